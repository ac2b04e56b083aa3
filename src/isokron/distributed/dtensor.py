"""Where the elements of a parameter are, and tensors of which a rank has only a part."""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from isokron.distributed.process_group import Ranks


@dataclass(frozen=True)
class ShardGrid:
    """The shards of a parameter, a grid of boxes.

    Args:
        cuts: (dimension, bounds) of every sharded dimension: chunk i is bounds[i] to bounds[i+1].
        ranks: the rank that has a shard, by the number of its chunk along each of them.
    """

    cuts: tuple[tuple[int, tuple[int, ...]], ...]
    ranks: Mapping[tuple[int, ...], int]


@dataclass(frozen=True)
class Place:
    """The ranks that have a parameter: all of it each (`shards` None), or one shard each."""

    ranks: Ranks
    shards: ShardGrid | None = None


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor. One exists only if its module was imported."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flat_shard(param: Tensor) -> bool:
    """Whether FSDP1 (FullyShardedDataParallel) has flattened it, also with use_orig_params=True."""
    module = sys.modules.get("torch.distributed.fsdp._common_utils")
    return module is not None and module._is_fsdp_flattened(param)


def mesh_of(tensor: Tensor) -> tuple[Any, Any]:
    """The mesh and the placements of a DTensor."""
    return tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]


def sharded_mesh_dims(param: Tensor) -> tuple[int, ...]:
    """The mesh dimensions along which a DTensor is sharded; along the others it is replicated.

    Raises a ValueError for placements that no optimizer here can step.
    """
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    mesh, placements = mesh_of(param)
    dims = tuple(i for i, placement in enumerate(placements) if not placement.is_replicate())
    sizes = tuple(mesh.size(i) for i in dims)
    try:
        if not all(type(placements[i]) in (Shard, _StridedShard) for i in dims):
            raise ValueError("placements must be Shard or Replicate; redistribute the parameter")
        if len(dims) > 1 and mesh.mesh_dim_names is None and prod(sizes) < dist.get_world_size():
            raise ValueError(
                "a mesh with several sharded and other dimensions must have names; pass "
                "mesh_dim_names to init_device_mesh"
            )
        shard_grid(tuple(param.shape), sizes, tuple(placements[i] for i in dims))
    except ValueError as error:
        raise ValueError(
            f"a DTensor of shape {tuple(param.shape)} is placed as {placements} on a mesh of "
            f"{tuple(mesh.shape)}; {error}"
        ) from None
    return dims


@lru_cache(maxsize=256)
def shard_grid(
    shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple[Any, ...]
) -> ShardGrid:
    """The shards of a tensor that is sharded along all dimensions of a mesh of `sizes`.

    Ranks are positions in the mesh, in row-major order.
    """
    dims = sorted({placement.dim for placement in placements})
    positions = list(product(*map(range, sizes)))
    cuts, keys = [], []
    for dim in dims:
        on = [i for i, placement in enumerate(placements) if placement.dim == dim]
        spans = _spans(shape[dim], [sizes[i] for i in on], [placements[i] for i in on])
        starts = sorted({span.start for span in spans.values() if span})
        numbers = {start: number for number, start in enumerate(starts)}
        cuts.append((dim, (*starts, shape[dim])))
        of_ranks = [spans[tuple(position[i] for i in on)] for position in positions]
        keys.append([numbers[span.start] if span else -1 for span in of_ranks])
    ranks = {key: rank for rank, key in enumerate(zip(*keys, strict=True)) if min(key) >= 0}
    return ShardGrid(tuple(cuts), ranks)


def _spans(
    size: int, counts: Sequence[int], placements: Sequence[Any]
) -> dict[tuple[int, ...], range]:
    """The range of a dimension at each position of a mesh, along all of which it is sharded.

    FSDP2 is first in the mesh but chunks what tensor parallelism has chunked before. torch reads
    its placement, _StridedShard, from left to right, which means other elements in some cases.
    """
    strided = [i for i, p in enumerate(placements) if hasattr(p, "split_factor")]
    order = sorted(range(len(counts)), key=lambda i: i in strided)
    positions = list(product(*map(range, counts)))
    spans = {at: _chunk(range(size), [(counts[i], at[i]) for i in order]) for at in positions}
    if not strided:
        return spans
    inner = prod(counts[1:])
    if strided != [0] or placements[0].split_factor != inner:
        raise ValueError(
            f"_StridedShard must be the first of the placements that shard dimension "
            f"{placements[0].dim}, with as many parts as the others make of it, {inner}, as FSDP2 "
            "makes it; redistribute the parameter"
        )
    lengths = Counter[int]()
    for at, span in spans.items():
        lengths[at[0]] += len(span)
    for at, span in spans.items():
        read = _chunk(range(lengths[at[0]]), zip(counts[1:], at[1:], strict=True))
        if len(read) != len(span):
            raise ValueError(
                f"dimension {placements[0].dim} has {size} elements and must be a multiple of its "
                f"{inner} tensor-parallel shards under FSDP2; pad the layer, or leave it out of "
                "the tensor-parallel plan"
            )
    return spans


