"""Attribution on 1, 2 and 3 processes: the same bytes, whoever did what, and whoever was killed."""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from isokron.attribution import (
    Ask,
    Asker,
    Build,
    Fit,
    Run,
    build,
    fit,
    read_queries,
    score,
    self_influence,
    write_self,
)
from isokron.attribution import subject as subjects
from isokron.curvature import fit as fit_curvature
from isokron.curvature import folding
from isokron.curvature.division import SEGMENTS, Division, Tree
from isokron.distributed import Ranks
from processes import outcomes, run

sys.path.insert(0, str(Path(__file__).parents[1] / "attribution"))
from letters import Model, subject


def in_small_batches(work: Callable[..., Any]) -> Callable[..., Any]:
    """Batches of five, in this process as in others, and as before when the work is done."""

    @wraps(work)
    def done(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(subjects, "PASS", 1)
            return work(*args)

    return done


FITS = {
    "kfac": Fit("kfac"),
    "reduced": Fit("kfac", sharing="reduce", examples=29),
    "exact": Fit("kfac", "exact"),
    "ekfac": Fit("ekfac"),
    "drawn": Fit("ekfac", "sampled", seed=3),
    "tkfac": Fit("tkfac"),
    "shampoo": Fit("shampoo"),
}


def world() -> Ranks | None:
    return Ranks(dist.group.WORLD, 60.0) if dist.is_initialized() else None


def begun(folder: Path, seed: int = 0) -> Run:
    return Run.begin(folder, subject(seed), ranks=world())


def contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def alike(tmp_path: Path, work: Callable[[Path], object], *counts: int) -> dict[str, bytes]:
    """What `work` leaves in a folder, alone and on these numbers of ranks."""
    work(tmp_path / "alone")
    wanted = contents(tmp_path / "alone")
    assert wanted
    for count in counts:
        run(count, work, tmp_path / f"by-{count}")
        found = contents(tmp_path / f"by-{count}")
        assert found.keys() == wanted.keys()
        assert [name for name in found if found[name] != wanted[name]] == []
    return wanted


@in_small_batches
def fits(folder: Path) -> None:
    for name, settings in FITS.items():
        fit(begun(folder / name), settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "KEPT", 0)  # EK-FAC passes over the data again
        fit(begun(folder / "again"), FITS["ekfac"])


def test_curvature_has_the_same_bytes_on_any_number_of_ranks(tmp_path: Path) -> None:
    wanted = alike(tmp_path, fits, 1, 2, 3)
    factors = {name.split("/")[0]: each for name, each in wanted.items() if "factors" in name}
    assert factors["again"] == factors["ekfac"]
    assert len(set(factors.values())) == len(FITS)


@in_small_batches
def stores(folder: Path) -> None:
    for name, settings in {
        "white": Build(dim=4),
        "tokens": Build(dim=4, tokens=True, dtype="bfloat16"),
        "plain": Build(dim=None, whiten=False),
    }.items():
        found = begun(folder / name)
        fit(found)
        assert build(found, settings, per_shard=5).plan.shards == 7
        queries = read_queries(found.subject.task, ["eval:0-2", "abcabc", "train:7"])
        for ask in (Ask(), Ask("mean", by_layer=True), Ask("nearest", fly=True, by_layer=True)):
            score(found, queries, ask)
        write_self(found, self_influence(Asker(found)))
        loner = Asker(found, Ask(unit=True, fly=name == "never")) if name == "white" else None
        if loner is not None:
            assert loner.scores(queries).of.shape == (5, 32)


def test_stores_and_scores_have_the_same_bytes_on_any_number_of_ranks(tmp_path: Path) -> None:
    wanted = alike(tmp_path, stores, 2, 3)
    assert not [name for name in wanted if name.endswith(".tmp")]


@in_small_batches
def built(folder: Path) -> None:
    build(begun(folder), Build(dim=4, whiten=False), per_shard=4)


def dying(folder: Path, at: int) -> None:
    """Rank 1 is killed when it is about to rename its n-th file: a shard, or the record of one."""
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


@pytest.mark.parametrize(("at", "after"), [(3, 1), (4, 3)])
def test_a_rank_that_is_killed_loses_nothing_that_was_finished(
    at: int, after: int, tmp_path: Path
) -> None:
    built(tmp_path / "right")
    wanted, folder = contents(tmp_path / "right"), tmp_path / "run"
    first, second = outcomes(2, dying, folder, at)
    assert second == -signal.SIGKILL
    assert "for ranks that did not come within" in str(first)
    left = {
        p.name: p.stat().st_mtime_ns for p in (folder / "gradients").glob("shard-*.safetensors")
    }
    assert len(left) == 5 + (at == 4)  # four of rank 0, and what rank 1 had done
    assert list((folder / "gradients").glob(".shard-*.tmp"))
    run(after, built, folder)
    assert contents(folder) == wanted
    whole = [name for name in left if name != "shard-00003.safetensors"]  # its record may be gone
    assert {name: (folder / "gradients" / name).stat().st_mtime_ns for name in whole} == {
        name: left[name] for name in whole
    }


@in_small_batches
def differing(folder: Path) -> list[str]:
    rank, found = dist.get_rank(), []
    run = begun(folder)
    for work in (
        lambda: begun(folder, seed=rank),
        lambda: build(run, Build(dim=4 + rank, whiten=False)),
        lambda: fit(run, Fit("tkfac" if rank else "kfac")),
    ):
        with pytest.raises(RuntimeError) as caught:
            work()
        found.append(str(caught.value))
    return found


def test_ranks_that_differ_are_told_in_what(tmp_path: Path) -> None:
    for model, stored, fitted in run(2, differing, tmp_path / "run"):
        assert model.startswith("a run's model and data must be the same on all 2 ranks")
        assert stored.startswith("the settings of build must be the same on all 2 ranks")
        assert 'method": "kfac' in fitted
        assert 'method": "tkfac' in fitted


@in_small_batches
def spoiled(folder: Path, verb: str) -> str:
    """The last example has no finite loss, which is seen by one rank only."""
    found = begun(folder)
    task = found.subject.task

    def loss(model: Model, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        last = (batch[0] == task.train.tensors[0][-1]).all(1)
        return task.loss(model, batch) * torch.where(last, float("inf"), 1.0)

    spoilt = replace(task, logits=None, loss=loss)
    found = replace(found, subject=replace(found.subject, task=spoilt))
    with pytest.raises((FloatingPointError, RuntimeError)) as caught:
        fit(found) if verb == "fit" else build(found, Build(4, whiten=False), per_shard=8)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("verb", ["fit", "build"])
def test_an_error_of_one_rank_ends_all_at_once(verb: str, tmp_path: Path) -> None:
    found = run(2, spoiled, tmp_path / "run", verb, seconds=30)
    kinds = {text.split(":")[0] for text in found}  # layers of both may have it
    assert "FloatingPointError" in kinds
    assert kinds <= {"Elsewhere", "FloatingPointError"}
    assert verb == "fit" or len(kinds) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [({"policy": "all"}, "adds up parts of them"), ({"batches": iter(())}, "must have a length")],
)
def test_what_cannot_be_divided_is_refused(given: dict[str, object], message: str) -> None:
    own = subject()
    batches = given.pop("batches", [own.train.batch(torch.arange(4))])
    with pytest.raises(ValueError, match=message):
        fit_curvature(own.model, batches, own.loss, division=Division(), **given)


def test_segments_are_added_in_one_order_however_they_are_divided() -> None:
    class Group:
        def __init__(self, rank: int, size: int) -> None:
            self.rank, self.size = rank, size

    found, most = set(), {}
    for size in range(1, 20):
        whole: Tree[str] = Tree(lambda one, other: f"({one}+{other})")
        most[size] = 0
        for rank in range(size):
            own: Tree[str] = Tree(lambda one, other: f"({one}+{other})")
            division = Division(Group(rank, size))
            for segment in division.own():
                own.put(segment, segment + 1, str(segment))
                most[size] = max(most[size], len(own.parts))
            assert [(first, last) for first, last, _ in own.parts] == division.held(rank)
            for part in own.parts:
                whole.put(*part)
        assert [part[:2] for part in whole.parts] == [(0, SEGMENTS)]
        found.add(whole.parts[0][2])
    assert len(found) == 1
    assert most[1] == 2
    assert max(most.values()) <= 5
