"""The source of a run's model and data: a task, or a pretrained model and files."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from isokron.cli import process

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isokron.attribution import Attributor
    from isokron.attribution.unroll import TrainingRun
    from isokron.tasks import Task
    from isokron.training import Progress

TASK = "Built-in task (see: isokron tasks), module:function or file.py:function."
STEPS = 300  # default training steps of a task's model
Dtype = Literal["float32", "bfloat16", "float16"]


def option(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field that is a command-line option; more: arguments of typer.Option."""
    return field(default=default, metadata={"help": help, **more})


TRAINED = {"rich_help_panel": "With --task"}
PRETRAINED = {"rich_help_panel": "With --model"}
LAYERS = {"rich_help_panel": "Layers"}


@dataclass(frozen=True)
class TaskSource:
    """Options for a task, or for a pretrained model and data."""

    panel: ClassVar[str] = "Model and data"
    task: str | None = option(None, TASK, metavar="TASK")
    model: str | None = option(
        None,
        "Hugging Face model, instead of --task: folder (also of an adapter of peft) or hub name.",
        metavar="MODEL",
    )
    data: str | None = option(
        None,
        "Training data of --model: a .jsonl, .csv, .tsv, .parquet or .txt file, a folder of .txt "
        "files, or the name of a data set.",
        metavar="DATA",
    )
    kind: Literal["language", "classifier"] = option("language", "Model type.", **PRETRAINED)
    text: str | None = option(None, "Column with the texts.", metavar="COLUMN", **PRETRAINED)
    label: str | None = option(None, "Column with the labels.", metavar="COLUMN", **PRETRAINED)
    id: str | None = option(None, "Column with the document ids.", metavar="COLUMN", **PRETRAINED)
    context: int | None = option(
        None, "Maximum tokens of a document. Default: the model's.", min=1, **PRETRAINED
    )
    long: Literal["error", "cut", "split"] = option(
        "error", "How to treat longer documents.", **PRETRAINED
    )
    dtype: Dtype = option("float32", "Dtype of the weights of --model.", **PRETRAINED)
    chat: bool | None = option(
        None, "Use the chat template for prompts. Default: if there is one.", **PRETRAINED
    )

    def check(self) -> None:
        """Refuse options that do not go together."""
        if self.task is None and (self.model is None or self.data is None):
            raise ValueError("give --task, or --model and --data")
        if self.task is not None and (self.model is not None or self.data is not None):
            raise ValueError("give --task, or --model and --data, not both")
        for option in fields(self) if self.task is not None else ():
            pretrained = option.metadata.items() >= PRETRAINED.items()
            if pretrained and getattr(self, option.name) != option.default:
                raise ValueError(f"--{option.name} goes with --model, not --task; leave it out")

    def load_task(self, evaluation: float = 0) -> Task:
        """The task; evaluation: the fraction of the documents of --data to hold out."""
        if self.task is not None:
            from isokron.tasks import load

            return load(self.task)
        from isokron.tasks.documents import read_documents
        from isokron.tasks.huggingface import classifier, language_model
        from isokron.tasks.model_location import locate

        assert self.model is not None
        assert self.data is not None
        settings: dict[str, Any] = {"context": self.context, "long": self.long}
        settings["evaluation"] = evaluation
        label = self.label or ("label" if self.kind == "classifier" else None)
        locate(self.model)  # a missing folder is told before data are looked for on a hub
        # read first, since loading the model may take long
        documents = read_documents(self.data, text=self.text, label=label, id=self.id)
        if self.kind == "classifier":
            task = classifier(self.model, documents, dtype=self.dtype, **settings)
        else:
            settings["chat"] = self.chat
            task = language_model(self.model, documents, dtype=self.dtype, **settings)
        return task


