"""The commands on a run, as a person gives them."""

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from isokron import Shampoo

LETTERS = Path(__file__).parents[1] / "attribution" / "letters.py"
TASK = ["--task", f"{LETTERS}:task", "--steps", "3"]
Result = tuple[int, str, str]
Call = Callable[..., Result]


@pytest.fixture
def isokron(called: Callable[..., Any]) -> Call:
    """Exit code, stdout and stderr of a call."""

    def call(*arguments: str, stdin: str = "") -> Result:
        done = called(*arguments, stdin=stdin)
        return int(done.returncode or 0), done.stdout, done.stderr

    return call


def fails(result: Result, code: int, message: str) -> None:
    assert result[0] == code, result[2]
    errors = [line for line in result[2].splitlines() if line.startswith("isokron: error")]
    assert len(errors) == 1, result[2]
    assert message in errors[0]


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_default_is_exact_and_says_what_it_does(isokron: Call, tmp_path: Path) -> None:
    code, out, err = isokron("attribute", "run", *TASK, "--query", "eval:0-1", "--verify")
    assert code == 0, err
    assert "left out: table (embedding)" in err
    assert "memory: peak " in err
    assert "scores: exact; 2 queries need 1 pass over the data" in err
    assert "Page: " in out
    (path,) = (tmp_path / "run" / "scores").glob("*.json")
    record = json.loads(path.read_text())
    assert record["method"]["scoring"] == "exact"
    assert record["command"].startswith(f"isokron attribute RUN --task {LETTERS}:task --steps 3")
    assert record["answers"][0]["verify"]["proponents"] < record["answers"][0]["verify"]["random"]
    assert not (tmp_path / "run" / "gradients").exists()
    again = isokron("query", "run", "--top", "1", stdin="eval:0-1\n")
    assert again[0] == 0, again[2]
    assert again[1].count("  + ") == 2  # both queries of the line


