"""A step of NaturalGradient: means over ranks, eigenbases that are due, directions, the update."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isokron.curvature.fit import add_ranks_
from isokron.curvature.layer_report import log_line
from isokron.curvature.layers import pack, unpack
from isokron.curvature.running_fisher import Damping, RunningFisher, decompose
from isokron.curvature.statistics import GradientRows, Sums, means_of
from isokron.distributed import Ranks
from isokron.linalg import sent
from isokron.optim.gradient_checks import wide_dtype
from isokron.optim.settings import learning_rate

logger = logging.getLogger(__name__)

LEAST_DAMPING, MOST_DAMPING = 1e-10, 1e4  # between which it is adapted
Observed = dict[str, tuple[Sums, float]]  # by layer, with the number of loss terms
LayerParams = Mapping[str, Mapping[str, Tensor]]  # by layer, of this name: its parameters


class Update(NamedTuple):
    """expected: change of the loss by the quadratic model; size: ‖update/lr‖² and elements."""

    expected: Tensor
    size: tuple[Tensor, int] | None


def layer_means(
    fishers: Mapping[str, RunningFisher],
    params: LayerParams,
    observed: Observed,
    terms_of_ranks: Sequence[Sequence[float]],
    reduction: str | None,
    scale: float,
    ranks: Ranks | None,
) -> Iterator[tuple[RunningFisher, dict[str, Tensor], float, float]]:
    """Means over the examples of all passes on all ranks, with their terms and places.

    reduction: of the loss, whose gradients are `scale` times as long; None: they are of terms.
    """
    for (name, (sums, terms)), counts in zip(
        observed.items(), zip(*terms_of_ranks, strict=True), strict=True
    ):
        total, fisher = sum(counts), fishers[name]
        # g̃ = factor·ĝ: from the gradient of the loss to that of one term
        factors = {"mean": terms, "sum": 1.0, "global_mean": total / len(counts)}
        factor = 1.0 if reduction is None else factors[reduction] / scale
        like = next(iter(params[name].values()))
        if ranks is not None:
            sums.scale_gradients_(factor, inputs=fisher.method == "tkfac")
            add_ranks_(sums, ranks, like, name)
            factor = 1.0
        if isinstance(sums, GradientRows) and not fisher.capacity:
            sums.fold("output", like)
        places = float(sums.get("places", total))
        yield fisher, means_of(sums, total / factor**2, like), total, places


def refresh_(
    fishers: Iterable[RunningFisher], group: Mapping[str, Any], ranks: Ranks | None, shares: bool
) -> int:
    """Decompose at multiples of `every`, and before in steps 0, 1, 2, 4, 8, …; how many failed."""
    # early statistics change fast; a layer without an inverse cannot wait
    step, every = group["steps"], group["every"]
    due = step % every == 0 or (step < every and step & (step - 1) == 0)
    fishers = [f for f in fishers if f.has_statistics and (due or not f.has_inverse)]
    fishers = [fisher for fisher in fishers if fisher.layer.kind != "diagonal"]
    failed = 0
    for fisher, pairs in zip(fishers, decompose(fishers, ranks, shares), strict=True):
        if pairs is not None:
            fisher.refresh_(pairs)
        else:
            failed += 1
            fisher.fallbacks["failed"] += 1
            name = fisher.layer.name
            logger.warning("no eigenbasis of layer %r was found; it keeps what it has", name)
        if logger.isEnabledFor(logging.INFO):
            record = fisher.record(group["damping"], group["max_condition"])
            logger.info("step %d: %s", step, log_line(record))
    return failed


def write_(
    fishers: Mapping[str, RunningFisher],
    params: LayerParams,
    group: Mapping[str, Any],
    ranks: Ranks | None,
    measured: bool,
) -> Update | None:
    """All directions, then their common scale, then the step. measured: also how large it was."""
    moves = []
    for name, fisher in fishers.items():
        if fisher.has_inverse and any(param.grad is not None for param in params[name].values()):
            moves.append((fisher, *_move(fisher, params[name], group)))
    if not moves:
        return None
    lr = float(learning_rate(group))
    slope = _total([(direction, moment) for _, _, moment, direction in moves])
    # ⟨V, HV⟩ = ⟨V, M̂⟩: what the quadratic model says this step will change
    falls = _total([(direction, grad) for _, grad, _, direction in moves])
    if ranks is not None:  # one rank's numbers for all: they may differ by rounding
        numbers = torch.stack([slope, falls]).to(ranks.device)
        slope, falls = ranks.all_gather(numbers)[0].unbind()
    size = torch.full_like(slope, lr)
    if group["kl_clip"] is not None:
        clipped = (group["kl_clip"] / slope).sqrt()
        size = torch.where(lr**2 * slope > group["kl_clip"], clipped, size)
    for fisher, _, _, direction in moves:
        layout, factor = fisher.layer.layout, sent(size, direction.device)
        for key, value in unpack(layout, direction).items():
            param = params[fisher.layer.name][layout.params[key]]
            if param.grad is not None:
                part = layout.part(key, param)
                part.mul_(1 - lr * group["weight_decay"])
                part.sub_((value * factor).to(param.dtype))
    expected = size**2 / 2 * slope - size * falls
    if not measured:
        return Update(expected, None)
    square = _total([(direction, direction) for *_, direction in moves])
    scale = size / lr if lr else torch.ones_like(size)
    return Update(expected, (square * scale**2, sum(move[-1].numel() for move in moves)))


def adapted(damping: Damping, ratio: float, omega: float) -> Damping:
    """λ/ω where the loss fell by less than ¼ of what was expected or is NaN, ωλ by more than ¾.

    Of two dampings each has the root of the factor, so that λ_G λ_A has it.
    """
    factor = 1 / omega if not ratio >= 0.25 else omega if ratio > 0.75 else 1.0
    if not isinstance(damping, Sequence):
        return min(max(damping * factor, LEAST_DAMPING), MOST_DAMPING)
    return tuple(min(max(part * factor**0.5, LEAST_DAMPING), MOST_DAMPING) for part in damping)


def _move(
    fisher: RunningFisher, params: Mapping[str, Tensor], group: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient, the debiased mean of gradients, and the direction. [B, o, i] each"""
    grads = {
        name: torch.zeros_like(param) if param.grad is None else param.grad
        for name, param in params.items()
    }
    matrix, state, beta = pack(fisher.layer.layout, grads), fisher.state, group["momentum"]
    grad = matrix.to(wide_dtype(matrix)) * (-1 if group["maximize"] else 1)
    state["step"] += 1
    moment = grad
    if beta > 0:
        mean = state.setdefault("momentum", torch.zeros_like(grad)).lerp_(grad, 1 - beta)
        moment = mean / (1 - beta ** float(state["step"]))
    return grad, moment, fisher.direction(moment, group["damping"], group["max_condition"])


def _total(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ ⟨X, Y⟩ in float64, on the device of the first. []"""
    products = [(x * y).sum().double() for x, y in pairs]
    device = products[0].device
    return torch.stack([sent(product, device) for product in products]).sum()
