"""Kernels against torch's own.

    python benchmarks/kernels.py [--only adamw|gram|newton-schulz] [--rounds 200]

adamw: a step of isokron.AdamW ("list", and "flat" with flat=True) against torch's AdamW, fused and
default (on a CPU a loop of single operations).
gram: β·F + w·GGᵀ on one triangle, against the full product.
newton-schulz: polar factors, against torch.optim.Muon's loop and a plain float32 loop.
"""

import argparse
from collections.abc import Callable

import torch
from products import gram_section, newton_schulz_section
from records import recorded
from timing import conditions, interleaved, restart_for_bfloat16

import isokron

Shapes = list[tuple[int, ...]]

CASES: dict[str, Shapes] = {
    "one 4096×1024": [(4096, 1024)],
    "200 of 64×64": [(64, 64)] * 200,
    "1000 of 64": [(64,)] * 1000,
    "mixed, 61 tensors": [(512, 512), (512, 2048), (2048,), (512,), (512,)] * 12 + [(1000, 512)],
}


def stepper(
    optimizer: type[torch.optim.Optimizer], shapes: Shapes, **settings: bool
) -> Callable[[], object]:
    """The step function of an optimizer with new parameters and gradients."""
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return optimizer(params, **settings).step  # type: ignore[arg-type]


def adamw(rounds: int) -> None:
    print(f"{'ms':18}{'default':>10}{'fused':>10}{'list':>24}{'flat':>24}")
    print(f"{'':38}{'(to default, to fused)':>24}")
    for name, shapes in CASES.items():
        torch.manual_seed(0)
        seconds = interleaved(
            {
                "default": stepper(torch.optim.AdamW, shapes),
                "fused": stepper(torch.optim.AdamW, shapes, fused=True),
                "list": stepper(isokron.AdamW, shapes),
                "flat": stepper(isokron.AdamW, shapes, flat=True),
            },
            rounds,
        )
        cells = [f"{1e3 * seconds[key]:10.3f}" for key in ("default", "fused")]
        for key in ("list", "flat"):
            ratios = [f"{seconds[key] / seconds[theirs]:.2f}×" for theirs in ("default", "fused")]
            cells.append(f"{1e3 * seconds[key]:9.3f} ({', '.join(ratios)})")
        print(f"{name:18}{''.join(cells)}")


SECTIONS: dict[str, Callable[[int], None]] = {
    "adamw": adamw,
    "gram": lambda rounds: gram_section(rounds // 20),
    "newton-schulz": lambda rounds: newton_schulz_section(rounds // 20),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section (default: all)")
    parser.add_argument("--rounds", type=int, default=200, help="timed runs per contestant")
    arguments = parser.parse_args()
    restart_for_bfloat16()  # torch.optim.Muon multiplies in bfloat16
    with recorded("kernels"):
        print(conditions())
        for name, section in SECTIONS.items():
            if arguments.only in (None, name):
                section(arguments.rounds)


if __name__ == "__main__":
    main()
