"""Options of Quad and Skew, and gradients that break naive implementations."""

import functools
import inspect
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from isokron import white_kron
from isokron.jax import quad, scale_by_quad, scale_by_skew, skew
from isokron.jax.linalg import norm_bound
from isokron.jax.quad_skew import ALIASES, fixed_numbers
from isokron.jax.settings import WhiteKronSettings
from isokron.white_kron import factor_rate
from white_kron_naive import Naive

SCALES = {"quad": scale_by_quad, "skew": scale_by_skew}
both = pytest.mark.parametrize("kind", SCALES)
SILENT: dict[str, Any] = {"noise_scale": 0.0, "lr_style": None}


def normal(seed: int, *shape: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


GRADS = {"w": normal(0, 6, 4), "v": normal(1, 6)}
VECTOR = {"v": GRADS["v"]}  # compiled in a moment


def run(
    steps: int = 3, scale: Any = scale_by_quad, grads: Any = GRADS, **options: Any
) -> tuple[list[Any], list[Any]]:
    """Directions and the state after each step, for gradients that grow."""
    transform = scale(**options)
    state, update = transform.init(grads), jax.jit(transform.update)
    updates, states = [], []
    for t in range(steps):
        update_now, state = update(jax.tree.map(lambda g, t=t: g * (1 + t), grads), state)
        updates.append(update_now)
        states.append(state)
    return updates, states


def factors_of(state: Any) -> dict[str, Any]:
    return {
        name: {key: x for key, x in batch.items() if key != "momentum"}
        for name, batch in state.blocks.items()
    }


def near(one: Any, other: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), one, other)


def differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(bool((a != b).any()) for a, b in pairs)


def finite(*trees: Any) -> bool:
    return all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(trees))


@functools.partial(jax.jit, static_argnums=0)
def repeated(update: Any, grads: Any, steps: int, state: Any) -> tuple[Any, Any]:
    """`steps` steps with the same gradients, in one loop."""
    first = (jax.tree.map(jnp.zeros_like, grads), state)
    return jax.lax.fori_loop(0, steps, lambda _, carry: update(grads, carry[1]), first)


@functools.cache
def transformed(kind: str, **options: Any) -> Any:
    """One for each of the options, so that `repeated` is compiled once for all tests."""
    return SCALES[kind](**options)


def test_names_of_other_libraries_are_accepted() -> None:
    grads = {"stack": normal(0, 2, 5, 3), "v": normal(1, 6)}
    options = {"momentum": 0.8, "stacked": {"stack": 1, "v": 0}, "seed": 3}
    theirs = {"b1": 0.8, "scanned_layers": {"stack": True, "v": False}, "key": 3}
    near(run(grads=grads, **options), run(grads=grads, **theirs), rtol=0)
    assert quad(scanned_layers=None, max_size_triangular=64) is not None


# the order of the arguments of eformer 0.0.101, by their names here
PUBLISHED = [
    "lr_style",
    "momentum",
    "normalize_grads",
    "max_size_dense",
    "preconditioner_lr",
    "preconditioner_init_scale",
    "dtype",
    "stacked",
    "block_size",
    "pipeline_axis_name",
    "pipeline_axis_size",
    "params_partition_specs",
    "noise_scale",
]


@both
def test_arguments_by_position_are_in_the_published_order(kind: str) -> None:
    scale_by, optimizer = SCALES[kind], {"quad": quad, "skew": skew}[kind]
    assert list(inspect.signature(scale_by).parameters)[: len(PUBLISHED)] == PUBLISHED
    outer = ["learning_rate", *PUBLISHED[:2], "weight_decay", "weight_decay_mask", *PUBLISHED[2:]]
    assert list(inspect.signature(optimizer).parameters)[: len(outer)] == outer
    named = run(2, scale_by, momentum=0.8, lr_style=None, normalize_grads=True, block_size=3)[0]
    values = (None, 0.8, True, 16384, 0.7, 1.0, None, 0, 3)
    near(run(2, lambda: scale_by(*values))[0], named, rtol=0)
    plain = optimizer(0.1, "adam", 0.0, 0.0, None, False, 16384, 0.7, 1.0, "float32", None, 3)
    updates, _ = plain.update(VECTOR, plain.init(VECTOR), VECTOR)
    (expected, *_), _ = run(1, scale_by, VECTOR, momentum=0.0)
    near(updates, jax.tree.map(lambda x: -0.1 * x, expected))
    with pytest.raises(TypeError, match=f"{kind} takes 16 arguments by position, got 17"):
        optimizer(*range(17))


