"""The result as files: race.json, race.csv, loss.svg and the page."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from isokron.pages.numbers import finite
from isokron.pages.plot import standalone
from isokron.race.figures import loss_by_step
from isokron.race.page import page
from isokron.race.results import Result, Run
from isokron.race.store import Store

HEADER = (
    *("task", "optimizer", "lr", "seed", "schedule_steps", "status", "final_loss", "best_loss"),
    *("steps_done", "seconds", "model_ms", "optimizer_ms", "optimizer_bytes", "best_lr", "message"),
)


def write_reports(result: Result, store: Store) -> None:
    store.write("race.json", as_json(result))
    store.write("race.csv", as_csv(result))
    store.write("loss.svg", standalone(loss_by_step(result)))
    store.write("index.html", page(result))


def as_json(result: Result) -> str:
    """Settings, standings, runs; the training loss of every step stays in the runs' files."""
    value = {
        "complete": result.complete,
        "settings": dict(result.settings),
        "standings": [asdict(standing) for standing in result.standings],
        "runs": [_run(run) for run in result.runs],
        "probes": [_run(run) for run in result.probes],
    }
    return json.dumps(finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def as_csv(result: Result) -> str:
    """One row per run, diverged and failed ones too, and those on shorter schedules."""
    best = {standing.optimizer: standing.best_lr for standing in result.standings}
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(HEADER)
    # an optimizer's runs of the race come first; on shorter schedules, the longest does
    whole = result.settings["steps"]
    every = [(run, run.schedule or whole) for run in (*result.runs, *result.probes)]
    for run, length in sorted(every, key=lambda e: (e[0].optimizer, -e[1], e[0].lr, e[0].seed)):
        steps = len(run.train_losses)
        writer.writerow(
            [
                result.settings["task"],
                run.optimizer,
                repr(run.lr),
                run.seed,
                length,
                run.status,
                repr(run.final) if run.status == "finished" else run.status,
                repr(min(run.eval_losses)) if run.eval_losses else "",
                steps,
                f"{steps * run.step_seconds:.3f}",
                f"{1e3 * run.model_seconds:.3f}",
                f"{1e3 * run.optimizer_seconds:.3f}",
                run.optimizer_bytes,
                "yes" if run.lr == best[run.optimizer] else "no",
                run.message,
            ]
        )
    return file.getvalue()


def _run(run: Run) -> dict[str, Any]:
    return {k: v for k, v in asdict(run).items() if k != "train_losses"} | {"final": run.final}
