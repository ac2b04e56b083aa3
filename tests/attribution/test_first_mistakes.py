"""First calls that are wrong: the error names the argument, the rule, the value and the remedy."""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from isokron import Attributor, losses

CROSS_ENTROPY = losses.CrossEntropy()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def pairs(count: int = 6) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(count, 4), torch.arange(count) % 3)


def begun(folder: Path, data: Any = None, **options: Any) -> Attributor:
    data = pairs() if data is None else data
    return Attributor(folder / "run", model(), data, **{"loss": CROSS_ENTROPY, **options})


def test_a_call_without_the_folder_says_so(tmp_path: Path) -> None:
    wrong: Any = Attributor
    with pytest.raises(TypeError, match=r"folder must be .* got a Sequential; write Attributor\('"):
        wrong(model(), pairs(), loss=CROSS_ENTROPY)
    with pytest.raises(TypeError, match=r"model must be .* got a TensorDataset"):
        wrong(tmp_path / "run", pairs(), loss=CROSS_ENTROPY)


def test_a_dict_of_data_sets_is_refused_by_its_keys(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"train_set .* a dict of 'train', 'test'; give one of"):
        begun(tmp_path, {"train": pairs(), "test": pairs()})


def test_arguments_of_the_data_stand_in_the_signature(tmp_path: Path) -> None:
    names = list(inspect.signature(Attributor).parameters)
    assert {"collate", "batch_size", "lengths", "ids"} <= set(names)
    with pytest.raises(TypeError, match=r"keyword argument 'collate_fn'; did you mean 'collate'\?"):
        begun(tmp_path, collate_fn=list)
    with pytest.raises(TypeError, match=r"keyword argument 'zzz'; it takes folder, model, train"):
        begun(tmp_path, zzz=1)


def test_ids_and_lengths_replace_those_of_a_task(tmp_path: Path) -> None:
    from letters import attributor, task

    names = [f"name {number}" for number in range(32)]
    assert attributor(tmp_path / "own", ids=names).data.ids == names
    lengths = list(range(1, len(task().train) + 1))
    assert attributor(tmp_path / "lengths", lengths=lengths).data.lengths == lengths


@pytest.mark.parametrize(
    ("loss", "got"),
    [
        (functional.cross_entropy, "torch's function cross_entropy"),
        (partial(functional.mse_loss, reduction="none"), "torch's function mse_loss"),
        (nn.MSELoss(), "the module MSELoss"),
        (losses.CrossEntropy, "the class CrossEntropy"),
        ("cross_entropy", "'cross_entropy'"),
        (None, "None"),
    ],
)
def test_what_is_no_loss_is_refused_by_its_name(loss: Any, got: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"loss must be .* got {got}; give loss=isokron.losses"):
        begun(tmp_path, loss=loss)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("batch", "got", "take"),
    [
        ({"x": 0, "y": 0, "name": 0}, "a dict of x, y, name", "model(batch['x']), batch['y']"),
        ({"x": 0, "y": 0}, "a dict of x, y", "model(batch['x']), batch['y']"),
        ({"x": 0}, "a dict of x", "model(batch['x']), batch[0]"),
        ((0, 0, 0), "a tuple of 3", "model(batch[0]), batch[1]"),
        (torch.zeros(2, 4), "a Tensor", "model(batch[0]), batch[1]"),
    ],
)
def test_a_loss_of_pairs_says_what_it_needs_for_other_batches(
    batch: Any, got: str, take: str
) -> None:
    with pytest.raises(ValueError, match="batch must be a pair") as caught:
        CROSS_ENTROPY(model(), batch)
    message = str(caught.value)
    assert f"got a {got.removeprefix('a ')};" in message
    assert f"CrossEntropy(forward=lambda model, batch: ({take}))" in message


