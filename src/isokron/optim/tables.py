"""Matrices that are likely embeddings or heads, told by shape where no module is known."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isokron.cutting import is_matrix, split_sizes
from isokron.optim.groups import param_name
from isokron.optim.settings import CHOICES

if TYPE_CHECKING:
    from isokron.optim.engine import Preconditioned

TALL = 4  # times as many rows as columns: MLPs have 4; tables of vocabularies have more
WIDE = 64  # times as many columns as rows: convolutions have 49; stacks of experts thousands


def is_table(shape: Sequence[int], group: Mapping[str, Any]) -> bool:
    """Whether a matrix, as [first, product of the rest], is too tall, too wide or too long.

    Stacked matrices are looked at one by one, and of a fused projection its largest part.
    """
    sides = list(shape[group["stacked"] :])
    if group["split"] is not None:
        dim = group["split_dim"]
        sides[dim] = max(split_sizes(sides, group["split"], dim))
    rows, columns = sides[0], math.prod(sides[1:])
    long = group["max_rows"] is not None and rows > group["max_rows"]
    return long or rows > TALL * columns or columns > WIDE * rows


def gets_method(shape: Sequence[int], group: Mapping[str, Any]) -> bool:
    """Whether the method steps a parameter of this shape; the rest goes to AdamW."""
    if group["route"] == "adamw":
        return False
    if is_matrix(shape, group["stacked"]):
        return group["route"] != "auto" or not is_table(shape, group)
    return bool(group["vectors"]) and group["route"] != "spectral" and math.prod(shape) > 1


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
        if optimizer.takes(param, method) and not optimizer.takes(param, group)
    ]
    if not tables:
        return
    who = type(optimizer).__name__
    more = f" and {len(tables) - 4} more" if len(tables) > 4 else ""
    warnings.warn(
        f"{who}: AdamW steps what is shaped like an embedding or a head: "
        f"{', '.join(tables[:4])}{more}. That is a matrix of more than max_rows="
        f"{group['max_rows']} rows, of more than {TALL} rows a column or of more than {WIDE} "
        f"columns a row. Better let {who}(isokron.param_groups(model)) find them by module type, "
        "or give every matrix the method by route='method'",
        stacklevel=3,
    )
