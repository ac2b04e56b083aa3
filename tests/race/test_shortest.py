"""The shortest schedule: found by bisection, trained, resumed, and told."""

import json
import math

import pytest

from isokron import race
from isokron.optimizers_by_name import resolve
from isokron.race import train as training
from isokron.race.page import page, sentences, table

QUICK = "torch.optim:SGD"
GOAL = 1.0  # what the made-up adamw ends at


@pytest.fixture
def made_up(monkeypatch, make_run):
    """Training that costs nothing: SGD ends at adamw's loss from `needed` steps on.

    Returns the list of (optimizer, seed, steps) trained.
    """

    def install(needed, diverging=()):
        trained = []

        def train(task, entrant, setting, seed, steps, on_step, **more):
            trained.append((entrant.spec, seed, steps))
            on_step(steps, 1.0)
            final = GOAL if entrant.spec == "adamw" else needed / steps
            slow = {"optimizer_seconds": 0.030} if entrant.spec == QUICK else {}
            bad = {"status": "diverged"} if (entrant.spec, seed, steps) in diverging else {}
            losses = (3.0, final)
            return make_run(entrant.spec, setting.lr, seed, losses, steps=steps, **slow, **bad)

        monkeypatch.setattr(training, "train", train)
        return trained

    return install


def shortest_of(task, steps=100, seeds=1, **more):
    return race.run(task, [QUICK], steps=steps, seeds=seeds, lr=[0.1], shortest=True, **more)


@pytest.mark.parametrize("needed", range(1, 21))
def test_bisection_finds_the_first_that_reaches_in_at_most_five_probes(task, made_up, needed):
    made_up(needed)
    result = shortest_of(task, steps=20)
    assert result.standings[1].shortest.steps == needed
    lengths = [run.steps for run in result.probes]
    assert len(lengths) == len(set(lengths)) <= 5
    assert needed == 20 or needed in lengths  # what is told was trained


@pytest.mark.parametrize(
    ("needed", "steps"), [(55, 55), (52, 55), (56, 60), (100, 100), (96, 100), (5, 5), (1, 5)]
)
def test_the_shortest_schedule_is_the_first_of_the_lengths_that_reaches(
    task, made_up, needed, steps
):
    trained = made_up(needed)
    result = shortest_of(task)
    found = result.standings[1].shortest
    assert (found.steps, found.share) == (steps, steps / 100)
    assert result.standings[1].schedules.get(steps, needed / 100) == pytest.approx(needed / steps)
    assert (QUICK, 0, steps) in trained
    assert len(result.runs) == 2
    assert [run.steps for run in result.probes] == [n for _, _, n in trained[2:]]


def test_time_is_that_of_the_same_steps_in_the_race(task, made_up):
    made_up(50)
    adamw, quick = shortest_of(task).standings
    assert adamw.shortest is None
    assert quick.shortest.seconds == pytest.approx(50 * 0.040)
    assert quick.shortest.time_share == pytest.approx(50 * 0.040 / (100 * 0.012))


def test_what_never_reaches_adamws_loss_is_not_looked_for(task, made_up):
    trained = made_up(101)
    result = shortest_of(task)
    assert len(trained) == 2
    assert result.standings[1].shortest is None
    assert table(result)[2][2:4] == ["not reached", "not reached"]
    assert sentences(result)[0] == (
        "adamw ends lowest, at 1.0000 squared error; no optimizer reaches AdamW's final loss on a "
        "shorter schedule."
    )


def test_adamw_alone_has_nothing_to_look_for(task, made_up):
    trained = made_up(1)
    result = race.run(task, ["adamw"], steps=100, seeds=1, lr=[0.1], shortest=True)
    assert trained == [("adamw", 0, 100)]
    assert table(result)[1][2:4] == ["100 steps", "1.20 s"]


def test_without_the_option_nothing_is_looked_for(task, made_up):
    trained = made_up(1)
    result = race.run(task, [QUICK], steps=100, seeds=1, lr=[0.1])
    assert len(trained) == 2
    assert result.standings[1].shortest is None
    assert len(table(result)[1]) == 9


def test_all_seeds_are_trained_and_one_that_diverges_is_a_miss(task, made_up):
    trained = made_up(10, diverging=[(QUICK, 1, 50)])
    result = shortest_of(task, seeds=3)
    assert result.standings[1].shortest.steps == 55
    assert sorted(job for job in trained if job[2] == 50) == [(QUICK, s, 50) for s in range(3)]
    assert "diverged" in page(result).partition("Diverged and failed runs")[2]


