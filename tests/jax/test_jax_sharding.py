"""Blocks spread over eight devices are worked on as on one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from sharded import CANARY, SCENARIOS

from isokron.jax import get_opt_state_partition_specs, quad, scale_by_skew


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sharded.py")],
        capture_output=True,
        text=True,
        # 1 leaves out what is no warning
        env=os.environ | {"XLA_FLAGS": flags, "TF_CPP_MIN_LOG_LEVEL": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line for line in lines} | {"stderr": done.stderr}


@pytest.mark.parametrize("name", SCENARIOS)
def test_eight_devices_equal_one(found: dict[str, Any], name: str) -> None:
    result, axis = found[name], SCENARIOS[name][3]
    assert result["error"] < 2e-6
    assert result["same structure"]
    assert result["state moved"] == 0
    assert result["params moved"] == 0
    assert result["compiled"] == 1
    devices = {"x": 4, "y": 2, None: 1}[axis]
    assert result["blocks"] == -(-9 // devices) * devices  # six of w, three of the stack
    assert result["blocks on a device"] == result["blocks"] // devices


def test_nothing_is_rematerialized(found: dict[str, Any]) -> None:
    before, after = found["stderr"].split(CANARY)
    assert "rematerialization" not in before
    assert "Involuntary full rematerialization" in after


def test_a_wrong_axis_is_told(found: dict[str, Any]) -> None:
    assert (
        "must be an axis of the mesh ('x', 'y'), got 'z'" in found["pipeline_axis_name"]["message"]
    )
    assert "must be 4, the mesh's size of 'x', got 3" in found["pipeline_axis_size"]["message"]


def test_specs_fit_any_settings() -> None:
    import jax
    import optax

    params = {"w": jnp.zeros((6, 4)), "v": jnp.zeros(3)}
    for factory, settings in [
        (quad, {}),
        (quad, {"weight_decay": 0.0, "learning_rate": optax.constant_schedule(0.1)}),
        (quad, {"block_size": 4, "dtype": "bfloat16", "apply": "old", "every": 5, "key": 0}),
        (scale_by_skew, {"max_size_dense": 5}),
        (lambda **given: optax.MultiSteps(quad(**given), 2), {"learning_rate": 0.1}),
    ]:
        specs = get_opt_state_partition_specs(params, factory, **settings)
        state = factory(**settings).init(params)
        assert jax.tree.structure(specs) == jax.tree.structure(state)
