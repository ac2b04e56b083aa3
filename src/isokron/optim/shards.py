"""The parameters of all ranks as pieces in buckets, and this rank's own pieces with their state."""

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.distributed.buckets import Bucket, Piece, Sheet, lay_out
from isokron.distributed.exchange import Gathering, begin_gather
from isokron.distributed.ranks import Ranks
from isokron.optim.owned import Owned, piece_state

Groups = Sequence[Mapping[str, Any]]  # of every parameter


class Shards:
    """`idle`: buckets of parameters frozen from the start: no state, until they have gradients."""

    def __init__(self, ranks: Ranks, bucket_bytes: int) -> None:
        self.ranks, self.bucket_bytes = ranks, bucket_bytes
        self.params: list[Tensor] = []
        self.buckets: list[Bucket] = []
        self.idle: set[int] = set()
        self.steps: list[Tensor] = []
        self.owned: dict[int, list[Owned]] = {}
        self._sizes: list[int] = []
        self._flats: dict[int, Tensor] = {}
        self._copies: dict[int, Tensor] = {}  # of parameters that are not contiguous
        self._built_for: Any = None

    def add(self, params: Sequence[Tensor]) -> None:
        """Give the pieces of more parameters to owners; what there is stays where it is."""
        sheets = [
            Sheet(tuple(p.shape), p.element_size(), (p.dtype, p.device, p.requires_grad))
            for p in params
        ]
        place: dict[str, Any] = {"first": len(self.params), "before": self.buckets}
        buckets = lay_out(sheets, self.ranks.size, self.bucket_bytes, **place)
        self.params += params
        self._sizes += [param.numel() for param in params]
        self.buckets += buckets
        frozen = [b for b in buckets if not self.params[b.parameters[0]].requires_grad]
        self.idle |= {bucket.number for bucket in frozen}

    def build(self, groups: Groups, state: MutableMapping[Tensor, Any], names: list[str]) -> None:
        """Make the lists of what this rank owns, of the state there is, and show theirs instead."""
        saved = [dict(state.get(param) or {}) for param in self.params]
        idle = {b for b in self.idle if not any(saved[i] for i in self.buckets[b].parameters)}
        flats = {i: param.detach().contiguous().view(-1) for i, param in enumerate(self.params)}
        for i, flat in flats.items():
            if flat.numel() != self._sizes[i]:
                raise RuntimeError(
                    f"parameter {names[i]} had {self._sizes[i]} elements when the optimizer was "
                    f"made and has {flat.numel()} now; make the optimizer anew"
                )
        mine: dict[int, list[Piece]] = {i: [] for i in flats}
        owned: dict[int, list[Owned]] = {}
        for bucket in self.buckets:
            lists: dict[int, list[Piece]] = {}
            for piece in bucket.owned(self.ranks.rank) if bucket.number not in idle else ():
                lists.setdefault(id(groups[piece.parameter]), []).append(piece)
                mine[piece.parameter].append(piece)
            several = [Owned(p, flats, groups[p[0].parameter]) for p in lists.values()]
            owned[bucket.number] = several
        found = {
            i: piece_state(f"state of parameter {names[i]}", saved[i], p, self.params[i], groups[i])
            for i, p in mine.items()
        }
        for each in (each for several in owned.values() for each in several):
            each.fused.adopt_([found[piece.parameter][piece.number] for piece in each.pieces])
        self.idle, self.owned, self._flats = idle, owned, flats
        self._copies = {i: flats[i] for i, p in enumerate(self.params) if not p.is_contiguous()}
        self.steps = [torch.tensor(float(entry.get("step", 0))) for entry in saved]
        self._built_for = self._form(groups)
        self._show(state)

    def _form(self, groups: Groups) -> Any:
        """What the lists depend on: where parameters lie, and the form of their state."""
        forms = [(group["amsgrad"], group["state_dtype"]) for group in groups]
        return [param.data_ptr() for param in self.params], forms

    def _show(self, state: MutableMapping[Tensor, Any]) -> None:
        asleep = {i for b in self.idle for i in self.buckets[b].parameters}
        entries: dict[int, dict[str, Tensor]] = {
            i: {"step": self.steps[i]} for i in range(len(self.params)) if i not in asleep
        }
        for each in (each for several in self.owned.values() for each in several):
            for at, piece in enumerate(each.pieces):
                entries[piece.parameter].update(each.entry(at))
        state.update({self.params[i]: entry for i, entry in entries.items()})

    def prepare(
        self,
        present: set[int],
        groups: Groups,
        state: MutableMapping[Tensor, Any],
        names: list[str],
    ) -> None:
        """Before a step: follow parameters that were moved, thawed or changed in place."""
        awake = {b for b in self.idle if not present.isdisjoint(self.buckets[b].parameters)}
        if awake or self._built_for != self._form(groups):
            self.idle -= awake
            self.build(groups, state, names)
        for i, copy in self._copies.items():
            copy.copy_(self.params[i].reshape(-1))

    def count_(self, present: set[int]) -> None:
        for i in present:
            self.steps[i].add_(1)

    def step_(
        self, bucket: Bucket, section: Tensor, present: set[int], groups: Groups
    ) -> Gathering:
        """Step what this rank owns of a bucket, and begin to tell the others."""
        owned = self.owned[bucket.number]
        for each in owned:
            each.step_(section, present, groups[each.pieces[0].parameter])
        views = {piece: view for o in owned for piece, view in zip(o.pieces, o.views, strict=True)}
        return begin_gather(self.ranks, bucket, views, self._flats[bucket.parameters[0]])

    def write_(self, gathering: Gathering, present: set[int]) -> None:
        """Let parameters that had gradients be what their owners have made of them."""
        rank, pieces = self.ranks.rank, gathering.bucket.pieces
        others = [p for p in pieces if p.owner != rank and p.parameter in present]
        gathering.write_(self._flats, others)

    def finish(self, present: set[int]) -> None:
        for i in present & self._copies.keys():
            self.params[i].copy_(self._copies[i].view(self.params[i].shape))
