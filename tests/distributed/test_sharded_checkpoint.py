"""State that is on several ranks is saved whole, and goes on with other numbers of ranks."""

import copy
import io
import pickle
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
from isokron.distributed.partial import full_state_dict
from isokron.optim.sharded import ShardedAdamW
from processes import run

STEPS = 6
SETTINGS: dict[str, Any] = {"lr": 1e-2, "bucket_bytes": 1 << 18, "amsgrad": True}


def train(model: Model, optimizer: torch.optim.Optimizer, turns: range) -> None:
    """The same gradients on every rank, and so the same average with any number of ranks."""
    for turn in turns:
        optimizer.zero_grad()
        model.backward(gradients(model, 0, turn, exact=True))
        optimizer.step()


def one_process() -> tuple[Model, isokron.AdamW]:
    """Never interrupted."""
    model = Model(UGLY)
    optimizer = isokron.AdamW(model.parameters(), lr=1e-2, amsgrad=True)
    for turn in range(STEPS):
        for param, grad in zip(
            model.parameters(), gradients(model, 0, turn, exact=True), strict=True
        ):
            param.grad = grad
        optimizer.step()
    return model, optimizer


def save(folder: str, flatten: bool, turns: range, before: str | None = None) -> list[str]:
    """Load what there is, train on, save; which parameters differ from one process's at the end."""
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), **SETTINGS)
    untouched = Model(UGLY)
    if before is not None:
        optimizer.param_groups[0]["lr"] = 7.0  # the checkpoint knows better
        state = get_optimizer_state_dict(model, optimizer, options=options)
        assert differing(model, untouched) == []
        both = {"model": model.state_dict(), "optimizer": state}
        dcp.load(both, checkpoint_id=before)
        model.load_state_dict(both["model"])
        set_optimizer_state_dict(model, optimizer, both["optimizer"], options=options)
        assert optimizer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, turns)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=folder)
    return differing(model, one_process()[0])


@pytest.mark.parametrize("flatten", [False, True])
def test_training_goes_on_with_other_numbers_of_ranks_to_the_bit(
    flatten: bool, tmp_path: Path
) -> None:
    two, one, four = (str(tmp_path / name) for name in ("two", "one", "four"))
    run(2, save, two, flatten, range(0, 2))
    run(1, save, one, flatten, range(2, 4), two)
    for wrong in run(4, save, four, flatten, range(4, STEPS), one):
        assert wrong == []


def full(path: str) -> None:
    """The whole state is that of one process; it loads into AdamW, torch's AdamW and back."""
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), **SETTINGS)
    train(model, optimizer, range(STEPS))
    whole = full_state_dict(optimizer)
    twin, reference = one_process()
    expected = reference.state_dict()
    assert whole["state"].keys() == expected["state"].keys()
    for i, entry in expected["state"].items():
        assert whole["state"][i].keys() == entry.keys()
        assert all(torch.equal(whole["state"][i][key], value) for key, value in entry.items())
    last = dist.get_world_size() - 1
    alone = optimizer.full_state_dict(to_rank=last)
    if dist.get_rank() != last:
        assert alone == {}
    else:
        assert alone["param_groups"] == whole["param_groups"]
        for i, entry in whole["state"].items():
            assert all(torch.equal(alone["state"][i][key], value) for key, value in entry.items())
    torch.save(whole, f"{path}.{dist.get_rank()}")
    loaded = torch.load(f"{path}.{dist.get_rank()}", weights_only=True)

    theirs = torch.optim.AdamW(twin.parameters(), fused=True)
    theirs.load_state_dict(loaded)
    assert theirs.param_groups[0]["lr"] == 1e-2
    again = isokron.AdamW(twin.parameters())
    again.load_state_dict(loaded)
    renewed = ShardedAdamW(model.parameters(), reduce="backward")
    renewed.load_state_dict(again.state_dict())
    assert renewed.param_groups[0].keys() == optimizer.param_groups[0].keys()
    train(model, renewed, range(9, 11))
    for turn in range(9, 11):
        for param, grad in zip(
            twin.parameters(), gradients(twin, 0, turn, exact=True), strict=True
        ):
            param.grad = grad
        again.step()
    assert differing(model, twin) == []


