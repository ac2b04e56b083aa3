"""Health of an optimizer in a few numbers per parameter group: `optimizer.statistics()`.

Sums over an update are recorded while the step is made; all else is computed from the state when
it is asked for. Where ranks share parameters, one all-reduce adds up what each of them owns.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, sqrt
from statistics import median
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from isokron.distributed import Ranks
from isokron.exponents import exponents
from isokron.linalg import inverse_power, on_host, unfold
from isokron.optim.adamw_lists import CompactList, FusedList, PartList
from isokron.optim.blocks import Batch, BatchStep
from isokron.optim.layout import AdamWList, GroupLayout
from isokron.optim.moments import sides_of
from isokron.optim.quantization import dequantize

Group = Mapping[str, Any]
Statistics = dict[str, Any]  # plain numbers or None, and the name of the group

# To read AdamW's moments once more takes a third of its step, which is bound by memory. Of a longer
# list about so many elements are sampled, in evenly spaced chunks; Adam's steps are much alike.
SAMPLE = 1 << 13
CHUNK = 128
PAIR_SAMPLE = 1 << 17  # elements of a batch whose direction is compared with Adam's
LOOK_EVERY = 10  # steps between looks at factors, which are more memory than the update is
MOST_CONDITION = 1 / torch.finfo(torch.float32).eps  # what is larger cannot be told from singular
WHOLE_SIZE = 384  # from here on only the lower triangle of a covariance is kept up to date


class Sample(NamedTuple):
    """One in `stride` elements of the moments of a parameter, flat or in chunks."""

    stride: int
    mean: Tensor
    square: Tensor


class Recorder:
    """What is known of the last step; it is filled from the first call of `statistics` on.

    updates: batch → sums over its blocks, see `record`, and the number of their elements.
    moments: list of AdamW → views of the moments that its update is estimated by.
    conditions: batch → the step in which its factors were looked at, and what was seen. [B]
    """

    def __init__(self) -> None:
        self.updates: WeakKeyDictionary[Batch, tuple[Tensor, int]] = WeakKeyDictionary()
        self.moments: WeakKeyDictionary[FusedList, list[Sample]] = WeakKeyDictionary()
        self.conditions: WeakKeyDictionary[Batch, tuple[int, Tensor]] = WeakKeyDictionary()
        self.steps = 0

    def begin_step(self) -> None:
        self.steps += 1
        self.updates.clear()

    def record(self, step: BatchStep, group: Group) -> None:
        """‖P‖², and of a sample ‖P‖², ⟨P, A⟩, ‖A‖²; P is the direction taken, A Adam's. [4]"""
        direction, elements = step.direction, step.direction.numel()
        wide = torch.promote_types(direction.dtype, torch.float32)
        norms = torch.linalg.vector_norm(direction.flatten(1), dim=1, dtype=wide)
        sums = [norms.double().square().sum()] + [norms.new_zeros((), dtype=torch.float64)] * 3
        stride = _stride(elements, PAIR_SAMPLE)
        if (y := _adam_sample(step.state, group, stride)) is not None:
            x, y = _sampled(direction.reshape(-1), stride).reshape(-1).to(wide), y.to(wide)
            pairs = ((x, x), (x, y), (y, y))
            sums[1:] = [torch.dot(*pair).double() * (elements / x.numel()) for pair in pairs]
        self.updates[step.batch] = torch.stack(sums), elements

    def current_conditions(self, batch: Batch, group: Group) -> Tensor:
        """Of its blocks; the factors are looked at again after LOOK_EVERY steps. [B]"""
        if not batch.rows:  # other ranks own its blocks
            return NO_BLOCKS
        last, conditions = self.conditions.get(batch, (-LOOK_EVERY, NO_BLOCKS))
        if self.steps >= last + LOOK_EVERY:
            conditions = _conditions(batch, group)
            self.conditions[batch] = self.steps, conditions
        return conditions


def _stride(count: int, sample: int) -> int:
    """One in so many chunks of `count` elements are sampled; 1: all elements are taken."""
    # an odd stride does not fall on the same columns in every row of a matrix
    return ceil(count / sample) | 1 if count > sample else 1


