"""With whom an optimizer shares its work, and what all of them must agree in before a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from isokron.distributed.agreement import NOT_FINITE, SKIP, Trouble, agreed_trouble, trouble_of
from isokron.distributed.places import (
    Place,
    chunk_bounds,
    is_plain_shard,
    is_sharded,
    local,
    mesh_of,
    sum_of_bits,
)
from isokron.distributed.ranks import TIMEOUT, Ranks, Traffic, fingerprint
from isokron.distributed.team import Elsewhere
from isokron.distributed.world import control_group

Members = tuple[int, ...]  # ranks among all processes, in order


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
    # of blocks that have had one, by parameter: whoever has the state of a block keeps it
    owners: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    controls: dict[Members, Ranks] = field(default_factory=dict)  # who agrees before a step
    meshes: dict[Any, Members] = field(default_factory=dict)
    asked: int = 0  # how many steps were asked for
    length: float = 0.0  # of this step's gradients that all ranks have whole
    met: bool = False  # whether ranks have found that they start from the same parameters

    def place(self, param: Tensor) -> Place | None:
        """Where it is shared; None for one that this process steps by itself."""
        if not is_sharded(param):
            return None if self.ranks is None else Place(self.ranks)
        mesh, placements = mesh_of(param)
        cut = cut_along(param)
        if cut is None:  # whole on all of them
            return Place(self._ranks(mesh.get_group(mesh.ndim - 1)))
        ranks, dim = self._ranks(mesh.get_group(cut)), placements[cut].dim
        return Place(ranks, dim, chunk_bounds(param.shape[dim], ranks.size))

    def _ranks(self, group: Any) -> Ranks:
        return self.groups.setdefault(group, Ranks(group, self.timeout))

    def parties(self, groups: Sequence[Mapping[str, Any]]) -> list[Ranks]:
        """With whom any parameter is shared."""
        if not self.active(groups):
            return []
        places = [self.place(param) for group in groups for param in group["params"]]
        return list(dict.fromkeys(place.ranks for place in places if place is not None))

    def active(self, groups: Sequence[Mapping[str, Any]]) -> bool:
        """Whether any parameter is shared."""
        if self.ranks is not None:
            return True
        others = [p for group in groups if not _plain(group["params"]) for p in group["params"]]
        return any(map(is_sharded, others))

    def members(self, param: Tensor) -> Members:
        """The processes that have any of a parameter, replicas too, and must step it alike."""
        if is_sharded(param):
            mesh = mesh_of(param)[0]
            if mesh not in self.meshes:
                self.meshes[mesh] = tuple(sorted(mesh.mesh.flatten().tolist()))
            return self.meshes[mesh]
        if self.ranks is None:
            return ()
        if None not in self.meshes:
            self.meshes[None] = tuple(sorted(self.ranks.members))
        return self.meshes[None]

    def agreed(
        self, groups: Sequence[Mapping[str, Any]], check: Callable[[], str | None]
    ) -> str | None:
        """Why this step is to be skipped, as `check` says on any rank; None: it is not.

        `check` reads `norms`, with whatever else it reads, into `length`. Raises on all ranks where
        one does, and where they are about to do different things.
        """
        if not self.active(groups):
            return check()
        self.asked += 1
        parties = dict.fromkeys(self.members(p) for group in groups for p in group["params"])
        parties.pop((), None)
        trouble = raised = None
        facts: dict[Members, list[tuple[str, Any]]] = {}
        self.length = 0.0
        try:
            if text := check():
                trouble = Trouble(text, SKIP)
            facts = self._facts(groups)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            trouble, raised = trouble_of(error), error
        what = f"optimizer.step() number {self.asked}"
        for who in parties:  # all of them hear of it before anybody raises
            length = self.length if who == self.meshes.get(None) else 0.0
            told = agreed_trouble(self.control(who), facts.get(who, []), trouble, length, what)
            trouble = told or trouble
        if raised is not None:
            raise raised
        if trouble is not None and trouble.level > SKIP:
            kind = FloatingPointError if trouble.level == NOT_FINITE else Elsewhere
            raise kind(f"{trouble.text}; no rank has stepped")
        if not self.met:
            for who in parties:
                self._compare_copies(self.control(who), groups)
        self.met = True
        return None if trouble is None else trouble.text

    def control(self, members: Members) -> Ranks:
        """These processes over connections that are the optimizer's own."""
        if members not in self.controls:
            self.controls[members] = control_group(members, self.timeout)
        return self.controls[members]

    def _compare_copies(self, control: Ranks, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise on all ranks unless those with the same shards have the same values in them."""
        params = [p for group in groups for p in group["params"] if is_sharded(p)]
        params = [p for p in params if self.members(p) == control.members]
        meshes = [(mesh_of(param)[0], cut_along(param)) for param in params]
        if all(mesh.size() == (1 if cut is None else mesh.size(cut)) for mesh, cut in meshes):
            return  # nobody has a copy
        where = [None if cut is None else mesh.get_coordinate()[cut] for mesh, cut in meshes]
        own = [fingerprint(where), fingerprint([sum_of_bits(local(param)) for param in params])]
        asked = replace(control, traffic=Traffic())  # once, and so in no account of steps
        everyone = asked.all_gather(torch.tensor(own, device=control.device)).tolist()
        first: dict[int, tuple[int, int]] = {}
        for rank, (shard, bits) in zip(control.members, everyone, strict=True):
            other, known = first.setdefault(shard, (rank, bits))
            if bits != known:
                raise RuntimeError(
                    f"copies of sharded parameters must have the same values, but those of rank "
                    f"{rank} differ from those of rank {other}; make the model from one seed on "
                    "all ranks, or load it from one checkpoint"
                )

    def norms(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        """Of gradients that all ranks have whole, and so must have alike: [n], one a device."""
        if self.ranks is None:
            return []
        params = [p for group in groups for p in group["params"] if not is_sharded(p)]
        grads = [p.grad for p in params if p.grad is not None]
        wide = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
        norms: dict[torch.device, list[Tensor]] = {}
        for norm in torch._foreach_norm(grads, dtype=wide) if grads else ():
            norms.setdefault(norm.device, []).append(norm)
        return [torch.stack(several).double() for several in norms.values()]

    def _facts(self, groups: Sequence[Mapping[str, Any]]) -> dict[Members, list[tuple[str, Any]]]:
        """What all that share parameters must agree in before this step."""
        facts: dict[Members, list[tuple[str, Any]]] = {}
        for number, group in enumerate(groups):
            shared: dict[Members, list[tuple[Any, Tensor]]] = {}
            names = group.get("param_names") or range(len(group["params"]))
            for name, param in zip(names, group["params"], strict=True):
                _check_gradient(name, param)
                shared.setdefault(self.members(param), []).append((name, param))
            shared.pop((), None)
            for members, params in shared.items():
                about = [
                    (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in params
                ]
                there = [name for name, param in params if param.grad is not None]
                own = facts.setdefault(members, [("steps asked for", self.asked)])
                own.append((f"parameters of group {number}", about))
                own.append((f"parameters of group {number} that have gradients", there))
                own.append((f"settings of group {number}", _settings(group)))
                whole = [param for _, param in params if not is_sharded(param)]
                if whole and not self.met:
                    bits = [sum_of_bits(param) for param in whole]
                    own.append((f"values of the parameters of group {number}", bits))
        return facts


def cut_along(param: Tensor) -> int | None:
    """The dimension of its mesh along which a DTensor is sharded; None for one that is replicated.

    Raises a ValueError for what cannot be stepped.
    """
    mesh, placements = mesh_of(param)
    cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
    if len(cut) > 1 or not all(is_plain_shard(placements[i]) for i in cut):
        raise ValueError(
            f"a DTensor of shape {tuple(param.shape)} is placed as {placements} on a mesh of "
            f"{tuple(mesh.shape)}; parameters may be sharded along one dimension of a mesh and "
            "replicated along the others (FSDP2, HSDP, or tensor parallel alone)"
        )
    return cut[0] if cut else None


def check_communication(who: str, dtype: Any) -> None:
    real = dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    if not real:
        raise ValueError(
            f"{who}: communication_dtype must be None or a floating-point dtype, got {dtype!r}"
        )


def _check_gradient(name: Any, param: Tensor) -> None:
    if param.grad is None or not is_sharded(param):
        return
    if not is_sharded(param.grad) or mesh_of(param.grad) != mesh_of(param):
        placed = mesh_of(param.grad)[1] if is_sharded(param.grad) else "a plain tensor"
        raise ValueError(
            f"parameter {name} is placed as {mesh_of(param)[1]} and its gradient as {placed}; "
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
