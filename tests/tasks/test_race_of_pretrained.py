"""Races on pretrained models and files of texts, from the command line."""

import json
import shutil
import sys

import pytest

from isokron.cli import main

pytest.importorskip("transformers")


@pytest.fixture
def race(folder, tmp_path, monkeypatch, capsys):
    """Exit code and stderr of a race of `adamw` and `muon`, a few steps on a model in a folder."""
    rows = [
        {"text": f"The cat sat on mat {k}, and the dog slept.", "label": ("good", "bad")[k % 2]}
        for k in range(20)
    ]
    lines = "\n".join(map(json.dumps, rows))
    (tmp_path / "train.jsonl").write_text(lines)
    options = ["--lr", "0.001,0.01", "--steps", "2", "--seeds", "1", "--out", "race"]

    def call(kind, *more):
        monkeypatch.chdir(tmp_path)
        source = ["--model", str(folder(kind)), *more]
        monkeypatch.setattr(sys, "argv", ["isokron", "race", *source, *options])
        with pytest.raises(SystemExit) as stopped:
            main()
        return stopped.value.code, capsys.readouterr().err

    return call


@pytest.mark.parametrize(("kind", "more"), [("gpt2", ()), ("bert", ("--kind", "classifier"))])
def test_a_tenth_of_the_documents_is_held_out(race, tmp_path, kind, more):
    assert race(kind, "--data", "train.jsonl", *more)[0] == 0
    found = json.loads((tmp_path / "race" / "race.json").read_text())
    assert found["settings"]["training examples"] == 18
    assert found["settings"]["evaluation examples"] == 2
    assert [run["optimizer"] for run in found["runs"]].count("muon") == 2


def test_results_are_in_a_folder_of_the_models_name(folder, tmp_path, monkeypatch):
    mine = shutil.copytree(folder("gpt2"), tmp_path / "mine")
    (mine / "train.jsonl").write_text('{"text": "The cat sat on the mat."}\n' * 20)
    monkeypatch.chdir(mine)
    options = ["--model", ".", "--data", "train.jsonl", "--lr", "0.001", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["isokron", "race", *options, "--seeds", "1"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 0
    assert (mine / "runs" / "race-mine" / "race.json").exists()


def test_a_model_without_data_is_refused(race, tmp_path):
    code, err = race("gpt2")
    assert (code, err.strip()) == (2, "isokron: error: give --task, or --model and --data")
    assert not (tmp_path / "race").exists()
