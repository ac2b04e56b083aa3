"""Agreement with retrained models (LDS) of isokron's methods and of peers, on the same subsets.

    python benchmarks/lds_table.py [--settings logistic,mlp,digits] [--subsets 50] [--queries 100]
        [--kronfluence FOLDER] [--dattri FOLDER] [--unroll] [--rules] [--table]

"logistic" and "mlp" are MNIST as dattri 0.3.0 has it (refinement.py): 5,000 training images, SGD.
"digits" is the perceptron of lds.py. "speeches" is speeches-tiny (a byte transformer of 0.14M
parameters) with 1,000 windows, and "resnet" a residual network (GroupNorm, 0.08M parameters) on
2,000 images of CIFAR-10. Models are retrained on random halves of the examples, `repeats` per half
with seeds of their own; LDS is the mean over queries (the first test examples) of Spearman's ρ
between summed scores of the halves and minus the mean losses of their models, ± its standard error
over queries. All methods have the same model, halves, queries and losses. The most expensive
methods score only the first queries of a setting.

FOLDER is where a peer was installed by `pip install --target`; it runs by lds_peers.py. Seconds are
CPU time of one thread, from the trained model to the scores of all queries; bytes are what a method
keeps to score further queries, in addition to the model and the data. `--unroll` differentiates the
training run. `--rules` averages EK-FAC scores over seeds and checkpoints at several dampings.

Runs are in docs/benchmarks/lds_table.json, losses of retrained models in benchmarks/.cache; what is
there is not computed again. `--table` prints what docs/lds_table.md is made of.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import lds
import refinement
import torch
import unroll
from packaged_data import CACHE, IMAGES, image_task
from records import Records
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timing import conditions
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import SGD, Optimizer

import isokron
from isokron.attribution import Attributor, Query
from isokron.attribution.evaluate import lds_by_query, random_subsets, retrain
from isokron.attribution.unroll import TrainingRun
from isokron.optim.functional_step import FunctionalStep
from isokron.tasks import Batch, Examples, Shown, Task

BATCH, SCORED = 64, 500  # examples of a training batch, and of a batch while scoring
CHECKPOINTS = 5  # evenly spaced, the last at the end
SEEDS = 5  # models that differ in their seeds only
HALF_MODELS = 10  # for TRAK, on halves that LDS does not use
DAMPINGS = (0.03, 0.1, 0.3, 1.0)
REFINED = "EK-FAC, exact Fisher, refine 10"
HESSIAN = "dattri influence by CG, regularization 0.1"
TRAK = "dattri TRAK, 10 models"
COMPARED = ("K-FAC", "EK-FAC", "gradients", TRAK)  # beside methods that score few queries
WITHOUT_NORMS = "EK-FAC, without norms"
KRONFLUENCE = "kronfluence EK-FAC, empirical, damping 0.1 of the mean"
PAIRS = (  # whose LDS are compared query by query
    ("EK-FAC", KRONFLUENCE),
    (WITHOUT_NORMS, KRONFLUENCE),
    ("kronfluence EK-FAC, sampled, damping 1e-8", "EK-FAC"),
    ("K-FAC", "EK-FAC"),
    ("K-FAC, store", "K-FAC"),
    ("AdamW's second moments", "gradients"),
    ("K-FAC", "gradients, 5 checkpoints"),
    ("EK-FAC", "gradients"),
    ("EK-FAC, exact Fisher", "EK-FAC"),
    ("EK-FAC, sampled Fisher", "EK-FAC"),
    ("EK-FAC, embeddings too", "EK-FAC"),
    (REFINED, "EK-FAC, exact Fisher"),
    ("EK-FAC, sampled Fisher, refine 10", "EK-FAC, sampled Fisher"),
    (REFINED, HESSIAN),
    ("unrolled", "EK-FAC"),
    ("dattri TRAK, 1 model", "EK-FAC"),
    (TRAK, "EK-FAC"),
    (TRAK, "K-FAC"),
    (TRAK, "5 seeds, damping 0.1"),
    ("5 seeds, damping 0.1", "1 seed, damping 0.1"),
    ("3 checkpoints, damping 0.1", "1 seed, damping 0.1"),
)
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Setting:
    """A task, how its models are trained, and how many of them for every subset.

    fisher: of the model's own labels: "exact" takes a backward pass for every label, "sampled" one.
    refined, unrolled: number of queries of `refine` and of the unrolled run, None for all; both
        cost several passes over the data for every query.
    """

    task: Callable[[], Task]
    optimizer: Callable[[nn.Module], Optimizer]
    epochs: int
    repeats: int
    fisher: str = "exact"
    refined: int | None = None
    unrolled: int = 20


class Residual(nn.Module):
    """x ↦ GELU(two convolutions of x + x), or + a convolution of x where the shape changes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            *(nn.GroupNorm(4, outputs), nn.GELU()),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.GroupNorm(4, outputs),
        )
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.gelu(self.body(images) + self.skip(images))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.GELU()]
    blocks = [Residual(16, 16), Residual(16, 32), Residual(32, 64)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def cifar10() -> Task:
    whole = image_task("cifar10")
    train, evaluation = (
        Examples(tuple(part[:count] for part in examples.tensors))
        for examples, count in ((whole.train, 2_000), (whole.held_out, IMAGES))
    )
    return replace(whole, model=resnet, train=train, evaluation=evaluation)


SETTINGS = {
    "logistic": Setting(
        lambda: refinement.mnist(refinement.linear), lambda m: SGD(m.parameters(), 0.01), 20, 2
    ),
    "mlp": Setting(
        lambda: refinement.mnist(refinement.perceptron),
        lambda m: SGD(m.parameters(), 0.01, momentum=0.9),
        50,
        1,
    ),
    "digits": Setting(
        lds.perceptron_task, lambda m: isokron.AdamW(m.named_parameters(), 1e-3), 30, 5
    ),
    "speeches": Setting(
        lambda: unroll.loaded(unroll.CASES["speeches"]),
        lambda m: isokron.AdamW(m.named_parameters(), 3e-3),
        10,
        1,
        fisher="sampled",
        refined=10,
        unrolled=5,
    ),
    "resnet": Setting(
        cifar10,
        lambda m: isokron.AdamW(m.named_parameters(), 3e-3),
        20,
        1,
        refined=10,
        unrolled=5,
    ),
}
# patterns that leave out norms, as kronfluence does
NORMS = {"speeches": "!*norm", "resnet": "!1,!*.body.1,!*.body.4"}
PERCEPTRONS, LARGER = ("logistic", "mlp", "digits"), ("speeches", "resnet")


class Result(NamedTuple):
    """Scores [queries, examples], CPU seconds, and bytes stored for further queries."""

    scores: Tensor
    seconds: float
    stored: int


def train(
    setting: Setting, task: Task, indices: Tensor, seed: int
) -> tuple[nn.Module, list[Weights], Optimizer]:
    """A model, its weights at evenly spaced epochs (the last are the model's), its optimizer."""
    torch.manual_seed(seed)
    model = task.model().train()
    optimizer, checkpoints = setting.optimizer(model), []
    for epoch in range(1, setting.epochs + 1):
        for batch in indices[torch.randperm(len(indices))].split(BATCH):
            optimizer.zero_grad()
            task.losses(model, task.train.batch(batch)).mean().backward()
            optimizer.step()
        if epoch * CHECKPOINTS % setting.epochs == 0:
            checkpoints.append({k: v.detach().clone() for k, v in model.state_dict().items()})
    return model.eval(), checkpoints, optimizer


def only_model(setting: Setting, task: Task, indices: Tensor, seed: int) -> nn.Module:
    return train(setting, task, indices, seed)[0]


class Study:
    """One setting: its models, queries, and the losses of retrained models."""

    def __init__(self, name: str, count: int, queries: int) -> None:
        self.name, self.setting = name, SETTINGS[name]
        self.task, self.folder = self.setting.task(), CACHE / "lds_table" / name
        self.members = random_subsets(count, len(self.task.train))
        self.asked = self.task.held_out.batch(torch.arange(queries))
        self.queries = [
            Query(self.task.held_out.batch(torch.tensor([n])), (Shown(),), str(n))
            for n in range(queries)
        ]

    @cached_property
    def losses(self) -> Tensor:
        start, repeats = time.process_time(), self.setting.repeats
        # not a method: its digest would be that of all that the study has computed
        model = partial(only_model, self.setting)
        losses = retrain(self.folder, self.task, model, self.members, [self.asked], repeats=repeats)
        print(f"{self.name}: retrained in {time.process_time() - start:.0f} CPU s", flush=True)
        return losses

    def trained(self, seed: int = 0, members: Tensor | None = None) -> dict[str, Any]:
        """Checkpoints, and the optimizer's state, of a model of all examples, or of a subset."""
        path = self.folder / "models" / f"{seed}.pt"
        if not path.exists():
            indices = torch.arange(len(self.task.train)) if members is None else members.nonzero()
            _, checkpoints, optimizer = train(self.setting, self.task, indices.flatten(), seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"checkpoints": checkpoints, "optimizer": optimizer.state_dict()}, path)
        saved: dict[str, Any] = torch.load(path)
        return saved

    @property
    def model(self) -> nn.Module:
        return self.at(self.trained()["checkpoints"][-1])

    def at(self, weights: Weights) -> nn.Module:
        model = self.task.model()
        model.load_state_dict(weights)
        return model.eval()

    def attributor(self, model: nn.Module, layers: str | None = None) -> Attributor:
        folder = tempfile.mkdtemp()
        return Attributor(folder, model, task=self.task, batch_size=SCORED, layers=layers)

    def scored(self, attributor: Attributor, count: int | None = None, **options: Any) -> Tensor:
        scores = attributor.score(self.queries[:count], save=False, **options)
        return scores.as_subclass(Tensor).clone()

    def quality(self, result: Result) -> dict[str, Any]:
        losses = self.losses[:, : len(result.scores)]
        values = lds_by_query(result.scores, self.members, losses)
        error = float(values.std()) / len(values) ** 0.5
        record = {"lds": round(float(values.mean()), 4), "error": round(error, 4)}
        record |= {"seconds": round(result.seconds, 2), "bytes": result.stored}
        return {**record, "by_query": [round(value, 3) for value in values.tolist()]}

    def measured(self, compute: Callable[["Study"], tuple[Tensor, int]]) -> dict[str, Any]:
        self.trained()  # training is not part of a method's time
        start = time.process_time()
        try:
            scores, stored = compute(self)
        except ValueError as error:  # no store agrees with exact scores
            return {"refused": str(error)}
        return self.quality(Result(scores, time.process_time() - start, stored))


