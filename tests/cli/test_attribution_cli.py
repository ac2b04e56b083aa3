"""The commands on a run, as a person gives them."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isokron.cli import main

LETTERS = Path(__file__).parents[1] / "attribution" / "letters.py"
TASK = ["--task", f"{LETTERS}:task", "--steps", "3"]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def isokron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Exit code, stdout and stderr of a call within this process, which has torch loaded."""

    def call(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["isokron", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    return call


def fails(result: tuple[int, str, str], code: int, message: str) -> None:
    assert result[0] == code
    errors = [line for line in result[2].splitlines() if line.startswith("isokron: error")]
    assert len(errors) == 1, result[2]
    assert message in errors[0]


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_one_command_does_what_the_single_ones_do(isokron: Call, tmp_path: Path) -> None:
    whole = isokron(
        "attribute", "whole", *TASK, "--query", "eval:0-1", "--query", "abc", "--dim", "4"
    )
    assert whole[0] == 0, whole[2]
    assert "Page: " in whole[1]
    for command in (
        ["fit", "parts", *TASK],
        ["build", "parts", "--dim", "4"],
        ["score", "parts", "--query", "eval:0-1", "--query", "abc"],
        ["report", "parts"],
    ):
        assert isokron(*command)[0] == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")
    again = isokron(
        "attribute", "whole", *TASK, "--query", "eval:0-1", "--query", "abc", "--dim", "4"
    )
    assert again[0] == 0
    assert contents(tmp_path / "whole") == contents(tmp_path / "parts")


def test_a_run_is_repeated_from_its_record_to_the_same_bytes(isokron: Call, tmp_path: Path) -> None:
    asked = ["--query", "eval:0-1", "--query", "abc", "--mode", "mean", "--by-layer", "--top", "3"]
    assert isokron("attribute", "one", *TASK, *asked, "--dim", "4", "--fit-examples", "20")[0] == 0
    assert isokron("score", "one", "--query", "abcd", "--top", "2")[0] == 0
    assert isokron("report", "one")[0] == 0
    code, _, err = isokron("repeat", "one", "two")
    assert code == 0, err
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    fails(isokron("repeat", "gone", "three"), 2, "no run in gone")


def test_queries_are_piped(isokron: Call) -> None:
    assert isokron("fit", "run", *TASK)[0] == 0
    assert isokron("build", "run", "--dim", "4")[0] == 0
    code, out, _ = isokron("query", "run", "--json", "--top", "2", stdin="eval:0\n\nabc\n")
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["query"] for record in records] == ["eval:0", "abc"]
    assert len(records[0]["proponents"]) == 2
    code, out, err = isokron("query", "run", stdin="eval:99\neval:1\n")
    assert code == 1
    assert "must lie between" in err
    assert len(out.splitlines()) == 10


def test_wrong_calls_are_told_in_one_line(isokron: Call, tmp_path: Path) -> None:
    asked = ["--query", "eval:0"]
    fails(isokron("attribute", "run", *asked), 2, "--task, or --model and --data")
    fails(isokron("attribute", "run", *TASK), 2, "say what is asked")
    fails(isokron("attribute", "run", *TASK, *asked, "--method", "ekfac"), 2, "belong to neither")
    fails(isokron("attribute", "run", *TASK, *asked, "--dtype", "int8"), 2, "dtype must be one of")
    fails(isokron("attribute", "run", *TASK, *asked, "--memory", "much"), 2, "--memory must be")
    fails(isokron("attribute", "run", "--task", "nothing", *asked), 2, "no task named")
    fails(isokron("attribute", "run", "--model", "m", *asked), 2, "--model and --data")
    fails(isokron("attribute", "run", "--model", "m", "--data", "gone.jsonl", *asked), 2, "no file")
    assert not list(tmp_path.glob("run/*"))
    fails(isokron("score", "run", *asked), 2, "no run in run; begin one")
    fails(isokron("query", "run"), 2, "no run in run")
    fails(isokron("report", "run"), 2, "no run in run")


def test_a_different_command_in_the_same_folder_is_refused(isokron: Call) -> None:
    assert isokron("fit", "run", *TASK)[0] == 0
    fails(isokron("fit", "run", *TASK[:2], "--steps", "4"), 2, "steps was 3, is 4; give a new")
    fails(isokron("fit", "run", *TASK, "--method", "tkfac"), 1, "method was 'kfac', is 'tkfac'")
    fails(isokron("query", "run"), 2, "no store to search; run: isokron build run")
