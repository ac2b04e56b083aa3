"""Symmetric products: Newton–Schulz and Gram matrices, for benchmarks/kernels.py."""

from collections.abc import Callable
from functools import partial

import torch
from timing import interleaved
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from isokron.linalg import gram_, newton_schulz, quickest
from isokron.polynomials import schedule

CLASSIC = schedule("classic", 5)
SHAPES = [(512, 512), (512, 2048), (1024, 1024), (1024, 4096), (2048, 2048)]
SLOW = 2**20  # without bfloat16 units torch's loop is slow: run once up to this size, then skipped


def plain_loop(matrix: Tensor) -> Tensor:
    """Five classic steps in the precision of the matrix."""
    x = matrix / matrix.norm()
    for a, b, c in CLASSIC:
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def polar_error(polar: Tensor, computed: Tensor) -> float:
    return float((computed - polar).norm() / polar.norm())


def newton_schulz_section(rounds: int) -> None:
    """isokron against torch.optim.Muon's loop and a plain float32 loop."""
    print("\nNewton–Schulz, five steps: ms, ratio to the plain float32 loop, relative error to UVᵀ")
    for shape in SHAPES:
        matrix = torch.randn(shape)
        contestants: dict[str, Callable[[], Tensor]] = {
            "plain loop": partial(plain_loop, matrix),
            "isokron": partial(newton_schulz, matrix),
            "isokron, classic": partial(newton_schulz, matrix, 5, "classic"),
            **{
                f"  method={method}": partial(newton_schulz, matrix, method=method)
                for method in ("plain", "symmetric", "gram", "eigh", "polar")
            },
        }
        u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
        took = interleaved(contestants, max(3, rounds * 2**18 // matrix.numel()), 1)
        if matrix.numel() <= SLOW:
            muon = partial(_zeropower_via_newtonschulz, matrix, CLASSIC[0], 5, 1e-7)
            contestants["torch.optim.Muon"] = muon
            took |= interleaved({"torch.optim.Muon": muon}, 1, 0)
        chosen = quickest(*shape, matrix.device, matrix.dtype, CLASSIC)
        print(f"{shape[0]}×{shape[1]} (auto is {chosen})")
        for name, run in contestants.items():
            ratio = took[name] / took["plain loop"]
            error = polar_error(u @ vh, run().float())
            print(f"  {name:22}{1e3 * took[name]:10.1f}{ratio:8.2f}{error:8.3f}")


def gram_section(rounds: int) -> None:
    """β·F + w·GGᵀ on one triangle, against the full product in place."""
    print("\nSymmetric accumulate: ms of the full product and of one triangle, ratio")
    for size, cols in [(512, 512), (1024, 1024), (1024, 4096), (2048, 2048), (4096, 1024)]:
        x, cov = torch.randn(1, size, cols), torch.zeros(1, size, size)
        took = interleaved(
            {
                "full": partial(cov.baddbmm_, x, x.mT, beta=0.9, alpha=0.1),
                "triangle": partial(gram_, cov, x, 0.9, 0.1),
            },
            max(5, rounds * 2**20 // (size * cols)),
            1,
        )
        ratio = took["triangle"] / took["full"]
        label = f"{size}×{cols}"
        print(f"  {label:12}{1e3 * took['full']:10.2f}{1e3 * took['triangle']:10.2f}{ratio:8.2f}")
