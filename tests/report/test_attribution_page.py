"""The page of a run: complete, escaped, deterministic, quick to open and fit for every reader."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from headless import Browser
from score_files import (
    WORDS,
    answer,
    image,
    image_answer,
    item,
    many,
    projected,
    record,
    text,
    text_answer,
    write_run,
)

from html_page import Page
from isokron.report.attribution import visible, write_report
from isokron.report.render import number, percent

HOSTILE = '<script>alert("1")</script><!--&\'x" onfocus="alert(2)'


def unfolded(html):
    """The page as it is after all folded queries were opened."""
    pattern = r'<script type="application/json">(.*?)</script>'
    return re.sub(pattern, lambda match: json.loads(match[1]), html)


def page_of(folder, *records, **options):
    """The unfolded page of these score files."""
    path = write_report(write_run(folder, *records), **options)
    return unfolded(path.read_text(encoding="utf-8"))


def words_of(html):
    """What a reader sees, spaces as one."""
    return " ".join(Page(html).text.split())


@pytest.fixture
def run(tmp_path):
    together = answer("a, b, c", [image("1"), image("2"), image("3")], [], [])
    return write_run(
        tmp_path / "run",
        record("first", [text_answer(), text_answer("what else")]),
        record("pictures", [image_answer(k) for k in range(8)]),
        record("mean", [together], method={"mode": "mean"}),
    )


@pytest.fixture
def html(run):
    return unfolded(write_report(run).read_text(encoding="utf-8"))


def test_page_is_well_formed_and_links_lead_somewhere(html):
    page = Page(html)
    assert {link[1:] for link in page.all("href")} <= set(page.all("id"))
    assert page.tags.count("svg") == 11


def test_the_page_is_written_without_torch(run):
    code = f"""if True:
        import sys
        from pathlib import Path
        from isokron.report.attribution import write_report
        write_report(Path({str(run)!r}))
        print(*{{name.split(".")[0] for name in sys.modules}}, "isokron.attribution" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "True"} & set(done.stdout.split())


def test_header_tells_method_scoring_noise_damping_coverage_and_command(tmp_path):
    exact = words_of(page_of(tmp_path / "exact", record()))
    assert "For 1 query, these of the 1,234 training examples in toy.jsonl" in exact
    assert "K-FAC, empirical Fisher" in exact
    assert "exact, without projection: 2 queries cost less than a store" in exact
    assert "Noise" not in exact
    assert "0.1 of each layer's mean eigenvalue" in exact
    assert "covers 106 of 135 M parameters; left out: lm_head, embed_tokens" in exact
    assert "2 layers left out lm_head 49,152 outputs, 28,311,552 parameters" in exact
    assert "isokron attribute runs/mine --query 'what is said'" in exact
    stored = words_of(page_of(tmp_path / "store", projected()))
    assert "from a store of projected gradients, dimension 32: 500 queries" in stored
    assert "Spearman correlation with exact scores 0.934, on a sample of 64 examples" in stored


def test_query_pane_shows_loss_what_the_model_said_and_the_check_by_training(tmp_path):
    html = page_of(tmp_path / "run", record())
    said = words_of(html)
    assert "12.0 nats over 5 tokens, 2.40 each" in said
    assert "Likeliest token at each position We have the truth" in said
    assert "written by the model itself" in said
    assert "One gradient step of the same length, from the same weights, changed this" in said
    assert "top proponents −0.800 nats random examples −0.0500 nats" in said
    assert "top opponents +0.300 nats" in said
    assert "Predicted nats score × 0.00410, measured by real steps" in said
    assert 'data-losses="4 2 0.5 3.5 2"' in html
    assert 'data-shares="0.1 0.6 0 -0.2 0.1"' in html


def test_what_a_run_did_not_measure_is_not_on_its_page(tmp_path):
    bare = text_answer(said=None, generated=False, verify=None, token_losses=[], loss=None)
    said = words_of(page_of(tmp_path / "run", record(answers=[bare])))
    for phrase in ("Loss", "Likeliest token", "written by the model", "real training", "bar below"):
        assert phrase not in said


def test_cards_show_share_first_and_other_numbers_in_one_format(tmp_path):
    html = page_of(tmp_path / "run", record())
    assert ">+15.0\u00a0%</span>" in html
    assert "score +3.00 = ⟨∇q, H⁻¹∇t⟩; its share of the query's 20.0 in positive" in html
    facts = "+3.00 % per token cosine 0.200 5 tokens loss 2.50 nats predicted +0.0123 nats"
    assert facts in words_of(html)


