"""SOAP, Shampoo, Katie and Muon as optax transformations: bad gradients, wrappers, settings."""

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import isokron
import isokron.jax
from isokron.jax import PreconditionedState
from isokron.jax.settings import Static

KINDS = ("soap", "shampoo", "katie", "muon")
every = pytest.mark.parametrize("kind", KINDS)
some = pytest.mark.parametrize("kind", ["katie", "muon"])  # others take long to compile


def tree(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"w": (4, 6), "other": (4, 6), "bias": (5,)}
    return {name: jnp.asarray(random.standard_normal(s), dtype) for name, s in shapes.items()}


@functools.cache
def made(kind: str) -> tuple[Any, Any]:
    """scale_by_…, and its update compiled once for all tests."""
    transform = getattr(isokron.jax, f"scale_by_{kind}")()
    return transform, jax.jit(transform.update)


def finite(*trees: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(trees))


def same(one: Any, other: Any, **tolerance: float) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), **{"rtol": 0, **tolerance})


@every
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_a_gradient_that_is_not_finite_leaves_the_state_untouched(kind: str, bad: Any) -> None:
    transform, update = made(kind)
    _, state = update(tree(1), transform.init(tree()))
    for name in ("w", "bias"):
        broken = tree(2) | {name: tree(2)[name].at[0].set(bad)}
        updates, after = update(broken, state)
        same(updates, jax.tree.map(jnp.zeros_like, updates))
        same(after._replace(skipped=state.skipped), state)
        assert after.skipped == state.skipped + 1
    same(update(tree(3), after)[0], update(tree(3), state)[0])


@every
def test_a_gradient_too_large_to_be_squared_is_left_out_where_it_is_squared(kind: str) -> None:
    transform, update = made(kind)
    huge = jax.tree.map(lambda g: g * 1e25, tree(1)) | {"bias": tree(1)["bias"]}
    updates, state = update(huge, transform.init(tree()))
    assert finite(updates, state)
    assert int(state.skipped) == (kind != "muon")


@every
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-10, 1.0, 1e15])
def test_gradients_of_any_size_keep_everything_finite(kind: str, size: float) -> None:
    """Steps are of about one length, too, where ε = 1e-8 is small beside the gradients."""
    transform, update = made(kind)
    state = transform.init(tree())
    for seed in range(1, 12):
        updates, state = update(jax.tree.map(lambda g: g * size, tree(seed)), state)
        assert finite(updates, state)
    assert state.skipped == state.failed == 0
    if size == 0:  # nothing was shown, and nothing learned
        same(updates, jax.tree.map(jnp.zeros_like, updates))
        same(state.blocks, transform.init(tree()).blocks)
    for name in ("w", "other") if size >= 1 else ():
        assert 0.03 < float(jnp.sqrt(jnp.mean(updates[name] ** 2))) < 3


def test_a_refresh_that_fails_keeps_the_operator_and_is_counted() -> None:
    transform, update = made("shampoo")
    _, state = update(tree(1), transform.init(tree()))
    own = state.blocks["4x6"]
    broken = own | {"cov.1": own["cov.1"].at[0].set(jnp.nan)}
    updates, after = update(tree(2), state._replace(blocks={"4x6": broken}))
    assert finite(updates)
    assert after.failed == 1
    same(after.blocks["4x6"]["root.1"][0], own["root.1"][0])
    same(after.blocks["4x6"]["root.0"][0], own["root.0"][0])
    assert (after.blocks["4x6"]["root.0"][1] != own["root.0"][1]).any()


@some
def test_the_second_step_compiles_nothing_and_neither_do_other_numbers(kind: str) -> None:
    factory = getattr(isokron.jax, kind)
    optimizer = optax.inject_hyperparams(factory)(0.01)
    update, state = jax.jit(optimizer.update), optimizer.init(tree())
    for seed, rate in enumerate((0.1, 0.2, 0.3)):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(tree(seed), state, tree())
    assert update._cache_size() == 1
    plain = factory(0.3)
    expected = plain.init(tree())
    for seed in range(3):
        wanted, expected = jax.jit(plain.update)(tree(seed), expected, tree())
    same(updates, wanted, rtol=2e-3, atol=1e-5)


@some
def test_outside_of_jit_a_step_is_compiled_once(kind: str, caplog: Any) -> None:
    transform, update = made(kind)
    state = transform.init(tree())
    _, state = transform.update(tree(1), state)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        found, after = transform.update(tree(2), state)
    assert not [record for record in caplog.records if "Compiling" in record.message]
    same(found, update(tree(2), state)[0], rtol=1e-6)
    assert after.count == 2


