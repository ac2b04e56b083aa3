"""What a step costs besides its products: time a block, and memory beyond the state.

    python benchmarks/blocks.py [--rounds 30] [--layers 30]

Time: 1, 256 and 10,000 equal blocks of 4×4, cut from one parameter or each a parameter, in steps
that refresh nothing: products of such blocks take next to no time, and what is left is finding
blocks, reading and writing them. Beside it torch.optim.AdamW(fused=True) on the same parameters.
Memory: matrices of a 135M language model (30 layers of width 576 and 1536), the largest resident
memory of a step, refreshes included, less what there is after it; each in a process of its own.
"""

import argparse
import os
import subprocess
import sys
import threading
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from records import recorded
from timing import conditions, interleaved
from torch import nn

import isokron

COUNTS = (1, 256, 10_000)
METHODS = ("SOAP", "Shampoo", "Katie", "Quad")
LAYER = [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)]


def with_gradients(shapes: list[tuple[int, int]]) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def time_blocks(rounds: int) -> None:
    torch.set_num_threads(1)
    print("| blocks of 4×4 | SOAP, µs a block | its step over AdamW's |\n|---|---|---|")
    for many in (False, True):
        for count in COUNTS:
            rows = isqrt(count)
            shapes = [(4, 4)] * count if many else [(4 * rows, 4 * (count // rows))]
            soap = isokron.SOAP(with_gradients(shapes), max_dim=4, every=10**6, start=1)
            adamw = torch.optim.AdamW(with_gradients(shapes), fused=True)
            took = interleaved({"soap": soap.step, "adamw": adamw.step}, rounds)
            of = f"{count:,} parameters" if many else f"{count:,} of one parameter"
            each = took["soap"] / count * 1e6
            print(f"| {of} | {each:.2f} | {took['soap'] / took['adamw']:.1f} |", flush=True)


def peak(name: str, layers: int, workspace: int | None) -> None:
    """Print the GB that a step needs beyond what is there after it."""
    group: dict[str, Any] = {"params": with_gradients(LAYER * layers)}
    group |= {} if workspace is None else {"workspace": workspace}
    optimizer = getattr(isokron, name)([group], lr=1e-3)
    most, over = 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(0.001):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(3):
        optimizer.step()
    over.set()
    watcher.join()
    print((most - resident()) / 1e9)


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def memory(layers: int) -> None:
    print("| GB a step needs beyond its state | in batches | all at once |\n|---|---|---|")
    for name in METHODS:
        cells = []
        for workspace in ("", str(1 << 40)):
            command = [sys.executable, __file__, "--peak", name, "--layers", str(layers)]
            command += ["--workspace", workspace] if workspace else []
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            cells.append(f"{float(done.stdout):.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--peak", choices=METHODS, help=argparse.SUPPRESS)
    parser.add_argument("--workspace", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peak:
        peak(given.peak, given.layers, given.workspace)
        return
    with recorded("blocks"):
        print(conditions())
        time_blocks(given.rounds)
        memory(given.layers)


if __name__ == "__main__":
    main()
