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
    task = toy()
    inputs, targets = task.train.batch(torch.tensor([3, 0]))
    assert inputs.tolist() == [[6.0, 7.0], [0.0, 1.0]]
    assert targets.tolist() == [13.0, 1.0]


def test_tensors_of_unequal_length_are_refused_with_their_lengths():
    with pytest.raises(ValueError, match=r"equal length, got lengths \[3, 4\]"):
        Examples((torch.zeros(3), torch.zeros(4)))


def test_no_examples_are_refused():
    with pytest.raises(ValueError, match="at least one example"):
        Examples((torch.zeros(0, 2),))


def test_a_tensor_without_its_tuple_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"write Examples\(\(inputs, targets\)\)"):
        Examples(torch.zeros(3))


def test_a_batch_larger_than_the_training_set_is_refused():
    with pytest.raises(ValueError, match=r"batch_size must lie between 1 and the 12 .* got 13"):
        toy(batch_size=13)


def test_examples_of_another_type_are_refused_by_argument_name():
    with pytest.raises(TypeError, match="evaluation must be Examples, got list"):
        toy(evaluation=[1, 2])


def test_losses_are_one_per_example():
    task = toy()
    batch = task.train.batch(torch.arange(5))
    assert task.losses(task.model(), batch).shape == (5,)


def test_a_mean_loss_is_refused_with_shape_and_remedy():
    task = toy(loss=lambda model, batch: model(batch[0]).mean())
    with pytest.raises(ValueError, match=r'shape \(5,\), got shape \(\).*reduction="none"'):
        task.losses(task.model(), task.train.batch(torch.arange(5)))


def test_a_loss_that_is_no_tensor_is_refused():
    task = toy(loss=lambda model, batch: 1.0)
    with pytest.raises(ValueError, match="got float"):
        task.losses(task.model(), task.train.batch(torch.arange(5)))


def test_a_model_in_place_of_a_function_that_makes_one_is_refused():
    with pytest.raises(TypeError, match=r"a fresh one: model=lambda: MyModel"):
        toy(model=nn.Linear(2, 1))


def test_logits_that_are_no_function_are_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"logits must be callable or None, got Tensor; pass"):
        toy(logits=torch.zeros(3))


@pytest.mark.parametrize("argument", ["show", "read"])
def test_other_functions_are_refused_alike(argument):
    with pytest.raises(TypeError, match=rf"{argument} must be callable or None, got str; pass"):
        toy(**{argument: "words"})


def test_what_attribution_needs_may_be_left_out():
    task = toy()
    assert (task.show, task.read, list(task.ids), task.trained) == (None, None, [], False)


def test_equal_ids_are_refused_with_both_positions():
    names = [str(i) for i in range(11)]
    with pytest.raises(ValueError, match=r"must differ, got '4' at positions 4 and 11"):
        toy(ids=[*names, "4"])


def test_ids_of_another_number_than_the_examples_are_refused():
    with pytest.raises(ValueError, match=r"each of the 12 training examples, got 2"):
        toy(ids=["a", "b"])
    with pytest.raises(TypeError, match="a sequence of strings, got one, 'abcdefghijkl'"):
        toy(ids="abcdefghijkl")
    with pytest.raises(TypeError, match="ids must be strings, got int 0"):
        toy(ids=list(range(12)))
