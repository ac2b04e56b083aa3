"""The bits of one process on averaged gradients, over real ranks; state that falls as 1/R."""

import gc
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed as dist

import isokron
from given_gradients import HALF, SMALL, UGLY, Model, average, differing, gradients
from isokron.distributed import exchange
from isokron.distributed.buckets import Sheet, lay_out
from isokron.distributed.exchange import begin_reduce
from isokron.distributed.partial import full_state_dict
from isokron.distributed.world import ranks_of
from isokron.optim.sharded import ShardedAdamW
from processes import outcomes, run


def groups(model: Model) -> list[dict[str, Any]]:
    params = model.all()
    half = len(params) // 2
    return [{"params": params[:half]}, {"params": params[half:], "lr": 3e-3, "weight_decay": 0.1}]


def steps_like_one_process(settings: dict[str, Any]) -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(UGLY), Model(UGLY)
        own = {"lr": 1e-2, **settings}
        optimizer = ShardedAdamW(groups(model), reduce=reduce, bucket_bytes=1 << 19, **own)
        reference = isokron.AdamW(groups(twin), **own)
        schedules = [
            torch.optim.lr_scheduler.CosineAnnealingLR(each, 10) for each in (optimizer, reference)
        ]
        for turn in range(4):
            optimizer.zero_grad()
            model.backward(gradients(model, rank, turn))
            optimizer.step()
            for param, grad in zip(twin.parameters(), average(twin, ranks, turn), strict=True):
                param.grad = grad
            reference.step()
            for schedule in schedules:
                schedule.step()
            wrong += [f"{reduce} {turn} {name}" for name in differing(model, twin)]
    return wrong


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_steps_have_the_bits_of_one_process(ranks: int) -> None:
    for wrong in run(ranks, steps_like_one_process, {}):
        assert wrong == []


