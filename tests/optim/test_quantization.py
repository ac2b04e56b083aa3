"""State in fewer bytes: codes against a naive search, rounding that is right on average, sizes."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import SMALL, build
from isokron import tasks
from isokron.optim.quantization import (
    dequantize,
    dequantize_symmetric,
    dynamic_levels,
    quantize,
    quantize_symmetric,
    stochastic_bfloat16,
)
from isokron.race.train import optimizer_bytes


def naive_levels(signed: bool) -> list[float]:
    """Every decade below 1 has half as many evenly spaced levels as the one above it."""
    decades = 7 if signed else 8
    levels = [0.0] if signed else []
    for decade in range(decades):
        low, high = 10.0 ** (decade - decades), 10.0 ** (decade + 1 - decades)
        count = 2**decade
        levels += [low + (high - low) * (i + 1) / count for i in range(count)]
    return levels + [-level for level in levels if signed and level]


def naive_errors(x: Tensor, signed: bool, block: int = 256) -> tuple[Tensor, Tensor]:
    """Distance to the nearest level in float64, row by row and block by block; and the scales."""
    levels = torch.tensor(naive_levels(signed), dtype=torch.float64)
    errors, scales = torch.zeros_like(x, dtype=torch.float64), []
    for row, target in zip(x.double().flatten(1), errors.view(len(x), -1), strict=True):
        for start in range(0, len(row), block):
            values = row[start : start + block]
            scale = values.abs().max()
            distances = (values[:, None] - levels * scale).abs()
            target[start : start + block] = distances.min(1).values
            scales.append(scale)
    return errors, torch.stack(scales).view(len(x), -1)


@pytest.mark.parametrize("shape", [(3, 256), (2, 40, 20), (5, 7), (1, 257)])
@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_the_nearest_level(shape: tuple[int, ...], signed: bool) -> None:
    x = torch.randn(shape) * torch.randn(shape).mul(3).exp()
    x = x if signed else x.square()
    codes, scale = quantize(x, signed)
    assert codes.dtype is (torch.int8 if signed else torch.uint8)
    assert codes.shape == x.shape
    errors, scales = naive_errors(x, signed)
    torch.testing.assert_close(scale.double(), scales)
    error = (dequantize(codes, scale, torch.float64) - x.double()).abs()
    # numbers are looked up by ten bits of their mantissa
    assert (error <= errors * (1 + 1e-6) + 2**-10 * x.double().abs()).all()


def test_the_largest_value_of_a_block_is_kept_and_signs_are_symmetric() -> None:
    x = torch.randn(4, 512)
    codes, scale = quantize(x, signed=True)
    values = dequantize(codes, scale, torch.float32).view(4, 2, 256)
    largest = x.view(4, 2, 256).abs().argmax(-1, keepdim=True)
    assert torch.equal(values.gather(-1, largest), x.view(4, 2, 256).gather(-1, largest))
    assert torch.equal(quantize(-x, signed=True)[0], -codes)
    assert len(dynamic_levels(7)) == 127
    assert len(dynamic_levels(8)) == 255


def test_a_second_moment_becomes_zero_only_where_its_block_is() -> None:
    x = torch.zeros(2, 256)
    x[0, 0] = 1.0
    values = dequantize(*quantize(x, signed=False), torch.float32)
    assert (values[0] > 0).all()
    assert values[0, 1:].max() <= 1e-7
    assert (values[1] == 0).all()


def test_rows_are_coded_alone_and_empty_or_broken_ones_are_fine() -> None:
    x = torch.randn(6, 3, 100)
    codes, scale = quantize(x, signed=True)
    for rows in (slice(0, 2), slice(2, 6), slice(3, 3)):
        part = quantize(x[rows], signed=True)
        assert torch.equal(part[0], codes[rows])
        assert torch.equal(part[1], scale[rows])
    x[1, 0, 0] = math.nan
    values = dequantize(*quantize(x, signed=True), torch.float32)
    assert values[1, 0, 0].isnan()
    assert values[[0, 2, 3, 4, 5]].isfinite().all()


def test_stochastic_rounding_takes_a_neighbour_and_is_right_on_average() -> None:
    x = torch.randn(1, 2001)
    spacing = torch.exp2(x.abs().double().log2().floor() - 7)  # bfloat16 has 8 bits of precision
    count = 4000
    total = torch.zeros_like(x, dtype=torch.float64)
    for seed in range(count):
        rounded = stochastic_bfloat16(x, torch.tensor([seed]))
        assert ((rounded.double() - x).abs() < spacing).all()
        total += rounded.double()
    # the mean of `count` draws has a standard deviation of at most half a spacing / √count
    deviation = (total / count - x).abs() / (0.5 * spacing / count**0.5)
    assert deviation.max() < 5.5
    assert 0.5 < deviation.square().mean() < 1.1  # of uniform bits 2/3, as the mean of 4p(1 − p)


def test_random_bits_depend_on_seed_and_position_alone() -> None:
    x = torch.full((3, 1000), 1 + 2**-8)  # half-way between two numbers
    rounded = stochastic_bfloat16(x, torch.tensor([5.0, 6.0, 5.0]))
    assert torch.equal(rounded[0], rounded[2])
    agreement = (rounded[0] == rounded[1]).double().mean()
    neighbours = (rounded[0, 1:] == rounded[0, :-1]).double().mean()
    assert 0.4 < agreement < 0.6
    assert 0.4 < neighbours < 0.6
    assert torch.equal(stochastic_bfloat16(x[1:2, :10], torch.tensor([6])), rounded[1:2, :10])
    exact = torch.randn(2, 50).bfloat16()
    assert torch.equal(stochastic_bfloat16(exact.float(), torch.tensor([1, 2])), exact)


def covariances(count: int, size: int) -> Tensor:
    x = torch.randn(count, size, 2 * size, dtype=torch.float64)
    x *= torch.logspace(0, -3, size, dtype=torch.float64)[:, None]  # rows of many sizes
    return x @ x.mT


@pytest.mark.parametrize("size", [1, 5, 64, 130])
def test_codes_of_symmetric_matrices_are_correlations_to_16_bits_and_right_on_average(
    size: int,
) -> None:
    matrices = covariances(2, size)
    deviations = matrices.diagonal(dim1=-2, dim2=-1).sqrt()
    spacing = deviations[:, :, None] * deviations[:, None, :] / (2**15 - 1)
    read = matrices.tril() + torch.full_like(matrices, 7.0).triu(1)  # what is above is not read
    count = 100
    total = torch.zeros_like(matrices)
    for seed in range(count):
        codes, scale = quantize_symmetric(read, torch.tensor([seed, seed]))
        values = dequantize_symmetric(codes, scale, torch.float64)
        assert ((values - matrices).abs() < 1.01 * spacing).all()
        assert torch.equal(values, values.mT)
        total += values
    assert codes.dtype is torch.uint8  # two bytes a code
    # the mean of draws has a standard deviation of at most half a spacing / √count
    assert ((total / count - matrices).abs() < 5.5 * 0.5 * spacing / count**0.5).all()


def test_codes_of_symmetric_matrices_without_a_gradient_or_with_nan_keep_to_their_rows() -> None:
    matrices = covariances(3, 8)
    matrices[0] = 0
    matrices[1, 2, :] = matrices[1, :, 2] = 0  # an input that is always 0
    matrices[2, 3, :] = matrices[2, :, 3] = math.nan
    codes, scale = quantize_symmetric(matrices, torch.tensor([1, 1, 1]))
    values = dequantize_symmetric(codes, scale, torch.float32)
    assert (values[0] == 0).all()
    assert (values[1, 2] == 0).all()
    assert values[1].isfinite().all()
    assert values[2, 3, 3].isnan()
    alone = quantize_symmetric(matrices[1:2], torch.tensor([1]))
    assert torch.equal(alone[0], codes[1:2])


def test_a_mean_in_codes_of_16_bits_keeps_the_small_eigenvalues_that_bfloat16_hides() -> None:
    size, beta = 48, 0.95
    root = torch.linalg.qr(torch.randn(size, size)).Q * torch.logspace(0, -2, size)
    exact = torch.zeros(1, size, size)
    small, half = exact.clone(), exact.clone()
    for step in range(100):
        seeds = torch.tensor([step])
        x = root @ torch.randn(size, 2 * size)
        gram = (x @ x.mT)[None]
        exact = torch.lerp(gram, exact, beta)
        mean = torch.lerp(gram, small, beta)
        small = dequantize_symmetric(*quantize_symmetric(mean, seeds), torch.float32)
        half = stochastic_bfloat16(torch.lerp(gram, half, beta), seeds).float()
        half = half.tril() + half.tril(-1).mT

    def error(mean: Tensor) -> float:
        """‖C^(−½)(A − C)C^(−½)‖₂"""
        lower = torch.linalg.cholesky(exact.double())
        left = torch.linalg.solve_triangular(lower, (mean - exact).double(), upper=False)
        return float(torch.linalg.solve_triangular(lower, left.mT, upper=False).norm(2))

    assert error(small) < 0.5
    assert error(half) > 20 * error(small)


def test_adamw_steps_as_naive_adamw_whose_moments_are_rounded() -> None:
    weight = nn.Parameter(torch.randn(32, 3, 100, dtype=torch.float64))
    w, lr, (beta1, beta2), eps = weight.detach().clone(), 0.01, (0.9, 0.99), 1e-8
    optimizer = isokron.AdamW([weight], lr, (beta1, beta2), weight_decay=0.1, moments="8bit")
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 20):
        weight.grad = g = torch.randn_like(w)
        optimizer.step()
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g.square()
        deviation = (v / (1 - beta2**step)).sqrt() + eps
        w = w * (1 - lr * 0.1) - lr * m / (1 - beta1**step) / deviation
        m, v = (dequantize(*quantize(x, s), torch.float64) for x, s in ((m, True), (v, False)))
    torch.testing.assert_close(weight.detach(), w, rtol=1e-9, atol=1e-9)


def test_small_tensors_vectors_and_short_rows_keep_their_moments_as_they_are() -> None:
    shapes = [(64, 64), (63, 64), (5000,), (1000, 7)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = isokron.AdamW(params, moments="8bit")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    dtypes = [optimizer.state[param]["exp_avg"].dtype for param in params]
    assert dtypes == [torch.int8, torch.float32, torch.float32, torch.float32]
    assert optimizer.state[params[0]]["exp_avg_sq"].dtype is torch.uint8
    soap = build(isokron.SOAP, params[:2], moments="8bit", factor_dtype="8bit", every=1)
    soap.step()
    assert soap.state[params[0]]["rotated.0"].dtype is torch.int8
    assert soap.state[params[0]]["cov.0.0"].nbytes < 2 * 0.54 * 64 * 64  # a triangle, in panels
    assert soap.state[params[1]]["rotated.0"].dtype is torch.float32


@pytest.mark.parametrize(
    ("name", "most"), [("AdamW", 0.3), ("SOAP", 1.0), ("Katie", 1.0), ("Shampoo", 1.0)]
)
def test_state_takes_at_most_so_many_times_the_bytes_of_adamws(name: str, most: float) -> None:
    def size(optimizer: Any, **settings: Any) -> int:
        model = tasks.load("speeches-small").model()
        made = optimizer(isokron.param_groups(model, **settings))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        made.step()
        return optimizer_bytes(made)

    factors = {} if name == "AdamW" else {"factor_dtype": "8bit"}
    small = size(getattr(isokron, name), moments="8bit", **factors)
    assert small <= most * size(isokron.AdamW)


@pytest.mark.parametrize("factor_dtype", [torch.bfloat16, "8bit"])
@pytest.mark.parametrize("name", ["SOAP", "Katie", "Shampoo"])
def test_a_step_in_few_bytes_is_close_to_one_in_float32(name: str, factor_dtype: Any) -> None:
    """Whose second moments, factors and operators have become those of many gradients."""
    start, scale = torch.randn(40, 31), torch.rand(40, 31) + 0.1

    def update(**settings: Any) -> Tensor:
        weight = nn.Parameter(start.clone())
        optimizer = build(getattr(isokron, name), [weight], lr=0.01, weight_decay=0.0, **settings)
        generator = torch.Generator().manual_seed(0)
        for _ in range(30):
            before = weight.detach().clone()
            weight.grad = (torch.randn(40, 31, generator=generator) + 0.5) * scale
            optimizer.step()
        return weight.detach() - before

    exact = update()
    small = update(moments="8bit", min_8bit_size=0, factor_dtype=factor_dtype)
    assert torch.cosine_similarity(exact.flatten(), small.flatten(), dim=0) > 0.98
    assert not torch.equal(exact, small)


@pytest.mark.parametrize("name", ["AdamW", "SOAP", "SignDescent"])
def test_small_steps_of_bfloat16_are_lost_to_the_nearest_and_kept_on_average(name: str) -> None:
    def moved(dtype: torch.dtype, rounding: str) -> float:
        weight = nn.Parameter(torch.full((64, 64), 3.0, dtype=dtype))
        settings = {"lr": 1e-3, "weight_decay": 0.0, "rounding": rounding}
        optimizer = build(getattr(isokron, name), [weight], **settings)
        generator = torch.Generator().manual_seed(0)
        for _ in range(30):
            weight.grad = torch.rand(64, 64, generator=generator).add(0.5).to(dtype)
            optimizer.step()
        return 3.0 - weight.detach().double().mean().item()

    exact = moved(torch.float32, "nearest")
    assert exact > 1e-3
    assert moved(torch.bfloat16, "nearest") == 0
    assert moved(torch.bfloat16, "stochastic") == pytest.approx(exact, rel=0.2)
    assert moved(torch.float32, "stochastic") == exact


@pytest.mark.parametrize(("moments", "copies"), [(None, {"momentum.0"}), ("8bit", set())])
def test_grafted_soap_keeps_its_first_moment_twice_only_in_float32(
    moments: str | None, copies: set[str]
) -> None:
    weight = nn.Parameter(torch.randn(6, 5))
    optimizer = build(isokron.SOAP, [weight], graft="adam", moments=moments, min_8bit_size=0)
    weight.grad = torch.randn(6, 5)
    optimizer.step()
    whole = {key for key, value in optimizer.state[weight].items() if value.shape == (6, 5)}
    assert whole == {"rotated.0", "variance.0", "graft.0"} | copies


@pytest.mark.parametrize("name", ["AdamW", "SOAP"])
def test_moments_that_change_their_form_are_refused(name: str) -> None:
    weight = nn.Parameter(torch.randn(6, 15))
    optimizer = build(getattr(isokron, name), [weight])
    weight.grad = torch.randn(6, 15)
    optimizer.step()
    optimizer.param_groups[0].update(SMALL)
    with pytest.raises(ValueError, match="set moments before the first step"):
        optimizer.step()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"moments": "4bit"}, "moments must be one of None, '8bit', got moments='4bit'"),
        ({"rounding": "up"}, "rounding must be one of 'nearest', 'stochastic'"),
        ({"min_8bit_size": -1}, "min_8bit_size must be a whole number of at least 0"),
        ({"factor_dtype": "4bit"}, "factor_dtype must be None or a floating-point dtype, or"),
    ],
)
def test_what_cannot_be_is_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build(isokron.SOAP, [nn.Parameter(torch.zeros(2, 2))], **settings)
