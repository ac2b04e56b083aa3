"""Ranks keep and send what was planned, to the byte: every optimizer, every layout."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from test_ownership import chosen
from torch import Tensor, nn

import isokron
from cases import CASES, Case
from isokron.distributed import local
from isokron.distributed.block_owners import refresh_cost
from isokron.optim.blocks import BatchStep
from isokron.plan import RankLayout, plan, state_bytes
from processes import mesh, run

# rows that do not divide, fewer rows than ranks, several blocks, half precision, no dimension
SHAPES: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((13, 10), torch.float32),
    ((24, 20), torch.float32),
    ((13, 10), torch.float32),
    ((3, 24), torch.bfloat16),
    ((8, 2, 2, 2), torch.float32),
    ((1, 9), torch.float64),
    ((17,), torch.float32),
    ((2,), torch.float32),
    ((5,), torch.bfloat16),
    ((), torch.float32),
    ((5, 6, 9), torch.float32),  # a stack of matrices
    ((24, 10), torch.float32),  # two matrices, one above the other
]
Counts = tuple[int, int, int]  # bytes of state, bytes sent in the first and in the second step


def parameters(device: str) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype, device=device)) for shape, dtype in SHAPES]


def grouped(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Several groups, so that owners in one depend on the work in the others."""
    return [
        {"params": params[:2]},
        {"params": params[2:-2], "weight_decay": 0.0},
        {"params": params[-2:-1], "stacked": 1},
        {"params": params[-1:], "split": (9, 15)},
    ]


def measured(numbers: list[int], kind: str, shard: int | None) -> list[Counts]:
    """On a rank: many optimizers, two steps each."""
    from torch.distributed import get_world_size
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    counts = []
    over = None
    if kind != "ddp":
        size = get_world_size()
        over = mesh(size // shard, shard) if shard else mesh(size)
    for case in (CASES[number] for number in numbers):
        params = parameters("cpu")
        if over is not None:
            lead = (Replicate(),) * (over.ndim - 1)
            params = [
                nn.Parameter(
                    distribute_tensor(
                        p.detach(),
                        over,
                        (*lead, Shard(0) if p.ndim else Replicate()),
                        src_data_rank=None,
                    )
                )
                for p in params
            ]
        optimizer = case.make(grouped(params))
        if over is None:
            optimizer.distribute()
        sent = [0]
        for step in range(2):
            for i, param in enumerate(params):
                param.grad = torch.full_like(param, 0.1 + 0.01 * i + 0.1 * step)
            optimizer.step()
            sent.append(traffic(optimizer))
        counts.append((local_state(optimizer), sent[1], sent[2] - sent[1]))
    return counts


def traffic(optimizer: isokron.Preconditioned) -> int:
    agreement = optimizer._agreement
    parties = {*([agreement.ranks] if agreement.ranks else []), *agreement._ranks.values()}
    return sum(ranks.traffic.sent for ranks in (*parties, *agreement._controls.values()))


def local_state(optimizer: isokron.Preconditioned) -> int:
    """Bytes of what this rank has in `optimizer.state`, but for step counters."""
    entries = optimizer.state.values()
    return sum(state_bytes({k: local(v) for k, v in entry.items()}) for entry in entries)


def planned(case: Case, *layout: Any) -> list[tuple[int, int]]:
    """State and traffic of the ranks that share one copy of the state."""
    costs = plan(case.make(grouped(parameters("meta"))), RankLayout(*layout))
    return list(zip(costs.state.tolist(), costs.sent.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ranks", "kind", "shard"),
    [(2, "ddp", None), (4, "ddp", None), (2, "fsdp", None), (4, "fsdp", None), (4, "hsdp", 2)],
)
def test_ranks_keep_and_send_what_was_planned(ranks: int, kind: str, shard: int | None) -> None:
    numbers = chosen(ranks)
    for number, *counts in zip(numbers, *run(ranks, measured, numbers, kind, shard), strict=True):
        expected = planned(CASES[number], kind, ranks, shard)
        for rank, measured_counts in enumerate(counts):
            state, sent = expected[rank % len(expected)]
            assert measured_counts == (state, sent, sent), f"{CASES[number].name}, rank {rank}"


class Clock:
    """A rank's clock, in flops: later than what it has computed and than all it has waited for.

    Directions are the time at which they were found, and parameters start at 0, so that a rank
    reads from its parameters which batches it has waited for.
    """

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params, self.time = params, 0.0

    def after(self, flops: float) -> float:
        self.time = max(self.time, *(-float(local(p).min()) for p in self.params)) + flops
        return self.time


class TimedMuon(isokron.Muon):
    clock: Clock

    def direction(self, moment: Tensor, state: dict[str, Tensor], group: Any) -> Tensor:
        flops = len(moment) * refresh_cost(moment.shape[1:], group, "polar")
        return torch.full_like(moment, self.clock.after(flops))


class TimedQuad(isokron.Quad):
    """Whose layers are several batches each."""

    clock: Clock

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Any) -> None:
        pass

    def directions(self, steps: Sequence[BatchStep], group: Any) -> None:
        costs = [len(s.grad) * refresh_cost(s.batch.shape, group, "products") for s in steps]
        time = self.clock.after(sum(costs))  # nothing is sent before all are there
        for step in steps:
            step.direction = torch.full_like(step.grad, time)


# of three sizes, several matrices a batch or one; and cut into blocks of several shapes
TIMED = [
    (TimedMuon, {"workspace": 1}),
    (TimedMuon, {"workspace": 1500}),
    (TimedMuon, {}),
    (TimedQuad, {"workspace": 1, "block_size": 8}),
    (TimedQuad, {"workspace": 4000, "block_size": 8}),
]
SIDES = [(12, 12)] * 9 + [(12, 20)] * 4 + [(16, 16)] * 3


def timed(number: int, device: str, over: Any = None) -> tuple[Any, list[nn.Parameter]]:
    from torch.distributed.tensor import Shard, distribute_tensor

    make, settings = TIMED[number]
    values = [torch.zeros(shape, dtype=torch.float64, device=device) for shape in SIDES]
    if over is not None:
        values = [distribute_tensor(value, over, [Shard(0)]) for value in values]
    params = [nn.Parameter(value) for value in values]
    group = {"params": params, "route": "method", **settings}
    return make([group], lr=1.0, weight_decay=0.0), params


def step_time(number: int, kind: str) -> float:
    """When a rank has written the last direction."""
    from torch.distributed import get_world_size

    over = mesh(get_world_size()) if kind == "fsdp" else None
    optimizer, params = timed(number, "cpu", over)
    if over is None:
        optimizer.distribute()
    optimizer.clock = Clock(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer.clock.after(0.0)


@pytest.mark.parametrize("number", range(len(TIMED)))
@pytest.mark.parametrize(("ranks", "kind"), [(2, "ddp"), (4, "ddp"), (3, "fsdp")])
def test_a_step_takes_as_long_as_planned(number: int, ranks: int, kind: str) -> None:
    costs = plan(timed(number, "meta")[0], RankLayout(kind, ranks))
    (planned,) = costs.product_span
    assert max(run(ranks, step_time, number, kind)) == planned
    assert costs.products.max() <= planned <= costs.products.sum()


def test_state_is_divided_and_not_copied() -> None:
    case = next(case for case in CASES if case.name == "shampoo-cut")
    total = planned(case, "ddp", 1)[0][0]
    parts = [state for state, _ in planned(case, "ddp", 4)]
    scalar = 3 * 2 * 4  # AdamW's two moments of the scalar, on three more ranks
    assert sum(parts) == total + scalar
    assert max(parts) < 0.5 * total
