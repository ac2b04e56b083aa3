"""Collectives of real processes, and what they say when somebody is missing."""

import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist

import isokron
from isokron.distributed import Ranks
from isokron.distributed.process_group import Pending, differing, fingerprint
from isokron.distributed.rank_tasks import side_by_side
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


def unlimited() -> None:
    """The collective itself would wait for as long as its group does."""
    ranks = world(2.0)
    if ranks.rank:
        time.sleep(60)
    Pending(dist.all_reduce(torch.zeros(1), async_op=True), "the test", ranks).wait()


def test_a_wait_ends_in_time_though_its_collective_does_not() -> None:
    first = outcomes(2, unlimited, seconds=40, awaited=1)[0]
    assert "rank 0 of 2 waited in the test for ranks that did not come within 2 s" in str(first)


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


class Backends:
    """A process group as torch shows which devices it has backends for."""

    def __init__(self, **by_device: str) -> None:
        self.by_device = by_device
        self._device_types = [torch.device(kind) for kind in by_device]
        self.bound_device_id = torch.device("cuda", 3)

    def _get_backend(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(name=lambda: self.by_device[device.type])


@pytest.mark.parametrize(
    ("backends", "messages", "data"),
    [
        ({"cpu": "gloo", "cuda": "nccl"}, "cpu", "cuda:1"),  # init_process_group()
        ({"cuda": "nccl", "cpu": "gloo"}, "cpu", "cuda:1"),
        ({"cuda": "nccl"}, "cuda:3", "cuda:1"),
        ({"cuda": "gloo", "cpu": "gloo"}, "cpu", "cpu"),  # init_process_group("gloo")
        ({"cpu": "gloo"}, "cpu", "cpu"),
    ],
)
def test_tensors_travel_from_where_the_group_reaches_them(
    backends: dict[str, str], messages: str, data: str
) -> None:
    ranks = Ranks(Backends(**backends))
    assert ranks.device == torch.device(messages)
    assert ranks.near(torch.device("cuda", 1)) == torch.device(data)
    assert ranks.near(torch.device("cpu")) == torch.device(messages)


def mixed(backend: str | None) -> tuple[str, list[float], list[float]]:
    """In a group that was made with, or without, a word of the devices it is for."""
    dist.destroy_process_group()
    store = dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    ranks = world()
    joined = side_by_side(ranks, torch.ones(2))
    weight = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = isokron.Shampoo([weight])
    optimizer.distribute()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return str(ranks.device), joined.tolist(), ranks.all_reduce_(torch.ones(2)).tolist()


@pytest.mark.parametrize("backend", ["cpu:gloo", "gloo", None])
def test_a_group_without_a_named_backend_is_known(backend: str | None) -> None:
    (found,) = outcomes(1, mixed, backend)
    assert found == (("cpu", [1.0, 1.0], [1.0, 1.0]),)


def test_fingerprints_ignore_the_order_of_keys_alone() -> None:
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1})
    assert fingerprint([1, 2]) != fingerprint([2, 1])


def test_a_difference_is_shown_where_it_begins() -> None:
    assert differing("x" * 50 + "a", "x" * 50 + "b") == f"…{'x' * 40}a against …{'x' * 40}b"
    assert differing("ab", "abc") == "ab against abc"
