"""Numbers of the published implementation, without its randomness, and a naive float64 version."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import isokron.jax
from isokron.jax import quad_skew
from isokron.jax.linalg import norm_bound
from isokron.jax.quad_skew import balance, procrustes, step_factor
from isokron.white_kron import matrix_shape
from white_kron_naive import Naive

ROOT = Path(__file__).parents[2]
DATA = Path(os.environ.get("ISOKRON_SHARED", ROOT.parent / "shared")) / "data" / "white_kron"
SETTINGS = {"max_size_dense": 32, "block_size": 16, "noise_scale": 0.0}
needs_data = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"no reference trajectories in {DATA}; set ISOKRON_SHARED to the folder that has data/",
)


def probes(size: int) -> np.ndarray:
    """Those of the trajectories, whose energy of a row is a mean over the padded width of 16."""
    return cosines(size) * np.sqrt(size / 16)


def cosines(size: int) -> np.ndarray:
    i, j = np.ogrid[:4, :size]
    return np.sqrt(2) * np.cos(1 + 1.7 * i + 0.9 * j)


def published_bound(
    matrix: jax.Array, scale: jax.Array, probes: jax.Array, size: jax.Array
) -> jax.Array:
    fixed = jnp.asarray(cosines(matrix.shape[-1]), matrix.dtype)
    return norm_bound(matrix, scale, fixed, jnp.full_like(scale, 16))


@pytest.fixture(scope="module", params=["quad", "skew"])
def runs(request: pytest.FixtureRequest) -> dict[str, object]:
    """Directions and parameters at the recorded steps: recorded, ours, and the naive ones."""
    if not DATA.is_dir():
        pytest.skip(str(needs_data.kwargs["reason"]))
    kind = request.param
    grads, recorded = np.load(DATA / "grads.npz"), np.load(DATA / f"trajectory_{kind}.npz")
    sensitivity = json.loads((DATA / f"sensitivity_{kind}.json").read_text())
    leaves = sorted({name.split("/")[2] for name in recorded.files})
    stacked = {leaf: int("_scan_" in leaf) for leaf in leaves}
    transform = getattr(isokron.jax, f"scale_by_{kind}")(stacked=stacked, **SETTINGS)
    patch = pytest.MonkeyPatch()
    patch.setattr(quad_skew, "norm_bound", published_bound)
    params = {leaf: grads[f"p0/{leaf}"] for leaf in leaves}
    state, update = jax.jit(transform.init)(params), jax.jit(transform.update)
    naive = {
        leaf: Naive(params[leaf].shape, "_scan_" in leaf, kind == "skew", probes) for leaf in leaves
    }
    together = {
        leaf: Naive(params[leaf].shape, True, kind == "skew", probes, clip_together=True)
        for leaf in leaves
        if "_scan_" in leaf
    }
    ours, plain, joint, walked = {}, {}, {}, {}
    for t in range(1, 21):
        step = {leaf: grads[f"g/{leaf}"][t - 1] for leaf in leaves}
        direction, state = update(step, state)
        ours[t] = {leaf: np.asarray(direction[leaf]) for leaf in leaves}
        # in float32, as both are
        params = {leaf: p - 0.01 * (ours[t][leaf] + 0.1 * p) for leaf, p in params.items()}
        plain[t] = {leaf: naive[leaf].direction(step[leaf]) for leaf in leaves}
        joint[t] = {leaf: each.direction(step[leaf]) for leaf, each in together.items()}
        walked[t] = params
    patch.undo()
    return {
        "leaves": leaves,
        "recorded": recorded,
        "tolerance": lambda t, leaf: max(2e-4, 3 * sensitivity[f"{t}/{leaf}"]),
        "start": {leaf: grads[f"p0/{leaf}"] for leaf in leaves},
        "ours": ours,
        "naive": plain,
        "together": joint,
        "walked": walked,
    }


def apart(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("t", [1, 2, 5, 20])
def test_directions_and_parameters_are_those_recorded(runs: dict, t: int) -> None:
    for leaf in runs["leaves"]:
        if "_scan_" in leaf:
            continue
        tolerance = runs["tolerance"](t, leaf)
        assert apart(runs["ours"][t][leaf], runs["recorded"][f"u/{t}/{leaf}"]) < tolerance, leaf
        path = runs["recorded"][f"p/{t}/{leaf}"] - runs["start"][leaf]
        assert apart(runs["walked"][t][leaf] - runs["start"][leaf], path) < tolerance, leaf


@pytest.mark.parametrize("t", [1, 2, 5, 20])
def test_stacked_layers_are_those_recorded_but_for_the_clip(runs: dict, t: int) -> None:
    """Recorded: one clip for all layers. The naive version with that clip has those numbers, and
    with a clip for each layer ours."""
    for leaf, joint in runs["together"][t].items():
        tolerance = runs["tolerance"](t, leaf)
        recorded = runs["recorded"][f"u/{t}/{leaf}"]
        assert apart(joint, recorded) < tolerance, leaf
        assert apart(runs["ours"][t][leaf], runs["naive"][t][leaf]) < tolerance, leaf
        for own, other in zip(runs["ours"][t][leaf], recorded, strict=True):
            assert apart(own / np.linalg.norm(own), other / np.linalg.norm(other)) < tolerance


def test_every_step_is_that_of_the_naive_version(runs: dict) -> None:
    for t in range(1, 21):
        for leaf in runs["leaves"]:
            assert apart(runs["ours"][t][leaf], runs["naive"][t][leaf]) < 5e-4, (t, leaf)


def single_functions(get: Callable[[str], jax.Array]) -> dict[str, jax.Array]:
    """What each function makes of its recorded arguments, by the name of the recorded result."""

    def bound_with(normals: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda matrix, scale: norm_bound(
            matrix, scale, get(normals), jnp.full_like(scale, matrix.shape[-1])
        )

    def bounded(name: str, normals: str) -> jax.Array:
        matrix = get(name)[None]
        return bound_with(normals)(matrix, jnp.max(jnp.abs(matrix), axis=(1, 2)))

    results = {
        "nlb/*/out": bounded("nlb/*/A", "nlb/*/normals"),
        "nlb_skh/*/out": bounded("nlb_skh/*/A", "nlb/*/normals"),
        "proc/*/out": procrustes(get("proc/*/Q")[None], bound_with("proc/*/normals")),
    }
    for kind, first, last in (("quad", "", ""), ("skew", "1", "2")):
        symmetric = kind == "quad"
        target = get(f"dense_{kind}/*/term2")[None]
        scale = bounded(f"dense_{kind}/*/term1", f"dense_{kind}/*/normals{first}") + target
        results[f"dense_{kind}/*/Lout"] = scale
        gram = (get(f"dense_{kind}/*/term1")[None],)
        factor, bound = get(f"dense_{kind}/*/Q")[None], bound_with(f"dense_{kind}/*/normals{last}")
        results[f"dense_{kind}/*/Qout"] = step_factor(
            factor, gram, target, 0.7 / scale, bound, symmetric
        )
        diagonal, one = get(f"diag_{kind}/*/term1")[None], jnp.ones(1)
        scale = jnp.max(diagonal, axis=1) + one
        results[f"diag_{kind}/*/Lout"] = scale
        factor = get(f"diag_{kind}/*/Q")[None]
        results[f"diag_{kind}/*/Qout"] = step_factor(
            factor, (diagonal,), one, 0.7 / scale, bound, symmetric
        )
    return results


@needs_data
@pytest.mark.parametrize("n", [5, 16, 33])
def test_single_functions_are_those_recorded(n: int) -> None:
    data = np.load(DATA / "functions.npz")
    given = {name.replace(f"/{n}/", "/*/"): data[name] for name in data.files if f"/{n}/" in name}
    results = jax.jit(lambda given: single_functions(given.__getitem__))(given)
    assert len(results) == 11
    for name, result in results.items():
        np.testing.assert_allclose(result[0], given[name], rtol=3e-6, atol=3e-6, err_msg=name)


@needs_data
def test_merging_and_balancing_are_those_recorded() -> None:
    data = np.load(DATA / "functions.npz")
    for name in data.files:
        if name.startswith("merge/"):
            shape = tuple(map(int, filter(None, name[6:].split("x"))))
            assert matrix_shape(shape) == (tuple(data[name]) or (1,)), shape
    scale = jax.jit(balance)(data["balance/Ql"], data["balance/Qr"])
    np.testing.assert_allclose(data["balance/Ql"] * scale[:, None, None], data["balance/Qlo"], 1e-6)
    np.testing.assert_allclose(data["balance/Qr"] / scale[:, None], data["balance/Qro"], 1e-6)
