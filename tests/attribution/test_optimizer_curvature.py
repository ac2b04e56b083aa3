"""Runs whose curvature is that of the optimizer which has trained the model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import Model, attributor, loss, task
from torch import Tensor

import isokron
from isokron.attribution import Attributor
from isokron.attribution.queries import read_queries

LAYERS = "*,!table"


def trained(name: str = "SOAP", steps: int = 20) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    optimizer = getattr(isokron, name)(isokron.param_groups(model), 0.01)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, task().train.batch(torch.arange(8) + step % 24)).mean().backward()
        optimizer.step()
    return model, optimizer


def opened(folder: Path, model: Model) -> Attributor:
    return Attributor(folder, model, task=task(), layers=LAYERS, batch_size=5)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "Katie", "AdamW"])
def test_scores_are_those_of_the_damped_operators(name: str, tmp_path: Path) -> None:
    model, optimizer = trained(name)
    a = opened(tmp_path, model).fit(optimizer=optimizer)
    queries = read_queries(task(), model, ["eval:0-1"])
    scores = a.score(queries, by_layer=True, save=False)
    assert a.curvature is not None
    inverse = a.curvature.damped_inverse(0.1)
    for number, layer in enumerate(a.subject.layers):
        rows = []
        for batch in [query.batch for query in queries] + [a.data.batch([n]) for n in range(32)]:
            model.zero_grad()
            (loss(model, batch) * (batch[0].size(1) - 1)).sum().backward()
            grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
            rows.append(isokron.curvature.layers.pack(layer.layout, grads))
        asked, examples = torch.stack(rows[:2]), torch.stack(rows[2:]).flatten(1)
        turned = torch.stack([inverse[layer.name].apply(row) for row in asked]).flatten(1)
        right = turned @ examples.mT
        scale = float(right.abs().max())
        torch.testing.assert_close(scores.by_layer[:, number], right, rtol=1e-3, atol=1e-4 * scale)


def test_an_optimizer_and_its_checkpoint_make_the_same_run(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for folder, source in (("live", optimizer), ("read", saved)):
        a = opened(tmp_path / folder, model).fit(optimizer=source)
        a.score(read_queries(task(), model, ["eval:0"]), name="scores")
    assert contents(tmp_path / "live") == contents(tmp_path / "read")
    # opened again, and continued with the same optimizer only
    opened(tmp_path / "live", model).fit(optimizer=optimizer)
    with pytest.raises(ValueError, match="optimizer"):
        opened(tmp_path / "live", model).fit(optimizer=trained("Katie")[1])
    with pytest.raises(ValueError, match="optimizer"):
        opened(tmp_path / "live", model).fit("ekfac")


def test_the_page_and_the_files_name_the_optimizer(tmp_path: Path) -> None:
    model, optimizer = trained("Shampoo")
    a = opened(tmp_path, model).fit(optimizer=optimizer)
    a.score(read_queries(task(), model, ["eval:0"]), name="scores")
    record = json.loads((tmp_path / "scores" / "scores.json").read_text())
    assert record["method"]["optimizer"]["name"] == "Shampoo"
    assert record["method"]["optimizer"]["step"] == 20
    assert "from a Shampoo optimizer at step 20" in a.report().read_text(encoding="utf-8")


def test_a_store_is_built_from_it(tmp_path: Path) -> None:
    model, optimizer = trained("Katie")
    a = opened(tmp_path, model).fit(optimizer=optimizer).build(dim=100)
    queries = read_queries(task(), model, ["eval:0-1"])
    stored, exact = (a.score(queries, store=use, save=False).as_subclass(Tensor) for use in (1, 0))
    torch.testing.assert_close(stored, exact, rtol=1e-3, atol=1e-3 * float(exact.abs().max()))


def test_refinement_of_it_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    a = opened(tmp_path, model).fit(optimizer=optimizer)
    with pytest.raises(ValueError, match="fit the curvature to the data"):
        a.score(read_queries(task(), model, ["eval:0"]), refine=2)


def test_a_wrong_optimizer_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    model, _ = trained()
    a = opened(tmp_path, model)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match="a state of another library"):
        a.fit(optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert contents(tmp_path) == before
    attributor(tmp_path / "other", layers=LAYERS).fit()
