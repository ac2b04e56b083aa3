"""Real ranks: state a rank, bytes a step against the plan's, and time a step.

    python benchmarks/distributed.py [--ranks 1,2,4] [--layout ddp|fsdp] [--only soap] [--cycles 3]

Processes with gloo on this machine, one thread each, step a small decoder (4 layers, width 256)
on random gradients, which all ranks have alike. "share" is the worst rank's state times the ranks,
over the state of one: 1 is an even division without copies. "plan" is what isokron.planning
foresees of both; a figure that differs is marked. "bits": whether parameters end with those they
have on the first number of ranks. Times are of the slowest rank: the median over
cycles of ten steps, one of which refreshes, of the mean step. Ranks share the cores there are.
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timing import conditions
from torch import distributed as dist
from torch import nn

import isokron
from isokron.planning import load_of, make_layout
from isokron.planning.report import in_bytes
from isokron.tasks.speeches import ByteTransformer

OPTIMIZERS = ("AdamW", "Shampoo", "SOAP", "Katie", "Muon", "Quad", "Skew")
CYCLE = 10


class Figures(NamedTuple):
    """Of one optimizer on one rank."""

    state: int
    sent: float
    seconds: float
    bits: int  # of all parameters in the end


def decoder() -> nn.Module:
    torch.manual_seed(0)
    return ByteTransformer(context=128, layers=4, width=256, heads=4)


def make(name: str, model: nn.Module) -> isokron.Preconditioned:
    optimizer: isokron.Preconditioned = getattr(isokron, name)(isokron.param_groups(model))
    return optimizer


def shared(name: str, layout: str) -> tuple[nn.Module, isokron.Preconditioned]:
    """On a rank: the decoder and its optimizer."""
    model = decoder()
    if layout == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = make(name, model)
    if layout == "ddp":
        optimizer.distribute()
    return model, optimizer


def measured(name: str, layout: str, cycles: int) -> Figures:
    """On a rank."""
    model, optimizer = shared(name, layout)
    generator = torch.Generator().manual_seed(1)
    for param in model.parameters():
        noise = torch.randn(param.shape, generator=generator)
        if layout == "fsdp":
            from torch.distributed.tensor import distribute_tensor

            placed: Any = param
            mesh, placements = placed.device_mesh, placed.placements
            noise = distribute_tensor(noise, mesh, placements, src_data_rank=None)
        param.grad = noise
    taken, sent = [], 0
    for cycle in range(cycles + 1):  # the first has more refreshes than the others
        dist.barrier()
        before, start = traffic(optimizer), time.perf_counter()
        for _ in range(CYCLE):
            optimizer.step()
        if cycle:
            taken.append((time.perf_counter() - start) / CYCLE)
            sent += traffic(optimizer) - before
    return Figures(
        state_bytes(optimizer), sent / cycles / CYCLE, statistics.median(taken), bits_of(model)
    )


def traffic(optimizer: isokron.Preconditioned) -> int:
    sharing = optimizer._sharing
    parties = {*([sharing.ranks] if sharing.ranks else []), *sharing.groups.values()}
    return sum(ranks.traffic.sent for ranks in (*parties, *sharing.controls.values()))


def bits_of(model: nn.Module) -> int:
    """A number of all bits of all parameters."""
    found = 0
    for param in model.parameters():
        whole = param.full_tensor() if hasattr(param, "full_tensor") else param
        found = zlib.crc32(whole.detach().contiguous().numpy().tobytes(), found)
    return found


def state_bytes(optimizer: isokron.Preconditioned) -> int:
    """What is here of the tensors in `optimizer.state`, counters aside."""
    from torch.distributed.tensor import DTensor

    total = 0
    for entry in optimizer.state.values():
        for key, value in entry.items():
            here = value.to_local() if isinstance(value, DTensor) else value
            total += 0 if key == "step" else here.numel() * here.element_size()
    return total


def rank_main(
    rank: int, size: int, store: str, names: list[str], layout: str, cycles: int, results: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    for name in names:
        results.put((rank, name, measured(name, layout, cycles)))
    dist.barrier()
    dist.destroy_process_group()


def run(size: int, names: list[str], layout: str, cycles: int) -> dict[str, list[Figures]]:
    """The figures of all ranks, by optimizer."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(
                target=rank_main, args=(rank, size, store, names, layout, cycles, results)
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        found = {name: [Figures(0, 0, 0, 0)] * size for name in names}
        for _ in range(size * len(names)):
            rank, name, figures = results.get(timeout=1800)
            found[name][rank] = figures
        for process in processes:
            process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--layout", choices=("ddp", "fsdp"), default="ddp")
    parser.add_argument("--only", default=",".join(OPTIMIZERS))
    parser.add_argument("--cycles", type=int, default=3)
    options = parser.parse_args()
    chosen = options.only.lower().split(",")
    names = [name for name in OPTIMIZERS if name.lower() in chosen]
    sizes = [int(size) for size in options.ranks.split(",")]
    torch.set_num_threads(1)  # as in the ranks
    print(f"{conditions()}; layout {options.layout}")
    print(f"{'':<9}{'ranks':>5}{'state':>11}{'share':>7}{'sent':>11}{'plan':>11}{'step':>10}  bits")
    found = {size: run(size, names, options.layout, options.cycles) for size in sizes}
    for name in names:
        model = decoder().to("meta")
        whole = int(load_of(make(name, model), make_layout("ddp", 1)).state.sum())
        for size in sizes:
            ranks = found[size][name]
            load = load_of(make(name, model), make_layout(options.layout, size))
            exact = [figures.state for figures in ranks] == load.state.tolist()
            exact = exact and [figures.sent for figures in ranks] == load.sent.tolist()
            worst = max(figures.state for figures in ranks)
            sent, plan = max(figures.sent for figures in ranks), int(load.sent.max())
            seconds = max(figures.seconds for figures in ranks)
            bits, first = (
                {figures.bits for figures in some} for some in (ranks, found[sizes[0]][name])
            )
            print(
                f"{name:<9}{size:>5}{in_bytes(worst):>11}{worst * size / whole:>7.3f}"
                f"{in_bytes(sent):>11}{in_bytes(plan):>11}{1e3 * seconds:>7.1f} ms"
                f"{'  same' if bits == first else '  other'}"
                f"{'' if exact else '  differs from the plan'}"
            )


if __name__ == "__main__":
    main()
