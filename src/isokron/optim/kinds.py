"""What a parameter is, told by the modules that hold it: embedding, head, norm, adapter, matrix."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList

from isokron.cutting import is_matrix

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
RECURRENT = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}  # gates in one weight
LAYERS = (
    *(nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
    ParametrizationList,
)


def find_kinds(model: nn.Module, owners: Mapping[Tensor, list[nn.Module]]) -> dict[Tensor, str]:
    """What every parameter is: matrices, adapters, embeddings, heads, filters, norms, vectors."""
    pairs = _adapters(model)
    heads = _heads(model, pairs)

    def kind(param: Tensor) -> str:
        mine = owners[param]
        if param in pairs:
            return "adapters"
        if any(isinstance(module, EMBEDDINGS) for module in mine):
            return "embeddings"
        if any(isinstance(module, NORMS) for module in mine):
            return "norms"
        if not is_matrix(param.shape):
            return "vectors"
        if param in heads:
            return "heads"
        if any(isinstance(m, _ConvNd) and m.groups == m.in_channels > 1 for m in mine):
            return "filters"
        return "matrices"

    return {param: kind(param) for param in owners}


def find_owners(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """Every module that holds a parameter; a tied one has several."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
    return owners


def matrices_within(param: Tensor, owners: Iterable[nn.Module]) -> dict[str, Any]:
    """How a parameter is several matrices, where its module's type says so."""
    for module in owners:
        if isinstance(module, nn.MultiheadAttention) and param is module.in_proj_weight:
            return {"split": 3, "split_dim": 0}
        if isinstance(module, _ConvNd) and module.groups > 1 and param is module.weight:
            return {"split": module.groups, "split_dim": 0}
        gates = next((n for kind, n in RECURRENT.items() if isinstance(module, kind)), 0)
        if gates and param.size(0) == gates * int(module.hidden_size):  # type: ignore[arg-type]
            return {"split": gates, "split_dim": 0}
        if _is_transposed(module) and param is module.weight:
            return {"split_dim": 1}
    return {}


def in_layer(owners: Iterable[nn.Module]) -> bool:
    return any(isinstance(module, LAYERS) or _is_transposed(module) for module in owners)


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear layer that keeps its weight as [in, out]."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _heads(model: nn.Module, adapters: set[Tensor]) -> set[Tensor]:
    """The weights of the output layer.

    Models that say which it is are asked (`get_output_embeddings`). Else it is the last linear
    layer, if others come before it and it does not sit inside one of several like blocks.
    """
    said = getattr(model, "get_output_embeddings", None)
    head = said() if callable(said) else None
    if isinstance(head, nn.Module):
        return _matrices(head)
    layers = {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or _is_transposed(module))
        and module.weight not in adapters
    }
    matrices = [p for p in model.parameters() if is_matrix(p.shape) and p not in adapters]
    if not layers or len(matrices) < 2:
        return set()
    name, last = list(layers.items())[-1]
    return set() if _in_repeated_block(model, name) else _matrices(last)


def _matrices(module: nn.Module) -> set[Tensor]:
    """A layer's matrices, also where its weight is computed from them (weight norm, adapters)."""
    return {param for param in module.parameters() if is_matrix(param.shape)}


def _in_repeated_block(model: nn.Module, name: str) -> bool:
    """Whether a module around this one, below the model, has a sibling of its class and shapes."""
    path = name.split(".")
    for depth in range(1, len(path)):
        parent = model.get_submodule(".".join(path[: depth - 1]))
        around = _likeness(parent.get_submodule(path[depth - 1]))
        if sum(_likeness(child) == around for child in parent.children()) > 1:
            return True
    return False


def _likeness(module: nn.Module) -> tuple[type, list[torch.Size]]:
    return type(module), [param.shape for param in module.parameters()]


def _adapters(model: nn.Module) -> set[Tensor]:
    """LoRA pairs: trainable [r, n] and [m, r], r < min(m, n), beside a frozen weight [m, n].

    They are looked for in the module that holds the weight (or its wrapper) and in its containers
    of adapters.
    """
    pairs: set[Tensor] = set()
    for module in model.modules():
        near = _nearby(module)
        trained = [param for param in near if param.requires_grad]
        for base in (param for param in near if not param.requires_grad):
            for down, up in itertools.permutations(trained, 2):
                if _is_pair(base, down, up):
                    pairs |= {down, up}
    return pairs


def _nearby(module: nn.Module) -> list[Tensor]:
    """Matrices of a module that adapts one layer: its own, its layer's and its adapters'."""
    containers = (nn.ModuleDict, nn.ParameterDict, nn.ParameterList, nn.ModuleList)
    near: list[Tensor] = list(module.parameters(recurse=False))
    for child in module.children():
        if isinstance(child, containers):
            near += [p for leaf in child.children() for p in leaf.parameters(recurse=False)]
        near += child.parameters(recurse=False)
    return [param for param in near if param.ndim == 2]


def _is_pair(base: Tensor, down: Tensor, up: Tensor) -> bool:
    """Whether up·down, or its transpose, is a low-rank change of the weight."""
    rank = down.size(0)
    product = (up.size(0), down.size(1))
    return up.size(1) == rank < min(base.shape) and product in (base.shape, base.shape[::-1])
