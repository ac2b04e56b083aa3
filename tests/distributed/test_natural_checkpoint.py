"""NaturalGradient's state through torch.distributed.checkpoint, on one process and on several."""

import copy
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
from torch.nn.parallel import DistributedDataParallel

import isokron
from processes import run

EXAMPLES = 12


class Net(nn.Module):
    """A convolution with bias, a batch norm, attention, an embedding and a layer norm."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.conv = nn.Conv1d(width, 6, 3, groups=2)
        self.batch_norm = nn.BatchNorm1d(6)
        self.wide = nn.Linear(6, 30)
        self.out = nn.Linear(30, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.embed(numbers)
        x = self.norm(x + self.attend(x, x, x)[0])
        x = self.batch_norm(self.conv(x.mT)).mean(2)
        return self.out(self.wide(x).tanh())


def batch(step: int) -> Tensor:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    generator = torch.Generator().manual_seed(step)
    numbers = torch.randint(9, (EXAMPLES, 5), generator=generator)
    return numbers[rank * EXAMPLES // ranks : (rank + 1) * EXAMPLES // ranks]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()


def made(**settings: Any) -> tuple[nn.Module, isokron.NaturalGradient]:
    """The model as it is trained, under DDP where there are ranks."""
    model = Net()
    optimizer = isokron.NaturalGradient(model, every=2, **settings)
    if not dist.is_initialized():
        return model, optimizer
    optimizer.distribute()
    return DistributedDataParallel(model), optimizer


def assert_equal(first: nn.Module, second: nn.Module) -> None:
    for (name, mine), theirs in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def resume(folder: str, options: dict[str, bool], settings: dict[str, Any]) -> set[str]:
    """Save after three steps, load into an optimizer that has taken 0 or 1, train both on."""
    chosen = StateDictOptions(**options)
    model, optimizer = made(**settings)
    train(model, optimizer, range(3))
    state = get_optimizer_state_dict(model, optimizer, options=chosen)
    dcp.save({"optimizer": state}, checkpoint_id=folder)
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(3, 6))
    for before in (0, 1):
        twin, its = made(**settings)
        train(twin, its, range(before))
        for group in its.param_groups:
            group["lr"] = 7.0  # the checkpoint knows better
        its.zero_grad()
        loaded = {"optimizer": get_optimizer_state_dict(twin, its, options=chosen)}
        assert all(group["lr"] == 7.0 for group in its.param_groups)
        assert all(param.grad is None for param in twin.parameters())
        dcp.load(loaded, checkpoint_id=folder)
        twin.load_state_dict(weights)
        set_optimizer_state_dict(twin, its, loaded["optimizer"], options=chosen)
        assert its.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        train(twin, its, range(3, 6))
        assert_equal(twin, model)
    return set(optimizer.state[optimizer.model.wide.weight])


OPTIONS = [{}, {"full_state_dict": True}, {"flatten_optimizer_state_dict": True}]
CASES: list[dict[str, Any]] = [
    {},
    {"method": "ekfac", "layers": "*", "momentum": 0.0},
    {"method": "tkfac", "policy": "all", "t_max": 20},
]


@pytest.mark.parametrize("settings", CASES)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_process_resumes_to_the_bit(
    options: dict[str, bool], settings: dict[str, Any], tmp_path: Path
) -> None:
    resume(str(tmp_path / "checkpoint"), options, settings)


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"full_state_dict": True, "broadcast_from_rank0": True}]
)
def test_two_ranks_resume_to_the_bit(options: dict[str, bool], tmp_path: Path) -> None:
    run(2, resume, str(tmp_path / "checkpoint"), options, {})


@pytest.mark.parametrize("options", OPTIONS)
def test_layers_kept_as_columns_resume_to_the_bit(options: dict[str, bool], tmp_path: Path) -> None:
    for keys in run(2, resume, str(tmp_path / "checkpoint"), options, {"policy": "all"}):
        assert "columns" in keys


@pytest.mark.parametrize("settings", CASES)
def test_asking_for_the_state_before_the_first_step_changes_nothing(
    settings: dict[str, Any],
) -> None:
    model, optimizer = made(**settings)
    twin, its = made(**settings)
    state = get_optimizer_state_dict(twin, its)["state"]
    assert {name for name, _ in twin.named_parameters()} == set(state)
    train(model, optimizer, range(4))
    train(twin, its, range(4))
    assert_equal(twin, model)


def test_the_first_state_has_the_form_of_all_later_ones() -> None:
    for settings in CASES:
        model, optimizer = made(**settings)
        forms = []
        for steps in (0, 3):
            train(model, optimizer, range(steps))
            optimizer.zero_grad()
            state = get_optimizer_state_dict(model, optimizer)["state"]
            forms.append(
                {
                    name: {k: (v.shape, v.dtype) for k, v in entry.items()}
                    for name, entry in state.items()
                }
            )
        assert forms[0] == forms[1]


def test_a_layer_that_never_had_a_gradient_is_as_new_after_loading(tmp_path: Path) -> None:
    def some(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, full: bool) -> None:
        for step in steps:
            optimizer.zero_grad()
            hidden = model[0](torch.randn(8, 4, generator=torch.Generator().manual_seed(step)))
            (model[1](hidden) if full else hidden).square().mean().backward()
            optimizer.step()

    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = isokron.NaturalGradient(model)
    some(model, optimizer, range(2), False)
    dcp.save(
        get_optimizer_state_dict(model, optimizer),
        checkpoint_id=tmp_path,
    )
    assert not optimizer.state[model[1].weight]["terms"]
    twin = copy.deepcopy(model)
    resumed = isokron.NaturalGradient(twin)
    loaded = get_optimizer_state_dict(twin, resumed)
    dcp.load(loaded, checkpoint_id=tmp_path)
    set_optimizer_state_dict(twin, resumed, loaded)
    for one, stepper in ((model, optimizer), (twin, resumed)):
        some(one, stepper, range(2, 5), True)
    assert_equal(twin, model)
