"""Weights from a file: all of them, or an error that names the first that is wrong."""

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from isokron.inspect import Setup, measure
from isokron.training import load_weights_


def test_given_weights_are_inspected_as_they_are(regression, tmp_path):
    model = regression.model()
    path = tmp_path / "model.safetensors"
    save_model(model, path)
    setup = Setup(regression, weights=path)
    assert setup.steps == 0
    measure(setup)
    for mine, theirs in zip(setup.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_given_weights_may_be_trained_further(regression, tmp_path):
    path = tmp_path / "model.safetensors"
    save_model(regression.model(), path)
    setup = Setup(regression, weights=path, steps=2)
    before = setup.model[0].weight.detach().clone()
    measure(setup)
    assert not torch.equal(setup.model[0].weight, before)


def test_tied_weights_are_there_under_either_name(tmp_path):
    def tied():
        model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
        model["b"].weight = model["a"].weight
        return model

    saved, loaded = tied(), tied()
    save_model(saved, tmp_path / "tied.safetensors")
    load_weights_(loaded, tmp_path / "tied.safetensors")
    assert torch.equal(loaded["b"].weight, saved["a"].weight)


def test_a_missing_file_is_called_missing_and_not_unfitting(regression, tmp_path):
    path = tmp_path / "none.safetensors"
    for missing in (path, tmp_path):  # a folder is no file either
        with pytest.raises(ValueError, match=rf"^weights must be .* there is no file '{missing}'"):
            Setup(regression, weights=missing)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("0.bias"), 'Missing key.*"0.bias"'),
        (lambda state: state.update(extra=torch.zeros(1)), 'Unexpected key.*"extra"'),
        (lambda state: state.update({"2.weight": torch.zeros(2, 3)}), "size mismatch for 2.weight"),
        (lambda state: state["0.weight"].fill_(torch.nan), "'0.weight' is not finite"),
    ],
)
def test_the_first_wrong_weight_is_named(change, message, regression, tmp_path):
    state = {key: value.clone() for key, value in regression.model().state_dict().items()}
    change(state)
    save_file(state, tmp_path / "wrong.safetensors")
    with pytest.raises(ValueError, match=rf"(?s)weights 'wrong.safetensors' .*{message}"):
        load_weights_(regression.model(), tmp_path / "wrong.safetensors")
