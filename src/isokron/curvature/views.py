"""How inputs of a layer, and gradients of its outputs, look as rows of matrices: y = W ā.

Inputs are [B, N, S, i], gradients of outputs [B, N, S, o]: B blocks that do not mix (the groups of
a convolution), N examples, S positions that share the weight.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
EPSILONS = ("eps", "variance_epsilon", "epsilon")  # names of it in norms that are not torch's


class View(Protocol):
    """`kind`: of inputs, which are "dense", or the "index" of a column of W, or "diagonal" where
    every weight has an input and an output of its own. `form`, `groups`: see packing.Layout."""

    @property
    def kind(self) -> str: ...

    @property
    def form(self) -> str: ...

    @property
    def groups(self) -> int: ...

    def inputs(self, x: Tensor, batch_dim: int) -> Tensor:
        """[B, N, S, i] without the one of a bias; an index is [B, N, S], −1 where none learns."""
        ...

    def outputs(self, y: Tensor, batch_dim: int) -> Tensor:
        """[B, N, S, o]"""
        ...


@dataclass(frozen=True)
class Linear:
    form: str = "rows"
    kind: str = "dense"
    groups: int = 1

    def inputs(self, x: Tensor, batch_dim: int) -> Tensor:
        return positions(x, batch_dim)

    def outputs(self, y: Tensor, batch_dim: int) -> Tensor:
        return positions(y, batch_dim)


@dataclass(frozen=True)
class Convolution:
    """Every position of the output sees the patch of the input under the kernel."""

    module: nn.modules.conv._ConvNd
    form: str = "rows"
    kind: str = "dense"

    @property
    def groups(self) -> int:
        return self.module.groups

    def inputs(self, x: Tensor, batch_dim: int) -> Tensor:
        patches = windows(self.module, x)  # [N, places..., channels, taps...]
        order = len(self.module.kernel_size)
        flat = patches.flatten(1, order).flatten(2)  # [N, S, channels · taps]
        return flat.unflatten(2, (self.groups, -1)).movedim(2, 0)

    def outputs(self, y: Tensor, batch_dim: int) -> Tensor:
        y = _batched(self.module, y).flatten(2).mT  # [N, S, channels]
        return y.unflatten(2, (self.groups, -1)).movedim(2, 0)


@dataclass(frozen=True)
class Table:
    """An embedding [vocabulary, d]: row v of it is column v of W, and the input says which."""

    padding: int | None
    form: str = "columns"
    kind: str = "index"
    groups: int = 1

    def inputs(self, x: Tensor, batch_dim: int) -> Tensor:
        x = x.movedim(batch_dim, 0) if x.ndim > 1 else x
        index = x.reshape(1, x.size(0) if x.ndim else 1, -1)
        return index if self.padding is None else index.masked_fill(index == self.padding, -1)

    def outputs(self, y: Tensor, batch_dim: int) -> Tensor:
        return positions(y, batch_dim)


@dataclass(frozen=True)
class Affine:
    """y = w ⊙ x̂ + b of a norm. Where it is (1 + w) ⊙ x̂, gradients are the same."""

    module: nn.Module
    form: str = "diagonal"
    kind: str = "diagonal"
    groups: int = 1

    def inputs(self, x: Tensor, batch_dim: int) -> Tensor:
        return self.outputs(normalized(self.module, x), batch_dim)

    def outputs(self, y: Tensor, batch_dim: int) -> Tensor:
        if isinstance(self.module, nn.GroupNorm):
            return y.reshape(*y.shape[:2], -1).mT[None]  # [1, N, S, channels]
        return positions(y.flatten(-len(_normalized_shape(self.module))), batch_dim)


def positions(x: Tensor, batch_dim: int) -> Tensor:
    """[N, ..., d] → [1, N, S, d]. A vector is one position of one example."""
    if x.ndim == 1:
        return x[None, None, None]
    x = x.movedim(batch_dim, 0) if x.ndim > 2 else x
    return x.reshape(1, len(x), -1, x.size(-1))


def windows(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    """What the kernel sees at every place, as a view: [N, places..., channels, taps...]."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = functional.pad(_batched(conv, x), conv._reversed_padding_repeated_twice, mode=mode)
    places, taps = [], []
    steps = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
    for dim, (width, step, gap) in enumerate(steps, 2):
        count = (x.size(dim) - gap * (width - 1) - 1) // step + 1
        places.append((count, x.stride(dim) * step))
        taps.append((width, x.stride(dim) * gap))
    sizes = [len(x), *(n for n, _ in places), x.size(1), *(n for n, _ in taps)]
    strides = [x.stride(0), *(s for _, s in places), x.stride(1), *(s for _, s in taps)]
    return x.as_strided(sizes, strides)


def _batched(conv: nn.modules.conv._ConvNd, x: Tensor) -> Tensor:
    return x[None] if x.ndim == len(conv.kernel_size) + 1 else x


def normalized(module: nn.Module, x: Tensor) -> Tensor:
    """x̂: what the norm makes of x before weight and bias, in float32 at least."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x, module.normalized_shape, eps=module.eps)
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x, module.num_groups, eps=module.eps)
    if isinstance(module, nn.RMSNorm):
        return functional.rms_norm(x, module.normalized_shape, eps=module.eps)
    return functional.rms_norm(x, _normalized_shape(module), eps=_epsilon(module))


def _normalized_shape(module: nn.Module) -> tuple[int, ...]:
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return tuple(module.normalized_shape)
    assert isinstance(module.weight, Tensor)
    return tuple(module.weight.shape)


def _epsilon(module: nn.Module) -> float | None:
    """Of a class of its own that is a root-mean-square norm by name; None if it has none."""
    found = (getattr(module, name, None) for name in EPSILONS)
    return next((value for value in found if isinstance(value, float)), None)


def _is_rms_norm(module: nn.Module) -> bool:
    """As transformers has them, one for every architecture: a weight, and nothing else."""
    own = [name for name, _ in module.named_parameters()]
    named = type(module).__name__.endswith("RMSNorm")
    return named and own == ["weight"] and _epsilon(module) is not None


def view_of(module: nn.Module) -> View | None:
    """How a layer of a known type is seen; None for others."""
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # of transformers
        return Linear("columns")
    if isinstance(module, nn.Linear):
        return Linear()
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Convolution(module)
    if isinstance(module, nn.Embedding):
        # one that scales what it looks up, or looks up something else, is not known
        return Table(module.padding_idx) if _keeps_forward(module, nn.Embedding) else None
    if isinstance(module, NORMS) or _is_rms_norm(module):
        return Affine(module)
    return None


def _keeps_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    return type(module).forward is kind.forward