def _chunk(span: range, chunks: Iterable[tuple[int, int]]) -> range:
    """Nested chunks, as torch.chunk makes them: for each (count, number), that one of so many."""
    for count, number in chunks:
        length = -(-len(span) // count)
        span = span[number * length : (number + 1) * length]
    return span


def shards_on(members: Sequence[int], param: Tensor, dims: Sequence[int]) -> ShardGrid:
    """The shards of one copy of a DTensor, which these global ranks have; ranks are their places
    in `members`."""
    mesh, placements = mesh_of(param)
    at = [slice(None) if i in dims else k for i, k in enumerate(mesh.get_coordinate())]
    positions = [members.index(rank) for rank in mesh.mesh[tuple(at)].flatten().tolist()]
    sizes = tuple(mesh.size(i) for i in dims)
    grid = shard_grid(tuple(param.shape), sizes, tuple(placements[i] for i in dims))
    return ShardGrid(grid.cuts, {key: positions[rank] for key, rank in grid.ranks.items()})


def shard_group(mesh: Any, dims: Sequence[int]) -> Any:
    """The process group of the ranks among which tensors are sharded along these mesh dimensions.

    torch makes it for several dimensions, in a collective call, and keeps it with the mesh.
    """
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if mesh.mesh_dim_names is None:
        return dist.group.WORLD
    return mesh[tuple(mesh.mesh_dim_names[i] for i in dims)]._flatten().get_group()


def chunk_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Where torch.chunk, and so a DTensor, splits a dimension."""
    length = -(-size // ranks)
    return tuple(min(rank * length, size) for rank in range(ranks + 1))


@lru_cache(maxsize=256)
def row_shards(length: int, ranks: int) -> ShardGrid:
    """The shards of a tensor of this many rows, cut into chunks of rows."""
    bounds = tuple(sorted(set(chunk_bounds(length, ranks))))
    return ShardGrid(((0, bounds),), {(rank,): rank for rank in range(len(bounds) - 1)})


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def part_of(tensor: Tensor, place: Place) -> Tensor:
    """What this rank steps elementwise: its shard, or its rows of a tensor that all ranks have."""
    if is_sharded(tensor):
        return local(tensor)
    rows = row_range(tensor, place)
    return tensor if rows is None else tensor[slice(*rows)]


def row_range(tensor: Tensor, place: Place) -> tuple[int, int] | None:
    """The first and last row of `part_of`; None if it is no range of rows."""
    shards = place.shards
    if not is_sharded(tensor) and tensor.ndim:
        shards = row_shards(len(tensor), place.ranks.size)
    if shards is None or [dim for dim, _ in shards.cuts] != [0]:
        return None
    bounds = shards.cuts[0][1]
    ranges = {shards.ranks[number,]: rows for number, rows in enumerate(pairwise(bounds))}
    return ranges.get(place.ranks.rank, (0, 0))


def whole_from(part: Tensor, like: Tensor, place: Place) -> Tensor:
    """A DTensor placed as `like`, with its number of rows if cut by rows, else with its shape, of
    which `part_of` gives `part`."""
    if like.ndim == 0:
        return part
    shape = like.shape if row_range(like, place) is None else (len(like), *part.shape[1:])
    if is_sharded(like):
        return _dtensor(part, shape, *mesh_of(like))
    return dtensor_from(part, shape, place.ranks)


def dtensor_from(chunk: Tensor, shape: Sequence[int], ranks: Ranks) -> Tensor:
    """A DTensor of this shape, of which this rank has a chunk of rows."""
    from torch.distributed.tensor import Shard

    # a mesh of one dimension: two would chunk rows in another way
    return _dtensor(chunk, shape, _group_mesh(ranks.group, chunk.device.type), [Shard(0)])


def _dtensor(part: Tensor, shape: Sequence[int], mesh: Any, placements: Any) -> Tensor:
    from torch.distributed.tensor import DTensor

    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@lru_cache(maxsize=16)
def _group_mesh(group: Any, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type)


def fill_(target: Tensor, source: Tensor) -> None:
    """Copy `source` into a tensor of the same shape; either may be a DTensor."""
    if is_sharded(target) and not is_sharded(source):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = mesh_of(target)
        source = distribute_tensor(
            source.to(mesh.device_type), mesh, placements, src_data_rank=None
        )
    elif is_sharded(source) and not is_sharded(target):
        source = source.full_tensor()  # type: ignore[attr-defined]
    elif is_sharded(source):
        source = source.redistribute(*mesh_of(target))  # type: ignore[attr-defined]
    local(target).copy_(local(source))


def gather_parts_(stepped: Sequence[tuple[Tensor, Place]]) -> None:
    """All-gather the rows that each rank has stepped of parameters that all ranks have."""
    params = [p for p, _ in stepped if p.ndim and not is_sharded(p)]
    if not params:
        return
    place = stepped[0][1]
    ranks = place.ranks
    sizes = [padded_part(param.shape, ranks.size) for param in params]
    sent = params[0].new_zeros(sum(sizes))
    for slot, param in zip(sent.split(sizes), params, strict=True):
        part = part_of(param, place)
        slot[: part.numel()].copy_(part.reshape(-1))
    gathered = ranks.all_gather(sent)
    for slots, param in zip(gathered.split(sizes, dim=1), params, strict=True):
        param.copy_(slots.reshape(-1, *param.shape[1:])[: len(param)])


def padded_part(shape: Sequence[int], ranks: int) -> int:
    """Elements of the largest of R chunks of a parameter along its first dimension."""
    return -(-shape[0] // ranks) * prod(shape[1:])


def sum_of_bits(param: Tensor) -> int:
    """The sum of the elements' bits as integers: a checksum."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = param.detach().contiguous().view(integer[param.element_size()])
    return int(bits.sum(dtype=torch.int64))
