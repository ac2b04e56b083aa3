"""The page and the plots: whole, self-contained, escaped, and honest about trouble."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from isokron import race
from isokron.pages.plot import Line, Plot, draw, short_names, standalone, ticks
from isokron.race.figures import learning_rates, loss_by_step, loss_by_time
from isokron.race.page import page
from isokron.race.results import Result
from isokron.race.standings import summarize

VOID = {"meta", "link", "br", "hr", "img", "input"}
HOSTILE = '<script>alert("1")</script>&\'x'


class Balance(HTMLParser):
    """Fails on a tag that is closed out of order; keeps tags, ids and texts."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.ids, self.links = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href"):
                self.links.append(value)
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


def result_of(runs, settings=None, seeds=1, complete=True):
    sweeps = {}
    for run in runs:
        sweeps.setdefault(run.optimizer, set()).add(run.lr)
    base = {
        "task": "toy",
        "unit": "loss",
        "steps": 20,
        "seeds": seeds,
        "batch size": 4,
        "parameters": 10,
        "training examples": 12,
    }
    standings = summarize(runs, sweeps, seeds)
    return Result(base | (settings or {}), tuple(runs), standings, complete)


@pytest.fixture(scope="module")
def result(task):
    spec = "torch.optim:SGD"
    lrs = {"adamw": [0.003, 0.01], "muon": [0.003, 0.01], spec: [0.01, 1e6], "toy:Raises": [0.01]}
    return race.run(task, ["muon", spec, "toy:Raises"], steps=8, seeds=2, lrs=lrs)


def test_page_is_well_formed_with_unique_ids(result):
    balance = parsed(page(result))
    assert balance.tags.count("svg") == 3
    assert len(balance.ids) == len(set(balance.ids))
    assert {"h1", "h2", "table", "title", "desc", "main"} <= set(balance.tags)


def test_page_needs_nothing_from_elsewhere(result):
    html = page(result)
    assert parsed(html).links == []
    assert not re.search(r"https?://|//[a-z]|@import|url\((?!#)|\bsrc=", html.replace("\n// ", ""))


def test_page_names_diverged_and_failed_runs(result):
    html = page(result)
    assert "diverged" in html
    assert "RuntimeError: no &lt;more&gt; steps" in html
    assert 'class="cross' in html


def test_sample_is_shown_escaped(result):
    assert "<pre>&lt;b&gt;fits &amp; smiles&lt;/b&gt;</pre>" in page(result)


def test_hostile_names_are_escaped_everywhere(make_run):
    runs = [
        make_run(),
        make_run(HOSTILE, sample=HOSTILE),
        make_run(HOSTILE, lr=0.3, status="diverged", message=HOSTILE),
    ]
    result = result_of(runs, {"task": HOSTILE, "unit": HOSTILE})
    html = page(result)
    assert parsed(html).tags.count("script") == 1  # the page's own
    assert "alert(" in html
    ElementTree.fromstring(standalone(loss_by_step(result)))


def test_plots_are_valid_xml_with_title_and_description(result):
    for plot in (loss_by_step(result), loss_by_time(result), learning_rates(result)):
        root = ElementTree.fromstring(draw(plot))
        assert root.find("title").text == plot.title
        assert root.find("desc").text == plot.description
        assert root.get("role") == "img"


def test_curves_have_a_thin_line_per_seed_and_a_thick_mean(result):
    svg = draw(loss_by_step(result))
    assert svg.count("curve thick") == 3  # the failed optimizer has none
    assert svg.count("curve thin") == 6


def test_time_axis_is_steps_times_step_time(make_run):
    result = result_of([make_run(model_seconds=0.5, optimizer_seconds=0.25)])
    (line,) = loss_by_time(result).lines
    assert [x for x, _ in line.points] == [0, 7.5, 15]


def test_labels_of_equal_curves_do_not_overlap():
    lines = [Line(f"name{i}", i, [(0, 2.0), (1, 1.0)]) for i in range(6)]
    svg = draw(Plot("p", "t", "d", "x", "y", lines))
    places = sorted(float(y) for y in re.findall(r'class="label[^>]* y="([\d.]+)"', svg))
    assert len(places) == 6
    assert all(b - a >= 15.9 for a, b in pairwise(places))
    assert places[-1] < 330


def test_an_empty_race_still_draws(make_run):
    result = result_of([make_run(status="diverged", eval_steps=(), eval_losses=())], complete=False)
    html = page(result)
    parsed(html)
    assert "no finished run" in html
    assert "was interrupted" in html


@pytest.mark.parametrize(
    ("low", "high", "log", "expected"),
    [
        (0, 10, False, [0, 2, 4, 6, 8, 10]),
        (0.0009, 1.1, True, [0.001, 0.01, 0.1, 1.0]),
        (2.05, 3.1, False, [2.2, 2.4, 2.6, 2.8, 3.0]),
    ],
)
def test_ticks_are_round_numbers(low, high, log, expected):
    assert ticks(low, high, log) == pytest.approx(expected)


def test_names_beside_curves_are_short_and_distinct():
    assert short_names(["adamw", "torch.optim:SGD(momentum=0.9)"]) == ["adamw", "SGD"]
    assert short_names(["muon", "muon(momentum=0.5)"]) == ["muon", "muon(moment…"]


@pytest.mark.parametrize("width", [390, 1280])
def test_page_renders_in_a_browser_without_scrolling_sideways(result, tmp_path, width):
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("install chromium to see the page rendered: apt-get install chromium")
    measure = "document.body.dataset.overflow = document.documentElement.scrollWidth - innerWidth"
    html = page(result).replace("</body>", f"<script>{measure}</script></body>")
    (tmp_path / "index.html").write_text(html, encoding="utf-8")
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
        f"--disable-background-networking --disable-component-update --window-size={width},900"
    )
    command = [chromium, *flags.split(), f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    dom = subprocess.run(
        [*command, f"file://{tmp_path / 'index.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert dom.count("<svg") == 3
    assert "Optimizers on toy" in dom
    assert int(re.search(r'data-overflow="(-?\d+)"', dom)[1]) <= 0
