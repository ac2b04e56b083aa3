"""Where a run's model and data come from: a task, or a pretrained model and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isokron.cli import several
from isokron.cli.loading import loading

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isokron.attribution import Run, Subject
    from isokron.tasks import Task
    from isokron.training import Watcher

KINDS = ("language", "classifier")
STEPS = 300  # of training, for a task whose model has not been trained


@dataclass(frozen=True)
class Source:
    """As it is written into run.json; a run is repeated from it."""

    task: str | None = None
    model: str | None = None
    data: str | None = None
    kind: str = "language"
    text: str | None = None
    label: str | None = None
    id: str | None = None
    context: int | None = None
    long: str = "error"
    weights: str | None = None
    steps: int | None = None
    lr: float = 3e-3
    seed: int = 0
    examples: int | None = None
    layers: tuple[str, ...] = ()

    @staticmethod
    def of(given: Mapping[str, Any]) -> Source:
        """What a command was given, whose options have the names of the fields."""
        own = {field.name: given[field.name] for field in fields(Source)}
        own["weights"] = None if own["weights"] is None else str(own["weights"])
        return Source(**{**own, "layers": tuple(own["layers"] or ())})

    def check(self) -> None:
        """What can be known to be wrong before anything is loaded."""
        if self.task is None and (self.model is None or self.data is None):
            raise ValueError(
                "say what is to be explained: --task, or --model and --data, of a new run"
            )
        if self.task is not None and (self.model is not None or self.data is not None):
            raise ValueError("give --task, or --model and --data, not both")
        if self.kind not in KINDS:
            raise ValueError(f"--kind must be one of {KINDS}, got {self.kind!r}")
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"--steps must be at least 0, got {self.steps}")
        if self.weights is not None and not Path(self.weights).is_file():
            raise ValueError(f"--weights: no file {self.weights!r}")

    def load_task(self) -> Task:
        if self.task is not None:
            from isokron.tasks import load

            return load(self.task)
        from isokron.tasks.documents import read_documents
        from isokron.tasks.huggingface import classifier, language_model

        assert self.model is not None
        assert self.data is not None
        classes = self.kind == "classifier"
        label = (self.label or "label") if classes else self.label
        # read before the model is looked for, which may be far away
        documents = read_documents(self.data, text=self.text, label=label, id=self.id)
        loading = classifier if classes else language_model
        return loading(self.model, documents, context=self.context, long=self.long, evaluation=0)

    def load_model(self, task: Task, folder: Path, watcher: Watcher) -> nn.Module:
        """Trained weights: the run's own, those given, those of the task, or such as it makes."""
        from isokron.attribution.run import WEIGHTS
        from isokron.attribution.subject import spread
        from isokron.training import load_weights_, make_model, note_of, save_weights, train_

        with loading():
            model = make_model(task, self.seed)
        own, note = folder / WEIGHTS, self._training()
        steps = (0 if task.trained else STEPS) if self.steps is None else self.steps
        if self.weights is not None:
            load_weights_(model, Path(self.weights))
        elif note_of(own) == note:
            load_weights_(model, own)
        elif steps:
            only = None if self.examples is None else spread(len(task.train), self.examples)
            train_(model, task, steps, self.lr, self.seed, watcher, only)
            folder.mkdir(parents=True, exist_ok=True)
            save_weights(model, own, note)
        return model.eval()

    def trained(self, task: Task, indices: Tensor, seed: int) -> nn.Module:
        """A new model, trained as the run's own was, on these examples of a task."""
        from isokron.training import make_model, train_

        model = make_model(task, seed)
        train_(
            model, task, STEPS if self.steps is None else self.steps, self.lr, seed, None, indices
        )
        return model.eval()

    def _training(self) -> str:
        """All that weights made for a run depend on."""
        return json.dumps(
            [self.task, self.model, self.data, self.steps, self.lr, self.seed, self.examples]
        )


def open_run(folder: Path, watcher: Watcher, given: Source | None = None) -> Run:
    """The run in a folder; what is `given` must be what it was begun with, or begins it."""
    from isokron.attribution import Run, Subject
    from isokron.attribution.run import RECORD, check_same, read_record
    from isokron.distributed.team import in_turn

    if (folder / RECORD).exists():
        there = recorded(read_record(folder))
        if given is not None and given != Source():
            check_same(folder, "source", asdict(there), asdict(given))
        given = there
    if given is None:
        raise ValueError(f"no run in {folder}; begin one with isokron fit or isokron attribute")
    given.check()
    with loading():
        task = given.load_task()
    ranks = several.ranks()
    with in_turn(ranks, "loading or training the model"):
        model = given.load_model(task, folder, watcher)
    subject: Subject = Subject(task, model, given.layers, given.examples)
    return Run.begin(folder, subject, asdict(given), ranks)


def recorded(record: dict[str, Any]) -> Source:
    """The source in a run.json."""
    given = record["source"]["given"]
    return replace(Source(**given), layers=tuple(given["layers"]))
