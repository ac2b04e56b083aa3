"""Several decompositions at a time give what one after the other gives."""

import subprocess
import sys

import pytest
import torch

from isokron.linalg import eigh, follow, threads

SCRIPT = """
import torch
from isokron.linalg import eigh, follow, threads
torch.set_num_threads(2)
torch.manual_seed(0)
half = torch.randn(5, 200, 220)
batch = half @ half.mT
print(threads.singly(batch))
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


def test_matrices_take_turns_of_their_own_only_on_the_cpu_and_when_large() -> None:
    assert threads.singly(torch.zeros(3, 200, 200))
    assert not threads.singly(torch.zeros(200, 200))
    assert not threads.singly(torch.zeros(3, 8, 8))
    assert not threads.singly(torch.zeros(3, 200, 200, device="meta"))


@pytest.mark.parametrize("cores", [1, 2])
def test_each_keeps_the_order_with_and_without_threads(
    cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.arange(6.0).view(6, 1, 1).expand(6, 4, 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: cores)
    sums = threads.each(lambda a, b: float((a + b).sum()), batch, batch)
    assert sums == [32.0 * i for i in range(6)]
    monkeypatch.setattr(threads, "_limits", tuple)
    assert threads.each(torch.trace, batch)[5] == 20


def test_an_error_in_a_thread_is_the_callers() -> None:
    pool = threads._pool(2, 0)
    with pytest.raises(torch.linalg.LinAlgError):
        list(pool.map(torch.linalg.cholesky, -torch.eye(3).expand(4, 3, 3)))


def test_threads_leave_eigh_and_follow_their_shapes() -> None:
    batch = torch.eye(4).expand(2, 3, 4, 4)
    assert eigh(batch)[0].shape == (2, 3, 4)
    assert follow(batch, batch).shape == (2, 3, 4, 4)
