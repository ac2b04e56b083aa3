"""`isokron inspect`: how ill-conditioned a task's model is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.progress import Display, fitted_table, show_table
from isokron.cli.race import TASK

if TYPE_CHECKING:
    from isokron.inspect import Inspection

STEPS = (
    "Train this many steps with AdamW first, since an untrained model's curvature says little. "
    "Default: 200, or 0 with --weights."
)
WEIGHTS = "A safetensors file with all of the model's weights."
FISHER = (
    "Labels of the Fisher: empirical (the data's), sampled (from the model) or exact (all labels: "
    "a backward pass for every class and position)."
)
SHARING = "Positions that share a weight: expand (one by one) or reduce (summed per example)."
LAYERS = "Patterns of layer names, such as 'blocks.*'; may be repeated. Default: all layers."
DAMPING = "Damping of the conditions shown, as a multiple of a layer's mean eigenvalue."
OUT = "Folder for the page; an earlier inspection in it is replaced."


def inspect(
    task: Annotated[str, typer.Option(help=TASK)] = "digits",
    steps: Annotated[int | None, typer.Option(help=STEPS)] = None,
    lr: Annotated[float, typer.Option(help="Learning rate for --steps.")] = 3e-3,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    weights: Annotated[Path | None, typer.Option(help=WEIGHTS)] = None,
    examples: Annotated[int, typer.Option(help="Training examples to fit on.")] = 512,
    method: Annotated[str, typer.Option(help="kfac, ekfac, tkfac or shampoo.")] = "kfac",
    fisher: Annotated[str, typer.Option(help=FISHER)] = "empirical",
    sharing: Annotated[str, typer.Option(help=SHARING)] = "expand",
    layers: Annotated[list[str] | None, typer.Option(help=LAYERS)] = None,
    damping: Annotated[float, typer.Option(help=DAMPING)] = 0.1,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("isokron-inspect"),
) -> None:
    """Fit the curvature of a task's model and show how ill-conditioned its layers are.

    Shows a table and writes a page with spectra and memory, its numbers and the curvature.

    Examples:

      isokron inspect --task digits

      isokron inspect --task speeches --fisher sampled --layers 'blocks.*'

      isokron inspect --task mine.py:task --weights trained.safetensors
    """
    with reported(2):
        from isokron.inspect import RECORDS, Setup, measure, write_report
        from isokron.race.race import open_folder
        from isokron.tasks import load

        names, loaded = layers or (), load(task)
        source = steps, lr, seed, weights
        setup = Setup(loaded, *source, examples, method, fisher, sharing, names, damping)
        open_folder(out, RECORDS)
    with reported(1):
        try:
            with Display() as progress:
                result, curvature = measure(setup, progress)
        except KeyboardInterrupt:
            typer.echo("Interrupted: nothing was written.", err=True)
            raise typer.Exit(130) from None
        write_report(result, curvature, out)
        show(result)
    typer.echo(f"Page: {(out / 'index.html').resolve()}")


def show(result: Inspection) -> None:
    """Print the table, how to read it, and the verdict."""
    from isokron.inspect import SPARE, table, texts

    verdict, _, notes = texts(result)
    cells, title = (
        table(result),
        "{task}, {method}, {examples:,} examples".format(**result.settings),
    )
    make = lambda width: fitted_table(title, cells, width, spare=SPARE)  # noqa: E731
    show_table(make, notes, after=[" ".join(verdict)])
