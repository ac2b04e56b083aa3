"""ShardedAdamW beside what people use: memory of moments and gradients, and time, on CPUs.

python benchmarks/sharded.py --ranks 2 --steps 20
"""

import argparse
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import isokron
from isokron.optim.sharded import ShardedAdamW

MB = 1 << 20


def model() -> nn.Sequential:
    """5.3M parameters: five times 512 → 1024 → 512."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)]
    return nn.Sequential(*layers)


def contender(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name.startswith("sharded"):
        mine = model()
        reduce: Any = name.split()[1]
        return mine, ShardedAdamW(mine.parameters(), reduce=reduce)
    ddp = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    if name == "ddp + AdamW":
        return ddp, isokron.AdamW(ddp.parameters())
    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=1e-3, fused=True)
    return ddp, zero


def size(tensors: list[Tensor]) -> float:
    """Of distinct memory, in MB."""
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(kept.values()) / MB


def measured(names: list[str], steps: int) -> dict[str, list[float]]:
    """Per contender: MB of moments, MB of gradients that stay, ms of backward and step."""
    both = {name: contender(name) for name in names}
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(dist.get_rank()))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(steps + 3):
        for name, (net, optimizer) in both.items():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    found = {}
    for name, (net, optimizer) in both.items():
        inner = getattr(optimizer, "optim", optimizer)
        moments = [v for entry in inner.state.values() for v in entry.values() if v.ndim]
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        if isinstance(optimizer, ShardedAdamW):
            grads += optimizer._gradients.sections.values()
        ms = 1000 * statistics.median(seconds[name][3:])
        found[name] = [size(moments), size(grads), ms]
    return found


def rank_main(rank: int, ranks: int, store: str, results: Any, work: Callable[[], Any]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks)
    found = work()
    dist.barrier()
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


class Work:
    """What a rank does, in a form that another process can be given."""

    def __init__(self, names: list[str], steps: int) -> None:
        self.names, self.steps = names, steps

    def __call__(self) -> dict[str, list[float]]:
        return measured(self.names, self.steps)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    names = ["ddp + AdamW", "ddp + ZeroRedundancy", "sharded step", "sharded backward"]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        work = Work(names, arguments.steps)
        given = (arguments.ranks, f"{folder}/store", results, work)
        processes = [
            context.Process(target=rank_main, args=(rank, *given)) for rank in range(given[0])
        ]
        for process in processes:
            process.start()
        found = results.get(timeout=600)
        for process in processes:
            process.join()
    print(f"{arguments.ranks} ranks, gloo, medians of {arguments.steps} interleaved steps")
    print(f"{'':22}{'moments MB':>12}{'gradients MB':>14}{'backward + step ms':>20}")
    for name, (moments, grads, ms) in found.items():
        ratio = ms / found[names[0]][2]
        print(f"{name:22}{moments:12.1f}{grads:14.1f}{ms:13.1f} ({ratio:.2f}×)")


if __name__ == "__main__":
    main()
