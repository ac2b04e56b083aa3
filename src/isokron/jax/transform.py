"""The optax transformation that all optimizers share; a Method holds what differs between them.

Gradients are gathered into batches of blocks, [B, ...]. Each step folds them into statistics
(`observe`), computes new operators from the statistics when a refresh is due (`refresh`), and
applies the operators (`direction`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from isokron.jax import blocks
from isokron.jax.blocks import Arrays, BlockBatch, Settings, Splitter, TreeLayout
from isokron.jax.linalg import across, spectral_direction
from isokron.jax.moments import adam, beta3_ratio, blend, debiased, graft, mixed
from isokron.jax.settings import first_refresh, in_dtype, is_zero, refresh_due
from isokron.jax.sharding import Placement, placement_of
from isokron.jax.stacks import warn_of_stacks

State = dict[str, jax.Array]  # what a method keeps of a batch; blocks first


class PreconditionedState(NamedTuple):
    """The state of every optimizer of this package."""

    count: Any  # steps
    skipped: Any  # of each layer, in the order of the leaves: steps without a finite gradient
    failed: Any  # refreshes that were not finite and left the operator as it was
    mu: Any  # Adam's moments, of the leaves that the method does not step
    nu: Any
    blocks: Any  # by the name of a batch, the state of its blocks


class Gradients(NamedTuple):
    """The gradients of one step, for a batch of blocks."""

    grad: jax.Array  # [B, ...]
    moment: jax.Array  # the debiased first moment, or the gradient where none is kept. [B, ...]
    step: jax.Array  # how many gradients the block has had. [B]
    live: jax.Array  # whether the gradient is finite; else it is 0 here, and the state stays. [B]
    sizes: jax.Array  # of blocks without padding. [B, order]


class Method(NamedTuple):
    """The hooks and flags of one optimizer.

    In hooks settings["count"] is the number of the step. State that a hook returns under a name
    that `init` does not use lasts for one step.

    init(batch, dtype, settings) → state.
    direction(gradients, state, settings) → the direction, and the state it changed.
    observe(gradients, state, settings) → the state it changed.
    refresh(gradients, state, settings) → new operators.
    install(operators, state, settings) → all state that they change, under the names in `operator`.
    splits(shape, settings) → how a layer is cut into blocks; empty to leave it to Adam.
    prepare, finish(batches, layout, settings) → first moments, or directions, of all batches; for
    operations on whole layers, such as a norm.
    """

    init: Callable[[BlockBatch, Any, Settings], State]
    direction: Callable[[Gradients, State, Settings], tuple[jax.Array, State]]
    observe: Callable[[Gradients, State, Settings], State] = lambda grads, state, settings: {}
    refresh: Callable[[Gradients, State, Settings], State] = lambda grads, state, settings: {}
    install: Callable[[State, State, Settings], State] = lambda operators, *_: operators
    splits: Splitter = blocks.matrix_splits
    prepare: Callable[[Arrays, TreeLayout, Settings], Arrays] = lambda moments, *_: moments
    finish: Callable[[Arrays, TreeLayout, Settings], Arrays] = lambda directions, *_: directions
    operator: tuple[str, ...] = ()  # names of the operators, up to a dot
    padded: bool = False  # whether blocks may be padded with zeros
    heavy_ball: bool = True  # whether `momentum` acts on the update; else it is the first moment
    keeps_moment: bool = False  # whether the method has a first moment of its own
    squares: bool = True  # whether gradients are squared, and must not overflow then
    fallible: bool = True  # whether a refresh may be not finite, as a decomposition may


def scale_by_preconditioned(
    method: Method, settings: Settings
) -> optax.GradientTransformationExtraArgs:
    """The transformation of a method; `settings` as isokron.jax.settings.settle returns them."""

    def layout_of(tree: Any, place: Placement) -> TreeLayout:
        return blocks.tree_layout(tree, settings, method.splits, method.padded, place)

    def init(params: Any) -> PreconditionedState:
        leaves, structure = jax.tree.flatten(params)
        layout = layout_of(params, placement_of(params, settings))
        warn_of_stacks(settings["optimizer"], params, settings["stacked"])
        dtype = jnp.result_type(jnp.float32, *[leaf.dtype for leaf in leaves])
        state = {
            name: _first_state(method, batch, dtype, settings)
            for name, batch in layout.batches.items()
        }
        zeros = [
            optax.MaskedNode() if i in layout.stepped else jnp.zeros_like(leaf, dtype=dtype)
            for i, leaf in enumerate(leaves)
        ]
        mu, nu = (jax.tree.unflatten(structure, zeros) for _ in range(2))
        skipped, failed = jnp.zeros(layout.layer_count, jnp.int32), jnp.zeros((), jnp.int32)
        # without leaves, optax.tree.map_params needs a prefix of the structure with leaves
        batches = layout.place.spread(state) if leaves else params
        return PreconditionedState(_zero_on_devices_of(leaves), skipped, failed, mu, nu, batches)

    # compiled, because outside of jit a lax.cond is compiled again at every call; `place` is an
    # argument, because the layout of concrete arrays is not known to their tracers
    @partial(jax.jit, static_argnums=2)
    def step(updates: Any, state: PreconditionedState, place: Placement) -> Any:
        return _step(method, settings, layout_of(updates, place), updates, state)

    def update(
        updates: Any, state: PreconditionedState, params: Any = None, **extra: Any
    ) -> tuple[Any, PreconditionedState]:
        del params, extra
        if not jax.tree.leaves(updates):
            return updates, state._replace(count=optax.safe_increment(state.count))
        layout = layout_of(updates, placement_of(updates, settings))
        if set(layout.batches) != set(state.blocks):
            raise ValueError(
                f"the state has blocks {sorted(state.blocks)} and the gradients make "
                f"{sorted(layout.batches)}; init it with the same parameters and settings"
            )
        return step(updates, state, layout.place)

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
    """The first count."""
    zero = jnp.zeros((), jnp.int32)
    if leaves and isinstance(leaves[0], jax.core.Tracer):
        # jit drops the devices of arguments that are not used
        return jnp.where(False, jnp.sum(leaves[0]).astype(jnp.int32), zero)
    return zero


def _working_dtype(state: PreconditionedState, grads: list[jax.Array]) -> Any:
    """float32, or float64 where the state is; statistics have a dtype of their own."""
    items = [item for batch in state.blocks.values() for item in batch.items()]
    arrays = [x for key, x in items if not key.startswith("cov.")]
    arrays = [*jax.tree.leaves(state.mu), *arrays] or grads
    return jnp.result_type(jnp.float32, *[array.dtype for array in arrays])


def _step(
    method: Method, settings: Settings, layout: TreeLayout, updates: Any, state: PreconditionedState
) -> tuple[Any, PreconditionedState]:
    """The directions of all leaves, and the state after this step."""
    leaves, structure = jax.tree.flatten(updates)
    place, dtype = layout.place, _working_dtype(state, leaves)
    count = optax.safe_increment(state.count)
    settings = {**in_dtype(settings, dtype), "count": count}

    # the transpose of gather puts directions where their gradients were, in the leaves' dtypes
    gather = partial(blocks.gather, layout=layout, dtype=dtype)
    grads, scatter = jax.vjp(gather, place.replicate(leaves))
    grads = place.spread(grads)
    adam_grads = {i: g.astype(dtype) for i, g in enumerate(leaves) if i not in layout.stepped}
    squares = method.squares or settings["graft"] not in (None, "sgd")
    finite = _finite_layers(grads, adam_grads, layout, squares)
    skipped = state.skipped + ~finite
    # bias corrections do not count steps without a finite gradient
    steps = jnp.maximum(count - skipped, 1).astype(dtype)

    live, row_steps = place.spread((layout.rows(finite, False), layout.rows(steps, 1)))
    gradients = {}
    for name, batch in layout.batches.items():
        grad = jnp.where(across(live[name], grads[name]), grads[name], 0)
        sizes = place.spread(jnp.asarray(batch.sizes, dtype))
        gradients[name] = Gradients(grad, grad, row_steps[name], live[name], sizes)
    directions, batches, failed = _step_blocks(method, settings, layout, gradients, state.blocks)
    (results,) = scatter(place.replicate(directions))

    mu, nu = jax.tree.leaves(state.mu), jax.tree.leaves(state.nu)
    for row, (i, grad) in enumerate(adam_grads.items()):
        step, fine = (x[layout.layers[i]].reshape(layout.leads[i]) for x in (steps, finite))
        direction, mu[row], nu[row] = adam(grad, mu[row], nu[row], step, fine, settings)
        results[i] = direction.astype(leaves[i].dtype)
    results = [place.home(result, i) for i, result in enumerate(results)]
    mu, nu = (jax.tree.unflatten(jax.tree.structure(state.mu), moments) for moments in (mu, nu))
    return jax.tree.unflatten(structure, results), PreconditionedState(
        count, skipped, state.failed + failed, mu, nu, place.spread(batches)
    )


def _step_blocks(
    method: Method,
    settings: Settings,
    layout: TreeLayout,
    gradients: dict[str, Gradients],
    before: dict[str, State],
) -> tuple[Arrays, dict[str, State], jax.Array]:
    """The directions of all batches, their state after this step, and how many refreshes failed."""
    states, directions, failed = {}, {}, jnp.int32(0)
    for name, grads in gradients.items():
        gradients[name], states[name] = _with_moment(method, grads, before[name], settings)
    moments = {name: grads.moment for name, grads in gradients.items()}
    for name, moment in method.prepare(moments, layout, settings).items():
        gradients[name] = gradients[name]._replace(moment=moment)
        directions[name], states[name], failures = _batch_step(
            method, settings, gradients[name], states[name], chunked=layout.place.axis is None
        )
        failed += jnp.sum(failures, dtype=jnp.int32)
    for name, direction in method.finish(directions, layout, settings).items():
        grads = gradients[name]
        directions[name], states[name] = _grafted(direction, grads, states[name], settings)
    return directions, states, failed


def _finite_layers(
    grads: Arrays, adam_grads: dict[int, jax.Array], layout: TreeLayout, squares: bool
) -> jax.Array:
    """Whether the gradient is finite, and its squares, which Adam and some methods use. [layers]"""

    def broken(x: jax.Array, squares: bool, lead: int = 1) -> jax.Array:
        axes = tuple(range(lead, x.ndim))
        size = jnp.sum(x * x, axis=axes) if squares else jnp.max(jnp.abs(x), axis=axes, initial=0)
        return (~jnp.isfinite(size)).astype(jnp.int32)

    replicate = layout.place.replicate
    of_blocks = {name: broken(x, squares) for name, x in grads.items()}
    count = layout.reduced(replicate(of_blocks), "add")
    for number, grad in adam_grads.items():
        of_leaf = replicate(broken(grad, True, len(layout.leads[number])))
        count = count.at[layout.layers[number]].set(of_leaf.reshape(-1))
    return count == 0


def _updated(state: State, changed: State, live: jax.Array) -> State:
    """The state with the changes of live blocks, each in the dtype it is stored in."""
    masked = {
        key: jnp.where(across(live, x), changed[key].astype(x.dtype), x)
        for key, x in state.items()
        if key in changed
    }
    return state | changed | masked


def _with_moment(
    method: Method, grads: Gradients, state: State, settings: Settings
) -> tuple[Gradients, State]:
    """Update the first moment and add it to the gradients."""
    if "momentum" not in state:
        return grads, state
    beta, stored = _first_beta(method, settings), state["momentum"].dtype
    old = state["momentum"].astype(grads.grad.dtype)
    mean = jnp.where(across(grads.live, old), mixed(old, grads.grad, beta), old)
    ratio = beta if settings["nesterov"] else 1
    ratio = beta3_ratio(settings) if method.heavy_ball else ratio
    # computed from the masked mean, so that one pass reads the old one, and before it is rounded
    moment = blend(mean, grads.grad, beta, ratio, grads.step)
    return grads._replace(moment=moment), state | {"momentum": mean.astype(stored)}


def _batch_step(
    method: Method, settings: Settings, gradients: Gradients, state: State, chunked: bool
) -> tuple[jax.Array, State, jax.Array]:
    """The directions of a batch, its new state, and which of its refreshes failed. [B]"""
    outside = {key: x for key, x in state.items() if key in ("momentum", "velocity", "graft")}

    def work(grads: Gradients, before: State) -> tuple[tuple[jax.Array, jax.Array], State]:
        # each change is masked where it is made: masked later, it would be computed twice
        after = _updated(before, method.observe(grads, before, settings), grads.live)
        after, failures = _refreshed(method, grads, after, settings)
        direction, changed = method.direction(grads, after, settings)
        if settings["polar"]:
            direction = spectral_direction(direction)
        after = _updated(after, changed, grads.live)
        direction = jnp.where(across(grads.live, direction), direction, 0)
        return (direction, failures), {key: after[key] for key in before}

    inside = {key: x for key, x in state.items() if key not in outside}
    run = partial(_in_chunks, work) if chunked else work
    (direction, failures), changed = run(gradients, inside)
    return direction, outside | changed, failures


def _in_chunks(
    work: Callable[[Gradients, State], tuple[Any, State]], gradients: Gradients, state: State
) -> tuple[Any, State]:
    """work(gradients, state), as many blocks at a time as the cache holds; the state in place."""
    rows = len(gradients.live)
    entries = max(x[0].size for x in jax.tree.leaves((gradients, state)))
    size = blocks.chunk_rows(rows, entries)
    if size == rows:
        return work(gradients, state)

    def chunk(i: jax.Array, carry: tuple[Any, State]) -> tuple[Any, State]:
        # the last chunk begins early, among blocks that are done: they are left as they are
        start = jnp.minimum(i * size, rows - size)
        undone = start + jnp.arange(size) >= i * size

        def part(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        grads, before = jax.tree.map(part, gradients), jax.tree.map(part, carry[1])
        outputs, after = work(grads._replace(live=grads.live & undone), before)
        before_outputs = jax.tree.map(part, carry[0])
        outputs = jax.tree.map(
            lambda x, new: jnp.where(across(undone, new), new, x), before_outputs, outputs
        )
        write = partial(jax.lax.dynamic_update_slice_in_dim, start_index=start, axis=0)
        return jax.tree.map(write, carry, (outputs, after))

    shapes, _ = jax.eval_shape(work, gradients, state)
    outputs = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.lax.fori_loop(0, -(-rows // size), chunk, (outputs, state))


def _refreshed(
    method: Method, grads: Gradients, state: State, settings: Settings
) -> tuple[State, jax.Array]:
    """The state with new operators, if they are due, and which of them could not be made. [B]"""
    none = jnp.zeros(len(grads.grad), bool)
    operators = {key: x for key, x in state.items() if key.split(".")[0] in method.operator}
    if not operators:
        return state, none

    def renew() -> tuple[State, jax.Array]:
        fresh, failures = method.refresh(grads, state, settings), none
        if method.fallible:
            finite = [jnp.isfinite(x).all(axis=tuple(range(1, x.ndim))) for x in fresh.values()]
            failures = ~jnp.stack(finite).all(axis=0) & grads.live
            # a block whose operators are not finite keeps those it has
            fresh = _updated({key: state[key] for key in fresh}, fresh, ~failures & grads.live)
        return _updated(operators, method.install(fresh, state, settings), grads.live), failures

    now = refresh_due(settings)
    if now is True:
        changed, failures = renew()
    else:
        changed, failures = jax.lax.cond(now, renew, lambda: (operators, none))
    return state | changed, failures


def _grafted(
    direction: jax.Array, grads: Gradients, state: State, settings: Settings
) -> tuple[jax.Array, State]:
    """The direction at the step length of the grafted method, then with a heavy ball."""
    simple = grads.moment  # of "sgd"
    if "graft" in state:
        beta, square = settings["betas"][1], jnp.square(grads.grad)
        sums = settings["graft"] == "adagrad"
        second = state["graft"] + square if sums else mixed(state["graft"], square, beta)
        variance = debiased(second, beta, grads.step) if settings["graft"] == "adam" else second
        simple = simple / (jnp.sqrt(variance) + settings["eps"])
        state = _updated(state, {"graft": second}, grads.live)
    if settings["graft"]:
        # before the first refresh there is no operator, and the grafted method steps alone
        first = jnp.where(settings["warmup"] > 0, 1, first_refresh(settings))
        direction = jnp.where(settings["count"] < first, simple, graft(direction, simple))
    if "velocity" in state:
        rate = settings["momentum"]  # B ← μB + (1−δ)P; B or, with Nesterov, (1−δ)P + μB
        direction = (1 - settings["dampening"]) * direction
        velocity = rate * state["velocity"] + direction
        direction = direction + rate * velocity if settings["nesterov"] else velocity
        state = _updated(state, {"velocity": velocity}, grads.live)
        direction = jnp.where(across(grads.live, direction), direction, 0)
    return direction, state
