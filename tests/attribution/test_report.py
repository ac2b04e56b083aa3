"""The report of a run: all that was found, escaped, always the same, and fit for every reader."""

import base64
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from headless import Browser

from isokron.attribution.answers import Found
from isokron.attribution.page.report import report
from isokron.attribution.page.tokens import level, readable, scale_of, scored_text, snippet
from isokron.pages.numbers import signed
from isokron.tasks import Shown
from isokron.tasks.png import png

HOSTILE = '<script>alert("1")</script>&\'x" onfocus="alert(2)'
VOID = {"meta", "link", "br", "hr", "img", "input"}
IMAGE = base64.b64encode(png(torch.arange(64, dtype=torch.uint8).view(8, 8))).decode()
ASK = {"unit": False, "by_layer": False, "fly": False, "damping": 0.1, "kind": "relative"}


class Parsed(HTMLParser):
    """Fails on a tag that is closed out of order; keeps tags, attributes and text."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def all(self, name):
        return [value for key, value in self.attributes if key == name]


def found(example, score, shown, tokens=(), layers=()):
    fields = {"example": example, "id": f"id-{example}", "score": score, "shown": shown}
    return fields | {"tokens": list(tokens), "layers": list(layers)}


def answer(query, shown, proponents, opponents):
    edges = [-5 + k / 4 for k in range(41)]
    return {
        "query": query,
        "shown": shown,
        "proponents": proponents,
        "opponents": opponents,
        "histogram": [edges, [k % 7 for k in range(40)]],
    }


def text(words, label="", title=""):
    return {"tokens": words, "context": "Before. ", "label": label, "title": title}


def image(label):
    return {"image": IMAGE, "label": label}


def texts(query="what is said", title="A title"):
    """An answer by token, the seventh example being among its proponents."""
    words = ["We", " hold", "\n", "these", " truths"]
    return answer(
        query,
        [text(words, title=title)],
        [found(7, 3.0, text(words, title=title), [1.0, 2.5, -0.5, 0.0, 0.0]), found(8, 2.0, {})],
        [found(9, -4.0, text(words * 90, title=title), [-1.0, 0.2, 0.0, 0.0, 0.1] * 90)],
    )


def images(k):
    some = [found(n, 3.0 - n, image(str(n % 3))) for n in range(3)]
    return answer(f"picture {k}", [image(str(k % 3))], some, [found(7, -1.0 - k, image("0"))])


def make_run(folder, sets, **more):
    """A folder with run.json and scores of `sets`: answers by mode, or (answers, mode, layers)."""
    (folder / "scores").mkdir(parents=True)
    source = {"task": "toy", "layers": [], "examples": 1234, **more}
    head = {"format": "isokron run", "version": 1, "isokron": "0.1.0", "torch": "2.13"}
    stages = {"fit": {"method": "ekfac"}, "build": {"whiten": True, "dim": None}}
    record = json.dumps({**head, "source": source, "stages": stages})
    (folder / "run.json").write_text(record)
    for name, (answers, mode, layers) in sets.items():
        scores = {"format": "isokron scores", "version": 1, "name": name}
        scores |= {"ask": ASK | {"mode": mode}, "layers": layers, "answers": answers}
        file = f"{len(list((folder / 'scores').iterdir()))}.json"
        (folder / "scores" / file).write_text(json.dumps(scores))
    return folder


def read(folder, **options):
    return report(folder, **options).read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path):
    together = answer("a, b, c", [image("1"), image("2"), image("3")], [], [])
    sets = {
        "first": ([texts(), texts("what else")], "individual", []),
        "pictures": ([images(k) for k in range(8)], "individual", []),
        "mean": ([together], "mean", []),
    }
    return make_run(tmp_path / "run", sets, command=["isokron", "score", "my run"])


def test_page_is_well_formed_and_links_lead_somewhere(run):
    page = Parsed(read(run))
    ids = page.all("id")
    assert len(ids) == len(set(ids))
    links = page.all("href")
    assert {link[1:] for link in links} <= set(ids)
    assert {"h1", "h2", "h3", "h4", "nav", "details", "summary", "svg"} <= set(page.tags)
    assert page.tags.count("svg") == 11


def test_page_needs_nothing_from_elsewhere(run):
    html = read(run)
    assert all(uri.startswith("data:image/png;base64,") for uri in Parsed(html).all("src"))
    assert not re.search(r"https?://|@import|url\(", html)


def test_lead_says_how_many_and_what_a_score_means(run):
    told = Parsed(read(run)).text
    assert "For 13 queries in 3 sets to a model of toy, these of its 1,234 training" in told
    assert "training on a proponent lowers the loss of the query, on an opponent raises it" in told
    assert "curvature (EK-FAC)" in told


def test_answers_show_examples_scores_and_tokens(run):
    html = read(run)
    assert 'data-s="+2.50" tabindex="0"> hold</b>' in html  # the strongest is in the tab order
    assert '<span class="context">Before. </span>' in html
    assert '<span class="nl"></span>\n' in html
    assert ">+3.00</span>" in html
    assert ">−4.00</span>" in html
    assert "show all, about 91 lines" in html
    assert '<li class="card" id="first.0.against.9">' in html
    assert '<bdi>2</bdi><span class="unlike"> ≠ query</span>' in html


def test_examples_of_several_queries_are_linked_to_each_other(run):
    html = read(run)
    assert 'href="#first.1.for.8"' in html  # from the other query with example 8
    assert '<a href="#example.7">also for 9 other queries</a>' in html
    assert '<li id="example.7">' in html
    assert "training examples come up for several" in html


def test_queries_asked_together_are_shown_together(run):
    html = read(run)
    assert "Mean of 3 queries" in html
    assert "3 queries, asked together" in html


def test_settings_and_the_command_are_told(run):
    html = read(run)
    assert "<pre>isokron score &#x27;my run&#x27;</pre>" in html
    assert "whiten: yes; dim: none" in html
    assert '<th scope="row">layers</th><td>all</td>' in html


def test_same_files_give_the_same_page(run):
    first = report(run).read_bytes()
    assert report(str(run)).read_bytes() == first
    assert str(run).encode() not in first


def test_top_limits_the_examples_of_each_side(run):
    assert read(run, top=1).count('class="card"') == 20
    with pytest.raises(ValueError, match="top must be at least 1, got 0"):
        report(run, top=0)


def test_only_the_first_of_many_answers_is_open(tmp_path):
    sets = {"many": ([images(k) for k in range(200)], "individual", [])}
    html = read(make_run(tmp_path / "run", sets))
    assert html.count('<details class="query"') == 200
    assert html.count(" open>") == 1
    assert len(html) < 2_000_000


def test_scores_by_layer_are_listed(tmp_path):
    some = answer("q", [image("1")], [found(1, 1.0, image("1"), (), [0.75, 0.25])], [])
    html = read(make_run(tmp_path / "run", {"s": ([some], "individual", ["head", "a<b"])}))
    assert '<span class="layer">a&lt;b</span>' in html
    assert ">+0.750</span>" in html


def test_small_images_are_drawn_by_their_pixels_and_large_ones_smoothly(tmp_path):
    large = base64.b64encode(png(torch.zeros(9, 200, 3, dtype=torch.uint8))).decode()
    some = answer("q", [image("1")], [found(1, 1.0, {"image": large})], [])
    page = Parsed(read(make_run(tmp_path / "run", {"s": ([some], "individual", [])})))
    assert [name for name in page.all("class") if name in ("pixels ", "")] == ["pixels ", ""]


def test_opponents_that_are_none_are_told(tmp_path):
    some = answer("q", [image("1")], [], [found(1, 0.5, image("1"))])
    html = read(make_run(tmp_path / "run", {"s": ([some], "individual", [])}))
    assert "1 of these have positive scores: there are no more opponents" in html


def hostile_run(folder):
    words = [HOSTILE, "</b></div>", "\x00\x07", "\u202e", "\ud83d"]
    some = found(1, 1.0, text(words, HOSTILE, HOSTILE), [1.0] * 5, [1.0]) | {"id": f"{HOSTILE} 1"}
    query = text(words, "other", HOSTILE)
    asked = [answer(HOSTILE, [query], [some], []), answer(HOSTILE, [query, query], [some], [])]
    more = {"task": HOSTILE, "command": HOSTILE, "note": {HOSTILE: [HOSTILE]}}
    return make_run(folder, {HOSTILE: (asked, "individual", [HOSTILE])}, **more)


def test_hostile_texts_are_escaped_everywhere(tmp_path):
    html = read(hostile_run(tmp_path / "run"))
    page = Parsed(html)
    assert page.tags.count("script") == 1  # the page's own
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    assert all(re.fullmatch(r"[\w.-]+", own) for own in page.all("id"))
    assert "\x00" not in html


def test_a_run_without_scores_says_what_to_do(run):
    for path in (run / "scores").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="score some queries first"):
        report(run)


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing"):
        report(tmp_path)
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="holds no record of a run"):
        report(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "4.json is not JSON"),
        ("[1]", "4.json is not of isokron scores version 1"),
        ('{"format": "isokron scores", "version": 1}', "are damaged: KeyError"),
    ],
)
def test_foreign_files_are_named_and_leave_no_page(run, content, message):
    (run / "scores" / "4.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        report(run)
    assert not (run / "report.html").exists()


def test_a_record_that_lacks_parts_is_refused(run):
    record = json.loads((run / "run.json").read_text())
    del record["stages"], record["source"]["task"]
    (run / "run.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match="lacks stages, task"):
        report(run)


def test_bytes_of_one_character_count_together():
    html = scored_text(Shown(tokens=("a", "", "é", "")), [1.0, 2.0, 3.0, -7.0], 7.0, "x")
    assert re.findall(r'data-s="([^"]+)"( tabindex="0")?>(.)<', html) == [
        ("+1.00", "", "a"),
        ("+5.00", "", "é"),
        ("−7.00", ' tabindex="0"', "∎"),
    ]


def test_tokens_without_scores_stay_a_text():
    html = scored_text(Shown(tokens=("a", "b")), [], 1.0, "x")
    assert html == '<div class="text" dir="auto">ab</div>'


def test_colours_are_symmetric_and_one_outlier_does_not_pale_the_rest():
    some = [Found(0, "0", 0.0, Shown(), (*(0.01 * k for k in range(100)), -1e6, float("nan")))]
    scale = scale_of(some)
    assert 0.9 < scale < 1
    assert (level(-1e6, scale), level(scale, scale), level(0.05, scale)) == ("n5", "p5", "")
    assert level(1.0, 0.0) == level(float("nan"), 1.0) == ""


def test_what_cannot_be_seen_is_made_readable():
    assert readable("a\tb\x07\u202e") == "a\tb␇⟨U+202E⟩"
    assert snippet("one\n\n two  three", 9) == "one two…"


def test_scores_are_written_for_people():
    values = (128713.7, -0.0110, 0.0, 1e-7, -2.5e8, float("inf"), 99.96)
    said = ["+128,714", "−0.0110", "0", "+1.00e-07", "−2.50e+08", "+inf", "+100"]
    assert [signed(value) for value in values] == said


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
UNFOLD = "document.querySelectorAll('details').forEach((each) => (each.open = true))"


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["plain", "hostile"])
def test_page_fits_and_nothing_complains(browser, run, tmp_path, kind, width):
    folder = run if kind == "plain" else hostile_run(tmp_path / "hostile")
    browser.open(report(folder), width)
    browser.value(UNFOLD)
    assert browser.value(OVERFLOW) <= 0
    assert browser.errors == []


def test_keys_reach_tokens_and_read_their_scores(browser, run):
    browser.open(report(run))
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "skip"
    browser.press("Enter")
    for _ in range(12):
        browser.press("Tab")
        if browser.value("document.activeElement.tagName") == "B":
            break
    assert browser.value("document.activeElement.textContent") == " hold"
    assert browser.value("tip.textContent").endswith("+2.50")
    browser.press("ArrowLeft")
    assert browser.value("tip.textContent") == '"We"  +1.00'
    browser.value("document.querySelectorAll('.tokens b')[4].click()")
    assert browser.value("tip.textContent") == '" truths"  0'
    browser.press("Tab")
    assert browser.value("document.activeElement.closest('.tokens') === null")  # one stop a text
    assert browser.value("tip.textContent") == ""


def test_filter_leaves_the_queries_with_all_words(browser, run):
    browser.open(report(run))
    write = "filter.value = 'PICTURE label 2'; filter.dispatchEvent(new Event('input'))"
    browser.value(write)
    shown = "[...document.querySelectorAll('.query')].filter((each) => !each.hidden)"
    assert browser.value(f"{shown}.length") == 2  # pictures 2 and 5
    assert browser.value("matches.textContent") == "2 of 11"


def test_a_link_unfolds_what_it_leads_to(browser, run):
    path = report(run)
    browser.open(Path(f"{path}#pictures.5.for.2"))
    assert browser.value("document.querySelector(':target').closest('details').open")
    assert browser.value("document.querySelector(':target').getBoundingClientRect().top") < 900
    write = "filter.value = 'nothing'; filter.dispatchEvent(new Event('input'))"
    browser.value(f"{write}; location.hash = 'pictures.6.for.2'")
    query = "document.getElementById('pictures.6.for.2').closest('.query')"
    assert browser.value(f"new Promise((done) => setTimeout(() => done(!{query}.hidden), 50))")
    assert browser.value(f"{query}.open")


def test_dark_pages_are_dark_and_tokens_stay_legible(browser, run):
    path = report(run)
    for dark in (False, True):
        browser.open(path, dark=dark)
        assert min(browser.value(CONTRASTS)) >= 4.5
        for place in ("body", ".tools button"):
            ground = f"getComputedStyle(document.querySelector('{place}')).backgroundColor"
            assert (browser.value(f"{LIGHT}({ground})") < 0.1) == dark


# relative luminance of a colour over the page's paper, and contrasts of all levels with the ink
LIGHT = """((colour) => {
  const pen = document.createElement("canvas").getContext("2d");
  for (const each of [getComputedStyle(document.body).backgroundColor, colour]) {
    pen.fillStyle = each;
    pen.fillRect(0, 0, 1, 1);
  }
  const parts = [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
})"""
CONTRASTS = f"""["p1","p2","p3","p4","p5","n1","n2","n3","n4","n5"].map((level) => {{
  const piece = document.querySelector(".tokens b");
  piece.className = level;
  const style = getComputedStyle(piece);
  const [a, b] = [style.color, style.backgroundColor].map({LIGHT});
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}})"""


def test_page_without_scripts_shows_all(browser, run):
    browser.open(report(run), scripts=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.value("document.querySelector('.tools').hidden")
    assert browser.value("document.querySelectorAll('.query').length") == 11
    assert browser.value("document.getElementById('tip')") is None
