"""Real ranks: state per rank, bytes sent per step against the plan, and time per step.

    python benchmarks/distributed.py [--ranks 1,2,4] [--layout ddp|fsdp] [--only soap] [--cycles 3]

Processes with gloo on this machine, one thread each, step a small decoder (4 layers, width 256)
on random gradients, the same on all ranks. "share" is the largest state of a rank times the number
of ranks, over the state of one process: 1 is an even division without copies. "plan" is what
isokron.plan computes for "sent"; a row whose state or bytes differ from it on any rank says so.
"bits" tells whether parameters end with the same bits as on the first number of ranks. Times are
those of the slowest rank: the median over cycles of ten steps, one of which refreshes, of the mean
step. The ranks share the cores of the machine.
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
from records import recorded
from timing import conditions
from torch import distributed as dist
from torch import nn

import isokron
from isokron.cli.plan import BYTES, in_units
from isokron.distributed import local
from isokron.plan import RankLayout, plan, state_bytes
from isokron.tasks.speeches import ByteTransformer

OPTIMIZERS = ("AdamW", "Shampoo", "SOAP", "Katie", "Muon", "Quad", "Skew")
CYCLE = 10


class Figures(NamedTuple):
    """Measurements of one optimizer on one rank."""

    state: int
    sent: float
    seconds: float
    checksum: int  # of all parameters in the end


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
    times, sent = [], 0
    for cycle in range(cycles + 1):  # the first cycle has more refreshes than the others
        dist.barrier()
        before, start = traffic(optimizer), time.perf_counter()
        for _ in range(CYCLE):
            optimizer.step()
        if cycle:
            times.append((time.perf_counter() - start) / CYCLE)
            sent += traffic(optimizer) - before
    entries = [{k: local(v) for k, v in entry.items()} for entry in optimizer.state.values()]
    state, seconds = sum(map(state_bytes, entries)), statistics.median(times)
    return Figures(state, sent / cycles / CYCLE, seconds, checksum(model))


def traffic(optimizer: isokron.Preconditioned) -> int:
    agreement = optimizer._agreement
    parties = {*([agreement.ranks] if agreement.ranks else []), *agreement._ranks.values()}
    return sum(ranks.traffic.sent for ranks in (*parties, *agreement._controls.values()))


def checksum(model: nn.Module) -> int:
    """Of the bits of all parameters."""
    value = 0
    for param in model.parameters():
        full = param.full_tensor() if hasattr(param, "full_tensor") else param
        value = zlib.crc32(full.detach().contiguous().numpy().tobytes(), value)
    return value


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
        figures = {name: [Figures(0, 0, 0, 0)] * size for name in names}
        for _ in range(size * len(names)):
            rank, name, figures_of_rank = results.get(timeout=1800)
            figures[name][rank] = figures_of_rank
        for process in processes:
            process.join()
    return figures


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
    with recorded("distributed"):
        print(f"{conditions()}; layout {options.layout}")
        heads = f"{'ranks':>5}{'state':>11}{'share':>7}{'sent':>11}{'plan':>11}{'step':>10}  bits"
        print(f"{'':<9}{heads}")
        figures = {size: run(size, names, options.layout, options.cycles) for size in sizes}
        for name in names:
            optimizer = make(name, decoder().to("meta"))
            one = int(plan(optimizer, RankLayout("ddp", 1)).state[0])
            expected_sum = figures[sizes[0]][name][0].checksum
            for size in sizes:
                state, sent, seconds, sums = map(list, zip(*figures[size][name], strict=True))
                costs = plan(optimizer, RankLayout(options.layout, size))
                exact = state == costs.state.tolist() and sent == costs.sent.tolist()
                print(
                    f"{name:<9}{size:>5}{in_units(max(state), BYTES):>11}"
                    f"{max(state) * size / one:>7.3f}{in_units(max(sent), BYTES):>11}"
                    f"{in_units(int(costs.sent.max()), BYTES):>11}{1e3 * max(seconds):>7.1f} ms"
                    f"{'  same' if set(sums) == {expected_sum} else '  other'}"
                    f"{'' if exact else '  differs from the plan'}"
                )


if __name__ == "__main__":
    main()
