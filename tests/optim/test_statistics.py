"""optimizer.statistics(): every number against a naive one in float64, over all optimizers."""

import json
from collections.abc import Mapping
from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import CASES, Case, Whitening, equal, loss_of, net, train

EVERY = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
LAST_STEP = ("update_rms", "adam_cosine")
WITH_ADAM = ("shampoo", "shampoo-cut", "soap", "soap-delayed", "katie", "katie-symmetric")


def rms(tensors: list[Tensor]) -> float:
    return float(torch.cat([x.flatten().double() for x in tensors]).square().mean().sqrt())


def directions(
    params: list[Tensor], before: list[Tensor], group: Mapping[str, Any]
) -> list[Tensor]:
    """P of W' = W − lr(P + λW); λW is in P where it was added to it."""

    def rate(w: Tensor) -> float:
        added = group["decay"] == "l2" or (group["decay"] == "momentum" and w.ndim > 1)
        return 0.0 if added else float(group["weight_decay"])

    return [(w - p) / group["lr"] - rate(w) * w for p, w in zip(params, before, strict=True)]


def stepped(model: nn.Module, optimizer: Any, seed: int, dtype: torch.dtype) -> list[Tensor]:
    """The directions of one step; all parameters are in one group."""
    before = [p.detach().clone() for p in model.parameters()]
    train(model, optimizer, range(seed, seed + 1), dtype)
    after = [p.detach() for p in model.parameters()]
    return directions(after, before, optimizer.param_groups[0])


@EVERY
def test_statistics_are_finite_plain_numbers_of_every_group(case: Case) -> None:
    model = net()
    optimizer = case.make(isokron.param_groups(model))
    before = optimizer.statistics()
    assert not optimizer.state  # asking makes no state
    assert all(group[key] is None for group in before for key in LAST_STEP)
    train(model, optimizer, range(7))
    statistics = optimizer.statistics()
    assert json.loads(json.dumps(statistics, allow_nan=False)) == statistics
    assert len(statistics) == len(optimizer.param_groups)
    assert [group["lr"] for group in statistics] == [g["lr"] for g in optimizer.param_groups]
    assert len({group["name"] for group in statistics}) == len(statistics)
    for group in statistics:
        assert group["update_rms"] > 0
        assert group["adam_cosine"] is None or -1 <= group["adam_cosine"] <= 1 + 1e-12
        most, middle = group["condition_max"], group["condition_median"]
        assert (most is None) == (middle is None)
        assert most is None or 1 - 1e-6 <= middle <= most
        assert group["refreshes"] >= 0 == group["failed_share"]


@EVERY
def test_statistics_change_no_bit_of_the_training(case: Case) -> None:
    asked, plain = net(), net()
    optimizer, reference = case.make(asked.parameters()), case.make(plain.parameters())
    for step in range(9):
        train(asked, optimizer, range(step, step + 1))
        optimizer.statistics()
    train(plain, reference, range(9))
    assert equal(asked, plain)
    assert optimizer.state_dict().keys() == reference.state_dict().keys()


@EVERY
def test_a_resumed_optimizer_has_the_same_statistics(case: Case) -> None:
    model, other = net(), net()
    optimizer, resumed = case.make(model.parameters()), case.make(other.parameters())
    train(model, optimizer, range(6))
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())
    for _ in range(2):
        numbers = [o.statistics()[0] for o in (optimizer, resumed)]
        for group in numbers:
            del group["refreshes"], group["failed_share"]  # counted since the optimizer was made
        assert numbers[0] == numbers[1]
        train(model, optimizer, range(6, 7))
        train(other, resumed, range(6, 7))


@EVERY
def test_update_rms_is_that_of_the_step_taken(case: Case) -> None:
    if case.settings.get("average"):
        pytest.skip("an average moves parameters otherwise than by the update")
    model = net(dtype=torch.float64)
    optimizer = case.make(model.parameters())
    optimizer.statistics()
    for seed in range(5):
        naive = stepped(model, optimizer, seed, torch.float64)
        # AdamW's moments in 8 bits are rounded after the step, and read back
        tolerance = 0.02 if case.name == "adamw-small" else 1e-6
        assert optimizer.statistics()[0]["update_rms"] == pytest.approx(rms(naive), rel=tolerance)


