"""Weights from a file: all of them, or an error that names the first that is wrong."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from isokron.inspection import inspect, make_plan
from isokron.inspection.models import make_model
from isokron.training import load_weights_


def test_given_weights_are_inspected_as_they_are(regression, tmp_path):
    model = regression.model()
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    plan = make_plan(regression, weights=path)
    made = make_model(plan)
    assert plan.steps == 0
    inspect(made, plan)
    for mine, theirs in zip(made.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_given_weights_may_be_trained_further(regression, tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(regression.model(), path)
    plan = make_plan(regression, weights=path, steps=2)
    made = make_model(plan)
    before = made[0].weight.detach().clone()
    inspect(made, plan)
    assert not torch.equal(made[0].weight, before)


def test_tied_weights_are_there_under_either_name(tmp_path):
    def tied():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return model

    saved, loaded = tied(), tied()
    save_model(saved, tmp_path / "tied.safetensors")
    load_weights_(loaded, tmp_path / "tied.safetensors")
    assert torch.equal(loaded["b"].weight, saved["a"].weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("0.bias"), "lack '0.bias'"),
        (lambda state: state.update(extra=torch.zeros(1)), "hold 'extra', which the model does"),
        (
            lambda state: state.update({"2.weight": torch.zeros(2, 3)}),
            r"'2.weight' has shape \(2, 3\), and \(2, 8\) in the model",
        ),
        (lambda state: state["0.weight"].fill_(torch.nan), "'0.weight' is not finite"),
    ],
)
def test_the_first_wrong_weight_is_named(change, message, regression, tmp_path):
    state = {key: value.clone() for key, value in regression.model().state_dict().items()}
    change(state)
    save_file(state, tmp_path / "wrong.safetensors")
    model = regression.model()
    before = model[0].bias.detach().clone()
    with pytest.raises(ValueError, match=message):
        load_weights_(model, tmp_path / "wrong.safetensors")
    assert torch.equal(model[0].bias, before)
