"""Katie against a naive version in float64, and its invariants."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import build
from naive import SHAPES, assert_follows, blended, flat, folded, gradients, hat, power, times

EVERY, START, BETAS, FACTOR_BETA, DAMPING, EPS = 3, 5, (0.9, 0.95), 0.8, 1e-2, 1e-6


def naive_katie(
    grads: list[Tensor],
    symmetric: bool = False,
    raw: bool = False,
    beta2: float = BETAS[1],
    beta: float = FACTOR_BETA,
    exponents: tuple[float, ...] = (2, 2, 2, 2),
    correct: bool = True,
    beta3: float | None = None,
) -> list[Tensor]:
    shape = grads[0].shape
    cov = [torch.zeros(n, n).double() for n in shape]
    root = [torch.eye(n).double() for n in shape]
    m, v, updates = torch.zeros_like(grads[0]), torch.zeros_like(grads[0]), []
    for t, g in enumerate(grads, start=1):
        v = folded(v, g * g, beta2)
        s = hat(v, beta2, t, correct).sqrt() + EPS
        unit = (v / t).sqrt() + EPS if beta2 == 1 else s  # of sums, the mean
        z = g if raw else g / unit
        for i, n in enumerate(shape):
            new = flat(z, i) @ flat(z, i).T / (g.numel() / n)
            cov[i] = folded(cov[i], new, beta)
        if t == START or (t > START and t % EVERY == 0):
            for i, n in enumerate(shape):
                if exponents[i]:
                    damped = hat(cov[i], beta, t, correct) + DAMPING * torch.eye(n)
                    root[i] = power(damped, -1 / exponents[i])
        adam = blended(m, g, BETAS[0], beta3, t, correct) / s
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        white = adam * s.sqrt() if symmetric else adam
        for i in range(len(shape)):
            white = times(white, root[i], i)
        white = white / s.sqrt() if symmetric else white
        updates.append(white * adam.norm() / white.norm())
    return updates


SETTINGS: dict[str, Any] = {
    "every": EVERY,
    "start": START,
    "betas": BETAS,
    "factor_beta": FACTOR_BETA,
    "damping": DAMPING,
    "eps": EPS,
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sequential": ({}, {}),
    "symmetric": ({"form": "symmetric"}, {"symmetric": True}),
    "raw": ({"statistic": "raw"}, {"raw": True}),
    "fourth roots": ({"exponent": 4}, {"exponents": (4,) * 4}),
    "one side": ({"exponent": {2: (0, 3)}}, {"exponents": (0, 3)}),
    "biased": ({"use_bias_correction": False}, {"correct": False}),
    "blended": ({"beta3": 0.5}, {"beta3": 0.5}),
    "blended, biased": (
        {"beta3": 0.95, "use_bias_correction": False},
        {"beta3": 0.95, "correct": False},
    ),
    "sums": ({"betas": (0.9, 1.0), "factor_beta": 1.0}, {"beta2": 1.0, "beta": 1.0}),
    "sum of squares": ({"betas": (0.9, 1.0)}, {"beta2": 1.0}),
}


PAIRS = [(name, s) for name in VARIANTS for s in SHAPES if name != "one side" or len(s) == 2]


@pytest.mark.parametrize(("variant", "shape"), PAIRS, ids=str)
def test_katie_follows_the_naive_version(variant: str, shape: tuple[int, ...]) -> None:
    own, theirs = VARIANTS[variant]
    assert_follows(
        isokron.Katie,
        lambda grads: naive_katie(grads, **theirs),
        gradients(shape, 16),
        **{**SETTINGS, **own},
    )


def walk(optimizer: Any, grads: Tensor, **settings: Any) -> Tensor:
    weight = nn.Parameter(torch.zeros_like(grads[0]))
    stepping = optimizer([weight], lr=0.1, weight_decay=0.0, **settings)
    for grad in grads:
        weight.grad = grad
        stepping.step()
    return weight.detach()


@pytest.mark.parametrize("form", ["sequential", "symmetric"])
@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_the_update_does_not_depend_on_the_scale_of_gradients(form: str, scale: float) -> None:
    grads = gradients((4, 5), 12)
    settings = {**SETTINGS, "eps": 0.0, "form": form}
    plain = walk(isokron.Katie, grads, **settings)
    torch.testing.assert_close(walk(isokron.Katie, scale * grads, **settings), plain)


def test_raw_factors_count_the_scale_twice() -> None:
    """The operator, before its norm is matched, falls with the square of the gradient's scale."""
    grads = gradients((4, 5), 6)
    roots = []
    for scale in (1.0, 10.0):
        weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
        settings = {**SETTINGS, "statistic": "raw", "damping": 1e-9, "every": 6, "start": 6}
        optimizer = build(isokron.Katie, [weight], **settings)
        for grad in scale * grads:
            weight.grad = grad
            optimizer.step()
        roots.append(optimizer.state[weight]["root.0.0"])
    torch.testing.assert_close(roots[0], 10 * roots[1], rtol=1e-4, atol=1e-6)