@both
def test_a_setting_given_by_two_names_is_refused(kind: str) -> None:
    for factory in (SCALES[kind], {"quad": quad, "skew": skew}[kind]):
        with pytest.raises(TypeError, match="got 'momentum' or 'b1' twice; give it once"):
            factory(b1=0.9, momentum=0.95)
        with pytest.raises(TypeError, match="got 'stacked' or 'scanned_layers' twice"):
            factory(scanned_layers=None, stacked=0)
        with pytest.raises(ValueError, match="normalize must be False with normalize_grads=True"):
            factory(normalize=True, normalize_grads=True)
    with pytest.raises(TypeError, match="got 'lr_style' twice"):
        SCALES[kind]("adam", lr_style=None)


@both
def test_help_names_all_arguments(kind: str) -> None:
    names = {*inspect.signature(SCALES[kind]).parameters} - {"shared"}
    names |= {*WhiteKronSettings.__annotations__, *ALIASES}
    for name in names:
        assert re.search(rf"\b{name}\b", str(SCALES[kind].__doc__)), name


def test_under_injected_hyperparameters_shapes_are_static() -> None:
    grads = {"stack": normal(0, 2, 5, 3)}
    with pytest.raises(ValueError, match=r"stacked must be .* name it in static_args"):
        optax.inject_hyperparams(quad)(0.1, stacked=1).init(grads)
    for optimizer in (
        optax.inject_hyperparams(quad)(0.1, b1=0.8, scanned_layers=1),
        optax.inject_hyperparams(quad, static_args="stacked")(0.1, stacked=1),
    ):
        assert optimizer.init(grads).inner_state[0].blocks.keys() == {"5x3"}


def test_the_style_of_adam_divides_by_five() -> None:
    raw, divided = (run(grads=VECTOR, lr_style=style)[0] for style in (None, "adam"))
    near(raw, jax.tree.map(lambda u: 5 * u, divided))


def test_factors_rest_between_updates_after_the_warmup() -> None:
    updates, states = run(7, grads=VECTOR, every=3, warmup=2)
    factors = [factors_of(state) for state in [scale_by_quad().init(VECTOR), *states]]
    moved = [differ(a, b) for a, b in itertools.pairwise(factors)]
    assert moved == [True, True, False, False, True, False, False]  # at 1, 2 and 5
    near(updates[0], run(1, grads=VECTOR)[0][0])


@both
def test_old_factors_give_the_direction_before_the_new(kind: str) -> None:
    old, states = run(2, SCALES[kind], apply="old", noise_scale=0.0, lr_style=None)
    _, same_states = run(2, SCALES[kind], apply="new", noise_scale=0.0)
    near(factors_of(states[-1]), factors_of(same_states[-1]))
    # the first factors are identities: the direction is the gradient, clipped
    rms = float(jnp.sqrt(jnp.mean(GRADS["w"] ** 2)))
    np.testing.assert_allclose(old[0]["w"], GRADS["w"] * min(1, 1.1 / rms), rtol=1e-5)


def test_old_factors_have_no_noise_and_a_limit_in_its_place() -> None:
    tiny = jax.tree.map(lambda g: g * 1e-12, GRADS)
    transform = scale_by_quad(apply="old", noise_scale=1e-6, momentum=0.0)
    _, state = repeated(transform.update, tiny, 200, transform.init(tiny))
    largest = float(jnp.max(jnp.abs(state.blocks["6d"]["factor.0"])))
    assert largest == pytest.approx(1e3, rel=1e-3)
    for side in (0, 1):
        assert float(jnp.max(jnp.abs(state.blocks["6x4"][f"factor.{side}"]))) <= 10**1.5 * 1.001


def test_a_seed_draws_probes_and_noise_and_none_is_fixed() -> None:
    def factors(seed: Any, grads: Any = VECTOR) -> Any:
        return factors_of(run(1, grads=grads, noise_scale=1e-3, seed=seed)[1][0])

    plain, drawn = factors(None, GRADS), factors(0, GRADS)
    assert all(differ(drawn[name], plain[name]) for name in ("6d", "6x4"))
    # those of a vector are the same beside a matrix
    assert differ(factors(1)["6d"], drawn["6d"])
    near(factors(jax.random.PRNGKey(0))["6d"], drawn["6d"], rtol=0)
    near(factors(jax.random.key(0))["6d"], drawn["6d"], rtol=0)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.01, atol=2e-3)  # it is only noise


def test_damping_is_relative_to_the_block() -> None:
    for size in (1.0, 1e-6):
        grads = jax.tree.map(lambda g, size=size: g * size, VECTOR)
        transform = scale_by_quad(damping=0.1, noise_scale=0.0)
        _, state = jax.jit(transform.update)(grads, transform.init(grads))
        largest = float(jnp.max(jnp.abs(grads["v"])))
        noisy = grads["v"] + 0.1 * largest * fixed_numbers((6,), jnp.float32)
        steep = jnp.max(noisy**2) + 1
        expected = (1 - factor_rate(1, 0.7) / 2 / steep * (noisy**2 - 1)) ** 2
        np.testing.assert_allclose(state.blocks["6d"]["factor.0"][0], expected, rtol=1e-5)


