"""What a page shows of a run: the last scores, each query once, and texts that are no tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from html_page import Page
from isokron import Attributor, losses


def attributor(folder: Path, data: list[Any], **options: Any) -> Attributor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    return Attributor(folder, model, data, **options).fit()


@pytest.fixture
def pairs() -> list[Any]:
    torch.manual_seed(1)
    return [(torch.randn(4), torch.tensor(k % 3)) for k in range(9)]


def queries_on(page: Path) -> int:
    return page.read_text(encoding="utf-8").count('<details class="query')


def test_another_top_replaces_the_scores_of_the_same_queries(
    tmp_path: Path, pairs: list[Any]
) -> None:
    a = attributor(tmp_path, pairs, loss=losses.CrossEntropy())
    a.score(pairs[:3], top=1)
    assert len(a.score(pairs[:3], top=4).answers[0]["proponents"]) > 1
    assert len(list((tmp_path / "scores").glob("*.json"))) == 1
    assert queries_on(a.report(all=True)) == 3


def test_a_page_shows_the_last_scores_and_all_where_asked(tmp_path: Path, pairs: list[Any]) -> None:
    a = attributor(tmp_path, pairs, loss=losses.CrossEntropy())
    a.score(pairs[:3], name="z")
    a.score(pairs[3:5], name="a")
    assert queries_on(a.report()) == 2
    text = " ".join(Page(a.report().read_text(encoding="utf-8")).text.split())
    assert "The run has 1 other set of scores, which isokron report RUN --all shows" in text
    assert queries_on(a.report(all=True)) == 5
    a.score(pairs[:3], name="z")
    assert queries_on(a.report()) == 3
    a.score(pairs[5:6], save=False)
    assert queries_on(a.report()) == 3
    (tmp_path / "scores" / "z.json").unlink()
    assert queries_on(a.report()) == 2  # of what is left


def test_a_string_of_a_dict_is_not_shown_as_a_token(tmp_path: Path, pairs: list[Any]) -> None:
    data = [{"x": x, "y": y, "name": f"row {k}"} for k, (x, y) in enumerate(pairs)]
    loss = losses.CrossEntropy(forward=lambda model, batch: (model(batch["x"]), batch["y"]))
    a = attributor(tmp_path, data, loss=loss)
    (answer,) = a.score(data[:1], name="one").answers
    assert answer["shown"] == [{"context": "row 0"}]
    assert answer["token_losses"] == []
    for item in answer["proponents"] + answer["opponents"]:
        assert item["shown"] == {"context": f"row {item['id']}"}
        assert item["tokens_counted"] is None
        assert item["tokens"] == []
    record = json.loads((tmp_path / "scores" / "one.json").read_text())
    assert record["answers"] == [answer]
    assert 'class="tokens"' not in a.report().read_text(encoding="utf-8")
