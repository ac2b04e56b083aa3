"""`isokron inspect`: how curved a task's model is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.watching import watched

if TYPE_CHECKING:
    from torch import nn

    from isokron.inspection import Inspection, Plan

MODEL = "What is inspected"
CURVATURE = "How curvature is fitted"
FILES = "Files"
LOG_WIDTH = 200  # of a table with every column


def inspect(
    task: Annotated[
        str,
        typer.Option(
            help="A built-in task (see: isokron tasks), module:function or file.py:function.",
            rich_help_panel=MODEL,
        ),
    ] = "digits",
    steps: Annotated[
        int | None,
        typer.Option(
            help="Steps of AdamW before, since an untrained model's curvature says little; 0 is as "
            "initialised. Default: 200, or 0 with --weights.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    lr: Annotated[
        float, typer.Option(help="Learning rate of these steps.", rich_help_panel=MODEL)
    ] = 3e-3,
    seed: Annotated[
        int,
        typer.Option(help="Of weights, batches and labels drawn.", rich_help_panel=MODEL),
    ] = 0,
    weights: Annotated[
        Path | None,
        typer.Option(
            help="A safetensors file with all of the model's weights.", rich_help_panel=MODEL
        ),
    ] = None,
    examples: Annotated[
        int, typer.Option(help="Training examples to fit on.", rich_help_panel=CURVATURE)
    ] = 512,
    method: Annotated[
        str, typer.Option(help="kfac, ekfac, tkfac or shampoo.", rich_help_panel=CURVATURE)
    ] = "kfac",
    fisher: Annotated[
        str,
        typer.Option(
            help="empirical (the data's labels), sampled (the model's) or exact (all labels: a "
            "backward pass for every class and position).",
            rich_help_panel=CURVATURE,
        ),
    ] = "empirical",
    sharing: Annotated[
        str,
        typer.Option(
            help="Positions that share a weight: expand (one by one) or reduce (together).",
            rich_help_panel=CURVATURE,
        ),
    ] = "expand",
    layers: Annotated[
        list[str] | None,
        typer.Option(
            help="Patterns of layer names, such as 'blocks.*'; may be repeated. Default: all.",
            rich_help_panel=CURVATURE,
        ),
    ] = None,
    damping: Annotated[
        float,
        typer.Option(
            help="Shown after damping by this multiple of a layer's mean eigenvalue.",
            rich_help_panel=CURVATURE,
        ),
    ] = 0.1,
    out: Annotated[
        Path,
        typer.Option(
            help="Folder of the page; an earlier inspection in it is replaced.",
            rich_help_panel=FILES,
        ),
    ] = Path("isokron-inspect"),
) -> None:
    """Fit the curvature of a task's model and show how ill-conditioned its layers are.

    Shows a table and writes a page with spectra and memory, its numbers and the curvature.

    Examples:

      isokron inspect --task digits

      isokron inspect --task speeches --fisher sampled --layers 'blocks.*'

      isokron inspect --task mine.py:task --weights trained.safetensors
    """
    with reported(2):
        from isokron.inspection import make_plan
        from isokron.inspection.report import open_folder

        plan = make_plan(
            task,
            steps=steps,
            lr=lr,
            seed=seed,
            weights=weights,
            examples=examples,
            method=method,
            fisher=fisher,
            sharing=sharing,
            layers=layers or (),
            damping=damping,
        )
        model = prepared(plan)
        open_folder(out)
    with reported(1):
        from isokron.inspection import inspect as inspecting
        from isokron.inspection.report import write_report

        try:
            with watched() as watcher:
                result, curvature = inspecting(model, plan, watcher)
        except KeyboardInterrupt:
            typer.echo("Interrupted: nothing was written.", err=True)
            raise typer.Exit(130) from None
        write_report(result, curvature, out)
        show(result)
    typer.echo(f"Page: {(out / 'index.html').resolve()}")


def prepared(plan: Plan) -> nn.Module:
    """The model before training, its layers known to be there: what is wrong is said at once."""
    import warnings

    from isokron.curvature.sites import find_sites
    from isokron.inspection.models import make_model

    model = make_model(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said again, as a note, by the fit
        find_sites(model, plan.layers or None)
    return model


def show(result: Inspection) -> None:
    """The table, how to read it, and the answer in words, on stdout."""
    from rich.console import Console

    from isokron.inspection.table import notes, rich_table
    from isokron.inspection.verdict import verdict

    console = Console()
    if not console.is_terminal:
        console = Console(width=LOG_WIDTH, color_system=None)  # a log does not wrap
    console.print(rich_table(result, console.width))
    for note in notes(result):
        console.print(note, style="dim", markup=False, highlight=False)
    console.print(" ".join(verdict(result)), markup=False, highlight=False)
