"""Correctness and speed of the Triton kernels on a GPU.

    python benchmarks/gpu.py [--rounds 50]

AdamW must equal torch.optim.AdamW(fused=True) bit for bit; products are compared with float64.
Times are medians of interleaved runs between CUDA events. AdamW's limit is the time to move its 28
bytes per element at the bandwidth of a.add_(b) on two elements (24 bytes).
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
from records import recorded
from timing import conditions
from torch import Tensor
from torch.optim._muon import _zeropower_via_newtonschulz

from isokron.linalg import newton_schulz
from isokron.polynomials import schedule

CASES: dict[str, list[tuple[int, ...]]] = {
    "one 4096×1024": [(4096, 1024)],
    "200 of 64×64": [(64, 64)] * 200,
    "1000 of 64": [(64,)] * 1000,
}
SIDES = (2048, 4096, 8192)
# every remainder modulo 16, below the size of a chunk, around it and beyond
RAGGED = [*range(1, 18), *range(1020, 1040), 2**20 + 3]
RATE, EPS = 3e-3, 1e-8


def gpu_interleaved(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warmup: int = 5
) -> dict[str, float]:
    """Median milliseconds between CUDA events, with interleaved runs."""
    took: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + rounds):
        for name, run in contestants.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            if turn >= warmup:
                took[name].append(start.elapsed_time(end))
    return {name: statistics.median(times) for name, times in took.items()}


def parameters(shapes: list[tuple[int, ...]], odd: bool = False) -> list[Tensor]:
    """Parameters with gradients; if `odd`, every third one is not aligned to 16 bytes."""
    params = []
    for i, shape in enumerate(shapes):
        shift = 1 if odd and i % 3 == 2 else 0
        room = torch.randn(torch.Size(shape).numel() + shift, device="cuda")
        param = room[shift:].view(shape).requires_grad_()
        param.grad = torch.randn_like(param)
        params.append(param)
    return params


class Ours:
    """adamw_ with its moments and step count."""

    def __init__(self, params: list[Tensor], amsgrad: bool = False) -> None:
        self.params = [param.detach() for param in params]
        self.grads = [param.grad for param in params if param.grad is not None]
        self.state = [[torch.zeros_like(p) for p in self.params] for _ in range(2 + amsgrad)]
        self.amsgrad = amsgrad
        self.count = 0

    def step(
        self, betas: tuple[float, float] = (0.9, 0.999), decay: float = 0.01, maximize: bool = False
    ) -> None:
        from isokron.kernels.triton_adamw import adamw_

        self.count += 1
        adamw_(
            self.params,
            self.grads,
            *self.state,
            step=self.count,
            beta1=betas[0],
            beta2=betas[1],
            weight_decay=decay,
            amsgrad=self.amsgrad,
            maximize=maximize,
            lr=RATE,
            eps=EPS,
        )


def bits_that_differ(
    amsgrad: bool, maximize: bool, decay: float, betas: tuple[float, float], steps: int = 200
) -> int:
    """Number of elements of parameters and moments that differ from torch's after `steps` steps."""
    params = parameters([(n,) for n in RAGGED], odd=True)
    ours = Ours(parameters([(n,) for n in RAGGED], odd=True), amsgrad)
    for ours_param, param in zip(ours.params, params, strict=True):
        ours_param.copy_(param)
    torchs = torch.optim.AdamW(
        params,
        betas=betas,
        weight_decay=decay,
        amsgrad=amsgrad,
        maximize=maximize,
        fused=True,
        lr=RATE,
        eps=EPS,
    )
    for _ in range(steps):
        for grad, param in zip(ours.grads, params, strict=True):
            param.grad = grad.normal_()
        torchs.step()
        ours.step(betas, decay, maximize)
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * amsgrad
    expected = [params, *([torchs.state[p][name] for p in params] for name in names)]
    return sum(
        int((a.detach().view(torch.int32) != b.view(torch.int32)).sum())
        for pair in zip([ours.params, *ours.state], expected, strict=True)
        for a, b in zip(*pair, strict=True)
    )


def adamw_is_right() -> bool:
    right = True
    settings = itertools.product(
        (False, True), (False, True), (0.0, 0.1), ((0.9, 0.999), (0.0, 0.5))
    )
    for amsgrad, maximize, decay, betas in settings:
        wrong = bits_that_differ(amsgrad, maximize, decay, betas)
        right &= wrong == 0
        verdict = "the bits of torch" if wrong == 0 else f"{wrong} elements DIFFER from torch"
        print(f"AdamW {amsgrad=!s:5} {maximize=!s:5} {decay=} {betas=}: {verdict}")
    return right


def products() -> dict[str, Callable[..., Tensor]]:
    """By pointers, and from sm_90 on by descriptors."""
    from isokron.kernels.triton_symmetric import symmetric_matmul
    from isokron.kernels.triton_symmetric_tma import symmetric_matmul_tma

    forms: dict[str, Callable[..., Tensor]] = {"isokron": symmetric_matmul}
    if torch.cuda.get_device_capability() >= (9, 0):
        forms["by TMA"] = symmetric_matmul_tma
    return forms


