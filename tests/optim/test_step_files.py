"""docs/architecture.md: the files that a steady step of SOAP runs through, in order."""

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import isokron
from processes import mesh, run

ROOT = Path(isokron.__file__).parent
DOCS = Path(__file__).parents[2] / "docs/architecture.md"


def files_of(call: Any) -> list[str]:
    """The files of the package whose functions a call runs, in the order of their first call."""
    files: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.setdefault(str(path.relative_to(ROOT)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(files)


def steady(params: list[nn.Parameter]) -> list[str]:
    """A step of SOAP between refreshes, on matrices, a norm's weight and a bias."""
    optimizer = isokron.SOAP(params, every=100, start=2)
    for _ in range(5):  # refreshes are in steps 2, 4, 8, …
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    return files_of(optimizer.step)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape)) for shape in ((12, 8), (8, 12), (12,), (8,))]


def test_a_steady_step_runs_through_the_files_that_the_page_lists() -> None:
    files = steady(parameters())
    listed = re.findall(r"^\d+\. `([\w/]+\.py)`", DOCS.read_text(), re.MULTILINE)
    assert files == listed
    assert len(files) <= 13


def sharded() -> list[str]:
    from torch.distributed.tensor import Shard, distribute_tensor

    params = [
        nn.Parameter(distribute_tensor(p.detach(), mesh(2), [Shard(0)])) for p in parameters()
    ]
    return steady(params)


def test_a_steady_step_of_sharded_parameters_runs_through_seventeen_files_at_most() -> None:
    for files in run(2, sharded):
        assert len(files) <= 17, files