def test_cards_without_content_show_id_label_and_loss(tmp_path):
    html = page_of(tmp_path / "run", record())
    card = html[html.index('id="set-first.0.for.8"') :]
    said = words_of(f"<ol><li {card[: card.index('</li>')]}</li></ol>")
    for part in ("id-8", "label tax", "loss 2.50 nats", "400 tokens", "+10.0 %"):
        assert part in said


def test_scores_below_their_noise_are_grey_and_say_why(tmp_path):
    html = page_of(tmp_path / "run", projected())
    assert html.count('class="card noisy"') == 1
    assert "below its noise: smaller than two standard errors (± 4.00 %)" in words_of(html)
    assert "± 2.00 %, by the projection" in words_of(html)


def test_an_answer_with_nothing_to_show_still_has_a_pane(tmp_path):
    html = page_of(tmp_path / "run", record(answers=[answer("the query's name", [{}], [], [])]))
    assert "<bdi>the query&#39;s name</bdi>" in html
    assert "No proponents: no example has a positive score." in words_of(html)
    assert "No opponents: no example has a negative score." in words_of(html)


def test_scores_of_another_number_of_tokens_leave_the_text_plain(tmp_path):
    short = answer("q", [text()], [item(1, 1.0, text(), tokens=[1.0, 2.0])], [])
    html = page_of(tmp_path / "run", record(answers=[short]))
    assert 'data-shares="' not in html
    assert html.count(">We hold\nthese truths</span>") == 2


@pytest.mark.parametrize(
    "part",
    [
        pytest.param("<bdi>2</bdi><span> ≠ query</span>", id="a label that differs is marked"),
        pytest.param('<a href="#example.7">also for 9 other queries</a>', id="link to the others"),
        pytest.param('<li id="example.7">', id="where it leads"),
        pytest.param("6 training examples come up for several queries", id="how many have links"),
        pytest.param("Mean of 3 queries", id="a mean has one title"),
        pytest.param("3 queries, asked together", id="its queries are shown together"),
    ],
)
def test_page_relates_queries_and_examples(html, part):
    assert part in html


def test_layers_have_bars_and_the_small_ones_are_summed(tmp_path):
    scores = [(-1) ** k * 2.0 ** -min(k, 11) for k in range(20)]
    few = answer("q", [image("1")], [item(1, 1.0, image("1"), layers=scores)], [])
    layers = [f"block<{k}>" for k in range(20)]
    html = page_of(tmp_path / "run", record(answers=[few], layers=layers))
    names = re.findall(r'<span class="layer">([^<]+)</span>', html)
    assert names[:2] == ["block&lt;0&gt;", "block&lt;1&gt;"]
    assert names[-1] == "the other 8 layers"
    assert len(names) == 13
    assert ">−2.50\u00a0%</span>" in html


def test_small_images_show_their_pixels_and_large_ones_are_smooth(tmp_path):
    few = answer("q", [image("1")], [item(1, 1.0, image("1", width=200))], [])
    page = Page(page_of(tmp_path / "run", record(answers=[few])))
    classes = [name for name in page.all("class") if name.strip() in ("pixels", "")]
    assert classes == ["pixels ", ""]


def test_same_files_give_the_same_page(run, tmp_path):
    first = write_report(run).read_bytes()
    assert write_report(run, tmp_path / "page.html") == tmp_path / "page.html"
    assert write_report(run).read_bytes() == first
    assert (tmp_path / "page.html").read_bytes() == first
    assert str(run).encode() not in first


def test_missing_numbers_are_never_written_as_none(tmp_path):
    lost = item(1, -1.0, text(), per_token=None, cosine=None, loss=None, tokens_counted=None)
    lost |= {"tokens": [-0.5, -0.5, 0.0, 0.0, 0.0], "layers": [0.0, -1.0]}
    check = {"examples": 3, "step": 0.1, "before": 1.0, "proponents": -1.0, "random": 0.0}
    fields = {"loss": None, "verify": check | {"opponents": None}}
    # without positive scores there is nothing to have a share of
    answers = [answer("q", [text()], [], [lost], positive=total, **fields) for total in (1.0, 0.0)]
    html = page_of(tmp_path / "run", record(answers=answers, layers=["a", "b"]))
    assert not re.search(r"\b(nan|None|null|inf|undefined)\b", words_of(html), re.I)
    assert not re.search(r'="[^"]*\b(nan|None)\b', html)


