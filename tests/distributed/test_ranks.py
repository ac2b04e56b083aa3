"""Collectives of real processes, and what they say when somebody is missing."""

import os
import signal
import time

import pytest
import torch
from torch import distributed as dist

from isokron.distributed import Ranks
from isokron.distributed.ranks import differing, fingerprint
from processes import outcomes, run


def world(timeout: float = 60.0) -> Ranks:
    return Ranks(dist.group.WORLD, timeout)


def uneven() -> list[list[float]]:
    ranks = world()
    own = torch.full((ranks.rank, 2), float(ranks.rank))
    return [part.flatten().tolist() for part in ranks.all_gather_uneven(own)]


def test_tensors_of_different_lengths_are_gathered() -> None:
    for found in run(3, uneven):
        assert found == [[], [1.0, 1.0], [2.0] * 4]


def exchanged() -> list[float]:
    ranks = world()
    sent = torch.arange(3.0) + 10 * ranks.rank  # one to rank 0, two to rank 1
    received = torch.empty(2 * (1 + ranks.rank))
    of_each = [1 + ranks.rank] * 2
    ranks.all_to_all_into(received, sent, of_each, [1, 2]).wait()
    assert ranks.traffic.sent == 4 * (2 if ranks.rank == 0 else 1)
    return received.tolist()


def test_what_is_sent_arrives_by_rank() -> None:
    assert run(2, exchanged) == [[0, 10], [1, 2, 11, 12]]


def disagreeing() -> str:
    ranks = world()
    ranks.agree("the order", ["a", "b"])
    with pytest.raises(RuntimeError) as caught:
        ranks.agree("the order", ["a", "b" if ranks.rank < 2 else "c"])
    return str(caught.value)


def test_a_difference_is_told_on_all_ranks() -> None:
    for text in run(3, disagreeing):
        assert "the order must be the same on all 3 ranks" in text
        assert 'rank 0 has ["a", "b"] against ["a", "c"] on rank 2' in text


def alone() -> None:
    ranks = world(2.0)
    if ranks.rank:
        time.sleep(60)
    ranks.barrier("the test")


def test_waiting_for_a_rank_that_does_not_come_ends() -> None:
    first = outcomes(2, alone, seconds=40, awaited=1)[0]
    text = str(first)
    assert "rank 0 of 2 waited in a barrier (the test)" in text
    assert "within 2 s" in text


def killed() -> None:
    ranks = world(30.0)
    if ranks.rank:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.barrier("the test")


def test_a_killed_rank_ends_the_others_with_an_error() -> None:
    first, second = outcomes(2, killed)
    assert "waited in a barrier (the test)" in str(first)
    assert second == -signal.SIGKILL


def test_fingerprints_ignore_the_order_of_keys_alone() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])


def test_a_difference_is_shown_where_it_begins() -> None:
    assert differing("x" * 50 + "a", "x" * 50 + "b") == f"…{'x' * 40}a against …{'x' * 40}b"
    assert differing("ab", "abc") == "ab against abc"
