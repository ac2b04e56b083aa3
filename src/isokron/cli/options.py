"""Options of the commands on a run, each written once and put into signatures by group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

Table = Mapping[str, tuple[Any, Any, str]]  # name → type, default, help

SOURCE: Table = {
    "task": (
        str | None,
        None,
        "Built-in task (see: isokron tasks), module:function or file.py:function.",
    ),
    "model": (
        str | None,
        None,
        "Hugging Face model instead: a local folder, or a name on the hub.",
    ),
    "data": (
        str | None,
        None,
        "Training data of --model: .jsonl, .csv, .tsv, .parquet, .txt, a folder of .txt, or the "
        "name of a data set.",
    ),
    "kind": (str, "language", "Model type: language or classifier."),
    "text": (str | None, None, "Column of texts in the data."),
    "label": (str | None, None, "Column of labels in the data."),
    "id": (str | None, None, "Column of document names in the data."),
    "context": (int | None, None, "Largest number of tokens of a document. Default: the model's."),
    "long": (str, "error", "Longer documents: error, cut or split."),
    "weights": (Path | None, None, "Safetensors file with the trained weights of the model."),
    "steps": (
        int | None,
        None,
        "AdamW steps to train a task's model first. Default: 300, none with --model or --weights.",
    ),
    "lr": (float, 3e-3, "Learning rate for --steps."),
    "seed": (int, 0, "Random seed."),
    "examples": (int | None, None, "Use only N training examples, evenly spaced."),
    "device": (str | None, None, "Device, such as cuda. Default: cuda if there is one."),
    "dtype": (str, "float32", "Weights of --model: float32, bfloat16 or float16."),
    "chat": (
        bool | None,
        None,
        "Put prompts into the tokenizer's chat template. Default: if it has one.",
    ),
}
LAYERS: Table = {
    "layers": (
        list[str] | None,
        None,
        "Patterns of layer names, separated by commas or repeated; !pattern excludes. Default: all "
        "linear, convolution and norm layers up to --max-side.",
    ),
    "max_side": (int, 8192, "Largest number of inputs or outputs of a layer taken by default."),
    "head": (str, "skip", "Output head above --max-side: skip, or lowrank to take it in."),
}
CURVATURE: Table = {
    "method": (str, "kfac", "kfac, ekfac, tkfac or shampoo."),
    "fisher": (str, "empirical", "Labels: empirical, sampled or exact."),
    "sharing": (str, "expand", "Positions that share a weight: expand or reduce."),
    "fit_examples": (
        int | None,
        None,
        "Fit the curvature to N examples, evenly spaced. Default: all.",
    ),
}
STORE: Table = {
    "dim": (
        int | None,
        None,
        "Project gradients to N × N a layer; 0: store them whole. Default: the smallest power of "
        "two from 16 on that has a rank correlation of 0.9 with exact scores on a sample.",
    ),
    "projection": (str, "rademacher", "Random numbers of the projection: rademacher or normal."),
    "store_dtype": (str, "float32", "Numbers of the store: float32, bfloat16 or float16."),
}
MEMORY: Table = {
    "memory": (
        str | None,
        None,
        "Memory to use, such as 2G or 500M. Default: half of what is free.",
    ),
    "damping": (
        float | None,
        None,
        "Added to the curvature, as a multiple of each layer's mean eigenvalue. Default: 0.1.",
    ),
}
QUERIES: Table = {
    "query": (
        list[str] | None,
        None,
        "Text, @file of texts or of prompts and completions, eval:0,3-5 or train:7; may be "
        "repeated.",
    ),
    "prompt": (
        list[str] | None,
        None,
        "Prompt of a language model: only what follows it is explained; may be repeated.",
    ),
    "completion": (
        list[str] | None,
        None,
        "What follows the prompt, one for each --prompt. Default: what the model writes.",
    ),
}
SCORES: Table = {
    "mode": (
        str,
        "individual",
        "Queries one by one (individual), by their mean gradient (mean), or by the largest score "
        "that any of them has (nearest).",
    ),
    "unit": (bool, False, "Cosines: the lengths of gradients do not count."),
    "by_layer": (bool, False, "Write down the score of every layer too."),
    "verify": (
        bool,
        False,
        "Take one real training step on the top examples, on random ones and on the opponents, and "
        "show how the query's loss moved.",
    ),
    "top": (int, 10, "Proponents and opponents to show, each."),
}
PANELS = {
    "Model and data": {**SOURCE, **LAYERS},
    "Curvature": {**CURVATURE, **MEMORY},
    "Gradient store": STORE,
    "Scores": {**QUERIES, **SCORES},
}


def with_options(*tables: Table) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command, whose keyword arguments these are, a signature that typer can read."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        added = [
            _parameter(name, *entry)
            for table in tables
            for name, entry in table.items()
            if name not in signature.parameters
        ]
        command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str, kind: Any, default: Any, help: str) -> inspect.Parameter:
    panel = next(panel for panel, table in PANELS.items() if name in table)
    flag = f"--{name.replace('_', '-')}"
    flag = f"{flag}/--no-{name}" if kind == bool | None else flag
    option = typer.Option(flag, help=help, rich_help_panel=panel)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


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
