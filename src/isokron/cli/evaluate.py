"""`isokron evaluate`: how far the scores of a run can be trusted."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from isokron.cli.attribution import RunFolder
from isokron.cli.errors import reported
from isokron.cli.progress import Display
from isokron.cli.source import open_run, recorded


def evaluate(
    run: RunFolder,
    subsets: Annotated[int, typer.Option(help="Models to retrain.")] = 20,
    fraction: Annotated[float, typer.Option(help="Part of the examples each is trained on.")] = 0.5,
    queries: Annotated[int, typer.Option(help="Evaluation examples to score.")] = 20,
    dims: Annotated[str, typer.Option(help="Dimensions of projections to compare.")] = "16,32,64",
    flipped: Annotated[float, typer.Option(help="Part of the labels to flip; 0: none.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Retrain the model on random parts of its data and see whether scores foretold the outcome.

    Prints the linear datamodelling score (rank correlation of what scores say with what
    retraining does), how well wrong labels are found, and projected against exact scores.

    Example:

      isokron evaluate runs/digits --subsets 30
    """
    with reported(2):
        sizes = _sizes(dims)
        if not 0 < fraction < 1:
            raise ValueError(f"--fraction must be between 0 and 1, got {fraction}")
        source = recorded(run)
        if source.model is not None or source.weights is not None:
            raise ValueError(
                f"{run} explains a model that was trained elsewhere, and cannot be retrained here; "
                "call isokron.attribution.evaluate with a training of your own"
            )
        with Display() as progress:
            a = open_run(run, progress)
        assert a.task is not None
        most = len(a.task.held_out)
        if not 1 <= queries <= most:
            raise ValueError(f"--queries must be from 1 to the {most} of evaluation, got {queries}")
    with reported(1), Display() as progress:
        from isokron.attribution.evaluate import evaluate_run

        results = evaluate_run(
            a,
            source.trained,
            queries,
            dims=sizes,
            flipped=flipped,
            models=subsets,
            fraction=fraction,
            seed=seed,
            progress=progress,
        )
    show(results)
    typer.echo(f"Written: {(run / 'evaluation' / 'evaluation.json').resolve()}")


def show(results: dict[str, Any]) -> None:
    """Print the results, a line each."""
    typer.echo("Linear datamodelling score, mean over queries and its standard error:")
    for name, level in results["lds"].items():
        typer.echo(f"  {name:<28} {level['mean']:6.3f} ± {level['error']:.3f}")
    if results["compression"]:
        typer.echo("Rank correlation of projected with exact scores, by dimension:")
    for name, by_dim in results["compression"].items():
        values = ", ".join(f"{dim}: {value:.3f}" for dim, value in by_dim.items())
        typer.echo(f"  {name:<28} {values}")
    if results["mislabelled"]:
        typer.echo("Area under ROC of finding flipped labels:")
        for name, value in results["mislabelled"].items():
            typer.echo(f"  by {name:<25} {value:6.3f}")


def _sizes(text: str) -> tuple[int, ...]:
    sizes = [int(part) if part.strip().isdigit() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"--dims must be whole numbers such as 8,16,32, got {text!r}")
    return tuple(sizes)
