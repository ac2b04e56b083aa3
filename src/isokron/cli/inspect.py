"""`isokron inspect`: the conditioning of a task's model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from isokron.cli.attribution import CurvatureOptions
from isokron.cli.encoding import echo
from isokron.cli.process import work
from isokron.cli.source import TASK
from isokron.cli.terminal import Display, fitted_table, output
from isokron.report.render import visible

STEPS = (
    "Train this many steps first, since an untrained model's curvature says little. "
    "Default: 200, or 0 with --weights."
)
LR = "Learning rate for --steps. Default: where a race begins its search."
OPTIMIZER = "Optimizer for --steps, as in a race; the page shows its statistics."
WEIGHTS = "Safetensors file with all of the model's weights."
LAYERS = (
    "Patterns of layer names, such as 'blocks.*', comma-separated or repeated; !pattern excludes. "
    "Default: all layers."
)
DAMPING = "Damping of the condition numbers, as a multiple of each layer's mean eigenvalue."
OUT = "Folder for the page; an earlier inspection in it is replaced."


def inspect(
    curvature: CurvatureOptions,
    task: Annotated[str, typer.Option(help=TASK, metavar="TASK")] = "digits",
    steps: Annotated[int | None, typer.Option(help=STEPS)] = None,
    optimizer: Annotated[str, typer.Option(help=OPTIMIZER, metavar="NAME")] = "adamw",
    lr: Annotated[float | None, typer.Option(help=LR)] = None,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    weights: Annotated[Path | None, typer.Option(help=WEIGHTS, metavar="FILE")] = None,
    examples: Annotated[int, typer.Option(help="Training examples to fit on.")] = 512,
    layers: Annotated[list[str] | None, typer.Option(help=LAYERS, metavar="PATTERN")] = None,
    damping: Annotated[float, typer.Option(help=DAMPING)] = 0.1,
    out: Annotated[Path, typer.Option(help=OUT)] = Path("isokron-inspect"),
) -> None:
    """Fit the curvature of a task's model and show how ill-conditioned its layers are.

    Shows a table, and writes a page with plots, its numbers as JSON, and the curvature.

    Examples:

      isokron inspect --task digits

      isokron inspect --task digits --optimizer soap

      isokron inspect --task speeches --fisher sampled --layers 'blocks.*'

      isokron inspect --task mine.py:task --weights trained.safetensors
    """
    from isokron.inspect import RECORDS, SPARE, Setup, measure, table, texts, write_report
    from isokron.race.race import open_folder
    from isokron.tasks import load

    fit = {**asdict(curvature), "examples": examples, "layers": layers or (), "damping": damping}
    fit["optimizer"] = optimizer
    setup = Setup(load(task), steps, lr, seed, weights, **fit)
    open_folder(out, RECORDS)
    with work("nothing was written"):
        with Display() as progress:
            result, fitted = measure(setup, progress)
        write_report(result, fitted, out)
    verdict, _, notes = texts(result)
    title, console = "{task}, {method}, {examples:,} examples".format(**result.settings), output()
    console.print(fitted_table(title, table(result), console.width, spare=SPARE))
    console.print(visible("\n".join(notes)), style="dim")
    echo(" ".join(verdict))
    echo(f"Page: {(out / 'index.html').resolve()}")