def stored_bytes(attributor: Attributor) -> int:
    """Bytes of the curvature and of the store on disk."""
    folders = (attributor.folder.curvature, attributor.folder.gradients)
    files = [file for folder in folders for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def model_bytes(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


def by_gradients(study: Study) -> tuple[Tensor, int]:
    return study.scored(study.attributor(study.model)), 0


def by_checkpoints(study: Study) -> tuple[Tensor, int]:
    """TracIn: inner products summed over checkpoints; the learning rate is constant."""
    checkpoints = study.trained()["checkpoints"]
    scores = [study.scored(study.attributor(study.at(weights))) for weights in checkpoints]
    return torch.stack(scores).sum(0), model_bytes(checkpoints[0]) * (len(checkpoints) - 1)


def by_curvature(
    study: Study,
    method: str,
    fisher: str,
    *,
    layers: str | None = None,
    store: bool = False,
    **options: Any,
) -> tuple[Tensor, int]:
    attributor = study.attributor(study.model, layers).fit(method, fisher=fisher)
    if store:
        attributor.build()
        print(f"the store's dimension: {attributor.folder.stage('build')}", flush=True)
    return study.scored(attributor, **options), stored_bytes(attributor)


def by_optimizer(study: Study) -> tuple[Tensor, int]:
    attributor = study.attributor(study.model)
    attributor.fit(optimizer=study.trained()["optimizer"])
    return study.scored(attributor), stored_bytes(attributor)


Compute = Callable[[Study], tuple[Tensor, int]]


def methods_of(name: str) -> dict[str, Compute]:
    """isokron's methods for a setting, without the unrolled run."""
    setting = SETTINGS[name]
    fisher = setting.fisher
    kfac = partial(by_curvature, method="kfac")
    ekfac = partial(by_curvature, method="ekfac")
    methods: dict[str, Compute] = {
        "gradients": by_gradients,
        "gradients, 5 checkpoints": by_checkpoints,
        "K-FAC": partial(kfac, fisher="empirical"),
        f"K-FAC, {fisher} Fisher": partial(kfac, fisher=fisher),
        "K-FAC, store": partial(kfac, fisher="empirical", store=True),
        "EK-FAC": partial(ekfac, fisher="empirical"),
        f"EK-FAC, {fisher} Fisher": partial(ekfac, fisher=fisher),
        f"EK-FAC, {fisher} Fisher, refine 10": partial(
            ekfac, fisher=fisher, refine=10, count=setting.refined
        ),
    }
    if name in ("digits", *LARGER):  # trained by AdamW
        methods["AdamW's second moments"] = by_optimizer
    if name in NORMS:
        methods[WITHOUT_NORMS] = partial(ekfac, fisher="empirical", layers=NORMS[name])
    if name == "speeches":  # by default embeddings are left out
        methods["EK-FAC, embeddings too"] = partial(ekfac, fisher="empirical", layers="*")
    return methods


def by_unrolling(study: Study) -> tuple[Tensor, int]:
    """The derivative of a training run without dropout."""
    task, setting = study.task, study.setting
    torch.manual_seed(0)
    model = task.model().train()
    functional = FunctionalStep(setting.optimizer(model), dict(model.named_parameters()))
    count = len(task.train)
    order = [b for _ in range(setting.epochs) for b in torch.randperm(count).split(BATCH)]
    bound = unroll.Losses(model, task)

    def loss(params: Weights, batch: Any) -> Tensor:
        weights = {f"model.{name}": param for name, param in params.items()}
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
            losses: Tensor = functional_call(bound, weights, (batch,))
        return losses

    def step(params: Any, state: Any, batch: Any, weights: Tensor) -> tuple[Any, Any]:
        losses, recorded = loss(params, batch), weights.requires_grad
        mean = (weights * losses).sum() / len(losses)
        slopes = torch.autograd.grad(mean, list(params.values()), create_graph=recorded)
        done = int(state["step"])
        with torch.set_grad_enabled(recorded):
            grads = dict(zip(params, slopes, strict=True))
            params, moments = functional(params, state["optimizer"], grads, done + 1, 1.0)
        return params, {"optimizer": moments, "step": state["step"] + 1}

    params = {name: param.detach().clone() for name, param in model.named_parameters()}
    state = {"optimizer": functional.initial_state(params), "step": torch.tensor(0)}
    run = TrainingRun(step, params, state, task.train.batch, order, count)
    asked = tuple(part[: setting.unrolled] for part in study.asked)
    return run.scores(lambda params: loss(params, asked)), 0


def inputs_and_targets(study: Study, examples: Batch) -> tuple[Tensor, Tensor]:
    """What the model is called with, and the classes it should predict."""
    first, second = examples
    if study.name == "speeches":  # windows of bytes, and the numbers of their speeches
        return first[:, :-1].long(), first[:, 1:].long()
    return first, second


def run_peer(study: Study, peer: str, installed: str) -> dict[str, Result]:
    """All methods of a library, in a process of its own."""
    models = [study.model]
    if peer == "dattri":  # TRAK averages over models of other halves
        halves = random_subsets(HALF_MODELS, len(study.task.train), seed=1)
        models += [
            study.at(study.trained(100 + number, half)["checkpoints"][-1])
            for number, half in enumerate(halves)
        ]
    tensors: dict[str, Tensor] = {}
    for part, examples in (("train", study.task.train.tensors), ("query", study.asked)):
        inputs, targets = inputs_and_targets(study, examples)
        tensors |= {f"{part}.x": inputs.contiguous(), f"{part}.y": targets.contiguous()}
    for number, model in enumerate(models):
        tensors |= {f"{number}.{k}": v.contiguous() for k, v in model.state_dict().items()}
    given, outputs = (study.folder / f"{peer}.{part}" for part in ("inputs", "outputs"))
    if not outputs.exists():
        save_file(tensors, given)
        program = Path(__file__).with_name("lds_peers.py")
        paths = (installed, os.environ.get("PYTHONPATH", ""))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, str(program), peer, study.name, str(given), str(outputs)]
        ended = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True)
        if ended.returncode:
            raise RuntimeError(f"{peer} failed:\n{ended.stderr[-2000:]}")
    scores = load_file(outputs)
    with safe_open(outputs, "pt") as file:
        facts = json.loads(file.metadata()["facts"])
    return {k: Result(scores[k], facts[k]["seconds"], facts[k]["bytes"]) for k in scores}