def hostile_run(folder):
    pieces = [HOSTILE, "</b></div>", "\x00\x07", "\u202e", "\ud83d", "שלום", "👩‍🚀"]
    shown = text(pieces, HOSTILE, HOSTILE, context=HOSTILE)
    card = item(1, 1.0, shown, tokens=[1.0] * 7, layers=[1.0], noisy=True, id=f"{HOSTILE} 1")
    query = text(pieces, "other", HOSTILE)
    fields = {"token_losses": [1.0] * 7, "token_scores": [1.0] * 7, "said": HOSTILE}
    answers = [answer(HOSTILE, [query], [card], [], **fields)] * 5
    answers.append(answer(HOSTILE, [query, query], [card], []))
    content = record(HOSTILE, answers, layers=[HOSTILE], command=HOSTILE)
    content["run"] = {
        "model": HOSTILE,
        "data": HOSTILE,
        "examples": 1,
        "skipped": {HOSTILE: HOSTILE},
    }
    content["method"] |= dict.fromkeys(("method", "fisher", "damping_rule", "why"), HOSTILE)
    left_out = [{"name": HOSTILE, "reason": HOSTILE, "parameters": 1}]
    content["method"]["coverage"] |= {"summary": HOSTILE, "left_out": left_out}
    return write_run(folder, content, record("other"))


def test_hostile_texts_are_escaped_everywhere(tmp_path):
    run = hostile_run(tmp_path / "run")
    html = write_report(run).read_text(encoding="utf-8")
    scripts = 1 + html.count('<script type="application/json"')
    assert Page(html).tags.count("script") == scripts  # the page's own and the JSON
    page = Page(unfolded(html))
    assert page.tags.count("script") == 2  # the page's own, and the words to search in
    assert not [key for key, _ in page.attributes if key.startswith("on")]
    assert all(re.fullmatch(r"[\w.-]+", name) for name in page.all("id"))
    assert "\x00" not in html
    assert "<!--" not in html


def test_a_run_without_scores_says_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no scores in .* first with `isokron score`"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("not json", "JSONDecodeError"),
        ("[1]", "TypeError"),
        ('{"format": "isokron scores", "version": 1}', "got 'isokron scores', version 1"),
        ('{"format": "isokron scores", "version": 3}', "KeyError: 'name'"),
        (json.dumps(record(answers=[answer("q", [], 3, 3)])), "TypeError"),
    ],
)
def test_a_damaged_or_foreign_file_is_refused_by_name_and_leaves_no_page(run, content, message):
    (run / "scores" / "9.json").write_text(content)
    expected = f"9.json is damaged, or not .* of version 3 .*{message}.*`isokron score`"
    with pytest.raises(ValueError, match=expected):
        write_report(run)
    assert not (run / "report.html").exists()


def test_what_cannot_be_seen_is_made_readable():
    assert visible("a\tb\x07\u202e") == "a\tb␇⟨U+202E⟩"


NUMBERS = {
    **{128713.7: "128,714", -0.0110: "−0.0110", 0.0: "0", 1e-7: "1.00 × 10⁻⁷", 99.96: "100"},
    **{-2.5e8: "−2.50 × 10⁸", 2.5: "2.50", float("inf"): "–", 99.4: "99.4", 0.05: "0.0500"},
}
SHARES = {
    **{0.123456: "+12.3 %", -0.00041: "−0.041 %", 1e-6: "+<0.001 %", 0.0: "0 %", 12.0: "+1,200 %"},
    **{float("nan"): "–", 0.0012: "+0.120 %", 0.0005: "+0.05 %", -1.0: "−100 %", 0.001: "+0.100 %"},
}


def test_numbers_have_three_digits():
    assert [number(value) for value in NUMBERS] == list(NUMBERS.values())
    assert [percent(value).replace("\u00a0", " ") for value in SHARES] == list(SHARES.values())
    signed = {1.5: "+1.50", -1.5: "−1.50", 0.0: "0", None: "–"}
    assert [number(value, plus=True) for value in signed] == list(signed.values())


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
# opening a query puts its details into the page, which open next
UNFOLD = """(async () => {
  for (let k = 0; k < 3; k += 1) {
    document.querySelectorAll("details").forEach((details) => (details.open = true));
    await new Promise((done) => setTimeout(done, 50));
  }
})()"""


