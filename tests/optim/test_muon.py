"""Muon against a naive float64 version of the paper, and against torch's."""

import math

import pytest
import torch
from torch import nn

import isokron
from cases import build
from isokron.polynomials import POLYNOMIALS


def naive_muon(
    weight: torch.Tensor, grads: torch.Tensor, lr: float, mu: float, decay: float, nesterov: bool
) -> torch.Tensor:
    """B ← μB + G, W ← W − lr(0.2√max(m,n) · NS₅(B) + λW), in the order the paper gives."""
    a, b, c = POLYNOMIALS["classic"][0]
    momentum = torch.zeros_like(weight)
    for grad in grads:
        momentum = mu * momentum + grad
        x = grad + mu * momentum if nesterov else momentum
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        weight = weight - lr * (0.2 * math.sqrt(max(weight.shape)) * x + decay * weight)
    return weight


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (10, 4)])
def test_follows_the_naive_version_in_float64(shape: tuple[int, int], nesterov: bool) -> None:
    start, grads = torch.randn(shape).double(), torch.randn(7, *shape).double()
    weight = nn.Parameter(start.clone())
    optimizer = isokron.Muon([weight], lr=0.05, nesterov=nesterov)
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    expected = naive_muon(start, grads, 0.05, 0.95, 0.1, nesterov)
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch has one since 2.9")
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(16, 16), (8, 24), (24, 8)])
def test_matches_torch_where_the_settings_coincide(
    shape: tuple[int, int], nesterov: bool, scale: str
) -> None:
    start = torch.randn(shape)
    mine, theirs = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    shared = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.05, "nesterov": nesterov}
    ours = build(isokron.Muon, [mine], scale=scale, dtype=torch.bfloat16, **shared)
    reference = torch.optim.Muon([theirs], adjust_lr_fn=scale, **shared)
    for _ in range(10):
        mine.grad = torch.randn(shape)
        theirs.grad = mine.grad.clone()
        ours.step()
        reference.step()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=2e-6)


def test_update_has_the_rms_of_adamw() -> None:
    weight = nn.Parameter(torch.zeros(64, 128))
    optimizer = isokron.Muon([weight], lr=1.0, weight_decay=0.0)
    weight.grad = torch.randn(64, 128)
    optimizer.step()
    assert 0.15 < weight.detach().square().mean().sqrt() < 0.25


def test_a_convolution_is_the_matrix_of_its_filters() -> None:
    start, grad = torch.randn(6, 4, 3, 3), torch.randn(6, 4, 3, 3)
    conv, matrix = nn.Parameter(start.clone()), nn.Parameter(start.reshape(6, 36))
    conv.grad, matrix.grad = grad, grad.reshape(6, 36)
    isokron.Muon([conv]).step()
    isokron.Muon([matrix]).step()
    assert torch.equal(conv.reshape(6, 36), matrix)


def test_stacked_experts_are_that_many_matrices() -> None:
    start, grad = torch.randn(3, 5, 8), torch.randn(3, 5, 8)
    stacked = nn.Parameter(start.clone())
    experts = [nn.Parameter(matrix.clone()) for matrix in start]
    stacked.grad = grad
    for expert, its_grad in zip(experts, grad, strict=True):
        expert.grad = its_grad
    isokron.Muon([{"params": [stacked], "stacked": 1}]).step()
    isokron.Muon(experts).step()
    assert torch.equal(stacked, torch.stack([e.detach() for e in experts]))


@pytest.mark.parametrize("dim", [0, 1])
def test_a_fused_projection_is_split_into_its_parts(dim: int) -> None:
    shape = (24, 8) if dim == 0 else (8, 24)
    start, grad = torch.randn(shape), torch.randn(shape)
    fused = nn.Parameter(start.clone())
    fused.grad = grad
    parts = [nn.Parameter(part.clone()) for part in start.split((12, 8, 4), dim)]
    for part, its_grad in zip(parts, grad.split((12, 8, 4), dim), strict=True):
        part.grad = its_grad
    isokron.Muon([{"params": [fused], "split": (12, 8, 4), "split_dim": dim}]).step()
    isokron.Muon(parts).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts], dim))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "spectral"}, "scale must be one of"),
        ({"steps": 2.5}, "steps must be"),
        ({"coefficients": (1, 2)}, "coefficients must be"),
    ],
)
def test_wrong_settings_of_its_own_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(isokron.Muon, [nn.Parameter(torch.zeros(2, 2))], **settings)


def test_a_part_of_one_row_is_a_matrix_of_its_own() -> None:
    """The blocks of a batch must not mix, whatever their shape."""
    weight = nn.Parameter(torch.zeros(4, 8))
    optimizer = isokron.Muon(
        [{"params": [weight], "split": 4}], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False
    )
    updates = []
    for size in (1.0, 100.0):
        with torch.no_grad():
            weight.zero_()
        weight.grad = torch.ones(4, 8)
        weight.grad[1:, ::2] *= -size
        optimizer.step()
        updates.append(weight.detach()[0].clone())
    assert torch.equal(*updates)


def test_a_split_of_a_dimension_that_is_merged_is_written_back() -> None:
    start, grad = torch.randn(4, 5, 6), torch.randn(4, 5, 6)
    fused = nn.Parameter(start.clone())
    fused.grad = grad
    parts = [nn.Parameter(part.clone()) for part in start.split(2, 2)]
    for part, its_grad in zip(parts, grad.split(2, 2), strict=True):
        part.grad = its_grad
    isokron.Muon([{"params": [fused], "split": 3, "split_dim": 2}]).step()
    isokron.Muon(parts).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in parts], 2))


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_grafted_first_step_has_the_full_length(kind: str) -> None:
    weight = nn.Parameter(torch.zeros(16, 16))
    weight.grad = torch.randn(16, 16)
    isokron.Muon([weight], lr=1.0, graft=kind, weight_decay=0.0).step()
    expected = weight.grad.norm() if kind == "sgd" else torch.tensor(16.0)
    torch.testing.assert_close(weight.detach().norm(), expected, rtol=1e-4, atol=0)


def test_without_coefficients_large_matrices_get_the_polar_factor_itself() -> None:
    weight = torch.nn.Parameter(torch.zeros(200, 600))
    optimizer = isokron.Muon([weight], lr=1.0, weight_decay=0.0, coefficients=None)
    weight.grad = torch.randn(200, 600)
    optimizer.step()
    u, _, vh = torch.linalg.svd(weight.grad, full_matrices=False)
    expected = -0.2 * 600**0.5 * u @ vh
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-3, atol=1e-4)
