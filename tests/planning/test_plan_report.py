"""The table fits a terminal, the data say the same, and numbers read well."""

import json

import pytest
from rich.console import Console

import isokron
from isokron.planning import as_json, given_speed, make_layout, make_model, make_report
from isokron.planning.layouts import KINDS
from isokron.planning.report import heading, in_bytes, in_seconds, notes, rich_table


def report(kind: str, ranks: int, shard: int | None = None):
    model = make_model("gpt2")
    long = "shampoo(max_dim=1024,factor_dtype=None,graft=None)"
    optimizers = {
        "adamw": isokron.AdamW(isokron.param_groups(model)),
        long: isokron.Shampoo(isokron.param_groups(model)),
        "muon": isokron.Muon(isokron.param_groups(model)),
    }
    return make_report(
        "gpt2", model, optimizers, make_layout(kind, ranks, shard), given_speed(1, 1)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_the_table_fits_a_hundred_columns(kind: str) -> None:
    planned = report(kind, 4096, 64 if kind == "hsdp" else None)
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        console.print(rich_table(planned))
    lines = captured.get().splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("…" in line for line in lines) == 1  # the long name
    assert len([line for line in lines if " B" in line or "kB" in line or "MB" in line]) == 4
    assert "4,096 ranks" in " ".join(heading(planned))
    assert "Times are estimates: products at 1 TFLOP/s" in notes(planned)[0]


def test_data_are_plain_and_complete() -> None:
    data = json.loads(json.dumps(as_json(report("hsdp", 32, 8))))
    assert (data["ranks"], data["shard"], data["layout"]) == (32, 8, "hsdp")
    whole, sharded, shampoo, muon = data["optimizers"]
    assert whole["of_adamw"] == 1
    assert sharded["state_worst"] == pytest.approx(whole["state_worst"] / 8, rel=0.01)
    assert shampoo["state_mean"] <= shampoo["state_worst"]
    assert shampoo["owners"] == muon["owners"] == 32


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "–"), (47, "47 B"), (999.7, "1 kB"), (1536, "1.54 kB"), (8.8e12, "8.8 TB")],
)
def test_bytes_read_well(number: float, text: str) -> None:
    assert in_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "–"), (2e-5, "20 µs"), (0.0123, "12.3 ms"), (5, "5 s"), (600, "10 min"), (7200, "2 h")],
)
def test_times_read_well(seconds: float, text: str) -> None:
    assert in_seconds(seconds) == text


@pytest.mark.parametrize(
    ("kind", "ranks", "shard", "said"),
    [
        ("ddp", 0, None, "ranks must be at least 1, got 0"),
        ("tp", 4, None, "one of ddp, fsdp, hsdp, got 'tp'"),
        ("hsdp", 6, 4, "must divide the 6 ranks, got 4"),
        ("hsdp", 6, None, "must be given for hsdp"),
        ("fsdp", 6, 2, "is of hsdp, not of fsdp"),
    ],
)
def test_a_layout_that_cannot_be_is_told_so(
    kind: str, ranks: int, shard: int | None, said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        make_layout(kind, ranks, shard)
