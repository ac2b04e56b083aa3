"""The memory that a run announces before it begins is what it uses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from isokron import Attributor, losses

SCRIPT = """
import json
import sys
from contextlib import suppress
from pathlib import Path
import torch
from torch import nn
from isokron import Attributor, losses

VOCABULARY, WIDTH, LENGTH, EXAMPLES = 20_000, 256, 40, 16
torch.set_num_threads(1)


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up = nn.ModuleList(nn.Linear(WIDTH, 4 * WIDTH) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.table(tokens)
        for up, down in zip(self.up, self.down):
            x = x + down(up(self.norm(x)).relu())
        return self.head(x)


def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))


torch.manual_seed(0)
model = Words()
tokens = torch.randint(VOCABULARY, (EXAMPLES, LENGTH + 1))
data = [(row[:-1], row[1:]) for row in tokens]
# what torch loads with its first passes and decompositions is no part of a plan
small = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
short = [(row[:-1] % 5, row[1:] % 5) for row in tokens[:2]]
settings = json.loads(sys.argv[2])
method = settings.pop("method")
warm = Attributor(sys.argv[1] + "/warm", small, short, loss=losses.CrossEntropy())
warm.fit(method).score(short)
a = Attributor(sys.argv[1] + "/run", model, data, loss=losses.CrossEntropy(), **settings)
queries = a.queries(data[:8])
plan = a.memory_plan(method, queries)
with suppress(OSError):  # some containers forbid it
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
before = memory("VmRSS:")
a.fit(method).score(queries, top=1)
a.self_influence()
used = memory("VmHWM:") - before
print(json.dumps({"announced": plan.peak, "used": used, "plan": plan.summary()}))
"""


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "kfac"},
        {"method": "ekfac"},
        {"method": "kfac", "head": "lowrank"},
    ],
    ids=str,
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_run_uses_what_it_announces(settings: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(settings)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout)
    assert result["used"] <= 2 * result["announced"], result
    assert result["announced"] <= 6 * result["used"], result


class Counted(nn.Linear):
    calls = 0

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        Counted.calls += 1
        return super().forward(input)


def test_memory_that_is_too_little_is_refused_before_any_pass_over_the_data(
    tmp_path: Path,
) -> None:
    model = nn.Sequential(Counted(64, 64))
    data = [(torch.randn(64), 0) for _ in range(50)]
    loss = losses.CrossEntropy()
    a = Attributor(tmp_path, model, data, loss=loss, memory=20_000, batch_size=1)
    with pytest.raises(ValueError, match=r"memory: peak .* does not fit; give more memory"):
        a.fit()
    assert Counted.calls <= 7  # probes of single examples, no pass over the 50
    assert a.folder.stage("fit") is None
