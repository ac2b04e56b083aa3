"""Exact scores against their definition: gradients by autograd, H as a matrix, in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.attribution.data import Data, Subject
from isokron.attribution.score import exact_scores, query_gradients
from isokron.curvature import Curvature, find_layers, fit
from isokron.curvature.layers import pack
from isokron.curvature.losses import CrossEntropy
from isokron.curvature.selection import Selection
from isokron.tasks import Examples

METHODS = ["kfac", "ekfac", "tkfac", "shampoo"]
LOSS = CrossEntropy()


class Words(nn.Module):
    """Tokens [N, S] → logits [N, S, 9]: an embedding, a norm, layers with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=0)
        self.norm = nn.LayerNorm(6)
        self.mix, self.head = nn.Linear(6, 8), nn.Linear(8, 9, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens)).cumsum(1)  # later positions see earlier ones
        return self.head(self.mix(x).tanh())


class Pictures(nn.Module):
    """[N, 2, 6, 6] → logits [N, 4]: a convolution in groups, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(2, 4, 3, stride=2, groups=2), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).tanh().flatten(1))


def case(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Examples]:
    torch.manual_seed(0)
    if name == "words":
        tokens, targets = torch.randint(0, 9, (2, 14, 5))
        targets[2, 3:] = -100
        return Words().to(dtype), Examples((tokens, targets))
    pictures = torch.randn(14, 2, 6, 6).to(dtype)
    return Pictures().to(dtype), Examples((pictures, torch.randint(0, 4, (14,))))


def batches(examples: Examples, size: int = 4) -> list[Any]:
    return [examples.batch(numbers) for numbers in torch.arange(len(examples)).split(size)]


def selected(model: nn.Module) -> Selection:
    return find_layers(model, "*")


def subject_of(model: nn.Module, loss: Any = LOSS) -> Subject:
    """The model with all its layers; batches are given one by one."""
    data = Data([0])
    return Subject(model, selected(model).layers, loss, data, torch.device("cpu"))


def fitted(name: str, method: str, dtype: torch.dtype = torch.float32) -> Curvature:
    model, examples = case(name, dtype)
    return fit(model, batches(examples), LOSS, method, selection=selected(model), dtype=dtype)


def dense_inverse(curvature: Curvature, name: str, damping: float) -> Tensor:
    """H⁻¹ of one layer as a matrix [B, oi, oi], from its definition."""
    operator = curvature[name]
    dense = operator.to_dense()
    level = damping * dense.diagonal(dim1=1, dim2=2).mean()
    if not hasattr(operator, "factors"):
        return torch.linalg.inv(dense + level * torch.eye(dense.size(1), dtype=dense.dtype))
    sides = [factor.to_dense() for factor in operator.factors]
    means = [side.diagonal(dim1=1, dim2=2).mean(1)[:, None, None] for side in sides]
    pi = (means[1] / means[0]).sqrt()
    eyes = [torch.eye(side.size(1), dtype=side.dtype) for side in sides]
    left = sides[0] + level.sqrt() / pi * eyes[0]
    right = sides[1] + level.sqrt() * pi * eyes[1]
    return torch.stack([torch.kron(a, b) for a, b in zip(left, right, strict=True)]).inverse()


def brute_force(name: str, method: str, damping: float) -> Tensor:
    """∇_qᵀ H⁻¹ ∇_t of all pairs of examples, summed over layers."""
    model, examples = case(name, torch.float64)
    curvature = fitted(name, method, torch.float64)
    params = dict(model.named_parameters())
    gradients = []
    for batch in batches(examples, 1):
        terms, weights = LOSS(model, batch)
        grads = torch.autograd.grad((terms * weights).sum(), list(params.values()))
        gradients.append(dict(zip(params, grads, strict=True)))
    total = torch.zeros(len(examples), len(examples), dtype=torch.float64)
    for layer in curvature:
        layout = curvature.layers[layer].layout
        rows = torch.stack([pack(layout, one) for one in gradients]).flatten(2).movedim(1, 0)
        total += (rows @ dense_inverse(curvature, layer, damping) @ rows.mT).sum(0)
    return total


def off(values: Tensor, right: Tensor) -> float:
    return float(torch.linalg.vector_norm(values - right) / torch.linalg.vector_norm(right))


@pytest.mark.parametrize("name", ["words", "pictures"])
@pytest.mark.parametrize("method", METHODS)
def test_scores_are_those_of_brute_force(name: str, method: str) -> None:
    model, examples = case(name)
    subject = subject_of(model)
    inverse = fitted(name, method).damped_inverse(0.1)
    queries = query_gradients(subject, batches(examples, 1), inverse)
    scores, losses, squares, _ = exact_scores(subject, batches(examples), queries, squares=True)
    right = brute_force(name, method, 0.1)
    assert off(scores, right) < 5e-6
    assert off(squares, right.diagonal()) < 5e-6
    layered = exact_scores(subject, batches(examples), queries, by_layer=True).scores
    assert off(layered.sum(1), right) < 5e-6
    terms, weights = LOSS(model, batches(examples, 14)[0])
    assert torch.allclose(losses, (terms * weights).reshape(14, -1).sum(1))


def test_scores_of_positions_add_up() -> None:
    model, examples = case("words")
    subject = subject_of(model)
    inverse = fitted("words", "kfac").damped_inverse(0.1)
    queries = query_gradients(subject, batches(examples, 1)[:3], inverse)
    tokens = exact_scores(subject, batches(examples, 14), queries, tokens=True).scores
    scores = exact_scores(subject, batches(examples), queries).scores
    assert tokens.shape == (3, 14, 5)
    assert off(tokens.sum(2), scores) < 1e-5


def test_short_queries_are_kept_as_rank_one_terms_and_long_ones_as_matrices() -> None:
    model = nn.Sequential(nn.Linear(30, 20))
    short = (torch.randn(1, 2, 30), torch.randint(0, 20, (1, 2)))
    long = (torch.randn(1, 40, 30), torch.randint(0, 20, (1, 40)))
    both = query_gradients(subject_of(model), [short, long], None).layers["0"]
    assert both.owner.tolist() == [0, 0]
    assert both.matrix_owner.tolist() == [1]


def test_queries_of_one_group_add_up() -> None:
    model, examples = case("words")
    subject = subject_of(model)
    alone = query_gradients(subject, batches(examples, 1)[:3], None)
    group = query_gradients(subject, batches(examples, 1)[:3], None, [0, 0, 0])
    together = exact_scores(subject, batches(examples), group).scores
    apart = exact_scores(subject, batches(examples), alone).scores
    assert off(together[0], apart.sum(0)) < 1e-5


def test_weights_of_terms_multiply_gradients_linearly() -> None:
    """A term of weight ½ counts half in a gradient, not by its root."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    batch = torch.randn(2, 4), torch.tensor([0, 2])

    def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return losses, torch.tensor([0.25, 1.0])

    subject = subject_of(model, weighted)
    queries = query_gradients(subject, [batch], None)
    scores, losses, *_ = exact_scores(subject, [batch], queries)
    terms, weights = weighted(model, batch)
    grads = []
    for k in range(2):
        parts = torch.autograd.grad(
            (terms * weights)[k], list(model.parameters()), retain_graph=True
        )
        grads.append(torch.cat([part.flatten() for part in parts]))
    rows = torch.stack(grads)
    assert off(scores[0], rows @ rows.sum(0)) < 1e-5
    assert torch.allclose(losses, terms * weights)


def test_a_mean_of_many_queries_holds_no_more_than_a_matrix_beside_its_terms() -> None:
    model, examples = case("words")
    subject = subject_of(model)
    inverse = fitted("words", "kfac").damped_inverse(0.1)
    asked = batches(examples, 1) * 20
    queries = query_gradients(subject, asked, inverse, groups=[0] * len(asked))
    for layer in subject.layers:
        if layer.kind == "index":  # an embedding's matrix would be of the vocabulary's size
            continue
        held = queries.layers[layer.name]
        numbers = held.matrices.numel()
        if len(held.owner):
            numbers += held.left.numel() + held.right.numel()
        assert numbers <= 2 * layer.parameters, layer.name
    scores = exact_scores(subject, batches(examples), queries).scores[0]
    assert off(scores, 20 * brute_force("words", "kfac", 0.1).sum(0)) < 5e-6
