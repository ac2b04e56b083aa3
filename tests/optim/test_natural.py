"""NaturalGradient against its definition, and what a user's training loop may do to it."""

import copy
import gc
import io
import json
import logging
import math
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import isokron
from isokron.curvature import running_fisher

SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1e-2, "kl_clip": None, "momentum": 0.0}


def net(seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 3, bias=False)]
    return nn.Sequential(*layers).to(dtype)


def data(seed: int, count: int = 8, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 4, generator=generator, dtype=dtype)
    return inputs, torch.randint(3, (count,), generator=generator)


def loss_of(model: nn.Module, seed: int, count: int = 8, reduction: str = "mean") -> Tensor:
    inputs, labels = data(seed, count, next(model.parameters()).dtype)
    return nn.functional.cross_entropy(model(inputs), labels, reduction=reduction)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, passes: int = 1
) -> None:
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            (loss_of(model, 100 * step + part) / passes).backward()
        optimizer.step()


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.parameters(), second.parameters()))


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


class Naive:
    """K-FAC or EK-FAC of the linear layers of `net`, from gradients of one example at a time."""

    def __init__(self, model: nn.Sequential, beta: float = 0.95, ekfac: bool = False) -> None:
        self.model, self.beta, self.ekfac = model, beta, ekfac
        self.linears = [layer for layer in model if isinstance(layer, nn.Linear)]
        self.known: list[dict[str, Any]] = [{"A": 0, "G": 0, "w": 0.0} for _ in self.linears]

    def directions(self, inputs: Tensor, labels: Tensor, damping: float, fresh: bool) -> list:
        pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.linears]
        for x, y in zip(inputs, labels, strict=True):
            seen = []
            for layer in self.model:
                a, x = x, layer(x)
                if isinstance(layer, nn.Linear):
                    one = a.new_ones(0 if layer.bias is None else 1)
                    seen.append((torch.cat([a.detach(), one]), x))
            grads = torch.autograd.grad(nn.functional.cross_entropy(x, y), [o for _, o in seen])
            for pair, (a, _), g in zip(pairs, seen, grads, strict=True):
                pair.append((a, g))
        found = []
        for own, pair in zip(self.known, pairs, strict=True):
            own["A"] = self.beta * own["A"] + sum(a.outer(a) for a, _ in pair)
            own["G"] = self.beta * own["G"] + sum(g.outer(g) for _, g in pair)
            own["w"] = self.beta * own["w"] + len(pair)
            if "L" in own:
                squares = [(own["Q"].mT @ g.outer(a) @ own["P"]).square() for a, g in pair]
                own["L"] = own["L"] + (sum(squares) / len(pair) - own["L"]) * len(pair) / own["w"]
            if fresh:
                (d, Q), (e, P) = (torch.linalg.eigh(own[side] / own["w"]) for side in "GA")
                if not self.ekfac or "L" not in own:
                    values = d.outer(e)
                else:
                    operator = torch.kron(own["Q"], own["P"])
                    operator = operator @ own["L"].flatten().diag() @ operator.mT
                    basis = torch.kron(Q, P)
                    values = (basis.mT @ operator @ basis).diagonal().view(len(d), len(e))
                own.update(Q=Q, P=P, values=values)
            if self.ekfac:
                own["L"] = own["values"] if fresh else own["L"]
                own["values"] = own["L"]
            grad = sum(g.outer(a) for a, g in pair) / len(pair)
            rotated = (own["Q"].mT @ grad @ own["P"]) / (own["values"] + damping)
            found.append(own["Q"] @ rotated @ own["P"].mT)
        return found


def changes(model: nn.Sequential, before: nn.Sequential) -> list[Tensor]:
    """What has been subtracted from the weights of linear layers, the column of a bias last."""
    found = []
    for new, old in zip(model, before, strict=True):
        if isinstance(new, nn.Linear):
            parts = [(old.weight - new.weight).detach()]
            if new.bias is not None:
                parts.append((old.bias - new.bias).detach()[:, None])
            found.append(torch.cat(parts, 1))
    return found


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_steps_are_those_of_the_definition(method: str) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, method=method, every=2, **SETTINGS)
    naive = Naive(model, ekfac=method == "ekfac")
    for step, fresh in enumerate([True, True, True, False, True, False]):
        before, count = copy.deepcopy(model), 5 + 3 * step
        wanted = naive.directions(*data(step, count), 1e-2, fresh)
        optimizer.zero_grad()
        loss_of(model, step, count).backward()
        optimizer.step()
        for mine, theirs in zip(changes(model, before), wanted, strict=True):
            torch.testing.assert_close(mine, 0.1 * theirs, rtol=1e-8, atol=1e-10)


