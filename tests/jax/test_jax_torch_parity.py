"""The JAX optimizers take the steps that those of torch take."""

from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import isokron
import isokron.jax
from isokron.polynomials import POLYNOMIALS
from naive import gradients

STEPS = 20
RATE = 0.01
SHAPES: dict[str, tuple[int, ...]] = {
    "square": (8, 8),
    "cut": (23, 12),  # above max_dim of 12: 12x12 and 11x12
    "wide": (8, 20),  # two of 8x10
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
    ("soap", ["square"], {"beta3": 0.5, "momentum": 0.5, "dampening": 0.3}),
    ("soap", ["square", "vector"], {"polar": True}),
    ("soap", ["square", "vector"], {"lr_scale": {"square": 2.0, "*": 8.0}}),
    ("muon", ["cut", "vector", "scalar"], {"lr_scale": {"vec*": 8.0}}),
    ("soap", ["cut"], {**FULL, "polar": True, "graft": None, "momentum": 0.5}),
    ("shampoo", ["cut"], {**CUT, "solver": "newton", "every": 4, "start": None}),
    ("shampoo", ["cut"], {**CUT, "solver": "higher", "exponent": 4, "deficient": "lift"}),
    ("shampoo", ["cut"], {**CUT, "form": "eigen", "graft": None}),
    ("shampoo", ["cut"], {**CUT, "statistic": "kl", "exponent": None, "graft": "rmsprop"}),
    ("shampoo", ["cut"], {**CUT, "statistic": "kl", "form": "eigen"}),
    ("shampoo", ["cut"], {**CUT, "statistic": "kl_sum", "exponent": None, "beta3": 0.0}),
    ("shampoo", ["square"], {"deficient": "pseudo", "damping": 0.0, "form": "eigen"}),
    ("shampoo", ["cut"], {**CUT, "factor_beta": 1.0, "exponent": {2: [4, 0]}}),
    ("shampoo", ["cut"], {"split": 2, "split_dim": 1, "every": 1}),
    ("shampoo", ["cut", "convolution"], {**CUT, "polar": True}),
    ("katie", ["cut"], {**CUT, "form": "symmetric", "statistic": "raw", "graft": "adagrad"}),
    ("katie", ["vector"], {"vectors": True, "eps": 0.0, "betas": (0.0, 0.9)}),
    ("katie", ["order3"], {"stacked": 1, "factor_beta": 0.5}),
    ("katie", ["cut"], {**CUT, "exponent": {2: (3, 0)}}),
    (
        "katie",
        ["cut"],
        {**CUT, "beta3": 0.95, "momentum": 0.5, "dampening": 0.3, "nesterov": True},
    ),
    ("katie", ["order3", "wide"], {**CUT, "polar": True}),
    ("katie", ["order3", "convolution"], {**CUT, "order": None}),
    ("muon", ["cut"], {"scale": "original", "coefficients": "cans", "nesterov": False}),
    ("muon", ["cut", "convolution"], {"scale": None}),
    ("muon", ["cut"], {"graft": "adam", "steps": 3, "split": (8, 15)}),
    ("muon", ["order3", "vector"], {"momentum": 0.0, "nesterov": False, "betas": (0.8, 0.9)}),
]


def apart(kind: str, names: list[str], options: dict[str, Any], dtype: type = np.float64) -> float:
    """The largest distance between the two, relative to how far torch's has walked, of any leaf."""
    random = np.random.default_rng(0)

    def draw() -> dict[str, np.ndarray]:
        return {name: random.standard_normal(SHAPES[name]).astype(dtype) for name in names}

    start = draw()
    weights = {name: torch.nn.Parameter(torch.tensor(value)) for name, value in start.items()}
    # in torch some of these are settings of a parameter group only
    theirs_options = dict(options)
    by_pattern = theirs_options.pop("lr_scale", {})
    scales = [
        next((scale for pattern, scale in by_pattern.items() if fnmatchcase(name, pattern)), 1.0)
        for name in names
    ]
    groups = [
        {"params": [weight], "lr_scale": scale, "refresh": "together", **theirs_options}
        for weight, scale in zip(weights.values(), scales, strict=True)
    ]
    theirs = TORCH[kind](groups, lr=RATE)
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
    assert not state[0].skipped.any()
    assert state[0].failed == 0
    distances = []
    for name in names:
        there = weights[name].detach().numpy()
        walked = np.linalg.norm(there - start[name])
        distances.append(np.linalg.norm(np.asarray(params[name]) - there) / walked)
    return float(max(distances))


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
            polar = isokron.jax.newton_schulz(jnp.asarray(given), 4, coefficients)
            options = {"method": "plain"}
            expected = isokron.linalg.newton_schulz(torch.tensor(given), 4, coefficients, **options)
            np.testing.assert_allclose(polar, expected, rtol=1e-10, atol=1e-12)


