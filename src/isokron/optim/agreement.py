"""What ranks tell each other before a step: settings, parameters, what is not finite."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import check_communication
from isokron.distributed.buckets import Bucket
from isokron.distributed.ranks import Ranks
from isokron.optim.settings import CHOICES


def check_arguments(
    who: str, reduce: str, nonfinite: str, bucket_bytes: Any, communication_dtype: Any
) -> None:
    """Raise one ValueError that names the argument, the rule and the value."""

    def need(ok: bool, name: str, rule: str, value: Any) -> None:
        if not ok:
            raise ValueError(f"{who}: {name} must be {rule}, got {name}={value!r}")

    need(reduce in ("step", "backward"), "reduce", "'step' or 'backward'", reduce)
    choices = CHOICES["nonfinite"]
    need(nonfinite in choices, "nonfinite", f"one of {', '.join(map(repr, choices))}", nonfinite)
    whole = isinstance(bucket_bytes, int) and bucket_bytes > 0
    need(whole, "bucket_bytes", "a whole number above 0", bucket_bytes)
    check_communication(who, communication_dtype)


def plain_settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's settings as JSON has them, to the last digit."""
    return {
        key: value.tolist() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def unfit(bucket: Bucket, section: Tensor, rank: int) -> set[int]:
    """The numbers of parameters of which a piece, in a rank's section, is not finite."""
    wide = torch.promote_types(section.dtype, torch.float32)
    if bool(section.sum(dtype=wide).isfinite()):
        return set()
    found = set()  # or finite numbers with a sum that is not: look
    for piece in bucket.owned(rank):
        if not bool(section[piece.start : piece.start + piece.length].isfinite().all()):
            found.add(piece.parameter)
    return found


def everybodys(ranks: Ranks, names: Sequence[str]) -> list[str]:
    """The names that any of the ranks has; names travel only where there are some."""
    count = ranks.all_reduce_(torch.tensor([len(names)], device=ranks.device))
    if not int(count):
        return []
    told = ranks.gather_text("\n".join(names))
    return sorted({name for text in told for name in text.strip().split("\n") if name})