@pytest.mark.parametrize("store", [["--no-store"], ["--dim", "4"], ["--store", "--dim", "64"]])
def test_one_command_does_what_the_single_ones_do(
    isokron: Call, tmp_path: Path, store: list[str]
) -> None:
    asked = ["--query", "eval:0-1", "--query", "abc", "--top", "4"]
    for _ in range(2):  # a second time nothing changes
        assert isokron("attribute", "whole", *TASK, *asked, *store)[0] == 0
    commands = [["fit", "parts", *TASK], ["score", "parts", *asked], ["report", "parts"]]
    if "--no-store" not in store:
        commands.insert(1, ["build", "parts", *store[-2:]])
    for command in commands:
        code, _, err = isokron(*command)
        assert code == 0, err
    whole, parts = (contents(tmp_path / name) for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name in whole:
        if not name.startswith(("scores/", "report.html")):
            assert whole[name] == parts[name], name
    (one, other) = (next((tmp_path / n / "scores").glob("*.json")) for n in ("whole", "parts"))
    assert json.loads(one.read_text())["answers"] == json.loads(other.read_text())["answers"]


def test_a_run_can_be_continued_from_another_folder(
    isokron: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "letters.py").write_bytes(LETTERS.read_bytes())
    task = ["--task", "letters.py:task", "--steps", "2"]
    assert isokron("fit", "run", *task)[0] == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setattr(Path, "cwd", lambda: tmp_path / "elsewhere")
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["source"]["given"]["task"]
    assert recorded == f"{tmp_path / 'letters.py'}:task"


def test_queries_are_piped(isokron: Call) -> None:
    assert isokron("fit", "run", *TASK)[0] == 0
    code, out, _ = isokron("query", "run", "--json", "--top", "2", stdin="eval:0\n\nabc\n")
    assert code == 0
    records = [json.loads(line) for line in out.splitlines()]
    assert [record["query"] for record in records] == ["eval:0", "abc"]
    assert len(records[0]["proponents"]) <= 2
    code, out, err = isokron("query", "run", stdin="eval:99\neval:1\n")
    assert code == 1
    assert "must lie between" in err
    assert "eval:1" in out


def test_wrong_calls_are_told_in_one_line_and_leave_nothing(isokron: Call, tmp_path: Path) -> None:
    asked = ["--query", "eval:0"]
    wrong = {
        "--task, or --model and --data": asked,
        "give a query: --query": TASK,
        "'--method': 'kfca' is not one of 'kfac'": [*TASK, *asked, "--method", "kfca"],
        "'--fisher': 'none' is not one of 'empirical'": [*TASK, *asked, "--fisher", "none"],
        "'--store-dtype': 'int8' is not one of": [*TASK, *asked, "--store-dtype", "int8"],
        "'--memory': Input should be a valid number": [*TASK, *asked, "--memory", "much"],
        "'--top': Input should be greater than or equal to 1": [*TASK, *asked, "--top", "0"],
        "'--dim': Input should be greater than or equal to 1": [*TASK, *asked, "--dim", "0"],
        "--completion must be given once for each --prompt": [
            *(*TASK, "--prompt", "a"),
            *("--completion", "b", "--completion", "c"),
        ],
        "'--max-side': Input should be greater than or equal to 1": [*TASK, "--max-side", "0"],
        "--dim needs a store and --no-store forbids": [*TASK, *asked, "--no-store", "--dim", "4"],
        "--refine needs exact scores": [*TASK, *asked, "--refine", "2", "--dim", "4"],
        "'--refine': Input should be greater than or equal to 0": [*TASK, "--refine", "-1"],
        "no gone.pt": [*TASK, *asked, "--curvature", "gone.pt"],
        "leave out --method": [*TASK, *asked, "--curvature", "c.pt", "--method", "ekfac"],
        "--weights are already trained": [*TASK, *asked, "--weights", "w.safetensors"],
        "--device 'nope' cannot be used": [*TASK, *asked, "--device", "nope"],
        "no task named": ["--task", "nothing", *asked],
        "--model and --data": ["--model", "m", *asked],
        "no file": ["--model", "m", "--data", "gone.jsonl", *asked],
        "'--kind': 'vision' is not one of": ["--model", "m", "--data", "d", "--kind", "vision"],
    }
    for message, options in wrong.items():
        fails(isokron("attribute", "run", *options), 2, message)
        assert not list(tmp_path.glob("run/*")), message
    for command in ("score", "query", "report", "evaluate", "build"):
        more = asked if command == "score" else []
        fails(isokron(command, "run", *more), 2, "no run in run")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--query", "eval:99"], "must lie between 0 and 7"),
        (["--query", "eval:0", "--layers", "nothing"], "'nothing' matches no"),
        (["--query", "eval:0", "--memory", "1e-6"], "does not fit; give more memory"),
        (["--prompt", "abc"], "takes no prompts"),
        (["--query", "eval:0", "--examples", "99"], "--examples must be from 1 to the 32"),
        (["--query", "eval:0", "--fit-examples", "99"], "--fit-examples must be from 1 to the 32"),
    ],
)
def test_what_only_the_task_knows_is_refused_before_any_stage(
    isokron: Call, tmp_path: Path, options: list[str], message: str
) -> None:
    fails(isokron("attribute", "run", *TASK, *options), 2, message)
    record = tmp_path / "run" / "run.json"
    assert not record.exists() or json.loads(record.read_text())["stages"] == {}
    # nothing was computed yet, so the options may change
    right = isokron("attribute", "run", *TASK[:2], "--steps", "2", "--query", "eval:0")
    assert right[0] == 0, right[2]


@pytest.mark.parametrize("query", [["--query", "eval:99"], ["--prompt", "abc"]])
def test_a_wrong_query_is_refused_before_the_model_is_trained(
    isokron: Call, tmp_path: Path, query: list[str]
) -> None:
    assert isokron("attribute", "run", *TASK, *query)[0] == 2
    assert not (tmp_path / "run").exists()


