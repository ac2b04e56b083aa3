"""Batches of bounded size: the same steps, the same checkpoints, less memory."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import isokron
from cases import build

CASES: list[tuple[str, dict[str, Any]]] = [
    ("SOAP", {}),
    ("Shampoo", {"refresh": "staggered"}),
    ("Katie", {"decay": "l2"}),
    ("Katie", {"refresh": 1}),
    ("Muon", {}),
    ("Quad", {"block_size": 4}),
    ("Skew", {"block_size": 4, "every": 3}),
]
SHAPES = [(8, 12), (10, 7), (8, 12), (3, 4), (5,), (10, 7)]


def params_of() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in SHAPES]


def trained(
    name: str, workspace: int, settings: dict[str, Any], steps: int = 7
) -> tuple[list[nn.Parameter], isokron.Preconditioned]:
    params = params_of()
    blocks = {} if "block_size" in settings or name == "Muon" else {"max_dim": 4, "every": 3}
    optimizer = build(getattr(isokron, name), params, **blocks, **settings, workspace=workspace)
    resume(params, optimizer, range(steps))
    return params, optimizer


def resume(params: list[nn.Parameter], optimizer: isokron.Preconditioned, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        for i, param in enumerate(params):
            param.grad = torch.randn_like(param) if (i + step) % 4 else None
        optimizer.step()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_small_batches_make_the_same_steps(name: str, settings: dict[str, Any]) -> None:
    params, optimizer = trained(name, 1, settings)
    others, other = trained(name, 1 << 30, settings)
    assert len(optimizer._layouts[0].waves) > len(other._layouts[0].waves)
    for param, expected in zip(params, others, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_checkpoints_do_not_depend_on_the_workspace(name: str, settings: dict[str, Any]) -> None:
    params, optimizer = trained(name, 1, settings)
    saved = optimizer.state_dict()
    others, other = trained(name, 1 << 30, settings, steps=0)
    for param, source in zip(others, params, strict=True):
        param.data.copy_(source.data)
    saved["param_groups"][0]["workspace"] = 1 << 30
    other.load_state_dict(saved)
    resume(params, optimizer, range(7, 12))
    resume(others, other, range(7, 12))
    for param, expected in zip(others, params, strict=True):
        torch.testing.assert_close(param, expected, rtol=1e-9, atol=1e-9)


def test_a_workspace_of_nothing_is_refused() -> None:
    with pytest.raises(
        ValueError, match="workspace must be None or a whole number of bytes above 0"
    ):
        build(isokron.SOAP, params_of(), workspace=0)


PEAK = """
import sys, torch, isokron
torch.set_num_threads(1)
settings = {} if sys.argv[1] == "Quad" else {"start": 100, "every": 100}


def peak():  # resident memory at its highest, KiB
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


def made(size, count, workspace):
    params = [torch.nn.Parameter(torch.randn(size, size)) for _ in range(count)]
    for param in params:
        param.grad = torch.randn_like(param)
    group = {"params": params, "workspace": workspace}
    return getattr(isokron, sys.argv[1])([group], **settings)


made(64, 2, 1 << 30).step()  # libraries load what they need
optimizer = made(512, 48, int(sys.argv[2]))
for layout in optimizer._current_layouts():
    for batch in layout.batches:
        for value in batch.state.values():
            value.add_(0)  # zeros take memory when they are written to
before = peak()
optimizer.step()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
@pytest.mark.parametrize("name", ["SOAP", "Katie", "Quad"])
def test_a_step_needs_some_workspaces_and_not_some_models(name: str) -> None:
    """48 MiB of gradients: at once, a step takes several times that; by 2 MiB it does not."""
    growth = {
        workspace: int(
            subprocess.run(
                [sys.executable, "-c", PEAK, name, str(workspace)],
                # what is freed goes back at once, and does not count again
                env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        for workspace in (2 << 20, 1 << 30)
    }
    assert growth[1 << 30] > 2 * 48 * 1024
    assert growth[2 << 20] < 40 * 1024
