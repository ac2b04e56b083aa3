"""The transformation that Quad and Skew share: momentum, blocks, factors, clip."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from isokron import white_kron
from isokron.jax import checks, placement
from isokron.jax.blocks import gather, scatter
from isokron.jax.factors import Method
from isokron.jax.layers import Layers, clipped, known, normalized
from isokron.jax.learning import Probes
from isokron.jax.noise import probe_rows, step_key
from isokron.jax.placement import Placement
from isokron.jax.steps import Learning, step
from isokron.jax.whitening import first_sides


class WhiteKronState(NamedTuple):
    """`skipped`: [layers of all leaves], steps whose gradient was not finite and was left out.

    `factors`: by the shape of a block, as white_kron.bucket_name names it. Without parameters it is
    what they are, so that the structure is a prefix of the full one, as optax.tree.map_params asks.
    """

    count: Any
    skipped: Any
    mu: Any
    factors: Any


def scale_by_white_kron(
    method: Method,
    *,
    lr_style: str | None,
    b1: float,
    normalize_grads: bool,
    max_size_dense: int | None,
    preconditioner_lr: float,
    preconditioner_init_scale: float,
    dtype: Any,
    scanned_layers: Any,
    block_size: int | None,
    pipeline_axis_name: str | None,
    pipeline_axis_size: int | None,
    params_partition_specs: Any,
    noise_scale: float,
    damping: float,
    every: int,
    warmup: int,
    apply: str,
    key: Any,
    probes: Probes | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Momentum made white; the arguments are those of scale_by_quad. `probes`: n ↦ [k, n]."""
    checks.check_settings(locals())
    stored = checks.state_dtype(dtype)
    block = checks.whole_number("block_size", block_size, white_kron.BLOCK_SIZE)
    largest = checks.whole_number("max_size_dense", max_size_dense, white_kron.MAX_SIZE_DENSE)
    learning = Learning(
        method, every, warmup, apply, noise_scale, damping, together=pipeline_axis_name is None
    )
    divisor = white_kron.ADAM_DIVISOR if lr_style == "adam" else 1.0

    def plan_of(tree: Any) -> white_kron.Plan:
        checks.check_leaves(tree)
        scanned = checks.scanned_leaves(tree, scanned_layers)
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]
        return white_kron.plan(shapes, scanned, block, largest)

    def init(params: Any) -> WhiteKronState:
        leaves = jax.tree.leaves(params)
        plan = plan_of(params)
        # float32, or float64 where a parameter is
        work = jnp.result_type(jnp.float32, *[leaf.dtype for leaf in leaves])
        kept = work if stored is None else stored
        mesh = placement.mesh_of(leaves)
        size = placement.axis_size(mesh, pipeline_axis_name, pipeline_axis_size)
        factors = {}
        for name, bucket in plan.buckets.items():
            rows = -(-bucket.blocks // size) * size  # as many for each device
            factors[name] = first_sides(bucket, rows, preconditioner_init_scale, kept, work)
        return WhiteKronState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros(sum(leaf.layers for leaf in plan.leaves), jnp.int32),
            mu=jax.tree.map(lambda leaf: _zeros_like(leaf, kept), params),
            factors=Placement(mesh, pipeline_axis_name).spread(factors) if leaves else params,
        )

    def update(
        updates: Any, state: WhiteKronState, params: Any = None, **extra: Any
    ) -> tuple[Any, WhiteKronState]:
        del params, extra
        grads, structure = jax.tree.flatten(updates)
        count = optax.safe_increment(state.count)
        plan = plan_of(updates)
        if not plan.buckets:
            return updates, state._replace(count=count)
        checks.check_buckets(plan, state.factors)
        mesh = placement.mesh_of(grads)
        placement.axis_size(mesh, pipeline_axis_name, pipeline_axis_size)
        place = Placement(mesh, pipeline_axis_name)
        homes = _homes(updates, params_partition_specs)
        rows = {name: sides[0].lipschitz.shape[0] for name, sides in state.factors.items()}
        layers = Layers(plan, rows)
        work = jax.tree.leaves(state.factors)[-1].dtype  # that of L, which is never rounded

        old = [moment.astype(work) for moment in jax.tree.leaves(state.mu)]
        moved, matrices = [], []
        for leaf, grad, moment in zip(plan.leaves, grads, old, strict=True):
            moved.append(b1 * moment + (1 - b1) * grad.astype(work))
            matrices.append(place.whole(moved[-1]).reshape(leaf.layers, *leaf.shape))
        batches = place.spread(
            {name: gather(matrices, each, rows[name]) for name, each in plan.buckets.items()}
        )
        # a layer that was left out has a younger moment than the others
        finite, live, batches = known(
            batches,
            layers,
            place,
            lambda finite: 1 - jnp.asarray(b1, work) ** (count - state.skipped - ~finite),
        )
        if normalize_grads:
            batches = normalized(batches, layers, place)
        this_key = step_key(key, count)
        directions, factors = step(
            learning,
            batches,
            state.factors,
            live,
            count,
            white_kron.factor_rate(
                count.astype(work), preconditioner_lr, minimum=jnp.minimum, maximum=jnp.maximum
            ),
            probes or (lambda size: probe_rows(size, this_key, work)),
            this_key,
        )
        directions = place.whole(clipped(directions, layers, place, divisor))

        result, moments = [], []
        for i, (leaf, grad, moment) in enumerate(zip(plan.leaves, grads, old, strict=True)):
            joined = scatter(directions, leaf) if leaf.bands else grad
            result.append(place.home(joined.reshape(grad.shape).astype(grad.dtype), homes[i]))
            fine = finite[layers.of_leaf[i]]
            fine = fine.reshape(-1, *[1] * (moment.ndim - 1)) if leaf.layers > 1 else fine.all()
            moments.append(place.home(jnp.where(fine, moved[i], moment), homes[i]))
        stored_moments = [
            new.astype(like.dtype)
            for new, like in zip(moments, jax.tree.leaves(state.mu), strict=True)
        ]
        return jax.tree.unflatten(structure, result), WhiteKronState(
            count,
            state.skipped + ~finite,
            jax.tree.unflatten(structure, stored_moments),
            place.spread(factors),
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _zeros_like(leaf: Any, dtype: Any) -> jax.Array:
    zeros = jnp.zeros_like(leaf, dtype=dtype)
    if not isinstance(leaf, jax.core.Tracer):
        return zeros
    # jit drops an argument that nothing uses, and with the last of them the devices of its mesh
    return jnp.where(False, leaf.astype(dtype), zeros)


def _homes(updates: Any, specs: Any) -> list[PartitionSpec | None]:
    """How each leaf is laid out: as the specs say, or as its type does."""
    if specs is None:
        return [placement.spec_of(leaf) for leaf in jax.tree.leaves(updates)]
    given = checks.by_path("params_partition_specs", updates, specs)
    return [getattr(each, "spec", each) for each in given]
