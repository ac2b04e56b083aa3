"""Exponential means of what has been seen, and what to divide a young one by."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.linalg import gram_, sent, surely_all, unfold
from isokron.optim.blocks import Batch


def bias(beta: float, step: Tensor) -> Tensor:
    """1 − βᵗ, the weight a mean that started at zero has gathered in t steps.

    By expm1: in float32 the plain form is off by 1e-5 at β = 0.999, t = 1.
    """
    return -torch.expm1(step * math.log(beta)) if beta > 0 else torch.ones_like(step)


def second_moment_(mean: Tensor, x: Tensor, beta: float) -> None:
    """V ← βV + (1−β)X², in place; AdaGrad's sum V ← V + X² at β = 1."""
    mean.mul_(beta).addcmul_(x, x, value=1 - beta if beta < 1 else 1.0)


def corrected(
    mean: Tensor, beta: float, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """V̂ = V/(1−βᵗ); V itself where it is a sum, or where bias is not to be corrected."""
    if beta == 1 or not group["use_bias_correction"]:
        return mean
    return mean / bias(beta, state["step"].view(-1, *[1] * (mean.ndim - 1))).to(mean.dtype)


def deviation(
    second: Tensor, beta: float, eps: float, state: Mapping[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """√V̂ + ε, as a new tensor."""
    root = second.sqrt()
    if root.requires_grad:  # √ keeps its result for the derivative
        root = root.clone()
    if beta < 1 and group["use_bias_correction"]:
        count = state["step"].view(-1, *[1] * (root.ndim - 1))
        # in place: a new tensor takes longer than the division
        root.div_(bias(beta, count).sqrt_())
    return root.add_(eps)


def counted(state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor | None:
    """The steps by which first moments are debiased; None where they are not to be."""
    return state["step"] if group["use_bias_correction"] else None


def first_moment_(
    mean: Tensor, grad: Tensor, beta: float, ratio: float, step: Tensor | None
) -> Tensor:
    """M ← βM + (1−β)G; returns the moment to step along, see `blend`."""
    mean.lerp_(grad, 1 - beta)
    return blend(mean, grad, beta, ratio, step)


def blend(mean: Tensor, grad: Tensor, beta: float, ratio: float, step: Tensor | None) -> Tensor:
    """β₃M₋ + (1−β₃)G, M₋ the mean before this gradient; debiased where `step` is given.

    `ratio`: β₃/β; 1 is the mean itself, and β is Nesterov's look-ahead, (1−β)G + βM.
    """
    moment = mean if ratio == 1 else grad.lerp(mean, ratio)
    if step is not None and ratio != 1:
        # gradients weigh (1−β₃) + β₃(1−βᵗ⁻¹) = 1 − (β₃/β)βᵗ
        step = step + (math.log(ratio) / math.log(beta) if ratio else math.inf)
    return moment if step is None else moment / bias(beta, step)


def beta3_ratio(group: Mapping[str, Any]) -> float:
    """β₃/β₁, by which Shampoo, SOAP and Katie blend their first moment."""
    beta3 = group.get("beta3")
    return 1.0 if beta3 is None else beta3 / group["betas"][0]


def heavy_ball_(velocity: Tensor, update: Tensor, group: Mapping[str, Any]) -> Tensor:
    """B ← μB + (1−δ)P; returns B, or (1−δ)P + μB with Nesterov."""
    rate, dampening = group["momentum"], group.get("dampening", 0.0)
    if dampening:
        update = update * (1 - dampening)
    velocity.mul_(rate).add_(update)
    return update.add(velocity, alpha=rate) if group["nesterov"] else velocity


TINY = 1e-100  # only keeps a zero direction from dividing by zero


def graft_direction(
    grad: Tensor, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
) -> Tensor:
    """D = m for SGD, else m / (√v + ε): AdaGrad's sum, RMSprop's mean, Adam's debiased mean.

    `state["graft"]` holds v and is updated in place; β₂ = 1 makes all of them AdaGrad's sum. All:
    [B, ...].
    """
    kind = group["graft"]
    if kind == "sgd":
        return moment
    second, beta2 = state["graft"], group["betas"][1]
    if kind == "adagrad":
        second.addcmul_(grad, grad)
    else:
        second_moment_(second, grad, beta2)
    beta = beta2 if kind == "adam" else 1.0  # nothing else is debiased
    return moment / deviation(second, beta, group["eps"], state, group)


def graft(direction: Tensor, length_of: Tensor) -> Tensor:
    """`direction` with, per block, the norm of `length_of`. [B, ...]"""
    return _scaled(direction, norms(length_of) / (norms(direction) + TINY))


def sums_by_owner(values: Sequence[Tensor], owners: Sequence[int]) -> Tensor:
    """For every row the sum over all rows with its owner. values: one [B] a batch → [ΣB]

    On the device of the first batch.
    """
    device = values[0].device
    joined = torch.cat([sent(value, device) for value in values])
    owner = sent(torch.tensor(owners, device="cpu"), device)
    total = joined.new_zeros(max(owners) + 1)
    if joined.is_cpu:
        total.index_add_(0, owner, joined)
    else:  # which CUDA adds up in a fixed order, unlike index_add_
        total.index_put_((owner,), joined, accumulate=True)
    return total[owner]


def norms(x: Tensor) -> Tensor:
    """Norm of every block, in float64: what a factor makes huge or tiny has a length too. [B]"""
    blocks = x.flatten(1)
    if x.dtype is torch.float32 and not torch.compiler.is_compiling():  # a graph has no branches
        # a quarter of the time, and right where squares that matter neither over- nor underflow
        lengths = torch.linalg.vector_norm(blocks, dim=1)
        if surely_all((lengths > 1e-12) & (lengths < 1e18)):
            return lengths.double()
    return torch.linalg.vector_norm(blocks, dim=1, dtype=torch.float64)


def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    return x * factor.to(x).view(-1, *[1] * (x.ndim - 1))


# F_i ← β F_i + (1−β) X_(i) X_(i)ᵀ, X_(i) the block with dimension i as rows; a sum at β = 1. Only
# the lower triangle is kept up to date. In the state they are "cov.0", "cov.1", …; a dimension
# without one has no factor. SOAP and Katie have the same.


def zero_covariances(
    batch: Batch, sides: Iterable[int], dtype: torch.dtype | str | None
) -> dict[str, Tensor]:
    # what is stored in fewer bits is worked on in the state's precision
    wide = None if dtype is torch.bfloat16 or isinstance(dtype, str) else dtype
    return {f"cov.{i}": torch.zeros_like(batch.eyes(batch.shape[i], wide)) for i in sides}


def sides_of(state: Mapping[str, Tensor]) -> list[int]:
    """The dimensions that have a factor."""
    return [int(key[4:]) for key in state if key.startswith("cov.")]


def observe_side_(cov: Tensor, x: Tensor, side: int, beta: float, scale: float = 1.0) -> None:
    """Fold blocks x [B, ...] into the second moment along one dimension, in place."""
    weight = scale * (1 - beta if beta < 1 else 1.0)
    gram_(cov, unfold(x.to(cov.dtype), side), beta, weight)


def debiased(
    state: Mapping[str, Tensor], side: int, beta: float, group: Mapping[str, Any]
) -> Tensor:
    """F̂ = F/(1−βᵗ), on and below the diagonal. [B, d, d]"""
    return corrected(state[f"cov.{side}"], beta, state, group)


def where_observed(fresh: Tensor, key: str, state: Mapping[str, Tensor]) -> Tensor:
    """The new operator of blocks that had a gradient, else the old: zeros say nothing. [B, ...]"""
    trace = state[f"cov.{key.rpartition('.')[2]}"].diagonal(dim1=-2, dim2=-1).sum(-1)
    observed = (trace != 0).view(-1, *[1] * (fresh.ndim - 1))
    return torch.where(observed, fresh.to(state[key].dtype), state[key])


# Names, up to a dot, of state that can be stored in fewer bytes.
FIRST_MOMENTS = {"momentum", "velocity", "moment", "rotated"}
SECOND_MOMENTS = {"variance", "graft"}
SYMMETRIC = {"cov", "root"}
BASES = {"basis"}


def state_formats(
    state: Mapping[str, Tensor], shape: Sequence[int], group: Mapping[str, Any]
) -> dict[str, str]:
    """How the state of blocks of a shape is stored, where it is in fewer bytes; see `Batch`."""
    dtype, large = group.get("factor_dtype"), math.prod(shape) >= group["min_8bit_size"]
    formats: dict[str, str] = {}
    if group["moments"] == "8bit" and large:
        formats |= dict.fromkeys(FIRST_MOMENTS, "signed")
        formats |= dict.fromkeys(SECOND_MOMENTS, "unsigned")
    if dtype is torch.bfloat16:
        formats |= dict.fromkeys(SYMMETRIC | BASES, "bfloat16")
    elif dtype == "8bit" and large:
        # errors in the statistics add up over steps, for which 8 bits are too few
        formats |= dict.fromkeys(SYMMETRIC, "symmetric") | dict.fromkeys(BASES, "signed")
    names = {key: key.split(".")[0] for key in state}
    return {key: formats[name] for key, name in names.items() if name in formats}
