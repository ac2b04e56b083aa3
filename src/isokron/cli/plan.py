"""`isokron plan`: memory, traffic and refresh time of optimizers on many ranks."""

import json
from typing import Annotated, Literal

import typer

from isokron.cli.process import work
from isokron.cli.terminal import output

Dtype = Literal["float32", "bfloat16", "float16", "float64"]
WIDTH = 100  # a narrower terminal wraps lines, which is better than numbers that are cut
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
    "Speed of eigendecompositions in TFLOP/s, with 10·d³ operations for a d×d matrix; on GPUs far "
    "lower than that of products."
)


def plan(
    model: Annotated[str, typer.Option(help=MODEL)],
    ranks: Annotated[int, typer.Option(help="Number of processes, one per GPU.")],
    layout: Annotated[Literal["ddp", "fsdp", "hsdp"], typer.Option(help=LAYOUT)] = "ddp",
    shard: Annotated[int | None, typer.Option(help=SHARD)] = None,
    optimizers: Annotated[
        str, typer.Option(help=OPTIMIZERS)
    ] = "adamw,shampoo,soap,katie,muon,quad,skew",
    dtype: Annotated[Dtype, typer.Option(help="Dtype of the parameters.")] = "float32",
    communication: Annotated[Dtype | None, typer.Option(help=COMMUNICATION)] = None,
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
    import torch

    from isokron import planning
    from isokron.optimizers_by_name import resolve, split_specs
    from isokron.planning.report import heading, notes

    sent = None if communication is None else getattr(torch, communication)
    where = planning.make_layout(layout, ranks, shard, sent)
    entrants = [resolve(spec) for spec in split_specs(optimizers)]
    speed = None
    if flops is not None and eigh_flops is not None:
        speed = planning.given_speed(flops, eigh_flops)
    elif flops is not None or eigh_flops is not None:
        raise ValueError("--flops and --eigh-flops go together; give both or neither")
    network = planning.make_model(model, getattr(torch, dtype))
    built = {e.spec: planning.check_optimizer(e.spec, e.build(network, 1e-3)) for e in entrants}
    with work():
        # takes a second: after all checks
        speed = speed or planning.measured_speed()
        report = planning.make_report(model, network, built, where, speed)
    if as_json:
        typer.echo(json.dumps(planning.as_json(report), indent=2))
        return
    console = output(WIDTH, log=WIDTH)
    console.print("\n".join(heading(report)))
    console.print(planning.rich_table(report))
    console.print("\n".join(notes(report)), style="dim")
