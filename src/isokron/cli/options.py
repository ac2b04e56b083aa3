"""Options that several commands on a run share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from isokron.attribution import Run

SOURCE = "What is explained"
CURVATURE = "Curvature"
STORE = "Gradient store"
SCORES = "Scores"

RunFolder = Annotated[Path, typer.Argument(help="The run's folder.", metavar="RUN")]

Task = Annotated[
    str | None,
    typer.Option(
        help="A built-in task (see: isokron tasks), module:function or file.py:function.",
        rich_help_panel=SOURCE,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="A Hugging Face model instead: a local folder, or a name on the hub.",
        rich_help_panel=SOURCE,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        help="Its training data: .jsonl, .csv, .tsv, .parquet, .txt, a folder of .txt, or the name "
        "of a data set.",
        rich_help_panel=SOURCE,
    ),
]
Kind = Annotated[
    str, typer.Option(help="Of the model: language or classifier.", rich_help_panel=SOURCE)
]
Text = Annotated[
    str | None, typer.Option(help="Column of texts in the data.", rich_help_panel=SOURCE)
]
Label = Annotated[str | None, typer.Option(help="Column of labels.", rich_help_panel=SOURCE)]
Id = Annotated[str | None, typer.Option(help="Column of names.", rich_help_panel=SOURCE)]
Context = Annotated[
    int | None,
    typer.Option(help="Most tokens of a document; default: the model's.", rich_help_panel=SOURCE),
]
Long = Annotated[
    str,
    typer.Option(help="Longer documents: error, cut or split.", rich_help_panel=SOURCE),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        help="A safetensors file with the trained weights of the model.", rich_help_panel=SOURCE
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        help="Steps of AdamW to train a task's model first. Default: 300, none with --model or "
        "--weights.",
        rich_help_panel=SOURCE,
    ),
]
Rate = Annotated[float, typer.Option(help="Learning rate of these.", rich_help_panel=SOURCE)]
Seed = Annotated[int, typer.Option(help="Of all that is random.", rich_help_panel=SOURCE)]
Examples = Annotated[
    int | None,
    typer.Option(
        help="Train on, and explain by, so many examples, evenly spread.",
        rich_help_panel=SOURCE,
    ),
]
Layers = Annotated[
    list[str] | None,
    typer.Option(
        help="Patterns of layer names; may be repeated. Default: all.", rich_help_panel=SOURCE
    ),
]

Method = Annotated[
    str, typer.Option(help="kfac, ekfac, tkfac or shampoo.", rich_help_panel=CURVATURE)
]
Fisher = Annotated[
    str, typer.Option(help="empirical, sampled or exact.", rich_help_panel=CURVATURE)
]
FitExamples = Annotated[
    int | None,
    typer.Option(
        help="Fit curvature to so many examples, evenly spread. Default: to all.",
        rich_help_panel=CURVATURE,
    ),
]
Sharing = Annotated[str, typer.Option(help="expand or reduce.", rich_help_panel=CURVATURE)]

Dim = Annotated[
    int | None,
    typer.Option(
        help="Gradients are projected to p×p a layer; 0: whole. Default: what makes rows of 65,536 "
        "numbers and a store of 2 GiB.",
        rich_help_panel=STORE,
    ),
]
Projection = Annotated[
    str, typer.Option(help="Random numbers: rademacher or normal.", rich_help_panel=STORE)
]
Scope = Annotated[
    str,
    typer.Option(help="Projected by layer, or all layers as one: global.", rich_help_panel=STORE),
]
Plain = Annotated[
    bool,
    typer.Option(
        "--plain",
        help="Curvature is not folded into the store, but applied to queries.",
        rich_help_panel=STORE,
    ),
]
Damping = Annotated[
    float,
    typer.Option(
        help="Added to eigenvalues, as a multiple of their mean in each layer.",
        rich_help_panel=STORE,
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.", rich_help_panel=STORE)]
Tokens = Annotated[
    bool, typer.Option("--tokens", help="A row for every token.", rich_help_panel=STORE)
]
Memory = Annotated[
    str | None,
    typer.Option(help="Memory for gradients, such as 2G or 500M.", rich_help_panel=STORE),
]

Queries = Annotated[
    list[str] | None,
    typer.Option(
        "--query",
        help="A text, @file of texts, eval:0,3-5 or train:7; may be repeated.",
        rich_help_panel=SCORES,
    ),
]
Mode = Annotated[
    str,
    typer.Option(
        help="Queries one by one (individual), by their mean, or by the nearest of them.",
        rich_help_panel=SCORES,
    ),
]
Unit = Annotated[
    bool, typer.Option("--unit", help="Cosines: lengths do not count.", rich_help_panel=SCORES)
]
ByLayer = Annotated[
    bool, typer.Option("--by-layer", help="Scores of every layer too.", rich_help_panel=SCORES)
]
Fly = Annotated[
    bool,
    typer.Option(
        "--no-store", help="Pass over the data: exact, with no store.", rich_help_panel=SCORES
    ),
]
DampingKind = Annotated[
    str,
    typer.Option(
        help="Of a plain store: relative, absolute, factored or pseudo.", rich_help_panel=SCORES
    ),
]
Top = Annotated[
    int, typer.Option(help="Proponents and opponents to show, each.", rich_help_panel=SCORES)
]


def bytes_of(memory: str | None) -> int | None:
    """`2G` → 2·2³⁰."""
    if memory is None:
        return None
    units = {"k": 10, "m": 20, "g": 30, "t": 40}
    text = memory.strip().lower().removesuffix("b").removesuffix("i")
    power = units.get(text[-1:], 0)
    try:
        number = float(text[:-1] if power else text)
    except ValueError:
        number = 0.0
    if not number > 0:
        raise ValueError(f"--memory must be a size such as 2G or 500M, got {memory!r}")
    return int(number * 2**power)


def dim_of(given: int | None, run: Run) -> int | None:
    """What is given, 0 being whole gradients, or what suits the model and its data."""
    from isokron.attribution.sides import suggested_dim

    if given is None:
        return suggested_dim(run.subject.sites, len(run.subject.train))
    return given or None
