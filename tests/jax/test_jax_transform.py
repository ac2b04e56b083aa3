"""What holds for every optimizer of isokron.jax, beyond the contract tests of optax."""

import functools
import inspect
import math
import subprocess
import sys
import warnings
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import isokron
import isokron.jax
from isokron.block_layout import cut_blocks
from isokron.jax import PreconditionedState, blocks, scale_by_path
from isokron.jax.settings import DEFAULTS, Static
from isokron.jax.sharding import Placement

TORCH = {
    "soap": isokron.SOAP,
    "shampoo": isokron.Shampoo,
    "katie": isokron.Katie,
    "muon": isokron.Muon,
    "quad": isokron.Quad,
    "skew": isokron.Skew,
}
every = pytest.mark.parametrize("kind", TORCH)
some = pytest.mark.parametrize("kind", ["katie", "quad"])  # others take long to compile


def tree(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    shapes = {"w": (4, 6), "stack": (2, 4, 6), "bias": (5,)}
    return {name: jnp.asarray(random.standard_normal(s), dtype) for name, s in shapes.items()}


STACKED = {"w": 0, "stack": 1, "bias": 0}


@functools.cache
def compiled(kind: str) -> tuple[Any, Any]:
    """scale_by_…, and its update compiled once for all tests."""
    transform = getattr(isokron.jax, f"scale_by_{kind}")(stacked=STACKED)
    return transform, jax.jit(transform.update)


def finite(*trees: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(trees))


def same(one: Any, other: Any, **tolerance: float) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.float64(a), np.float64(b), **{"rtol": 0, **tolerance})


@every
@pytest.mark.parametrize("bad", [jnp.nan, -jnp.inf])
def test_a_layer_whose_gradient_is_not_finite_is_left_out(kind: str, bad: Any) -> None:
    """Its state and the number of its steps stay; all other layers go on as if it were finite."""
    transform, update = compiled(kind)
    _, state = update(tree(1), transform.init(tree()))
    good = tree(2)
    broken = good | {"stack": good["stack"].at[1, 0, 0].set(bad), "bias": good["bias"] + bad}
    updates, after = update(broken, state)
    assert finite(updates, after)
    expected, fine = update(good, state)
    same(updates["w"], expected["w"], rtol=1e-5, atol=1e-6)
    same(updates["stack"][0], expected["stack"][0], rtol=1e-5, atol=1e-6)
    same(updates["stack"][1], jnp.zeros((4, 6)))
    same(updates["bias"], jnp.zeros(5))
    # layers in the order of the leaves: the bias, the two of the stack, w
    np.testing.assert_array_equal(after.skipped, [1, 0, 1, 0])
    (name,) = (name for name in state.blocks if "x" in name)
    for key, new in after.blocks[name].items():  # in the same order
        np.testing.assert_array_equal(new[1], state.blocks[name][key][1])
        for row in (0, 2):
            same(new[row], fine.blocks[name][key][row], rtol=1e-5, atol=1e-6)
    # the bias had one gradient less, and its moments know: the same gradient again is its second
    later, _ = update(good, after)
    same(later["bias"], expected["bias"], rtol=1e-4, atol=2e-5)


@every
def test_a_gradient_too_large_to_be_squared_is_left_out_where_it_is_squared(kind: str) -> None:
    transform, update = compiled(kind)
    huge = jax.tree.map(lambda g: g * 1e25, tree(1)) | {"bias": tree(1)["bias"]}
    updates, state = update(huge, transform.init(tree()))
    assert finite(updates, state)
    squares = kind not in ("muon", "quad", "skew")
    np.testing.assert_array_equal(state.skipped, [0, squares, squares, squares])


@every
def test_a_vector_whose_square_overflows_is_left_out_and_moves_on(kind: str) -> None:
    """By itself Adam's second moment would be infinite, and its updates 0 for good."""
    transform, update = compiled(kind)
    _, state = update(tree(1) | {"bias": tree(1)["bias"] * 1e20}, transform.init(tree()))
    squares = kind not in ("quad", "skew")  # which step vectors themselves
    np.testing.assert_array_equal(state.skipped, [squares, 0, 0, 0])
    updates, state = update(tree(2), state)
    assert np.abs(updates["bias"]).min() > 1e-3


