"""The page, the table and the files: whole, self-contained, escaped, and the same every time."""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from isokron.curvature import Curvature
from isokron.inspection import inspect, make_plan
from isokron.inspection.figures import groups
from isokron.inspection.models import make_model
from isokron.inspection.names import short_layers
from isokron.inspection.page import page
from isokron.inspection.report import open_folder, write_report
from isokron.inspection.table import COLUMNS, rich_table, rows
from isokron.inspection.verdict import verdict

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
HOSTILE = '<script>alert("1")</script>&\'x'


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order; keeps tags, ids and links."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        self.links += [value for name, value in attributes if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(html):
    balance = Balance()
    balance.feed(html)
    balance.close()
    assert balance.open == []
    return balance


def inspected(task, **options):
    plan = make_plan(task, **{"steps": 3, "examples": 20, **options})
    return inspect(make_model(plan), plan)


def many(result, count):
    """The same inspection with more layers than colours."""
    layers = [
        replace(result.layers[i % len(result.layers)], name=f"blocks.{i}.attention_projection")
        for i in range(count)
    ]
    return replace(result, layers=tuple(layers))


def test_page_is_well_formed_with_unique_ids_and_needs_nothing_from_elsewhere(reading):
    html = page(inspected(reading)[0])
    balance = parsed(html)
    assert len(balance.ids) == len(set(balance.ids))
    assert balance.tags.count("svg") == 6  # ranks, damping, spectra, two sides, memory
    assert balance.links == []
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)|\bsrc=", html.replace("\n// ", ""))


def test_many_layers_are_spread_over_figures(reading):
    result = many(inspected(reading)[0], 17)
    html = page(result)
    assert [len(group) for group in groups(result.layers)] == [6, 6, 5]
    assert html.count("<h3>All eigenvalues (") == 3
    parsed(html)
    classes = re.findall(r'id="spectra-0-title".*?</svg>', html, re.S)[0]
    assert len(set(re.findall(r"curve thick (c\d)", classes))) == 6


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac", "shampoo"])
def test_every_method_has_a_page(reading, method):
    html = page(inspected(reading, method=method, damping=0.0)[0])
    assert ("Side of the inputs, A" in html) == (method != "ekfac")


def test_hostile_names_are_escaped_everywhere(reading):
    result = inspected(reading)[0]
    layers = tuple(replace(facts, name=f"{HOSTILE}{i}") for i, facts in enumerate(result.layers))
    settings = {**result.settings, "task": HOSTILE, "unit": HOSTILE}
    html = page(replace(result, layers=layers, settings=settings, notes=(HOSTILE,)))
    assert parsed(html).tags.count("script") == 1  # the page's own


def test_a_model_without_curvature_still_has_a_page(reading):
    result = inspected(reading)[0]
    gone = {"trace": 0.0, "largest": 0.0, "smallest": 0.0, "effective_rank": 0.0, "kept": 0}
    none = {"spectrum": (), "output_spectrum": None, "input_spectrum": None}
    dead = replace(result, layers=tuple(replace(f, **gone, **none) for f in result.layers))
    assert verdict(dead) == ["No layer has any curvature: all gradients are zero."]
    parsed(page(dead))


def test_lead_names_the_worst_layer_and_counts_directions(regression):
    result = inspected(regression)[0]
    worst = max(result.layers, key=lambda f: f.largest / f.mean)
    said = verdict(result)
    assert said[0].startswith(f"The largest eigenvalue of layer {worst.name} is ")
    rank = sum(f.effective_rank for f in result.layers)
    assert said[1].startswith(f"About {rank:,.0f} of 74 directions matter")


def test_rows_have_all_columns_and_a_narrow_terminal_gives_up_some(reading):
    result = inspected(reading)[0]
    assert {len(row) for row in rows(result)} == {len(COLUMNS)}
    for width in (60, 80, 200):
        console = Console(width=width, color_system=None)
        with console.capture() as capture:
            console.print(rich_table(result, width))
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


