"""The transformation behind every optimizer here; a Method says what is particular to one of them.

Gradients are gathered into batches of blocks, [B, ...]. Each step folds them into statistics
(`observe`), makes new operators of the statistics when that is due (`refresh`), and applies the
operators (`direction`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from isokron.jax.blocks import (
    Arrays,
    BlockBatch,
    BlockSplit,
    LayerIndex,
    Settings,
    TreeLayout,
    chunk_rows,
    gather,
    matrix_splits,
    scatter,
    tree_layout,
)
from isokron.jax.linalg import across
from isokron.jax.moments import adam, first_moment, graft, graft_direction, heavy_ball, mixed
from isokron.jax.settings import first_refresh, in_dtype, is_zero, refresh_due
from isokron.jax.sharding import Placement, axis_size, mesh_of, placement_of

State = dict[str, jax.Array]  # what a method keeps of a batch; blocks first


class PreconditionedState(NamedTuple):
    """The state of every optimizer of this package.

    `count`: steps. `skipped`: of each layer, steps left out because its gradient was not finite;
    layers in the order of the leaves, one for a leaf that is not stacked. `failed`: refreshes that
    were not finite and left the operator as it was. `mu`, `nu`: Adam's moments of the leaves that
    the method does not step. `blocks`: by the name of a batch, the state of its blocks.
    """

    count: Any
    skipped: Any
    failed: Any
    mu: Any
    nu: Any
    blocks: Any


class Gradients(NamedTuple):
    """What one step shows of a batch of blocks."""

    grad: jax.Array  # [B, ...]
    moment: jax.Array  # the debiased first moment, or the gradient where none is kept. [B, ...]
    step: jax.Array  # how many gradients the block has had. [B]
    live: jax.Array  # whether the gradient is finite; else it is 0 here, and the state stays. [B]
    sizes: jax.Array  # of blocks without padding. [B, order]


def _nothing(shown: Gradients, state: State, count: jax.Array, settings: Settings) -> State:
    return {}


def _unchanged(blocks: Arrays, layers: LayerIndex, place: Placement, settings: Settings) -> Arrays:
    return blocks


class Method(NamedTuple):
    """What is particular to an optimizer. `count` is the step; state that `init` does not make, and
    another hook returns, lasts for one step.

    init(batch, dtype, settings) → state.
    direction(gradients, state, count, settings) → the direction, and the state it changed.
    observe(gradients, state, count, settings) → the state it changed.
    refresh(gradients, state, count, settings) → new operators.
    install(operators, state) → all state that they change, under the names in `operator`.
    splits(shape, settings) → how a layer is cut; nothing where Adam is to step it.
    prepare, finish(batches, layers, place, settings) → first moments, or directions, of all
    batches; for what concerns a layer as a whole.
    """

    init: Callable[[BlockBatch, Any, Settings], State]
    direction: Callable[[Gradients, State, jax.Array, Settings], tuple[jax.Array, State]]
    observe: Callable[[Gradients, State, jax.Array, Settings], State] = _nothing
    refresh: Callable[[Gradients, State, jax.Array, Settings], State] = _nothing
    install: Callable[[State, State], State] = lambda operators, state: operators
    splits: Callable[[tuple[int, ...], Settings], list[BlockSplit]] = matrix_splits
    prepare: Callable[[Arrays, LayerIndex, Placement, Settings], Arrays] = _unchanged
    finish: Callable[[Arrays, LayerIndex, Placement, Settings], Arrays] = _unchanged
    operator: tuple[str, ...] = ()  # names of the operators, up to a dot
    padded: bool = False  # whether blocks may be padded with zeros
    heavy_ball: bool = True  # whether `momentum` acts on the update; else it is the first moment
    keeps_moment: bool = False  # whether the method has a first moment of its own
    debias: bool = True  # whether the direction depends on the scale of the first moment
    squares: bool = True  # whether gradients are squared, and must not overflow then
    fallible: bool = True  # whether a refresh may be not finite, as a decomposition may


def scale_by_preconditioned(
    method: Method, settings: Settings
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a method; `settings` as isokron.jax.settings.settle returns them."""
    axis, size = settings["pipeline_axis_name"], settings["pipeline_axis_size"]

    def layout_of(tree: Any) -> TreeLayout:
        multiple = axis_size(mesh_of(jax.tree.leaves(tree)), axis, size)
        return tree_layout(tree, settings, method.splits, method.padded, multiple)

    def init(params: Any) -> PreconditionedState:
        leaves, structure = jax.tree.flatten(params)
        layout = layout_of(params)
        dtype = jnp.result_type(jnp.float32, *[leaf.dtype for leaf in leaves])
        blocks = {
            name: _first_state(method, batch, dtype, settings)
            for name, batch in layout.batches.items()
        }
        stepped = {number for group in layout.groups for number in group.leaves}
        zeros = [
            optax.MaskedNode() if i in stepped else jnp.zeros_like(leaf, dtype=dtype)
            for i, leaf in enumerate(leaves)
        ]
        mu, nu = (jax.tree.unflatten(structure, zeros) for _ in range(2))
        return PreconditionedState(
            count=_zero_on_devices_of(leaves),
            skipped=jnp.zeros(layout.layer_count, jnp.int32),
            failed=jnp.zeros((), jnp.int32),
            mu=mu,
            nu=nu,
            # without leaves, optax.tree.map_params needs a prefix of the structure with leaves
            blocks=Placement(mesh_of(leaves), axis).spread(blocks) if leaves else params,
        )

    # compiled, because outside of jit a lax.cond is compiled again at every call
    @partial(jax.jit, static_argnums=2)
    def step(updates: Any, state: PreconditionedState, place: Placement) -> Any:
        return _step(method, settings, layout_of(updates), place, updates, state)

    def update(
        updates: Any, state: PreconditionedState, params: Any = None, **extra: Any
    ) -> tuple[Any, PreconditionedState]:
        del params, extra
        if not jax.tree.leaves(updates):
            return updates, state._replace(count=optax.safe_increment(state.count))
        names = layout_of(updates).batches
        if set(names) != set(state.blocks):
            raise ValueError(
                f"the state has blocks {sorted(state.blocks)} and the gradients make "
                f"{sorted(names)}; init it with the same parameters and settings"
            )
        place = placement_of(updates, axis, size, settings["params_partition_specs"])
        return step(updates, state, place)

    return optax.GradientTransformationExtraArgs(init, update)


