"""Where arrays live on a mesh: momentum like its parameter, blocks spread over one axis."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AnyMesh = AbstractMesh | Mesh | None


def mesh_of(arrays: Iterable[Any]) -> AnyMesh:
    """The mesh that the arrays lie on, or else the one that jax.set_mesh set, or none."""
    for each in arrays:
        traced = isinstance(each, jax.core.Tracer)
        sharding = jax.typeof(each).sharding if traced else getattr(each, "sharding", None)
        mesh = getattr(sharding, "mesh", None)
        if mesh is not None and not mesh.empty:
            return mesh
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def axis_size(mesh: AnyMesh, name: str | None, size: int | None) -> int:
    """The size of the axis that blocks are spread over: as given, or else the mesh's."""
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
    """A mesh, or None, and the axis over which blocks are spread, or None."""

    mesh: AnyMesh
    axis: str | None

    def spread(self, tree: Any) -> Any:
        """Blocks, spread over the axis."""
        return tree if self.axis is None else self._placed(tree, PartitionSpec(self.axis))

    def whole(self, tree: Any) -> Any:
        """On every device: cutting and joining sharded matrices would move them piecemeal."""
        alone = self.mesh is None and self.axis is None
        return tree if alone else self._placed(tree, PartitionSpec())

    def home(self, array: jax.Array, spec: PartitionSpec | None) -> jax.Array:
        """Like its parameter, if that is known."""
        return array if spec is None else place(array, spec, self.mesh)

    def _placed(self, tree: Any, spec: PartitionSpec) -> Any:
        return jax.tree.map(lambda each: place(each, spec, self.mesh), tree)


def place(array: jax.Array, spec: PartitionSpec, mesh: AnyMesh) -> jax.Array:
    """The array, laid out so. Without a mesh, and inside shard_map, it stays where it is."""
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
