"""The search for an optimizer's best setting, the same for all; somebody else trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, TypeAlias

from isokron.optimizers_by_name import YARDSTICK, Entrant, parse_spec

CENTRE = 1e-2  # rates are this times a power of √2
FARTHEST = 16  # half octaves from there to the lowest and the highest rate tried
RATIOS = (1, 3, 10)  # of the rate of everything else to that of hidden matrices
# of AdamW; the first of each is tried first
DECAYS, BETAS = (0.1, 0.01), (0.95, 0.99, 0.999)
PAIRS = 3  # of rates, with which AdamW gets all of these
FINALISTS = 4  # settings that are trained at full length

# a run: setting, steps and seed
Key: TypeAlias = "tuple[Setting, int, int]"
Plans: TypeAlias = Iterator[list[Key]]
# the final loss of a run: infinite if it diverged, nan if it failed
Loss: TypeAlias = Callable[["Setting", int, int], float]


@dataclass(frozen=True)
class Setting:
    """What a run depends on beside its task, seed and steps.

    name: the optimizer, with its options.
    lr: learning rate of hidden matrices.
    ratio: of the rate of everything else (embeddings, head, norms, biases) to it.
    decay, beta2: weight decay and β₂ in a search for AdamW's; None: the optimizer's own.
    """

    name: str
    lr: float
    ratio: float = 1
    decay: float | None = None
    beta2: float | None = None

    def __str__(self) -> str:
        """Without the name, and without what are AdamW's defaults."""
        parts = [f"{self.lr:g}"]
        if self.ratio != 1:
            parts.append(f"rest × {self.ratio:g}")
        if self.beta2 not in (None, 0.999):
            parts.append(f"β₂ {self.beta2:g}")
        if self.decay not in (None, 0.01):
            parts.append(f"decay {self.decay:g}")
        return ", ".join(parts)

    @property
    def options(self) -> dict[str, Any]:
        """Options of `Entrant.build`, beside the learning rate."""
        options: dict[str, Any] = {}
        if self.decay is not None:
            options["weight_decay"] = self.decay
        if self.beta2 is not None:
            options["betas"] = (0.9, self.beta2)
        if self.ratio != 1:
            options["lr_scale"] = {"matrices": 1.0, "*": float(self.ratio)}
        return options

    def moved(self, half_octaves: int) -> list[Setting]:
        """The same with the rate times a power of √2; none if that is too far."""
        place = round(2 * math.log2(self.lr / CENTRE)) + half_octaves
        lr = float(f"{CENTRE * 2 ** (place / 2):.3g}")
        return [replace(self, lr=lr)] if abs(place) <= FARTHEST else []


def quarter(steps: int) -> int:
    """The length at which settings are compared first."""
    return max(1, steps // 4)


@dataclass
class Search:
    """The settings of one optimizer that were asked for so far; see `plans`.

    start: the middle of the first three rates.
    choices: of weight decay and β₂, that of `start` first.
    short, full: settings asked for at a quarter of the length, and at all of it.
    """

    start: Setting
    ratios: Sequence[float]
    choices: Sequence[tuple[float | None, float | None]]
    steps: int
    seeds: int
    loss: Loss
    short: list[Setting] = field(default_factory=list)
    full: list[Setting] = field(default_factory=list)

    def plans(self) -> Plans:
        """Lists of runs, each depending on the losses of those before.

        First at a quarter of the length, on seed 0: three rates a factor of 2 apart with each
        ratio, further rates while the best of a ratio is at an edge, and every other choice for the
        best pairs. The best settings then train at full length, and the best of these with rates a
        factor of √2 above and below, until a better one is not found. It gets all seeds; if one
        diverges, so does the next best.
        """
        steps, short = self.steps, quarter(self.steps)
        first = [replace(self.start, ratio=ratio) for ratio in self.ratios]
        new = [s for setting in first for k in (-2, 0, 2) for s in setting.moved(k)]
        while new:
            self.short += new
            yield [(setting, short, 0) for setting in new]
            new = [setting for ratio in self.ratios for setting in self._beyond_edge(ratio)]
        if len(self.choices) > 1:
            new = [
                replace(setting, decay=decay, beta2=beta2)
                for setting in self.ranked(self.short, short)[:PAIRS]
                for decay, beta2 in self.choices[1:]
            ]
            self.short += new
            yield [(setting, short, 0) for setting in new]
        new = self.ranked(self.short, short)[:FINALISTS]
        while new:
            self.full += new
            yield [(setting, steps, 0) for setting in new]
            new = [setting for setting in self._around_best() if setting not in self.full]
        for best in self.ranked(self.full, steps) if self.seeds > 1 else ():
            yield [(best, steps, seed) for seed in range(1, self.seeds)]
            if all(math.isfinite(self.loss(best, steps, seed)) for seed in range(self.seeds)):
                return

    def ranked(self, settings: Sequence[Setting], steps: int) -> list[Setting]:
        """Those that finished, by the loss of seed 0."""
        finite = [s for s in settings if math.isfinite(self.loss(s, steps, 0))]
        return sorted(finite, key=lambda setting: self.loss(setting, steps, 0))

    def _best(self, settings: Sequence[Setting], steps: int) -> list[Setting]:
        """The best; of settings that all diverged, the lowest rate; none if they failed."""
        if ranked := self.ranked(settings, steps):
            return ranked[:1]
        diverged = [s for s in settings if not math.isnan(self.loss(s, steps, 0))]
        return sorted(diverged, key=lambda setting: setting.lr)[:1]

    def _beyond_edge(self, ratio: float) -> list[Setting]:
        """The next rate at this ratio, where the best of those tried is the lowest or highest."""
        settings = [setting for setting in self.short if setting.ratio == ratio]
        rates = [setting.lr for setting in settings]
        for best in self._best(settings, quarter(self.steps)):
            if best.lr == min(rates):
                return best.moved(-2)
            if best.lr == max(rates):
                return best.moved(2)
        return []

    def _around_best(self) -> list[Setting]:
        best = self._best(self.full, self.steps)
        return [near for setting in best for k in (-1, 1) for near in setting.moved(k)]


def search_for(entrant: Entrant, steps: int, seeds: int, loss: Loss) -> Search:
    """The search over whatever the optimizer's options leave open."""
    name, options = parse_spec(entrant.spec)
    adamw = name == YARDSTICK
    decays = DECAYS if adamw and "weight_decay" not in options else (None,)
    betas = BETAS if adamw and "betas" not in options else (None,)
    choices = list(product(decays, betas))
    start = Setting(entrant.spec, entrant.lr, 1, *choices[0])
    return Search(start, RATIOS if entrant.two_rates else (1,), choices, steps, seeds, loss)