def _first_state(method: Method, batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    state = {}
    zeros = jnp.zeros((batch.rows, *batch.shape), dtype)
    keeps = not method.keeps_moment or settings["graft"]
    if keeps and not is_zero(_first_beta(method, settings)):
        state["momentum"] = zeros.astype(settings["state_dtype"] or dtype)
    if method.heavy_ball and not is_zero(settings["momentum"]):
        state["velocity"] = zeros
    if settings["graft"] not in (None, "sgd"):
        state["graft"] = zeros
    return {**state, **method.init(batch, dtype, settings)}


def _first_beta(method: Method, settings: Settings) -> Any:
    return settings["betas"][0] if method.heavy_ball else settings["momentum"]


def _zero_on_devices_of(leaves: list[Any]) -> jax.Array:
    """The first count. It uses a traced leaf, because jit drops the devices of unused arguments."""
    zero = jnp.zeros((), jnp.int32)
    for leaf in leaves[:1]:
        if isinstance(leaf, jax.core.Tracer):
            return jnp.where(False, jnp.sum(leaf).astype(jnp.int32), zero)
    return zero


def _working_dtype(state: PreconditionedState, grads: list[jax.Array]) -> Any:
    """float32, or float64 where the state is; statistics have a dtype of their own."""
    blocks = [x for batch in state.blocks.values() for key, x in batch.items() if key[:4] != "cov."]
    arrays = [*jax.tree.leaves(state.mu), *blocks] or grads
    return jnp.result_type(jnp.float32, *[array.dtype for array in arrays])


def _step(
    method: Method,
    settings: Settings,
    layout: TreeLayout,
    place: Placement,
    updates: Any,
    state: PreconditionedState,
) -> tuple[Any, PreconditionedState]:
    """The directions of all leaves, and the state after this step."""
    leaves, structure = jax.tree.flatten(updates)
    dtype = _working_dtype(state, leaves)
    settings = in_dtype(settings, dtype)
    count = optax.safe_increment(state.count)
    layers = LayerIndex(layout)

    grads = place.spread(gather(place.replicate(leaves), layout, dtype))
    stepped = {number for group in layout.groups for number in group.leaves}
    adam_grads = {i: leaf.astype(dtype) for i, leaf in enumerate(leaves) if i not in stepped}
    finite = _finite_layers(grads, adam_grads, layers, place, method.squares)
    skipped = state.skipped + ~finite
    # a layer whose gradients were left out has younger moments than the others
    steps = jnp.maximum(count - skipped, 1).astype(dtype)

    live, row_steps = place.spread((layers.rows(finite, False), layers.rows(steps, 1)))
    shown = {
        name: Gradients(
            grad=(zeroed := jnp.where(across(live[name], grad), grad, 0)),
            moment=zeroed,
            step=row_steps[name],
            live=live[name],
            sizes=place.spread(jnp.asarray(layout.batches[name].sizes, dtype)),
        )
        for name, grad in grads.items()
    }
    directions, blocks, failed = _step_blocks(method, settings, layers, place, count, shown, state)
    results = scatter(place.replicate(directions), layout)
    results_adam, mu, nu = _step_adam(adam_grads, finite, steps, layout, settings, state)
    results |= results_adam
    result = [
        place.home(results[i].reshape(leaf.shape).astype(leaf.dtype), i)
        for i, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, result), PreconditionedState(
        count, skipped, state.failed + failed, mu, nu, place.spread(blocks)
    )


def _step_blocks(
    method: Method,
    settings: Settings,
    layers: LayerIndex,
    place: Placement,
    count: jax.Array,
    shown: dict[str, Gradients],
    state: PreconditionedState,
) -> tuple[Arrays, dict[str, State], jax.Array]:
    """The directions of all batches, their state after this step, and how many refreshes failed."""
    blocks, directions, failed = {}, {}, jnp.int32(0)
    for name, gradients in shown.items():
        shown[name], blocks[name] = _with_moment(method, gradients, state.blocks[name], settings)
    moments = {name: gradients.moment for name, gradients in shown.items()}
    for name, moment in method.prepare(moments, layers, place, settings).items():
        shown[name] = shown[name]._replace(moment=moment)
    for name, gradients in shown.items():
        directions[name], blocks[name], failures = _batch_step(
            method, settings, count, gradients, blocks[name], chunked=place.axis is None
        )
        failed += jnp.sum(failures, dtype=jnp.int32)
    directions = method.finish(directions, layers, place, settings)
    for name, gradients in shown.items():
        directions[name], blocks[name] = _grafted(
            directions[name], gradients, blocks[name], count, settings
        )
    return directions, blocks, failed


def _step_adam(
    grads: dict[int, jax.Array],
    finite: jax.Array,
    steps: jax.Array,
    layout: TreeLayout,
    settings: Settings,
    state: PreconditionedState,
) -> tuple[dict[int, jax.Array], Any, Any]:
    """Adam's directions of the leaves that the method does not step, and their moments."""
    directions, mu, nu = {}, [], []
    moments = zip(jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), strict=True)
    for (number, grad), (old_mu, old_nu) in zip(grads.items(), moments, strict=True):
        of_leaf, lead = layout.layers[number], layout.leads[number]
        fine = across(finite[of_leaf].reshape(lead), grad)
        direction, new_mu, new_nu = adam(
            jnp.where(fine, grad, 0), old_mu, old_nu, steps[of_leaf].reshape(lead), settings
        )
        directions[number] = jnp.where(fine, direction, 0)
        mu.append(jnp.where(fine, new_mu, old_mu))
        nu.append(jnp.where(fine, new_nu, old_nu))
    structure = jax.tree.structure(state.mu)
    return directions, jax.tree.unflatten(structure, mu), jax.tree.unflatten(structure, nu)