@dataclass(frozen=True)
class Source(TaskSource):
    """Options for model and data; run.json records those that differ from the defaults."""

    weights: str | None = option(
        None, "Safetensors file with the model's trained weights.", metavar="FILE", **TRAINED
    )
    steps: int | None = option(
        None,
        "Train the model for N steps of AdamW. Default: 300, 0 with --weights.",
        min=0,
        **TRAINED,
    )
    lr: float = option(3e-3, "Learning rate for --steps.", min=0, **TRAINED)
    seed: int = option(0, "Random seed.")
    examples: int | None = option(None, "Use only N training examples, evenly spaced.", min=1)
    on_bad: Literal["raise", "skip"] = option(
        "raise", "Training examples without a finite loss or gradient: stop, or go on without them."
    )
    layers: list[str] | None = option(
        None,
        "Patterns of layer names, comma-separated or repeated; !pattern excludes. Default: all "
        "linear, convolution and norm layers up to --max-side.",
        metavar="PATTERN",
        **LAYERS,
    )
    max_side: int = option(
        8192, "Largest number of inputs or outputs of the default layers.", min=1, **LAYERS
    )
    head: Literal["skip", "lowrank"] = option(
        "skip",
        "Output head larger than --max-side: leave it out, or use a low-rank form.",
        **LAYERS,
    )

    def resolved(self) -> Source:
        """The source with absolute paths, after checking that its options go together."""
        self.check()
        if self.weights is not None and self.steps:
            raise ValueError("--weights are already trained; leave out --steps or --weights")
        if self.weights is not None and not Path(self.weights).is_file():
            raise ValueError(f"--weights: no file {self.weights!r}")
        return self.with_paths()

    def with_paths(self) -> Source:
        """The source with absolute paths, since later commands may run in another folder."""
        from isokron.tasks.catalog import resolved

        names = [name for name in ("task", "model", "data", "weights") if getattr(self, name)]
        paths: dict[str, Any] = {
            name: resolved(getattr(self, name), task=name == "task") for name in names
        }
        return replace(self, **paths)

    def given(self) -> dict[str, Any]:
        """Options that differ from the defaults, for run.json and the command on the page."""
        values = {option.name: getattr(self, option.name) for option in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(Source(), name)}

    def load_model(self, task: Task, folder: Path, progress: Progress) -> nn.Module:
        """The model with weights from --weights, the run's folder or the task, or trained now."""
        from isokron.attribution.data import spread
        from isokron.attribution.run_folder import WEIGHTS, check_retrained, has_results
        from isokron.files import locked
        from isokron.training import (
            load_weights_,
            make_model,
            save_weights,
            task_digest,
            train_,
        )

        model, path = make_model(task, self.seed), folder / WEIGHTS
        steps = (0 if task.trained else STEPS) if self.steps is None else self.steps
        if self.weights is not None:
            load_weights_(model, Path(self.weights))
        elif steps:
            # settings that the weights depend on; a stopped command may have left other weights
            names = ("task", "model", "data", "steps", "lr", "seed", "examples")
            settings, code = [getattr(self, name) for name in names], []
            with suppress(TypeError):  # a task of objects without content is known by its name
                code = [task_digest(task)]
            # results are compared with what the task does
            wanted = settings if has_results(folder) else settings + code
            with ExitStack() as stack:
                if not is_trained(path, wanted):
                    # a command that is started twice trains once, and both have the same weights
                    stack.enter_context(locked(path))
                if is_trained(path, wanted):
                    load_weights_(model, path)
                else:
                    examples = spread(len(task.train), self.examples or len(task.train))
                    train_(model, task, steps, self.lr, self.seed, progress, examples)
                    check_retrained(folder, model)
                    save_weights(model, path, {"training": json.dumps(settings + code)})
        return model.eval()

    def training_run(self, task: Task, device: str, progress: Progress) -> TrainingRun:
        """The training by `load_model` as a function of example weights; refused if it has none."""
        from isokron.attribution.data import spread
        from isokron.attribution.task_run import task_run
        from isokron.training import make_model, make_optimizer

        steps = (0 if task.trained else STEPS) if self.steps is None else self.steps
        if not steps:
            raise ValueError(
                "--method unroll needs a model that is trained here, in at least one step, got a "
                "task with a trained model or --steps 0; give --steps"
            )
        model = make_model(task, self.seed).to(device)
        examples = spread(len(task.train), self.examples or len(task.train))
        return task_run(
            task,
            model,
            make_optimizer(model, self.lr),
            steps,
            self.seed,
            examples=examples,
            progress=progress,
        )

    def trained_on(self, task: Task, examples: Tensor, seed: int) -> nn.Module:
        """A new model, trained on these examples like the run's model on all of them."""
        from isokron.training import make_model, train_

        model = make_model(task, seed)
        steps = STEPS if self.steps is None else self.steps
        train_(model, task, steps, self.lr, seed, examples=examples)
        return model.eval()


