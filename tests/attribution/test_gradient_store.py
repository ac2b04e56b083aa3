"""A gradient store gives back what was written, at the cost of what is read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from small_store import COLUMNS, SCHEMA, WIDTH, build, contents, fill, gradients

import isokron
from isokron.attribution import store as store_module
from isokron.attribution.projection import GENERATOR
from isokron.attribution.store import Store, StoreWriter


def test_a_store_gives_back_what_was_written(tmp_path: Path) -> None:
    build(tmp_path / "new" / "store")
    store = Store.open(tmp_path / "new" / "store", verify="full")
    assert (len(store), store.width, store.examples, store.dtype) == (10, 22, 10, torch.float32)
    assert torch.cat([rows for _, rows in store.blocks(1000)]).equal(gradients(0, 10))
    assert store.extra("loss").equal(torch.arange(10) / 2)
    assert store.ids() == [f"é-{k}" for k in range(10)]
    assert store.settings == {**SCHEMA["settings"], "generator": GENERATOR}
    assert store.columns("fc2") == slice(12, 22)


def test_the_folder_holds_shards_and_a_manifest_only(tmp_path: Path) -> None:
    build(tmp_path)
    shards = [f"shard-0000{k}.safetensors" for k in range(3)]
    assert sorted(contents(tmp_path)) == ["manifest.json", *shards]
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert [record["header"]["tensors"]["gradients"] for record in manifest["shards"]] == [
        ["F32", [rows, 22]] for rows in (4, 4, 2)
    ]
    assert manifest["columns"] == [["fc1", [3, 4]], ["fc2", [1, 5, 2]]]


def test_a_shard_is_plain_safetensors_that_says_what_it_belongs_to(tmp_path: Path) -> None:
    store = build(tmp_path, dtype=torch.bfloat16)
    path = tmp_path / "shard-00001.safetensors"
    assert load_file(path)["gradients"].equal(gradients(4, 8).bfloat16())
    with safe_open(path, "pt") as file:
        owner = json.loads(file.metadata()["isokron"])
    assert (owner["settings"], owner["first_example"]) == (store.schema.digest, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_keep_to_memory_and_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    store, row = build(tmp_path, dtype=dtype), WIDTH * dtype.itemsize
    for memory, sizes in [
        (row, [1] * 10),
        (3 * row + 1, [3, 1, 3, 1, 2]),
        (10**9, [4, 4, 2]),
    ]:
        blocks = list(store.blocks(memory))
        assert [len(rows) for _, rows in blocks] == sizes
        for first, rows in blocks:
            assert rows.equal(gradients(first, first + len(rows)).to(dtype))
    with pytest.raises(ValueError, match=f"memory must hold a row of {row} bytes, got {row - 1}"):
        next(store.blocks(row - 1))


def test_rows_come_in_the_order_asked_for(tmp_path: Path) -> None:
    store = build(tmp_path)
    wanted = [9, 0, 4, 3, 4]
    assert store.rows(wanted).equal(gradients(0, 10)[wanted])
    assert store.rows(torch.tensor(wanted)).equal(gradients(0, 10)[wanted])
    assert store.rows([]).shape == (0, WIDTH)
    with pytest.raises(IndexError, match="indices must be from 0 to 9, got 10"):
        store.rows([1, 10])


def test_writing_to_what_was_read_leaves_the_file_alone(tmp_path: Path) -> None:
    store, before = build(tmp_path), contents(tmp_path)
    _, rows = next(store.blocks(10**6))
    rows.zero_()
    assert contents(tmp_path) == before
    assert store.rows([0]).equal(gradients(0, 1))


def test_gradients_of_another_layout_and_dtype_are_stored_alike(tmp_path: Path) -> None:
    build(tmp_path / "a", examples=4)
    writer = StoreWriter.open(tmp_path / "b", **{**SCHEMA, "examples": 4})
    turned = gradients(0, 4).double().mT.contiguous().mT.requires_grad_()
    extra = {"loss": torch.arange(8)[::2] / 4}
    writer.write(0, turned, ids=[f"é-{k}" for k in range(4)], extra=extra)
    writer.finish()
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_finished_store_has_nothing_missing_and_is_left_as_it_is(tmp_path: Path) -> None:
    build(tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    writer = StoreWriter.open(tmp_path, **SCHEMA)
    assert writer.missing() == []
    writer.finish()
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_settings_of_equal_value_are_the_same_settings(tmp_path: Path) -> None:
    changed = {"projection": {"seed": 0, "dim": 3.0}, "model": "toy"}
    fill(StoreWriter.open(tmp_path, **SCHEMA), [0, 1])
    build(tmp_path, settings=changed)
    build(tmp_path.with_name("straight"))
    assert contents(tmp_path) == contents(tmp_path.with_name("straight"))


@pytest.mark.parametrize("finished", [True, False])
def test_other_settings_are_refused_with_every_difference(tmp_path: Path, finished: bool) -> None:
    if finished:
        build(tmp_path)
    else:
        fill(StoreWriter.open(tmp_path, **SCHEMA), [0])
    before = contents(tmp_path)
    settings = {"model": "big", "projection": {"dim": 3, "seed": 7}}
    with pytest.raises(ValueError, match="begun with other settings") as caught:
        StoreWriter.open(
            tmp_path,
            settings=settings,
            columns={**COLUMNS, "fc2": (10,), "fc3": (1,)},
            examples=11,
            examples_per_shard=4,
            dtype=torch.float16,
        )
    for line in [
        "settings.model was 'toy' and is now 'big'",
        "settings.projection.seed was 0 and is now 7",
        "columns.fc2 was (1, 5, 2) and is now (10,)",
        "columns.fc3 was None and is now (1,)",
        "examples was 10 and is now 11",
        "dtype was 'float32' and is now 'float16'",
    ]:
        assert line in str(caught.value)
    assert "projection.dim" not in str(caught.value)
    assert contents(tmp_path) == before


def test_a_store_of_another_generator_is_refused(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "GENERATOR", "philox4x32-10 v0")
        build(tmp_path)
    with pytest.raises(ValueError, match=r"generator 'philox4x32-10 v0', and this isokron .* v1'"):
        Store.open(tmp_path)
    with pytest.raises(ValueError, match=r"settings.generator was 'philox4x32-10 v0' and is now"):
        StoreWriter.open(tmp_path, **SCHEMA)


def test_other_peoples_files_are_never_mixed_with(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"has other files in it, such as thesis.txt; give"):
        StoreWriter.open(tmp_path, **SCHEMA)


def rows(first: int = 0, last: int = 4) -> dict:
    return {"gradients": gradients(first, last), "ids": [str(k) for k in range(first, last)]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"gradients": torch.ones(4, 21)},
            r"must be floating of shape \(4, 22\), got .* \(4, 21\)",
        ),
        ({"gradients": torch.ones(4, 22).int()}, r"must be floating .* torch.int32"),
        ({"gradients": torch.ones(3, 22)}, r"of shape \(4, 22\), got .* \(3, 22\)"),
        ({"gradients": gradients(0, 4).log()}, "finite, those of example 0 are not in torch.fl"),
        ({"ids": ["a"]}, "ids of shard 0 must be 4, one an example, got 1"),
        ({"extra": {"loss": torch.ones(5)}}, "loss of shard 0 must be 4, one an example, got 5"),
        ({"extra": {"ids": torch.ones(4)}}, "extra must not hold gradients or ids"),
        ({"number": 3}, "number must be from 0 to 2, got 3"),
    ],
)
def test_a_wrong_shard_is_refused_and_leaves_nothing(
    tmp_path: Path, changes: dict, message: str
) -> None:
    writer = StoreWriter.open(tmp_path, **SCHEMA)
    given = {"number": 0, **rows(), **changes}
    with pytest.raises(ValueError, match=message):
        writer.write(given.pop("number"), given.pop("gradients"), **given)
    assert list(contents(tmp_path)) == ["schema.json"]


@pytest.mark.parametrize("value", [1e6, -1e6, float("nan"), float("inf"), float("-inf")])
def test_gradients_that_float16_cannot_hold_are_named(tmp_path: Path, value: float) -> None:
    writer = StoreWriter.open(tmp_path, **SCHEMA, dtype=torch.float16)
    wrong = gradients(4, 8)
    wrong[2, 3] = value
    with pytest.raises(
        ValueError, match=r"those of example 6 are not in torch.float16; store them"
    ):
        writer.write(1, wrong, ids=list("abcd"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"settings": {"model": torch}}, "settings must be JSON-able"),
        ({"settings": {"damping": float("nan")}}, "settings must be JSON-able"),
        ({"examples": 0}, "examples must be a whole number of at least 1, got 0"),
        ({"examples_per_shard": 2.5}, "examples_per_shard must be a whole .* got 2.5"),
        ({"dtype": torch.float64}, "dtype must be one of .*bfloat16.* got float64"),
        ({"columns": {}}, r"columns must have entries of a layer at least, got \(\)"),
        ({"columns": {"fc": (0, 3)}}, r"columns must have entries .* got .*\(0, 3\)"),
    ],
)
def test_a_wrong_plan_is_refused_before_a_folder_is_made(
    tmp_path: Path, changes: dict, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StoreWriter.open(tmp_path / "store", **{**SCHEMA, **changes})
    assert not (tmp_path / "store").exists()


def test_names_that_are_not_there_are_told(tmp_path: Path) -> None:
    store = build(tmp_path)
    with pytest.raises(ValueError, match="layer 'fc3' is not in the store, which has fc1, fc2"):
        store.columns("fc3")
    with pytest.raises(ValueError, match="the store has no 'position', it has gradients, ids, "):
        store.extra("position")
    with pytest.raises(ValueError, match="verify must be 'size' or 'full', got 'all'"):
        Store.open(tmp_path, verify="all")


MEASURE = """
import sys, torch
from isokron.attribution.store import Store

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

torch.ones(64, 64) @ torch.ones(64)  # what torch itself takes the first time
start = resident()
store = Store.open(sys.argv[1])
opened = resident() - start
most = 0
for _, rows in store.blocks(4 << 20):
    rows.sum()
    most = max(most, resident() - start)
print(opened, most)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_opening_reads_nothing_and_a_scan_holds_one_block(tmp_path: Path) -> None:
    build(tmp_path, columns={"fc": (1 << 17,)}, examples=64, examples_per_shard=16)  # 32 MiB
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(isokron.__file__).parents[1]), "OMP_NUM_THREADS": "1"},
    )
    opened, most = map(int, done.stdout.split())
    assert opened < 4 << 20
    assert most < 12 << 20