@pytest.mark.parametrize("ranks", [1, 3])
def test_the_whole_state_is_that_of_one_process(ranks: int, tmp_path: Path) -> None:
    run(ranks, full, str(tmp_path / "state"))


def saved_by_itself() -> None:
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters())
    train(model, optimizer, range(2))
    state = optimizer.state_dict()
    by_name = get_optimizer_state_dict(model, optimizer)
    for part in (state, {"optimizer": state}, state["state"][0], by_name, state.copy()):
        with pytest.raises(TypeError, match="full_state_dict"):
            torch.save(part, io.BytesIO())
    for each in (optimizer, copy.copy(state)):
        with pytest.raises(TypeError, match="full_state_dict"):
            pickle.dumps(each)
    # kept in memory it is as good as any
    kept, before = copy.deepcopy(state), copy.deepcopy(model)
    train(model, optimizer, range(2, 4))
    after = copy.deepcopy(model)
    model.load_state_dict(before.state_dict())
    optimizer.load_state_dict(kept)
    train(model, optimizer, range(2, 4))
    assert differing(model, after) == []


def test_a_part_is_not_saved_as_if_it_were_all() -> None:
    run(2, saved_by_itself)


def foreign() -> list[str]:
    model, twin, texts = Model(UGLY), Model(UGLY), []
    optimizer = ShardedAdamW(list(model.named_parameters()))
    train(model, optimizer, range(2))
    sgd = torch.optim.SGD(twin.parameters(), momentum=0.9)
    ams = torch.optim.AdamW(twin.parameters(), amsgrad=True)
    for other in (sgd, ams):
        for param, grad in zip(twin.parameters(), gradients(twin, 0, 0), strict=True):
            param.grad = grad
        other.step()
    wrong = optimizer.full_state_dict()
    wrong["state"][4]["exp_avg"] = torch.zeros(3, 127)
    ams_state = {**ams.state_dict(), "param_groups": optimizer.state_dict()["param_groups"]}
    pieces = optimizer.state_dict()
    key = next(k for k in pieces["state"][6] if k.startswith("exp_avg."))
    del pieces["state"][6][key]
    few = {"state": {}, "param_groups": [{"params": [0, 1]}]}
    kept = copy.deepcopy(optimizer.state_dict())
    for bad in (sgd.state_dict(), ams_state, wrong, pieces, few):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            optimizer.load_state_dict(bad)
        texts.append(str(caught.value))
    still = optimizer.state_dict()["state"]
    for i, entry in kept["state"].items():
        assert all(torch.equal(still[i][name], value) for name, value in entry.items())
    texts[3] = texts[3].replace(key, "KEY")
    return texts


def test_a_foreign_checkpoint_is_refused_by_its_first_differing_key() -> None:
    for sgd, ams, wrong, pieces, few in run(2, foreign):
        assert "state of parameter 'p0': " in sgd
        assert "'momentum_buffer' is not part" in sgd or "is missing from" in sgd
        assert "'max_exp_avg_sq' is not part of this state" in ams
        assert "'p4': 'exp_avg' has shape (3, 127) in the checkpoint and (127, 3) here" in wrong
        assert "'p6': 'KEY' is missing from the checkpoint" in pieces
        assert "groups of [2] parameters" in few


def frozen(folder: str) -> list[str]:
    """Frozen parameters have no state, and keep none in a checkpoint."""
    model = Model(UGLY)
    for param in model.all()[5:8]:
        param.requires_grad_(False)
    optimizer = ShardedAdamW(model.parameters())
    model.backward(
        [
            g if p.requires_grad else None
            for p, g in zip(model.all(), gradients(model, 0, 0), strict=True)
        ]
    )
    optimizer.step()
    assert all(param not in optimizer.state for param in model.all()[5:7])
    state = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    assert all(param not in optimizer.state for param in model.all()[5:7])
    assert not {5, 6, 7} & full_state_dict(optimizer)["state"].keys()
    return []


def test_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    run(2, frozen, str(tmp_path / "saved"))


def full_by_torch() -> str:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = torch.nn.Linear(3, 2)
    optimizer = isokron.ShardedAdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    return str(caught.value)


def test_a_full_state_that_would_be_a_part_is_refused() -> None:
    for text in run(2, full_by_torch):
        assert "would take one rank's part for the whole" in text
