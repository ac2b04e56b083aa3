"""The engine's own promises, against naive versions where there is mathematics."""

import copy
import inspect
import logging
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import Whitening, build, equal, loss_of, net, train
from isokron import names
from isokron.optim.settings import SWITCHES


def steps(optimizer: torch.optim.Optimizer, weight: Tensor, grads: Tensor) -> Tensor:
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


class Descent(isokron.Preconditioned):
    """The engine with the identity: what is left is moments, decay and grafting."""

    def __init__(self, params: object, lr: float = 0.1, **settings: object) -> None:
        super().__init__(params, lr, **settings)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", ["decoupled", "l2"])
@pytest.mark.parametrize("kind", [None, "sgd", "adagrad", "rmsprop", "adam"])
def test_moment_decay_and_grafting_follow_the_naive_version(
    nesterov: bool, decay: str, kind: str | None
) -> None:
    start, grads = torch.randn(4, 6).double(), torch.randn(9, 4, 6).double()
    lr, beta, beta2, eps, alpha = 0.1, 0.8, 0.95, 1e-3, 0.3
    weight = nn.Parameter(start.clone())
    optimizer = build(
        isokron.SignDescent,
        [weight],
        lr=lr,
        momentum=beta,
        nesterov=nesterov,
        weight_decay=alpha,
        decay=decay,
        graft=kind,
        betas=(0.5, beta2),
        eps=eps,
    )
    optimizer.__class__ = type("Debiased", (isokron.SignDescent,), {"debias": True})
    w, mean, second = start.clone(), torch.zeros(4, 6).double(), torch.zeros(4, 6).double()
    for t, grad in enumerate(grads, start=1):
        g = grad + alpha * w if decay == "l2" else grad
        mean = beta * mean + (1 - beta) * g
        if nesterov:
            moment = ((1 - beta) * g + beta * mean) / (1 - beta ** (t + 1))
        else:
            moment = mean / (1 - beta**t)
        second = second + g**2 if kind == "adagrad" else beta2 * second + (1 - beta2) * g**2
        corrected = second / (1 - beta2**t) if kind == "adam" else second
        simple = moment if kind == "sgd" else moment / (corrected.sqrt() + eps)
        p = moment.sign()
        p = p if kind is None else p * simple.norm() / p.norm()
        w = w - lr * (p + (alpha * w if decay == "decoupled" else 0))
    # the counters are float32, so the bias corrections agree to float32
    torch.testing.assert_close(steps(optimizer, weight, grads), w, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("every", "start"), [(1, None), (3, None), (2, 5), (4, 1), (10, 1), (10, 3)]
)
def test_refresh_happens_at_start_and_then_every_so_many(every: int, start: int | None) -> None:
    seen = []

    class Watched(Whitening):
        def refresh(self, state: Any, group: Any, first: bool) -> dict[str, Tensor]:
            seen.append(int(state["step"].flatten()[0]))
            return super().refresh(state, group, first)

    weight = nn.Parameter(torch.randn(4, 4))
    steps(Watched([weight], every=every, start=start), weight, torch.randn(12, 4, 4))
    first = start or every
    early = {first * 2**k for k in range(4)}
    due = [t for t in range(1, 13) if t == first or (t > first and t % every == 0)]
    assert seen == sorted({*due, *(t for t in early if t < every)})


