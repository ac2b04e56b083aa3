"""Ranks keep and send what was planned, to the byte: every optimizer, every layout."""

from typing import Any

import pytest
import torch
from test_ownership import chosen
from torch import nn

import isokron
from cases import CASES, Case
from isokron.distributed import local
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


def test_state_is_divided_and_not_copied() -> None:
    case = next(case for case in CASES if case.name == "shampoo-cut")
    total = planned(case, "ddp", 1)[0][0]
    parts = [state for state, _ in planned(case, "ddp", 4)]
    scalar = 3 * 2 * 4  # AdamW's two moments of the scalar, on three more ranks
    assert sum(parts) == total + scalar
    assert max(parts) < 0.5 * total
