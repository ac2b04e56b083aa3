"""Every option does what it says."""

import itertools
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from isokron import white_kron
from isokron.jax import chunks, quad, scale_by_quad, scale_by_skew
from isokron.jax.noise import fixed
from isokron.jax.norm_bound import norm_bound

GRADS = {
    "w": jnp.asarray(np.random.default_rng(0).standard_normal((6, 4)), jnp.float32),
    "v": jnp.asarray(np.random.default_rng(1).standard_normal(6), jnp.float32),
}


VECTOR = {"v": GRADS["v"]}  # compiled in a moment


def run(
    steps: int = 3, scale: Any = scale_by_quad, grads: Any = GRADS, **options: Any
) -> tuple[list[Any], list[Any]]:
    transform = scale(**options)
    state, update = transform.init(grads), jax.jit(transform.update)
    updates, states = [], []
    for t in range(steps):
        update_now, state = update(jax.tree.map(lambda g, t=t: g * (1 + t), grads), state)
        updates.append(update_now)
        states.append(state)
    return updates, states


def near(one: Any, other: Any, rtol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6), one, other)


def differ(one: Any, other: Any) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(bool((a != b).any()) for a, b in pairs)


def test_the_style_of_adam_divides_by_five() -> None:
    raw, divided = (run(grads=VECTOR, lr_style=style)[0] for style in (None, "adam"))
    near(raw, jax.tree.map(lambda u: 5 * u, divided))


def test_factors_rest_between_updates_after_the_warmup() -> None:
    updates, states = run(7, grads=VECTOR, every=3, warmup=2)
    factors = [state.factors for state in [scale_by_quad().init(VECTOR), *states]]
    moved = [differ(a, b) for a, b in itertools.pairwise(factors)]
    assert moved == [True, True, False, False, True, False, False]  # at 1, 2 and 5
    near(updates[0], run(1, grads=VECTOR)[0][0])


@pytest.mark.parametrize("scale", [scale_by_quad, scale_by_skew])
def test_old_factors_give_the_direction_before_the_new(scale: Any) -> None:
    old, states = run(2, scale, apply="old", noise_scale=0.0, lr_style=None)
    _, same_states = run(2, scale, apply="new", noise_scale=0.0)
    near(states[-1].factors, same_states[-1].factors)
    # the first factors are identities: the direction is the gradient, clipped
    rms = float(jnp.sqrt(jnp.mean(GRADS["w"] ** 2)))
    np.testing.assert_allclose(old[0]["w"], GRADS["w"] * min(1, 1.1 / rms), rtol=1e-5)


def test_old_factors_have_no_noise_and_a_limit_in_its_place() -> None:
    tiny = jax.tree.map(lambda g: g * 1e-12, GRADS)
    transform = scale_by_quad(apply="old", noise_scale=1e-6, b1=0.0)
    _, state = jax.lax.fori_loop(
        0, 200, lambda _, each: transform.update(tiny, each[1]), (tiny, transform.init(tiny))
    )
    assert float(jnp.max(jnp.abs(state.factors["6d"][0].factor))) == pytest.approx(1e3, rel=1e-3)
    for side in state.factors["6x4"]:
        assert float(jnp.max(jnp.abs(side.factor))) <= 10**1.5 * 1.001


def test_a_key_draws_probes_and_noise_and_none_is_fixed() -> None:
    def factors(key: Any, grads: Any = VECTOR) -> Any:
        return run(1, grads=grads, noise_scale=1e-3, key=key)[1][0].factors

    plain, drawn = factors(None, GRADS), factors(0, GRADS)
    assert all(differ(drawn[name], plain[name]) for name in ("6d", "6x4"))
    # those of a vector are the same beside a matrix
    assert differ(factors(1)["6d"], drawn["6d"])
    near(factors(jax.random.PRNGKey(0))["6d"], drawn["6d"], rtol=0)
    near(factors(jax.random.key(0))["6d"], drawn["6d"], rtol=0)
    for one, other in zip(jax.tree.leaves(drawn), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.01, atol=2e-3)  # it is only noise


