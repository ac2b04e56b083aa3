"""The transformation that SOAP, Shampoo, Katie and Muon share.

Observations are folded into statistics, statistics become an operator, and the operator is applied
to a gradient: isokron.optim.preconditioned, as a pure function. A method says what is its own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from isokron.jax import settings
from isokron.jax.batches import Batches, Plan, block_shape, gather, plan, scatter
from isokron.jax.cadence import due, unready
from isokron.jax.grafting import graft, graft_direction, graft_together
from isokron.jax.moments import adam, filtered, first_moment, heavy_ball
from isokron.jax.sides import State, across, known_only

Group = Mapping[str, Any]


class PreconditionedState(NamedTuple):
    """`count`: steps taken; `skipped`: those left out for a gradient that was not finite; `failed`:
    blocks whose operator could not be made anew and stayed as it was.

    `mu`, `nu`: Adam's moments of the leaves that the method does not take. `blocks`: by the shape
    of a block, what the method keeps of all blocks of that shape.
    """

    count: Any
    skipped: Any
    failed: Any
    mu: Any
    nu: Any
    blocks: Any


class Method(NamedTuple):
    """What a method is made of. state: [B, ...] under plain names; step: a float.

    init(rows, shape, dtype, group) → state; observe(grad, state, step, group) → what it changed;
    refresh(state, order of the blocks, step, group) → new operators; install(fresh, state) → all
    that they change, under the names in `operator`, up to a dot; direction(moment, state, step,
    group) → the direction, and what it changed. The rest: as in isokron.optim.preconditioned.
    """

    init: Callable[[int, tuple[int, ...], Any, Group], State]
    observe: Callable[[jax.Array, State, jax.Array, Group], State]
    refresh: Callable[[State, int, jax.Array, Group], State]
    direction: Callable[[jax.Array, State, jax.Array, Group], tuple[jax.Array, State]]
    install: Callable[[State, State], State] = lambda fresh, state: fresh
    operator: tuple[str, ...] = ()
    order: int | None = None
    heavy_ball: bool = True
    keeps_moment: bool = False
    debias: bool = True
    squares: bool = True


def scale_by_preconditioned(method: Method, group: Group) -> optax.GradientTransformationExtraArgs:
    """`group`: the settings, as isokron.jax.settings.settled has made them."""

    def init(params: Any) -> PreconditionedState:
        leaves, structure = jax.tree.flatten(params)
        where = plan(params, group, method.order)
        dtype = jnp.result_type(jnp.float32, *[leaf.dtype for leaf in leaves])
        zeros = [
            optax.MaskedNode() if leaf.pieces else jnp.zeros_like(array, dtype=dtype)
            for array, leaf in zip(leaves, where.leaves, strict=True)
        ]
        blocks = {
            name: _first(method, rows, block_shape(name), dtype, group)
            for name, rows in where.rows.items()
        }
        zero = jnp.zeros((), jnp.int32)
        mu, nu = (jax.tree.unflatten(structure, zeros) for _ in range(2))
        # without leaves, the structure is to be a prefix of any: optax.tree.map_params asks that
        return PreconditionedState(zero, zero, zero, mu, nu, blocks if leaves else params)

    # compiled, because a lax.cond outside of jit is compiled anew each time
    stepped = jax.jit(lambda updates, state: _step(method, group, updates, state))

    def update(
        updates: Any, state: PreconditionedState, params: Any = None, **extra: Any
    ) -> tuple[Any, PreconditionedState]:
        del params, extra
        where = plan(updates, group, method.order)
        if jax.tree.leaves(updates) and set(where.rows) != set(state.blocks):
            raise ValueError(
                f"the state has blocks {sorted(state.blocks)} and the gradients make "
                f"{sorted(where.rows)}; init it with the same parameters and settings"
            )
        return stepped(updates, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _first(method: Method, rows: int, shape: tuple[int, ...], dtype: Any, group: Group) -> State:
    zeros = jnp.zeros((rows, *shape), dtype)
    state = {}
    if _positive(_rate(method, group)) and (not method.keeps_moment or group["graft"]):
        state["momentum"] = zeros
    if method.heavy_ball and _positive(group["momentum"]):
        state["velocity"] = zeros
    if group["graft"] not in (None, "sgd"):
        state["graft"] = zeros
    return {**state, **method.init(rows, shape, dtype, group)}


def _step(
    method: Method, group: Group, updates: Any, state: PreconditionedState
) -> tuple[Any, PreconditionedState]:
    grads, structure = jax.tree.flatten(updates)
    if not grads:
        return updates, state._replace(count=optax.safe_increment(state.count))
    where = plan(updates, group, method.order)
    dtype = _work(state, grads)
    wide = [grad.astype(dtype) for grad in grads]
    fits = [jnp.isfinite(jnp.sum(x * x) if method.squares else x).all() for x in wide]

    def move() -> tuple[list[jax.Array], PreconditionedState]:
        return _moved(method, settings.in_dtype(group, dtype), wide, where, state)

    def stay() -> tuple[list[jax.Array], PreconditionedState]:
        zeros = [jnp.zeros_like(grad) for grad in wide]
        return zeros, state._replace(skipped=optax.safe_increment(state.skipped))

    directions, new = jax.lax.cond(jnp.stack(fits).all(), move, stay)
    result = [each.astype(grad.dtype) for each, grad in zip(directions, grads, strict=True)]
    return jax.tree.unflatten(structure, result), new


def _moved(
    method: Method,
    group: Group,
    grads: list[jax.Array],
    where: Plan,
    state: PreconditionedState,
) -> tuple[list[jax.Array], PreconditionedState]:
    """Directions of all leaves, and the state after this step."""
    count = optax.safe_increment(state.count)
    step = count.astype(grads[0].dtype)
    batches = gather(grads, where, grads[0].dtype)
    blocks, moments = {}, {}
    for name, grad in batches.items():
        own = state.blocks[name]
        own = own | method.observe(grad, own, step, group)
        moments[name], mean = _moment(method, grad, own, step, group)
        blocks[name] = own | mean
    blocks, failed = _refreshed(method, blocks, count, step, group)
    directions = {}
    for name, moment in moments.items():
        given = batches[name] if method.keeps_moment else moment
        directions[name], changed = method.direction(given, blocks[name], step, group)
        blocks[name] = blocks[name] | changed
    if group["graft"] and batches:
        directions, blocks = _grafted(
            batches, moments, directions, blocks, unready(count, group), where, step, group
        )
    for name, own in blocks.items():
        if "velocity" in own:
            directions[name], velocity = heavy_ball(own["velocity"], directions[name], group)
            blocks[name] = own | {"velocity": velocity}

    result, mu, nu = [], [], []
    kept = zip(jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True)
    for grad, leaf in zip(grads, where.leaves, strict=True):
        if leaf.pieces:
            result.append(scatter(directions, leaf).reshape(grad.shape))
            continue
        direction, first, second = adam(grad, *next(kept), step, group)
        result.append(direction)
        mu.append(first)
        nu.append(second)
    return result, PreconditionedState(
        count,
        state.skipped,
        state.failed + failed,
        jax.tree.unflatten(jax.tree.structure(state.mu), mu),
        jax.tree.unflatten(jax.tree.structure(state.nu), nu),
        blocks,
    )


def _moment(
    method: Method, grad: jax.Array, state: State, step: jax.Array, group: Group
) -> tuple[jax.Array, State]:
    """The first moment as the method or the grafted one wants it; `grad` where none is kept."""
    if "momentum" not in state:
        return grad, {}
    beta, beta3 = _rate(method, group), group["beta3"]
    if method.heavy_ball and beta3 is not None:
        moment, mean = filtered(state["momentum"], grad, beta, beta3, step)
    else:
        counted = step if method.debias or group["graft"] else None
        ahead = group["nesterov"] and not method.heavy_ball
        moment, mean = first_moment(state["momentum"], grad, beta, ahead, counted)
    return moment, {"momentum": mean}


def _refreshed(
    method: Method, blocks: dict[str, State], count: jax.Array, step: jax.Array, group: Group
) -> tuple[dict[str, State], jax.Array]:
    """The state with new operators, if they are due; and how many could not be made."""
    if not method.operator or not blocks:
        return blocks, jnp.int32(0)

    def renew() -> tuple[dict[str, State], jax.Array]:
        pairs = {
            name: _renewed(method, own, len(block_shape(name)), step, group)
            for name, own in blocks.items()
        }
        failed = jnp.stack([count for _, count in pairs.values()]).sum(dtype=jnp.int32)
        return {name: changed for name, (changed, _) in pairs.items()}, failed

    def keep() -> tuple[dict[str, State], jax.Array]:
        kept = {
            name: {key: own[key] for key in own if key.split(".")[0] in method.operator}
            for name, own in blocks.items()
        }
        return kept, jnp.int32(0)

    now = due(count, group)
    changed, failed = renew() if now is True else jax.lax.cond(now, renew, keep)
    return {name: own | changed[name] for name, own in blocks.items()}, failed


def _renewed(
    method: Method, state: State, order: int, step: jax.Array, group: Group
) -> tuple[State, jax.Array]:
    """New operators of a batch, or where one is not finite the one it had; how many those are."""
    fresh = known_only(method.refresh(state, order, step, group), state)
    if not fresh:
        return {}, jnp.int32(0)
    finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in fresh.values()]
    fine = jnp.stack(finite).all(axis=0)
    fresh = {key: jnp.where(across(fine, x), x, state[key]) for key, x in fresh.items()}
    return method.install(fresh, state), jnp.sum(~fine, dtype=jnp.int32)


def _grafted(
    grads: Batches,
    moments: Batches,
    directions: Batches,
    blocks: dict[str, State],
    early: jax.Array,
    where: Plan,
    step: jax.Array,
    group: Group,
) -> tuple[Batches, dict[str, State]]:
    """Directions as long as those of the simple method, which steps alone while it is `early`."""
    simple: Batches = {}
    for name, grad in grads.items():
        second = blocks[name].get("graft")
        simple[name], second = graft_direction(grad, moments[name], second, step, group)
        if second is not None:
            blocks[name] = blocks[name] | {"graft": second}
    if group["graft_by"] == "parameter":
        directions = graft_together(directions, simple, where)
    else:
        directions = {name: graft(each, simple[name]) for name, each in directions.items()}
    alone = {name: jnp.where(early, simple[name], each) for name, each in directions.items()}
    return alone, blocks


def _rate(method: Method, group: Group) -> Any:
    """The first moment's rate."""
    return group["betas"][0] if method.heavy_ball else group["momentum"]


def _positive(value: Any) -> bool:
    """A number that JAX traces may be anything, and so counts as one."""
    return not settings.is_zero(value)


def _work(state: PreconditionedState, grads: list[jax.Array]) -> Any:
    """The dtype that is worked in: that of the state, but for factors, which have their own."""
    blocks = [x for own in state.blocks.values() for key, x in own.items() if key[:4] != "cov."]
    kept = [*jax.tree.leaves(state.mu), *blocks] or grads
    return jnp.result_type(jnp.float32, *[each.dtype for each in kept])
