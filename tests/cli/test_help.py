"""`--help` of every command: examples that work, in plain characters, within the terminal."""

import inspect
import re
import shlex
from pathlib import Path

import pytest
import typer

from isokron import Attributor, race
from isokron.attribution.evaluate import evaluate
from isokron.cli.app import COMMANDS, app
from isokron.inspect import Setup
from isokron.tasks.huggingface import classifier, language_model

NAMES = [command.__name__ for commands in COMMANDS.values() for command in commands]
# examples of these run for seconds; those of the others take a model from a hub, or minutes
CHEAP = ("attribute", "fit", "build", "score", "query", "report", "tasks", "info")


def examples(text: str) -> list[str]:
    return [line.strip() for line in text.partition("\nExamples:\n")[2].splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_has_examples_and_fits_the_terminal(name, width, called, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = called(*name.split(), "--help")
    assert done.returncode == 0, done.stderr
    commands = examples(done.stdout)
    assert len(commands) >= (1 if name == "report" else 2)
    for command in commands:
        assert f"isokron {name}".strip() in command or name in ("info", "tasks")
        assert len(command) <= 86
    description = done.stdout.partition("\nExamples:\n")[0]
    assert max(map(len, description.splitlines())) <= width
    assert done.stdout.isascii()
    assert "<bool>" not in done.stdout
    assert "--help, -h" in description


def test_every_option_is_shown_once_with_its_default(called) -> None:
    group = typer.main.get_command(app)
    for name in NAMES:
        text = called(name, "--help").stdout.partition("\nExamples:\n")[0]
        lines = [line.split()[0].rstrip(",") for line in text.splitlines() if line[:4] == "  --"]
        options = [p.opts[0] for p in group.commands[name].params if p.opts[0].startswith("--")]
        assert sorted(lines) == sorted([*options, "--help"])
        for line in text.splitlines():
            assert not ("[default:" in line and "Default:" in line), line
    assert "--seed N                    Random seed. [default: 0]" in called("fit", "-h").stdout


def test_options_are_explained_by_options_of_the_same_command() -> None:
    group = typer.main.get_command(app)
    for name in NAMES:
        params = group.commands[name].params
        there = {option for param in params for option in (*param.opts, *param.secondary_opts)}
        for param in params:
            # of another command that is named, such as `attribute`, options may be named too
            own = re.sub(r"`\w+` [^.]*", "", param.help or "")
            assert set(re.findall(r"--[a-z][a-z-]*", own)) <= there, (name, param.name)


def test_options_have_the_names_of_pythons_arguments() -> None:
    model = (language_model, classifier)
    score = (Attributor, Attributor.fit, Attributor.build, Attributor.score, *model)
    # command → Python, and options that Python has no argument for
    python = {
        "race": ((race.run, *model), "kind"),
        "attribute": (score, "kind weights steps lr query prompt completion"),
        "inspect": ((Setup,), "out"),
        "evaluate": ((evaluate,), "run"),
    }
    # `attribute` has several of these
    others = {"fit_examples": "examples", "store_dtype": "dtype", "curvature": "optimizer"}
    group = typer.main.get_command(app)
    for name, (functions, own) in python.items():
        names = {argument for f in functions for argument in inspect.signature(f).parameters}
        options = {others.get(p.name, p.name) for p in group.commands[name].params}
        assert options - names == set(own.split()), name


def test_examples_run_as_printed(called, tmp_path: Path) -> None:
    ran = 0
    for name in CHEAP:
        for command in examples(called(name, "--help").stdout):
            if "--model" in command or "unroll" in command or "race" in command:
                continue
            first, *last = command.split(" | ")
            stdin = shlex.split(first)[1] + "\n" if last else "eval:1\n"
            arguments = shlex.split(last[0] if last else first)[1:]
            # of the tiny task, fewer steps and examples are as good
            new = name in ("attribute", "fit")
            quick = ["--steps", "2", "--examples", "40"] if new else []
            done = called(*arguments, *quick, stdin=stdin)
            assert done.returncode == 0, (command, done.stderr)
            ran += 1
    assert ran >= 11
    assert (tmp_path / "runs" / "digits" / "report.html").exists()


def test_what_to_explain_comes_right_after_the_model_and_its_data(called) -> None:
    lines = called("attribute", "--help").stdout.splitlines()
    panels = [line for line in lines if line.endswith(":") and line[0] != " "]
    first = ["Arguments:", "Model and data:", "Queries:"]
    assert panels[:3] == first, panels
    assert set(panels[3:]) > {"With --task:", "With --model:", "Layers:", "Curvature:", "Scores:"}
