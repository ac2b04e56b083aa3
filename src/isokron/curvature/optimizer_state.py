"""Curvature from the state of an optimizer that keeps second moments of gradients anyway.

    Shampoo          L = Σ GGᵀ, R = Σ GᵀG                      F ≈ L ⊗ R / tr R
    Katie            variances S², correlations K_L, K_R       L and R of S ⊙ (K_L ⊗ K_R) ⊙ S
    SOAP             bases Q_L, Q_R, second moments Λ in them  F ≈ Q diag(Λ) Qᵀ, Q = Q_L ⊗ Q_R
    NaturalGradient  A and G, as `fit` has them
    AdamW            second moments of entries                 F ≈ diag(V)

All are running means over steps, of the gradients G of batches. A batch of n terms has the mean of
n gradients, whose covariance is 1/n of that of single terms: F has another scale than `fit` gives.

Blocks of a weight that was cut have a part of L and R each: their sums over neighbours are the
diagonal blocks of the factors of the whole. A bias is one more input, uncorrelated with the others.
"""

import math
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isokron.block_layout import cut_blocks
from isokron.curvature.curvature import Curvature, LayerCurvature
from isokron.curvature.layers import Layer, pack
from isokron.curvature.statistics import check_finite
from isokron.linalg import eigh, mirror_
from isokron.operators.kron import is_thin

METHODS = {"SOAP": "ekfac", "Shampoo": "shampoo", "Katie": "shampoo", "AdamW": "diagonal"}
FIT = "fit the curvature to the data instead: fit('ekfac')"


class Origin(NamedTuple):
    """The optimizer of a curvature, the steps it has made, and the kind of curvature."""

    name: str
    step: int
    method: str


@dataclass(frozen=True)
class ParamState:
    """A parameter's state: flat entries, and the settings of its group."""

    name: str
    shape: tuple[int, ...]
    entry: Mapping[str, Any]
    group: Mapping[str, Any]

    def tensor(self, key: str) -> Tensor:
        value = torch.as_tensor(self.entry[key]).detach()
        if not value.is_floating_point():
            raise _too_few_bits(key, self.name)
        return value.to(torch.promote_types(value.dtype, torch.float32))

    def mean(self, key: str, beta: float) -> Tensor:
        """A running mean, corrected for its start at 0; a sum at β = 1."""
        step, value = float(self.entry["step"]), self.tensor(key)
        if beta == 1 or step < 1 or not self.group.get("use_bias_correction", True):
            return value
        return value / (-math.expm1(step * math.log(beta)) if beta > 0 else 1.0)

    def squares(self) -> Tensor:
        """AdamW's second moments, in the shape of the parameter."""
        squares = self.mean("exp_avg_sq", self.group["betas"][1])
        check_shapes(self.name, {"exp_avg_sq": squares}, {"exp_avg_sq": self.shape})
        return squares