def test_a_matrix_whose_square_overflows_is_left_out_where_grafting_squares_it() -> None:
    transform = isokron.jax.scale_by_muon(graft="adam", stacked=STACKED)
    huge = tree(1) | {"w": tree(1)["w"] * 1e20}
    _, state = transform.update(huge, transform.init(tree()))
    np.testing.assert_array_equal(state.skipped, [0, 0, 0, 1])


@every
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-10, 1.0, 1e15])
def test_gradients_of_any_size_keep_everything_finite(kind: str, size: float) -> None:
    """Steps are of about one length, too, where ε = 1e-8 is small beside the gradients."""
    transform, update = compiled(kind)
    state = transform.init(tree())
    for seed in range(1, 12):
        updates, state = update(jax.tree.map(lambda g: g * size, tree(seed)), state)
        assert finite(updates, state)
    assert not state.skipped.any()
    assert state.failed == 0
    if size == 0:
        same(updates, jax.tree.map(jnp.zeros_like, updates))
    for name in ("w", "stack") if size >= 1 else ():
        assert 0.03 < float(jnp.sqrt(jnp.mean(updates[name] ** 2))) < 3


def test_a_refresh_that_fails_keeps_the_operator_and_is_counted() -> None:
    transform, update = compiled("shampoo")
    _, state = update(tree(1), transform.init(tree()))
    batch = state.blocks["4x6"]
    broken = batch | {"cov.1": batch["cov.1"].at[0].set(jnp.nan)}
    updates, after = update(tree(2), state._replace(blocks={"4x6": broken}))
    assert finite(updates)
    assert after.failed == 1
    same(after.blocks["4x6"]["root.1"][0], batch["root.1"][0])
    same(after.blocks["4x6"]["root.0"][0], batch["root.0"][0])
    assert (after.blocks["4x6"]["root.0"][1] != batch["root.0"][1]).any()


@some
def test_the_second_step_compiles_nothing_and_neither_do_other_numbers(kind: str) -> None:
    factory = getattr(isokron.jax, kind)
    optimizer = optax.inject_hyperparams(factory)(0.01, stacked=STACKED)
    update, state = jax.jit(optimizer.update), optimizer.init(tree())
    for seed, rate in enumerate((0.1, 0.2, 0.3)):
        state.hyperparams["learning_rate"] = jnp.float32(rate)
        updates, state = update(tree(seed), state, tree())
    assert update._cache_size() == 1
    plain = factory(0.3, stacked=STACKED)
    expected = plain.init(tree())
    for seed in range(3):
        wanted, expected = jax.jit(plain.update)(tree(seed), expected, tree())
    same(updates, wanted, rtol=2e-3, atol=1e-5)


@some
def test_outside_of_jit_a_step_is_compiled_once(kind: str, caplog: Any) -> None:
    transform, update = compiled(kind)
    state = transform.init(tree())
    _, state = transform.update(tree(1), state)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        eager, after = transform.update(tree(2), state)
    assert not [record for record in caplog.records if "Compiling" in record.message]
    same(eager, update(tree(2), state)[0], rtol=1e-5, atol=1e-6)
    assert after.count == 2


@some
def test_wrappers_of_optax_get_what_they_expect(kind: str, tmp_path: Any) -> None:
    """Pure under apply_if_finite, made of shapes alone, saved and restored to the bit."""
    factory = functools.partial(getattr(isokron.jax, kind), stacked=STACKED)
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
    written = flax.serialization.to_bytes(state)  # msgpack
    same(flax.serialization.from_bytes(optimizer.init(tree()), written), state)
    same(update(tree(9), restored, tree())[0], update(tree(9), state, tree())[0])


