"""Training-data attribution: which examples taught the model what it says."""

from isokron.attribution.attributor import Attributor
from isokron.attribution.data import Data
from isokron.attribution.queries import Query, read_queries
from isokron.attribution.results import Scores
from isokron.attribution.store import Store

__all__ = ["Attributor", "Data", "Query", "Scores", "Store", "read_queries"]
