"""`isokron evaluate`: scores of a run against models that are retrained without some examples."""

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from isokron.cli.attribution import RunFolder
from isokron.cli.encoding import echo
from isokron.cli.process import work
from isokron.cli.source import open_run, recorded_source
from isokron.cli.terminal import Display


def evaluate(
    run: RunFolder,
    subsets: Annotated[
        int, typer.Option(help="Number of models to retrain; 0, if unrolled: none.", min=0)
    ] = 20,
    queries: Annotated[int, typer.Option(help="Evaluation examples to score.", min=1)] = 20,
    fraction: Annotated[
        float, typer.Option(help="Fraction of the examples in a subset.", min=0, max=1)
    ] = 0.5,
    flipped: Annotated[
        float, typer.Option(help="Fraction of labels to flip; 0: none.", min=0, max=0.9)
    ] = 0.1,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Retrain the model on random parts of its data and compare the results with the scores.

    Prints the linear datamodelling score (the rank correlation of predicted with actual losses of
    the retrained models), how well self-influence finds flipped labels, and how well projected
    scores agree with exact ones. A run of `--method unroll` is retrained with its own seed and
    batches, in which examples outside of the subset have weight 0; its scores are also compared
    with those of gradients and EK-FAC.

    Examples:
      isokron evaluate runs/digits --subsets 30
      isokron evaluate runs/unrolled --fraction 0.99
      isokron evaluate runs/unrolled --subsets 0
    """
    from isokron.attribution.evaluate import evaluate as evaluate_scores

    source = recorded_source(run)
    if source.model is not None or source.weights is not None:
        raise ValueError(
            f"{run} has a model that was trained elsewhere and cannot be retrained by this "
            "command; call isokron.attribution.evaluate.evaluate with a training function"
        )
    with Display() as progress:
        a = open_run(run, progress)
        assert a.task is not None
        most = len(a.task.held_out)
        if queries > most:
            raise ValueError(f"--queries must be from 1 to the {most} of evaluation, got {queries}")
        if subsets < 2 and not (a.is_unrolled and subsets == 0):
            raise ValueError(f"--subsets must be at least 2, or 0 if unrolled, got {subsets}")
        settings: dict[str, Any] = {"subsets": subsets, "flipped": flipped, "seed": seed}
        settings["fraction"] = fraction
        with work():
            results = evaluate_scores(a, source.trained_on, queries, progress=progress, **settings)
    show(results)
    echo(f"Written: {(run / 'evaluation' / 'evaluation.json').resolve()}")


def show(results: Mapping[str, Any]) -> None:
    """Print the results of `isokron evaluate`."""
    headings = {
        "lds": "Linear datamodelling score",
        "agreement": "Rank correlation with unrolled scores",
    }
    for key, heading in headings.items():
        if results[key]:
            echo(f"{heading}, mean over queries ± standard error:")
        for name, level in results[key].items():
            echo(f"  {name:<28} {level['mean']:6.3f} ± {level['error']:.3f}")
    if results["projected"]:
        levels = ", ".join(f"{dim}: {rho:.3f}" for dim, rho in results["projected"].items())
        echo(f"Rank correlation of a store's scores with exact ones, by dimension:\n  {levels}")
    if results["mislabelled"]:
        echo("Area under the ROC curve of finding flipped labels:")
        for name, value in results["mislabelled"].items():
            echo(f"  by {name:<25} {value:6.3f}")