@pytest.mark.parametrize("rate", [0.1, 0.7])
def test_a_small_preconditioner_lr_is_not_raised(rate: float) -> None:
    assert factor_rate(1, rate) == pytest.approx(rate, rel=1e-4)
    assert factor_rate(10**9, rate) == min(rate, 0.4)
    grads, moved = {"w": normal(0, 5)}, []
    for given in (rate, rate / 2):
        transform = scale_by_quad(preconditioner_lr=given, noise_scale=0.0)
        _, state = jax.jit(transform.update)(grads, transform.init(grads))
        steep = jnp.max(grads["w"] ** 2) + 1
        expected = (1 - factor_rate(1, given) / 2 / steep * (grads["w"] ** 2 - 1)) ** 2
        factor = state.blocks["5d"]["factor.0"]
        np.testing.assert_allclose(factor[0], expected, rtol=1e-5)
        moved.append(float(jnp.abs(factor - 1).max()))
    assert moved[1] < 0.6 * moved[0]


@pytest.mark.parametrize(("update_every", "counts"), [(1, (98, 99, 100)), (7, (97, 104, 111))])
def test_balance_comes_every_hundred_steps_and_leaves_p_alone(
    update_every: int, counts: tuple[int, ...]
) -> None:
    """Or with the first update from a hundredth step on; `counts` are of the step before."""
    transform = scale_by_quad(noise_scale=0.0, every=update_every)
    state = transform.init(GRADS)
    batch = state.blocks["6x4"]
    lopsided = state.blocks | {"6x4": batch | {"factor.0": batch["factor.0"] * 8}}
    update, sizes = jax.jit(transform.update), []
    for count in counts:
        _, after = update(GRADS, state._replace(blocks=lopsided, count=jnp.int32(count)))
        factors = [after.blocks["6x4"][f"factor.{side}"] for side in (0, 1)]
        sizes.append([float(jnp.max(jnp.abs(factor))) for factor in factors])
    ratios = [left / right for left, right in sizes]
    assert ratios[0] == pytest.approx(ratios[2], rel=1e-3)
    assert ratios[1] == pytest.approx(ratios[0] / 8, rel=0.1)
    products = [left * right for left, right in sizes]
    assert products == pytest.approx([products[0]] * 3, rel=1e-3)


def test_the_bound_is_below_the_norm_and_near() -> None:
    """Also where the matrix is padded, which changes nothing."""
    random = np.random.default_rng(0)
    for n in (3, 17, 64):
        root = random.standard_normal((5, n, n)).astype(np.float32)
        probes, size = fixed_numbers((4, n + 9), jnp.float32), jnp.full(5, float(n))
        for matrices in (root @ root.swapaxes(1, 2), root - root.swapaxes(1, 2)):
            top = np.abs(matrices).max((1, 2))
            bound = jax.jit(norm_bound)(matrices, top, probes[:, :n], size)
            true = np.linalg.norm(matrices, 2, axis=(1, 2))
            assert (np.asarray(bound) <= true * 1.00001).all()
            assert (np.asarray(bound) >= 0.8 * true).all()
            padded = np.pad(matrices, ((0, 0), (0, 9), (0, 9)))
            np.testing.assert_allclose(norm_bound(padded, top, probes, size), bound, rtol=1e-5)
    zeros = jnp.zeros((2, 4, 4))
    nothing = norm_bound(zeros, jnp.zeros(2), fixed_numbers((4, 4), jnp.float32), jnp.full(2, 4.0))
    np.testing.assert_array_equal(nothing, 0)


def test_fixed_numbers_are_those_of_plain_integers() -> None:
    expected = [
        [white_kron.uniform(white_kron.scramble(i, j) % 2**32) for j in range(70)]
        for i in range(40)
    ]
    np.testing.assert_allclose(fixed_numbers((40, 70), jnp.float32), expected, atol=1e-6)
    np.testing.assert_allclose(np.mean(np.square(expected)), 1, atol=0.05)
    assert np.linalg.matrix_rank(np.array(expected)) == 40


