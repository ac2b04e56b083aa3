"""Quad and Skew: the naive float64 version, recorded numbers, faults, options."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import build, equal, net, train
from isokron.linalg import norm_bound
from isokron.optim import quad_skew
from isokron.optim.quad_skew import Pull, balance_, fixed_numbers, procrustes
from isokron.white_kron import scramble, uniform
from naive import gradients
from white_kron_naive import Naive

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ISOKRON_SHARED", ROOT.parent / "shared")) / "data" / "white_kron"
METHODS = {"quad": isokron.Quad, "skew": isokron.Skew}
both = pytest.mark.parametrize("kind", METHODS)
needs_data = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"no reference trajectories in {DATA}; set ISOKRON_SHARED to the folder that has data/",
)
SHAPES = [(12, 8), (20, 35), (40, 10), (10, 40), (33, 50), (5, 3, 4), (7,), (), (1, 6), (16, 16)]


def recorded_probes(size: int) -> np.ndarray:
    """Those of the trajectories, whose energy of a row is a mean over the padded width of 16."""
    i, j = np.ogrid[:4, :size]
    return np.sqrt(2) * np.cos(1 + 1.7 * i + 0.9 * j) * np.sqrt(size / 16)


def our_probes(size: int) -> np.ndarray:
    return fixed_numbers((4, size), torch.empty(0, dtype=torch.float64)).numpy()


def directions(
    make: Callable[..., isokron.Preconditioned], grads: Tensor, **settings: Any
) -> list[Tensor]:
    """What each step takes off a parameter, by lr 1 and without decay."""
    weight = nn.Parameter(torch.zeros_like(grads[0]))
    optimizer = build(make, [weight], lr=1.0, weight_decay=0.0, **settings)
    steps = []
    for grad in grads:
        before = weight.detach().clone()
        weight.grad = grad.clone()
        optimizer.step()
        steps.append(before - weight.detach())
    return steps


def apart(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_direction_is_that_of_the_naive_version(kind: str, shape: tuple[int, ...]) -> None:
    """Also past the hundredth step, which balances the sides."""
    grads = gradients(shape, 103)
    settings = {"block_size": 16, "max_size_dense": 32, "noise_scale": 0.0}
    found = directions(METHODS[kind], grads, **settings)
    naive = Naive(shape, False, kind == "skew", our_probes)
    for t, (ours, grad) in enumerate(zip(found, grads, strict=True), 1):
        assert apart(ours, naive.direction(grad.numpy())) < 1e-6, t


@both
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_normalize_divides_the_momentum_by_its_norm(kind: str, shape: tuple[int, ...]) -> None:
    """Gradients that grow and shrink: those of size one would have another momentum. Layers of
    (33, 50) and (20, 35) have blocks in four batches."""
    grads = gradients(shape, 12)
    grads = grads * torch.tensor([1.0, 30.0, 0.1] * 4).view(-1, *[1] * len(shape))
    settings = {"block_size": 16, "max_size_dense": 64, "noise_scale": 0.0, "normalize": True}
    found = directions(METHODS[kind], grads, **settings)
    naive = Naive(shape, False, kind == "skew", our_probes, largest=64, normalize=True)
    for t, (ours, grad) in enumerate(zip(found, grads, strict=True), 1):
        assert apart(ours, naive.direction(grad.numpy())) < 1e-6, t


@both
def test_without_bias_correction_the_momentum_is_whitened_as_it_is(kind: str) -> None:
    grads = gradients((12, 8), 1)
    settings: dict[str, Any] = {"noise_scale": 0.0}
    biased = directions(METHODS[kind], grads, use_bias_correction=False, **settings)
    plain = directions(METHODS[kind], 0.05 * grads, momentum=0.0, **settings)
    assert apart(biased[0], plain[0]) < 1e-9


def test_stacked_layers_are_normalized_one_by_one() -> None:
    grads = gradients((3, 20, 17), 4)
    grads = grads * torch.tensor([1.0, 30.0, 0.1]).view(1, 3, 1, 1)
    settings = {"block_size": 16, "noise_scale": 0.0, "normalize": True, "stacked": 1}
    found = directions(isokron.Quad, grads, **settings)
    naive = Naive((3, 20, 17), True, False, our_probes, normalize=True)
    for t, (ours, grad) in enumerate(zip(found, grads, strict=True), 1):
        assert apart(ours, naive.direction(grad.numpy())) < 1e-6, t


@needs_data
@both
def test_directions_are_those_recorded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of stacked leaves one by one; those are recorded with one clip for all together."""

    def numbers(shape: Any, like: Tensor, *_: Any) -> Tensor:
        return torch.from_numpy(recorded_probes(shape[-1])).to(like)

    monkeypatch.setattr(quad_skew, "_numbers", numbers)
    grads, recorded = np.load(DATA / "grads.npz"), np.load(DATA / f"trajectory_{kind}.npz")
    sensitivity = json.loads((DATA / f"sensitivity_{kind}.json").read_text())
    settings = {"block_size": 16, "max_size_dense": 32, "noise_scale": 0.0}
    for leaf in sorted({name.split("/")[2] for name in recorded.files}):
        stacked = "_scan_" in leaf
        shown = torch.from_numpy(grads[f"g/{leaf}"])
        layers = shown.unbind(1) if stacked else [shown]
        found = [directions(METHODS[kind], layer, **settings) for layer in layers]
        for t in (1, 2, 5, 20):
            expected = recorded[f"u/{t}/{leaf}"]
            for layer, each in zip(found, expected if stacked else expected[None], strict=True):
                ours = layer[t - 1].numpy()
                if stacked:
                    ours, each = ours / np.linalg.norm(ours), each / np.linalg.norm(each)
                assert apart(ours, each) < max(2e-4, 3 * sensitivity[f"{t}/{leaf}"]), (t, leaf)


