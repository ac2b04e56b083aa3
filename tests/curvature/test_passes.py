"""Passes over data: the model is as before, weights count as they should, on any device."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from isokron.curvature import CrossEntropy, find_layers, fit
from isokron.curvature.backward import Passes
from isokron.curvature.check import check_layers
from isokron.curvature.layers import Layer
from isokron.curvature.selection import LeftOut
from isokron.curvature.statistics import Uses

EXAMPLES, LENGTH, WIDTH, CLASSES = 4, 3, 5, 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def batch(*shape: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(*shape, WIDTH).double(), torch.randint(CLASSES, shape)


def gradients(model: nn.Module, data: Any, loss: Any, **options: Any) -> dict[str, Tensor]:
    """Of examples, [N, o, i] by layer."""
    found: dict[str, Tensor] = {}

    def fold(layer: Layer, uses: Uses) -> None:
        uses = uses.written()
        found[layer.name] = torch.einsum("bnso,bnsi->noi", uses.grads, uses.inputs)

    layers = find_layers(model).layers
    Passes(model, [data], loss, layers, dtype=torch.float64, **options).over(fold)
    return found


class Mode(nn.Module):
    """Dropout, and a norm that learns from batches in training mode."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, 6), nn.BatchNorm1d(6)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, CLASSES)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.drop(self.norm(self.first(x))))
        if self.fails:
            raise ArithmeticError("in forward")
        return y


@pytest.mark.parametrize("fails", [False, True])
def test_passes_are_in_eval_mode_and_modes_are_restored(fails: bool) -> None:
    model, data = Mode(fails).double().train(), batch(EXAMPLES)
    model.head.eval()  # a mode of its own
    model.first.weight.requires_grad_(False)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    expected = pytest.raises(ArithmeticError) if fails else contextlib.nullcontext()
    for layers in (None, "*"):
        with expected:
            selection = find_layers(model, layers)
            check_layers(model, data, CrossEntropy(), selection)
            Passes(model, [data], CrossEntropy(), selection.layers).over(lambda layer, uses: None)
        modes = [m.training for m in (model, model.first, model.norm, model.drop, model.head)]
        assert modes == [True, True, True, True, False]
        assert [p.requires_grad for p in model.first.parameters()] == [False, True]
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
    if not fails:
        one, other = (gradients(model, data, CrossEntropy()) for _ in range(2))
        assert all(torch.equal(one[name], other[name]) for name in one)