def test_a_run_with_a_store_is_scored_with_it(isokron: Call) -> None:
    asked = ["--query", "eval:0"]
    assert isokron("attribute", "run", *TASK, *asked, "--dim", "4")[0] == 0
    code, _, err = isokron("attribute", "run", *TASK, *asked)
    assert code == 0, err
    assert "scores: store; the run has a store" in err


def test_a_different_command_in_the_same_folder_is_refused(isokron: Call) -> None:
    assert isokron("fit", "run", *TASK)[0] == 0
    fails(isokron("fit", "run", "--steps", "4"), 2, "steps was 3, is 4; give a new")
    fails(isokron("fit", "run", *TASK[:2], "--steps", "4"), 2, "steps was 3, is 4; give a new")
    fails(isokron("fit", "run", *TASK, "--method", "tkfac"), 1, "method was 'kfac', is 'tkfac'")
    fails(isokron("score", "run", "--query", "eval:0", "--store"), 1, "has no store; build one")


def test_scores_are_refined(isokron: Call, tmp_path: Path) -> None:
    options = [*TASK, "--layers", "*,!table", "--query", "eval:0", "--refine", "3"]
    code, _, err = isokron("attribute", "run", *options)
    assert code == 0, err
    assert "scores: exact; --refine needs exact scores" in err
    (path,) = (tmp_path / "run" / "scores").glob("*.json")
    record = json.loads(path.read_text())
    assert record["method"]["refine"]["steps"] == 3
    assert "--refine 3" in record["command"]
    fails(isokron("score", "run", "--self", "--refine", "2"), 2, "--self goes with --top")


def test_curvature_comes_from_a_checkpoint(isokron: Call, tmp_path: Path) -> None:
    letters = runpy.run_path(str(LETTERS))
    model = letters["Model"]()
    optimizer = Shampoo(model.named_parameters())
    letters["loss"](model, letters["task"]().train.tensors).mean().backward()
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    options = [*TASK, "--layers", "*,!table", "--query", "eval:0"]
    code, _, err = isokron("attribute", "run", *options, "--curvature", "checkpoint.pt")
    assert code == 0, err
    (path,) = (tmp_path / "run" / "scores").glob("*.json")
    record = json.loads(path.read_text())
    assert record["method"]["optimizer"]["step"] == 1
    assert f"--curvature {tmp_path / 'checkpoint.pt'}" in record["command"]
    # the same state from another place is the same curvature
    (tmp_path / "checkpoint.pt").rename(tmp_path / "moved.pt")
    assert isokron("attribute", "run", *options, "--curvature", "moved.pt")[0] == 0
    (tmp_path / "text.pt").write_text("no checkpoint")
    result = isokron("fit", "other", *options[:-2], "--curvature", "text.pt")
    fails(result, 1, "--curvature text.pt is no file of tensors")


def test_self_influence_is_written(isokron: Call, tmp_path: Path) -> None:
    assert isokron("fit", "run", *TASK)[0] == 0
    code, out, _ = isokron("score", "run", "--self", "--top", "3")
    assert code == 0
    assert (tmp_path / "run" / "self.safetensors").exists()
    assert len(out.splitlines()) == 4
    fails(isokron("score", "run"), 2, "give --query or --prompt, or --self")
    fails(isokron("score", "run", "--self", "--unit"), 2, "--self goes with --top")
    fails(isokron("score", "run", "--self", "--store"), 1, "has no store")


def test_a_run_is_evaluated(isokron: Call, tmp_path: Path) -> None:
    assert isokron("fit", "run", *TASK)[0] == 0
    fails(isokron("evaluate", "run", "--queries", "9"), 2, "--queries must be from 1 to the 8")
    code, out, err = isokron(
        "evaluate", "run", "--subsets", "3", "--queries", "2", "--flipped", "0"
    )
    assert code == 0, err
    assert "gradients" in out
    assert (tmp_path / "run" / "evaluation" / "evaluation.json").exists()


