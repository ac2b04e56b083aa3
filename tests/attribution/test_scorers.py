"""Scorers: which examples are measured, the order of scores, and means of queries."""

from pathlib import Path

import pytest
import torch
from letters import attributor, read
from torch import Tensor

from isokron.attribution import scorers

QUERIES = [(read(text)[0][0],) for text in ("abcdef", "fedcba")]


def plain(scores: Tensor) -> Tensor:
    return scores.as_subclass(Tensor)


def test_the_seed_chooses_the_examples_that_entries_are_measured_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorers, "MEASURED", 4)
    scorer = attributor(tmp_path).fit()._store_scorer()
    complete = scorer.encoders({"damping": 0.1})
    first, again, other = (scorer.shares(complete, seed) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_scores_of_length_sorted_examples_are_in_the_order_of_the_data(tmp_path: Path) -> None:
    lengths = [1 + 7 * number % 5 for number in range(32)]
    found = []
    for name, options in (("sorted", {"lengths": lengths}), ("unsorted", {})):
        a = attributor(tmp_path / name, **options).fit()
        assert (a.data.plan() == attributor(tmp_path / "other").data.plan()) == (not options)
        scores = a.score(QUERIES, save=False, store=False)
        stored = a.build(dim=8).score(QUERIES, save=False, store=True)
        found.append((plain(scores), plain(stored), a.self_influence(store=False)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.abs().max()))


def test_scores_for_the_mean_of_queries_are_the_mean_of_their_scores(tmp_path: Path) -> None:
    a = attributor(tmp_path).fit()
    single = plain(a.score(QUERIES, save=False, store=False))
    mean = plain(a.score(QUERIES, mode="mean", save=False, store=False))
    torch.testing.assert_close(mean, single.mean(0, keepdim=True), rtol=1e-3, atol=1e-5)
