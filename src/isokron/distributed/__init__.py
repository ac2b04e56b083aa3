"""Which rank owns which block, how blocks travel, and how ranks agree."""

from isokron.distributed.block_exchange import Arriving, BlockExchange
from isokron.distributed.block_owners import assign, block_cost, factored_sizes
from isokron.distributed.dtensor import (
    Place,
    dtensor_from,
    fill_,
    gather_parts_,
    is_flat_shard,
    is_sharded,
    local,
    part_of,
    row_range,
    sharded_mesh_dims,
    whole_from,
)
from isokron.distributed.process_group import TIMEOUT, Ranks, process_count, ranks_of
from isokron.distributed.sharded_state import (
    PartialState,
    full_state_dict,
    gather_rows,
    is_receiver,
    partial_state,
    shard_rows,
    unshard_rows,
)
from isokron.distributed.step_agreement import StepAgreement, agreed_trouble, check_communication

__all__ = [
    "TIMEOUT",
    "Arriving",
    "BlockExchange",
    "PartialState",
    "Place",
    "Ranks",
    "StepAgreement",
    "agreed_trouble",
    "assign",
    "block_cost",
    "check_communication",
    "dtensor_from",
    "factored_sizes",
    "fill_",
    "full_state_dict",
    "gather_parts_",
    "gather_rows",
    "is_flat_shard",
    "is_receiver",
    "is_sharded",
    "local",
    "part_of",
    "partial_state",
    "process_count",
    "ranks_of",
    "row_range",
    "shard_rows",
    "sharded_mesh_dims",
    "unshard_rows",
    "whole_from",
]
