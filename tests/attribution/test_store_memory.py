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

from isokron.attribution.projection import collect, encoders
from isokron.attribution.store import Schema, Store
from isokron.curvature import CrossEntropy
from isokron.curvature.selection import find_layers

torch.manual_seed(0)
model = nn.Linear(128, 128, bias=False)
x, y = torch.randn(1500, 128), torch.randint(0, 128, (1500,))
by_name = encoders(find_layers(model).layers, None)
columns = {name: encoder.width for name, encoder in by_name.items()}
width = sum(columns.values())
folder, memory = Path(sys.argv[1]), 16 * 2**20


def now(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def run(name, examples):
    size = memory // 8 // (4 * width)  # a shard is in memory a few times while it is written
    store = Store.begin(folder / name, Schema({}, columns, examples, size))
    for number, first, last in store.missing():
        rows = []
        batch = x[first:last], y[first:last]
        collect(model, [batch], CrossEntropy(), by_name, lambda part, *_: rows.append(part))
        store.write(number, torch.cat(rows), [str(k) for k in range(first, last)], {})
    store.finish()
    query = torch.randn(2, width)
    scores = torch.cat([query @ rows.mT for rows in store.blocks(memory)], 1)
    assert scores.shape == (2, examples)
    return store


run("small", 32)  # what is loaded on the first use is no part of it
Path("/proc/self/clear_refs").write_text("5")
before = now("VmRSS")
store = run("large", 1500)
print(len(store) * width * 4, now("VmHWM") - before)
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
