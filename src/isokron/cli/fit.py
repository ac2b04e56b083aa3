"""`isokron fit`: curvature of a trained model, the first stage of a run."""

from __future__ import annotations

import typer

from isokron.cli import options as o
from isokron.cli.errors import reported
from isokron.cli.sources import Source, open_run
from isokron.cli.watching import Stages, watched


def fit(
    call: typer.Context,
    run: o.RunFolder,
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
) -> None:
    """Fit the curvature of a model, which says how far training on an example reaches.

    Example:

      isokron fit runs/digits --task digits --method ekfac
    """
    source = Source.of(call.params)
    with reported(2):
        from isokron.attribution import Fit

        settings = Fit(method, fisher, sharing, seed, fit_examples)
        with watched() as watcher:
            opened = open_run(run, watcher, source)
    with reported(1):
        from isokron.attribution import fit as fitting

        with watched() as watcher:
            found = fitting(opened, settings, Stages(watcher))
        size = sum(record["bytes"] for record in found.report(spectra=False))
        typer.echo(f"Curvature of {len(found)} layers, {size / 2**20:.1f} MiB: {opened.curvature}")
