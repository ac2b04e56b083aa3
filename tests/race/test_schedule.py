"""What every run shares: schedule, evaluation points, batches."""

import pytest
import torch

from isokron.race.train import evaluation_steps
from isokron.training import batch_order, warmup_cosine


def test_schedule_warms_up_over_a_tenth_and_falls_to_zero():
    factors = [warmup_cosine(step, 100) for step in range(101)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == 1.0
    assert factors[55] == pytest.approx(0.5)
    assert factors[100] == pytest.approx(0.0)
    assert factors[10:] == sorted(factors[10:], reverse=True)


@pytest.mark.parametrize("steps", [1, 2, 5, 24, 25, 300, 1001])
def test_evaluations_include_the_start_and_the_end(steps):
    points = evaluation_steps(steps)
    assert points[0] == 0
    assert points[-1] == steps
    assert len(points) == min(steps, 24) + 1


def test_an_epoch_shows_every_example_once():
    order = batch_order(examples=12, batch_size=4, steps=7, seed=0)
    assert order.shape == (7, 4)
    assert sorted(order[:3].flatten().tolist()) == list(range(12))
    assert sorted(order[3:6].flatten().tolist()) == list(range(12))
    assert not torch.equal(order[:3], order[3:6])


def test_batches_depend_on_the_seed_only():
    assert torch.equal(batch_order(12, 4, 7, 5), batch_order(12, 4, 7, 5))
    assert not torch.equal(batch_order(12, 4, 7, 5), batch_order(12, 4, 7, 6))
    assert torch.equal(batch_order(12, 4, 3, 5), batch_order(12, 4, 7, 5)[:3])
