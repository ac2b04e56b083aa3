"""Quad and Skew of JAX take the steps that those of torch take."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import isokron
import isokron.jax
from naive import gradients

METHODS = {"quad": isokron.Quad, "skew": isokron.Skew}
STEPS = 20
SHAPES = [(12, 8), (20, 35), (40, 10), (10, 40), (33, 50), (5, 3, 4), (7,), (), (1, 6), (16, 16)]
# what is no matter of shapes: two dense sides and two blocks, one dense side, none
FEW = [(20, 12), (5, 40), (7,)]
OPTIONS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "default": (SHAPES, {}),
    "no style, rates, normalized": (
        FEW,
        {
            "lr_style": None,
            "b1": 0.8,
            "preconditioner_lr": 0.3,
            "preconditioner_init_scale": 2.0,
            "normalize_grads": True,
        },
    ),
    "noise, every": (FEW, {"noise_scale": 1e-3, "damping": 1e-2, "every": 3, "warmup": 4}),
    "every, from the third": (FEW, {"every": 3}),
    "old, every": (FEW, {"apply": "old", "every": 4, "warmup": 2}),
    "bfloat16": (FEW, {"dtype": "bfloat16"}),
}
TORCH_NAMES = {"b1": "momentum", "normalize_grads": "normalize"}


def directions(
    kind: str, grads: dict[str, torch.Tensor], **settings: Any
) -> list[dict[str, torch.Tensor]]:
    """What each step of torch takes off parameters, by lr 1 and without decay."""
    weights = {name: torch.nn.Parameter(torch.zeros_like(each[0])) for name, each in grads.items()}
    optimizer = METHODS[kind](
        [{"params": list(weights.values()), **settings}], lr=1.0, weight_decay=0.0
    )
    steps = []
    for t in range(STEPS):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = grads[name][t].clone()
        optimizer.step()
        steps.append({name: before[name] - weight.detach() for name, weight in weights.items()})
    return steps


def apart(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("kind", METHODS)
@pytest.mark.parametrize("options", OPTIONS)
def test_torch_and_jax_have_the_same_numbers(kind: str, options: str) -> None:
    shapes, changed = OPTIONS[options]
    given = {"block_size": 16, "max_size_dense": 32, **changed}
    mine = {TORCH_NAMES.get(name, name): value for name, value in given.items()}
    if "dtype" in mine:
        mine["dtype"] = torch.bfloat16
    # a factor rounded to 8 bits may fall to either side
    tolerance = 2e-2 if "dtype" in mine else 1e-5
    grads = {str(shape): gradients(shape, STEPS, seed=3) for shape in shapes}
    found = directions(kind, grads, route="method", **mine)
    with jax.enable_x64(True):
        scale = getattr(isokron.jax, f"scale_by_{kind}")(**given)
        state = scale.init({str(shape): jnp.zeros(shape) for shape in shapes})
        update = jax.jit(scale.update)
        for t, ours in enumerate(found):
            theirs, state = update({name: each[t].numpy() for name, each in grads.items()}, state)
            for name, each in theirs.items():
                assert apart(ours[name], each) < tolerance, (t, name)
