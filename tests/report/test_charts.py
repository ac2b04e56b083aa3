"""Charts are valid SVG, described for screen readers, and parts of a page are escaped."""

import re
from xml.etree import ElementTree

import pytest

from isokron.report.charts import Dots, Histogram, Row, draw_dots, draw_histogram
from isokron.report.render import bullets, document, framed, settings_table, sortable, table

HOSTILE = "<i>\"&'"


def histogram(**fields):
    values = {"edges": [0.0, 1.0, 2.0], "counts": [1000, 3], "marks": [(1, [0.5, 99.0])]}
    return Histogram("h", HOSTILE, "all scores", "score", "examples", **(values | fields))


def test_charts_are_valid_xml_with_title_and_description():
    rows = [Row(HOSTILE, HOSTILE, 0.1, 0.5, HOSTILE), Row("b", "b", 1e-9, None, "1e-7 %")]
    dots = Dots("d", HOSTILE, "shares", "of all directions", rows)
    for svg, chart in ((draw_dots(dots), dots), (draw_histogram(histogram()), histogram())):
        root = ElementTree.fromstring(svg)
        assert root.find("title").text == chart.title
        assert root.find("desc").text == chart.description


def test_values_beyond_the_edges_are_marked_at_the_edge():
    marks = re.findall(r"M([\d.]+) \d+v11", draw_histogram(histogram()))
    assert [float(x) for x in marks] == pytest.approx([159.5, 470.0])


def test_a_histogram_without_counts_still_draws():
    ElementTree.fromstring(draw_histogram(histogram(counts=[0, 0], marks=[])))


@pytest.mark.parametrize(
    "html",
    [
        table(("name", HOSTILE), [["a", HOSTILE]]),
        sortable(HOSTILE, ("name", "x"), [[HOSTILE * 4, HOSTILE]], [[HOSTILE, 1.5]]),
        bullets([HOSTILE]),
        settings_table({HOSTILE: {HOSTILE: [HOSTILE]}}),
        framed(HOSTILE, "<svg></svg>", HOSTILE),
        document(HOSTILE, "<p>a body of HTML</p>"),
    ],
)
def test_parts_of_a_page_escape_their_texts(html):
    assert "<i>" not in html
    assert "&lt;i&gt;" in html
    assert 'data-key="<' not in html
