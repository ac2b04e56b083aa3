"""One use of a layer: its inputs and the gradients of its outputs, by example and position."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from isokron.curvature.layers import Layer, embedding_scale, epsilon_of


@dataclass(frozen=True, eq=False)
class Event:
    """One use of a layer.

    inputs: [B, N, S, i], or numbers of columns [B, N, S]; grads: of its outputs, [B, N, S, o]. Of
    an expert, every token routed to it is an example: `tokens` [N] are their numbers among all
    `count` tokens of the batch; regrouped by example, [N, S] are their positions in it, and −1
    where rows were filled up. vector: outputs have no dimension of positions. source: equal for
    layers of the same input, and for those right behind them.
    """

    layer: Layer
    inputs: Tensor
    grads: Tensor
    tokens: Tensor | None = None
    count: int = 0
    vector: bool = False
    source: tuple[int, ...] = ()


def inputs_of(layer: Layer, x: Tensor) -> Tensor:
    """[B, N, S, i] without the one of a bias; an index is [B, N, S], −1 for none."""
    module: Any = layer.module
    if layer.kind == "index":
        index = x.reshape(1, x.size(0) if x.ndim else 1, -1)
        padding = module.padding_idx
        return index if padding is None else index.masked_fill(index == padding, -1)
    if layer.kind == "diagonal":
        # y = w ⊙ x̂ + b, or (1 + w) ⊙ x̂, whose gradients are the same
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if isinstance(module, nn.LayerNorm):
            normalized = functional.layer_norm(x, module.normalized_shape, eps=module.eps)
        elif isinstance(module, nn.GroupNorm):
            normalized = functional.group_norm(x, module.num_groups, eps=module.eps)
        else:
            normalized = functional.rms_norm(x, module.weight.shape, eps=epsilon_of(module))
        return outputs_of(layer, normalized)
    return _patches(module, x) if isinstance(module, _ConvNd) else outputs_of(layer, x)


def outputs_of(layer: Layer, y: Tensor) -> Tensor:
    """[N, ..., o] → [B, N, S, o]. A vector is one position of one example."""
    module: Any = layer.module
    if isinstance(module, _ConvNd):
        y = _batched(module, y).flatten(2).mT  # [N, S, channels]
        if layer.kind == "diagonal":
            return y[None]
        return y.unflatten(2, (module.groups, -1)).movedim(2, 0)
    if isinstance(module, nn.GroupNorm):
        return y.reshape(*y.shape[:2], -1).mT[None]  # [1, N, S, channels]
    if layer.kind == "diagonal" and isinstance(module, nn.LayerNorm | nn.RMSNorm):
        y = y.flatten(-module.weight.ndim)
    scale = embedding_scale(module)
    y = y if scale is None else y * scale
    return y.reshape(1, len(y) if y.ndim > 1 else 1, -1, y.size(-1))


def as_use_of(owner: Layer, event: Event) -> Event:
    """A use of a layer by the matrix W of another that has the same weight.

    Where W has the layer's outputs as its inputs, g̃āᵀ becomes (ā|g̃|/√i)(√i g̃/|g̃|)ᵀ: the same
    gradient, of inputs of about the size of activations, so that K-FAC's sums over uses agree.
    """
    layer, inputs, grads = event.layer, event.inputs, event.grads
    if layer.layout == owner.layout:
        return replace(event, layer=owner)
    grads = grads.to(torch.promote_types(grads.dtype, torch.float32))
    if layer.kind == "index":
        places = inputs.clamp_min(0)[..., None]
        hot = grads.new_zeros(*inputs.shape, layer.columns)
        inputs = hot.scatter_(-1, places, (inputs >= 0)[..., None].to(grads.dtype))
    if layer.layout.transposed == owner.layout.transposed:
        return replace(event, layer=owner, inputs=inputs, grads=grads)
    length = torch.linalg.vector_norm(grads, dim=-1, keepdim=True) / grads.size(-1) ** 0.5
    turned = grads / length.clamp_min(torch.finfo(grads.dtype).tiny)
    return replace(event, layer=owner, inputs=turned, grads=inputs * length)


def _patches(conv: _ConvNd, x: Tensor) -> Tensor:
    """The input under the kernel at every position of the output: [groups, N, S, i]."""
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    x = functional.pad(_batched(conv, x), conv._reversed_padding_repeated_twice, mode=mode)
    sizes = zip(conv.kernel_size, conv.stride, conv.dilation, strict=True)
    for dim, (width, step, gap) in enumerate(sizes, 2):
        # unfold has all taps of a dilated kernel and those between them
        x = x.unfold(dim, gap * (width - 1) + 1, step)[..., ::gap]
    order = len(conv.kernel_size)
    patches = x.movedim(1, 1 + order)  # [N, places..., channels, taps...]
    flat = patches.flatten(1, order).flatten(2)  # [N, S, channels · taps]
    return flat.unflatten(2, (conv.groups, -1)).movedim(2, 0)


def _batched(conv: _ConvNd, x: Tensor) -> Tensor:
    return x[None] if x.ndim == len(conv.kernel_size) + 1 else x


def expert_events(
    layers: list[Layer], x: Tensor, index: Tensor, weights: Tensor, grad: Tensor
) -> Iterator[Event]:
    """What each expert's two products see, computed again: the module makes them in one kernel.

    y_t = Σ_k w_tk · W_down gate(W_up x_t), with expert index_tk in slot k of token t.
    x, grad: [T, d]; index, weights: [T, K].
    """
    module: Any = layers[0].module
    by_name = {tuple(layer.name.split(".")[-2:]): layer for layer in layers}
    up, slots = "gate_up_proj" if module.has_gate else "up_proj", index.size(1)
    x, flat = x.detach(), index.flatten()
    # routers that spread experts over ranks mark what is elsewhere by numbers past the last
    counts = torch.bincount(flat, minlength=module.down_proj.size(0)).tolist()
    for expert, rows in enumerate(flat.argsort(stable=True).split(counts)):
        pair = by_name.get((str(expert), up)), by_name.get((str(expert), "down_proj"))
        if not len(rows) or pair == (None, None):
            continue
        tokens = rows // slots
        inputs = x[tokens]
        bias = getattr(module, f"{up}_bias")[expert].detach() if module.has_bias else None
        up_weight, down_weight = (
            # [o, i], the layout of a linear layer
            weight.detach().mT if module.is_transposed else weight.detach()
            for weight in (getattr(module, up)[expert], module.down_proj[expert])
        )
        hidden = functional.linear(inputs, up_weight, bias)
        # only the gate is differentiated: the two products are known
        with torch.enable_grad():
            hidden.requires_grad_()
            gated = module._apply_gate(hidden) if module.has_gate else module.act_fn(hidden)
        grads = (grad[tokens] * weights.detach().flatten()[rows, None]).to(gated.dtype)
        (hidden_grads,) = torch.autograd.grad(gated, hidden, grads @ down_weight)
        for layer, a, g in zip(pair, (inputs, gated.detach()), (hidden_grads, grads), strict=True):
            if layer is not None:
                yield Event(layer, a[None, :, None], g[None, :, None], tokens, len(x))


def by_example(event: Event, examples: int | None, terms: int = 0) -> Event:
    """An event with as many examples as the batch.

    Layers that see flattened tokens have N·S rows, example by example; experts have those routed to
    them, which come side by side by example, with zeros up to the longest.
    """
    rows = event.grads.size(1)
    if examples is None or (event.tokens is None and rows == examples):
        return event
    count = rows if event.tokens is None else event.count
    # fewer positions than loss terms: as of an embedding of positions that all examples share
    if examples == 0 or count % examples or count * event.grads.size(2) < max(examples, terms):
        name = event.layer.name
        raise ValueError(
            f"layer {name!r}: {count} rows for {examples} examples cannot be told apart by "
            f"example; give it an input for every example, or leave it out by layers='!{name}'"
        )
    if event.tokens is None:
        inputs, grads = (
            x.flatten(1, 2).unflatten(1, (examples, -1)) for x in (event.inputs, event.grads)
        )
        return replace(event, inputs=inputs, grads=grads)
    length = count // examples
    # tokens are in rising order, so that those of an example are neighbours
    example = event.tokens // length
    sizes = torch.bincount(example, minlength=examples)
    place = torch.arange(rows, device=example.device) - (sizes.cumsum(0) - sizes)[example]
    shape = (examples, int(sizes.max()))

    def filled(x: Tensor) -> Tensor:
        padded = x.new_zeros(len(x), *shape, x.size(-1))
        padded[:, example, place] = x[:, :, 0]
        return padded

    positions = event.tokens.new_full(shape, -1)
    positions[example, place] = event.tokens % length
    return Event(event.layer, filled(event.inputs), filled(event.grads), positions, length)