def test_katie_without_correlations_is_adam() -> None:
    """Factors that are never refreshed are identities, and what is left is Adam."""
    grads = gradients((4, 5), 12)
    betas = (0.9, 0.95)
    katie = walk(isokron.Katie, grads, start=100, betas=betas)
    weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    adam = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0, betas=betas)
    for grad in grads:
        weight.grad = grad
        adam.step()
    torch.testing.assert_close(katie, weight.detach())


def test_uncorrelated_gradients_leave_adam_alone_too() -> None:
    """Independent entries of any variances have no correlations: the factors come out as I."""
    generator = torch.Generator().manual_seed(0)
    scales = 10 ** torch.randn(6, 8, generator=generator, dtype=torch.float64)
    weight = nn.Parameter(torch.zeros(6, 8, dtype=torch.float64))
    settings = {"every": 2000, "betas": (0.9, 0.999), "factor_beta": 0.999, "damping": 1e-6}
    optimizer = build(isokron.Katie, [weight], **settings)
    for _ in range(2000):
        weight.grad = scales * torch.randn(6, 8, generator=generator, dtype=torch.float64)
        optimizer.step()
    for i, n in enumerate((6, 8)):
        root = optimizer.state[weight][f"root.{i}.0"]
        torch.testing.assert_close(root, torch.eye(n).double(), atol=0.1, rtol=0)


def test_the_symmetric_operator_is_positive_definite() -> None:
    """⟨M, Δ⟩ > 0 for every M: with β₁ = 0, the update always has a part along the gradient."""
    weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    settings = {**SETTINGS, "betas": (0.0, 0.95), "form": "symmetric", "every": 1, "start": 1}
    optimizer = build(isokron.Katie, [weight], lr=1.0, weight_decay=0.0, **settings)
    for grad in gradients((4, 5), 40):
        before = weight.detach().clone()
        weight.grad = grad
        optimizer.step()
        assert ((before - weight.detach()) * grad).sum() > 0


def test_variances_and_correlations_have_rates_of_their_own() -> None:
    grads = gradients((4, 5), 9)
    base = walk(isokron.Katie, grads, **SETTINGS)
    assert not torch.allclose(base, walk(isokron.Katie, grads, **{**SETTINGS, "factor_beta": 0.5}))
    assert not torch.allclose(base, walk(isokron.Katie, grads, **{**SETTINGS, "betas": (0.9, 0.5)}))


def test_entries_without_gradients_are_no_division_by_zero() -> None:
    grads = gradients((4, 5), 6)
    grads[:, 1] = 0
    for form in ("sequential", "symmetric"):
        moved = walk(isokron.Katie, grads, **{**SETTINGS, "eps": 0.0, "form": form})
        assert moved.isfinite().all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "parallel"}, "form must be one of"),
        ({"statistic": "kl"}, "statistic must be one of"),
        ({"damping": 0.0}, "damping must be a finite number above 0"),
        ({"damping": float("inf")}, "damping must be a finite number above 0"),
        ({"factor_dtype": torch.int32}, "factor_dtype must be None or a floating-point dtype"),
        ({"factor_beta": 1.1}, "factor_beta must be at least 0 and at most 1"),
        ({"exponent": -1}, "exponent must be a number of at least 0"),
    ],
    ids=str,
)
def test_wrong_settings_of_katie_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(isokron.Katie, [nn.Parameter(torch.zeros(2, 2))], **settings)
