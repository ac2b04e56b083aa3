"""The command line as a person meets it: in a process of its own."""

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isokron._version import __version__
from isokron.cli.process import named_options

TOY = Path(__file__).parents[1] / "race" / "toy.py"


def isokron(*arguments, cwd=None):
    command = [sys.executable, "-m", "isokron", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=cwd
    )


def one_line_error(text):
    lines = text.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("isokron: error: ")
    return lines[0]


def toy_race(*more):
    return ["race", "--task", f"{TOY}:task", "--seeds", "1", "--lr", "0.003,0.01", *more]


def test_version():
    assert isokron("--version").stdout == f"isokron {__version__}\n"


def test_help_shows_what_to_type():
    done = isokron("--help")
    assert done.returncode == 0
    assert "isokron demo" in done.stdout


def test_tasks_are_listed_one_per_line():
    done = isokron("tasks")
    for name in ("digits-tiny", "mnist-small", "speeches-small"):
        assert len(re.findall(rf"^{name} .*parameters.*examples", done.stdout, re.M)) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rce"], "No such command 'rce'"),
        (["race", "--nonsense"], "No such option"),
        (["race", "--steps", "many"], "--steps"),
        (["race", "--task", "digitz"], "did you mean digits"),
        (["hessian", "runs/a"], "No such command 'hessian'; did you mean fit?"),
        (["build", "runs/a", "--projection_dim", "16"], "--projection_dim; did you mean --dim?"),
        (["score", "runs/a", "--fsdp"], "No such option: --fsdp; isokron has none"),
        (["race", "--context", "5", "--task", "digits"], "--context goes with --model, not --task"),
        (["race", "--optimizers", "mun"], "did you mean muon"),
        (["race", "--optimizers", "muon(0.9)"], "options must read"),
        (["race", "--lr", "1e-3,fast"], "'1e-3,fast' is not a list of numbers"),
        (["race", "--steps", "0"], "--steps must be at least 1, got 0"),
        (["race", "--lr", "adamw=0.005x-10"], "--lr must be positive numbers, got -10.0"),
        (["race", "--lr", "0.005x"], "write 1e-3,3e-3 or muon=0.01,0.02 or adamw=0.005x10"),
        (["race", "--optimizers", "muon(lr_scale={'x*':2.0})"], "'x*' matches no trainable"),
        (["race", "--lr", "-1"], "--lr must be positive numbers, got -1.0"),
        (["race", "--lr", "soap=0.1"], "--lr is given for 'soap', which is not in the race"),
    ],
)
def test_a_wrong_call_exits_2_with_one_line(arguments, message, inside, tmp_path):
    code, err = inside(*arguments)
    assert code == 2
    assert message in one_line_error(err)
    assert list(tmp_path.iterdir()) == []


def test_failed_work_exits_1_without_a_traceback(inside, tmp_path):
    (tmp_path / "mine.py").write_text(TOY.read_text().replace(".mean(1)", ".mean()"))
    code, err = inside("race", "--task", "mine.py:task", "--steps", "2")
    assert code == 1
    assert "one loss per example" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_a_race_in_which_nothing_finishes_says_so(tmp_path):
    text = TOY.read_text().replace("noisy", "bad").replace(".mean(1)", ".mean(1) * float('nan')")
    (tmp_path / "mine.py").write_text(text)
    arguments = ("race", "--task", "mine.py:task", "--steps", "4", "--optimizers", "sign")
    done = isokron(*arguments, cwd=tmp_path)
    assert done.returncode == 1
    assert re.search(r"sign .* diverged ", done.stdout)
    assert "index.html" in done.stdout


