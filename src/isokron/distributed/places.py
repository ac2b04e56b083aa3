"""Where the elements of a parameter are, and how a tensor that is here in part is spoken of."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from isokron.distributed.ranks import Ranks
from isokron.distributed.traffic import padded_part


@dataclass(frozen=True)
class Place:
    """Where a parameter is: whole on each of `ranks` (`dim` None), or cut along `dim`, so that
    rank r has elements bounds[r] to bounds[r+1]."""

    ranks: Ranks
    dim: int | None = None
    bounds: tuple[int, ...] = ()


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; nobody has one who has not imported their module."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_flat_shard(param: Tensor) -> bool:
    """Whether FSDP1 (FullyShardedDataParallel) has flattened a parameter, or is its flat one.

    It marks both, also with use_orig_params=True.
    """
    module = sys.modules.get("torch.distributed.fsdp._common_utils")
    return module is not None and module._is_fsdp_flattened(param)


def mesh_of(tensor: Tensor) -> tuple[Any, Any]:
    """The mesh of a DTensor, and how it is placed there."""
    return tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]


def is_plain_shard(placement: Any) -> bool:
    module = sys.modules["torch.distributed.tensor"]
    return type(placement) is module.Shard


def chunk_bounds(size: int, ranks: int) -> tuple[int, ...]:
    """Where torch.chunk, and so a DTensor, cuts a dimension: equal pieces but for the last ones."""
    each = -(-size // ranks)
    return tuple(min(rank * each, size) for rank in range(ranks + 1))


def local(tensor: Tensor) -> Tensor:
    """What is here of a tensor, sharing its memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def part_of(tensor: Tensor, place: Place) -> Tensor:
    """What this rank steps of a tensor that is sharded, or of which everybody has the whole."""
    if is_sharded(tensor):
        return local(tensor)
    if tensor.ndim == 0:
        return tensor
    dim, bounds = rows_of(tensor.shape, place)
    start = bounds[place.ranks.rank]
    return tensor.narrow(dim, start, bounds[place.ranks.rank + 1] - start)


def rows_of(shape: Sequence[int], place: Place) -> tuple[int, tuple[int, ...]]:
    """Along which dimension elementwise work on a parameter is cut, and where."""
    if place.dim is not None:
        return place.dim, place.bounds
    return 0, chunk_bounds(shape[0], place.ranks.size)


def whole_from(part: Tensor, like: Tensor, place: Place) -> Tensor:
    """The tensor, shaped as `like`, of which `part` is what `part_of` gives: a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if like.ndim == 0:
        return part
    if is_sharded(like):
        mesh, placements = mesh_of(like)
    else:
        mesh = _group_mesh(place.ranks.group, like.device.type)
        placements = (Shard(0) if place.ranks.size > 1 else Replicate(),)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=stride
    )


@lru_cache(maxsize=16)
def _group_mesh(group: Any, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type)


def fill_(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into one of the same shape, of either of which only a part may be here."""
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
    """Give to all ranks the rows of whole parameters that each has stepped: one collective."""
    whole = [(p, at) for p, at in stepped if at.dim is None and p.ndim and not is_sharded(p)]
    if not whole:
        return
    ranks, dtype = whole[0][1].ranks, whole[0][0].dtype
    sizes = [padded_part(param.shape, ranks.size) for param, _ in whole]
    own = whole[0][0].new_zeros(sum(sizes), dtype=dtype)
    at = 0
    for size, (param, place) in zip(sizes, whole, strict=True):
        part = part_of(param, place)
        own[at : at + part.numel()].copy_(part.reshape(-1))
        at += size
    everything = own.new_empty(ranks.size, own.numel())
    ranks.all_gather_into(everything, own).wait()
    at = 0
    for size, (param, _) in zip(sizes, whole, strict=True):
        rows = everything[:, at : at + size].reshape(-1, *param.shape[1:])
        param.copy_(rows[: len(param)])
        at += size


def sum_of_bits(param: Tensor) -> int:
    """A number that hardly ever is the same for other elements."""
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[param.element_size()]
    return int(param.detach().contiguous().view(whole).sum(dtype=torch.int64))
