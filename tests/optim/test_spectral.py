"""Whiten, then polar (polar=True), against a naive version in float64."""

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


@pytest.mark.parametrize("shape", [(4, 10), (10, 4)])
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (isokron.Muon, {}),
        (isokron.Shampoo, {"route": "spectral", "momentum": 0.0, "graft": None}),
        (isokron.Shampoo, {"polar": True, "graft": None, "start": 9}),
    ],
)
def test_without_a_scale_the_update_is_the_polar_factor_itself(
    method: Any, settings: dict[str, Any], shape: tuple[int, int]
) -> None:
    weight = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    weight.grad = torch.randn(shape).double()
    group = {"params": [weight], "scale": None, **settings}
    method([group], lr=1.0, weight_decay=0.0).step()
    expected = -naive_polar(weight.grad) / (0.2 * math.sqrt(max(shape)))
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (isokron.SOAP, {"polar": 1}, "polar must be True or False"),
        (isokron.SOAP, {"polar": True, "vectors": True}, "polar must be False where vectors"),
        (isokron.Muon, {"polar": True}, "polar must be False for a method without roots"),
        (isokron.Quad, {"polar": True}, "polar must be False for a method without roots"),
        (isokron.AdamW, {"polar": True}, "polar must be False for a method without roots"),
    ],
)
def test_polar_factors_without_a_meaning_are_refused(
    method: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(method, [nn.Parameter(torch.zeros(2, 2))], **settings)
