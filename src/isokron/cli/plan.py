"""`isokron plan`: memory, traffic and computation of optimizers on many ranks."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import typer

from isokron.cli.encoding import echo, printable
from isokron.cli.terminal import output
from isokron.report.render import visible

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
WIDTH = 100  # a narrower terminal wraps lines, which is better than numbers that are cut
NAME = 26  # columns of an optimizer's name
BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
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
COMMUNICATION = "Dtype in which blocks are sent. Default: their own."
FLOPS = "Speed of matrix products in TFLOP/s. Default: measured on this machine, in a second."
EIGH = (
    "Speed of eigendecompositions in TFLOP/s, with 10 d^3 operations for a d x d matrix; on GPUs "
    "far lower than that of products."
)
HELD = {
    "ddp": "whole parameters on every rank (ddp)",
    "fsdp": "parameters sharded over all ranks (fsdp)",
    "hsdp": "parameters sharded over {shard} ranks and replicated {copies} times (hsdp)",
}
NOTES = (
    "state: bytes that the optimizer keeps, mean and worst over ranks; of AdamW: the worst as a "
    "share of the first line. sent: bytes that a rank sends in a step, besides the reduction of "
    "gradients; ? is unknown. compute: time per step for decompositions, roots or polar factors, "
    "mean over ranks; what is computed every few steps is divided by them. delay: how much longer "
    "a step takes for them, in which ranks wait for each other. owners: ranks that own blocks; the "
    "others wait."
)


def plan(
    model: Annotated[str, typer.Option(help=MODEL, metavar="MODEL")],
    ranks: Annotated[int, typer.Option(help="Number of processes, one per GPU.")],
    layout: Annotated[Literal["ddp", "fsdp", "hsdp"], typer.Option(help=LAYOUT)] = "ddp",
    shard: Annotated[int | None, typer.Option(help=SHARD)] = None,
    optimizers: Annotated[
        str, typer.Option(help=OPTIMIZERS, metavar="LIST")
    ] = "adamw,shampoo,soap,katie,muon,quad,skew",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the parameters.")] = "float32",
    communication: Annotated[Dtype | None, typer.Option(help=COMMUNICATION)] = None,
    flops: Annotated[float | None, typer.Option(help=FLOPS)] = None,
    eigh_flops: Annotated[float | None, typer.Option(help=EIGH)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Show memory, traffic and computation of optimizers, on one rank or many.

    Nothing is trained and no weights are in memory: the blocks, their owners and their state are
    those that the optimizers would have.

    Examples:
      isokron plan --model llama-7b --ranks 64
      isokron plan --model llama-70b --ranks 4096 --layout hsdp --shard 64
      isokron plan --model gpt2 --ranks 8 --optimizers 'adamw,soap(max_dim=1024)' --json
    """
    import torch

    from isokron.model_shapes import make_model
    from isokron.optimizers_by_name import resolve, split_specs
    from isokron.plan import RankLayout, Speed, measured_speed, report

    sent = None if communication is None else getattr(torch, communication)
    rank_layout = RankLayout(layout, ranks, shard, sent)
    entrants = [resolve(spec) for spec in split_specs(optimizers)]
    if (flops is None) != (eigh_flops is None):
        raise ValueError("--flops and --eigh-flops go together; give both or neither")
    for name, value in (("flops", flops), ("eigh_flops", eigh_flops)):
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name} must be a positive number of TFLOP/s, got {value}")
    network = make_model(model, getattr(torch, dtype))
    built = {entrant.spec: entrant.build(network, 1e-3) for entrant in entrants}
    speed = Speed(flops * 1e12, eigh_flops * 1e12) if flops and eigh_flops else measured_speed()
    planned = {"model": model, **report(network, built, rank_layout, speed)}
    if as_json:
        echo(json.dumps(planned, indent=2))
    else:
        show(planned)


def show(planned: Mapping[str, Any]) -> None:
    """Print a report as a table of at most 100 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("optimizer", no_wrap=True)
    for name in ("state", "worst", "of AdamW", "sent", "worst", "compute", "delay", "owners"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in planned["optimizers"]:
        table.add_row(
            shortened(row["optimizer"]),
            *(in_units(row[key], BYTES) for key in ("state_mean", "state_worst")),
            f"{100 * row['of_adamw']:.3g} %",
            *(in_units(row[key], BYTES) for key in ("sent_mean", "sent_worst")),
            *(in_units(row[key], SECONDS) for key in ("compute", "delay")),
            f"{row['owners']:,}" if row["owners"] else printable("–"),
        )
    console, rates = output(WIDTH, log=WIDTH), [planned["product_flops"], planned["eigh_flops"]]
    held = HELD[planned["layout"]].format(**planned, copies=planned["ranks"] // planned["shard"])
    model = "{model}: {parameters:,} parameters in {tensors:,} tensors of {dtype}".format(**planned)
    console.print(visible(model))
    console.print(f"{planned['ranks']:,} rank{'s' * (planned['ranks'] > 1)}, {held}")
    console.print(table)
    speeds = "products at {:.3g} TFLOP/s and decompositions at {:.3g}".format(
        *(r / 1e12 for r in rates)
    )
    console.print(f"Times are estimates: {speeds}, {planned['speed']}.\n{NOTES}", style="dim")


def shortened(name: str) -> str:
    return name if len(name) <= NAME else f"{name[: NAME - 3]}..."


def in_units(number: float | None, units: Mapping[str, float]) -> str:
    """'1.23 GB' with units=BYTES; "–" for 0, "?" for None."""
    if not number:
        return "?" if number is None else printable("–")
    ends = [*units.values(), float("inf")][1:]
    unit = next(u for u, end in zip(units, ends, strict=True) if number < 0.9995 * end)
    return printable(f"{number / units[unit]:.3g} {unit}")
