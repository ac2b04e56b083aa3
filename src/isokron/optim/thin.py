"""An output side too large for o×o, kept as the gradients it is made of: G = UUᵀ, rows of U apart.

Rank r has the rows U_[r] of all columns, o·T/R numbers. Over the shards of rows, unlike over those
of columns, Gram matrices may be added up: UᵀU = Σ U_[r]ᵀU_[r]. From UᵀU = B s Bᵀ follow G's
eigenvectors Q = U B s^(−½), and with A = Q_A d Q_Aᵀ

    V = (Q [(QᵀN) ⊘ (sdᵀ + λ)] + (N − QQᵀN)/λ) Q_Aᵀ,  N = M Q_A

of which each rank makes its rows, once QᵀN = Σ Q_[r]ᵀN_[r] is known. Nothing is o×o. Outside the
span of Q there is no curvature, and 1/λ makes a step even of the rounding of what is inside: there
a column of N counts only where it is larger than rounding.
"""

import io
import logging
import math
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import Ranks
from isokron.distributed.parcels import bounds, gather, sum_
from isokron.operators import gram

logger = logging.getLogger(__name__)

MOST = 8192  # columns, whose T×T still fits; with more, those that weigh least are left out
ROWS = ("columns", "basis.output")  # of which a rank has its rows
OUTPUT = ("output", "values.output", *ROWS)  # what is known of an output side
EPS = torch.finfo(torch.float64).eps
# A column of N in the span of Q seems to leave it by 1 to 3 units of N's precision, and more where
# gradients are themselves long sums; what leaves it by less than this is not known to a digit.
ROUNDING = 16


def fold_(state: dict[str, Tensor], columns: Tensor, weight: float) -> None:
    """G ← (1−w)G + wUUᵀ: the columns beside those there were, all by the roots of their weights."""
    parts = [columns * math.sqrt(weight)]
    if "columns" in state:
        parts.insert(0, state["columns"] * math.sqrt(1 - weight))
    state["columns"] = torch.cat(parts, 2)


def gram_of(state: dict[str, Tensor], ranks: Ranks) -> Tensor:
    """UᵀU = Σ U_[r]ᵀU_[r] in float64. [B, T, T]"""
    columns = state["columns"]
    total = gram(columns, columns.device)
    sum_(ranks, [total])
    return total


def long(state: dict[str, Tensor], rows: int) -> bool:
    """Whether there are more columns than are good: MOST, or twice as many as can be apart."""
    return "columns" in state and state["columns"].size(2) > min(MOST, 2 * rows)


