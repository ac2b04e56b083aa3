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
from isokron.curvature import running_fisher
from isokron.distributed.process_group import process_count
from isokron.optim import natural_step
from isokron.optim.natural_gradient import NaturalGradient
from processes import run

SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1e-2, "reduction": "global_mean"}


def net(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).double()


def made(**settings: Any) -> tuple[nn.Sequential, NaturalGradient]:
    model = net(settings.pop("width", 6))
    optimizer = NaturalGradient(model, **{**SETTINGS, **settings})
    optimizer.distribute(timeout=20)
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
        ("setting", 'step with must be .*"damping": "0.01".* against .*"damping": "0.5"'),
        ("later setting", 'step with must be .*"lr": "0.1".* against .*"lr": "0.2"'),
        ("layers", "step with must be the same on all 2 ranks, but rank 0 has .* on rank 1"),
        ("passes", 'step with must be .*"observed layers": ."0".* against .*"observed layers": ..'),
        ("gradients", "gradients must be the same on all ranks.*DistributedDataParallel"),
        ("missing", "parameters with a gradient.*0.weight.* against .*0.bias"),
        ("all missing", '"observed layers": ."0".* against .*"observed layers": ..'),
        ("nothing", ""),
    ],
)
def test_ranks_that_differ_are_told_how(what: str, message: str) -> None:
    for text in run(2, differing, what):
        assert bool(text) == bool(message)
        assert re.search(message, text), text


def spoiled(mode: str, where: str, policy: str) -> tuple[str, int, bool]:
    """A rank's NaN, in its gradient or in what its layers see, is everybody's."""
    model, optimizer = made(nonfinite=mode, policy=policy, width=8)
    backward(model)
    optimizer.step()
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    backward(model, 1)
    if dist.get_rank() == 1:
        if where == "gradient":
            model[0].weight.grad[0, 0] = torch.nan
        else:
            grads = [param.grad.clone() for param in model[0].parameters()]
            outputs = model[0](torch.ones(1, 4).double())
            outputs.backward(torch.full_like(outputs, torch.nan))
            for param, grad in zip(model[0].parameters(), grads, strict=True):
                param.grad = grad
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
@pytest.mark.parametrize("policy", ["dense", "all"])
def test_what_is_not_finite_on_one_rank_stops_all(where: str, policy: str) -> None:
    for text, skipped, same in run(2, spoiled, "skip", where, policy):
        assert (text, skipped, same) == ("", 1, True)
    first, second = run(2, spoiled, "raise", where, policy)
    assert "rank 1 of 2 failed in NaturalGradient.step" in first[0]
    assert second[0].startswith("FloatingPointError")
    assert first[2] is second[2] is True


def adapted() -> list[float]:
    """Damping after each of some steps, and the parameters."""
    model, optimizer = made(kl_clip=None, lr=1.5)
    found = []
    for step in range(6):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        average(model)
        optimizer.step()
        with torch.no_grad():
            after = loss_of(model, step)
        found.append(optimizer.update_damping(loss.item(), after.item()))
    return [*found, *torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()]


def test_damping_is_adapted_alike() -> None:
    (alone,) = run(1, adapted)
    found = run(3, adapted)
    assert found[0] == found[1] == found[2]
    assert found[0][:6] == pytest.approx(alone[:6])
    assert len(set(alone[:6])) > 1
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(alone), rtol=1e-6, atol=1e-9)


def worked() -> list[int]:
    """Sizes of the matrices that this rank has decomposed."""
    sizes: list[int] = []
    plain = running_fisher.eigh

    def eigh(matrix: Tensor, retries: Any) -> tuple[Tensor, Tensor]:
        sizes.append(matrix.size(-1))
        return plain(matrix, retries)

    model, optimizer = made(width=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running_fisher, "eigh", eigh)
        backward(model)
        optimizer.step()
    return sizes


def test_each_decomposition_is_the_work_of_one_rank() -> None:
    first, second = run(2, worked)
    assert sorted(first + second) == [3, 5, 20, 21]
    assert first == [21]


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


def failing() -> tuple[int, list[bool], str]:
    """A basis that the rank whose work it is does not find is kept by all."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    natural_step.logger.addHandler(handler)
    patch = pytest.MonkeyPatch()
    model, optimizer = made(every=1)
    backward(model)
    optimizer.step()
    before = [optimizer.state[model[i].weight]["basis.output"].clone() for i in (0, 2)]
    plain = running_fisher.eigh
    if dist.get_rank() == 0:  # who has the largest of all, the input side of the last layer
        patch.setattr(running_fisher, "eigh", lambda matrix, _: plain(matrix * torch.nan))
    optimizer.zero_grad()
    backward(model, 1)
    optimizer.step()
    patch.undo()
    failed = optimizer.failed_refreshes
    natural_step.logger.removeHandler(handler)
    after = [optimizer.state[model[i].weight]["basis.output"] for i in (0, 2)]
    return failed, list(map(torch.equal, before, after)), " ".join(records)


def test_a_basis_one_rank_could_not_find_is_kept_by_all() -> None:
    found = run(2, failing)
    assert found[0] == found[1]
    assert found[0][:2] == (1, [False, True])
    assert "no eigenbasis of layer '2'" in found[0][2]
