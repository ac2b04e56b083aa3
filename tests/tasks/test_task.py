"""The task value: its checks, and one loss per example."""

import pytest
import torch
from torch import nn

from isokron.tasks import Examples, Task


def toy(**changes):
    inputs = torch.arange(24.0).view(12, 2)
    examples = Examples((inputs, inputs.sum(1)))
    values = {
        "name": "toy",
        "model": lambda: nn.Linear(2, 1),
        "train": examples,
        "evaluation": examples,
        "loss": lambda model, batch: (model(batch[0])[:, 0] - batch[1]) ** 2,
        "batch_size": 4,
    }
    return Task(**(values | changes))


def test_a_batch_takes_the_same_rows_of_every_tensor():
    inputs, targets = toy().train.batch(torch.tensor([3, 0]))
    assert inputs.tolist() == [[6.0, 7.0], [0.0, 1.0]]
    assert targets.tolist() == [13.0, 1.0]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ((torch.zeros(3), torch.zeros(4)), r"equal length, .* lengths \[3, 4\]"),
        ((torch.zeros(0, 2),), r"one row per example, got tuple of lengths \[0\]"),
        ((), r"got tuple of lengths \[\]"),
        (torch.zeros(3), r"got Tensor of .*; write Examples\(\(inputs, targets\)\)"),
    ],
)
def test_wrong_examples_are_refused_with_the_remedy(tensors, message):
    with pytest.raises(ValueError, match=message):
        Examples(tensors)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch_size": 13}, ValueError, "batch_size must lie between 1 and the 12 .* got 13"),
        (
            {"train": None},
            TypeError,
            "train and evaluation must be Examples.*, got NoneType and Examples",
        ),
        (
            {"evaluation": [1, 2]},
            TypeError,
            "train and evaluation must be Examples.*, got Examples and list",
        ),
        (
            {"model": nn.Linear(2, 1)},
            TypeError,
            "a new model, got a model; write model=lambda: MyModel",
        ),
        ({"lengths": [3]}, ValueError, "lengths must be 12, one per training example, got 1"),
        ({"ids": ["a", "b"]}, ValueError, "ids must be 12, one per training example, got 2"),
    ],
)
def test_wrong_arguments_are_refused_by_name(changes, error, message):
    with pytest.raises(error, match=message):
        toy(**changes)


def test_what_attribution_needs_may_be_left_out():
    task = toy(evaluation=None)
    assert (task.show, task.read, task.prompt, task.said, task.lengths) == (None,) * 5
    assert (list(task.ids), task.skipped, task.trained) == ([], (), False)
    with pytest.raises(ValueError, match="task 'toy' has no evaluation examples"):
        _ = task.held_out
    assert toy().held_out is not None


def test_losses_are_one_per_example():
    task = toy()
    assert task.losses(task.model(), task.train.batch(torch.arange(5))).shape == (5,)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda model, batch: model(batch[0]).mean(),
            r'got Tensor of shape \(\); .*"none"',
        ),
        (lambda model, batch: 1.0, "got float"),
    ],
)
def test_another_loss_is_refused_with_shape_and_remedy(loss, message):
    task = toy(loss=loss)
    with pytest.raises(ValueError, match=message):
        task.losses(task.model(), task.train.batch(torch.arange(5)))