def test_polar_factors_have_the_dtype_of_their_matrix_and_no_gradient() -> None:
    matrix = jnp.asarray(np.random.default_rng(0).standard_normal((4, 6)), jnp.bfloat16)
    polar = isokron.jax.newton_schulz(matrix, 12, "exact")
    assert polar.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(polar @ polar.T), np.eye(4), atol=0.05)
    assert isokron.jax.newton_schulz(jnp.zeros((0, 3))).shape == (0, 3)
    slope = jax.grad(lambda x: isokron.jax.newton_schulz(x).sum())(jnp.eye(3))
    np.testing.assert_array_equal(slope, 0)
    with pytest.raises(ValueError, match=r"needs matrices \[..., m, n\], got shape \(3,\)"):
        isokron.jax.newton_schulz(jnp.ones(3))
    with pytest.raises(ValueError, match="coefficients must be one of"):
        isokron.jax.newton_schulz(matrix, coefficients="best")


WHITE_KRON = {"quad": isokron.Quad, "skew": isokron.Skew}
WHITE_SHAPES: list[tuple[int, ...]] = [
    *[(12, 8), (20, 35), (40, 10), (10, 40), (33, 50)],
    *[(5, 3, 4), (7,), (), (1, 6), (16, 16)],
]
# what is no matter of shapes: two dense sides and two blocks, one dense side, none
FEW: list[tuple[int, ...]] = [(20, 12), (5, 40), (7,)]
WHITE_OPTIONS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "default": (WHITE_SHAPES, {}),
    "no style, rates, normalized": (
        FEW,
        {
            "lr_style": None,
            "momentum": 0.8,
            "preconditioner_lr": 0.3,
            "preconditioner_lr_floor": 0.2999,
            "preconditioner_init_scale": 2.0,
            "normalize": True,
        },
    ),
    "noise, every": (FEW, {"noise_scale": 1e-3, "damping": 1e-2, "every": 3, "warmup": 4}),
    "every, from the third": (FEW, {"every": 3}),
    "old, every": (FEW, {"apply": "old", "every": 4, "warmup": 2}),
    "bfloat16": (FEW, {"dtype": "bfloat16"}),
}


def torch_directions(
    kind: str, grads: dict[str, torch.Tensor], **settings: Any
) -> list[dict[str, torch.Tensor]]:
    """What each step of torch takes off parameters, by lr 1 and without decay."""
    weights = {name: torch.nn.Parameter(torch.zeros_like(each[0])) for name, each in grads.items()}
    group = {"params": list(weights.values()), "route": "method", **settings}
    optimizer = WHITE_KRON[kind]([group], lr=1.0, weight_decay=0.0)
    steps = []
    for t in range(STEPS):
        before = {name: weight.detach().clone() for name, weight in weights.items()}
        for name, weight in weights.items():
            weight.grad = grads[name][t].clone()
        optimizer.step()
        steps.append({name: before[name] - weight.detach() for name, weight in weights.items()})
    return steps


@pytest.mark.parametrize("kind", WHITE_KRON)
@pytest.mark.parametrize("options", WHITE_OPTIONS)
def test_quad_and_skew_have_the_directions_of_torch(kind: str, options: str) -> None:
    shapes, changed = WHITE_OPTIONS[options]
    settings = {"block_size": 16, "max_size_dense": 32, **changed}
    rounded = {"dtype": torch.bfloat16} if "dtype" in settings else {}
    # a factor rounded to 8 bits may fall to either side
    tolerance = 2e-2 if rounded else 1e-5
    grads = {str(shape): gradients(shape, STEPS, seed=3) for shape in shapes}
    theirs = torch_directions(kind, grads, **settings | rounded)
    with jax.enable_x64(True):
        scale = getattr(isokron.jax, f"scale_by_{kind}")(**settings)
        state = scale.init({str(shape): jnp.zeros(shape) for shape in shapes})
        update = jax.jit(scale.update)
        for t, expected in enumerate(theirs):
            ours, state = update({name: each[t].numpy() for name, each in grads.items()}, state)
            for name, direction in ours.items():
                gap = np.linalg.norm(np.asarray(direction) - expected[name].numpy())
                assert gap < tolerance * np.linalg.norm(expected[name].numpy()), (t, name)
