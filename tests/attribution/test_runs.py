"""Runs: stages that refuse what differs, scores that agree, and kills that lose nothing."""

import json
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from letters import subject, task

import forked
from isokron.attribution import (
    Ask,
    Asker,
    Build,
    Fit,
    Run,
    Subject,
    build,
    fit,
    read_queries,
    score,
    self_influence,
)
from isokron.attribution.storage.store import Store

QUERIES = ["eval:0-2", "train:3", "abcabc"]


def whole(folder: Path, settings: Build | None = None, method: str = "kfac") -> Run:
    run = Run.begin(folder, subject())
    fit(run, Fit(method))
    build(run, settings or Build(dim=4), per_shard=7)
    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("method", "settings", "kind"),
    [
        ("kfac", Build(dim=None, whiten=False), "relative"),
        ("ekfac", Build(dim=None, whiten=False), "relative"),
        ("kfac", Build(dim=None, whiten=True), "factored"),
    ],
)
@pytest.mark.parametrize("mode", ["individual", "mean", "nearest"])
def test_a_store_answers_as_the_data_do(
    method: str, settings: Build, kind: str, mode: str, tmp_path: Path
) -> None:
    run = whole(tmp_path / "run", settings, method)
    queries = read_queries(run.subject.task, QUERIES)
    for by_layer in (False, True):
        stored, passed = (
            Asker(run, Ask(mode, by_layer=by_layer, fly=fly, kind=kind)) for fly in (False, True)
        )
        found, right = stored.scores(queries).of, passed.scores(queries).of
        assert found.shape[0] == (5 if mode == "individual" else 1)
        torch.testing.assert_close(found, right, rtol=1e-3, atol=1e-3 * float(right.abs().max()))
    torch.testing.assert_close(self_influence(stored), self_influence(passed), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("settings", [Build(dim=4), Build(dim=4, whiten=False), None])
def test_scores_of_tokens_add_up(settings: Build | None, tmp_path: Path) -> None:
    run = whole(tmp_path / "run", settings)
    asker = Asker(run)
    queries = read_queries(run.subject.task, ["abcabc"])
    whole_scores = asker.scores(queries).of[0]
    tokens = torch.tensor(asker.token_scores(queries[0], [0, 7, 31]))
    assert tokens.shape == (3, 5)
    torch.testing.assert_close(tokens.sum(1), whole_scores[[0, 7, 31]], rtol=1e-3, atol=1e-3)


def test_a_store_of_tokens_answers_as_one_of_examples(tmp_path: Path) -> None:
    one = whole(tmp_path / "one", Build(dim=4))
    other = whole(tmp_path / "other", Build(dim=4, tokens=True))
    queries = read_queries(one.subject.task, QUERIES)
    right = Asker(one).scores(queries).of
    torch.testing.assert_close(Asker(other).scores(queries).of, right, rtol=1e-3, atol=1e-3)


def test_cosines_are_those_of_whitened_rows(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    queries = read_queries(run.subject.task, ["train:0-31"])
    found = Asker(run, Ask(unit=True)).scores(queries).of
    torch.testing.assert_close(found.diagonal(), torch.ones(32))
    assert found.abs().max() < 1.0001
    plain = whole(tmp_path / "plain", Build(dim=4, whiten=False))
    with pytest.raises(ValueError, match=r"unit scores need rows .* build a whitened store"):
        Asker(plain, Ask(unit=True))


def test_answers_name_the_foremost_examples(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    answers = score(run, read_queries(run.subject.task, QUERIES), count=4)
    assert [each.query for each in answers.each] == [
        "eval:0",
        "eval:1",
        "eval:2",
        "train:3",
        "abcabc",
    ]
    for each, scores in zip(answers.each, answers.scores, strict=True):
        assert [found.score for found in each.proponents] == sorted(scores.tolist())[::-1][:4]
        assert [found.score for found in each.opponents] == sorted(scores.tolist())[:4]
        assert each.proponents[0].id == f"row {int(scores.argmax())}"
        assert sum(each.histogram[1]) == 32
    record = json.loads((run.scores / f"{answers.name}.json").read_text())
    assert record["answers"][4]["query"] == "abcabc"
    assert record["answers"][0]["proponents"][0]["shown"]["title"] == "a < b"


def test_the_same_commands_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = whole(tmp_path / name)
        score(run, read_queries(run.subject.task, QUERIES))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    run = whole(tmp_path / "one")  # once more, in the same place
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_runs import QUERIES, whole
from isokron.attribution import read_queries, score
print("ready", flush=True)
run = whole(Path(sys.argv[1]))
score(run, read_queries(run.subject.task, QUERIES))
"""


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    right = tmp_path / "right"
    run = whole(right)
    score(run, read_queries(run.subject.task, QUERIES))
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
    assert contents(tmp_path / "run") == contents(right)


def test_what_differs_is_named(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    with pytest.raises(ValueError, match="another fit: method was 'kfac', is 'tkfac'; give a new"):
        fit(run, Fit("tkfac"))
    with pytest.raises(ValueError, match="another build: dim was 4, is 8; give a new folder"):
        build(run, Build(dim=8))
    with pytest.raises(ValueError, match=r"another source: weights was '\w+', is '\w+'"):
        Run.begin(tmp_path / "run", subject(seed=1))
    with pytest.raises(ValueError, match=r"another source: examples was 32, is 20; data was"):
        Run.begin(tmp_path / "run", replace(subject(), examples=20))


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    run, other = whole(tmp_path / "run"), Run.begin(tmp_path / "other", subject(seed=1))
    fit(other)
    build(other, Build(dim=4), per_shard=7)
    (tmp_path / "run" / "gradients").rename(tmp_path / "away")
    (tmp_path / "other" / "gradients").rename(tmp_path / "run" / "gradients")
    with pytest.raises(ValueError, match=r"another store: weights was '\w+', is '\w+'"):
        Asker(run)


def test_ekfac_and_whitening_are_refused_before_anything_is_built(tmp_path: Path) -> None:
    run = Run.begin(tmp_path / "run", subject())
    fit(run, Fit("ekfac"))
    with pytest.raises(ValueError, match="belong to neither; fit method 'kfac'"):
        build(run)
    assert run.stage("build") is None
    assert not run.gradients.exists()


def test_whitening_needs_curvature(tmp_path: Path) -> None:
    run = Run.begin(tmp_path / "run", subject())
    with pytest.raises(ValueError, match=r"a whitened store needs curvature, and .* fit it first"):
        build(run)
    assert run.stage("build") is None


def test_without_curvature_gradients_themselves_are_compared(tmp_path: Path) -> None:
    run = Run.begin(tmp_path / "run", subject())
    build(run, Build(dim=None, whiten=False))
    store = Store.open(run.gradients)
    rows = store.rows(range(32))
    found = Asker(run).scores(read_queries(run.subject.task, ["train:0-31"])).of
    torch.testing.assert_close(found, rows @ rows.mT, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("eval:8", "query eval:8 must lie between 0 and 7"),
        ("eval:x", "query eval:x must be numbers such as eval:0"),
        ("train:5-2", "query train:5-2 must lie between"),
        ("@missing.jsonl", "no file or folder"),
        ("@picture.png", "must be a file that ends in one of"),
    ],
)
def test_queries_that_are_not_there_are_named(query: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_queries(task(), [query])
    with pytest.raises(ValueError, match="reads no texts; ask about one of its examples"):
        read_queries(replace(task(), read=None), ["words"])


def test_queries_come_from_files(tmp_path: Path) -> None:
    path = tmp_path / "queries.jsonl"
    path.write_text('{"text": "abca"}\n{"text": "hhhh"}\n')
    assert [query.name for query in read_queries(task(), [f"@{path}"])] == ["abca", "hhhh"]


def test_folders_that_are_no_runs_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="neither empty nor a run"):
        Run.begin(tmp_path, subject())
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Run.begin(tmp_path, subject())
    (tmp_path / "run.json").write_text('{"format": "isokron run", "version": 99}')
    with pytest.raises(ValueError, match="of version 99, this isokron"):
        Run.begin(tmp_path, subject())


def test_a_run_killed_as_it_began_is_begun_anew(tmp_path: Path) -> None:
    for name in (".run.json.tmp", ".weights.safetensors.tmp", "weights.safetensors"):
        (tmp_path / name).write_text("half of i")
    assert Run.begin(tmp_path, subject()).record["stages"] == {}


def test_curvature_may_be_that_of_some_examples(tmp_path: Path) -> None:
    some, all_of_them = (Run.begin(tmp_path / name, subject()) for name in ("some", "all"))
    found = fit(some, Fit(examples=8))
    assert found.report()[0]["terms"] == 8 * 5
    assert fit(all_of_them).report()[0]["terms"] == 32 * 5
    with pytest.raises(ValueError, match="examples to fit must be from 1 to the 32 of the run"):
        fit(Run.begin(tmp_path / "more", subject()), Fit(examples=33))


def test_too_many_examples_are_an_error() -> None:
    with pytest.raises(ValueError, match="examples must be from 1 to the 32 training examples"):
        Subject(task(), subject().model, examples=33)


def test_memory_bounds_shards_and_blocks(tmp_path: Path) -> None:
    run = Run.begin(tmp_path / "run", subject())
    fit(run)
    store = build(run, Build(dim=4), memory=4 * 8 * 5 * 70)
    assert store.plan.shards > 1
    queries = read_queries(run.subject.task, QUERIES)
    right = Asker(run).scores(queries).of
    found = Asker(run, memory=4 * store.width * 2).scores(queries).of
    # sums in another order; how far apart they end depends on the instruction set
    tolerance = 1e-5 * float(right.abs().max())
    torch.testing.assert_close(found, right, rtol=1e-4, atol=tolerance)
    with pytest.raises(ValueError, match="memory must be eight times a row"):
        build(Run.begin(tmp_path / "other", subject()), Build(4, whiten=False), memory=64)
