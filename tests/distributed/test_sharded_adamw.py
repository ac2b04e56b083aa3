"""AdamW divided over real ranks: the bits of one process, 1/R of the state, errors on all ranks."""

import gc
import os
import signal
import time
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import isokron
from given_gradients import HALF, SMALL, UGLY, Model, average, differing, gradients
from isokron import ShardedAdamW
from isokron.distributed import Ranks, gradient_buckets
from isokron.distributed.sharded_gradient import ShardedGradient
from processes import outcomes, run


class Pair:
    """A model over ranks and the same one in one process, which gets the averaged gradients."""

    def __init__(
        self,
        kinds: Any = UGLY,
        sharding: dict[str, Any] | None = None,
        frozen: str = "",
        **settings: Any,
    ) -> None:
        self.sharding = {"gradients": "sharded", "bucket_bytes": 1 << 18, **(sharding or {})}
        self.model, self.twin = Model(kinds), Model(kinds)
        for model in (self.model, self.twin):
            for name, param in model.named_parameters():
                param.requires_grad_(name != frozen)
        self.optimizer = isokron.AdamW(groups(self.model), **settings)
        self.optimizer.distribute(**self.sharding)
        self.reference = isokron.AdamW(groups(self.twin), **settings)

    def backward(self, turn: int, absent: Collection[int] = (), exact: bool = False) -> None:
        """Gradients of this rank, or under `gradients="whole"` the averages, as DDP makes them."""
        if self.sharding["gradients"] == "whole":
            grads = average(self.model, dist.get_world_size(), turn, exact)
        else:
            grads = gradients(self.model, dist.get_rank(), turn, exact)
        self.model.backward([None if i in absent else g for i, g in enumerate(grads)])
        averages = average(self.twin, dist.get_world_size(), turn, exact)
        self.twin.backward([None if i in absent else g for i, g in enumerate(averages)])

    def step(self) -> list[str]:
        """Which parameters differ in any bit."""
        self.optimizer.step()
        self.reference.step()
        return differing(self.model, self.twin)

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()
        self.reference.zero_grad()


def was_sent(param: Tensor) -> bool:
    return isinstance(param.grad, ShardedGradient) and param.grad.local is None


def groups(model: Model) -> list[dict[str, Any]]:
    params = model.all()
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], "lr": 3e-3, "weight_decay": 0.1}]


def steps_like_one_process(mode: str, settings: dict[str, Any]) -> list[str]:
    pair = Pair(sharding={"gradients": mode}, lr=1e-2, **settings)
    schedules = [
        torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        for optimizer in (pair.optimizer, pair.reference)
    ]
    wrong = []
    for turn in range(4):
        pair.zero_grad()
        pair.backward(turn)
        wrong += [f"step {turn} {name}" for name in pair.step()]
        for schedule in schedules:
            schedule.step()
    full = pair.optimizer.full_state_dict()["state"]
    for i, entry in pair.reference.state_dict()["state"].items():
        wrong += [f"{key} {i}" for key in entry if not torch.equal(entry[key], full[i][key])]
    return wrong


