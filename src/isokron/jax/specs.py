"""How the state of an optimizer is laid out on a mesh."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from isokron.jax import checks, placement
from isokron.jax.quad import quad
from isokron.jax.transform import WhiteKronState


def get_opt_state_partition_specs(
    params: Any,
    optimizer: Callable[..., optax.GradientTransformationExtraArgs] = quad,
    **settings: Any,
) -> Any:
    """A tree of PartitionSpecs of the structure of optimizer(**settings).init(params).

    `optimizer`: quad, skew, scale_by_quad, scale_by_skew, or anything that wraps one of them.
    Momentum lies like its parameter: as params_partition_specs says, or else as the parameters do.
    Blocks lie on pipeline_axis_name. `params` may be abstract.
    """
    given = settings.get("params_partition_specs")
    axis = settings.get("pipeline_axis_name")
    state = jax.eval_shape(optimizer(**settings).init, params)
    leaves = dict(jax.tree.leaves_with_path(params))

    def like_params(tree: Any) -> Any:
        if given is not None:
            found = checks.by_path("params_partition_specs", tree, given)
            specs = [getattr(each, "spec", each) or PartitionSpec() for each in found]
        else:
            paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
            specs = [placement.spec_of(leaves[path]) or PartitionSpec() for path in paths]
        return jax.tree.unflatten(jax.tree.structure(tree), specs)

    def of_node(node: Any) -> Any:
        if not isinstance(node, WhiteKronState):
            return PartitionSpec()
        return WhiteKronState(
            count=PartitionSpec(),
            skipped=PartitionSpec(),
            mu=like_params(node.mu),
            factors=jax.tree.map(lambda _: PartitionSpec(axis), node.factors),
        )

    return jax.tree.map(of_node, state, is_leaf=lambda node: isinstance(node, WhiteKronState))
