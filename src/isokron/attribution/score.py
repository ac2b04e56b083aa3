"""Exact influence ⟨∇_q, H⁻¹∇_t⟩ of training examples t on queries q, in passes over the data.

A layer's gradient is Σ g̃āᵀ over the positions of an example. Where H = G ⊗ A, a query's H⁻¹∇_q is
Σ (G⁻¹g̃)(A⁻¹ā)ᵀ, a sum of as few rank-one terms u vᵀ as the query has positions, and

    ⟨∇_q, H⁻¹∇_t⟩ = Σ_r Σ_s (u_r · g̃_s)(v_r · ā_s)

needs neither gradient as a matrix: a query of R positions costs R(o + i) instead of oi per training
position. An embedding's ā is one-hot, so v_r · ā_s compares token ids. Koh & Liang 1703.04730,
Grosse et al. 2308.03296.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isokron.attribution.data import Subject
from isokron.curvature import Curvature
from isokron.curvature.backward import Passes, refuse_nonfinite
from isokron.curvature.layers import Layer
from isokron.curvature.statistics import Uses
from isokron.operators import Diagonal, Kron, KronEigen

CHUNK = 2**22  # entries of per-example gradients, or of kernels, computed at a time
SLACK = 4  # rank-one terms are replaced by matrices of at most 4 times their memory


class LayerQueries:
    """H⁻¹∇ of all queries at one layer: rank-one terms u vᵀ, or matrices where these are smaller.

    Filled by `add` and `finish`. left: u [B, R, o]; right: v [B, R, i], or token ids [R] of an
    embedding; owner [R]: the query of each term. matrices: [D, B, o, i] of the queries
    matrix_owner [D]. inverse: H⁻¹ of the layer, None for the identity.
    """

    left: Tensor
    right: Tensor

    def __init__(self, layer: Layer, inverse: Any, device: torch.device) -> None:
        self.layer, self.inverse = layer, inverse
        # under EK-FAC, whose eigenvalues are no Kronecker product, H⁻¹∇ is not of low rank
        self.factored = inverse is None or isinstance(inverse, Kron)
        self.terms: list[tuple[int, Tensor, Tensor]] = []
        self.term_counts = Counter[int]()
        self.by_query: dict[int, Tensor] = {}
        self.owner = self.matrix_owner = torch.zeros(0, dtype=torch.int64, device=device)
        self.matrices = torch.zeros(0, *layer.shape, device=device)
        self.count = 0

    def add(self, query: int, uses: Uses) -> None:
        """Add one backward pass of a query; the gradients of all rows of its batch are summed."""
        _, outputs, inputs = self.layer.shape
        # positions without a gradient, such as padding, add no term
        reached = uses.grads.abs().amax((0, 3)).flatten().nonzero()[:, 0]
        # including earlier batches, since a mean of queries has several
        count = self.term_counts[query] + len(reached)
        small = count * (outputs + inputs) <= outputs * inputs
        if uses.kind == "index" or (uses.kind == "dense" and self.factored and small):
            self.term_counts[query] = count
            self.terms.append((query, *self._rank_one_terms(uses, reached)))
        else:
            total = gradient(self.layer, uses).sum(0)
            self._add_matrix(query, total if self.inverse is None else self.inverse.apply(total))

    def _rank_one_terms(self, uses: Uses, reached: Tensor) -> tuple[Tensor, Tensor]:
        """u and v of the positions that have a gradient."""
        grads = uses.grads.flatten(1, 2).index_select(1, reached)
        if uses.kind == "index":
            columns = uses.inputs.flatten()[reached]
            # −1 marks padding, and −2 equals no token
            return apply_to_columns(self.inverse, grads, columns), columns.where(columns >= 0, -2)
        rows = uses.written().inputs.flatten(1, 2).index_select(1, reached)
        if self.inverse is None:
            return grads, rows
        output, side = self.inverse.factors
        return output.apply(grads, -1), side.apply(rows, -1)

    def _add_matrix(self, query: int, matrix: Tensor) -> None:
        earlier = self.by_query.get(query)
        self.by_query[query] = matrix if earlier is None else earlier + matrix

    def finish(self, count: int) -> None:
        """Join the terms and matrices of all `count` queries into single tensors."""
        _, outputs, inputs = self.layer.shape
        device, self.count = self.owner.device, count
        size = sum(left.size(1) for _, left, _ in self.terms) * (outputs + inputs)
        matrix = outputs * inputs
        # with many terms, matrices are less work and may take a little more memory
        if self.layer.kind == "dense" and size > 2 * matrix and count * matrix <= SLACK * size:
            for query, left, right in self.terms:
                self._add_matrix(query, left.mT @ right)
            self.terms.clear()
        if self.terms:
            owners = [query for query, left, _ in self.terms for _ in range(left.size(1))]
            self.owner = torch.tensor(owners, dtype=torch.int64, device=device)
            self.left = torch.cat([left for _, left, _ in self.terms], 1)
            dim = 0 if self.layer.kind == "index" else 1
            self.right = torch.cat([right for _, _, right in self.terms], dim)
        if self.by_query:
            self.matrix_owner = torch.tensor(list(self.by_query), device=device)
            self.matrices = torch.stack(list(self.by_query.values()))
        # freed now, not when all layers are finished
        self.terms, self.by_query = [], {}

    def products(self, uses: Uses, tokens: bool = False) -> Tensor:
        """Scores of a batch: [Q, N], or [Q, N, S] by position."""
        _, examples, positions, _ = uses.grads.shape
        scores = uses.grads.new_zeros(self.count, examples * positions)
        if len(self.owner):
            self._add_terms_(scores, uses)
        result = scores.view(self.count, examples, positions)
        result = result if tokens else result.sum(2)
        if len(self.matrix_owner):
            dense = matrix_products(self.matrices, self.layer, uses, tokens)
            result = result.index_add(0, self.matrix_owner, dense)
        if tokens and uses.positions is not None:
            # tokens routed to an expert return to their positions; padding has a score of 0
            places = uses.positions.clamp_min(0).expand_as(result)
            total = result.new_zeros(self.count, examples, uses.length)
            return total.scatter_add(2, places, result)
        uses_of_all = 1 + len(self.layer.tied)
        if tokens and result.size(2) % uses_of_all == 0:
            # a position has one use by each layer with this weight
            return result.unflatten(2, (uses_of_all, -1)).sum(2)
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


def _inner(uses: Uses, right: Tensor) -> Tensor:
    """ā · v of all positions and terms, where ā includes the 1 of a bias: [B, P, R]"""
    inputs = uses.inputs.flatten(1, 2)
    if not uses.bias:
        return inputs @ right.mT
    return torch.baddbmm(right[:, None, :, -1], inputs, right[:, :, :-1].mT)


def matrix_products(matrices: Tensor, layer: Layer, uses: Uses, tokens: bool) -> Tensor:
    """⟨V, ∇⟩ of V [D, B, o, i] with the gradients of a batch: [D, N], or [D, N, S]."""
    count, positions = len(matrices), uses.grads.size(2)
    if uses.kind == "diagonal":
        rows = diagonal_rows(layer, uses)
        scores = torch.einsum("nsoi,qoi->qns", rows, matrices[:, 0])
    elif tokens or count * positions <= count + positions:
        # Σ_s g̃ᵀVā is less work than ∇ for few positions and queries
        uses = uses.written()
        parts = [(uses.grads @ v[:, None] * uses.inputs).sum((0, 3)) for v in matrices]
        scores = torch.stack(parts)
    else:
        flat = matrices.flatten(1)
        parts = [flat @ part.flatten(1).mT for part in _gradients_in_chunks(layer, uses)]
        return torch.cat(parts, 1)
    return scores if tokens else scores.sum(2)


def _gradients_in_chunks(layer: Layer, uses: Uses) -> Iterable[Tensor]:
    """`gradient` of a few examples at a time, at most CHUNK entries: [n, B, o, i]"""
    step = max(1, CHUNK // layer.parameters)
    for first in range(0, uses.grads.size(1), step):
        part = slice(first, first + step)
        yield gradient(layer, replace(uses, inputs=uses.inputs[:, part], grads=uses.grads[:, part]))


def gradient(layer: Layer, uses: Uses) -> Tensor:
    """Gradients of the examples of a batch as matrices; not for embeddings. [N, B, o, i]"""
    if uses.kind == "diagonal":
        return diagonal_rows(layer, uses).sum(1)[:, None]
    uses = uses.written()
    return (uses.grads.mT @ uses.inputs).movedim(0, 1)


def diagonal_rows(layer: Layer, uses: Uses) -> Tensor:
    """Gradients of a norm's weight and bias at every position: [N, S, o, d]"""
    parts = {"weight": uses.grads * uses.inputs, "bias": uses.grads}
    return torch.stack([parts[key][0] for key in layer.layout.params], 2)


