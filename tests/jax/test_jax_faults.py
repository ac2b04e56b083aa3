"""Faults that were known, each with the test that would find it again."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from isokron.jax import quad, scale_by_quad, scale_by_skew, skew
from isokron.jax.noise import probe_rows
from isokron.white_kron import factor_rate
from white_kron_naive import Naive

SCALES = {"quad": scale_by_quad, "skew": scale_by_skew}
both = pytest.mark.parametrize("kind", SCALES)
SILENT: dict[str, Any] = {"noise_scale": 0.0, "lr_style": None}


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def finite(*trees: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(trees))


@functools.partial(jax.jit, static_argnums=0)
def repeated(update: Any, grads: Any, steps: int, state: Any) -> tuple[Any, Any]:
    """`steps` steps with the same gradients, in one loop."""
    first = (jax.tree.map(jnp.zeros_like, grads), state)
    return jax.lax.fori_loop(0, steps, lambda _, each: update(grads, each[1]), first)


@functools.cache
def transformed(kind: str, **options: Any) -> Any:
    """One for each of the options, so that `repeated` is compiled once for all tests."""
    return SCALES[kind](**options)


@functools.cache
def made(kind: str, scanned: bool = False) -> tuple[Any, Any]:
    """init, and update compiled once for all tests."""
    transform = SCALES[kind](
        scanned_layers={"w": False, "v": False, "stack": True} if scanned else None
    )
    return transform.init, jax.jit(transform.update)


@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_a_small_preconditioner_lr_is_not_raised(rate: float) -> None:
    assert factor_rate(1, rate) == pytest.approx(rate, rel=1e-4)
    assert factor_rate(10**9, rate) == min(rate, 0.4)
    grads = {"w": normal(0, 5)}
    moved = []
    for given in (rate, rate / 2):
        transform = scale_by_quad(preconditioner_lr=given, noise_scale=0.0)
        _, state = jax.jit(transform.update)(grads, transform.init(grads))
        steep = jnp.max(grads["w"] ** 2) + 1
        expected = (1 - factor_rate(1, given) / 2 / steep * (grads["w"] ** 2 - 1)) ** 2
        np.testing.assert_allclose(state.factors["5d"][0].factor[0], expected, rtol=1e-5)
        moved.append(float(jnp.abs(state.factors["5d"][0].factor - 1).max()))
    assert moved[1] < 0.6 * moved[0]


@both
def test_stacked_layers_are_worked_on_and_clipped_one_by_one(kind: str) -> None:
    """The second layer's gradients are far larger: one clip for both would shrink the first."""
    sizes = jnp.array([1.0, 1e3, 1e-3])[:, None, None]
    stack = {"a": normal(1, 3, 9, 7) * sizes, "b": normal(2, 3, 8) * sizes[:, 0]}
    alone = {f"{name}{i}": stack[name][i] for name in stack for i in range(3)}
    whole = SCALES[kind](scanned_layers=True, normalize_grads=False)
    parts = SCALES[kind]()
    one, many = whole.init(stack), parts.init(alone)
    step_one, step_many = jax.jit(whole.update), jax.jit(parts.update)
    for sign in (1, -1, 1, 1):
        stacked, one = step_one(jax.tree.map(lambda x, s=sign: s * x, stack), one)
        each, many = step_many(jax.tree.map(lambda x, s=sign: s * x, alone), many)
        for name in stack:
            for i in range(3):
                own = each[f"{name}{i}"]
                np.testing.assert_allclose(stacked[name][i], own, rtol=1e-4, atol=1e-6)
    first, _ = step_one(stack, whole.init(stack))
    for leaf in first.values():
        sizes = 5 * np.sqrt(np.mean(np.square(leaf), axis=tuple(range(1, leaf.ndim))))
        assert sizes[0] > 0.5
        np.testing.assert_allclose(sizes[1], 1.1, rtol=1e-5)


