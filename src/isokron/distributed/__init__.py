"""Who owns which block, and how blocks travel."""

from isokron.distributed.agreement import agreed_trouble
from isokron.distributed.ownership import assign, block_cost
from isokron.distributed.places import (
    Place,
    Sharing,
    fill_,
    gather_parts_,
    is_sharded,
    local,
    part_of,
    whole_from,
)
from isokron.distributed.ranks import TIMEOUT, Ranks, ranks_of
from isokron.distributed.regions import block_of_shard, holders
from isokron.distributed.travel import Arriving, Travel

__all__ = [
    "TIMEOUT",
    "Arriving",
    "Place",
    "Ranks",
    "Sharing",
    "Travel",
    "agreed_trouble",
    "assign",
    "block_cost",
    "block_of_shard",
    "fill_",
    "gather_parts_",
    "holders",
    "is_sharded",
    "local",
    "part_of",
    "ranks_of",
    "whole_from",
]
