"""Step times of this source against those of another checkout, in turns.

    git worktree add /path/to/other <revision>
    python benchmarks/revisions.py /path/to/other/src [--rounds 9]

Two processes of one thread, one for each source, make ten steps of the same optimizer on the same
parameters by turns. "ratio" is this source's CPU time over the other's, the median over rounds.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from timing import conditions

import isokron

SHAPES: dict[str, list[tuple[int, ...]]] = {
    "large": [*[(512, 512)] * 4, *[(512, 2048)] * 2, *[(512,)] * 8],
    "small": [*[(64, 64)] * 200, *[(64,)] * 100],
    "vectors": [(64,)] * 1000,
    "1,024 blocks": [(1024, 1024)],
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    *(("SOAP", shapes, {"every": 10}) for shapes in ("large", "small")),
    *(("Shampoo", shapes, {"every": 10}) for shapes in ("large", "small")),
    ("Katie", "large", {"every": 10}),
    *(("Muon", shapes, {}) for shapes in ("large", "small")),
    *(("Quad", shapes, {}) for shapes in ("large", "small")),
    *(("AdamW", shapes, {}) for shapes in ("large", "vectors")),
    ("SOAP", "1,024 blocks", {"every": 1000, "max_dim": 32}),
]
STEPS = 10


def serve() -> None:
    """Time ten steps of a case for every line on standard input."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    optimizers = []
    for name, shapes, settings in CASES:
        params = [torch.nn.Parameter(0.02 * torch.randn(shape)) for shape in SHAPES[shapes]]
        optimizer = getattr(isokron, name)(params, **settings)
        for param in params:
            param.grad = torch.randn_like(param)
        for _ in range(STEPS + 1):  # past the first refreshes
            optimizer.step()
        optimizers.append(optimizer)
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.process_time()
        for _ in range(STEPS):
            optimizers[int(line)].step()
        print(time.process_time() - start, flush=True)


def started(source: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--serve"]
    pipe = subprocess.PIPE
    server = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
    assert server.stdout is not None
    if server.stdout.readline().strip() != "ready":
        raise SystemExit(f"the optimizers of {source} could not be made")
    return server


def timed(server: "subprocess.Popen[str]", case: int) -> float:
    assert server.stdin is not None
    assert server.stdout is not None
    print(case, file=server.stdin, flush=True)
    return float(server.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("other", nargs="?", help="the folder src of another checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    if options.other is None or not (Path(options.other) / "isokron").is_dir():
        parser.error("name the folder src of another checkout, which has isokron/")
    print(conditions())
    servers = [started(options.other), started(str(Path(isokron.__file__).parents[1]))]
    print(f"{'':8} {'':12} {'other':>12} {'ratio':>8}")
    for number, (name, shapes, _) in enumerate(CASES):
        rounds = []
        for turn in range(options.rounds):
            order = servers if turn % 2 else servers[::-1]  # neither is always the first
            times = {server: timed(server, number) for server in order}
            rounds.append([times[server] for server in servers])
        other = statistics.median(before for before, _ in rounds) / STEPS * 1e3
        ratio = statistics.median(now / before for before, now in rounds)
        print(f"{name:8} {shapes:12} {other:9.2f} ms {ratio:8.3f}", flush=True)
    for server in servers:
        server.kill()


if __name__ == "__main__":
    main()