def check_shapes(
    name: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse the state of a parameter with another shape than the model's."""
    for key, value in tensors.items():
        if tuple(value.shape) != shapes[key]:
            raise ValueError(
                f"the optimizer's state {key!r} of {name!r} has shape {tuple(value.shape)}, and "
                f"the model needs {shapes[key]}; give the optimizer that has trained this model"
            )


def _too_few_bits(key: str, name: str) -> ValueError:
    return ValueError(
        f"the state {key!r} of {name!r} is kept in 8 bits, which curvature is not read from; {FIT}"
    )


def curvature_from_optimizer(
    model: nn.Module, layers: Sequence[Layer], optimizer: Any
) -> tuple[Curvature, Origin]:
    """The curvature of layers, without a pass over data.

    optimizer: a Shampoo, SOAP, Katie, NaturalGradient or AdamW of isokron, its state_dict(), or a
    mapping with that under "optimizer".
    """
    states = param_states(model, optimizer)
    kind = _optimizer_name(states)
    fitted = [_layer_curvature(layer, states) for layer in layers]
    for layer in fitted:
        check_finite(layer.name, layer.statistics)
    steps = [float(state.entry.get("step", 0)) for state in states.values()]
    first = next(iter(states.values()))
    method = str(first.group["method"]) if kind == "NaturalGradient" else METHODS[kind]
    device = next(model.parameters()).device
    moved = [
        replace(x, statistics={k: v.to(device).contiguous() for k, v in x.statistics.items()})
        for x in fitted
    ]
    return Curvature(moved), Origin(kind, int(max(steps)), method)


def read_checkpoint(path: Path) -> Any:
    """Tensors and plain values of a file written by torch.save."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, LookupError) as error:
        raise ValueError(
            f"curvature {path} is no file of tensors and plain values by torch.save "
            f"({type(error).__name__}); save optimizer.state_dict()"
        ) from None


def param_states(model: nn.Module, optimizer: Any) -> dict[str, ParamState]:
    """The state of every parameter that has one, by its name in the model."""
    params = dict(getattr(model, "_orig_mod", model).named_parameters())
    live = hasattr(optimizer, "param_groups") and hasattr(optimizer, "state_dict")
    saved = optimizer.state_dict() if live else optimizer
    if isinstance(saved, Mapping) and "param_groups" not in saved:
        saved = saved.get("optimizer", saved)
    if not isinstance(saved, Mapping) or not {"state", "param_groups"} <= saved.keys():
        keys = ", ".join(map(str, list(saved)[:5])) if isinstance(saved, Mapping) else ""
        raise ValueError(
            "optimizer must be an optimizer of isokron, its state_dict(), or a checkpoint with "
            f"that under 'optimizer', got {type(saved).__name__} {keys}".rstrip()
        )
    groups = saved["param_groups"]
    names = _live_names(params, optimizer) if live else _saved_names(params, groups)
    states: dict[str, ParamState] = {}
    for group, of_group in zip(groups, names, strict=True):
        if "route" not in group and "kl_clip" not in group:
            raise ValueError(
                "optimizer must be a Shampoo, SOAP, Katie, NaturalGradient or AdamW of isokron, "
                f"and this is a state of another library; {FIT}"
            )
        for number, name in zip(group["params"], of_group, strict=True):
            if name not in params:
                raise ValueError(
                    f"the optimizer has a parameter {name!r} that the model lacks; give the "
                    "optimizer that has trained this model"
                )
            entry = saved["state"].get(number)
            if entry:
                states[name] = ParamState(name, tuple(params[name].shape), entry, group)
    if not states:
        raise ValueError(f"the optimizer has made no step, and knows no gradients; {FIT}")
    return states


def _live_names(params: Mapping[str, Tensor], optimizer: Any) -> list[list[str]]:
    names = {param: name for name, param in params.items()}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if p not in names]
    if foreign:
        raise ValueError(
            f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is none of the "
            "model's; give the optimizer that has trained this model"
        )
    return [[names[param] for param in group["params"]] for group in optimizer.param_groups]


def _saved_names(
    params: Mapping[str, Tensor], groups: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    if all("param_names" in group for group in groups):
        prefix = "_orig_mod."  # of a compiled model
        return [[name.removeprefix(prefix) for name in g["param_names"]] for g in groups]
    # one group of all parameters has them in the order of the model
    if len(groups) == 1 and len(groups[0]["params"]) == len(params):
        return [list(params)]
    raise ValueError(
        f"the checkpoint has no names of parameters, in groups of "
        f"{[len(group['params']) for group in groups]} where the model has {len(params)}; make the "
        "optimizer from isokron.param_groups(model) or model.named_parameters(), or give the "
        "optimizer itself"
    )


def _optimizer_name(states: Mapping[str, ParamState]) -> str:
    keys = {key.split(".")[0] for state in states.values() for key in state.entry}
    if any("kl_clip" in state.group for state in states.values()):
        return "NaturalGradient"
    if "cov" in keys:
        return "SOAP" if "basis" in keys else "Katie" if "variance" in keys else "Shampoo"
    if "exp_avg_sq_scale" in keys:
        raise _too_few_bits("exp_avg_sq", next(iter(states)))
    if keys <= {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "scale"}:
        return "AdamW"
    raise ValueError(
        "optimizer must keep second moments of gradients, as Shampoo, SOAP, Katie, NaturalGradient "
        f"and AdamW do, and this keeps {', '.join(sorted(keys))}; {FIT}"
    )


def _layer_curvature(layer: Layer, states: Mapping[str, ParamState]) -> LayerCurvature:
    layout = layer.layout
    weight = states.get(next(iter(layout.params.values())))
    if weight is not None and "kl_clip" in weight.group:
        return _of_natural_gradient(layer, weight)
    missing = [name for name in layout.params.values() if name not in states]
    if missing or weight is None:
        raise ValueError(
            f"the optimizer has no state of {missing[0]!r}; leave its layer out: "
            f"layers='!{layer.name}'"
        )
    of_layer = [states[name] for name in layout.params.values()]
    if all("exp_avg_sq" in state.entry for state in of_layer):
        squares = {state.name: state.squares() for state in of_layer}
        return _result(layer, "ekfac", {"eigenvalues": pack(layout, squares)})
    bias = states[layout.params["bias"]] if layout.bias else None
    if "cov.0.0" not in weight.entry or layer.kind != "dense":
        raise ValueError(
            f"the optimizer's state of {weight.name!r} is no curvature of a layer; leave it out: "
            f"layers='!{layer.name}'"
        )
    if bias is not None and "exp_avg_sq" not in bias.entry:
        raise ValueError(
            f"the optimizer's state of {bias.name!r} is not that of AdamW; leave its layer out: "
            f"layers='!{layer.name}'"
        )
    blocks = list(_blocks(layer, weight))
    extra = None if bias is None else layout.part("bias", bias.squares()).reshape(-1)
    single = layout.groups == 1 and not layout.rows
    if "basis.0.0" in weight.entry and single:
        return _result(layer, "ekfac", _eigen(layer, blocks, extra))
    return _result(layer, "shampoo", _sides(layer, blocks, extra))


def _result(layer: Layer, method: str, statistics: dict[str, Tensor]) -> LayerCurvature:
    return LayerCurvature(layer.name, method, layer.layout, statistics)


def _of_natural_gradient(layer: Layer, state: ParamState) -> LayerCurvature:
    """Its statistics are those of `fit`; layers that share a parameter have a prefix each."""
    prefix = f"{layer.name.rpartition('.')[2]}." if layer.layout.rows else ""
    entry = {
        key.removeprefix(prefix): value
        for key, value in state.entry.items()
        if key.startswith(prefix)
    }
    if float(entry.get("terms", 0)) <= 0:
        raise ValueError(
            f"the optimizer has observed nothing of layer {layer.name!r}; leave it out: "
            f"layers='!{layer.name}'"
        )
    of_layer, method = replace(state, entry=entry), str(state.group["method"])
    keys = ["eigenvalues", "basis.output", "basis.input"]
    if "eigenvalues" not in entry:
        keys = ["input", "columns" if "columns" in entry else "output"]
        method = "kfac" if method == "ekfac" else method
    statistics = {key: of_layer.tensor(key) for key in keys if key in entry}
    blocks, outputs, inputs = layer.shape
    if "columns" in statistics:
        count, lengths = int(entry["count"]), of_layer.tensor("lengths")
        units = statistics["columns"][..., :count].to(lengths)
        statistics["columns"] = units * lengths[:, None, :count]
    left, right = (blocks, outputs, outputs), (blocks, inputs, inputs)
    shapes = {"output": left, "basis.output": left, "input": right, "basis.input": right}
    shapes |= {"eigenvalues": layer.shape, "columns": (blocks, outputs, int(entry.get("count", 0)))}
    if is_thin(statistics.get("basis.output")):
        rank = statistics["basis.output"].size(2)
        shapes |= {"basis.output": (blocks, outputs, rank)}
        shapes |= {"eigenvalues": (blocks, rank + 1, inputs)}
    check_shapes(layer.name, statistics, shapes)
    terms = float(entry["terms"])
    return replace(_result(layer, method, statistics), terms=terms)


@dataclass(frozen=True)
class BlockState:
    """A block of a weight as a matrix: its rows and columns in that of the layer, and its state.

    factors: L [m, m] and R [n, n], the dimensions of inputs as one. bases, variance: of SOAP.
    """

    rows: Tensor
    columns: Tensor
    factors: tuple[Tensor, Tensor]
    bases: tuple[Tensor, Tensor] | None = None
    variance: Tensor | None = None


def _blocks(layer: Layer, state: ParamState) -> Iterator[BlockState]:
    """The blocks of a weight that lie in a layer, with the rows of it that they cover."""
    layout, group = layer.layout, state.group
    cut = {key: group[key] for key in ("max_dim", "stacked", "split", "split_dim")}
    cut["order"] = group.get("order")  # checkpoints without it have blocks of any order
    row_of, column_of = _places(layer, state)
    numbers = torch.arange(prod(state.shape)).view(state.shape)
    for i, block in enumerate(cut_blocks(state.shape, **cut)):
        order = len(block.shape)
        sides = list(range(order))
        # outputs first, also where the weight is [inputs, outputs]
        sides = [*sides[-1:], *sides[:-1]] if layout.transposed else sides
        index = block.read(numbers).permute(sides).flatten(1)  # [m, n]
        rows = row_of[index[:, 0]]
        inside = rows >= 0
        if not bool(inside.any()):
            continue
        columns = column_of[index[inside][0]]
        same = row_of[index] == rows[:, None]
        same[inside] &= column_of[index[inside]] == columns
        if getattr(state.entry.get(f"cov.0.{i}"), "ndim", 2) < 2:
            raise _too_few_bits(f"cov.0.{i}", state.name)
        expected = {f"cov.{side}.{i}": (block.shape[side],) * 2 for side in sides}
        shapes = {key: tuple(getattr(state.entry.get(key), "shape", ())) for key in expected}
        if order < 2 or not bool(same.all()) or shapes != expected:
            raise ValueError(
                f"the blocks of {state.name!r} in the optimizer do not fit the model's shape "
                f"{state.shape}: factors {sorted(shapes.values())}; give the optimizer that has "
                f"trained this model, or leave the layer out: layers='!{layer.name}'"
            )
        yield _block_state(state, i, sides, rows, columns, inside)


def _block_state(
    state: ParamState, number: int, sides: list[int], rows: Tensor, columns: Tensor, inside: Tensor
) -> BlockState:
    group, entry = state.group, state.entry
    if group.get("statistic") in ("kl", "kl_sum"):
        raise ValueError(
            f"the factors of {state.name!r} are those of statistic='kl', which are no sums of "
            f"squared gradients; {FIT}"
        )
    beta2 = group["betas"][1]
    beta = beta2 if group["factor_beta"] is None else group["factor_beta"]
    covs = [_mirrored(state.mean(f"cov.{side}.{number}", beta)) for side in sides]
    left = covs[0]
    # every factor has the trace of the whole, which a product of them has once
    right = reduce(lambda a, b: torch.kron(a, b) / b.trace().clamp_min(1e-30), covs[1:])
    variance = bases = None
    if f"variance.{number}" in entry:
        variance = state.mean(f"variance.{number}", beta2).permute(sides).flatten(1)  # [m, n]
    if variance is not None and f"basis.0.{number}" in entry:
        turned = [state.tensor(f"basis.{side}.{number}") for side in sides]
        bases = (turned[0], reduce(torch.kron, turned[1:]))
    elif variance is not None and group.get("statistic") == "correlation":
        # L_ab = Σ_c S_ac S_bc (K_L)_ab (K_R)_cc, and R alike: partial traces of the covariance
        right = reduce(torch.kron, covs[1:])
        scale = variance.sqrt()
        outer = left * ((scale * right.diagonal()) @ scale.mT)
        right = right * ((scale * left.diagonal()[:, None]).mT @ scale)
        left = outer
    left = left[inside][:, inside]
    return BlockState(rows[inside], columns, (left, right), bases, variance)


def _places(layer: Layer, state: ParamState) -> tuple[Tensor, Tensor]:
    """Row and column in the layer's matrix of every entry of its weight, −1 for none of them."""
    layout = replace(
        layer.layout,
        params={"weight": state.name},
        shapes={"weight": layer.layout.shapes["weight"]},
    )
    size = prod(state.shape)
    numbers = torch.arange(size).view(state.shape)
    index = pack(layout, {state.name: numbers}).flatten(0, 1)  # [B·o, i]
    row_of, column_of = (torch.full((size,), -1) for _ in range(2))
    row_of[index] = torch.arange(len(index))[:, None].expand_as(index)
    column_of[index] = torch.arange(index.size(1)).expand_as(index)
    return row_of, column_of


def _sides(layer: Layer, blocks: Sequence[BlockState], bias: Tensor | None) -> dict[str, Tensor]:
    """L and R of a layer, from the parts that its blocks have of them."""
    count, outputs, _ = layer.shape
    left, right = _factors(layer, blocks)
    if bias is not None:
        left.diagonal().add_(bias)
        right = torch.block_diag(right, bias.sum())
    groups = left.view(count, outputs, count, outputs).diagonal(dim1=0, dim2=2)  # [o, o, B]
    return {"output": groups.movedim(-1, 0).clone(), "input": right.expand(count, -1, -1).clone()}


def _factors(layer: Layer, blocks: Sequence[BlockState]) -> tuple[Tensor, Tensor]:
    count, outputs, inputs = layer.shape
    like = blocks[0].factors[0]
    left = like.new_zeros(count * outputs, count * outputs)
    right = like.new_zeros((inputs - layer.layout.bias,) * 2)
    for block in blocks:
        left[block.rows[:, None], block.rows] += block.factors[0]
        right[block.columns[:, None], block.columns] += block.factors[1]
    return left, right


def _eigen(layer: Layer, blocks: Sequence[BlockState], bias: Tensor | None) -> dict[str, Tensor]:
    """Bases and second moments of a layer of SOAP.

    Blocks that are side by side have bases of their own: those of the summed factors take their
    place, with Λ the diagonal of the blocks' operators in them.
    """
    _, outputs, inputs = layer.shape
    like = blocks[0].factors[0]
    left, right = like.new_zeros(outputs, outputs), like.new_zeros(inputs, inputs)
    values = like.new_zeros(outputs, inputs)
    if len(blocks) > 1:
        factors = _factors(layer, blocks)
        for sides, factor in ((left, factors[0]), (right, factors[1])):
            parts = {tuple((b.rows if sides is left else b.columns).tolist()) for b in blocks}
            for part in sorted(parts):
                index = torch.tensor(part)
                square = factor[index[:, None], index]
                sides[index[:, None], index] = eigh(square[None])[1][0].to(like)
    for block in blocks:
        rows, columns = block.rows, block.columns
        assert block.bases is not None
        assert block.variance is not None
        if len(blocks) == 1:
            left[rows[:, None], rows], right[columns[:, None], columns] = block.bases
            values[rows[:, None], columns] = block.variance
            continue
        turn_left = left[rows[:, None], rows].mT @ block.bases[0]
        turn_right = right[columns[:, None], columns].mT @ block.bases[1]
        turned = turn_left.square() @ block.variance @ turn_right.square().mT
        values[rows[:, None], columns] = turned
    if bias is not None:
        right[-1, -1] = 1
        values[:, -1] = left.square().mT @ bias
    return {"basis.output": left[None], "basis.input": right[None], "eigenvalues": values[None]}


def _mirrored(cov: Tensor) -> Tensor:
    """Both halves of a factor of which the lower one is kept up to date."""
    return mirror_(cov[None].clone())[0]
