"""AdamW on lists of tensors, with the same bits as torch's own AdamW(fused=True).

m ← m + (1−β₁)(g − m), v ← β₂v + (1−β₂)g²
p ← p(1 − lr·λ) − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε)      (Loshchilov and Hutter, 1711.05101)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.kernels import Lists, StepCount, Tensors, adamw_
from isokron.optim.groups import decay_rate, learning_rate


class FusedList:
    """Parameters of one group, device and dtype that AdamW steps, with their state as lists.

    The lists are kept from step to step, and one step counter serves all of them as long as no
    gradient has been missing: over many small tensors, Python is most of a step. Kernels read
    memory and ignore strides, so whatever is not laid out like its parameter goes through a copy
    that is.
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
        """Take over what there is of a saved state, whatever its layout, dtype or device.

        One counter is to serve all parameters where all have seen as many gradients, else none.
        """
        counts = [float(entry.get("step", 0)) for entry in saved]
        alike = len(set(counts)) == 1
        steps = [torch.full_like(self.step[0], count) for count in counts[: 1 if alike else None]]
        self.step = tuple(steps * (len(counts) if alike else 1))
        for key, values in self.state.items():
            for value, entry in zip(values, saved, strict=True):
                if key in entry:
                    value.copy_(entry[key])

    def _lists(self, grads: list[Tensor]) -> Lists:
        moments = (self.state["exp_avg"], self.state["exp_avg_sq"])
        return (self.params, grads, *moments, self.state.get("max_exp_avg_sq", ()), self.step)

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if the counters had to part because a gradient was missing."""
        present = [grad for p in self.params if (grad := p.grad) is not None]
        if not present:
            return False
        if len(present) == len(self.params):
            self._update_(self._lists(present), group, self.count)
            return False
        parted = len(self.params) > 1 and self.step[0] is self.step[1]
        if parted:
            self.step = tuple(step.clone() for step in self.step)
        rows = [i for i, p in enumerate(self.params) if p.grad is not None]
        lists: list[Tensors] = [
            [tensors[i] for i in rows] if tensors else [] for tensors in self._lists([])
        ]
        lists[1] = present
        self._update_(lists, group, StepCount())
        return parted

    def _update_(self, lists: Lists, group: Mapping[str, Any], count: StepCount) -> None:
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
        for param, exp_avg in zip(params, exp_avgs, strict=True):
            if param.shape != exp_avg.shape:
                raise RuntimeError(
                    f"AdamW: a parameter must keep its shape, but one of {tuple(exp_avg.shape)} is "
                    f"{tuple(param.shape)} now; make the optimizer anew"
                )
        targets = [_laid_out(p, m) for p, m in zip(params, exp_avgs, strict=True)]
        copies = [_laid_out(g, m) for g, m in zip(grads, exp_avgs, strict=True)]
        adamw_(targets, copies, *state, **settings)
        for param, target in zip(params, targets, strict=True):
            if target is not param:
                param.copy_(target)


def _laid_out(tensor: Tensor, like: Tensor) -> Tensor:
    """`tensor` itself if it has the memory layout of `like`, else a copy that has."""
    if tensor.dtype is like.dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)