def test_settings_and_inputs_of_all_kinds_have_the_bits_of_one_process() -> None:
    settings = {
        "betas": (0.8, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.3,
        "amsgrad": True,
        "state_dtype": torch.float32,
        "nonfinite": "ignore",  # each bucket is stepped while the next are under way
    }
    for wrong in run(2, steps_like_one_process, settings):
        assert wrong == []


def steps_by_torchs_reduce_scatter() -> list[str]:
    """What tensors on a GPU take; two ranks' sum has no order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "added_by_hand", lambda device: False)
        return steps_like_one_process({})


def test_torchs_own_reduce_scatter_has_the_bits_too() -> None:
    for wrong in run(2, steps_by_torchs_reduce_scatter):
        assert wrong == []


def accumulates() -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(UGLY), Model(UGLY)
        optimizer = ShardedAdamW(model.parameters(), reduce=reduce, bucket_bytes=1 << 18)
        reference = isokron.AdamW(twin.parameters())
        for turn in range(2):
            optimizer.zero_grad()
            for part in (0, 1, 2):
                model.backward(gradients(model, rank, 3 * turn + part, exact=True))
            if reduce == "backward":
                assert all(p.grad is None for p in model.parameters() if p.numel())
            optimizer.step()
            parts = [average(twin, ranks, 3 * turn + part, exact=True) for part in (0, 1, 2)]
            for param, *grads in zip(twin.parameters(), *parts, strict=True):
                param.grad = grads[0] + grads[1] + grads[2]
            reference.step()
            wrong += [f"{reduce} {turn} {name}" for name in differing(model, twin)]
    return wrong


def leaves_early() -> tuple[int, int]:
    """Buckets, and how many are under way when those of two earlier passes have had time."""
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), reduce="backward", bucket_bytes=1 << 18)
    for turn in range(3):
        model.backward(gradients(model, dist.get_rank(), turn))
        dist.barrier()
        time.sleep(0.3)
    return len(optimizer._shards.buckets), len(optimizer._gradients._flying)  # type: ignore[union-attr]


def test_averages_are_taken_in_while_backward_passes_go_on() -> None:
    for buckets, flying in run(2, leaves_early):
        assert flying <= buckets


def test_gradients_of_several_backward_passes_add_up() -> None:
    assert run(2, accumulates) == [[], []]


def no_cleared_gradients() -> list[str]:
    """As in torch, a step leaves gradients where they are; the next pass adds to them."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(SMALL), Model(SMALL)
        optimizer = ShardedAdamW(model.parameters(), reduce=reduce)
        reference = isokron.AdamW(twin.parameters())
        for turn in range(3):
            model.backward(gradients(model, rank, turn, exact=True))
            optimizer.step()
            twin.backward(list(average(twin, ranks, turn, exact=True)))
            reference.step()
        wrong += [f"{reduce} {name}" for name in differing(model, twin)]
    return wrong


def test_gradients_stay_until_they_are_cleared() -> None:
    assert run(4, no_cleared_gradients) == [[]] * 4  # two of them own nothing


def unusual_parameters() -> list[str]:
    """Missing and late gradients, a frozen parameter that thaws, other layouts, moved memory."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(UGLY), Model(UGLY)
        for each in (model, twin):
            each.p4.data = each.p4.data.t().contiguous().t()
            each.p11.requires_grad_(False)
        optimizer = ShardedAdamW(model.parameters(), reduce=reduce, bucket_bytes=1 << 18)
        assert model.p11 not in optimizer.state
        reference = isokron.AdamW(twin.parameters())
        for turn in range(5):
            for each in (model, twin):
                if turn == 1:
                    each.p4.data.mul_(0.5)
                if turn == 3:
                    each.p11.requires_grad_(True)
                if turn == 4:
                    each.p6.data = each.p6.data.clone()
            absent = {0: {5, 8}, 1: {5}, 2: set(range(12)) - {5}, 3: {0}, 4: set()}[turn]
            absent |= {11} if turn < 3 else set()
            optimizer.zero_grad()
            own = gradients(model, rank, turn)
            model.backward([None if i in absent else g for i, g in enumerate(own)])
            optimizer.step()
            for i, grad in enumerate(average(twin, ranks, turn)):
                twin.all()[i].grad = None if i in absent else grad
            reference.step()
            # the transposed one has its last 381 % 32 elements elsewhere, and others' rounding
            close = torch.allclose(model.p4, twin.p4, rtol=1e-6, atol=1e-7)
            assert close
            assert not model.p4.is_contiguous()
            wrong += [f"{reduce} {turn} {n}" for n in differing(model, twin) if n != "p4"]
        mine, one = full_state_dict(optimizer)["state"], reference.state_dict()["state"]
        wrong += [f"step of {i}" for i, entry in mine.items() if entry["step"] != one[i]["step"]]
    return wrong


def test_missing_gradients_leave_parameters_alone() -> None:
    assert run(2, unusual_parameters) == [[], []]


def added_groups() -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(UGLY), Model(UGLY)
        optimizer = ShardedAdamW(model.all()[:6], reduce=reduce)
        reference = isokron.AdamW(twin.all()[:6])
        for turn in range(3):
            if turn == 1:
                optimizer.add_param_group({"params": model.all()[6:], "lr": 1e-2})
                reference.add_param_group({"params": twin.all()[6:], "lr": 1e-2})
            optimizer.zero_grad()
            model.backward(gradients(model, rank, turn))
            optimizer.step()
            for param, grad in zip(twin.parameters(), average(twin, ranks, turn), strict=True):
                param.grad = grad
            reference.step()
            wrong += [f"{reduce} {turn} {name}" for name in differing(model, twin)]
            for param in model.parameters():
                param.grad = None
    return wrong


def test_groups_can_be_added_later() -> None:
    assert run(2, added_groups) == [[], []]


def counted() -> tuple[int, int, list[int], int, int]:
    """Bytes of state here and in all, bytes sent, and the sections' bytes; gradients that stay."""
    kinds = [((512, 640), torch.float32), ((640,), torch.float32), ((300, 640), HALF)] * 2
    sent = []
    for reduce in ("step", "backward"):
        model = Model(kinds)
        optimizer = ShardedAdamW(model.parameters(), reduce=reduce, nonfinite="ignore")
        before = optimizer.ranks.traffic.sent
        model.backward(gradients(model, dist.get_rank(), 0))
        kept = sum(p.grad.numel() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        sent.append(optimizer.ranks.traffic.sent - before)
    values = [v for entry in optimizer.state.values() for v in entry.values()]
    here = sum(v.numel() * v.element_size() for v in values if v.ndim)
    whole = sum(2 * p.numel() * p.element_size() for p in model.parameters())
    buckets = optimizer._shards.buckets
    each = sum(b.section * model.all()[b.parameters[0]].element_size() for b in buckets)
    return here, whole, sent, each, kept


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_falls_with_the_number_of_ranks_and_bytes_are_those_of_the_formula(
    ranks: int,
) -> None:
    for here, whole, sent, each, kept in run(ranks, counted):
        assert here <= 1.3 * whole / ranks
        # a section to every other rank, as gradients and as parameters
        bulk = 2 * (ranks - 1) * each
        assert sent == [bulk, bulk]
        assert 2 * ranks * each <= 1.5 * whole  # so much is padding at most
        assert kept == 0


def clipped() -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    norms = []
    for reduce in ("step", "backward"):
        for most in (0.5, 1e9):
            model, twin = Model(UGLY), Model(UGLY)
            optimizer = ShardedAdamW(model.parameters(), reduce=reduce, bucket_bytes=1 << 18)
            reference = isokron.AdamW(twin.parameters())
            model.backward(gradients(model, rank, 0))
            norm = optimizer.clip_grad_norm_(most)
            optimizer.step()
            average_ = average(twin, ranks, 0)
            squares = [grad.double().square().sum() for grad in average_]
            expected = torch.stack(squares).sum().sqrt()
            torch.testing.assert_close(norm, expected, rtol=1e-7, atol=0)
            scale = float((most / (norm + 1e-6)).clamp(max=1.0))
            for param, grad in zip(twin.parameters(), average_, strict=True):
                param.grad = grad * scale
            reference.step()
            assert differing(model, twin) == []
            norms.append(float(norm))
    optimizer = ShardedAdamW(model.parameters())
    model.backward(gradients(model, rank, 0))
    optimizer.clip_grad_norm_(1.0)
    model.backward(gradients(model, rank, 0))
    with pytest.raises(RuntimeError, match="changed since clip_grad_norm_"):
        optimizer.step()
    return norms


def test_the_norm_of_all_gradients_is_clipped() -> None:
    found = run(2, clipped)
    assert found[0] == found[1]
    assert len(set(found[0])) == 1


def gathered(most: float) -> float:
    """The norm of gradients that are the same whatever the number of ranks."""
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters())
    model.backward(gradients(model, 0, 0, exact=True))
    return float(optimizer.clip_grad_norm_(most))


def test_the_norm_does_not_depend_on_the_number_of_ranks() -> None:
    norms = {norm for ranks in (1, 2, 4) for norm in run(ranks, gathered, 1.0)}
    assert len(norms) == 1


def nonfinite() -> list[str]:
    rank = dist.get_rank()
    texts = []
    for reduce in ("step", "backward"):
        for mode in ("raise", "skip"):
            model, before = Model(UGLY), Model(UGLY)
            optimizer = ShardedAdamW(
                list(model.named_parameters()), reduce=reduce, nonfinite=mode, bucket_bytes=1 << 18
            )
            grads = gradients(model, rank, 0)
            if rank == 1:
                grads[5][7] = torch.inf
                grads[9][-1] = torch.nan
            model.backward(list(grads))
            if mode == "raise":
                with pytest.raises(FloatingPointError) as caught:
                    optimizer.step()
                texts.append(str(caught.value))
            else:
                optimizer.step()
                assert optimizer.skipped_steps == 1
            assert differing(model, before) == []
            assert all(entry["step"] == 0 for entry in optimizer.state.values())
            optimizer.zero_grad()
            model.backward(gradients(model, rank, 0))
            optimizer.step()
            assert len(differing(model, before)) == sum(p.numel() > 0 for p in model.parameters())
    return texts


def test_gradients_that_are_not_finite_change_nothing_on_any_rank() -> None:
    for texts in run(2, nonfinite):
        for text in texts:
            assert "non-finite average gradient of parameter 'p5', 'p9'; nothing was" in text


def disagreements() -> list[str]:
    rank = dist.get_rank()
    texts = []

    def told(what: Callable[[], Any]) -> None:
        with pytest.raises(RuntimeError) as caught:
            what()
        texts.append(str(caught.value))

    model = Model(SMALL)
    params = model.all()
    told(lambda: ShardedAdamW(params[::-1] if rank else params))
    told(lambda: ShardedAdamW([params[0].detach().double() if rank else params[0].detach()]))
    told(lambda: ShardedAdamW(params, bucket_bytes=100 + rank))
    told(lambda: ShardedAdamW(params, lr=1.0 + rank).step())

    optimizer = ShardedAdamW(params)
    with torch.no_grad():
        params[0][0] += rank
    told(optimizer.step)
    with torch.no_grad():
        params[0][0] -= rank

    grads = gradients(model, rank, 0)
    model.backward([grads[0], None if rank else grads[1]])
    told(optimizer.step)
    return texts


def test_ranks_that_disagree_are_told_so() -> None:
    for texts in run(2, disagreements):
        assert all("must be the same on all 2 ranks, but rank 0 has" in text for text in texts)
        shown = [
            ("(7,)", "(3, 5)"),
            ("float32", "float64"),
            ("100", "101"),
            ('"lr": 1.0', '"lr": 2.0'),
            ("parameters' bits", "against"),
            ('"without gradients": []', '"without gradients": [1]'),
        ]
        for text, both in zip(texts, shown, strict=True):
            assert all(part in text for part in both)


def uneven_passes() -> None:
    """One rank has gone through one batch more: the other must not wait for it for ever."""
    rank = dist.get_rank()
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), reduce="backward", timeout=20)
    for turn in range(1 + rank):
        model.backward(gradients(model, rank, turn))
    optimizer.step()


