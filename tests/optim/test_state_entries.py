"""Entries of `optimizer.state`: their bytes and counts, and what others do to them."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import isokron
from cases import CASES, Case, equal, net, train

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def after_three_steps(case: Case) -> tuple[nn.Module, isokron.Preconditioned]:
    model = net()
    optimizer = case.make(model.named_parameters())
    train(model, optimizer, range(3))
    return model, optimizer


@every_case
def test_tensors_of_a_state_dict_own_no_more_than_their_bytes(case: Case) -> None:
    _, optimizer = after_three_steps(case)
    for entry in optimizer.state_dict()["state"].values():
        assert all(v.untyped_storage().nbytes() == v.nbytes for v in entry.values())


@every_case
def test_asking_for_the_state_before_the_first_step_changes_nothing(case: Case) -> None:
    model, reference = net(), net()
    optimizer, plain = case.make(model.parameters()), case.make(reference.parameters())
    state = get_optimizer_state_dict(model, optimizer)["state"]
    assert set(state) == {name for name, _ in model.named_parameters()}
    assert all(entry["step"] == 0 for entry in state.values())
    train(model, optimizer, range(5))
    train(reference, plain, range(5))
    assert equal(model, reference)


@every_case
def test_steps_are_counted_past_the_integers_of_float32(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    for entry in state["state"].values():
        entry["step"].fill_(2.0**24 - 1)
    optimizer.load_state_dict(state)
    train(model, optimizer, range(2, 5))
    by_method = [e for e in optimizer.state.values() if not {"exp_avg", "exp_avg_scale"} & set(e)]
    assert all(entry["step"] == 2**24 + 2 for entry in by_method)
    assert by_method or "adamw" in case.name


@pytest.mark.xfail(strict=True, reason="AdamW's steps are counted in torch's float32 too")
def test_adamw_counts_steps_past_the_integers_of_float32() -> None:
    model = net()
    optimizer = isokron.AdamW(model.parameters())
    train(model, optimizer, range(1))
    for entry in optimizer.state.values():
        entry["step"].fill_(2.0**24)
    train(model, optimizer, range(1))
    assert all(float(entry["step"]) == 2**24 + 1 for entry in optimizer.state.values())


@every_case
def test_a_deleted_entry_starts_afresh_and_a_replaced_one_counts(case: Case) -> None:
    model, optimizer = after_three_steps(case)
    first, second, third = model.square.weight, model.hidden.bias, model.hidden.weight
    del optimizer.state[first]
    optimizer.state[second] = {k: torch.zeros_like(v) for k, v in optimizer.state[second].items()}
    other = {key: value.clone() for key, value in optimizer.state[third].items()}
    optimizer.state[third]["step"] = other["step"] + 4
    train(model, optimizer, range(3, 4))
    steps = {param: float(entry["step"]) for param, entry in optimizer.state.items()}
    assert (steps.pop(first), steps.pop(second), steps.pop(third)) == (1, 1, 8)
    assert set(steps.values()) == {4}
    # a state dict does not undo it either
    del optimizer.state[first]
    numbers = {param: i for i, param in enumerate(model.parameters())}
    assert optimizer.state_dict()["state"][numbers[first]]["step"] == 0


@every_case
def test_an_entry_without_a_tensor_or_with_another_is_refused(case: Case) -> None:
    model, optimizer = after_three_steps(case)
    entry = optimizer.state[model.square.weight]
    key = next(key for key in entry if key != "step")
    removed = entry.pop(key)
    for spare in ({}, {key: removed, "ema": torch.zeros(2)}):
        entry.update(spare)
        with pytest.raises(ValueError, match=rf"'square\.weight': '({key}|ema)'"):
            optimizer.step()
        entry.pop("ema", None)


@pytest.mark.xfail(strict=True, reason="a moment that is switched on later counts its own steps")
@pytest.mark.parametrize(
    ("make", "settings", "change"),
    [
        (isokron.Preconditioned, {"lr": 1.0}, {"momentum": 0.9}),
        (isokron.Shampoo, {"graft": None, "weight_decay": 0.0}, {"graft": "adam"}),
    ],
)
def test_a_moment_that_is_switched_on_later_has_the_length_of_one_from_the_start(
    make: Any, settings: dict[str, Any], change: dict[str, Any]
) -> None:
    """With one gradient in all steps."""
    grad = torch.randn(8, 8)

    def lengths(before: int, **given: Any) -> Tensor:
        weight = nn.Parameter(torch.zeros(8, 8))
        optimizer = make([{"params": [weight], "route": "method", **given}], **settings)
        for step in range(before + 3):
            if step == before:
                optimizer.param_groups[0].update(change)
                old = weight.detach().clone()
            weight.grad = grad.clone()
            optimizer.step()
        return (weight.detach() - old).norm()

    torch.testing.assert_close(lengths(50), lengths(0, **change), rtol=0.05, atol=0)
