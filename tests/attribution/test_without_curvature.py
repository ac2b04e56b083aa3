"""Scores without curvature: asked for by fit(None), warned of where fit() was forgotten."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import attributor, task
from torch import Tensor

from isokron.attribution import Attributor, Query
from isokron.attribution.queries import read_queries

LAYERS = "*,!table"


def asked() -> list[Query]:
    return read_queries(task(), None, ["eval:0-2"])


def gradients(a: Attributor) -> Tensor:
    """Gradients of all training examples by autograd: [N, P]"""
    names = [name for layer in a.subject.layers for name in layer.layout.params.values()]
    params = [a.subject.model.get_parameter(name) for name in dict.fromkeys(names)]
    rows = []
    for number in range(len(a.data)):
        terms, weights = a.subject.loss(a.subject.model, a.data.batch([number]))
        slopes = torch.autograd.grad((terms * weights).sum(), params)
        rows.append(torch.cat([slope.flatten() for slope in slopes]))
    return torch.stack(rows)


CALLS: list[Callable[[Attributor], Any]] = [
    lambda a: a.score(asked(), save=False),
    lambda a: a.score(asked(), save=False),
    lambda a: a.self_influence(),
    lambda a: a.build(dim=4),
]


@pytest.mark.parametrize("first", CALLS[1:])
def test_a_forgotten_fit_is_warned_of_once(
    first: Callable[[Attributor], Any], tmp_path: Path
) -> None:
    a = attributor(tmp_path, layers=LAYERS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for call in (first, *CALLS):
            call(a)
    (warning,) = (w for w in caught if issubclass(w.category, UserWarning))
    assert "call fit() for curvature, or fit(None) to score without" in str(warning.message)


def test_fit_none_is_a_stage_of_plain_products(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        a = attributor(tmp_path, layers=LAYERS).fit(None)
        scores = a.score(read_queries(task(), None, ["train:0-5"]), name="plain")
        rows = gradients(a)
        right = rows[:6] @ rows.mT
        limit = 1e-4 * float(right.abs().max())
        torch.testing.assert_close(scores.as_subclass(Tensor), right, rtol=1e-3, atol=limit)
        close = {"rtol": 1e-3, "atol": limit}
        torch.testing.assert_close(a.self_influence(), rows.square().sum(1), **close)
        a.fit("none").build(dim=100)
        stored = a.score(asked(), save=False).as_subclass(Tensor)
    exact = attributor(tmp_path, layers=LAYERS).score(asked(), store=False, save=False)
    torch.testing.assert_close(stored, exact.as_subclass(Tensor), rtol=1e-3, atol=limit)
    assert a.folder.stage("fit") == {"method": "none"}
    with pytest.raises(ValueError, match="another fit: method was 'none', is 'kfac'"):
        a.fit("kfac")
    method = json.loads((tmp_path / "scores" / "plain.json").read_text())["method"]
    assert method["method"] == "none"
    assert method["damping_rule"] == "no curvature was fitted: H is the identity"
    assert "inner products of gradients, without curvature" in a.report().read_text()


def test_no_memory_is_planned_for_statistics_without_curvature(tmp_path: Path) -> None:
    a = attributor(tmp_path, layers=LAYERS)
    assert {"statistics", "decompositions"} <= a.memory_plan().parts.keys()
    assert a.fit(None).memory_plan().parts.keys() == {"activations", "queries"}