def uneven_gradients() -> None:
    """One rank has no gradient of a parameter, so a bucket does not leave while another's does."""
    rank = dist.get_rank()
    model = Model(UGLY)
    settings: dict[str, Any] = {"reduce": "backward", "bucket_bytes": 1 << 18, "timeout": 20}
    optimizer = ShardedAdamW(model.parameters(), **settings)
    grads = gradients(model, rank, 0)
    model.backward([None if rank and i == 6 else grad for i, grad in enumerate(grads)])
    optimizer.step()


@pytest.mark.parametrize("uneven", [uneven_passes, uneven_gradients])
def test_ranks_whose_backward_passes_differ_are_told_so(uneven: Callable[[], None]) -> None:
    for text in map(str, outcomes(2, uneven, seconds=40)):
        assert "what a step starts from must be the same on all 2 ranks" in text
        assert ("gradients sent" if uneven is uneven_passes else "without gradients") in text


def killed() -> None:
    rank = dist.get_rank()
    model = Model(UGLY)
    optimizer = ShardedAdamW(model.parameters(), reduce="backward", timeout=20)
    for turn in range(3):
        optimizer.zero_grad()
        if rank and turn == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model.backward(gradients(model, rank, turn))
        optimizer.step()


def test_a_killed_rank_ends_the_others_with_an_error_in_time() -> None:
    first, second = outcomes(2, killed, seconds=40)
    assert "rank 0 of 2 waited in" in str(first)
    assert second == -signal.SIGKILL


