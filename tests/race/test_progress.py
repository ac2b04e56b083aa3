"""Progress: plain lines for logs, and honest counts."""

import io

import pytest

from isokron.race import progress
from isokron.race.progress import LineProgress, LiveProgress, Tally


def drive(watch, make_run):
    watch.planned(2, 5)
    watch.started("adamw", 0.1, 0, 5)
    watch.stepped(1, 2.5)
    watch.ended(make_run(losses=(3, 1.25)))
    watch.started("muon", 0.1, 0, 5)
    watch.ended(make_run("muon", status="diverged"))


def test_lines_have_no_control_characters_and_tell_every_outcome(make_run, monkeypatch):
    monkeypatch.setattr(progress, "QUIET_SECONDS", -1.0)
    stream = io.StringIO()
    drive(LineProgress(stream), make_run)
    text = stream.getvalue()
    assert all(character.isprintable() for character in text.replace("\n", ""))
    assert text.splitlines() == [
        "2 runs of 5 steps",
        "run 1 of 2, adamw, lr 0.1, seed 0: step 1 of 5, loss 2.5",
        "run 1 of 2, adamw, lr 0.1, seed 0: loss 1.2500",
        "run 2 of 2, muon, lr 0.1, seed 0: diverged",
    ]


def test_live_display_shows_run_step_loss_and_best(make_run):
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100)
    with LiveProgress(console) as live:
        drive(live, make_run)
        live.planned(1, 5)
        live.started("sign", 0.3, 1, 5)
        live.stepped(4, 0.75)
    text = stream.getvalue()
    for expected in ("run 3 of 3", "sign, lr 0.3, seed 1", "step 4 of 5", "loss 0.75"):
        assert expected in text
    assert "adamw 1.2500 (lr 0.1), muon none yet" in text


def test_runs_on_top_are_said_with_their_reason_and_their_length(make_run):
    stream = io.StringIO()
    lines = LineProgress(stream)
    drive(lines, make_run)
    lines.planned(0, 4, "looking for it")
    lines.planned(1, 3, "looking for it")
    lines.started("muon", 0.1, 0, 3)
    lines.ended(make_run("muon", losses=(3, 0.5), schedule=3))
    assert stream.getvalue().splitlines()[-2:] == [
        "1 run of 3 steps more: looking for it",
        "run 3 of 3, muon, lr 0.1, seed 0, 3 steps: loss 0.5000",
    ]
    assert lines.tally.best_words() == "adamw 1.2500 (lr 0.1), muon none yet"
    assert lines.tally.share() == 1


def test_time_left_counts_steps_since_runs_differ_in_length(monkeypatch):
    tally = Tally(began=0.0)
    tally.planned(1, 30)
    tally.planned(2, 10)
    tally.started("muon", 0.1, 0, 30)
    tally.step = 25
    monkeypatch.setattr(progress.time, "monotonic", lambda: 50.0)
    assert tally.remaining() == pytest.approx(50.0)


def test_time_left_follows_the_share_done(monkeypatch):
    tally = Tally(work=40, worked=10, began=0.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: 30.0)
    assert tally.remaining() == pytest.approx(90.0)
    tally.step = 10
    assert tally.remaining() == pytest.approx(30.0)