@both
def test_normalize_divides_the_momentum_by_its_norm_layer_by_layer(kind: str) -> None:
    """Over gradients that grow and shrink, and layers with blocks in four batches."""
    transform = SCALES[kind](
        normalize_grads=True, scanned_layers=True, block_size=16, noise_scale=0.0
    )
    update = jax.jit(transform.update)

    def probes(size: int) -> np.ndarray:
        return np.asarray(probe_rows(size, None, jnp.float32), np.float64)

    naive = Naive((2, 20, 17), True, kind == "skew", probes, normalize=True)
    state = transform.init({"a": normal(0, 2, 20, 17)})
    for step, scale in enumerate((1.0, 30.0, 0.1, 1.0)):
        grad = scale * normal(step, 2, 20, 17) * jnp.array([1.0, 100.0])[:, None, None]
        found, state = update({"a": grad}, state)
        expected = naive.direction(np.asarray(grad))
        np.testing.assert_allclose(found["a"], expected, rtol=0, atol=2e-4 * abs(expected).max())


@both
def test_zero_gradients_keep_everything_finite(kind: str) -> None:
    grads = {"w": jnp.zeros((9, 7)), "v": jnp.zeros(6)}
    for options in (SILENT, {}, {"apply": "old"})[: 3 if kind == "quad" else 2]:
        transform = transformed(kind, **options)
        updates, state = repeated(transform.update, grads, 1000, transform.init(grads))
        assert finite(updates, state)
        assert all(bool((leaf == 0).all()) for leaf in jax.tree.leaves(updates))
        if options.get("noise_scale") == 0:  # nothing was shown, and nothing learned
            np.testing.assert_array_equal(state.factors["9x7"][0].factor[0], np.eye(9))


@both
def test_rows_without_gradients_keep_everything_finite(kind: str) -> None:
    """What is never observed would grow by a factor a step until it overflows."""
    grads = {"w": normal(0, 9, 7).at[2:5].set(0), "v": normal(1, 6).at[0].set(0)}
    transform = transformed(kind, **SILENT)
    updates, state = repeated(transform.update, grads, 1000, transform.init(grads))
    assert finite(updates, state)
    assert all(bool((leaf != 0).any()) for leaf in jax.tree.leaves(updates))


@both
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_a_gradient_that_is_not_finite_leaves_its_own_state_untouched(kind: str, bad: Any) -> None:
    good = {"w": normal(0, 9, 7), "v": normal(1, 6), "stack": normal(2, 2, 4, 3)}
    init, update = made(kind, scanned=True)
    _, state = update(good, init(good))
    broken = good | {"w": good["w"].at[3, 4].set(bad), "stack": good["stack"].at[1, 0, 0].set(bad)}
    updates, after = update(broken, state)
    assert finite(updates, after)
    np.testing.assert_array_equal(updates["w"], 0)
    np.testing.assert_array_equal(updates["stack"][1], 0)
    np.testing.assert_array_equal(after.mu["w"], state.mu["w"])
    for old, new in zip(state.factors["9x7"], after.factors["9x7"], strict=True):
        np.testing.assert_array_equal(new.factor, old.factor)
        np.testing.assert_array_equal(new.lipschitz, old.lipschitz)
    for old, new in zip(state.factors["4x3"], after.factors["4x3"], strict=True):
        np.testing.assert_array_equal(new.factor[1], old.factor[1])
        assert (new.factor[0] != old.factor[0]).any()
    # in the order of the leaves: the two layers of the stack, v, w
    np.testing.assert_array_equal(after.skipped, [0, 1, 0, 1])
    # the others went on as if nothing had happened, and so does it: its bias counts its own steps
    fine, _ = update(good, state)
    np.testing.assert_array_equal(updates["v"], fine["v"])
    np.testing.assert_allclose(updates["stack"][0], fine["stack"][0], rtol=1e-6)
    later, _ = update(good, after)
    np.testing.assert_allclose(later["w"], fine["w"], rtol=1e-4, atol=2e-5)


@both
def test_gradients_of_any_size_make_a_step_of_about_the_same(kind: str) -> None:
    transform = transformed(kind, **SILENT)
    for size in (1e-30, 1e-10, 1e10, 1e30):
        grads = {"w": normal(0, 9, 7) * size, "v": normal(1, 6) * size}
        updates, state = repeated(transform.update, grads, 300, transform.init(grads))
        assert finite(updates, state)
        for leaf in jax.tree.leaves(updates):
            rms = float(jnp.sqrt(jnp.mean(leaf**2)))
            assert rms <= 1.1001
            assert rms > 0.5 or size < 1e-20  # beyond the limit of growth


