"""Loads foreseen from shapes: divided evenly, replicated where it is so, quick at 70 B."""

import time

import numpy as np
import pytest
import torch
from torch import nn

import isokron
from cases import CASES, Case, net
from isokron.distributed.agreement import AGREEMENT
from isokron.distributed.traffic import sent_by_reduce
from isokron.planning import given_speed, load_of, make_layout, make_model

GPT2 = make_model("gpt2")


def loads(name: str, kind: str, ranks: int, shard: int | None = None, **settings):
    optimizer = getattr(isokron, name)(isokron.param_groups(GPT2), **settings)
    return load_of(optimizer, make_layout(kind, ranks, shard))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_one_rank_keeps_what_one_process_keeps(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    entries = [entry.items() for entry in optimizer.state.values()]
    kept = [value for items in entries for key, value in items if key != "step"]
    for layout in (make_layout("ddp", 1), make_layout("fsdp", 1), make_layout("ddp", 8).alone()):
        load = load_of(case.make(net().to("meta").parameters()), layout)
        assert load.state.tolist() == [sum(v.numel() * v.element_size() for v in kept)]
        assert load.sent.tolist() == [0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("name", ["AdamW", "Shampoo", "SOAP", "Katie"])
def test_state_falls_as_one_over_the_ranks(name: str, kind: str) -> None:
    one = loads(name, kind, 1).state.sum()
    for ranks in (2, 8, 64):
        state = loads(name, kind, ranks).state
        assert state.sum() == one
        assert state.max() < 1.1 * one / ranks


@pytest.mark.parametrize("name", ["Shampoo", "Muon", "Quad"])
def test_copies_of_shards_are_as_one_copy(name: str) -> None:
    copies, one = loads(name, "hsdp", 32, 8), loads(name, "fsdp", 8)
    assert np.array_equal(copies.state, one.state)
    agreed = [sent_by_reduce(AGREEMENT, ranks) for ranks in (32, 8)]  # over all copies
    assert np.array_equal(copies.sent - agreed[0], one.sent - agreed[1])


def test_sharded_blocks_in_half_precision_send_half() -> None:
    optimizer = isokron.SOAP(isokron.param_groups(GPT2))
    wide = load_of(optimizer, make_layout("fsdp", 8))
    half = load_of(optimizer, make_layout("fsdp", 8, communication=torch.bfloat16))
    agreed = sent_by_reduce(AGREEMENT, 8)
    assert np.array_equal((wide.sent - agreed) // 2, half.sent - agreed)
    assert np.array_equal(wide.state, half.state)


def test_what_is_not_distributed_is_whole_on_every_rank_and_sends_nothing() -> None:
    count = sum(param.numel() for param in GPT2.parameters())
    optimizer = isokron.AdamW(isokron.param_groups(GPT2))
    load = load_of(optimizer, make_layout("ddp", 64).alone())
    assert load.state.tolist() == [8 * count]
    assert load.sent.tolist() == [0]


def test_refreshes_take_their_flops_over_their_rate() -> None:
    matrix = nn.Parameter(torch.empty(512, 256, device="meta"))  # two blocks of 256×256
    speed = given_speed(2.0, 0.5)
    seconds = 2 * 10 * 2 * 256**3 / 1e12
    soap = load_of(isokron.SOAP([matrix], every=10), make_layout("ddp", 1))
    assert soap.refresh_seconds(speed) == pytest.approx([seconds / 10 / 0.5])
    quad = load_of(isokron.Quad([matrix]), make_layout("ddp", 1))
    assert quad.refresh_seconds(speed) == pytest.approx([seconds / 2.0])
    adamw = load_of(isokron.AdamW([matrix]), make_layout("ddp", 1))
    assert adamw.refresh_seconds(speed) == [0]


def test_seventy_billion_parameters_on_thousands_of_ranks_are_planned_in_seconds() -> None:
    start = time.process_time()
    model = make_model("llama-70b")
    optimizer = isokron.Shampoo(isokron.param_groups(model))
    for kind in ("ddp", "fsdp"):
        load = load_of(optimizer, make_layout(kind, 4096))
        assert load.state.max() < 1.01 * load.state.mean()
        assert load.blocks.sum() > 1_000_000
    assert time.process_time() - start < 15
