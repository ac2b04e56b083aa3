"""With whom an optimizer shares its work, and what all of them must agree in before a step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from isokron.distributed.agreement import agreed_trouble
from isokron.distributed.places import (
    Place,
    chunk_bounds,
    is_plain_shard,
    is_sharded,
    mesh_of,
    sum_of_bits,
)
from isokron.distributed.ranks import TIMEOUT, Ranks


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
    met: bool = False  # whether ranks have found that they start from the same parameters

    def place(self, param: Tensor) -> Place | None:
        """Where it is shared; None for one that this process steps by itself."""
        if not is_sharded(param):
            return None if self.ranks is None else Place(self.ranks)
        mesh, placements = mesh_of(param)
        cut = [i for i, placement in enumerate(placements) if not placement.is_replicate()]
        if not cut:  # whole on all of them
            return Place(self._ranks(mesh.get_group(mesh.ndim - 1)))
        kind = placements[cut[0]]
        if len(cut) > 1 or not is_plain_shard(kind):
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
        fatal = raised is not None
        for ranks, facts in parties.items():  # all of them hear of it before anybody raises
            trouble = agreed_trouble(ranks, facts, found, fatal, self._length(ranks, groups))
            if trouble is not None:
                found, fatal = trouble.text, fatal or trouble.fatal
        if fatal:
            raise FloatingPointError(found) from raised
        self.met = True
        return found

    def _length(self, ranks: Ranks, groups: Sequence[Mapping[str, Any]]) -> float:
        """The norm of gradients that all of `ranks` have whole, and so must have alike."""
        if ranks is not self.ranks:
            return 0.0
        params = [p for group in groups for p in group["params"] if not is_sharded(p)]
        grads = [p.grad for p in params if p.grad is not None]
        if not grads:
            return 0.0
        wide = reduce(torch.promote_types, {grad.dtype for grad in grads}, torch.float32)
        norms = torch._foreach_norm(grads, dtype=wide)
        return float(torch.stack([norm.double().cpu() for norm in norms]).norm())

    def _parties(self, groups: Sequence[Mapping[str, Any]]) -> dict[Ranks, list[tuple[str, Any]]]:
        """With whom this step is shared, and what all of them must agree in."""
        parties: dict[Ranks, list[tuple[str, Any]]] = {}
        for number, group in enumerate(groups):
            shared: dict[Ranks, list[tuple[Any, ...]]] = {}
            for i, param in enumerate(group["params"]):
                place = self.place(param)
                if place is not None:
                    names = group.get("param_names")
                    name, learns = names[i] if names else i, param.requires_grad
                    about = (name, tuple(param.shape), str(param.dtype), learns)
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
                if ranks is self.ranks and not self.met:
                    plain = [p for p in group["params"] if not is_sharded(p)]
                    bits = [sum_of_bits(param) for param in plain]
                    facts.append((f"values of the parameters of group {number}", bits))
        return parties


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
