"""Errors of curvature say what was wrong, where, and what to do about it."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvature_naive import CLASSES, CROSS_ENTROPY, batched, labels
from isokron.curvature import capture, find_layers, fit
from isokron.curvature.check import check_layers
from isokron.curvature.selection import LeftOut

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, CLASSES))


def data() -> list[Any]:
    return batched(torch.randn(4, 3), labels(4))


def plain(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_named_by_its_example(method: str, value: float) -> None:
    x, y = torch.randn(4, 3), labels(4)
    x[2, 1] = value
    with pytest.raises(FloatingPointError, match="example 0 of batch 1 has a loss of nan"):
        fit(network(), batched(x, y), CROSS_ENTROPY, method)


def test_a_layer_whose_gradients_overflow_is_named() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        hidden = model[0](batch[0])
        return model[2](model[1](hidden)).sum(1) + 1e30 * hidden.sum(1)  # 1e60 is past float32

    with pytest.raises(FloatingPointError, match="layer '0': output"):
        fit(network(), data(), loss)


@pytest.mark.parametrize("batches", [[], [(torch.zeros(0, 3), labels(0))]])
def test_no_data_is_an_error(batches: Any) -> None:
    with pytest.raises(ValueError, match="at least one loss term that counts"):
        fit(network(), batches, CROSS_ENTROPY)


def test_data_of_which_nothing_counts_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one loss term that counts"):
        fit(network(), [(torch.randn(2, 3), torch.full((2,), -100))], CROSS_ENTROPY)


def test_a_batch_without_examples_among_others_changes_nothing() -> None:
    model, given = network(), data()
    want = fit(model, given, CROSS_ENTROPY, "ekfac")
    found = fit(model, [(torch.zeros(0, 3), labels(0)), *given], CROSS_ENTROPY, "ekfac")
    for layer in want:
        torch.testing.assert_close(found[layer].to_dense(), want[layer].to_dense())


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Linear(3, CLASSES), nn.Linear(3, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


@pytest.mark.parametrize("method", METHODS)
def test_a_layer_that_is_never_used_is_named(method: str) -> None:
    with pytest.raises(
        ValueError, match=r"no gradient ever came to idle.*leave it out by layers='!id"
    ):
        fit(Unused(), data(), CROSS_ENTROPY, method)
    assert list(fit(Unused(), data(), CROSS_ENTROPY, method, layers="!idle")) == ["used"]
    assert list(fit(Unused(), data(), CROSS_ENTROPY, method, layers="used")) == ["used"]


def test_a_loss_that_uses_no_layer_is_an_error() -> None:
    with pytest.raises(ValueError, match="does not depend on any of the layers observed"):
        fit(network(), data(), lambda model, batch: batch[0].sum(1))


LOSSES: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean": (lambda m, b: plain(m, b).mean(), "one loss a term.*got a scalar; use reduction="),
    "a number": (lambda m, b: plain(m, b).mean().item(), "one loss a term.*got float"),
    "weights of another shape": (
        lambda m, b: (plain(m, b), torch.ones(len(b[0]), 1)),
        r"weights in the shape of its terms \(2,\), got \(2, 1\)",
    ),
    "negative weights": (
        lambda m, b: (plain(m, b), -torch.ones(len(b[0]))),
        "weights of loss terms must be at least 0, got -1",
    ),
    "three things": (lambda m, b: (plain(m, b),) * 3, "terms, or .*, got 3 things"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_not_one_a_term_are_errors(name: str) -> None:
    loss, message = LOSSES[name]
    with pytest.raises(ValueError, match=message):
        fit(network(), data(), loss)


@pytest.mark.parametrize("argument", ["method", "fisher", "sharing"])
def test_unknown_choices_are_errors(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be one of .*, got 'other'"):
        fit(network(), data(), CROSS_ENTROPY, **{argument: "other"})


def test_batches_to_go_over_once_are_an_error_for_ekfac_only() -> None:
    model, given = network(), data()
    with pytest.raises(ValueError, match=r"something to go over twice.*got generator"):
        fit(model, (batch for batch in given), CROSS_ENTROPY, "ekfac")
    once = fit(model, (batch for batch in given), CROSS_ENTROPY)
    for layer, want in fit(model, given, CROSS_ENTROPY).items():
        assert torch.equal(once[layer].to_dense(), want.to_dense())


@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_a_plain_loss_has_no_distribution(fisher: str) -> None:
    with pytest.raises(ValueError, match=f"fisher='{fisher}' needs a loss that knows its distrib"):
        fit(network(), data(), plain, fisher=fisher)


def test_a_model_without_known_layers_is_an_error() -> None:
    for model in (
        nn.Sequential(nn.Tanh()),
        nn.Sequential(nn.LayerNorm(3, elementwise_affine=False)),
    ):
        with pytest.raises(ValueError, match="no layer to observe in Sequential"):
            fit(model, data(), CROSS_ENTROPY)


def test_a_pattern_that_matches_nothing_is_an_error_that_names_near_ones() -> None:
    model = Unused()
    for wrong in ("usde", "!usde", ["idle", "usde"], "idle,!usde"):
        with pytest.raises(ValueError, match=r"layers: '!?usde' matches no module.*are used"):
            fit(model, data(), CROSS_ENTROPY, layers=wrong)
    with pytest.raises(ValueError, match="at least one pattern, got \\[\\]"):
        fit(model, data(), CROSS_ENTROPY, layers=[])
    with pytest.raises(ValueError, match=r"no layer to observe.*idle \(excluded"):
        fit(model, data(), CROSS_ENTROPY, layers="!idle,!used")


class Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)) * self.scale)


def test_layers_of_unknown_types_are_in_the_summary_and_not_warned_of() -> None:
    model = Partly()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(fit(model, data(), CROSS_ENTROPY, "ekfac")) == ["first", "head"]
        with capture(model):
            pass
    summary = find_layers(model).summary()
    assert summary == (
        "covers 31 of 40 parameters; left out: the model itself (Partly), norm (BatchNorm1d)"
    )


def test_a_layer_used_on_different_numbers_of_examples_is_named() -> None:
    class Uneven(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + self.layer(x[:1])

    with pytest.raises(ValueError, match=r"layer 'layer': 1 rows for 2 examples.*layers='!layer'"):
        fit(Uneven(), data(), CROSS_ENTROPY)


@pytest.mark.parametrize("places", [torch.arange(3), torch.arange(3)[None]])
def test_positions_that_all_examples_share_are_found_in_the_first_batch(places: Tensor) -> None:

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.places = nn.Embedding(5, 4), nn.Embedding(3, 4)
            self.head = nn.Linear(4, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.tokens(x) + self.places(places))

    given = [(torch.randint(5, (2, 3)), torch.randint(CLASSES, (2, 3)))]
    with pytest.raises(ValueError, match=r"layer 'places': .* cannot be told apart.*'!places'"):
        fit(Positions(), given, CROSS_ENTROPY, "ekfac", layers="*")
    model = Positions()
    selection = check_layers(model, given[0], CROSS_ENTROPY, find_layers(model, "*"))
    assert [layer.name for layer in selection.layers] == ["tokens", "head"]
    rows = places.size(0)
    assert selection.left_out == [
        LeftOut("places", f"{rows} rows for 2 examples cannot be told apart by example", 12)
    ]
    fit(Positions(), given, CROSS_ENTROPY, "ekfac", layers="*,!places")
