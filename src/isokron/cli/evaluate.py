"""`isokron evaluate`: how far the scores of a run can be trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from isokron.cli import options as o
from isokron.cli.errors import reported
from isokron.cli.sources import open_run, recorded
from isokron.cli.watching import Stages, watched

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isokron.tasks import Task

EVALUATION = "Evaluation"


def evaluate(
    run: o.RunFolder,
    subsets: Annotated[
        int, typer.Option(help="Models to retrain.", rich_help_panel=EVALUATION)
    ] = 20,
    fraction: Annotated[
        float,
        typer.Option(help="Of the examples, for each of them.", rich_help_panel=EVALUATION),
    ] = 0.5,
    queries: Annotated[
        int,
        typer.Option(help="Evaluation examples that are asked about.", rich_help_panel=EVALUATION),
    ] = 20,
    dims: Annotated[
        str, typer.Option(help="p of projections to compare.", rich_help_panel=EVALUATION)
    ] = "8,16,32",
    flipped: Annotated[
        float,
        typer.Option(
            help="Labels made wrong, to be found again; 0: none.", rich_help_panel=EVALUATION
        ),
    ] = 0.1,
    damping: o.Damping = 0.1,
    damping_kind: o.DampingKind = "relative",
    seed: o.Seed = 0,
) -> None:
    """Retrain the model on random parts of its data and see whether scores foretold the outcome.

    Prints the linear datamodelling score (rank correlation of what scores say with what
    retraining does), how well wrong labels are found, and compressed against exact scores.

    Example:

      isokron evaluate runs/digits --subsets 30
    """
    with reported(2):
        from isokron.attribution import Ask
        from isokron.attribution.run import read_record

        sizes = _sizes(dims)
        ask = Ask(damping=damping, kind=damping_kind)
        with watched() as watcher:
            opened = open_run(run, watcher)
        source = recorded(read_record(run))
        if source.model is not None or source.weights is not None:
            raise ValueError(
                f"{run} explains a model that was trained elsewhere, and cannot be retrained here; "
                "call isokron.attribution.evaluate with a training of your own"
            )
    with reported(1):
        from isokron.attribution import evaluate as evaluating

        def train(task: Task, indices: Tensor, seed: int) -> nn.Module:
            return source.trained(task, indices, seed)

        with watched() as watcher:
            found = evaluating(
                opened,
                train,
                subsets=subsets,
                fraction=fraction,
                queries=queries,
                dims=sizes,
                seed=seed,
                flipped=flipped,
                ask=ask,
                progress=Stages(watcher),
            )
        show(found)
        typer.echo(f"Plot: {(run / 'evaluation' / 'quality.svg').resolve()}")


def show(found: dict[str, Any]) -> None:
    """What came of it, a line each."""
    typer.echo("Linear datamodelling score, mean over queries and its standard error:")
    for name, level in found["lds"].items():
        typer.echo(f"  {name:<28} {level['mean']:6.3f} ± {level['error']:.3f}")
    typer.echo("Rank correlation of projected with whole scores, by p:")
    for name, by_dim in found["compression"].items():
        values = ", ".join(f"{p}: {value:.3f}" for p, value in by_dim.items())
        typer.echo(f"  {name:<28} {values}")
    if found["mislabelled"]:
        typer.echo("Area under ROC of finding flipped labels:")
        for name, value in found["mislabelled"].items():
            typer.echo(f"  by {name:<25} {value:6.3f}")


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1:
        raise ValueError(f"--dims must be whole numbers such as 8,16,32, got {text!r}")
    return sizes
