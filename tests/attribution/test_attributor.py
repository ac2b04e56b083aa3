"""Runs: any data set, stages that refuse what differs, stores that agree, kills."""

import json
import random
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import Model, attributor, task
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import forked
import isokron
from isokron.attribution import Attributor, Query
from isokron.attribution.queries import read_queries
from isokron.attribution.store import Store, write_entries
from isokron.tasks import Shown

TEXTS = ["eval:0-2", "train:3", "abcabc"]


def asked(a: Attributor, texts: list[str] | None = None) -> list[Query]:
    assert a.task is not None
    return read_queries(a.task, a.subject.model, texts or TEXTS, ids=a.data.ids)


def finished(folder: Path, method: str = "kfac", **settings: Any) -> Attributor:
    a = attributor(folder)
    return a.fit(method).build(**{"dim": 4, **settings})


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def close(values: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(values, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac"])
@pytest.mark.parametrize("mode", ["individual", "mean", "nearest"])
def test_a_store_of_whole_gradients_answers_as_the_data_do(
    method: str, mode: str, tmp_path: Path
) -> None:
    a = attributor(tmp_path, layers="*,!table").fit(method).build(dim=100)
    stored, exact = (a.score(asked(a), mode=mode, store=use, save=False) for use in (True, False))
    assert len(stored) == (5 if mode == "individual" else 1)
    close(stored.as_subclass(Tensor), exact.as_subclass(Tensor))
    close(stored.by_layer.sum(1), exact.as_subclass(Tensor))
    close(a.self_influence(), a.self_influence(store=False))


def test_nearest_takes_the_layers_of_the_query_with_the_largest_score(tmp_path: Path) -> None:
    a = attributor(tmp_path).fit()
    each = a.score(asked(a), by_layer=True, save=False)
    best = each.as_subclass(Tensor).argmax(0)
    nearest = a.score(asked(a), mode="nearest", by_layer=True, save=False)
    for example, query in enumerate(best.tolist()):
        close(nearest.by_layer[0, :, example], each.by_layer[query, :, example])


@pytest.mark.parametrize("store", [False, True])
def test_cosines_of_examples_with_themselves_are_one(store: bool, tmp_path: Path) -> None:
    a = finished(tmp_path, dim=100) if store else attributor(tmp_path).fit()
    scores = a.score(asked(a, ["train:0-31"]), unit=True, store=store, save=False)
    close(scores.diagonal(), torch.ones(32))
    assert scores.abs().max() < 1.001


@pytest.mark.parametrize("unit", [False, True])
def test_scores_of_tokens_add_up_to_what_is_shown(unit: bool, tmp_path: Path) -> None:
    a = attributor(tmp_path).fit()
    a.score(asked(a, ["abcabc"]), unit=unit, name="one")
    record = json.loads((tmp_path / "scores" / "one.json").read_text())
    (answer,) = record["answers"]
    for item in answer["proponents"] + answer["opponents"]:
        assert sum(item["tokens"]) == pytest.approx(item["score"], rel=1e-3, abs=1e-4)
        assert -1.001 <= item["cosine"] <= 1.001
    assert len(answer["token_losses"]) == len(answer["token_scores"]) == 5
    assert sum(answer["token_losses"]) == pytest.approx(answer["loss"], rel=1e-4)
    top = sum(item["score"] * (1 if not unit else 0) for item in answer["proponents"])
    if not unit:
        assert sum(answer["token_scores"]) == pytest.approx(top, rel=1e-3)


def test_python_scores_have_top_layers_and_tokens(tmp_path: Path) -> None:
    a = attributor(tmp_path).fit()
    scores = a.score(asked(a))
    assert scores.shape == (5, 32)
    assert type(scores + 1) is Tensor
    (first, *_) = scores.top(3)
    assert first.proponents[0].id == f"row {int(scores[0].argmax())}"
    assert [entry.score for entry in first.proponents] == sorted(scores[0].tolist())[::-1][:3]
    assert scores.by_layer.shape == (5, len(scores.layers), 32)
    number = first.proponents[0].example
    assert sum(scores.tokens[0][number]) == pytest.approx(float(scores[0, number]), rel=1e-3)


def test_examples_without_influence_are_neither_proponents_nor_opponents(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    data = [(torch.ones(2), 0), (torch.ones(2), 0)]
    a = Attributor(tmp_path, model, data, loss=isokron.losses.CrossEntropy()).fit(None)
    (top,) = a.score([data[0]]).top(10)
    assert len(top.proponents) == 2
    assert top.opponents == []


def test_the_same_commands_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        a = finished(tmp_path / name)
        a.score(asked(a))
        a.report()
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    finished(tmp_path / "one").report()  # once more, in the same place
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_attributor import asked, finished
print("ready", flush=True)
a = finished(Path(sys.argv[1]))
a.score(asked(a))
"""


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    right = finished(tmp_path / "right")
    right.score(asked(right))
    command = ["-c", SCRIPT, tmp_path / "run", *Path(__file__).parents[:2]]
    moments, killed = random.Random(0), 0
    with forked.server(tmp_path, ("torch",)) as server:
        for _ in range(6):
            process = server.start(*command, folder=tmp_path)
            while not process.out:
                assert process.poll() is None, process.err
                time.sleep(0.005)
            time.sleep(moments.uniform(0.0, 0.3))
            process.kill(signal.SIGKILL)
            killed += process.wait() == -signal.SIGKILL
        server.run(*command, folder=tmp_path)
    assert killed > 0
    assert contents(tmp_path / "run") == contents(tmp_path / "right")


def test_what_differs_is_named(tmp_path: Path) -> None:
    a = finished(tmp_path)
    with pytest.raises(ValueError, match="another fit: method was 'kfac', is 'tkfac'; give a new"):
        a.fit("tkfac")
    with pytest.raises(ValueError, match="another build: dim was 4, is 8; give a new folder"):
        a.build(dim=8)
    with pytest.raises(ValueError, match=r"another source: weights was '\w+', is '\w+'"):
        attributor(tmp_path, seed=1)
    with pytest.raises(ValueError, match=r"another source: examples was 32, is 20; data was"):
        attributor(tmp_path, examples=20)
    renamed = replace(task(), ids=[f"other {number}" for number in range(32)])
    with pytest.raises(ValueError, match=r"another source: data was"):
        attributor(tmp_path, task=renamed)


@pytest.mark.parametrize(
    "call",
    [
        lambda a: a.fit("kfca"),
        lambda a: a.fit(fisher="none"),
        lambda a: a.fit(examples=33),
        lambda a: a.build(dtype="int8"),
        lambda a: a.build(dim=-1),
        lambda a: a.build(dim=0),
        lambda a: a.build(damping=-1.0),
    ],
)
def test_a_typo_leaves_the_folder_as_it_was(
    call: Callable[[Attributor], Any], tmp_path: Path
) -> None:
    a = attributor(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(ValueError, match=r"must be"):
        call(a)
    assert contents(tmp_path) == before


def test_a_bad_pattern_begins_no_run(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nothing"):
        attributor(tmp_path / "run", layers="nothing")
    assert not (tmp_path / "run").exists()


def test_memory_that_is_too_little_is_refused_before_any_work(tmp_path: Path) -> None:
    a = attributor(tmp_path, memory=1024)
    with pytest.raises(ValueError, match=r"memory: peak .* does not fit; give more memory"):
        a.fit()
    assert a.folder.stage("fit") is None


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    a = finished(tmp_path / "run")
    attributor(tmp_path / "other", seed=1).fit().build(dim=4)
    (tmp_path / "run" / "gradients").rename(tmp_path / "away")
    (tmp_path / "other" / "gradients").rename(tmp_path / "run" / "gradients")
    with pytest.raises(ValueError, match=r"another store: weights was '\w+', is '\w+'"):
        a.score(asked(a))


def test_the_damping_of_a_store_is_that_of_its_rows(tmp_path: Path) -> None:
    a = finished(tmp_path, damping=0.5)
    right = a.score(asked(a), store=True, save=False)
    assert torch.equal(a.score(asked(a), damping=0.5, save=False), right)
    with pytest.raises(ValueError, match=r"damping 0.1 differs from that of the store"):
        a.score(asked(a), damping=0.1)


def test_without_curvature_gradients_themselves_are_compared(tmp_path: Path) -> None:
    a = attributor(tmp_path, layers="*,!table").fit(None).build(dim=100)
    rows = torch.cat(list(Store.open(tmp_path / "gradients").blocks(10**9)))
    close(a.score(asked(a, ["train:0-31"]), save=False).as_subclass(Tensor), rows @ rows.mT)


def test_a_projected_run_measures_its_noise(tmp_path: Path) -> None:
    a = attributor(tmp_path, layers="*,!table").fit().build(dim=2)
    scores = a.score(asked(a), name="noisy")
    exact = a.score(asked(a), store=False, save=False)
    assert scores.noise.sample == 32
    rows = zip(exact.as_subclass(Tensor), scores.as_subclass(Tensor), strict=True)
    pairs = [torch.stack([_ranks(one), _ranks(other)]) for one, other in rows]
    correlations = [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]
    record = json.loads((tmp_path / "scores" / "noisy.json").read_text())
    assert record["noise"]["spearman"] == scores.noise.spearman < 1.0
    assert scores.noise.spearman == pytest.approx(sum(correlations) / 5, abs=1e-6)
    answer = record["answers"][0]
    assert answer["standard_error"] > 0
    for item in answer["proponents"]:
        assert item["noisy"] == (abs(item["score"]) < 2 * answer["standard_error"])


@pytest.mark.parametrize("unit", [False, True])
def test_scores_of_few_entries_are_on_the_scale_of_exact_ones(unit: bool, tmp_path: Path) -> None:
    a = attributor(tmp_path, layers="*,!table").fit().build(dim=2)
    stored = a.score(asked(a), unit=unit, by_layer=True, save=False)
    exact = a.score(asked(a), unit=unit, store=False, save=False).as_subclass(Tensor)
    projected = stored.as_subclass(Tensor)
    # all 32 examples are in the sample: no factor would come closer to the exact scores
    slopes = (exact * projected).sum(1) / projected.square().sum(1)
    torch.testing.assert_close(slopes, torch.ones(5), rtol=1e-4, atol=0)
    close(stored.by_layer.sum(1), projected)
    residual = (projected - exact).square().mean(1).sqrt()
    assert stored.noise is not None
    torch.testing.assert_close(torch.tensor(stored.noise.standard_error), residual)
    # read from the store, not from the few entries
    close(a.self_influence(store=True), a.self_influence(store=False))


def test_a_build_killed_before_its_schema_was_written_begins_anew(tmp_path: Path) -> None:
    for name in ("straight", "killed"):
        a = attributor(tmp_path / name).fit()
        if name == "killed":  # with other settings
            write_entries(a.folder.gradients, {"blocks": torch.arange(3).int()})
        a.build(dim=2)
    stores = [contents(tmp_path / name / "gradients") for name in ("straight", "killed")]
    assert stores[0] == stores[1]
    assert "entries.safetensors" in stores[0]


def _ranks(values: Tensor) -> Tensor:
    return values.argsort().argsort().double()


def test_the_default_dimension_is_one_that_agrees_with_exact_scores(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(100, 80), nn.Tanh(), nn.Linear(80, 60))
    data = list(zip(torch.randn(90, 100), torch.randint(0, 60, (90,)), strict=True))
    loss = isokron.losses.CrossEntropy()
    a = Attributor(tmp_path, model, data, loss=loss).fit().build()
    scores = a.score(data[:5], store=True)
    assert scores.noise.spearman > 0.85  # chosen on other queries
    stage = a.folder.stage("build")
    assert stage is not None
    assert stage["dim"] in (16, 32, 64, 128)


class Pairs(Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(1, 4, 4, generator=generator), "label": torch.tensor(number % 3)}


def dict_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["label"], reduction="none")


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))


def test_any_data_set_gives_the_same_scores(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    data = Pairs()
    rows = [data[number] for number in range(12)]
    inputs = torch.stack([row["x"] for row in rows])
    labels = torch.stack([row["label"] for row in rows])
    hub = datasets.Dataset.from_dict({"x": inputs.tolist(), "label": labels.tolist()})
    pair_loss = isokron.losses.CrossEntropy()
    cases: dict[str, tuple[Any, Any]] = {
        "dataset": (data, dict_loss),
        "loader": (DataLoader(data, batch_size=5, shuffle=True), dict_loss),
        "dicts": (rows, dict_loss),
        "tuples": (list(zip(inputs, labels, strict=True)), pair_loss),
        "tensors": (TensorDataset(inputs, labels), pair_loss),
        "examples": (isokron.tasks.Examples((inputs, labels)), pair_loss),
        "hub": (hub.with_format("torch"), dict_loss),
    }
    results = {}
    for name, (train_set, loss) in cases.items():
        a = Attributor(tmp_path / name, network(), train_set, loss=loss).fit()
        item = train_set.dataset if isinstance(train_set, DataLoader) else train_set
        queries = item if name == "examples" else [item[number] for number in range(2)]
        results[name] = a.score(queries).as_subclass(Tensor)[:2]
    for name, scores in results.items():
        assert scores.shape == (2, 12), name
        close(scores, results["dataset"])


def test_data_that_cannot_be_read_by_number_are_refused(tmp_path: Path) -> None:
    loss = isokron.losses.CrossEntropy()
    with pytest.raises(ValueError, match="readable by index"):
        Attributor(tmp_path, network(), iter([1, 2]), loss=loss)
    table = pytest.importorskip("pandas").DataFrame({"x": [0.5, 1.5], "label": [0, 1]})
    with pytest.raises(ValueError, match=r"a DataFrame of 'x', 'label'; .*df.to_dict\('records'\)"):
        Attributor(tmp_path, network(), table, loss=loss)
    with pytest.raises(ValueError, match="at least one example"):
        Attributor(tmp_path, network(), [], loss=loss)
    with pytest.raises(ValueError, match="ids must be 12 different names"):
        Attributor(tmp_path, network(), Pairs(), loss=dict_loss, ids=["a"])
    with pytest.raises(ValueError, match=r"loss must be one of isokron.losses"):
        Attributor(tmp_path, network(), Pairs())


def test_a_query_of_several_rows_counts_them_together(tmp_path: Path) -> None:
    a = Attributor(tmp_path, network(), Pairs(), loss=dict_loss).fit()
    rows = [a.data.batch([number]) for number in range(3)]
    single = a.score([Query(row, (Shown(),), "one") for row in rows], save=False)
    three = Query(a.data.batch([0, 1, 2]), (Shown(), Shown(), Shown()), "three")
    close(a.score([three])[0], single.as_subclass(Tensor).sum(0))


def test_dropout_and_batch_norm_do_not_act_and_modes_come_back(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    data = list(zip(torch.randn(20, 4), torch.randint(0, 3, (20,)), strict=True))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss, scores = isokron.losses.CrossEntropy(), []
    for name in ("one", "two"):
        a = Attributor(tmp_path / name, model, data, loss=loss).fit()
        scores.append(a.score(data[:2], verify=True).as_subclass(Tensor))
    assert torch.equal(*scores)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(param.requires_grad and param.grad is None for param in model.parameters())
    assert [item.reason for item in a.selection.left_out] == ["BatchNorm1d"]


def test_scores_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    a = attributor(tmp_path)
    query = asked(a, ["abc"])[0]
    with torch.no_grad():
        next(a.subject.model.parameters()).fill_(float("nan"))
    with pytest.raises((FloatingPointError, ValueError), match=r"nan|finite|NaN"):
        a.score([query])


def test_one_flipped_byte_of_the_curvature_is_found(tmp_path: Path) -> None:
    attributor(tmp_path).fit()
    (path, *_) = (tmp_path / "curvature").glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    a = attributor(tmp_path)
    with pytest.raises(ValueError, match=path.name):
        a.score(asked(a))


def test_a_run_that_is_opened_again_scores_to_the_same_bits(tmp_path: Path) -> None:
    first = attributor(tmp_path).fit()
    right = first.score(asked(first), save=False)
    again = attributor(tmp_path)
    assert torch.equal(again.score(asked(again), save=False), right)


def test_many_queries_choose_a_store_and_few_do_not(tmp_path: Path) -> None:
    a = attributor(tmp_path)
    few = asked(a)
    use, why = a.choose(few)
    assert not use
    assert why == "5 queries need 1 pass over the data (a store is built above 4)"
    a = attributor(tmp_path, memory=a.memory_plan().peak + 1)  # one query at a time
    use, why = a.choose(few)
    assert use
    assert why == "5 queries need 5 passes over the data (a store is built above 4)"
    right = attributor(tmp_path).fit()
    blocks = a.score(few, store=False, save=False)
    close(blocks.as_subclass(Tensor), right.score(few, store=False, save=False).as_subclass(Tensor))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("eval:8", "query eval:8 must lie between 0 and 7"),
        ("eval:x", "query eval:x must be numbers such as eval:0"),
        ("train:5-2", "query train:5-2 must lie between"),
        ("@missing.jsonl", "query @missing.jsonl: there is no file or folder 'missing.jsonl'"),
    ],
)
def test_queries_that_are_not_there_are_named(query: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_queries(task(), Model(), [query])
    with pytest.raises(ValueError, match="reads no texts; use one of its examples"):
        read_queries(replace(task(), read=None), Model(), ["words"])
    with pytest.raises(ValueError, match="has no evaluation examples"):
        read_queries(replace(task(), evaluation=None), Model(), ["eval:0"])


def test_a_query_file_that_is_not_there_is_not_looked_for_on_a_hub(monkeypatch) -> None:
    def from_hub(source: str) -> list[dict[str, str]]:
        raise AssertionError(f"asked a hub for {source!r}")

    monkeypatch.setattr("isokron.tasks.documents._data_set", from_hub)
    for name in ("nofile", "folder/nofile", "name:train"):
        with pytest.raises(ValueError, match=f"query @{name}: there is no file or folder '{name}'"):
            read_queries(task(), Model(), [f"@{name}"])
    with pytest.raises(ValueError, match="no file or folder ''"):
        read_queries(task(), Model(), ["@"])


def test_queries_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text('{"text": "abca"}\n{"text": "hhhh"}\n')
    queries = read_queries(task(), Model(), [f"@{path}"])
    assert [query.name for query in queries] == ["abca", "hhhh"]


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files in it \(such as notes.txt\)"):
        attributor(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        attributor(tmp_path)
    (tmp_path / "run.json").write_text('{"format": "isokron run", "version": 99}')
    with pytest.raises(ValueError, match="of version 99, this isokron"):
        attributor(tmp_path)


def test_a_run_killed_as_it_began_is_begun_anew(tmp_path: Path) -> None:
    for name in (".run.json.tmp", ".weights.safetensors.tmp", "weights.safetensors"):
        (tmp_path / name).write_text("half of i")
    assert attributor(tmp_path).folder.stage("fit") is None


def test_a_run_without_results_may_begin_again_with_another_source(tmp_path: Path) -> None:
    first = attributor(tmp_path)
    second = attributor(tmp_path, seed=1)
    with pytest.raises(ValueError, match="another source: weights was"):
        first.fit()
    second.fit()
    with pytest.raises(ValueError, match="another source: weights was"):
        attributor(tmp_path)


def test_curvature_may_be_that_of_some_examples(tmp_path: Path) -> None:
    some = attributor(tmp_path / "some").fit(examples=8)
    assert some.curvature is not None
    assert some.curvature.report()[0]["terms"] == 8 * 5