def test_damping_is_relative_to_the_block() -> None:
    """Then a step does not depend on the scale of the gradients, which are white from the start."""
    for size in (1.0, 1e-6):
        grads = jax.tree.map(lambda g, size=size: g * size, VECTOR)
        transform = scale_by_quad(damping=0.1, noise_scale=0.0, preconditioner_init_scale=1.0)
        _, state = jax.jit(transform.update)(grads, transform.init(grads))
        largest = float(jnp.max(jnp.abs(grads["v"])))
        noisy = grads["v"] + 0.1 * largest * fixed((6,), jnp.float32)
        steep = jnp.max(noisy**2) + 1
        rate = white_kron.factor_rate(1, 0.7)
        expected = (1 - rate / 2 / steep * (noisy**2 - 1)) ** 2
        np.testing.assert_allclose(state.factors["6d"][0].factor[0], expected, rtol=1e-5)


def test_decay_and_its_mask_and_the_schedule() -> None:
    params = {"decays": GRADS["v"], "stays": GRADS["v"]}
    rates = optax.linear_schedule(0.1, 0.0, 4)
    mask = {"decays": True, "stays": False}
    optimizer = quad(rates, weight_decay=0.5, weight_decay_mask=mask)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    plain, _ = run(3, grads=VECTOR)
    for t in range(3):
        grads = jax.tree.map(lambda g, t=t: g * (1 + t), params)
        updates, state = update(grads, state, params)
        near(updates["decays"], -rates(t) * (plain[t]["v"] + 0.5 * params["decays"]))
        near(updates["stays"], -rates(t) * plain[t]["v"])


def test_balance_comes_every_hundred_steps_and_leaves_p_alone() -> None:
    transform = scale_by_quad(noise_scale=0.0)
    state = transform.init(GRADS)
    left, right = state.factors["6x4"]
    lopsided = {**state.factors, "6x4": (left._replace(factor=left.factor * 8), right)}
    update = jax.jit(transform.update)
    sizes = {}
    for count in (98, 99, 100):
        _, after = update(GRADS, state._replace(factors=lopsided, count=jnp.int32(count)))
        sizes[count] = [float(jnp.max(jnp.abs(side.factor))) for side in after.factors["6x4"]]
    ratio = {count: left / right for count, (left, right) in sizes.items()}
    assert ratio[98] == pytest.approx(ratio[100], rel=1e-3)
    assert ratio[99] == pytest.approx(ratio[98] / 8, rel=0.1)
    products = [left * right for left, right in sizes.values()]
    assert products == pytest.approx([products[0]] * 3, rel=1e-3)


def test_an_update_after_a_rest_balances_what_the_rest_left_out() -> None:
    transform = scale_by_quad(noise_scale=0.0, every=7)
    state = transform.init(GRADS)
    left, right = state.factors["6x4"]
    lopsided = {**state.factors, "6x4": (left._replace(factor=left.factor * 8), right)}
    _, after = jax.jit(transform.update)(
        GRADS, state._replace(factors=lopsided, count=jnp.int32(104))
    )  # 105 is the first update from 100 on
    left, right = (float(jnp.max(jnp.abs(side.factor))) for side in after.factors["6x4"])
    assert left / right < 2


def test_the_bound_is_below_the_norm_and_near() -> None:
    random = np.random.default_rng(0)
    for n in (3, 17, 64):
        root = random.standard_normal((5, n, n))
        for matrices in (root @ root.swapaxes(1, 2), root - root.swapaxes(1, 2)):
            top = np.abs(matrices).max((1, 2))
            bound = jax.jit(norm_bound)(matrices, top, fixed((4, n), jnp.float32))
            true = np.linalg.norm(matrices, 2, axis=(1, 2))
            assert (np.asarray(bound) <= true * 1.00001).all()
            assert (np.asarray(bound) >= 0.8 * true).all()
    nothing = jax.jit(norm_bound)(jnp.zeros((2, 4, 4)), jnp.zeros(2), fixed((4, 4), jnp.float32))
    np.testing.assert_array_equal(nothing, 0)


