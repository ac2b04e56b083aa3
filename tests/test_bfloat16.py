"""Machines on which a bfloat16 product is an illegal instruction: noticed, and tests run there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from isokron.bfloat16 import (
    PRODUCT,
    REMEDY,
    Bfloat16Unusable,
    bfloat16_environment,
    product_survives,
)

TESTS = Path(__file__).parent


@pytest.fixture
def illegal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children of this process are on such a machine."""
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(TESTS / "illegal_bfloat16"))


def test_in_this_test_run_products_survive() -> None:
    assert bfloat16_environment() == {}


@pytest.mark.usefixtures("illegal")
def test_an_illegal_instruction_is_noticed_and_avoided() -> None:
    before = dict(os.environ)
    assert bfloat16_environment() == REMEDY
    assert dict(os.environ) == before


@pytest.mark.usefixtures("illegal")
def test_where_nothing_helps_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ILLEGAL_BFLOAT16", "1")
    with pytest.raises(Bfloat16Unusable, match="use float32"):
        bfloat16_environment()


def test_a_broken_torch_is_not_taken_for_a_broken_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('no torch here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="no torch here"):
        product_survives()


@pytest.mark.usefixtures("illegal")
def test_a_test_run_on_such_a_machine_passes() -> None:
    test = "test_parameters_keep_their_dtype_and_resume_in_it[dtype0-muon]"
    name = f"{TESTS / 'optim' / 'test_contract.py'}::{test}"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.usefixtures("illegal")
def test_a_benchmark_on_such_a_machine_starts_anew(tmp_path: Path) -> None:
    script = tmp_path / "benchmark.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(TESTS.parent / 'benchmarks')!r})\n"
        "from timing import restart_for_bfloat16\n"
        "restart_for_bfloat16()\n"
        f"{PRODUCT}\n"
        "print(sys.argv[1])\n"
    )
    done = subprocess.run([sys.executable, script, "still"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "still\n"), done.stderr
