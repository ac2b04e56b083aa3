"""Optimizer specs: parsing, resolving, and errors before any work."""

import pytest
import torch
from torch import nn

from isokron.optim.lr_transfer import METHOD_MULTIPLE
from isokron.optimizers_by_name import BUILT_IN, parse_spec, resolve, split_specs


def test_specs_are_split_at_outer_commas_only():
    text = "adamw, muon(momentum=0.9),torch.optim:Adam(betas=(0.9,0.99),eps=1e-9)"
    assert split_specs(text) == [
        "adamw",
        "muon(momentum=0.9)",
        "torch.optim:Adam(betas=(0.9,0.99),eps=1e-9)",
    ]


def test_options_are_python_literals():
    spec = "torch.optim:SGD(momentum=0.9,nesterov=True)"
    assert parse_spec(spec) == ("torch.optim:SGD", {"momentum": 0.9, "nesterov": True})
    assert parse_spec("muon") == ("muon", {})


@pytest.mark.parametrize(
    "spec", ["muon(0.9)", "muon(momentum=)", "muon(momentum=0.9", "muon(x=__import__('os'))",
             "muon(momentum=0.9)(1)", "muon(**{'a': 1})", "muon(a=1) or x"]
)  # fmt: skip
def test_malformed_options_are_refused(spec):
    with pytest.raises(ValueError, match=r"options must read name\(option=value"):
        parse_spec(spec)


def test_options_may_be_settings_of_parameter_groups():
    optimizer = resolve("shampoo(deficient='lift', every=3)").build(torch.nn.Linear(4, 4), 0.1)
    assert all(group["deficient"] == "lift" for group in optimizer.param_groups)
    assert optimizer.defaults["every"] == 3
    with pytest.raises(ValueError, match=r"'deficient' .* of another optimizer"):
        resolve("soap(deficient='lift')")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mun", "did you mean muon"),
        ("torch.optim:Sgd", "has no 'Sgd'"),
        ("torch.optim:SGD(momentun=0.9)", "cannot be called: .*momentun"),
        ("muon(nonsense=1)", "cannot be called: .*nonsense"),
        ("muon(momentum=2)", "optimizer 'muon.momentum=2.': .*momentum must be .* below 1"),
        ("muon(scale='loud')", "optimizer .*: .*scale must be one of .* got scale='loud'"),
        ("muon(lr=0.1)", "lr is no option of an optimizer; give lr=0.1"),
        ("math:pi", "must be callable, got float"),
    ],
)
def test_wrong_specs_are_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        resolve(spec)


def test_options_a_constructor_hands_on_are_checked_by_building_it(monkeypatch):
    import isokron

    class HandsOn(isokron.Muon):
        def __init__(self, params, lr=1e-2, *, own=1, **shared):
            super().__init__(params, lr, **shared)

    monkeypatch.setattr(isokron, "Muon", HandsOn, raising=False)
    resolve("muon(own=2,momentum=0.5)")
    with pytest.raises(ValueError, match=r"cannot be called: .*momentun.*; its options are own$"):
        resolve("muon(momentun=0.5)")


def test_an_empty_name_is_refused():
    with pytest.raises(ValueError, match="empty name"):
        split_specs("adamw,,muon")


def test_options_reach_the_optimizer():
    optimizer = resolve("torch.optim:SGD(momentum=0.5)").build(nn.Linear(2, 2), 0.25)
    assert optimizer.defaults["momentum"] == 0.5
    assert optimizer.defaults["lr"] == 0.25


def test_a_factory_with_a_first_parameter_model_gets_the_model():
    optimizer = resolve("toy:whole_model(momentum=0.5)").build(nn.Linear(2, 2), 0.25)
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.defaults["momentum"] == 0.5


def test_an_optimizer_of_ours_that_takes_the_model_gets_it():
    optimizer = resolve("natural(layers='1*',damping=0.5)").build(
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), 0.25
    )
    assert optimizer.param_groups[0]["param_names"] == ["1.weight", "1.bias"]
    with pytest.raises(ValueError, match="damping must be a finite number above 0"):
        resolve("natural(damping=-1)")
    with pytest.raises(ValueError, match=r"cannot be called: .*; its options are method, fisher"):
        resolve("natural(dampin=1)")


def test_policies_dampings_and_condition_numbers_of_natural_can_be_raced():
    text = (
        'natural(policy="all"),natural(damping=1e-2,max_condition=1e4),natural(policy={"1":"all"})'
    )
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    dense, clipped, named = (resolve(spec).build(model, 0.1) for spec in split_specs(text))
    assert [record["policy"] for record in dense.report()] == ["all", "all"]
    assert clipped.param_groups[0]["max_condition"] == 1e4
    assert [record["policy"] for record in named.report()] == ["dense", "all"]
    with pytest.raises(ValueError, match="use fisher='empirical'"):
        resolve("natural(fisher='sampled')")


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_optimizers_train_every_parameter(name):
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 5))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = resolve(name).build(model, 0.01)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.tensor([0, 1, 2, 3, 4])).square().sum().backward()
        optimizer.step()
    assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_match_adamw_is_an_option_with_the_learning_rates_of_adamw() -> None:
    entrant = resolve("muon(match_adamw=True)")
    assert entrant.lr == resolve("adamw").lr
    (group,) = entrant.build(nn.Sequential(nn.Linear(8, 8, bias=False)), 1e-3).param_groups
    assert group["lr_scale"] == METHOD_MULTIPLE
    with pytest.raises(ValueError, match=r"match_adamw must be True or False, got 0\.5"):
        resolve("muon(match_adamw=0.5)")


def test_settings_by_name_pattern_are_those_of_the_model_of_the_task() -> None:
    entrant = resolve("soap(lr_scale={'1.*':2.0})")
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    scales = [group["lr_scale"] for group in entrant.build(model, 1e-3).param_groups]
    assert sorted(scales) == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"'2\.\*' matches no trainable parameter"):
        resolve("soap(lr_scale={'2.*':2.0})").build(model, 1e-3)
