"""The order of runs, given and tuned learning rates, and races that meet trouble."""

import json
from dataclasses import replace

import pytest
from torch import nn

from isokron import race
from isokron.race.page import sentences
from isokron.race.race import Race, write_run
from isokron.race.search import quarter


def test_runs_are_interleaved_by_seed_then_position_then_optimizer(task):
    stages = []
    lr = {"adamw": [0.01, 0.02], "sign": [0.03, 0.04]}
    race.run(task, ["sign"], steps=2, seeds=2, lr=lr, progress=lambda *call: stages.append(call))
    jobs = [stage.split(", ")[1:] for stage, done, total, _ in stages if done == 1]
    once = [["adamw", "lr 0.01"], ["sign", "lr 0.03"], ["adamw", "lr 0.02"], ["sign", "lr 0.04"]]
    assert jobs == [[*job, f"seed {seed}"] for seed in (0, 1) for job in once]


def test_adamw_is_added_first(task):
    ready = Race(task, ["muon"], 5, 1)
    assert ready.settings["optimizers"] == ["adamw", "muon"]


def test_given_learning_rates_are_all_that_is_tried_with_all_seeds(task):
    spec = "torch.optim:SGD"
    lr = {"adamw": [1e-3, (3e-3, 10)], spec: [0.1, (0.01, 3)]}
    result = race.run(task, [spec], steps=4, seeds=2, lr=lr)
    tried = [[(str(t.setting), t.steps, t.seeds) for t in s.tried] for s in result.standings]
    assert sorted(tried[0]) == [("0.001", 4, 2), ("0.003, rest × 10", 4, 2)]
    assert sorted(tried[1]) == [("0.01, rest × 3", 4, 2), ("0.1", 4, 2)]
    assert result.settings["learning rates"] == {
        "adamw": [0.001, "0.003x10"],
        spec: ["0.01x3", 0.1],
    }
    assert result.probes == []


def test_by_default_all_are_tuned_and_the_best_gets_all_seeds(task):
    two_rates = ["adamw", "torch.optim:AdamW"]
    one_rate = ["soap(match_adamw=True)", "toy:whole_model", "natural"]
    result = race.run(task, [*two_rates, *one_rate], steps=12, seeds=2)
    for s in result.standings:
        ratios = {trial.setting.ratio for trial in s.tried}
        assert ratios == ({1, 3, 10} if s.optimizer in two_rates else {1}), s.optimizer
        assert [trial.setting for trial in s.tried if trial.seeds == 2] == [s.setting]
        assert not s.edge
        assert {trial.steps for trial in s.tried} == {quarter(12), 12}
    # of AdamW also weight decay and β₂; only the race's own
    choices = [{(t.setting.decay, t.setting.beta2) for t in s.tried} for s in result.standings]
    assert [len(values) for values in choices] == [6, 1, 1, 1, 1]
    assert not result.searched


def test_a_model_without_other_parameters_is_tuned_with_one_rate(task):
    """All multiples of the rest would be the same run."""

    for model in (lambda: nn.Linear(6, 3, bias=False), lambda: nn.LayerNorm(6)):
        one = replace(task, model=model, loss=lambda m, b: m(b[0]).square().mean(1), sample=None)
        result = race.run(one, ["sign"], steps=4, seeds=1)
        assert {trial.setting.ratio for s in result.standings for trial in s.tried} == {1}
        assert "rest" not in " ".join(sentences(result))


def test_a_diverging_optimizer_is_shown_and_not_dropped(task):
    spec = "torch.optim:SGD"
    lr = {"adamw": [0.01], spec: [0.01, 1e6]}
    result = race.run(task, [spec], steps=8, seeds=1, lr=lr)
    assert [run.status for run in result.runs_of(spec)] == ["finished", "diverged"]
    assert result.standings[1].diverged == 1
    assert result.standings[1].setting.lr == 0.01


