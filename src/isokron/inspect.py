"""How ill-conditioned a task's model is: spectra, effective ranks and memory of its curvature."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron._version import __version__
from isokron.curvature import CrossEntropy, Curvature, Event, capture, fit
from isokron.curvature.layers import find_layers
from isokron.operators import woodbury_policy
from isokron.tasks import Batch, Task, load
from isokron.training import Progress, digest, evaluation_loss, load_weights_, silent, train_
from isokron.training import make_model as seeded_model

STEPS = 200  # of training before the fit, unless weights are given
CHOICES = {
    "method": ("kfac", "ekfac", "tkfac", "shampoo"),
    "fisher": ("empirical", "sampled", "exact"),
    "sharing": ("expand", "reduce"),
}
POLICIES = ("none", "all", "hybrid", "auto")
FLOAT, HALF = 4, 2  # bytes of a number
POINTS = 200  # of a spectrum, geometrically spaced

Points = tuple[tuple[int, float], ...]  # number of an eigenvalue, 1 being the largest, and value


@dataclass(frozen=True)
class LayerFacts:
    """One layer.

    blocks, outputs, inputs: of its matrix, the column of a bias included. places: gradients of its
    outputs that one example makes. damping: what is added to every eigenvalue. effective_rank: exp
    of the entropy of the eigenvalues. scaled_rank: the same after the diagonal of the Fisher is
    made 1; None where it is not a product of two sides. kept: eigenvalues above the damping.
    Spectra are thinned out; those of the sides are None where a method has none.
    """

    name: str
    kind: str
    blocks: int
    outputs: int
    inputs: int
    places: int
    bytes: int
    trace: float
    largest: float
    smallest: float
    condition: float
    damping: float
    condition_damped: float
    effective_rank: float
    scaled_rank: float | None
    kept: int
    spectrum: Points
    output_spectrum: Points | None
    input_spectrum: Points | None

    @property
    def dimension(self) -> int:
        return self.blocks * self.outputs * self.inputs

    @property
    def mean(self) -> float:
        return self.trace / self.dimension

    @property
    def peak(self) -> float:
        """Largest over mean eigenvalue."""
        return self.largest / self.mean

    @property
    def share(self) -> float:
        """Effective rank as a share of all directions."""
        return self.effective_rank / self.dimension

    @property
    def scaled_share(self) -> float | None:
        return None if self.scaled_rank is None else self.scaled_rank / self.dimension

    def condition_at(self, multiple: float) -> float:
        """(λ_max + m λ̄) / (λ_min + m λ̄)"""
        added = multiple * self.mean
        return (self.largest + added) / (self.smallest + added)

    def keeps_gradients(self, examples: int, policy: str) -> bool:
        """Whether the policy keeps the T = places · examples gradients of the outputs."""
        gradients = self.places * examples
        return self.kind != "diagonal" and woodbury_policy(self.outputs, gradients, policy)

    def output_bytes(self, examples: int, policy: str, number: int = FLOAT) -> int:
        """Covariance o×o in float32, or gradients o×T of `number` bytes each; one per block."""
        if self.keeps_gradients(examples, policy):
            return self.blocks * self.outputs * self.places * examples * number
        return 0 if self.kind == "diagonal" else self.blocks * self.outputs**2 * FLOAT

    def input_bytes(self) -> int:
        """Covariance i×i; counts of columns for an embedding; the full diagonal for a norm."""
        if self.kind == "diagonal":
            return self.dimension * FLOAT
        return self.blocks * self.inputs ** (1 if self.kind == "index" else 2) * FLOAT


@dataclass(frozen=True)
class Inspection:
    """settings: all that the results depend on. terms: of the loss, over all examples fitted on.

    model_bytes: of the parameters. notes: layers that were left out, and warnings of the fit.
    """

    settings: Mapping[str, Any]
    layers: tuple[LayerFacts, ...]
    terms: int
    model_bytes: int
    evaluation_loss: float
    notes: tuple[str, ...]

    def by_policy(self) -> list[dict[str, Any]]:
        """Per policy: layers kept as gradients, and bytes of all output and input sides."""
        # outputs_half: with the gradients, but not the covariances, in half precision
        layers, examples = self.layers, self.settings["examples"]
        return [
            {
                "policy": policy,
                "gradients": sum(f.keeps_gradients(examples, policy) for f in layers),
                "outputs": sum(f.output_bytes(examples, policy) for f in layers),
                "outputs_half": sum(f.output_bytes(examples, policy, HALF) for f in layers),
                "inputs": sum(f.input_bytes() for f in layers),
            }
            for policy in POLICIES
        ]


@dataclass(eq=False)
class Setup:
    """What is inspected and how; all is checked, and the model made, before any work.

    Args:
        task: whose model is inspected.
        steps: steps of AdamW before the fit; by default 200, or 0 with `weights`.
        lr: learning rate of these steps.
        seed: random seed of the weights, batches and sampled labels.
        weights: a safetensors file with all of the model's weights.
        examples: training examples to fit on.
        method, fisher, sharing: as in `isokron.curvature.fit`.
        layers: patterns of layer names; all layers by default.
        damping: a multiple of each layer's mean eigenvalue.
    """

    task: Task
    steps: int | None = None
    lr: float = 3e-3
    seed: int = 0
    weights: Path | str | None = None
    examples: int = 512
    method: str = "kfac"
    fisher: str = "empirical"
    sharing: str = "expand"
    layers: Sequence[str] = ()
    damping: float = 0.1

    def __post_init__(self) -> None:
        if self.steps is None:
            self.steps = STEPS if self.weights is None else 0
        rules = {name: (f"one of {', '.join(CHOICES[name])}", getattr(self, name) in CHOICES[name])
                 for name in CHOICES}  # fmt: skip
        rules |= {
            "steps": ("at least 0", self.steps >= 0),
            "examples": ("at least 1", self.examples >= 1),
            "seed": ("at least 0", self.seed >= 0),
            "lr": ("a positive number", 0 < self.lr < math.inf),
            "damping": ("a finite number of at least 0", 0 <= self.damping < math.inf),
        }
        for name, (rule, holds) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        if self.fisher != "empirical" and self.task.logits is None:
            raise ValueError(
                f"fisher {self.fisher!r} needs a task with logits; {self.task.name!r} has none: "
                "give Task(logits=...), scores of classes and their targets, or use empirical"
            )
        self.examples = min(self.examples, len(self.task.train))
        self.model = seeded_model(self.task, self.seed)
        if self.weights is not None:
            load_weights_(self.model, Path(self.weights))
        # raises where a pattern matches nothing
        layer_names(self.model, self.layers)


def inspect(
    task: Task | str, *, progress: Progress = silent, **options: Any
) -> tuple[Inspection, Curvature]:
    """Train a task's model, fit its curvature, and measure it. options: those of `Setup`."""
    return measure(Setup(task if isinstance(task, Task) else load(task), **options), progress)