@some
def test_masked_and_labelled_leaves_are_stepped_as_if_alone(kind: str) -> None:
    """`stacked` is found by path: were it by position, `w` would be taken for stacked layers."""
    transform, update = compiled(kind)
    labels = {"w": "ours", "stack": "adam", "bias": "ours"}
    for wrapped in (
        optax.masked(transform, {name: label == "ours" for name, label in labels.items()}),
        optax.multi_transform({"ours": transform, "adam": optax.scale_by_adam()}, labels),
    ):
        updates, _ = jax.jit(wrapped.update)(tree(1), wrapped.init(tree()))
        alone = {name: tree(1)[name] for name in ("w", "bias")}
        expected, _ = update(alone, transform.init(alone))
        same({name: updates[name] for name in alone}, expected, rtol=1e-5)


def test_gradients_accumulate() -> None:
    optimizer = optax.MultiSteps(isokron.jax.quad(0.01, stacked=STACKED), every_k_schedule=2)
    state, params, update = optimizer.init(tree()), tree(), jax.jit(optimizer.update)
    for seed in (1, 2):
        updates, state = update(tree(seed), state, params)
        params = optax.apply_updates(params, updates)
    plain = isokron.jax.quad(0.01, stacked=STACKED)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, tree(1), tree(2))
    updates, _ = jax.jit(plain.update)(mean, plain.init(tree()), tree())
    same(params, optax.apply_updates(tree(), updates), rtol=2e-5, atol=1e-6)


@every
def test_the_structure_of_the_state_is_that_of_no_parameters_and_more(kind: str) -> None:
    transform, update = compiled(kind)
    _, state = update(tree(1), transform.init(tree()))
    assert isinstance(state, PreconditionedState)
    assert isinstance(state.mu["w"], optax.MaskedNode)
    doubled = optax.tree.map_params(transform, lambda x: 2 * x, state)
    same(doubled.blocks, jax.tree.map(lambda x: 2 * x, state.blocks))
    assert doubled.count == 1
    assert update({}, transform.init({}))[1].count == 1


@every
def test_updates_have_the_dtype_of_the_gradients_and_state_float32(kind: str) -> None:
    transform, update = compiled(kind)
    state = transform.init(tree(0, "bfloat16"))
    updates, state = update(tree(1, "bfloat16"), state)
    assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype("bfloat16")}
    stored = jax.tree.leaves((state.mu, state.nu, state.blocks))
    assert {leaf.dtype for leaf in stored} == {jnp.dtype("float32")}
    exact, _ = update(jax.tree.map(jnp.float32, tree(1, "bfloat16")), transform.init(tree()))
    same(updates, exact, rtol=0.01, atol=0.01)


def test_statistics_have_the_dtype_they_are_given() -> None:
    for kind in ("soap", "shampoo", "katie"):
        transform = getattr(isokron.jax, f"scale_by_{kind}")(factor_dtype="bfloat16")
        _, state = jax.eval_shape(transform.update, tree(1), jax.eval_shape(transform.init, tree()))
        for key, x in state.blocks["4x6"].items():
            assert x.dtype == ("bfloat16" if key.startswith("cov") else "float32"), key


def test_a_tree_says_which_leaves_are_stacks() -> None:
    params = {"stack": jnp.ones((3, 4, 5)), "whole": jnp.ones((3, 4, 5))}
    transform = isokron.jax.scale_by_soap(stacked={"stack": 1, "whole": 0})
    state = jax.eval_shape(transform.init, params)
    shapes = {name: batch["variance"].shape for name, batch in state.blocks.items()}
    assert shapes == {"4x5": (3, 4, 5), "12x5": (1, 12, 5)}


