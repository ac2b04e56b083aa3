"""Shampoo against ten naive lines in float64, and what is its own to refuse."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import build
from naive import (
    SHAPES,
    assert_follows,
    blended,
    blocks,
    flat,
    folded,
    gradients,
    hat,
    power,
    times,
)

EVERY, START, BETAS, FACTOR_BETA, EPS = 3, 5, (0.9, 0.99), 0.9, 1e-3


def naive_shampoo(
    grads: list[Tensor],
    beta: float = FACTOR_BETA,
    exponent: float | None = None,
    kl: bool = False,
    summed: bool = False,
    graft: str | None = None,
    unit: bool = False,
    beta2: float = BETAS[1],
    correct: bool = True,
    beta3: float | None = None,
) -> list[Tensor]:
    shape = grads[0].shape
    order = len(shape)
    p = exponent or (2 if kl and not summed else 2 * order)
    cov = [torch.zeros(n, n, dtype=torch.float64) for n in shape]
    root = [torch.eye(n, dtype=torch.float64) for n in shape]
    m, v, updates = torch.zeros_like(grads[0]), torch.zeros_like(grads[0]), []
    for t, g in enumerate(grads, start=1):
        for i in range(order):
            x = g
            for j in range(order):
                x = times(x, root[j], j) if kl and j != i else x
            scale = shape[i] / g.numel() if kl and not summed else 1
            cov[i] = folded(cov[i], scale * flat(x, i) @ flat(x, i).T, beta)
        if t == START or (t > START and t % EVERY == 0):
            for i in range(order):
                known = hat(cov[i], beta, t, correct)
                eps = EPS * known.diagonal().mean() if unit else EPS
                root[i] = power(known + eps * torch.eye(shape[i]), -1 / p)
        mean = blended(m, g, BETAS[0], beta3, t, correct)
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = folded(v, g * g, beta2)
        update = mean
        for i in range(order):
            update = times(update, root[i], i)
        if graft == "adam":
            simple = mean / (hat(v, beta2, t, correct).sqrt() + 1e-8)
            update = simple if t < START else update * simple.norm() / update.norm()
        updates.append(update)
    return updates


SETTINGS: dict[str, Any] = {
    "every": EVERY,
    "start": START,
    "betas": BETAS,
    "factor_beta": FACTOR_BETA,
    "damping": EPS,
    "deficient": "lift",
    "exponent": None,
    "graft": None,
}
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "adagrad": ({"factor_beta": 1.0}, {"beta": 1.0}),
    "blended": ({"beta3": 0.5}, {"beta3": 0.5}),
    "blended, biased": (
        {"beta3": 0.95, "use_bias_correction": False, "graft": "adam"},
        {"beta3": 0.95, "correct": False, "graft": "adam"},
    ),
    "newton": ({"solver": "newton"}, {}),
    "higher": ({"solver": "higher", "deficient": "relative"}, {"unit": True}),
    "half": ({"exponent": 2}, {"exponent": 2}),
    "biased": (
        {"use_bias_correction": False, "graft": "adam"},
        {"correct": False, "graft": "adam"},
    ),
    "all sums": (
        {"betas": (0.9, 1.0), "factor_beta": 1.0, "graft": "adam"},
        {"beta2": 1.0, "beta": 1.0, "graft": "adam"},
    ),
    "kl": ({"statistic": "kl"}, {"kl": True}),
    "kl sum": ({"statistic": "kl_sum"}, {"kl": True, "summed": True}),
    "grafted": ({"graft": "adam"}, {"graft": "adam"}),
    "relative": ({"deficient": "relative"}, {"unit": True}),
    "eigen": ({"form": "eigen"}, {}),
    "eigen, relative": ({"form": "eigen", "deficient": "relative"}, {"unit": True}),
    "eigen, kl": ({"form": "eigen", "statistic": "kl"}, {"kl": True}),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_shampoo_follows_the_naive_version(shape: tuple[int, ...], variant: str) -> None:
    own, theirs = VARIANTS[variant]
    assert_follows(
        isokron.Shampoo,
        lambda grads: naive_shampoo(grads, **theirs),
        gradients(shape, 16),
        **{**SETTINGS, **own},
    )


def test_blocks_are_preconditioned_each_by_itself() -> None:
    grads = gradients((5, 7), 14)
    weight = nn.Parameter(torch.zeros(5, 7, dtype=torch.float64))
    settings = {**SETTINGS, "graft": "adam", "max_dim": 3, "refresh": "together"}
    optimizer = build(isokron.Shampoo, [weight], lr=1.0, weight_decay=0.0, **settings)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    expected = torch.zeros(5, 7, dtype=torch.float64)
    for where in blocks(expected, 3):
        expected[where] = -sum(naive_shampoo([g[where] for g in grads], graft="adam"))
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-6)


def test_bases_and_eigenvalues_follow_a_damping_that_changes_between_refreshes() -> None:
    """In place of the root, of which a new damping makes another one only in the next refresh."""
    grads, directions = gradients((4, 5), 3), []
    settings = {**SETTINGS, "every": 2, "start": 2, "betas": (0.0, 0.99)}
    for form in ("root", "eigen"):
        weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
        optimizer = build(isokron.Shampoo, [weight], lr=1.0, form=form, **settings)
        for t, grad in enumerate(grads):
            if t == 2:
                before = weight.detach().clone()
                optimizer.param_groups[0].update(damping=0.5, exponent=2, weight_decay=0.0)
            weight.grad = grad
            optimizer.step()
        directions.append(before - weight.detach())
    cov = [torch.zeros(n, n).double() for n in (4, 5)]
    for grad in grads[:2]:
        cov = [folded(c, flat(grad, i) @ flat(grad, i).T, FACTOR_BETA) for i, c in enumerate(cov)]
    roots = [power(hat(c, FACTOR_BETA, 2) + 0.5 * torch.eye(len(c)), -1 / 2).double() for c in cov]
    torch.testing.assert_close(directions[1], roots[0] @ grads[2] @ roots[1])
    assert (directions[0] - directions[1]).norm() > 0.1 * directions[1].norm()
    assert sorted(key for key in optimizer.state[weight] if key.startswith(("root", "values"))) == [
        "values.0.0",
        "values.1.0",
    ]


def test_the_pseudo_inverse_leaves_out_what_no_gradient_has_shown() -> None:
    """Gradients of two rows out of four: the other rows are never divided by."""
    weight = nn.Parameter(torch.zeros(4, 3, dtype=torch.float64))
    settings = {**SETTINGS, "damping": 0.0, "deficient": "pseudo", "every": 1, "start": 1}
    optimizer = build(isokron.Shampoo, [weight], lr=1.0, weight_decay=0.0, **settings)
    grads = gradients((4, 3), 8)
    grads[:, 2:] = 0
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    root = optimizer.state[weight]["root.0.0"]
    assert torch.all(weight[2:] == 0)
    assert weight.isfinite().all()
    assert root[2:].abs().max() < 1e-12
    assert root[:2, :2].abs().max() > 1e-2


def test_an_exponent_a_dimension_and_none_where_it_is_zero() -> None:
    grads = gradients((4, 5), 6)
    weight = nn.Parameter(torch.zeros(4, 5, dtype=torch.float64))
    settings = {**SETTINGS, "every": 1, "start": 1, "betas": (0.0, 0.99)}
    optimizer = build(
        isokron.Shampoo, [weight], lr=1.0, weight_decay=0.0, **{**settings, "exponent": {2: (2, 0)}}
    )
    cov, expected = torch.zeros(4, 4).double(), torch.zeros(4, 5).double()
    for t, grad in enumerate(grads, start=1):
        weight.grad = grad
        optimizer.step()
        cov = FACTOR_BETA * cov + (1 - FACTOR_BETA) * grad @ grad.T
        hat = cov / (1 - FACTOR_BETA**t) + EPS * torch.eye(4)
        expected -= power(hat, -0.5) @ grad
    assert "cov.1.0" not in optimizer.state[weight]
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"statistic": "fisher"}, "statistic must be one of"),
        ({"factor_beta": 1.5}, "factor_beta must be at least 0 and at most 1, got"),
        ({"exponent": -1}, "exponent must be"),
        ({"exponent": {2: (1, 2, 3)}}, "exponent must be"),
        ({"deficient": "pseudo"}, "damping must be 0"),
        ({"solver": "qr"}, "solver must be one of"),
        ({"solver": "newton", "exponent": 2.5}, "root must be an integer for solver='newton'"),
        ({"damping": -1.0}, "damping must be"),
        ({"refresh": 10}, "refresh must be below every=10"),
        ({"refresh": 0}, "refresh must be 'together', 'staggered' or a delay in steps"),
        ({"refresh": "later"}, "refresh must be 'together', 'staggered' or a delay in steps"),
        ({"tolerated": -1}, "tolerated must be"),
        ({"average": "mean"}, "average must be one of"),
        ({"beta3": 1.0}, r"beta3 must be None, or in \[0, 1\) where betas\[0\] is above 0, got"),
        ({"beta3": 0.5, "betas": (0.0, 0.9)}, "beta3 must be None"),
        ({"dampening": 0.5}, "0 where momentum is 0 .there is nothing to dampen"),
        ({"dampening": 1.0, "momentum": 0.9}, r"dampening must be in \[0, 1\)"),
    ],
    ids=str,
)
def test_wrong_settings_of_shampoo_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(isokron.Shampoo, [nn.Parameter(torch.zeros(2, 2))], **settings)


def test_an_unknown_keyword_is_refused_with_what_was_meant() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'factor_betas'.*factor_beta"):
        isokron.Shampoo([nn.Parameter(torch.zeros(2, 2))], factor_betas=0.9)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'refrsh'.*'refresh'"):
        isokron.SOAP([nn.Parameter(torch.zeros(2, 2))], refrsh="staggered")
