"""isokron.AdamW against torch.optim.AdamW(fused=True), and both against the memory's speed.

    python benchmarks/adamw.py [--rounds 200]

AdamW reads p, g, m, v and writes p, m, v: 28 bytes a float32 element, in 16 bytes of memory. The
limit is that traffic at the speed of a kernel that does next to nothing else: a.add_(b) over as
much memory, which moves 24 bytes for the same 16.
"""

import argparse
from collections.abc import Callable

import torch
from timing import conditions, interleaved

import isokron

CASES: dict[str, list[tuple[int, ...]]] = {
    "one 4096×1024": [(4096, 1024)],
    "200 of 64×64": [(64, 64)] * 200,
    "1000 of 64": [(64,)] * 1000,
    "mixed, 61 tensors": [(512, 512), (512, 2048), (2048,), (512,), (512,)] * 12 + [(1000, 512)],
}


def stepper(
    optimizer: type[torch.optim.Optimizer], shapes: list[tuple[int, ...]], **settings: bool
) -> Callable[[], object]:
    """A step of an optimizer on parameters of its own, gradients in place."""
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return optimizer(params, **settings).step  # type: ignore[arg-type]


def memory_traffic(elements: int) -> Callable[[], object]:
    """24 bytes an element, in the 16 that AdamW lives in, by a kernel that only adds."""
    a, b = torch.zeros(2 * elements), torch.ones(2 * elements)
    return lambda: a.add_(b)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200, help="timed turns a contestant")
    rounds = parser.parse_args().rounds
    print(conditions())
    print(f"{'':20}{'torch fused':>12}{'isokron':>12}{'ratio':>8}{'limit':>10}{'of limit':>10}")
    for name, shapes in CASES.items():
        torch.manual_seed(0)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        took = interleaved(
            {
                "torch": stepper(torch.optim.AdamW, shapes, fused=True),
                "isokron": stepper(isokron.AdamW, shapes),
                "limit": memory_traffic(elements),
            },
            rounds,
        )
        took["limit"] *= 28 / 24
        ms = {key: 1e3 * seconds for key, seconds in took.items()}
        print(
            f"{name:20}{ms['torch']:9.3f} ms{ms['isokron']:9.3f} ms"
            f"{ms['isokron'] / ms['torch']:8.2f}{ms['limit']:7.3f} ms"
            f"{ms['limit'] / ms['isokron']:10.0%}"
        )


if __name__ == "__main__":
    main()
