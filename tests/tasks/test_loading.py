"""Tasks by name, by module and by file, and errors that help."""

import sys

import pytest

from isokron import tasks
from isokron.tasks.catalog import resolved

SOURCE = """
import torch
from isokron.tasks import Examples, Task

def task():
    x = torch.arange(8.0)[:, None]
    return Task("mine", lambda: torch.nn.Linear(1, 1), Examples((x,)), Examples((x,)),
                lambda model, batch: model(batch[0])[:, 0] ** 2, 2)

def wrong():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_own_task.py"
    path.write_text(SOURCE)
    return path


def test_bare_name_means_tiny():
    assert tasks.load("digits").name == "digits-tiny"


def test_task_from_a_file(file):
    assert tasks.load(f"{file}:task").name == "mine"


def test_task_from_a_module(file, monkeypatch):
    monkeypatch.syspath_prepend(file.parent)
    assert tasks.load("my_own_task:task").name == "mine"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digitz", "did you mean digits"),
        ("nothing-like-it", "built in are digits-tiny, .*speeches-small"),
        ("no_such_module_at_all:task", "no module named 'no_such_module_at_all'"),
        ("no/such/file.py:task", "no file 'no/such/file.py'"),
        ("json:nothing", "json has no 'nothing'"),
        ("json:", "not of the form module:name"),
    ],
)
def test_wrong_specs_are_explained(spec, message):
    with pytest.raises(ValueError, match=message):
        tasks.load(spec)


def test_a_function_that_returns_something_else_is_refused(file):
    with pytest.raises(ValueError, match=r"must return an isokron.Task, got int"):
        tasks.load(f"{file}:wrong")


def test_a_missing_import_inside_the_users_module_is_not_hidden(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import surely_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        tasks.load("needs_more:task")


def test_names_can_be_listed_without_torch():
    import subprocess

    code = "import sys, isokron.tasks as t; t.names(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sources_are_resolved_to_absolute_paths(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    here = str(tmp_path)
    for source, expected in (
        ("my_own_task.py", f"{here}/my_own_task.py"),
        ("./digits", f"{here}/digits"),
        ("digits", f"{here}/digits"),
        ("my_own_task.py:task", f"{here}/my_own_task.py:task"),
        ("HuggingFaceTB/SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M"),
        ("wikitext:raw:test[:5%]", "wikitext:raw:test[:5%]"),
        ("json:loads", "json:loads"),
        ("no.py:task", "no.py:task"),
        ("", ""),
    ):
        assert resolved(source) == expected
    # a folder of that name is not the task
    assert resolved("digits", task=True) == "digits"
    assert resolved("my_own_task.py:task", task=True) == f"{here}/my_own_task.py:task"
    assert tasks.load(resolved("my_own_task.py:task", task=True)).name == "mine"
