"""`isokron plan`: memory, traffic and refresh time of optimizers on many ranks."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from isokron.cli.errors import reported
from isokron.cli.progress import show_table

if TYPE_CHECKING:
    import torch

    from isokron.planning import Report

DTYPES = ("float32", "bfloat16", "float16", "float64")
WIDTH = 100
MODEL = (
    "gpt2, gpt2-medium, gpt2-large, gpt2-xl, llama-7b, llama-13b, llama-70b, mistral-7b, "
    "llama3-8b, llama3-70b; a built-in task; module:function or file.py:function that returns a "
    "model; or a folder with a Hugging Face config.json."
)
LAYOUT = (
    "ddp: replicated parameters and optimizer.distribute(); fsdp: sharded over all ranks; hsdp: "
    "sharded over --shard ranks and replicated across these groups."
)
SHARD = "Ranks that share one copy of the parameters (hsdp only)."
OPTIMIZERS = "Comma-separated, with options in parentheses: adamw,soap(max_dim=1024)."
COMMUNICATION = "Dtype in which blocks are sent, such as bfloat16. Default: their own."
FLOPS = "Speed of matrix products in TFLOP/s, for times. Default: measured here, in a second."
EIGH = (
    "Speed of eigendecompositions in TFLOP/s, a d×d one counted as 10·d³; on GPUs far lower than "
    "that of products."
)


def plan(
    model: Annotated[str, typer.Option(help=MODEL)],
    ranks: Annotated[int, typer.Option(help="Number of processes, one per GPU.")],
    layout: Annotated[str, typer.Option(help=LAYOUT)] = "ddp",
    shard: Annotated[int | None, typer.Option(help=SHARD)] = None,
    optimizers: Annotated[
        str, typer.Option(help=OPTIMIZERS)
    ] = "adamw,shampoo,soap,katie,muon,quad,skew",
    dtype: Annotated[
        str, typer.Option(help=f"Dtype of the parameters: {', '.join(DTYPES)}.")
    ] = "float32",
    communication: Annotated[str | None, typer.Option(help=COMMUNICATION)] = None,
    flops: Annotated[float | None, typer.Option(help=FLOPS)] = None,
    eigh_flops: Annotated[float | None, typer.Option(help=EIGH)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Show memory, traffic and refresh time of optimizers on many ranks.

    Nothing is trained and no weights are in memory: the blocks, their owners and their state are
    those that the optimizers would have.

    Examples:

      isokron plan --model llama-7b --ranks 64

      isokron plan --model llama-70b --ranks 4096 --layout hsdp --shard 64 \\
        --flops 300 --eigh-flops 1

      isokron plan --model gpt2 --ranks 8 --optimizers 'adamw,soap(max_dim=1024)' --json
    """
    with reported(2):
        from isokron import planning
        from isokron.optimizers_by_name import resolve, split_specs

        sent = None if communication is None else _dtype("communication", communication)
        where = planning.make_layout(layout, ranks, shard, sent)
        entrants = [resolve(spec) for spec in split_specs(optimizers)]
        if (flops is None) != (eigh_flops is None):
            raise ValueError(
                "--flops, the speed of products, and --eigh-flops, of decompositions, go together; "
                "give both, or neither to have them measured here"
            )
        # measured below, after all checks, unless given
        speed = None
        if flops is not None and eigh_flops is not None:
            speed = planning.given_speed(flops, eigh_flops)
        network = planning.make_model(model, _dtype("dtype", dtype))
        built = {e.spec: planning.check_optimizer(e.spec, e.build(network, 1e-3)) for e in entrants}
    with reported(1):
        speed = speed or planning.measured_speed()
        report = planning.make_report(model, network, built, where, speed)
        if as_json:
            typer.echo(json.dumps(planning.as_json(report), indent=2))
        else:
            show(report)


def _dtype(argument: str, name: str) -> torch.dtype:
    import torch

    if name not in DTYPES:
        raise ValueError(f"{argument} must be one of {', '.join(DTYPES)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def show(report: Report) -> None:
    """Print the table and how to read it."""
    from isokron.planning.report import heading, notes, rich_table

    show_table(lambda width: rich_table(report), notes(report), heading(report), least=WIDTH)
