"""FSDP2, HSDP and tensor parallelism on one device mesh."""

from collections import Counter
from functools import cache
from math import prod

import pytest
import torch
from test_ownership import gradients, like, make, sharded
from test_plan_real import traffic
from test_wrapped import CHOSEN, model, settings, train
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import _StridedShard

import isokron
from cases import CASES
from isokron.distributed.dtensor import shard_grid
from isokron.distributed.process_group import sent_by_reduce
from isokron.distributed.step_agreement import AGREEMENT_BYTES
from processes import mesh, run

NAMES = {1: ("tp",), 2: ("dp", "tp"), 3: ("replicas", "dp", "tp")}


def parallel(shape: tuple[int, ...], only: str | None) -> list[list[Tensor]]:
    """Train with tensor parallelism on the last mesh dimension, and FSDP2 or HSDP on the others."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    over = mesh(*shape, names=NAMES[len(shape)])
    plan = {
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Replicate()),
    }
    if len(shape) > 1:  # without FSDP2, torch leaves the gradient of this embedding replicated
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    results = []
    for case in CHOSEN:
        if only not in (None, case.name):
            continue
        net = model(28)
        parallelize_module(net, over["tp"], plan)
        if len(shape) > 1:
            for part in (net.up, net.down, net):
                fully_shard(part, mesh=over[NAMES[len(shape)][:-1]])
        optimizer = case.make(isokron.param_groups(net), **settings(case.name))
        ranks = prod(shape[:-1])
        train(net, optimizer, dist.get_rank() // shape[-1], ranks)
        params = [p.detach() for p in net.parameters()]
        results.append([p.full_tensor() if isinstance(p, DTensor) else p for p in params])
    return results


@cache
def one_process(name: str) -> list[Tensor]:
    net, case = model(28), next(case for case in CHOSEN if case.name == name)
    train(net, case.make(isokron.param_groups(net), **settings(name)), 0, 1)
    return [p.detach() for p in net.parameters()]


@pytest.mark.parametrize(
    ("shape", "only"), [((2,), "shampoo"), ((2, 2), None), ((2, 1, 2), "soap")], ids=str
)
def test_tensor_parallel_layers_train_as_in_one_process(
    shape: tuple[int, ...], only: str | None
) -> None:
    names = [name for name, _ in model(28).named_parameters()]
    cases = [case.name for case in CHOSEN if only in (None, case.name)]
    for results in run(prod(shape), parallel, shape, only):
        for case, params in zip(cases, results, strict=True):
            for name, one, many in zip(names, one_process(case), params, strict=True):
                # bases of a few gradients turn rounding of 1e-16 into 1e-7
                torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-6, msg=f"{case}: {name}")


def sent(layout: str) -> tuple[list[int], list[int]]:
    """Bytes that this rank has sent in two steps, and those that it needed to send."""
    from torch.distributed.tensor import DTensor

    measured, needed = list[int](), list[int]()
    for case in (case for case in CASES if case.name in ("muon", "soap", "quad")):
        over = mesh(2, 2)
        params = sharded(make(case)[0][:-1], over, layout)  # the last is a scalar, replicated
        optimizer = case.make(params)
        before = 0
        for step in range(2):
            for param, grad in zip(params, gradients(step, missing=False), strict=False):
                param.grad = like(grad, param)
            optimizer.step()
            measured.append(traffic(optimizer) - before)
            before += measured[-1]
        count = sent_by_reduce(AGREEMENT_BYTES, 4)
        for param in params:
            # the state of a block is on the rank that owns it, and nowhere else
            owned = {key.rpartition(".")[2] for key in optimizer.state[param] if "." in key}
            local = torch.full_like(param.to_local(), dist.get_rank())
            holder = DTensor.from_local(
                local, over, param.placements, shape=param.shape, stride=param.stride()
            ).full_tensor()
            blocks = optimizer.traits.cut(param.shape, optimizer.param_groups[0])
            if not optimizer.traits.takes(param, optimizer.param_groups[0]):
                blocks = []
            for number, block in enumerate(blocks):
                held = Counter(block.read(holder).flatten().tolist())[dist.get_rank()]
                if str(number) in owned:
                    count += (prod(block.shape) - held) * param.element_size()  # directions
                else:
                    count += held * param.element_size()  # the gradient
        needed += [count, count]
    return measured, needed


@pytest.mark.parametrize("layout", ["S0", "01"])
def test_ranks_send_gradients_to_owners_and_directions_back_and_no_more(layout: str) -> None:
    totals = []
    for measured, needed in run(4, sent, layout):
        assert measured == needed
        totals.append(sum(needed))
    assert min(totals) > 0


@pytest.mark.parametrize("dp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_are_those_of_fsdp2_or_are_refused(dp: int, tp: int) -> None:
    """FSDP2 chunks what tensor parallelism has chunked; torch may read its placements otherwise."""
    outer = _StridedShard(0, split_factor=tp) if tp > 1 else Shard(0)
    refused = 0
    for size in range(1, 70):
        chunks = [chunked(chunk, dp) for chunk in chunked(torch.arange(size), tp)]
        ours = [chunks[rank % tp][rank // tp].tolist() for rank in range(dp * tp)]
        columns, _ = outer._split_tensor(torch.arange(size), dp, with_padding=False)
        torchs = [chunked(columns[rank // tp], tp)[rank % tp].tolist() for rank in range(dp * tp)]
        if ours != torchs:
            refused += 1
            with pytest.raises(ValueError, match=f"must be a multiple of its {tp} tensor-parallel"):
                shard_grid((size,), (dp, tp), (outer, Shard(0)))
            continue
        grid = shard_grid((size,), (dp, tp), (outer, Shard(0)))
        ((_, bounds),) = grid.cuts
        ranges = {rank: range(*bounds[number:][:2]) for (number,), rank in grid.ranks.items()}
        assert [list(ranges.get(rank, ())) for rank in range(dp * tp)] == ours
    assert (refused > 0) == (dp == 3 and tp > 1)


def chunked(tensor: Tensor, count: int) -> list[Tensor]:
    """torch.chunk, which leaves out empty chunks."""
    chunks = list(tensor.chunk(count))
    return chunks + [tensor[:0]] * (count - len(chunks))


def differing() -> str:
    """One rank has another learning rate for the norm, which is on the mesh of FSDP2 alone."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    over, net = mesh(2, 2, names=NAMES[2]), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    parallelize_module(net, over["tp"], {"1": ColwiseParallel()})
    fully_shard(net, mesh=over["dp"])
    norm = {"params": list(net[0].parameters()), "lr": 0.2 if dist.get_rank() == 2 else 0.1}
    optimizer = isokron.Muon([norm, {"params": list(net[1].parameters())}])
    for param in net.parameters():
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_what_differs_on_a_part_of_a_mesh_ends_the_step_of_all_its_ranks() -> None:
    for text in run(4, differing, seconds=60):  # ranks would wait for 300 s
        assert "settings of group 0 must be the same on all 2 ranks" in text


