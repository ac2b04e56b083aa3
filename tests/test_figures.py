"""Every figure of README.md and docs/ is in a record of docs/benchmarks, at the digits written."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(BENCHMARKS))

import bench  # noqa: E402
import figures  # noqa: E402


@pytest.fixture(scope="module")
def sources() -> figures.Sources:
    """Rows of all records that pages name; read by a process of its own.

    Scripts such as benchmarks/timing.py would hide packages of these names from other tests.
    """
    command = [sys.executable, str(BENCHMARKS / "figures.py"), "--sources"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("page", figures.pages())
def test_figures_of_a_page_are_in_the_records_it_names(page: str, sources: figures.Sources) -> None:
    assert figures.complaints(page, figures.pages()[page], sources) == []


def changed(line: figures.Line, match: re.Match[str]) -> figures.Line:
    """A line in which the last digit of one number is another one."""
    digit = str((int(line.text[match.end() - 1]) + 5) % 10)
    text = line.text[: match.end() - 1] + digit + line.text[match.end() :]
    return figures.Line(**{**vars(line), "text": text})


@pytest.mark.parametrize("page", figures.pages())
def test_a_changed_digit_in_a_table_is_noticed(page: str, sources: figures.Sources) -> None:
    """At most one in fifty agrees with another row: rows of one table may be nearly equal."""
    text = figures.pages()[page]
    mutants = [
        changed(line, match)
        for line in figures.lines_of(page, text)
        if line.by_row
        for match in line.figures()
        if match[0] not in line.settings and "." in match[0]
    ]
    unnoticed = [mutant for mutant in mutants if not figures.missing(mutant, sources)]
    assert len(unnoticed) <= len(mutants) / 50, unnoticed


def test_most_changed_digits_of_sentences_are_noticed(sources: figures.Sources) -> None:
    """A number in a sentence may agree by chance with another one of the same records."""
    mutants = [
        changed(line, match)
        for page, text in figures.pages().items()
        for line in figures.lines_of(page, text)
        if line.sources and not line.by_row
        for match in line.figures()
        if match[0] not in line.settings
    ]
    unnoticed = [mutant for mutant in mutants if not figures.missing(mutant, sources)]
    assert len(mutants) > 100
    assert len(unnoticed) < len(mutants) / 2


PAGE = """# Title

<!-- figures: table -->

| | loss | time |
|---|---|---|
| SOAP | 1.25 | 0.40 |

SOAP ends at 1.3, with `lr=0.017` ([1802.09568](https://arxiv.org/abs/1802.09568)) and torch 2.13.
"""
ROWS = {"table": ["| soap | 1.251 | 0.4 |", "| katie | 1.26 | 1.0 |", "| katie | 1.437 |"]}


def test_numbers_agree_at_the_digits_of_the_page() -> None:
    assert figures.complaints("page.md", PAGE, ROWS) == []


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("1.25 |", "1.24 |", "page.md:7: no row of table has 1.24"),
        ("0.40 |", "1.00 |", "page.md:7: no row of table has 1.00"),  # of the other row
        ("1.3,", "1.2,", "page.md:9: nothing of table has 1.2"),
        ("figures: table", "figures: tables", "page.md:7: no records tables in docs/benchmarks"),
        ("# Title", "An AUC of 0.9.", "page.md:1: 0.9 under no marker of figures or settings"),
    ],
)
def test_a_wrong_figure_is_named_with_its_line(old: str, new: str, message: str) -> None:
    assert PAGE.count(old) == 1
    assert message in figures.complaints("page.md", PAGE.replace(old, new), ROWS)


def test_claims_settings_and_derived_numbers() -> None:
    page = PAGE.replace("figures: table", "claims: table").replace("| 0.40 |", "| 1.437 |")
    assert figures.complaints("page.md", page, ROWS) == ["page.md:7: nothing of table has 1.437"]
    page = page.replace("| SOAP |", "| SOAP or Katie |")
    assert figures.complaints("page.md", page, ROWS) == []
    saved = page + "\n<!-- derived: 0.19 = 1.437 - 1.25 -->\n\nIt gains 0.19 at lr 0.03.\n"
    assert figures.complaints("page.md", saved, ROWS) == ["page.md:13: nothing of table has 0.03"]
    listed = saved.replace("<!-- derived", "<!-- settings: 0.03 -->\n<!-- derived")
    assert figures.complaints("page.md", listed, ROWS) == []
    for wrong in (listed.replace("gains 0.19", "gains 0.18"), listed.replace("1.437 -", "1.447 -")):
        assert figures.complaints("page.md", wrong, ROWS) != []


def test_a_heading_ends_what_a_marker_says() -> None:
    page = PAGE + "\n## Next\n\nIt gains 1.25.\n"
    assert figures.complaints("page.md", page, ROWS) == [
        "page.md:13: 1.25 under no marker of figures or settings"
    ]


def test_every_benchmark_is_on_the_page_of_benchmarks() -> None:
    """And in the list of `make bench`, or among those that are started by hand."""
    scripts = {path.stem: path.read_text() for path in BENCHMARKS.glob("*.py")}
    runnable = {name for name, text in scripts.items() if "def main()" in text}
    parts = {
        "bench",
        "figures",
        "lds_peers",
        "kronfluence_images",
        "kronfluence_scores",
        "pretrained",
    }
    listed = {script.name for script in bench.SCRIPTS} | set(bench.BY_HAND)
    assert runnable - parts == listed
    page = figures.pages()["docs/benchmarks.md"]
    assert [name for name in listed if f"`{name}.py`" not in page] == []


def test_the_small_version_of_a_benchmark_never_writes_over_a_record(tmp_path: Path) -> None:
    """`recorded` writes where ISOKRON_BENCHMARKS says, one run per command line."""
    script = (
        "import sys; sys.argv = ['x.py', '--only', 'a']\n"
        "from records import FOLDER, recorded\n"
        "for value in (1.5, 2.5):\n"
        "    with recorded('trial'):\n"
        "        print(f'a {value}')\n"
        "print(FOLDER)\n"
    )
    environment = {**os.environ, "ISOKRON_BENCHMARKS": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, cwd=BENCHMARKS, env=environment
    )
    assert done.stdout.splitlines() == ["a 1.5", "a 2.5", str(tmp_path)]
    (run,) = json.loads((tmp_path / "trial.json").read_text())["runs"]
    assert (run["arguments"], run["printed"]) == ("--only a", ["a 2.5"])
    assert not (figures.RECORDS / "trial.json").exists()
