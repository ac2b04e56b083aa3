"""Steps of DistributedShampoo, recorded for tests/optim, as isokron.jax takes them."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from isokron.jax import scale_by_shampoo

DATA = Path(__file__).parents[1] / "optim/distributed_shampoo"
SHAPES = json.loads((DATA / "manifest.json").read_text())["roots"]["shapes"]
PLAIN: dict[str, Any] = {
    **{"betas": (0.9, 0.99), "factor_beta": 0.99, "damping": 1e-6, "deficient": "lift"},
    **{"exponent": None, "graft": None, "every": 1, "start": 1, "max_dim": None},
}
ADAM = {"graft": "adam"}


def decayed(momentum: float, dampening: float) -> list[optax.GradientTransformation]:
    """Decayed weights that the momentum accumulates."""
    scale = optax.scale(1 - dampening)
    return [optax.add_decayed_weights(0.1), scale, optax.trace(momentum)]


CONFIGS: dict[str, tuple[float, dict[str, Any], list[optax.GradientTransformation]]] = {
    "roots": (0.01, {}, []),
    "beta3_0.8": (0.01, {"beta3": 0.8}, []),
    "beta3_0.95_graft_adam": (0.01, {"beta3": 0.95, **ADAM}, []),
    "momentum_0.8_dampening_0.3_nesterov": (
        0.003,
        {"momentum": 0.8, "dampening": 0.3, "nesterov": True, **ADAM},
        [],
    ),
    "momentum_0.9_dampening_0.3": (0.003, {}, decayed(0.9, 0.3)),
    "kl_roots": (0.01, {"statistic": "kl_sum", **ADAM}, []),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_takes_the_recorded_steps(name: str) -> None:
    lr, settings, after = CONFIGS[name]
    recorded = np.load(DATA / f"{name}.npz")
    random = np.random.default_rng(1)
    with jax.enable_x64(True):
        start = [random.standard_normal(shape) for shape in SHAPES]
        optimizer = optax.chain(scale_by_shampoo(**{**PLAIN, **settings}), *after, optax.scale(-lr))
        params = [jnp.asarray(value) for value in start]
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for t in range(30):
            grads = [random.standard_normal(p.shape) * (1 + i) for i, p in enumerate(params)]
            updates, state = update(grads, state, params)
            params = optax.apply_updates(params, updates)
            for i in range(len(params)) if f"{t + 1}.0" in recorded else ():
                there = recorded[f"{t + 1}.{i}"]
                moved = np.linalg.norm(there - start[i])
                assert np.linalg.norm(np.asarray(params[i]) - there) < 1e-5 * moved
