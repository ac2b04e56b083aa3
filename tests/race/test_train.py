"""One run: what it measures, and how it ends when the optimizer misbehaves."""

import dataclasses

import pytest
import torch

from isokron.optimizers_by_name import resolve
from isokron.race.train import optimizer_bytes, train


def test_a_run_learns_and_records_every_step(task):
    run = train(task, resolve("torch.optim:AdamW"), 0.03, seed=0, steps=40)
    assert run.status == "finished"
    assert run.final < 0.7 * run.eval_losses[0]
    assert len(run.train_losses) == 40
    assert (run.eval_steps[0], run.eval_steps[-1]) == (0, 40)
    assert run.model_seconds > 0
    assert run.optimizer_seconds > 0


def test_optimizers_of_one_seed_share_weights_and_batches(task):
    seen = []

    def spying(model, batch):
        if torch.is_grad_enabled():
            seen[-1].append(batch[0].sum().item())
        return task.loss(model, batch)

    spied = dataclasses.replace(task, loss=spying)
    runs = []
    for spec, lr in (("torch.optim:AdamW", 0.01), ("torch.optim:SGD", 0.1), ("muon", 0.01)):
        seen.append([])
        runs.append(train(spied, resolve(spec), lr, seed=3, steps=6))
    assert len({(run.weights, run.batches, run.eval_losses[0]) for run in runs}) == 1
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 6
    other = train(task, resolve("torch.optim:SGD"), 0.1, seed=4, steps=6)
    assert other.weights != runs[0].weights
    assert other.batches != runs[0].batches


def test_the_same_run_twice_is_the_same(task):
    first, second = (train(task, resolve("muon"), 0.01, seed=1, steps=8) for _ in range(2))
    assert first.eval_losses == second.eval_losses
    assert first.train_losses == second.train_losses


def test_the_callers_random_state_is_left_alone(task):
    torch.manual_seed(11)
    before = torch.get_rng_state()
    train(task, resolve("torch.optim:SGD"), 0.1, seed=0, steps=2)
    assert torch.equal(before, torch.get_rng_state())


def test_an_enormous_learning_rate_is_told_as_divergence(task):
    run = train(task, resolve("torch.optim:SGD"), 1e6, seed=0, steps=20)
    assert run.status == "diverged"
    assert run.final == float("inf")
    assert "rose from" in run.message or "became" in run.message
    assert len(run.train_losses) < 20


def test_a_floating_point_error_is_divergence(task):
    run = train(task, resolve("toy:Overflows"), 0.1, 0, steps=5)
    assert (run.status, run.message) == ("diverged", "gradient of 0.weight is not finite")


def test_an_exception_of_the_optimizer_is_its_failure(task):
    run = train(task, resolve("toy:Raises"), 0.1, 0, steps=5)
    assert (run.status, run.message) == ("failed", "RuntimeError: no <more> steps")


def test_an_exception_of_the_task_is_not_blamed_on_the_optimizer(task):
    broken = dataclasses.replace(task, loss=lambda model, batch: model(batch[0]).mean())
    with pytest.raises(ValueError, match="one loss per example"):
        train(broken, resolve("torch.optim:SGD"), 0.1, 0, steps=5)


def test_memory_counts_every_storage_once():
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    buffer = torch.zeros(100)
    optimizer.state[parameter] = {"a": buffer[:50], "b": buffer[50:], "c": [torch.zeros(3)]}
    assert optimizer_bytes(optimizer) == 100 * 4 + 3 * 4


def test_adam_state_is_two_copies_of_the_parameters(task):
    run = train(task, resolve("torch.optim:AdamW"), 0.01, 0, steps=2)
    parameters = sum(p.numel() for p in task.model().parameters())
    tensors = len(list(task.model().parameters()))
    assert run.optimizer_bytes == 2 * 4 * parameters + 4 * tensors


def test_a_run_ends_with_the_statistics_of_its_last_step(task):
    run = train(task, resolve("shampoo(every=2)"), 0.01, 0, steps=4)
    assert {"update_rms", "adam_cosine", "condition_max"} <= run.statistics[0].keys()
    assert any(group["update_rms"] and group["refreshes"] for group in run.statistics)
    assert train(task, resolve("torch.optim:SGD"), 0.01, 0, steps=4).statistics == []