@pytest.mark.parametrize("mode", ["whole", "sharded"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parameters_and_moments_have_the_bits_of_one_process(mode: str, ranks: int) -> None:
    assert run(ranks, steps_like_one_process, mode, {}) == [[]] * ranks


def test_settings_keep_the_bits_of_one_process() -> None:
    settings = {
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "amsgrad": True,
        "maximize": True,
        "decay": "l2",
        "state_dtype": torch.float32,
        "nonfinite": "skip",
    }
    assert run(2, steps_like_one_process, "sharded", settings) == [[], []]


def steps_by_reduce_scatter() -> list[str]:
    """As on a GPU; a sum over two ranks has no order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradient_buckets, "added_by_receiver", lambda device: False)
        return steps_like_one_process("sharded", {})


def test_torchs_reduce_scatter_gives_the_same_bits() -> None:
    assert run(2, steps_by_reduce_scatter) == [[], []]


def accumulates() -> list[str]:
    """Three backward passes a step, and gradients that are never cleared."""
    pair, wrong = Pair(), []
    for turn in range(4):
        pair.backward(turn, exact=True)
        # all gradients were sent during the backward pass
        assert all(was_sent(param) for param in pair.model.parameters() if param.numel())
        if turn in (2, 3):
            wrong += pair.step()
    return wrong


def test_gradients_of_several_backward_passes_add_up() -> None:
    assert run(2, accumulates) == [[], []]


def unusual_parameters(mode: str, frozen: str) -> list[str]:
    """Missing gradients, a frozen parameter that thaws, other layouts, memory that is replaced."""
    pair, wrong = Pair(sharding={"gradients": mode}, frozen=frozen), []
    for model in (pair.model, pair.twin):
        model.p4.data = model.p4.data.t().contiguous().t()
        model.p11.requires_grad_(False)
    for turn in range(5):
        for model in (pair.model, pair.twin):
            if turn == 1:
                model.p4.data.mul_(0.5)
            if turn == 3:
                model.p11.requires_grad_(True)
            if turn == 4:
                model.p6.data = model.p6.data.clone()
        absent = {0: {5, 8}, 1: {5}, 2: set(range(12)) - {5}, 3: {0}, 4: set()}[turn]
        pair.zero_grad()
        pair.backward(turn, absent | ({11} if turn < 3 else set()))
        wrong += [f"{turn} {name}" for name in pair.step() if name != "p4"]
        assert pair.model.p11 in pair.optimizer.state or turn < 3
        # the transposed one is divided in logical order, so that other elements come last
        torch.testing.assert_close(pair.model.p4, pair.twin.p4, rtol=1e-6, atol=1e-7)
        assert not pair.model.p4.is_contiguous()
    counts = [pair.reference.state[p]["step"] for p in pair.twin.all() if p.numel()]
    assert counts == [pair.optimizer.state[p]["step"] for p in pair.model.all() if p.numel()]
    return wrong


@pytest.mark.parametrize(
    ("mode", "frozen"),
    [("whole", "p11"), ("sharded", "p11"), ("sharded", "")],
    ids=["whole", "frozen before distribute", "frozen after distribute"],
)
def test_parameters_without_gradients_are_left_alone(mode: str, frozen: str) -> None:
    assert run(2, unusual_parameters, mode, frozen) == [[], []]


def thawing() -> list[list[bool]]:
    """After each backward pass, for every parameter: whether its gradient was sent."""
    layers = [nn.Linear(8, 8, bias=False) for _ in range(3)]
    layers[1].requires_grad_(False)
    params = [layer.weight for layer in layers]
    optimizer = ShardedAdamW(params, bucket_bytes=256)
    sent = []
    for turn in range(4):
        if turn == 1:
            layers[1].requires_grad_(True)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(turn + 10 * dist.get_rank())
        nn.Sequential(*layers)(torch.randn(4, 8, generator=generator)).sum().backward()
        sent.append(list(map(was_sent, params)))
        optimizer.step()
    return sent


def test_a_thawed_parameter_takes_part_in_later_backward_passes() -> None:
    for sent in run(2, thawing):
        assert sent[2:] == [[True] * 3] * 2


def added_groups() -> list[str]:
    model, twin, wrong = Model(UGLY), Model(UGLY), []
    optimizer, reference = ShardedAdamW(model.all()[:6]), isokron.AdamW(twin.all()[:6])
    for turn in range(3):
        if turn == 1:
            optimizer.add_param_group({"params": model.all()[6:], "lr": 1e-2})
            reference.add_param_group({"params": twin.all()[6:], "lr": 1e-2})
        model.zero_grad()
        optimizer.zero_grad()
        model.backward(gradients(model, dist.get_rank(), turn))
        optimizer.step()
        for param, grad in zip(twin.all(), average(twin, dist.get_world_size(), turn), strict=True):
            param.grad = grad
        reference.step()
        wrong += differing(model, twin)
    return wrong


def test_groups_can_be_added_later() -> None:
    assert run(2, added_groups) == [[], []]


def counted() -> tuple[float, int, int]:
    """This rank's share of moments, bytes sent in a step, and bytes of the model."""
    model = Model([((512, 640), torch.float32), ((640,), torch.float32), ((300, 640), HALF)] * 2)
    ranks = Ranks(dist.group.WORLD)
    optimizer = ShardedAdamW(model.parameters(), group=ranks)
    model.backward(gradients(model, dist.get_rank(), 0))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert all(map(was_sent, model.parameters()))
    optimizer.step()
    values = [v.to_local() for e in optimizer.state.values() for k, v in e.items() if k != "step"]
    moments = sum(value.numel() * value.element_size() for value in values)
    return moments / (2 * whole), ranks.traffic.sent, whole


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_and_sends_what_ddp_sends(ranks: int) -> None:
    for moments, sent, whole in run(ranks, counted):
        assert moments == 1 / ranks
        assert sent == 2 * whole * (ranks - 1) // ranks


def clipped(max_norm: float) -> float:
    pair = Pair()
    pair.backward(0)
    norm = pair.optimizer.clip_grad_norm_(max_norm)
    squares = [p.grad.double().square().sum() for p in pair.twin.parameters()]
    torch.testing.assert_close(norm, torch.stack(squares).sum().sqrt(), rtol=1e-12, atol=0)
    scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for param in pair.twin.parameters():
        param.grad *= scale
    assert pair.step() == []
    return float(norm)


@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_the_norm_over_all_ranks_is_clipped(max_norm: float) -> None:
    assert len(set(run(3, clipped, max_norm))) == 1


def by_torch() -> list[str]:
    """What torch's functions say about gradients that have been sent."""
    pair, texts = Pair(), []
    pair.backward(0)
    params = list(pair.model.parameters())
    for function in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        with pytest.raises(RuntimeError) as caught:
            function(params, 1.0)
        texts.append(str(caught.value))
    with pytest.raises(RuntimeError) as caught:
        print(params[0].grad * 2)
    texts.append(str(caught.value))
    assert pair.step() == []  # nothing has changed
    return texts


def test_torchs_clipping_is_told_what_clips_sharded_gradients() -> None:
    for texts in run(2, by_torch):
        assert all("sharded gradient: it has been sent" in text for text in texts)
        assert all("call optimizer.clip_grad_norm_(max_norm)" in text for text in texts)


def zeroed_by_the_model(to_none: bool) -> list[str]:
    """model.zero_grad() in place of the optimizer's, also after a pass that no step follows."""
    pair, wrong = Pair(), []
    for turn in range(4):
        for model in (pair.model, pair.twin):
            model.zero_grad(set_to_none=to_none)
        if turn == 2:
            pair.backward(turn)
            for model in (pair.model, pair.twin):
                model.zero_grad(set_to_none=to_none)
        pair.backward(turn, absent={5} if turn == 3 else ())
        if turn == 1:  # one gradient alone, and the others go on adding up
            for model in (pair.model, pair.twin):
                model.p2.grad = None
            pair.backward(turn)
        wrong += [f"{turn} {name}" for name in pair.step()]
    return wrong


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_of_the_model_forgets_what_has_been_sent(to_none: bool) -> None:
    assert run(2, zeroed_by_the_model, to_none) == [[], []]


def zeroed_on_one_rank() -> str:
    pair = Pair()
    pair.backward(0)
    if dist.get_rank():
        pair.model.zero_grad()
    with pytest.raises(RuntimeError) as caught:
        pair.optimizer.step()
    return str(caught.value)


def test_ranks_of_which_one_has_forgotten_its_gradients_are_told_so() -> None:
    for text in run(2, zeroed_on_one_rank):
        assert "gradients before a step must be the same on all 2 ranks" in text
        assert '"gradients set to None": 0' in text


def nonfinite(mode: str) -> None:
    rank, model, before = dist.get_rank(), Model(UGLY), Model(UGLY)
    optimizer = ShardedAdamW(list(model.named_parameters()), nonfinite=mode)
    grads = gradients(model, rank, 0)
    if rank == 1:
        grads[5][7], grads[9][-1] = torch.inf, torch.nan  # in the rows of rank 0 and of rank 1
    model.backward(list(grads))
    if mode == "raise":
        with pytest.raises(FloatingPointError, match=f"parameter '{'p9' if rank else 'p5'}'"):
            optimizer.step()
    else:
        optimizer.step()
        assert optimizer.skipped_steps == 1
    assert differing(model, before) == []
    optimizer.zero_grad()
    model.backward(gradients(model, rank, 0))
    optimizer.step()
    assert len(differing(model, before)) == sum(p.numel() > 0 for p in model.parameters())


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_gradients_that_are_not_finite_change_nothing_on_any_rank(mode: str) -> None:
    run(2, nonfinite, mode)


def disagreements() -> list[str]:
    rank, texts = dist.get_rank(), []

    def refused(call: Callable[[], Any]) -> None:
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value))

    refused(lambda: ShardedAdamW(Model(SMALL).all()[:: -1 if rank else 1]))
    refused(lambda: ShardedAdamW(Model([((7,), [torch.float32, torch.float64][rank])]).all()))
    refused(lambda: ShardedAdamW(Model(SMALL).all(), bucket_bytes=100 + rank))
    refused(lambda: ShardedAdamW(Model(SMALL).all(), lr=1.0 + rank).step())
    model = Model(SMALL)
    with torch.no_grad():
        model.p0[0] += rank
    refused(ShardedAdamW(model.all()).step)
    return texts


