"""Options that combine with every method, against naive versions in float64."""

import math
from typing import Any

import pytest
import test_katie
import test_shampoo
import test_soap
import torch
from torch import Tensor, nn

import isokron
from cases import build
from isokron.polynomials import POLYNOMIALS
from naive import assert_follows, gradients


def naive_polar(update: Tensor) -> Tensor:
    """0.2√max(m, n) · NS₅(U), U [m, ...] as a matrix [m, n]."""
    x = update.flatten(1) / update.norm()
    for a, b, c in [POLYNOMIALS["classic"][0]] * 5:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return 0.2 * math.sqrt(max(x.shape)) * x.view_as(update)


METHODS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "soap": (isokron.SOAP, test_soap.naive_soap, test_soap.SETTINGS),
    "katie": (isokron.Katie, test_katie.naive_katie, test_katie.SETTINGS),
    "shampoo": (isokron.Shampoo, test_shampoo.naive_shampoo, test_shampoo.SETTINGS),
}


@pytest.mark.parametrize("shape", [(4, 5), (6, 3), (3, 4, 2)], ids=str)
@pytest.mark.parametrize("name", METHODS)
def test_whiten_then_polar_follows_the_naive_version(name: str, shape: tuple[int, ...]) -> None:
    method, naive, settings = METHODS[name]
    assert_follows(
        method,
        lambda grads: [naive_polar(update) for update in naive(grads)],
        gradients(shape, 20),
        **{**settings, "vectors": False, "polar": True},
    )


def test_a_grafted_polar_factor_has_the_length_of_adam() -> None:
    weight = nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.randn(16, 16)
    group = {"params": [weight], "polar": True}
    isokron.SOAP([group], lr=1.0, start=1, weight_decay=0.0).step()
    # the first step of Adam has entries ±1
    torch.testing.assert_close(weight.detach().norm(), torch.tensor(16.0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_cautious_decay_spares_weights_that_move_away_from_zero(dtype: torch.dtype) -> None:
    """Momentum descent on a matrix and AdamW on a vector; one entry gets no gradient."""
    lr, rate, beta = 0.1, 0.5, 0.9
    grads = gradients((4, 5), 10).to(dtype)
    grads[:, 0, 0] = 0
    start = torch.randn(4, 5, dtype=torch.float64).to(dtype)
    matrix, vector = nn.Parameter(start.clone()), nn.Parameter(start[1].clone())
    optimizer = isokron.Preconditioned(
        [matrix, vector], lr, momentum=beta, betas=(0.9, 0.99), weight_decay=rate, decay="cautious"
    )
    expected = {matrix: start.double(), vector: start[1].double()}
    m, v = torch.zeros(4, 5, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    spared = 0
    for t, grad in enumerate(grads, start=1):
        matrix.grad, vector.grad = grad, grad[1]
        optimizer.step()
        m, v = 0.9 * m + 0.1 * grad, 0.99 * v + 0.01 * grad[1].double() ** 2
        mean = m / (1 - 0.9**t)
        updates = {matrix: mean, vector: mean[1] / ((v / (1 - 0.99**t)).sqrt() + 1e-8)}
        for param, update in updates.items():
            weight = expected[param]
            aligned = update * weight > 0
            spared += int((~aligned).sum())
            expected[param] = weight - lr * (update + rate * weight * aligned)
    assert 20 < spared < 230
    tolerance = 1e-9 if dtype is torch.float64 else 3e-2
    for param, weight in expected.items():
        torch.testing.assert_close(param.double(), weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (isokron.SOAP, {"polar": 1}, "polar must be True or False"),
        (isokron.SOAP, {"polar": True, "vectors": True}, "polar must be False where vectors=True"),
        (isokron.Muon, {"polar": True}, "polar must be False for a method that has no Kronecker"),
        (isokron.Quad, {"polar": True}, "polar must be False for a method that has no Kronecker"),
        (isokron.AdamW, {"polar": True}, "polar must be False for a method that has no Kronecker"),
        (isokron.Muon, {"decay": "careful"}, "decay must be one of .*'cautious'"),
    ],
)
def test_compositions_without_a_meaning_are_refused(
    method: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, [nn.Parameter(torch.zeros(2, 2))], **settings)
