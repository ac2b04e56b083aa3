"""Races on pretrained models and files of texts, from the command line."""

import json
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


def test_a_model_without_data_is_refused(race, tmp_path):
    code, err = race("gpt2")
    assert (code, err.strip()) == (2, "isokron: error: give --task, or --model and --data")
    assert not (tmp_path / "race").exists()
