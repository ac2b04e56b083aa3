"""Small tensors side by side in one buffer, which AdamW steps as one tensor, to the same bits.

Over many small tensors a step is mostly finding them. In a buffer there is one to find, provided
that gradients are in one too: each `.grad` becomes a view of it, into which autograd adds.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from isokron.optim.fused import FusedList

# Larger tensors gain nothing.
MOST = 1 << 16
# Kernels take so many elements at a time, and what is left at a tensor's end in another way: only
# tensors without such an end get the same bits in the middle of a buffer.
UNIT = 32


class FlatList:
    """A FusedList of parameters that have become views of one tensor.

    As long as all have gradients and lie where they were put. Otherwise it is a list like any
    other from then on, of the same state.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype, amsgrad: bool) -> None:
        self.params = tuple(params)
        whole = _buffer(self.params)
        slots = _cut(whole, self.params)
        for param, slot in zip(self.params, slots, strict=True):
            param.data = slot
        self.addresses = list(map(Tensor.data_ptr, slots))
        self.matrices = [param for param in self.params if param.ndim > 1]
        self.gradient = whole.grad = torch.zeros_like(whole)
        self._cut_gradient()
        self.form = (dtype, amsgrad)
        self.list = FusedList([whole], dtype, amsgrad)
        self.state = {key: _cut(values[0], params) for key, values in self.list.state.items()}
        self.flat = True

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i under the names torch.optim.AdamW gives it."""
        if not self.flat:
            return self.list.row(i)
        return {"step": self.list.step[0], **{key: cut[i] for key, cut in self.state.items()}}

    def adopt_(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over what there is of a saved state; a buffer has one counter, or is none."""
        counts = {float(entry.get("step", 0)) for entry in saved}
        if len(counts) > 1:
            self._part_()
        if not self.flat:
            self.list.adopt_(saved)
            return
        self.list.adopt_([{"step": counts.pop()}])
        for key, cut in self.state.items():
            for value, entry in zip(cut, saved, strict=True):
                if key in entry:
                    value.copy_(entry[key])

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if the state is in other tensors now."""
        if not self.flat:
            return self.list.step_(group)
        grads = [grad for p in self.params if (grad := p.grad) is not None]
        if not grads:
            return False
        if len(grads) < len(self.params) or not self._unmoved():
            self._part_()
            self.list.step_(group)
            return True
        if not (all(map(is_, grads, self.grads)) and self._views_hold()):
            self._gather_(grads)
        return self.list.step_(group)

    def zero_grad_(self) -> None:
        """Gradients of zero that stay where they are, in place of none."""
        if not self.flat or not self._unmoved():
            return
        self.gradient.zero_()
        if not self._views_hold():
            self._cut_gradient()
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad if param.requires_grad else None

    def _cut_gradient(self) -> None:
        self.grads = _cut(self.gradient, self.params)
        self.grad_addresses = list(map(Tensor.data_ptr, self.grads))

    def _views_hold(self) -> bool:
        """Whether nobody has pointed a gradient to other memory (`grad.data = …`)."""
        return list(map(Tensor.data_ptr, self.grads)) == self.grad_addresses

    def _unmoved(self) -> bool:
        """Whether nobody has pointed a parameter to other memory, or turned it round in place."""
        return list(map(Tensor.data_ptr, self.params)) == self.addresses and all(
            map(Tensor.is_contiguous, self.matrices)
        )

    def _gather_(self, grads: list[Tensor]) -> None:
        """Copy gradients that somebody else has made to where they belong."""
        if not self._views_hold():
            self._cut_gradient()
        own = self.gradient.untyped_storage().data_ptr()
        if any(
            grad is not view and grad.untyped_storage().data_ptr() == own
            for grad, view in zip(grads, self.grads, strict=True)
        ):  # views that have changed places would overwrite one another
            grads = [grad.clone() for grad in grads]
        for param, grad, view in zip(self.params, grads, self.grads, strict=True):
            if grad is not view:
                view.copy_(grad)
                param.grad = view

    def _part_(self) -> None:
        """Be a list of tensors; the parameters stay where they are."""
        rows = [self.row(i) for i in range(len(self.params))]
        self.list = FusedList(self.params, *self.form)
        self.list.adopt_(rows)
        self.flat = False


def small_and_large(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Those that may move into a buffer, and the others."""
    small = [param for param in params if _movable(param)]
    if not _whole_of(small):  # a buffer made before is taken up again, if nothing else has changed
        small = [param for param in small if _sole_owner(param)]
    chosen = set(map(id, small)) if len(small) > 1 else set()
    return [p for p in params if id(p) in chosen], [p for p in params if id(p) not in chosen]


def _movable(param: Tensor) -> bool:
    """A plain tensor like its gradient will be, without an end of its own."""
    return (
        type(param) in (Tensor, nn.Parameter)
        and param.is_leaf
        and param.grad_dtype in (None, param.dtype)
        and param.is_contiguous()
        and param.numel() <= MOST
        and param.numel() % UNIT == 0
    )


def _sole_owner(param: Tensor) -> bool:
    """Whether nobody else has hold of its memory: no view, no twin, no other process."""
    storage = param.untyped_storage()
    return (
        storage.nbytes() == param.numel() * param.element_size()
        and not storage.is_shared()
        and torch._C._storage_Use_Count(storage._cdata) <= 2  # the parameter, and `storage`
    )


def _whole_of(params: Sequence[Tensor]) -> bool:
    """Whether the parameters lie one after the other and fill their storage."""
    if not params:
        return False
    storage = params[0].untyped_storage()
    starts = accumulate((p.numel() for p in params[:-1]), initial=0)
    return storage.nbytes() == sum(p.numel() * p.element_size() for p in params) and all(
        p.untyped_storage().data_ptr() == storage.data_ptr() and p.storage_offset() == start
        for p, start in zip(params, starts, strict=True)
    )


def _buffer(params: Sequence[Tensor]) -> Tensor:
    """The parameters' elements in one tensor: the one they are in already, or a new one."""
    first = params[0].detach()
    if _whole_of(params):
        return first.as_strided((sum(p.numel() for p in params),), (1,), 0)
    return torch.cat([param.detach().flatten() for param in params])


def _cut(whole: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of a buffer, in the shapes of the parameters."""
    parts = whole.split([param.numel() for param in params])
    return tuple(part.view(param.shape) for part, param in zip(parts, params, strict=True))