def weighted(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    x, targets, weights = data
    terms = functional.cross_entropy(model(x).flatten(0, -2), targets.flatten(), reduction="none")
    return terms.view(targets.shape), weights


class Weighted(CrossEntropy):
    """A likelihood with weights of its own."""

    def weights(self, targets: Tensor) -> Tensor:
        return 0.25 * (1 + torch.arange(targets.numel()).view(targets.shape) % 3).double()


@pytest.mark.parametrize("kind", ["function", "likelihood"])
@pytest.mark.parametrize("weighting", ["linear", "sqrt"])
def test_weights_multiply_the_gradients_of_terms(kind: str, weighting: str) -> None:
    model, (x, targets) = network(), batch(EXAMPLES, LENGTH)
    weights = Weighted().weights(targets)
    data, loss = (
        ((x, targets, weights), weighted) if kind == "function" else ((x, targets), Weighted())
    )
    found = gradients(model, data, loss, weighting=weighting)
    for n in range(EXAMPLES):
        factor = weights[n] if weighting == "linear" else weights[n].sqrt()
        terms = functional.cross_entropy(model(x[n]), targets[n], reduction="none")
        grad = torch.autograd.grad((terms * factor).sum(), [model[0].weight, model[0].bias])
        want = torch.cat([grad[0], grad[1][:, None]], 1)
        torch.testing.assert_close(found["0"][n], want)


def test_losses_of_examples_and_of_their_tokens_are_recorded() -> None:
    model, (x, targets) = network(), batch(EXAMPLES, LENGTH)
    targets[1, 2] = targets[3] = -100
    want = functional.cross_entropy(model(x).mT, targets, reduction="none").detach()
    layers = find_layers(model).layers
    for loss in (CrossEntropy(), lambda m, d: CrossEntropy()(m, d)):
        passes = Passes(model, [(x, targets)], loss, layers)
        passes.over(lambda layer, uses: None)
        torch.testing.assert_close(passes.losses, want.sum(1))
        assert passes.token_losses is not None
        torch.testing.assert_close(passes.token_losses, want)


@pytest.mark.parametrize("ignored", [0, 2, LENGTH])
def test_terms_of_unmasked_tokens_in_one_dimension_are_refused(ignored: int) -> None:
    model, (x, targets) = network(), batch(EXAMPLES, LENGTH)
    targets[0, :ignored] = -100  # even a multiple of the examples would be terms of others

    def loss(model: nn.Module, data: Any) -> Tensor:
        counted = data[1] != -100
        return functional.cross_entropy(model(data[0])[counted], data[1][counted], reduction="none")

    message = r"one term an example, \[N\], or terms by example, \[N, S\], got shape .* weights"
    with pytest.raises(ValueError, match=message):
        fit(model, [(x, targets)], loss)


def test_no_gradient_is_added_to_a_module_outside_the_model() -> None:
    model, before, after = network(), nn.Linear(WIDTH, WIDTH), nn.Linear(CLASSES, CLASSES)
    before, after, data = before.double(), after.double(), batch(EXAMPLES)
    after.bias.grad = torch.ones_like(after.bias)

    def forward(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
        return after(model(before(data[0]))), data[1]

    def own(model: nn.Module, data: Any) -> Tensor:
        return CrossEntropy(forward)(model, data)[0]

    for loss, fisher in ((own, "empirical"), (CrossEntropy(forward), "exact")):
        selection = check_layers(model, data, loss, find_layers(model))
        assert len(selection.layers) == 2
        found = fit(model, [data], loss, fisher=fisher, layers="*")
        assert all(value > 0 for value in found.trace().values())
    outside = [*before.parameters(), *after.parameters()]
    assert [param.grad is None for param in outside] == [True, True, True, False]
    assert torch.equal(after.bias.grad, torch.ones_like(after.bias))
    assert all(param.requires_grad for param in outside)


def test_a_model_on_several_devices_is_refused() -> None:
    model = network()
    model[0].to("meta")
    with pytest.raises(ValueError, match="one device, got parameters on cpu, meta; load it"):
        fit(model, [batch(EXAMPLES)], CrossEntropy())


def test_one_term_an_example_has_no_losses_of_tokens() -> None:
    model, (x, targets) = network(), batch(EXAMPLES)
    passes = Passes(model, [(x, targets)], CrossEntropy(), find_layers(model).layers)
    passes.over(lambda layer, uses: None)
    torch.testing.assert_close(
        passes.losses, functional.cross_entropy(model(x), targets, reduction="none").detach()
    )
    assert passes.token_losses is None


class Flattened(nn.Module):
    """Layers that see all tokens in one dimension, as OPT's and routers do."""

    def __init__(self, rows: str) -> None:
        super().__init__()
        self.layer, self.head, self.rows = nn.Linear(WIDTH, 6), nn.Linear(6, CLASSES), rows

    def forward(self, x: Tensor) -> Tensor:
        if self.rows == "tokens":
            return self.head(self.layer(x.flatten(0, 1)).tanh().view(*x.shape[:2], 6))
        if self.rows == "turned":  # positions come first
            hidden = self.layer(x.transpose(0, 1).flatten(0, 1)).tanh()
            return self.head(hidden.view(x.size(1), x.size(0), 6).transpose(0, 1))
        first, second = self.layer(x[:2, 0]), self.layer(x[2:, 1])  # as experts of a list
        return self.head(torch.cat([first, second])[:, None].expand(-1, x.size(1), -1))


@pytest.mark.parametrize("loss", [CrossEntropy(), lambda m, d: CrossEntropy()(m, d)[0].sum(1)])
def test_flattened_tokens_are_told_apart_by_example(loss: Any) -> None:
    model, data = Flattened("tokens").double(), batch(EXAMPLES, LENGTH)
    found = gradients(model, data, loss)["layer"]
    for n in range(EXAMPLES):
        terms = functional.cross_entropy(model(data[0][n : n + 1])[0], data[1][n], reduction="sum")
        grads = torch.autograd.grad(terms, [model.layer.weight, model.layer.bias])
        torch.testing.assert_close(found[n], torch.cat([grads[0], grads[1][:, None]], 1))


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ("turned", "mixes examples"),
        ("routed", "2 rows for 4 examples cannot be told apart by example"),
    ],
)
def test_what_cannot_be_told_apart_is_left_out_before_the_passes(rows: str, reason: str) -> None:
    model, data = Flattened(rows).double(), batch(EXAMPLES, LENGTH)
    selection = check_layers(model, data, CrossEntropy(), find_layers(model))
    assert selection.left_out == [LeftOut("layer", reason, 36)]
    assert [layer.name for layer in selection.layers] == ["head"]


def test_a_layer_that_the_loss_does_not_use_is_left_out() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.aside, self.idle = (nn.Linear(WIDTH, CLASSES) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            self.aside(x)
            return self.used(x)

    model = Aside().double()
    selection = check_layers(model, batch(EXAMPLES), CrossEntropy(), find_layers(model))
    assert [layer.name for layer in selection.layers] == ["used"]
    assert selection.left_out == [
        LeftOut("aside", "not used by the loss", 24),
        LeftOut("idle", "its module is not called", 24),
    ]


def test_batches_without_a_term_that_counts_change_no_selection() -> None:
    model, (x, targets) = network(), batch(EXAMPLES)
    selection = find_layers(model)
    empty = x, torch.full_like(targets, -100)
    assert check_layers(model, empty, CrossEntropy(), selection).layers == selection.layers


DEVICE = """
import second_device, torch
from torch import nn
from isokron.curvature import CrossEntropy, find_layers, fit
from isokron.curvature.backward import Passes
from isokron.curvature.check import check_layers

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Linear(6, 4))
x, t = torch.randn(4, 3, 5), torch.randint(4, (4, 3))
t[1] = -100
found = {}
for device in ("cpu", "npu"):
    there, data = model.to(device), (x.to(device), t.to(device))
    for fisher in ("empirical", "sampled", "exact"):
        selection = check_layers(there, data, CrossEntropy(), find_layers(there, "*"))
        assert len(selection.layers) == 3
        def fold(layer, uses):
            key = fisher, layer.name
            value = (uses.grads.sum(2).square().sum() + uses.inputs.sum()).cpu()
            found.setdefault((device, *key), []).append(value)
        passes = Passes(there, [data], CrossEntropy(), selection.layers, fisher=fisher)
        passes.over(fold)
        if fisher != "exact":
            found[device, fisher, "losses"] = [passes.losses.cpu().sum()]
for (device, *key), values in found.items():
    for mine, theirs in zip(values, found["cpu", *key], strict=True):
        torch.testing.assert_close(mine, theirs)
"""


@pytest.mark.usefixtures("second_device")
def test_passes_on_a_second_device_have_the_numbers_of_the_cpu() -> None:
    # in a process of its own, since a backend of torch stays registered
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", DEVICE],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
