"""`isokron attribute`: from a model and its data to the page, in one go."""

from __future__ import annotations

from dataclasses import replace

import typer

from isokron.cli import options as o
from isokron.cli import several
from isokron.cli.errors import reported
from isokron.cli.loading import loading
from isokron.cli.score import show
from isokron.cli.sources import Source, open_run
from isokron.cli.watching import Stages, watched


def attribute(
    call: typer.Context,
    run: o.RunFolder,
    query: o.Queries = None,
    task: o.Task = None,
    model: o.Model = None,
    data: o.Data = None,
    kind: o.Kind = "language",
    text: o.Text = None,
    label: o.Label = None,
    id: o.Id = None,
    context: o.Context = None,
    long: o.Long = "error",
    weights: o.Weights = None,
    steps: o.Steps = None,
    lr: o.Rate = 3e-3,
    seed: o.Seed = 0,
    examples: o.Examples = None,
    layers: o.Layers = None,
    method: o.Method = "kfac",
    fisher: o.Fisher = "empirical",
    sharing: o.Sharing = "expand",
    fit_examples: o.FitExamples = None,
    dim: o.Dim = None,
    projection: o.Projection = "rademacher",
    scope: o.Scope = "layer",
    plain: o.Plain = False,
    damping: o.Damping = 0.1,
    dtype: o.Dtype = "float32",
    memory: o.Memory = None,
    mode: o.Mode = "individual",
    unit: o.Unit = False,
    by_layer: o.ByLayer = False,
    no_store: o.Fly = False,
    top: o.Top = 10,
) -> None:
    """Which training examples made the model say this: fit, build, score and report at once.

    Stopped at any moment, the same command goes on where it was.

    Examples:

      isokron attribute runs/digits --task digits --query eval:0-4

      isokron attribute runs/mine --model path/to/model --data train.jsonl --query "a text"
    """
    source = Source.of(call.params)
    with reported(2), loading():
        from isokron.attribution import Ask, Build, Fit, read_queries
        from isokron.attribution.sides import check_separable

        budget = o.bytes_of(memory)
        fitting = Fit(method, fisher, sharing, seed, fit_examples)
        # checked before the model is loaded
        storing = Build(dim or None, projection, "layer", seed, not plain, damping, dtype)
        ask = Ask(mode, unit, by_layer, no_store, damping)
        if not plain and not no_store:
            check_separable(method)
        if not query:
            raise ValueError("say what is asked: --query eval:0, or a text")
    with watched() as watcher:
        stages = Stages(watcher)
        with reported(2):
            opened = open_run(run, watcher, source)
            storing = replace(storing, dim=o.dim_of(dim, opened), scope=scope)
            queries = read_queries(opened.subject.task, query)
        with reported(1):
            from isokron.attribution import build, fit, report, score
            from isokron.attribution.page.report import PAGE
            from isokron.distributed.team import in_turn

            try:
                fit(opened, fitting, stages)
                if not no_store:
                    build(opened, storing, stages, budget)
                answers = score(opened, queries, ask, count=top, progress=stages, memory=budget)
                with in_turn(opened.ranks, "writing the page"):
                    page = report(run, top=top) if opened.leads else run / PAGE
            except KeyboardInterrupt:
                if several.leads():
                    typer.echo("Interrupted: the same command goes on from here.", err=True)
                raise typer.Exit(130) from None
    show(answers)
    typer.echo(f"\nPage: {page.resolve()}")