def test_ranks_that_disagree_are_told_so() -> None:
    differences = [
        ("[7]", "[3, 5]"),
        ("float32", "float64"),
        ("100", "101"),
        ("1.0", "2.0"),
        ("values of the parameters", "against"),
    ]
    for texts in run(2, disagreements):
        for text, both in zip(texts, differences, strict=True):
            assert "must be the same on all 2 ranks, but rank 0 has" in text
            assert all(part in text for part in both)


def uneven_passes() -> None:
    """One rank has gone through one batch more than the other."""
    rank, model = dist.get_rank(), Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), timeout=20)
    for turn in range(1 + rank):
        model.backward(gradients(model, rank, turn))
    optimizer.step()


def uneven_gradients() -> None:
    """One rank has no gradient of a parameter, so that its bucket is not sent there."""
    rank, model = dist.get_rank(), Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), bucket_bytes=1 << 18, timeout=20)
    grads = gradients(model, rank, 0)
    model.backward([None if rank and i == 6 else grad for i, grad in enumerate(grads)])
    optimizer.step()


def killed() -> None:
    rank, model = dist.get_rank(), Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), timeout=20)
    for turn in range(3):
        optimizer.zero_grad()
        if rank and turn == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model.backward(gradients(model, rank, turn))
        optimizer.step()