def test_only_the_rows_that_are_due_are_refreshed() -> None:
    """Two equal blocks out of step with each other: each has its own cadence."""
    pair = [nn.Parameter(torch.randn(4, 4)) for _ in range(2)]
    alone = [nn.Parameter(p.detach().clone()) for p in pair]
    together = Whitening(pair, every=3)
    apart = [Whitening([p], every=3) for p in alone]
    for t in range(10):
        for i in range(2):
            grad = torch.randn(4, 4) if t > 0 or i == 0 else None
            pair[i].grad = alone[i].grad = grad
        together.step()
        for optimizer in apart:
            optimizer.step()
    for mine, theirs in zip(pair, alone, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_before_its_start_the_grafted_method_steps_alone() -> None:
    start, grads = torch.randn(4, 4), torch.randn(4, 4, 4)
    grafted, plain = nn.Parameter(start.clone()), nn.Parameter(start.clone())
    settings = {"momentum": 0.9, "lr": 0.1}
    steps(Whitening([grafted], every=2, start=5, graft="sgd", **settings), grafted, grads)
    steps(Descent([plain], **settings), plain, grads)
    torch.testing.assert_close(grafted, plain)


def test_equal_blocks_are_one_batch_and_unequal_ones_are_not() -> None:
    shapes = [(8, 8), (8, 8), (16, 8), (8, 4)]  # (16, 8) is cut into two of (8, 8)
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = Whitening(params, max_dim=8)
    seen = []
    original = optimizer.direction
    optimizer.direction = lambda m, s, g: seen.append(tuple(m.shape)) or original(m, s, g)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    assert seen == [(4, 8, 8), (1, 8, 4)]
    assert set(optimizer.state[params[2]]) == {
        "step",
        *(f"{key}.{block}" for key in ("momentum", "cov", "root", "refreshed") for block in (0, 1)),
    }


@pytest.mark.parametrize("method", [isokron.SOAP, isokron.Shampoo, isokron.Katie])
def test_a_convolution_is_stepped_as_the_matrix_of_its_filters(method: Any) -> None:
    start, grads = torch.randn(6, 4, 3, 3), torch.randn(5, 6, 4, 3, 3)
    conv, matrix = nn.Parameter(start.clone()), nn.Parameter(start.reshape(6, 36))
    steps(method([conv], max_dim=12), conv, grads)
    steps(method([matrix], max_dim=12), matrix, grads.reshape(5, 6, 36))
    assert torch.equal(conv.reshape(6, 36), matrix)


def test_batched_blocks_follow_a_loop_over_blocks() -> None:
    weight = nn.Parameter(torch.randn(22, 13).double())
    start, grads = weight.detach().clone(), torch.randn(7, 22, 13).double()
    steps(Whitening([weight], every=1, max_dim=8, momentum=0.0), weight, grads)
    expected = start.clone()
    for rows in range(0, 22, 8):
        for cols in range(0, 13, 8):
            cov = torch.zeros(min(8, 22 - rows), min(8, 22 - rows)).double()
            for grad in grads:
                g = grad[rows : rows + 8, cols : cols + 8]
                cov = 0.9 * cov + 0.1 * g @ g.T
                values, basis = torch.linalg.eigh(cov)
                root = basis @ torch.diag((values.clamp(min=0) + 1e-6) ** -0.5) @ basis.T
                expected[rows : rows + 8, cols : cols + 8] -= 1e-2 * root @ g
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["square.weight", "hidden.bias"])
def test_a_nonfinite_gradient_raises_before_anything_changes(value: float, name: str) -> None:
    model = net()
    optimizer = isokron.Muon(model.named_parameters(), lr=1e-2)
    train(model, optimizer, range(3))
    before, state = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    loss_of(model, 3).backward()
    model.get_parameter(name).grad.view(-1)[1] = value
    with pytest.raises(FloatingPointError, match=name.replace(".", r"\.")):
        optimizer.step()
    assert equal(model, before)
    after = optimizer.state_dict()
    for index, entry in state["state"].items():
        assert all(torch.equal(entry[key], after["state"][index][key]) for key in entry)


def test_skipping_nonfinite_steps_is_counted_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    optimizer = isokron.Muon(model.parameters(), nonfinite="skip")
    loss_of(model, 0).backward()
    model.out.bias.grad[0] = math.nan
    with caplog.at_level(logging.WARNING):
        optimizer.step()
    assert equal(model, net())
    assert optimizer.skipped_steps == 1
    assert "skipped a step" in caplog.text


def test_huge_but_finite_gradients_are_not_mistaken_for_infinite_ones() -> None:
    weight = nn.Parameter(torch.zeros(4, 4))
    weight.grad = torch.full((4, 4), 3e38)
    isokron.SignDescent([weight], lr=0.1).step()
    assert torch.equal(weight.detach(), torch.full((4, 4), -0.1))