def test_files_are_the_same_every_time_and_the_curvature_loads(reading, tmp_path):
    for name in ("one", "two", "one"):
        open_folder(tmp_path / name)
        write_report(*inspected(reading), tmp_path / name)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()}
        for name in ("one", "two")
    )
    assert first == second
    assert len(first) == 4
    saved = json.loads(first["inspect.json"])
    assert [layer["name"] for layer in saved["layers"]] == ["tokens", "norm", "head"]
    loaded = Curvature.load(tmp_path / "one" / "curvature", reading.model())
    assert loaded.report()[2]["trace"] == pytest.approx(saved["layers"][2]["trace"])


def test_a_write_that_fails_leaves_no_page_of_other_numbers(reading, tmp_path, monkeypatch):
    open_folder(tmp_path / "one")
    result, curvature = inspected(reading)
    write_report(result, curvature, tmp_path / "one")

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(curvature, "save", full)
    with pytest.raises(OSError, match="no space"):
        write_report(replace(result, loss=9.0), curvature, tmp_path / "one")
    assert not (tmp_path / "one" / "index.html").exists()
    open_folder(tmp_path / "one")  # and may be repeated


def test_folders_of_others_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files in it \(such as thesis.txt\)"):
        open_folder(tmp_path)
    with pytest.raises(ValueError, match="is a file; give a folder"):
        open_folder(tmp_path / "thesis.txt")
    with pytest.raises(ValueError, match="cannot be written: Not a directory"):
        open_folder(tmp_path / "thesis.txt" / "deeper")


# sorts the table by its second head, reads a plot, and notes what went wrong on the way
PROBE = """
const wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
"""
MEASURE = """
const body = document.body;
const first = () => document.querySelector(".sortable tbody th").textContent;
const before = first();
document.querySelectorAll(".sortable thead button")[3].click();
body.dataset.sorted = [...document.querySelectorAll(".sortable tbody tr")]
  .map((row) => row.cells[3].textContent).join(" ");
const figure = document.querySelector('figure[data-log="x"]');
const box = figure.querySelector("svg").getBoundingClientRect();
figure.querySelector("svg").dispatchEvent(
  new PointerEvent("pointermove", { clientX: box.left + box.width / 2, clientY: box.top + 9 }));
body.dataset.readout = figure.querySelector(".readout").textContent;
for (const details of document.querySelectorAll("details")) details.open = true;
body.dataset.overflow = document.documentElement.scrollWidth - innerWidth;
body.dataset.wrong = wrong.join("; ");
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_page_works_in_a_browser_without_scrolling_sideways(reading, tmp_path, width):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("install chromium to see the page rendered: apt-get install chromium")
    html = page(many(inspected(reading)[0], 9))
    html = html.replace("<head>", f"<head><script>{PROBE}</script>", 1)
    html = html.replace("</body>", f"<script>{MEASURE}</script></body>")
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    # a window of chromium is at least 500 wide: a phone is a frame in it
    frame = f'<iframe src="index.html" style="width: {width}px; height: 900px"></iframe>'
    copied = (
        "<script>onload = () => Object.assign(document.body.dataset, "
        'document.querySelector("iframe").contentDocument.body.dataset)</script>'
    )
    (tmp_path / "frame.html").write_text(f"<body>{frame}{copied}</body>", encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        "--disable-background-networking --disable-component-update --window-size=1400,1000 "
        "--allow-file-access-from-files"
    )
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run(
        [*command, f"file://{tmp_path / 'frame.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    data = dict(re.findall(r'data-(\w+)="([^"]*)"', dom))
    assert data["wrong"] == ""
    assert int(data["overflow"]) <= 0
    traces = [float(text) for text in data["sorted"].split()]
    assert traces == sorted(traces, reverse=True)
    assert len(traces) == 9
    assert data["readout"].startswith("damping / mean eigenvalue ")
    assert "worst (" in data["readout"]
