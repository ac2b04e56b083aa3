"""The folder of a run: tried first, one training at a time, weights that are never replaced."""

import json
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from isokron.training import load_weights_, save_weights

LETTERS = Path(__file__).parents[1] / "attribution" / "letters.py"
TASK = ["--task", f"{LETTERS}:task", "--steps", "3"]
QUERY = ["--query", "eval:0"]
Call = Callable[..., Any]


def refused(result: Any, code: int, message: str) -> None:
    assert result.returncode == code, result.stderr
    (error,) = (line for line in result.stderr.splitlines() if line.startswith("isokron: error"))
    assert re.search(message, error), error


@pytest.mark.parametrize("command", [["attribute", *QUERY], ["fit"]], ids=["attribute", "fit"])
def test_a_folder_that_cannot_be_made_is_found_before_training(
    command: list[str], called: Call, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    first, *options = command
    result = called(first, "file/run", *options, *TASK)
    refused(result, 2, "could not write 'file/run': Not a directory; make its folder writable")
    assert "training" not in result.stderr


def test_a_folder_that_is_not_writable_is_found_before_training(
    called: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.TemporaryFile", denied)  # root may write anywhere
    result = called("fit", "run", *TASK)
    refused(result, 2, "could not write 'run': Permission denied; make its folder writable")
    assert not (tmp_path / "run").exists()


def test_weights_that_were_cut_off_are_named_with_the_remedy(called: Call, tmp_path: Path) -> None:
    assert called("attribute", "run", *TASK, *QUERY).returncode == 0
    weights = tmp_path / "run" / "weights.safetensors"
    before = weights.read_bytes()
    os.truncate(weights, 0)
    result = called("attribute", "run", *TASK, *QUERY)
    refused(result, 2, r"weights.safetensors is damaged: .*; delete it, and the same command")
    weights.unlink()
    assert called("attribute", "run", *TASK, *QUERY).returncode == 0
    assert weights.read_bytes() == before


def test_weights_of_a_task_file_that_was_changed_are_trained_again(
    called: Call, tmp_path: Path
) -> None:
    file, text = tmp_path / "mine.py", LETTERS.read_text()
    options = ["--task", f"{file}:task", "--steps", "3"]
    changes = [("", ""), ("# a note\n", ""), ("manual_seed(0)", "manual_seed(5)")]
    changes += [(".tanh()", ".relu()"), (".mean(1)", ".sum(1)")]
    for old, new in changes:
        file.write_text("# a note\n" + text.replace(old, new) if old else "# a note\n" + text)
        for name in ("run", f"new {new}"):
            # stopped before any result: the memory is too small
            result = called("fit", name, *options, "--memory", "1e-5")
            refused(result, 2, "does not fit; give more memory")
        again, straight = (tmp_path / name / "weights.safetensors" for name in ("run", name))
        assert again.read_bytes() == straight.read_bytes(), (old, new)


def test_weights_of_results_are_not_replaced_by_others(called: Call, tmp_path: Path) -> None:
    assert called("attribute", "run", *TASK, *QUERY).returncode == 0
    run = tmp_path / "run"
    record = json.loads((run / "run.json").read_text())
    record["fingerprint"]["weights"] = "0" * 16  # as of training on another machine
    (run / "run.json").write_text(json.dumps(record))
    (run / "weights.safetensors").unlink()
    refused(called("score", "run", *QUERY), 2, r"training it again gave \w+, .*; give a new folder")
    assert not (run / "weights.safetensors").exists()


def test_two_commands_at_once_train_once(processes: Any, tmp_path: Path) -> None:
    command = ["-m", "isokron", "attribute", "run", *TASK, *QUERY]
    both = [processes.start(*command, folder=tmp_path) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0], [process.err for process in both]
    assert sum("training" in process.err for process in both) <= 1
    assert not [path for path in (tmp_path / "run").rglob(".*") if path.is_file()]


def test_a_second_training_waits_and_reads_the_first(
    called: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process writes while the lock is awaited is not replaced."""
    assert called("attribute", "other", *TASK, *QUERY).returncode == 0
    from isokron import files

    locked, weights = files.locked, Path("run", "weights.safetensors")

    def late(path: Path) -> Any:
        if path.name == weights.name:
            (tmp_path / weights).parent.mkdir(exist_ok=True)
            (tmp_path / weights).write_bytes((tmp_path / "other" / weights.name).read_bytes())
        return locked(path)

    def not_again(*_: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr(files, "locked", late)
    monkeypatch.setattr("isokron.training.train_", not_again)
    result = called("attribute", "run", *TASK, *QUERY)
    assert result.returncode == 0, result.stderr


def test_weights_are_written_whole_and_readable_by_all(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight
            self.register_buffer("part", torch.randn(4, 2).T)

    torch.manual_seed(0)
    model, other = Tied(), Tied()
    save_weights(model, tmp_path / "weights.safetensors", {"training": "one"})
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~_umask()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"training": "one"}
        assert len(file.keys()) == 4
    load_weights_(other, path)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