@both
def test_an_outburst_is_forgotten(kind: str) -> None:
    grads = {"w": normal(0, 9, 7), "v": normal(1, 6)}
    burst = jax.tree.map(lambda g: g * 1e20, grads)
    update = transformed(kind).update
    _, state = repeated(update, grads, 50, transformed(kind).init(grads))
    step, state = repeated(update, burst, 1, state)
    assert finite(step, state)
    updates, state = repeated(update, grads, 3000, state)
    assert finite(updates, state)
    assert all(float(jnp.sqrt(jnp.mean(leaf**2))) > 0.1 for leaf in updates.values())


def test_small_matrices_are_not_padded() -> None:
    params = {f"w{i}": jnp.zeros((64, 8)) for i in range(16)}
    state = quad().init(params)
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    blocks = 16 * (64 * 8 + 64 * 64 + 8 * 8 + 2) * 4
    assert stored == blocks + 4 + 16 * 4  # the count, and what was skipped
    shapes = {
        name: [side.factor.shape for side in sides] for name, sides in state[0].factors.items()
    }
    assert shapes == {"64x8": [(16, 64, 64), (16, 8, 8)]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preconditioner_lr": 0.0}, r"preconditioner_lr must be a number in \(0, 1\], got 0.0"),
        ({"preconditioner_lr": 1.5}, "preconditioner_lr must be"),
        ({"preconditioner_lr": "fast"}, "preconditioner_lr must be a number"),
        ({"lr_style": "sgd"}, r"lr_style must be one of \('adam', None\), got 'sgd'"),
        ({"dtype": "float16"}, "dtype must be one of"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"dtype": "nonsense"}, "dtype must be one of"),
        ({"dtype": "float64"}, "jax_enable_x64"),
        ({"b1": 1.0}, r"b1 must be a number in \[0, 1\), got 1.0"),
        ({"preconditioner_init_scale": 0.0}, "preconditioner_init_scale must be"),
        ({"noise_scale": -1.0}, "noise_scale must be"),
        ({"damping": float("nan")}, "damping must be"),
        ({"damping": 0.1, "apply": "old"}, "damping must be 0 with apply='old'"),
        ({"apply": "both"}, "apply must be one of"),
        ({"every": 0}, "every must be"),
        ({"warmup": -1}, "warmup must be"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"block_size": 2.5}, "block_size must be an integer"),
        ({"max_size_dense": -1}, "max_size_dense must be an integer"),
        ({"block_size": jnp.int32(4)}, "static_args"),
        ({"pipeline_axis_name": "x", "pipeline_axis_size": 0}, "pipeline_axis_size must be"),
    ],
)
def test_wrong_settings_are_told(options: dict[str, Any], message: str) -> None:
    for factory in (quad, skew, scale_by_quad, scale_by_skew):
        with pytest.raises(ValueError, match=message):
            factory(**options)


def test_wrong_trees_are_told() -> None:
    params = {"w": jnp.zeros((4, 3)), "ids": jnp.zeros(3, jnp.int32)}
    with pytest.raises(ValueError, match=r"\['ids'\] is int32; leave it out"):
        scale_by_quad().init(params)
    with pytest.raises(ValueError, match="complex64"):
        scale_by_quad().init({"w": jnp.zeros(3, jnp.complex64)})
    with pytest.raises(ValueError, match=r"scanned_layers has no entry for \['v'\]"):
        scale_by_quad(scanned_layers={"w": False}).init({"w": jnp.zeros(3), "v": jnp.zeros(3)})
    with pytest.raises(ValueError, match=r"scanned_layers: \['w'\] has no axis"):
        scale_by_quad(scanned_layers=True).init({"w": jnp.zeros(())})
    with pytest.raises(ValueError, match="pipeline_axis_size must be given"):
        scale_by_quad(pipeline_axis_name="x").init({"w": jnp.zeros(3)})
    transform = scale_by_quad()
    state = transform.init({"w": jnp.zeros((4, 3))})
    with pytest.raises(ValueError, match="the state has blocks"):
        transform.update({"w": jnp.zeros((5, 3))}, state)