def squared_length(layer: Layer, uses: Uses, inverse: Any) -> Tensor:
    """⟨∇, H⁻¹∇⟩ of every example at one layer: [N]"""
    _, outputs, inputs = layer.shape
    few = uses.grads.size(2) <= min(outputs, inputs)
    if uses.kind == "dense" and isinstance(inverse, Kron) and few:
        # products of pairs of positions are smaller than the gradient
        uses = uses.written()
        output, side = inverse.factors
        kernel = uses.grads @ output.apply(uses.grads, -1).mT  # [B, N, S, S]
        return (kernel * (uses.inputs @ side.apply(uses.inputs, -1).mT)).sum((0, 2, 3))
    if uses.kind == "index":
        columns, grads = uses.inputs[0], uses.grads  # [N, S], [1, N, S, o]
        turned = apply_to_columns(inverse, grads.flatten(1, 2), columns.flatten())
        same = (columns[:, :, None] == columns[:, None]) & (columns >= 0)[:, :, None]
        return ((grads @ turned.view_as(grads).mT)[0] * same).sum((1, 2))
    return torch.cat([_squares(part, inverse) for part in _gradients_in_chunks(layer, uses)])


def _squares(matrices: Tensor, inverse: Any) -> Tensor:
    """⟨∇, H⁻¹∇⟩ of gradients [N, B, o, i]: [N]"""
    if isinstance(inverse, KronEigen):
        # in the eigenbasis, without rotating back
        rotated = torch.stack([inverse.rotate(matrix) for matrix in matrices])
        return (inverse.eigenvalues * rotated.square()).flatten(1).sum(1)
    turned = [matrix if inverse is None else inverse.apply(matrix) for matrix in matrices]
    return (matrices * torch.stack(turned)).flatten(1).sum(1)


