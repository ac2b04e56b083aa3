"""Attribution on 2 and 3 processes: the scores of one, whoever did what, and whoever was killed."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

from isokron.attribution import Attributor, read_queries
from isokron.distributed import Ranks
from processes import outcomes, run

sys.path.insert(0, str(Path(__file__).parents[1] / "attribution"))
from letters import Model, attributor, task

QUERIES = ["eval:0-2", "abcabc", "train:7"]
BUILDS: dict[str, dict[str, Any]] = {
    "white": {"dim": 4},
    "whole": {"dim": 100},
}


def world() -> Ranks | None:
    return Ranks(dist.group.WORLD, 60.0) if dist.is_initialized() else None


def begun(folder: Path, **options: Any) -> Attributor:
    return attributor(folder, ranks=world(), **options)


def contents(folder: Path) -> dict[str, bytes]:
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def stable(folder: Path) -> list[str]:
    """Files whose names do not come from their bytes."""
    return [name for name in contents(folder) if "factors-" not in name]


def scored(folder: Path) -> dict[str, Tensor]:
    """All that a run computes, by name."""
    results = {}
    for name, settings in BUILDS.items():
        a = begun(folder / name).fit("kfac" if name == "white" else "ekfac")
        queries = read_queries(task(), a.subject.model, QUERIES, ids=a.data.ids)
        calls: dict[str, dict[str, Any]] = {
            "exact": {"verify": True},
            "unit": {"unit": True, "by_layer": True},
            "mean": {"mode": "mean"},
            "nearest": {"mode": "nearest", "by_layer": True},
        }
        for key, options in calls.items():
            scores = a.score(queries, name=key, store=False, **options)
            results[f"{name} {key}"] = scores.as_subclass(Tensor)
        if name == "whole":
            bare = begun(folder / "refined", layers="*,!table").fit()
            refined = bare.score(queries, refine=4, name="refined")
            results["refined"] = refined.as_subclass(Tensor)
        results[f"{name} layers"] = a.score(queries, save=False).by_layer
        results[f"{name} self"] = a.self_influence(store=False)
        a.build(**settings)
        results[f"{name} stored"] = a.score(queries, name="stored").as_subclass(Tensor)
        results[f"{name} self stored"] = a.self_influence()
    return results


def test_several_processes_give_the_scores_of_one(tmp_path: Path) -> None:
    alone = scored(tmp_path / "alone")
    for count in (2, 3):
        first, second = (tmp_path / f"{count}-{turn}" for turn in range(2))
        everyone = run(count, scored, first)
        for name, right in alone.items():
            scale = float(right.abs().max())
            for results in everyone:
                assert torch.equal(results[name], everyone[0][name]), name
                torch.testing.assert_close(results[name], right, rtol=1e-3, atol=1e-4 * scale)
        assert stable(first) == stable(tmp_path / "alone")
        run(count, scored, second)
        assert contents(first) == contents(second)


def built(folder: Path) -> None:
    begun(folder).fit(None).build(dim=4)


def dying(folder: Path, at: int) -> None:
    """Rank 1 is killed when it is about to rename its n-th file."""
    renamed = 0

    def hook(name: str, _arguments: object) -> None:
        nonlocal renamed
        if name == "os.rename":
            renamed += 1
            if renamed == at:
                os.kill(os.getpid(), signal.SIGKILL)

    if dist.get_rank():
        sys.addaudithook(hook)
    built(folder)


@pytest.mark.parametrize(("at", "after"), [(2, 1), (3, 3)])
def test_a_rank_that_is_killed_loses_nothing_that_was_finished(
    at: int, after: int, tmp_path: Path
) -> None:
    built(tmp_path / "right")
    folder = tmp_path / "run"
    first, second = outcomes(2, dying, folder, at)
    assert second == -signal.SIGKILL
    assert "for ranks that did not come within" in str(first)
    shards = (folder / "gradients").glob("shard-*")
    finished = {path.name: path.stat().st_mtime_ns for path in shards}
    assert len(finished) >= 8  # all of rank 0, at least
    run(after, built, folder)
    assert contents(folder) == contents(tmp_path / "right")
    for name, time in finished.items():
        assert (folder / "gradients" / name).stat().st_mtime_ns == time


def differing(folder: Path) -> list[str]:
    rank, messages = dist.get_rank(), []
    a = begun(folder)
    renamed = replace(task(), ids=[f"{rank}-{number}" for number in range(32)])
    calls: tuple[Callable[[], Any], ...] = (
        lambda: begun(folder, seed=rank),
        lambda: begun(folder, task=renamed),
        lambda: a.build(dim=4 + rank),
        lambda: a.fit("tkfac" if rank else "kfac"),
    )
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        messages.append(str(caught.value))
    return messages


def test_ranks_that_differ_are_told_in_what(tmp_path: Path) -> None:
    for model, data, stored, fitted in run(2, differing, tmp_path / "run"):
        for message in (model, data):
            assert message.startswith("a run's model and data must be the same on all 2 ranks")
        assert stored.startswith("the settings of build must be the same on all 2 ranks")
        assert 'method": "kfac' in fitted
        assert 'method": "tkfac' in fitted


def spoiled(folder: Path, verb: str) -> str:
    """The last example has no finite loss, which is seen by one rank only."""
    words = task()

    def loss(model: Model, batch: tuple[Tensor, ...]) -> Tensor:
        last = (batch[0] == words.train.tensors[0][-1]).all(1)
        return words.losses(model, batch) * torch.where(last, float("inf"), 1.0)

    a = begun(folder, loss=loss)
    with pytest.raises((FloatingPointError, RuntimeError)) as caught:
        a.fit() if verb == "fit" else a.build(dim=4)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("verb", ["fit", "build"])
def test_an_error_of_one_rank_ends_all_at_once(verb: str, tmp_path: Path) -> None:
    kinds = {text.split(":")[0] for text in run(2, spoiled, tmp_path / "run", verb, seconds=60)}
    assert "FloatingPointError" in kinds
    assert kinds <= {"RankFailed", "FloatingPointError"}
