"""`isokron plan`: its table, its JSON and its errors."""

import json

import pytest

from isokron.cli.plan import BYTES, SECONDS, in_units

SMALL = (
    "plan",
    "--model",
    "gpt2",
    "--ranks",
    "8",
    "--flops",
    "1",
    "--eigh-flops",
    "1",
    "--optimizers",
    "adamw,soap",
)


@pytest.mark.parametrize(
    ("layout", "held"),
    [
        ((), "whole parameters on every rank (ddp)"),
        (("--layout", "fsdp"), "parameters sharded over all ranks (fsdp)"),
        (("--layout", "hsdp", "--shard", "4"), "sharded over 4 ranks and replicated 2 times"),
    ],
)
def test_a_plan_is_a_table_with_a_heading_and_notes(called, layout, held) -> None:
    done = called(*SMALL, *layout)
    assert done.returncode == 0, done.stderr
    model, ranks, _, _, _, *lines = done.stdout.splitlines()
    assert model.startswith("gpt2: 124,439,808 parameters in 148 tensors of float32")
    assert ranks.startswith("8 ranks, ")
    assert held in ranks
    names = [line.split("  ")[0].strip() for line in lines[:3]]
    assert names == ["adamw, on every rank", "adamw, sharded", "soap"]
    assert lines[4].startswith("Times are estimates: products at 1 TFLOP/s")


def test_the_table_fits_a_hundred_columns(called) -> None:
    long = "shampoo(max_dim=1024,factor_dtype=None,graft=None)"
    options = ("--ranks", "4096", "--layout", "hsdp", "--shard", "64", "--optimizers", long)
    lines = called(*SMALL, *options).stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert sum("..." in line for line in lines) == 1  # the long name


def test_json_has_the_same_optimizers(called) -> None:
    planned = json.loads(called(*SMALL, "--communication", "bfloat16", "--json").stdout)
    names = [row["optimizer"] for row in planned["optimizers"]]
    assert names == ["adamw, on every rank", "adamw, sharded", "soap"]
    assert (planned["model"], planned["communication"]) == ("gpt2", "bfloat16")


@pytest.mark.parametrize(
    ("number", "units", "text"),
    [
        (0, BYTES, "–"),
        (None, BYTES, "?"),
        (47, BYTES, "47 B"),
        (999.7, BYTES, "1 kB"),
        (1536, BYTES, "1.54 kB"),
        (8.8e12, BYTES, "8.8 TB"),
        (2e-5, SECONDS, "20 µs"),
        (0.0123, SECONDS, "12.3 ms"),
        (5, SECONDS, "5 s"),
        (600, SECONDS, "10 min"),
        (7200, SECONDS, "2 h"),
    ],
)
def test_numbers_have_three_digits_and_a_unit(number, units, text) -> None:
    assert in_units(number, units) == text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "lama-7b", "--ranks", "4"), "did you mean llama-7b"),
        (("--model", "gpt2", "--ranks", "0"), "--ranks must be at least 1"),
        (
            ("--model", "gpt2", "--ranks", "6", "--layout", "hsdp", "--shard", "4"),
            "--shard must divide",
        ),
        (
            ("--model", "gpt2", "--ranks", "6", "--optimizers", "torch.optim:SGD"),
            "cannot be planned",
        ),
        (("--model", "gpt2", "--ranks", "6", "--optimizers", "sop"), "did you mean soap"),
        (("--model", "gpt2", "--ranks", "6", "--dtype", "int8"), "'--dtype': 'int8' is not one of"),
        (
            ("--model", "gpt2", "--ranks", "6", "--flops", "0", "--eigh-flops", "1"),
            "--flops must be a positive number of TFLOP/s",
        ),
        (("--model", "gpt2", "--ranks", "6", "--flops", "1"), "go together"),
        (("--model", "gpt2", "--ranks", "6", "--eigh-flops", "1"), "go together"),
        (("--ranks", "6"), "--model"),
    ],
)
def test_a_wrong_call_is_one_line(inside, arguments, said) -> None:
    code, errors = inside("plan", *arguments)
    assert code == 2
    assert len(errors.splitlines()) == 1
    assert said in errors
