"""SOAP against a naive version in float64, and a basis that converges."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import build
from isokron.linalg import follow, offdiagonal
from naive import SHAPES, assert_follows, blended, flat, folded, gradients, hat, times

EVERY, START, BETAS, FACTOR_BETA = 3, 6, (0.9, 0.99), 0.9


def naive_soap(
    grads: list[Tensor],
    qr: bool = True,
    sides: tuple[int, ...] | None = None,
    beta2: float = BETAS[1],
    beta: float = FACTOR_BETA,
    correct: bool = True,
    beta3: float | None = None,
) -> Any:
    """Adam in the basis; the moment is kept outside of it, the variances turn with it.

    What turning makes of the diagonal of a factor says by how much it is wrong; and the square of
    the moment cannot be larger than that of the gradients it is made of.
    """
    shape = grads[0].shape
    sides = tuple(range(len(shape))) if sides is None else sides
    cov = {i: torch.zeros(shape[i], shape[i]).double() for i in sides}
    basis = {i: torch.eye(shape[i]).double() for i in sides}
    m, v, updates, started = torch.zeros_like(grads[0]), torch.zeros_like(grads[0]), [], False
    for t, g in enumerate(grads, start=1):
        for i in sides:
            cov[i] = folded(cov[i], flat(g, i) @ flat(g, i).T, beta)
        if t == START or (t > START and t % EVERY == 0):
            for i in sides:
                if qr and started:
                    order = (basis[i].T @ cov[i] @ basis[i]).diagonal().argsort(descending=True)
                    new = torch.linalg.qr(cov[i] @ basis[i][:, order]).Q
                else:
                    new = torch.linalg.eigh(cov[i]).eigenvectors
                evened, old = (new.T @ basis[i]) ** 2, basis[i]
                right, wrong = diagonal(cov[i], new), evened @ diagonal(cov[i], old)
                v = times(v, (right / wrong)[:, None] * evened, i)
                basis[i] = new
            if BETAS[0] ** 2 < beta2:
                weight = (1 - BETAS[0] ** 2 / beta2) * (1 if beta2 == 1 else 1 - beta2)
                rotated = m
                for i in sides:
                    rotated = times(rotated, basis[i].T, i)
                v = torch.maximum(v, rotated**2 * weight / (1 - BETAS[0]) ** 2)
            started = True
        turned = g
        for i in sides:
            turned = times(turned, basis[i].T, i)
        v = folded(v, turned**2, beta2)
        update = blended(m, g, BETAS[0], beta3, t, correct)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        for i in sides:
            update = times(update, basis[i].T, i)
        update = update / (hat(v, beta2, t, correct).sqrt() + 1e-8)
        for i in sides:
            update = times(update, basis[i], i)
        updates.append(update)
    return updates


def full(lower: Tensor) -> Tensor:
    return lower.tril() + lower.tril(-1).T


def diagonal(matrix: Tensor, basis: Tensor) -> Tensor:
    values = (basis.T @ matrix @ basis).diagonal()
    return values.clamp(min=1e-4 * values.mean())


SETTINGS: dict[str, Any] = {
    "every": EVERY,
    "start": START,
    "betas": BETAS,
    "factor_beta": FACTOR_BETA,
    "graft": None,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("basis", ["qr", "eigh"])
def test_soap_follows_the_naive_version(shape: tuple[int, ...], basis: str) -> None:
    assert_follows(
        isokron.SOAP,
        lambda grads: naive_soap(grads, qr=basis == "qr"),
        gradients(shape, 20),
        **SETTINGS,
        basis=basis,
    )


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "biased": ({"use_bias_correction": False}, {"correct": False}),
    "blended": ({"beta3": 0.5}, {"beta3": 0.5}),
    "blended, biased": (
        {"beta3": 0.95, "use_bias_correction": False},
        {"beta3": 0.95, "correct": False},
    ),
    "sums": ({"betas": (0.9, 1.0), "factor_beta": None}, {"beta2": 1.0, "beta": 1.0}),
    "sum of squares": ({"betas": (0.9, 1.0)}, {"beta2": 1.0}),
    "sums in factors": ({"factor_beta": 1.0}, {"beta": 1.0}),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_sums_and_biased_means_follow_the_naive_version(
    shape: tuple[int, ...], variant: str
) -> None:
    own, theirs = VARIANTS[variant]
    settings = {**SETTINGS, **own}
    assert_follows(
        isokron.SOAP, lambda grads: naive_soap(grads, **theirs), gradients(shape, 20), **settings
    )


def test_what_goes_to_adamw_cannot_sum() -> None:
    weight, bias = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"betas\[1\] must be below 1 for AdamW.*vectors=True"):
        isokron.SOAP([weight, bias], betas=(0.9, 1.0))
    build(isokron.SOAP, [weight, bias], betas=(0.9, 1.0), vectors=True)
    with pytest.raises(ValueError, match=r"betas must be two numbers in \[0, 1\), got"):
        isokron.Muon([weight], betas=(0.9, 1.0))
    with pytest.raises(ValueError, match="the second at most 1"):
        isokron.SOAP([weight], betas=(1.0, 1.0))
    with pytest.raises(ValueError, match="use_bias_correction must be True for AdamW"):
        isokron.AdamW([weight], use_bias_correction=False)


def test_the_basis_of_a_static_matrix_converges() -> None:
    spread = torch.linspace(0, 3, 24, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
    matrix = turn @ torch.diag(10**-spread) @ turn.T
    basis = torch.linalg.qr(torch.randn(24, 24, dtype=torch.float64)).Q
    for _ in range(60):
        basis = follow(matrix, basis)
    assert offdiagonal(matrix, basis) < 1e-3
    rayleigh = (basis.T @ matrix @ basis).diagonal()
    assert torch.all(rayleigh.diff() <= 0)


def test_soap_finds_the_basis_of_gradients_that_have_changed() -> None:
    """The same through the optimizer in float32: another gradient, then 60 refreshes."""
    first, then = torch.randn(8, 8), torch.randn(8, 8)
    weight = nn.Parameter(torch.zeros(8, 8))
    optimizer = isokron.SOAP([weight], lr=0.0, every=1, factor_beta=0.5)
    for grad in (first, *[then] * 60):
        weight.grad = grad
        optimizer.step()
    state = optimizer.state[weight]
    for i in range(2):
        cov = state[f"cov.{i}.0"].double()
        cov = cov.tril() + cov.tril(-1).T
        basis = state[f"basis.{i}.0"].double()
        assert offdiagonal(cov, basis) < 1e-3
        torch.testing.assert_close(basis.T @ basis, torch.eye(8).double(), atol=1e-5, rtol=0)


def test_a_basis_within_tolerance_is_kept() -> None:
    weight = nn.Parameter(torch.zeros(5, 6))
    grads = gradients((5, 6), 12).float()
    kept = isokron.SOAP([weight], every=2, tolerance=1.0)
    for t, grad in enumerate(grads, start=1):
        weight.grad = grad
        kept.step()
        if t == 2:
            first = kept.state[weight]["basis.0.0"].clone()
    assert torch.equal(kept.state[weight]["basis.0.0"], first)
    assert not torch.equal(first, torch.eye(5))


@pytest.mark.parametrize("basis", ["qr", "eigh"])
def test_variances_in_a_new_basis_are_those_of_the_factors(basis: str) -> None:
    """Up to LEAST, where a block has one dimension and the step of a refresh has no gradient."""
    weight = nn.Parameter(torch.zeros(6, dtype=torch.float64))
    group = {"params": [weight], "vectors": True, "every": 2}
    optimizer = isokron.SOAP([group], betas=(0.9, 0.8), basis=basis)
    for t, grad in enumerate(gradients((6,), 8), start=1):
        weight.grad = grad * (t % 2)
        optimizer.step()
    state = optimizer.state[weight]
    expected = diagonal(full(state["cov.0.0"]), state["basis.0.0"])
    torch.testing.assert_close(state["variance.0"].flatten(), expected, rtol=1e-3, atol=0)


def test_steps_after_a_turn_are_no_longer_than_gradients_allow() -> None:
    """In the basis of a gradient it is diagonal, which sums over rows and columns do not tell."""
    weight = nn.Parameter(torch.zeros(5, 6, dtype=torch.float64))
    optimizer = isokron.SOAP([weight], start=2, graft=None)
    for grad in (gradients((5, 6), 1)[0], torch.zeros(5, 6)):
        weight.grad = grad.double()
        optimizer.step()
    state = optimizer.state[weight]
    rotated, variance = state["rotated.0"], state["variance.0"]
    most = 0.1**2 / (0.05 * (1 - 0.9**2 / 0.95))  # of M²/E, for any gradients
    ratio = rotated.square() / variance * (0.95 / 0.9**2)  # as it was before the second step
    assert 0.9 * most < ratio.max() <= most * (1 + 1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"basis": "svd"}, "basis must be one of"),
        ({"factor_beta": 1.1}, "factor_beta must be at least 0 and at most 1"),
        ({"max_dim": 0}, "max_dim must be"),
        ({"every": 0}, "every must be"),
        ({"tolerance": -1.0}, "tolerance must be a finite number at least 0"),
    ],
    ids=str,
)
def test_wrong_settings_of_soap_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(isokron.SOAP, [nn.Parameter(torch.zeros(2, 2))], **settings)
