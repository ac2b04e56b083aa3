"""A layer's running Fisher: means that carry their weight, eigenbases, and the damped inverse.

The state of a layer is a dict of tensors: `input` A, `output` G, with the weights `places` and
`terms` they carry; `basis.` and `values.` of both sides; `eigenvalues` Λ for EK-FAC and norms. In
place of G there may be `columns`, see isokron.optim.thin.
Martens & Grosse 1503.05671, George et al. 1806.03884.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isokron.linalg import eigh, surely_all
from isokron.operators import KronEigen
from isokron.optim import thin

State = dict[str, Tensor]
SIDES = ("output", "input")
LEAST_DAMPING, MOST_DAMPING = 1e-10, 1e4  # between which it is adapted


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
    # column-major as LAPACK leaves it, products round otherwise than with what a checkpoint gives
    return values.clamp_min(0), basis.contiguous()


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


def filled(
    state: State,
    kind: str,
    size: tuple[int, int, int],
    param: Tensor,
    group: Mapping[str, Any],
    columns: bool,
) -> dict[str, Any]:
    """The state of a layer with zeros for what is not known yet, which `known` undoes.

    `kind`: of its view. `columns`: whether its output side may be kept as these.
    """
    keys = ["places", "terms", "step"]
    keys += ["momentum"] if group["momentum"] > 0 else []
    keys += ["eigenvalues"] if kind == "diagonal" or group["method"] == "ekfac" else []
    if kind != "diagonal":
        keys += [part + side for part in ("", "values.", "basis.") for side in SIDES]
    absent = {*state, *(thin.OUTPUT if columns else ())}
    if kind == "index":  # A is diagonal, and needs no basis
        absent.add("basis.input")
    form = dict.fromkeys(keys, torch.empty(0))
    form |= {"input": torch.empty(0, 0)} if kind == "index" else {}
    wide = torch.promote_types(param.dtype, torch.float32)
    dtypes = {"places": torch.float64, "terms": torch.float64, "step": torch.float32}
    zeros = {
        key: torch.zeros(shape, dtype=dtypes.get(key, wide), device=param.device if shape else None)
        for key, shape in shapes(form, size).items()
        if key not in absent
    }
    return thin.packed({**zeros, **state}) if columns else {**zeros, **state}


def known(state: State) -> State:
    """Without what is zero because nothing is known of it."""
    if "terms" in state and not state["terms"]:
        return {}
    if "basis.output" in state and not state["basis.output"].any():
        forget_(state)
    return state


def _product(state: State) -> Tensor:
    return state["values.output"][:, :, None] * state["values.input"][:, None, :]


def _carried(state: State, made: State) -> Tensor:
    values = state["eigenvalues"]
    if "basis.output" in made:
        values = (made["basis.output"].mT @ state["basis.output"]).square() @ values
    if "basis.input" in made:
        values = values @ (state["basis.input"].mT @ made["basis.input"]).square()
    return values


def adapted_damping(damping: float, change: float, expected: float, omega: float) -> float:
    """Levenberg–Marquardt: ρ = change / expected; λ ← ωλ where ρ > ¾, λ/ω where ρ < ¼."""
    ratio = change / expected if expected < 0 else 0.5
    if not ratio >= 0.25:  # NaN too: the loss has left the numbers
        damping /= omega
    elif ratio > 0.75:
        damping *= omega
    return min(max(damping, LEAST_DAMPING), MOST_DAMPING)
