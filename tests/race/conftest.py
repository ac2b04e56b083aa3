"""The toy task and its optimizers can be named in specs: toy:task, toy:Raises."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def task():
    import toy

    return toy.task()


@pytest.fixture
def make_run():
    """A finished run by its curve, made by hand."""
    from isokron.race.results import Run

    def make(optimizer="adamw", lr=0.1, seed=0, losses=(3.0, 2.0, 1.0), **changes):
        values = {
            "optimizer": optimizer,
            "lr": lr,
            "seed": seed,
            "steps": 20,
            "status": "finished",
            "message": "",
            "eval_steps": [10 * i for i in range(len(losses))],
            "eval_losses": list(losses),
            "train_losses": list(losses[1:]),
            "model_seconds": 0.010,
            "optimizer_seconds": 0.002,
            "optimizer_bytes": 2048,
            "weights": "w",
            "batches": "b",
        }
        return Run(**(values | changes))

    return make
