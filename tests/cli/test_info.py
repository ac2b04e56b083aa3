"""`isokron info` says which code runs, and why, whatever is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isokron._version import __version__


def info(tmp_path: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "isokron", "info"],
        env={**os.environ, "ISOKRON_CACHE": str(tmp_path / "cache"), **environment},
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ISOKRON_NATIVE": "0"}, "torch   switched off by ISOKRON_NATIVE=0"),
        ({"CC": "/nowhere/cc"}, "torch   /nowhere/cc cannot be run"),
        ({"CC": "false"}, "torch   false failed"),
        ({"PATH": "/nowhere", "CC": ""}, "torch   no C compiler"),
    ],
)
def test_a_path_is_told_with_its_reason(
    environment: dict[str, str], said: str, tmp_path: Path
) -> None:
    lines = info(tmp_path, **environment)
    assert lines[0].startswith(f"isokron {__version__}, Python ")
    adamw = next(line for line in lines if line.startswith("AdamW "))
    assert said in adamw


def test_without_switches_the_compiled_code_is_named_if_there_is_any(tmp_path: Path) -> None:
    adamw = next(line for line in info(tmp_path) if line.startswith("AdamW "))
    assert " native  compiled by " in adamw or " torch   " in adamw
    assert (" native " in adamw) == any((tmp_path / "cache").glob("adamw-*.so"))
