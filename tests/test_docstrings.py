"""Docstrings and the reference: arguments that exist, one by one, and every name the pages use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType

import pytest

from test_docs import DOCS, ROOT, reference_entries

SOURCE = ROOT / "src/isokron"
TREES = {path: ast.parse(path.read_text()) for path in sorted(SOURCE.rglob("*.py"))}
CLASSES = {
    node.name: node
    for tree in TREES.values()
    for node in ast.walk(tree)
    if isinstance(node, ast.ClassDef)
}
# to the section's end, which is a line without indentation or the end
SECTION = re.compile(r"^Args:\n((?: .*\n?|\n)*)", re.MULTILINE)
# text between backticks, and a name at its beginning
INLINE = re.compile(r"`(isokron(?:\.\w+)+)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

Documented = ast.FunctionDef | ast.ClassDef


def parameters(node: Documented) -> set[str]:
    """Names of arguments; of a class, those of its own or inherited __init__, or its fields."""
    if isinstance(node, ast.FunctionDef):
        a = node.args
        given = (*a.posonlyargs, *a.args, *a.kwonlyargs, a.vararg, a.kwarg)
        return {arg.arg for arg in given if arg is not None} - {"self", "cls"}
    inits = [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    if inits:
        return parameters(inits[0])
    names = {ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)}
    bases = [CLASSES[name] for name in map(ast.unparse, node.bases) if name in CLASSES]
    return names.union(*map(parameters, bases))


def entries(docstring: str) -> list[str]:
    """What stands before the colon of every entry of the section Args; a line that has none."""
    sections = SECTION.findall(docstring)
    lines = [line for section in sections for line in section.splitlines()]
    return [re.split(r":(?: |$)", line[4:])[0] for line in lines if re.match(r" {4}\S", line)]


def wrong_entries(node: Documented) -> list[str]:
    """Entries of Args that are not one argument, and arguments explained in another's entry."""
    docstring, names = ast.get_docstring(node) or "", parameters(node)
    hidden = [
        x for x in re.findall(r"`(\w+)`: ", "".join(SECTION.findall(docstring))) if x in names
    ]
    return [x for x in entries(docstring) if x.lstrip("*") not in names] + hidden


def documented_nodes(tree: ast.Module) -> Iterator[Documented]:
    return (x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef | ast.ClassDef))


def names_used(page: str) -> set[str]:
    """Names of isokron in a page's Python, where they are imported or used, and in its prose."""
    used, homes = set(INLINE.findall(page)), {"isokron": "isokron"}
    for tree in map(ast.parse, BLOCK.findall(page)):
        nodes = list(ast.walk(tree))
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("isokron."):
                homes |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
        for chain in (ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)):
            first, _, rest = chain.partition(".")
            if first in homes and re.fullmatch(r"[\w.]+", rest):
                used.add(f"{homes[first]}.{rest}")
    return used | set(homes.values())


def is_in_reference(name: str) -> bool:
    """Whether the reference has it, or its class, by this name or another of the same object."""
    value = resolve_name(name)
    if isinstance(value, ModuleType) or any(value is resolve_name(x) for x in reference_entries()):
        return True
    owner = name.rpartition(".")[0]
    return isinstance(resolve_name(owner), type) and is_in_reference(owner)


@pytest.mark.parametrize("path", TREES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_every_entry_of_args_is_one_parameter(path: Path) -> None:
    """The site shows an entry of two names, `fused, foreach`, as one required argument."""
    wrong = {
        f"{node.name}: {x}" for node in documented_nodes(TREES[path]) for x in wrong_entries(node)
    }
    assert wrong == set(), "give each argument a line of its own, under its name"


def test_wrong_entries_are_found() -> None:
    text = '''
def f(a, b, *, c=1, **more):
    """Line.

    Args:
        a: one. `b`: another.
        b, c: joint,
            over: two lines.
        d: of nothing.
        **more: others.

    Returns: nothing.
    """
'''
    assert [wrong_entries(x) for x in documented_nodes(ast.parse(text))] == [["b, c", "d", "b"]]
    # enough are read for the test above to mean something
    read = [
        x
        for t in TREES.values()
        for n in documented_nodes(t)
        for x in entries(ast.get_docstring(n) or "")
    ]
    assert len(read) > 300


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.name)
def test_names_on_a_page_are_in_the_reference(page: Path) -> None:
    used = sorted(names_used(page.read_text()))
    # kernels need triton to be imported, and are called by isokron.kernels only
    missing = [x for x in used if ".triton_" not in x and not is_in_reference(x)]
    assert missing == [], "names to add to docs/reference, or to leave out of the page"


def test_names_on_pages_are_found() -> None:
    page = """`isokron.curvature.Curvature.load(path)` and `isokron.plan`

```python
import isokron
from isokron import tasks
from isokron.plan import plan as cost

tasks.load("digits")
cost(isokron.SOAP(model.parameters()).state, "isokron.nothing")
```
"""
    found = {"isokron.curvature.Curvature.load", "isokron.plan", "isokron", "isokron.tasks"}
    assert names_used(page) == found | {"isokron.plan.plan", "isokron.tasks.load", "isokron.SOAP"}
    assert all(map(is_in_reference, found))
    assert not is_in_reference("isokron.plan.measured_speed")