def test_state_is_stored_in_the_dtype_it_is_given_and_l_is_not_rounded() -> None:
    for dtype in ("bfloat16", "float32", jnp.bfloat16, None):
        transform = scale_by_quad(dtype=dtype)
        _, state = jax.eval_shape(transform.update, GRADS, transform.init(GRADS))
        for batch in state.blocks.values():
            for key, x in batch.items():
                rounded = "float32" if key.startswith("lipschitz") else dtype or "float32"
                assert x.dtype == jnp.dtype(rounded), key
    exact, rounded = (run(dtype=dtype)[0][-1] for dtype in (None, "bfloat16"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0.05, atol=0.02), exact, rounded
    )


@both
def test_stacked_layers_are_worked_on_and_clipped_one_by_one(kind: str) -> None:
    """The second layer's gradients are far larger: one clip for both would shrink the first."""
    sizes = jnp.array([1.0, 1e3, 1e-3])[:, None, None]
    stack = {"a": normal(1, 3, 9, 7) * sizes, "b": normal(2, 3, 8) * sizes[:, 0]}
    alone = {f"{name}{i}": stack[name][i] for name in stack for i in range(3)}
    stacked, parts = SCALES[kind](stacked=1), SCALES[kind]()
    one, many = stacked.init(stack), parts.init(alone)
    step_one, step_many = jax.jit(stacked.update), jax.jit(parts.update)
    for sign in (1, -1, 1, 1):
        together, one = step_one(jax.tree.map(lambda x, s=sign: s * x, stack), one)
        apart, many = step_many(jax.tree.map(lambda x, s=sign: s * x, alone), many)
        for name, i in itertools.product(stack, range(3)):
            layer = apart[f"{name}{i}"]
            np.testing.assert_allclose(together[name][i], layer, rtol=1e-4, atol=1e-6)
    first, _ = step_one(stack, stacked.init(stack))
    for leaf in first.values():
        lengths = 5 * np.sqrt(np.mean(np.square(leaf), axis=tuple(range(1, leaf.ndim))))
        assert lengths[0] > 0.5
        np.testing.assert_allclose(lengths[1], 1.1, rtol=1e-5)


@both
@pytest.mark.parametrize(("name", "norm"), [("normalize", True), ("normalize_grads", "leaf")])
def test_the_momentum_is_divided_by_its_norm_by_layer_or_by_leaf(
    kind: str, name: str, norm: Any
) -> None:
    """Over gradients that grow and shrink, and layers with blocks in four batches."""
    transform = SCALES[kind](**{name: True}, stacked=1, block_size=16, noise_scale=0.0)
    update = jax.jit(transform.update)

    def probes(size: int) -> np.ndarray:
        return np.asarray(fixed_numbers((4, size), jnp.float32), np.float64)

    naive = Naive((2, 20, 17), True, kind == "skew", probes, normalize=norm)
    state = transform.init({"a": normal(0, 2, 20, 17)})
    for step, scale in enumerate((1.0, 30.0, 0.1, 1.0)):
        grad = scale * normal(step, 2, 20, 17) * jnp.array([1.0, 100.0])[:, None, None]
        ours, state = update({"a": grad}, state)
        expected = naive.direction(np.asarray(grad))
        np.testing.assert_allclose(ours["a"], expected, rtol=0, atol=2e-4 * abs(expected).max())


@both
def test_zero_gradients_keep_everything_finite(kind: str) -> None:
    grads = {"w": jnp.zeros((9, 7)), "v": jnp.zeros(6)}
    for options in (SILENT, {}, {"apply": "old"})[: 3 if kind == "quad" else 2]:
        transform = transformed(kind, **options)
        updates, state = repeated(transform.update, grads, 1000, transform.init(grads))
        assert finite(updates, state)
        assert all(bool((leaf == 0).all()) for leaf in jax.tree.leaves(updates))
        if options.get("noise_scale") == 0:  # nothing was shown, and nothing learned
            np.testing.assert_array_equal(state.blocks["9x7"]["factor.0"][0], np.eye(9))


@both
def test_rows_without_gradients_keep_everything_finite(kind: str) -> None:
    """What is never observed would grow by a factor a step until it overflows."""
    grads = {"w": normal(0, 9, 7).at[2:5].set(0), "v": normal(1, 6).at[0].set(0)}
    transform = transformed(kind, **SILENT)
    updates, state = repeated(transform.update, grads, 1000, transform.init(grads))
    assert finite(updates, state)
    assert all(bool((leaf != 0).any()) for leaf in jax.tree.leaves(updates))


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


def test_small_matrices_are_not_padded_to_the_block_size() -> None:
    params = {f"w{i}": jnp.zeros((64, 8)) for i in range(16)}
    state = quad().init(params)
    assert set(state[0].blocks) == {"64x8"}
    stored = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    blocks = 16 * (64 * 8 + 64 * 64 + 8 * 8 + 2) * 4
    assert stored == blocks + 2 * 4 + 16 * 4  # count and failures, and what was skipped