def stalled() -> None:
    rank, model = dist.get_rank(), Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), bucket_bytes=1 << 18, timeout=2.0)
    if rank:
        time.sleep(60)
    model.backward(gradients(model, rank, 0))
    optimizer.step()


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (uneven_passes, "gradients before a step must be the same on all 2 ranks"),
        (uneven_gradients, "gradients before a step must be the same on all 2 ranks"),
        (killed, "rank 0 of 2 waited in"),
        (stalled, "within 2 s"),
    ],
)
def test_no_rank_waits_for_ever(function: Callable[[], None], text: str) -> None:
    assert text in str(outcomes(2, function, seconds=40, awaited=1)[0])


def wide_sums() -> list[str]:
    rank, model, twin = dist.get_rank(), Model(UGLY), Model(UGLY)
    half = [p for p in model.all() if p.dtype is HALF]
    optimizer = ShardedAdamW(half, communication_dtype=torch.float32)
    reference = isokron.AdamW([p for p in twin.all() if p.dtype is HALF])
    model.backward(gradients(model, rank, 0))
    optimizer.step()
    for param, *grads in zip(twin.all(), *(gradients(twin, r, 0) for r in (0, 1)), strict=True):
        param.grad = ((grads[0].float() + grads[1].float()) / 2).to(param.dtype)
    reference.step()
    return differing(model, twin)


