"""Exact influence ⟨∇_q, H⁻¹∇_t⟩ of training examples t on queries q, in passes over the data.

A layer's gradient is Σ g̃āᵀ over the positions of an example. Where H = G ⊗ A, a query's H⁻¹∇_q is
Σ (G⁻¹g̃)(A⁻¹ā)ᵀ, a sum of as few rank-one terms u vᵀ as the query has positions, and

    ⟨∇_q, H⁻¹∇_t⟩ = Σ_r Σ_s (u_r · g̃_s)(v_r · ā_s)

needs neither gradient as a matrix: a short query costs R(o + i) a training position in place of oi.
An embedding's ā is one-hot, so v_r · ā_s is an equality of token numbers. Koh & Liang 1703.04730,
Grosse et al. 2308.03296.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature import Curvature
from isokron.curvature.backward import Passes
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss
from isokron.curvature.statistics import Uses
from isokron.operators import Diagonal, Kron

CHUNK = 2**22  # entries of per-example gradients, or of kernels, made at a time
SLACK = 4  # a sum of rank-one terms may become a matrix where that takes at most 4 times its memory


@dataclass(frozen=True, eq=False)
class LayerQueries:
    """H⁻¹∇ of all queries at one layer: rank-one terms, and matrices where these are smaller.

    left: u [B, R, o]; right: v [B, R, i], or token numbers [R] of an embedding; owner: [R], the
    query of each. matrices: [D, B, o, i] of the queries `matrix_owner` [D].
    """

    count: int
    owner: Tensor
    left: Tensor
    right: Tensor
    matrix_owner: Tensor
    matrices: Tensor

    def select(self, query: int) -> "LayerQueries":
        terms = (self.owner == query).nonzero()[:, 0]
        rows = (self.matrix_owner == query).nonzero()[:, 0]
        right = self.right.index_select(self.right.ndim - 2 if self.right.ndim > 1 else 0, terms)
        return LayerQueries(
            1,
            torch.zeros_like(terms),
            self.left.index_select(1, terms),
            right,
            torch.zeros_like(rows),
            self.matrices.index_select(0, rows),
        )

    def products(self, layer: Layer, uses: Uses, tokens: bool = False) -> Tensor:
        """Scores of a batch: [Q, N], or [Q, N, S] by position."""
        _, examples, positions, _ = uses.grads.shape
        scores = uses.grads.new_zeros(self.count, examples * positions)
        if len(self.owner):
            self._add_terms_(scores, uses)
        result = scores.view(self.count, examples, positions)
        result = result if tokens else result.sum(2)
        if len(self.matrix_owner):
            dense = matrix_products(self.matrices, layer, uses, tokens)
            result = result.index_add(0, self.matrix_owner, dense)
        if tokens and uses.positions is not None:
            return _in_place(result, uses.positions, uses.length)
        return result

    def _add_terms_(self, scores: Tensor, uses: Uses) -> None:
        grads = uses.grads.flatten(1, 2)  # [B, P, o]
        step = max(1, CHUNK // max(1, grads.size(1)))
        for first in range(0, len(self.owner), step):
            part = slice(first, first + step)
            kernel = grads @ self.left[:, part].mT  # [B, P, R]
            if uses.kind == "index":
                kernel *= uses.inputs.flatten(1)[:, :, None] == self.right[part]
            else:
                kernel *= _inner(uses, self.right[:, part])
            scores.index_add_(0, self.owner[part], kernel.sum(0).mT)


def _in_place(scores: Tensor, positions: Tensor, length: int) -> Tensor:
    """Scores of the tokens routed to an expert, where they are in their examples: [Q, N, length]"""
    total = scores.new_zeros(*scores.shape[:2], length)
    index = positions.clamp_min(0).expand_as(scores)  # filled up rows have a score of 0
    return total.scatter_add(2, index, scores)


def _inner(uses: Uses, right: Tensor) -> Tensor:
    """ā · v of all positions and terms, a bias's one included: [B, P, R]"""
    inputs = uses.inputs.flatten(1, 2)
    if not uses.bias:
        return inputs @ right.mT
    return torch.baddbmm(right[:, None, :, -1], inputs, right[:, :, :-1].mT)


