"""AdamW on lists of tensors, by torch's fused kernel: the same bits as its own AdamW(fused=True).

m ← m + (1−β₁)(g − m), v ← β₂v + (1−β₂)g²
p ← p(1 − lr·λ) − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε)      (Loshchilov and Hutter, 1711.05101)
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isokron.optim.groups import decay_rate, learning_rate


class FusedList:
    """Parameters of one group, device and dtype that AdamW steps, with their state as lists.

    The lists are kept from step to step, and one step counter serves all of them as long as no
    gradient has been missing: building lists and counting is half the time of a step over many
    small tensors. The kernel reads memory and ignores strides, so whatever is not laid out like
    its parameter goes through a copy that is.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype, amsgrad: bool) -> None:
        self.params = params
        self.dtype = dtype
        names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
        self.state = {key: [torch.zeros_like(p, dtype=dtype) for p in params] for key in names}
        self.step = [torch.zeros((), device=params[0].device)] * len(params)
        self.plain = all(m.is_contiguous() for m in self.state["exp_avg"])  # once and for all

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i under the names torch.optim.AdamW gives it."""
        return {"step": self.step[i], **{key: values[i] for key, values in self.state.items()}}

    def adopt_(self, i: int, saved: Mapping[str, Any]) -> None:
        """Take over what there is of a saved state, whatever its layout, dtype or device."""
        self.step[i] = torch.full_like(self.step[i], float(saved.get("step", 0)))
        for key, values in self.state.items():
            if key in saved:
                values[i].copy_(saved[key])

    def share_step_(self) -> None:
        """Let one counter serve all parameters where all have seen as many gradients, else none."""
        alike = len({float(step) for step in self.step}) == 1
        self.step = [self.step[0]] * len(self.step) if alike else [s.clone() for s in self.step]

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if the counters had to part because a gradient was missing."""
        grads = [p.grad for p in self.params]
        rows = [i for i, grad in enumerate(grads) if grad is not None]
        if not rows:
            return False
        present = [grad for grad in grads if grad is not None]
        if len(rows) == len(self.params):
            self._update_(self.params, present, self.step, self.state, group)
            return False
        parted = len(self.params) > 1 and self.step[0] is self.step[1]
        if parted:
            self.step = [step.clone() for step in self.step]
        state = {key: [values[i] for i in rows] for key, values in self.state.items()}
        params, steps = [self.params[i] for i in rows], [self.step[i] for i in rows]
        self._update_(params, present, steps, state, group)
        return parted

    def _update_(
        self,
        params: list[Tensor],
        grads: list[Tensor],
        steps: list[Tensor],
        state: dict[str, list[Tensor]],
        group: Mapping[str, Any],
    ) -> None:
        if len(steps) > 1 and steps[0] is steps[1]:
            steps[0].add_(1)
        else:
            torch._foreach_add_(steps, 1)
        weight_decay = group["weight_decay"]
        if weight_decay and group["decay"] == "l2":
            signed = -weight_decay if group["maximize"] else weight_decay
            grads = list(torch._foreach_add(grads, params, alpha=signed))
        targets = params
        if not (self.plain and _flat(params, grads, self.dtype)):
            exp_avg = state["exp_avg"]
            targets = [_laid_out(p, m, self.dtype) for p, m in zip(params, exp_avg, strict=True)]
            grads = [_laid_out(g, m, self.dtype) for g, m in zip(grads, exp_avg, strict=True)]
        beta1, beta2 = group["betas"]
        torch._fused_adamw_(
            targets,
            grads,
            state["exp_avg"],
            state["exp_avg_sq"],
            state.get("max_exp_avg_sq", []),
            steps,
            amsgrad="max_exp_avg_sq" in state,
            lr=learning_rate(group),
            beta1=beta1,
            beta2=beta2,
            weight_decay=decay_rate(group),
            eps=group["eps"],
            maximize=group["maximize"],
        )
        for param, target in zip(params, targets, strict=True) if targets is not params else ():
            if target is not param:
                param.copy_(target)


def _flat(params: list[Tensor], grads: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether every tensor lies in memory in plain order, and so in the same order."""
    return (
        all(p.dtype is dtype for p in params)
        and all(g.dtype is dtype for g in grads)
        and all(map(Tensor.is_contiguous, params))
        and all(map(Tensor.is_contiguous, grads))
    )


def _laid_out(tensor: Tensor, like: Tensor, dtype: torch.dtype) -> Tensor:
    """`tensor` itself if it has the memory layout of `like`, else a copy that has."""
    if tensor.dtype is dtype and tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like).copy_(tensor)
