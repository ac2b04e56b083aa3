"""Pages: links lead somewhere, the navigation has every page, the reference every public name."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

import isokron

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
GENERATED = {"changelog.md", "contributing.md", "examples.md"}  # by docs/site_hooks.py
ENTRY = re.compile(
    r"^(?::::|###) (isokron\.\S+)(?:\n {4}options: \{members: \[(.*)\]\})?", re.MULTILINE
)
MODULES = (
    "attribution",
    "curvature",
    "distributed",
    "jax",
    "kernels",
    "linalg",
    "losses",
    "operators",
    "optim",
    "race",
    "tasks",
)
METHODS = {
    "AdamW": "adamw.md",
    "Muon": "muon.md",
    "SignDescent": "muon.md",
    "Shampoo": "shampoo.md",
    "SOAP": "shampoo.md",
    "Katie": "katie.md",
    "Quad": "white_kron.md",
    "Skew": "white_kron.md",
    "NaturalGradient": "natural.md",
}


def prose(page: Path) -> str:
    """The text without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of its headings, by the rule of GitHub, which mkdocs.yml sets for the site too."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def public_names(module: str) -> list[str]:
    """`__all__` of isokron or of a module in it, read from its source."""
    path = ROOT / "src/isokron" / module
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    raise AssertionError(f"{path} has no __all__")


def settings_table(page: Path) -> list[dict[str, str]]:
    """Rows of the table of arguments under "## Settings": cells by the heads of their columns."""
    section = page.read_text().partition("\n## Settings\n")[2].partition("\n## ")[0]
    table = re.search(r"^\| argument \|.*\n(?:\|.*\n)+", section, re.MULTILINE)
    assert table, f"no table of arguments under Settings in {page.name}"
    heads, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()
    )
    return [dict(zip(heads, row, strict=True)) for row in rows]


def reference_entries() -> dict[str, str]:
    """Documented name → the members that its page lists, separated by commas."""
    pages = [page.read_text() for page in (DOCS / "reference").glob("*.md")]
    return {name: members for page in pages for name, members in ENTRY.findall(page)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_of_a_page_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), target


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"^ +- .+: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert pages - set(listed) == set(), "pages to add to nav of mkdocs.yml"
    assert set(listed) - pages == GENERATED, "nav of mkdocs.yml names pages that do not exist"
    assert len(listed) == len(set(listed)), "nav of mkdocs.yml names a page twice"


@pytest.mark.parametrize("module", ["", *MODULES])
def test_every_public_name_has_an_entry_in_the_reference(module: str) -> None:
    """Under its own module, or where it is most often imported from."""
    entries = reference_entries()
    missing = [
        name
        for name in public_names(module)
        if name not in ("__version__", *MODULES)
        and not {f"isokron.{name}", f"isokron.losses.{name}"} & set(entries)
        and not any(re.fullmatch(rf"isokron\.{module}\.(.+\.)?{name}", entry) for entry in entries)
    ]
    assert missing == [], f"names of isokron.{module} to add to docs/reference"


def test_all_modules_are_documented() -> None:
    lower = {name for name in public_names("") if (ROOT / "src/isokron" / name).is_dir()}
    assert lower | {"losses"} == set(MODULES)


@pytest.mark.parametrize("name", reference_entries())
def test_entries_of_the_reference_exist(name: str) -> None:
    documented = resolve_name(name)
    for member in filter(None, reference_entries()[name].split(", ")):
        assert hasattr(documented, member), member


@pytest.mark.parametrize("name", METHODS)
def test_settings_of_a_page_are_the_arguments_of_its_method(name: str) -> None:
    """A column has the name of the class where a page has several; "–": not an argument of it."""
    rows = settings_table(DOCS / METHODS[name])
    column = name if name in rows[0] else "default"
    listed = [(row["argument"], row[column]) for row in rows if row[column] != "–"]
    arguments = [
        (f"`{argument.name}`", f"`{argument.default!r}`")
        for argument in inspect.signature(getattr(isokron, name)).parameters.values()
        if argument.name not in ("params", "model") and argument.kind != argument.VAR_KEYWORD
    ]
    assert sorted(listed) == sorted(arguments)


def test_citation_has_the_version() -> None:
    assert f"\nversion: {isokron.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_site_builds_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    pytest.importorskip("mkdocstrings", reason="install the site's packages: make docs")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True)
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) >= len(PAGES) - 2  # README.md and CHANGELOG.md are not, or not alike, in it
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=\"?(?:https?:)?//")
    styles = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")
    for page in pages:
        assert not loads.findall(page.read_text()), page
    for sheet in tmp_path.rglob("*.css"):
        assert not styles.findall(sheet.read_text()), sheet
