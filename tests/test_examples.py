"""Every example runs and does what it says; so does every Python block of the README and docs."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parent.parent
ARGUMENTS = {
    "train_cnn.py": ["--steps", "40"],
    "train_huggingface.py": ["--steps", "30"],
    "explain.py": ["pages"],
}
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[forked.Server]:
    """Each block and each example has a process of its own, and imports isokron itself."""
    heavy = (*forked.TORCH, "transformers.models.gpt2.modeling_gpt2", "sklearn.datasets", "optax")
    folder = tmp_path_factory.mktemp("python")
    with forked.server(folder, heavy, HF_HUB_OFFLINE="1") as server:
        yield server


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_does_what_it_says(
    name: str, python: forked.Server, tmp_path: Path
) -> None:
    path = ROOT / "examples" / name
    assert len(path.read_text().splitlines()) < 150
    printed = python.run(path, *ARGUMENTS.get(name, []), folder=tmp_path).out
    if name == "explain.py":  # its first query is a training example, which explains itself best
        assert "perceptron: 0 (" in printed
        assert len(list((tmp_path / "pages").glob("*/report.html"))) == 3
        return
    losses = [float(value) for value in re.findall(r"loss (\d+\.\d+)", printed)]
    assert losses[-1] < 0.6 * losses[0], printed


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_of_a_page_runs(code: str, python: forked.Server, tmp_path: Path) -> None:
    """A page may leave out `model`, `batches` and `loss_fn`: the reader has them already."""
    given = (
        "import torch, isokron\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))\n"
        "batches = [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(3)]\n"
        "loss_fn = nn.functional.cross_entropy\n"
    )
    (tmp_path / "block.py").write_text(given + code)
    python.run("block.py", folder=tmp_path)
