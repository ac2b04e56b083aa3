"""Measure the curvature of a task's model, and report its conditioning by layer."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from isokron import training
from isokron._version import __version__
from isokron.curvature import CrossEntropy, Curvature, Event, Selection, capture, find_layers, fit
from isokron.curvature.check import check_layers
from isokron.curvature.curvature import condition_number
from isokron.curvature.fit import FISHERS, METHODS, SHARINGS
from isokron.files import write_atomically
from isokron.operators import woodbury_policy
from isokron.optimizers_by_name import resolve
from isokron.report.charts import COLOURS, Dots, Line, Plot, Row
from isokron.report.render import MISSING, finite, health_row, memory, render
from isokron.tasks import Batch, Task
from isokron.training import Progress, silent

LayerFacts = SimpleNamespace  # the numbers of one layer: see `layer_facts`
POLICIES = ("dense", "all", "hybrid", "auto")
FLOAT = 4  # bytes of a number
POINTS = 200  # points of a spectrum, geometrically spaced
RECORDS, PAGE = "inspect.json", "index.html"
# columns in the order in which a narrow terminal drops them
SPARE = ("kind", "trace", "condition", "above damping", "statistics", "outputs × inputs")
LOG: Any = {"x_log": True, "y_log": True, "empty": "no curvature"}
# spectrum of a layer → title and unit of its plots
SPECTRA = {
    "spectrum": ("All eigenvalues", "eigenvalue / mean"),
    "input_spectrum": ("Side of the inputs, A", "eigenvalue / largest"),
    "output_spectrum": ("Side of the output gradients, G", "eigenvalue / largest"),
}


@dataclass(eq=False)
class Setup:
    """The arguments of an inspection, validated; the model is created from them.

    Args:
        task: the model, its data and its loss.
        steps: training steps before the fit; default: 200, or 0 with `weights`.
        lr: learning rate of these steps; default: the middle of the optimizer's sweep in a race.
        seed: random seed of weights, batches and sampled labels.
        weights: a safetensors file with all of the model's weights.
        examples: training examples to fit on.
        method: as in `isokron.curvature.fit`.
        fisher: as in `isokron.curvature.fit`.
        sharing: as in `isokron.curvature.fit`.
        layers: patterns of layer names; default: all layers.
        damping: a multiple of each layer's mean eigenvalue.
        optimizer: of these steps, as in a race.
    """

    task: Task
    steps: int | None = None
    lr: float | None = None
    seed: int = 0
    weights: Path | str | None = None
    examples: int = 512
    method: str = "kfac"
    fisher: str = "empirical"
    sharing: str = "expand"
    layers: Sequence[str] = ()
    damping: float = 0.1
    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        if self.steps is None:
            self.steps = 200 if self.weights is None else 0
        self.entrant = resolve(self.optimizer)
        if self.lr is None:
            self.lr = self.entrant.lr
        rules = {
            "steps": (self.steps >= 0, "at least 0"),
            "examples": (self.examples >= 1, "at least 1"),
            "lr": (0 < self.lr < math.inf, "a positive number"),
            "damping": (0 <= self.damping < math.inf, "a finite number of at least 0"),
            "method": (self.method in METHODS, f"one of {', '.join(METHODS)}"),
            "fisher": (self.fisher in FISHERS, f"one of {', '.join(FISHERS)}"),
            "sharing": (self.sharing in SHARINGS, f"one of {', '.join(SHARINGS)}"),
        }
        for name, (holds, rule) in rules.items():
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)!r}")
        if self.fisher != "empirical" and self.task.logits is None:
            raise ValueError(
                f"fisher {self.fisher!r} needs a task with logits; {self.task.name!r} has none: "
                "give Task(logits=...), scores of classes and their targets, or use empirical"
            )
        self.model = training.make_model(self.task, self.seed)
        if self.weights is not None:
            training.load_weights_(self.model, Path(self.weights))
        self.loss = CrossEntropy(self.task.logits) if self.task.logits else self.task.losses
        # without a pattern, embeddings would not be selected
        self.selection = find_layers(self.model, list(self.layers) or "*")
        generator = torch.Generator().manual_seed(self.seed)
        self.order = torch.randperm(len(self.task.train), generator=generator)[: self.examples]
        self.examples = len(self.order)

    def settings(self) -> dict[str, Any]:
        """Everything that the result depends on, JSON-able."""
        return {
            "task": self.task.name,
            "unit": self.task.unit,
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "weights": Path(self.weights).name if self.weights else f"made from seed {self.seed}",
            "training": f"{self.steps} steps of {self.optimizer}" if self.steps else "none",
            "optimizer": self.optimizer if self.steps else "none",
            "learning rate": self.lr if self.steps else "none",
            "batch size": self.task.batch_size,
            **{x: getattr(self, x) for x in ("seed", "examples", "method", "fisher", "sharing")},
            "layers": list(self.layers) or "all",
            "damping": self.damping,
            "terms": "predictions" if self.task.logits else "examples",
            "weights digest": training.digest(self.model.state_dict().values()),
            "torch": torch.__version__,
            "isokron": __version__,
        }


@dataclass(frozen=True)
class Inspection:
    """What `measure` finds out."""

    settings: dict[str, Any]  # all that the result depends on
    layers: tuple[LayerFacts, ...]
    terms: int  # of the loss, over all examples fitted on
    model_bytes: int  # of the parameters
    evaluation_loss: float
    notes: tuple[str, ...]  # on layers that were left out
    statistics: list[dict[str, Any]]  # of the optimizer after the last step, if it has them


def measure(setup: Setup, progress: Progress = silent) -> tuple[Inspection, Curvature]:
    """Train the model, fit its curvature, and compute the numbers of every layer."""
    model, task = setup.model, setup.task
    with torch.random.fork_rng(devices=[]):
        statistics = train_(setup, progress) if setup.steps else []
        selection, places, notes = usable_layers(setup)
        batches = ExampleBatches(setup, progress)
        options: Any = {"fisher": setup.fisher, "sharing": setup.sharing, "seed": setup.seed}
        curvature = fit(model, batches, setup.loss, setup.method, selection=selection, **options)
        loss = training.evaluation_loss(model, task)
    records = curvature.report()
    facts = tuple(layer_facts(curvature, r, setup, places[r["layer"]]) for r in records)
    size = sum(parameter.nbytes for parameter in model.parameters())
    terms = int(records[0]["terms"])
    return Inspection(setup.settings(), facts, terms, size, loss, notes, statistics), curvature


def train_(setup: Setup, progress: Progress) -> list[dict[str, Any]]:
    """Train the model, and return `optimizer.statistics()`, [] if the optimizer has none."""
    assert setup.steps is not None
    assert setup.lr is not None
    optimizer: Any = setup.entrant.build(setup.model, setup.lr)
    statistics = getattr(optimizer, "statistics", list)
    statistics()  # the first call turns recording on
    arguments = (setup.model, setup.task, setup.steps, setup.lr, setup.seed, progress)
    training.train_(*arguments, optimizer=optimizer)
    numbers: list[dict[str, Any]] = statistics()
    # averaged weights take the place of the last ones, and hooks leave the model
    for method in ("eval", "close"):
        getattr(optimizer, method, lambda: None)()
    return numbers


@dataclass
class ExampleBatches:
    """Batches of the examples to fit on; can be iterated several times."""

    setup: Setup
    progress: Progress

    def __iter__(self) -> Iterator[Batch]:
        parts = self.setup.order.split(self.setup.task.batch_size)
        for i, part in enumerate(parts, start=1):
            yield self.setup.task.train.batch(part)
            # this batch is done when the next one is requested
            self.progress("fitting", i, len(parts))


def usable_layers(setup: Setup) -> tuple[Selection, Counter[str], tuple[str, ...]]:
    """Layers with a gradient per example, their places (see `layer_facts`), notes on others."""
    counts: Counter[str] = Counter()

    def count(event: Event) -> None:
        counts[event.layer.name] += event.grads.size(1) * event.grads.size(2)

    # every example twice, so that there are two even in a data set of one
    order = setup.order[: max(1, setup.task.batch_size // 2)].repeat(2)
    batch = setup.task.train.batch(order)
    with capture(setup.model, list(setup.layers) or None, sink=count):
        selection = check_layers(setup.model, batch, setup.loss, setup.selection)
    dropped = [item for item in selection.left_out if item not in setup.selection.left_out]
    notes = tuple(f"{item.name} is left out: {item.reason}." for item in dropped)
    summed = setup.sharing == "reduce"  # one gradient per example
    # the check goes back twice through the batch
    rows = 2 * len(order)
    places = {name: 1 if summed else total // rows for name, total in counts.items()}
    return selection, Counter(places), notes


def layer_facts(
    curvature: Curvature, record: Mapping[str, Any], setup: Setup, places: int
) -> LayerFacts:
    """The record of a layer in the curvature's report, and numbers from its spectrum."""
    name, kind, inputs = record["layer"], record["kind"], record["inputs"]
    spectrum = curvature.spectrum(name)
    values, sides = spectrum.values.double().clamp_min(0), spectrum.sides
    largest, smallest, dimension = float(values.max()), float(values.min()), values.numel()
    mean, added = record["trace"] / dimension, setup.damping * float(values.mean())
    scaled = None if sides is None else scaled_rank(curvature.layers[name].statistics)
    # covariance i×i for K-FAC, counts of columns for an embedding, diagonal for a norm
    columns = {"dense": inputs, "index": 1, "diagonal": record["outputs"]}[kind]
    return LayerFacts(
        **record,
        name=name,
        dimension=dimension,
        places=places,  # output gradients per example, over uses and positions
        input_bytes=record["blocks"] * inputs * columns * FLOAT,
        output_bytes={p: output_bytes(record, places * setup.examples, p) for p in POLICIES},
        mean=mean,
        largest=largest,
        smallest=smallest,
        peak=largest / mean if mean else 0.0,
        damping=added,  # added to every eigenvalue
        condition_damped=condition_number(values + added),
        share=record["effective_rank"] / dimension,
        scaled_rank=scaled,  # effective rank after diagonal scaling; None without two sides
        scaled_share=None if scaled is None else scaled / dimension,
        kept=int((values > added).sum()),  # eigenvalues above the damping
        spectrum=thinned(values),
        output_spectrum=None if sides is None else thinned(sides[0].double()),
        input_spectrum=None if sides is None else thinned(sides[1].double()),
    )


