"""`isokron info` says which code runs, and why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isokron._version import __version__

ILLEGAL = Path(__file__).parents[1] / "illegal_bfloat16"


def info(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "isokron", "info"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_versions_and_paths_are_named() -> None:
    lines = info()
    assert lines[0].startswith(f"isokron {__version__}, Python ")
    assert any(line.startswith("AdamW               cpu     torch   ") for line in lines)
    assert any(line.startswith("bfloat16 products   cpu     torch   ") for line in lines)


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({}, "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before"),
        ({"ILLEGAL_BFLOAT16": "1"}, "use float32"),
    ],
)
def test_where_bfloat16_is_an_illegal_instruction_it_says_what_to_do(
    environment: dict[str, str], advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    lines = info(PYTHONPATH=str(ILLEGAL), **environment)
    line = next(line for line in lines if line.startswith("bfloat16 products "))
    assert line.split()[3] == "broken"
    assert advice in line
