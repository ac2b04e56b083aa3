"""Charts are valid SVG, described for screen readers, and parts of a page are escaped."""

import re
from xml.etree import ElementTree

import pytest

from isokron.report.charts import Chart, Dots, Line, Plot, Row, draw, draw_dots, draw_histogram
from isokron.report.render import environment

HOSTILE = "<i>\"&'"


def test_charts_are_valid_xml_with_title_and_description():
    rows = [Row(HOSTILE, HOSTILE, 0.1, 0.5, HOSTILE), Row("b", "b", 1e-9, None, "1e-7 %")]
    dots = Dots("d", HOSTILE, "shares", "of all directions", rows)
    bars = Chart("h", HOSTILE, "all scores", "score")
    histogram = draw_histogram(bars, [0.0, 1.0, 2.0], [1000, 3], [[0.5], [1.5, 2.0]])
    for svg, chart in ((draw_dots(dots), dots), (histogram, bars)):
        root = ElementTree.fromstring(svg)
        assert root.find("title").text == chart.title
        assert root.find("desc").text == chart.description


def test_labels_stand_in_the_order_of_the_ends_of_their_curves():
    lines = [Line(f"curve {end}", 1, [(0, 9.0), (1, end)]) for end in (1.0, 3.0, 1.01, 8.0)]
    svg = draw(Plot("p", "t", "d", "x", "y", lines))
    labels = re.findall(r'class="label.* y="([\d.]+)"><title>(.*)</title>', svg)
    names = [name for _, name in sorted(labels, key=lambda label: float(label[0]))]
    assert names == ["curve 8.0", "curve 3.0", "curve 1.01", "curve 1.0"]


@pytest.mark.parametrize(
    ("macro", "arguments"),
    [
        ("table", (("name", HOSTILE), [["a", HOSTILE]])),
        ("table", (("name", "x"), [[HOSTILE * 4, "x"]], "names")),
        ("sortable", (HOSTILE, ("name", "x"), [[(HOSTILE * 4, HOSTILE), (HOSTILE, 1.5)]])),
        ("bullets", ([HOSTILE],)),
        ("settings", ({HOSTILE: {HOSTILE: [HOSTILE]}},)),
    ],
)
def test_parts_of_a_page_escape_their_texts(macro, arguments):
    html = getattr(environment().get_template("parts.html").module, macro)(*arguments)
    assert "<i>" not in html
    assert "&lt;i&gt;" in html
    assert 'data-key="<' not in html