def run_rules(study: Study, records: Records, key: dict[str, Any]) -> None:
    """EK-FAC scores averaged over seeds, or over the last three checkpoints."""
    weights = [study.trained(seed)["checkpoints"][-1] for seed in range(SEEDS)]
    weights += study.trained()["checkpoints"][-3:-1]
    averages = {"1 seed": [0], "3 seeds": [0, 1, 2], "5 seeds": [0, 1, 2, 3, 4]}
    averages["3 checkpoints"] = [0, SEEDS, SEEDS + 1]
    attributors, fitting = [], []
    for one in weights:
        start = time.process_time()
        attributors.append(study.attributor(study.at(one)).fit("ekfac"))
        fitting.append(time.process_time() - start)
    for damping in DAMPINGS:
        results = []
        for attributor, seconds in zip(attributors, fitting, strict=True):
            start = time.process_time() - seconds
            scores = study.scored(attributor, damping=damping)
            seconds = time.process_time() - start
            results.append(Result(scores, seconds, stored_bytes(attributor)))
        for average, numbers in averages.items():
            members = [results[number] for number in numbers]
            # every further model is stored with its curvature
            stored = sum(one.stored for one in members) + model_bytes(weights[0]) * (
                len(members) - 1
            )
            mean = torch.stack([one.scores for one in members]).mean(0)
            result = Result(mean, sum(one.seconds for one in members), stored)
            rule = {"rule": average, "damping": damping}
            records.once(partial(study.quality, result), **key, **rule)