def _finite_layers(
    grads: Arrays,
    adam_grads: dict[int, jax.Array],
    layers: LayerIndex,
    place: Placement,
    squares: bool,
) -> jax.Array:
    """Which layers have a gradient that is finite, and where it is squared, has finite squares."""

    def broken(x: jax.Array, lead: int = 1) -> jax.Array:
        axes = tuple(range(lead, x.ndim))
        size = jnp.sum(x * x, axis=axes) if squares else jnp.max(jnp.abs(x), axis=axes, initial=0)
        return (~jnp.isfinite(size)).astype(jnp.int32)

    count = layers.total(place.replicate({name: broken(x) for name, x in grads.items()}))
    for number, grad in adam_grads.items():
        of_leaf = place.replicate(broken(grad, len(layers.layout.leads[number])))
        count = count.at[layers.layout.layers[number]].set(of_leaf.reshape(-1))
    return count == 0


def _updated(state: State, changed: State, live: jax.Array) -> State:
    """The state with what has changed of live blocks, in the dtype it is stored in."""
    masked = {
        key: jnp.where(across(live, x), changed[key].astype(x.dtype), x)
        for key, x in state.items()
        if key in changed
    }
    return state | changed | masked


def _with_moment(
    method: Method, shown: Gradients, state: State, settings: Settings
) -> tuple[Gradients, State]:
    """Add the first moment as the method, or the grafted one, wants it."""
    if "momentum" not in state:
        return shown, state
    beta, stored = _first_beta(method, settings), state["momentum"].dtype
    old = state["momentum"].astype(shown.grad.dtype)
    mean = jnp.where(across(shown.live, old), mixed(old, shown.grad, beta), old)
    # from the masked mean, so that one pass reads the old one; before it is rounded for storage
    moment = first_moment(
        mean,
        shown.grad,
        beta,
        settings["nesterov"] and not method.heavy_ball,
        shown.step if method.debias or settings["graft"] else None,
    )
    return shown._replace(moment=moment), state | {"momentum": mean.astype(stored)}


