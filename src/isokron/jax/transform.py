"""The transformation that Quad and Skew share: momentum, blocks, factors, clip."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from isokron import white_kron
from isokron.jax import checks, placement
from isokron.jax.blocks import gather, rows_of, scatter
from isokron.jax.factors import Method
from isokron.jax.moments import clipped, first_moment, normalized
from isokron.jax.noise import probe_rows, step_key
from isokron.jax.steps import Learning, step
from isokron.jax.whitening import Probes, first_sides


class WhiteKronState(NamedTuple):
    """`skipped`: [leaves], the steps in which a leaf's gradient was not finite and was left out.

    `factors`: by the shape of a block, as white_kron.bucket_name names it. Without parameters it is
    what they are, so that the structure is a prefix of the full one, as optax.tree.map_params asks.
    """

    count: jax.Array
    skipped: jax.Array
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
    learning = Learning(method, every, warmup, apply, noise_scale, damping)
    divisor = white_kron.ADAM_DIVISOR if lr_style == "adam" else 1.0

    def plan_of(tree: Any) -> white_kron.Plan:
        checks.check_leaves(tree)
        scanned = checks.by_path("scanned_layers", tree, scanned_layers or False)
        shapes = [tuple(leaf.shape) for leaf in jax.tree.leaves(tree)]
        return white_kron.plan(shapes, scanned, block, largest)

    def spread(tree: Any, mesh: Any) -> Any:
        if pipeline_axis_name is None:
            return tree
        spec = PartitionSpec(pipeline_axis_name)
        return jax.tree.map(lambda each: placement.place(each, spec, mesh), tree)

    def whole(array: jax.Array, mesh: Any) -> jax.Array:
        """On every device, because cutting a sharded matrix into blocks would move it piecemeal."""
        if pipeline_axis_name is None and mesh is None:
            return array
        return placement.place(array, PartitionSpec(), mesh)

    def init(params: Any) -> WhiteKronState:
        leaves = jax.tree.leaves(params)
        # float32, or float64 where a parameter is
        work = jnp.result_type(jnp.float32, *[leaf.dtype for leaf in leaves])
        kept = work if stored is None else stored
        mesh = placement.mesh_of(leaves)
        size = placement.axis_size(mesh, pipeline_axis_name, pipeline_axis_size)
        factors = {}
        for name, bucket in plan_of(params).buckets.items():
            rows = -(-bucket.count // size) * size  # as many for each device
            sides = first_sides(bucket, rows, preconditioner_init_scale, kept, work)
            factors[name] = spread(sides, mesh)
        return WhiteKronState(
            count=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros(len(leaves), jnp.int32),
            mu=jax.tree.map(lambda leaf: jnp.zeros_like(leaf, dtype=kept), params),
            factors=factors if leaves else params,
        )

    def update(
        updates: Any, state: WhiteKronState, params: Any = None, **extra: Any
    ) -> tuple[Any, WhiteKronState]:
        del params, extra
        grads, structure = jax.tree.flatten(updates)
        count = optax.safe_increment(state.count)
        if not grads:
            return updates, state._replace(count=count)
        plan = plan_of(updates)
        checks.check_buckets(plan, state.factors)
        mesh = placement.mesh_of(grads)
        placement.axis_size(mesh, pipeline_axis_name, pipeline_axis_size)
        homes = _homes(updates, params_partition_specs)
        work = jax.tree.leaves(state.factors)[-1].dtype  # that of L, which is never rounded

        finite = jnp.stack([jnp.all(jnp.isfinite(grad)) for grad in grads])
        skipped = state.skipped + ~finite
        bias = 1 - jnp.asarray(b1, work) ** jnp.maximum(count - skipped, 1)
        moments, matrices = [], []
        for i, (leaf, moment) in enumerate(
            zip(plan.leaves, jax.tree.leaves(state.mu), strict=True)
        ):
            grad = grads[i].astype(work)
            if normalize_grads:
                grad = normalized(grad, leaf.layers)
            moments.append(first_moment(grad, moment.astype(work), b1, finite[i]))
            corrected = whole(moments[i] / bias[i], mesh)
            matrices.append(corrected.reshape(leaf.layers, *leaf.shape))

        batches, live = {}, {}
        for name, bucket in plan.buckets.items():
            rows = state.factors[name][0].lipschitz.shape[0]
            batches[name] = spread(gather(matrices, bucket, rows), mesh)
            live[name] = spread(rows_of(finite, bucket, rows), mesh)
        rate = white_kron.factor_rate(
            count.astype(work), preconditioner_lr, jnp.minimum, jnp.maximum
        )
        this_key = step_key(key, count)
        directions, factors = step(
            learning,
            batches,
            state.factors,
            live,
            count,
            rate,
            probes or (lambda size: probe_rows(size, this_key, work)),
            this_key,
        )
        directions = {name: whole(each, mesh) for name, each in directions.items()}

        result = []
        for i, (leaf, grad) in enumerate(zip(plan.leaves, grads, strict=True)):
            if not leaf.bands:
                result.append(grad)  # it has no entries
                continue
            joined = clipped(scatter(directions, leaf), leaf.layers) / divisor
            joined = jnp.where(finite[i], joined, 0).astype(grad.dtype).reshape(grad.shape)
            result.append(_at_home(joined, homes[i], mesh))
            moments[i] = _at_home(moments[i], homes[i], mesh)
        mu = jax.tree.map(lambda new, old: new.astype(old.dtype), moments, jax.tree.leaves(state.mu))
        return jax.tree.unflatten(structure, result), WhiteKronState(
            count, skipped, jax.tree.unflatten(structure, mu), spread(factors, mesh)
        )

    return optax.GradientTransformationExtraArgs(init, update)


def _homes(updates: Any, specs: Any) -> list[PartitionSpec | None]:
    """How each leaf is laid out: as the specs say, or as its type does."""
    if specs is None:
        return [placement.spec_of(leaf) for leaf in jax.tree.leaves(updates)]
    given = checks.by_path("params_partition_specs", updates, specs)
    return [getattr(each, "spec", each) for each in given]


def _at_home(array: jax.Array, spec: PartitionSpec | None, mesh: Any) -> jax.Array:
    return array if spec is None else placement.place(array, spec, mesh)
