"""The page, the table and the files: whole, self-contained, escaped, and the same every time."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from markupsafe import escape
from rich.console import Console

from html_page import HOSTILE, Page, opened
from isokron.cli.terminal import fitted_table
from isokron.curvature import Curvature
from isokron.inspect import (
    RECORDS,
    SPARE,
    Setup,
    conditions_by_damping,
    measure,
    page,
    short_layers,
    table,
    texts,
    write_report,
)
from isokron.race.race import open_folder


def changed(facts, **values):
    return SimpleNamespace(**{**vars(facts), **values})


def many(result, count):
    """The same inspection with more layers than colours."""
    layers = [
        changed(result.layers[i % len(result.layers)], name=f"blocks.{i}.attention_projection")
        for i in range(count)
    ]
    return replace(result, layers=tuple(layers))


def test_page_is_well_formed_and_needs_nothing_from_elsewhere(reading, inspected):
    # ranks, damping, spectra, two sides, memory
    assert Page(page(inspected(reading)[0])).tags.count("svg") == 6


def test_many_layers_are_spread_over_figures(reading, inspected):
    result = many(inspected(reading)[0], 17)
    html = page(result)
    Page(html)
    assert html.count("<h3>All eigenvalues (") == 3
    plots = re.findall(r'id="spectrum-\d-title".*?</svg>', html, re.S)
    assert [len(set(re.findall(r"curve thick (c\d)", plot))) for plot in plots] == [6, 6, 5]


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac", "shampoo"])
def test_every_method_has_a_page(reading, method, inspected):
    html = page(inspected(reading, method=method, damping=0.0)[0])
    assert ("Side of the inputs, A" in html) == (method != "ekfac")


def test_hostile_names_are_escaped_everywhere(reading, inspected):
    result = inspected(reading)[0]
    layers = tuple(changed(facts, name=f"{HOSTILE}{i}") for i, facts in enumerate(result.layers))
    settings = {**result.settings, "task": HOSTILE, "unit": HOSTILE}
    html = page(replace(result, layers=layers, settings=settings, notes=(HOSTILE,)))
    assert Page(html).tags.count("script") == 1  # the page's own


def test_a_model_without_curvature_still_has_a_page(reading, inspected):
    result = inspected(reading)[0]
    gone = {"trace": 0.0, "largest": 0.0, "smallest": 0.0, "effective_rank": 0.0, "kept": 0}
    none = {"spectrum": (), "output_spectrum": None, "input_spectrum": None}
    dead = replace(result, layers=tuple(changed(f, **gone, **none) for f in result.layers))
    assert texts(dead)[0] == ["No layer has any curvature: all gradients are zero."]
    Page(page(dead))


def test_lead_names_the_worst_layer_and_counts_directions(regression, inspected):
    result = inspected(regression)[0]
    worst = max(result.layers, key=lambda f: f.largest / f.mean)
    said = texts(result)[0]
    assert said[0].startswith(f"The largest eigenvalue of layer {worst.name} is ")
    rank = sum(f.effective_rank for f in result.layers)
    assert said[1].startswith(f"About {rank:,.0f} of 74 directions matter")


def test_condition_by_damping_passes_through_the_damped_condition(regression, inspected):
    result = inspected(regression, damping=0.1)[0]
    lines = {line.beside: dict(line.points) for line in conditions_by_damping(result).lines}
    ranked = sorted(result.layers, key=lambda f: f.largest / f.mean)
    assert lines["worst"][0.1] == pytest.approx(ranked[-1].condition_damped, rel=1e-4)
    assert lines["best"][0.1] == pytest.approx(ranked[0].condition_damped, rel=1e-4)


def test_rows_have_all_columns_and_a_narrow_terminal_gives_up_some(reading, inspected):
    result = inspected(reading)[0]
    for width in (60, 80, 200):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(fitted_table("title", table(result), width, spare=SPARE))
        lines = capture.get().splitlines()
        assert max(map(len, lines)) <= width
        assert any("tokens" in line for line in lines)
    assert "statistics" in capture.get()


def test_short_names_are_distinct_endings():
    names = ["0", "blocks.0.query", "blocks.1.query", "head", "a.very_long_name_of_a_layer", ""]
    assert list(short_layers(names).values()) == [
        "0",
        "0.query",
        "1.query",
        "head",
        "very_l…_layer",
        "model",
    ]


def test_files_are_the_same_every_time_and_the_curvature_loads(reading, tmp_path, inspected):
    for name in ("one", "two", "one"):
        open_folder(tmp_path / name, RECORDS)
        write_report(*inspected(reading), tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("one", "two")
    )
    assert first == second
    assert len(first) == 4
    saved = json.loads(first["inspect.json"])
    assert [layer["name"] for layer in saved["layers"]] == ["tokens", "norm", "head"]
    loaded = Curvature.load(tmp_path / "one" / "curvature")
    assert loaded.report()[2]["trace"] == pytest.approx(saved["layers"][2]["trace"])


def test_a_write_that_fails_leaves_no_page_of_other_numbers(
    reading, tmp_path, monkeypatch, inspected
):
    open_folder(tmp_path / "one", RECORDS)
    result, curvature = inspected(reading)
    write_report(result, curvature, tmp_path / "one")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(curvature, "save", full)
    with pytest.raises(OSError, match="no space"):
        write_report(replace(result, evaluation_loss=9.0), curvature, tmp_path / "one")
    assert not (tmp_path / "one" / "index.html").exists()
    open_folder(tmp_path / "one", RECORDS)  # and may be repeated


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files in it \(such as thesis.txt\)"):
        open_folder(tmp_path, RECORDS)
    with pytest.raises(ValueError, match="is a file; give a new folder"):
        open_folder(tmp_path / "thesis.txt", RECORDS)
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        open_folder(tmp_path / "thesis.txt" / "deeper", RECORDS)


# sorts the table by its fourth head, and points at the middle of a plot
SORTED = """
document.querySelectorAll(".sortable thead button")[3].click();
[...document.querySelectorAll(".sortable tbody tr")].map((row) => +row.cells[3].textContent)
"""
READOUT = """
const figure = document.querySelector('figure[data-log="x"]');
const box = figure.querySelector("svg").getBoundingClientRect();
figure.querySelector("svg").dispatchEvent(
  new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 9 }));
