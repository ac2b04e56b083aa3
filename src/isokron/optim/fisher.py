"""A layer's running Fisher: means that carry their weight, eigenbases, and the damped inverse.

The state of a layer is a dict of tensors: `input` A, `output` G, with the weights `places` and
`terms` they carry; `basis.` and `values.` of both sides; `eigenvalues` Λ for EK-FAC and norms. In
place of G there may be `columns`, see isokron.optim.thin.
Martens & Grosse 1503.05671, George et al. 1806.03884.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from isokron.linalg import eigh, surely_all
from isokron.operators import KronEigen
from isokron.optim import thin

State = dict[str, Tensor]
SIDES = ("output", "input")


def fold_(state: State, seen: Mapping[str, Tensor], beta: float) -> None:
    """A ← Σ w āāᵀ / Σ w, w of what was seen being 1 and of all before being multiplied by β."""
    for count in ("places", "terms"):
        state[count] = seen[count] + beta * state.get(count, 0.0)
    for key, value in seen.items():
        if key in ("places", "terms"):
            continue
        if key == "columns":
            thin.fold_(state, value, float(seen["terms"] / state["terms"]))
            continue
        count = "places" if key == "input" else "terms"
        if key in state:
            state[key].lerp_(value, float(seen[count] / state[count]))
        else:
            state[key] = value


def sides(state: State) -> dict[str, Tensor]:
    """The matrices whose eigenbases are asked for. Of G kept as `columns` there is none here."""
    return {side: state[side] for side in SIDES if side in state and state[side].ndim == 3}


def decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues of at least 0 and their vectors; NaN where they could not be found."""
    values, basis = eigh(matrix)
    return values.clamp_min(0), basis


def refresh_(state: State, made: State, correct: bool) -> Tensor:
    """Take new eigenbases, or keep those there are if they could not be found; whether so. []

    A layer that has none yet gets ones along which it does not move, until `forget_` is called.
    `correct`: Λ is carried over to the new basis as the diagonal of the operator it stands for,
    Λ ← (Q_G'ᵀQ_G)^{⊙2} Λ (Q_AᵀQ_A')^{⊙2}, which keeps its sum. The first Λ is d_G d_Aᵀ.
    """
    for side in SIDES:
        if f"values.{side}" not in made:  # the columns of an embedding are apart from each other
            made[f"values.{side}"] = state[side].clone()
    finite = torch.stack([value.sum().isfinite() for value in made.values()]).all()
    if not surely_all(finite):
        for key, value in made.items():
            still = torch.full_like(value, torch.inf if key.startswith("values.") else 0.0)
            made[key] = torch.where(finite, value, state.get(key, still))
    if correct:
        made["eigenvalues"] = _carried(state, made) if "eigenvalues" in state else _product(made)
    state.update(made)
    return ~finite


def forget_(state: State) -> None:
    """As if there had been no refresh."""
    for key in [key for key in state if key.startswith(("basis.", "values.", "eigenvalues"))]:
        del state[key]


def ready(state: State) -> bool:
    return "values.output" in state or ("eigenvalues" in state and "output" not in state)


def direction(matrix: Tensor, state: State, damping: float) -> Tensor:
    """Q_G[(Q_GᵀVQ_A) ⊘ (d_G d_Aᵀ + λ)]Q_Aᵀ, or ⊘ (Λ + λ). [B, o, i]"""
    values = state["eigenvalues"] if "eigenvalues" in state else _product(state)
    operator = KronEigen((state.get("basis.output"), state.get("basis.input")), values)
    return operator.unrotate(operator.rotate(matrix) / (values + damping))


def shapes(
    state: State, size: tuple[int, int, int], own: int | None = None
) -> dict[str, tuple[int, ...]]:
    """What shape every tensor of a layer's state must have, for a matrix [B, o, i].

    `own`: how many rows of its columns are here.
    """
    blocks, rows, columns = size
    sides = {"output": (blocks, rows), "input": (blocks, columns)}
    wanted: dict[str, tuple[int, ...]] = {"momentum": size, "eigenvalues": size}
    for side, (_, width) in sides.items():
        dense = state.get(side, torch.empty(0)).ndim != 2
        wanted[side] = (blocks, width, width) if dense else (blocks, width)
        wanted[f"basis.{side}"] = (blocks, width, width)
        wanted[f"values.{side}"] = (blocks, width)
    if "columns" in state:
        wanted |= thin.shapes(state, blocks, rows if own is None else own)
    return {key: wanted.get(key, ()) for key in state}


def _product(state: State) -> Tensor:
    return state["values.output"][:, :, None] * state["values.input"][:, None, :]


def _carried(state: State, made: State) -> Tensor:
    values = state["eigenvalues"]
    if "basis.output" in made:
        values = (made["basis.output"].mT @ state["basis.output"]).square() @ values
    if "basis.input" in made:
        values = values @ (state["basis.input"].mT @ made["basis.input"]).square()
    return values
