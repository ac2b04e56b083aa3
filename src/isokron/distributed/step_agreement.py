"""Which ranks share each parameter, and what they agree on before a step.

Before a step changes anything the ranks compare what they are about to do in one small all-reduce:
settings, parameters, which gradients there are, and what any of them has found wrong.
"""

import math
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.weak import WeakTensorKeyDictionary

from isokron.distributed.attendance import attend
from isokron.distributed.dtensor import (
    Place,
    is_sharded,
    local,
    mesh_of,
    shard_group,
    sharded_mesh_dims,
    shards_on,
    sum_of_bits,
)
from isokron.distributed.process_group import (
    TIMEOUT,
    RankLost,
    Ranks,
    Traffic,
    control_group,
    fingerprint,
)
from isokron.distributed.rank_tasks import RankFailed

Members = tuple[int, ...]  # sorted global ranks
Groups = Sequence[Mapping[str, Any]]
Facts = list[tuple[str, Any]]  # (name, value) that must be the same on all ranks

AGREEMENT_BYTES = 5 * torch.int64.itemsize
NORM_TOLERANCE = 1e-4  # relative; equal gradients on unlike machines differ by rounding
OK, SKIP, NOT_FINITE, FAILED = range(4)  # all ranks act on the highest level that any reports


@dataclass(frozen=True)
class Trouble:
    """Why a step cannot be taken, and how bad it is."""

    text: str
    level: int


def trouble_of(error: Exception) -> Trouble:
    """The trouble of a rank that is about to raise."""
    if isinstance(error, FloatingPointError):
        return Trouble(str(error), NOT_FINITE)
    return Trouble(f"{type(error).__name__}: {error}", FAILED)


def agreed_trouble(
    ranks: Ranks,
    facts: Sequence[tuple[str, Any]],
    trouble: Trouble | None,
    length: float = 0.0,
    what: str = "an agreement",
) -> Trouble | None:
    """What any rank has found wrong and which rank it is; None if all may go on.

    Args:
        ranks: those that must agree.
        facts: what must be the same on all ranks, else all raise; ignored if any rank raises.
        trouble: what this rank has found.
        length: the norm of the gradients that all ranks must have alike.
        what: names the agreement in an error.
    """
    mark = zlib.crc32(repr(facts).encode())
    level = OK if trouble is None else trouble.level
    # positive floats are ordered like their bits, so a maximum over integers serves all five
    (bits,) = struct.unpack("q", struct.pack("d", length if math.isfinite(length) else 0.0))
    numbers = torch.tensor([mark, -mark, level, bits, -bits], device=ranks.device)
    most, least, worst, *norm_bits = ranks.all_reduce_(numbers, dist.ReduceOp.MAX, what).tolist()
    if worst < NOT_FINITE and most != -least:
        _raise_difference(ranks, facts)
    if worst == OK:
        longest, shortest = (struct.unpack("d", struct.pack("q", abs(b)))[0] for b in norm_bits)
        if longest - shortest > NORM_TOLERANCE * longest:
            raise RuntimeError(
                f"gradients must be the same on all {ranks.size} ranks, but their norms are from "
                f"{shortest:.6g} to {longest:.6g}, and {length:.6g} on rank {dist.get_rank()}; "
                "call the model by its DistributedDataParallel, or average gradients before step()"
            )
        return None
    texts = ranks.gather_text("" if trouble is None else trouble.text)
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks.members, texts, strict=True):
        if text.strip():
            ranks_by_text.setdefault(text, []).append(rank)
    reports = [f"{text} (rank {', '.join(map(str, of))})" for text, of in ranks_by_text.items()]
    return Trouble("; ".join(reports), worst)


def _raise_difference(ranks: Ranks, facts: Sequence[tuple[str, Any]]) -> None:
    """Raise on all ranks with the first fact in which they differ."""
    ranks.agree("what an optimizer shares", [name for name, _ in facts])
    for name, fact in facts:
        ranks.agree(name, fact)
    raise RuntimeError(
        f"the {ranks.size} ranks differ in what they are about to do: {facts!r} on rank "
        f"{dist.get_rank()}"
    )