def test_a_failing_optimizer_is_reported_and_the_race_goes_on(task):
    result = race.run(task, ["toy:Raises", "muon"], steps=5, seeds=2, lr=0.01)
    adamw, raises, muon = result.standings
    assert raises.failure == "RuntimeError: no <more> steps"
    assert raises.setting is None
    assert [run.status for run in result.runs_of("toy:Raises")] == ["failed", "failed"]
    assert adamw.setting.lr == muon.setting.lr == 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"lr": [0.1, -1]}, "lr must be positive numbers, got -1"),
        ({"lr": []}, "lr must be positive numbers, got none"),
        ({"lr": {"adamw": "0.1"}}, "lr must be a list of learning rates, got '0.1'"),
        ({"lr": ["0.1"]}, "lr must be positive numbers, got '0.1'"),
        ({"lr": [True]}, "lr must be positive numbers, got True"),
        ({"lr": [[0.1, 3]]}, r"lr must be positive numbers, got \[0\.1, 3\]"),
        ({"lr": [(0.1, 3, 3)]}, r"lr must be positive numbers, got \(0\.1, 3, 3\)"),
        ({"lr": {"soap": [0.1]}}, "'soap', which is not in the race"),
        ({"lr": [(0.1, 0)]}, "lr must be positive numbers, got 0"),
        (
            {"optimizers": ["natural"], "lr": [(0.1, 3)]},
            "lr gives 'natural' two learning rates, .* it takes the model",
        ),
        (
            {"optimizers": ["soap(lr_scale={'0.*':2.0})", "muon(lr_scale={'9.*':2.0})"]},
            r"optimizer \"muon.*lr_scale pattern '9\.\*' matches no trainable parameter",
        ),
        (
            {"optimizers": ["muon(lr_scale={'matrices':-1.0})"]},
            r"optimizer \"muon.*lr_scale must be .* got lr_scale=-1\.0",
        ),
        (
            {"optimizers": ["muon(lr_scale=0)"]},
            r"optimizer 'muon.lr_scale=0.': .*lr_scale must be .* got lr_scale=0",
        ),
    ],
)
def test_wrong_arguments_are_named(task, arguments, message):
    with pytest.raises(ValueError, match=message):
        race.run(task, **({"optimizers": ["adamw"]} | arguments))


def test_an_interrupted_race_carries_what_was_finished(task, tmp_path):
    def impatient(stage, done, total, note):
        if "muon" in stage and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race.run(task, ["muon"], steps=5, seeds=1, lr=[0.01], out=tmp_path, progress=impatient)
    saved = json.loads((tmp_path / "race.json").read_text())
    assert [run["optimizer"] for run in saved["runs"]] == ["adamw"]
    assert not saved["complete"]
    assert "interrupted" in (tmp_path / "index.html").read_text()


def test_an_interruption_right_after_a_run_was_written_still_shows_it(task, tmp_path, monkeypatch):
    def interrupted(folder, run):
        write_run(folder, run)
        raise KeyboardInterrupt

    monkeypatch.setattr("isokron.race.race.write_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        race.run(task, ["muon"], steps=5, seeds=1, lr=[0.01], out=tmp_path)
    saved = json.loads((tmp_path / "race.json").read_text())
    assert [run["optimizer"] for run in saved["runs"]] == ["adamw"]


def test_progress_counts_runs_and_steps_and_ends_every_run_with_its_outcome(task):
    calls = []
    race.run(
        task,
        ["torch.optim:SGD"],
        steps=3,
        seeds=1,
        lr={"adamw": [0.1], "torch.optim:SGD": [1e6]},
        progress=lambda *call: calls.append(call),
    )
    assert [call[:3] for call in calls[:3]] == [
        ("run 1 of 2, adamw, lr 0.1, seed 0", step, 3) for step in (1, 2, 3)
    ]
    assert calls[0][3].startswith("training loss ")
    assert calls[2][3].startswith("final loss ")
    assert calls[-1] == ("run 2 of 2, torch.optim:SGD, lr 1e+06, seed 0", 1, 1, "diverged")
