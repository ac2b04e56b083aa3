"""State that ranks are given: a fault of one is an error of all, and asking for it is no step."""

import copy
from typing import Any

import torch
from test_ownership import sharded
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import isokron
from processes import mesh, run


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 6), (6, 8), (4,))
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def stepped(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int) -> None:
    for _ in range(steps):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()


def one_bad_part(key: str) -> str:
    params = sharded(parameters(), mesh(2))
    names = ("first", "second", "bias")
    optimizer = isokron.SOAP(list(zip(names, params, strict=True)), every=2)
    stepped(optimizer, params, 2)
    state = copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 1:
        number = 2 if key == "exp_avg" else 1
        state["state"][number][key].to_local().view(-1)[0] = torch.nan
    try:
        optimizer.load_state_dict(state)
    except ValueError as error:
        stepped(optimizer, params, 1)
        return str(error)
    return ""


def test_nan_in_one_ranks_part_is_refused_by_all() -> None:
    for key, name in (("cov.0.0", "second"), ("exp_avg", "bias")):
        for text in run(2, one_bad_part, key):
            assert f"parameter {name!r}: {key!r} has NaN or infinity" in text
            assert "(rank 1)" in text


def warmed_up() -> list[float]:
    """A schedule starts at 0, and rank 1 has gradients of 0 in its part."""
    params = sharded(parameters(), mesh(2))
    optimizer = isokron.SOAP(params, lr=0.0)
    for param in params:
        param.grad = torch.zeros_like(param)
        assert isinstance(param.grad, DTensor)
        if dist.get_rank() == 0:
            param.grad.to_local().fill_(1)
    optimizer.step()
    return [float(entry["step"]) for entry in optimizer.state.values()]


def test_a_first_step_of_a_warmup_counts_on_ranks_without_gradients() -> None:
    assert run(2, warmed_up) == [[1.0, 1.0, 1.0]] * 2


def asked_for_state(layout: str) -> None:
    def trained(asked: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        if layout == "fsdp":
            fully_shard(model, mesh=mesh(2))
        optimizer = isokron.SOAP(isokron.param_groups(model), lr=1e-2)
        if layout == "ddp":
            optimizer.distribute()
        if asked:
            state = get_optimizer_state_dict(model, optimizer)["state"]
            assert len(state) == 4
        for seed in range(4):
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        params = [param.detach() for param in model.parameters()]
        return [p.full_tensor() if isinstance(p, DTensor) else p for p in params]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_asking_for_the_state_before_the_first_step_changes_nothing_on_two_ranks() -> None:
    for layout in ("fsdp", "ddp"):
        run(2, asked_for_state, layout)
