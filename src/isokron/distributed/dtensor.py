"""Where the elements of a parameter are, and tensors of which a rank has only a part."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from isokron.distributed.process_group import Ranks


@dataclass(frozen=True)
class Place:
    """The ranks that have a parameter: all of it each (`dim` None), or a shard along `dim`.

    Rank r has elements bounds[r] to bounds[r+1] of dimension `dim`.
    """

    ranks: Ranks
    dim: int | None = None
    bounds: tuple[int, ...] = ()


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


def sharded_mesh_dim(param: Tensor) -> int | None:
    """The mesh dimension along which a DTensor is sharded; None if it is replicated.

    Raises a ValueError for placements that no optimizer here can step.
    """
    shard = sys.modules["torch.distributed.tensor"].Shard
    mesh, placements = mesh_of(param)
    dims = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(dims) > 1 or not all(type(placements[i]) is shard for i in dims):
        raise ValueError(
            f"a DTensor of shape {tuple(param.shape)} is placed as {placements} on a mesh of "
            f"{tuple(mesh.shape)}; parameters may be sharded along one dimension of a mesh and "
            "replicated along the others (FSDP2, HSDP, or tensor parallel alone)"
        )
    return dims[0] if dims else None


def chunk_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Where torch.chunk, and so a DTensor, splits a dimension."""
    length = -(-size // ranks)
    return tuple(min(rank * length, size) for rank in range(ranks + 1))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def part_of(tensor: Tensor, place: Place) -> Tensor:
    """What this rank steps elementwise: its shard, or its rows of a tensor that all ranks have."""
    if is_sharded(tensor):
        return local(tensor)
    if tensor.ndim == 0:
        return tensor
    bounds = chunk_bounds(len(tensor), place.ranks.size)
    start = bounds[place.ranks.rank]
    return tensor.narrow(0, start, bounds[place.ranks.rank + 1] - start)


def whole_from(part: Tensor, like: Tensor, place: Place) -> Tensor:
    """A DTensor with the shape of `like` of which `part_of` gives `part`."""
    if like.ndim == 0:
        return part
    placements = mesh_of(like)[1] if is_sharded(like) else None
    return dtensor_from(part, like.shape, like, place, placements)


def dtensor_from(
    part: Tensor, shape: Sequence[int], param: Tensor, place: Place, placements: Any = None
) -> Tensor:
    """A DTensor made of this rank's part, by default a chunk of rows, over the ranks of `place`.

    Args:
        part: what this rank has.
        shape: of the whole tensor.
        param: the parameter it belongs to, whose mesh it is placed on.
        place: of the parameter.
        placements: None for Shard(0) over the ranks of `place` and Replicate otherwise.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if is_sharded(param):
        mesh = mesh_of(param)[0]
        dim = sharded_mesh_dim(param)
    else:
        mesh, dim = _group_mesh(place.ranks.group, param.device.type), 0
    if placements is None:
        placements = [Replicate()] * mesh.ndim
        if place.ranks.size > 1:
            placements[mesh.ndim - 1 if dim is None else dim] = Shard(0)
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
    params = [p for p, at in stepped if at.dim is None and p.ndim and not is_sharded(p)]
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