def output_bytes(layer: Mapping[str, Any], gradients: int, policy: str) -> int:
    """Bytes of K-FAC's output side: a covariance o×o, or T gradients o×T, of every block."""
    if layer["kind"] == "diagonal":
        return 0
    outputs: int = layer["outputs"]
    columns = gradients if woodbury_policy(outputs, gradients, policy) else outputs
    return outputs * columns * FLOAT * int(layer["blocks"])


def thinned(values: Tensor) -> tuple[tuple[int, float], ...]:
    """At most POINTS of the positive eigenvalues in descending order, with their ranks 1 … n."""
    ordered = values.flatten().sort(descending=True).values
    n = int((ordered > 0).sum())
    numbers = sorted({round(n ** (i / (POINTS - 1))) for i in range(POINTS)}) if n else []
    # four digits are more than a plot can show
    return tuple((number, float(f"{float(ordered[number - 1]):.4g}")) for number in numbers)


def scaled_rank(statistics: Mapping[str, Tensor]) -> float:
    """Effective rank of D^-½ (G ⊗ A) D^-½, D the diagonal of G ⊗ A."""
    # the Kronecker product of the correlation matrices of both sides
    left, right = (_correlations(statistics[side]) for side in ("output", "input"))
    p = (left[:, :, None] * right[:, None, :]).clamp_min(0).flatten()  # [B, o] and [B, i]
    p = p[p > 0] / p.sum()
    return float((-(p * p.log()).sum()).exp()) if len(p) else 0.0


