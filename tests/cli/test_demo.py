"""The demo, shortened: it ends with the page, and replaces nothing but itself."""

from pathlib import Path

import pytest
import typer

from isokron.cli import demo as module


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(module, "STEPS", 2)
    monkeypatch.setattr(module, "RATES", {"adamw": (1e-3,), "sign": (1e-3,)})
    monkeypatch.setattr(module, "EXAMPLES", 40)
    monkeypatch.setattr(module, "LEARNED", 2)


def test_demo_shows_text_and_ends_with_the_page_and_may_be_repeated(short, tmp_path, capsys):
    for _ in range(2):
        module.demo(tmp_path / "demo")
        lines = capsys.readouterr().out.splitlines()
        pages = [line.partition(": ")[2] for line in lines[-2:]]
        names = ["index.html", "attribution/report.html"]
        assert pages == [str((tmp_path / "demo" / name).resolve()) for name in names]
        assert all(Path(page).is_file() for page in pages)
        assert any(line.startswith("Fellow-Citizens of the Senate: ") for line in lines)


def test_demo_does_not_replace_a_race_that_is_not_a_demo(short, tmp_path, monkeypatch, capsys):
    module.demo(tmp_path / "race")
    monkeypatch.setattr(module, "STEPS", 3)
    with pytest.raises(typer.Exit) as stopped:
        module.demo(tmp_path / "race")
    assert stopped.value.exit_code == 2
    assert (tmp_path / "race" / "index.html").exists()
    assert "cannot resume: steps was 2 and is now 3" in capsys.readouterr().err


def test_demo_leaves_other_peoples_files_alone(short, tmp_path, capsys):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(typer.Exit) as stopped:
        module.demo(tmp_path)
    assert stopped.value.exit_code == 2
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert "has other files in it" in capsys.readouterr().err