def test_a_training_run_is_unrolled(isokron: Call, tmp_path: Path) -> None:
    command = ["attribute", "run", *TASK, "--method", "unroll", "--query", "eval:0-1"]
    code, out, err = isokron(*command)
    assert code == 0, err
    assert "scores: exact; derivatives through the training run" in err
    assert "row " in out
    first = contents(tmp_path / "run")
    record = json.loads(next((tmp_path / "run" / "scores").glob("*.json")).read_text())
    assert record["method"]["method"] == "unroll"
    assert "--method unroll" in record["command"]
    assert "--fisher" not in record["command"]
    assert "derivative through the training run" in first["report.html"].decode()
    assert isokron(*command)[0] == 0
    assert contents(tmp_path / "run") == first
    answer = isokron("query", "run", "--top", "1", "--json", stdin="eval:0\n")
    assert answer[0] == 0, answer[2]
    top = record["answers"][0]["proponents"][0]
    assert json.loads(answer[1])["proponents"][0]["score"] == pytest.approx(top["score"])
    options = ["--subsets", "4", "--queries", "2", "--fraction", "0.9"]
    code, out, err = isokron("evaluate", "run", *options)
    assert code == 0, err
    assert "unroll" in out
    assert "Rank correlation of a store" not in out
    assert "Rank correlation with unrolled scores" in out
    results = json.loads((tmp_path / "run" / "evaluation" / "evaluation.json").read_text())
    assert (results["fraction"], results["same_batches"]) == (0.9, True)
    code, out, err = isokron("evaluate", "run", "--subsets", "0", "--queries", "2")
    assert code == 0, err
    assert "Linear" not in out
    assert "ekfac" in out
    one = ["--subsets", "1", "--queries", "2"]
    fails(isokron("evaluate", "run", *one), 2, "--subsets must be at least 2, or 0 if unrolled")
    fails(isokron("build", "run"), 1, "has no gradients to store")
    fails(isokron("score", "run", "--self"), 1, "no self-influence")


def test_what_cannot_be_unrolled_is_refused_before_any_work(isokron: Call, tmp_path: Path) -> None:
    asked = ["--method", "unroll", "--query", "eval:0"]
    files = ["--model", "m", "--data", "d.jsonl"]
    fails(isokron("attribute", "run", *files, *asked), 2, "training run of a model from --model")
    for options in (["--damping", "0.1"], ["--dim", "4"], ["--unit"], ["--fisher", "exact"]):
        message = "--method unroll takes no option of curvature"
        fails(isokron("attribute", "run", *TASK, *asked, *options), 2, message)
    untrained = [*TASK[:2], "--steps", "0"]
    fails(isokron("attribute", "run", *untrained, *asked), 2, "in at least one step")
    broken = {
        "buffer 'norm.running_mean' changes in training": ("nn.LayerNorm(6)", "Norm(6)"),
        "'norm.weight' has no gradient in step 1": (
            "self.norm(self.table(letters))",
            "self.table(letters)",
        ),
    }
    norm = "class Norm(nn.BatchNorm1d):\n    def forward(self, x): return super().forward(x.mT).mT"
    for message, change in broken.items():
        text = LETTERS.read_text().replace("class Model", f"{norm}\n\nclass Model", 1)
        assert change[0] in text
        (tmp_path / "mine.py").write_text(text.replace(*change))
        mine = ["--task", "mine.py:task", "--steps", "3"]
        for command in (["attribute", "run", *mine, *asked], ["fit", "run", *mine, *asked[:2]]):
            fails(isokron(*command), 2, message)
    assert not (tmp_path / "run").exists()


