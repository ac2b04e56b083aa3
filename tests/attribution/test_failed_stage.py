"""A stage that failed leaves a run that can do all others; a finished one is not changed."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from isokron.attribution import Attributor
from isokron.attribution.scorers import StoreScorer
from isokron.attribution.store import Store
from isokron.files import lock


class Stopped(Exception):
    pass


class Stoppable(nn.Module):
    """Stops in one of the next calls, as for memory or an interrupt."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
        self.calls_left = -1

    def forward(self, x: Tensor) -> Tensor:
        self.calls_left -= 1
        if self.calls_left == 0:
            raise Stopped
        output: Tensor = self.layers(x)
        return output


def opened(folder: Path) -> tuple[Attributor, Stoppable]:
    torch.manual_seed(0)
    model = Stoppable()
    data = [(torch.randn(5), torch.tensor(number % 3)) for number in range(32)]
    loss = isokron.losses.CrossEntropy()
    return Attributor(folder, model, data, loss=loss, batch_size=1), model


def stopped_at(model: Stoppable, call: int, stage: Callable[[], object]) -> None:
    model.calls_left = call
    with pytest.raises(Stopped):
        stage()
    model.calls_left = -1


def scores(a: Attributor, **settings: Any) -> Tensor:
    return a.score([a.data.source[0]], save=False, **settings).as_subclass(Tensor)


def test_after_a_failed_fit_another_method_can_be_fitted(tmp_path: Path) -> None:
    a, model = opened(tmp_path / "run")
    stopped_at(model, 9, a.fit)
    assert a.folder.stage("fit") is None
    a.fit("ekfac").build(dim=4)
    right = opened(tmp_path / "right")[0].fit("ekfac").build(dim=4)
    assert torch.equal(scores(a), scores(right))
    with pytest.raises(ValueError, match="another fit: method was 'ekfac', is 'kfac'"):
        a.fit()


def test_after_a_failed_build_another_store_can_be_built(tmp_path: Path) -> None:
    a, model = opened(tmp_path / "run")
    a.fit()
    stopped_at(model, 50, lambda: a.build(dim=2))
    assert 0 < len(list(a.folder.gradients.glob("shard-*"))) < 16
    assert a.folder.stage("build") is None
    scores(a)  # without the store
    with pytest.raises(ValueError, match="has no store"):
        scores(a, store=True)
    a.build(dim=4)
    right = opened(tmp_path / "right")[0].fit().build(dim=4)
    for path in right.folder.gradients.iterdir():
        assert path.read_bytes() == (a.folder.gradients / path.name).read_bytes()
    with pytest.raises(ValueError, match="another build: dim was 4, is 2; give a new folder"):
        a.build(dim=2)


def test_shards_of_the_same_settings_are_continued(tmp_path: Path) -> None:
    a, model = opened(tmp_path)
    a.fit()
    stopped_at(model, 50, lambda: a.build(dim=2))
    before = {path: path.stat().st_mtime_ns for path in a.folder.gradients.glob("shard-*")}
    again, _ = opened(tmp_path)
    again.fit().build()  # the dimension of the store that was begun
    assert json.loads((tmp_path / "run.json").read_text())["stages"]["build"]["dim"] == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_store_that_another_process_is_writing_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = opened(tmp_path)
    a.fit()
    fill, problems = StoreScorer._fill, list[str]()

    def meanwhile(scorer: StoreScorer, store: Store, *arguments: Any) -> None:
        monkeypatch.setattr(StoreScorer, "_fill", fill)
        with pytest.raises(ValueError, match="another process is building a store") as caught:
            opened(tmp_path)[0].fit().build(dim=4)
        problems.append(str(caught.value))
        fill(scorer, store, *arguments)

    monkeypatch.setattr(StoreScorer, "_fill", meanwhile)
    a.build(dim=2)
    assert len(problems) == 1
    with (a.folder.gradients / "schema.json").open("rb") as file:
        assert lock(file, wait=False)  # given back
    assert len(a.store) == 32


def test_curvature_that_was_fitted_elsewhere_meanwhile_is_taken(tmp_path: Path) -> None:
    a, model = opened(tmp_path)
    other, _ = opened(tmp_path)
    forward, calls = Stoppable.forward, [0]

    def meanwhile(module: Stoppable, x: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == 5:
            other.fit()
        return forward(module, x)

    model.forward = meanwhile.__get__(model)  # type: ignore[method-assign]
    a.fit()
    path = a.folder.curvature / "curvature.json"
    before = path.stat().st_mtime_ns
    assert torch.equal(scores(a), scores(other))
    assert path.stat().st_mtime_ns == before
    late, _ = opened(tmp_path)
    with pytest.raises(ValueError, match="another fit"):
        late.fit("tkfac")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_run_that_is_read_only_is_scored(tmp_path: Path) -> None:
    a, _ = opened(tmp_path)
    a.fit()
    tmp_path.chmod(0o500)
    scores(opened(tmp_path)[0])
    tmp_path.chmod(0o700)


def test_a_run_of_an_older_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    opened(tmp_path)[0].fit()
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 3}))
    with pytest.raises(ValueError, match=r"'isokron run' of version 3, .* version 4; begin a new"):
        opened(tmp_path)
