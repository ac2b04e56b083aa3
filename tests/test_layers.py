"""Imports point one way, and importing the package costs nothing."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import isokron

ROOT = Path(isokron.__file__).parent
# who may import whom, besides themselves
ALLOWED = {
    "kernels": set(),
    "linalg": {"kernels"},
    "operators": {"kernels", "linalg"},
    "distributed": set(),
    "curvature": {"kernels", "linalg", "operators", "distributed"},
    "optim": {"kernels", "linalg", "operators", "curvature", "distributed"},
    "jax": set(),
    "tasks": set(),
    "report": set(),
    "attribution": {
        "kernels",
        "linalg",
        "operators",
        "curvature",
        "distributed",
        "optim",
        "tasks",
        "report",
    },
    "race": {"optim", "tasks", "report"},
    "cli": {
        "kernels",
        "curvature",
        "distributed",
        "optim",
        "tasks",
        "report",
        "race",
        "attribution",
    },
}
OPTIONAL = {"triton", "jax", "transformers", "datasets", "faiss", "matplotlib", "sklearn"}


def imports(path: Path) -> set[str]:
    """Every module a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_folders_import_only_what_they_may() -> None:
    for folder in (path for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"):
        allowed = ALLOWED[folder.name] | {folder.name, "_version", "__version__"}
        for path in folder.rglob("*.py"):
            used = {name.split(".")[1] for name in imports(path) if name.startswith("isokron.")}
            wrong = {name for name in used if (ROOT / name).is_dir()} - allowed
            assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}"


def test_every_public_name_is_there() -> None:
    for name in isokron.__all__:
        assert getattr(isokron, name) is not None
    assert set(isokron.__all__) <= set(dir(isokron))


def loaded_after(code: str) -> set[str]:
    """The top-level modules a fresh interpreter has loaded after running the code."""
    script = f"{code}\nimport sys; print(*{{name.split('.')[0] for name in sys.modules}})"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_importing_isokron_loads_no_torch() -> None:
    assert not {"torch", "numpy", "rich", "typer"} & loaded_after("import isokron")


def test_importing_the_optimizers_loads_nothing_optional() -> None:
    assert not (OPTIONAL | {"rich", "typer"}) & loaded_after("import isokron; isokron.Muon")


def test_the_command_line_starts_without_torch() -> None:
    assert not (OPTIONAL | {"torch"}) & loaded_after("import isokron.cli")


@pytest.mark.parametrize(("name", "hint"), [("muon", "did you mean Muon"), ("Nope", "it has SOAP")])
def test_a_name_that_is_not_there_is_told_what_is(name: str, hint: str) -> None:
    with pytest.raises(AttributeError, match=hint):
        getattr(isokron, name)


def test_isokron_jax_says_what_to_install() -> None:
    hidden = "import importlib.util as u; f = u.find_spec; "
    hidden += "u.find_spec = lambda name: None if name == 'jax' else f(name); import isokron.jax"
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    assert done.stderr.endswith("run: pip install 'isokron[jax]'\n")
