"""Where arrays lie on a mesh: blocks on one axis, updates and Adam's moments like parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from isokron.jax.settings import values_by_path

AnyMesh = AbstractMesh | Mesh | None


def get_opt_state_partition_specs(
    params: Any,
    optimizer: Callable[..., optax.GradientTransformationExtraArgs] | None = None,
    **settings: Any,
) -> Any:
    """A tree of PartitionSpecs with the structure of optimizer(**settings).init(params).

    Blocks lie on `pipeline_axis_name`; Adam's moments lie like their parameter, as
    `params_partition_specs` says or else as the parameters do.

    Args:
        params: the parameters, or jax.ShapeDtypeStructs of them.
        optimizer: a constructor of this package, or one that wraps it; quad by default.
        **settings: what the optimizer will be constructed with.
    """
    # imported here, because both are built on this module
    from isokron.jax.quad_skew import quad
    from isokron.jax.transform import PreconditionedState

    specs = settings.get("params_partition_specs")
    specs = jax.tree.map(spec_of, params) if specs is None else specs
    blocks = PartitionSpec(settings.get("pipeline_axis_name"))
    state = jax.eval_shape((optimizer or quad)(**settings).init, params)

    def like_params(tree: Any) -> Any:
        flat = [spec or PartitionSpec() for spec in listed_specs(tree, specs)]
        return jax.tree.unflatten(jax.tree.structure(tree), flat)

    def of_node(node: Any) -> Any:
        if not isinstance(node, PreconditionedState):
            return PartitionSpec()
        return jax.tree.map(lambda _: PartitionSpec(), node)._replace(
            mu=like_params(node.mu),
            nu=like_params(node.nu),
            blocks=jax.tree.map(lambda _: blocks, node.blocks),
        )

    return jax.tree.map(of_node, state, is_leaf=lambda node: isinstance(node, PreconditionedState))


def listed_specs(tree: Any, specs: Any) -> list[PartitionSpec | None]:
    """The spec of each leaf, out of a tree of specs or of NamedShardings."""
    listed = values_by_path("params_partition_specs", tree, specs)
    return [getattr(spec, "spec", spec) for spec in listed]


def mesh_of(arrays: Iterable[Any]) -> AnyMesh:
    """The mesh that the arrays lie on, or else the one that jax.set_mesh set, or None."""
    for array in arrays:
        traced = isinstance(array, jax.core.Tracer)
        sharding = jax.typeof(array).sharding if traced else getattr(array, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def axis_size(mesh: AnyMesh, name: str | None, size: int | None) -> int:
    """The size of the mesh axis over which blocks are spread; 1 without one."""
    if name is None:
        return 1
    if mesh is not None and name not in mesh.axis_names:
        raise ValueError(
            f"pipeline_axis_name must be an axis of the mesh {tuple(mesh.axis_names)}, "
            f"got {name!r}; name one of them, or None to keep all blocks on every device"
        )
    if mesh is None and size is None:
        raise ValueError(
            f"pipeline_axis_size must be given with pipeline_axis_name={name!r} where there is no "
            "mesh; pass the size of the axis, or call under jax.set_mesh(mesh)"
        )
    if mesh is not None and size not in (None, mesh.shape[name]):
        raise ValueError(
            f"pipeline_axis_size must be {mesh.shape[name]}, the mesh's size of {name!r}, "
            f"got {size}; pass that, or None to take the mesh's"
        )
    return int(mesh.shape[name] if size is None and mesh is not None else size or 1)


class Placement(NamedTuple):
    """A mesh, the axis over which blocks are spread, its size, and the specs of the leaves."""

    mesh: AnyMesh
    axis: str | None
    size: int = 1
    homes: tuple[PartitionSpec | None, ...] = ()

    def spread(self, tree: Any) -> Any:
        """Spread arrays of blocks over the axis."""
        return tree if self.axis is None else self._placed(tree, PartitionSpec(self.axis))

    def replicate(self, tree: Any) -> Any:
        """Put arrays on every device."""
        # cutting sharded matrices would move them piece by piece
        alone = self.mesh is None and self.axis is None
        return tree if alone else self._placed(tree, PartitionSpec())

    def home(self, array: jax.Array, leaf: int) -> jax.Array:
        """Lay an array out like leaf number `leaf`, if that is known."""
        spec = self.homes[leaf]
        return array if spec is None else place(array, spec, self.mesh)

    def _placed(self, tree: Any, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda array: place(array, spec, self.mesh), tree)


def placement_of(tree: Any, settings: Mapping[str, Any]) -> Placement:
    """Where a tree of parameters or gradients lies, and where its blocks go."""
    leaves, specs = jax.tree.leaves(tree), settings["params_partition_specs"]
    mesh, axis = mesh_of(leaves), settings["pipeline_axis_name"]
    size = axis_size(mesh, axis, settings["pipeline_axis_size"])
    homes = map(spec_of, leaves) if specs is None else listed_specs(tree, specs)
    return Placement(mesh, axis, size, tuple(homes))


def place(array: jax.Array, spec: PartitionSpec, mesh: AnyMesh) -> jax.Array:
    """Lay an array out by a spec. Without a mesh, and inside shard_map, it stays where it is."""
    if mesh is None:
        try:  # a mesh set by `with mesh:` cannot be asked for, only used
            return jax.lax.with_sharding_constraint(array, spec)
        except RuntimeError:
            return array
    kinds = set(mesh.axis_types)
    if AxisType.Manual in kinds:
        return array
    if isinstance(mesh, Mesh) and not isinstance(array, jax.core.Tracer):
        return jax.device_put(array, NamedSharding(mesh, spec))
    if AxisType.Explicit in kinds:
        return jax.sharding.reshard(array, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))


def spec_of(leaf: Any) -> PartitionSpec | None:
    """How an array is laid out, where that is part of its type or known outside of jit."""
    sharding = getattr(leaf, "sharding", None)
    if isinstance(leaf, jax.core.Tracer):
        sharding = jax.typeof(leaf).sharding
        if AxisType.Explicit not in sharding.mesh.axis_types:
            return None  # the compiler's choice, not known yet
    return sharding.spec if isinstance(sharding, NamedSharding) else None