def matrix_products(matrices: Tensor, layer: Layer, uses: Uses, tokens: bool) -> Tensor:
    """⟨V, ∇⟩ of V [D, B, o, i] with the gradients of a batch: [D, N], or [D, N, S]."""
    if uses.kind == "diagonal":
        rows = diagonal_rows(layer, uses)
        scores = torch.einsum("nsoi,qoi->qns", rows, matrices[:, 0])
        return scores if tokens else scores.sum(2)
    if uses.kind == "index":
        columns = uses.inputs[0].clamp_min(0)
        grads = uses.grads[0] * (uses.inputs[0] >= 0)[..., None]
        scores = torch.stack([(grads * matrix[0].mT[columns]).sum(-1) for matrix in matrices])
        return scores if tokens else scores.sum(2)
    uses = uses.written()
    positions, count = uses.grads.size(2), len(matrices)
    # Σ_s g̃ᵀVā is less work than ∇ where there are few positions and queries
    if tokens or count * positions <= count + positions:
        parts = [(uses.grads @ v[:, None] * uses.inputs).sum((0, 3)) for v in matrices]
        scores = torch.stack(parts)
        return scores if tokens else scores.sum(2)
    flat = matrices.flatten(1)
    step = max(1, CHUNK // max(1, flat.size(1)))
    pairs = zip(uses.grads.split(step, 1), uses.inputs.split(step, 1), strict=True)
    gradients = ((g.mT @ a).movedim(0, 1).flatten(1) for g, a in pairs)
    return torch.cat([flat @ gradient.mT for gradient in gradients], 1)


def diagonal_rows(layer: Layer, uses: Uses) -> Tensor:
    """Gradients of a norm's weight and bias at every position: [N, S, o, d]"""
    parts = {"weight": uses.grads * uses.inputs, "bias": uses.grads}
    return torch.stack([parts[key][0] for key in layer.layout.params], 2)


def gradient(layer: Layer, uses: Uses) -> Tensor:
    """Gradients of the examples of a batch as matrices: [N, B, o, i]"""
    if uses.kind == "diagonal":
        return diagonal_rows(layer, uses).sum(1)[:, None]
    if uses.kind == "index":
        columns = uses.inputs[0].clamp_min(0)
        grads = uses.grads[0] * (uses.inputs[0] >= 0)[..., None]
        total = grads.new_zeros(len(grads), layer.shape[2], grads.size(2))
        total.scatter_add_(1, columns[..., None].expand_as(grads), grads)
        return total.mT[:, None]
    uses = uses.written()
    return (uses.grads.mT @ uses.inputs).movedim(0, 1)


@dataclass(eq=False)
class QueryGradients:
    """H⁻¹∇ of some queries by layer, and what their forward passes said.

    losses: of each query; token_losses: of each of its positions, empty where it has none. squares:
    ⟨∇, H⁻¹∇⟩ of each, without groups.
    """

    layers: dict[str, LayerQueries] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    token_losses: list[list[float]] = field(default_factory=list)

    def select(self, query: int) -> "QueryGradients":
        """Those of one query."""
        layers = {name: part.select(query) for name, part in self.layers.items()}
        parts = self.squares, self.losses, self.token_losses
        return QueryGradients(layers, *([values[query]] for values in parts))  # type: ignore[arg-type]


class _Collector:
    """The terms and matrices of one layer, query by query."""

    def __init__(self, layer: Layer, inverse: Any, dense: bool) -> None:
        self.layer, self.inverse, self.dense = layer, inverse, dense
        self.left: list[Tensor] = []
        self.right: list[Tensor] = []
        self.owner: list[int] = []
        self.matrices: dict[int, Tensor] = {}

    def add(self, query: int, uses: Uses) -> None:
        """One backward pass of a query; all rows of its batch count together."""
        _, outputs, inputs = self.layer.shape
        factored = not self.dense and (self.inverse is None or isinstance(self.inverse, Kron))
        reached = uses.grads.abs().amax((0, 3)).flatten().nonzero()[:, 0]
        small = len(reached) * (outputs + inputs) <= outputs * inputs
        if uses.kind == "diagonal" or not factored or not (small or uses.kind == "index"):
            total = gradient(self.layer, uses).sum(0)
            turned = total if self.inverse is None else self.inverse.apply(total)
            earlier = self.matrices.get(query)
            self.matrices[query] = turned if earlier is None else earlier + turned
            return
        left, right = self._terms(uses, reached)
        self.left.append(left)
        self.right.append(right)
        self.owner += [query] * len(reached)

    def _terms(self, uses: Uses, reached: Tensor) -> tuple[Tensor, Tensor]:
        """u and v of the positions that a gradient has come to."""
        grads = uses.grads.flatten(1, 2).index_select(1, reached)
        output, side = (None, None) if self.inverse is None else self.inverse.factors
        left = grads if output is None else output.apply(grads, -1)
        if uses.kind == "index":
            columns = uses.inputs.flatten()[reached]
            if side is not None:
                assert isinstance(side, Diagonal)
                left = left * side.values[0][columns.clamp_min(0), None].to(left.dtype)
            return left, columns.where(columns >= 0, -2)  # −1 marks padding and equals no token
        rows = uses.written().inputs.flatten(1, 2).index_select(1, reached)
        return left, rows if side is None else side.apply(rows, -1)

    def finish(self, count: int, like: Tensor) -> LayerQueries:
        blocks, outputs, inputs = self.layer.shape
        terms = len(self.owner)
        matrix = outputs * inputs
        cheaper = terms * (outputs + inputs) > 2 * matrix
        fits = count * matrix <= SLACK * terms * (outputs + inputs)
        if self.layer.kind == "dense" and cheaper and fits:
            self._densify()
        owner = torch.tensor(self.owner, dtype=torch.int64, device=like.device)
        dim = 0 if self.layer.kind == "index" else 1
        left = torch.cat(self.left, 1) if self.left else like.new_zeros(blocks, 0, outputs)
        right = torch.cat(self.right, dim) if self.right else like.new_zeros(blocks, 0, inputs)
        numbers = torch.tensor(list(self.matrices), dtype=torch.int64, device=like.device)
        empty = like.new_zeros(0, blocks, outputs, inputs)
        matrices = torch.stack(list(self.matrices.values())) if self.matrices else empty
        # joined above: not held twice until all layers are finished
        self.left, self.right, self.owner, self.matrices = [], [], [], {}
        return LayerQueries(count, owner, left, right, numbers, matrices)

    def _densify(self) -> None:
        left, right = torch.cat(self.left, 1), torch.cat(self.right, 1)
        owner = torch.tensor(self.owner, device=left.device)
        for query in sorted(set(self.owner)):
            rows = (owner == query).nonzero()[:, 0]
            total = left.index_select(1, rows).mT @ right.index_select(1, rows)
            earlier = self.matrices.get(query)
            self.matrices[query] = total if earlier is None else earlier + total
        self.left, self.right, self.owner = [], [], []


def query_gradients(
    model: nn.Module,
    batches: Sequence[Any],
    loss: Loss | Likelihood,
    layers: list[Layer],
    inverse: Curvature | None,
    groups: Sequence[int] | None = None,
    dense: bool = False,
    names: Sequence[str] = (),
) -> QueryGradients:
    """H⁻¹∇ of every query. `groups`: the query that each batch belongs to; default: its own.

    A group of several batches adds up, which is how a mean query, or the sum of some examples, is
    made. dense: matrices only. names: of queries, to be refused by name if they have no loss.
    """
    alone = groups is None
    groups = range(len(batches)) if groups is None else groups
    collectors = {
        layer.name: _Collector(layer, None if inverse is None else inverse[layer.name], dense)
        for layer in layers
    }
    result = QueryGradients()
    like: list[Tensor] = []
    squares: list[Tensor] = []
    number = 0

    def fold(layer: Layer, uses: Uses) -> None:
        if not like:
            like.append(uses.grads.new_zeros(0))
        collector = collectors[layer.name]
        collector.add(groups[number], uses)
        if alone:  # all rows of a batch count together, as if they were positions of one
            squares.append(squared_length(layer, _joined(uses), collector.inverse).sum())

    def after() -> None:
        nonlocal number
        if names and not passes.count:
            raise ValueError(
                f"query {names[number]!r:.60} has no loss term that counts; give it an example "
                "with a target that is not ignored"
            )
        result.squares.append(float(torch.stack(squares).sum()) if squares else 0.0)
        squares.clear()
        result.losses.append(float(passes.losses.sum()))
        by_token = passes.token_losses
        one = by_token is not None and len(by_token) == 1
        result.token_losses.append(by_token[0].tolist() if one and by_token is not None else [])
        number += 1

    passes = gradient_passes(model, batches, loss, layers)
    passes.over(fold, after)
    count = max(groups) + 1
    for name, collector in collectors.items():
        result.layers[name] = collector.finish(count, like[0])
    return result


def gradient_passes(
    model: nn.Module, batches: Iterable[Any], loss: Loss | Likelihood, layers: list[Layer]
) -> Passes:
    """Passes that show every layer's part of ∇Σ wℓ; positions need no mask, their g̃ is 0."""
    return Passes(model, batches, loss, layers, weighting="linear")


def exact_scores(
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss | Likelihood,
    layers: list[Layer],
    queries: QueryGradients,
    *,
    by_layer: bool = False,
    tokens: bool = False,
    lengths: "SquaredLengths | None" = None,
) -> tuple[Tensor, Tensor]:
    """Scores and losses of all examples, in the order of the batches: [Q, N] and [N].

    by_layer: [Q, layers, N]; tokens: by position, [Q, N, S], of one batch. lengths: takes
    ⟨∇, H⁻¹∇⟩ of the examples in the same pass.
    """
    parts: dict[str, Tensor] = {}
    scores: list[Tensor] = []
    losses: list[Tensor] = []

    def fold(layer: Layer, uses: Uses) -> None:
        check_examples(layer, uses, passes)
        product = queries.layers[layer.name].products(layer, uses, tokens)
        earlier = parts.get(layer.name)
        parts[layer.name] = product if earlier is None else earlier + product
        if lengths is not None:
            lengths.take(layer, uses)

    def after() -> None:
        # layers that no gradient came to, such as an expert without a token in this batch
        zeros = passes.losses.new_zeros((count, len(passes.losses), 1)[: 2 + tokens], dtype=wide)
        shown = [parts.pop(layer.name, zeros) for layer in layers]
        if tokens:  # a layer of fewer positions, as after pooling, belongs to no token
            most = max(part.size(2) for part in shown)
            shown = [part for part in shown if part.size(2) == most]
        scores.append(torch.stack(shown, 1) if by_layer else torch.stack(shown).sum(0))
        losses.append(passes.losses.detach())
        if lengths is not None:
            lengths.after(passes.losses)

    passes = gradient_passes(model, batches, loss, layers)
    count, wide = next(iter(queries.layers.values())).count, passes.dtype
    passes.over(fold, after, check=False)
    if not scores:
        device = next(model.parameters()).device
        empty = torch.zeros(count, len(layers), 0, device=device)
        return (empty if by_layer else empty[:, 0]), torch.zeros(0, device=device)
    return torch.cat(scores, 2 if by_layer else 1), torch.cat(losses)


def check_examples(layer: Layer, uses: Uses, passes: Passes) -> None:
    examples, seen = len(passes.losses), uses.grads.size(1)
    if seen != examples:
        raise ValueError(
            f"layer {layer.name!r} saw {seen} examples in a batch of {examples}, so its gradients "
            f"cannot be told apart by example; leave it out: layers='!{layer.name}'"
        )


class SquaredLengths:
    """⟨∇, H⁻¹∇⟩ of every example, summed over layers, as passes go by."""

    def __init__(self, inverse: Curvature | None) -> None:
        self.inverse = inverse
        self.finished: list[Tensor] = []
        self.batch: Tensor | None = None

    def take(self, layer: Layer, uses: Uses) -> None:
        inverse = None if self.inverse is None else self.inverse[layer.name]
        squares = squared_length(layer, uses, inverse)
        self.batch = squares if self.batch is None else self.batch + squares

    def after(self, losses: Tensor) -> None:
        """The end of a batch of examples with these losses; without terms, no layer was seen."""
        batch = torch.zeros_like(losses, dtype=torch.float32) if self.batch is None else self.batch
        self.finished.append(batch)
        self.batch = None

    def total(self, device: torch.device | None = None) -> Tensor:
        """[N]; device: of an empty result, as of a rank without batches."""
        return torch.cat(self.finished) if self.finished else torch.zeros(0, device=device)


def squared_length(layer: Layer, uses: Uses, inverse: Any) -> Tensor:
    """⟨∇, H⁻¹∇⟩ of every example at one layer: [N]"""
    _, outputs, inputs = layer.shape
    if (
        uses.kind == "dense"
        and isinstance(inverse, Kron)
        and uses.grads.size(2) <= min(outputs, inputs)
    ):
        uses = uses.written()
        output, side = inverse.factors
        kernel = _gram(uses.grads, output.apply(uses.grads, -1))
        return (kernel * _gram(uses.inputs, side.apply(uses.inputs, -1))).sum((0, 2, 3))
    if uses.kind == "index" and (inverse is None or isinstance(inverse, Kron)):
        return _index_length(uses, inverse)
    total = []
    step = max(1, CHUNK // (layer.shape[0] * outputs * inputs))
    for first in range(0, uses.grads.size(1), step):
        part = slice(first, first + step)
        for matrix in gradient(layer, _examples(uses, part)):
            turned = matrix if inverse is None else inverse.apply(matrix)
            total.append((matrix * turned).sum())
    return torch.stack(total)


def _gram(rows: Tensor, turned: Tensor) -> Tensor:
    return rows @ turned.mT  # [B, N, S, S]


def _index_length(uses: Uses, inverse: Kron | None) -> Tensor:
    columns, grads = uses.inputs[0], uses.grads  # [N, S], [1, N, S, o]
    kernel = _gram(grads, grads if inverse is None else inverse.factors[0].apply(grads, -1))[0]
    same = (columns[:, :, None] == columns[:, None]) & (columns >= 0)[:, :, None]
    if inverse is not None:
        side = inverse.factors[1]
        assert isinstance(side, Diagonal)
        kernel = kernel * side.values[0][columns.clamp_min(0), None].to(kernel.dtype)
    return (kernel * same).sum((1, 2))


def _joined(uses: Uses) -> Uses:
    inputs, grads = (x.flatten(1, 2)[:, None] for x in (uses.inputs, uses.grads))
    return replace(uses, inputs=inputs, grads=grads, counted=None)


def _examples(uses: Uses, part: slice) -> Uses:
    return replace(uses, inputs=uses.inputs[:, part], grads=uses.grads[:, part], counted=None)