@pytest.mark.parametrize("case", [c for c in CASES if c.name in WITH_ADAM], ids=lambda c: c.name)
def test_adam_cosine_is_that_of_adams_moments_in_float64(case: Case) -> None:
    model = net(dtype=torch.float64)
    optimizer = case.make(model.parameters(), vectors=False)
    optimizer.statistics()
    group = optimizer.param_groups[0]
    (beta1, beta2), eps = group["betas"], group["eps"]
    matrices = [i for i, p in enumerate(model.parameters()) if p.ndim > 1]
    params = list(model.parameters())
    first = [torch.zeros_like(params[i]) for i in matrices]
    second = [torch.zeros_like(m) for m in first]
    for step in range(6):
        taken = stepped(model, optimizer, step, torch.float64)
        adam = []
        for k, i in enumerate(matrices):
            grad = params[i].grad
            assert grad is not None
            first[k] = beta1 * first[k] + (1 - beta1) * grad
            second[k] = beta2 * second[k] + (1 - beta2) * grad**2
            spread = (second[k] / (1 - beta2 ** (step + 1))).sqrt() + eps
            adam.append((first[k] / (1 - beta1 ** (step + 1)) / spread).flatten())
        x, y = torch.cat([taken[i].flatten() for i in matrices]), torch.cat(adam)
        naive = float(x @ y / (x.norm() * y.norm()))
        assert optimizer.statistics()[0]["adam_cosine"] == pytest.approx(naive, abs=1e-6)


@pytest.mark.parametrize("shape", [(12, 12), (10, 400)])
@pytest.mark.parametrize("optimizer_type", [isokron.Shampoo, isokron.Katie])
def test_condition_of_roots_is_that_of_the_damped_factor_from_below(
    optimizer_type: Any, shape: tuple[int, int]
) -> None:
    param = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    optimizer = optimizer_type([param], every=1, refresh="together", max_dim=None)
    scales = torch.logspace(0, -2, shape[0], dtype=torch.float64)
    mix = torch.linalg.qr(torch.randn(shape[0], shape[0], dtype=torch.float64))[0]
    for _ in range(8):
        param.grad = mix @ (scales[:, None] * torch.randn(shape, dtype=torch.float64))
        optimizer.step()
    state, naive = optimizer.state[param], []
    for side in range(2):
        values = torch.linalg.eigvalsh(state[f"root.{side}.0"])
        naive.append(float((values[-1] / values[0]) ** 2))
    estimate = optimizer.statistics()[0]["condition_max"]
    assert estimate is not None
    assert 0.7 * max(naive) <= estimate <= max(naive) * (1 + 1e-9)


def test_condition_of_soap_is_of_the_second_moment_in_the_basis() -> None:
    torch.manual_seed(0)
    param = nn.Parameter(torch.zeros(6, 6, dtype=torch.float64))
    optimizer = isokron.SOAP([param], every=4, start=None, refresh="together", betas=(0.9, 0.95))
    for grad in torch.randn(5, 6, 6, dtype=torch.float64):
        param.grad = grad.clone()
        optimizer.step()
    variance = optimizer.state[param]["variance.0"]
    sides = (variance.sum(0), variance.sum(1))
    naive = max(float(side.max() / side.min()) for side in sides)
    statistics = optimizer.statistics()[0]
    assert statistics["condition_max"] == pytest.approx(naive, rel=1e-6)
    assert statistics["condition_median"] == statistics["condition_max"]  # there is one block


@pytest.mark.parametrize("optimizer_type", [isokron.Quad, isokron.Skew])
def test_condition_of_learned_factors_is_from_below(optimizer_type: Any) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.zeros(s, dtype=torch.float64)) for s in ((8, 8), (9,))]
    optimizer = optimizer_type(params)
    scales = torch.logspace(0, -2, 9, dtype=torch.float64)
    for _ in range(60):
        params[0].grad = scales[:8, None] * torch.randn(8, 8, dtype=torch.float64)
        params[1].grad = scales * torch.randn(9, dtype=torch.float64)
        optimizer.step()
    dense = [optimizer.state[params[0]][f"factor.{i}.0"] for i in range(2)]
    vector = optimizer.state[params[1]]["factor.0.0"]
    of_matrix = max(float(torch.linalg.cond(q)) ** 2 for q in dense)
    of_vector = float(vector.abs().max() / vector.abs().min()) ** 2
    numbers = [optimizer.statistics()[0][key] for key in ("condition_max", "condition_median")]
    # the median of two is their mean
    estimates = sorted([numbers[0], 2 * numbers[1] - numbers[0]])
    assert any(e == pytest.approx(of_vector, rel=1e-9) for e in estimates)
    other = sum(estimates) - of_vector
    assert 0.2 * of_matrix <= other <= of_matrix * (1 + 1e-9)