def tables() -> list[str]:
    """LDS, seconds and megabytes by method; LDS by rule; and differences, paired by query."""
    runs = Records("lds_table").runs
    by_name: dict[str, dict[str, dict[str, Any]]] = {}  # by method or rule, then setting
    for run in runs:
        title = run.get("method") or f"{run['rule']}, damping {run['damping']:g}"
        by_name.setdefault(title, {})[run["setting"]] = run

    def cells(name: str, form: Callable[[dict[str, Any]], str], order: Iterable[str]) -> list[str]:
        found = [by_name[name].get(setting, {}) for setting in order]
        return [form(run) if "lds" in run else "–" for run in found]

    def quality(run: dict[str, Any]) -> str:
        return f"{run['lds']:.3f} ± {run['error']:.3f}"

    lines = list[str]()
    for settings in (PERCEPTRONS, LARGER):
        columns = (*settings, "seconds", "MB")
        lines += ["", f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
        for name in (name for name in by_name if ", damping" not in name or "kron" in name):
            if not by_name[name].keys() & set(settings):
                continue
            seconds = cells(name, lambda run: f"{run['seconds']:.1f}", settings)
            size = cells(name, lambda run: f"{run['bytes'] / 1e6:.1f}", settings)
            costs = f"{' / '.join(seconds)} | {' / '.join(size)}"
            lines.append(f"| {name} | {' | '.join(cells(name, quality, settings))} | {costs} |")
    lines += ["", "| mean over, damping | digits | logistic | mlp |", "|---" * 4 + "|"]
    for name in (f"{run['rule']}, damping {run['damping']:g}" for run in runs if "rule" in run):
        line = f"| {name} | {' | '.join(cells(name, quality, ('digits', 'logistic', 'mlp')))} |"
        lines += [line] if line not in lines else []
    lines += ["", "| unrolled and others, its queries | LDS |", "|---|---|"]
    for setting, run in by_name["unrolled"].items():
        if setting in PERCEPTRONS:
            compared = ("unrolled", "K-FAC", "EK-FAC", REFINED, HESSIAN)
            shown = " | ".join(first_queries(by_name, setting, compared, len(run["by_query"])))
            lines.append(f"| {setting} | {shown} | {run['seconds']:.0f} |")
    lines += ["", "| first queries | LDS | " + " | ".join(COMPARED) + " | seconds |"]
    lines += ["|---" * (3 + len(COMPARED)) + "|"]
    for name, by_setting in by_name.items():
        for setting in LARGER:
            run = by_setting.get(setting, {})
            asked = len(run.get("by_query", ()))
            if 0 < asked < run["queries"]:
                shown = " | ".join(first_queries(by_name, setting, (name, *COMPARED), asked))
                label = f"{setting}, {name}, {asked} queries"
                lines.append(f"| {label} | {shown} | {run['seconds']:.0f} |")
    lines += ["", f"| difference | {' | '.join(SETTINGS)} |", "|---" * (1 + len(SETTINGS)) + "|"]
    for one, other in PAIRS:
        gains = []
        for setting in SETTINGS:
            pair = [
                by_name.get(name, {}).get(setting, {}).get("by_query", ()) for name in (one, other)
            ]
            asked = min(len(pair[0]), len(pair[1]))  # some methods score the first queries only
            if not asked:
                gains.append("–")
                continue
            gain = torch.tensor(pair[0][:asked]) - torch.tensor(pair[1][:asked])
            gains.append(f"{gain.mean():+.3f} ± {gain.std() / asked**0.5:.3f}")
        lines.append(f"| {one} − {other} | {' | '.join(gains)} |")
    return lines


def first_queries(
    by_name: dict[str, dict[str, dict[str, Any]]], setting: str, names: Iterable[str], asked: int
) -> list[str]:
    """LDS of the first queries by method."""
    cells = []
    for name in names:
        values = torch.tensor(by_name.get(name, {}).get(setting, {}).get("by_query", ())[:asked])
        error = values.std() / asked**0.5 if len(values) else 0
        cells.append(f"{values.mean():.3f} ± {error:.3f}" if len(values) else "–")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", default=",".join(SETTINGS), help="by default all")
    parser.add_argument("--subsets", type=int, default=50)
    parser.add_argument("--queries", type=int, default=100)
    parser.add_argument("--kronfluence", metavar="FOLDER")
    parser.add_argument("--dattri", metavar="FOLDER")
    parser.add_argument("--unroll", action="store_true")
    parser.add_argument("--rules", action="store_true")
    parser.add_argument("--table", action="store_true", help="print tables, run nothing")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records, names = Records("lds_table"), args.settings.split(",")
    if args.table:
        print("\n".join(tables()))
        return
    for name in names:
        study = Study(name, args.subsets, args.queries)
        key = {"setting": name, "subsets": args.subsets, "queries": args.queries}
        # settings are run on different machines
        records.facts.setdefault("machines", {}).setdefault(name, conditions())
        methods = methods_of(name)
        if args.unroll:
            methods["unrolled"] = by_unrolling
        for method, compute in methods.items():
            records.once(partial(study.measured, compute), **key, method=method)
        for peer, installed in (("kronfluence", args.kronfluence), ("dattri", args.dattri)):
            if installed and not records.select(**key, peer=peer):
                for method, result in run_peer(study, peer, installed).items():
                    records.once(partial(study.quality, result), **key, peer=peer, method=method)
        if args.rules:
            run_rules(study, records, key)


if __name__ == "__main__":
    main()