def _correlations(side: Tensor) -> Tensor:
    """Eigenvalues of the correlation matrix of a covariance; 0 for units that are always 0."""
    # counts of columns are a diagonal covariance
    if side.ndim == 2:
        return (side > 0).double()
    root = side.double().diagonal(dim1=1, dim2=2).rsqrt().nan_to_num(nan=0.0, posinf=0.0)
    return torch.linalg.eigvalsh(side.double() * root[:, :, None] * root[:, None, :])


def write_report(result: Inspection, curvature: Curvature, folder: Path) -> None:
    """Write the files atomically, the page last, so that its presence means completeness."""
    record = {**vars(result), "layers": [vars(facts) for facts in result.layers]}
    text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False) + "\n"
    html = page(result)
    # an older page would not match the new files
    (folder / PAGE).unlink(missing_ok=True)
    curvature.save(folder / "curvature")
    write_atomically(folder / RECORDS, [text.encode()])
    write_atomically(folder / PAGE, [html.encode()])


def page(result: Inspection) -> str:
    """The page as one self-contained HTML file."""
    rows, s = [cells(facts) for facts in result.layers], result.settings
    return render(
        "inspect.html",
        title=f"Curvature of {s['task']}",
        s=s,
        result=result,
        sentences=texts(result),
        columns=list(rows[0]),
        rows=[list(row.values()) for row in rows],
        woodbury_policy=woodbury_policy,
        dots=ranks(result),
        conditions=conditions_by_damping(result),
        memory_by_examples=memory_by_examples(result),
        health=[health_row(s["optimizer"], result.statistics)] if result.statistics else [],
        **{field: spectra(result, field) for field in SPECTRA},
    )


