"""A layer as y = W ā: its parameters, inputs and gradients of outputs as batches of matrices.

W is [B, o, i], a bias its last column: B blocks that do not mix, such as the groups of a
convolution. Inputs are [B, N, S, i] and gradients of outputs [B, N, S, o]: N examples, S positions
that share the weight.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
RMS_NORMS = ("RMSNorm", "T5LayerNorm")  # ends of the class names of transformers' own norms
EPSILONS = ("eps", "variance_epsilon", "epsilon")


@dataclass(frozen=True)
class Layout:
    """How a layer's parameters make a matrix.

    form: a weight has its outputs in "rows", as [o, ...], or in "columns", as [i, o]; "diagonal":
        weight and bias are rows in which every entry stands alone.
    params: names of "weight" and "bias" in the model; shapes: their shapes in this layer.
    rows: first and last row, for parameters that several layers share.
    """

    form: str
    params: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    groups: int = 1
    rows: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def bias(self) -> bool:
        return "bias" in self.params

    @property
    def shape(self) -> tuple[int, int, int]:
        """(B, o, i), the column of a bias included."""
        if self.form == "diagonal":
            return 1, len(self.params), prod(self.shapes[next(iter(self.params))])
        first, *sizes = self.shapes["weight"]
        if self.form == "columns":
            return 1, sizes[0], first + self.bias
        return self.groups, first // self.groups, prod(sizes) + self.bias

    def part(self, key: str, tensor: Tensor) -> Tensor:
        """The layer's rows of a parameter, as a view."""
        return tensor[slice(*self.rows[key])] if key in self.rows else tensor


def pack(layout: Layout, tensors: Mapping[str, Tensor]) -> Tensor:
    """Tensors shaped like parameters, by the model's names, as one batch of matrices [B, o, i]."""
    parts = {
        key: layout.part(key, tensors[name]).reshape(layout.shapes[key])
        for key, name in layout.params.items()
    }
    if layout.form == "diagonal":
        return torch.stack([value.flatten() for value in parts.values()])[None]
    weight = parts["weight"]
    if layout.form == "columns":
        matrix = weight.mT[None]
    else:
        matrix = weight.reshape(layout.groups, len(weight) // layout.groups, -1)
    if not layout.bias:
        return matrix
    return torch.cat([matrix, parts["bias"].reshape(*matrix.shape[:2], 1)], 2)


def unpack(layout: Layout, matrix: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack`, by the keys "weight" and "bias"."""
    shapes = layout.shapes
    if layout.form == "diagonal":
        return {key: row.reshape(shapes[key]) for key, row in zip(shapes, matrix[0], strict=True)}
    weight = matrix[..., :-1] if layout.bias else matrix
    weight = weight[0].mT if layout.form == "columns" else weight
    parts = {"weight": weight.reshape(shapes["weight"])}
    return {**parts, "bias": matrix[..., -1].flatten()} if layout.bias else parts


@dataclass(frozen=True)
class View:
    """Inputs and outputs of a linear layer; subclasses are other types of layers.

    kind: inputs are "dense", or the "index" of a column of W, or "diagonal" where every weight has
        an input and an output of its own.
    """

    form: str = "rows"
    kind: str = "dense"
    groups: int = 1

    def inputs(self, x: Tensor) -> Tensor:
        """[B, N, S, i] without the one of a bias; an index is [B, N, S], −1 for none."""
        return self.outputs(x)

    def outputs(self, y: Tensor) -> Tensor:
        """[N, ..., o] → [B, N, S, o]. A vector is one position of one example."""
        return y.reshape(1, len(y) if y.ndim > 1 else 1, -1, y.size(-1))


@dataclass(frozen=True)
class Convolution(View):
    """Every position of the output sees the patch of the input under the kernel."""

    module: nn.modules.conv._ConvNd = field(kw_only=True)

    def inputs(self, x: Tensor) -> Tensor:
        conv = self.module
        mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
        x = functional.pad(self._batched(x), conv._reversed_padding_repeated_twice, mode=mode)
        sizes = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
        for dim, (width, step, gap) in enumerate(sizes, 2):
            # unfold has all taps of a dilated kernel and those between them
            x = x.unfold(dim, gap * (width - 1) + 1, step)[..., ::gap]
        order = len(conv.kernel_size)
        patches = x.movedim(1, 1 + order)  # [N, places..., channels, taps...]
        flat = patches.flatten(1, order).flatten(2)  # [N, S, channels · taps]
        return flat.unflatten(2, (self.groups, -1)).movedim(2, 0)

    def outputs(self, y: Tensor) -> Tensor:
        y = self._batched(y).flatten(2).mT  # [N, S, channels]
        return y.unflatten(2, (self.groups, -1)).movedim(2, 0)

    def _batched(self, x: Tensor) -> Tensor:
        return x[None] if x.ndim == len(self.module.kernel_size) + 1 else x


@dataclass(frozen=True)
class Table(View):
    """An embedding [vocabulary, d]: its row v is column v of W, and the input says which."""

    padding: int | None = None

    def inputs(self, x: Tensor) -> Tensor:
        index = x.reshape(1, x.size(0) if x.ndim else 1, -1)
        return index if self.padding is None else index.masked_fill(index == self.padding, -1)


@dataclass(frozen=True)
class Affine(View):
    """y = w ⊙ x̂ + b of a norm. Where it is (1 + w) ⊙ x̂, gradients are the same."""

    module: nn.Module = field(kw_only=True)

    def inputs(self, x: Tensor) -> Tensor:
        module = self.module
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(module, nn.LayerNorm):
            x = functional.layer_norm(x, module.normalized_shape, eps=module.eps)
        elif isinstance(module, nn.GroupNorm):
            x = functional.group_norm(x, module.num_groups, eps=module.eps)
        else:
            x = functional.rms_norm(x, self._weight.shape, eps=_epsilon(module))
        return self.outputs(x)

    def outputs(self, y: Tensor) -> Tensor:
        if isinstance(self.module, nn.GroupNorm):
            return y.reshape(*y.shape[:2], -1).mT[None]  # [1, N, S, channels]
        return super().outputs(y.flatten(-self._weight.ndim))

    @property
    def _weight(self) -> Tensor:
        assert isinstance(self.module.weight, Tensor)
        return self.module.weight


def view_of(module: nn.Module) -> View | None:
    """How a module of a known type is seen; None for other types."""
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # transformers' linear layer
        return View("columns")
    if isinstance(module, nn.Linear):
        return View()
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return Convolution(groups=module.groups, module=module)
    if type(module).forward is nn.Embedding.forward:
        # a subclass that scales its rows has gradients other than those of a table
        return Table("columns", "index", padding=getattr(module, "padding_idx", None))
    if isinstance(module, NORMS) or _is_rms_norm(module):
        return Affine("diagonal", "diagonal", module=module)
    return None


def _is_rms_norm(module: nn.Module) -> bool:
    """transformers has a class for every architecture, with a weight and an epsilon."""
    names = [name for name, _ in module.named_parameters()]
    by_name = type(module).__name__.endswith(RMS_NORMS)
    return by_name and names == ["weight"] and _epsilon(module) is not None


def _epsilon(module: nn.Module) -> float | None:
    values = (getattr(module, name, None) for name in EPSILONS)
    return next((value for value in values if isinstance(value, float)), None)