def test_optimizers_take_turns_in_their_searches(task, made_up):
    trained = made_up(30)
    other = "torch.optim:Adam"
    race.run(task, [QUICK, other], steps=100, seeds=2, lr=[0.1], shortest=True)
    names = [name for name, _, steps in trained if steps < 100]
    assert names == [QUICK, other] * (len(names) // 2)


def test_results_are_told_in_table_page_and_json(task, made_up, tmp_path):
    made_up(50)
    result = shortest_of(task, seeds=2, out=tmp_path)
    assert table(result)[2][2:4] == ["50 steps (0.50×)", "2.00 s (1.67×)"]
    assert "on a schedule of 50 steps, 0.50× AdamW's, in 1.67× its time" in sentences(result)[0]
    html = (tmp_path / "index.html").read_text()
    assert "<td>50 steps (0.50×)</td>" in html
    assert "<td>45 steps</td><td>2</td><td>1.1111</td><td>not reached</td>" in html
    found = json.loads((tmp_path / "race.json").read_text())
    assert found["standings"][1]["shortest"]["steps"] == 50
    assert len(found["runs"]) == 4
    assert {run["steps"] for run in found["probes"]} >= {45, 50}


def real(task, out, **more):
    """Muon against an adamw that hardly moves."""
    values = {"steps": 12, "seeds": 2, "lr": {"adamw": [1e-3], "muon": [0.1]}, "out": out}
    return race.run(task, ["muon"], **(values | {"shortest": True} | more))


def outcome(result):
    found = result.standings[1].shortest
    finals = {(run.steps, run.seed): run.final for run in result.probes}
    return found.steps, found.share, finals


def test_a_probe_is_a_run_on_a_schedule_of_its_own_length(task):
    result = real(task, None)
    found = result.standings[1].shortest
    assert 1 <= found.steps < 12
    for run in result.probes:
        alone = training.train(task, resolve("muon"), 0.1, run.seed, run.steps)
        assert run.eval_steps[-1] == len(run.train_losses) == run.steps
        assert len(run.eval_steps) == 1 + min(run.steps, 4)
        assert run.train_losses == alone.train_losses
    at_end = [run.final for run in result.probes if run.steps == found.steps]
    assert math.fsum(at_end) / 2 <= result.standings[0].final


def stops_in(n):
    """Ctrl-C in the n-th run of a shorter schedule."""
    stages = set()

    def progress(stage, done, total, note=""):
        if total and "steps" in stage:
            stages.add(stage)
        if len(stages) == n:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_search_that_was_stopped_is_resumed_to_the_same_result(task, tmp_path, n):
    whole = real(task, tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        real(task, tmp_path / "stopped", progress=stops_in(n))
    saved = json.loads((tmp_path / "stopped" / "race.json").read_text())
    assert len(saved["probes"]) == n - 1
    assert saved["standings"][1]["shortest"] is None
    assert "<td>not finished</td>" in (tmp_path / "stopped" / "index.html").read_text()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "stopped" / "runs").iterdir()}
    resumed = real(task, tmp_path / "stopped", resume=True)
    assert outcome(resumed) == outcome(whole)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    names = [{p.name for p in (tmp_path / f / "runs").iterdir()} for f in ("whole", "stopped")]
    assert names[0] == names[1]


def test_a_race_run_without_it_can_be_resumed_with_it_and_back(task, tmp_path):
    plain = real(task, tmp_path, shortest=False)
    assert plain.probes == []
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").iterdir()}
    added = real(task, tmp_path, resume=True)
    assert {p: p.stat().st_mtime_ns for p in before} == before
    assert outcome(added) == outcome(real(task, None))
    assert outcome(real(task, tmp_path, shortest=False, resume=True)) == outcome(added)


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_probe_that_fails_is_a_miss_and_is_tried_again(task, tmp_path, monkeypatch, seeds):
    whole = training.train

    def fails_when_short(task, entrant, setting, seed, steps, on_step, **more):
        broken = resolve("toy:Raises") if steps == 6 else entrant
        run = whole(task, broken, setting, seed, steps, on_step)
        run.optimizer = entrant.spec
        return run

    monkeypatch.setattr(training, "train", fails_when_short)
    failed = real(task, tmp_path, seeds=seeds)
    assert failed.standings[1].shortest.steps > 6
    assert [run.status for run in failed.probes if run.steps == 6] == ["failed"] * seeds
    assert page(failed).count("muon failed: RuntimeError") == 1
    monkeypatch.setattr(training, "train", whole)
    repaired = real(task, tmp_path, seeds=seeds, resume=True)
    assert repaired.standings[1].shortest.steps <= 6