def texts(result: Inspection) -> tuple[list[str], str, list[str]]:
    """Sentences on the result, one on the setting, and notes on the table."""
    text = render("inspect.txt", result=result, s=result.settings, number=number, percent=percent)
    verdict, _, remarks = text.strip().partition("\n\n")
    setting, *notes = remarks.strip().split("\n")
    return verdict.split("\n"), setting, notes


def number(value: float) -> str:
    """A condition number with three digits, from a million on in powers of ten."""
    if not math.isfinite(value):
        return "infinite"
    return f"{value:.1e}" if value >= 1e6 else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(share: float) -> str:
    return f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"


def table(result: Inspection) -> list[list[str]]:
    """The header, then a row per layer."""
    rows = [cells(facts) for facts in result.layers]
    return [list(rows[0]), *([text for text, _ in row.values()] for row in rows)]


def cells(f: LayerFacts) -> dict[str, tuple[str, float | str]]:
    """A row of the table: column → text and sort key."""
    blocks = "" if f.blocks == 1 else f"{f.blocks} × "
    above, scaled = f.kept / f.dimension, f.scaled_share
    return {
        "layer": (f.name or "model", f.name),
        "outputs × inputs": (f"{blocks}{f.outputs:,} × {f.inputs:,}", f.dimension),
        "kind": (f.kind, f.kind),
        "trace": (f"{f.trace:.3g}", f.trace),
        "condition": (number(f.condition), min(f.condition, 1e308)),
        "condition, damped": (number(f.condition_damped), min(f.condition_damped, 1e308)),
        "effective rank": (f"{f.effective_rank:,.1f}", f.effective_rank),
        "of all directions": (percent(f.share), f.share),
        "after diagonal scaling": (MISSING, -1) if scaled is None else (percent(scaled), scaled),
        "above damping": (percent(above), above),
        "statistics": (memory(f.bytes), f.bytes),
    }


def short_layers(names: Sequence[str]) -> dict[str, str]:
    """The shortest unique ending of each dotted name, cropped in the middle."""
    short = {}
    for name in names:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            ending = ".".join(parts[-count:])
            # a number alone is not a name
            if not ending.isdecimal() and sum(f".{x}".endswith(f".{ending}") for x in names) == 1:
                break
        short[name] = (ending if len(ending) <= 13 else f"{ending[:6]}…{ending[-6:]}") or "model"
    return short


