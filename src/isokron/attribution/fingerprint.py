"""What a result belongs to, besides its settings: weights, data, and what the loss does.

The loss, the collate function and the code of the model cannot be hashed. What they do can be
measured: losses of two training examples and the norms of their gradients at a few layers. These
numbers are recorded, and compared with a tolerance, since other threads or another CPU round
differently.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.data import Subject
from isokron.attribution.score import gradient_passes, squared_length
from isokron.curvature.layers import Layer
from isokron.curvature.statistics import Uses
from isokron.digest import weights_digest
from isokron.files import check_same

LAYERS = 4  # whose gradients are measured
SEARCHED = 16  # examples of which the first two with a loss are measured
LARGEST = 2**24  # parameters of such a layer, if there are smaller ones
TOLERANCE = 1e-3  # relative
ROUNDING = 8  # the same as a multiple of the machine epsilon, for half precision
FLOOR = 1e-3  # of the tolerance: a loss below it is what rounding leaves of numbers near 1
TINY = 1e-30
LOSSES = "losses"

Numbers = dict[str, list[float | None]]


@dataclass(frozen=True)
class Fingerprint:
    """The weights and the data by their digests, the loss by what it gives.

    loss: losses of two examples, norms of their gradients by layer, and the sum of all weights.
    tolerance: relative, for these.
    """

    weights: str
    data: str
    loss: Numbers
    tolerance: float

    def record(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def digests(self) -> dict[str, Any]:
        return {"weights": self.weights, "data": self.data}

    def loss_differences(self, recorded: Mapping[str, Any]) -> list[str]:
        """The numbers that differ by more than rounding, each with both values."""
        old: Numbers = recorded.get("loss") or {}
        tolerance = max(self.tolerance, recorded.get("tolerance") or 0.0)
        floor = FLOOR * tolerance
        losses, *norms = (_sizes(numbers) for numbers in self.loss.values())
        # a gradient is as inexact as its loss, and has the rounding errors of the largest
        slack = tolerance + floor / max(min(losses, default=1.0), TINY)
        largest = max((size for sizes in norms for size in sizes), default=0.0)
        wrong = []
        for name in {**old, **self.loss}:
            was, now = old.get(name, []), self.loss.get(name, [])
            limits = (tolerance, floor) if name == LOSSES else (slack, floor * largest)
            same = (_close(a, b, *limits) for a, b in zip(was, now, strict=False))
            if len(was) != len(now) or not all(same):
                wrong.append(f"{name} were {_shown(was)}, are {_shown(now)}")
        return wrong


def _sizes(numbers: list[float | None]) -> list[float]:
    return [abs(number) for number in numbers if number is not None]


def _close(a: float | None, b: float | None, tolerance: float, floor: float) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= tolerance * max(abs(a), abs(b)) + floor


def _shown(numbers: list[float | None]) -> str:
    return "[" + ", ".join("none" if x is None else f"{x:.6g}" for x in numbers) + "]"


class Fingerprints:
    """The fingerprint of a subject; taken again when its weights have changed."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.data = subject, subject.data.digest()
        self.latest: Fingerprint | None = None

    def now(self) -> Fingerprint:
        weights = weights_digest(self.subject.model)
        if self.latest is None or self.latest.weights != weights:
            numbers, tolerance = measured_loss(self.subject)
            self.latest = Fingerprint(weights, self.data, numbers, tolerance)
        return self.latest

    def check(self, path: Path, what: str, recorded: Mapping[str, Any]) -> None:
        """Refuse a record of another fingerprint."""
        now = self.now()
        old = {name: recorded.get(name) for name in now.digests()}
        check_same(path, what, old, now.digests())
        self.check_loss(path, recorded)

    def refuse_random(self) -> None:
        """Refuse a loss that is another one when it is computed again."""
        now = self.now()
        again = replace(now, loss=measured_loss(self.subject)[0])
        if random := again.loss_differences(now.record()):
            raise ValueError(
                "the loss must be the same whenever it is computed, and for the first examples "
                f"{random[0]}, one after the other; make loss, collate and model deterministic"
            )

    def check_loss(self, path: Path, recorded: Mapping[str, Any]) -> None:
        """Refuse a record of another loss, collate function or model code."""
        now = self.now()
        if not (wrong := now.loss_differences(recorded)):
            return
        self.refuse_random()
        raise ValueError(
            f"{path} has another loss, collate function or model code, by the first examples: "
            f"{'; '.join(wrong[:3])}; give a new folder"
        )


def measured_loss(subject: Subject) -> tuple[Numbers, float]:
    """Losses and gradient norms of the first two examples, and the tolerance of their rounding."""
    layers = measured_layers(subject.layers)
    squares = {layer.name: torch.zeros(1) for layer in layers}

    def fold(layer: Layer, uses: Uses) -> None:
        length = squared_length(layer, uses, None).cpu()
        earlier = squares[layer.name]
        squares[layer.name] = length if len(earlier) != len(length) else earlier + length

    few, count = replace(subject, layers=layers), len(subject.data)
    with _Precision(layers) as precision:
        for first in range(0, min(SEARCHED, count), 2):
            numbers = list(range(first, min(first + 2, count)))
            passes = gradient_passes(few, few.batches([numbers]))
            passes.over(fold, check=False)
            if passes.count:  # the first ones may have no loss that counts
                break
    record = {LOSSES: _numbers(passes.losses)}
    record |= {
        f"gradient norms of {name!r}": _numbers(square.clamp_min(0).sqrt())
        for name, square in squares.items()
    }
    # losses with other weights may be the same, and have another curvature
    record["weights of all terms"] = [passes.count]
    return record, max(TOLERANCE, ROUNDING * precision.epsilon)


def measured_layers(layers: list[Layer]) -> list[Layer]:
    """A few of the layers, the first and the last of them included."""
    small = [layer for layer in layers if layer.parameters <= LARGEST]
    small = small or sorted(layers, key=lambda layer: layer.parameters)[:1]
    count = min(LAYERS, len(small))
    return [small[k * (len(small) - 1) // max(1, count - 1)] for k in range(count)]


def _numbers(values: Tensor) -> list[float | None]:
    """One number per example, or their sum where terms cannot be told apart by example."""
    values = values.detach().double().flatten()
    listed = values.tolist() if len(values) <= 2 else [float(values.sum())]
    return [value if isfinite(value) else None for value in listed]


class _Precision:
    """The largest machine epsilon of what some layers compute, which autocast may change."""

    def __init__(self, layers: list[Layer]) -> None:
        self.modules = {layer.module for layer in layers}
        exact = torch.get_float32_matmul_precision() == "highest"
        self.epsilon = 0.0 if exact else torch.finfo(torch.bfloat16).eps

    def __enter__(self) -> "_Precision":
        self.hooks = [module.register_forward_hook(self._see) for module in self.modules]
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self.hooks:
            hook.remove()

    def _see(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(outputs, Tensor) and outputs.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(outputs.dtype).eps)