figure.querySelector(".readout").textContent
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_page_works_in_a_browser_without_scrolling_sideways(reading, tmp_path, width, inspected):
    browser = opened(page(many(inspected(reading)[0], 9)), tmp_path, width)
    traces = browser.value(SORTED)
    assert traces == sorted(traces, reverse=True)
    assert len(traces) == 9
    readout = browser.value(READOUT)
    assert readout.startswith("damping / mean eigenvalue ")
    assert "worst (" in readout
    assert browser.errors == []
    browser.close()


@pytest.mark.parametrize(
    "optimizer", ["soap", "natural", "muon(average='primal')", "torch.optim:SGD"]
)
def test_page_has_the_statistics_of_the_optimizer_that_trained(optimizer, regression, tmp_path):
    setup = Setup(regression, steps=3, examples=20, optimizer=optimizer)
    result, curvature = measure(setup)
    assert not any(module._forward_hooks for module in setup.model.modules())
    write_report(result, curvature, tmp_path)
    saved = json.loads((tmp_path / RECORDS).read_text())
    assert saved["settings"]["training"] == f"3 steps of {optimizer}"
    row = f'<th scope="row">{escape(optimizer)}</th>'
    if optimizer.startswith("torch"):
        assert saved["statistics"] == []
        assert row not in page(result)
    else:
        assert saved["statistics"][0]["update_rms"] > 0
        assert row in page(result)
