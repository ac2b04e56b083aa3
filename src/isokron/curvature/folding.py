"""What every batch shows of all layers, folded into their statistics."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isokron.curvature import heads, statistics
from isokron.curvature.columns import Columns, Policy
from isokron.curvature.division import Division, Segments
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Sums, Uses, either, mirrored, reduced

KEPT = 2**24  # bytes of inputs and gradients that are kept for a second look, to save a second pass

Layers = dict[str, Sums]  # by name
TERMS = ".."  # no layer's name, under which the loss terms are counted


class Kept:
    """Uses of a segment's batches, to be looked at again; `uses` is None where they are too many.

    That is for the segment to say alone: its bits are not to depend on who has which others.
    """

    def __init__(self, batches: int, most: int) -> None:
        self.batches, self.most = batches, most  # 0 where their number is not known; bytes
        self.uses: list[tuple[Site, Uses]] | None = []
        self.size, self.done = 0, 0

    def add(self, site: Site, uses: Uses) -> None:
        if self.uses is None:
            return
        self.size += uses.inputs.nbytes + uses.grads.nbytes
        # what will not all fit is dropped at once, and not when half of the data are held
        if self.size > self.most or self.size * self.batches > self.most * (self.done + 1):
            self.uses = None
            return
        # a copy of inputs, for they may lie in memory that the next batch writes to
        self.uses.append((site, replace(uses, inputs=uses.inputs.clone())))


class Folding:
    """The statistics of a first pass. `batches`: how many there will be, 0 if that is not known."""

    def __init__(
        self,
        sites: Sequence[Site],
        method: str,
        fisher: str,
        sharing: str,
        policy: Policy,
        batches: int,
        division: Division,
    ) -> None:
        self.method, self.fisher, self.sharing = method, fisher, sharing
        self.waiting: dict[str, tuple[Site, Uses]] = {}
        self.division, self.batches = division, batches
        self.kept: list[Kept] = []
        names = [site.name for site in sites]

        def fresh() -> Layers:
            segment = len(self.kept) + (division.own().start)
            count = division.end(segment, batches) - division.end(segment - 1, batches)
            kept = Kept(count, KEPT // division.segments)
            if fisher == "sampled":  # the second look is at other labels
                kept.uses = None
            self.kept.append(kept)
            return {TERMS: Sums(), **{name: Columns(policy) for name in names}}

        known = batches if division.segments > 1 else 0
        self.segments = Segments(division, known, fresh, added)

    def take(self, site: Site, uses: Uses) -> None:
        """The uses of one layer in one backward pass, or in place of all of them, of a softmax."""
        own = self.segments.now[site.name]
        by_sides = self.method in ("kfac", "ekfac")
        if uses.kind == "softmax":
            self.kept[-1].uses = None
            if by_sides:
                heads.covariance_(own, uses)
                self.waiting[site.name] = site, uses
            else:
                heads.traced_(own, uses, self.sharing if self.method == "tkfac" else "expand")
            return
        shared = self._shared(uses)
        if uses.kind == "diagonal":
            statistics.diagonal_(own, uses, list(site.layout.params))
        elif by_sides and self.fisher == "exact":
            statistics.output_covariance_(own, shared)
            before = self.waiting.get(site.name, (site, None))[1]
            self.waiting[site.name] = site, either(before, uses)
        elif by_sides:
            statistics.covariances_(own, shared, site.columns)
        elif self.method == "tkfac":
            statistics.traced_(own, shared, site.columns)
        else:
            statistics.gradients_(own, uses, site.columns)
        if self.method == "ekfac" and uses.kind != "diagonal":
            self.kept[-1].add(site, uses)

    def end(self, terms: float) -> None:
        """Of a batch. Inputs count once, however many passes went back from them."""
        now = self.segments.now
        for site, uses in self.waiting.values():
            statistics.input_covariance_(now[site.name], self._shared(uses), site.columns)
        self.waiting.clear()
        total = now[TERMS].into("terms", torch.zeros((), dtype=torch.float64))
        total += terms
        self.kept[-1].done += 1
        self.segments.advance()

    def again(self) -> list[Kept] | None:
        """What was kept of all segments, if all of it was."""
        return None if any(kept.uses is None for kept in self.kept) else self.kept

    def _shared(self, uses: Uses) -> Uses:
        return reduced(uses) if self.sharing == "reduce" else uses


def added(one: Layers, other: Layers) -> Layers:
    for name, sums in other.items():
        one[name].add(sums)
    return one


def means(layer: str, sums: Sums, terms: float) -> dict[str, Tensor]:
    """Sums made means: by the positions for inputs of K-FAC, by the terms for all others. The sums
    are gone then."""
    columns = sums.kept(terms) if isinstance(sums, Columns) else {}
    found = mirrored(sums)
    if "softmax" in found:
        found["output"] = heads.output_side(found)
    places = found.pop("places", None)
    for name, value in found.items():
        value.div_(float(places) if name == "input" and places is not None else terms)
    found.update(columns)
    check_finite(layer, found)
    return found


def check_finite(layer: str, found: dict[str, Tensor]) -> None:
    for name, value in found.items():
        if not bool(torch.stack(value.aminmax()).isfinite().all()):  # without a copy of it
            raise FloatingPointError(
                f"layer {layer!r}: {name} statistics are not finite; look for NaN or Inf in the "
                "data, or for losses that overflow in half precision"
            )
