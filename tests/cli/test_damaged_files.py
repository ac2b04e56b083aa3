"""Damaged files and wrong surroundings: one line that names the file and what to do."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isokron.distributed.launch import join

LETTERS = Path(__file__).parents[1] / "attribution" / "letters.py"
RACE = "race --task digits-tiny --optimizers sign --lr 0.01 --seeds 1 --steps 2 --out race"
SCORE = "score run --query eval:0"


@pytest.fixture
def works(called: Callable[..., Any], tmp_path: Path) -> Callable[[str], None]:
    """Makes a run and a race, each of which then works."""

    def call(command: str) -> None:
        kind = "race" if command.startswith("race") else "run"
        begin = RACE if kind == "race" else f"attribute run --task {LETTERS}:task --steps 2"
        done = called(*begin.split(), *([] if kind == "race" else ["--query", "eval:0"]))
        assert done.returncode == 0, done.stderr

    return call


@pytest.mark.parametrize(
    ("command", "name", "text", "error", "code"),
    [
        (SCORE, "run/run.json", "{", "is not JSON: .*; begin a new run", 2),
        (SCORE, "run/run.json", "[]", "a JSON object is missing; begin a new run", 2),
        (SCORE, "run/run.json", None, "source, .*is missing; begin a new run", 2),
        (SCORE, "run/curvature/curvature.json", "[]", "a JSON object is missing; delete the", 1),
        (f"{RACE} --resume", "race/runs/*.json", "", "is not JSON: .*; delete it, and the same", 1),
        (f"{RACE} --resume", "race/runs/*.json", "{}", "is no run of a race: .*; delete it", 1),
        (f"{RACE} --resume", "race/settings.json", "", "is not JSON: .*; give a new folder", 2),
    ],
)
def test_a_damaged_file_is_named_with_the_remedy(
    called: Callable[..., Any],
    works: Callable[[str], None],
    tmp_path: Path,
    command: str,
    name: str,
    text: str | None,
    error: str,
    code: int,
) -> None:
    works(command)
    (path, *_) = tmp_path.glob(name)
    if text is None:
        record = json.loads(path.read_text())
        text = json.dumps({key: record[key] for key in ("format", "version")})
    path.write_text(text)
    done = called(*command.split())
    assert done.returncode == code, done.stderr
    (line,) = (x for x in done.stderr.splitlines() if x.startswith("isokron: error"))
    relative = path.relative_to(tmp_path)
    assert str(relative) in line
    assert re.search(error, line), line


def test_a_layer_that_curvature_lacks_is_told_with_its_file(
    called: Callable[..., Any], works: Callable[[str], None], tmp_path: Path
) -> None:
    works(SCORE)
    path = tmp_path / "run" / "curvature" / "curvature.json"
    name = json.loads(path.read_text())["layers"][0]["name"]
    path.write_text(path.read_text().replace(f'"name": "{name}"', '"name": "gone"'))
    done = called(*SCORE.split())
    assert done.returncode == 1
    assert "layer 'gone' is " in done.stderr
    assert "in run/curvature/curvature.json and None in the model; load it with" in done.stderr


def test_a_closed_stdin_is_told(
    called: Callable[..., Any],
    works: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from isokron.cli import main

    works(SCORE)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr(sys, "argv", ["isokron", "query", "run"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert "stdin is closed; give queries in a pipe" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "MASTER_PORT"])
def test_a_variable_of_torchrun_that_is_no_number_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a whole number, got 'abc'; start"):
        join({"WORLD_SIZE": "2", name: "abc"})