class Fails(Whitening):
    """Every second refresh of a block is not finite."""

    def refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any], first: bool
    ) -> dict[str, Tensor]:
        fresh = super().refresh(state, group, first)
        even = state["step"].view(-1, 1, 1) / group["every"] % 2 == 0
        return {"root": torch.where(even, torch.nan, fresh["root"])}


def test_refreshes_and_failures_are_counted_by_group() -> None:
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    groups = [{"params": params[:2]}, {"params": params[2:], "every": 2}]
    optimizer = Fails(groups, every=3)
    for step in range(12):
        for param in params:
            param.grad = torch.randn(4, 4)
        optimizer.step()
        if step == 5:  # in the middle, and never twice
            assert [s["refreshes"] for s in optimizer.statistics()] == [4, 3]
    counts = [(s["refreshes"], s["failed_share"]) for s in optimizer.statistics()]
    assert counts == [(8, 0.5), (6, 0.5)]
    assert optimizer.failed_refreshes == 7


@EVERY
def test_state_bytes_are_those_of_the_state_without_counters(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(2))
    naive = sum(
        value.nbytes
        for entry in optimizer.state.values()
        for key, value in entry.items()
        if key not in ("step", "average_weight")
    )
    assert optimizer.statistics()[0]["state_bytes"] == naive


@pytest.mark.parametrize("name", ["adamw", "adamw-small", "muon", "shampoo"])
def test_large_updates_are_sampled(name: str) -> None:
    torch.manual_seed(0)
    case = next(case for case in CASES if case.name == name)
    params = [nn.Parameter(torch.randn(shape)) for shape in ((300, 300), (64, 1000), (300,))]
    optimizer = case.make(params, weight_decay=0.0)
    optimizer.statistics()
    for _ in range(3):
        before = [p.detach().clone() for p in params]
        for param in params:
            param.grad = torch.randn_like(param) * torch.rand(len(param), *[1] * (param.ndim - 1))
        optimizer.step()
    naive = rms(directions([p.detach() for p in params], before, optimizer.param_groups[0]))
    assert optimizer.statistics()[0]["update_rms"] == pytest.approx(naive, rel=0.05)


def test_a_missing_gradient_leaves_its_block_out_of_the_update() -> None:
    params = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    optimizer = isokron.Muon(params, lr=0.1, weight_decay=0.0)
    optimizer.statistics()
    params[0].grad = torch.randn(4, 4)
    before = params[0].detach().clone()
    optimizer.step()
    naive = rms([(before - params[0].detach()) / 0.1])
    assert optimizer.statistics()[0]["update_rms"] == pytest.approx(naive, rel=1e-5)


@pytest.mark.parametrize("clip", [None, 1e-6])
def test_natural_gradient_reports_its_layers_and_adamws_group(clip: float | None) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, kl_clip=clip, max_condition=1e5, every=2)
    assert [s["update_rms"] for s in optimizer.statistics()] == [None, None]
    params = optimizer.param_groups[0]["params"]
    for step in range(4):
        before = [p.detach().double().clone() for p in params]
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    lr = optimizer.param_groups[0]["lr"]
    naive = rms([(w - p.detach()) / lr for p, w in zip(params, before, strict=True)])
    layers, others = optimizer.statistics()
    assert layers["update_rms"] == pytest.approx(naive, rel=1e-2)
    conditions = sorted(record["condition_after"] for record in optimizer.report())
    assert layers["condition_max"] == pytest.approx(conditions[-1], rel=1e-6)
    assert layers["refreshes"] == 3 * len(optimizer.report())
    assert others["adam_cosine"] == 1.0
    json.dumps([layers, others], allow_nan=False)
    assert sqrt(others["state_bytes"]) > 1