@dataclass(eq=False)
class StepAgreement:
    """The ranks an optimizer shares its work with.

    Args:
        ranks: share the work on parameters that all of them have whole; None: nobody does.
            Sharded parameters (DTensor) are always shared by the ranks that have their shards.
        communication_dtype: in which blocks travel; None for their own.
        timeout: seconds that a rank waits for the others.
    """

    ranks: Ranks | None = None
    communication_dtype: torch.dtype | None = None
    timeout: float = TIMEOUT
    length: float = 0.0  # norm of this step's gradients that all ranks have whole
    # of each block that has had one: state stays where it is when blocks are laid out anew
    owners: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    _ranks: dict[Members, Ranks] = field(default_factory=dict)  # of sharded parameters
    _controls: dict[Members, Ranks] = field(default_factory=dict)
    _members: dict[Any, Members] = field(default_factory=dict)  # by mesh; None: of `ranks`
    _places: dict[Any, Place] = field(default_factory=dict)  # by shape, mesh and placements
    _steps: int = 0
    _started: bool = False  # whether parameters were found to have the same values on all ranks

    def place(self, param: Tensor) -> Place | None:
        """The ranks that share a parameter; None if this process steps it by itself."""
        if not is_sharded(param):
            return None if self.ranks is None else Place(self.ranks)
        mesh, placements = mesh_of(param)
        key = (param.shape, mesh, placements)
        if key not in self._places:
            dims = sharded_mesh_dims(param)
            # the ranks of one mesh dimension share the work on a replicated parameter
            ranks = self._group_ranks(shard_group(mesh, dims or [mesh.ndim - 1]))
            shards = shards_on(ranks.members, param, dims) if dims else None
            self._places[key] = Place(ranks, shards)
        return self._places[key]

    def _group_ranks(self, group: Any) -> Ranks:
        # by members: torch takes meshes that look alike for one, whose groups are several
        ranks = Ranks(group, self.timeout)
        return self._ranks.setdefault(ranks.members, ranks)

    def active(self, groups: Groups) -> bool:
        """Whether any parameter is shared."""
        if self.ranks is not None:
            return True
        return any(is_sharded(p) for g in groups if not _plain(g["params"]) for p in g["params"])

    def members(self, param: Tensor) -> Members:
        """The processes that have any part of a parameter, replicas included."""
        if is_sharded(param):
            mesh = mesh_of(param)[0]
            if mesh not in self._members:
                self._members[mesh] = tuple(sorted(mesh.mesh.flatten().tolist()))
            return self._members[mesh]
        if self.ranks is None:
            return ()
        if None not in self._members:
            self._members[None] = tuple(sorted(self.ranks.members))
        return self._members[None]

    def control(self, members: Members) -> Ranks:
        """A group of these processes that is the optimizer's own."""
        if members not in self._controls:
            self._controls[members] = control_group(members, self.timeout)
        return self._controls[members]

    def agreed(self, groups: Groups, check: Callable[[], str | None]) -> str | None:
        """Why this step is to be skipped, as `check` says on any rank; None to take it.

        Raises on all ranks if one does, or if they are about to do different things. `check` sets
        `length` from `norms`.
        """
        if not self.active(groups):
            return check()
        self._steps += 1
        parties = dict.fromkeys(self.members(p) for group in groups for p in group["params"])
        parties.pop((), None)
        trouble: Trouble | None = None
        raised: Exception | None = None
        facts: dict[Members, Facts] = {}
        self.length = 0.0
        try:
            if text := check():
                trouble = Trouble(text, SKIP)
            facts = self._facts(groups)
        except Exception as error:  # whatever it is, the others must not wait for this rank
            trouble, raised = trouble_of(error), error
        what = f"optimizer.step() number {self._steps}"
        facts = {party: facts.get(party, []) for party in parties}
        trouble, differing = self._compare_facts(facts, what, trouble, self.length)
        raised = raised or differing
        if raised is not None:
            raise raised
        if trouble is not None and trouble.level > SKIP:
            error_type = FloatingPointError if trouble.level == NOT_FINITE else RankFailed
            raise error_type(f"{trouble.text}; no rank has stepped")
        if not self._started:
            for party in parties:
                self._compare_replicas(self.control(party), groups)
        self._started = True
        return None if trouble is None else trouble.text

    def agree(self, facts: Mapping[Members, Facts], call: str, remedy: str) -> None:
        """Raise on all ranks unless the facts of each party are the same on all of its members.

        `remedy`: what to do where only some ranks make this call.
        """
        for party in sorted(facts, key=len):
            attend(party, self.timeout, call, remedy)
        trouble, differing = self._compare_facts(facts, call)
        if differing is not None:
            raise differing
        if trouble is not None:
            raise RankFailed(trouble.text)

    def reported(self, groups: Groups, problem: str | None, what: str) -> str | None:
        """What any of the ranks that share parameters reports; None: no rank has a problem."""
        parties = dict.fromkeys(self.members(p) for group in groups for p in group["params"])
        parties.pop((), None)
        facts: dict[Members, Facts] = {party: [] for party in parties}
        trouble, differing = self._compare_facts(
            facts, what, Trouble(problem, SKIP) if problem else None
        )
        if differing is not None:
            raise differing
        return None if trouble is None else trouble.text

    def _compare_facts(
        self,
        facts: Mapping[Members, Facts],
        what: str,
        trouble: Trouble | None = None,
        length: float = 0.0,
    ) -> tuple[Trouble | None, RuntimeError | None]:
        """What is wrong on any rank, and the error of a rank whose party differs in its facts.

        Parties overlap where some parameters are on a part of a mesh. The largest comes last, so
        that all ranks hear of what differs in a smaller one before any of them raises.
        """
        differing: RuntimeError | None = None
        for party in sorted(facts, key=len):
            norm = length if party == self._members.get(None) else 0.0
            try:
                reported = agreed_trouble(self.control(party), facts[party], trouble, norm, what)
            except RankLost:
                raise
            except RuntimeError as error:
                differing = differing or error
                reported = trouble_of(error)
            trouble = reported or trouble
        return trouble, differing

    def norms(self, groups: Groups) -> list[Tensor]:
        """Norms of the gradients that all ranks must have alike: [n], one tensor a device."""
        if self.ranks is None:
            return []
        params = [p for group in groups for p in group["params"] if not is_sharded(p)]
        grads = [p.grad for p in params if p.grad is not None]
        wide = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
        norms: dict[torch.device, list[Tensor]] = {}
        for norm in torch._foreach_norm(grads, dtype=wide) if grads else ():
            norms.setdefault(norm.device, []).append(norm)
        return [torch.stack(of_device).double() for of_device in norms.values()]

    def _facts(self, groups: Groups) -> dict[Members, Facts]:
        """What all that share parameters must agree on before this step."""
        facts: dict[Members, Facts] = {}
        for number, group in enumerate(groups):
            by_members: dict[Members, list[tuple[Any, Tensor]]] = {}
            names = group.get("param_names") or range(len(group["params"]))
            for name, param in zip(names, group["params"], strict=True):
                _check_placement(name, param)
                by_members.setdefault(self.members(param), []).append((name, param))
            by_members.pop((), None)
            for members, params in by_members.items():
                about = [
                    (name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in params
                ]
                present = [name for name, param in params if param.grad is not None]
                shared = facts.setdefault(members, [("steps asked for", self._steps)])
                shared.append((f"parameters of group {number}", about))
                shared.append((f"parameters of group {number} that have gradients", present))
                shared.append((f"settings of group {number}", _settings(group)))
                replicated = [param for _, param in params if not is_sharded(param)]
                if replicated and not self._started:
                    bits = [sum_of_bits(param) for param in replicated]
                    shared.append((f"values of the parameters of group {number}", bits))
        return facts

    def _compare_replicas(self, control: Ranks, groups: Groups) -> None:
        """Raise on all ranks unless replicas of the same shards have the same values."""
        params = [p for group in groups for p in group["params"] if is_sharded(p)]
        params = [p for p in params if self.members(p) == control.members]
        meshes = [(mesh_of(param)[0], sharded_mesh_dims(param)) for param in params]
        if all(mesh.size() == prod(map(mesh.size, dims)) for mesh, dims in meshes):
            return  # no replicas
        shards = [[mesh.get_coordinate()[dim] for dim in dims] for mesh, dims in meshes]
        bits = [sum_of_bits(local(param)) for param in params]
        # done once, so not counted as traffic of a step
        uncounted = replace(control, traffic=Traffic())
        prints = torch.tensor([fingerprint(shards), fingerprint(bits)], device=control.device)
        first: dict[int, tuple[int, int]] = {}
        gathered = uncounted.all_gather(prints).tolist()
        for rank, (shard, checksum) in zip(control.members, gathered, strict=True):
            first_rank, expected = first.setdefault(shard, (rank, checksum))
            if checksum != expected:
                raise RuntimeError(
                    f"copies of sharded parameters must have the same values, but those of rank "
                    f"{rank} differ from those of rank {first_rank}; make the model from one seed "
                    "on all ranks, or load it from one checkpoint"
                )


def check_communication(optimizer: str, dtype: Any) -> None:
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ValueError(
            f"{optimizer}: communication_dtype must be None or a floating-point dtype, got "
            f"{dtype!r}"
        )


def _check_placement(name: Any, param: Tensor) -> None:
    if param.grad is None or not is_sharded(param):
        return
    if not is_sharded(param.grad) or mesh_of(param.grad) != mesh_of(param):
        placed = mesh_of(param.grad)[1] if is_sharded(param.grad) else "a plain tensor"
        raise ValueError(
            f"parameter {name} is placed as {mesh_of(param)[1]} and its gradient as {placed}; "
            "redistribute the gradient to where the parameter is before the step"
        )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: value.item() if isinstance(value, Tensor) else repr(value)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Whether none is a tensor subclass, which is much faster than asking each."""
    return set(map(type, tensors)) <= {Tensor, nn.Parameter}
