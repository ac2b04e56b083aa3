"""Where the elements of a parameter are, and how a tensor that is here in part is spoken of."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from isokron.distributed.agreement import agreed_trouble
from isokron.distributed.ranks import TIMEOUT, Ranks
from isokron.distributed.traffic import padded_part


@dataclass(frozen=True)
class Place:
    """Where a parameter is: whole on each of `ranks` (`dim` None), or cut along `dim`, so that
    rank r has elements bounds[r] to bounds[r+1]."""

    ranks: Ranks
    dim: int | None = None
    bounds: tuple[int, ...] = ()


@dataclass(eq=False)
class Sharing:
    """With whom an optimizer shares its work, and how.

    `ranks`: who shares the work on parameters that all of them have whole; None: nobody does.
    Parameters that are sharded (DTensor) are always shared by the ranks that have their shards.
    `communication_dtype`: in which blocks travel, None for their own.
    """

    ranks: Ranks | None = None
    communication_dtype: torch.dtype | None = None
    timeout: float = TIMEOUT
    groups: dict[Any, Ranks] = field(default_factory=dict)  # by process group

    def place(self, param: Tensor) -> Place | None:
        """Where it is shared; None for one that this process steps by itself."""
        if not is_sharded(param):
            return None if self.ranks is None else Place(self.ranks)
        mesh, placements = _mesh(param)
        cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        if not cut:  # whole on all of them
            return Place(self._ranks(mesh.get_group(mesh.ndim - 1)))
        kind = placements[cut[0]]
        if len(cut) > 1 or not _plain_shard(kind):
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} is placed as {placements} on a mesh of "
                f"{tuple(mesh.shape)}; parameters may be sharded along one dimension of a mesh and "
                "replicated along the others (FSDP2, HSDP, or tensor parallel alone)"
            )
        ranks = self._ranks(mesh.get_group(cut[0]))
        return Place(ranks, kind.dim, chunk_bounds(param.shape[kind.dim], ranks.size))

    def _ranks(self, group: Any) -> Ranks:
        return self.groups.setdefault(group, Ranks(group, self.timeout))

    def parties(self, groups: Sequence[Mapping[str, Any]]) -> list[Ranks]:
        """With whom any parameter is shared."""
        return list(self._parties(groups)) if self.active(groups) else []

    def active(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether any parameter is shared."""
        if self.ranks is not None:
            return True
        others = [p for group in groups if not _plain(group["params"]) for p in group["params"]]
        return any(map(is_sharded, others))

    def agreed(
        self, groups: Sequence[Mapping[str, Any]], check: Callable[[], str | None]
    ) -> str | None:
        """Why this step is to be skipped, as `check` says on any rank; None: it is not.

        Raises on all ranks what `check` raises on one, and where ranks are about to do different
        things.
        """
        if not self.active(groups):
            return check()
        parties = self._parties(groups)
        raised = None
        try:
            found = check()
        except FloatingPointError as error:
            found, raised = str(error), error
        for ranks, facts in parties.items():
            trouble = agreed_trouble(ranks, facts, found, raised is not None)
            if trouble and trouble.fatal:
                raise FloatingPointError(trouble.text) from raised
            found = found or (trouble.text if trouble else None)
        return found

    def _parties(self, groups: Sequence[Mapping[str, Any]]) -> dict[Ranks, list[tuple[str, Any]]]:
        """With whom this step is shared, and what all of them must agree in."""
        parties: dict[Ranks, list[tuple[str, Any]]] = {}
        for number, group in enumerate(groups):
            shared: dict[Ranks, list[tuple[Any, ...]]] = {}
            for i, param in enumerate(group["params"]):
                place = self.place(param)
                if place is not None:
                    names = group.get("param_names")
                    about = (names[i] if names else i, tuple(param.shape), str(param.dtype))
                    _check_gradient(about[0], param)
                    shared.setdefault(place.ranks, []).append((about, param.grad is not None))
            for ranks, params in shared.items():
                facts = parties.setdefault(ranks, [])
                facts.append((f"parameters of group {number}", [about for about, _ in params]))
                facts.append(
                    (
                        f"parameters of group {number} that have gradients",
                        [about[0] for about, there in params if there],
                    )
                )
                facts.append((f"settings of group {number}", _settings(group)))
        return parties


def _check_gradient(name: Any, param: Tensor) -> None:
    if param.grad is None or not is_sharded(param):
        return
    if not is_sharded(param.grad) or _mesh(param.grad) != _mesh(param):
        placed = _mesh(param.grad)[1] if is_sharded(param.grad) else "a plain tensor"
        raise ValueError(
            f"parameter {name} is placed as {_mesh(param)[1]} and its gradient as {placed}; "
            "redistribute the gradient to where the parameter is before the step"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    left = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {
        key: value.item() if isinstance(value, Tensor) else repr(value)
        for key, value in left.items()
    }


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Whether all are tensors like any other, asked quickly."""
    return set(map(type, tensors)) <= {Tensor, nn.Parameter}


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor; nobody has one who has not imported their module."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _mesh(tensor: Tensor) -> tuple[Any, Any]:
    """The mesh of a DTensor, and how it is placed there."""
    return tensor.device_mesh, tensor.placements  # type: ignore[attr-defined]


def _plain_shard(placement: Any) -> bool:
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
        mesh, placements = _mesh(like)
    else:
        mesh = _mesh_of(place.ranks.group, like.device.type)
        placements = (Shard(0) if place.ranks.size > 1 else Replicate(),)
    stride = torch.empty(like.shape, device="meta").stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=like.shape, stride=stride
    )


@lru_cache(maxsize=16)
def _mesh_of(group: Any, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, device_type)


def fill_(target: Tensor, source: Tensor) -> None:
    """Copy a tensor into one of the same shape, of either of which only a part may be here."""
    if is_sharded(target) and not is_sharded(source):
        from torch.distributed.tensor import distribute_tensor

        mesh, placements = _mesh(target)
        source = distribute_tensor(
            source.to(mesh.device_type), mesh, placements, src_data_rank=None
        )
    elif is_sharded(source) and not is_sharded(target):
        source = source.full_tensor()  # type: ignore[attr-defined]
    elif is_sharded(source):
        source = source.redistribute(*_mesh(target))  # type: ignore[attr-defined]
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
