"""Every example runs and does what it says; so does every Python block of the README and docs."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import forked

ROOT = Path(__file__).parent.parent
ARGUMENTS = {
    "train_cnn.py": ["--steps", "40"],
    "train_huggingface.py": ["--steps", "30", "--folder", "run"],
    "explain.py": ["pages"],
}
PACKAGES = {  # beside those that isokron needs
    "attribute_trainer.py": ("transformers", "accelerate"),
    "explain.py": ("transformers",),
    "finetune_lora.py": ("trl", "peft", "datasets"),
    "train_accelerate.py": ("accelerate", "transformers"),
    "train_cnn.py": ("sklearn",),
    "train_flax.py": ("flax", "optax"),
    "train_huggingface.py": ("transformers", "accelerate"),
    "train_lightning.py": ("lightning", "sklearn"),
}
SAYS = {  # what an example prints beside its losses
    "attribute_trainer.py": "'the dog barks' was taught by 'the dog barks'",
    "explain.py": "perceptron: 0 (",  # its first query is a training example, the best proponent
    "train_accelerate.py": "the same weights: True",
    "train_lightning.py": "the same weights: True",
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


def losses_of(printed: str) -> list[float]:
    return [float(value) for value in re.findall(r"loss (\d+\.\d+)", printed)]


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_runs_and_does_what_it_says(
    name: str, python: forked.Server, tmp_path: Path
) -> None:
    for package in PACKAGES.get(name, ()):
        pytest.importorskip(package, reason=f"pip install {package}")
    path = ROOT / "examples" / name
    assert len(path.read_text().splitlines()) < 100
    printed = python.run(path, *ARGUMENTS.get(name, []), folder=tmp_path).out
    assert SAYS.get(name, "") in printed
    if name == "explain.py":
        assert len(list((tmp_path / "pages").glob("*/report.html"))) == 3
        return
    losses = losses_of(printed)
    assert losses[-1] < 0.6 * losses[0], printed


def test_example_of_the_trainer_continues_where_it_stopped(
    python: forked.Server, tmp_path: Path
) -> None:
    for package in PACKAGES["train_huggingface.py"]:
        pytest.importorskip(package, reason=f"pip install {package}")
    path = ROOT / "examples" / "train_huggingface.py"
    first, second = (
        losses_of(python.run(path, "--steps", steps, "--folder", "run", folder=tmp_path).out)
        for steps in (20, 25)
    )
    assert second[: len(first)] == first  # the Trainer's log of the first run
    assert len(second) == len(first) + 1
    assert second[-1] < first[-1]


@pytest.mark.parametrize("shard", [[], ["--shard"]], ids=["ddp", "fsdp2"])
def test_distributed_example_runs_under_torchrun_and_resumes_on_one_process(
    shard: list[str], python: forked.Server, tmp_path: Path
) -> None:
    path = ROOT / "examples" / "train_distributed.py"
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    options = ["--steps", "20", "--checkpoint", "run"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, *launch, *options, *shard],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    losses = losses_of(ended.stdout)
    assert losses[-1] < 0.6 * losses[0]
    printed = python.run(path, *options, folder=tmp_path).out
    assert "step 20 loss" in printed
    assert losses_of(printed)[0] < 1.2 * losses[-1]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_of_a_page_runs(code: str, python: forked.Server, tmp_path: Path) -> None:
    """A page may leave out what the reader has: a model, batches, data and a loss."""
    given = (
        "import torch, isokron\nfrom torch import nn\n"
        "model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 2))\n"
        "batches = [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(3)]\n"
        "train_set = test_set = [pair for batch in batches for pair in zip(*batch)]\n"
        "loss_fn = nn.functional.cross_entropy\n"
    )
    (tmp_path / "block.py").write_text(given + code)
    python.run("block.py", folder=tmp_path)