def products_are_right() -> bool:
    right = True
    shapes = [
        (1, 64, 64),
        (3, 100, 33),
        (2, 1100, 520),
        (2, 1104, 520),
        (1, 2048, 2048),
        (1, 3000, 1000),
    ]
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    for (form, product), dtype, shape in itertools.product(products().items(), dtypes, shapes):
        if form == "by TMA" and (shape[1] % 8 or shape[2] % 8):
            continue
        x = torch.randn(shape, device="cuda").to(dtype)
        add = (x @ x.mT).to(dtype)
        add = (add + add.mT) / 2
        got = product(x, alpha=0.5, beta=-0.25, add=add)
        want = 0.5 * x.double() @ x.double().mT - 0.25 * add.double()
        bound = max(torch.finfo(dtype).eps, 1e-6) * want.abs().max().item()
        error = (got.double() - want).abs().max().item()
        right &= error <= bound
        verdict = "right" if error <= bound else f"WRONG, error {error:.2e} over {bound:.2e}"
        mirror = "" if torch.equal(got, got.mT) else ", not symmetric to the bit"
        size = "×".join(map(str, shape))
        print(f"product {form:8} {str(dtype)[6:]:9} {size:14}: {verdict}{mirror}")
    return right


def adamw_table(rounds: int) -> None:
    print(f"\n{'AdamW':20}{'torch fused':>12}{'isokron':>12}{'ratio':>8}{'of limit':>10}")
    for name, shapes in CASES.items():
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        a, b = (torch.ones(2 * elements, device="cuda") for _ in range(2))
        ms = gpu_interleaved(
            {
                "torch": torch.optim.AdamW(parameters(shapes), fused=True).step,
                "isokron": Ours(parameters(shapes)).step,
                "limit": partial(a.add_, b),
            },
            rounds,
        )
        print(
            f"{name:20}{ms['torch']:9.3f} ms{ms['isokron']:9.3f} ms"
            f"{ms['isokron'] / ms['torch']:8.2f}{ms['limit'] * 28 / 24 / ms['isokron']:10.0%}"
        )


def products_table(rounds: int) -> None:
    ours = products()
    titles = "".join(f"{name:>12}{'ratio':>8}" for name in ours)
    print(f"\n{'X Xᵀ in bfloat16':20}{'torch':>12}{titles}")
    for side in SIDES:
        x = torch.randn(1, side, side, device="cuda").bfloat16()
        out = torch.empty_like(x)
        forms: dict[str, Callable[[], object]] = {"torch": partial(torch.bmm, x, x.mT, out=out)}
        forms |= {name: partial(product, x, out) for name, product in ours.items()}
        ms = gpu_interleaved(forms, rounds)
        texts = "".join(f"{ms[name]:9.3f} ms{ms[name] / ms['torch']:8.2f}" for name in ours)
        print(f"{side:<20}{ms['torch']:9.3f} ms{texts}")


def newton_schulz_table(rounds: int) -> None:
    from isokron.kernels.triton_symmetric import newton_schulz_

    classic = schedule("classic", 5)

    def ours(matrix: Tensor) -> Tensor:
        x = matrix.bfloat16().unsqueeze(0)
        x /= torch.linalg.vector_norm(x).clamp(min=1e-7)
        return newton_schulz_(x, classic)

    print(
        f"\n{'Newton–Schulz, 5':20}{'torch Muon':>12}{'plain loop':>12}{'isokron':>12}{'ratio':>8}"
    )
    for side in SIDES:
        m = torch.randn(side, side, device="cuda")
        ms = gpu_interleaved(
            {
                "torch": partial(_zeropower_via_newtonschulz, m, classic[0], 5, 1e-7),
                "plain": partial(newton_schulz, m, dtype=torch.bfloat16, method="plain"),
                "isokron": partial(ours, m),
            },
            rounds,
        )
        print(
            f"{side:<20}{ms['torch']:9.3f} ms{ms['plain']:9.3f} ms{ms['isokron']:9.3f} ms"
            f"{ms['isokron'] / ms['torch']:8.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50, help="timed runs per contestant")
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs an NVIDIA GPU and a CUDA build of torch, found none")
    try:
        import triton
    except ImportError:
        sys.exit("benchmarks/gpu.py needs Triton; pip install 'isokron[triton]'")
    major, minor = torch.cuda.get_device_capability()
    torch.manual_seed(0)
    with torch.no_grad(), recorded("gpu"):
        print(f"{torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}")
        print(f"{conditions()}, Triton {triton.__version__}")
        right = [adamw_is_right(), products_are_right()]
        adamw_table(rounds)
        products_table(rounds)
        newton_schulz_table(rounds)
    sys.exit(0 if all(right) else "some checks failed, see above")


if __name__ == "__main__":
    main()
