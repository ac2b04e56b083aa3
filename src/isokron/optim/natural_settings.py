"""What may be said to NaturalGradient, and what makes it wrong."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isokron.distributed import is_sharded, process_count
from isokron.optim.groups import check_group, check_number
from isokron.optim.modes import MODES

CHOICES = {"method": ("kfac", "ekfac"), "reduction": ("mean", "sum", "global_mean")}


def check_natural(group: Mapping[str, Any]) -> None:
    check_group("NaturalGradient", group)
    check_number("NaturalGradient", "damping", group["damping"], "above 0")
    if group["kl_clip"] is not None:
        check_number("NaturalGradient", "kl_clip", group["kl_clip"], "above 0")
    for name, choices in CHOICES.items():
        if group[name] not in choices:
            raise ValueError(
                f"NaturalGradient: {name} must be one of {', '.join(map(repr, choices))}, got "
                f"{name}={group[name]!r}"
            )
    every = group["statistics_every"]
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(
            "NaturalGradient: statistics_every must be a whole number of at least 1, got "
            f"statistics_every={every!r}"
        )
    beta = group["factor_beta"]
    if not isinstance(beta, float | int) or not 0 <= beta <= 1:
        raise ValueError(
            "NaturalGradient: factor_beta must be at least 0 and at most 1, got "
            f"factor_beta={beta!r}"
        )


def check_whole(name: str, param: Tensor) -> None:
    if is_sharded(param):
        raise ValueError(
            f"NaturalGradient: parameter {name} is a DTensor, but layers must have whole weights; "
            "wrap the model in DistributedDataParallel, or take Shampoo or SOAP with fully_shard"
        )


def check_reduce(reduce: str, method: str) -> None:
    """Refuse what ranks could not do."""
    if reduce not in MODES:
        raise ValueError(
            f"NaturalGradient: reduce must be one of {', '.join(map(repr, MODES))}, got "
            f"reduce={reduce!r}"
        )
    if reduce == "gram" and method == "ekfac":
        raise ValueError(
            'NaturalGradient: reduce="gram" keeps no whole basis of outputs, in which '
            'method="ekfac" could measure; use method="kfac", or reduce="auto"'
        )


def warn_of_ranks() -> None:
    if (count := process_count()) > 1:
        warnings.warn(
            f"NaturalGradient: {count} ranks do not share what their layers see, so that equal "
            "models drift apart; call optimizer.distribute() before the first step",
            stacklevel=4,
        )