def search(browser, words):
    browser.value(f"filter.value = {words!r}; filter.dispatchEvent(new Event('input'))")


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("kind", ["plain", "hostile", "layers"])
def test_page_fits_and_nothing_complains(browser, run, tmp_path, kind, width):
    if kind == "hostile":
        run = hostile_run(tmp_path / "hostile")
    elif kind == "layers":
        layers = [f"model.layers.{k}.mlp.down_proj" for k in range(30)]
        scores = [1 / (k + 1) for k in range(30)]
        few = [item(n, 1.0, shown, layers=scores) for n, shown in enumerate([text(), image("1")])]
        answers = [answer("q", [text()], few[:1], []), answer("q", [image("1")], few[1:], [])]
        run = write_run(tmp_path / "layers", record(answers=answers, layers=layers))
    browser.open(write_report(run), width)
    browser.value(UNFOLD)
    assert browser.value("document.querySelectorAll('.lazy > script').length") == 0
    assert browser.value(OVERFLOW) <= 0
    assert browser.errors == []
    assert not browser.value(r"/\b(nan|NaN|undefined|None|null)\b/.test(document.body.innerText)")


def test_a_page_of_100_queries_opens_with_few_nodes(browser, tmp_path):
    path = write_report(write_run(tmp_path / "run", many()))
    browser.open(path)
    # all queries together have more than 400,000 tokens
    assert browser.value("document.querySelectorAll('*').length") < 8_000
    assert browser.value("queries.length") == 100
    assert browser.value("document.querySelectorAll('.card').length") == 20
    browser.value("queries[99].querySelector('summary').click()")
    browser.value("new Promise((done) => setTimeout(done, 100))")
    assert browser.value("queries[99].querySelectorAll('.card').length") == 20
    assert browser.value("queries[99].querySelectorAll('.tokens b').length") == 4_000
    assert browser.errors == []


def test_tokens_are_cut_where_they_were_in_any_script(browser, tmp_path):
    pieces = ["a", "", "é", "👩‍🚀", "שלום", "\n", "\x07", "</b>", ""]
    shares = [1.0, 2.0, 3.0, 0.0, -1.0, 0.5, 0.5, 0.1, -7.0]
    few = answer("q", [text()], [item(1, 1.0, text(pieces), tokens=shares)], [], positive=100.0)
    browser.open(write_report(write_run(tmp_path / "run", record(answers=[few]))))
    tokens = "[...document.querySelectorAll('.cards .tokens b')]"
    read = f"{tokens}.map((b) => [b.textContent, b.dataset.s])"
    assert [(piece, tip.replace("\u00a0", " ")) for piece, tip in browser.value(read)] == [
        ("a", "+1.00 %"),
        ("é", "+5.00 %"),  # bytes of one character count together
        ("👩‍🚀", "0 %"),
        ("שלום", "−1.00 %"),
        ("\n", "+0.500 %"),
        ("␇", "+0.500 %"),
        ("</b>", "+0.100 %"),
        ("∎", "−7.00 %"),
    ]
    assert browser.value("document.querySelector('.cards .tokens [tabindex]').textContent") == "∎"


def test_script_and_page_write_numbers_alike(browser, run):
    browser.open(write_report(run))
    values = [value for value in NUMBERS if abs(value) < float("inf")]
    assert browser.value(f"{values}.map(number)") == [NUMBERS[value] for value in values]
    shares = [share for share in SHARES if share == share]
    assert browser.value(f"{shares}.map(percent)") == [percent(share) for share in shares]


def test_colours_are_symmetric_and_one_outlier_does_not_pale_the_others(browser, run):
    browser.open(write_report(run))
    shares = [0.01 * k for k in range(100)]
    scale = browser.value(f"scaleOf([...{shares}, -1e6, NaN])")
    assert 0.9 < scale < 1
    levels = browser.value(f"[-1e6, {scale}, 0.05, NaN].map((x) => level(x, {scale}, 'pn'))")
    assert levels == ["n5", "p5", "", ""]
    assert browser.value("level(1, 0, 'pn')") == ""


def test_keys_reach_tokens_and_read_their_shares(browser, run):
    browser.open(write_report(run))
    browser.press("Tab")
    assert browser.value("document.activeElement.className") == "skip"
    browser.press("Enter")
    focus = "document.activeElement.closest('.cards .tokens') !== null"
    for _ in range(15):
        browser.press("Tab")
        if browser.value(focus):
            break
    assert browser.value("document.activeElement.textContent") == " hold"
    assert browser.value("tip.textContent").endswith("+12.5\u00a0%")
    browser.press("ArrowLeft")
    assert browser.value("tip.textContent") == '"We"  +5.00\u00a0%'
    browser.press("Tab")
    assert browser.value("document.activeElement.closest('.tokens') === null")  # one stop a text
    assert browser.value("tip.textContent") == ""
    browser.value("document.querySelectorAll('.one .tokens b')[1].click()")
    assert browser.value("tip.textContent") == '" hold"  loss 2.00 nats, +60.0\u00a0%'


