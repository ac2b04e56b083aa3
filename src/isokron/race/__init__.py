"""Fair comparison of optimizers: same weights, same batches, every learning rate tuned."""

from isokron.race.race import run
from isokron.race.results import Result, Run, Standing

__all__ = ["Result", "Run", "Standing", "run"]
