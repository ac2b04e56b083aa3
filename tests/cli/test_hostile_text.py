"""Ids, labels and texts with escape sequences: neither the terminal nor the page obeys them."""

import json
import logging
import unicodedata
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isokron.cli.encoding import configure_output, echo, json_text
from isokron.cli.terminal import Display, one_line
from isokron.tasks import Shown

# sets the clipboard, clears the screen, CSI as one character of C1, a direction mark, a new line
HOSTILE = "\x1b]52;c;cm0=\x07\x1b[2J\x9b31m\u202etxt\r\n  + 99 %"
TASK = f"""
from dataclasses import replace
from isokron.tasks import Shown, load

def task():
    t = load("digits-tiny")
    ids = [f"{{n}}" + {HOSTILE!r} for n in range(len(t.train))]
    show = lambda batch: [
        Shown(tokens=({HOSTILE!r},), label={HOSTILE!r}, title={HOSTILE!r}) for _ in batch[1]
    ]
    return replace(t, ids=ids, show=show, said=lambda model, batch: {HOSTILE!r})
"""


def unseen(text: str) -> set[str]:
    """Characters that a terminal obeys, or that change the order of others."""
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf") and c not in "\n\t"}


def test_hostile_texts_of_data_are_shown_and_not_obeyed(
    called: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "task.py").write_text(TASK, encoding="utf-8")
    begin = "--task task.py:task --steps 2 --examples 40 --query eval:0 --verify --by-layer"
    for command in (
        f"attribute run {begin}",
        "score run --query train:3 --top 2",
        "score run --self --top 3",
        "report run",
    ):
        done = called(*command.split())
        assert done.returncode == 0, done.stderr
        assert not unseen(done.stdout + done.stderr), command
        # a line break within an id must not look like another entry
        assert not [line for line in done.stdout.splitlines() if line.startswith("  + 99 %")]
    assert (
        "␛]52;c;cm0=␇␛[2J⟨U+009B⟩31m⟨U+202E⟩txt + 99 %" in called("score", "run", "--self").stdout
    )
    assert not unseen((tmp_path / "run" / "report.html").read_text(encoding="utf-8"))
    done = called("query", "run", "--json", stdin="train:1\n")
    assert not unseen(done.stdout)
    assert json.loads(done.stdout)["proponents"][0]["id"].endswith(HOSTILE)
    wrong = called("query", "run", stdin=f"train:{HOSTILE}")
    assert wrong.returncode == 1
    assert not unseen(wrong.stderr)


def test_json_is_escaped_and_not_changed(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"id": "".join(map(chr, range(0x100))) + "\u2028\u202e\u2066\U000e0001 ü"}
    echo(json_text(value))
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert not unseen(out)


def test_progress_warnings_and_logs_are_visible(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        configure_output()
        with Display() as display:
            display(HOSTILE, 0, 0, HOSTILE)
        warnings.warn(HOSTILE, stacklevel=1)
        logging.getLogger("isokron").warning("%s was begun", HOSTILE)
    err = capsys.readouterr().err
    assert not unseen(err)
    assert err.count("isokron: warning: ␛]52;c;") == 2


def test_a_line_has_one_line() -> None:
    shown = Shown(tokens=("a\nb",), title="x\n  + 99 %", label="one\ntwo")
    assert one_line(shown) == "x + 99 %, label one two, a b"