def test_search_leaves_queries_and_examples_with_all_words(browser, run):
    browser.open(write_report(run))
    search(browser, "PICTURE label 2")
    assert browser.value("queries.filter((query) => !query.hidden).length") == 2  # 2 and 5
    assert browser.value("matches.textContent") == "2 of 11 queries, 0 examples"
    search(browser, "id-9 truths")
    assert browser.value("matches.textContent") == "2 of 11 queries, 2 examples"
    visible_cards = "[...queries[{}].querySelectorAll('.card')].filter((card) => !card.hidden)"
    (card,) = browser.value(f"{visible_cards.format(0)}.map((card) => card.id)")
    assert card == "set-first.0.against.9"
    # a query that is opened later shows the matching examples only
    browser.value("queries[1].open = true; new Promise((done) => setTimeout(done, 50))")
    assert browser.value(f"{visible_cards.format(1)}.length") == 1
    search(browser, "")
    assert browser.value("queries.every((query) => !query.hidden)")
    assert browser.value(f"{visible_cards.format(0)}.length") == 3


def test_cards_can_be_ordered_by_share_per_token_or_cosine(browser, run):
    browser.open(write_report(run))
    cards = "[...queries[0].querySelectorAll('.for .card')]"
    order = f"{cards}.map((card) => [card.id.at(-1), card.innerText[0]])"
    for key, expected in (("share", "78"), ("per_token", "78"), ("cosine", "87"), ("share", "78")):
        browser.value(f"document.querySelector('[value={key}]').click()")
        ids, ranks = zip(*browser.value(order), strict=True)
        assert ("".join(ids), "".join(ranks)) == (expected, "12")


def test_the_command_can_be_copied(browser, run):
    browser.open(write_report(run))
    browser.value("document.querySelector('.copy').click()")
    assert browser.value("getSelection().toString()").startswith("isokron attribute runs/mine")
    browser.value("new Promise((done) => setTimeout(done, 100))")
    assert browser.value("document.querySelector('.copy').innerText") in ("Copied", "Selected")


def test_a_link_unfolds_what_it_leads_to(browser, run):
    path = write_report(run)
    browser.open(Path(f"{path}#set-pictures.5.for.2"))
    assert browser.value("document.querySelector('.here').closest('details').open")
    assert 0 <= browser.value("document.querySelector('.here').getBoundingClientRect().top") < 900
    search(browser, "nothing")
    browser.value("location.hash = 'set-pictures.6.for.2'")
    query = "document.getElementById('set-pictures.6.for.2').closest('.query')"
    assert browser.value(f"new Promise((done) => setTimeout(() => done(!{query}.hidden), 50))")
    assert browser.value(f"{query}.open")
    browser.value("location.hash = 'example.7'")
    assert browser.value("new Promise((done) => setTimeout(() => done(repeated.open), 50))")


def test_dark_pages_are_dark_and_tokens_stay_legible(browser, run):
    path = write_report(run)
    for dark in (False, True):
        browser.open(path, dark=dark)
        assert min(browser.value(CONTRASTS)) >= 4.5
        for place in ("body", "button"):
            ground = f"getComputedStyle(document.querySelector('{place}')).backgroundColor"
            assert (browser.value(f"{LIGHT}({ground})") < 0.1) == dark


# relative luminance of a colour over the page's paper, and contrasts of all levels with the ink
LIGHT = """((colour) => {
  const pen = document.createElement("canvas").getContext("2d");
  for (const fill of [getComputedStyle(document.body).backgroundColor, colour]) {
    pen.fillStyle = fill;
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


def test_without_scripts_the_first_query_can_be_read(browser, run):
    browser.open(write_report(run), scripts=False)
    browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert browser.value("document.querySelector('.tools').hidden")
    assert browser.value("document.querySelectorAll('.query').length") == 11
    assert browser.value("document.querySelectorAll('.query .card').length") == 3
    assert "".join(WORDS) in browser.value("document.querySelector('.card .tokens').textContent")
    assert browser.value("document.getElementById('tip')") is None
