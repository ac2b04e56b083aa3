"""Padding is no data: it changes no curvature, and neither does the size of batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvature_naive import EXACT
from isokron import NaturalGradient
from isokron.curvature import CrossEntropy, fit

WORDS, WIDTH = 7, 4
SIDES = {"right": 0.0, "left": 1.0, "both": 0.5}


class Reader(nn.Module):
    """Attention and a block with dead units, to which padding, word 0, is nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.mix = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1)
        self.up, self.head = nn.Linear(WIDTH, 6), nn.Linear(6, WORDS)
        self.up.bias.data -= 0.2  # of some words, nothing gets through

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.table(words))
        x = x + self.mix(x, x, x, key_padding_mask=words == 0, need_weights=False)[0]
        return self.head(self.up(self.conv(x.mT).mT).relu())


class Cumulative(nn.Module):
    """Tokens, of which later ones read earlier ones: gradients go back through positions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).cumsum(1))


class Likeliest(CrossEntropy):
    """Draws that do not depend on the batch."""

    def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        return outputs.argmax(-1)


def scores(model: nn.Module, words: Tensor) -> tuple[Tensor, Tensor]:
    """Targets that no shift cuts from the words, so that padding may be on any side."""
    return model(words), torch.where(words == 0, -100, (words * 3) % WORDS)


def by_example(model: nn.Module, words: Tensor) -> Tensor:
    outputs, targets = scores(model, words)
    return functional.cross_entropy(outputs.mT, targets, reduction="none").sum(1)


def of_first(model: nn.Module, words: Tensor) -> Tensor:
    """One prediction of an example, at its first word: no other gradient at the last layers."""
    outputs, targets = scores(model, words)
    first = (words != 0).int().argmax(1)
    rows = torch.arange(len(words))
    return functional.cross_entropy(outputs[rows, first], targets[rows, first], reduction="none")


def padded(documents: list[Tensor], side: str, more: int = 0) -> Tensor:
    size = more + max(map(len, documents))
    rows = []
    for document in documents:
        before = round(SIDES[side] * (size - len(document)))
        rows.append(functional.pad(document, (before, size - len(document) - before)))
    return torch.stack(rows)


def documents() -> list[Tensor]:
    return [torch.randint(1, WORDS, (size,)) for size in (2, 5, 1, 3, 5, 4, 2, 3, 5, 1, 4, 2)]


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac", "shampoo"])
def test_curvature_is_the_same_for_any_padding_and_batch(
    method: str, side: str, sharing: str
) -> None:
    model, data = Reader().double(), documents()
    alone, together = [row[None] for row in data], [padded(data[:5], side), padded(data[5:], side)]
    losses: list[tuple[Any, str]] = [(by_example, "empirical"), (of_first, "empirical")]
    losses += [(Likeliest(scores), fisher) for fisher in ("empirical", "sampled", "exact")]
    # gradients of keys sum to zero over positions: their eigenbasis would be one of rounding
    layers = "*,!mix.k" if sharing == "reduce" else "*"
    options: dict[str, Any] = {"sharing": sharing, "layers": layers, "dtype": torch.float64}
    for loss, fisher in losses:
        want, found = (
            fit(model, x, loss, method, fisher=fisher, **options) for x in (alone, together)
        )
        assert len(want) == (8 if sharing == "reduce" else 9)
        for layer in want:
            torch.testing.assert_close(found[layer].to_dense(), want[layer].to_dense(), **EXACT)


def test_terms_by_example_and_by_position_have_the_same_inputs() -> None:
    model, words = Reader().double(), padded(documents(), "right")
    losses: list[Any] = [by_example, CrossEntropy(scores)]
    one, other = (fit(model, [words], loss, dtype=torch.float64).layers for loss in losses)
    for name, layer in one.items():
        if "input" in layer.statistics:
            torch.testing.assert_close(
                layer.statistics["input"], other[name].statistics["input"], **EXACT
            )


class Lookup(nn.Module):
    """Values, and queries by two matrices, of which the first position has no use."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.value = nn.Linear(4, 2), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        use = (torch.arange(x.size(1)) > 0)[:, None].to(x)
        return self.value(x) + (self.up(self.down(x)) * use)[..., :3]


