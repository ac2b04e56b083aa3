"""One progress display for a command: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from isokron.cli import several

if TYPE_CHECKING:
    from isokron.training import Watcher

STAGES = {
    "fit": "curvature",
    "build": "gradients",
    "score": "scores",
    "answer": "answers",
    "retrain": "retraining",
    "compress": "projections",
}
UNITS = {"answer": "query", "retrain": "model", "compress": "part"}


@contextmanager
def watched() -> Iterator[Watcher]:
    """On stderr, for as long as it lasts; by one of several processes."""
    from rich.console import Console

    from isokron.training import Bar, Lines, Silent

    if not several.leads():
        yield Silent()
        return
    console = Console(stderr=True)
    if console.is_terminal:
        with Bar(console) as bar:
            yield bar
    else:
        yield Lines(console.file)


class Stages:
    """Tells a watcher of a run's stages: which it is, how far, of how many."""

    def __init__(self, watcher: Watcher) -> None:
        self.watcher, self.stage = watcher, ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != self.stage or not done:
            self.stage = stage
            self.watcher.began(STAGES.get(stage, stage), total, UNITS.get(stage, "example"))
        self.watcher.advanced(done)
