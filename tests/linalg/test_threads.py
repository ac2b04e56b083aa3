"""Decompositions on several threads give the results of a single one."""

import subprocess
import sys

import pytest
import torch

from isokron.linalg import threads

SCRIPT = """
import torch
from isokron.linalg import eigh, follow, threads
torch.set_num_threads(2)
torch.manual_seed(0)
half = torch.randn(5, 200, 220)
batch = half @ half.mT
print(threads.worth_threads(batch))
values, vectors = eigh(batch)
torch.testing.assert_close(vectors * values.unsqueeze(-2) @ vectors.mT, batch, rtol=1e-3, atol=1e-2)
again = eigh(batch)
assert torch.equal(values, again[0]) and torch.equal(vectors, again[1])
basis = follow(batch, vectors)
torch.testing.assert_close(basis.mT @ basis, torch.eye(200).expand(5, 200, 200), atol=1e-4, rtol=0)
rayleigh = (basis.mT @ batch @ basis).diagonal(dim1=1, dim2=2)
assert (rayleigh.diff() <= 1e-2).all()
bad = batch.clone()
bad[2, 0, 0] = torch.nan
values, _ = eigh(bad)
assert values[2].isnan().all() and values[[0, 1, 3, 4]].isfinite().all()
assert torch.get_num_threads() == 2
"""


def test_a_batch_on_two_cores_is_decomposed_right_and_the_same_every_time() -> None:
    """In a process of its own: the tests of this one run on a single core."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"]


def test_only_batches_of_large_matrices_on_the_cpu_are_worth_threads() -> None:
    assert threads.worth_threads(torch.zeros(3, 200, 200))
    assert not threads.worth_threads(torch.zeros(200, 200))
    assert not threads.worth_threads(torch.zeros(3, 8, 8))
    assert not threads.worth_threads(torch.zeros(3, 200, 200, device="meta"))


@pytest.mark.parametrize("cores", [1, 2])
def test_results_are_in_order_with_and_without_threads(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.arange(6.0).view(6, 1, 1).expand(6, 4, 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    sums = threads.map_matrices(lambda a, b: float((a + b).sum()), batch, batch)
    assert sums == [32.0 * i for i in range(6)]
    monkeypatch.setattr(threads, "_thread_limits", tuple)
    assert threads.map_matrices(torch.trace, batch)[5] == 20


def test_an_error_in_a_thread_is_raised_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    with pytest.raises(torch.linalg.LinAlgError):
        threads.map_matrices(torch.linalg.cholesky, -torch.eye(3).expand(4, 3, 3))
