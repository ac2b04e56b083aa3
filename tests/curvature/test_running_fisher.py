"""The running Fisher of a layer and its damped inverse, against dense matrices in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.curvature import find_layers
from isokron.curvature.layer_report import log_line
from isokron.curvature.running_fisher import RunningFisher, decompose
from isokron.curvature.statistics import Sums, Uses, eigenvalues_, means_of

OUTPUTS, INPUTS = 9, 6
POLICIES = ("dense", "auto", "hybrid", "all")


def observations(
    seed: int, count: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """Gradients g [T, o] and inputs a [T, i]."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (count, OUTPUTS), (count, INPUTS)
    g, a = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    return (0.1 * g).to(dtype), a.to(dtype)


def fisher_of(
    data: list[tuple[Tensor, Tensor]], method: str = "kfac", beta: float = 0.9, **settings: Any
) -> RunningFisher:
    """After one refresh at the end of all observations."""
    g, a = data[0]
    layer = find_layers(nn.Linear(a.size(1), g.size(1), bias=False), max_side=None).layers[0]
    fisher = RunningFisher(layer, method, **settings)
    fisher.make_(g, 0.0)
    for g, a in data:
        left, right = g[None], a[None]
        if method == "tkfac":
            left = left * a.norm(dim=1)[None, :, None]
            right = right * g.norm(dim=1)[None, :, None]
        means = {"input": right.mT @ right / len(g)}
        if fisher.capacity:
            means["columns"] = left.mT / math.sqrt(len(g))
        else:
            means["output"] = left.mT @ left / len(g)
        fisher.fold_(means, len(g), len(g), beta)
    (pairs,) = decompose([fisher])
    assert pairs is not None
    fisher.refresh_(pairs)
    return fisher


def naive_sides(
    data: list[tuple[Tensor, Tensor]], method: str = "kfac", beta: float = 0.9
) -> tuple[Tensor, Tensor]:
    """G and A, example by example."""
    outputs, inputs, total = 0.0, 0.0, 0.0
    for g, a in data:
        outputs, inputs, total = beta * outputs, beta * inputs, beta * total
        for one, other in zip(g.double(), a.double(), strict=True):
            weights = (1.0, 1.0) if method != "tkfac" else (other @ other, one @ one)
            outputs = outputs + weights[0] * one.outer(one)
            inputs = inputs + weights[1] * other.outer(other)
            total += 1
    outputs, inputs = outputs / total, inputs / total
    return outputs, inputs / inputs.trace() if method == "tkfac" else inputs


def naive_inverse(sides: tuple[Tensor, Tensor], damping: Any, condition: float | None) -> Tensor:
    """H⁻¹ on row-major matrices, by a dense eigendecomposition of the whole."""
    left, right = sides
    if isinstance(damping, tuple):
        eyes = torch.eye(OUTPUTS).double(), torch.eye(INPUTS).double()
        left, right = left + damping[0] * eyes[0], right + damping[1] * eyes[1]
        damping = 0.0
    fisher = torch.kron(left, right)
    values, basis = torch.linalg.eigh(fisher + damping * torch.eye(len(fisher)).double())
    if condition is not None:
        values = values.clamp_min(float(values.max()) / condition)
    return basis @ torch.diag(1 / values) @ basis.mT


