"""Bytes by policy are those of the tensors that would be kept."""

import pytest
import torch

from isokron.inspection import inspect, make_plan
from isokron.inspection.memory import by_policy, input_bytes, output_bytes
from isokron.inspection.training import make_model
from isokron.operators import gradient_factor, woodbury_policy


@pytest.fixture
def result(reading):
    plan = make_plan(reading, steps=0, examples=20)
    return inspect(make_model(plan), plan)


def test_covariances_take_what_the_fit_holds(result):
    inspection, curvature = result
    for facts in inspection.layers:
        held = sum(value.nbytes for value in curvature.layers[facts.name].statistics.values())
        assert output_bytes(facts, 80, "none") + input_bytes(facts) == held == facts.bytes
    none = by_policy(inspection.layers, 80)[0]
    assert none.total == sum(facts.bytes for facts in inspection.layers)


def test_gradients_take_what_their_factor_holds(result):
    head = result[0].layers[-1]
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        kept = gradient_factor(torch.randn(head.outputs, 80), store_dtype=dtype).columns
        assert output_bytes(head, 80, "all", size) == kept.nbytes


@pytest.mark.parametrize("terms", [1, 3, 80])
def test_auto_chooses_layer_by_layer(result, terms):
    layers = [facts for facts in result[0].layers if facts.kind != "diagonal"]
    found = {p.policy: p for p in by_policy(result[0].layers, terms)}
    assert found["auto"].gradients == sum(
        woodbury_policy(facts.outputs, terms, "auto") for facts in layers
    )
    assert found["all"].gradients == len(layers) == 2
    assert found["none"].gradients == found["hybrid"].gradients == 0
    assert found["auto"].outputs <= found["none"].outputs
