"""The standings in a terminal, wide or narrow."""

import io

import pytest
from rich.console import Console

from isokron.race.results import Result, summarize
from isokron.race.table import COLUMNS, memory, rich_table


@pytest.fixture
def result(make_run):
    runs = (make_run("adamw"), make_run("muon[x]", losses=(3.0, 1.0, 0.5)))
    settings = {"task": "toy", "steps": 20, "seeds": 1, "unit": "loss"}
    return Result(settings, runs, summarize(runs, {"adamw": [0.1], "muon[x]": [0.1]}, 1))


def printed(result, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(rich_table(result, width))
    return [line for line in console.file.getvalue().splitlines() if "│" in line or "┃" in line]


def test_a_wide_terminal_gets_a_row_per_optimizer(result):
    header, *lines = printed(result, 200)
    assert all(column in header for column in COLUMNS)
    assert [line.split()[1] for line in lines] == ["adamw", "muon[x]"]


def test_a_narrow_terminal_gets_a_column_per_optimizer_and_whole_words(result):
    header, *lines = printed(result, 80)
    assert header.split()[1::2] == ["optimizer", "adamw", "muon[x]"]
    assert len(lines) >= len(COLUMNS) - 1
    assert max(map(len, lines)) <= 80
    assert any("10 (2.00× fewer)" in line for line in lines)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_memory_is_told_in_units_people_read(count, words):
    assert memory(count) == words