def test_half_precision_gradients_can_be_added_in_float32() -> None:
    assert run(2, wide_sums) == [[], []]


def in_two_groups() -> list[str]:
    """Ranks 0 and 2 train one model, 1 and 3 another."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, twin = Model(SMALL), Model(SMALL)
    optimizer = ShardedAdamW(model.parameters(), group=pairs[rank % 2])
    reference = isokron.AdamW(twin.parameters())
    model.backward(gradients(model, rank, 0))
    optimizer.step()
    both = [gradients(model, r, 0) for r in (rank % 2, rank % 2 + 2)]
    for param, *grads in zip(twin.parameters(), *both, strict=True):
        param.grad = (grads[0] + grads[1]) / 2
    reference.step()
    with pytest.raises(ValueError, match="is not in it; pass a group only on the ranks"):
        ShardedAdamW(model.parameters(), group=pairs[1 - rank % 2])
    return differing(model, twin)


def test_the_ranks_of_a_process_group_train_by_themselves() -> None:
    assert run(4, in_two_groups) == [[]] * 4


def closing() -> tuple[list[float], list[float]]:
    """Losses of this rank, and those of one process with the data of all ranks."""
    torch.manual_seed(0)
    model, twin, data = nn.Linear(6, 3), nn.Linear(6, 3), torch.randn(8, 6)
    twin.load_state_dict(model.state_dict())
    optimizer = ShardedAdamW(model.parameters(), lr=0.1)
    reference = torch.optim.AdamW(twin.parameters(), lr=0.1)

    def loss(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            value = model(rows).square().mean()
            value.backward()
            return value

        return float(optimizer.step(closure))

    part = data.chunk(dist.get_world_size())[dist.get_rank()]
    losses = [loss(model, optimizer, part) for _ in range(3)]
    expected = [loss(twin, reference, data) for _ in range(3)]
    assert all(map(torch.allclose, model.parameters(), twin.parameters()))
    return losses, expected


def test_a_closure_is_run_before_the_step() -> None:
    (first, expected), (second, _) = run(2, closing)
    mean = [(a + b) / 2 for a, b in zip(first, second, strict=True)]
    assert mean == pytest.approx(expected, rel=1e-5)


def refusals() -> None:
    model = Model(SMALL)
    params = model.all()
    for wrong in ({"bucket_bytes": 0}, {"communication_dtype": torch.int8}, {"timeout": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            ShardedAdamW(params, **wrong)
    with pytest.raises(ValueError, match="gradients must be 'whole' or 'sharded'"):
        isokron.AdamW(params).distribute(gradients="some")
    with pytest.raises(ValueError, match="average must be None with gradients='sharded'"):
        ShardedAdamW(params, average="primal")
    optimizer = ShardedAdamW(params[:1])
    with pytest.raises(ValueError, match="average must be None"):
        optimizer.add_param_group({"params": params[1:], "average": "primal"})
    assert len(optimizer.param_groups) == 1
    params[0].grad = torch.zeros(7).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    params[0].grad = None
    optimizer.step()  # no gradients: nothing to do
    assert all(entry["step"] == 0 for entry in optimizer.state.values())


def test_what_cannot_be_right_is_refused() -> None:
    run(1, refusals)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedAdamW(Model(SMALL).parameters())


def discarded() -> None:
    model = Model(SMALL)
    optimizer = ShardedAdamW(model.parameters())
    model.backward(gradients(model, 0, 0))
    assert all(map(was_sent, model.parameters()))
    successor = ShardedAdamW(model.parameters())
    with pytest.raises(RuntimeError, match="was taken by another optimizer"):
        model.backward(gradients(model, 0, 0))
    del optimizer, successor
    gc.collect()
    assert all(param.grad is None for param in model.parameters())
    model.backward(gradients(model, 0, 0))
    assert all(type(param.grad) is Tensor for param in model.parameters())


def test_a_discarded_optimizer_leaves_gradients_alone() -> None:
    run(1, discarded)
