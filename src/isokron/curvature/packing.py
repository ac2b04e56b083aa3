"""Parameters as matrices [B, o, i], a bias the last column, and back: B blocks that do not mix."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

FORMS = ("rows", "columns", "diagonal")


@dataclass(frozen=True)
class Layout:
    """How a layer's parameters make a matrix.

    `form`: a weight has its outputs in "rows", as [o, ...], or in "columns", as [i, o]; or weight
    and bias are themselves rows, in which every entry stands alone ("diagonal"). `params`: names
    of "weight" and "bias" in the model, `shapes` theirs here; `rows`: which rows of those that pack
    several.
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
        """B, o and i, a bias included."""
        if self.form == "diagonal":
            return 1, len(self.params), prod(self.shapes[next(iter(self.params))])
        first, *rest = self.shapes["weight"]
        if self.form == "columns":
            return 1, rest[0], first + self.bias
        return self.groups, first // self.groups, prod(rest) + self.bias


def pack(layout: Layout, tensors: Mapping[str, Tensor]) -> Tensor:
    """What has the shapes of parameters, by the model's names, as one batch of matrices."""
    own = {
        key: tensors[name][slice(*layout.rows.get(key, (None,)))]
        for key, name in layout.params.items()
    }
    if layout.form == "diagonal":
        return torch.stack([value.flatten() for value in own.values()])[None]
    weight = own["weight"]
    if layout.form == "columns":
        matrix = weight.mT[None]
    else:
        matrix = weight.reshape(layout.groups, len(weight) // layout.groups, -1)
    if not layout.bias:
        return matrix
    return torch.cat([matrix, own["bias"].reshape(*matrix.shape[:2], 1)], 2)


def unpack(layout: Layout, matrix: Tensor) -> dict[str, Tensor]:
    """The inverse of `pack`, by the layer's own names "weight" and "bias"."""
    shapes = layout.shapes
    if layout.form == "diagonal":
        return {key: row.reshape(shapes[key]) for key, row in zip(shapes, matrix[0], strict=True)}
    weight = matrix[..., :-1] if layout.bias else matrix
    turned = weight[0].mT if layout.form == "columns" else weight
    found = {"weight": turned.reshape(shapes["weight"])}
    return {**found, "bias": matrix[..., -1].flatten()} if layout.bias else found


def put_(
    result: dict[str, Tensor], layout: Layout, matrix: Tensor, like: Mapping[str, Tensor]
) -> None:
    """Add a matrix to its parameters in `result`.

    Packed parameters get it in their rows; those that several layers share, the sum over layers.
    """
    for key, value in unpack(layout, matrix).items():
        name = layout.params[key]
        whole = result.setdefault(name, torch.zeros_like(like[name]))
        whole[slice(*layout.rows.get(key, (None,)))] += value.to(whole.dtype)
