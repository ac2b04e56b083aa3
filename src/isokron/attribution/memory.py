"""How much memory a run needs, computed before its first pass."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.data import Subject, size_of
from isokron.attribution.queries import Query
from isokron.curvature.fit import MAX_TERMS, planned_bytes
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss
from isokron.distributed import Ranks

# copies of a layer's inputs and outputs: those of the graph, and gradients or float32 copies
ACTIVATIONS = 2
LEAST = 64  # tokens of a batch, however short memory is
LOGITS = 3  # logits, their softmax and their gradient


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that a run takes beside what the process holds already.

    statistics and decompositions: of the curvature; activations: of the largest batch; queries:
    gradients of one block of queries, which are scored in one pass.
    """

    limit: int
    statistics: int
    decompositions: int
    activations: int
    queries: int
    block: int = 1  # queries

    @property
    def peak(self) -> int:
        return self.statistics + self.decompositions + self.activations + self.queries

    def summary(self) -> str:
        """One line for the terminal."""
        parts = {
            "statistics": self.statistics,
            "decompositions": self.decompositions,
            "activations": self.activations,
            "queries": self.queries,
        }
        listed = ", ".join(f"{name} {readable(size)}" for name, size in parts.items())
        return f"memory: peak {readable(self.peak)} of {readable(self.limit)} ({listed})"

    def check(self) -> None:
        """Refuse a plan that does not fit, before any work."""
        if self.peak > self.limit:
            raise ValueError(
                f"{self.summary()}: that does not fit; give more --memory, leave large layers out "
                "(--layers '!pattern'), lower --max-side, or shorten the documents (--context)"
            )


class Budget:
    """What the stages of a run need, within a limit that is fixed when it begins."""

    def __init__(self, subject: Subject, lowrank: Sequence[str], memory: int | None) -> None:
        if memory is not None and (isinstance(memory, str) or memory < 1):
            raise ValueError(f"memory must be a number of bytes, such as 2 * 2**30, got {memory!r}")
        self.subject, self.lowrank = subject, lowrank
        self.limit = _limit(memory, subject.device, subject.ranks)

    @cached_property
    def longest(self) -> list[int]:
        """The batch that needs most memory."""
        return self.subject.data.longest()

    @cached_property
    def probe(self) -> "Probe":
        """Of the longest training example."""
        subject = self.subject
        batch = subject.batch(self.longest[-1:])
        return probe_example(subject.model, subject.loss, batch, subject.layers)

    def plan(self, method: str, queries: Sequence[Query] = ()) -> MemoryPlan:
        """Of curvature of this method and of these queries, computed before any pass."""
        subject, probe = self.subject, self.probe
        terms = min(MAX_TERMS, self.terms(range(len(subject.data))))
        planned = planned_bytes(subject.layers, method, lowrank=self.lowrank, terms=terms)
        numbers = sum(
            probe.positions.get(layer.name, 0) * layer.shape[0] * sum(layer.shape[1:])
            for layer in subject.layers
        )
        one_example = 4 * (ACTIVATIONS * numbers + LOGITS * probe.outputs)
        # smaller batches where those of the default size would take most of the memory
        while len(self.longest) * one_example > self.limit // 3 and subject.data.tokens > LEAST:
            subject.data.tokens //= 2
            del self.longest
        wide = len(self.longest) * one_example
        fixed = planned["statistics"] + planned["decompositions"] + wide
        example = size_of(subject.data.batch(self.longest[-1:]))
        length = max((size_of(query.batch) / example for query in queries), default=1.0)
        one = query_bytes(subject.layers, probe, length, dense=method == "ekfac")
        # as many queries to a pass as half of what is left holds, and one at least
        block = (self.limit - fixed) // 2 // max(1, one)
        block = max(1, min(len(queries), block))
        sizes = planned["statistics"], planned["decompositions"], wide, block * one
        return MemoryPlan(self.limit, *sizes, block=block)

    def terms(self, numbers: Iterable[int]) -> int:
        """Loss terms of some examples, at most."""
        lengths = self.subject.data.lengths
        one = max((self.probe.positions[name] for name in self.lowrank), default=1)
        return sum(one if lengths is None else lengths[number] for number in numbers)

    def check_head(self, numbers: Sequence[int]) -> None:
        """Refuse more gradients of a low-rank head than are kept."""
        terms = self.terms(numbers)
        if self.lowrank and terms > MAX_TERMS:
            fewer = max(1, len(numbers) * MAX_TERMS // terms)
            raise ValueError(
                f"head='lowrank' keeps the gradient of every loss term, and there are {terms:,} "
                f"loss terms, more than {MAX_TERMS:,}; give fewer examples to fit (--fit-examples "
                f"{fewer}), or leave the head out"
            )


def query_bytes(
    layers: Sequence[Layer], probe: "Probe", length: float = 1.0, dense: bool = False
) -> int:
    """Of H⁻¹∇ of one query: rank-one terms, or a matrix where that is smaller, or `dense`."""
    total = 0
    for layer in layers:
        blocks, outputs, inputs = layer.shape
        positions = int(length * probe.positions.get(layer.name, 0)) + 1
        terms = positions * (outputs + (1 if layer.kind == "index" else inputs))
        # the eigenvalues of EK-FAC are no product: its H⁻¹∇ has no rank-one terms
        total += 4 * blocks * (outputs * inputs if dense else min(terms, outputs * inputs))
    return total


@dataclass(frozen=True)
class Probe:
    """What one example does in the model: positions of every layer, numbers of the outputs."""

    positions: dict[str, int]
    outputs: int


def probe_example(
    model: nn.Module, loss: Loss | Likelihood, batch: Any, layers: Sequence[Layer]
) -> Probe:
    """A forward pass of one example, without gradients."""
    positions: dict[str, int] = {}
    sizes: list[int] = []

    def hook(name: str, outputs: int) -> Any:
        def seen(_: nn.Module, __: Any, out: Any) -> None:
            first = out[0] if isinstance(out, tuple) else out
            if isinstance(first, Tensor):
                positions[name] = positions.get(name, 0) + max(1, first.numel() // outputs)
                sizes.append(first.numel())

        return seen

    handles = []
    for layer in layers:
        blocks, outputs, inputs = layer.shape
        width = inputs if layer.kind == "diagonal" else blocks * outputs
        handles.append(layer.module.register_forward_hook(hook(layer.name, width)))
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            if isinstance(loss, Likelihood):
                sizes.append(loss.forward(model, batch)[0].numel())
            else:
                loss(model, batch)
    finally:
        for handle in handles:
            handle.remove()
        for module, training in modes.items():
            module.training = training
    return Probe(positions, max(sizes, default=0))


def _limit(memory: int | None, device: torch.device, ranks: Ranks | None) -> int:
    """What is given, or half of what is free; the same on all ranks, whose blocks depend on it."""
    if memory is not None:
        return memory
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
