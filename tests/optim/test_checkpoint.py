"""Loading says what does not fit, and leaves the optimizer as it was."""

import copy
import io
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import isokron
from cases import CASES, Case, Whitening, equal, net, train

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
METHODS = [
    *(isokron.AdamW, isokron.Muon, isokron.Shampoo, isokron.SOAP, isokron.Katie, isokron.Quad),
    *(isokron.Skew, isokron.SignDescent),
]


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state dict through a file of plain values."""
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    state: dict[str, Any] = torch.load(buffer, weights_only=True)
    return state


def equal_entries(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(torch.as_tensor(value), torch.as_tensor(second[key]))
        for key, value in first.items()
    )


def trained(optimizer: type, **settings: Any) -> tuple[torch.nn.Module, Any]:
    model = net()
    made = optimizer(model.named_parameters(), **settings)
    train(model, made, range(3))
    return model, made


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


def after_three_steps(case: Case) -> tuple[nn.Module, isokron.Preconditioned]:
    model = net()
    optimizer = case.make(model.named_parameters())
    train(model, optimizer, range(3))
    return model, optimizer


def reordered(model: nn.Module, order: list[str], case: Case) -> isokron.Preconditioned:
    return case.make([(name, model.get_parameter(name)) for name in order])


@every_case
def test_state_goes_to_the_parameter_of_its_name(case: Case) -> None:
    """`square` and `twin` have one shape."""
    model, optimizer = after_three_steps(case)
    twin = copy.deepcopy(model)
    order = [name for name, _ in model.named_parameters()][::-1]
    loaded = reordered(twin, order, case)
    loaded.load_state_dict(saved(optimizer))
    assert loaded.param_groups[0]["param_names"] == order
    for name, param in model.named_parameters():
        assert equal_entries(optimizer.state[param], loaded.state[twin.get_parameter(name)]), name


@pytest.mark.parametrize("flatten", [False, True])
def test_torch_distributed_checkpoint_finds_parameters_by_name(flatten: bool) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    model, optimizer = trained(isokron.SOAP)
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer, options=options))
    twin = copy.deepcopy(model)
    loaded = isokron.SOAP(list(twin.named_parameters())[::-1])
    set_optimizer_state_dict(twin, loaded, state, options=options)
    for name, param in model.named_parameters():
        assert equal_entries(optimizer.state[param], loaded.state[twin.get_parameter(name)]), name


def test_natural_gradient_finds_layers_by_name() -> None:
    class Two(nn.Module):
        def __init__(self, first: str, second: str) -> None:
            super().__init__()
            for name in (first, second):
                setattr(self, name, nn.Linear(4, 4))
            self.first, self.second = "q", "k"

        def forward(self, x: Tensor) -> Tensor:
            return self.k(self.q(x).tanh())

    model, twin = Two("q", "k"), Two("k", "q")
    twin.load_state_dict(model.state_dict())
    optimizer, loaded = (isokron.NaturalGradient(m, every=2) for m in (model, twin))

    def go(module: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
        for seed in steps:
            opt.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
            (module(x) - x).square().mean().backward()
            opt.step()

    go(model, optimizer, range(3))
    twin.load_state_dict(model.state_dict())
    loaded.load_state_dict(saved(optimizer))
    go(model, optimizer, range(3, 6))
    go(twin, loaded, range(3, 6))
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, twin.get_parameter(name))
    state = saved(optimizer)
    state["state"][0]["input"][0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"'q\.weight': 'input' has NaN"):
        loaded.load_state_dict(state)
    with pytest.raises(ValueError, match="fisher must be 'empirical', as in the checkpoint"):
        isokron.NaturalGradient(twin, fisher="exact").load_state_dict(saved(optimizer))


def test_a_renamed_parameter_is_refused_and_a_wrapped_one_is_not() -> None:
    _, optimizer = trained(isokron.SOAP)
    state = saved(optimizer)
    names = state["param_groups"][0]["param_names"]
    names[:] = [f"module._orig_mod.{name}" for name in names]
    optimizer.load_state_dict(state)
    names[names.index("module._orig_mod.twin.weight")] = "gate.weight"
    with pytest.raises(ValueError, match=r"no parameter 'twin\.weight'.*none named 'gate\.weight'"):
        optimizer.load_state_dict(state)


@every_case
def test_a_step_may_be_a_number_of_python_or_a_tensor_of_integers(case: Case) -> None:
    """As in checkpoints of older optimizers of torch, and of tools that rewrite them."""
    model, optimizer = after_three_steps(case)
    for convert in (int, float, lambda step: step.long()):
        state = copy.deepcopy(optimizer.state_dict())
        for entry in state["state"].values():
            entry["step"] = convert(entry["step"])
        twin = copy.deepcopy(model)
        loaded = case.make(twin.named_parameters())
        loaded.load_state_dict(state)
        after = loaded.state_dict()["state"]
        for number, entry in optimizer.state_dict()["state"].items():
            assert equal_entries(entry, after[number])


def test_wrappers_are_not_taken_off_names_that_would_be_equal() -> None:
    """A layer may be called `module` too."""

    def of(prefix: str) -> isokron.AdamW:
        names = [f"{prefix}{name}" for name in ("a.weight", "module.a.weight")]
        return isokron.AdamW([(name, nn.Parameter(torch.ones(3, 3))) for name in names])

    with pytest.raises(ValueError, match=r"no parameter '_orig_mod\.a\.weight'"):
        of("_orig_mod.").load_state_dict(saved(of("")))


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("lr", [np.float64(0.5), np.float32(0.5), np.array(0.5)])
@pytest.mark.parametrize("method", [isokron.AdamW, isokron.SOAP, isokron.NaturalGradient])
def test_learning_rates_of_numpy_are_saved_as_plain_numbers(
    method: Any, lr: Any, steps: int
) -> None:
    model = net()
    optimizer = method(model if method is isokron.NaturalGradient else model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = lr
    if steps:
        train(model, optimizer, range(steps))
    state = saved(optimizer)
    assert {type(group["lr"]) for group in state["param_groups"]} == {float}
    optimizer.load_state_dict(state)


@pytest.mark.parametrize(("first", "second"), list(permutations(METHODS, 2)))
def test_the_state_of_another_method_is_told_as_that(first: type, second: type) -> None:
    model, optimizer = trained(first)
    whose = f"{second.__name__}: the checkpoint is of isokron.{first.__name__}, not of"
    with pytest.raises(ValueError, match=whose):
        second(model.named_parameters()).load_state_dict(saved(optimizer))


@pytest.mark.parametrize("method", [*METHODS[1:], isokron.NaturalGradient])
def test_the_state_of_torchs_adamw_is_told_as_that(method: Any) -> None:
    model = net()
    theirs = torch.optim.AdamW(model.parameters())
    train(model, theirs, range(2))
    natural = method is isokron.NaturalGradient
    optimizer = method(model if natural else model.parameters())
    with pytest.raises(ValueError, match=r"as of torch\.optim\.AdamW or Adam, not of"):
        optimizer.load_state_dict(theirs.state_dict())


def test_weight_decay_of_torchs_adam_is_not_taken_for_that_of_adamw() -> None:
    model = net()
    theirs = torch.optim.Adam(model.parameters(), weight_decay=0.1)
    train(model, theirs, range(2))
    with pytest.raises(ValueError, match=r'weight_decay=0\.1 to the gradient.*set decay="l2"'):
        isokron.AdamW(model.parameters()).load_state_dict(theirs.state_dict())
    isokron.AdamW(model.parameters(), decay="l2").load_state_dict(theirs.state_dict())


@pytest.mark.parametrize("make", [isokron.SOAP, isokron.AdamW, isokron.NaturalGradient])
def test_a_newer_format_and_a_missing_setting_are_refused_by_name(make: Any) -> None:
    model = net()
    optimizer = make(model if make is isokron.NaturalGradient else model.named_parameters())
    train(model, optimizer, range(2))
    name = make.__name__
    state = saved(optimizer)
    state["param_groups"][0]["format"] = f"{name} 99"
    with pytest.raises(ValueError, match=f"format 99 of {name}, and this isokron reads .* up to 1"):
        optimizer.load_state_dict(state)
    state = saved(optimizer)
    del state["param_groups"][0]["lr_scale"]
    with pytest.raises(ValueError, match=f"{name}: group 0 of the checkpoint has no setting 'lr_s"):
        optimizer.load_state_dict(state)


@every_case
def test_other_defaults_do_not_alter_a_resumed_run(case: Case) -> None:
    model, optimizer = after_three_steps(case)
    twin = copy.deepcopy(model)
    resumed = case.optimizer(twin.named_parameters())
    resumed.load_state_dict(saved(optimizer))
    for one, other in zip(optimizer.param_groups, resumed.param_groups, strict=True):
        one, other = ({k: v for k, v in g.items() if k != "params"} for g in (one, other))
        assert one == other
    train(model, optimizer, range(3, 8))
    train(twin, resumed, range(3, 8))
    assert equal(model, twin)


@pytest.mark.parametrize("make", [isokron.AdamW, isokron.SOAP])
@pytest.mark.parametrize("match_adamw", [False, True])
def test_a_resumed_run_keeps_its_multiples(make: Any, match_adamw: bool) -> None:
    def build(model: Any, multiple: float, match_adamw: bool = False) -> Any:
        scale = {} if match_adamw else {"lr_scale": {"out.weight": multiple}}
        return make(isokron.param_groups(model, match_adamw=match_adamw, **scale))

    model = net()
    optimizer = build(model, 8.0, match_adamw)
    train(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    resumed = build(twin, 2.0)
    resumed.load_state_dict(saved(optimizer))
    train(model, optimizer, range(3, 5))
    train(twin, resumed, range(3, 5))
    assert equal(model, twin)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@every_case
def test_an_entry_that_is_not_finite_is_refused_by_name(case: Case, value: float) -> None:
    model, optimizer = after_three_steps(case)
    twin_model, twin = copy.deepcopy((model, optimizer))
    names = [name for name, _ in model.named_parameters()]
    for name in ("square.weight", "norm.bias"):
        for key, entry in optimizer.state_dict()["state"][names.index(name)].items():
            if not entry.is_floating_point() or not entry.numel():
                continue
            state = copy.deepcopy(optimizer.state_dict())
            state["state"][names.index(name)][key].view(-1)[-1] = value
            with pytest.raises(ValueError, match=f"parameter '{name}': '{key}' has NaN or inf"):
                optimizer.load_state_dict(state)
    train(model, optimizer, range(3, 5))
    train(twin_model, twin, range(3, 5))
    assert equal(model, twin_model)


def test_settings_of_a_checkpoint_are_checked() -> None:
    model, optimizer = trained(isokron.SOAP)
    for name, value in {"betas": (1.5, 0.9), "graft": "foo", "max_dim": 0, "basis": "foo"}.items():
        for steps in (0, 3):
            state = saved(optimizer)
            state["state"] = state["state"] if steps else {}
            state["param_groups"][0][name] = value
            with pytest.raises(ValueError, match=f"SOAP.*{name}"):
                isokron.SOAP(model.named_parameters()).load_state_dict(state)


class Block(nn.Module):
    """A language model's ends around two projections of one shape."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50_000, 8)
        for name in names:
            setattr(self, name, nn.Linear(8, 8))
        self.head = nn.Linear(8, 50_000, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        return self.head(self.q(hidden).tanh() * self.k(hidden))


@pytest.mark.parametrize("settings", [{}, {"route": "method", "max_dim": 64}])
@pytest.mark.filterwarnings("ignore:SOAP. AdamW steps what is shaped like")
def test_a_vocabulary_of_50000_resumes_by_name_to_the_bit(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, twin = Block("q", "k"), Block("k", "q")
    optimizer, resumed = (
        isokron.SOAP([{"params": list(m.named_parameters()), **settings}], every=99, start=2)
        for m in (model, twin)
    )

    def go(module: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
        for seed in steps:
            tokens = torch.randint(50_000, (9,), generator=torch.Generator().manual_seed(seed))
            opt.zero_grad()
            nn.functional.cross_entropy(module(tokens[:-1]), tokens[1:]).backward()
            opt.step()

    # bases are refreshed in steps 2, 4 and 8: LAPACK's bits depend on the order of a batch
    go(model, optimizer, range(4))
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(saved(optimizer))
    go(model, optimizer, range(4, 7))
    go(twin, resumed, range(4, 7))
    for name, param in model.named_parameters():
        assert torch.equal(param, twin.get_parameter(name)), name
