"""Where a run's model and data come from: a task, or a pretrained model and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from isokron.cli import processes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isokron.attribution import Attributor
    from isokron.tasks import Task
    from isokron.training import Progress

KINDS = ("language", "classifier")
STEPS = 300  # of training, for a task whose model has not been trained
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Source:
    """What run.json keeps of a command, so that later commands find model and data again."""

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
    dtype: str = "float32"
    chat: bool | None = None
    layers: tuple[str, ...] = ()
    max_side: int = 8192
    head: str = "skip"

    @staticmethod
    def of(options: Mapping[str, Any]) -> Source:
        """The options of a command, with paths that do not depend on the current folder."""
        from isokron.tasks.catalog import resolved

        values = {field.name: options[field.name] for field in fields(Source)}
        values["layers"] = tuple(values["layers"] or ())
        for name in ("task", "model", "data", "weights"):
            if values[name] is not None:
                values[name] = resolved(str(values[name]), task=name == "task")
        return Source(**values)

    def check(self) -> None:
        """Refuse what can be known to be wrong before anything is loaded."""
        if self.task is None and (self.model is None or self.data is None):
            raise ValueError("a new run needs --task, or --model and --data")
        if self.task is not None and (self.model is not None or self.data is not None):
            raise ValueError("give --task, or --model and --data, not both")
        for option, value, choices in (
            ("--kind", self.kind, KINDS),
            ("--dtype", self.dtype, DTYPES),
        ):
            if value not in choices:
                raise ValueError(f"{option} must be one of {choices}, got {value!r}")
        if self.steps is not None and self.steps < 0:
            raise ValueError(f"--steps must be at least 0, got {self.steps}")
        if self.weights is not None and not Path(self.weights).is_file():
            raise ValueError(f"--weights: no file {self.weights!r}")

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, for run.json and for the command on the page."""
        default = asdict(Source())
        return {name: value for name, value in asdict(self).items() if value != default[name]}

    def load_task(self) -> Task:
        if self.task is not None:
            from isokron.tasks import load

            return load(self.task)
        import torch

        from isokron.tasks.documents import read_documents
        from isokron.tasks.huggingface import classifier, language_model

        assert self.model is not None
        assert self.data is not None
        classes = self.kind == "classifier"
        label = (self.label or "label") if classes else self.label
        # read before the model is looked for, which may be far away
        documents = read_documents(self.data, text=self.text, label=label, id=self.id)
        shared: dict[str, Any] = {"context": self.context, "long": self.long, "evaluation": 0}
        shared["dtype"] = getattr(torch, self.dtype)
        if classes:
            return classifier(self.model, documents, **shared)
        return language_model(self.model, documents, chat=self.chat, **shared)

    def load_model(self, task: Task, folder: Path, progress: Progress) -> nn.Module:
        """Trained weights: those given, the run's own, the task's, or newly trained ones."""
        import torch

        from isokron.attribution.data import spread
        from isokron.attribution.run_folder import WEIGHTS
        from isokron.training import load_weights_, make_model, note_of, save_weights, train_

        model = make_model(task, self.seed)
        own, note = folder / WEIGHTS, self._training()
        steps = (0 if task.trained else STEPS) if self.steps is None else self.steps
        if self.weights is not None:
            load_weights_(model, Path(self.weights))
        elif note_of(own) == note:
            load_weights_(model, own)
        elif steps:
            only = None
            if self.examples is not None:
                only = torch.tensor(spread(len(task.train), self.examples))
            train_(model, task, steps, self.lr, self.seed, progress, only)
            folder.mkdir(parents=True, exist_ok=True)
            save_weights(model, own, note)
        return model.eval()

    def trained(self, task: Task, indices: Tensor, seed: int) -> nn.Module:
        """A new model, trained as the run's own was, on these examples of a task."""
        from isokron.training import make_model, train_

        model = make_model(task, seed)
        steps = STEPS if self.steps is None else self.steps
        train_(model, task, steps, self.lr, seed, only=indices)
        return model.eval()

    def _training(self) -> str:
        """All that weights trained for a run depend on."""
        return json.dumps(
            [self.task, self.model, self.data, self.steps, self.lr, self.seed, self.examples]
        )


def open_run(
    folder: Path,
    progress: Progress,
    source: Source | None = None,
    *,
    memory: int | None = None,
    device: str | None = None,
) -> Attributor:
    """The run in a folder; `source` must be the one it was begun with, or begins it."""
    from isokron.attribution import Attributor
    from isokron.attribution.run_folder import RECORD, check_folder, check_same
    from isokron.distributed.team import in_turn

    check_folder(folder)
    if (folder / RECORD).exists():
        earlier = recorded(folder)
        if source is not None and source != Source():
            check_same(folder, "source", earlier.given(), source.given())
        source = earlier
    if source is None:
        raise ValueError(f"no run in {folder}; begin one with: isokron attribute {folder}")
    source.check()
    task = source.load_task()
    if source.examples is not None and source.examples > len(task.train):
        raise ValueError(
            f"--examples must be from 1 to the {len(task.train)} training examples, got "
            f"{source.examples}"
        )
    ranks = processes.ranks()
    with in_turn(ranks, "loading or training the model"):
        model = source.load_model(task, folder, progress)
    return Attributor(
        folder,
        model,
        task=task,
        device=device or default_device(),
        layers=source.layers or None,
        head=source.head,
        max_side=source.max_side,
        memory=memory,
        examples=source.examples,
        source=source.given(),
        ranks=ranks,
        progress=progress,
    )


def recorded(folder: Path) -> Source:
    """The source in a folder's run.json."""
    from isokron.attribution.run_folder import read_record

    given = read_record(folder)["source"]["given"]
    return Source(**{**given, "layers": tuple(given.get("layers", ()))})


def default_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"
