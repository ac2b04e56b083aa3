"""The progress display: plain lines for logs, a bar for terminals, nothing on other ranks."""

import io

import pytest
from rich.console import Console

from isokron.cli import process, terminal
from isokron.cli.terminal import Display


def shown(*calls, as_terminal=False):
    console = Console(file=io.StringIO(), force_terminal=as_terminal, width=100)
    with Display(console) as display:
        for call in calls:
            display(*call)
    return console.file.getvalue()


STAGE = [("training", 1, 3), ("training", 2, 3, "loss 2"), ("training", 3, 3, "loss 1")]


def test_a_log_has_messages_and_the_end_of_every_stage_without_control_characters():
    text = shown(*STAGE, ("2 more runs: why", 0, 0), ("fitting", 1, 2), ("fitting", 2, 2))
    assert text == "training: 3 of 3, loss 1\n2 more runs: why\nfitting: 2 of 2\n"


def test_a_log_has_a_line_now_and_then(monkeypatch):
    monkeypatch.setattr(terminal, "QUIET_SECONDS", -1.0)
    assert len(shown(*STAGE).splitlines()) == 3


def test_a_terminal_has_one_bar_of_the_stage_that_runs():
    text = shown(*STAGE, ("run [1] of 2", 4, 5, "loss 0.75"), as_terminal=True)
    for expected in ("run [1] of 2", "4 of 5", "loss 0.75"):
        assert expected in text
    assert text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")  # cleared, and the cursor is back


@pytest.mark.parametrize("as_terminal", [False, True])
def test_one_of_several_ranks_shows_progress(monkeypatch, as_terminal):
    monkeypatch.setattr(process, "leads", lambda: False)
    assert shown(*STAGE, as_terminal=as_terminal) == ""