def test_fixed_numbers_are_those_of_plain_integers() -> None:
    found = fixed((40, 70), jnp.float32)
    expected = [
        [white_kron.uniform(white_kron.scramble(i, j) % 2**32) for j in range(70)]
        for i in range(40)
    ]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_allclose(np.mean(np.square(expected)), 1, atol=0.05)
    assert np.linalg.matrix_rank(np.array(expected)) == 40


def test_blocks_cover_every_leaf_once() -> None:
    shapes = [(5,), (), (7, 9), (3, 20, 11), (4, 3, 2, 8), (30, 4), (0, 3)]
    scanned = [False, False, False, True, True, False, False]
    plan = white_kron.plan(shapes, scanned, block_size=4, max_size_dense=16)
    for index, shape in enumerate(shapes):
        own = [piece for bucket in plan.buckets.values() for piece in bucket.pieces]
        sizes = [p.blocks * int(np.prod(p.shape)) for p in own if p.leaf == index]
        assert sum(sizes) == int(np.prod(shape))
    for bucket in plan.buckets.values():
        ends = np.cumsum([piece.blocks for piece in bucket.pieces])
        assert [piece.first for piece in bucket.pieces] == [0, *ends[:-1]]
    assert plan.buckets["20dx4"].dense == (False, True)


@pytest.mark.parametrize("scale", [scale_by_quad, scale_by_skew])
def test_chunks_change_nothing(scale: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    grads = {"w": jnp.asarray(np.random.default_rng(0).standard_normal((18, 16)), jnp.float32)}
    settings = {"scale": scale, "grads": grads, "block_size": 6, "every": 2, "warmup": 1}
    whole = run(**settings)
    monkeypatch.setattr(chunks, "ENTRIES", 2 * 36)
    assert chunks.chunk_rows(6, 36) == 2  # of 6×6; the three of 6×4 go all at once
    near(run(**settings), whole)


def test_chunks_are_divisors_that_fill_the_cache() -> None:
    entries = chunks.ENTRIES // 4
    rows = {rows: chunks.chunk_rows(rows, entries) for rows in (3, 4, 7, 24, 25)}
    assert rows == {3: 3, 4: 4, 7: 1, 24: 4, 25: 1}
    # a loop over 5003 rows of 8×8, which is a prime, would take far longer than all at once
    assert chunks.chunk_rows(5003, 64) == 5003
    assert chunks.chunk_rows(10**6, 10**9) == 1


def test_leaves_of_every_kind_come_back_in_their_shape() -> None:
    shapes = {"a": (5,), "b": (), "c": (7, 9), "d": (1, 6), "e": (2, 3, 4), "f": (0, 3)}
    grads = {name: jnp.ones(shape) for name, shape in shapes.items()}
    transform = scale_by_quad(block_size=4, max_size_dense=8)
    updates, _ = jax.eval_shape(transform.update, grads, jax.eval_shape(transform.init, grads))
    assert {name: leaf.shape for name, leaf in updates.items()} == shapes


def test_jax_needs_no_torch_and_the_package_no_jax() -> None:
    def blocked(module: str, code: str) -> None:
        script = f"import sys; sys.modules[{module!r}] = None; {code}"
        subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)

    # and not only the import: a step, of what has twins in torch
    step = "o = k.shampoo(); p = j.eye(3); o.update(p, o.init(p), p); k.newton_schulz(p)"
    imports = "import isokron; import isokron.jax as k; import jax.numpy as j"
    blocked("torch", f"{imports}; isokron.jax.quad(0.1); {step}")
    blocked("jax", "import isokron; isokron.SOAP; import isokron.white_kron")