def _sampled(flat: Tensor, stride: int) -> Tensor:
    """All elements, [n], or a view of evenly spaced chunks, [k, CHUNK]."""
    return flat if stride == 1 else flat[: len(flat) // CHUNK * CHUNK].view(-1, CHUNK)[::stride]


def _adam_sample(state: Mapping[str, Tensor], group: Group, stride: int) -> Tensor | None:
    """M̂ ⊘ (√V̂ + ε), M̂ the method's own first moment; None if it keeps no second moment V. [k]

    Grafting to Adam has computed it; Katie keeps √V̂ + ε for the step.
    """
    grafted = group["graft"] == "adam"
    if group["betas"][1] == 1 or not (grafted or "deviation" in state):  # at 1, V is a sum
        return None
    moment = _sampled(state["adam"].reshape(-1), stride)
    if not grafted:
        moment = moment / _sampled(state["deviation"].reshape(-1), stride)
    return moment.reshape(-1)


class GroupPart(NamedTuple):
    """The share of one batch or list in the statistics of its group.

    Args:
        group: number of the group.
        ranks: those that have the other shares of these parameters; None: there are none.
        sums: of `Recorder.record`, the last of which may be left out. [4]
        counts: elements of the update, of these in blocks, refreshes, failures, bytes of state.
        conditions: of all blocks, in one order on all ranks; 0 where another rank owns it. [n]
    """

    group: int
    ranks: Ranks | None
    sums: Tensor
    counts: Sequence[float]
    conditions: Tensor


NOTHING = torch.zeros(4, dtype=torch.float64, device="cpu")
NO_BLOCKS = NOTHING[:0]


def statistics(
    groups: Sequence[Group], layouts: Sequence[GroupLayout], recorder: Recorder
) -> list[Statistics]:
    """One dict per group, the same on all ranks; see `Preconditioned.statistics`."""
    pairs = list(zip(groups, layouts, strict=False))
    parts = [part for i, pair in enumerate(pairs) for part in _parts(i, *pair, recorder)]
    values = on_host([tensor for part in parts for tensor in (part.sums, part.conditions)])
    numbers: dict[Ranks | None, list[tuple[int, list[float]]]] = {}
    for part, sums, conditions in zip(parts, values[::2], values[1::2], strict=True):
        row = [*sums, *[0.0] * (4 - len(sums)), *part.counts, *conditions]
        numbers.setdefault(part.ranks, []).append((part.group, row))
    totals = [[0.0] * 9 for _ in groups]
    all_conditions: list[list[float]] = [[] for _ in groups]
    for ranks, rows in numbers.items():
        flat = torch.tensor([x for _, row in rows for x in row], dtype=torch.float64, device="cpu")
        if ranks is not None:
            flat = ranks.all_reduce_(flat.to(ranks.device), what="optimizer.statistics()").cpu()
        for (i, _), row in zip(rows, flat.split([len(row) for _, row in rows]), strict=True):
            totals[i] = [x + y for x, y in zip(totals[i], row.tolist(), strict=False)]
            all_conditions[i] += [x for x in row[9:].tolist() if x]
    return [
        summary(i, group, i < len(layouts) and bool(layouts[i].waves), totals[i], all_conditions[i])
        for i, group in enumerate(groups)
    ]


def summary(
    i: int, group: Group, has_blocks: bool, totals: Sequence[float], conditions: Sequence[float]
) -> Statistics:
    """The statistics of the i-th group from its sums and counts, see `GroupPart`."""
    squares, paired, products, adam, elements, in_blocks, refreshes, failures, size = totals
    known = elements > 0 and (in_blocks > 0 or not has_blocks)
    cosine = products / sqrt(paired * adam) if paired * adam > 0 else None
    if known and not has_blocks and not group.get("amsgrad"):
        cosine = 1.0  # AdamW steps all of the group
    return {
        "name": group.get("name", str(i)),
        "lr": float(group["lr"]),
        "update_rms": sqrt(squares / elements) if known else None,
        "adam_cosine": cosine,
        "condition_max": max(conditions, default=None),
        "condition_median": median(conditions) if conditions else None,
        "refreshes": int(refreshes),
        "failed_share": failures / refreshes if refreshes else 0.0,
        "state_bytes": int(size),
    }


def _parts(
    number: int, group: Group, layout: GroupLayout, recorder: Recorder
) -> Iterator[GroupPart]:
    for batch in layout.batches:
        sums, elements = recorder.updates.get(batch, (NOTHING, 0))
        size = sum(value.nbytes for value in batch.saved().values())
        counts = (elements, elements, batch.refresh_count, batch.failure_count, size)
        conditions, ranks = recorder.current_conditions(batch, group), None
        if batch.exchange is not None:
            ranks, owned = batch.exchange.ranks, conditions
            conditions = owned.new_zeros(len(batch.exchange.owners))
            conditions[batch.exchange.owned] = owned
        yield GroupPart(number, ranks, sums, counts, conditions)
    for params in layout.adamw:
        ranks = params.places[0].ranks if isinstance(params, PartList) else None
        square, elements, size = _adamw_update(params, group, recorder)
        yield GroupPart(number, ranks, square.view(1), (elements, 0, 0, 0, size), NO_BLOCKS)
    if layout.averages is not None:  # of whole parameters on every rank
        pairs = zip(layout.averages.params, layout.averages.iterate, strict=True)
        size = sum(2 * param.numel() * x.element_size() for param, x in pairs)
        yield GroupPart(number, None, NOTHING, (0, 0, 0, 0, size), NO_BLOCKS)


# AdamW's update, from its moments.


def _adamw_update(params: AdamWList, group: Group, recorder: Recorder) -> tuple[Tensor, int, int]:
    """‖P‖² of the most recent update of each parameter, its elements, and the state's bytes."""
    stepped = params if isinstance(params, FusedList | CompactList) else params.list
    sizes = [param.numel() for param in stepped.params]
    if isinstance(params, PartList):
        sizes = [n - sum(margins or ()) for n, margins in zip(sizes, params.margins, strict=True)]
        if params.places[0].ranks.rank > 0:  # what every rank has is counted by the first
            pairs = zip(sizes, params.params, strict=True)
            sizes = [n if n < param.numel() else 0 for n, param in pairs]
    if isinstance(stepped, CompactList):
        steps = [row["step"] for row in stepped.rows]
        entries = [row for n, row in zip(sizes, stepped.rows, strict=True) if n]
        memory = sum(v.nbytes for row in entries for k, v in row.items() if k != "step")
        sampled = [_compact_sample(stepped, row) for row in stepped.rows]
    else:
        steps = list(stepped.step)
        memory = sum(sizes) * sum(values[0].element_size() for values in stepped.state.values())
        if stepped not in recorder.moments:
            recorder.moments[stepped] = _fused_samples(stepped)
        sampled = recorder.moments[stepped]
    shared = all(step is steps[0] for step in steps)
    counts = [float(steps[0])] * len(steps) if shared else torch.stack(steps).tolist()
    alike: dict[tuple[float, int], list[int]] = {}
    for i, (count, sample) in enumerate(zip(counts, sampled, strict=True)):
        if count and sizes[i]:
            alike.setdefault((count, sample.stride), []).append(i)
    total = torch.zeros((), dtype=torch.float64, device=steps[0].device)
    wide = torch.promote_types(sampled[0].mean.dtype, torch.float32)
    beta1, beta2 = group["betas"]
    for (count, stride), rows in alike.items():
        mean = torch.cat([sampled[i].mean for i in rows]).to(wide)
        square = torch.cat([sampled[i].square for i in rows]).to(wide)
        # m̂ / (√v̂ + ε), but for 1/(1 − β₁ᵗ)
        moved = mean.div_(square.sqrt_().div_(sqrt(1 - beta2**count)).add_(group["eps"]))
        weight = 1.0 if stride == 1 else sum(sizes[i] for i in rows) / moved.numel()
        weight /= (1 - beta1**count) ** 2
        total.add_(moved.square().sum(dtype=torch.float64), alpha=weight)
    return total, sum(sizes[i] for rows in alike.values() for i in rows), memory


def _fused_samples(stepped: FusedList) -> list[Sample]:
    """Views of the moments, which a list steps in place: all of small ones, chunks of others."""
    state = stepped.state
    squares = state.get("max_exp_avg_sq", state["exp_avg_sq"])
    stride = _stride(sum(mean.numel() for mean in state["exp_avg"]), SAMPLE)
    samples = []
    for pair in zip(state["exp_avg"], squares, strict=True):
        every = stride if pair[0].numel() >= 8 * CHUNK else 1
        flat = (x.as_strided((x.numel(),), (1,)) for x in pair)
        samples.append(Sample(every, *(_sampled(x, every) for x in flat)))
    return samples


def _compact_sample(stepped: CompactList, row: Mapping[str, Tensor]) -> Sample:
    """Evenly spaced rows of the moments of a parameter, decoded and flat."""
    stride, names = (
        ceil(row["exp_avg"].numel() / SAMPLE) or 1,
        (stepped.names[0], stepped.names[-1]),
    )
    values = [row[name][::stride] if stride > 1 else row[name] for name in names]
    if stepped.quantized:
        scales = [row[f"{name}_scale"][::stride] for name in names]
        values = [dequantize(x, s, stepped.dtype) for x, s in zip(values, scales, strict=True)]
    return Sample(stride, *(value.flatten() for value in values))


# Condition numbers of factors, from below: no decomposition is made for them.


def _conditions(batch: Batch, group: Group) -> Tensor:
    """The largest condition number of the factors of each block; 0: it has none. [B]"""
    names = {key.split(".")[0] for key in batch.state}
    edges: list[tuple[Tensor, Tensor, float]] = []
    if names >= {"basis", "variance"}:
        # of the second moment in the basis, summed over the other dimensions
        variance = batch.read_state(None, ("variance",))["variance"]
        for side in range(len(batch.shape)):
            values = unfold(variance, side).sum(2)
            edges.append((values.amax(1), values.amin(1), 1.0))
    elif names >= {"cov", "root"} and "exponent" in group:
        powers = exponents(group, len(batch.shape))
        for i in sides_of(batch.state):
            cov, root = batch.read_state(None, (f"cov.{i}", f"root.{i}")).values()
            diagonal = root.diagonal(dim1=1, dim2=2)
            edges.append((*_edges(root, _top(cov.to(root.dtype)), diagonal), powers[i]))
    elif names >= {"cov", "values", "basis"}:
        for i in sides_of(batch.state):
            power, values = exponents(group, len(batch.shape))[i], batch.state[f"values.{i}"]
            roots = inverse_power(values, power, group["damping"], group["deficient"])
            edges.append((roots.amax(1), roots.amin(1), power))
    elif "factor" in names:
        keys = [key for key in batch.state if key.split(".")[0] in ("factor", "moment")]
        state = batch.read_state(None, keys)
        moment = state.pop("moment", None)
        for i, factor in enumerate(state.values()):
            edges.append((*_factor_edges(factor.to(batch.dtype), moment, i), 2.0))
    condition = torch.zeros(len(batch.rows), dtype=torch.float64, device=batch.device)
    for most, least, power in edges:
        ratio = (most.double() / least).pow(power).clamp_max(MOST_CONDITION)
        condition = condition.maximum(ratio.nan_to_num(0.0))  # 0/0: it has seen no gradient
    return condition


def _edges(matrix: Tensor, low: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Bounds within the singular values of matrices: their largest from below, smallest from above.

    matrix: [B, n, n]; low: [B, n], near the directions in which they are small; lengths: [B, n],
    of the images of unit vectors. → [B], [B]
    """
    row = lengths.argmax(1)[:, None, None].expand(-1, 1, matrix.size(2))
    probes = torch.stack([matrix.gather(1, row)[:, 0], low], 2)
    sizes = torch.linalg.vector_norm(matrix @ probes, dim=1) / torch.linalg.vector_norm(
        probes, dim=1
    )
    high, small = sizes.unbind(1)
    return high.fmax(lengths.amax(1)), small.fmin(lengths.amin(1))


def _top(cov: Tensor) -> Tensor:
    """Near the top eigenvector: A²e, e of the largest diagonal entry. [B, n, n] → [B, n]"""
    if cov.size(1) >= WHOLE_SIZE:
        cov = cov.tril() + cov.tril(-1).mT
    column = cov.diagonal(dim1=1, dim2=2).argmax(1)[:, None, None].expand(-1, 1, cov.size(1))
    return (cov @ cov.gather(1, column).mT)[:, :, 0]


def _factor_edges(factor: Tensor, moment: Tensor | None, side: int) -> tuple[Tensor, Tensor]:
    """Of Q, which is smallest where the moment, or its unit vectors, are largest. [B], [B]"""
    if factor.ndim == 2:
        return factor.abs().amax(1), factor.abs().amin(1)
    lengths = torch.linalg.vector_norm(factor, dim=2)
    low = torch.zeros_like(lengths)
    if moment is not None:
        rows = unfold(moment.to(factor.dtype), side)
        low = (rows @ (rows.mT @ rows.sum(2, keepdim=True)))[:, :, 0]
    return _edges(factor, low, lengths)
