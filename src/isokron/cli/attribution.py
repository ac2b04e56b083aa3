"""`isokron attribute`, its single steps (fit, build, score, query, report)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import typer

from isokron.cli import process
from isokron.cli.encoding import echo, json_text
from isokron.cli.process import work
from isokron.cli.source import (
    Dtype,
    Machine,
    Resources,
    Source,
    open_run,
    option,
    recorded_source,
)
from isokron.cli.terminal import (
    SHOWN,
    Display,
    example_line,
    joined,
    score_records,
    show_scores,
)

if TYPE_CHECKING:
    from isokron.attribution import Attributor, Query
    from isokron.tasks import Task

RunFolder = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN")]


@dataclass(frozen=True)
class CurvatureOptions:
    """Options of all commands that fit curvature."""

    panel: ClassVar[str] = "Curvature"
    method: Literal["kfac", "ekfac", "tkfac", "shampoo"] = option("kfac", "Curvature to fit.")
    fisher: Literal["empirical", "sampled", "exact"] = option(
        "empirical",
        "Labels: those of the data, sampled from the model, or all of them (a backward pass for "
        "every class and position).",
    )
    sharing: Literal["expand", "reduce"] = option(
        "expand", "Positions that share a weight: count each, or sum them per example."
    )


@dataclass(frozen=True)
class RunCurvature(CurvatureOptions):
    """Options of `fit`."""

    method: Literal["kfac", "ekfac", "tkfac", "shampoo", "unroll", "none"] = option(  # type: ignore[assignment]
        "kfac",
        "Curvature to fit; none: scores are products of gradients; unroll: derivatives through the "
        "training run.",
    )
    fit_examples: int | None = option(
        None, "Fit to N examples, evenly spaced. Default: all.", min=1
    )
    curvature: Path | None = option(
        None,
        "Take the curvature from a checkpoint of the isokron optimizer that has trained the model "
        "(its state_dict(), or a dict with it under 'optimizer') instead of fitting one.",
        metavar="FILE",
    )

    def check(self, source: Source, chosen: bool = False) -> None:
        """Refuse options without effect beside --curvature or --method unroll, or a missing file.

        chosen: whether options are given that an unrolled run does not take.
        """
        if self.curvature is not None:
            if replace(self, curvature=None) != RunCurvature():
                raise ValueError(
                    "--curvature takes what the optimizer has; leave out --method, --fisher, "
                    "--sharing and --fit-examples"
                )
            if not self.curvature.is_file():
                raise ValueError(f"--curvature must be a file, and there is no {self.curvature}")
        if self.method == "none" and replace(self, method="kfac") != RunCurvature():
            raise ValueError(
                "--method none fits no curvature; leave out --fisher, --sharing and --fit-examples"
            )
        if self.method != "unroll":
            return
        if source.model is not None or source.weights is not None:
            raise ValueError(
                "--method unroll needs to train the model itself, and the training run of a model "
                "from --model or --weights is not known; give --task alone"
            )
        if process.ranks() is not None:
            raise ValueError("--method unroll works on one process; start it without torchrun")
        if replace(self, method="kfac") != RunCurvature() or chosen:
            raise ValueError(
                "--method unroll takes no option of curvature, damping, stores, layers or cosines; "
                "leave out --fisher, --sharing, --fit-examples, --damping, --dim, --store-dtype, "
                "--store, --refine, --layers, --by-layer and --unit"
            )

    def fit(self, a: Attributor) -> None:
        if self.curvature is not None:
            a.fit(optimizer=self.curvature)
            return
        if self.method == "unroll":
            return  # open_run has given the run, which needs no fit
        if self.method == "none":
            a.fit(None)
            return
        seed = recorded_source(a.folder.path).seed
        settings: dict[str, Any] = {"fisher": self.fisher, "sharing": self.sharing, "seed": seed}
        a.fit(self.method, examples=self.fit_examples, **settings)


@dataclass(frozen=True)
class StoreRows:
    """Options of `build`."""

    panel: ClassVar[str] = "Gradient store"
    dim: int | None = option(
        None,
        "Store N x N numbers of each layer's gradient. Default: a small power of two from 16 on "
        "whose scores have a rank correlation of 0.9 with exact ones.",
        min=1,
    )
    store_dtype: Dtype = option("float32", "Dtype of the stored gradients.")

    def build(self, a: Attributor, damping: float | None, queries: Any = None) -> None:
        settings: dict[str, Any] = {} if damping is None else {"damping": damping}
        settings |= {"dtype": self.store_dtype, "seed": recorded_source(a.folder.path).seed}
        a.build(self.dim, queries=queries, **settings)


@dataclass(frozen=True)
class Asked:
    """Options of `score`: the queries, and what is computed for them."""

    panel: ClassVar[str] = "Queries"
    query: list[str] | None = option(
        None,
        "What to explain: a text, @file (of texts, or of prompts and completions), eval:0,3-5 or "
        "train:7. May be repeated.",
    )
    prompt: list[str] | None = option(
        None, "Prompt of a language model; only its completion is explained. May be repeated."
    )
    completion: list[str] | None = option(
        None, "Completion, one for each --prompt. Default: generated by the model."
    )
    mode: Literal["individual", "mean", "nearest"] = option(
        "individual",
        "Score for each query, for the mean gradient of all queries, or by the largest score that "
        "an example has for any query.",
    )
    by_layer: bool = option(False, "Also write the scores of every layer.")
    verify: bool = option(
        False,
        "Take one real training step on the top proponents, on random examples and on the "
        "opponents, show how the loss of the query changes, and predict its change if an example "
        "were left out.",
    )

    def check(self) -> None:
        """Refuse options that do not go together, before anything is loaded or written."""
        prompts, completions = self.prompt or [], self.completion or []
        if not (self.query or prompts):
            raise ValueError("give a query: --query eval:0, --query 'a text' or --prompt 'a text'")
        if completions and len(completions) != len(prompts):
            counts = f"{len(completions)} for {len(prompts)}"
            raise ValueError(f"--completion must be given once for each --prompt, got {counts}")
        if self.verify and self.mode != "individual":
            raise ValueError(f"--verify needs --mode individual, got {self.mode!r}")

    def read(self, task: Task | None, a: Attributor | None = None) -> list[Query]:
        """The queries; `a` has the model, which writes completions."""
        from isokron.attribution.queries import read_queries

        assert task is not None
        prompts = self.prompt or []
        completions: Sequence[str | None] = self.completion or [None] * len(prompts)
        pairs = list(zip(prompts, completions, strict=True))
        model = None if a is None else a.subject.model
        # a query may be an example that the run leaves out
        return read_queries(task, model, self.query or [], pairs, ids=task.ids)

    def settings(self) -> dict[str, Any]:
        return {"mode": self.mode, "by_layer": self.by_layer, "verify": self.verify}


@dataclass(frozen=True)
class Scoring:
    """Options of `score` and `query`, named as the arguments of Attributor.score."""

    panel: ClassVar[str] = "Scores"
    store: bool | None = option(
        None,
        "Score with a gradient store, or exactly in passes over the data. Default: with the store "
        "of the run; `attribute` builds one for --dim or if exact scores need more than 4 passes.",
    )
    unit: bool = option(False, "Score by cosine, which ignores the norms of gradients.")
    refine: int = option(
        0,
        "Refine exact scores by N steps of conjugate gradients toward the exact Gauss-Newton "
        "matrix, a pass over the data each; --damping is then 10 unless it is given.",
        min=0,
    )
    top: int = option(10, "Number of proponents and of opponents per query.", min=1)


def attribute(
    run: RunFolder,
    source: Source,
    curvature: RunCurvature,
    rows: StoreRows,
    asked: Asked,
    scoring: Scoring,
    resources: Resources,
) -> None:
    """Find the training examples behind what a model says: fit, score and report in one command.

    If it is stopped, run the same command again to continue.

    Examples:
      isokron attribute runs/digits --task digits --query eval:0-4
      isokron attribute runs/unrolled --task digits --method unroll --query eval:0
      isokron attribute runs/mine --model gpt2 --data train.jsonl --prompt "Who was"
    """
    # checked before the model is loaded or trained, which may take minutes
    asked.check()
    if scoring.store is False and rows.dim is not None:
        raise ValueError("--dim needs a store and --no-store forbids one; leave out one of them")
    if scoring.refine and (scoring.store or rows.dim is not None):
        raise ValueError("--refine needs exact scores; leave out --store and --dim (--no-store)")
    if scoring.refine and scoring.unit:
        raise ValueError("--refine does not go with --unit; leave one of them out")
    if scoring.refine and curvature.curvature is not None:
        raise ValueError("--refine needs a curvature fitted to the data; leave out --curvature")
    flags = (scoring.store, scoring.refine, asked.by_layer, scoring.unit, source.layers)
    given = resources.damping is not None or rows != StoreRows() or any(flags)
    curvature.check(source, given)
    with Display() as progress:
        unrolled = curvature.method == "unroll"
        a = open_run(run, progress, source, resources, check=asked.read, unrolled=unrolled)
        queries = asked.read(a.task, a)
        use_store, why = a.choose(queries)
        if unrolled:
            use_store, why = False, "derivatives through the training run"
        elif scoring.refine:
            use_store, why = False, "--refine needs exact scores"
        elif not use_store and a.folder.begun_store() is not None:
            use_store, why = True, "the run has a store"
        demanded = scoring.store is not None or rows.dim is not None
        if demanded:
            use_store, why = scoring.store is not False, "as requested"
        announce(a, progress, curvature, queries, scoring.refine)
        if scoring.refine:  # refused before the fit
            from isokron.attribution.refinement import check_refinable

            check_refinable(a.subject, {**asdict(scoring), "store": False}, optimizer=False)
        progress(f"scores: {'store' if use_store else 'exact'}; {why}", 0, 0)
        with work():
            curvature.fit(a)
            if use_store:
                try:
                    rows.build(a, resources.damping, queries)
                except ValueError as error:
                    if demanded or a.folder.begun_store() is not None:
                        raise
                    # no store is accurate enough: score exactly instead
                    use_store, why = False, str(error)
                    progress(f"scores: exact; {why}", 0, 0)
            settings = {**asdict(scoring), **asked.settings(), "store": use_store, "why": why}
            scores = a.score(queries, damping=resources.damping, **settings)
            page = write_page(run)
        progress(progress.times(), 0, 0)
    show_scores(a, queries, scores, min(SHOWN, scoring.top))
    echo(f"\nPage: {page.resolve()}")


def fit(run: RunFolder, source: Source, curvature: RunCurvature, machine: Machine) -> None:
    """Fit the curvature of a model on its training data.

    Examples:
      isokron fit runs/digits-ekfac --task digits --method ekfac
      isokron fit runs/mine --model gpt2 --data train.jsonl --fit-examples 1000
    """
    curvature.check(source)
    with Display() as progress:
        unrolled = curvature.method == "unroll"
        a = open_run(run, progress, source, machine, unrolled=unrolled)
        announce(a, progress, curvature)
        with work():
            curvature.fit(a)
    has_none = curvature.method in ("unroll", "none")
    echo("Nothing to fit" if has_none else f"Curvature: {a.folder.curvature}")


def build(run: RunFolder, rows: StoreRows, resources: Resources) -> None:
    """Store the gradients of all training examples, to score without passes over the data.

    If it is stopped, run the same command again to continue.

    Examples:
      isokron build runs/digits
      isokron build runs/digits-ekfac --dim 16 --store-dtype bfloat16
    """
    with Display() as progress:
        a = open_run(run, progress, machine=resources)
        with work():
            rows.build(a, resources.damping)
    echo(f"Gradients: {a.folder.gradients}")


def score(
    run: RunFolder,
    asked: Asked,
    scoring: Scoring,
    resources: Resources,
    self_influence: Annotated[
        bool,
        typer.Option(
            "--self",
            help="Score the influence of every example on itself, which is large for mislabelled "
            "and rare examples.",
            rich_help_panel=Asked.panel,
        ),
    ] = False,
) -> None:
    """Score all training examples for one or more queries.

    A positive score means that training on the example lowers the loss of the query.

    Examples:
      isokron score runs/digits --query eval:0-9
      isokron score runs/digits --query eval:0 --query train:7 --top 3
      isokron score runs/digits --self
    """
    if self_influence == bool(asked.query or asked.prompt):
        raise ValueError("give --query or --prompt, or --self")
    if self_influence:
        if asked != Asked() or scoring.unit or scoring.refine:
            raise ValueError("--self goes with --top, --store and --damping only")
        score_self(run, scoring, resources)
        return
    asked.check()
    with Display() as progress:
        a = open_run(run, progress, machine=resources)
        queries = asked.read(a.task, a)
        with work():
            settings = {**asdict(scoring), **asked.settings(), "damping": resources.damping}
            scores = a.score(queries, **settings)
    show_scores(a, queries, scores, min(SHOWN, scoring.top))
    echo(f"Scores: {a.folder.scores}")


def score_self(run: Path, scoring: Scoring, resources: Resources) -> None:
    """Write the self-influence of all examples, and print the largest."""
    from safetensors.torch import save

    from isokron.distributed.rank_tasks import in_turn
    from isokron.files import write_atomically

    path = run / "self.safetensors"
    with Display() as progress:
        a = open_run(run, progress, machine=resources)
        with work():
            values = a.self_influence(resources.damping, scoring.store)
            with in_turn(process.ranks(), "writing scores"):
                if process.leads():
                    write_atomically(path, [save({"self_influence": values.contiguous()})])
    for number in values.argsort(descending=True, stable=True)[: scoring.top].tolist():
        example = example_line(a, number)
        echo(f"    {float(values[number]):12.5g}  {joined(a.data.ids[number]):<20}  {example}")
    echo(f"Influence of examples on themselves: {path}")


def query(
    run: RunFolder,
    scoring: Scoring,
    resources: Resources,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per query.")
    ] = False,
) -> None:
    """Answer queries from the keyboard or a pipe, one per line: a text, eval:3 or train:7.

    Examples:
      isokron query runs/digits
      echo eval:0 | isokron query runs/digits --json
    """
    with Display() as progress:
        a = open_run(run, progress, machine=resources)
    failed = False
    for text in input_lines():
        try:
            queries = Asked(query=[text]).read(a.task, a)
            scores = a.score(queries, damping=resources.damping, save=False, **asdict(scoring))
        except (ValueError, FloatingPointError) as error:
            # continue with the next line
            failed = True
            process.complain(str(error))
            continue
        if as_json:
            for record in score_records(a, queries, scores, scoring.top):
                echo(json_text(record))
        else:
            show_scores(a, queries, scores, scoring.top)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def input_lines() -> Iterator[str]:
    """Non-empty lines of stdin, with a prompt in a terminal."""
    if sys.stdin is None:
        raise ValueError("stdin is closed; give queries in a pipe, or use isokron score --query")
    prompt = "query> " if sys.stdin.isatty() else ""
    echo(prompt, end="", err=True)
    for line in sys.stdin:
        if line.strip():
            yield line.rstrip("\n")
        echo(prompt, end="", err=True)


def report(
    run: RunFolder,
    all: Annotated[
        bool, typer.Option("--all", help="Show all scores of the run. Default: the last ones.")
    ] = False,
) -> None:
    """Write the page of a run's scores; this needs neither the model nor the data.

    Examples:
      isokron report runs/digits
      isokron report runs/digits --all
    """
    recorded_source(run)  # raises if the folder has no run
    echo(f"Page: {write_page(run, all).resolve()}")


def write_page(run: Path, all: bool = False) -> Path:
    from isokron.distributed.rank_tasks import in_turn
    from isokron.report.attribution import write_report

    with in_turn(process.ranks(), "writing the page"):
        return write_report(run, all=all) if process.leads() else run / "report.html"


def announce(
    a: Attributor,
    progress: Display,
    curvature: RunCurvature,
    queries: Sequence[Query] = (),
    refine: int = 0,
) -> None:
    """Print covered layers, skipped documents and memory; refuse a run that does not fit."""
    from isokron.report.render import plural

    most, examples = len(a.data), curvature.fit_examples
    if examples is not None and examples > most:
        raise ValueError(f"--fit-examples must be from 1 to the {most} of the run, got {examples}")
    progress(a.selection.summary(), 0, 0)
    assert a.task is not None
    skipped = a.task.skipped
    if skipped:
        names = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
        count = plural(len(skipped), "document")
        progress(f"skipped {count} with fewer than two tokens: {names}", 0, 0)
    method = "ekfac" if curvature.curvature is not None else curvature.method
    plan = a.memory_plan(method, queries, refine=refine)
    progress(plan.summary(), 0, 0)
    plan.check()
