"""The page and the plots: whole, self-contained, escaped, and honest about trouble."""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from html_page import HOSTILE, Page, opened
from isokron import race
from isokron.race.page import health, learning_rates, loss_plot, page
from isokron.race.results import summarize
from isokron.report.charts import Line, Plot, draw, short_names, standalone, ticks


def result_of(runs, settings=None, seeds=1, complete=True):
    base = {
        "task": "toy",
        "unit": "loss",
        "steps": 20,
        "seeds": seeds,
        "optimizers": list(dict.fromkeys(run.optimizer for run in runs)),
        "batch size": 4,
        "parameters": 10,
        "training examples": 12,
    }
    return summarize(base | (settings or {}), runs, complete)


@pytest.fixture(scope="module")
def result(task):
    spec = "torch.optim:SGD"
    lr = {"adamw": [0.003, 0.01], "muon": [0.003, 0.01], spec: [0.01, 1e6], "toy:Raises": [0.01]}
    return race.run(task, ["muon", spec, "toy:Raises"], steps=8, seeds=2, lr=lr)


def test_page_is_well_formed_and_needs_nothing_from_elsewhere(result):
    tags = Page(page(result)).tags
    assert tags.count("svg") == 3
    assert {"h1", "h2", "table", "title", "desc", "main"} <= set(tags)


def test_page_names_diverged_and_failed_runs(result):
    html = page(result)
    assert "diverged" in html
    assert "RuntimeError: no &lt;more&gt; steps" in html
    assert 'class="cross' in html


def test_page_shows_the_statistics_of_optimizers_that_have_them(result):
    assert [row[0] for row in health(result)] == ["adamw", "muon"]
    assert all(float(row[1]) > 0 for row in health(result))
    assert "State of the optimizers after the last step" in page(result)


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
    assert Page(html).tags.count("script") == 1  # the page's own
    assert "alert(" in html
    ElementTree.fromstring(standalone(loss_plot(result, "step")))


def test_plots_are_valid_xml_with_title_and_description(result):
    for plot in (loss_plot(result, "step"), loss_plot(result, "time"), learning_rates(result)):
        root = ElementTree.fromstring(draw(plot))
        assert root.find("title").text == plot.title
        assert root.find("desc").text == plot.description
        assert root.get("role") == "img"


def test_curves_have_a_thin_line_per_seed_and_a_thick_mean(result):
    svg = draw(loss_plot(result, "step"))
    assert svg.count("curve thick") == 3  # the failed optimizer has none
    assert svg.count("curve thin") == 6


def test_time_axis_is_steps_times_step_time(make_run):
    result = result_of([make_run(model_seconds=0.5, optimizer_seconds=0.25)])
    (line,) = loss_plot(result, "time").lines
    assert [x for x, _ in line.points] == [0, 7.5, 15]


def test_labels_of_equal_curves_do_not_overlap():
    lines = [Line(f"name{i}", i, [(0, 2.0), (1, 1.0)]) for i in range(6)]
    svg = draw(Plot("p", "t", "d", "x", "y", lines))
    places = sorted(float(y) for y in re.findall(r'class="label[^>]* y="([\d.]+)"', svg))
    assert len(places) == 6
    assert all(b - a >= 15.9 for a, b in pairwise(places))
    assert places[-1] < 330


def test_diverged_runs_are_a_section_only_if_there_are_any(result, make_run):
    assert "Diverged and failed runs" in page(result)
    assert "Diverged and failed runs" not in page(result_of([make_run()]))


def test_an_empty_race_still_draws(make_run):
    result = result_of([make_run(status="diverged", eval_steps=[], eval_losses=[])], complete=False)
    html = page(result)
    Page(html)
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
    browser = opened(page(result), tmp_path, width)
    assert browser.value("document.querySelectorAll('svg').length") == 3
    assert browser.value("document.title") == "Optimizers on toy"
    # the shadow at the right edge of a table that scrolls
    style = "getComputedStyle(document.querySelector('.scroll'))"
    assert browser.value(f"{style}.backgroundAttachment") == "local, scroll"
    browser.close()
