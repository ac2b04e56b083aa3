"""Every element has one owner and one place, and the cuts do not depend on the number of ranks."""

import pytest

from isokron.distributed.buckets import PIECE, UNIT, Bucket, Sheet, cuts, lay_out

SHAPES = [(), (1,), (31,), (0,), (127, 3), (PIECE,), (PIECE + 1,), (3, PIECE - 7), (0, 5), (1009,)]


def sheets(kinds: str = "a") -> list[Sheet]:
    return [Sheet(s, 4, kinds[i % len(kinds)]) for i, s in enumerate(SHAPES)]


def numel(bucket: Bucket) -> int:
    return sum(piece.length for piece in bucket.pieces)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("most", [1, 4096, 1 << 18, 1 << 30])
def test_every_element_is_in_one_piece_and_every_piece_in_one_place(ranks: int, most: int) -> None:
    buckets = lay_out(sheets("ab"), ranks, most)
    assert [bucket.number for bucket in buckets] == list(range(len(buckets)))
    ends = dict.fromkeys(range(len(SHAPES)), 0)
    for piece in sorted((p for b in buckets for p in b.pieces), key=lambda p: (p.number, p.offset)):
        assert piece.offset == ends[piece.parameter]
        assert piece.shape == SHAPES[piece.parameter]
        ends[piece.parameter] += piece.length
        whole = sheets()[piece.parameter].numel
        assert piece.offset % UNIT == 0
        assert piece.length % UNIT == 0 or piece.offset + piece.length == whole
    assert list(ends.values()) == [sheet.numel for sheet in sheets()]
    for bucket in buckets:
        assert len({sheets("ab")[piece.parameter].kind for piece in bucket.pieces}) == 1
        places = set()
        for piece in bucket.pieces:
            assert piece.bucket == bucket.number
            assert 0 <= piece.owner < ranks
            assert piece.start + piece.length <= bucket.section
            places |= {(piece.owner, piece.start + k) for k in range(piece.length)}
        assert len(places) == numel(bucket)  # none on top of another


def test_the_cuts_are_the_same_for_any_number_of_ranks() -> None:
    def grid(ranks: int) -> list[list[tuple[int, int, int, int]]]:
        buckets = lay_out(sheets(), ranks, 1 << 18)
        return [[(p.parameter, p.number, p.offset, p.length) for p in b.pieces] for b in buckets]

    assert grid(1) == grid(2) == grid(7)


def test_buckets_hold_at_most_what_they_may_and_last_parameters_come_first() -> None:
    most = 3 * PIECE * 4
    layers = [Sheet((PIECE // 2,), 4) for _ in range(20)] + [Sheet((10, PIECE), 4)]
    buckets = lay_out(layers, 2, most)
    assert all(numel(bucket) * 4 <= most for bucket in buckets)
    assert buckets[0].parameters == [20]
    firsts = [bucket.parameters[0] for bucket in buckets]
    assert firsts == sorted(firsts, reverse=True)


def test_a_parameter_is_in_the_buckets_of_one_unit() -> None:
    for most in (1, 4096, 1 << 18, 1 << 20):
        buckets = lay_out(sheets(), 3, most)
        for i in range(len(SHAPES)):
            assert len({b.unit for b in buckets if i in b.parameters}) <= 1
        units = {unit: [b for b in buckets if b.unit == unit] for unit in {b.unit for b in buckets}}
        assert all(
            len(several) == 1 or several[0].parameters == several[-1].parameters
            for several in units.values()
        )


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_own_equal_parts_of_a_large_model(ranks: int) -> None:
    layers = [Sheet((1024, 1024), 4), Sheet((4096, 512), 4), Sheet((1024,), 4)] * 8
    buckets = lay_out(layers, ranks, 25 << 20)
    loads = [sum(p.length for b in buckets for p in b.owned(rank)) for rank in range(ranks)]
    assert max(loads) <= 1.05 * sum(loads) / ranks
    padded = sum(bucket.section * ranks for bucket in buckets)
    assert padded <= 1.1 * sum(loads)


def test_small_buckets_do_not_all_go_to_one_rank() -> None:
    buckets = lay_out([Sheet((100,), 4)] * 12, 4, 400)
    assert len(buckets) == 12
    assert [sum(len(b.owned(rank)) for b in buckets) for rank in range(4)] == [3] * 4


def test_more_parameters_leave_the_owners_of_others_as_they_are() -> None:
    first = lay_out(sheets(), 3, 1 << 18)
    more = lay_out([Sheet((1000,), 4)] * 2, 3, 1 << 18, first=len(SHAPES), before=first)
    assert [bucket.number for bucket in more] == [len(first)]
    assert more[0].unit == first[-1].unit + 1
    assert {piece.parameter for piece in more[0].pieces} == {len(SHAPES), len(SHAPES) + 1}
    loads = [sum(p.length for b in first for p in b.owned(rank)) for rank in range(3)]
    assert more[0].pieces[0].owner == loads.index(min(loads))


def test_cuts_end_where_the_parameter_does() -> None:
    assert cuts(0) == []
    assert cuts(1) == [(0, 1)]
    assert cuts(2 * PIECE) == [(0, PIECE), (PIECE, PIECE)]
    assert cuts(PIECE + 33) == [(0, PIECE), (PIECE, 33)]
