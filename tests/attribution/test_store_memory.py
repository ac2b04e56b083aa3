"""A store larger than the memory it is given is built and read within that memory."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from pathlib import Path

import torch
from torch import nn

from isokron.attribution.building import build_store
from isokron.attribution.encoding import encoding
from isokron.attribution.scoring import score_store
from isokron.curvature import CrossEntropy
from isokron.curvature.sites import find_sites
from isokron.tasks import Examples

torch.manual_seed(0)
model = nn.Linear(128, 128, bias=False)
examples = Examples((torch.randn(1500, 128), torch.randint(0, 128, (1500,))))
how = encoding(find_sites(model))
folder, memory = Path(sys.argv[1]), 16 * 2**20


def now(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def run(name, count, budget):
    some = Examples(tuple(tensor[:count] for tensor in examples.tensors))
    store = build_store(folder / name, model, some, CrossEntropy(), how, memory=budget)
    return store, score_store(store, torch.randn(2, how.width), memory=budget).of


run("small", 32, memory)  # what is loaded on the first use is no part of it
Path("/proc/self/clear_refs").write_text("5")
before = now("VmRSS")
store, scores = run("large", 1500, memory)
print(len(store) * store.width * 4, now("VmHWM") - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_a_store_of_six_times_the_memory_is_built_and_scored(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    size, peak = map(int, done.stdout.split())
    assert size > 5 * 16 * 2**20
    assert peak < 2 * 16 * 2**20  # pages of files that are mapped count too, until given back