def test_a_run_goes_through_few_files(isokron: Call) -> None:
    """Files of the package whose functions `attribute` calls: what a reader has to follow."""
    options, files = [*TASK[:2], "--steps", "0"], set()
    assert isokron("attribute", "warm", *options, "--query", "eval:0")[0] == 0  # imports are done

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        code, _, err = isokron("attribute", "run", *options, "--query", "eval:0")
    finally:
        sys.setprofile(None)
    assert code == 0, err
    package = Path(sys.modules["isokron"].__file__ or "").parent
    ours = sorted(f for f in files if f.startswith(str(package)) and f.endswith(".py"))
    assert len(ours) <= 46, ours


def test_the_first_line_says_how_many_gradients_agree_and_strict_refuses(
    isokron: Call, tmp_path: Path
) -> None:
    options = ["--steps", "0", "--query", "eval:0", "--strict"]
    code, _, err = isokron("attribute", "run", *TASK[:2], *options)
    assert code == 0, err
    line = next(line for line in err.splitlines() if "covers" in line)
    assert line.startswith("gradients of 3 of 3 layers agree with autograd; covers")
    scaled = "class Scaled(nn.Linear):\n    def forward(self, x): return 2 * super().forward(x)"
    text = LETTERS.read_text().replace("class Model", f"{scaled}\n\n\nclass Model", 1)
    text = text.replace("nn.Linear(6, 8)", "Scaled(6, 8)")
    (tmp_path / "mine.py").write_text(text)
    mine = ["--task", "mine.py:task", *options]
    fails(isokron("attribute", "other", *mine), 2, "--strict: gradients of 1 of 3 layers")
    assert not (tmp_path / "other").exists()
    _, _, err = isokron("attribute", "other", *mine[:-1])
    assert "gradients of 2 of 3 layers agree with autograd" in err


BAD_TASK = """
from dataclasses import replace
from isokron.tasks import Examples, load

def task():
    t = load("digits-tiny")
    images, labels = t.train.tensors
    images = images.clone()
    images[[90, 200]] = float("nan")
    ids = [f"digit {n}" for n in range(len(images))]
    return replace(t, train=Examples((images, labels)), ids=ids, trained=True)
"""


def test_bad_examples_are_named_or_skipped_and_listed(isokron: Call, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(BAD_TASK)
    options = ["--task", "task.py:task", "--steps", "0"]
    for command in (["fit", "named"], ["attribute", "asked", "--query", "eval:0"]):
        error = "example 'digit 90' has a loss of nan; mend it, or go on without such examples: "
        fails(isokron(*command, *options), 1, f"{error}--on-bad skip")
        assert not (tmp_path / command[1] / "scores").exists()
    skip = [*options, "--on-bad", "skip", "--query", "eval:0", "--query", "train:300"]
    skipped = "2 of 1437 training examples are skipped and have no scores: digit 90 (loss nan), "
    code, _, err = isokron("attribute", "run", *skip)
    assert code == 0, err
    assert f"isokron: warning: {skipped}digit 200 (loss nan)" in err
    code, out, err = isokron("score", "run", "--query", "train:1436")
    assert code == 0, err
    latest = (tmp_path / "run" / "scores" / "latest").read_text()
    record = json.loads((tmp_path / "run" / "scores" / f"{latest}.json").read_text())
    assert record["run"]["skipped"] == {"digit 90": "loss nan", "digit 200": "loss nan"}
    assert record["run"]["examples"] == 1435
    page = (tmp_path / "run" / "report.html").read_text()
    assert "2 training examples whose loss or gradient is not finite" in page
    assert "train:1436: label 9" in out
    assert "  digit 1436 " in out


def test_examples_that_a_run_leaves_out_are_queries(isokron: Call) -> None:
    options = ["--task", "digits", "--steps", "0", "--examples", "10"]
    code, out, err = isokron("attribute", "run", *options, "--query", "train:1000")
    assert code == 0, err
    assert "\ntrain:1000: " in out


def test_a_missing_folder_is_told_before_data_are_looked_for(isokron: Call) -> None:
    pytest.importorskip("transformers")
    call = isokron("fit", "run", "--model", "./gone", "--data", "organization/data")
    fails(call, 2, "no folder 'gone' with a model; give the folder")