def test_the_first_step_is_the_exact_inverse_of_the_curvature_that_fit_finds() -> None:
    model = net()
    batch = data(0)

    def terms(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    fitted = isokron.curvature.fit(model, [batch], terms, layers=["0", "3"], dtype=torch.float64)
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    before = copy.deepcopy(model)
    loss_of(model, 0).backward()
    optimizer.step()
    grads = {name: param.grad for name, param in model.named_parameters()}
    wanted = fitted.inverse(1e-2).matvec(grads)
    new, old = dict(model.named_parameters()), dict(before.named_parameters())
    for name in ("0.weight", "0.bias", "3.weight"):
        torch.testing.assert_close(old[name] - new[name], 0.1 * wanted[name], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_several_passes_before_a_step_are_one_of_their_union(method: str) -> None:
    whole, parted = net(), net()
    settings = {**SETTINGS, "method": method}
    optimizer, several = (isokron.NaturalGradient(m, **settings) for m in (whole, parted))
    for step in range(4):
        inputs, labels = data(step, 12)
        optimizer.zero_grad()
        nn.functional.cross_entropy(whole(inputs), labels).backward()
        optimizer.step()
        several.zero_grad()
        for rows in (slice(0, 4), slice(4, 12)):
            part = nn.functional.cross_entropy(parted(inputs[rows]), labels[rows], reduction="sum")
            (part / 12).backward()
        several.step()
    for mine, theirs in zip(whole.parameters(), parted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-12)


def test_sum_and_mean_have_the_same_curvature() -> None:
    mean, total = net(), net()
    states = []
    for model, reduction in ((mean, "mean"), (total, "sum")):
        optimizer = isokron.NaturalGradient(model, reduction=reduction, **SETTINGS)
        loss_of(model, 0, reduction=reduction).backward()
        optimizer.step()
        states.append(optimizer.state[model[0].weight])
    for key in ("input", "output"):
        torch.testing.assert_close(states[0][key], states[1][key], rtol=1e-10, atol=1e-14)


def test_recomputed_and_dropped_passes_do_not_join_what_is_apart() -> None:
    model, reference = net(), net()
    optimizer, plain = (isokron.NaturalGradient(m, **SETTINGS) for m in (model, reference))
    loss_of(model, 7)  # leads nowhere
    for part in range(2):
        inputs, labels = data(part)
        outputs = torch.utils.checkpoint.checkpoint(model, inputs, use_reentrant=False)
        (nn.functional.cross_entropy(outputs, labels) / 2).backward()
    optimizer.step()
    train(reference, plain, range(1), passes=2)
    assert equal(model, reference)


@pytest.mark.parametrize("mode", ["eval", "no_grad", "zero_grad"])
def test_passes_that_do_not_train_are_not_counted(mode: str) -> None:
    model, reference = net(), net()
    optimizer, plain = (isokron.NaturalGradient(m, **SETTINGS) for m in (model, reference))
    for step in range(3):
        if mode == "no_grad":
            with torch.no_grad():
                loss_of(model, 50)
        else:
            model.train(mode != "eval")
            loss_of(model, 50).backward()
            model.train()
        optimizer.zero_grad()
        train(reference, plain, range(step, step + 1))
        loss = loss_of(model, 100 * step)
        optimizer.zero_grad()  # between the passes, as some loops have it
        loss.backward()
        optimizer.step()
    assert equal(model, reference)


def of_parameters(model: nn.Module, loss: Tensor, inputs: Tensor) -> None:
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)


def of_inputs(model: nn.Module, loss: Tensor, inputs: Tensor) -> None:
    (grad,) = torch.autograd.grad(loss, inputs, create_graph=True)
    torch.autograd.grad(
        grad.square().sum(), list(model.parameters()), retain_graph=True, allow_unused=True
    )


def backward_to_inputs(model: nn.Module, loss: Tensor, inputs: Tensor) -> None:
    loss.backward(inputs=[inputs], retain_graph=True)


@pytest.mark.parametrize("same_graph", [True, False])
@pytest.mark.parametrize("other", [of_parameters, of_inputs, backward_to_inputs])
def test_gradients_for_something_else_are_not_observed(other: Any, same_graph: bool) -> None:
    """A gradient penalty, an influence or a norm for a log, before a step or after its passes."""

    def trained(uses: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Twice().double()
        optimizer = isokron.NaturalGradient(model, **SETTINGS)
        for _ in range(3):
            inputs = torch.randn(8, 2, 3, 3, dtype=torch.float64, requires_grad=True)
            loss = model(inputs).square().mean()
            if uses:
                other(model, loss if same_graph else model(inputs).sum(), inputs)
            loss.backward()
            if uses:
                other(model, model(inputs).sum(), inputs)
            optimizer.step()
            optimizer.zero_grad()
        return model

    assert equal(trained(True), trained(False))


class Twice(nn.Module):
    """One layer used twice by the same examples, and a convolution over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, groups=2, bias=True)
        self.shared = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x).tanh().mean((2, 3))
        return self.out(self.shared(self.shared(h).tanh()))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_convolutions_and_layers_used_twice_are_what_fit_makes_of_them(method: str) -> None:
    torch.manual_seed(0)
    model = Twice().double()
    batch = (torch.randn(5, 2, 4, 4).double(), torch.randint(3, (5,)))

    def terms(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    optimizer = isokron.NaturalGradient(model, method=method, factor_beta=1.0, **SETTINGS)
    optimizer.param_groups[0]["lr"] = 0.0  # the model stays, so that fit sees the same
    for _ in range(3):
        optimizer.zero_grad()
        terms(model, batch).mean().backward()
        optimizer.step()
    fitted = isokron.curvature.fit(model, [batch], terms, method, dtype=torch.float64)
    for name, layer in fitted.layers.items():
        mine = optimizer.state[model.get_submodule(name).weight]
        if method == "kfac":
            for side in ("input", "output"):
                torch.testing.assert_close(mine[side], layer.statistics[side])
        else:  # of three looks the first has found no basis yet
            first = mine["values.output"][:, :, None] * mine["values.input"][:, None, :]
            wanted = (first + 2 * layer.statistics["eigenvalues"]) / 3
            torch.testing.assert_close(mine["eigenvalues"], wanted, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("stop", [1, 2, 5, 7])
@pytest.mark.parametrize("passes", [1, 3])
@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_resume_from_a_checkpoint_is_bit_exact(stop: int, passes: int, method: str) -> None:
    settings = {"every": 4, "statistics_every": 3, "method": method, "momentum": 0.9}
    model = net(dtype=torch.float32)
    optimizer = isokron.NaturalGradient(model, **settings)
    train(model, optimizer, range(stop), passes)
    other = net(1, torch.float32)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = isokron.NaturalGradient(other, lr=7.0)  # settings come from the checkpoint
    resumed.load_state_dict(saved(optimizer))
    train(model, optimizer, range(stop, 12), passes)
    train(other, resumed, range(stop, 12), passes)
    assert equal(model, other)


def test_hooks_are_on_only_for_steps_that_look() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, statistics_every=3, **SETTINGS)
    hooked = []
    for step in range(7):
        hooked.append(bool(model[0]._forward_hooks))
        train(model, optimizer, range(step, step + 1))
    assert hooked == [step % 3 == 0 for step in range(7)]


def test_hooks_go_with_close_and_with_the_optimizer() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    train(model, optimizer, range(1))
    optimizer.close()
    assert not model[0]._forward_hooks
    train(model, optimizer, range(1, 3))  # by what is known of the curvature
    assert not model[0]._forward_hooks
    another = isokron.NaturalGradient(model, **SETTINGS)
    assert model[0]._forward_hooks
    del another
    gc.collect()
    assert not model[0]._forward_hooks


def test_a_deep_copy_of_model_and_optimizer_goes_on_as_the_original() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, method="ekfac", **SETTINGS)
    train(model, optimizer, range(3))
    twin, its = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(3, 6))
    train(twin, its, range(3, 6))
    assert equal(model, twin)
    twin, its = pickle.loads(pickle.dumps((model, optimizer)))
    train(model, optimizer, range(6, 9))
    train(twin, its, range(6, 9))
    assert equal(model, twin)


def test_a_copy_of_the_model_alone_is_not_observed() -> None:
    model, reference = net(), net()
    optimizer, plain = (isokron.NaturalGradient(m, **SETTINGS) for m in (model, reference))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(twin, 9).backward()
    train(reference, plain, range(1))
    loss_of(model, 0).backward()
    optimizer.step()
    assert equal(model, reference)


def test_frozen_layers_stay_and_may_thaw() -> None:
    model = net()
    model[0].requires_grad_(False)
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    train(model, optimizer, range(2))
    assert torch.equal(model[0].weight, net()[0].weight)
    assert model[0].weight not in optimizer.state
    assert not torch.equal(model[3].weight, net()[3].weight)
    model[0].weight.requires_grad_()
    train(model, optimizer, range(2, 4))
    assert not torch.equal(model[0].weight, net()[0].weight)
    assert torch.equal(model[0].bias, net()[0].bias)


def test_missing_gradients_leave_a_layer_and_its_state_alone() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, **{**SETTINGS, "momentum": 0.9})
    optimizer.step()
    assert equal(model, net())
    train(model, optimizer, range(1))
    before = copy.deepcopy(model)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    model[0].weight.grad = model[0].bias.grad = None
    optimizer.step()
    assert torch.equal(model[0].weight, before[0].weight)
    assert not torch.equal(model[3].weight, before[3].weight)
    assert optimizer.state[model[0].weight]["step"] == 1


@pytest.mark.parametrize("lr", [0.01, 10.0])
def test_kl_clip_bounds_the_whole_step(lr: float) -> None:
    free, held = net(), net()
    for model, clip in ((free, None), (held, 1e-2)):
        optimizer = isokron.NaturalGradient(model, **{**SETTINGS, "lr": lr, "kl_clip": clip})
        loss_of(model, 0).backward()
        optimizer.step()
    start = net()
    whole, short = changes(free, start), changes(held, start)
    grads = [torch.cat([held[0].weight.grad, held[0].bias.grad[:, None]], 1), held[3].weight.grad]
    size = lr * sum((move * grad).sum() for move, grad in zip(whole, grads, strict=True))
    scale = min(1.0, (1e-2 / size).sqrt())
    assert (scale < 1) == (lr > 1)
    for mine, theirs in zip(short, whole, strict=True):
        torch.testing.assert_close(mine, scale * theirs)


def test_momentum_and_weight_decay_are_those_of_the_definition() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(
        model, **{**SETTINGS, "momentum": 0.9, "weight_decay": 0.5}, every=1, factor_beta=0.0
    )
    mean = 0.0
    for step in range(3):
        before = copy.deepcopy(model)
        train(model, optimizer, range(step, step + 1))
        state, grad = optimizer.state[model[3].weight], model[3].weight.grad
        mean = 0.9 * mean + 0.1 * grad
        F = torch.kron(state["output"][0], state["input"][0])
        moment = (mean / (1 - 0.9 ** (step + 1))).flatten()
        move = torch.linalg.solve(F + 1e-2 * torch.eye(18), moment).view(3, 6)
        wanted = before[3].weight * (1 - 0.1 * 0.5) - 0.1 * move
        torch.testing.assert_close(model[3].weight, wanted, rtol=1e-6, atol=1e-9)


def test_the_rest_is_stepped_by_adamw_under_the_same_schedule() -> None:
    model, reference = net(), net()
    optimizer = isokron.NaturalGradient(model, adamw_lr=0.01, **SETTINGS)
    plain = torch.optim.AdamW(reference[2].parameters(), lr=0.01, weight_decay=0.0)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)) for o in (optimizer, plain)
    ]
    for step in range(3):
        train(model, optimizer, range(step, step + 1))
        for mine, theirs in zip(model[2].parameters(), reference[2].parameters(), strict=True):
            theirs.grad = mine.grad.clone()
        plain.step()
        for schedule in schedules:
            schedule.step()
    for mine, theirs in zip(model[2].parameters(), reference[2].parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    frozen = copy.deepcopy(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer, range(3, 4))
    assert equal(model, frozen)


@pytest.mark.parametrize("kl_clip", [None, 1e-3])
def test_each_group_scales_its_learning_rate(kl_clip: float | None) -> None:
    model, reference = net(), net()
    shared = {"weight_decay": 0.1, "kl_clip": kl_clip, "damping": 1e-2}
    optimizer = isokron.NaturalGradient(model, lr=0.4, adamw_lr=0.02, **shared)
    for group, scale in zip(optimizer.param_groups, (0.25, 2.0), strict=True):
        group["lr_scale"] = scale
    plain = isokron.NaturalGradient(reference, lr=0.1, adamw_lr=0.04, **shared)
    train(model, optimizer, range(3))
    train(reference, plain, range(3))
    assert equal(model, reference)


def test_maximize_steps_up_the_loss_as_far_as_down_its_negative() -> None:
    ends = []
    for sign in (1, -1):
        model = net()
        optimizer = isokron.NaturalGradient(model, weight_decay=0.1, damping=1e-2)
        for group in optimizer.param_groups:
            group["maximize"] = sign < 0
        for step in range(4):
            optimizer.zero_grad()
            loss = sign * loss_of(model, step)
            loss.backward()
            optimizer.step()
            after = sign * loss_of(model, step)
            damping = optimizer.update_damping(loss.item(), after.item())
        ends.append((model, damping))
    assert equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1] != 1e-2


def test_embeddings_norms_and_attention_are_preconditioned_when_named() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(7, 8)
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.norm = nn.LayerNorm(8)
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.table(x)
            return self.out(self.norm(h + self.attention(h, h, h)[0]).mean(1))

    torch.manual_seed(0)
    model = Words()
    x, y = torch.randint(7, (16, 5)), torch.randint(3, (16,))
    plain = nn.functional.linear
    for method in ("kfac", "ekfac"):
        optimizer = isokron.NaturalGradient(model, layers="*", method=method, lr=0.01, damping=0.1)
        assert len(optimizer.param_groups) == 1
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        assert "q.basis.input" in optimizer.state[model.attention.in_proj_weight]
        twin, its = copy.deepcopy((model, optimizer))
        its.load_state_dict(saved(optimizer))
        for one, stepper in ((model, optimizer), (twin, its)):
            stepper.zero_grad()
            nn.functional.cross_entropy(one(x), y).backward()
            stepper.step()
        assert equal(model, twin)
        optimizer.close()
    assert nn.functional.linear is plain


def test_torchs_switches_are_taken_and_statistics_name_both_groups() -> None:
    optimizer = isokron.NaturalGradient(net(), lr=0.1, adamw_lr=0.2, fused=True, foreach=False)
    numbers = optimizer.statistics()
    assert [(s["name"], s["lr"]) for s in numbers] == [("layers", 0.1), ("adamw", 0.2)]


def test_a_model_without_layers_for_it_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer to precondition in Embedding"):
        isokron.NaturalGradient(nn.Embedding(4, 2))


def test_tied_weights_go_to_adamw() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    model[1].weight = model[0].weight
    optimizer = isokron.NaturalGradient(model, lr=0.01)
    assert optimizer.param_groups[0]["param_names"] == ["2.weight", "2.bias"]


@pytest.mark.parametrize(("after", "rule"), [(0.0, 1), (1.0, -1), (float("nan"), -1)])
def test_damping_falls_where_the_quadratic_model_holds_and_rises_elsewhere(
    after: float, rule: int
) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    train(model, optimizer, range(1))
    found = optimizer.update_damping(1.0, after, omega=0.5)
    assert found == optimizer.param_groups[0]["damping"] == 1e-2 * 0.5**rule


def test_damping_stays_where_the_prediction_is_half_right() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    loss_of(model, 0).backward()
    before = copy.deepcopy(model)
    optimizer.step()
    state, grad = optimizer.state[model[3].weight], model[3].weight.grad
    predicted = 0.0
    for layer, name in ((0, "0"), (3, "3")):
        state = optimizer.state[model[layer].weight]
        F = torch.kron(state["output"][0], state["input"][0])
        delta = -changes(model, before)[0 if name == "0" else 1].flatten()
        grad = model[layer].weight.grad
        if layer == 0:
            grad = torch.cat([grad, model[0].bias.grad[:, None]], 1)
        curved = F @ delta + 1e-2 * delta
        predicted += float(grad.flatten() @ delta + delta @ curved / 2)
    for share, wanted in ((0.26, 1e-2), (0.74, 1e-2), (0.24, 1e-2 / 0.95), (0.76, 1e-2)):
        torch.testing.assert_close(optimizer.update_damping(1.0, 1.0 + share * predicted), wanted)


@pytest.mark.parametrize("where", ["gradient", "statistics"])
@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_what_is_not_finite_changes_nothing_and_is_reported(where: str, mode: str) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, nonfinite=mode, **SETTINGS)
    train(model, optimizer, range(2))
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    if where == "gradient":
        model[0].weight.grad[0, 0] = torch.inf
    else:
        outputs = model[0](data(2)[0])
        outputs.backward(torch.full_like(outputs, torch.nan))
        for param in model[0].parameters():
            param.grad.nan_to_num_()
    if mode == "raise":
        rule = "0.weight" if where == "gradient" else "layer '0'"
        with pytest.raises(FloatingPointError, match=f"{rule}.*; nothing was changed"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped_steps == 1
    assert equal(model, before)
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for index, entry in state["state"].items():
        assert all(torch.equal(after["state"][index][key], value) for key, value in entry.items())
    train(model, optimizer, range(3, 4))
    assert all(param.isfinite().all() for param in model.parameters())


def test_a_failed_refresh_keeps_the_old_basis_and_is_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, every=1, **SETTINGS)
    train(model, optimizer, range(1))
    basis = optimizer.state[model[0].weight]["basis.input"].clone()
    eigh = running_fisher.eigh
    monkeypatch.setattr(running_fisher, "eigh", lambda matrix, _: eigh(matrix * torch.nan))
    with caplog.at_level(logging.WARNING, "isokron.optim"):
        train(model, optimizer, range(1, 2))
        assert optimizer.failed_refreshes == 2
    assert "layer '0'" in caplog.text
    assert torch.equal(optimizer.state[model[0].weight]["basis.input"], basis)


def test_a_layer_whose_first_refresh_fails_stays_where_it_is_until_one_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = net()
    start = model[0].weight.detach().clone()
    optimizer = isokron.NaturalGradient(model, every=100, **SETTINGS)
    with monkeypatch.context() as patch:
        eigh = running_fisher.eigh
        patch.setattr(running_fisher, "eigh", lambda matrix, _: eigh(matrix * torch.nan))
        train(model, optimizer, range(1))
    assert torch.equal(model[0].weight, start)
    saved = optimizer.state_dict()["state"][0]
    assert all(value.isfinite().all() for value in saved.values())
    train(model, optimizer, range(1, 2))
    assert optimizer.failed_refreshes == 2
    assert not torch.equal(model[0].weight, start)
    assert all(value.isfinite().all() for value in optimizer.state[model[0].weight].values())


@pytest.mark.parametrize("way", ["step", "clip", "by hand", "disabled"])
def test_a_scaled_loss_is_unscaled_in_the_statistics(way: str) -> None:
    model, reference = net(dtype=torch.float32), net(dtype=torch.float32)
    optimizer, plain = (isokron.NaturalGradient(m, **SETTINGS) for m in (model, reference))
    scaler = torch.amp.GradScaler("cpu", growth_interval=2, enabled=way != "disabled")

    def clip(module: nn.Module) -> None:
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)

    for step in range(5):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, step)).backward()
        if way == "by hand":
            optimizer.loss_scale = scaler.get_scale()
        if way == "clip":
            scaler.unscale_(optimizer)
            clip(model)
        scaler.step(optimizer)
        scaler.update()
        plain.zero_grad()
        loss_of(reference, step).backward()
        if way == "clip":
            clip(reference)
        plain.step()
    assert scaler.get_scale() == (1.0 if way == "disabled" else 65536.0 * 4)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_step_that_a_scaler_leaves_out_leaves_no_trace() -> None:
    model, reference = net(dtype=torch.float32), net(dtype=torch.float32)
    optimizer, plain = (isokron.NaturalGradient(m, **SETTINGS) for m in (model, reference))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    scaler.scale(loss_of(model, 5)).backward()
    model[0].weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert equal(model, reference)
    train(model, optimizer, range(1))  # without the scaler, whose scale is not this step's
    train(reference, plain, range(1))
    assert equal(model, reference)


def test_what_was_seen_for_a_step_left_out_is_forgotten_by_the_next_pass() -> None:
    """Also in loops that clear gradients by model.zero_grad(), of which optimizers hear nothing."""
    model, reference = net(dtype=torch.float32), net(dtype=torch.float32)
    optimizers = [isokron.NaturalGradient(m, **SETTINGS) for m in (model, reference)]
    for trained, optimizer, passes in zip(
        (model, reference), optimizers, ([5, 0], [0]), strict=True
    ):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for seed in passes:
            scaler.scale(loss_of(trained, seed)).backward()
            if seed == 5:
                trained[0].weight.grad[0, 0] = torch.inf
            scaler.step(optimizer)
            scaler.update(2.0**10)
            trained.zero_grad()
    assert equal(model, reference)


def test_a_transformer_trains_alike_with_a_scaler_and_without() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    words = torch.randint(32, (6, 12), generator=torch.Generator().manual_seed(0))
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
        optimizer = isokron.NaturalGradient(model, lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(words, labels=words).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        found.append(losses)
    assert found[0][-1] < found[0][0]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_dtype_and_wide_statistics(dtype: torch.dtype) -> None:
    model = net(dtype=dtype)
    optimizer = isokron.NaturalGradient(model, lr=0.01)
    train(model, optimizer, range(3))
    assert all(p.dtype is dtype and p.isfinite().all() for p in model.parameters())
    resumed = isokron.NaturalGradient(copy.deepcopy(model))
    resumed.load_state_dict(saved(optimizer))
    assert resumed.state[resumed.model[0].weight]["input"].dtype is torch.float32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"damping": 0.0}, "damping must be a finite number above 0, got damping=0.0"),
        ({"kl_clip": -1.0}, "kl_clip must be .* above 0"),
        ({"method": "kfak"}, "method must be one of 'kfac', 'ekfac', 'tkfac', got method='kfak'"),
        ({"reduction": "none"}, "reduction must be one of 'mean', 'sum'"),
        ({"every": 0}, "every must be a whole number of at least 1"),
        ({"statistics_every": 1.5}, "statistics_every must be a whole number"),
        ({"factor_beta": 1.5}, "factor_beta must be at least 0 and at most 1"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"lr": -1.0}, "lr must be"),
        ({"fisher": "none"}, "fisher must be one of 'empirical', 'sampled', 'exact'"),
        ({"max_condition": 0.5}, "max_condition must be None or at least 1"),
        ({"policy": "some"}, "policy must be one of"),
        ({"policy": None}, "policy must be one of .* got None"),
        ({"rho": "low"}, "rho must be positive, got 'low'"),
        ({"momentum": "high"}, "momentum must be at least 0 and below 1, got momentum='high'"),
        ({"max_condition": "low"}, "max_condition must be None or at least 1"),
        ({"factor_beta": None}, "factor_beta must be at least 0"),
        ({"damping": (1e-3, 0.0)}, "damping must be a finite number above 0"),
        ({"damping": (1e-3, 1e-3, 1e-3)}, "damping must be a number or a pair"),
        ({"o_max": 0}, "o_max must be a whole number of at least 1"),
        ({"store_dtype": torch.int8}, "store_dtype must be one of"),
        ({"policy": {"7": "all"}}, "policy must name layers that are fitted, got '7'"),
        ({"policy": "all", "t_max": 1}, "t_max must be a whole number of at least 2"),
        ({"store": "disk"}, "store must be one of 'auto', 'device', 'host'"),
        ({"layers": ["nothing*"]}, "'nothing.' matches no module"),
        ({"layers": ["1"]}, "no layer to observe"),
    ],
)
def test_wrong_settings_are_explained(settings: dict[str, Any], message: str) -> None:
    model = net()
    with pytest.raises(ValueError, match=message):
        isokron.NaturalGradient(model, **settings)
    gc.collect()
    assert not model[0]._forward_hooks


def test_several_ranks_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    optimizer = isokron.NaturalGradient(net())
    with pytest.warns(UserWarning, match="2 ranks do not share what their layers see"):
        optimizer.step()


def test_wrong_use_is_explained() -> None:
    model = net()
    with pytest.raises(TypeError, match=r"takes the model.*NaturalGradient\(model\)"):
        isokron.NaturalGradient(model.parameters())
    with pytest.raises(TypeError, match=r"no groups, got list; .* in lr= and .* in adamw_lr="):
        isokron.NaturalGradient(isokron.param_groups(model, lr_scale=2.0))  # type: ignore[arg-type]
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    with pytest.raises(RuntimeError, match="takes no other group"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    for wrong in (-1.0, True, "2", None, torch.nan):
        optimizer.param_groups[0]["lr_scale"] = wrong
        with pytest.raises(ValueError, match="lr_scale must be a finite number above 0"):
            optimizer.step()
    optimizer.param_groups[0]["lr_scale"] = 1.0
    with pytest.raises(RuntimeError, match="call step"):
        optimizer.update_damping(1.0, 0.5)
    model.eval()
    loss_of(model, 0).backward()
    with pytest.raises(
        RuntimeError, match="layer '0' has a gradient, but no pass of it was observed"
    ):
        optimizer.step()
    assert equal(model, net())
    wider = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, 3, bias=False))
    model.train()
    train(model, optimizer, range(1))
    other = isokron.NaturalGradient(wider)
    with pytest.raises(ValueError, match=r"of layer '0' has shape .* and \(1, 7.* here"):
        other.load_state_dict(saved(optimizer))


@pytest.mark.parametrize("method", ["kfac", "tkfac", "ekfac"])
@pytest.mark.parametrize("fisher", ["sampled", "exact"])
def test_observed_statistics_are_those_that_fit_finds(fisher: str, method: str) -> None:
    model, batch = net(), data(0)
    # the model stays, so that fit sees the same
    still = {**SETTINGS, "lr": 0.0, "adamw_lr": 0.0}
    optimizer = isokron.NaturalGradient(model, fisher=fisher, method=method, **still)
    logits = model(batch[0])
    optimizer.observe(logits)
    assert all(param.grad is None for param in model.parameters())
    nn.functional.cross_entropy(logits, batch[1]).backward()
    grads = {name: param.grad.clone() for name, param in model.named_parameters()}
    optimizer.step()
    assert all(torch.equal(p.grad, grads[name]) for name, p in model.named_parameters())
    factors = "kfac" if method == "ekfac" else method
    fitted = isokron.curvature.fit(
        model,
        [batch],
        isokron.losses.CrossEntropy(),
        factors,
        fisher=fisher,
        layers=["0", "3"],
        dtype=torch.float64,
    )
    for name, layer in fitted.layers.items():
        state = optimizer.state[model[int(name)].weight]
        assert state["terms"] == 8
        for side in ("input", "output"):  # the first draws are the same too
            torch.testing.assert_close(state[side], layer.statistics[side])


def test_the_mean_of_sampled_statistics_is_the_exact_one() -> None:
    model, batch = net(), data(0, 32)
    states = []
    for fisher, passes in (("exact", 1), ("sampled", 400)):
        optimizer = isokron.NaturalGradient(model, fisher=fisher, **SETTINGS)
        optimizer.param_groups[0]["lr"] = 0.0
        for _ in range(passes):  # of one step: each draws other labels
            optimizer.observe(model(batch[0]))
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
        states.append(optimizer.state[model[3].weight]["output"].clone())
        optimizer.close()
        model.zero_grad()
    error = (states[1] - states[0]).norm() / states[0].norm()
    assert 0 < error < 0.05


def test_targets_that_are_ignored_are_not_observed() -> None:
    model = net()
    inputs, labels = data(0, 8)
    labels[5:] = -100
    states = []
    for count, targets in ((8, labels), (5, None)):
        optimizer = isokron.NaturalGradient(model, fisher="exact", lr=0.0, adamw_lr=0.0)
        logits = model(inputs[:count])
        optimizer.observe(logits, targets)
        nn.functional.cross_entropy(logits, labels[:count]).backward()
        optimizer.step()
        states.append({k: v.clone() for k, v in optimizer.state[model[0].weight].items()})
        optimizer.close()
        model.zero_grad()
    for key in ("terms", "places", "input", "output"):
        torch.testing.assert_close(states[0][key], states[1][key])


def test_sampled_labels_resume_to_the_bit_and_cost_nothing_between_observations() -> None:
    def steps(model: nn.Module, optimizer: isokron.NaturalGradient, numbers: range) -> None:
        for step in numbers:
            inputs, labels = data(step, dtype=torch.float32)
            optimizer.zero_grad()
            logits = model(inputs)
            optimizer.observe(logits, labels)
            nn.functional.cross_entropy(logits, labels).backward()
            optimizer.step()

    settings = {"fisher": "sampled", "statistics_every": 2}
    model = net(dtype=torch.float32)
    optimizer = isokron.NaturalGradient(model, **settings)
    steps(model, optimizer, range(3))
    twin = copy.deepcopy(model)
    resumed = isokron.NaturalGradient(twin, **settings)
    resumed.load_state_dict(saved(optimizer))
    steps(model, optimizer, range(3, 7))
    steps(twin, resumed, range(3, 7))
    assert equal(model, twin)
    with pytest.raises(RuntimeError, match=r"observe\(\) is for fisher='sampled' and 'exact'"):
        isokron.NaturalGradient(net()).observe(torch.zeros(2, 3))
    fresh = net()
    stepper = isokron.NaturalGradient(fresh, fisher="sampled")
    loss_of(fresh, 0).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer.observe\(outputs\) before"):
        stepper.step()


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac"])
@pytest.mark.parametrize("policy", ["auto", "all", {"3": "all"}])
@pytest.mark.parametrize("damping", [{}, {"max_condition": 1e3}])
def test_every_policy_takes_the_dense_steps(method: str, policy: Any, damping: Any) -> None:
    dense, other = net(), net()
    settings = {**SETTINGS, "method": method, "momentum": 0.9, **damping}
    optimizers = [
        isokron.NaturalGradient(dense, **settings),
        isokron.NaturalGradient(other, policy=policy, rho=2.0, **settings),
    ]
    for model, optimizer in zip((dense, other), optimizers, strict=True):
        train(model, optimizer, range(5))
    for one, two in zip(dense.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-11)
    if policy == "all":
        resumed = isokron.NaturalGradient(copy.deepcopy(other), policy=policy, rho=2.0)
        resumed.load_state_dict(saved(optimizers[1]))
        train(other, optimizers[1], range(5, 8))
        train(resumed.model, resumed, range(5, 8))
        assert equal(other, resumed.model)


def test_a_report_has_a_record_a_layer_a_table_and_json() -> None:
    model = net(dtype=torch.float32)
    optimizer = isokron.NaturalGradient(model, policy={"0": "all"}, max_condition=1e3, layers="*")
    assert [record["terms"] for record in optimizer.report()] == [0.0, 0.0, 0.0]
    train(model, optimizer, range(3))
    report = optimizer.report()
    assert [record["layer"] for record in report] == ["0", "2", "3"]
    for record in report:
        assert record["condition_after"] <= 1e3 * (1 + 1e-5)
        assert 0 <= record["clipped"] < 1
        assert record["damping"] == 1e-3
        assert record["bytes"] > 0
    first = report[0]
    state = optimizer.state[model[0].weight]
    assert first["columns"] == int(state["count"]) <= 12  # 2·o, of 24 gradients
    assert first["bytes"] == sum(value.nbytes for value in state.values())
    table = str(report)
    assert table.splitlines()[0].split()[:4] == ["layer", "shape", "T", "λ"]
    assert "6×5" in table
    lines = [json.loads(line) for line in report.json_lines().splitlines()]
    assert lines[0]["condition_after"] == first["condition_after"]
    assert all(line["condition"] is None or line["condition"] >= 1 for line in lines)


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_few_columns_in_half_precision_train_and_resume_to_the_bit(method: str) -> None:
    model = net(dtype=torch.float32)
    settings: Any = {"method": method, "policy": "all", "t_max": 4, "every": 2}
    settings |= {"store_dtype": torch.bfloat16, "damping": (1e-2, 1e-1)}
    optimizer = isokron.NaturalGradient(model, **settings)
    train(model, optimizer, range(5))
    state = optimizer.state[model[0].weight]
    assert state["columns"].dtype is torch.bfloat16
    assert state["basis.output"].shape == (1, 6, 4)
    assert ("eigenvalues" in state) == (method == "ekfac")
    resumed = isokron.NaturalGradient(copy.deepcopy(model), **settings)
    resumed.load_state_dict(saved(optimizer))
    assert resumed.param_groups[0]["damping"] == (1e-2, 1e-1)
    train(model, optimizer, range(5, 8))
    train(resumed.model, resumed, range(5, 8))
    assert equal(model, resumed.model)
    record = optimizer.report()[0]
    assert (record["damping_output"], record["damping_input"]) == (1e-2, 1e-1)
    assert 1 <= record["condition_input"] < math.inf
    assert optimizer.update_damping(1.0, 2.0) == pytest.approx((1e-2 / 0.95**0.5, 0.1 / 0.95**0.5))


def test_a_refresh_logs_a_line_a_layer(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, policy={"0": "all"}, max_condition=1e3)
    with caplog.at_level(logging.INFO, "isokron"):
        train(model, optimizer, range(1))
    (first, *others) = [record.getMessage() for record in caplog.records]
    for part in ("layer 0: kfac", "policy all", "T 8", "λ 0.001", "κ_max 1000", "fallbacks none"):
        assert part in first
    assert any("layer 3: kfac, policy dense" in line for line in others)


@pytest.mark.parametrize("policy", ["hybrid", "dense"])
def test_a_vocabulary_of_50257_is_trained_in_bounded_memory(policy: str) -> None:
    """GPT-2's sizes but for width and depth: a dense output side would take 10 GB."""
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 64, "n_positions": 32, "vocab_size": 50257}
    config = transformers.GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    words = torch.randint(50257, (4, 12), generator=torch.Generator().manual_seed(0))
    optimizer = isokron.NaturalGradient(model, lr=0.05, policy=policy, t_max=64, every=2)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = model(words, labels=words).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    records = {record["layer"]: record for record in optimizer.report()}
    names = set(optimizer.param_groups[0]["param_names"])
    assert ("lm_head.weight" in names) == ("lm_head" in records) == (policy == "hybrid")
    if policy == "hybrid":
        head = records["lm_head"]
        assert head["columns"] <= 64
        # columns, a thin basis and a momentum in float32, and a little of the inputs
        assert head["bytes"] < 50257 * 3 * 64 * 4 * 1.01
        assert 0 < head["lost"] < 1  # of 44 gradients a step, the best 32 of 64 are kept


def test_a_layer_that_is_frozen_after_its_first_pass_waits_for_the_next() -> None:
    model = net()
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    loss_of(model, 0).backward()
    model[3].requires_grad_(False)
    model[3].weight.grad = None
    optimizer.step()
    assert equal(model[3], net()[3])
    assert not equal(model[0], net()[0])
    model[3].requires_grad_(True)
    train(model, optimizer, range(1, 2))
    assert not equal(model[3], net()[3])
