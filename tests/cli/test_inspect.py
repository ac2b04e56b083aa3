"""`isokron inspect` as a person meets it."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

TOY = Path(__file__).parents[1] / "race" / "toy.py"
MINE = ["inspect", "--task", f"{TOY}:task", "--out", "page"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "digitz"], "did you mean digits"),
        (["--method", "kfak"], "'--method': 'kfak' is not one of 'kfac', 'ekfac', 'tkfac'"),
        (["--fisher", "true"], "'--fisher': 'true' is not one of 'empirical', 'sampled', 'exact'"),
        (["--sharing", "none"], "'--sharing': 'none' is not one of 'expand', 'reduce'"),
        (["--steps", "-1"], "--steps must be at least 0, got -1"),
        (["--examples", "0"], "--examples must be at least 1"),
        (["--damping", "-0.1"], "--damping must be a finite number of at least 0, got -0.1"),
        (["--lr", "0"], "--lr must be a positive number"),
        (
            ["--weights", "none.safetensors"],
            "--weights must be a safetensors file, and there is no file 'none.safetensors'",
        ),
        (["--layers", "nothing*"], "'nothing*' matches no module"),
        (
            ["--task", f"{TOY}:task", "--fisher", "sampled"],
            "--fisher 'sampled' needs a task with logits",
        ),
    ],
)
def test_a_wrong_call_exits_2_with_one_line_and_writes_nothing(
    arguments, message, inside, tmp_path
):
    code, err = inside("inspect", *arguments)
    (line,) = err.splitlines()
    assert code == 2
    assert line.startswith("isokron: error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: path.write_text("not tensors"), "'w.safetensors' do not fit: "),
        (
            lambda path: save_file({"0.weight": torch.zeros(8, 6)}, path),
            "Missing key(s)",
        ),
    ],
)
def test_bad_weights_exit_2_with_one_line(write, message, inside, tmp_path):
    write(tmp_path / "w.safetensors")
    code, err = inside(*MINE, "--weights", "w.safetensors")
    (line,) = err.splitlines()
    assert code == 2
    assert message in line
    assert not (tmp_path / "page").exists()


def test_a_folder_that_cannot_be_written_exits_2_before_any_work(inside, tmp_path):
    (tmp_path / "file").write_text("")
    code, err = inside("inspect", "--task", f"{TOY}:task", "--out", "file/page")
    (line,) = err.splitlines()
    assert code == 2
    assert "--out 'file/page' cannot be written: Not a directory" in line


def test_training_that_diverges_exits_1_and_says_what_to_do(inside, tmp_path):
    code, err = inside(*MINE, "--lr", "1e30")
    assert code == 1
    assert "lower --lr 1e+30" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert list((tmp_path / "page").iterdir()) == []


def test_an_inspection_prints_the_table_and_the_page_and_may_be_repeated(
    processes, inside, tmp_path
):
    done = processes.run("-m", "isokron", *MINE, "--steps", "5", folder=tmp_path)
    assert done.out.splitlines()[-1] == f"Page: {(tmp_path / 'page' / 'index.html').resolve()}"
    assert re.search(r"│ 0 +│ +8 × 7 │ +dense │", done.out)
    assert "training: 5 of 5, loss" in done.err
    assert "fitting: 4 of 4" in done.err
    for text in (done.out, done.err):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    files = {p: p.read_bytes() for p in (tmp_path / "page").rglob("*") if p.is_file()}
    assert inside(*MINE, "--steps", "5")[0] == 0
    assert {p: p.read_bytes() for p in (tmp_path / "page").rglob("*") if p.is_file()} == files
    saved = json.loads((tmp_path / "page" / "inspect.json").read_text())
    assert saved["settings"]["training"] == "5 steps of adamw"


def test_one_that_is_interrupted_exits_130_without_a_page(processes, tmp_path):
    process = processes.start("-m", "isokron", *MINE, "--steps", "1000000", folder=tmp_path)
    deadline = time.monotonic() + 60
    while not (tmp_path / "page").exists():
        assert process.poll() is None, process.err
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.3)
    process.kill(signal.SIGINT)
    assert process.wait() == 130
    assert process.err.splitlines()[-1] == "Interrupted: nothing was written."
    assert list((tmp_path / "page").iterdir()) == []
