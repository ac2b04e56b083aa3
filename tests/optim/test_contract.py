"""What every optimizer promises, over the one list of them."""

import copy
import io
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import CASES, DEVICE, Case, equal, loss_of, net, randn, train

# The second device is slow: there every property is looked at once.
STOPS = [1, 2, 7, 11] if DEVICE == "cpu" else [7]
DTYPES = [torch.bfloat16, torch.float16, torch.float64] if DEVICE == "cpu" else [torch.bfloat16]
CONVEX_STEPS, CONVEX_LOSS = (200, 0.02) if DEVICE == "cpu" else (50, 0.4)
PLAIN = {torch.Tensor, type(torch.empty(0, device=DEVICE))}

WIDE = [c for c in CASES if "adamw" not in c.name and "moments" not in c.settings]

every_case = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def all_at_once(case: Case) -> Case:
    """Without turns, which depend on the other parameters of an optimizer and their order."""
    refresh = case.settings.get("refresh")
    refresh = refresh if isinstance(refresh, int) else "together"
    return replace(case, settings={**case.settings, "refresh": refresh})


def saved_and_loaded(state_dict: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state_dict, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@every_case
def test_loss_falls_on_a_convex_problem(case: Case) -> None:
    weight = nn.Parameter(torch.zeros(6, 10, device=DEVICE))
    inputs, true = randn(200, 10), randn(6, 10)
    targets = inputs @ true.T
    optimizer = case.make([weight], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 10 * (1 - t / CONVEX_STEPS))
    losses = []
    for _ in range(CONVEX_STEPS):
        optimizer.zero_grad()
        loss = (inputs @ weight.T - targets).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    assert losses[-1] < CONVEX_LOSS * losses[0]


@every_case
def test_loss_falls_on_a_small_network(case: Case) -> None:
    model = net()
    start = loss_of(model, 10_000).item()
    train(model, case.make(isokron.param_groups(model)), range(150))
    assert loss_of(model, 10_000).item() < 0.75 * start


@every_case
@pytest.mark.parametrize("stop", STOPS)
def test_resume_from_a_checkpoint_is_bit_exact(case: Case, stop: int) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(stop))
    other = net(seed=1)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed = case.make(other.parameters())
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    train(model, optimizer, range(stop, 20))
    train(other, resumed, range(stop, 20))
    assert equal(model, other)


@every_case
@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_keep_their_dtype_and_resume_in_it(case: Case, dtype: torch.dtype) -> None:
    model = net(dtype=dtype)
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(4), dtype)
    assert all(p.dtype is dtype for p in model.parameters())
    assert all(p.isfinite().all() for p in model.parameters())
    twin = copy.deepcopy(model)
    resumed = case.make(twin.parameters())
    resumed.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        for key, value in optimizer.state[mine].items():
            assert resumed.state[theirs][key].dtype is value.dtype
    train(model, optimizer, range(4, 8), dtype)
    train(twin, resumed, range(4, 8), dtype)
    assert equal(model, twin)


@pytest.mark.parametrize("case", WIDE, ids=lambda c: c.name)
def test_half_precision_parameters_have_float32_state(case: Case) -> None:
    model = net(dtype=torch.bfloat16)
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(2), torch.bfloat16)
    entries = [item for entry in optimizer.state.values() for item in entry.items()]
    assert entries
    counts = ("step", "average_weight")
    assert all(v.dtype is torch.float32 for key, v in entries if key not in counts)


@every_case
def test_state_is_flat_plain_tensors(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(2))
    for entry in optimizer.state_dict()["state"].values():
        assert all(type(key) is str and type(value) in PLAIN for key, value in entry.items())


@every_case
def test_a_missing_gradient_leaves_its_parameter_and_the_others_alone(case: Case) -> None:
    """`square` and `twin` share a batch: without one's gradient the other steps as if alone."""
    case = all_at_once(case)
    model, alone = net(), net()
    optimizer = case.make(model.parameters())
    names = [name for name, _ in alone.named_parameters() if name != "square.weight"]
    reference = case.make([p for name, p in alone.named_parameters() if name in names])
    for step in range(6):
        for module, opt in ((model, optimizer), (alone, reference)):
            module.zero_grad()
            loss_of(module, step).backward()
            if module is model:
                module.square.weight.grad = None
            opt.step()
    assert torch.equal(model.square.weight, net().square.weight)
    for name in names:
        torch.testing.assert_close(
            model.get_parameter(name), alone.get_parameter(name), rtol=1e-5, atol=1e-6
        )


