"""Unrolled and refined runs, killed at any moment or on a full disk: the same command ends them."""

import contextlib
import importlib
import io
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isokron.cli import main

# loaded here, so that every child has them
for module in ("torch._dynamo", "isokron.attribution", "isokron.report.attribution"):
    importlib.import_module(module)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
LETTERS = Path(__file__).parents[1] / "attribution" / "letters.py"
TASK = ["--task", f"{LETTERS}:task", "--steps", "3", "--query", "eval:0"]
COMMANDS = {
    "unroll": [*TASK, "--method", "unroll"],
    "refine": [*TASK, "--layers", "*,!table", "--refine", "2"],
}


def run_in_child(work: Callable[[], object]) -> tuple[int, str]:
    """Exit code, or −signal, and stderr of work in a process that has torch loaded."""
    reading, writing = os.pipe()
    number = os.fork()
    if number == 0:
        os.dup2(writing, 2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = 1
        try:
            work()
        except SystemExit as stopped:
            code = int(stopped.code or 0)
        finally:
            with contextlib.suppress(Exception):
                sys.stderr.flush()
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as stream:
        said = stream.read()
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]), said


def attribute(options: list[str]) -> Callable[[], object]:
    def work() -> None:
        sys.argv, sys.stdin = ["isokron", "attribute", "run", *options], io.StringIO()
        main()

    return work


def killed_at(event: int, folder: Path, work: Callable[[], object]) -> Callable[[], object]:
    """The work, with a SIGKILL at the n-th time that a file of a folder is opened or renamed."""

    def run() -> object:
        left = event

        def hook(name: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if name not in ("open", "os.rename", "os.mkdir", "os.remove"):
                return
            if str(folder) in str(Path(str(arguments[0])).absolute()):
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        return work()

    return run


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_file_it_is_ended_by_the_same_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = attribute(COMMANDS[name])
    (tmp_path / "straight").mkdir()
    monkeypatch.chdir(tmp_path / "straight")
    assert run_in_child(work)[0] == 0
    wanted = contents(tmp_path / "straight")
    (tmp_path / "killed").mkdir()
    monkeypatch.chdir(tmp_path / "killed")
    kills, event = 0, 1
    # each attempt continues the one before it, and comes a little further
    while (code := run_in_child(killed_at(event, tmp_path / "killed" / "run", work))[0]) != 0:
        assert code == -signal.SIGKILL
        kills, event = kills + 1, event + 7
    assert kills > 2
    assert contents(tmp_path / "killed") == wanted


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("limit", [300, 1500])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    name: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = attribute(COMMANDS[name])
    monkeypatch.chdir(tmp_path)

    def limited() -> None:
        # files may have so many bytes: the weights have more than 300, scores more than 1500
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        work()

    code, said = run_in_child(limited)
    assert code == 1, said
    errors = [line for line in said.splitlines() if line.startswith("isokron: error")]
    assert len(errors) == 1, said
    assert "could not write" in errors[0]
    assert "free some space" in errors[0]
    assert not list(tmp_path.rglob(".*.tmp"))
    code, said = run_in_child(work)
    assert code == 0, said