def apply_to_columns(inverse: Any, grads: Tensor, columns: Tensor) -> Tensor:
    """Vectors h with H⁻¹(g eᵀ) = h eᵀ, where e is the unit vector of a token. [1, P, o], [P]"""
    if inverse is None:
        return grads
    # the input side of an embedding is diagonal, so H⁻¹ acts on each column alone
    columns = columns.clamp_min(0)
    if isinstance(inverse, KronEigen):
        part: Kron | KronEigen = replace(inverse, eigenvalues=inverse.eigenvalues[..., columns])
    else:
        output, side = inverse.factors
        part = Kron((output, Diagonal(side.values[:, columns])))
    return part.apply(grads.mT).mT


@dataclass(eq=False)
class QueryGradients:
    """H⁻¹∇ of some queries by layer, and the losses of their forward passes.

    losses: of each query. token_losses: of each of its positions, empty if there are none.
    squares: ⟨∇, H⁻¹∇⟩ of each query, not for groups.
    """

    count: int
    layers: dict[str, LayerQueries] = field(default_factory=dict)
    squares: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    token_losses: list[list[float]] = field(default_factory=list)


def query_gradients(
    subject: Subject,
    batches: Sequence[Any],
    inverse: Curvature | None,
    groups: Sequence[int] | None = None,
    names: Sequence[str] = (),
) -> QueryGradients:
    """H⁻¹∇ of every query, from one batch each.

    groups: the query that each batch belongs to, whose gradients are summed; for the mean of
    queries, or the sum of some examples. names: of the queries, for errors.
    """
    owners = range(len(batches)) if groups is None else groups
    result = QueryGradients(count=max(owners, default=-1) + 1)
    for layer in subject.layers:
        operator = None if inverse is None else inverse[layer.name]
        result.layers[layer.name] = LayerQueries(layer, operator, subject.device)
    squares: list[Tensor] = []

    def fold(layer: Layer, uses: Uses) -> None:
        queries = result.layers[layer.name]
        queries.add(owners[len(result.losses)], uses)
        if groups is None:
            # rows of a batch are treated like positions of one example
            inputs, grads = (x.flatten(1, 2)[:, None] for x in (uses.inputs, uses.grads))
            joined = replace(uses, inputs=inputs, grads=grads)
            squares.append(squared_length(layer, joined, queries.inverse).sum())

    def after() -> None:
        if names and not passes.count:
            raise ValueError(
                f"query {names[len(result.losses)]!r:.60} has no loss term that counts; give it an "
                "example with a target that is not ignored"
            )
        result.squares.append(float(torch.stack(squares).sum()) if squares else 0.0)
        squares.clear()
        result.losses.append(float(passes.losses.sum()))
        by_token = passes.token_losses
        single = by_token is not None and len(by_token) == 1
        result.token_losses.append(by_token[0].tolist() if single and by_token is not None else [])

    passes = gradient_passes(subject, QueryBatches(batches, names))
    # a query that does not use a layer has a score of 0 there
    passes.over(fold, after, check=False)
    for layer_queries in result.layers.values():
        layer_queries.finish(result.count)
    return result


