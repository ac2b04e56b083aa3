"""NaturalGradient on many ranks against one rank that has seen all examples."""

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import isokron
from isokron.distributed.world import ranks_of
from isokron.optim.modes import bytes_sent, mode_of
from processes import outcomes, run

MODES = ("covariance", "gather", "gram", "auto")
COUNTS = {1: [12], 2: [3, 9], 4: [2, 5, 1, 4]}  # examples of every rank, 12 in all
SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1e-2, "kl_clip": 1e-2, "every": 2}


class Net(nn.Module):
    """A convolution in groups, a wide layer, one used twice, and a norm for AdamW."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(2, 4, 2, groups=2)
        self.wide = nn.Linear(4, 40)
        self.norm = nn.LayerNorm(40)
        self.shared = nn.Linear(40, 40)
        self.out = nn.Linear(40, 3, bias=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.wide(self.conv(x).tanh().mean((2, 3)))).tanh()
        return self.out(self.shared(self.shared(h).tanh()))


def losses(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    """Of 12 examples a step, or some of them: a weight for each, so that no two are alike."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(12, 2, 3, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (12,), generator=generator)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(
        model(inputs[rows].to(dtype)), labels[rows], reduction="none"
    )


def own_rows() -> slice:
    counts, rank = COUNTS[dist.get_world_size()], dist.get_rank()
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def one_rank(steps: int = 5, dtype: torch.dtype = torch.float64, **settings: Any) -> list[Tensor]:
    model = Net(dtype)
    optimizer = isokron.NaturalGradient(model, **{**SETTINGS, **settings})
    for step in range(steps):
        optimizer.zero_grad()
        losses(model, step).mean().backward()
        optimizer.step()
    return parameters(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Under DDP, whose average is to be the mean over all examples."""
    for step in steps:
        optimizer.zero_grad()
        (losses(model, step, own_rows()).sum() * dist.get_world_size() / 12).backward()
        optimizer.step()


def many_ranks(
    many: list[dict[str, Any]], dtype: torch.dtype = torch.float64, steps: int = 5
) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Parameters and state after training with each of the settings."""
    found = []
    for settings in many:
        model = Net(dtype)
        wrapped = DistributedDataParallel(model)
        optimizer = isokron.NaturalGradient(
            model,
            **{**SETTINGS, "reduction": "global_mean", "ranks": ranks_of(timeout=60), **settings},
        )
        train(wrapped, optimizer, range(steps))
        found.append((parameters(model), optimizer.state_dict()["state"]))
    return found


def assert_same(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert error < tolerance, f"relative error {error:.2g}"


def assert_bit_equal(ranks: list[Any]) -> None:
    for params, state in ranks[1:]:
        assert all(map(torch.equal, params, ranks[0][0]))
        assert state.keys() == ranks[0][1].keys()
        for index, entry in state.items():
            assert all(torch.equal(value, ranks[0][1][index][k]) for k, value in entry.items())


CASES = [{"reduce": mode} for mode in MODES] + [
    {"reduce": mode, "method": "ekfac"} for mode in MODES if mode != "gram"
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_unequal_counts_are_one_rank_that_saw_all(ranks: int, tmp_path: Path) -> None:
    found = run(ranks, many_ranks, CASES, folder=tmp_path)
    for case, each in zip(CASES, zip(*found, strict=True), strict=True):
        method = case.get("method", "kfac")
        assert_bit_equal(list(each))
        assert_same(each[0][0], one_rank(method=method), 1e-10)


def test_float32_is_as_near_as_its_rounding(tmp_path: Path) -> None:
    for found in zip(*run(2, many_ranks, CASES, torch.float32, folder=tmp_path), strict=True):
        assert_bit_equal(list(found))
    for case, (params, _) in zip(
        CASES, run(2, many_ranks, CASES, torch.float32, folder=tmp_path)[0], strict=True
    ):
        wanted = one_rank(method=case.get("method", "kfac"), dtype=torch.float32)
        assert_same(params, wanted, 1e-3)
