"""SOAP, Shampoo, Katie and Muon of JAX go where those of torch go, step by step."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import isokron
import isokron.jax
from isokron.block_layout import cut_blocks
from isokron.jax.batches import gather, plan, scatter
from isokron.polynomials import POLYNOMIALS

STEPS = 20
RATE = 0.01
SHAPES: dict[str, tuple[int, ...]] = {
    "square": (8, 8),
    "cut": (20, 12),  # above max_dim of 12: 12x12 and 8x12
    "wide": (8, 20),  # 8x12, in the same batch, and 8x8, in that of the square
    "row": (1, 9),
    "convolution": (6, 4, 3, 3),
    "order3": (5, 6, 7),
    "vector": (7,),
    "scalar": (),
}
TORCH = {
    "soap": isokron.SOAP,
    "shampoo": isokron.Shampoo,
    "katie": isokron.Katie,
    "muon": isokron.Muon,
}
CUT = {"max_dim": 12}
# A factor of less than full rank has eigenvectors that rounding chooses, others on every machine:
# where blocks are not square, SOAP is compared from a step on at which all ranks are full.
FULL = {"max_dim": 12, "start": 5}
DEFAULTS: dict[str, dict[str, Any]] = {"soap": FULL, "shampoo": CUT, "katie": CUT, "muon": {}}
OPTIONS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("soap", ["square"], {}),
    ("soap", ["cut"], {**FULL, "graft": None, "basis": "eigh"}),
    ("soap", ["cut"], {**FULL, "graft": "sgd", "tolerance": 0.3, "factor_beta": 0.8, "every": 3}),
    ("soap", ["cut"], {**FULL, "graft": "adagrad"}),
    (
        "soap",
        ["vector"],
        {"vectors": True, "start": 8, "momentum": 0.5, "nesterov": True},
    ),
    ("shampoo", ["cut"], {**CUT, "solver": "newton", "every": 4, "start": None}),
    ("shampoo", ["cut"], {**CUT, "solver": "higher", "exponent": 4, "deficient": "lift"}),
    ("shampoo", ["cut"], {**CUT, "form": "eigen", "graft": None}),
    ("shampoo", ["cut"], {**CUT, "form": "eigen", "tolerance": 0.3, "deficient": "lift"}),
    ("shampoo", ["cut"], {**CUT, "statistic": "kl", "exponent": None, "graft": "rmsprop"}),
    ("shampoo", ["cut"], {**CUT, "statistic": "kl", "form": "eigen"}),
    ("shampoo", ["square"], {"deficient": "pseudo", "damping": 0.0, "form": "eigen"}),
    ("shampoo", ["cut"], {**CUT, "factor_beta": 1.0, "exponent": {2: [4, 0]}}),
    ("shampoo", ["cut"], {"split": 2, "split_dim": 1, "every": 1}),
    ("katie", ["cut"], {**CUT, "form": "symmetric", "statistic": "raw", "graft": "adagrad"}),
    ("katie", ["vector"], {"vectors": True, "eps": 0.0, "betas": (0.0, 0.9)}),
    ("katie", ["order3"], {"stacked": 1, "factor_beta": 0.5}),
    ("katie", ["cut"], {**CUT, "exponent": {2: (3, 0)}}),
    ("muon", ["cut"], {"scale": "original", "coefficients": "cans", "nesterov": False}),
    ("muon", ["cut"], {"graft": "adam", "steps": 3, "split": (8, 12)}),
    ("muon", ["order3", "vector"], {"momentum": 0.0, "nesterov": False, "betas": (0.8, 0.9)}),
]


def apart(kind: str, names: list[str], options: dict[str, Any], dtype: type = np.float64) -> float:
    """The largest distance between the two, relative to how far torch's has walked, of any leaf."""
    random = np.random.default_rng(0)

    def draw() -> dict[str, np.ndarray]:
        return {name: random.standard_normal(SHAPES[name]).astype(dtype) for name in names}

    start = draw()
    weights = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    theirs = TORCH[kind](list(weights.values()), lr=RATE, **options)
    ours = getattr(isokron.jax, kind)(RATE, **options)
    params = {name: jnp.asarray(value) for name, value in start.items()}
    state = jax.jit(ours.init)(params)

    @jax.jit
    def step(noise: Any, state: Any, params: Any) -> tuple[Any, Any]:
        grads = {name: noise[name] + 0.5 * params[name] for name in names}
        updates, state = ours.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for noise in (draw() for _ in range(STEPS)):
        for name, weight in weights.items():
            weight.grad = torch.tensor(noise[name]) + 0.5 * weight.detach()
        theirs.step()
        params, state = step(noise, state, params)
    assert state[0].count == STEPS
    assert state[0].skipped == state[0].failed == 0
    found = []
    for name in names:
        there = weights[name].detach().numpy()
        walked = np.linalg.norm(there - start[name])
        found.append(np.linalg.norm(np.asarray(params[name]) - there) / walked)
    return float(max(found))


