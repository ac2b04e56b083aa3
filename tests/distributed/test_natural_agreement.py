"""Ranks of NaturalGradient that differ say so, and those that decide decide alike."""

import copy
import logging
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import isokron
from isokron.distributed.world import process_count
from isokron.optim import layers
from isokron.optim.natural import NaturalGradient
from processes import run

SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1e-2, "reduction": "global_mean"}


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()


def made(**settings: Any) -> tuple[nn.Sequential, NaturalGradient]:
    model, reduce = net(settings.pop("width", 6)), settings.pop("reduce", "auto")
    optimizer = NaturalGradient(model, **{**SETTINGS, **settings})
    optimizer.distribute(reduce=reduce, timeout=20)
    return model, optimizer


def loss_of(model: nn.Module, step: int = 0, examples: int = 6) -> Tensor:
    """Of this rank's part: every R-th of the examples."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(examples, 4, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (examples,), generator=generator)
    some = slice(dist.get_rank(), None, dist.get_world_size())
    size = dist.get_world_size()
    losses = nn.functional.cross_entropy(model(inputs[some]), labels[some], reduction="sum")
    return losses * size / examples


def backward(model: nn.Module, step: int = 0) -> None:
    loss_of(model, step).backward()
    average(model)


def average(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def failure(of: Callable[[], Any]) -> str:
    try:
        of()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def differing(what: str) -> str:
    """The error of this rank, of which the second differs from the others."""
    odd = dist.get_rank() == 1
    model, optimizer = made(
        damping=0.5 if odd and what == "setting" else 1e-2,
        layers="0" if odd and what == "layers" else None,
        reduce="gather" if odd and what == "reduce" else "covariance",
    )
    for step in range(2):  # in the second, ranks already know each other
        optimizer.zero_grad()
        if what == "passes" and odd and step:
            model.eval()
        if what == "gradients" and step:
            loss_of(model, step).backward()
        else:
            backward(model, step)
        if odd and step and what == "later setting":
            optimizer.param_groups[0]["lr"] = 0.2
        if odd and step and what == "missing":
            model[0].weight.grad = None
        if odd and step and what == "all missing":
            optimizer.zero_grad()
        before = copy.deepcopy(model.state_dict())
        if text := failure(optimizer.step):
            assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
            return text
    return ""


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("setting", 'settings must be .*"damping": "0.01".* against .*"damping": "0.5"'),
        ("later setting", 'settings must be .*"lr": "0.1".* against .*"lr": "0.2"'),
        ("layers", "layers must be the same on all 2 ranks, but rank 0 has .* on rank 1"),
        ("reduce", 'reduce must be .* "covariance" against "gather" on rank 1'),
        ("passes", 'what layers have shown since the last step must be .*{"0": .* against {}'),
        ("gradients", "gradients must be the same on all ranks.*DistributedDataParallel"),
        ("missing", "parameters with a gradient must be the same"),
        ("all missing", "what layers have shown since the last step must be the same"),
        ("nothing", ""),
    ],
)
def test_ranks_that_differ_are_told_how(what: str, message: str) -> None:
    for text in run(2, differing, what):
        assert bool(text) == bool(message)
        assert re.search(message, text), text


def spoiled(mode: str, where: str, reduce: str) -> tuple[str, int, bool]:
    """A rank's NaN, in its gradient or in what its layers see, is everybody's."""
    model, optimizer = made(nonfinite=mode, reduce=reduce, width=8)
    backward(model)
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    backward(model, 1)
    if dist.get_rank() == 1:
        if where == "gradient":
            model[0].weight.grad[0, 0] = torch.nan
        else:
            seen = optimizer._layers.recorder.sums["0"]
            (seen.rows["output"][0] if seen.rows else seen["output"])[0, 0, 0] = torch.nan
    text = failure(optimizer.step)
    same = all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    after = optimizer.state_dict()["state"]
    for index, entry in state["state"].items():
        same &= all(torch.equal(after[index][key], value) for key, value in entry.items())
    optimizer.zero_grad()
    backward(model, 2)
    optimizer.step()  # and on they go
    return text, optimizer.skipped_steps, same


@pytest.mark.parametrize("where", ["gradient", "statistics"])
@pytest.mark.parametrize("reduce", ["covariance", "gram"])
def test_what_is_not_finite_on_one_rank_stops_all(where: str, reduce: str) -> None:
    for text, skipped, same in run(2, spoiled, "skip", where, reduce):
        assert (text, skipped, same) == ("", 1, True)
    first, second = run(2, spoiled, "raise", where, reduce)
    assert "rank 1 cannot step, its error says why; nothing was changed" in first[0]
    assert second[0].startswith("FloatingPointError")
    assert first[2] is second[2] is True


def adapted() -> list[float]:
    """Damping after each of some steps, and the parameters."""
    model, optimizer = made(adapt_damping=True, kl_clip=None, lr=2.0)
    found = []
    for step in range(6):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            average(model)
            return loss.detach()

        optimizer.step(closure)
        found.append(optimizer.param_groups[0]["damping"])
    return [*found, *torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()]


def test_damping_is_adapted_alike() -> None:
    (alone,) = run(1, adapted)
    found = run(3, adapted)
    assert found[0] == found[1] == found[2]
    assert found[0][:6] == pytest.approx(alone[:6])
    assert len(set(alone[:6])) > 1
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(alone), rtol=1e-6, atol=1e-9)


def worked() -> tuple[list[int], int]:
    """Sizes of the matrices that this rank has decomposed, and how often results travel."""
    done: list[int] = []
    plain = layers.decomposed

    def decomposed(matrix: Tensor) -> tuple[Tensor, Tensor]:
        done.append(matrix.size(-1))
        return plain(matrix)

    model, optimizer = made(width=20, reduce="covariance")
    ranks = optimizer.ranks
    gathers = []
    gather = type(ranks).all_gather

    def all_gather(self: Any, x: Tensor) -> Any:
        gathers.append(x.dtype)
        return gather(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "decomposed", decomposed)
        patch.setattr(type(ranks), "all_gather", all_gather)
        backward(model)
        optimizer.step()
    return done, gathers.count(torch.uint8)


def test_each_decomposition_is_the_work_of_one_rank() -> None:
    found = run(2, worked)
    assert sorted(found[0][0] + found[1][0]) == [3, 5, 20, 21]
    assert found[0][0] == [21]
    assert [gathers for _, gathers in found] == [1, 1]


def silent() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, optimizer = made()
        for each in (NaturalGradient(net()), copy.deepcopy(optimizer)):
            loss_of(each.model).backward()
            each.step()
    return [str(w.message) for w in caught if "ranks do not share" in str(w.message)]


def test_ranks_nobody_spoke_of_are_warned_of_with_the_remedy() -> None:
    for texts in run(2, silent):
        assert len(texts) == 2  # of the first, and of a copy, which has no ranks
        assert all("call optimizer.distribute()" in text for text in texts)


def test_wrong_ranks_are_explained() -> None:
    assert process_count() == 0
    optimizer = isokron.NaturalGradient(net())
    with pytest.raises(RuntimeError, match="init_process_group"):
        optimizer.distribute()
    with pytest.raises(ValueError, match="reduce must be one of 'auto', 'covariance'"):
        optimizer.distribute(reduce="sum")


def refused() -> str:
    return failure(lambda: made(method="ekfac", reduce="gram"))


def test_a_gram_matrix_has_no_basis_for_ekfac() -> None:
    for text in run(2, refused):
        assert 'use method="kfac", or reduce="auto"' in text


def failing() -> tuple[int, list[bool], str]:
    """A basis that the rank whose work it is does not find is kept by all."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    layers.logger.addHandler(handler)
    patch = pytest.MonkeyPatch()
    model, optimizer = made(every=1)
    backward(model)
    optimizer.step()
    before = [optimizer.state[model[i].weight]["basis.output"].clone() for i in (0, 2)]
    plain = layers.decomposed
    if dist.get_rank() == 0:  # who has the largest of all, the input side of the last layer
        patch.setattr(layers, "decomposed", lambda matrix: plain(matrix * torch.nan))
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    patch.undo()
    failed = optimizer.failed_refreshes
    layers.logger.removeHandler(handler)
    after = [optimizer.state[model[i].weight]["basis.output"] for i in (0, 2)]
    return failed, list(map(torch.equal, before, after)), " ".join(records)


def test_a_basis_one_rank_could_not_find_is_kept_by_all() -> None:
    found = run(2, failing)
    assert found[0] == found[1]
    assert found[0][:2] == (1, [False, True])
    assert "no eigenbasis of layer '2'" in found[0][2]