@pytest.mark.parametrize("condition", [None, 30.0])
@pytest.mark.parametrize("damping", [1e-3, (0.02, 0.1)])
@pytest.mark.parametrize("t_max", [None, 6])  # of the 9 outputs: a whole basis, and a thin one
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", ["kfac", "tkfac"])
def test_every_policy_and_damping_is_the_dense_inverse(
    method: str, policy: str, t_max: int | None, damping: Any, condition: float | None
) -> None:
    data = [observations(0, 2), observations(1, 3)]  # of rank 5 < 9
    fisher = fisher_of(data, method, policy=policy, t_max=t_max, o_max=8)
    # T of "auto" is the capacity, by default 18, more than ¾ of 9
    keeps = policy in ("all", "hybrid") or (policy == "auto" and t_max == 6)
    assert (fisher.capacity > 0) == keeps
    assert fisher.thin == (keeps and t_max == 6)
    inverse = naive_inverse(naive_sides(data, method), damping, condition)
    gradient = torch.randn(1, OUTPUTS, INPUTS, dtype=torch.float64)
    direction = fisher.direction(gradient, damping, condition)
    wanted = (inverse @ gradient.flatten()).view_as(gradient)
    torch.testing.assert_close(direction, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("outputs", [4_000, 9_000, 50_257])
def test_auto_keeps_the_columns_of_a_wide_head_however_many_there_were(outputs: int) -> None:
    with torch.device("meta"):
        layer = find_layers(nn.Linear(4, outputs, bias=False), max_side=None).layers[0]
    for settings in ({}, {"t_max": 1024}):
        fisher = RunningFisher(layer, "kfac", "auto", **settings)
        assert fisher.thin
        shapes = fisher.shapes(True)
        assert all(outputs not in shape[2:] for shape in shapes.values())
        assert "output" not in shapes
    # one with fewer columns than t_max has no use for a dense basis either
    assert RunningFisher(layer, "kfac", "auto", t_max=outputs).capacity == 0


@pytest.mark.parametrize("policy", ["auto", "all"])
def test_as_many_columns_as_outputs_lose_nothing(policy: str) -> None:
    data = [observations(seed, 7) for seed in range(6)]
    fisher = fisher_of(data, policy=policy, rho=1.0, t_max=9)
    assert int(fisher.state["count"]) == 9
    assert fisher.record(1e-2, None)["lost"] == 0.0
    gradient = torch.randn(1, OUTPUTS, INPUTS, dtype=torch.float64)
    wanted = naive_inverse(naive_sides(data), 1e-2, None) @ gradient.flatten()
    direction = fisher.direction(gradient, 1e-2, None)
    torch.testing.assert_close(direction.flatten(), wanted, rtol=1e-9, atol=1e-9)


def test_columns_past_t_max_are_the_best_and_the_others_count_evenly() -> None:
    data = [observations(0, 8)]
    fisher = fisher_of(data, policy="all", t_max=8)
    assert (int(fisher.state["count"]), fisher.record(1e-3, None)["lost"]) == (8, 0.0)
    fisher = fisher_of([*data, observations(1, 4)], policy="all", t_max=8, beta=1.0)
    first = data[0][0] / math.sqrt(12)  # of weight 8/12 after the second observation
    values, basis = torch.linalg.eigh(first.mT @ first)
    best = basis[:, -4:] @ torch.diag(values[-4:]) @ basis[:, -4:].mT
    later = observations(1, 4)[0] / math.sqrt(12)
    kept = best + later.mT @ later
    columns = fisher.state["columns"][0] * fisher.state["lengths"][0]
    torch.testing.assert_close(columns @ columns.mT, kept, rtol=1e-9, atol=1e-12)
    lost = float(values[:-4].sum())
    record = fisher.record(1e-3, None)
    assert record["lost"] == pytest.approx(lost / (lost + float(kept.trace())))
    # one direction of nine is outside of the eight columns
    _, basis = torch.linalg.eigh(kept)
    output = kept + lost * basis[:, :1] @ basis[:, :1].mT
    _, inputs = naive_sides([*data, observations(1, 4)], beta=1.0)
    gradient = torch.randn(1, OUTPUTS, INPUTS, dtype=torch.float64)
    wanted = naive_inverse((output, inputs), 1e-3, None) @ gradient.flatten()
    direction = fisher.direction(gradient, 1e-3, None)
    torch.testing.assert_close(direction.flatten(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_columns_in_half_precision_are_decayed_and_as_right_as_their_rounding(
    dtype: torch.dtype,
) -> None:
    """Weights of 0.999 would round to 1, and gradients of 1e-7 to 0 in float16."""
    data = [tuple(1e-6 * x for x in observations(seed, 1)) for seed in range(6)]
    stored = fisher_of(data, policy="all", t_max=8, beta=0.999, dtype=dtype)
    right = fisher_of(data, policy="all", t_max=8, beta=0.999)
    assert stored.state["columns"].dtype is dtype
    for key, rtol in (("lengths", 1e-12), ("values.output", 2e-2)):
        torch.testing.assert_close(stored.state[key], right.state[key], rtol=rtol, atol=0)


def test_columns_of_a_checkpoint_go_where_their_storage_says() -> None:
    saved = fisher_of([observations(0, 3)], policy="all", t_max=4)
    fisher = RunningFisher(saved.layer, policy="all", t_max=4, storage="device")
    fisher.load_(saved.state, torch.zeros((), device="meta"))
    assert fisher.state["columns"].is_meta


def test_clipped_eigenvalues_are_counted_and_the_condition_number_holds() -> None:
    data = [observations(0, 4)]
    left, right = naive_sides(data)
    values = torch.linalg.eigvalsh(torch.kron(left, right)).clamp_min(0) + 1e-3
    share = float((values < values.max() / 20).double().mean())
    assert 0 < share < 1
    for policy in ("dense", "all"):
        record = fisher_of(data, policy=policy).record(1e-3, 20.0)
        assert record["clipped"] == pytest.approx(share)
        assert record["condition"] == math.inf
        assert record["condition_after"] == pytest.approx(20.0)
        free = fisher_of(data, policy=policy).record(1e-3, None)
        assert free["condition_after"] == pytest.approx(float(values.max() / values.min()))
        assert free["clipped"] == 0.0


def layer_data(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Gradients and inputs of a wide layer and of a softmax for 12 examples: rank-deficient."""
    torch.manual_seed(0)
    first, wide, out = nn.Linear(8, 4), nn.Linear(4, 40), nn.Linear(40, 3, bias=False)
    inputs, labels = torch.randn(12, 8).double(), torch.randint(3, (12,))
    for layer in (first, wide, out):
        layer.to(dtype)
    hidden = first(inputs.to(dtype)).tanh()
    middle = wide(hidden)
    acts = middle.tanh()
    logits = out(acts)
    loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
    grads = torch.autograd.grad(loss, [middle, logits])
    return [(grads[0], hidden.detach()), (grads[1], acts.detach())]


def gaussian_data(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((12, 60), (12, 40)), ((50, 200), (50, 120))
    return [
        tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in pair)
        for pair in sizes
    ]


@pytest.mark.parametrize("policy", ["dense", "all"])
@pytest.mark.parametrize("make", [layer_data, gaussian_data])
def test_float32_steps_are_right_at_any_damping_with_rank_deficient_factors(
    make: Any, policy: str
) -> None:
    """Where 1/λ would turn the rounding outside of the factors' span into the whole step."""
    for (g, a), (g64, a64) in zip(make(torch.float32), make(torch.float64), strict=True):
        fisher = fisher_of([(g, a)], policy=policy)
        gradient = (g.mT @ a)[None] / len(g)
        # the gradient is in the span of both sides: there, and only there, in float64
        (q, s, _), (p, t, _) = (
            torch.linalg.svd(x.mT / math.sqrt(len(x)), full_matrices=False) for x in (g64, a64)
        )
        inner = q.mT @ (g64.mT @ a64 / len(g64)) @ p
        curvature = s.square()[:, None] * t.square()
        for damping in (1e-2, 1e-4, 1e-6, 1e-8):
            wanted = q @ (inner / (curvature + damping)) @ p.mT
            direction = fisher.direction(gradient, damping, None)[0].double()
            error = float((direction - wanted).norm() / wanted.norm())
            # without the rule, up to 2e-4, 2e-2, 2 and 140 for these dampings
            assert error < (2e-2 if damping < 1e-4 else 2e-4), (damping, error)


@pytest.mark.parametrize("policy", ["dense", "all"])
def test_what_really_is_outside_of_the_span_is_stepped_by(policy: str) -> None:
    g, a = gaussian_data(torch.float32)[0]
    fisher = fisher_of([(g, a)], policy=policy)
    span = torch.linalg.qr(g.double().mT).Q
    outside = torch.randn(1, 60, 40, dtype=torch.float64)
    outside = outside - span @ (span.mT @ outside)
    for damping in (1e-2, 1e-4):
        direction = fisher.direction(outside.float(), damping, None).double()
        error = (direction - outside / damping).norm() / (outside / damping).norm()
        assert error < 2e-3 * 1e-4 / damping + 1e-5


def test_small_eigenvalues_along_axes_are_not_taken_for_rounding() -> None:
    """Entries of a float32 covariance are right to their own size, not to that of the largest."""
    scales = torch.logspace(0, -4, 30, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    g, a = (torch.randn(200, 30, generator=generator, dtype=torch.float64) * scales for _ in "ga")
    fisher = fisher_of([(g.float(), a.float())])
    inverse = fisher_of([(g.float().double(), a.float().double())])
    gradient = (g.mT @ a / 200)[None]
    for damping in (1e-2, 1e-4, 1e-6):
        wanted = inverse.direction(gradient, damping, None)
        direction = fisher.direction(gradient.float(), damping, None).double()
        assert (direction - wanted).norm() < 1e-4 * wanted.norm()


def test_eigenvalues_of_a_thin_basis_keep_their_sum_when_it_changes() -> None:
    """Λ' is the diagonal in the new basis of QΛQᵀ + (I − QQᵀ)λ₀, and the rest of its trace."""
    fisher = fisher_of([observations(0, 4)], "ekfac", policy="all", t_max=7)
    values = fisher.state["eigenvalues"]
    left, right = (fisher.state[f"basis.{side}"][0].clone() for side in ("output", "input"))
    real = (left != 0).any(0)
    assert int(real.sum()) == 4
    values.copy_(torch.rand_like(values))
    values[:, :-1] = torch.where(real[:, None], values[:, :-1], values[:, -1:])
    inside, outside = values[0, :-1][real].clone(), values[0, -1].clone()
    left = left[:, real]
    span = torch.kron(left, right)
    beyond = torch.eye(OUTPUTS).double() - left @ left.mT
    operator = span @ inside.flatten().diag() @ span.mT
    operator += torch.kron(beyond, right @ outside.diag() @ right.mT)
    g, a = observations(1, 3)
    means = {"input": (a.mT @ a / 3)[None], "columns": g.mT[None] / math.sqrt(3)}
    fisher.fold_(means, 3, 3, 0.5)
    (pairs,) = decompose([fisher])
    assert pairs is not None
    fisher.refresh_(pairs)
    new = fisher.state["basis.output"][0]
    both = torch.kron(new, fisher.state["basis.input"][0])
    diagonal = (both * (operator @ both)).sum(0).view(7, INPUTS)
    found = fisher.state["eigenvalues"][0]
    torch.testing.assert_close(found[:-1], diagonal, rtol=1e-9, atol=1e-12)
    total = found[:-1].sum() + (OUTPUTS - 7) * found[-1].sum()
    torch.testing.assert_close(total, operator.trace())


@pytest.mark.parametrize("terms", [5, 30])
@pytest.mark.parametrize("damping", [1e-2, (0.1, 0.2)])
def test_measured_eigenvalues_of_columns_are_divided_by(terms: int, damping: Any) -> None:
    """Λ = mean (Q_Gᵀ∇Q_A)² inside, what its trace lacks outside; all of Λ where T ≥ o."""
    t_max = 6 if terms < OUTPUTS else None
    data = observations(0, terms)
    fisher = fisher_of([data], "ekfac", policy="all", t_max=t_max)
    g, a = observations(1, terms)
    sums, bases = Sums(), fisher.bases()
    assert bases is not None
    eigenvalues_(sums, Uses(a[None, :, None], g[None, :, None], "dense"), bases, INPUTS)
    fisher.fold_(means_of(sums, terms, g), terms, terms, 0.0)
    left, right = (torch.linalg.eigh(x).eigenvectors for x in naive_sides([data]))
    turned = ((g @ left)[:, :, None] * (a @ right)[:, None]).square().mean(0)
    if t_max is not None:  # rank 5, and what is outside of it
        turned[:-5] = turned[:-5].mean(0)
    added = damping if isinstance(damping, float) else damping[0] * damping[1]
    gradient = torch.randn(1, OUTPUTS, INPUTS, dtype=torch.float64)
    wanted = left @ (left.mT @ gradient[0] @ right / (turned + added)) @ right.mT
    direction = fisher.direction(gradient, damping, None)[0]
    torch.testing.assert_close(direction, wanted, rtol=1e-9, atol=1e-9)


def test_a_log_line_has_what_a_paper_reports() -> None:
    line = log_line(fisher_of([observations(0, 4)], policy="all").record((0.1, 0.2), 20.0))
    for part in ("policy all", "T 4", "λ_G 0.1", "λ_A 0.2", "κ_max 20", "of 54", "fallbacks none"):
        assert part in line


def test_eigenvalues_of_ekfac_keep_their_sum_when_the_basis_changes() -> None:
    fisher = fisher_of([observations(0, 20)], "ekfac")
    measured = torch.rand_like(fisher.state["eigenvalues"])
    fisher.state["eigenvalues"].copy_(measured)
    old = [fisher.state[f"basis.{side}"][0].clone() for side in ("output", "input")]
    g, a = observations(1, 20)
    means = {"input": (a.mT @ a / 20)[None], "output": (g.mT @ g / 20)[None]}
    fisher.fold_(means, 20, 20, 0.5)
    (pairs,) = decompose([fisher])
    assert pairs is not None
    fisher.refresh_(pairs)
    operator = torch.kron(*old) @ measured.flatten().diag() @ torch.kron(*old).mT
    new = torch.kron(fisher.state["basis.output"][0], fisher.state["basis.input"][0])
    wanted = (new.mT @ operator @ new).diagonal().view_as(measured)
    torch.testing.assert_close(fisher.state["eigenvalues"], wanted, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(fisher.state["eigenvalues"].sum(), measured.sum())