def layer_names(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Names of the layers that have a curvature and match one of the patterns."""
    # without a pattern, embeddings would not be selected
    return [layer.name for layer in find_layers(model, list(patterns) or "*").layers]


def measure(setup: Setup, progress: Progress = silent) -> tuple[Inspection, Curvature]:
    """Train the model as asked, fit its curvature, and compute the facts of every layer."""
    model, task = setup.model, setup.task
    with torch.random.fork_rng(devices=[]):
        if setup.steps:
            train_(model, task, setup.steps, setup.lr, setup.seed, progress)
        model.eval()
        order = example_order(setup)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            places, notes = usable_layers(setup, order[:2])
            curvature = fit(
                model,
                Batches(task, order, progress),
                CrossEntropy(partial(checked_logits, task)) if task.logits else task.losses,
                setup.method,
                fisher=setup.fisher,
                sharing=setup.sharing,
                layers=list(places),
                seed=setup.seed,
            )
        loss = evaluation_loss(model, task)
    records = curvature.report()
    facts = [layer_facts(curvature, r, setup.damping, places[r["layer"]]) for r in records]
    notes = tuple(dict.fromkeys([*notes, *(str(warning.message) for warning in caught)]))
    size = sum(parameter.nbytes for parameter in model.parameters())
    result = Inspection(_settings(setup), tuple(facts), int(records[0]["terms"]), size, loss, notes)
    return result, curvature


def example_order(setup: Setup) -> Tensor:
    """Which training examples are fitted on: the first of a seeded permutation."""
    generator = torch.Generator().manual_seed(setup.seed)
    return torch.randperm(len(setup.task.train), generator=generator)[: setup.examples]


class Batches:
    """Batches of the training examples `order`, which may be iterated several times."""

    def __init__(self, task: Task, order: Tensor, progress: Progress) -> None:
        self.task, self.order, self.progress = task, order, progress

    def __iter__(self) -> Iterator[Batch]:
        parts = self.order.split(self.task.batch_size)
        for i, part in enumerate(parts, start=1):
            yield self.task.train.batch(part)
            # when the next batch is asked for, this one is done
            self.progress("fitting", i, len(parts))


def checked_logits(task: Task, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """What the task's logits return, if the shapes are right."""
    assert task.logits is not None
    scores, targets = task.logits(model, batch)
    if scores.shape[:-1] != targets.shape or targets.is_floating_point():
        shapes = f"{tuple(scores.shape)} and {tuple(targets.shape)} of {targets.dtype}"
        rule = "logits must return scores [..., classes] and integer targets [...]"
        raise ValueError(f"task {task.name!r}: {rule}, got shapes {shapes}")
    return scores, targets


def usable_layers(setup: Setup, few: Tensor) -> tuple[dict[str, int], tuple[str, ...]]:
    """Layers that see every example by itself, each with its places, and notes on the others.

    few: training examples to try it with.
    """
    # an embedding of positions that all examples share has one gradient for all, which has as many
    # places for twice as many examples: no curvature can be made
    once, twice = (_places(setup, order) for order in (few, torch.cat([few, few])))
    places: dict[str, int] = {}
    notes = []
    for name in layer_names(setup.model, setup.layers):
        if name not in once:
            notes.append(f"{name} is left out: the loss does not use it.")
        elif twice[name] < 2 * once[name]:
            shared = "all examples of a batch share its input, so that their gradients come summed"
            notes.append(f"{name} is left out: {shared}.")
        else:
            places[name] = 1 if setup.sharing == "reduce" else once[name] // len(few)
    if not places:
        raise ValueError(f"no layer is left to inspect: {' '.join(notes)}")
    return places, tuple(notes)


def _places(setup: Setup, order: Tensor) -> dict[str, int]:
    """In how many places, examples times positions, each layer is used for one batch."""
    counts: dict[str, int] = {}

    def count(event: Event) -> None:
        places = event.grads.size(1) * event.grads.size(2)
        counts[event.layer.name] = counts.get(event.layer.name, 0) + places

    with capture(setup.model, list(setup.layers) or None, sink=count):
        setup.task.losses(setup.model, setup.task.train.batch(order)).sum().backward()
    setup.model.zero_grad()
    return counts


def layer_facts(
    curvature: Curvature, record: Mapping[str, Any], damping: float, places: int
) -> LayerFacts:
    """record: of the curvature's report; damping: a multiple of the layer's mean eigenvalue."""
    spectrum = curvature.spectrum(name := record["layer"])
    values, sides = spectrum.values.double().clamp_min(0), spectrum.sides
    largest, smallest, added = float(values.max()), float(values.min()), damping * values.mean()
    floor = smallest + float(added)
    names = ("kind", "blocks", "outputs", "inputs", "bytes", "trace", "condition", "effective_rank")
    return LayerFacts(
        name=name,
        **{key: record[key] for key in names},
        places=places,
        largest=largest,
        smallest=smallest,
        damping=float(added),
        condition_damped=(largest + float(added)) / floor if floor > 0 else math.inf,
        scaled_rank=None if sides is None else scaled_rank(curvature.layers[name].statistics),
        kept=int((values > added).sum()),
        spectrum=thinned(values),
        output_spectrum=None if sides is None else thinned(sides[0].double()),
        input_spectrum=None if sides is None else thinned(sides[1].double()),
    )


def thinned(values: Tensor, count: int = POINTS) -> Points:
    """Eigenvalues in falling order, those above 0, at about `count` numbers 1 … n."""
    ordered = values.flatten().sort(descending=True).values
    n = int((ordered > 0).sum())
    numbers = sorted({round(n ** (i / (count - 1))) for i in range(count)}) if n else []
    # four digits are more than a plot can show
    return tuple((number, float(f"{float(ordered[number - 1]):.4g}")) for number in numbers)


def scaled_rank(statistics: Mapping[str, Tensor]) -> float | None:
    """Effective rank of D^-½ (G ⊗ A) D^-½, D the diagonal; None where the sides are not kept."""
    # it is the product of both sides' correlation matrices: what diagonal scaling leaves
    if not {"output", "input"} <= set(statistics):
        return None
    left, right = (_correlations(statistics[side]) for side in ("output", "input"))
    p = (left[:, :, None] * right[:, None, :]).clamp_min(0).flatten()  # [B, o] and [B, i]
    p = p[p > 0] / p.sum()
    return float((-(p * p.log()).sum()).exp()) if len(p) else 0.0


def _correlations(side: Tensor) -> Tensor:
    """Eigenvalues of the correlations of a covariance; a unit that is always 0 has none."""
    # uncorrelated columns, by their counts
    if side.ndim == 2:
        return (side > 0).double()
    side = side.double()
    diagonal = side.diagonal(dim1=1, dim2=2)
    root = torch.where(diagonal > 0, diagonal.clamp_min(1e-300).rsqrt(), 0.0)
    return torch.linalg.eigvalsh(side * root[:, :, None] * root[:, None, :])


def _settings(setup: Setup) -> dict[str, Any]:
    """All that the result depends on, as JSON."""
    task = setup.task
    return {
        "task": task.name,
        "unit": task.unit,
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "weights": Path(setup.weights).name if setup.weights else f"made from seed {setup.seed}",
        "training": f"{setup.steps} steps of AdamW" if setup.steps else "none",
        "learning rate": setup.lr if setup.steps else "none",
        "batch size": task.batch_size,
        "seed": setup.seed,
        "examples": setup.examples,
        "method": setup.method,
        "fisher": setup.fisher,
        "sharing": setup.sharing,
        "layers": list(setup.layers) or "all",
        "damping": setup.damping,
        "terms": "predictions" if task.logits else "examples",
        "weights digest": digest(setup.model.state_dict().values()),
        "torch": torch.__version__,
        "isokron": __version__,
    }