@some
def test_wrappers_of_optax_get_what_they_expect(kind: str, tmp_path: Any) -> None:
    """Pure under apply_if_finite, made of shapes alone, saved and restored to the bit."""
    factory = getattr(isokron.jax, kind)
    optimizer = optax.apply_if_finite(
        optax.chain(optax.clip_by_global_norm(1e3), factory(optax.linear_schedule(0.01, 0, 9))), 3
    )
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), tree())
    state = optimizer.init(tree())
    same(optimizer.init(shapes), state)
    update = jax.jit(optimizer.update)
    _, state = update(tree(1), state, tree())
    broken = tree(2) | {"w": jnp.full((4, 6), jnp.nan)}
    with jax.checking_leaks():
        _, after = jax.jit(lambda *each: optimizer.update(*each))(broken, state, tree())
    same(after.inner_state[1][0].blocks, state.inner_state[1][0].blocks)
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", jax.eval_shape(optimizer.init, shapes))
    same(restored, state)
    same(update(tree(9), restored, tree())[0], update(tree(9), state, tree())[0])


@some
def test_masked_and_labelled_leaves_are_stepped_as_if_alone(kind: str) -> None:
    transform, update = made(kind)
    labels = {"w": "ours", "other": "adam", "bias": "ours"}
    for wrapped in (
        optax.masked(transform, {name: label == "ours" for name, label in labels.items()}),
        optax.multi_transform({"ours": transform, "adam": optax.scale_by_adam()}, labels),
    ):
        updates, _ = jax.jit(wrapped.update)(tree(1), wrapped.init(tree()))
        alone = {name: tree(1)[name] for name in ("w", "bias")}
        expected, _ = update(alone, transform.init(alone))
        same({name: updates[name] for name in alone}, expected, rtol=1e-5)


@every
def test_the_structure_of_the_state_is_that_of_no_parameters_and_more(kind: str) -> None:
    transform, update = made(kind)
    _, state = update(tree(1), transform.init(tree()))
    assert isinstance(state, PreconditionedState)
    assert isinstance(state.mu["w"], optax.MaskedNode)
    doubled = optax.tree.map_params(transform, lambda x: 2 * x, state)
    same(doubled.mu["bias"], 2 * state.mu["bias"])
    same(doubled.blocks, jax.tree.map(lambda x: 2 * x, state.blocks))
    assert doubled.count == 1
    assert update({}, transform.init({}))[1].count == 1


@every
def test_updates_have_the_dtype_of_the_gradients_and_state_float32(kind: str) -> None:
    given = "bfloat16"
    transform, update = made(kind)
    state = transform.init(tree(0, given))
    updates, state = update(tree(1, given), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(given)}
    kept = jax.tree.leaves((state.mu, state.nu, state.blocks))
    assert {leaf.dtype for leaf in kept} == {jnp.dtype("float32")}
    exact, _ = update(jax.tree.map(jnp.float32, tree(1, given)), transform.init(tree()))
    same(updates, exact, rtol=0.01, atol=0.01)


def test_factors_have_the_dtype_they_are_given() -> None:
    for kind in ("soap", "shampoo", "katie"):
        transform = getattr(isokron.jax, f"scale_by_{kind}")(factor_dtype="bfloat16")
        _, state = jax.eval_shape(transform.update, tree(1), jax.eval_shape(transform.init, tree()))
        kept = {key: x.dtype for key, x in state.blocks["4x6"].items() if key != "momentum"}
        for key, dtype in kept.items():
            assert dtype == ("bfloat16" if key.startswith("cov") else "float32"), key


def test_a_tree_says_which_leaves_are_stacks() -> None:
    params = {"stack": jnp.ones((3, 4, 5)), "whole": jnp.ones((3, 4, 5))}
    transform = isokron.jax.scale_by_soap(stacked={"stack": 1, "whole": 0})
    state = jax.eval_shape(transform.init, params)
    assert {name: own["variance"].shape for name, own in state.blocks.items()} == {
        "4x5": (3, 4, 5),
        "3x20": (1, 3, 20),
    }


@every
def test_leaves_of_every_kind_come_back_in_their_shape(kind: str) -> None:
    shapes = {"a": (5,), "b": (), "c": (1, 6), "d": (2, 3, 4), "e": (0, 3), "f": (2, 1, 3)}
    grads = {name: jnp.ones(shape) for name, shape in shapes.items()}
    transform, _ = made(kind)
    updates, _ = jax.eval_shape(transform.update, grads, jax.eval_shape(transform.init, grads))
    assert {name: leaf.shape for name, leaf in updates.items()} == shapes


def test_decay_and_its_mask_and_the_schedule() -> None:
    rates = optax.linear_schedule(0.1, 0.0, 4)
    mask = {"w": True, "other": False, "bias": True}
    for kind in ("katie", "muon"):
        transform, update = made(kind)
        optimizer = getattr(isokron.jax, kind)(rates, weight_decay=0.5, weight_decay_mask=mask)
        updates, _ = jax.jit(optimizer.update)(tree(1), optimizer.init(tree()), tree())
        plain, _ = update(tree(1), transform.init(tree()))
        expected = {
            name: -0.1 * (plain[name] + (0.5 if mask[name] else 0) * tree()[name]) for name in mask
        }
        same(updates, expected, rtol=1e-4, atol=1e-6)


LEFT_OUT = {"params", "lr", "self", "refresh", "average", "nonfinite"}