def refused() -> list[str]:
    from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

    over, weight = mesh(2, 2), torch.ones(8, 6)
    local = nn.Parameter(DTensor.from_local(weight[:4], over, [Shard(0), Partial()]))
    strided = [_StridedShard(0, split_factor=4), Replicate()]
    several = nn.Parameter(distribute_tensor(weight, over, strided, src_data_rank=None))
    unnamed = mesh(2, 1, 2)
    on_three = [Replicate(), Shard(0), Shard(1)]
    nameless = nn.Parameter(distribute_tensor(weight, unnamed, on_three, src_data_rank=None))
    texts = []
    optimizer = isokron.Muon([("first", nn.Parameter(weight.clone()))])
    for param in (local, several, nameless):
        with pytest.raises(ValueError, match="DTensor") as caught:
            optimizer.add_param_group({"params": [("weight", param)]})
        texts.append(str(caught.value))
    assert len(optimizer.param_groups) == 1
    columns = nn.Parameter(distribute_tensor(weight, over, [Shard(0), Shard(1)]))
    columns.grad = DTensor.from_local(weight, over, [Replicate(), Replicate()])
    with pytest.raises(ValueError, match="placed") as caught:
        isokron.Muon([columns]).step()
    return [*texts, str(caught.value)]


def test_placements_that_are_not_supported_are_refused_with_a_remedy() -> None:
    for partial, several, nameless, gradient in run(4, refused):
        assert partial.startswith("Muon: parameter 'weight': a DTensor of shape (8, 6) is placed")
        assert "placements must be Shard or Replicate; redistribute the parameter" in partial
        assert "_StridedShard must be the first of the placements that shard dimension 0" in several
        assert "must have names; pass mesh_dim_names to init_device_mesh" in nameless
        assert "redistribute the gradient to where the parameter is before the step" in gradient