def shorten_(
    state: dict[str, Tensor], squares: Tensor, basis: Tensor, rows: int, layer: str
) -> None:
    """U ← U B of the largest s, the best approximation of G by so many columns; by o, G itself."""
    kept = min(MOST // 2, rows)
    if kept < rows:
        lost = float(squares[:, :-kept].sum() / squares.sum())
        logger.warning("layer %r: %.2g of the trace of G is left out with its columns", layer, lost)
    columns = state["columns"]
    state["columns"] = (columns.double() @ basis[:, :, -kept:]).to(columns.dtype)


def basis_of(
    state: dict[str, Tensor], squares: Tensor, basis: Tensor, rows: int
) -> dict[str, Tensor]:
    """Q = U B s^(−½), this rank's rows of it, and s; without what is rounding in s."""
    columns = state["columns"]
    squares, basis = squares[:, -rows:], basis[:, :, -rows:]  # ascending: the others are zero
    noise = columns.size(2) * EPS * squares.amax(1, keepdim=True)
    squares = torch.where(squares > noise, squares, 0.0)
    some = (squares > 0).any(0) | squares.isnan().any(0)
    squares, basis = squares[:, some], basis[:, :, some]
    scale = torch.where(squares > 0, squares.rsqrt(), 0.0)[:, None]
    found = columns.double() @ (basis * scale)
    return {"basis.output": found.to(columns.dtype), "values.output": squares.to(columns.dtype)}


def direction(matrix: Tensor, state: dict[str, Tensor], damping: float, ranks: Ranks) -> Tensor:
    """V of all rows: each rank's own are made there, and gathered. [B, o, i]"""
    parts = bounds(matrix.size(1), ranks.size)
    own = slice(*parts[ranks.rank])
    right = state.get("basis.input")
    turned = matrix[:, own] if right is None else matrix[:, own] @ right  # [B, o/R, i]
    found = _inverse(turned, state, damping, ranks)
    found = found if right is None else found @ right.mT
    blocks, _, columns = matrix.shape
    forms = [[((blocks, b - a, columns), found.dtype)] for a, b in parts]
    return torch.cat([of[0] for of in gather(ranks, [found], forms)], 1).to(matrix.device)


def _inverse(turned: Tensor, state: dict[str, Tensor], damping: float, ranks: Ranks) -> Tensor:
    """Q [(QᵀN) ⊘ (sdᵀ + λ)] + (N − QQᵀN)/λ, own rows. N: [B, o/R, i]"""
    left = state["basis.output"]
    inner = (left.mT @ turned).contiguous()  # [B, k, i]
    sum_(ranks, [inner])
    outer = turned - left @ inner
    # sums over o terms have left some of the span in it: once more, and nothing is left
    again = (left.mT @ outer).contiguous()
    squares = torch.stack([_squares(turned), _squares(outer)])  # [2, B, i]
    sum_(ranks, [again, squares])
    size = torch.maximum(squares[0], squares[0].mean(1, keepdim=True))
    least = (ROUNDING * torch.finfo(turned.dtype).eps) ** 2 * size
    counts = (squares[1] - _squares(again) > least)[:, None]
    values = state["values.output"][:, :, None] * state["values.input"][:, None, :]
    inside = (inner + again) / (values + damping) - torch.where(counts, again / damping, 0.0)
    return left @ inside + torch.where(counts, outer / damping, 0.0)


def _squares(matrix: Tensor) -> Tensor:
    """|x|² of every column in float64, where squares do not underflow. [B, i]"""
    return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float64).square()


def whole(state: dict[str, Tensor], rows: int, ranks: Ranks) -> dict[str, Tensor]:
    """The state with all rows, as a checkpoint for any number of ranks has it. All ranks call."""
    some = [state[key] for key in ROWS if key in state]
    forms = [
        [((len(value), b - a, value.size(2)), value.dtype) for value in some]
        for a, b in bounds(rows, ranks.size)
    ]
    found = gather(ranks, some, forms)
    names = [key for key in ROWS if key in state]
    return {**state, **{key: torch.cat([of[i] for of in found], 1) for i, key in enumerate(names)}}


def own_(state: dict[str, Tensor], rows: int, ranks: Ranks) -> int:
    """Of a state with all rows, this rank's; and how many these are."""
    first, last = bounds(rows, ranks.size)[ranks.rank]
    for key in ROWS:
        if key in state and state[key].size(1) == rows:
            state[key] = state[key][:, first:last].clone()
    return last - first


def packed(state: dict[str, Tensor]) -> dict[str, Any]:
    """The output side as bytes: torch.distributed.checkpoint reads a tensor only into one of its
    shape, but an optimizer that has not stepped cannot know how many columns there will be."""
    buffer = io.BytesIO()
    torch.save({key: state[key] for key in OUTPUT if key in state}, buffer)
    return {**{k: v for k, v in state.items() if k not in OUTPUT}, "packed": buffer.getvalue()}


def unpacked(state: dict[str, Any]) -> dict[str, Tensor]:
    """Undo `packed`."""
    if "packed" not in state:
        return state
    side = torch.load(io.BytesIO(state["packed"]), map_location="cpu", weights_only=True)
    return {**{k: v for k, v in state.items() if k != "packed"}, **side}


def shapes(state: dict[str, Tensor], blocks: int, rows: int) -> dict[str, tuple[int, ...]]:
    """What shapes a state with so many rows must have: what is T or k long is as it is."""
    found: dict[str, tuple[int, ...]] = {}
    for key in (*ROWS, "values.output"):
        if key in state:
            rest = (rows,) if key in ROWS else ()
            found[key] = (blocks, *rest, state[key].size(-1))
    return found
