"""Small parameters in one buffer that AdamW steps as one tensor, with the same bits.

Over many small tensors most of a step is Python finding them and their gradients. In a buffer there
is one tensor to find, provided that each `.grad` is a view of a buffer too, to which autograd adds.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from isokron.optim.adamw_lists import VECTOR, FusedList

MAX_NUMEL = 1 << 16  # larger tensors gain nothing


class FlatList:
    """A FusedList whose parameters have become views of one tensor.

    It stays flat as long as all parameters have gradients and are where they were put; otherwise
    it is a list of tensors from then on, with the same state.
    """

    def __init__(self, params: Sequence[Tensor], dtype: torch.dtype, amsgrad: bool) -> None:
        self.params = tuple(params)
        buffer = _buffer(self.params)
        views = _views(buffer, self.params)
        for param, view in zip(self.params, views, strict=True):
            param.data = view
        self.addresses = _addresses(views)
        self.matrices = [param for param in self.params if param.ndim > 1]
        self.gradient = buffer.grad = torch.zeros_like(buffer)
        self._cut_gradient()
        self.form = (dtype, amsgrad)
        self.list = FusedList([buffer], dtype, amsgrad)
        self.state = {key: _views(values[0], params) for key, values in self.list.state.items()}
        self.flat = True

    def row(self, i: int) -> dict[str, Tensor]:
        """The state of parameter i under the names torch.optim.AdamW gives it."""
        if not self.flat:
            return self.list.row(i)
        return {"step": self.list.step[0], **{key: views[i] for key, views in self.state.items()}}

    def adopt_(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Take over a saved state; a buffer has one step counter."""
        counts = {float(entry.get("step", 0)) for entry in saved}
        if len(counts) > 1:
            self._unflatten_()
        if not self.flat:
            self.list.adopt_(saved)
            return
        self.list.adopt_([{"step": counts.pop()}])
        for key, views in self.state.items():
            for view, entry in zip(views, saved, strict=True):
                if key in entry:
                    view.copy_(entry[key])

    def step_(self, group: Mapping[str, Any]) -> bool:
        """One step; True if the state is in other tensors now."""
        if not self.flat:
            return self.list.step_(group)
        grads = [grad for p in self.params if (grad := p.grad) is not None]
        if not grads:
            return False
        if len(grads) < len(self.params) or not self._in_place():
            self._unflatten_()
            self.list.step_(group)
            return True
        if not (all(map(is_, grads, self.grads)) and self._gradients_in_place()):
            self._collect_(grads)
        return self.list.step_(group)

    def zero_grad_(self) -> None:
        """Set gradients to zero, as views of the buffer, instead of to None."""
        if not self.flat or not self._in_place():
            return
        self.gradient.zero_()
        if not self._gradients_in_place():
            self._cut_gradient()
        for param, grad in zip(self.params, self.grads, strict=True):
            param.grad = grad if param.requires_grad else None

    def _cut_gradient(self) -> None:
        self.grads = _views(self.gradient, self.params)
        self.grad_addresses = _addresses(self.grads)

    def _gradients_in_place(self) -> bool:
        """False after `grad.data = …`."""
        return _addresses(self.grads) == self.grad_addresses

    def _in_place(self) -> bool:
        """False after `param.data = …`, also if it is the same memory transposed."""
        return _addresses(self.params) == self.addresses and all(
            map(Tensor.is_contiguous, self.matrices)
        )

    def _collect_(self, grads: list[Tensor]) -> None:
        """Copy gradients that are other tensors into the buffer."""
        if not self._gradients_in_place():
            self._cut_gradient()
        pairs = [(g, v) for g, v in zip(grads, self.grads, strict=True) if g is not v]
        memory = self.gradient.untyped_storage().data_ptr()
        if any(grad.untyped_storage().data_ptr() == memory for grad, _ in pairs):
            # views that were swapped would overwrite one another
            pairs = [(grad.clone(), view) for grad, view in pairs]
        for grad, view in pairs:
            view.copy_(grad)
        for param, view in zip(self.params, self.grads, strict=True):
            param.grad = view

    def _unflatten_(self) -> None:
        """Become a list of tensors; the parameters stay where they are."""
        rows = [self.row(i) for i in range(len(self.params))]
        self.list = FusedList(self.params, *self.form)
        self.list.adopt_(rows)
        self.flat = False


def small_and_large(params: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """The parameters that may move into a buffer, and the others."""
    small = [param for param in params if _movable(param)]
    if not _fill_storage(small):  # a buffer that was made before is used again
        small = [param for param in small if _sole_owner(param)]
    chosen = set(map(id, small)) if len(small) > 1 else set()
    return [p for p in params if id(p) in chosen], [p for p in params if id(p) not in chosen]


def _movable(param: Tensor) -> bool:
    """Whether it is a small plain tensor that kernels round alike within a buffer."""
    return (
        type(param) in (Tensor, nn.Parameter)
        and param.is_leaf
        and getattr(param, "grad_dtype", None)
        in (None, param.dtype)  # torch 2.9 and older have none
        and param.is_contiguous()
        and param.numel() <= MAX_NUMEL
        and param.numel() % VECTOR == 0
    )


def _sole_owner(param: Tensor) -> bool:
    """Whether nothing else uses its memory: no view, tied parameter or other process."""
    storage = param.untyped_storage()
    return (
        storage.nbytes() == param.numel() * param.element_size()
        and not storage.is_shared()
        and torch._C._storage_Use_Count(storage._cdata) <= 2  # the parameter, and `storage`
    )


def _fill_storage(params: Sequence[Tensor]) -> bool:
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
    if _fill_storage(params):
        return params[0].detach().as_strided((sum(p.numel() for p in params),), (1,), 0)
    return torch.cat([param.detach().flatten() for param in params])


def _views(buffer: Tensor, params: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Views of a buffer in the shapes of the parameters."""
    parts = buffer.split([param.numel() for param in params])
    return tuple(part.view(param.shape) for part, param in zip(parts, params, strict=True))


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return list(map(Tensor.data_ptr, tensors))