@every_case
def test_a_parameter_that_misses_steps_counts_only_its_own(case: Case) -> None:
    """A gradient every other step gives what stepping only then gives."""
    case = all_at_once(case)
    first, second = randn(4, 5), randn(4, 5)
    pair = [nn.Parameter(first.clone()), nn.Parameter(second.clone())]
    single = nn.Parameter(second.clone())
    optimizer, reference = case.make(pair), case.make([single])
    grads = randn(12, 4, 5)
    for step, grad in enumerate(grads):
        pair[0].grad = grad.clone()
        pair[1].grad = single.grad = grad.flip(0) if step % 2 else None
        optimizer.step()
        reference.step()
    torch.testing.assert_close(pair[1], single, rtol=1e-5, atol=1e-6)


@every_case
def test_order_of_parameters_does_not_matter(case: Case) -> None:
    case = all_at_once(case)
    forward, backward = net(), net()
    train(forward, case.make(list(forward.parameters())), range(5))
    train(backward, case.make(list(backward.parameters())[::-1]), range(5))
    for mine, theirs in zip(forward.parameters(), backward.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@every_case
def test_groups_step_with_their_own_learning_rates(case: Case) -> None:
    model, reference = net(), net()
    settings = {"weight_decay": 0.0}
    groups = [
        {"params": [model.square.weight], "lr": 0.0},
        {"params": [model.twin.weight], "lr_scale": 0.5},
    ]
    optimizer = case.make(groups, **settings)
    plain = case.make([reference.twin.weight], **settings)
    for module, opt in ((model, optimizer), (reference, plain)):
        loss_of(module, 0).backward()
        opt.step()
    start = net()
    assert torch.equal(model.square.weight, start.square.weight)
    half = (model.twin.weight - start.twin.weight) * 2
    torch.testing.assert_close(
        half, reference.twin.weight - start.twin.weight, atol=1e-6, rtol=1e-4
    )


@every_case
def test_one_schedule_reaches_every_parameter(case: Case) -> None:
    model = net()
    optimizer = case.make(isokron.param_groups(model, lr_scale={"out.*": 0.1}))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    train(model, optimizer, range(1))
    schedule.step()  # from here on the rate is 0, for every group
    frozen = copy.deepcopy(model)
    train(model, optimizer, range(1, 3))
    assert equal(model, frozen)


@every_case
def test_closure_is_called_with_gradients_enabled_and_its_loss_returned(case: Case) -> None:
    model, reference = net(), net()
    optimizer = case.make(model.parameters())

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    train(reference, case.make(reference.parameters()), range(1))
    assert loss.item() == loss_of(net(), 0).item()
    assert equal(model, reference)


@every_case
def test_a_group_added_late_steps_and_leaves_the_others_as_they_were(case: Case) -> None:
    model, reference = net(), net()
    optimizer = case.make([model.square.weight, model.hidden.bias])
    plain = case.make([reference.square.weight, reference.hidden.bias])
    for step in range(6):
        reference.zero_grad()
        loss_of(reference, step).backward()  # the same gradients for both
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            mine.grad = theirs.grad.clone()
        if step == 3:
            late = [model.twin.weight, model.out.bias]
            optimizer.add_param_group({"params": late})
        optimizer.step()
        plain.step()
    assert torch.equal(model.square.weight, reference.square.weight)
    assert torch.equal(model.hidden.bias, reference.hidden.bias)
    assert not torch.equal(model.twin.weight, net().twin.weight)
    assert optimizer.state[model.twin.weight]["step"] == 3
    assert optimizer.state[model.square.weight]["step"] == 6


@every_case
def test_grad_scaler_skips_overflowing_steps_and_unscales_the_others(case: Case) -> None:
    model, reference = net(), net()
    optimizer, plain = case.make(model.parameters()), case.make(reference.parameters())
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    scaler.scale(loss_of(model, 0)).backward()
    model.square.weight.grad[0, 0] = torch.inf
    scaler.step(optimizer)
    scaler.update()
    assert equal(model, reference)
    optimizer.zero_grad()
    scaler.scale(loss_of(model, 1)).backward()
    scaler.step(optimizer)
    loss_of(reference, 1).backward()
    plain.step()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@every_case
def test_maximize_climbs_what_minimize_descends(case: Case) -> None:
    down, up = net(), net()
    descend = case.make(down.parameters(), weight_decay=0.1)
    climb = case.make(up.parameters(), weight_decay=0.1, maximize=True)
    for step in range(4):
        for module, opt, sign in ((down, descend, 1), (up, climb, -1)):
            opt.zero_grad()
            (sign * loss_of(module, step)).backward()
            opt.step()
    for mine, theirs in zip(down.parameters(), up.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@every_case
def test_a_deep_copy_goes_on_as_the_original(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(4))
    twin_model, twin = copy.deepcopy((model, optimizer))
    train(model, optimizer, range(4, 9))
    train(twin_model, twin, range(4, 9))
    assert equal(model, twin_model)


@every_case
def test_pickling_keeps_hyperparameters_and_state(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    train(model, optimizer, range(3))
    twin = pickle.loads(pickle.dumps(optimizer))
    assert twin.defaults == optimizer.defaults
    for mine, theirs in zip(
        optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True
    ):
        mine.grad = theirs.grad = torch.ones_like(mine)
    optimizer.step()
    twin.step()
    for mine, theirs in zip(
        optimizer.param_groups[0]["params"], twin.param_groups[0]["params"], strict=True
    ):
        assert torch.equal(mine, theirs)


@every_case
def test_layout_in_memory_does_not_change_the_result(case: Case) -> None:
    """channels_last and transposed parameters, expanded and sliced gradients."""
    conv, matrix = randn(6, 4, 3, 3), randn(5, 8)
    wide = randn(5, 16)
    plain = [
        nn.Parameter(conv.clone()),
        nn.Parameter(matrix.clone()),
        nn.Parameter(wide[:, :8] + 0),
    ]
    odd = [
        nn.Parameter(conv.clone(memory_format=torch.channels_last)),
        nn.Parameter(matrix.T.contiguous().T),
        nn.Parameter(wide.clone()[:, :8]),
    ]
    optimizer, reference = case.make(odd), case.make(plain)
    for _ in range(4):
        grads = [randn(6, 4, 3, 3), randn(5, 1).expand(5, 8), randn(8, 5).T]
        for params in (plain, odd):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad.contiguous() if params is plain else grad
        optimizer.step()
        reference.step()
    assert odd[0].is_contiguous(memory_format=torch.channels_last)
    for mine, theirs in zip(odd, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@every_case
def test_gradients_are_never_written_to(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters(), weight_decay=0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        before = [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before, strict=True))


@every_case
def test_empty_and_scalar_parameters_are_fine(case: Case) -> None:
    params = [
        nn.Parameter(torch.zeros(0, 3, device=DEVICE)),
        nn.Parameter(torch.ones((), device=DEVICE)),
    ]
    optimizer = case.make(params)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert params[1].item() < 1


@every_case
def test_a_step_without_any_gradient_changes_nothing(case: Case) -> None:
    model = net()
    optimizer = case.make(model.parameters())
    optimizer.step()
    assert equal(model, net())


@every_case
def test_torchs_switches_of_implementation_are_taken_and_change_nothing(case: Case) -> None:
    models = net(), net()
    for model, switches in zip(models, ({}, {"fused": True, "foreach": False}), strict=True):
        group = {**case.settings, "params": list(model.parameters())}
        train(model, case.optimizer([group], **switches), range(3))
    assert equal(*models)


COMPILED = [(case, "inductor") for case in CASES if case.compiles]
COMPILED += [(case, "aot_eager") for case in CASES if case.name == "soap"]  # a graph is enough


@pytest.mark.parametrize(("case", "backend"), COMPILED, ids=lambda item: getattr(item, "name", ""))
def test_the_direction_compiles_as_one_graph(case: Case, backend: str) -> None:
    model, reference = net(), net()
    optimizer, plain = case.make(model.parameters()), case.make(reference.parameters())
    optimizer.direction = torch.compile(optimizer.direction, fullgraph=True, backend=backend)
    train(model, optimizer, range(3))
    train(reference, plain, range(3))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["SOAP", "Muon", "Quad", "AdamW"])
def test_a_compiled_step_is_the_step(name: str) -> None:
    def parameters(compiled: bool) -> list[Tensor]:
        model = net()
        optimizer = getattr(isokron, name)(model.parameters())
        step = torch.compile(optimizer.step) if compiled else optimizer.step
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            step()
        return list(model.parameters())

    for one, other in zip(parameters(True), parameters(False), strict=True):
        assert torch.equal(one, other)