def wide_sums() -> list[str]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(UGLY), Model(UGLY)
        settings: dict[str, Any] = {"reduce": reduce, "communication_dtype": torch.float32}
        optimizer = ShardedAdamW([p for p in model.all() if p.dtype is HALF], **settings)
        reference = isokron.AdamW([p for p in twin.all() if p.dtype is HALF])
        model.backward(gradients(model, rank, 0))
        optimizer.step()
        every = [gradients(model, r, 0) for r in range(ranks)]
        for param, *grads in zip(twin.parameters(), *every, strict=True):
            param.grad = ((grads[0].float() + grads[1].float()) / 2).to(param.dtype)
        reference.step()
        wrong += [f"{reduce} {name}" for name in differing(model, twin)]
    return wrong


def test_half_precision_gradients_can_be_added_in_float32() -> None:
    assert run(2, wide_sums) == [[], []]


def in_two_groups() -> list[str]:
    """Ranks 0 and 2 train one model, 1 and 3 another."""
    rank = dist.get_rank()
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    wrong = []
    for reduce in ("step", "backward"):
        model, twin = Model(SMALL), Model(SMALL)
        group = pairs[rank % 2]
        optimizer = ShardedAdamW(model.parameters(), reduce=reduce, group=group)
        reference = isokron.AdamW(twin.parameters())
        model.backward(gradients(model, rank, 0))
        optimizer.step()
        both = [gradients(model, r, 0) for r in (rank % 2, rank % 2 + 2)]
        for param, *grads in zip(twin.parameters(), *both, strict=True):
            param.grad = (grads[0] + grads[1]) / 2
        reference.step()
        wrong += [f"{reduce} {name}" for name in differing(model, twin)]
    with pytest.raises(ValueError, match="is not in it; pass a group only on the ranks"):
        ShardedAdamW(model.parameters(), group=pairs[1 - rank % 2])
    return wrong


def test_the_ranks_of_a_process_group_train_by_themselves() -> None:
    assert run(4, in_two_groups) == [[]] * 4


