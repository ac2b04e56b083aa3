"""The inputs torch tests its own optimizers with, given to ours."""

from typing import Any

import pytest
import torch
from torch import nn

import isokron
from isokron.optim.spectral import SCALES

common = pytest.importorskip(
    "torch.testing._internal.common_optimizers", reason="needs expecttest: pip install expecttest"
)
RENAMED = {"ns_steps": "steps", "ns_coefficients": "coefficients", "adjust_lr_fn": "scale"}
ADAMW = [
    case
    for case in common.optim_inputs_func_adamw("cpu")
    if not {"capturable", "differentiable"} & set(case.kwargs)
]
HAS_MUON = hasattr(torch.optim, "Muon")  # since torch 2.9
# torch 2.15 has a third rule of scale
MUON = [
    case
    for case in (common.optim_inputs_func_muon("cpu") if HAS_MUON else [])
    if case.kwargs.get("adjust_lr_fn", "original") in (*SCALES, None)
]


def problem() -> tuple[nn.Parameter, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Parameter(torch.randn(8, 12)), torch.randn(20, 12), torch.randn(20, 8)


def descend(make: Any, steps: int = 10) -> torch.Tensor:
    weight, inputs, targets = problem()
    optimizer = make([weight])
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (inputs @ weight.T - targets).square().mean()
        loss.backward()
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("case", ADAMW, ids=lambda case: case.desc)
def test_adamw_on_torchs_inputs(case: Any) -> None:
    kwargs = {key: value for key, value in case.kwargs.items() if key not in ("foreach", "fused")}
    theirs = descend(lambda params: torch.optim.AdamW(params, fused=True, **kwargs))
    assert torch.equal(descend(lambda params: isokron.AdamW(params, **kwargs)), theirs)


@pytest.mark.parametrize("case", MUON, ids=lambda case: case.desc)
def test_muon_on_torchs_inputs(case: Any) -> None:
    theirs = descend(lambda params: torch.optim.Muon(params, **case.kwargs))
    kwargs = {"lr": 1e-3, "scale": "original", "dtype": torch.bfloat16}
    kwargs |= {RENAMED.get(key, key): value for key, value in case.kwargs.items()}
    mine = descend(lambda params: isokron.Muon(params, **kwargs))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


ERRORS = [
    (isokron.AdamW, case) for case in common.optim_error_inputs_func_adamw("cpu", torch.float32)
]
if HAS_MUON:
    ERRORS += [
        (isokron.Muon, case) for case in common.optim_error_inputs_func_muon("cpu", torch.float32)
    ]
# What torch only warns of we refuse; what only torch has is not ours to refuse.
OTHER = ("duplicate parameters", "2D", "capturable", "fused", "step", "real parameters", "complex")


@pytest.mark.parametrize(
    ("optimizer", "case"),
    [
        (make, case)
        for make, case in ERRORS
        if not any(word in case.optimizer_error_input.desc for word in OTHER)
    ],
    ids=lambda value: getattr(getattr(value, "optimizer_error_input", None), "desc", ""),
)
def test_wrong_calls_that_torch_refuses_are_refused(optimizer: type, case: Any) -> None:
    given = case.optimizer_error_input
    params = given.params if given.params is not None else [nn.Parameter(torch.zeros(2, 2))]
    kwargs = {RENAMED.get(key, key): value for key, value in given.kwargs.items()}
    warned = issubclass(case.error_type, Warning)
    with (pytest.warns if warned else pytest.raises)(case.error_type):
        optimizer(params, **kwargs)