def _batch_step(
    method: Method,
    settings: Settings,
    count: jax.Array,
    gradients: Gradients,
    state: State,
    chunked: bool,
) -> tuple[jax.Array, State, jax.Array]:
    """The directions of a batch, its new state, and which of its refreshes failed. [B]"""
    outside = {key: x for key, x in state.items() if key in ("momentum", "velocity", "graft")}

    def work(shown: Gradients, before: State) -> tuple[tuple[jax.Array, jax.Array], State]:
        # each change is masked where it is made: masked later, it would be computed twice
        after = _updated(before, method.observe(shown, before, count, settings), shown.live)
        after, failures = _refreshed(method, shown, after, count, settings)
        direction, changed = method.direction(shown, after, count, settings)
        after = _updated(after, changed, shown.live)
        direction = jnp.where(across(shown.live, direction), direction, 0)
        return (direction, failures), {key: after[key] for key in before}

    inside = {key: x for key, x in state.items() if key not in outside}
    (direction, failures), changed = (
        _in_chunks(work, gradients, inside) if chunked else work(gradients, inside)
    )
    return direction, outside | changed, failures


def _in_chunks(
    work: Callable[[Gradients, State], tuple[Any, State]], gradients: Gradients, state: State
) -> tuple[Any, State]:
    """work(gradients, state), as many blocks at a time as the cache holds; the state in place."""
    rows = len(gradients.live)
    entries = max(x[0].size for x in jax.tree.leaves((gradients, state)))
    size = chunk_rows(rows, entries)
    if size == rows:
        return work(gradients, state)

    def chunk(i: jax.Array, carry: tuple[Any, State]) -> tuple[Any, State]:
        # the last chunk begins early, among blocks that are done: they are left as they are
        start = jnp.minimum(i * size, rows - size)
        undone = start + jnp.arange(size) >= i * size

        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        shown, before = jax.tree.map(part, gradients), jax.tree.map(part, carry[1])
        outputs, after = work(shown._replace(live=shown.live & undone), before)
        outputs = jax.tree.map(
            lambda new, x: jnp.where(across(undone, new), new, part(x)), outputs, carry[0]
        )
        return jax.tree.map(
            lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, start, 0),
            carry,
            (outputs, after),
        )

    shapes, _ = jax.eval_shape(work, gradients, state)
    outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-rows // size), chunk, (outputs, state))


def _refreshed(
    method: Method, shown: Gradients, state: State, count: jax.Array, settings: Settings
) -> tuple[State, jax.Array]:
    """The state with new operators, if they are due, and which of them could not be made. [B]"""
    none = jnp.zeros(len(shown.grad), bool)
    operators = {key: x for key, x in state.items() if key.split(".")[0] in method.operator}
    if not operators:
        return state, none

    def renew() -> tuple[State, jax.Array]:
        fresh = method.refresh(shown, state, count, settings)
        if not method.fallible:
            return _updated(operators, method.install(fresh, state), shown.live), none
        finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in fresh.values()]
        fine = jnp.stack(finite).all(axis=0)
        # a block whose operators are not finite keeps those it has
        fresh = _updated({key: state[key] for key in fresh}, fresh, fine & shown.live)
        return _updated(operators, method.install(fresh, state), shown.live), ~fine & shown.live

    now = refresh_due(count, settings)
    changed, failures = (
        renew() if now is True else jax.lax.cond(now, renew, lambda: (operators, none))
    )
    return state | changed, failures


def _grafted(
    direction: jax.Array, shown: Gradients, state: State, count: jax.Array, settings: Settings
) -> tuple[jax.Array, State]:
    """The direction at the step length of the grafted method, then with a heavy ball."""
    if settings["graft"]:
        simple, second = graft_direction(
            shown.grad, shown.moment, state.get("graft"), shown.step, settings
        )
        # before the first refresh there is no operator, and the grafted method steps alone
        first = jnp.where(settings["warmup"] > 0, 1, first_refresh(settings))
        direction = jnp.where(count < first, simple, graft(direction, simple))
        if second is not None:
            state = _updated(state, {"graft": second}, shown.live)
    if "velocity" in state:
        direction, velocity = heavy_ball(state["velocity"], direction, settings)
        state = _updated(state, {"velocity": velocity}, shown.live)
        direction = jnp.where(across(shown.live, direction), direction, 0)
    return direction, state
