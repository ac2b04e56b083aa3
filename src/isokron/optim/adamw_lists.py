"""AdamW on lists of tensors, with the bits of torch.optim.AdamW(fused=True).

m ← m + (1−β₁)(g − m), v ← β₂v + (1−β₂)g²
p ← p(1 − lr·λ) − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε)      (Loshchilov and Hutter, 1711.05101)
"""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack

from isokron.distributed import (
    Place,
    fill_,
    gather_parts_,
    part_of,
    row_range,
    whole_from,
)
from isokron.distributed.gradient_buckets import BUCKET_BYTES, GradientBuckets
from isokron.kernels import Lists, StepCount, Tensors, adamw_
from isokron.linalg.device_transfer import as_tensor
from isokron.optim.gradient_checks import GRAD
from isokron.optim.quantization import dequantize, quantize, stochastic_bfloat16
from isokron.optim.settings import decay_rate, learning_rate

# CPU kernels compute up to 32 elements at once, and what remains at the end of a tensor one by
# one, with other rounding.
VECTOR = 32


class FusedList:
    """Parameters of one group, device and dtype, with their state in lists.

    The lists are kept from step to step, and one step counter serves all parameters until a
    gradient is missing: over many small tensors, Python is most of a step.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype, amsgrad: bool) -> None:
        self.params = tuple(params)
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        self.state = {key: tuple(torch.zeros_like(p, dtype=dtype) for p in params) for key in names}
        counter = torch.zeros((), dtype=torch.float32, device=params[0].device)
        self.step = (counter,) * len(params)
        self.count = StepCount()

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i under the names torch.optim.AdamW gives it."""
        return {"step": self.step[i], **{key: values[i] for key, values in self.state.items()}}

    def adopt_(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over a saved state, of any layout, dtype or device; missing entries stay zero."""
        counts = [float(entry.get("step", 0)) for entry in saved]
        shared = len(set(counts)) == 1
        steps = [torch.full_like(self.step[0], count) for count in counts[: 1 if shared else None]]
        self.step = tuple(steps * (len(counts) if shared else 1))
        for key, values in self.state.items():
            for value, entry in zip(values, saved, strict=True):
                if key in entry:
                    value.copy_(entry[key])

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if parameters have counters of their own now."""
        grads = [grad for grad in map(GRAD, self.params) if grad is not None]
        if not grads:
            return False
        if len(grads) == len(self.params):
            update_(self._lists(grads), group, self.count)
            return False
        separated = self.step[0] is self.step[1]
        if separated:
            self.step = tuple(step.clone() for step in self.step)
        rows = [i for i, p in enumerate(self.params) if p.grad is not None]
        lists: list[Tensors] = [
            [tensors[i] for i in rows] if tensors else [] for tensors in self._lists([])
        ]
        lists[1] = grads
        update_(lists, group, StepCount())
        return separated

    def _lists(self, grads: list[Tensor]) -> Lists:
        moments = (self.state["exp_avg"], self.state["exp_avg_sq"])
        return (self.params, grads, *moments, self.state.get("max_exp_avg_sq", ()), self.step)


def update_(lists: Lists, group: Mapping[str, Any], count: StepCount) -> None:
    """One step of AdamW on lists as `adamw_` takes them; counters are incremented here."""
    params, grads, exp_avgs, exp_avg_sqs, maxima, steps = lists
    state = (exp_avgs, exp_avg_sqs, maxima, steps)
    if len(steps) > 1 and steps[0] is steps[1]:
        steps[0].add_(1)
    else:
        torch._foreach_add_(steps, 1)
    weight_decay = group["weight_decay"]
    if weight_decay and group["decay"] == "l2":
        signed = -weight_decay if group["maximize"] else weight_decay
        grads = list(torch._foreach_add(grads, params, alpha=signed))
    beta1, beta2 = group["betas"]
    settings = {
        "lr": learning_rate(group),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": decay_rate(group),
        "eps": group["eps"],
        "maximize": group["maximize"],
    }
    if adamw_(params, grads, *state, count=count, **settings):
        return
    # fused kernels read memory and ignore strides
    targets = [_laid_out(p, m) for p, m in zip(params, exp_avgs, strict=True)]
    copies = [_laid_out(g, m) for g, m in zip(grads, exp_avgs, strict=True)]
    if not adamw_(targets, copies, *state, **settings):
        raise RuntimeError(
            "AdamW: moments must be dense tensors in one piece of memory; load the state anew"
        )
    for param, target in zip(params, targets, strict=True):
        if target is not param:
            param.copy_(target)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` itself if it has the dtype and memory layout of `like`, else a copy that has."""
    if tensor.dtype is like.dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)


MIN_ROW = 8  # elements of a row: a scale takes as many bytes as four codes


def is_quantized(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Whether AdamW keeps the moments of a parameter in 8 bits; those of vectors never are."""
    large = param.ndim > 1 and param.numel() >= group["min_8bit_size"]
    return group["moments"] == "8bit" and large and prod(param.shape[1:]) >= MIN_ROW


class CompactList:
    """Parameters with moments in 8 bits (`quantized`), or with stochastic rounding of their steps.

    They are stepped one by one, so that the moments of one at a time are decoded. A block of codes
    is within a row of the parameter, so that shards of rows have the codes of the whole.
    """

    def __init__(
        self, params: Sequence[Tensor], dtype: torch.dtype, amsgrad: bool, quantized: bool
    ) -> None:
        self.params, self.quantized = tuple(params), quantized
        self.dtype = torch.promote_types(dtype, torch.float32) if quantized else dtype
        self.names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")[: 3 if amsgrad else 2]
        self.counts = [StepCount() for _ in params]
        self.rows = []
        for param in params:
            step = torch.zeros((), dtype=torch.float32, device=param.device)
            zeros = [torch.zeros_like(param, dtype=self.dtype) for _ in self.names]
            self.rows.append({"step": step, **self._stored(zeros)})

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i: torch's names, and `exp_avg_scale`, … of codes."""
        return dict(self.rows[i])

    def adopt_(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over a saved state; missing entries stay zero."""
        for row, entry in zip(self.rows, saved, strict=True):
            for key, value in row.items():
                if key in entry:
                    value.copy_(as_tensor(entry[key]))

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; the state stays in its tensors."""
        for param, row, count in zip(self.params, self.rows, self.counts, strict=True):
            if param.grad is None:
                continue
            if not param.numel():  # a rank without rows counts steps as the others do
                row["step"] += 1
                continue
            moments = [self._decoded(row, name) for name in self.names]
            narrow = group["rounding"] == "stochastic" and param.dtype is torch.bfloat16
            weight = param.detach().float() if narrow else param
            grad = param.grad.to(weight.dtype)
            lists = ([weight], [grad], moments[:1], moments[1:2], moments[2:], [row["step"]])
            update_(lists, group, count)
            if narrow:
                param.copy_(stochastic_bfloat16(weight, row["step"].view(1)))
            for key, value in self._stored(moments).items():
                if value is not row[key]:
                    row[key].copy_(value)
        return False

    def _decoded(self, row: Mapping[str, Tensor], name: str) -> Tensor:
        if self.quantized:
            return dequantize(row[name], row[f"{name}_scale"], self.dtype)
        return row[name].to(torch.promote_types(self.dtype, torch.float32))

    def _stored(self, moments: Sequence[Tensor]) -> dict[str, Tensor]:
        if not self.quantized:
            return dict(zip(self.names, moments, strict=True))
        stored = {}
        for name, moment in zip(self.names, moments, strict=True):
            stored[name], stored[f"{name}_scale"] = quantize(moment, signed=name == "exp_avg")
        return stored


class PartList:
    """The parts of parameters that this rank steps: its rows of a whole one, or its shard.

    Rows of whole parameters are all-gathered after the step. The state of a parameter is a DTensor,
    so that torch.distributed.checkpoint reshards it. `buckets`: where the gradients are if they
    are sharded; None if they are in `.grad`. `quantized`: of a CompactList; None for a FusedList.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        places: Sequence[Place],
        dtype: torch.dtype,
        amsgrad: bool,
        quantized: bool | None = None,
    ) -> None:
        self.params, self.places = tuple(params), tuple(places)
        pairs = list(zip(self.params, self.places, strict=True))
        for param, place in pairs:
            if quantized and param.ndim and row_range(param, place) is None:
                dims = [dim for dim, _ in place.shards.cuts] if place.shards else []
                raise ValueError(
                    "AdamW: moments='8bit' needs parameters that are sharded along their first "
                    f"dimension, got dimensions {dims} of shape {tuple(param.shape)}; set "
                    "moments=None in their group"
                )
        # the parts of a CompactList keep their shape, and have no bits to agree with
        self.margins = [_margins(*pair) if quantized is None else None for pair in pairs]
        parts = [_padded(*pair) for pair in zip(self._parts(), self.margins, strict=True)]
        self.list = (
            FusedList(parts, dtype, amsgrad)
            if quantized is None
            else CompactList(parts, dtype, amsgrad, quantized)
        )
        self.buckets: GradientBuckets | None = None

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i under the names torch.optim.AdamW gives it."""
        param, place, row = self.params[i], self.places[i], self.list.row(i)
        part = part_of(param.detach(), place)
        for key, value in row.items():
            if key.endswith("_scale"):
                row[key] = whole_from(value, param, place)
            elif key != "step":
                row[key] = whole_from(_unpadded(value, self.margins[i], part), param, place)
        return row

    def adopt_(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over a saved state, of whole parameters or of parts."""
        self.list.adopt_([{"step": entry["step"]} if "step" in entry else {} for entry in saved])
        for i, entry in enumerate(saved):
            for key, value in self.row(i).items():
                if key in entry and key != "step":
                    fill_(value, entry[key])

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if parameters have counters of their own now."""
        parts, grads = self._parts(), self._gradients()
        for i, flat in enumerate(self.list.params):
            # anew in every step, because `param.data` may have been replaced
            flat.data = _padded(parts[i], self.margins[i])
            grad = grads[i]
            flat.grad = None if grad is None else _padded(grad, self.margins[i]).to(flat.dtype)
        separated = self.list.step_(group)
        for part, flat, margins in zip(parts, self.list.params, self.margins, strict=True):
            flat.grad = None
            if flat.data_ptr() != part.data_ptr():
                part.copy_(_unpadded(flat, margins, part))
        self._gather([i for i, grad in enumerate(grads) if grad is not None])
        return separated

    def _parts(self) -> list[Tensor]:
        pairs = zip(self.params, self.places, strict=True)
        return [part_of(param.detach(), place) for param, place in pairs]

    def _gradients(self) -> list[Tensor | None]:
        """This rank's part of every gradient."""
        if self.buckets is not None:
            return [self.buckets.rows(param) for param in self.params]
        return [
            None if param.grad is None else part_of(param.grad, place)
            for param, place in zip(self.params, self.places, strict=True)
        ]

    def _gather(self, stepped: list[int]) -> None:
        """All-gather parameters, some at a time: each call needs a buffer for all that it gets."""
        size, buckets = 0, dict[int, list[tuple[Tensor, Place]]]()
        for i in stepped:
            param = self.params[i]
            buckets.setdefault(size // BUCKET_BYTES, []).append((param, self.places[i]))
            size += param.numel() * param.element_size()
        for bucket in buckets.values():
            gather_parts_(bucket)


def _margins(param: Tensor, place: Place) -> tuple[int, int]:
    """Zeros before and after a part with which its elements have the bits of the whole parameter.

    With zeros after it no element is at the end of a tensor. The last part of a parameter has them
    before it instead, so that the same elements as in the whole parameter are at the end.
    """
    rows = row_range(param, place)
    if rows is None:
        return 0, 0
    row = prod(param.shape[1:])
    start, stop = rows[0] * row, rows[1] * row
    if start == stop:
        return 0, 0
    return (0, (start - stop) % VECTOR) if stop < param.numel() else (start % VECTOR, 0)


def _padded(part: Tensor, margins: tuple[int, int] | None) -> Tensor:
    """A part, flattened, between its margins; it shares memory where there are none.

    `margins` None: the part as it is.
    """
    if margins is None:
        return part
    flat = part.reshape(-1)
    return nn.functional.pad(flat, margins) if any(margins) else flat


def _unpadded(flat: Tensor, margins: tuple[int, int] | None, part: Tensor) -> Tensor:
    """The inverse of `_padded`, in the shape of `part`; it shares memory with `flat`."""
    if margins is None:
        return flat
    inner = flat[margins[0] : margins[0] + part.numel()].view(part.shape)
    # from_dlpack makes a storage that begins there: torch cannot copy a DTensor with an offset
    return from_dlpack(inner) if margins[0] else inner