@pytest.mark.parametrize(
    ("kind", "torch_name"), [*zip(KINDS, ("SOAP", "Shampoo", "Katie", "Muon"), strict=True)]
)
def test_names_and_defaults_are_those_of_torch(kind: str, torch_name: str) -> None:
    theirs = inspect.signature(getattr(isokron, torch_name).__init__).parameters
    ours = inspect.signature(getattr(isokron.jax, kind)).parameters
    assert ours["learning_rate"].default == theirs["lr"].default
    for name in set(theirs) - LEFT_OUT:
        default = ours[name].default
        default = default.value if isinstance(default, Static) else default
        assert default == theirs[name].default, name
    inner = inspect.signature(getattr(isokron.jax, f"scale_by_{kind}")).parameters
    assert set(ours) - set(inner) == {"learning_rate", "weight_decay", "weight_decay_mask"}
    assert all(ours[name].default == inner[name].default for name in inner)


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("soap", {"betas": (0.9, 1.0)}, r"betas must be a number in \[0, 1\) each, got 1.0"),
    ("soap", {"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
    ("soap", {"basis": "svd"}, r"basis must be one of \('qr', 'eigh'\), got 'svd'"),
    ("soap", {"tolerance": -1.0}, "tolerance must be a number of at least 0"),
    ("soap", {"factor_beta": 1.0}, r"factor_beta must be a number in \[0, 1\), got 1.0"),
    ("soap", {"factor_dtype": "int8"}, "factor_dtype must be None or a floating-point dtype"),
    ("soap", {"factor_dtype": "wide"}, "factor_dtype must be None or a floating-point dtype"),
    ("soap", {"graft": "adamw"}, "graft must be one of"),
    ("soap", {"graft_by": "leaf"}, "graft_by must be one of"),
    ("soap", {"every": 0}, "every must be an integer of at least 1, got 0"),
    ("soap", {"start": 0}, "start must be None or an integer of at least 1, got 0"),
    ("soap", {"max_dim": 2.5}, "max_dim must be None or an integer of at least 1, got 2.5"),
    ("soap", {"max_dim": jnp.int32(8)}, "name it in static_args"),
    ("soap", {"oversize": "pad"}, "oversize must be one of"),
    ("soap", {"nesterov": True}, "nesterov must be False where momentum is 0"),
    ("soap", {"vectors": 1}, "vectors must be True or False, got 1"),
    ("soap", {"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
    ("soap", {"beta3": 2.0}, "beta3 must be a number"),
    ("soap", {"eps": -1e-8}, "eps must be a number of at least 0"),
    ("soap", {"split_dim": -1}, "split_dim must be an integer of at least 0"),
    ("shampoo", {"damping": -1.0}, "damping must be"),
    ("shampoo", {"form": "dense"}, "form must be one of"),
    ("shampoo", {"statistic": "raw"}, "statistic must be one of"),
    ("shampoo", {"tolerance": 0.1}, "tolerance must be 0 for form='root', got 0.1"),
    ("shampoo", {"solver": "newton", "form": "eigen"}, "solver must be 'eigh' for form='eigen'"),
    ("shampoo", {"solver": "newton", "exponent": 2.5}, "root must be an integer"),
    ("shampoo", {"solver": "qr"}, "solver must be one of"),
    ("shampoo", {"exponent": -2}, "exponent must be a number of at least 0"),
    ("shampoo", {"deficient": "pseudo"}, "damping must be 0 for deficient='pseudo'"),
    ("katie", {"damping": 0.0}, "damping must be a number above 0, got 0.0"),
    ("katie", {"form": "root"}, "form must be one of"),
    ("katie", {"statistic": "kl"}, "statistic must be one of"),
    ("muon", {"scale": "rms"}, "scale must be one of"),
    ("muon", {"steps": -1}, "steps must be an integer of at least 0"),
    ("muon", {"coefficients": "best"}, "coefficients must be one of"),
    ("muon", {"dtype": "int32"}, "dtype must be None or a floating-point dtype"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_wrong_settings_are_told(kind: str, options: dict[str, Any], message: str) -> None:
    for factory in (getattr(isokron.jax, kind), getattr(isokron.jax, f"scale_by_{kind}")):
        with pytest.raises(ValueError, match=message):
            factory(**options)


def test_wrong_trees_are_told() -> None:
    soap = isokron.jax.scale_by_soap
    with pytest.raises(ValueError, match=r"SOAP needs real .* \['ids'\] is int32; leave it out"):
        soap().init({"ids": jnp.zeros((3, 3), jnp.int32)})
    with pytest.raises(ValueError, match="complex64"):
        soap().init({"w": jnp.zeros((3, 3), jnp.complex64)})
    with pytest.raises(ValueError, match=r"leaf \['w'\]: split=2 must divide dimension 0"):
        soap(split=2).init({"w": jnp.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"stacked must be an integer from 0 to 2 for \['w'\]"):
        soap(stacked=3).init({"w": jnp.zeros((3, 4))})
    transform = soap()
    state = transform.init({"w": jnp.zeros((4, 3))})
    with pytest.raises(ValueError, match=r"the state has blocks \['4x3'\]"):
        transform.update({"w": jnp.zeros((5, 3))}, state)
