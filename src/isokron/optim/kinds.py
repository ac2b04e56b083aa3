"""What a parameter is, told by the modules that hold it: embedding, head, norm, adapter, matrix."""

import itertools
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from isokron.block_layout import is_matrix

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
RECURRENT = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}  # gates in one weight
LAYERS = (
    *(nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
    ParametrizationList,
)


def find_kinds(
    model: nn.Module, owners: Mapping[Tensor, list[nn.Module]], heads: Set[Tensor] | None = None
) -> dict[Tensor, str]:
    """What every parameter is; the head is looked for unless its weights are given."""
    pairs = _adapters(model)
    heads = find_heads(model, pairs) if heads is None else heads

    def kind(param: Tensor) -> str:
        modules = owners[param]
        if param in pairs:
            return "adapters"
        if any(isinstance(module, EMBEDDINGS) for module in modules):
            return "embeddings"
        if any(isinstance(module, NORMS) for module in modules):
            return "norms"
        if param in heads:
            return "heads"
        if any(_is_experts(module) for module in modules):
            return "matrices" if param.ndim == 3 else "vectors"  # [experts, n] are biases
        if not is_matrix(param.shape):
            return "rows" if param.ndim > 1 and _is_weight(param, modules) else "vectors"
        if any(isinstance(m, _ConvNd) and m.groups == m.in_channels > 1 for m in modules):
            return "filters"
        known = any(isinstance(m, LAYERS) or _is_linear(m) or _is_router(m) for m in modules)
        return "matrices" if known else "raw weights"

    return {param: kind(param) for param in owners}


def find_owners(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """Every module that holds a parameter or computes its own of it; a tied one has several."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners.setdefault(param, []).append(module)
        if is_parametrized(module):
            for param in module.get_submodule("parametrizations").parameters():
                owners.setdefault(param, []).append(module)
    return owners


def find_parts(model: nn.Module) -> dict[Tensor, dict[str, Any]]:
    """How parameters are several matrices, where a module's type says so."""
    parts: dict[Tensor, dict[str, Any]] = {}
    for module in model.modules():
        for param, part in _parts(module).items():
            parts.setdefault(param, part)  # what a module says of its layers comes first
    return parts


def _parts(module: nn.Module) -> dict[Tensor, dict[str, Any]]:
    tensors = dict(module.named_parameters(recurse=False))
    if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
        return {module.in_proj_weight: {"split": 3, "split_dim": 0}}
    if isinstance(module, _ConvNd) and module.groups > 1:
        return {module.weight: {"split": module.groups, "split_dim": 0}}
    gates = next((n for kind, n in RECURRENT.items() if isinstance(module, kind)), 0)
    if gates:
        rows = gates * int(module.hidden_size)  # type: ignore[arg-type]
        return {
            param: {"split": gates, "split_dim": 0}
            for param in tensors.values()
            if param.ndim == 2 and param.size(0) == rows
        }
    if _is_transposed(module):
        return {tensors["weight"]: {"split_dim": 1}} if "weight" in tensors else {}
    if _is_experts(module):
        return _expert_parts(module, tensors)
    fused = dict(module.named_children()).get("c_attn")  # GPT-2's query, key and value side by side
    if fused is not None and _is_transposed(fused) and _of_transformers(module, "Attention"):
        width, outputs = fused.weight.shape  # type: ignore[misc]
        if outputs % width == 0:
            return {fused.weight: {"split": outputs // width, "split_dim": 1}}  # type: ignore[dict-item]
    return {}


def _expert_parts(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[Tensor, dict[str, Any]]:
    """Stacks [experts, m, n]; a gate and its up projection are two where they lie side by side."""
    parts: dict[Tensor, dict[str, Any]] = {
        param: {"stacked": 1} for param in tensors.values() if param.ndim == 3
    }
    layout = vars(module)
    gate_up = tensors.get("gate_up_proj")
    if gate_up in parts and layout.get("has_gate") and layout.get("is_concatenated"):
        parts[gate_up] |= {"split": 2, "split_dim": int(layout["is_transposed"])}
    return parts


def _of_transformers(module: nn.Module, ending: str, home: str = "models") -> bool:
    """By the names of its classes, of which FSDP2 and parametrizations add one."""
    return any(
        kind.__module__.startswith(f"transformers.{home}") and kind.__name__.endswith(ending)
        for kind in type(module).__mro__
    )


def _is_experts(module: nn.Module) -> bool:
    """A mixture of experts that keeps the weights of all in one parameter."""
    return _of_transformers(module, "Experts")


def _is_router(module: nn.Module) -> bool:
    """A linear layer that chooses experts."""
    return _of_transformers(module, "Router")


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear layer that keeps its weight as [in, out]."""
    return _of_transformers(module, "Conv1D", "pytorch_utils")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def _is_weight(param: Tensor, modules: Iterable[nn.Module]) -> bool:
    return any(
        (isinstance(module, _ConvNd) or _is_linear(module)) and param is module.weight
        for module in modules
    )


def find_heads(model: nn.Module, adapters: Set[Tensor] = frozenset()) -> set[Tensor]:
    """The weights of the output layer.

    Models of transformers are asked: `get_output_embeddings`, else the layers with an output for
    each of the config's labels; one that is a backbone has none. Else it is the last linear layer,
    if others come before it and it does not sit inside one of several like blocks.
    """
    said = getattr(model, "get_output_embeddings", None)
    head = said() if callable(said) else None
    if isinstance(head, nn.Module):
        return head_weights(head)
    layers = {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and module.weight not in adapters
    }
    if _of_transformers(model, "PreTrainedModel", "modeling_utils"):
        labels = model.config.num_labels  # type: ignore[union-attr]
        found = [
            module
            for name, module in layers.items()
            if _outputs(module) == labels and not _in_repeated_block(model, name)
        ]
        if found or model.base_model is model:
            return {weight for module in found for weight in head_weights(module)}
    weights = [p for p in model.parameters() if p.ndim > 1 and p not in adapters]
    if not layers or len(weights) < 2:
        return set()
    name, last = list(layers.items())[-1]
    return set() if _in_repeated_block(model, name) else head_weights(last)


def _outputs(module: nn.Module) -> int:
    return int(module.weight.size(1 if _is_transposed(module) else 0))  # type: ignore


def head_weights(module: nn.Module) -> set[Tensor]:
    """A layer's weights, also where they are computed from others (weight norm, adapters)."""
    return {param for param in module.parameters() if param.ndim > 1}


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
