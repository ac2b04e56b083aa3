"""The standings in a terminal, wide or narrow."""

import io

import pytest
from rich.console import Console

from isokron.cli.terminal import fitted_table
from isokron.race.page import sentences, table
from isokron.race.results import summarize
from isokron.report.render import memory

SETTINGS = {
    "task": "toy",
    "steps": 20,
    "seeds": 1,
    "unit": "loss",
    "batch size": 4,
    "parameters": 10,
    "training examples": 12,
}


def result_of(*runs, seeds=1):
    names = list(dict.fromkeys(run.optimizer for run in runs))
    return summarize({**SETTINGS, "optimizers": names, "seeds": seeds}, runs)


@pytest.fixture
def result(make_run):
    runs = (make_run("adamw"), make_run("muon[x]", losses=(3.0, 1.0, 0.5)))
    return result_of(*runs)


def printed(result, width):
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(fitted_table("toy", table(result), width))
    return [line for line in console.file.getvalue().splitlines() if "│" in line or "┃" in line]


def test_a_wide_terminal_gets_a_row_per_optimizer(result):
    header, *lines = printed(result, 200)
    assert all(column in header for column in table(result)[0])
    assert [line.split()[1] for line in lines] == ["adamw", "muon[x]"]


def test_a_narrow_terminal_gets_a_column_per_optimizer_and_whole_words(result):
    header, *lines = printed(result, 80)
    assert header.split()[1::2] == ["optimizer", "adamw", "muon[x]"]
    assert len(lines) >= len(table(result)[0]) - 1
    assert max(map(len, lines)) <= 80
    assert any("10 (0.50×)" in line for line in lines)


@pytest.mark.parametrize("width", [40, 80, 120, 250])
def test_shortest_schedules_fit_any_terminal(make_run, width):
    runs = (make_run("adamw"), make_run("muon", losses=(3.0, 1.0, 0.5)))
    probes = [make_run("muon", losses=(3, 10 / n), steps=n) for n in range(1, 20)]
    result = result_of(*runs, *probes)
    lines = printed(result, width)
    assert max(map(len, lines)) <= width
    assert len(lines) == 3 if width == 250 else len(lines) >= len(table(result)[0]) - 1
    cells = [[cell.strip() for cell in line.strip("│┃").split("│")] for line in lines]
    flat = " ".join(" ".join(row) for row in cells)
    assert "10 steps" in flat
    assert "(0.50×)" in flat
    assert ("10 steps (0.50×)" in flat) == (width > 40)


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**30, "3.0 GiB")]
)
def test_memory_is_told_in_units_people_read(count, words):
    assert memory(count) == words


def test_a_tie_is_not_called_a_gain(make_run):
    tie = result_of(make_run("adamw"), make_run("muon"))
    assert [row[2] for row in table(tie)[1:]] == ["20 (1.00×)", "20 (1.00×)"]
    assert "of AdamW's steps" not in sentences(tie)[0]


def test_a_busy_machine_is_told_and_a_quiet_one_is_not(make_run):
    quiet = result_of(make_run("adamw"), make_run("muon", model_seconds=0.011))
    busy = result_of(make_run("adamw"), make_run("muon", model_seconds=0.012))
    assert not any("busy" in note for note in sentences(quiet))
    assert any("from 10.0 to 12.0 ms" in note for note in sentences(busy))


def test_the_least_disturbed_run_tells_the_time(make_run):
    runs = [make_run(seed=seed, model_seconds=0.01 * (1 + seed)) for seed in range(3)]
    (standing,) = result_of(*runs, seeds=3).standings
    assert standing.model_seconds == 0.01