def test_sparse_gradients_are_refused_by_name() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = isokron.Muon(table.named_parameters())
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match=r"sparse gradients.*'weight'.*sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.complex64), "view_as_real"),
        (torch.zeros(3, 1).expand(3, 4), "expanded tensor"),
        (torch.zeros(3, 3).to_sparse(), "to_dense"),
    ],
)
def test_parameters_no_step_could_be_right_for_are_refused(param: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        isokron.AdamW([param.requires_grad_()])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -1.0}, "lr must be a finite number of at least 0, got lr=-1.0"),
        ({"lr": math.nan}, "lr must be"),
        ({"lr": "fast"}, "lr must be"),
        ({"lr": torch.tensor([0.1, 0.2])}, "lr must be"),
        ({"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"eps": -1e-8}, "eps must be"),
        ({"betas": (0.9, 1.0)}, "betas must be"),
        ({"betas": 0.9}, "betas must be"),
        ({"decay": "L2"}, "decay must be one of 'decoupled', 'corrected', 'l2'"),
        ({"graft": "lion"}, "graft must be one of"),
        ({"nonfinite": "warn"}, "nonfinite must be one of"),
        ({"nesterov": True, "momentum": 0.0}, "nesterov must be False"),
        ({"vectors": True}, "vectors must be False"),
    ],
    ids=str,
)
def test_wrong_hyperparameters_are_named_with_their_rule_and_value(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build(isokron.Muon, [nn.Parameter(torch.zeros(2, 2))], **settings)


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ({"lr": -1}, "lr must be"),
        ({"lr_scale": -1}, "lr_scale must be"),
        ({"route": "muon"}, "route must be"),
        ({"weigth_decay": 0.1}, "did you mean 'weight_decay'"),
        ({"ns_steps": 3}, "unknown key 'ns_steps' in a parameter group; did you mean 'steps'"),
        ({"learning_rate": 3}, "did you mean 'lr'"),
        ({"stacked": 1}, "stacked=1 needs at least 3 dimensions"),
        ({"split": 3}, "split=3 must divide"),
        ({"split": (1, 2)}, "sum to 2"),
    ],
    ids=str,
)
def test_a_wrong_group_is_refused_and_not_added(group: dict[str, object], message: str) -> None:
    optimizer = isokron.Muon([nn.Parameter(torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, 2))], **group})
    assert len(optimizer.param_groups) == 1


# optimizers whose constructors take bare parameters
OPTIMIZERS = (
    *(isokron.AdamW, isokron.Shampoo, isokron.SOAP, isokron.Katie, isokron.Muon),
    *(isokron.SignDescent, isokron.Quad, isokron.Skew),
)


@pytest.mark.parametrize(
    ("make", "name", "ours"),
    [
        (isokron.SOAP, "precondition_frequency", "'every'"),
        (isokron.SOAP, "shampoo_beta", "'factor_beta'"),
        (isokron.SOAP, "precondition_1d", "'vectors'"),
        (isokron.SOAP, "max_precond_dim", "'max_dim'"),
        (isokron.Shampoo, "preconditioning_compute_steps", "'every'"),
        (isokron.Shampoo, "max_preconditioner_dim", "'max_dim'"),
        (isokron.Shampoo, "start_preconditioning_step", "'start'"),
        (isokron.Shampoo, "grafting_config", "'graft'"),
        (isokron.Shampoo, "use_nesterov", "'nesterov'"),
        (isokron.Shampoo, "epsilon", "'damping' or 'eps'"),
        (isokron.Muon, "epsilon", "'eps'"),
        (isokron.Muon, "ns_steps", "'steps'"),
        (isokron.Quad, "normalize_grads", "'normalize'"),
        (isokron.AdamW, "learning_rate", "'lr'"),
    ],
)
def test_other_libraries_names_are_answered_with_ours(make: type, name: str, ours: str) -> None:
    with pytest.raises(TypeError, match=f"{name!r}; did you mean {ours}"):
        make([nn.Parameter(torch.zeros(2, 2))], **{name: 1})


NAMES = {name for table in names.OPTIMIZERS.values() for name in table}


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_every_hint_names_a_setting_that_is_accepted(make: type) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    defaults = make([weight]).defaults
    takes = {*defaults, *inspect.signature(make).parameters, *SWITCHES}
    for name in sorted(NAMES - takes):
        with pytest.raises(TypeError) as caught:
            make([weight], **{name: 1})
        _, _, hint = str(caught.value).partition("did you mean ")
        for setting in re.findall(r"'(\w+)'", hint.partition("?")[0]):
            make([{"params": [weight], setting: defaults[setting]}])


