"""Oracles of curvature: where approximations are exact, and what must not change them."""

import itertools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from curvature_naive import CLASSES, EXACT, batched, kron, labels
from isokron.curvature import (
    BinaryCrossEntropy,
    CrossEntropy,
    Curvature,
    Likelihood,
    SquaredError,
    fit,
)
from isokron.curvature.backward import hessian_roots, sampled_slopes

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")
DOUBLE = {"dtype": torch.float64}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


class Sequence(nn.Module):
    """Tokens, of which later ones read earlier ones: gradients go back through positions."""

    def __init__(self, outputs: int = CLASSES) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).cumsum(1))


def matrix(model: nn.Module, name: str, grads: dict[str, Tensor]) -> Tensor:
    return torch.cat([grads[f"{name}.weight"], grads[f"{name}.bias"][:, None]], 1).flatten()


def jacobian(model: nn.Module, x: Tensor, name: str) -> Tensor:
    """Of outputs with respect to a linear layer [weight, bias]. [outputs, parameters]"""
    params = dict(model.named_parameters())
    rows = []
    for value in model(x).flatten():
        found = torch.autograd.grad(value, [*params.values()], retain_graph=True, allow_unused=True)
        rows.append(matrix(model, name, dict(zip(params, found, strict=True))))
    return torch.stack(rows)


