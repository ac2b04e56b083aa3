"""A race on disk: atomic, resumable, and refusing what does not belong."""

import json
import os
import signal
from pathlib import Path

import pytest

from isokron import race
from isokron.files import write_atomically
from isokron.race.race import race_folder, read_runs, slug, write_run


def small(task, out, **changes):
    values = {"steps": 4, "seeds": 1, "lr": [0.003, 0.01], "out": out} | changes
    return race.run(task, values.pop("optimizers", ["muon"]), **values)


def contents(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


def test_a_race_leaves_all_its_files(task, tmp_path):
    small(task, tmp_path / "new" / "race")
    names = {path.name for path in (tmp_path / "new" / "race").glob("[!.]*")}
    reports = {"race.json", "index.html", "loss.svg"}
    assert names == {"runs", "settings.json", *reports}
    runs = sorted(path.name for path in (tmp_path / "new" / "race" / "runs").iterdir())
    assert runs == [
        f"{o}-lr{lr}-steps4-seed0.json" for o in ("adamw", "muon") for lr in (0.003, 0.01)
    ]


def test_a_run_survives_the_disk_unchanged(make_run, tmp_path):
    run = make_run(lr=1 / 3, ratio=3, beta2=0.95, losses=(3.0, 0.1 + 0.2), sample="a\nb")
    with race_folder(tmp_path, {}, resume=False):
        write_run(tmp_path, run)
    assert read_runs(tmp_path) == [run]


def test_resume_reuses_finished_runs_to_the_byte(task, tmp_path):
    first = small(task, tmp_path)
    before = contents(tmp_path / "runs")
    (tmp_path / "runs" / "muon-lr0.01-steps4-seed0.json").unlink()
    second = small(task, tmp_path, resume=True)
    after = contents(tmp_path / "runs")
    assert after.keys() == before.keys()
    del after["muon-lr0.01-steps4-seed0.json"], before["muon-lr0.01-steps4-seed0.json"]
    assert after == before
    assert [s.final for s in second.standings] == [s.final for s in first.standings]


def test_failed_runs_are_tried_again(make_run, task, tmp_path):
    small(task, tmp_path)
    write_run(tmp_path, make_run("muon", lr=0.01, steps=4, status="failed", message="was broken"))
    assert small(task, tmp_path, resume=True).standings[1].failure == ""


def test_changed_settings_are_refused_with_both_values(task, tmp_path):
    small(task, tmp_path)
    with pytest.raises(ValueError, match="another race: steps was 4, is 5; give a new folder"):
        small(task, tmp_path, resume=True, steps=5)
    with pytest.raises(ValueError, match="another race: optimizers was"):
        small(task, tmp_path, resume=True, optimizers=["sign"])


def test_an_existing_race_is_refused_without_resume(task, tmp_path):
    small(task, tmp_path)
    with pytest.raises(ValueError, match="already holds a race; continue it with resume=True"):
        small(task, tmp_path)


def test_other_peoples_files_are_never_mixed_with(task, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    for resume in (False, True):
        with pytest.raises(ValueError, match=r"other files in it \(such as thesis.txt\)"):
            small(task, tmp_path, resume=resume)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_leftover_temporary_files_do_no_harm(task, tmp_path):
    (tmp_path / ".settings.json.123.tmp").write_text("{")
    small(task, tmp_path)
    (tmp_path / "runs" / ".muon-lr0.01-steps4-seed0.json.123.tmp").write_text('{"optim')
    assert len(small(task, tmp_path, resume=True).runs) == 4


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_atomically(path, [b"old"])

    def broken(descriptor):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, [b"new"])
    assert path.read_text() == "old"


def test_different_specs_never_share_a_file_name():
    specs = ["m:f(a=1)", "m:f(a_1)", "m/f(a=1)", "x" * 70, "x" * 71, "../../etc", "adamw"]
    slugs = [slug(spec) for spec in specs]
    assert len(set(slugs)) == len(specs)
    assert slugs[-1] == "adamw"
    assert not any("/" in name or name.startswith(".") for name in slugs)


def test_diverged_runs_stand_in_json(task, tmp_path):
    spec = "torch.optim:SGD"
    small(task, tmp_path, optimizers=[spec], steps=8, lr={"adamw": [0.01], spec: [1e6]})
    found = json.loads((tmp_path / "race.json").read_text(), parse_constant=pytest.fail)
    assert found["runs"][1]["status"] == "diverged"
    assert found["standings"][1]["final"] is None


def test_a_folder_where_nothing_was_finished_is_free(tmp_path):
    for steps in (5, 6):
        with race_folder(tmp_path / "r", {"task": "toy", "steps": steps}, resume=False):
            pass
    saved = json.loads((tmp_path / "r" / "settings.json").read_text())
    assert saved == {"task": "toy", "steps": 6}


@pytest.mark.parametrize("call", ["replace", "mkdir"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_race_killed_at_its_start_leaves_a_folder_that_is_free(tmp_path, call, resume):
    tmp_path /= "race"
    tmp_path.mkdir()
    if (killed := os.fork()) == 0:
        usual = getattr(Path, call)

        def fatal(path, *args, **keywords):
            if path != tmp_path:  # the folder itself is there already
                os.kill(os.getpid(), signal.SIGKILL)
            usual(path, *args, **keywords)

        setattr(Path, call, fatal)
        with race_folder(tmp_path, {"steps": 5}, resume=False):
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    with race_folder(tmp_path, {"steps": 6}, resume=resume):
        assert json.loads((tmp_path / "settings.json").read_text()) == {"steps": 6}


def test_two_processes_cannot_race_in_one_folder(task, tmp_path):
    with (
        race_folder(tmp_path, {"task": "other"}, resume=False),
        pytest.raises(ValueError, match="another process is running a race"),
    ):
        small(task, tmp_path)
    assert json.loads((tmp_path / "settings.json").read_text()) == {"task": "other"}
    assert small(task, tmp_path).complete
