"""Loading says what does not fit, and leaves the optimizer as it was."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import isokron
from cases import Whitening, equal, net, train


def trained(optimizer: type, **settings: Any) -> tuple[torch.nn.Module, Any]:
    model = net()
    made = optimizer(model.named_parameters(), **settings)
    train(model, made, range(3))
    return model, made


def test_a_foreign_checkpoint_is_refused_by_its_first_differing_key() -> None:
    model, muon = trained(isokron.Muon)
    other = isokron.AdamW(model.named_parameters())
    with pytest.raises(ValueError, match=r"parameter 'conv\.weight': 'exp_avg' is missing"):
        other.load_state_dict(muon.state_dict())


def test_other_blocks_are_refused_with_both_shapes() -> None:
    model, saved = trained(Whitening, max_dim=8)
    state = saved.state_dict()
    for group in state["param_groups"]:
        group["max_dim"] = 6
    with pytest.raises(ValueError, match=r"'square|hidden|conv"):
        Whitening(model.named_parameters(), max_dim=6).load_state_dict(state)


def test_a_failed_load_leaves_the_optimizer_as_it_was() -> None:
    model, optimizer = trained(isokron.Muon)
    twin_model, twin = copy.deepcopy((model, optimizer))
    broken = copy.deepcopy(optimizer.state_dict())
    del broken["state"][1]["momentum.0"]
    with pytest.raises(ValueError, match=r"momentum\.0"):
        optimizer.load_state_dict(broken)
    train(model, optimizer, range(3, 6))
    train(twin_model, twin, range(3, 6))
    assert equal(model, twin_model)


def test_loading_does_not_alias_the_checkpoint() -> None:
    model, optimizer = trained(isokron.Muon)
    state = copy.deepcopy(optimizer.state_dict())
    kept = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 6))
    for index, entry in kept["state"].items():
        assert all(torch.equal(entry[key], state["state"][index][key]) for key in entry)


def test_user_hooks_run_around_loading() -> None:
    model, optimizer = trained(isokron.Muon)
    state = copy.deepcopy(optimizer.state_dict())
    called = []

    def double(opt: object, given: dict[str, Any]) -> dict[str, Any]:
        entry = {**given["state"][1], "momentum.0": given["state"][1]["momentum.0"] * 2}
        return {**given, "state": {**given["state"], 1: entry}}

    optimizer.register_load_state_dict_pre_hook(double)
    optimizer.register_load_state_dict_post_hook(lambda opt: called.append(True))
    optimizer.load_state_dict(state)
    loaded = optimizer.state[model.conv.weight]["momentum.0"]
    assert torch.equal(loaded, state["state"][1]["momentum.0"] * 2)
    assert called == [True]


@pytest.mark.parametrize("make", [isokron.AdamW, isokron.Muon, Whitening])
def test_state_goes_through_torch_distributed_checkpoint(make: type) -> None:
    """One process: get and set by fully qualified names, into an optimizer that never stepped."""
    model, optimizer = trained(make)
    state = get_optimizer_state_dict(model, optimizer)
    twin = copy.deepcopy(model)
    resumed = make(twin.named_parameters())
    set_optimizer_state_dict(twin, resumed, copy.deepcopy(state))
    train(model, optimizer, range(3, 6))
    train(twin, resumed, range(3, 6))
    assert equal(model, twin)


def test_a_checkpoint_with_blocks_to_spare_is_refused() -> None:
    four, two = (torch.nn.Parameter(torch.randn(n, 3, 5)) for n in (4, 2))
    saved = isokron.Muon([{"params": [four], "stacked": 1}])
    four.grad = torch.randn(4, 3, 5)
    saved.step()
    other = isokron.Muon([{"params": [two], "stacked": 1}])
    with pytest.raises(ValueError, match=r"'momentum\.2' is not part of this state"):
        other.load_state_dict(saved.state_dict())


def test_a_checkpoint_of_adamw_does_not_pass_for_one_of_muon() -> None:
    model, adamw = trained(isokron.AdamW)
    with pytest.raises(ValueError, match="'exp_avg' is not part of this state"):
        isokron.Muon(model.named_parameters()).load_state_dict(adamw.state_dict())


def test_the_state_is_changed_in_place_and_reset_by_clearing_it() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = isokron.Muon([weight], lr=1.0, momentum=0.5, weight_decay=0.0)
    weight.grad = torch.eye(4)
    optimizer.step()
    optimizer.state[weight]["momentum.0"].copy_(torch.eye(4).flip(0) * 1e6)
    before = weight.detach().clone()
    optimizer.step()
    step = before - weight.detach()
    assert step.flip(0).trace() > 2 * step.trace()  # along the moment that was written
    optimizer.state.clear()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_other_keys_of_a_group_do_not_lay_blocks_out_anew() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    optimizer = isokron.Muon([weight])
    addresses = set()
    for step in range(3):
        optimizer.param_groups[0]["my_counter"] = step
        weight.grad = torch.eye(4)
        optimizer.step()
        addresses.add(optimizer.state[weight]["momentum.0"].data_ptr())
    assert len(addresses) == 1


def test_settings_changed_in_mid_training_take_effect() -> None:
    model = net()
    optimizer = isokron.SignDescent(model.named_parameters(), momentum=0.0)
    train(model, optimizer, range(2))
    (group,) = optimizer.param_groups
    group["momentum"] = 0.9
    train(model, optimizer, range(2, 4))
    entry = optimizer.state[model.square.weight]
    assert entry["step"] == 4
    assert entry["momentum.0"].any()
    group["momentum"], group["graft"] = 0.0, "adam"
    train(model, optimizer, range(4, 6))
    assert set(optimizer.state[model.square.weight]) == {"step", "graft.0"}
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_skipped_steps_are_counted_across_copies() -> None:
    weight = torch.nn.Parameter(torch.zeros(2, 2))
    weight.grad = torch.full((2, 2), torch.nan)
    optimizer = isokron.Muon([weight], nonfinite="skip")
    optimizer.step()
    assert copy.deepcopy(optimizer).skipped_steps == 1


def test_other_groups_are_refused_with_both_sizes() -> None:
    model, plain = trained(isokron.Muon)
    routed = isokron.Muon(isokron.param_groups(model))
    with pytest.raises(ValueError, match=r"groups of \[11\] parameters, this optimizer of \["):
        routed.load_state_dict(plain.state_dict())


@pytest.mark.parametrize(("first", "then"), [("adamw", "method"), ("method", "adamw")])
def test_a_parameter_that_changes_its_stepper_starts_afresh(first: str, then: str) -> None:
    """A count of the old moments would take the new ones for old."""

    def last_step(routes: list[str]) -> torch.Tensor:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.zeros(6, 4))
        optimizer = isokron.Katie([weight], lr=1.0, weight_decay=0.0)
        for route in routes:
            optimizer.param_groups[0]["route"] = route
            before = weight.detach().clone()
            weight.grad = torch.ones(6, 4)
            optimizer.step()
        return weight.detach() - before

    torch.testing.assert_close(last_step([first] * 3 + [then]), last_step([then]))
