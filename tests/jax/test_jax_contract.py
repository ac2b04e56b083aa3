"""What optax asks of a transformation, and its own contract tests leave out."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import isokron.jax
from isokron.jax import WhiteKronState, quad, scale_by_quad, scale_by_skew, skew

FACTORIES = {"quad": quad, "skew": skew}


def tree(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"w": (4, 4), "stack": (2, 4, 4), "bias": (5,)}
    return {name: jnp.asarray(random.standard_normal(s), dtype) for name, s in shapes.items()}


FLAGS = {"w": False, "stack": True, "bias": False}


def same(one: Any, other: Any, **tolerance: float) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), **{"rtol": 2e-5, **tolerance})


@functools.cache
def plain() -> tuple[Any, Any]:
    """Quad, and its update compiled once for all tests."""
    optimizer = quad(0.01, scanned_layers=FLAGS)
    return optimizer, jax.jit(optimizer.update)


def after(optimizer: Any, params: Any, seeds: range = range(1, 4)) -> tuple[Any, Any]:
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for seed in seeds:
        updates, state = update(tree(seed), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def test_the_second_step_compiles_nothing_and_neither_do_other_numbers() -> None:
    optimizer = quad(0.01, scanned_layers=FLAGS)
    update = plain()[1]
    params, state = tree(), optimizer.init(tree())
    for seed in range(3):
        _, state = update(tree(seed), state, params)
    assert update._cache_size() == 1
    made = optax.inject_hyperparams(quad, static_args=("scanned_layers",))(
        0.01, scanned_layers=FLAGS
    )
    update, state = jax.jit(made.update), made.init(params)
    for rate in (0.1, 0.2, 0.3):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        _, state = update(tree(), state, params)
    assert update._cache_size() == 1


def test_masked_leaves_keep_the_flags_of_the_others() -> None:
    """Flags are found by path: were they by position, `w` would be taken for stacked layers."""
    inner = functools.partial(scale_by_quad, scanned_layers=FLAGS)
    masked = optax.masked(inner(), {"w": True, "stack": True, "bias": False})
    updates, state = jax.jit(masked.update)(tree(1), masked.init(tree()))
    alone = {name: value for name, value in tree(1).items() if name != "bias"}
    expected, _ = jax.jit(inner().update)(alone, inner().init(alone))
    same({name: updates[name] for name in expected}, expected)
    np.testing.assert_array_equal(updates["bias"], tree(1)["bias"])
    assert state.inner_state.skipped.shape == (3,)  # one for w, two for the stack


def test_multi_transform_gives_each_its_own() -> None:
    labels = {"w": "quad", "stack": "skew", "bias": "adam"}
    transforms = {
        "quad": scale_by_quad(scanned_layers=FLAGS),
        "skew": scale_by_skew(scanned_layers=FLAGS),
        "adam": optax.scale_by_adam(),
    }
    optimizer = optax.multi_transform(transforms, labels)
    updates, _ = jax.jit(optimizer.update)(tree(1), optimizer.init(tree()))
    for name, label in labels.items():
        one, flags = {name: tree(1)[name]}, {name: FLAGS[name]}
        alone = {
            "quad": scale_by_quad(scanned_layers=flags),
            "skew": scale_by_skew(scanned_layers=flags),
            "adam": optax.scale_by_adam(),
        }[label]
        same(updates[name], jax.jit(alone.update)(one, alone.init(one))[0][name])


def test_gradients_accumulate() -> None:
    optimizer = optax.MultiSteps(quad(0.01, scanned_layers=FLAGS), every_k_schedule=2)
    state, params = optimizer.init(tree()), tree()
    update = jax.jit(optimizer.update)
    for seed in (1, 2):
        updates, state = update(tree(seed), state, params)
        params = optax.apply_updates(params, updates)
    alone, step = plain()
    mean = jax.tree.map(lambda a, b: (a + b) / 2, tree(1), tree(2))
    updates, _ = step(mean, alone.init(tree()), tree())
    same(params, optax.apply_updates(tree(), updates))


@pytest.mark.parametrize("kind", FACTORIES)
def test_update_is_a_pure_function(kind: str) -> None:
    """A state that was written into would differ after apply_if_finite threw the step away."""
    optimizer = optax.apply_if_finite(FACTORIES[kind](0.01, scanned_layers=FLAGS), 5)
    update, params = jax.jit(optimizer.update), tree()
    _, state = update(tree(1), optimizer.init(params), params)
    before = jax.tree.map(np.asarray, state.inner_state)
    bad = tree(2) | {"w": jnp.full((4, 4), jnp.nan)}
    with jax.checking_leaks():
        updates, state = jax.jit(lambda *each: optimizer.update(*each))(bad, state, params)
    same(updates, jax.tree.map(jnp.zeros_like, params))
    same(state.inner_state[0].factors, before[0].factors, rtol=0)
    assert state.inner_state[0].count in (1, 2)
    once, _ = update(tree(3), state, params)
    again, _ = update(tree(3), state, params)
    same(once, again, rtol=0)


def test_a_checkpoint_resumes_to_the_bit(tmp_path: Any) -> None:
    optimizer = skew(optax.linear_schedule(0.01, 0.0, 10), scanned_layers=FLAGS, dtype="bfloat16")
    params, state = after(optimizer, tree())
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(optimizer.init, params))
    same(restored, state, rtol=0)
    update = jax.jit(optimizer.update)
    same(update(tree(9), restored, params)[0], update(tree(9), state, params)[0], rtol=0)


def test_shapes_alone_make_a_state() -> None:
    optimizer = quad(0.01, scanned_layers=FLAGS)
    state = optimizer.init(tree())
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), tree())
    same(optimizer.init(shapes), state, rtol=0)
    abstract = jax.eval_shape(optimizer.init, shapes)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )


def test_the_structure_of_the_state_is_that_of_no_parameters_and_more() -> None:
    optimizer = scale_by_quad(scanned_layers=FLAGS)
    state = optimizer.init(tree())
    assert isinstance(state, WhiteKronState)
    doubled = optax.tree.map_params(optimizer, lambda x: 2 * x, state)
    same(doubled.mu, jax.tree.map(lambda x: 2 * x, state.mu))
    assert doubled.count == state.count
    empty = optimizer.init({})
    assert jax.jit(optimizer.update)({}, empty)[1].count == 1


@pytest.mark.parametrize("given", ["float16", "bfloat16", "float32"])
def test_updates_have_the_dtype_of_the_gradients_and_state_its_own(given: str) -> None:
    for dtype in ("bfloat16", "float32", jnp.bfloat16, None):
        optimizer = scale_by_quad(dtype=dtype, scanned_layers=FLAGS)
        start = optimizer.init(tree(0, given))
        updates, state = jax.eval_shape(optimizer.update, tree(1, given), start)
        assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(given)}
        kept = {each.factor.dtype for sides in state.factors.values() for each in sides}
        kept |= {leaf.dtype for leaf in jax.tree.leaves(state.mu)}
        assert kept == {jnp.dtype(dtype or "float32")}


def test_rounded_state_is_near_the_other() -> None:
    exact, _ = after(plain()[0], tree())
    rounded, _ = after(quad(0.01, scanned_layers=FLAGS, dtype="bfloat16"), tree())
    same(rounded, exact, rtol=0.05, atol=2e-4)


def test_both_names_are_reached_through_the_package() -> None:
    assert set(isokron.jax.__all__) <= set(dir(isokron.jax))
    assert isokron.jax is __import__("isokron").jax
