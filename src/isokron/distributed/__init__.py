"""Who owns which block, and how blocks travel."""

from isokron.distributed.agreement import agreed_trouble
from isokron.distributed.complete import completed
from isokron.distributed.ownership import assign, block_cost
from isokron.distributed.partial import (
    PartialState,
    asked_by_torch,
    full_is_asked_for,
    full_state_dict,
    is_receiver,
    partial_state,
)
from isokron.distributed.places import (
    Place,
    fill_,
    gather_parts_,
    is_flat_shard,
    is_sharded,
    local,
    part_of,
    whole_from,
)
from isokron.distributed.ranks import TIMEOUT, Ranks
from isokron.distributed.regions import block_of_shard, holders
from isokron.distributed.sharing import Sharing, check_communication, cut_along
from isokron.distributed.travel import Arriving, Travel
from isokron.distributed.world import process_count, ranks_of

__all__ = [
    "TIMEOUT",
    "Arriving",
    "PartialState",
    "Place",
    "Ranks",
    "Sharing",
    "Travel",
    "agreed_trouble",
    "asked_by_torch",
    "assign",
    "block_cost",
    "block_of_shard",
    "check_communication",
    "completed",
    "cut_along",
    "fill_",
    "full_is_asked_for",
    "full_state_dict",
    "gather_parts_",
    "holders",
    "is_flat_shard",
    "is_receiver",
    "is_sharded",
    "local",
    "part_of",
    "partial_state",
    "process_count",
    "ranks_of",
    "whole_from",
]
