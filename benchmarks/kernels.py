"""Kernels against torch's own, and against what the memory allows.

    python benchmarks/kernels.py [--only adamw|gram|newton-schulz] [--rounds 200]

adamw: AdamW reads p, g, m, v and writes p, m, v: 28 bytes a float32 element. The limit is what the
same traffic takes with next to no arithmetic (traffic.c: four arrays read, three of them written,
on as many threads), over as many elements in four whole arrays. "native" is isokron.AdamW as it is
where there is a compiler, "operator" what it is where there is none (ISOKRON_NATIVE=0), "flat" with
flat=True. Ratios are to torch's fused AdamW.
gram: β·F + w·GGᵀ on one triangle, against the whole product.
newton-schulz: polar factors, against torch.optim.Muon's own loop and a plain one in float32.
"""

import argparse
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch
from products import gram_section, newton_schulz_section
from timing import conditions, interleaved

import isokron
from isokron.kernels import status
from isokron.kernels.adamw_native import OPENMP
from isokron.kernels.native import Native, torch_symbols

Shapes = list[tuple[int, ...]]

CASES: dict[str, Shapes] = {
    "one 4096×1024": [(4096, 1024)],
    "200 of 64×64": [(64, 64)] * 200,
    "1000 of 64": [(64,)] * 1000,
    "mixed, 61 tensors": [(512, 512), (512, 2048), (2048,), (512,), (512,)] * 12 + [(1000, 512)],
}


def stepper(
    optimizer: type[torch.optim.Optimizer], shapes: Shapes, native: bool = True, **settings: bool
) -> Callable[[], object]:
    """A step of an optimizer on parameters of its own, gradients in place."""
    params = [torch.randn(shape).requires_grad_() for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    made = optimizer(params, **settings)  # type: ignore[arg-type]

    def step() -> None:
        os.environ["ISOKRON_NATIVE"] = str(int(native))
        made.step()

    return step


class _Arrays(ctypes.Structure):
    """`struct arrays` of traffic.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("param", "grad", "exp_avg", "exp_avg_sq")),
        *((name, ctypes.c_int64) for name in ("length", "threads")),
        *((name, ctypes.c_void_p) for name in OPENMP),
    )


TRAFFIC = Native(str(Path(__file__).parent / "traffic.c"), check=lambda library: None)


def memory_traffic(elements: int) -> Callable[[], object]:
    """AdamW's traffic over so many elements, in C."""
    os.environ["ISOKRON_NATIVE"] = "1"
    library = TRAFFIC.library()
    if library is None:
        raise SystemExit(f"the limit is measured by traffic.c: {TRAFFIC.status()[1]}")
    arrays = [torch.ones(elements) for _ in range(4)]
    threads = torch.get_num_threads() if elements > 1 << 15 else 1
    addresses = [array.data_ptr() for array in arrays]
    struct = _Arrays(*addresses, elements, threads, **torch_symbols(OPENMP))

    def run(held: object = arrays) -> None:
        library.traffic(ctypes.byref(struct))

    return run


def adamw(rounds: int) -> None:
    print("AdamW:", ": ".join(status()))
    ours = {
        "native": {},
        "flat": {"flat": True},
        "operator": {"native": False},
        "flat operator": {"native": False, "flat": True},
    }
    print(f"{'ms':18}{'torch':>9}" + "".join(f"{name:>20}" for name in ours) + f"{'limit':>9}")
    for name, shapes in CASES.items():
        torch.manual_seed(0)
        elements = sum(torch.Size(shape).numel() for shape in shapes)
        took = interleaved(
            {
                "torch": stepper(torch.optim.AdamW, shapes, fused=True),
                **{key: stepper(isokron.AdamW, shapes, **way) for key, way in ours.items()},
                "limit": memory_traffic(elements),
            },
            rounds,
        )
        cells = [f"{1e3 * took[key]:12.3f} ({took[key] / took['torch']:.2f}×)" for key in ours]
        reached = took["limit"] / min(took["native"], took["flat"])
        print(
            f"{name:18}{1e3 * took['torch']:9.3f}{''.join(cells)}{1e3 * took['limit']:9.3f}"
            f" ({reached:.0%} reached)"
        )


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
    parser.add_argument("--rounds", type=int, default=200, help="timed turns a contestant")
    arguments = parser.parse_args()
    print(conditions())
    for name, section in SECTIONS.items():
        if arguments.only in (None, name):
            section(arguments.rounds)


if __name__ == "__main__":
    main()