@pytest.mark.parametrize("kind", DEFAULTS)
def test_leaves_of_every_shape_go_where_torch_goes(kind: str) -> None:
    names = [name for name in SHAPES if name != "order3"]  # as a convolution is
    with jax.enable_x64(True):
        assert apart(kind, names, DEFAULTS[kind]) < 1e-10


@pytest.mark.parametrize(
    ("kind", "names", "options"),
    OPTIONS,
    ids=[f"{kind}-{'-'.join(map(str, options))}" for kind, _, options in OPTIONS],
)
def test_options_mean_what_they_mean_in_torch(
    kind: str, names: list[str], options: dict[str, Any]
) -> None:
    with jax.enable_x64(True):
        assert apart(kind, names, options) < 1e-6


@pytest.mark.parametrize("kind", ["shampoo", "katie", "muon"])
def test_in_float32_they_stay_near(kind: str) -> None:
    assert apart(kind, ["cut"], DEFAULTS[kind], np.float32) < 1e-4


@pytest.mark.parametrize("coefficients", [*POLYNOMIALS, None, (1.5, -0.5, 0.0)])
def test_polar_factors_are_those_of_torch(coefficients: Any) -> None:
    matrix = np.random.default_rng(0).standard_normal((3, 4, 9)) * 1e-30
    with jax.enable_x64(True):
        for given in (matrix, matrix.swapaxes(1, 2), matrix[0, :, :1] * 0):
            found = isokron.jax.newton_schulz(jnp.asarray(given), 4, coefficients)
            options = {"method": "plain"}
            expected = isokron.linalg.newton_schulz(torch.tensor(given), 4, coefficients, **options)
            np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)


def test_polar_factors_have_the_dtype_of_their_matrix_and_no_gradient() -> None:
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.bfloat16)
    found = isokron.jax.newton_schulz(matrix, 12, "exact")
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(found @ found.T), np.eye(4), atol=0.05)
    assert isokron.jax.newton_schulz(jnp.zeros((0, 3))).shape == (0, 3)
    slope = jax.grad(lambda x: isokron.jax.newton_schulz(x).sum())(jnp.eye(3))
    np.testing.assert_array_equal(slope, 0)
    with pytest.raises(ValueError, match=r"needs matrices \[..., m, n\], got shape \(3,\)"):
        isokron.jax.newton_schulz(jnp.ones(3))
    with pytest.raises(ValueError, match="coefficients must be one of"):
        isokron.jax.newton_schulz(matrix, coefficients="best")


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((33, 20), {"max_dim": 16}),
        ((3, 5, 40, 7), {"max_dim": 16, "stacked": 1}),
        ((2, 12, 10), {"max_dim": 4, "stacked": 1, "split": (3, 9)}),
        ((2, 10, 12), {"max_dim": 5, "stacked": 1, "split": 3, "split_dim": 1}),
        ((6, 1, 3, 3), {"max_dim": 8, "oversize": "identity"}),
        ((30, 1), {"max_dim": 7, "vectors": True}),
    ],
)
def test_blocks_are_those_of_torch_and_come_together_again(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    group = {"oversize": "cut", "vectors": False, "stacked": 0, "split": None, "split_dim": 0}
    where = plan(jnp.zeros(shape), {"optimizer": "SOAP", **group, **options}, None)
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    batches = jax.jit(lambda leaf: gather([leaf], where, jnp.float32))(array)
    own = {name: value for name, value in options.items() if name != "vectors"}
    expected = sorted(block.read(array).tobytes() for block in cut_blocks(shape, **own))
    found = sorted(np.asarray(block).tobytes() for rows in batches.values() for block in rows)
    assert found == expected
    whole = jax.jit(lambda rows: scatter(rows, where.leaves[0]))(batches)
    np.testing.assert_array_equal(whole.reshape(shape), array)
