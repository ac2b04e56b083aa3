"""`isokron plan`: what optimizers cost on many ranks, before there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.errors import reported

if TYPE_CHECKING:
    import torch

    from isokron.planning import Report

MODEL = "What is trained"
RANKS = "On which ranks"
SHOWN = "What is shown"
ALL = "adamw,shampoo,soap,katie,muon,quad,skew"
DTYPES = ("float32", "bfloat16", "float16", "float64")
WIDTH = 100


def plan(
    model: Annotated[
        str,
        typer.Option(
            help="gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-7b, llama-13b, llama-70b, "
            "mistral-7b, llama3-8b, llama3-70b; a built-in task; module:function or "
            "file.py:function that makes a model; or a folder with a Hugging Face config.json.",
            rich_help_panel=MODEL,
        ),
    ],
    ranks: Annotated[int, typer.Option(help="Processes, one a GPU.", rich_help_panel=RANKS)],
    layout: Annotated[
        str,
        typer.Option(
            help="ddp: whole parameters and optimizer.distribute(); fsdp: sharded over all ranks; "
            "hsdp: sharded over --shard ranks, and so in several copies.",
            rich_help_panel=RANKS,
        ),
    ] = "ddp",
    shard: Annotated[
        int | None,
        typer.Option(help="Of hsdp: ranks that share one copy.", rich_help_panel=RANKS),
    ] = None,
    optimizers: Annotated[
        str,
        typer.Option(
            help="Comma-separated, with options in parentheses: adamw,soap(max_dim=1024).",
            rich_help_panel=MODEL,
        ),
    ] = ALL,
    dtype: Annotated[
        str,
        typer.Option(help=f"Of parameters: {', '.join(DTYPES)}.", rich_help_panel=MODEL),
    ] = "float32",
    communication: Annotated[
        str | None,
        typer.Option(
            help="In which blocks travel, such as bfloat16. Default: their own.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    flops: Annotated[
        float | None,
        typer.Option(
            help="Speed of products in TFLOP/s, for times. Default: measured here, in a second.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    eigh_flops: Annotated[
        float | None,
        typer.Option(
            help="Speed of decompositions, of which a d×d one counts as 10·d³; on GPUs many times "
            "less than of products.",
            rich_help_panel=RANKS,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Plain data instead of a table.", rich_help_panel=SHOWN)
    ] = False,
) -> None:
    """Tell memory, traffic and refresh time of optimizers on many ranks.

    Nothing is trained and no weights are in memory: blocks, their owners and their state are those
    that the optimizers would have.

    Examples:

      isokron plan --model llama-7b --ranks 64

      isokron plan --model llama-70b --ranks 4096 --layout hsdp --shard 64 \\
        --flops 300 --eigh-flops 1

      isokron plan --model gpt2 --ranks 8 --optimizers 'adamw,soap(max_dim=1024)' --json
    """
    with reported(2):
        from isokron.planning import (
            check_optimizer,
            given_speed,
            make_layout,
            make_model,
            make_report,
            measured_speed,
        )
        from isokron.race.optimizers import resolve, split_specs

        sent = None if communication is None else _dtype("communication", communication)
        where = make_layout(layout, ranks, shard, sent)
        entrants = [resolve(spec) for spec in split_specs(optimizers)]
        speed = None
        if flops is not None and eigh_flops is not None:
            speed = given_speed(flops, eigh_flops)
        elif flops is not None or eigh_flops is not None:
            raise ValueError(
                "flops, the speed of products, and eigh-flops, of decompositions, go together; "
                "give both, or neither to have them measured here"
            )
        made = make_model(model, _dtype("dtype", dtype))
        built = {e.spec: check_optimizer(e.spec, e.build(made, 1e-3)) for e in entrants}
    with reported(1):
        report = make_report(model, made, built, where, speed or measured_speed())
        _show_json(report) if json else show(report)


def _dtype(argument: str, name: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise ValueError(f"{argument} must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _show_json(report: Report) -> None:
    import json

    from isokron.planning import as_json

    typer.echo(json.dumps(as_json(report), indent=2))


def show(report: Report) -> None:
    """The table and how to read it, on stdout."""
    from rich.console import Console

    from isokron.planning.report import heading, notes, rich_table

    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH, color_system=None)
    elif console.width < WIDTH:  # lines that wrap are better than numbers that are cut
        console = Console(width=WIDTH)
    for line in heading(report):
        console.print(line, markup=False, highlight=False)
    console.print(rich_table(report))
    for note in notes(report):
        console.print(note, style="dim", markup=False, highlight=False)