def ggn(
    model: nn.Module, x: Tensor, targets: Tensor, name: str, loss: Callable[..., Tensor]
) -> Tensor:
    """(1/M) Σ JᵀHJ, with the Hessian of the loss itself by autograd."""
    y = model(x).detach()
    hessian = torch.autograd.functional.hessian(lambda y: loss(y, targets), y)
    size = y.numel()
    j = jacobian(model, x, name)
    return j.T @ hessian.reshape(size, size) @ j / (size // y.size(-1))


def cross_entropy(y: Tensor, t: Tensor) -> Tensor:
    return functional.cross_entropy(y.reshape(-1, y.size(-1)), t.flatten(), reduction="sum")


def squared(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).square().sum()


def binary(y: Tensor, t: Tensor) -> Tensor:
    return functional.binary_cross_entropy_with_logits(y, t, reduction="sum")


LOSSES: dict[str, tuple[Likelihood, Callable[..., Tensor], Callable[[Tensor], Tensor]]] = {
    "cross-entropy": (CrossEntropy(), cross_entropy, lambda y: y.argmin(-1)),
    "squared error": (SquaredError(), squared, torch.randn_like),
    "binary": (BinaryCrossEntropy(), binary, lambda y: (y > 0.1).to(y.dtype)),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_deep_linear_net_with_squared_error_has_its_ggn(method: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 3)).double()
    x, t = torch.randn(5, 3).double(), torch.randn(5, 3).double()
    found = fit(model, batched(x, t), SquaredError(), method, fisher="exact", **DOUBLE)
    for name in found:
        want = ggn(model, x, t, name, squared)
        torch.testing.assert_close(found[name].to_dense()[0], want, **EXACT)


@pytest.mark.parametrize(
    ("method", "fisher"),
    # EK-FAC draws another label for its eigenvalues
    [(m, f) for m in METHODS for f in ("empirical", "sampled") if (m, f) != ("ekfac", "sampled")],
)
def test_one_datum_with_cross_entropy_is_exact(method: str, fisher: str) -> None:
    model, x = network(), torch.randn(1, 3).double()
    y = labels(1)
    found = fit(model, [(x, y)], CrossEntropy(), method, fisher=fisher, seed=3, **DOUBLE)
    if fisher == "sampled":  # the one label that its gradient belongs to
        options = [fit(model, [(x, y + c)], CrossEntropy(), method, **DOUBLE) for c in range(3)]
        gaps = [float((o["2"].to_dense() - found["2"].to_dense()).norm()) for o in options]
        y = y + gaps.index(min(gaps))
    loss = functional.cross_entropy(model(x), y)
    grads = dict(
        zip(
            dict(model.named_parameters()),
            torch.autograd.grad(loss, [*model.parameters()]),
            strict=True,
        )
    )
    for name in found:
        flat = matrix(model, name, grads)
        torch.testing.assert_close(found[name].to_dense()[0], torch.outer(flat, flat), **EXACT)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tokens", [False, True])
def test_the_exact_fisher_is_the_ggn_of_the_layer(name: str, tokens: bool) -> None:
    likelihood, loss, targets = LOSSES[name]
    model = Sequence().double() if tokens else network()
    x = torch.randn(2, 3, 2).double() if tokens else torch.randn(4, 3).double()
    t = targets(model(x).detach())
    found = fit(model, batched(x, t), likelihood, "ekfac", fisher="exact", **DOUBLE)
    shampoo = fit(model, batched(x, t), likelihood, "shampoo", fisher="exact", **DOUBLE)
    for layer in found:
        want = ggn(model, x, t, layer, loss)
        known = found.layers[layer].statistics
        basis = kron(known["basis.output"], known["basis.input"])[0]
        diagonal = (basis.T @ want @ basis).diagonal()
        torch.testing.assert_close(known["eigenvalues"].flatten(), diagonal, **EXACT)
        o, i = known["eigenvalues"].shape[1:]
        left = want.view(o, i, o, i).diagonal(dim1=1, dim2=3).sum(-1)
        torch.testing.assert_close(shampoo.layers[layer].statistics["output"][0], left, **EXACT)


@pytest.mark.parametrize("name", LOSSES)
def test_the_sampled_fisher_converges_to_the_exact_one(name: str) -> None:
    likelihood, _, targets = LOSSES[name]
    model, x = network(), torch.randn(4, 3).double()
    t = targets(model(x).detach())
    many = [(x.repeat(2000, 1), t.repeat(2000, *[1] * (t.ndim - 1)))]
    sampled = fit(model, many, likelihood, "ekfac", fisher="sampled", **DOUBLE)
    exact = fit(model, [(x, t)], likelihood, "ekfac", fisher="exact", **DOUBLE)
    for layer in exact:
        want = exact[layer].to_dense()
        assert (sampled[layer].to_dense() - want).norm() < 0.06 * want.norm()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_batches_do_not_change_curvature(method: str, fisher: str) -> None:
    model, x = Sequence().double(), torch.randn(7, 3, 2).double()
    t = torch.randint(CLASSES, (7, 3))
    t[0, 1] = t[3] = -100

    def fitted(*sizes: int) -> Curvature:
        data = batched(x, t, sizes=sizes)
        return fit(model, data, CrossEntropy(), method, fisher=fisher, **DOUBLE)

    whole = fitted(7)
    for sizes in ((1,), (2, 5), (3,)):
        found = fitted(*sizes)
        for layer in whole:
            torch.testing.assert_close(found[layer].to_dense(), whole[layer].to_dense(), **EXACT)


@pytest.mark.parametrize("name", LOSSES)
def test_drawn_labels_depend_on_the_seed_and_the_number_of_the_batch_only(name: str) -> None:
    likelihood, _, targets = LOSSES[name]
    drawn: list[Tensor] = []

    class Spy(type(likelihood)):  # type: ignore[misc]
        def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
            drawn.append(super().draw(outputs, generator))
            return drawn[-1]

    model, x = network(), torch.randn(40, 3).double()
    t = targets(model(x).detach())

    def second_batch(size: int, seed: int) -> Tensor:
        drawn.clear()
        data = [(x[:size], t[:size]), (x[20:], t[20:])]
        fit(model, data, Spy(), fisher="sampled", seed=seed, **DOUBLE)
        return drawn[1]

    assert torch.equal(second_batch(20, 5), second_batch(3, 5))
    assert not torch.equal(second_batch(20, 5), second_batch(20, 6))


def test_ekfac_draws_other_labels_for_eigenvalues_than_for_bases() -> None:
    drawn: list[Tensor] = []

    class Spy(CrossEntropy):
        def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
            drawn.append(super().draw(outputs, generator))
            return drawn[-1]

    model, x = network(), torch.randn(40, 3).double()
    t = torch.zeros(40, dtype=torch.long)
    found = fit(model, [(x, t)], Spy(), "ekfac", fisher="sampled", **DOUBLE)
    first, second = drawn
    assert not torch.equal(first, second)
    # bases are those of the first labels, and the sum of Λ, which no basis changes, of the second
    of = [fit(model, [(x, y)], CrossEntropy(), "ekfac", **DOUBLE) for y in (first, second)]
    for layer in found:
        known, basis = found.layers[layer].statistics, of[0].layers[layer].statistics
        torch.testing.assert_close(known["basis.output"], basis["basis.output"])
        assert not torch.allclose(known["eigenvalues"], basis["eigenvalues"])
        assert known["eigenvalues"].sum() == pytest.approx(
            float(of[1].layers[layer].statistics["eigenvalues"].sum())
        )


@pytest.mark.parametrize("method", METHODS)
def test_two_fits_are_bit_identical(method: str) -> None:
    model, x, t = Sequence(), torch.randn(6, 3, 2), torch.randint(CLASSES, (6, 3))

    def fitted() -> Curvature:
        return fit(model, batched(x, t), CrossEntropy(), method, fisher="sampled")

    one, two = fitted(), fitted()
    for layer, key in itertools.product(one, one.layers["first"].statistics):
        assert torch.equal(one.layers[layer].statistics[key], two.layers[layer].statistics[key]), (
            key
        )


def test_gradients_of_examples_are_the_same_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, t = Sequence().double(), torch.randn(6, 3, 2).double(), torch.randint(CLASSES, (6, 3))
    for method in ("ekfac", "shampoo"):
        want = fit(model, [(x, t)], CrossEntropy(), method, **DOUBLE)
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["isokron.curvature.statistics"], "CHUNK", 1)
            found = fit(model, [(x, t)], CrossEntropy(), method, **DOUBLE)
        for layer in want:
            torch.testing.assert_close(found[layer].to_dense(), want[layer].to_dense(), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flat", [False, True])
def test_slopes_of_cross_entropy_are_the_gradients_of_its_terms(
    dtype: torch.dtype, flat: bool
) -> None:
    outputs, targets = (3 * torch.randn(4, 3, CLASSES)).to(dtype), torch.randint(CLASSES, (4, 3))
    targets[1, 2] = targets[3, 0] = -1
    outputs = (outputs.flatten(0, 1) if flat else outputs).requires_grad_()
    loss = CrossEntropy(ignore_index=-1)
    loss.terms(outputs, targets).sum().backward()
    weights = loss.weights(targets).to(dtype).reshape(*outputs.shape[:-1], 1)
    torch.testing.assert_close(
        loss.terms_and_slopes(outputs.detach(), targets)[1] * weights, outputs.grad
    )


def test_a_class_made_of_cross_entropy_may_have_terms_of_its_own() -> None:
    class Doubled(CrossEntropy):
        def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return 2 * super().terms(outputs, targets)

    model, x, t = network(), torch.randn(5, 3).double(), labels(5)
    want, found = (fit(model, [(x, t)], loss, **DOUBLE) for loss in (CrossEntropy(), Doubled()))
    for layer in want:
        torch.testing.assert_close(found[layer].to_dense(), 4 * want[layer].to_dense(), **EXACT)


def test_batches_may_share_their_memory() -> None:
    model = nn.Linear(3, CLASSES, bias=False).double()
    x, t = torch.randn(6, 3).double(), labels(6)

    class Reused:
        def __iter__(self) -> Any:
            buffer = torch.empty(2, 3).double()
            for part, y in zip(x.split(2), t.split(2), strict=True):
                yield buffer.copy_(part), y

    want = fit(model, batched(x, t), CrossEntropy(), "ekfac", **DOUBLE)
    found = fit(model, Reused(), CrossEntropy(), "ekfac", **DOUBLE)
    torch.testing.assert_close(found[""].to_dense(), want[""].to_dense(), **EXACT)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_what_is_masked_is_as_if_it_were_not_there(method: str, sharing: str) -> None:
    model, x = network(), torch.randn(6, 3).double()
    t = labels(6)
    t[1] = t[4] = -100
    some = t != -100
    options: Any = {"method": method, "sharing": sharing, **DOUBLE}
    found = fit(model, batched(x, t), CrossEntropy(), **options)
    want = fit(model, [(x[some], t[some])], CrossEntropy(), **options)
    for layer in want:
        torch.testing.assert_close(found[layer].to_dense(), want[layer].to_dense(), **EXACT)


def test_losses_of_ones_own_with_weights_are_a_likelihood_with_masked_terms() -> None:
    model, x = Sequence().double(), torch.randn(4, 3, 2).double()
    t = torch.randint(CLASSES, (4, 3))
    t[0, 1] = t[2, 2] = -100

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        losses = functional.cross_entropy(model(batch[0]).mT, batch[1], reduction="none")
        return losses, batch[1] != -100

    want = fit(model, [(x, t)], CrossEntropy(), "ekfac", **DOUBLE)
    found = fit(model, [(x, t)], loss, "ekfac", **DOUBLE)
    for layer in want:
        torch.testing.assert_close(found[layer].to_dense(), want[layer].to_dense(), **EXACT)


def test_fractional_weights_count_squares_of_gradients_once() -> None:
    model, x, t = nn.Linear(3, CLASSES).double(), torch.randn(4, 3).double(), labels(4)
    weights = torch.tensor([0.25, 1.0, 0.0, 2.0]).double()

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return functional.cross_entropy(model(batch[0]), batch[1], reduction="none"), weights

    found = fit(model, [(x, t)], loss, **DOUBLE).layers[""].statistics["output"][0]
    g = model(x).softmax(-1).detach() - functional.one_hot(t, CLASSES)
    torch.testing.assert_close(found, (g * weights[:, None]).T @ g / weights.sum(), **EXACT)


class Graded(CrossEntropy):
    """Terms of fractional weights."""

    def weights(self, targets: Tensor) -> Tensor:
        return torch.tensor([0.25, 1.0, 0.0, 2.0]).double()[torch.arange(len(targets)) % 4]


def test_drawn_and_all_labels_have_gradients_of_fractional_weights_once() -> None:
    model, x, t = nn.Linear(3, CLASSES).double(), torch.randn(4, 3).double(), labels(4)
    weights, p = Graded().weights(t), model(x).softmax(-1).detach()
    want = torch.diag(weights @ p) - (p * weights[:, None]).T @ p
    found = fit(model, [(x, t)], Graded(), fisher="exact", **DOUBLE).layers[""].statistics
    torch.testing.assert_close(found["output"][0], want / weights.sum(), **EXACT)
    outputs = model(x).detach()
    slopes = sampled_slopes(Graded(), outputs, weights, torch.Generator().manual_seed(0))
    drawn = Graded().draw(outputs, torch.Generator().manual_seed(0))
    rows = p - functional.one_hot(drawn, CLASSES)
    torch.testing.assert_close(slopes, weights.sqrt()[:, None] * rows, **EXACT)
    roots = hessian_roots(Graded(), outputs, weights)
    torch.testing.assert_close(sum(root.T @ root for root in roots), want, **EXACT)


def test_an_exact_fisher_of_many_classes_is_warned_of_before_the_first_backward_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Sequence(outputs=400).double()
    x, t = torch.randn(2, 3, 2).double(), torch.zeros(2, 3, dtype=torch.long)
    passed: list[str] = []
    monkeypatch.setattr(Tensor, "backward", lambda *_, **__: passed.append("back"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match=r"takes 1,200 backward passes a batch.*400 classes"):
            fit(model, [(x, t)], CrossEntropy(), fisher="exact")
    assert not passed
    monkeypatch.undo()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(model, [(x, t)], CrossEntropy(), fisher="exact", layers="last")  # in closed form
        fit(model, [(x, t)], CrossEntropy(), fisher="sampled")


def test_curvature_is_a_mean_over_terms() -> None:
    model, x, t = network(), torch.randn(4, 3).double(), labels(4)
    once = fit(model, [(x, t)], CrossEntropy(), "ekfac", **DOUBLE)
    twice = fit(model, [(x, t), (x, t)], CrossEntropy(), "ekfac", **DOUBLE)
    for layer in once:
        torch.testing.assert_close(twice[layer].to_dense(), once[layer].to_dense(), **EXACT)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_eigenvalues_keep_the_trace_of_the_fisher_however_positions_share(sharing: str) -> None:
    model, x = Sequence().double(), torch.randn(4, 3, 2).double()
    t = torch.randint(CLASSES, (4, 3))
    found = fit(model, [(x, t)], CrossEntropy(), "ekfac", sharing=sharing, **DOUBLE).trace()
    total = dict.fromkeys(found, 0.0)
    for n in range(4):
        loss = cross_entropy(model(x[n : n + 1]), t[n : n + 1])
        grads = torch.autograd.grad(loss, [*model.parameters()])
        for (name, _), grad in zip(model.named_parameters(), grads, strict=True):
            total[name.partition(".")[0]] += float(grad.square().sum()) / t.numel()
    for name, value in total.items():
        assert found[name] == pytest.approx(value, abs=1e-12)


def test_a_likelihood_of_ones_own_needs_no_call() -> None:
    class Poisson:
        """exp(y) − t y, for which the Hessian is exp(y)."""

        forward = staticmethod(CrossEntropy().forward)

        def weights(self, targets: Tensor) -> Tensor:
            return torch.ones(targets.shape[:-1])

        def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return (outputs.exp() - targets * outputs).sum(-1)

        def draw(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
            return torch.zeros_like(outputs)

        def roots(self, outputs: Tensor) -> Any:
            for c in range(outputs.size(-1)):
                root = torch.zeros_like(outputs)
                root[..., c] = (outputs[..., c] / 2).exp()
                yield root

    model, x = nn.Sequential(nn.Linear(3, 2)).double(), torch.randn(4, 3).double()
    t = torch.ones(4, 2).double()
    for fisher in ("empirical", "sampled", "exact"):
        found = fit(model, [(x, t)], Poisson(), "ekfac", fisher=fisher, **DOUBLE)
        assert found.trace()["0"] > 0
    want = ggn(model, x, t, "0", lambda y, t: (y.exp() - t * y).sum())
    assert found.trace()["0"] == pytest.approx(float(want.trace()), abs=1e-12)
