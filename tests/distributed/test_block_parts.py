"""Blocks of a sharded parameter: what each rank has of them."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

import isokron
from isokron.block_layout import Block, cut_blocks
from isokron.distributed.block_exchange import block_parts
from isokron.distributed.dtensor import ShardGrid, row_shards, shard_grid

SHAPES = {
    "matrix": ((7, 10), {}),
    "cut": ((7, 10), {"max_dim": 4}),
    "row": ((1, 10, 3), {"max_dim": 4}),
    "convolution": ((6, 4, 3, 3), {"max_dim": 20}),
    "all in one matrix": ((6, 4, 3, 3), {"order": 2, "max_dim": 5}),
    "merged from the front": ((3, 2, 2, 9), {"max_dim": 12}),
    "experts": ((3, 5, 6), {"stacked": 1, "max_dim": 4}),
    "attention": ((9, 5), {"split": 3, "max_dim": 4}),
    "split columns": ((5, 9), {"split": (1, 8), "split_dim": 1}),
    "one row a part": ((3, 8), {"split": 3}),
    "experts' attention": ((2, 9, 4), {"stacked": 1, "split": 3}),
}


def assembled(block: Block, tensor: Tensor, shards: ShardGrid) -> Tensor:
    """A block put together from what every rank has of it, each element once."""
    result = torch.full_like(block.read(tensor), -1)
    parts = block_parts(block, tensor.shape, shards)
    assert len({part.rank for part in parts}) == len(parts)
    for part in parts:
        slot = result[part.cut]
        assert bool((slot == -1).all())
        slot.copy_(part.local.view(shard(tensor, shards, part.rank)))
    return result


def shard(tensor: Tensor, shards: ShardGrid, rank: int) -> Tensor:
    """What a rank has of a tensor."""
    (numbers,) = (key for key, holder in shards.ranks.items() if holder == rank)
    for number, (dim, bounds) in zip(numbers, shards.cuts, strict=True):
        tensor = tensor.narrow(dim, bounds[number], bounds[number + 1] - bounds[number])
    return tensor.contiguous()


def columns(shape: Sequence[int], dim: int, ranks: int) -> ShardGrid:
    return shard_grid(tuple(shape), (ranks,), (Shard(dim),))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_parts_have_every_element_of_a_block_once(name: str, ranks: int) -> None:
    shape, settings = SHAPES[name]
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    for block in cut_blocks(shape, **settings):
        parts = assembled(block, tensor, row_shards(shape[0], ranks))
        assert torch.equal(parts, block.read(tensor))


@pytest.mark.parametrize("dim", [0, 1])
def test_columns_may_be_sharded_too(dim: int) -> None:
    tensor = torch.arange(72.0).view(6, 4, 3)
    for block in cut_blocks(tensor.shape, max_dim=5):
        parts = assembled(block, tensor, columns(tensor.shape, dim, 3))
        assert torch.equal(parts, block.read(tensor))


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 5)])
@pytest.mark.parametrize("dims", ["01", "10", "00"])
@pytest.mark.parametrize("name", sorted(SHAPES.keys() - {"merged from the front"}))
def test_two_mesh_dimensions_may_shard_a_parameter(
    name: str, dims: str, sizes: tuple[int, int]
) -> None:
    shape, settings = SHAPES[name]
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape)
    shards = shard_grid(shape, sizes, tuple(Shard(int(dim)) for dim in dims))
    for block in cut_blocks(shape, **settings):
        assert torch.equal(assembled(block, tensor, shards), block.read(tensor))


def test_a_dimension_merged_into_another_is_refused() -> None:
    block = cut_blocks((6, 4, 3, 3), order=2)[0]
    with pytest.raises(ValueError, match="sharded along dimension 2, which its blocks merge"):
        block_parts(block, (6, 4, 3, 3), columns((6, 4, 3, 3), 2, 2))


@pytest.mark.parametrize("method", [isokron.Quad, isokron.Skew])
def test_blocks_of_the_white_kron_pair_too(method: type[isokron.Quad]) -> None:
    tensor = torch.arange(60.0).view(10, 3, 2)
    optimizer = method([torch.nn.Parameter(torch.zeros_like(tensor))], block_size=4)
    for block in optimizer.traits.cut(tensor.shape, optimizer.param_groups[0]):
        parts = assembled(block, tensor, row_shards(10, 3))
        assert torch.equal(parts, block.read(tensor))
