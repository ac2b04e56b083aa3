"""Fair comparison of optimizers: same weights, same batches, all tuned in the same way."""

from isokron.race.race import run
from isokron.race.results import Result, Run, Standing, Trial
from isokron.race.search import Setting

__all__ = ["Result", "Run", "Setting", "Standing", "Trial", "run"]
