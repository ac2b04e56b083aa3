"""Sharded AdamW's checkpoints: other numbers of ranks, other modes, and one process."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import isokron
from given_gradients import UGLY, Model, differing, gradients
from processes import run

STEPS = 6
KINDS = [kind for kind in UGLY if 0 not in kind[0]]  # parameters without elements have no state
SETTINGS: dict[str, Any] = {"lr": 1e-2, "amsgrad": True}


def make(mode: str, **settings: Any) -> tuple[Model, isokron.AdamW]:
    """`mode`: how gradients are distributed; "" for a plain AdamW."""
    model = Model(KINDS)
    optimizer = isokron.AdamW(model.named_parameters(), **(SETTINGS | settings))
    if mode:
        optimizer.distribute(gradients=mode, bucket_bytes=1 << 18)
    return model, optimizer


def train(model: Model, optimizer: torch.optim.Optimizer, turns: range) -> None:
    """The same gradients on every rank, and so the same average with any number of ranks."""
    for turn in turns:
        optimizer.zero_grad()
        model.backward(gradients(model, 0, turn, exact=True))
        optimizer.step()


def uninterrupted(steps: int = STEPS) -> tuple[Model, isokron.AdamW]:
    model, optimizer = make("")
    train(model, optimizer, range(steps))
    return model, optimizer


def resume(mode: str, turns: range, folder: str, flatten: bool, before: str = "") -> list[str]:
    """Load, train on, save; which parameters differ from those of an uninterrupted process."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = make(mode, lr=7.0 if before else 1e-2)
    if before:
        state = get_optimizer_state_dict(model, optimizer, options=options)
        assert differing(model, Model(KINDS)) == []  # torch has taken a step of lr=0
        saved = {"model": model.state_dict(), "optimizer": state}
        dcp.load(saved, checkpoint_id=before)
        model.load_state_dict(saved["model"])
        set_optimizer_state_dict(model, optimizer, saved["optimizer"], options=options)
        assert optimizer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, turns)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    return differing(model, uninterrupted(turns.stop)[0])


@pytest.mark.parametrize("flatten", [False, True])
def test_training_goes_on_with_other_ranks_and_modes_to_the_bit(
    flatten: bool, tmp_path: Path
) -> None:
    stages = [(2, "sharded"), (4, "whole"), (3, "sharded"), (1, ""), (2, "sharded")]
    before = ""
    for stage, (ranks, mode) in enumerate(stages):
        turns, folder = range(2 * stage, 2 * stage + 2), str(tmp_path / str(stage))
        assert run(ranks, resume, mode, turns, folder, flatten, before) == [[]] * ranks
        before = folder


def full(path: str) -> None:
    model, optimizer = make("sharded")
    train(model, optimizer, range(STEPS))
    whole = isokron.distributed.full_state_dict(optimizer)
    twin, reference = uninterrupted()
    for i, entry in reference.state_dict()["state"].items():
        assert whole["state"][i].keys() == entry.keys()
        assert all(torch.equal(whole["state"][i][key], value) for key, value in entry.items())
    last = dist.get_world_size() - 1
    alone = optimizer.full_state_dict(to_rank=last)
    assert (alone == {}) == (dist.get_rank() != last)
    torch.save(whole, f"{path}.{dist.get_rank()}")
    loaded = torch.load(f"{path}.{dist.get_rank()}", weights_only=True)

    by_torch = torch.optim.AdamW(twin.parameters(), fused=True)
    by_torch.load_state_dict(copy.deepcopy(loaded))
    by_torch.param_groups[0]["fused"] = True  # which torch takes from the checkpoint
    renewed = isokron.ShardedAdamW(model.parameters())
    renewed.load_state_dict(by_torch.state_dict())
    del optimizer
    train(model, renewed, range(9, 11))
    train(twin, by_torch, range(9, 11))
    assert differing(model, twin) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_full_state_is_that_of_one_process_and_of_torch(ranks: int, tmp_path: Path) -> None:
    run(ranks, full, str(tmp_path / "state"))


def saved_by_itself() -> None:
    model, optimizer = make("sharded")
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    by_name = get_optimizer_state_dict(model, optimizer)
    for part in (state, {"optimizer": state}, state["state"][1], by_name, copy.copy(state)):
        with pytest.raises(TypeError, match="full_state_dict"):
            torch.save(part, io.BytesIO())
    with pytest.raises(RuntimeError, match="full_state_dict"):
        copy.deepcopy(optimizer)
    # a copy in memory is complete for this rank
    memory, weights = copy.deepcopy(state), copy.deepcopy(model.state_dict())
    train(model, optimizer, range(2, 4))
    after = copy.deepcopy(model.state_dict())
    model.load_state_dict(weights)
    optimizer.load_state_dict(memory)
    train(model, optimizer, range(2, 4))
    assert all(torch.equal(value, after[key]) for key, value in model.state_dict().items())


def test_one_ranks_part_is_not_saved_as_the_whole() -> None:
    run(2, saved_by_itself)


def foreign() -> list[str]:
    model, optimizer = make("sharded", amsgrad=False)
    train(model, optimizer, range(2))
    twin, texts = Model(KINDS), []
    sgd = torch.optim.SGD(twin.parameters(), momentum=0.9)
    train(twin, sgd, range(1))
    misshapen, part = optimizer.full_state_dict(), optimizer.full_state_dict()
    misshapen["state"][3]["exp_avg"] = torch.zeros(3, 127)
    del part["state"][6]["exp_avg"]
    few = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    before = optimizer.full_state_dict()["state"]
    for wrong in (sgd.state_dict(), misshapen, part, few):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            optimizer.load_state_dict(wrong)
        texts.append(str(caught.value))
    after = optimizer.full_state_dict()["state"]
    for i, entry in before.items():
        assert all(torch.equal(after[i][key], value) for key, value in entry.items())
    return texts


def test_a_foreign_checkpoint_is_refused_by_name_and_changes_nothing() -> None:
    for sgd, misshapen, part, few in run(2, foreign):
        assert "another library, as of torch.optim.SGD or Muon, not of AdamW" in sgd
        assert "'p3': 'exp_avg' has shape (3, 127) in the state and (127, 3) here" in misshapen
        assert "'p6': 'exp_avg' is missing from the checkpoint" in part
        assert "groups of [2] parameters" in few


def frozen(folder: str) -> None:
    model = Model(KINDS)
    for param in model.all()[5:8]:
        param.requires_grad_(False)
    optimizer = isokron.ShardedAdamW(model.parameters())
    grads = gradients(model, 0, 0)
    model.backward([None if 5 <= i < 8 else grad for i, grad in enumerate(grads)])
    optimizer.step()
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert not any(param in optimizer.state for param in model.all()[5:8])
    assert not {5, 6, 7} & optimizer.full_state_dict()["state"].keys()


def test_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    run(2, frozen, str(tmp_path / "saved"))


def full_by_torch() -> None:
    model, optimizer = make("sharded")
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    expected = get_optimizer_state_dict(*uninterrupted(2))["state"]
    for name, entry in expected.items():
        assert all(torch.equal(state[name][key], value) for key, value in entry.items())


def test_torchs_full_state_dict_is_that_of_one_process() -> None:
    run(2, full_by_torch)