def test_dicts_are_examples_of_a_loss_that_takes_them(tmp_path: Path) -> None:
    data = [{"x": x, "y": y, "name": f"row {k}"} for k, (x, y) in enumerate(pairs())]
    loss = losses.CrossEntropy(forward=lambda model, batch: (model(batch["x"]), batch["y"]))
    a = begun(tmp_path, data, loss=loss)
    right = begun(tmp_path / "pairs")
    for scored in (a, right):
        scored.fit()
    torch.testing.assert_close(
        *(x.score(y, save=False).as_subclass(Tensor) for x, y in ((a, data), (right, pairs())))
    )
    with pytest.raises(ValueError, match=r"got one example, a dict of x, y, name; put it into"):
        a.score(data[0])


TOKENS = [torch.arange(3), torch.arange(5)]


@pytest.mark.parametrize(
    ("queries", "error"),
    [
        (lambda data: data[0], r"got one example, \(a tensor \[4\], a tensor \[\]\); put it into"),
        (lambda data: (data[0][0], 1), "got one example"),  # a number for a tensor of one
        (lambda data: data[:3][0], r"those of the training set.* got a tensor \[4\]"),
        (lambda data: [data[0], data[1][0]], r"got a tensor \[4\]"),
        (lambda data: [data[:2]], r"got \(a tensor \[2, 4\], a tensor \[2\]\)"),
        (lambda data: [(*data[0], 1)], r"got \(a tensor \[4\], a tensor \[\], a int\)"),
        (lambda data: [{"x": data[0][0]}], "got a dict of x"),
        (lambda data: {"x": data[0][0]}, "queries must be a list"),
        (lambda data: iter([data[0]]), "queries must be a list or data set of examples"),
        (lambda data: 3, "queries must be a list or data set of examples"),
    ],
)
def test_queries_that_are_no_list_of_examples_are_refused(
    queries: Callable[[TensorDataset], Any], error: str, tmp_path: Path
) -> None:
    a, data = begun(tmp_path).fit(), pairs()
    with pytest.raises(ValueError, match=error):
        a.score(queries(data))
    for right in ([data[0]], (data[0], data[1]), data, [(data[0][0], 1)], [list(data[0])][:0]):
        if len(right):
            assert len(a.score(right, save=False)) == len(right)


def test_lists_of_tokens_of_any_length_are_examples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    data = [[1, 2, 3], [4, 5], [6, 7, 8, 1]]

    def pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        padded = nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], True, -100)
        return padded[:, :-1].clamp_min(0), padded[:, 1:]

    a = Attributor(tmp_path, network, data, loss=CROSS_ENTROPY, collate=pad).fit()
    assert a.score([[2, 3]], save=False).shape == (1, 3)
    with pytest.raises(ValueError, match=r"got one example, .*put it into a list"):
        a.score([1, 2, 3])


def test_numbers_of_numpy_are_numbers(tmp_path: Path) -> None:
    a = begun(tmp_path, max_side=np.int64(100), examples=np.int64(5))
    a.fit(examples=np.int64(4), seed=np.int64(1)).build(np.int64(2), damping=np.float32(0.25))
    a.score([pairs()[0]], top=np.int64(1), unit=np.bool_(True))
    a = begun(tmp_path, max_side=100, examples=5).fit(examples=4, seed=1)
    a.build(2, damping=0.25).score([pairs()[0]], top=1, unit=True)


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", ".", ".hidden", "", "/tmp"])
def test_a_name_does_not_leave_the_folder_of_scores(name: str, tmp_path: Path) -> None:
    a = begun(tmp_path).fit()
    with pytest.raises(ValueError, match=r"name must be a file name without a folder, got"):
        a.score([pairs()[0]], name=name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert not (tmp_path / "run" / "scores").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_few_examples_have_a_store(count: int, tmp_path: Path) -> None:
    a = begun(tmp_path, pairs(count)).fit().build()
    scores = a.score([pairs()[0]], save=False)
    assert scores.noise.spearman == 1
    exact = a.score([pairs()[0]], store=False, save=False)
    torch.testing.assert_close(
        scores.as_subclass(Tensor), exact.as_subclass(Tensor), rtol=1e-3, atol=1e-5
    )