def spectra(result: Inspection, field: str) -> list[Plot]:
    """Plots of eigenvalues in descending order, with as many layers each as there are colours."""
    title, unit = SPECTRA[field]
    sides = field != "spectrum"
    layers = [f for f in result.layers if not sides or (f.output_spectrum and f.input_spectrum)]
    damping = None if sides else result.settings["damping"] or None
    short = short_layers([f.name for f in result.layers])
    count = math.ceil(len(layers) / COLOURS)
    plots = []
    for i, part in enumerate(torch.arange(len(layers)).tensor_split(count) if count else ()):
        lines = []
        for colour, f in enumerate((layers[k] for k in part), start=1):
            points = getattr(f, field)
            by = points[0][1] if sides else f.mean
            curve = [(place, float(f"{value / by:.4g}")) for place, value in points]
            lines.append(Line(f.name, colour % COLOURS, curve, beside=short[f.name]))
        # relative to the mean or the largest; below 1e-7 is rounding error of float32
        values = [damping or 1.0, *(y for line in lines for _, y in line.points)]
        y_range = (max(1e-7, min(values)) / 2, max(values) * 2)
        place = f" ({i + 1} of {count})" if count > 1 else ""
        text = f"{title}, layer by layer in falling order, as {unit}."
        labels = (f"{field}-{i}", title + place, text, "number of the eigenvalue", unit)
        plots.append(Plot(*labels, lines, y_range=y_range, goal=damping, **LOG))
    return plots


def conditions_by_damping(result: Inspection) -> Plot:
    """Condition number by damping, for the worst, the median and the best layer."""
    ranked = sorted((f for f in result.layers if f.trace > 0), key=lambda f: f.peak)
    lines: dict[str, Line] = {}
    for words, colour, place in (("worst", 2, -1), ("median", 1, len(ranked) // 2), ("best", 3, 0)):
        for f in ranked[place:][:1]:
            added = [(m, m * f.mean) for m in (10 ** (k / 4) for k in range(-24, 5))]
            points = [(m, (f.largest + x) / (f.smallest + x)) for m, x in added]
            # with few layers, one may be both: it is drawn once
            lines.setdefault(f.name, Line(f"{words} ({f.name})", colour, points, beside=words))
    text = "Condition number after damping, of layers by their largest over their mean eigenvalue."
    labels = ("damping", "Condition by damping", text, "damping / mean eigenvalue")
    return Plot(*labels, "condition number", list(lines.values()), **LOG)


def ranks(result: Inspection) -> Dots:
    """Effective rank relative to the dimension, before and after diagonal scaling."""
    short = short_layers([f.name for f in result.layers])
    rows = []
    for f in result.layers:
        # 1.4 of 20, but 3 of 20 and 140 of 2,000
        rank = f"{f.effective_rank:,.0f}" if f.effective_rank >= 10 else f"{f.effective_rank:.2g}"
        text = f"{rank} of {f.dimension:,}"
        rows.append(Row(f.name, short[f.name], f.share, f.scaled_share, text))
    text = "; ".join(f"{row.label}: {row.text}" for row in rows)
    return Dots("ranks", "Effective rank by layer", text, "effective rank / dimension", rows)


def memory_by_examples(result: Inspection) -> Plot:
    """Memory of all output sides under each policy, by the number of examples."""
    layers, most = result.layers, max(1e4, 4.0 * result.settings["examples"])
    counts = sorted({round(most ** (k / 60)) for k in range(61)})
    lines = []
    for policy, colour in (("dense", 0), ("all", 2), ("auto", 1)):
        sizes = [sum(output_bytes(vars(f), n * f.places, policy) for f in layers) for n in counts]
        points = [(n, size / 2**20) for n, size in zip(counts, sizes, strict=True) if size]
        lines.append(Line(policy, colour, points))
    text = (
        "Memory of all output sides as covariances (dense), gradients (all), or by choice (auto)."
    )
    labels = ("memory", "Output sides by number of examples", text, "examples", "MiB")
    return Plot(*labels, lines, **LOG)
