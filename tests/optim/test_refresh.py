"""Refreshes that fail, take turns or run on a thread, and gradients that are hard to factor."""

import copy
import logging
import multiprocessing
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import build, equal, loss_of, net, train

METHODS = [isokron.Shampoo, isokron.SOAP, isokron.Katie]
every_method = pytest.mark.parametrize("method", METHODS, ids=lambda m: m.__name__)


def walk(optimizer: isokron.Preconditioned, weight: nn.Parameter, grads: Any) -> Tensor:
    for grad in grads:
        weight.grad = grad
        optimizer.step()
    return weight.detach()


def broken(*args: Any, **kwargs: Any) -> Any:
    raise torch.linalg.LinAlgError("did not converge")


@every_method
def test_an_eigh_that_fails_keeps_the_old_operator_and_is_counted(
    method: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    settings = {"basis": "eigh"} if method is isokron.SOAP else {}
    optimizer = build(method, model.named_parameters(), lr=1e-3, every=2, tolerated=2, **settings)
    train(model, optimizer, range(3))
    state = optimizer.state[model.square.weight]
    key = "basis.0.0" if method is isokron.SOAP else "root.0.0"
    before = state[key].clone()
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    with caplog.at_level(logging.WARNING):
        train(model, optimizer, range(3, 7))  # two refreshes, both fail, both are tolerated
    assert torch.equal(state[key], before)
    assert optimizer.failed_refreshes > 0
    assert "'square.weight'" in caplog.text
    with pytest.raises(FloatingPointError, match=r"tolerated=2.*'\w+\.weight'.*damping"):
        train(model, optimizer, range(7, 9))
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_refresh_that_works_again_starts_the_count_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = build(isokron.Katie, [weight], every=1, tolerated=1)
    real = torch.linalg.eigh
    for t in range(12):
        monkeypatch.setattr(torch.linalg, "eigh", broken if t % 2 else real)
        weight.grad = torch.randn(4, 4)
        optimizer.step()
    assert optimizer.failed_refreshes == 6


def test_one_bad_block_does_not_spoil_the_others_of_its_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal matrices are refreshed as one batch: one that fails leaves the others theirs."""
    pair = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    alone = nn.Parameter(torch.zeros(4, 4))
    together, apart = (
        build(isokron.Katie, p, lr=0.1, every=2, start=2, tolerated=9) for p in (pair, [alone])
    )
    real = torch.linalg.eigh

    def picky(matrix: Tensor, UPLO: str = "L") -> Any:
        if bool((matrix.diagonal(dim1=-2, dim2=-1).std(-1) < 1e-4).any()):
            return broken()
        return real(matrix, UPLO=UPLO)

    monkeypatch.setattr(torch.linalg, "eigh", picky)
    for _ in range(4):
        alone.grad = torch.randn(4, 4)
        pair[0].grad, pair[1].grad = alone.grad.clone(), torch.eye(4)
        together.step()
        apart.step()
    assert together.failed_refreshes == 2
    assert apart.failed_refreshes == 0
    torch.testing.assert_close(pair[0], alone)


@every_method
def test_a_singular_factor_is_stepped_over(method: Any) -> None:
    """Every gradient is the same rank-one matrix with rows and columns of zeros."""
    weight = nn.Parameter(torch.randn(6, 5))
    grad = torch.zeros(6, 5)
    grad[:2, :2] = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
    optimizer = method([weight], lr=0.01, every=1, weight_decay=0.0)
    before = weight.detach().clone()
    walk(optimizer, weight, [grad] * 20)
    assert weight.isfinite().all()
    assert optimizer.failed_refreshes == 0
    moved = (before - weight.detach())[:2, :2]
    assert (moved * grad[:2, :2]).sum() > 0


@every_method
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_nonfinite_gradient_never_reaches_the_statistics(method: Any, bad: float) -> None:
    model, reference = net(), net()
    optimizer = method(model.named_parameters(), every=2, nonfinite="skip")
    plain = method(reference.named_parameters(), every=2)
    for step in range(6):
        if step == 3:
            model.zero_grad()
            loss_of(model, 99).backward()
            model.square.weight.grad[0, 0] = bad
            optimizer.step()
        train(model, optimizer, range(step, step + 1))
        train(reference, plain, range(step, step + 1))
    assert equal(model, reference)
    assert optimizer.skipped_steps == 1


@every_method
def test_gradients_too_large_to_square_are_refused_by_name(method: Any) -> None:
    model = net()
    optimizer = method(model.named_parameters(), every=2)
    train(model, optimizer, range(3))
    before = {k: v.clone() for k, v in optimizer.state[model.square.weight].items()}
    model.zero_grad()
    loss_of(model, 3).backward()
    model.square.weight.grad.mul_(1e22)
    with pytest.raises(FloatingPointError, match=r"too large to be squared.*'square.weight'"):
        optimizer.step()
    after = optimizer.state[model.square.weight]
    assert all(torch.equal(value, after[key]) for key, value in before.items())
    train(model, optimizer, range(3, 6))
    assert all(p.isfinite().all() for p in model.parameters())


@every_method
@pytest.mark.parametrize("scale", [1e-20, 1e-10, 1e10, 1e17])
def test_gradients_of_any_scale_train_on(method: Any, scale: float) -> None:
    """Also one that changes from step to step between the ordinary and the extreme."""
    model = net()
    optimizer = method(model.named_parameters(), lr=1e-3, every=2)
    for step in range(20):
        model.zero_grad()
        loss_of(model, step).backward()
        for param in model.parameters():
            param.grad.mul_(scale if step % 3 else 1.0)
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())
    assert all(v.isfinite().all() for s in optimizer.state.values() for v in s.values())
    assert loss_of(model, 1000).item() < 2 * loss_of(net(), 1000).item()
    assert optimizer.failed_refreshes == 0


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_gradients_for_many_steps_do_no_harm(method: Any, dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.randn(5, 6).to(dtype))
    optimizer = method([weight], lr=1e-2, every=2, weight_decay=0.0)
    walk(optimizer, weight, [torch.zeros(5, 6, dtype=dtype)] * 30)
    start = weight.detach().clone()
    walk(optimizer, weight, torch.randn(10, 5, 6).to(dtype))
    assert not torch.equal(weight.detach(), start)
    walk(optimizer, weight, [torch.zeros(5, 6, dtype=dtype)] * 60)
    walk(optimizer, weight, torch.randn(10, 5, 6).to(dtype))
    assert weight.isfinite().all()
    assert (weight.detach() - start).abs().max() < 1.0
    assert optimizer.failed_refreshes == 0


@every_method
def test_a_parameter_without_gradients_for_fifty_steps_goes_on_where_it_was(method: Any) -> None:
    pair = [nn.Parameter(torch.zeros(4, 4)) for _ in range(2)]
    alone = nn.Parameter(torch.zeros(4, 4))
    settings = {"every": 3, "refresh": "together"}  # turns depend on who else is there
    together, apart = method(pair, **settings), method([alone], **settings)
    for t in range(70):
        pair[0].grad, grad = torch.randn(4, 4), torch.randn(4, 4)
        pair[1].grad = alone.grad = grad if t < 10 or t >= 60 else None
        together.step()
        apart.step()
    torch.testing.assert_close(pair[1], alone, rtol=1e-4, atol=1e-5)


def refresh_steps(
    shapes: Any, steps: int, method: Any = isokron.Shampoo, **settings: Any
) -> list[list[int]]:
    """The steps in which a method changes its operator of each of some matrices."""
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = build(method, params, **settings)
    key = "basis.0.0" if method is isokron.SOAP else "root.0.0"
    operators = [torch.eye(len(param)) for param in params]
    changed: list[list[int]] = [[] for _ in params]
    for step in range(1, steps + 1):
        for param in params:
            param.grad = torch.randn_like(param)
        optimizer.step()
        for i, param in enumerate(params):
            operator = optimizer.state[param][key]
            if not torch.equal(operator, operators[i]):
                changed[i].append(step)
                operators[i] = operator.clone()
    return changed


COMMON_STEPS: list[tuple[dict[str, Any], list[int]]] = [
    ({"start": None}, [4]),
    ({"start": 1}, [1, 2]),
    ({"start": 2}, [2]),
    ({"start": 3}, [3]),
    ({"start": 4}, [4]),
    ({"start": 6}, [6]),
    ({"start": None, "warmup": 3}, [1, 2, 3, 7]),
    ({"start": 1, "warmup": 3}, [1, 2, 3, 4, 5]),
    ({"start": 2, "every": 10}, [2, 4, 8]),
    ({"start": 3, "every": 1}, [3]),
]


@pytest.mark.parametrize(("settings", "common"), COMMON_STEPS, ids=str)
def test_blocks_take_turns_after_their_common_refreshes(
    settings: dict[str, Any], common: list[int]
) -> None:
    settings = {"every": 4, **settings}
    every, last = settings["every"], common[-1]
    blocks = refresh_steps([(4, 4)] * 2 * every, last + 3 * every, **settings)
    assert all(steps[: len(common)] == common for steps in blocks)
    turns = [steps[len(common) :] for steps in blocks]
    # the first turn is at most `every` steps after the last common one, and two blocks share each
    firsts = Counter(steps[0] for steps in turns)
    assert firsts == dict.fromkeys(range(last + 1, last + every + 1), 2)
    assert all(steps == [steps[0] + i * every for i in range(3)] for steps in turns)


def test_together_blocks_refresh_in_the_same_steps_also_after_a_warmup() -> None:
    settings = {"every": 4, "start": None, "refresh": "together"}
    assert refresh_steps([(4, 4)] * 8, 16, **settings) == [[4, 8, 12, 16]] * 8
    assert refresh_steps([(4, 4)] * 8, 16, warmup=3, **settings) == [[1, 2, 3, 7, 11, 15]] * 8


@every_method
def test_costly_blocks_take_turns_of_their_own(method: Any) -> None:
    shapes = [(32, 32), *[(4, 4)] * 3, (32, 32), *[(4, 4)] * 3]
    blocks = refresh_steps(shapes, 16, method, every=4)
    turns = [steps[-1] % 4 for steps in blocks]
    large, small = [turns[0], turns[4]], turns[1:4] + turns[5:]
    assert len({*large}) == 2
    assert sorted(Counter(small).values()) == [3, 3]
    assert not {*large} & {*small}


@pytest.mark.parametrize("delay", [1, 2, 3])
def test_a_delayed_refresh_counts_exactly_so_many_steps_later(delay: int) -> None:
    """The operator in use is the one an undelayed twin had made `delay` steps before."""
    grads = torch.randn(13, 5, 5)
    late, prompt = nn.Parameter(torch.zeros(5, 5)), nn.Parameter(torch.zeros(5, 5))
    settings = {"every": 4, "start": 4}
    delayed, direct = (
        isokron.Katie([late], refresh=delay, **settings),
        isokron.Katie([prompt], **settings),
    )
    history = []
    for t, grad in enumerate(grads):
        late.grad, prompt.grad = grad, grad
        delayed.step()
        direct.step()
        history.append(direct.state[prompt]["root.0.0"].clone())
        now = delayed.state[late]["root.0.0"]
        expected = history[t - delay] if t >= delay else torch.eye(5)
        assert torch.equal(now, expected), t


@every_method
def test_how_long_a_delayed_refresh_takes_changes_no_number(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    real = method.refresh
    for pause in (0.0, 0.03):

        def slowly(
            self: Any, state: Any, group: Any, first: bool, pause: float = pause
        ) -> dict[str, Tensor]:
            time.sleep(pause)
            return real(self, state, group, first)

        monkeypatch.setattr(method, "refresh", slowly)
        model = net()
        train(model, method(model.parameters(), every=4, refresh=2), range(12))
        results.append(model)
    assert equal(*results)


def test_an_error_on_the_thread_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = isokron.Katie([weight], every=3, refresh=1)
    monkeypatch.setattr(isokron.Katie, "refresh", raising)
    with pytest.raises(RuntimeError, match="out of memory"):
        walk(optimizer, weight, torch.randn(4, 4, 4))


def test_failures_on_the_thread_are_counted_and_tolerated(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = build(isokron.Katie, [("weight", weight)], every=3, refresh=1, tolerated=1)
    walk(optimizer, weight, torch.randn(3, 4, 4))  # refreshes begin at 1 and 3
    optimizer.state_dict()  # and both have ended
    monkeypatch.setattr(torch.linalg, "eigh", broken)
    walk(optimizer, weight, torch.randn(4, 4, 4))
    assert optimizer.failed_refreshes == 1
    with pytest.raises(FloatingPointError, match=r"tolerated=1.*'weight'"):
        walk(optimizer, weight, torch.randn(4, 4, 4))


def test_pickling_waits_for_what_has_begun() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters(), every=4, start=4, refresh=3)
    train(model, optimizer, range(5))
    coming = {
        key: value
        for key, value in optimizer.state_dict()["state"][1].items()
        if key.startswith("next.basis")
    }
    assert coming
    assert any(not torch.equal(value, torch.eye(len(value))) for value in coming.values())


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6)])
@pytest.mark.parametrize("settings", [{}, {"statistic": "kl"}], ids=str)
def test_zeros_say_nothing_and_the_first_gradient_after_them_steps(
    shape: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """A refresh on statistics of zeros leaves the operator as it is, here the identity."""
    weight = nn.Parameter(torch.zeros(shape))
    optimizer = build(isokron.Shampoo, [weight], lr=0.01, weight_decay=0.0, max_dim=8, **settings)
    walk(optimizer, weight, [torch.zeros(shape)] * 10)
    walk(optimizer, weight, 1e-2 * torch.randn(5, *shape))
    moved = weight.detach().square().mean().sqrt()
    assert 1e-3 < moved < 0.1


def test_a_first_gradient_of_zeros_does_not_count_as_a_basis() -> None:
    weight, twin = (nn.Parameter(torch.zeros(5, 6)) for _ in range(2))
    late, plain = isokron.SOAP([weight], start=2, every=2), isokron.SOAP([twin], start=2, every=2)
    grads = torch.randn(4, 5, 6)
    walk(plain, twin, grads[:2])
    walk(late, weight, [torch.zeros(5, 6)] * 2)
    assert torch.equal(late.state[weight]["basis.0.0"], torch.eye(5))
    walk(late, weight, grads[:2])  # its first refresh is an eigh of what it then knows
    cov = late.state[weight]["cov.0.0"]
    basis = late.state[weight]["basis.0.0"]
    turned = basis.T @ (cov.tril() + cov.tril(-1).T) @ basis
    assert (turned - turned.diag().diag()).norm() < 1e-5 * turned.norm()


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_grafted_steps_of_blocks_of_order_three_have_adams_length_at_any_scale(
    scale: float,
) -> None:
    weight = nn.Parameter(torch.zeros(4, 5, 6))
    optimizer = isokron.Shampoo([weight], lr=0.01, weight_decay=0.0, max_dim=8, eps=0.0)
    walk(optimizer, weight, scale * torch.randn(4, 4, 5, 6))
    assert 1e-3 < weight.detach().square().mean().sqrt() < 0.1


UNTOUCHED: list[tuple[Any, dict[str, Any]]] = [
    (isokron.SOAP, {"betas": (0.0, 0.95), "max_dim": 2, "graft": None}),
    (isokron.Shampoo, {"max_dim": 2}),
    (isokron.Preconditioned, {"lr": 0.1, "graft": "adam"}),
    (isokron.Katie, {"decay": "l2", "betas": (0.0, 0.95)}),
    (isokron.Shampoo, {"route": "spectral", "momentum": 0.5}),
]


@pytest.mark.parametrize(("method", "settings"), UNTOUCHED, ids=str)
def test_gradients_are_never_written_to(method: Any, settings: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(4, 6))
    optimizer = build(method, [weight], **settings)
    for grad in torch.randn(3, 4, 6):
        weight.grad = grad.clone()
        optimizer.step()
        assert torch.equal(weight.grad, grad)


@every_method
def test_a_delay_that_is_switched_on_later_goes_on_with_the_operator_there_is(method: Any) -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    optimizer = method([weight], every=10)
    key = "basis.0.0" if method is isokron.SOAP else "root.0.0"
    walk(optimizer, weight, torch.randn(11, 4, 6))
    before = optimizer.state[weight][key].clone()
    optimizer.param_groups[0]["refresh"] = 2
    walk(optimizer, weight, torch.randn(4, 4, 6))
    assert torch.equal(optimizer.state[weight][key], before)
    walk(optimizer, weight, torch.randn(8, 4, 6))
    assert not torch.equal(optimizer.state[weight][key], before)


@every_method
@pytest.mark.parametrize(
    "settings",
    [
        {"state_dtype": None},
        {"state_dtype": torch.float64},
        {"factor_dtype": torch.bfloat16},
        {"factor_dtype": torch.float64},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_precision_may_be_asked_for(
    method: Any, settings: dict[str, Any], dtype: torch.dtype
) -> None:
    weight = nn.Parameter(torch.zeros(4, 6, dtype=dtype))
    optimizer = build(method, [weight], every=2, **settings)
    walk(optimizer, weight, torch.randn(6, 4, 6).to(dtype))
    assert weight.isfinite().all()
    assert optimizer.failed_refreshes == 0


def test_factors_in_float64_work_with_a_tolerance() -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    settings = {"tolerance": 0.1, "factor_dtype": torch.float64}
    walk(build(isokron.SOAP, [weight], every=2, **settings), weight, torch.randn(6, 4, 6))
    assert weight.isfinite().all()


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e12])
def test_a_tolerance_does_not_depend_on_the_scale_of_gradients(scale: float) -> None:
    weight = nn.Parameter(torch.zeros(4, 6))
    optimizer = build(isokron.SOAP, [weight], tolerance=0.05, every=1)
    walk(optimizer, weight, scale * torch.randn(3, 4, 6))
    assert not torch.equal(optimizer.state[weight]["basis.0.0"], torch.eye(4))


def test_blocks_without_an_operator_are_stepped_by_the_grafted_method_alone() -> None:
    weight = nn.Parameter(torch.zeros(4, 8))
    optimizer = build(isokron.Shampoo, [weight], lr=0.01, max_dim=4, weight_decay=0.0)
    walk(optimizer, weight, 1e-3 * torch.randn(1, 4, 8))
    blocks = [weight.detach()[:, :4], weight.detach()[:, 4:]]
    for block in blocks:
        torch.testing.assert_close(block.norm(), torch.tensor(0.04), rtol=1e-3, atol=0)


def test_a_checkpoint_that_does_not_fit_leaves_a_refresh_that_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = isokron.Katie.refresh

    def slowly(self: Any, state: Any, group: Any, first: bool) -> dict[str, Tensor]:
        time.sleep(0.05)
        return real(self, state, group, first)

    monkeypatch.setattr(isokron.Katie, "refresh", slowly)
    pair = [nn.Parameter(torch.zeros(4, 6)) for _ in range(2)]
    disturbed, plain = (isokron.Katie([p], every=6, refresh=3) for p in pair)
    for t, grad in enumerate(torch.randn(6, 4, 6)):
        for param in pair:
            param.grad = grad
        disturbed.step()
        plain.step()
        if t == 1:
            misfit = copy.deepcopy(disturbed.state_dict())
            misfit["state"][0]["root.0.0"] = torch.zeros(3, 3)
            with pytest.raises(ValueError, match=r"root\.0\.0"):
                disturbed.load_state_dict(misfit)
    assert torch.equal(*pair)


def test_a_checkpoint_can_be_taken_after_an_error_on_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def raising(*args: Any) -> Any:
        raise MemoryError("no room")

    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = isokron.Katie([weight], every=6, refresh=3)
    monkeypatch.setattr(isokron.Katie, "refresh", raising)
    walk(optimizer, weight, torch.randn(2, 4, 4))
    assert optimizer.state_dict()["state"]
    with pytest.raises(MemoryError):
        walk(optimizer, weight, torch.randn(3, 4, 4))


def _train_on(optimizer: isokron.Preconditioned, weight: nn.Parameter) -> None:
    walk(optimizer, weight, torch.randn(10, 4, 4))


def test_a_fork_refreshes_with_threads_of_its_own() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    optimizer = isokron.Katie([weight], every=4, refresh=2)
    walk(optimizer, weight, torch.randn(7, 4, 4))
    optimizer.state_dict()
    child = multiprocessing.get_context("fork").Process(target=_train_on, args=(optimizer, weight))
    child.start()
    child.join(timeout=30)
    hung = child.is_alive()
    child.kill()
    assert not hung
    assert child.exitcode == 0


def test_a_delayed_refresh_waits_until_the_first_has_landed() -> None:
    """It begins in step 2 and lands in step 5; one that began in step 4 would take its place."""
    grads = torch.randn(9, 5, 5)
    late, prompt = nn.Parameter(torch.zeros(5, 5)), nn.Parameter(torch.zeros(5, 5))
    delayed = isokron.Katie([late], every=4, start=2, refresh=3)
    direct = isokron.Katie([prompt], every=4, start=2)
    roots, seen = [], []
    for grad in grads:
        late.grad, prompt.grad = grad, grad.clone()
        delayed.step()
        direct.step()
        roots.append(direct.state[prompt]["root.0.0"].clone())
        seen.append(delayed.state[late]["root.0.0"].clone())
    assert all(torch.equal(root, torch.eye(5)) for root in seen[:4])
    assert all(torch.equal(root, roots[1]) for root in seen[4:])
