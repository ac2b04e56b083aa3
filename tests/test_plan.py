"""Plans from shapes: what one process keeps, even division over ranks, reports, NaturalGradient."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import isokron
from cases import CASES, Case, loss_of, net
from isokron.distributed.process_group import sent_by_reduce
from isokron.distributed.step_agreement import AGREEMENT_BYTES
from isokron.model_shapes import make_model
from isokron.plan import RankCosts, RankLayout, Speed, measured_speed, plan, report, state_bytes

GPT2 = make_model("gpt2")


def gpt2_costs(name: str, *layout, **settings) -> RankCosts:
    return plan(getattr(isokron, name)(isokron.param_groups(GPT2), **settings), RankLayout(*layout))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_rank_keeps_what_one_process_keeps(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for kind in ("ddp", "fsdp"):
        costs = plan(case.make(net().to("meta").parameters()), RankLayout(kind, 1))
        assert costs.state.tolist() == [sum(map(state_bytes, optimizer.state.values()))]
        assert costs.sent.tolist() == [0]


def test_frozen_parameters_have_no_state() -> None:
    model = net().to("meta")
    model.hidden.requires_grad_(False)
    costs = plan(isokron.AdamW(model.parameters()), RankLayout("ddp", 1))
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    assert costs.state.tolist() == [2 * 4 * trained]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["AdamW", "Shampoo", "SOAP", "Katie"])
def test_state_per_rank_falls_as_one_over_the_ranks(name: str, kind: str) -> None:
    one = gpt2_costs(name, kind, 1).state.sum()
    for ranks in (2, 8, 64):
        state = gpt2_costs(name, kind, ranks).state
        assert state.sum() == one
        assert state.max() < 1.1 * one / ranks


@pytest.mark.parametrize("name", ["Shampoo", "Muon", "Quad"])
def test_replicated_groups_cost_what_one_group_costs(name: str) -> None:
    replicated, one = gpt2_costs(name, "hsdp", 32, 8), gpt2_costs(name, "fsdp", 8)
    assert np.array_equal(replicated.state, one.state)
    # but for the agreement, which is over all ranks
    agreed = [sent_by_reduce(AGREEMENT_BYTES, ranks) for ranks in (32, 8)]
    assert np.array_equal(replicated.sent - agreed[0], one.sent - agreed[1])


def test_sharded_blocks_in_half_precision_send_half() -> None:
    wide = gpt2_costs("SOAP", "fsdp", 8)
    half = gpt2_costs("SOAP", "fsdp", 8, None, torch.bfloat16)
    agreed = sent_by_reduce(AGREEMENT_BYTES, 8)
    assert np.array_equal((wide.sent - agreed) // 2, half.sent - agreed)
    assert np.array_equal(wide.state, half.state)


def test_refreshes_are_counted_in_flops_a_step() -> None:
    matrix = nn.Parameter(torch.empty(512, 256, device="meta"))  # two blocks of 256×256
    flops = 2 * 10 * 2 * 256**3
    optimizers = [
        (isokron.SOAP([matrix], every=10, refresh="together"), flops / 10, 0),
        (isokron.Quad([matrix]), 0, flops),
        (isokron.AdamW([matrix]), 0, 0),
    ]
    for optimizer, decompositions, products in optimizers:
        costs = plan(optimizer, RankLayout("ddp", 1))
        assert costs.decompositions.item() == pytest.approx(decompositions)
        assert costs.products.item() == pytest.approx(products)


@pytest.mark.parametrize(
    ("ranks", "count", "over"), [(1, 40, 1), (10, 100, 1), (4, 40, 1), (4, 10, 4)]
)
def test_in_every_turn_ranks_wait_for_the_slowest(ranks: int, count: int, over: float) -> None:
    """Over refreshes that are divided evenly; a rank with less than a block a turn idles."""
    model = nn.ModuleList(nn.Linear(256, 256, bias=False, device="meta") for _ in range(count))
    soap = isokron.SOAP([{"params": list(model.parameters()), "route": "method"}], every=10)
    layout = RankLayout("ddp", ranks)
    assert plan(soap, layout).decompositions.shape == (10, ranks)
    *_, row = report(model, {"soap": soap}, layout, Speed(1.0, 1.0))["optimizers"]
    even = count * 2 * 10 * 256**3 / 10 / ranks
    assert row["compute"] == pytest.approx(even)
    assert row["delay"] == pytest.approx(over * even)


def test_ranks_that_own_one_large_matrix_each_take_their_turns_in_pairs() -> None:
    """Each is a batch of its own, and a rank waits for the batch before the last."""
    model = nn.ModuleList(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(24))
    muon = isokron.Muon([{"params": list(model.parameters()), "route": "method"}])
    flops = 5 * 6 * 4096**3
    for ranks, taken in ((1, 24), (2, 12), (8, 12), (64, 12)):
        costs = plan(muon, RankLayout("ddp", ranks))
        assert costs.product_span.sum() == pytest.approx(taken * flops)
        assert costs.products.sum() == pytest.approx(24 * flops)


def test_refreshes_on_a_thread_wait_for_nobody() -> None:
    model = nn.ModuleList(nn.Linear(2048, 2048, bias=False, device="meta") for _ in range(24))
    for refresh, turns in ((1, 1), ("together", 4)):
        groups = [{"params": list(model.parameters()), "route": "method", "refresh": refresh}]
        soap = isokron.SOAP(groups, every=10, max_dim=None)
        costs = plan(soap, RankLayout("ddp", 8))
        even = 24 / 8 * 2 * 10 * 2048**3 / 10
        assert costs.decompositions.max(1).sum() == pytest.approx(even)
        assert costs.decomposition_span.sum() == pytest.approx(turns * even)


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_million_blocks_are_divided_evenly_over_thousands_of_ranks(kind: str) -> None:
    optimizer = isokron.Shampoo(isokron.param_groups(make_model("llama-70b")))
    costs = plan(optimizer, RankLayout(kind, 4096))
    assert costs.state.max() < 1.01 * costs.state.mean()
    assert costs.blocks.sum() > 1_000_000


@pytest.mark.parametrize(
    "settings",
    [
        *({}, {"method": "ekfac"}, {"momentum": 0.0}),
        *({"policy": "all", "t_max": 4}, {"policy": "all", "store": "host"}),
    ],
    ids=str,
)
def test_natural_gradient_keeps_what_was_planned(settings) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, **settings)
    loss_of(model, 0).backward()
    optimizer.step()
    kept = sum(map(state_bytes, optimizer.state.values()))
    planned = isokron.NaturalGradient(net().to("meta"), **settings)
    costs = plan(planned, RankLayout("ddp", 3))
    assert costs.state.tolist() == [kept] * 3
    assert np.isnan(costs.sent).all()
    with pytest.raises(ValueError, match="layout must be ddp for NaturalGradient"):
        plan(planned, RankLayout("fsdp", 3))


def test_other_optimizers_are_refused() -> None:
    with pytest.raises(ValueError, match="SGD cannot be planned"):
        plan(torch.optim.SGD(GPT2.parameters(), 0.1), RankLayout("ddp", 2))


def test_a_report_is_plain_data_of_every_optimizer() -> None:
    names = {"adamw": "AdamW", "shampoo": "Shampoo", "muon": "Muon"}
    optimizers = {
        name: getattr(isokron, kind)(isokron.param_groups(GPT2)) for name, kind in names.items()
    }
    planned = report(GPT2, optimizers, RankLayout("hsdp", 32, 8), Speed(2e12, 1e12))
    data = json.loads(json.dumps(planned))
    assert (data["ranks"], data["shard"], data["layout"]) == (32, 8, "hsdp")
    whole, sharded, shampoo, muon = data["optimizers"]
    assert (whole["of_adamw"], whole["sent_worst"], whole["owners"]) == (1, 0, 0)
    assert sharded["state_worst"] == pytest.approx(whole["state_worst"] / 8, rel=0.01)
    assert shampoo["state_mean"] <= shampoo["state_worst"]
    assert shampoo["owners"] == muon["owners"] == 32
    costs = plan(optimizers["shampoo"], RankLayout("hsdp", 32, 8))
    assert shampoo["delay"] == pytest.approx(costs.decomposition_span.sum() / 1e12)
    costs = plan(optimizers["muon"], RankLayout("hsdp", 32, 8))
    assert muon["compute"] == costs.products.sum(0).mean() / 2e12


def test_the_speed_of_this_machine_is_measured() -> None:
    speed = measured_speed(side=64)
    assert speed.products > 0 < speed.decompositions
    assert "measured" in speed.source


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (("ddp", 0), "ranks must be at least 1, got 0"),
        (("tp", 4), "one of ddp, fsdp, hsdp, got 'tp'"),
        (("hsdp", 6, 4), "must divide the 6 ranks, got 4"),
        (("hsdp", 6), "shard must be given with hsdp and only then"),
        (("fsdp", 6, 2), "shard must be given with hsdp and only then"),
    ],
)
def test_an_impossible_layout_is_refused(layout, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankLayout(*layout)
