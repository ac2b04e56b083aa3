"""The bits of one process on averaged gradients, over real ranks; state that falls as 1/R."""

import copy
import os
import pickle
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import isokron
from isokron.distributed.partial import full_state_dict
from isokron.optim.sharded import ShardedAdamW
from processes import outcomes, run

HALF = torch.bfloat16
UGLY: list[tuple[tuple[int, ...], torch.dtype]] = [
    ((), torch.float32),
    ((1,), torch.float32),
    ((31,), torch.float32),
    ((0,), torch.float32),
    ((127, 3), torch.float32),
    ((65537,), torch.float32),
    ((2, 65549), torch.float32),
    ((0, 5), torch.float32),
    ((1009,), HALF),
    ((70001,), HALF),
    ((97,), torch.float64),
    ((64, 64), torch.float32),
]
SMALL: list[tuple[tuple[int, ...], torch.dtype]] = [((7,), torch.float32), ((3, 5), torch.float32)]


class Model(nn.Module):
    """Parameters whose gradients are what one says: loss Σ p·g."""

    def __init__(self, kinds: list[tuple[tuple[int, ...], torch.dtype]]) -> None:
        super().__init__()
        drawn = torch.Generator().manual_seed(1)
        for i, (shape, dtype) in enumerate(kinds):
            values = torch.randn(shape, generator=drawn).to(dtype)
            self.register_parameter(f"p{i}", nn.Parameter(values))

    def all(self) -> list[nn.Parameter]:
        return list(self.parameters())

    def backward(self, grads: list[Tensor | None]) -> None:
        pairs = zip(self.all(), grads, strict=True)
        sum((p * g).sum().double() for p, g in pairs if g is not None).backward()


def gradients(
    model: Model, rank: int, turn: int, exact: bool = True, scale: float = 1.0
) -> list[Tensor]:
    """A rank's gradients. `exact`: their sums are the same in any order."""
    drawn = torch.Generator().manual_seed(1000 * turn + rank)
    found = []
    for param in model.parameters():
        if exact:
            grad = torch.randint(-16, 17, param.shape, generator=drawn) / 64
        else:
            grad = torch.randn(param.shape, generator=drawn)
        found.append((grad * scale).to(param.dtype))
    return found


def average(model: Model, ranks: int, turn: int, exact: bool = True) -> list[Tensor]:
    """Σᵣ gᵣ / R, in the gradients' dtype."""
    every = [gradients(model, rank, turn, exact) for rank in range(ranks)]
    return [torch.stack(list(each)).sum(0).to(each[0].dtype) / ranks for each in zip(*every)]


def groups(model: Model) -> list[dict[str, Any]]:
    params = model.all()
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], "lr": 3e-3, "weight_decay": 0.1}]


def differing(one: nn.Module, other: nn.Module) -> list[str]:
    """The names of parameters of which a bit differs."""
    others = dict(other.named_parameters())
    return [n for n, p in one.named_parameters() if not torch.equal(p, others[n])]


def steps_like_one_process(kinds: Any, exact: bool, settings: dict[str, Any]) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(kinds), Model(kinds)
        own = {"lr": 1e-2, **settings}
        optimizer = ShardedAdamW(groups(model), reduce=reduce, bucket_bytes=1 << 19, **own)
        reference = isokron.AdamW(groups(twin), **own)
        schedules = [
            torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (optimizer, reference)
        ]
        for turn in range(4):
            optimizer.zero_grad()
            model.backward(gradients(model, rank, turn, exact))
            optimizer.step()
            for param, grad in zip(twin.parameters(), average(twin, ranks, turn, exact)):
                param.grad = grad
            reference.step()
            for schedule in schedules:
                schedule.step()
            wrong += [f"{reduce} {turn} {name}" for name in differing(model, twin)]
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_steps_have_the_bits_of_one_process(ranks: int, tmp_path: Path) -> None:
    # for two ranks any gradients; for more, such whose sums do not depend on the order
    for wrong in run(ranks, steps_like_one_process, UGLY, ranks != 2, {}, folder=tmp_path):
        assert wrong == []