@needs_data
@pytest.mark.parametrize("n", [5, 16, 33])
def test_single_functions_are_those_recorded(n: int) -> None:
    data = np.load(DATA / "functions.npz")

    def get(name: str) -> Tensor:
        return torch.from_numpy(data[name.replace("*", str(n))])

    def near(found: Tensor, name: str) -> None:
        torch.testing.assert_close(found[0], get(name), rtol=3e-6, atol=3e-6)

    def bounded(name: str, normals: str) -> Tensor:
        matrix = get(name)[None]
        return norm_bound(matrix, matrix.abs().amax((1, 2)), get(normals))

    near(bounded("nlb/*/A", "nlb/*/normals"), "nlb/*/out")
    near(bounded("nlb_skh/*/A", "nlb/*/normals"), "nlb_skh/*/out")
    near(procrustes(get("proc/*/Q")[None], get("proc/*/normals")), "proc/*/out")
    for kind, method in METHODS.items():
        last = "" if kind == "quad" else "2"
        gram, target = get(f"dense_{kind}/*/term1")[None], get(f"dense_{kind}/*/term2")
        scale = get(f"dense_{kind}/*/Lout").reshape(1)
        # a root of T with as many columns as T's target says
        pull = Pull(torch.empty(1, n, int(target)), gram.clone(), method.pace * 0.7 / scale)
        if pull.thin is None:
            probes = get(f"dense_{kind}/*/normals{last}")
            factor = get(f"dense_{kind}/*/Q")[None]
            quad = kind == "quad"
            moved = pull.around(factor) if quad else procrustes(pull.before(factor), probes)
            near(moved, f"dense_{kind}/*/Qout")


@needs_data
def test_balancing_is_that_recorded() -> None:
    data = np.load(DATA / "functions.npz")
    left, right = torch.from_numpy(data["balance/Ql"]), torch.from_numpy(data["balance/Qr"])
    balance_([left, right], torch.ones(len(left), dtype=torch.bool))
    np.testing.assert_allclose(left, data["balance/Qlo"], 1e-6)
    np.testing.assert_allclose(right, data["balance/Qro"], 1e-6)


def test_the_fixed_numbers_are_those_of_both_frameworks() -> None:
    ours = fixed_numbers((300, 500), torch.empty(0, dtype=torch.float64))
    rows, columns = np.ogrid[:300, :500]
    bits = scramble(rows.astype(np.uint64), columns.astype(np.uint64)) & np.uint64(2**32 - 1)
    torch.testing.assert_close(ours, torch.from_numpy(uniform(bits.astype(np.float64))))
    assert abs(ours.square().mean() - 1) < 0.01


@both
def test_layers_of_a_stack_step_as_if_each_were_alone(kind: str) -> None:
    grads = gradients((3, 20, 9), 8).float()
    stacked = directions(METHODS[kind], grads, stacked=1, block_size=16)
    alone = [directions(METHODS[kind], grads[:, i], block_size=16) for i in range(3)]
    for t in range(8):
        for i in range(3):
            assert apart(stacked[t][i], alone[i][t]) < 1e-5


@both
def test_the_clip_is_one_for_a_whole_layer(kind: str) -> None:
    """A layer of four blocks, of which one alone would be clipped more than the others."""
    grads = gradients((32, 32), 3)
    grads[:, :16, :16] *= 1e3
    settings = {"block_size": 16, "lr_style": None}
    whole = directions(METHODS[kind], grads, **settings)[-1]
    corner = directions(METHODS[kind], grads[:, :16, :16], **settings)[-1]
    assert whole.square().mean().sqrt() < 1.1001
    assert corner.square().mean().sqrt() < 1.1001
    naive = Naive((32, 32), False, kind == "skew", our_probes)
    for grad in grads:
        expected = naive.direction(grad.numpy()) * 5
    assert apart(whole, expected) < 1e-5


