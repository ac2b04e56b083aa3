"""Kinds of parameters, by the modules that hold them: matrices, embeddings, heads, norms, …"""

from collections.abc import Sequence, Set
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from isokron.block_layout import is_matrix
from isokron.optim.wrapped_models import unwrapped

NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
RECURRENT = {nn.LSTM: 4, nn.LSTMCell: 4, nn.GRU: 3, nn.GRUCell: 3}  # gates in one weight
LAYERS = (
    *(nn.Linear, nn.Bilinear, _ConvNd, nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase),
    ParametrizationList,
)


def find_kinds(model: nn.Module, heads: Set[Tensor] | None = None) -> dict[Tensor, str]:
    """The kind of every parameter; the output head is searched for unless its weights are given."""
    adapters = _adapters(model)
    heads = find_heads(model, adapters) if heads is None else heads

    def kind(param: Tensor, modules: Sequence[nn.Module]) -> str:
        if param in adapters:
            return "adapters"
        if any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in modules):
            return "embeddings"
        if any(isinstance(m, NORMS) or _of_transformers(m, "Norm") for m in modules):
            return "norms"
        if param in heads:
            return "heads"
        if any(_of_transformers(module, "Experts") for module in modules):
            return "matrices" if param.ndim == 3 else "vectors"  # [experts, n] are biases
        if not is_matrix(param.shape):
            weight = any(
                (isinstance(m, _ConvNd) or _is_linear(m)) and param is m.weight for m in modules
            )
            return "rows" if param.ndim > 1 and weight else "vectors"
        if any(isinstance(m, _ConvNd) and m.groups == m.in_channels > 1 for m in modules):
            return "filters"
        layer = any(
            isinstance(m, LAYERS) or _is_linear(m) or _of_transformers(m, "Router") for m in modules
        )
        return "matrices" if layer else "raw weights"

    return {param: kind(param, modules) for param, modules in _owners(model).items()}


def _owners(model: nn.Module) -> dict[Tensor, list[nn.Module]]:
    """The modules that hold a parameter or compute their own from it; a tied one has several."""
    owners: dict[Tensor, list[nn.Module]] = {}
    for module in model.modules():
        params = list(module.parameters(recurse=False))
        if is_parametrized(module):
            params += module.get_submodule("parametrizations").parameters()
        for param in params:
            owners.setdefault(param, []).append(module)
    return owners


