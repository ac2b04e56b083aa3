"""`torchrun -m isokron`: a real launch, and processes that find what torchrun tells its own.

There is one launch, for each takes seconds: three times an interpreter that imports torch.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from isokron.attribution import data
from isokron.cli import main
from processes import CONTEXT

Call = Callable[..., tuple[int, str, str]]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")

# batches of five examples, so that there is something to share
TASK = """
import sys
sys.path.insert(0, {letters!r})
from isokron.attribution import data
from letters import task
data.TOKENS = 30
"""
QUERIES = ["--query", "eval:0-1", "--query", "abc"]
LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "isokron"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "ISOKRON_TIMEOUT": "60"}


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(data, "TOKENS", data.TOKENS)  # which the task changes
    letters = str(Path(__file__).parents[1] / "attribution")
    (tmp_path / "task.py").write_text(TASK.format(letters=letters))
    return ["--task", f"{tmp_path / 'task.py'}:task", "--steps", "3"]


def launched(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *LAUNCH, *arguments]
    return subprocess.run(
        command, cwd=folder, env=ENV, capture_output=True, text=True, timeout=120, check=False
    )


def started(*calls: list[str], folder: Path) -> tuple[list[int | None], list[str]]:
    """Exit codes and what is on stderr of processes with the environment that torchrun gives."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    told = [folder / f"stderr-{rank}" for rank in range(len(calls))]
    processes = []
    for rank, arguments in enumerate(calls):
        env = {"RANK": str(rank), "WORLD_SIZE": str(len(calls)), "MASTER_PORT": str(port)}
        env |= {**ENV, "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        process = CONTEXT.Process(target=isokron, args=(arguments, env, folder, told[rank]))
        process.start()
        processes.append(process)
    end = time.monotonic() + 60
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    assert not late
    return [process.exitcode for process in processes], [path.read_text() for path in told]


def isokron(arguments: list[str], env: dict[str, str], folder: Path, told: Path) -> None:
    """The command, in a process of its own."""
    os.environ.clear()
    os.environ.update(env)
    torch.set_num_threads(1)
    os.chdir(folder)
    with told.open("w") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.argv = ["isokron", *arguments]
    main()


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


def assert_scores_agree(run: Path, right: Path) -> None:
    (scores,), (wanted,) = ((folder / "scores").glob("*.safetensors") for folder in (run, right))
    assert scores.name == wanted.name
    for name, values in load_file(wanted).items():
        tolerance = 1e-4 * float(values.abs().max())
        torch.testing.assert_close(load_file(scores)[name], values, rtol=1e-3, atol=tolerance)


def test_two_processes_write_what_one_does(task: list[str], tmp_path: Path, alone: Call) -> None:
    whole = [*task, *QUERIES, "--dim", "4"]
    code, printed, errors = alone("attribute", "alone", *whole)
    assert code == 0, errors
    shared = launched("attribute", "shared", *whole, folder=tmp_path)
    assert shared.returncode == 0, shared.stderr
    assert len(list((tmp_path / "shared" / "gradients").glob("shard-*"))) == 16
    assert_scores_agree(tmp_path / "shared", tmp_path / "alone")
    assert shared.stdout.count("Page: ") == printed.count("Page: ") == 1  # one of them prints


def test_an_error_of_all_is_told_by_one(task: list[str], tmp_path: Path, alone: Call) -> None:
    assert alone("fit", "run", *task)[0] == 0
    wrong = ["fit", "run", *task, "--method", "tkfac"]
    codes, told = started(wrong, wrong, folder=tmp_path)
    assert codes == [1, 1]
    (line,) = complaints("".join(told))
    assert "another fit: method was 'kfac', is 'tkfac'" in line


def test_a_command_that_cannot_be_shared_is_refused_once(tmp_path: Path) -> None:
    codes, told = started(*[["evaluate", "run"]] * 2, folder=tmp_path)
    assert all(codes)
    (line,) = complaints("".join(told))
    assert "isokron evaluate works on one process, and torchrun has started 2" in line


KILLED = """
import os, signal
from isokron.attribution import Store
write = Store.write
def dying(self, number, *args, **kwargs):
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return write(self, number, *args, **kwargs)
if os.environ.get("RANK") == "1" and os.environ.get("DYING"):
    Store.write = dying
"""


def test_a_killed_process_ends_the_other_and_the_next_goes_on(
    task: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: Call
) -> None:
    with (tmp_path / "task.py").open("a") as file:
        file.write(KILLED)
    assert alone("fit", "run", *task)[0] == 0
    monkeypatch.setitem(ENV, "DYING", "1")
    codes, _ = started(*[["build", "run", "--dim", "4"]] * 2, folder=tmp_path)
    assert codes[0] not in (0, None)
    assert codes[1] == -signal.SIGKILL
    there = {path.name for path in (tmp_path / "run" / "gradients").glob("shard-*")}
    assert "shard-00001.safetensors" in there
    assert "shard-00003.safetensors" not in there
    assert alone("build", "run", "--dim", "4")[0] == 0
    assert alone("fit", "right", *task)[0] == 0
    assert alone("build", "right", "--dim", "4")[0] == 0
    assert contents(tmp_path / "run") == contents(tmp_path / "right")


def test_other_arguments_are_told_by_one_and_end_all(task: list[str], tmp_path: Path) -> None:
    codes, told = started(*[["fit", f"run-{rank}", *task] for rank in range(2)], folder=tmp_path)
    assert codes == [2, 2]
    (line,) = complaints("".join(told))
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
