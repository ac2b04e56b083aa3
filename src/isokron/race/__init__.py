"""Fair comparison of optimizers: same weights, same batches, every learning rate tuned."""

from isokron.race.race import Interrupted, run
from isokron.race.results import Result, Run, Standing

__all__ = ["Interrupted", "Result", "Run", "Standing", "run"]
