"""AdamW divided over ranks beside DDP and ZeroRedundancyOptimizer: memory and time, on CPUs.

python benchmarks/sharded.py --ranks 2 --steps 20
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from records import recorded
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import isokron

MB = 1 << 20
NAMES = ("ddp + AdamW", "ddp + ZeroRedundancy", "ddp + distribute()", "gradients='sharded'")


def model() -> nn.Sequential:
    """5.2M parameters: five times 512 → 1024 → 512."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512)]
    return nn.Sequential(*layers)


def contender(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    if name == "gradients='sharded'":
        net: nn.Module = model()
        return net, isokron.ShardedAdamW(net.parameters(), nonfinite="ignore")
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    if name == "ddp + ZeroRedundancy":
        params = net.parameters()
        return net, ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=True)
    optimizer = isokron.AdamW(net.parameters())
    if name == "ddp + distribute()":
        optimizer.distribute()
    return net, optimizer


def megabytes(tensors: list[Tensor]) -> float:
    """Of distinct memory on this rank."""
    local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    sizes = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in local}
    return sum(sizes.values()) / MB


def measure(net: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Megabytes of moments, and of the gradients that remain after a backward pass."""
    state = getattr(optimizer, "optim", optimizer).state
    moments = [value for entry in state.values() for value in entry.values() if value.ndim]
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    if isinstance(optimizer, isokron.ShardedAdamW):
        buckets = optimizer._buckets
        rows = [buckets.rows(p) for p in net.parameters() if buckets is not None]
        grads += [row for row in rows if row is not None]
    return megabytes(moments), megabytes(grads)


def rank_main(rank: int, ranks: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    contenders = {name: contender(name) for name in NAMES}
    x = torch.randn(16, 512, generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for _ in range(steps + 3):
        for name, (net, optimizer) in contenders.items():
            optimizer.zero_grad()
            loss = net(x).square().mean()
            dist.barrier()
            start = time.perf_counter()
            loss.backward()
            optimizer.step()
            seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        lines = [f"{ranks} ranks, gloo, medians of {steps} interleaved steps"]
        lines.append(f"{'':22}{'moments MB':>12}{'gradients MB':>14}{'backward + step ms':>20}")
        first = statistics.median(seconds[NAMES[0]][3:])
        for name in NAMES:
            moments, grads = measure(*contenders[name])
            median = statistics.median(seconds[name][3:])
            ratio = f"{1000 * median:13.1f} ({median / first:.2f}×)"
            lines.append(f"{name:22}{moments:12.1f}{grads:14.1f}{ratio}")
        Path(folder, "table.txt").write_text("\n".join(lines))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, recorded("sharded"):
        settings = (arguments.ranks, arguments.steps, folder)
        spawn(rank_main, settings, nprocs=arguments.ranks)
        print(Path(folder, "table.txt").read_text())


if __name__ == "__main__":
    main()