def find_parts(model: nn.Module) -> dict[Tensor, dict[str, Any]]:
    """Settings of parameters that are several matrices, where a module's type says so."""
    parts: dict[Tensor, dict[str, Any]] = {}
    for module in model.modules():
        for param, settings in _parts(module).items():
            parts.setdefault(param, settings)  # a module comes before the layers inside it
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
        weights = [p for p in tensors.values() if p.ndim == 2 and p.size(0) == rows]
        return {weight: {"split": gates, "split_dim": 0} for weight in weights}
    if _is_transposed(module) or isinstance(module, _ConvTransposeNd):
        return {tensors["weight"]: {"split_dim": 1}} if "weight" in tensors else {}
    if _of_transformers(module, "Experts"):  # [experts, m, n]
        layout = vars(module)
        parts: dict[Tensor, dict[str, Any]] = {
            param: {"stacked": 1, "split_dim": int(layout.get("is_transposed", False))}
            for param in tensors.values()
            if param.ndim == 3
        }
        gate_up = tensors.get("gate_up_proj")
        if gate_up in parts and layout.get("has_gate") and layout.get("is_concatenated"):
            parts[gate_up]["split"] = 2
        return parts
    fused = dict(module.named_children()).get("c_attn")  # GPT-2's query, key and value side by side
    fused = None if fused is None else unwrapped(fused)
    if fused is not None and _is_transposed(fused) and _of_transformers(module, "Attention"):
        width, outputs = fused.weight.shape  # type: ignore[misc]
        if outputs % width == 0:
            return {fused.weight: {"split": outputs // width, "split_dim": 1}}  # type: ignore[dict-item]
    return {}


def _of_transformers(module: nn.Module, ending: str, home: str = "models") -> bool:
    """Whether a module is of a class of transformers, given by the end of its name."""
    # FSDP2 and parametrizations replace a module's class by a subclass
    return any(
        kind.__module__.startswith(f"transformers.{home}") and kind.__name__.endswith(ending)
        for kind in type(module).__mro__
    )


def _is_transposed(module: nn.Module) -> bool:
    """GPT-2's Conv1D: a linear layer whose weight is [in, out]."""
    return _of_transformers(module, "Conv1D", "pytorch_utils")


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or _is_transposed(module)


def find_heads(model: nn.Module, adapters: Set[Tensor] = frozenset()) -> set[Tensor]:
    """The weights of the output layer.

    Models of transformers are asked: `get_output_embeddings`, else the layers with one output for
    each of the config's labels; a backbone has none. In other models it is the last linear layer,
    if others come before it and it is not inside one of several similar blocks. A module whose
    parameters are all in one child (a wrapper, or a LightningModule) has that child's head.
    """
    get_head = getattr(model, "get_output_embeddings", None)
    head = get_head() if callable(get_head) else None
    if isinstance(head, nn.Module):
        return layer_weights(head)
    children = [child for child in model.children() if any(True for _ in child.parameters())]
    if len(children) == 1 and not any(True for _ in model.parameters(recurse=False)):
        return find_heads(children[0], adapters)
    layers = {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and module.weight not in adapters
    }
    if _of_transformers(model, "PreTrainedModel", "modeling_utils"):
        labels = model.config.num_labels  # type: ignore[union-attr]
        classifiers = [
            module
            for name, module in layers.items()
            if module.weight.size(int(_is_transposed(module))) == labels
            and not _in_repeated_block(model, name)
        ]
        if classifiers or model.base_model is model:
            return {weight for module in classifiers for weight in layer_weights(module)}
    weights = [p for p in model.parameters() if p.ndim > 1 and p not in adapters]
    if not layers or len(weights) < 2:
        return set()
    name, last = list(layers.items())[-1]
    return set() if _in_repeated_block(model, name) else layer_weights(last)


def layer_weights(module: nn.Module) -> set[Tensor]:
    """A layer's weights, also where they are computed from others (weight norm, adapters)."""
    return {param for param in module.parameters() if param.ndim > 1}


def _in_repeated_block(model: nn.Module, name: str) -> bool:
    """Whether a module around this one has a sibling of the same class and shapes."""

    def likeness(module: nn.Module) -> tuple[type, list[torch.Size]]:
        return type(module), [param.shape for param in module.parameters()]

    path = name.split(".")
    for depth in range(1, len(path)):
        parent = model.get_submodule(".".join(path[: depth - 1]))
        block = likeness(parent.get_submodule(path[depth - 1]))
        if sum(likeness(child) == block for child in parent.children()) > 1:
            return True
    return False


def _adapters(model: nn.Module) -> set[Tensor]:
    """LoRA pairs: trainable [r, n] and [m, r], r < min(m, n), beside a frozen weight [m, n].

    They are in the module that holds the weight (or wraps it) or in its containers of adapters.
    """
    pairs: set[Tensor] = set()
    containers = (nn.ModuleDict, nn.ParameterDict, nn.ParameterList, nn.ModuleList)
    for module in model.modules():
        near = list(module.parameters(recurse=False))
        for child in map(unwrapped, module.children()):
            if isinstance(child, containers):
                near += [p for layer in child.children() for p in layer.parameters(recurse=False)]
            near += child.parameters(recurse=False)
        matrices = [param for param in near if param.ndim == 2]
        trained = [param for param in matrices if param.requires_grad]
        for base in (param for param in matrices if not param.requires_grad):
            for down, up in permutations(trained, 2):
                product = (up.size(0), down.size(1))
                low_rank = up.size(1) == down.size(0) < min(base.shape)
                if low_rank and product in (base.shape, base.shape[::-1]):
                    pairs |= {down, up}
    return pairs