def test_positions_of_layers_with_the_same_input_count_alike() -> None:
    model, x = Lookup().double(), torch.randn(3, 4, 4).double()
    found = fit(model, [(x, torch.randint(3, (3, 4)))], CrossEntropy(), dtype=torch.float64)
    for name, inputs in {"down": x, "up": model.down(x).detach(), "value": x}.items():
        rows = torch.cat([inputs, torch.ones(3, 4, 1)], 2).flatten(0, 1)
        side = found.layers[name].statistics["input"][0]
        torch.testing.assert_close(side, rows.T @ rows / 12, **EXACT)


def test_every_vector_counts_even_if_a_relu_passes_nothing_on() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU(), nn.Linear(1, 3))
    model[0].weight.data[:] = 1.0
    model[0].bias.data[:] = 0.0
    x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
    found = fit(model, [(x, torch.tensor([0, 1]))], CrossEntropy()).layers["0"].statistics
    ones = torch.cat([x, torch.ones(2, 1)], 1)
    torch.testing.assert_close(found["input"][0], ones.T @ ones / 2)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_padding_changes_no_step_of_natural_gradient(fisher: str, side: str) -> None:
    weights = []
    for more in (0, 3):
        torch.manual_seed(0)
        model, words = Reader().double(), padded(documents(), side, more)
        optimizer = NaturalGradient(model, fisher=fisher, loss=Likeliest(), damping=0.1, layers="*")
        for _ in range(2):
            optimizer.zero_grad()
            outputs, targets = scores(model, words)
            if fisher != "empirical":
                optimizer.observe(outputs, targets)
            functional.cross_entropy(outputs.mT, targets, reduction="none").sum(1).mean().backward()
            optimizer.step()
        weights.append(torch.cat([param.detach().flatten() for param in model.parameters()]))
    torch.testing.assert_close(weights[0], weights[1], **EXACT)


def test_a_prompt_without_losses_keeps_the_gradients_that_come_to_it() -> None:
    model, x = Cumulative().double(), torch.randn(4, 3, 2).double()
    t = torch.randint(3, (4, 3))
    t[:, :2] = -100  # only the last token has a loss, which reads all others
    found = fit(model, [(x, t)], CrossEntropy(), dtype=torch.float64)
    hidden = model.first(x)
    scores = model.last(torch.tanh(hidden).cumsum(1))
    g = torch.autograd.grad(
        functional.cross_entropy(scores[:, 2], t[:, 2], reduction="sum"), hidden
    )
    rows = g[0].flatten(0, 1)
    torch.testing.assert_close(
        found.layers["first"].statistics["output"][0], rows.T @ rows / 4, **EXACT
    )
    ones = torch.cat([x, torch.ones(4, 3, 1)], 2).flatten(0, 1)
    torch.testing.assert_close(
        found.layers["first"].statistics["input"][0], ones.T @ ones / 12, **EXACT
    )


@pytest.mark.parametrize("policy", ["dense", "all"])
@pytest.mark.parametrize("method", ["kfac", "tkfac", "shampoo"])
def test_a_layer_behind_a_weight_that_begins_at_zero_has_curvature_zero(
    method: str, policy: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3, bias=False))
    nn.init.zeros_(model[1].weight)  # as of an adapter
    data = torch.randn(6, 4, 4), torch.randint(3, (6, 4))
    curvature = fit(model, [data, data], CrossEntropy(), method, policy=policy)
    assert curvature.trace()["0"] == 0 < curvature.trace()["1"]
    moved = curvature.inverse(0.1)["0"].apply(torch.ones(1, 5, 5))
    torch.testing.assert_close(moved, torch.full((1, 5, 5), 10.0))
    if method == "shampoo":
        return
    optimizer = NaturalGradient(model, method=method, policy=policy)
    for _ in range(3):
        optimizer.zero_grad()
        functional.cross_entropy(model(data[0]).mT, data[1]).backward()
        optimizer.step()
    assert all(bool(param.isfinite().all()) for param in model.parameters())
