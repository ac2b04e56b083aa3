"""What a person sees while a race runs: live in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING

from isokron.pages.plot import short
from isokron.race.results import Run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

QUIET_SECONDS = 10.0  # between lines where there is no terminal


@dataclass
class Tally:
    """Counts, best losses and the time remaining.

    total, ended: runs. work, worked: the same in steps, since runs differ in length.
    length: steps of the race's own runs; steps: of the current one.
    """

    length: int = 0
    steps: int = 0
    total: int = 0
    ended: int = 0
    work: int = 0
    worked: int = 0
    current: str = ""
    step: int = 0
    loss: float = math.nan
    best: dict[str, tuple[float, float]] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)

    def planned(self, runs: int, steps: int) -> None:
        self.total += runs
        self.work += runs * steps
        self.length = self.length or steps

    def started(self, optimizer: str, lr: float, seed: int, steps: int) -> None:
        shorter = "" if steps == self.length else f", {steps} steps"
        self.current = f"{optimizer}, lr {lr:g}, seed {seed}{shorter}"
        self.steps, self.step, self.loss = steps, 0, math.nan

    def ended_run(self, run: Run) -> None:
        self.ended += 1
        self.worked += self.steps
        self.step = 0
        if run.schedule is not None:  # not comparable with the others' best
            return
        best = self.best.get(run.optimizer, (math.inf, math.nan))
        self.best[run.optimizer] = min(best, (run.final, run.lr))

    def share(self) -> float:
        """How much of what is planned is done, by steps."""
        return (self.worked + self.step) / max(1, self.work)

    def remaining(self) -> float | None:
        """Seconds left at the pace so far; None before there is a pace."""
        share = self.share()
        elapsed = time.monotonic() - self.began
        return elapsed * (1 - share) / share if share > 0 and elapsed > 1 else None

    def best_words(self) -> str:
        return ", ".join(
            f"{short(name)} {final:.4f} (lr {lr:g})"
            if math.isfinite(final)
            else f"{short(name)} none yet"
            for name, (final, lr) in self.best.items()
        )


class LineProgress:
    """Plain lines, without control characters, for logs and pipes."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.tally = Tally()
        self.spoke = time.monotonic()

    def planned(self, runs: int, steps: int, why: str = "") -> None:
        self.tally.planned(runs, steps)
        if runs:
            words = f"{runs} {'run' if runs == 1 else 'runs'} of {steps} steps"
            self._say(f"{words} more: {why}" if why else words)

    def started(self, optimizer: str, lr: float, seed: int, steps: int) -> None:
        self.tally.started(optimizer, lr, seed, steps)

    def stepped(self, step: int, loss: float) -> None:
        tally = self.tally
        tally.step, tally.loss = step, loss
        if time.monotonic() - self.spoke > QUIET_SECONDS:
            at = f"run {tally.ended + 1} of {tally.total}, {tally.current}: step {step}"
            self._say(f"{at} of {tally.steps}, loss {loss:.5g}{_left(tally)}")

    def ended(self, run: Run) -> None:
        self.tally.ended_run(run)
        outcome = f"loss {run.final:.4f}" if run.status == "finished" else run.status
        self._say(f"run {self.tally.ended} of {self.tally.total}, {self.tally.current}: {outcome}")

    def _say(self, text: str) -> None:
        self.spoke = time.monotonic()
        print(text, file=self.stream, flush=True)


class LiveProgress:
    """A bar, the current run and the best so far, redrawn in place."""

    def __init__(self, console: Console) -> None:
        from rich.live import Live

        self.tally = Tally()
        self.live = Live(console=console, get_renderable=self._render, transient=True)

    def __enter__(self) -> LiveProgress:
        self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.live.stop()

    def planned(self, runs: int, steps: int, why: str = "") -> None:
        self.tally.planned(runs, steps)

    def started(self, optimizer: str, lr: float, seed: int, steps: int) -> None:
        self.tally.started(optimizer, lr, seed, steps)

    def stepped(self, step: int, loss: float) -> None:
        self.tally.step, self.tally.loss = step, loss

    def ended(self, run: Run) -> None:
        self.tally.ended_run(run)

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        tally = self.tally
        number = min(tally.ended + 1, tally.total)
        now = f"run {number} of {tally.total}  {tally.current}"
        loss = "" if math.isnan(tally.loss) else f", loss {tally.loss:.5g}"
        where = f"step {tally.step} of {tally.steps}{loss}{_left(tally)}"
        lines: list[RenderableType] = [Text(now), Text(where, style="dim")]
        if tally.best:
            lines.append(Text(f"best  {tally.best_words()}", style="dim"))
        return Group(*lines, ProgressBar(total=1.0, completed=tally.share(), width=48))


def _left(tally: Tally) -> str:
    seconds = tally.remaining()
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f", about {minutes} min {rest:02d} s left" if minutes else f", about {rest} s left"
