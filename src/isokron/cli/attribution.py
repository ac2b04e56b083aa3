"""`isokron attribute` and its single steps: fit, build, score, query, report."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isokron.cli import processes
from isokron.cli.errors import complain, reported
from isokron.cli.options import (
    CURVATURE,
    LAYERS,
    MEMORY,
    QUERIES,
    SCORES,
    SOURCE,
    STORE,
    bytes_of,
    with_options,
)
from isokron.cli.progress import Display
from isokron.cli.source import Source, open_run
from isokron.cli.terminal import SHOWN, Clock, records, show, show_self

if TYPE_CHECKING:
    from isokron.attribution import Attributor, Query

PROMPT = "query> "
RunFolder = Annotated[Path, typer.Argument(help="Folder of the run.", metavar="RUN")]
UseStore = Annotated[
    bool | None,
    typer.Option(
        "--store/--no-store",
        help="Build and use a gradient store, or score exactly in passes over the data. Default: "
        "exact, unless that would take more than 4 passes or --dim is given.",
        rich_help_panel="Gradient store",
    ),
]


@with_options(SOURCE, LAYERS, CURVATURE, STORE, MEMORY, QUERIES, SCORES)
def attribute(run: RunFolder, store: UseStore = None, **options: Any) -> None:
    """Which training examples made the model say this: fit, score and report at once.

    Stopped at any moment, the same command goes on where it was.

    Examples:

      isokron attribute runs/digits --task digits --query eval:0-4

      isokron attribute runs/mine --model path/to/model --data train.jsonl --prompt "Who was"
    """
    with reported(2):
        check(options, asked=True)
    clock = Clock()
    with Display() as progress:
        with reported(2):
            a = begin(run, progress, options)
            queries = read(a, options)
            use_store, why = a.choose(queries)
            if store is not None or options["dim"] is not None:
                use_store, why = store is not False, "as asked for"
            plan = a.memory_plan(options["method"], queries)
            announce(a, plan.summary(), f"scores: {'store' if use_store else 'exact'}; {why}")
            plan.check()
        with reported(1), interruptible():
            clock.start("fit")
            a.fit(**fit_settings(options))
            if use_store:
                clock.start("build")
                use_store, why = try_build(a, options, queries, store, why)
            clock.start("score")
            scores = a.score(queries, store=use_store, why=why, **score_settings(options))
            clock.start("report")
            page = write_page(a)
    show(a, queries, scores, min(SHOWN, options["top"]))
    typer.echo(f"\n{clock.summary()}\nPage: {page.resolve()}")


@with_options(SOURCE, LAYERS, CURVATURE, MEMORY)
def fit(run: RunFolder, **options: Any) -> None:
    """Fit the curvature of a model.

    Example:

      isokron fit runs/digits --task digits --method ekfac
    """
    with reported(2):
        check(options)
        with Display() as progress:
            a = begin(run, progress, options)
            announce(a, a.memory_plan(options["method"]).summary())
    with reported(1), Display() as progress:
        a.fit(**fit_settings(options))
        assert a.curvature is not None
        size = sum(record["bytes"] for record in a.curvature.report(spectra=False))
        where = a.folder.curvature
        typer.echo(f"Curvature of {len(a.curvature)} layers, {size / 2**20:.1f} MiB: {where}")


@with_options(STORE, MEMORY)
def build(
    run: RunFolder,
    seed: Annotated[int, typer.Option(help="Random seed of the projection.")] = 0,
    **options: Any,
) -> None:
    """Store the gradients of all training examples, to answer queries without a pass over the data.

    A build that was stopped goes on where it was with the same command.

    Example:

      isokron build runs/digits --dim 16 --store-dtype bfloat16
    """
    with reported(2):
        check(options)
        with Display() as progress:
            a = open_run(run, progress, memory=bytes_of(options["memory"]))
    with reported(1):
        a.build(**{**build_settings(options), "seed": seed})
        store = a.store
        assert store is not None
        size = len(store) * store.width * store.dtype.itemsize
        typer.echo(
            f"Gradients of {store.examples:,} examples, rows of {store.width:,}, "
            f"{size / 2**20:.1f} MiB: {a.folder.gradients}"
        )


@with_options(QUERIES, SCORES, MEMORY)
def score(
    run: RunFolder,
    store: UseStore = None,
    name: Annotated[str | None, typer.Option(help="Name of the scores' files.")] = None,
    self_influence: Annotated[
        bool,
        typer.Option(
            "--self",
            help="Influence of every example on itself: large for what is mislabelled or rare.",
        ),
    ] = False,
    **options: Any,
) -> None:
    """Score all training examples for one query or many.

    Positive: training on the example lowers the loss of the query.

    Examples:

      isokron score runs/digits --query eval:0-9

      isokron score runs/speeches --query "the Congress of the United States"
    """
    with reported(2):
        check(options)
        asked = bool(options["query"] or options["prompt"])
        if self_influence == asked:
            raise ValueError("give --query or --prompt, or --self")
        with Display() as progress:
            a = open_run(run, progress, memory=bytes_of(options["memory"]))
            queries = read(a, options) if asked else []
    with reported(1):
        if self_influence:
            show_self(a, options["top"], options["damping"], store)
            return
        scores = a.score(queries, store=store, name=name, **score_settings(options))
        show(a, queries, scores, min(SHOWN, options["top"]))
        typer.echo(f"Scores: {a.folder.scores}")


@with_options(MEMORY)
def query(
    run: RunFolder,
    top: Annotated[int, typer.Option(help="Proponents and opponents to show, each.")] = 5,
    unit: Annotated[bool, typer.Option("--unit", help="Cosines.")] = False,
    store: UseStore = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object a line.")] = False,
    **options: Any,
) -> None:
    """Ask a run, one query a line: a text, eval:3 or train:7.

    Examples:

      isokron query runs/speeches

      echo "eval:0" | isokron query runs/digits --json
    """
    from isokron.attribution.queries import read_queries

    with reported(2):
        check({**options, "top": top})
        with Display() as progress:
            a = open_run(run, progress, memory=bytes_of(options["memory"]))
    failed = False
    for text in lines():
        try:
            assert a.task is not None
            queries = read_queries(a.task, a.subject.model, [text], ids=a.data.ids)
            scores = a.score(
                queries, unit=unit, store=store, damping=options["damping"], save=False
            )
        except (ValueError, FloatingPointError) as error:
            failed = True
            complain(str(error), 1)
            continue
        if as_json:
            for record in records(a, queries, scores, top):
                typer.echo(json.dumps(record, ensure_ascii=False))
        else:
            show(a, queries, scores, top)
    if failed and not sys.stdin.isatty():
        raise typer.Exit(1)


def report(
    run: RunFolder,
    top: Annotated[int | None, typer.Option(help="Examples of each sign. Default: all.")] = None,
) -> None:
    """Write the page of a run's scores. It needs neither the model nor the data.

    Example:

      isokron report runs/digits
    """
    with reported(2):
        from isokron.attribution.run_folder import read_record
        from isokron.distributed.team import in_turn
        from isokron.report.attribution import write_report

        read_record(run)
        page = run / "report.html"
        with in_turn(processes.ranks(), "writing the page"):
            if processes.leads():
                page = write_report(run, top=top)
    typer.echo(f"Page: {page.resolve()}")


def check(options: dict[str, Any], asked: bool = False) -> None:
    """Refuse wrong values before anything is loaded or written."""
    from isokron.attribution.attributor import MODES, check_damping
    from isokron.attribution.gradients import DTYPES
    from isokron.attribution.projection import KINDS
    from isokron.curvature.fit import FISHERS, METHODS, SHARINGS

    choices = {
        "method": METHODS,
        "fisher": FISHERS,
        "sharing": SHARINGS,
        "mode": MODES,
        "store_dtype": tuple(DTYPES),
        "projection": KINDS,
        "head": ("skip", "lowrank"),
    }
    for name, allowed in choices.items():
        if name in options and options[name] not in allowed:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be one of {allowed}, got {options[name]!r}")
    for name, least in (("top", 1), ("dim", 0), ("examples", 1), ("fit_examples", 1)):
        value = options.get(name)
        if value is not None and value < least:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} must be at least {least}, got {value}")
    bytes_of(options.get("memory"))
    if options.get("verify") and options["mode"] != "individual":
        raise ValueError(f"--verify needs --mode individual, got {options['mode']!r}")
    if options.get("damping") is not None:
        check_damping(options["damping"])
    if asked and not (options["query"] or options["prompt"]):
        raise ValueError("say what is asked: --query eval:0, --query 'a text' or --prompt 'a text'")
    prompts, completions = options.get("prompt") or [], options.get("completion") or []
    if completions and len(completions) != len(prompts):
        raise ValueError(
            f"--completion must be given once for each --prompt, got {len(completions)} for "
            f"{len(prompts)}"
        )
    if "task" in options and (options["task"] or options["model"] or options["data"]):
        Source.of(options).check()


def begin(run: Path, progress: Display, options: dict[str, Any]) -> Attributor:
    """The run that the options begin, or take up."""
    memory, device = bytes_of(options["memory"]), options["device"]
    return open_run(run, progress, Source.of(options), memory=memory, device=device)


def read(a: Attributor, options: dict[str, Any]) -> list[Query]:
    from isokron.attribution.queries import read_queries

    assert a.task is not None
    prompts = options["prompt"] or []
    completions = options["completion"] or [None] * len(prompts)
    pairs = list(zip(prompts, completions, strict=True))
    return read_queries(a.task, a.subject.model, options["query"] or [], pairs, ids=a.data.ids)


def fit_settings(options: dict[str, Any]) -> dict[str, Any]:
    names = ("method", "fisher", "sharing", "seed")
    return {name: options[name] for name in names} | {"examples": options["fit_examples"]}


def build_settings(options: dict[str, Any]) -> dict[str, Any]:
    damping = {} if options["damping"] is None else {"damping": options["damping"]}
    return {
        "dim": options["dim"],
        "kind": options["projection"],
        "dtype": options["store_dtype"],
        "seed": options.get("seed", 0),
        **damping,
    }


def score_settings(options: dict[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in (*SCORES, "damping")}


def announce(a: Attributor, *lines: str) -> None:
    """What the run covers and needs, before the work begins."""
    if not processes.leads():
        return
    typer.echo(a.selection.summary(), err=True)
    skipped = a.task.skipped if a.task is not None else ()
    if skipped:
        names = ", ".join(skipped[:3]) + (", …" if len(skipped) > 3 else "")
        typer.echo(f"skipped {len(skipped)} documents of fewer than two tokens: {names}", err=True)
    for line in lines:
        typer.echo(line, err=True)


def try_build(
    a: Attributor,
    options: dict[str, Any],
    queries: Sequence[Query],
    store: bool | None,
    why: str,
) -> tuple[bool, str]:
    """Build a store; unless it was asked for, exact scores take its place if it is too noisy."""
    try:
        a.build(**build_settings(options), queries=queries)
    except ValueError as error:
        if store is not None or options["dim"] is not None or a.folder.stage("build") is not None:
            raise
        typer.echo(f"scores: exact; {error}", err=True)
        return False, str(error)
    return True, why


def write_page(a: Attributor) -> Path:
    from isokron.distributed.team import in_turn

    with in_turn(a.subject.ranks, "writing the page"):
        return a.report() if a.folder.leads else a.folder.path / "report.html"


@contextmanager
def interruptible() -> Iterator[None]:
    """Says, after Ctrl-C, that nothing finished is lost."""
    try:
        yield
    except KeyboardInterrupt:
        if processes.leads():
            typer.echo("Interrupted: the same command goes on from here.", err=True)
        raise typer.Exit(130) from None


def lines() -> Iterator[str]:
    """Queries from the keyboard, with a prompt, or from a pipe; none of them empty."""
    terminal = sys.stdin.isatty()
    while True:
        if terminal:
            typer.echo(PROMPT, nl=False, err=True)
        text = sys.stdin.readline()
        if not text:
            if terminal:
                typer.echo("", err=True)
            return
        if text.strip():
            yield text.rstrip("\n")
