"""How much memory a run needs, computed before its first pass."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from isokron.attribution.data import Subject, size_of
from isokron.attribution.queries import Query
from isokron.attribution.score import SLACK, gradient_passes
from isokron.curvature.backward import unchanged
from isokron.curvature.fit import MAX_TERMS, planned_bytes
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood
from isokron.curvature.statistics import Uses
from isokron.distributed import Ranks

# copies of a layer's inputs and outputs: those of the graph, and gradients or float32 copies
ACTIVATIONS = 2
LOGITS = 3  # logits, their softmax and their gradient
LEAST = 64  # tokens of a batch, however short memory is


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run takes beside what the process holds already.

    parts: statistics and decompositions of the curvature, activations of the largest batch, and
    the gradients of one block of queries, which are scored in one pass.
    """

    limit: int
    parts: dict[str, int]
    block: int  # queries

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    def summary(self) -> str:
        """One line for the terminal."""
        listed = ", ".join(f"{name} {readable(size)}" for name, size in self.parts.items())
        return f"memory: peak {readable(self.peak)} of {readable(self.limit)} ({listed})"

    def check(self) -> None:
        """Refuse a plan that does not fit, before any work."""
        if self.peak > self.limit:
            raise ValueError(
                f"{self.summary()}: that does not fit; give more --memory, leave large layers out "
                "(--layers '!pattern'), lower --max-side, or shorten the documents (--context)"
            )


@dataclass(frozen=True)
class Probe:
    """What one example does in the model. size: its tokens, or other numbers."""

    size: int
    positions: dict[str, int]  # by layer
    outputs: int  # numbers of the largest output

    def of(self, layer: str) -> int:
        # an example may have no gradient at a layer, as at an expert without a token
        return self.positions.get(layer, self.size)


class Budget:
    """What the stages of a run need, within a limit that is fixed when it begins."""

    def __init__(self, subject: Subject, lowrank: Sequence[str], memory: int | None) -> None:
        if memory is not None and (isinstance(memory, str) or memory < 1):
            raise ValueError(f"memory must be a number of bytes, such as 2 * 2**30, got {memory!r}")
        self.subject, self.lowrank = subject, lowrank
        self.limit = _default_limit(subject.device, subject.ranks) if memory is None else memory

    def plan(self, method: str, queries: Sequence[Query] = ()) -> MemoryPlan:
        """For curvature of this method and for these queries."""
        layers, data, probe = self.subject.layers, self.subject.data, self.probe
        terms = min(MAX_TERMS, self._terms(range(len(data))))
        planned = planned_bytes(layers, method, lowrank=self.lowrank, terms=terms)
        parts = {name: planned[name] for name in ("statistics", "decompositions")}
        numbers = sum(
            probe.of(layer.name) * layer.shape[0] * sum(layer.shape[1:]) for layer in layers
        )
        example = 4 * (ACTIVATIONS * numbers + LOGITS * probe.outputs)
        # smaller batches where those of the default size would take most of the memory
        while len(data.longest()) * example > self.limit // 3 and data.tokens > LEAST:
            data.tokens //= 2
        parts["activations"] = len(data.longest()) * example
        longest = max((size_of(query.batch) for query in queries), default=probe.size)
        # the eigenvalues of EK-FAC are no product: its H⁻¹∇ has no rank-one terms
        query = self._query_bytes(longest / probe.size, dense=method == "ekfac")
        # as many queries to a pass as half of what is left holds, and one at least
        block = (self.limit - sum(parts.values())) // 2 // max(1, query)
        block = max(1, min(len(queries), block))
        return MemoryPlan(self.limit, {**parts, "queries": block * query}, block)

    def _query_bytes(self, length: float, dense: bool) -> int:
        """Of H⁻¹∇ of a query `length` times as long as the probed example."""
        total = 0
        for layer in self.subject.layers:
            blocks, outputs, inputs = layer.shape
            positions = int(length * self.probe.of(layer.name)) + 1
            if layer.kind == "index":
                size = positions * (outputs + 1)
            elif dense:
                size = outputs * inputs
            else:
                # many terms may become matrices that take some more
                size = min(SLACK * positions * (outputs + inputs), outputs * inputs)
            total += 4 * blocks * size
        return total

    def _terms(self, numbers: Iterable[int]) -> int:
        """Loss terms of some examples, at most."""
        lengths = self.subject.data.lengths
        one = max((self.probe.of(name) for name in self.lowrank), default=1)
        return sum(one if lengths is None else lengths[number] for number in numbers)

    def check_head(self, numbers: Sequence[int]) -> None:
        """Refuse more gradients of a low-rank head than are kept."""
        terms = self._terms(numbers)
        if self.lowrank and terms > MAX_TERMS:
            fewer = max(1, len(numbers) * MAX_TERMS // terms)
            raise ValueError(
                f"head='lowrank' keeps the gradient of every loss term, and there are {terms:,} "
                f"loss terms, more than {MAX_TERMS:,}; give fewer examples to fit (--fit-examples "
                f"{fewer}), or leave the head out"
            )

    @cached_property
    def probe(self) -> Probe:
        """One pass over the longest training example."""
        subject, positions, sizes = self.subject, dict[str, int](), [0]
        batch = subject.batch(subject.data.longest()[-1:])

        def fold(layer: Layer, uses: Uses) -> None:
            positions[layer.name] = uses.grads.size(2)
            sizes.append(uses.grads.numel())

        gradient_passes(subject, [batch]).over(fold, check=False)
        # a head that is left out has logits all the same
        if isinstance(subject.loss, Likelihood):
            with unchanged(subject.model), torch.no_grad():
                sizes.append(subject.loss.forward(subject.model, batch)[0].numel())
        return Probe(size_of(batch), positions, max(sizes))


def _default_limit(device: torch.device, ranks: Ranks | None) -> int:
    """Half of what is free; the same on all ranks, whose blocks of queries depend on it."""
    if ranks is None:
        return available_bytes(device) // 2
    # ranks on one machine share its memory; those of several machines use less than they could
    least = min(int(text) for text in ranks.gather_text(str(available_bytes(device))))
    return least // (2 * ranks.size)


def available_bytes(device: torch.device) -> int:
    """Free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    status = Path("/proc/meminfo")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)


def readable(size: float) -> str:
    """1536 → 1.5 KiB"""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