def refusals() -> None:
    model = Model(SMALL)
    params = model.all()
    for wrong in (
        {"reduce": "never"},
        {"nonfinite": "hope"},
        {"bucket_bytes": 0},
        {"communication_dtype": torch.int8},
        {"lr": -1.0},
        {"timeout": 0},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))} must be"):
            ShardedAdamW(params, **wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass model\.parameters"):
        ShardedAdamW(model)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice"):
        ShardedAdamW([params[0], params[0]])
    with pytest.raises(ValueError, match="did you mean 'weight_decay'"):
        ShardedAdamW([{"params": params, "weight_decy": 0.0}])
    optimizer = ShardedAdamW(params)
    params[0].grad = torch.zeros(7).to_sparse()
    with pytest.raises(RuntimeError, match="sparse=False"):
        optimizer.step()
    params[0].grad = None
    optimizer.step()  # no gradients: nothing to do
    assert all(entry["step"] == 0 for entry in optimizer.state.values())


def thawing() -> list[list[bool]]:
    """Of every parameter, after each backward pass: whether its gradient has left already."""
    rank = dist.get_rank()
    layers = [torch.nn.Linear(8, 8, bias=False) for _ in range(3)]
    layers[1].requires_grad_(False)
    params = [layer.weight for layer in layers]
    optimizer = ShardedAdamW(params, reduce="backward", bucket_bytes=256)
    left = []
    for turn in range(4):
        if turn == 1:
            layers[1].requires_grad_(True)
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(turn + 10 * rank)
        torch.nn.Sequential(*layers)(torch.randn(4, 8, generator=generator)).sum().backward()
        left.append([param.grad is None for param in params])
        optimizer.step()
    return left


def test_the_gradients_of_a_thawed_parameter_leave_in_backward_passes() -> None:
    """From its second one on: nobody tells that a parameter has thawed before it has a gradient."""
    for left in run(2, thawing):
        assert left[2:] == [[True] * 3] * 2


def closing(reduce: str) -> tuple[list[float], list[float], bool]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(6, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    data = torch.randn(8, 6)
    optimizer = ShardedAdamW(layers[0].parameters(), lr=0.1, reduce=reduce)  # type: ignore[arg-type]
    reference = torch.optim.AdamW(layers[1].parameters(), lr=0.1)
    losses: tuple[list[float], list[float]] = ([], [])
    for _ in range(3):

        def closure(at: int, which: torch.optim.Optimizer, rows: torch.Tensor) -> torch.Tensor:
            which.zero_grad()
            loss = layers[at](rows).square().mean()
            loss.backward()
            return loss

        own = data.chunk(ranks)[rank]
        losses[0].append(float(optimizer.step(lambda own=own: closure(0, optimizer, own))))
        losses[1].append(float(reference.step(lambda: closure(1, reference, data))))
    same = all(map(torch.allclose, layers[0].parameters(), layers[1].parameters()))
    return *losses, same


@pytest.mark.parametrize("reduce", ["step", "backward"])
def test_a_closure_is_run_as_torch_does(reduce: str) -> None:
    first, second = run(2, closing, reduce)
    assert [first[2], second[2]] == [True, True]
    mean = [(a + b) / 2 for a, b in zip(first[0], second[0], strict=True)]
    assert mean == pytest.approx(first[1], rel=1e-5)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_what_cannot_be_right_is_refused() -> None:
    run(1, refusals)
    with pytest.raises(RuntimeError, match="init_process_group"):
        ShardedAdamW(Model(SMALL).parameters())


def forgotten() -> int:
    """An optimizer that is gone leaves no hooks on the parameters."""
    model = Model(SMALL)
    optimizer = ShardedAdamW(model.parameters(), reduce="backward")
    model.backward(gradients(model, 0, 0))
    del optimizer
    gc.collect()
    model.backward(gradients(model, 0, 0))
    assert all(param.grad is not None for param in model.parameters())
    return sum(len(param._post_accumulate_grad_hooks) for param in model.parameters())


def test_an_optimizer_that_is_gone_leaves_parameters_alone() -> None:
    assert run(1, forgotten) == [0]


def stalled() -> None:
    rank = dist.get_rank()
    model = Model(UGLY)
    settings: dict[str, Any] = {"reduce": "backward", "bucket_bytes": 1 << 18, "timeout": 2.0}
    optimizer = ShardedAdamW(model.parameters(), **settings)
    if rank:
        time.sleep(60)
    model.backward(gradients(model, rank, 0))
    optimizer.step()


def test_a_rank_that_does_not_come_ends_the_others_in_time() -> None:
    first, _ = outcomes(2, stalled, seconds=40, awaited=1)
    assert "within 2 s" in str(first)


def half_way() -> None:
    """This rank has sent its gradients; the other never does."""
    ranks = ranks_of(timeout=2.0)
    if ranks.rank:
        time.sleep(60)
    bucket = lay_out([Sheet((100,), 4)], 2, 1000)[0]
    begin_reduce(ranks, bucket, {0: torch.ones(100)}, torch.empty(0)).average()


def test_waiting_for_gradients_ends_in_time() -> None:
    first, _ = outcomes(2, half_way, seconds=40, awaited=1)
    assert "within 2 s" in str(first)