@dataclass(frozen=True)
class Machine:
    """Options of all commands on a run."""

    panel: ClassVar[str] = "Computation"
    device: str | None = option(
        None, "Device, such as cuda. Default: cuda if there is one.", metavar="DEVICE"
    )
    strict: bool = option(
        False,
        "Refuse layers whose gradients are not those of autograd. Default: they are left out.",
    )
    memory: float | None = option(
        None, "Memory to use, in GiB. Default: half of what is free.", min=1e-6, metavar="GIB"
    )


@dataclass(frozen=True)
class Resources(Machine):
    """Options of commands that use H⁻¹."""

    damping: float | None = option(
        None,
        "Damping, as a multiple of each layer's mean eigenvalue; larger is closer to plain "
        "similarity of gradients. Default: 0.1.",
        min=0,
        rich_help_panel="Curvature",
    )


def open_run(
    folder: Path,
    progress: Progress,
    source: Source | None = None,
    machine: Machine = Machine(),
    check: Callable[[Task], object] | None = None,
    unrolled: bool | None = None,
) -> Attributor:
    """Open the run in a folder, or begin a new one; `source` must match an existing run.

    check: called with the task before its model is trained. unrolled: whether scores are
    derivatives through the training of the model; default: as recorded in the folder.
    """
    import torch

    from isokron.attribution import Attributor
    from isokron.attribution.run_folder import RECORD, WEIGHTS, has_results, read_record
    from isokron.distributed.rank_tasks import in_turn
    from isokron.files import check_free, check_same, check_writable

    check_free(folder, RECORD, ours=[WEIGHTS])
    is_new = not (folder / RECORD).exists()
    if source is None or (source == Source() and (folder / RECORD).exists()):
        source = recorded_source(folder)
    elif has_results(folder):
        recorded = recorded_source(folder).given()
        check_same(folder, "source", recorded, source.with_paths().given())
    source = source.resolved()
    device = machine.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device!r} cannot be used: {error}") from None
    if is_new and process.leads():
        check_writable(folder)  # before anything is loaded or trained
    if source.model is not None:  # from a hub this takes minutes
        progress(f"loading {source.model}", 0, 0)
    task = source.load_task()
    most = len(task.train)
    if source.examples is not None and source.examples > most:
        limit = f"from 1 to the {most} training examples"
        raise ValueError(f"--examples must be {limit}, got {source.examples}")
    if check is not None and not task.trained:
        check(task)
    if unrolled is None and (folder / RECORD).exists():
        unrolled = (read_record(folder)["stages"].get("fit") or {}).get("method") == "unroll"
    # refused before the model is trained
    run = source.training_run(task, device, progress) if unrolled else None
    # the first rank trains, the others read its weights
    with in_turn(process.ranks(), "loading or training the model"):
        model = source.load_model(task, folder, progress)
    a = Attributor(
        folder,
        model,
        task=task,
        device=device,
        layers=source.layers,
        head=source.head,
        max_side=source.max_side,
        memory=None if machine.memory is None else int(machine.memory * 2**30),
        examples=source.examples,
        on_bad=source.on_bad,
        strict=machine.strict,
        source=source.given(),
        ranks=process.ranks(),
        progress=progress,
    )
    return a if run is None else a.fit("unroll", run=run)


def is_trained(path: Path, settings: list[Any]) -> bool:
    """Whether the weights of a run are there, and were trained with these settings."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return False
    try:
        with safe_open(path, "pt") as file:
            recorded = json.loads(file.metadata()["training"])
            return bool(recorded[: len(settings)] == settings)
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged: {error}; delete it, and the same command trains the model again"
        ) from None


def recorded_source(folder: Path) -> Source:
    """The source in a folder's run.json."""
    from isokron.attribution.run_folder import read_record

    return Source(**read_record(folder)["source"]["given"])
