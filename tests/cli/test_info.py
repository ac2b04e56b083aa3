"""`isokron info` says which code runs, and why."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isokron._version import __version__

ILLEGAL = Path(__file__).parents[1] / "illegal_bfloat16"


Call = Callable[..., "subprocess.CompletedProcess[str]"]


def anew(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """In an interpreter of its own, which on such a machine is at risk itself."""
    command = [sys.executable, "-m", "isokron", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def info(call: Call) -> list[str]:
    done = call("info")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_versions_and_paths_are_named(called: Call) -> None:
    lines = info(called)
    assert lines[0].startswith(f"isokron {__version__}, Python ")
    assert any(line.startswith("AdamW               cpu     torch   ") for line in lines)
    assert any(line.startswith("bfloat16 products   cpu     torch   ") for line in lines)


@pytest.mark.parametrize(
    ("remedy_helps", "advice"),
    [(True, "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before"), (False, "use float32")],
)
def test_where_bfloat16_is_an_illegal_instruction_it_says_what_to_do(
    remedy_helps: bool, advice: str, called: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ILLEGAL), prepend=os.pathsep)
    if not remedy_helps:
        monkeypatch.setenv("ILLEGAL_BFLOAT16", "1")
    lines = info(anew if remedy_helps else called)
    line = next(line for line in lines if line.startswith("bfloat16 products "))
    assert line.split()[3] == "broken"
    assert advice in line
