"""`torchrun -m isokron`: real launches, of which there are few, for each takes seconds."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from isokron.attribution import subject
from isokron.cli import main

Call = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")

# batches of five examples, so that there is something to share
TASK = """
import sys
sys.path.insert(0, {letters!r})
from isokron.attribution import subject
from letters import task
subject.PASS = 1
"""
QUERIES = ["--query", "eval:0-1", "--query", "abc"]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "isokron"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "ISOKRON_TIMEOUT": "60"}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(subject, "PASS", subject.PASS)  # which the task changes
    letters = str(Path(__file__).parents[1] / "attribution")
    (tmp_path / "task.py").write_text(TASK.format(letters=letters))
    return ["--task", f"{tmp_path / 'task.py'}:task", "--steps", "3"]


def launched(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *LAUNCH, *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    """Exit code, stdout and stderr of a call within this process."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["isokron", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            main()
        return int(stopped.value.code or 0), *capsys.readouterr()

    return call


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def complaints(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("isokron: error")]


def test_two_processes_write_what_one_does(task: list[str], tmp_path: Path, alone: Call) -> None:
    whole = [*task, *QUERIES, "--dim", "4"]
    code, printed, errors = alone("attribute", "alone", *whole)
    assert code == 0, errors
    shared = launched("attribute", "shared", *whole, folder=tmp_path)
    assert shared.returncode == 0, shared.stderr
    assert contents(tmp_path / "shared") == contents(tmp_path / "alone")
    assert len(list((tmp_path / "shared" / "gradients").glob("shard-*"))) == 7
    # one of them prints, and shows progress
    assert shared.stdout.replace("shared", "alone") == printed
    assert shared.stderr.count("gradients: example 32 of 32") == 1
    wrong = launched("fit", "shared", *task, "--method", "tkfac", folder=tmp_path)
    assert wrong.returncode == 1
    (line,) = complaints(wrong.stderr)
    assert "another fit: method was 'kfac', is 'tkfac'" in line


def test_a_command_that_cannot_be_shared_is_refused_once(tmp_path: Path) -> None:
    done = launched("evaluate", "run", folder=tmp_path)
    assert done.returncode != 0
    (line,) = complaints(done.stderr)
    assert "isokron evaluate works on one process, and torchrun has started 2" in line


KILLED = """
import os, signal
from isokron.attribution import building
write = building.StoreWriter.write
def dying(self, number, *args, **kwargs):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, number, *args, **kwargs)
if os.environ.get("RANK") == "1" and os.environ.get("DYING"):
    building.StoreWriter.write = dying
"""


def test_a_killed_process_ends_the_launch_and_the_next_goes_on(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Call
) -> None:
    with (tmp_path / "task.py").open("a") as file:
        file.write(KILLED)
    assert alone("fit", "run", *task)[0] == 0
    monkeypatch.setitem(ENV, "DYING", "1")
    killed = launched("build", "run", "--dim", "4", folder=tmp_path)
    assert killed.returncode != 0
    there = {path.name for path in (tmp_path / "run" / "gradients").glob("shard-*.json")}
    assert "shard-00001.json" in there
    assert "shard-00003.json" not in there
    assert alone("build", "run", "--dim", "4")[0] == 0
    assert alone("fit", "right", *task)[0] == 0
    assert alone("build", "right", "--dim", "4")[0] == 0
    assert contents(tmp_path / "run") == contents(tmp_path / "right")


def test_other_arguments_are_told_by_one_and_end_all(task: list[str], tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(2):
        env = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        command = [sys.executable, "-m", "isokron", "fit", f"run-{rank}", *task]
        started.append(
            subprocess.Popen(
                command,
                cwd=tmp_path,
                env={**ENV, **env, "MASTER_PORT": str(port)},
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    told = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    (line,) = [line for text in told for line in complaints(text)]
    assert "the arguments of isokron must be the same on all 2 ranks" in line
    assert "run-0" in line
    assert "run-1" in line


def test_half_of_a_launch_is_told_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, alone: Call
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, errors = alone("tasks")
    assert code == 2
    (line,) = complaints(errors)
    assert "RANK, MASTER_ADDR, MASTER_PORT" in line
