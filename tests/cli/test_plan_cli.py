"""`isokron plan` as a person meets it."""

import json

import pytest

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


@pytest.mark.parametrize("layout", [(), ("--layout", "fsdp"), ("--layout", "hsdp", "--shard", "4")])
def test_a_plan_is_a_table_that_says_of_what_and_how_sure(called, layout) -> None:
    done = called(*SMALL, *layout)
    assert done.returncode == 0, done.stderr
    model, ranks, _, _, _, *lines = done.stdout.splitlines()
    assert model.startswith("gpt2: 124,439,808 parameters")
    assert ranks.startswith("8 ranks, ")
    names = [line.split("  ")[0].strip() for line in lines[:3]]
    assert names == ["adamw, on every rank", "adamw, sharded", "soap"]
    assert lines[4].startswith("Times are estimates: products at 1 TFLOP/s")


def test_a_plan_is_data_for_machines(called) -> None:
    rows = json.loads(called(*SMALL, "--json").stdout)["optimizers"]
    names = [row["optimizer"] for row in rows]
    assert names == ["adamw, on every rank", "adamw, sharded", "soap"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--model", "lama-7b", "--ranks", "4"), "did you mean llama-7b"),
        (("--model", "gpt2", "--ranks", "0"), "--ranks must be at least 1"),
        (
            ("--model", "gpt2", "--ranks", "6", "--layout", "hsdp", "--shard", "4"),
            "--shard must divide",
        ),
        (("--model", "gpt2", "--ranks", "6", "--optimizers", "natural"), "cannot be planned"),
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