class QueryBatches(list[Any]):
    """Batches of queries, by whose names a loss that is not finite is refused."""

    def __init__(self, batches: Iterable[Any], names: Sequence[str]) -> None:
        super().__init__(batches)
        self.names = names

    def check_losses(self, number: int, losses: Tensor) -> None:
        name = self.names[number] if self.names else ""
        refuse_nonfinite(losses, lambda row: f"query {name!r:.60}", "ask without it")


def gradient_passes(subject: Subject, batches: Iterable[Any]) -> Passes:
    """Passes over ∇Σ wℓ of every layer; masked positions have g̃ = 0."""
    return Passes(subject.model, batches, subject.loss, subject.layers, weighting="linear")


class PassScores(NamedTuple):
    """Scores [Q, N], [Q, layers, N] by layer or [Q, N, S] by token.

    losses: of the examples, [N]. squares: ⟨∇, H⁻¹∇⟩ [N], or zeros. totals: with tokens, the scores
    of all layers, [Q, N].
    """

    scores: Tensor
    losses: Tensor
    squares: Tensor
    totals: Tensor | None = None


def exact_scores(
    subject: Subject,
    batches: Iterable[Any],
    queries: QueryGradients,
    *,
    by_layer: bool = False,
    tokens: bool = False,
    squares: bool = False,
) -> PassScores:
    """One pass over the examples, in the order of the batches; with `tokens`, of one batch."""
    scores: list[Tensor] = []
    losses: list[Tensor] = []
    lengths: list[Tensor] = []
    totals: list[Tensor] = []
    # of the current batch
    parts: dict[str, Tensor] = {}
    layer_squares: list[Tensor] = []

    def fold(layer: Layer, uses: Uses) -> None:
        examples, rows = len(passes.losses), uses.grads.size(1)
        if rows != examples:
            raise ValueError(
                f"layer {layer.name!r} has {rows} rows in a batch of {examples} examples, so its "
                f"gradients cannot be separated by example; exclude it: layers='!{layer.name}'"
            )
        layer_queries = queries.layers[layer.name]
        product = layer_queries.products(uses, tokens)
        parts[layer.name] = parts[layer.name] + product if layer.name in parts else product
        if squares:
            layer_squares.append(squared_length(layer, uses, layer_queries.inverse))

    def after() -> None:
        batch_losses = passes.losses.detach()
        shape = (queries.count, len(batch_losses), 1)[: 2 + tokens]
        # for a layer without a gradient, such as an expert without a token in this batch
        zeros = batch_losses.new_zeros(shape, dtype=passes.dtype)
        products = [parts.pop(layer.name, zeros) for layer in subject.layers]
        if tokens:
            totals.append(torch.stack([part.sum(2) for part in products]).sum(0))
            # a layer with fewer positions, as after pooling, has no scores by token
            most = max(part.size(2) for part in products)
            products = [part for part in products if part.size(2) == most]
        scores.append(torch.stack(products, 1) if by_layer else torch.stack(products).sum(0))
        losses.append(batch_losses)
        lengths.append(sum(layer_squares, torch.zeros_like(batch_losses, dtype=passes.dtype)))
        layer_squares.clear()

    passes = gradient_passes(subject, batches)
    passes.over(fold, after, check=False)
    if not scores:
        # a rank without batches
        empty = torch.zeros(0, device=subject.device)
        shape = (queries.count, len(subject.layers), 0) if by_layer else (queries.count, 0)
        return PassScores(empty.view(shape), empty, empty)
    joined = torch.cat(scores, 2 if by_layer else 1)
    joined_totals = torch.cat(totals, 1) if tokens else None
    return PassScores(joined, torch.cat(losses), torch.cat(lengths), joined_totals)
