import pytest
import torch

from isokron.block_layout import cut_blocks, cut_lengths, merge_dims
from isokron.optim.blocks import BatchRow, views_of


@pytest.mark.parametrize(
    ("shape", "max_dim", "order", "expected"),
    [
        ((256, 128, 3, 3), 1024, None, (256, 128, 9)),
        ((256, 128, 3, 3), None, 2, (256, 1152)),
        ((256, 128, 3, 3), 64, 2, (256, 1152)),
        ((16, 6, 5, 5), None, 2, (16, 150)),
        ((5, 5, 6, 16), None, 2, (150, 16)),  # of flax, whose output channels come last
        ((4, 4), None, 2, (4, 4)),
        ((32, 3, 3, 3), 1024, None, (32, 27)),  # a matrix never becomes a vector
        ((4, 4), 1024, None, (4, 4)),
        ((1, 5, 1, 7), 1024, None, (5, 7)),
        ((7,), 1024, None, (7,)),
        ((1, 1), 1024, None, ()),
        ((8, 8, 8), 64, None, (8, 64)),
        ((8, 8, 8), 63, None, (8, 8, 8)),
    ],
)
def test_small_neighbours_merge_from_the_last_backwards(
    shape: tuple[int, ...], max_dim: int | None, order: int | None, expected: tuple[int, ...]
) -> None:
    assert merge_dims(shape, max_dim, order) == expected


@pytest.mark.parametrize(
    ("size", "max_dim", "length"),
    [
        (256, 256, 256),
        (255, None, 255),
        (768, 256, 256),
        (576, 256, 192),
        (1152, 256, 192),  # one block more than needed, and all are equal
        (257, 256, 136),  # of an odd size no two blocks are equal: multiples of 8
        (7, 4, 4),
    ],
)
def test_dimensions_are_cut_into_equal_blocks_where_possible(
    size: int, max_dim: int | None, length: int
) -> None:
    assert cut_lengths((size,), max_dim) == (length,)


@pytest.mark.parametrize(
    ("shape", "settings", "count"),
    [
        ((10, 7), {"max_dim": 4}, 3 * 2),
        ((3, 5, 6), {"stacked": 1}, 3),
        ((2, 3, 5, 6), {"stacked": 2, "max_dim": 4}, 6 * 4),
        ((12, 5), {"split": 3}, 3),
        ((12, 5), {"split": (6, 4, 2)}, 3),
        ((5, 12), {"split": 3, "split_dim": 1}, 3),
        ((2, 9, 4), {"stacked": 1, "split": 3}, 6),
        ((6, 4, 3, 3), {"order": 2, "split": 2}, 2),
        ((16, 9, 3, 3), {"max_dim": 10}, 2 * 1 * 1),
    ],
)
def test_blocks_cover_every_element_once(
    shape: tuple[int, ...], settings: dict[str, int], count: int
) -> None:
    blocks = cut_blocks(shape, **settings)
    covered = torch.zeros(shape)
    for block in blocks:
        view = block.view(covered)
        assert view.shape == block.shape
        view += 1
    assert len(blocks) == count
    assert covered.eq(1).all()


def test_blocks_are_views_and_reads_are_equal() -> None:
    weight = torch.randn(12, 5, 3)
    for block in cut_blocks(weight.shape, order=2, split=(8, 4)):
        assert torch.equal(block.read(weight), block.view(weight))
        assert block.view(weight).untyped_storage().data_ptr() == weight.data_ptr()


def test_a_layout_that_does_not_merge_is_read_by_copy_and_not_viewed() -> None:
    weight = torch.randn(4, 2, 3, 3).contiguous(memory_format=torch.channels_last)
    (block,) = cut_blocks(weight.shape, order=2)
    assert torch.equal(block.read(weight), weight.reshape(4, 18))
    with pytest.raises(RuntimeError):
        block.view(weight)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"split": 5}, "split=5 must divide dimension 0"),
        ({"split": (6, 5)}, "sum to 12"),
        ({"split": (12, 0)}, "positive sizes"),
        ({"split": 2, "split_dim": 2}, "split_dim 2"),
    ],
)
def test_a_split_that_does_not_fit_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cut_blocks((12, 5), **settings)


@pytest.mark.parametrize(
    ("shape", "settings", "views"),
    [
        ((8, 12), {"max_dim": 4}, 1),
        ((10, 14), {"max_dim": 4}, 4),  # whole ones, those at either end, and the corner
        ((3, 8, 8), {"stacked": 1, "max_dim": 4}, 3),
        ((12, 8), {"split": 3, "max_dim": 2}, 3),
        ((8, 8, 8), {"max_dim": 4}, 1),
        ((6, 4, 3, 3), {"order": 2}, 1),
        ((5, 7), {}, 1),
    ],
)
def test_equal_blocks_are_read_and_written_as_few_tiles(
    shape: tuple[int, ...], settings: dict[str, int], views: int
) -> None:
    param = torch.randn(shape)
    rows: dict[tuple[int, ...], list[BatchRow]] = {}
    for number, block in enumerate(cut_blocks(shape, **settings)):
        rows.setdefault(block.shape, []).append(BatchRow(param, block, number))
    found = {block_shape: views_of(equal) for block_shape, equal in rows.items()}
    assert sum(map(len, found.values())) == views
    for block_shape, several in found.items():
        expected = torch.stack([row.block.read(param) for row in rows[block_shape]])
        assert [i for view in several for i in view.rows] == list(range(len(expected)))
        assert torch.equal(torch.cat([view.read(param) for view in several]), expected)
        for view in several:
            view.split(view.block.view(param)).zero_()
    assert not param.any()


@pytest.mark.parametrize("chosen", [range(1, 6), [0, 1, 2, 4, 5, 6], [3, 4, 8, 9]])
def test_rows_with_gaps_are_tiles_too(chosen: list[int]) -> None:
    param = torch.randn(12, 12)
    blocks = cut_blocks(param.shape, max_dim=3)
    rows = [BatchRow(param, blocks[i], i) for i in chosen]
    read = torch.cat([view.read(param) for view in views_of(rows)])
    assert torch.equal(read, torch.stack([row.block.read(param) for row in rows]))