@both
@pytest.mark.parametrize("size", [1e-30, 1e-10, 1e10, 1e30])
def test_any_finite_gradient_gives_a_finite_step(kind: str, size: float) -> None:
    grads = gradients((20, 12), 30).float()
    found = directions(METHODS[kind], grads / grads.abs().max() * size, block_size=16)
    assert all(step.isfinite().all() for step in found)
    assert all(step.square().mean().sqrt() <= 0.2201 for step in found)


@both
@pytest.mark.parametrize("noise", [0.0, 1e-9])
@pytest.mark.parametrize("apply", ["new", "old"])
def test_zero_gradients_keep_factors_finite_and_parameters_still(
    kind: str, noise: float, apply: str
) -> None:
    weight = nn.Parameter(torch.ones(10, 6))
    optimizer = build(
        METHODS[kind], [weight], lr=0.1, weight_decay=0.0, noise_scale=noise, apply=apply
    )
    for _ in range(200):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    assert all(value.isfinite().all() for value in optimizer.state[weight].values())
    assert torch.equal(weight.detach(), torch.ones(10, 6))


@both
def test_a_gradient_that_is_not_finite_leaves_state_alone_and_is_reported(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = METHODS[kind](model.named_parameters(), nonfinite="skip")
    train(model, optimizer, range(3))
    before = {key: value.clone() for key, value in optimizer.state[model.twin.weight].items()}
    model.twin.weight.grad[0, 0] = torch.nan
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert optimizer.skipped_steps == 1
    assert "twin.weight" in caplog.text
    after = optimizer.state[model.twin.weight]
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    strict = METHODS[kind](model.named_parameters())
    with pytest.raises(FloatingPointError, match=r"twin\.weight"):
        strict.step()


@both
def test_seeded_numbers_are_of_the_seed_and_the_step_alone(kind: str) -> None:
    runs = []
    for seed in (0, 0, 1):
        model = net()
        optimizer = build(METHODS[kind], model.parameters(), seed=seed, noise_scale=1e-3)
        train(model, optimizer, range(6))
        runs.append(model)
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


@both
def test_bfloat16_state_is_half_of_float32_and_trains_as_well(kind: str) -> None:
    losses, sizes = [], []
    for dtype in (None, torch.bfloat16):
        model = net()
        optimizer = METHODS[kind](model.parameters(), dtype=dtype)
        losses.append(train(model, optimizer, range(60)))
        entry = optimizer.state[model.hidden.weight]
        sizes.append(sum(value.nbytes for value in entry.values()))
    assert sizes[1] < 0.52 * sizes[0]
    assert losses[1] < 1.2 * losses[0]


@both
def test_a_small_factor_rate_is_not_raised_to_the_floor(kind: str) -> None:
    grads = gradients((8, 8), 12)
    slow, same, raised = (
        directions(METHODS[kind], grads, preconditioner_lr=1e-6, preconditioner_lr_floor=floor)
        for floor in (0.4, 0.0, 1.0)
    )
    still = directions(METHODS[kind], grads, preconditioner_lr=1e-12)
    for each in zip(slow, same, raised, still, strict=True):
        assert apart(each[0], each[1]) < 1e-9
        assert apart(each[0], each[2]) < 1e-9
        assert apart(each[0], each[3]) < 1e-3


@both
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preconditioner_lr": 0.0}, "preconditioner_lr must be a finite number above 0"),
        ({"preconditioner_lr": 1.5}, "preconditioner_lr must be at most 1"),
        ({"preconditioner_lr_floor": -1.0}, "preconditioner_lr_floor must be a finite number"),
        ({"preconditioner_init_scale": 1e9}, "preconditioner_init_scale must be at most 1e\\+06"),
        ({"lr_style": "adamw"}, "lr_style must be one of \\('adam', None\\), got"),
        ({"apply": "both"}, "apply must be one of"),
        ({"dtype": torch.float16}, "dtype must be one of"),
        ({"dtype": "bfloat16"}, "dtype must be one of"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1"),
        ({"max_size_dense": 2.5}, "max_size_dense must be a whole number"),
        ({"noise_scale": float("nan")}, "noise_scale must be a finite number"),
        ({"damping": 0.1, "apply": "old"}, "damping must be 0 with apply='old'"),
        ({"seed": -1}, "seed must be None or a whole number"),
        ({"normalize": 1}, "normalize must be True or False"),
        ({"max_dim": 64}, "max_dim must be None here; `block_size`"),
        ({"warmup": -1}, "warmup must be a whole number of at least 0"),
        ({"every": 3, "warmup": 2, "refresh": 1}, "refresh must be a word with a warmup"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_bad_settings_are_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    weight = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(ValueError, match=f"{kind.title()}: {message}"):
        build(METHODS[kind], [weight], **settings)