@every
def test_leaves_of_every_kind_come_back_in_their_shape(kind: str) -> None:
    shapes = {"a": (5,), "b": (), "c": (1, 6), "d": (2, 3, 4), "e": (0, 3), "f": (2, 1, 3)}
    grads = {name: jnp.ones(shape) for name, shape in shapes.items()}
    transform = getattr(isokron.jax, f"scale_by_{kind}")()
    updates, _ = jax.eval_shape(transform.update, grads, jax.eval_shape(transform.init, grads))
    assert {name: leaf.shape for name, leaf in updates.items()} == shapes


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((33, 20), {"max_dim": 16}),
        ((3, 5, 40, 7), {"max_dim": 16, "stacked": 1}),
        ((3, 5, 40, 7), {"max_dim": 16, "stacked": 1, "order": None}),
        ((2, 12, 10), {"max_dim": 4, "stacked": 1, "split": (3, 9)}),
        ((2, 10, 12), {"max_dim": 5, "stacked": 1, "split": 3, "split_dim": 1}),
        ((30, 1), {"max_dim": 7, "vectors": True}),
    ],
)
def test_blocks_are_those_of_torch_and_come_together_again(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    settings = {"optimizer": "SOAP", **DEFAULTS, **options}
    array = np.arange(2 * np.prod(shape), dtype=np.float32).reshape(2, *shape)
    leaves = [jnp.asarray(array[0]), jnp.asarray(array[1])]  # of one shape, cut together
    place = Placement(None, None)
    layout = blocks.tree_layout(leaves, settings, blocks.matrix_splits, False, place)
    batches, scatter = jax.vjp(lambda leaves: blocks.gather(leaves, layout, jnp.float32), leaves)
    plain = {"order": 2, **{name: x for name, x in options.items() if name != "vectors"}}
    cuts = cut_blocks(shape, **plain)
    expected = sorted(block.read(leaf).tobytes() for block in cuts for leaf in array)
    gathered = [np.asarray(block).tobytes() for rows in batches.values() for block in rows]
    assert sorted(gathered) == expected
    np.testing.assert_array_equal(scatter(batches)[0], array)  # the transpose is the inverse


def test_padding_shares_batches_where_it_costs_little_and_is_cut_off_again() -> None:
    """Two small matrices beside 40 larger ones, but not beside one."""
    shapes = [(16, 16)] * 40 + [(14, 16), (8, 3), (3,), (5,)]
    random = np.random.default_rng(0)
    leaves = [jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in shapes]
    transform = isokron.jax.scale_by_quad(noise_scale=0.0)
    state = transform.init(leaves)
    rows = {name: len(batch["momentum"]) for name, batch in state.blocks.items()}
    assert rows == {"16x16": 42, "5d": 2}
    alone = [transform.update([leaf], transform.init([leaf]))[0][0] for leaf in leaves[40:]]
    together, after = transform.update(leaves, state)
    for one, other in zip(alone, together[40:], strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(after.blocks["16x16"]["factor.1"][40, 14:], 0)
    few = transform.init([leaves[0], leaves[41]])
    assert set(few.blocks) == {"16x16", "8x3"}


@pytest.mark.parametrize("kind", ["quad", "skew", "soap"])
def test_chunks_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven blocks, two at a time and one that is left."""
    names = {"block_size" if kind != "soap" else "max_dim": 6, "every": 2}
    transform = getattr(isokron.jax, f"scale_by_{kind}")(**names)
    grads = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((42, 6)), jnp.float32)}

    def three_steps() -> tuple[Any, Any]:
        state = transform.init(grads)
        for _ in range(3):
            updates, state = jax.jit(lambda g, s: transform.update(g, s))(grads, state)
        return updates, state

    expected = three_steps()
    monkeypatch.setattr(blocks, "CACHE_ENTRIES", 2 * 36)
    assert blocks.chunk_rows(7, 36) == 2
    transform = getattr(isokron.jax, f"scale_by_{kind}")(**names)
    same(three_steps(), expected, rtol=1e-4, atol=1e-6)


def test_chunks_fill_the_cache_and_divide_the_batch_where_they_can() -> None:
    entries = blocks.CACHE_ENTRIES // 4
    rows = {rows: blocks.chunk_rows(rows, entries) for rows in (3, 4, 6, 7, 24)}
    assert rows == {3: 3, 4: 4, 6: 3, 7: 4, 24: 4}
    assert blocks.chunk_rows(10**6, 10**9) == 1


def test_decay_and_its_mask_and_the_schedule() -> None:
    rates = optax.linear_schedule(0.1, 0.0, 4)
    mask = {"w": True, "stack": False, "bias": True}
    for kind in ("katie", "quad"):
        transform, update = compiled(kind)
        optimizer = getattr(isokron.jax, kind)(
            rates, weight_decay=0.5, weight_decay_mask=mask, stacked=STACKED
        )
        updates, _ = jax.jit(optimizer.update)(tree(1), optimizer.init(tree()), tree())
        plain, _ = update(tree(1), transform.init(tree()))
        expected = {
            name: -0.1 * (plain[name] + (0.5 if mask[name] else 0) * tree()[name]) for name in mask
        }
        same(updates, expected, rtol=1e-4, atol=1e-6)


@every
def test_names_and_defaults_are_those_of_torch(kind: str) -> None:
    """Of the keywords that torch's constructor has and JAX has too."""
    theirs = inspect.signature(TORCH[kind].__init__).parameters
    ours = inspect.signature(getattr(isokron.jax, kind)).parameters
    assert ours["learning_rate"].default == theirs["lr"].default
    if kind not in ("quad", "skew"):  # which take all of eformer's by position
        assert len(ours) <= 17  # learning_rate, **shared, and fifteen
    shared = 0
    for name, parameter in ours.items():
        default = parameter.default
        default = default.value if isinstance(default, Static) else default
        if name in theirs and name != "shared":
            assert default == theirs[name].default, name
            shared += 1
    assert shared >= 7
    inner = inspect.signature(getattr(isokron.jax, f"scale_by_{kind}")).parameters
    chained = {"learning_rate", "weight_decay", "weight_decay_mask", "lr_scale"}
    assert set(ours) - set(inner) == chained
    assert all(ours[name].default == inner[name].default for name in inner)


def test_multiples_are_learning_rates_of_leaves() -> None:
    """Weight decay included, under jit and in the dtype of the leaf; all six have this chain."""
    optimizer, params, grads = isokron.jax.muon, tree(), tree(1)
    params["layers"] = {"bias": jnp.ones(3, jnp.bfloat16)}
    grads["layers"] = {"bias": jnp.ones(3, jnp.bfloat16)}
    scaled = optimizer(0.1, lr_scale={"layers.b*": 4.0, "layers.*": 2.0, "*": 0.5})
    updates, _ = jax.jit(scaled.update)(grads, scaled.init(params), params)
    assert updates["layers"]["bias"].dtype == jnp.bfloat16
    expected = {}
    for rate in (0.4, 0.05):
        plain = optimizer(rate)
        expected[rate], _ = jax.jit(plain.update)(grads, plain.init(params), params)
    same(updates, expected[0.05] | {"layers": expected[0.4]["layers"]}, rtol=1e-2, atol=1e-6)


def test_a_chain_of_another_library_takes_the_multiples_too() -> None:
    params = {"embed": jnp.ones(3), "head": jnp.ones(3)}
    optimizer = optax.chain(optax.adamw(0.1), scale_by_path({"embed": 8.0}))
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    same({"embed": updates["embed"]}, {"embed": 8 * updates["head"]}, rtol=1e-6, atol=0)


@pytest.mark.parametrize("wrong", [0, -1.0, math.nan, math.inf, "2", True, None])
def test_a_multiple_that_is_not_a_positive_number_is_refused(wrong: Any) -> None:
    message = r"lr_scale\['\*'\] must be a finite number above 0, got"
    with pytest.raises(ValueError, match=message):
        isokron.jax.soap(lr_scale={"bias": 2.0, "*": wrong})


def test_multiples_without_patterns_and_patterns_without_leaves_are_refused() -> None:
    with pytest.raises(TypeError, match=r"patterns of lr_scale must be strings, got 0; write '0'"):
        isokron.jax.soap(lr_scale={0: 2.0})
    with pytest.raises(TypeError, match=r"lr_scale must be a mapping of patterns .* got 2\.0"):
        isokron.jax.muon(lr_scale=2.0)
    optimizer = isokron.jax.soap(lr_scale={"heads.*": 2.0})
    message = r"pattern 'heads\.\*' matches no parameter; paths look like head\.kernel$"
    with pytest.raises(ValueError, match=message):
        optimizer.init({"head": {"kernel": jnp.ones((2, 2))}})


WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("soap", {"betas": (0.9, 1.0)}, r"betas must be two numbers in \[0, 1\), got \(0.9, 1.0\)"),
    ("soap", {"betas": 0.9}, r"betas must be two numbers in \[0, 1\), got 0.9"),
    ("soap", {"basis": "svd"}, r"basis must be one of \('qr', 'eigh'\), got 'svd'"),
    ("soap", {"tolerance": -1.0}, "tolerance must be a number of at least 0"),
    ("soap", {"factor_beta": 1.0}, r"factor_beta must be None or a number in \[0, 1\), got 1.0"),
    ("katie", {"factor_beta": None}, r"factor_beta must be a number in \[0, 1\), got None"),
    ("soap", {"factor_dtype": "int8"}, "factor_dtype must be None or a floating-point dtype"),
    ("soap", {"factor_dtype": "wide"}, "factor_dtype must be None or a floating-point dtype"),
    ("soap", {"graft": "adamw"}, "graft must be one of"),
    ("soap", {"every": 0}, "every must be an integer of at least 1, got 0"),
    ("soap", {"start": 0}, "start must be None or an integer of at least 1, got 0"),
    ("soap", {"max_dim": 2.5}, "max_dim must be None or an integer of at least 1, got 2.5"),
    ("soap", {"max_dim": jnp.int32(8)}, "name it in static_args"),
    ("soap", {"nesterov": True}, "nesterov must be False where momentum is 0"),
    ("katie", {"dampening": 0.1}, "dampening must be 0 where momentum is 0"),
    ("shampoo", {"beta3": 0.5, "betas": (0.0, 0.9)}, "beta3 must be None where"),
    ("soap", {"vectors": 1}, "vectors must be True or False, got 1"),
    ("soap", {"polar": 1}, "polar must be True or False, got 1"),
    ("katie", {"polar": True, "vectors": True}, "polar must be False where vectors=True"),
    ("soap", {"momentum": 1.0}, r"momentum must be a number in \[0, 1\)"),
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
    ("quad", {"preconditioner_lr": 0.0}, r"preconditioner_lr must be a number in \(0, 1\], got 0"),
    ("quad", {"preconditioner_lr": 1.5}, "preconditioner_lr must be"),
    ("skew", {"preconditioner_lr": "fast"}, "preconditioner_lr must be a number"),
    ("quad", {"lr_style": "sgd"}, r"lr_style must be one of \('adam', None\), got 'sgd'"),
    ("quad", {"dtype": "float16"}, "dtype must be None or bfloat16, float32 or"),
    ("quad", {"dtype": "nonsense"}, "dtype must be None or bfloat16, float32 or"),
    ("skew", {"dtype": "float64"}, "jax_enable_x64"),
    ("quad", {"momentum": 1.0}, r"momentum must be a number in \[0, 1\), got 1.0"),
    ("quad", {"preconditioner_init_scale": 0.0}, "preconditioner_init_scale must be"),
    ("quad", {"noise_scale": -1.0}, "noise_scale must be"),
    ("quad", {"damping": float("nan")}, "damping must be"),
    ("quad", {"damping": 0.1, "apply": "old"}, "damping must be 0 with apply='old'"),
    ("quad", {"apply": "both"}, "apply must be one of"),
    ("quad", {"normalize": "yes"}, "normalize must be True or False, got 'yes'"),
    ("quad", {"warmup": -1}, "warmup must be"),
    ("quad", {"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
    ("quad", {"max_size_dense": -1}, "max_size_dense must be an integer"),
    ("quad", {"block_size": jnp.int32(4)}, "static_args"),
    ("quad", {"pipeline_axis_name": "x", "pipeline_axis_size": 0}, "pipeline_axis_size must be"),
]


@pytest.mark.parametrize(("kind", "options", "message"), WRONG)
def test_wrong_settings_are_told(kind: str, options: dict[str, Any], message: str) -> None:
    for factory in (getattr(isokron.jax, kind), getattr(isokron.jax, f"scale_by_{kind}")):
        with pytest.raises(ValueError, match=message):
            factory(**options)


@every
def test_an_unknown_setting_is_answered_with_those_there_are(kind: str) -> None:
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'route'; it takes .*momentum"
    ):
        getattr(isokron.jax, kind)(route="method")


@pytest.mark.parametrize("kind", ["muon", "quad", "skew"])
def test_methods_without_roots_or_eigenbases_have_no_polar(kind: str) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'polar'"):
        getattr(isokron.jax, kind)(polar=True)


def test_wrong_trees_are_told() -> None:
    soap, quad = isokron.jax.scale_by_soap, isokron.jax.scale_by_quad
    with pytest.raises(ValueError, match=r"SOAP needs real .* \['ids'\] is int32; leave it out"):
        soap().init({"ids": jnp.zeros((3, 3), jnp.int32)})
    with pytest.raises(ValueError, match="complex64"):
        quad().init({"w": jnp.zeros((3, 3), jnp.complex64)})
    with pytest.raises(ValueError, match=r"leaf \['w'\]: split=2 must divide dimension 0"):
        soap(split=2).init({"w": jnp.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"stacked must be an integer from 0 to 2 for \['w'\]"):
        soap(stacked=3).init({"w": jnp.zeros((3, 4))})
    with pytest.raises(ValueError, match=r"stacked must be an integer from 0 to 0 for \['w'\]"):
        quad(stacked=True).init({"w": jnp.zeros(())})
    with pytest.raises(ValueError, match=r"stacked has no entry for \['v'\]"):
        quad(stacked={"w": 0}).init({"w": jnp.zeros(3), "v": jnp.zeros(3)})
    with pytest.raises(ValueError, match="pipeline_axis_size must be given"):
        quad(pipeline_axis_name="x").init({"w": jnp.zeros(3)})
    transform = soap()
    state = transform.init({"w": jnp.zeros((4, 3))})
    with pytest.raises(ValueError, match=r"the state has blocks \['4x3'\]"):
        transform.update({"w": jnp.zeros((5, 3))}, state)


def test_split_takes_a_tree() -> None:
    """Each leaf as by a transformation of its own; leaves of one shape may be split differently."""
    random = np.random.default_rng(0)
    shapes = {"qkv": (4, 6), "kv": (4, 6), "w": (4, 6), "stack": (2, 4, 6), "bias": (5,)}
    grads = {k: jnp.asarray(random.standard_normal(s), jnp.float32) for k, s in shapes.items()}
    split: Any = {"qkv": 3, "kv": [2, 4], "w": None, "stack": (5, 1), "bias": None}
    stacked = {**dict.fromkeys(shapes, 0), "stack": 1}
    together = isokron.jax.scale_by_soap(split=split, split_dim=1, stacked=stacked)
    directions, _ = together.update(grads, together.init(grads))
    for name, grad in grads.items():
        one = isokron.jax.scale_by_soap(split=split[name], split_dim=1, stacked=stacked[name])
        alone, _ = one.update({name: grad}, one.init({name: grad}))
        same(alone[name], directions[name], atol=1e-5)
    nested = isokron.jax.scale_by_muon(split={"a": 3, "b": {"c": None, "d": (4, 2)}}, split_dim=1)
    w = jnp.zeros((4, 6))
    state = nested.init({"a": {"x": w}, "b": {"c": w, "d": w}})
    assert {name: len(b["momentum"]) for name, b in state.blocks.items()} == {
        **{"4x2": 4, "4x6": 1, "4x4": 1}
    }


def test_a_split_that_cannot_be_meant_is_told() -> None:
    soap, w = isokron.jax.scale_by_soap, jnp.zeros((3, 4))
    with pytest.raises(ValueError, match=r"split has no entry for \['v'\]"):
        soap(split={"w": None}).init({"w": w, "v": w})
    with pytest.raises(ValueError, match=r"\['w'\] of shape \(3, 4\), got 'three'"):
        soap(split={"w": "three"}).init({"w": w})
    with pytest.raises(ValueError, match=r"split=3 must divide .*split also takes a tree"):
        soap(split=3, split_dim=1).init({"w": w})


def shaped(**shapes: Any) -> Any:
    return jax.tree.map(jnp.zeros, shapes, is_leaf=lambda node: isinstance(node, tuple))


LAYER = {"q": (4, 8, 8), "up": (4, 8, 32), "norm": (4, 8)}
WARNED: dict[str, tuple[Any, Any, str]] = {
    # taken for stacks of vectors
    "unstacked": (shaped(w=(8, 6), b=(6,)), 1, "matrices ['w'] (8, 6) for stacks of vectors"),
    "some unstacked": (shaped(head=(8, 6), layers=LAYER), 1, "['head'] (8, 6) for"),
    "too deep": (shaped(layers=LAYER), 2, "['layers']['norm'] (4, 8), ['layers']['q'] (4, 8, 8)"),
    # stacks that would be mixed
    "layers": (shaped(head=(8, 6), layers=LAYER), 0, "['layers']['q'] (4, 8, 8), ['layers']['up']"),
    "experts": (shaped(r=(8, 6), experts={"up": (6, 8, 9), "down": (6, 9, 8)}), 0, "['experts']"),
    "flat": (shaped(**LAYER), 0, "['q'] (4, 8, 8), ['up'] (4, 8, 32) share"),
}
DENSE = {"kernel": (8, 2, 4), "bias": (2, 4)}
QUIET: dict[str, tuple[Any, Any]] = {
    "layers": (shaped(**LAYER), 1),
    "tree": (shaped(head=(8, 6), layers=LAYER), {"head": 0, "layers": 1}),
    "told": (shaped(**LAYER), {"q": 0, "up": 0, "norm": 0}),
    "vectors": (shaped(b=(6,)), 1),
    "attention": (shaped(q=DENSE, k=DENSE, out={"kernel": (2, 4, 8), "bias": (8,)}), 0),
    "convolutions": (shaped(a={"kernel": (3, 3, 4, 8)}, b={"kernel": (3, 3, 8, 8)}), 0),
    "1d": (shaped(a={"kernel": (3, 4, 8)}, b={"kernel": (3, 8, 8)}), 0),
    "one": (shaped(kernel=(6, 8, 9)), 0),
}


@pytest.mark.parametrize("case", WARNED)
def test_stacks_and_matrices_that_are_mistaken_for_each_other_are_named_once(case: str) -> None:
    params, stacked, text = WARNED[case]
    transform = isokron.jax.muon(stacked=stacked)
    with pytest.warns(UserWarning, match="give stacked a tree") as caught:
        state = transform.init(params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        transform.update(params, state, params)
    assert len(caught) == 1
    assert str(caught[0].message).startswith("Muon: ")
    assert text in str(caught[0].message)


@pytest.mark.parametrize("case", QUIET)
def test_stacks_as_they_are_warn_of_nothing(case: str) -> None:
    params, stacked = QUIET[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        isokron.jax.muon(stacked=stacked).init(params)


def test_jax_needs_no_torch_and_the_package_no_jax() -> None:
    def blocked(module: str, code: str) -> None:
        script = f"import sys; sys.modules[{module!r}] = None; {code}"
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    # and not only the import: a step, of what has twins in torch
    step = "o = k.shampoo(); p = j.eye(3); o.update(p, o.init(p), p); k.newton_schulz(p)"
    imports = "import isokron; import isokron.jax as k; import jax.numpy as j"
    blocked("torch", f"{imports}; isokron.jax.quad(0.1); {step}")
    blocked("jax", "import isokron; isokron.SOAP; import isokron.white_kron")


def test_bases_of_several_shapes_are_followed_at_the_same_time_without_a_deadlock() -> None:
    """Two batched QR decompositions at a time block the two threads of a pool (jaxlib 0.10.2)."""
    code = """
import flax.serialization
import jax
from isokron.jax.linalg import follow

@jax.jit
def turn(pairs):
    return [(matrix, follow(matrix, basis)) for matrix, basis in pairs]

draws = [jax.random.normal(jax.random.key(n), (8, n, n)) for n in range(33, 39)]
pairs = [(draw @ draw.mT, draw) for draw in draws]
for _ in range(100):
    pairs = jax.block_until_ready(turn(pairs))
"""
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