@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("warmup_steps", "scheduler"),
        ("gradient_clipping", "clip_grad_norm_"),
        ("weight_decay_type", "did you mean 'decay'?"),
        ("storage_dtype", "'state_dtype'"),
    ],
)
def test_names_that_look_like_another_setting_are_not_taken_for_it(
    make: type, name: str, advice: str
) -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(TypeError, match=name) as caught:
        make([weight], **{name: 1})
    assert advice in str(caught.value)
    with pytest.raises(ValueError, match=name) as refused:
        make([{"params": [weight], name: 1}])
    assert advice in str(refused.value)


def test_a_parameter_given_twice_is_refused() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    with pytest.warns(UserWarning, match="duplicate"), pytest.raises(ValueError, match="twice"):
        isokron.Muon([weight, weight])


def test_mixed_dtypes_share_a_group_and_an_optimizer() -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    params = [nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in kinds]
    optimizer = isokron.Muon(params, lr=0.1)
    for param in params:
        param.grad = torch.eye(4, dtype=param.dtype)
    optimizer.step()
    for param in params:
        torch.testing.assert_close(param.float(), params[0].float(), rtol=1e-2, atol=1e-2)
    assert optimizer.state[params[3]]["momentum.0"].dtype is torch.float64


def test_devices_may_be_mixed() -> None:
    """The meta device stands in for an accelerator: shapes and placement, no numbers."""
    params = [nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4, device="meta"))]
    optimizer = isokron.SignDescent(params, lr=0.1, nonfinite="ignore")
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    torch.testing.assert_close(params[0].detach(), torch.full((4, 4), 0.9 - 0.01))
    assert optimizer.state[params[1]]["momentum.0"].device.type == "meta"