def test_a_race_prints_the_table_and_the_page_and_refuses_to_overwrite(inside, tmp_path):
    arguments = toy_race("--steps", "5", "--optimizers", "sign,torch.optim:SGD", "--out", "r")
    done = isokron(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"Page: {(tmp_path / 'r' / 'index.html').resolve()}"
    assert re.search(r"torch.optim:SGD +│", done.stdout)
    for text in (done.stdout, done.stderr):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    code, err = inside(*arguments)
    assert code == 2
    assert "already holds a race; continue it with --resume" in one_line_error(err)


def test_repeated_learning_rates_are_joined(inside, tmp_path):
    more = ["--lr", "0.1x10", "--optimizers", "sign", "--lr", "sign=0.02", "--lr", "sign=0.04"]
    assert inside(*toy_race(*more, "--steps", "2", "--out", "r"))[0] == 0
    rates = json.loads((tmp_path / "r" / "settings.json").read_text())["learning rates"]
    assert rates == {"adamw": [0.003, 0.01, "0.1x10"], "sign": [0.02, 0.04]}


def test_learning_rates_can_be_given_per_optimizer(inside, tmp_path):
    more = ["--optimizers", "sign", "--lr", "sign=0.02", "--steps", "2", "--out", "r"]
    assert inside(*toy_race(*more))[0] == 0
    names = sorted(path.name for path in (tmp_path / "r" / "runs").iterdir())
    assert names == [
        "adamw-lr0.003-steps2-seed0.json",
        "adamw-lr0.01-steps2-seed0.json",
        "sign-lr0.02-steps2-seed0.json",
    ]


@pytest.fixture
def started_race(processes, tmp_path):
    """A long race in the background, once its first run, or the one awaited, is on disk."""

    def start(arguments, awaited="[!.]*.json"):
        process = processes.start("-m", "isokron", *arguments, folder=tmp_path)
        deadline = time.monotonic() + 60
        while not list((tmp_path / "r" / "runs").glob(awaited)):
            assert process.poll() is None, process.err
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return process

    return start


def finished_runs(tmp_path):
    return {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "r/runs").glob("[!.]*")}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_race_is_completed_by_resume(how, started_race, called, tmp_path):
    arguments = toy_race("--optimizers", "sign", "--steps", "500", "--out", "r")
    process = started_race(arguments)
    process.kill(how)
    code = process.wait()
    before = finished_runs(tmp_path)
    assert 1 <= len(before) < 4
    if how is signal.SIGINT:
        assert code == 130
        assert "Traceback" not in process.err
        assert "--resume" in process.err
        assert "not finished" in process.out or "adamw" in process.out
        assert "The race was interrupted" in (tmp_path / "r" / "index.html").read_text()
    else:
        assert code == -signal.SIGKILL
    (tmp_path / "r" / "runs" / ".sign-lr0.01-seed0.json.1.tmp").write_text('{"opt')
    done = called(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    after = finished_runs(tmp_path)
    assert len(after) == 4
    assert {path: after[path] for path in before} == before
    assert "interrupted" not in (tmp_path / "r" / "index.html").read_text()


def test_a_killed_search_for_settings_is_completed_by_resume(started_race, called, tmp_path):
    arguments = ["race", "--task", f"{TOY}:task", "--seeds", "2", "--steps", "100", "--out", "r"]
    arguments += ["--optimizers", "sign,torch.optim:SGD"]
    process = started_race(arguments, "sign-*-rest3-*.json")
    process.kill(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = finished_runs(tmp_path)
    done = called(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    assert "Tuned on the first seed" in done.stdout
    after = finished_runs(tmp_path)
    assert {path: after[path] for path in before} == before
    standings = json.loads((tmp_path / "r" / "race.json").read_text())["standings"]
    assert all(len(s["tried"]) > 12 and s["setting"] and not s["edge"] for s in standings)


# an adamw that hardly moves, so that sign reaches its loss early
EASY = ["--optimizers", "sign", "--lr", "adamw=1e-5", "--lr", "sign=0.01", "--out", "r"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("race", {"--shortest", "--resume", "--steps"}),
        (
            "inspect",
            {"--task", "--weights", "--method", "--damping", "isokron inspect --task digits"},
        ),
    ],
)
def test_help_names_options_and_loads_no_torch(command, words):
    script = (
        f"import sys, isokron.cli as cli; sys.argv = ['isokron', {command!r}, '--help']\n"
        "try: cli.main()\nfinally: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert all(word in done.stdout for word in words)
    assert done.stdout.splitlines()[-1] == "False"


def test_shortest_schedules_are_shown_and_may_be_asked_for_later(called, tmp_path):
    arguments = toy_race("--steps", "20", *EASY)
    assert called(*arguments).returncode == 0
    before = finished_runs(tmp_path)
    done = called(*arguments, "--resume", "--shortest")
    assert done.returncode == 0, done.stderr
    assert re.search(r"│ +\d+ steps \(0\.\d\d×\) │ +\d+\.\d\d s \(\d\.\d\d×\) │", done.stdout)
    assert "looking for the shortest schedule" in done.stderr
    after = finished_runs(tmp_path)
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)


def test_a_race_killed_in_a_search_loses_that_run_only(started_race, called, tmp_path):
    arguments = toy_race("--steps", "1000", "--shortest", *EASY)
    process = started_race(arguments, "[!.]*-steps???-*.json")
    process.kill(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = finished_runs(tmp_path)
    done = called(*arguments, "--resume")
    assert done.returncode == 0, done.stderr
    after = finished_runs(tmp_path)
    assert {path: after[path] for path in before} == before
    standings = json.loads((tmp_path / "r" / "race.json").read_text())["standings"]
    found = standings[1]["shortest"]["steps"]
    assert (tmp_path / "r" / "runs" / f"sign-lr0.01-steps{found}-seed0.json") in after


def test_resume_with_other_settings_exits_2_naming_the_difference(inside):
    assert inside(*toy_race("--steps", "2", "--out", "r"))[0] == 0
    code, err = inside(*toy_race("--steps", "3", "--out", "r", "--resume"))
    assert code == 2
    assert "has another race: steps was 2, is 3" in one_line_error(err)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (
            ("return Task(", "1 / 0\n    return Task("),
            "ZeroDivisionError: division by zero (mine.py",
        ),
        (
            ("import torch", "import torch_of_mine"),
            "No module named 'torch_of_mine' (mine.py, line",
        ),
    ],
)
def test_an_error_in_a_task_says_where(broken, message, inside, tmp_path):
    text = TOY.read_text()
    assert broken[0] in text
    (tmp_path / "mine.py").write_text(text.replace(*broken, 1))
    code, err = inside("race", "--task", "mine.py:task", "--steps", "2")
    assert code in (1, 2)
    assert message in one_line_error(err)


def test_a_dotted_optimizer_is_told_how_to_write_it(inside):
    code, err = inside("race", "--optimizers", "torch.optim.SGD")
    assert code == 2
    assert "did you mean torch.optim:SGD" in one_line_error(err)


def test_a_wrong_option_is_told_which_there_are(inside):
    code, err = inside("race", "--optimizers", "muon(momentumm=0.9)")
    assert code == 2
    assert "its options are momentum, nesterov" in one_line_error(err)


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("score exactly (store=False)", "score exactly (--no-store)"),
        ("continue it with resume=True, or wait", "continue it with --resume, or wait"),
        ("lower lr=0.1", "lower --lr 0.1"),
        ("'muon(lr=1)': the run's rule, give lr=1", "'muon(lr=1)': the run's rule, give --lr 1"),
        ("leave it out (layers='!a')", "leave it out (--layers '!a')"),
        ("out 'x' is a file", "--out 'x' is a file"),
        ("or use long='cut' or long='split'", "or use --long cut or --long split"),
        ("graft='adam' has no option", "graft='adam' has no option"),
    ],
)
def test_errors_of_the_library_name_arguments_and_the_command_line_names_options(
    message: str, shown: str
) -> None:
    options = {name: f"--{name}" for name in ("store", "resume", "lr", "layers", "out", "long")}
    assert named_options(message, options) == shown
