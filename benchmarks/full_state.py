"""Memory of `full_state_dict`: how far it lifts the peak of every rank.

    python benchmarks/full_state.py [--ranks 2,4] [--layout ddp|fsdp] [--only soap] [--to-rank 0]

Processes with gloo on this machine have stepped the decoder of distributed.py once. "growth" is
the resident memory at its peak during the call, over that before it, of the worst rank; "others"
is the worst of those that do not get the state. "full" is the size of the state of one process.
Ratios are to AdamW's two moments of the model. Needs Linux: /proc/self/clear_refs resets peaks.
"""

import argparse
import ctypes
import gc
import multiprocessing
import tempfile
from pathlib import Path
from typing import Any

import torch
from records import recorded
from timing import conditions
from torch import distributed as dist
from torch import nn

import isokron
from distributed import OPTIMIZERS, decoder, shared
from isokron.cli.plan import BYTES, in_units


def stepped(name: str, layout: str) -> isokron.Preconditioned:
    """On a rank: an optimizer of the decoder that has state."""
    model, optimizer = shared(name, layout)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def resident(what: str) -> int:
    """Bytes: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def forget_peak() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide what is asked for
    Path("/proc/self/clear_refs").write_text("5")


def measured(optimizer: Any, options: dict[str, Any]) -> tuple[int, int]:
    """Growth of the peak, and the size of the state, 0 where it does not come."""
    dist.barrier()
    forget_peak()
    before = resident("VmRSS")
    full = optimizer.full_state_dict(**options)
    grown = resident("VmHWM") - before
    tensors = [value for entry in full.get("state", {}).values() for value in entry.values()]
    return grown, sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def rank_main(
    rank: int, size: int, store: str, names: list[str], layout: str, options: Any, results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for name in names:
        results.put((name, measured(stepped(name, layout), options)))
    dist.barrier()
    dist.destroy_process_group()


def run(
    size: int, names: list[str], layout: str, options: dict[str, Any]
) -> dict[str, list[tuple[int, int]]]:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        last = (size, str(Path(folder) / "store"), names, layout, options, results)
        processes = [context.Process(target=rank_main, args=(r, *last)) for r in range(size)]
        for process in processes:
            process.start()
        for _ in range(size * len(names)):
            name, figures = results.get(timeout=600)
            found[name].append(figures)
        for process in processes:
            process.join()
    return found


def moments(model: nn.Module) -> int:
    return sum(2 * param.numel() * param.element_size() for param in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--layout", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--only", default="AdamW,SOAP")
    parser.add_argument("--to-rank", type=int)
    given = parser.parse_args()
    chosen = given.only.lower().split(",")
    names = [name for name in OPTIMIZERS if name.lower() in chosen]
    options = {} if given.to_rank is None else {"to_rank": given.to_rank}
    with recorded("full_state"):
        print(f"{conditions()}; layout {given.layout}")
        print(
            f"{'':<9}{'ranks':>5}{'full':>11}{'growth':>11}{'ratio':>8}{'others':>11}{'ratio':>8}"
        )
        adamw = moments(decoder())
        for size in map(int, given.ranks.split(",")):
            for name, figures in run(size, names, given.layout, options).items():
                full = max(whole for _, whole in figures)
                growth = max(grown for grown, whole in figures if whole)
                others = max((grown for grown, whole in figures if not whole), default=0)
                print(
                    f"{name:<9}{size:>5}{in_units(full, BYTES):>11}{in_units(growth, BYTES):>11}"
                    f"{growth / adamw:>8.2f}{in_units(others, BYTES):>11}{others / adamw:>8.2f}"
                )


if __name__ == "__main__":
    main()
