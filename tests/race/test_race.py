"""The order of runs, the growth of sweeps, and races that meet trouble."""

import json

import pytest

from isokron import race
from isokron.race.race import Race, interleaved, next_lr, write_run
from isokron.race.results import Standing


@pytest.mark.parametrize(
    ("best", "following"), [(1.0, 3.0), (0.1, 0.0333), (0.3, None), (None, 0.0333)]
)
def test_a_sweep_grows_beyond_the_edge_its_best_lies_at(best, following):
    assert next_lr(Standing("adamw", [0.1, 0.3, 1.0], best)) == following


def test_runs_are_interleaved_by_seed_then_position_then_optimizer():
    jobs = [key[:3] for key in interleaved({"adamw": [1, 2], "muon": [3, 4]}, seeds=2)]
    once = [("adamw", 1), ("muon", 3), ("adamw", 2), ("muon", 4)]
    assert jobs == [(*job, seed) for seed in (0, 1) for job in once]


def test_adamw_is_added_first(task):
    ready = Race(task, ["muon"], 5, 1)
    assert ready.settings["optimizers"] == ["adamw", "muon"]


def test_default_sweeps_grow_at_most_twice_and_given_ones_never(task):
    # far too few steps to learn: the largest learning rate tried is always best
    spec = "torch.optim:SGD"
    result = race.run(task, [spec], steps=2, seeds=1, lrs={"adamw": [1e-3, 3e-3]})
    adamw, sgd = result.standings
    assert adamw.lrs == [1e-3, 3e-3]
    assert adamw.edge
    assert sgd.lrs == [3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 9e-2]
    assert sgd.best_lr == 9e-2


def test_a_diverging_optimizer_is_shown_and_not_dropped(task):
    spec = "torch.optim:SGD"
    lrs = {"adamw": [0.01], spec: [0.01, 1e6]}
    result = race.run(task, [spec], steps=8, seeds=1, lrs=lrs)
    assert [run.status for run in result.runs_of(spec)] == ["finished", "diverged"]
    assert result.standings[1].diverged == 1
    assert result.standings[1].best_lr == 0.01


def test_a_failing_optimizer_is_reported_and_the_race_goes_on(task):
    result = race.run(task, ["toy:Raises", "muon"], steps=5, seeds=2, lrs=[0.01])
    adamw, raises, muon = result.standings
    assert raises.failure == "RuntimeError: no <more> steps"
    assert raises.best_lr is None
    assert [run.status for run in result.runs_of("toy:Raises")] == ["failed", "failed"]
    assert adamw.best_lr == muon.best_lr == 0.01


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"seeds": 0}, "seeds must be at least 1, got 0"),
        ({"lrs": [0.1, -1]}, "lr must be positive numbers, got -1"),
        ({"lrs": []}, "lr must be positive numbers, got none"),
        ({"lrs": {"soap": [0.1]}}, "'soap', which is not in the race"),
    ],
)
def test_wrong_arguments_are_named(task, arguments, message):
    with pytest.raises(ValueError, match=message):
        race.run(task, ["adamw"], **arguments)


def test_an_interrupted_race_carries_what_was_finished(task, tmp_path):
    def impatient(stage, done, total, note):
        if "muon" in stage and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        race.run(task, ["muon"], steps=5, seeds=1, lrs=[0.01], out=tmp_path, progress=impatient)
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
        race.run(task, ["muon"], steps=5, seeds=1, lrs=[0.01], out=tmp_path)
    saved = json.loads((tmp_path / "race.json").read_text())
    assert [run["optimizer"] for run in saved["runs"]] == ["adamw"]


def test_progress_counts_runs_and_steps_and_ends_every_run_with_its_outcome(task):
    calls = []
    race.run(
        task,
        ["torch.optim:SGD"],
        steps=3,
        seeds=1,
        lrs={"adamw": [0.1], "torch.optim:SGD": [1e6]},
        progress=lambda *call: calls.append(call),
    )
    assert [call[:3] for call in calls[:3]] == [
        ("run 1 of 2, adamw, lr 0.1, seed 0", step, 3) for step in (1, 2, 3)
    ]
    assert calls[0][3].startswith("training loss ")
    assert calls[2][3].startswith("final loss ")
    assert calls[-1] == ("run 2 of 2, torch.optim:SGD, lr 1e+06, seed 0", 1, 1, "diverged")
