"""Matrices that are likely embeddings or heads, told by shape where no module is known."""

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isokron.block_layout import is_matrix, split_sizes
from isokron.optim.groups import param_name
from isokron.optim.settings import CHOICES

if TYPE_CHECKING:
    from isokron.optim.engine import Preconditioned

TALL = 4  # times as many rows as columns: MLPs have 4; tables of vocabularies have more
SEVERAL = 6  # matrices of which the first or last, if tall, is that of a small vocabulary
WIDE = 64  # times as many columns as rows: convolutions have 49; stacks of experts thousands


def is_table(shape: Sequence[int], group: Mapping[str, Any]) -> bool:
    """Whether a matrix is too tall, too wide or too long."""
    rows, columns = _sides(shape, group)
    long = group["max_rows"] is not None and rows > group["max_rows"]
    return long or rows > TALL * columns or columns > WIDE * rows


def is_end(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether it is the first or the last of several matrices, and has more rows than columns.

    Models begin with their embedding and end with their head, which in a small vocabulary may have
    the shape of an MLP's matrix.
    """

    def matrices(params: Iterable[Tensor]) -> Iterator[Tensor]:
        return (param for param in params if is_matrix(param.shape, group["stacked"]))

    params = group["params"]
    if all(next(matrices(side), None) is not param for side in (params, reversed(params))):
        return False
    rows, columns = _sides(param.shape, group)
    return rows > columns and len(list(islice(matrices(params), SEVERAL))) == SEVERAL


def _sides(shape: Sequence[int], group: Mapping[str, Any]) -> tuple[int, int]:
    """A matrix as [first, product of the rest].

    Stacked matrices are looked at one by one, and of a fused projection its largest part.
    """
    sides = list(shape[group["stacked"] :])
    if group["split"] is not None:
        dim = group["split_dim"]
        sides[dim] = max(split_sizes(sides, group["split"], dim))
    return sides[0], math.prod(sides[1:])


def gets_method(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether the method steps a parameter of a group; the rest goes to AdamW."""
    if group["route"] == "adamw":
        return False
    if is_matrix(param.shape, group["stacked"]):
        told = group["route"] != "auto"
        return told or not (is_table(param.shape, group) or is_end(param, group))
    return bool(group["vectors"]) and group["route"] != "spectral" and param.numel() > 1


def check_route(optimizer: str, group: Mapping[str, Any]) -> None:
    """Refuse the name of another method, which a group cannot have."""
    if group["route"] not in CHOICES["route"]:
        raise ValueError(
            f"{optimizer}: route must be one of {', '.join(map(repr, CHOICES['route']))}, got "
            f"route={group['route']!r}; one optimizer has one method, so give the parameters of "
            "another method to a second optimizer"
        )


def warn_of_tables(optimizer: "Preconditioned", group: Mapping[str, Any]) -> None:
    """Say which matrices of a group go to AdamW for their shape alone."""
    method = {**group, "route": "method"} if group["route"] == "auto" else group
    tables = [
        param_name(group, i) + (f" {tuple(param.shape)}" if group.get("param_names") else "")
        for i, param in enumerate(group["params"])
        if param.numel() and optimizer.takes(param, method) and not optimizer.takes(param, group)
    ]
    if not tables:
        return
    who = type(optimizer).__name__
    more = f" and {len(tables) - 4} more" if len(tables) > 4 else ""
    warnings.warn(
        f"{who}: AdamW steps what is shaped like an embedding or a head: "
        f"{', '.join(tables[:4])}{more}. That is a matrix of more than max_rows="
        f"{group['max_rows']} rows, of more than {TALL} rows a column or of more than {WIDE} "
        f"columns a row, or a tall one that is first or last of {SEVERAL} or more. "
        f"Better let {who}(isokron.param_groups(model)) find them by module type, "
        "or give every matrix the method by route='method'",
        stacklevel=_level_of_caller(),
    )


def _level_of_caller() -> int:
    """The `stacklevel` of the first frame that is neither ours nor torch's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals["__name__"].split(".")[0] in ("isokron", "torch"):
        level, frame = level + 1, frame.f_back
    return level