def test_frozen_parameters_have_no_state_until_they_thaw() -> None:
    model = net()
    model.square.requires_grad_(False)
    optimizer = isokron.Muon(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    assert model.square.weight not in optimizer.state
    twin_state = optimizer.state[model.twin.weight]["momentum.0"].clone()
    model.square.requires_grad_(True)
    optimizer.zero_grad()
    loss_of(model, 2).backward()
    model.twin.weight.grad = None
    optimizer.step()
    assert optimizer.state[model.square.weight]["step"] == 1
    assert torch.equal(optimizer.state[model.twin.weight]["momentum.0"], twin_state)


def test_a_tensor_learning_rate_is_a_learning_rate() -> None:
    for make in (isokron.AdamW, isokron.Muon, isokron.SignDescent):
        model, reference = net(), net()
        train(model, make(model.parameters(), lr=torch.tensor(0.01)), range(3))
        train(reference, make(reference.parameters(), lr=0.01), range(3))
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_numbers_of_numpy_and_tensors_of_one_element_are_learning_rates() -> None:
    for lr in (np.float32(0.01), torch.tensor([0.01])):
        model = net()
        train(model, isokron.Muon(model.parameters(), lr=lr), range(2))


def test_a_parameter_whose_data_was_replaced_is_still_stepped() -> None:
    model, reference = net(), net()
    optimizer, plain = isokron.Muon(model.parameters()), isokron.Muon(reference.parameters())
    train(model, optimizer, range(2))
    for param in model.parameters():
        param.data = param.data.clone()
    train(model, optimizer, range(2, 4))
    train(reference, plain, range(4))
    assert equal(model, reference)


def test_momentum_of_the_update_follows_the_naive_version() -> None:
    """B ← μB + (1−δ)(P + αW), with and without Nesterov; P is the debiased first moment."""
    beta1, mu, alpha = 0.9, 0.7, 0.2
    for nesterov, dampening in ((False, 0.0), (True, 0.0), (False, 0.3), (True, 0.3)):
        weight = nn.Parameter(torch.zeros(3, 4, dtype=torch.float64))
        grads = torch.randn(12, 3, 4, dtype=torch.float64)
        settings = {"momentum": mu, "nesterov": nesterov, "dampening": dampening}
        optimizer = build(
            isokron.Shampoo,
            [weight],
            lr=0.1,
            betas=(beta1, 0.9),
            graft=None,
            start=99,
            weight_decay=alpha,
            decay="momentum",
            **settings,
        )
        m = b = w = torch.zeros(3, 4, dtype=torch.float64)
        for t, g in enumerate(grads, start=1):
            m = beta1 * m + (1 - beta1) * g
            p = (1 - dampening) * (m / (1 - beta1**t) + alpha * w)
            b = mu * b + p
            w = w - 0.1 * (p + mu * b if nesterov else b)
        torch.testing.assert_close(steps(optimizer, weight, grads), w, rtol=1e-9, atol=1e-9)


CYCLED = (isokron.Muon, isokron.Quad, isokron.SignDescent, isokron.SOAP, isokron.AdamW)


@pytest.mark.parametrize("make", CYCLED)
@pytest.mark.parametrize("cycle", ["one", "many"])
def test_cycled_momentum_is_the_first_moments_rate(make: type, cycle: str) -> None:
    """OneCycleLR and CyclicLR write betas[0]: the same by hand, where the method has its rate."""
    params = [nn.Parameter(torch.ones(4, 3)) for _ in range(2)]
    cycled, by_hand = (build(make, [param], weight_decay=0.0) for param in params)
    schedule: Any
    if cycle == "one":
        schedule = torch.optim.lr_scheduler.OneCycleLR(cycled, 0.1, total_steps=8)
    else:
        schedule = torch.optim.lr_scheduler.CyclicLR(cycled, 0.01, 0.1, 3)
    heavy_ball, rates = cycled.traits.heavy_ball, []
    for _ in range(6):
        group, theirs = by_hand.param_groups[0], cycled.param_groups[0]
        group["lr"], group["betas"] = theirs["lr"], theirs["betas"]
        if group["momentum"] and not heavy_ball:
            group["momentum"] = theirs["betas"][0]
        rates.append(theirs["betas"][0])
        grad = torch.randn(4, 3)
        for param, optimizer in zip(params, (cycled, by_hand), strict=True):
            param.grad = grad.clone()
            optimizer.step()
        assert theirs["momentum"] == group["momentum"]
        assert torch.equal(*params)
        schedule.step()
    assert len(set(rates)) > 2
    if make is isokron.Muon:  # one that is set after the cycle stays
        cycled.step()
        cycled.param_groups[0]["momentum"] = 0.5
        cycled.step()
        assert cycled.param_groups[0]["momentum"] == 0.5


def test_corrected_weight_decay_falls_with_the_learning_rate() -> None:
    """W ← W − lr·(lr/peak)·λW, for blocks and for what AdamW steps; the peak is remembered."""
    params = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(4))]
    optimizer = build(isokron.Muon, params, lr=0.5, weight_decay=0.1, decay="corrected")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: (0.5, 1.0, 0.25)[min(t, 2)])
    expected = 1.0
    for factor in (0.5, 1.0, 0.25):
        for param in params:
            param.grad = torch.zeros_like(param)
        optimizer.step()
        schedule.step()
        expected *= 1 - 0.5 * factor * factor * 0.1
        for param in params:
            torch.testing.assert_close(param.detach(), torch.full_like(param, expected))
    assert optimizer.state_dict()["param_groups"][0]["peak_lr"] == 0.5


@pytest.mark.parametrize("method", [isokron.Shampoo, isokron.SOAP, isokron.Katie])
def test_a_group_may_be_routed_to_spectral_descent(method: Any) -> None:
    """Muon's direction under another optimizer's momentum: of whole matrices, whatever max_dim."""
    weight, twin = (nn.Parameter(torch.zeros(6, 4)) for _ in range(2))
    group = {"params": [weight], "route": "spectral"}
    optimizer = method([group], betas=(0.9, 0.99), max_dim=3, graft=None)
    muon = isokron.Muon([twin], lr=optimizer.defaults["lr"], momentum=0.9, nesterov=False)
    for grad in torch.randn(4, 6, 4):
        weight.grad, twin.grad = grad, grad.clone()
        optimizer.step()
        muon.step()
    torch.testing.assert_close(weight, twin, rtol=1e-4, atol=1e-6)
    assert sorted(optimizer.state[weight]) == ["momentum.0", "step"]
