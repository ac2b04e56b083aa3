"""Memory that a run needs, computed before its first pass."""

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
from isokron.report.render import memory

ACTIVATIONS = 2  # copies of inputs and outputs: in the graph, and as gradients or in float32
LOGITS = 3  # logits, their softmax and their gradient
VECTORS = 6  # gradients held per query while conjugate gradients refine a block of queries
LEAST = 64  # minimum number of tokens in a batch
PASSES = 4  # over the data, above which a store is cheaper than exact scores


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run needs in addition to what the process uses already.

    parts: statistics and decompositions of the curvature, activations of the largest batch, and
    gradients of the queries of one pass. block: number of these queries.
    """

    limit: int
    parts: dict[str, int]
    block: int

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    def summary(self) -> str:
        """One line for the terminal."""
        listed = ", ".join(f"{name} {memory(size)}" for name, size in self.parts.items())
        return f"memory: peak {memory(self.peak)} of {memory(self.limit)} ({listed})"

    def check(self) -> None:
        """Refuse a plan that exceeds the limit."""
        if self.peak > self.limit:
            raise ValueError(
                f"{self.summary()}: that does not fit; give more memory, leave large layers out "
                "(layers='!pattern'), lower max_side, or shorten the documents"
            )


@dataclass(frozen=True)
class Probe:
    """Sizes measured on one example.

    size: tokens, or other numbers. positions: by layer. outputs: elements of the largest output.
    """

    size: int
    positions: dict[str, int]
    outputs: int

    def of(self, layer: str) -> int:
        # an example may not use a layer, such as an expert
        return self.positions.get(layer, self.size)


class Budget:
    """Plans the memory of a run within a limit, by default half of the free memory."""

    def __init__(self, subject: Subject, lowrank: Sequence[str], limit: int | None) -> None:
        if limit is not None and (isinstance(limit, str) or limit < 1):
            raise ValueError(f"memory must be a number of bytes, such as 2 * 2**30, got {limit!r}")
        self.subject, self.lowrank = subject, lowrank
        self.limit = _default_limit(subject.device, subject.ranks) if limit is None else limit

    def plan(
        self, method: str, queries: Sequence[Query] = (), *, refine: bool = False
    ) -> MemoryPlan:
        """The memory of a run with this curvature and these queries."""
        layers, data, probe = self.subject.layers, self.subject.data, self.probe
        terms = min(MAX_TERMS, self._terms(range(len(data))))
        parts = {}
        if method not in ("unroll", "none"):
            planned = planned_bytes(layers, method, lowrank=self.lowrank, terms=terms)
            parts = {name: planned[name] for name in ("statistics", "decompositions")}
        numbers = sum(
            probe.of(layer.name) * layer.shape[0] * sum(layer.shape[1:]) for layer in layers
        )
        example = 4 * (ACTIVATIONS * numbers + LOGITS * probe.outputs)
        # batches become smaller if they would take most of the memory
        while len(data.longest()) * example > self.limit // 3 and data.tokens > LEAST:
            data.tokens //= 2
        parts["activations"] = len(data.longest()) * example
        longest = max((size_of(query.batch) for query in queries), default=probe.size)
        # under EK-FAC, whose eigenvalues are no Kronecker product, H⁻¹∇ is not of low rank
        query = self._query_bytes(longest / probe.size, dense=method == "ekfac")
        if refine:
            # solutions of all queries are kept; a product with G has activations for each query
            vector = 4 * sum(layer.parameters for layer in layers)
            parts["solutions"] = max(1, len(queries)) * vector
            query = VECTORS * vector + parts["activations"]
        # queries of a pass use half of the remaining memory
        block = (self.limit - sum(parts.values())) // 2 // max(1, query)
        block = max(1, min(len(queries), block))
        return MemoryPlan(self.limit, {**parts, "queries": block * query}, block)

    def choose(self, plan: MemoryPlan, queries: int) -> tuple[bool, str]:
        """Whether a store is cheaper than exact scores for so many queries, and why."""
        # exact scores need a pass over the data for each block of queries that fits in memory, a
        # store needs one pass and then a product per query
        passes = -(-queries // plan.block)
        count = f"{queries} queries need" if queries > 1 else "1 query needs"
        takes = f"{passes} pass{'es' if passes > 1 else ''} over the data"
        return passes > PASSES, f"{count} {takes} (a store is built above {PASSES})"

    def _query_bytes(self, length: float, dense: bool) -> int:
        """Bytes of H⁻¹∇ of a query `length` times as long as the probed example."""
        total = 0
        for layer in self.subject.layers:
            blocks, outputs, inputs = layer.shape
            positions = int(length * self.probe.of(layer.name)) + 1
            if layer.kind == "index":
                size = positions * (outputs + 1)
            elif dense:
                size = outputs * inputs
            else:
                # many terms are replaced by matrices, which may be larger
                size = min(SLACK * positions * (outputs + inputs), outputs * inputs)
            total += 4 * blocks * size
        return total

    def _terms(self, numbers: Iterable[int]) -> int:
        """An upper bound on the loss terms of some examples."""
        lengths = self.subject.data.lengths
        one = max((self.probe.of(name) for name in self.lowrank), default=1)
        heads = [layer for layer in self.subject.layers if layer.name in self.lowrank]
        # an embedding that is tied to the head has a gradient for every token too
        uses = max((1 + len(layer.tied) for layer in heads), default=1)
        return sum(one if lengths is None else uses * lengths[number] for number in numbers)

    def check_head(self, numbers: Sequence[int]) -> None:
        """Refuse more loss terms than a low-rank head can store gradients for."""
        terms = self._terms(numbers)
        if self.lowrank and terms > MAX_TERMS:
            fewer = max(1, len(numbers) * MAX_TERMS // terms)
            raise ValueError(
                f"head='lowrank' stores the gradient of every loss term, and there are {terms:,} "
                f"loss terms, more than {MAX_TERMS:,}; fit to fewer examples, at most "
                f"{fewer}, or leave the head out"
            )

    @cached_property
    def probe(self) -> Probe:
        """One pass over the longest training example."""
        subject, positions, sizes = self.subject, dict[str, int](), [0]
        longest = subject.data.longest()[-1:]
        batch = subject.batch(longest)

        def fold(layer: Layer, uses: Uses) -> None:
            positions[layer.name] = uses.grads.size(2)
            sizes.append(uses.grads.numel())

        gradient_passes(subject, subject.batches([longest])).over(fold, check=False)
        # also if the head is left out
        if isinstance(subject.loss, Likelihood):
            with unchanged(subject.model), torch.no_grad():
                sizes.append(subject.loss.forward(subject.model, batch)[0].numel())
        return Probe(size_of(batch), positions, max(sizes))


def _default_limit(device: torch.device, ranks: Ranks | None) -> int:
    """Half of the free memory; the same on all ranks, which must score equal blocks of queries."""
    if ranks is None:
        return available_bytes(device) // 2
    # as if all ranks were on one machine, whose memory they share
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
