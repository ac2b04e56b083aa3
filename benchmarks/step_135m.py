"""The cost of one optimizer step at 135M parameters: the shapes of SmolLM2, random gradients.

    python benchmarks/step_135m.py [--layers 30] [--optimizers muon,soap] [--steps 30]

Steps are timed from the eleventh on, when a method that refreshes every ten steps has its rhythm:
the median, the longest, and the mean step; and the share of the peak of float32 products (1,024 x
1,024, measured in the same run) that the products of a mean step reach. Decompositions are not
products: where they take the time, the share is low. AdamW steps the embedding for all. Results are
in docs/benchmarks/step_135m.json.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from records import Records
from timing import conditions
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import isokron
from isokron.optimizers_by_name import resolve, split_specs

WIDTH, KEYS, HIDDEN, VOCABULARY = 576, 192, 1536, 49_152
OPTIMIZERS = "adamw,muon,quad,shampoo,katie,soap,soap(refresh='together')"


class Layer(nn.Module):
    """The matrices and vectors of one layer; only their shapes matter."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH, bias=False)
        self.key = nn.Linear(WIDTH, KEYS, bias=False)
        self.value = nn.Linear(WIDTH, KEYS, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.norms = nn.ModuleList([nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)])


def peak() -> float:
    """Operations per second of float32 products."""
    x = torch.randn(1024, 1024)
    seconds = []
    for _ in range(20):
        start = time.perf_counter()
        x @ x
        seconds.append(time.perf_counter() - start)
    return 2 * 1024**3 / statistics.median(seconds)


def measure(spec: str, layers: int, steps: int) -> dict[str, float]:
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Layer() for _ in range(layers)))
    optimizer = resolve(spec).build(model, 1e-3)
    for param in model.parameters():
        param.grad = torch.randn_like(param) * 1e-3
    seconds, operations = [], 0
    for step in range(steps):
        counter = FlopCounterMode(display=False)
        if step == steps - 10:  # of the last ten steps, a cycle of refreshes
            with counter:
                for _ in range(10):
                    optimizer.step()
            operations = counter.get_total_flops() // 10
            break
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    timed = seconds[10:]
    mean = statistics.fmean(timed)
    state = sum(v.nbytes for entry in optimizer.state.values() for v in entry.values()
                if isinstance(v, torch.Tensor))  # fmt: skip
    return {
        "median": statistics.median(timed),
        "longest": max(timed),
        "mean": mean,
        "of_peak": operations / mean / peak(),
        "state_bytes": state,
    }


def tables(layers: int | None = None) -> list[str]:
    """A row per optimizer, at this number of layers or at all that were measured."""
    lines = ["| optimizer | median step | longest | mean | products, of peak | state |"]
    lines.append("|---|---|---|---|---|---|")
    for run in Records("step_135m").select(**({} if layers is None else {"layers": layers})):
        times = " | ".join(f"{run[key]:.2f} s" for key in ("median", "longest", "mean"))
        lines.append(f"| {run['optimizer']} | {times} | {run['of_peak']:.0%} "
                     f"| {run['state_bytes'] / 2**20:,.0f} MiB |")  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--optimizers", default=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    if args.steps < 30:
        parser.error("--steps must be at least 30: ten to start, ten to time, ten to count")
    records = Records("step_135m")
    print(f"{conditions()}, isokron {isokron.__version__}, {args.layers} layers")
    for spec in split_specs(args.optimizers):
        key = {"optimizer": spec, "layers": args.layers}
        run = {**key, **measure(spec, args.layers, args.steps), "machine": conditions()}
        records.runs = [old for old in records.runs if not key.items() <= old.items()] + [run]
        records.save()
    print("\n".join(tables(args.layers)))


if __name__ == "__main__":
    main()
