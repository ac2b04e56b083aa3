"""Blocks of a sharded parameter: what each rank has of them."""

import itertools

import pytest
import torch

import isokron
from isokron.block_layout import cut_blocks
from isokron.distributed.places import chunk_bounds
from isokron.distributed.regions import block_of_shard, holders

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


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_holders_have_every_element_once_and_where_they_say(name: str, ranks: int) -> None:
    shape, settings = SHAPES[name]
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    bounds = chunk_bounds(shape[0], ranks)
    for block in cut_blocks(shape, **settings):
        wanted = block.read(whole)
        found = torch.full_like(wanted, -1)
        held = holders(block, shape, 0, bounds)
        assert len({holder.rank for holder in held}) == len(held)
        for rank, (lo, hi) in enumerate(itertools.pairwise(bounds)):
            mine = block_of_shard(block, shape, 0, lo, hi)
            assert (mine is not None) == (rank in [holder.rank for holder in held])
            if mine is not None:
                holder = next(each for each in held if each.rank == rank)
                place = found.narrow(holder.axis, holder.lo, holder.hi - holder.lo)
                assert bool((place == -1).all())
                place.copy_(mine.view(whole[lo:hi]))
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("dim", [0, 1])
def test_columns_may_be_sharded_too(dim: int) -> None:
    shape = (6, 4, 3)
    whole = torch.arange(72.0).view(shape)
    for block in cut_blocks(shape, max_dim=5):
        wanted = block.read(whole)
        found = torch.full_like(wanted, -1)
        bounds = chunk_bounds(shape[dim], 3)
        for holder in holders(block, shape, dim, bounds):
            lo, hi = bounds[holder.rank], bounds[holder.rank + 1]
            mine = block_of_shard(block, shape, dim, lo, hi)
            shard = whole.narrow(dim, lo, hi - lo).contiguous()
            found.narrow(holder.axis, holder.lo, holder.hi - holder.lo).copy_(mine.view(shard))
        assert torch.equal(found, wanted)


def test_a_dimension_merged_into_another_is_refused() -> None:
    block = cut_blocks((6, 4, 3, 3), order=2)[0]
    with pytest.raises(ValueError, match="sharded along dimension 2, which its blocks merge"):
        holders(block, (6, 4, 3, 3), 2, (0, 2, 3))


@pytest.mark.parametrize("method", [isokron.Quad, isokron.Skew])
def test_blocks_of_the_white_kron_pair_too(method: type[isokron.Quad]) -> None:
    shape = (10, 3, 2)
    optimizer = method([torch.nn.Parameter(torch.zeros(shape))], block_size=4)
    whole = torch.arange(60.0).view(shape)
    for block in optimizer.cut(shape, optimizer.param_groups[0]):
        for holder in holders(block, shape, 0, (0, 4, 8, 10)):
            lo, hi = (0, 4, 8, 10)[holder.rank : holder.rank + 2]
            mine = block_of_shard(block, shape, 0, lo, hi)
            part = block.read(whole).narrow(holder.axis, holder.lo, holder.hi - holder.lo)
            assert torch.equal(mine.view(whole[lo:hi]), part)
