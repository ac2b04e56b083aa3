"""Every optimizer once: the contract tests run over this list.

ISOKRON_TEST_DEVICE=npu puts models and data on a second device (second_device.py).
"""

import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import isokron
from isokron.optim.blocks import Batch
from isokron.optim.layout import Traits, matrices_of

DEVICE = os.environ.get("ISOKRON_TEST_DEVICE", "cpu")
if DEVICE == "npu":
    import second_device  # noqa: F401


class Whitening(isokron.Preconditioned):
    """The smallest method with a statistic and an operator: P = (E GGᵀ + εI)^(−½) M on the left.

    It is here because the contract must hold for state, observation and cadence, whatever
    optimizers the package has.
    """

    def __init__(self, params: Any, lr: float = 1e-2, **settings: Any) -> None:
        traits = Traits(cut=matrices_of, operator=("root",))
        super().__init__(
            params, lr, traits, **{"momentum": 0.9, "every": 3, "max_dim": 8, **settings}
        )

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        eyes = batch.eyes(batch.shape[0])
        return {"cov": torch.zeros_like(eyes), "root": eyes}

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        state["cov"].mul_(0.9).add_(grad @ grad.mT, alpha=0.1)

    def refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any], first: bool
    ) -> dict[str, Tensor]:
        values, basis = torch.linalg.eigh(state["cov"])
        scaled = basis * (values.clamp(min=0) + 1e-6).rsqrt().unsqueeze(-2)
        return {"root": scaled @ basis.mT}

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return state["root"] @ moment


def build(optimizer: Callable[..., Any], params: Any, **settings: Any) -> Any:
    """An optimizer with any settings: those that its constructor does not take are group keys."""
    parameters = inspect.signature(optimizer).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    keywords = {key: settings.pop(key) for key in list(settings) if anything or key in parameters}
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    return optimizer([{**settings, **group} for group in groups], **keywords)


@dataclass(frozen=True)
class Case:
    name: str
    optimizer: Callable[..., isokron.Preconditioned]
    settings: dict[str, Any] = field(default_factory=dict)
    compiles: bool = True  # `direction` is promised to compile as one graph

    def make(self, params: Any, **settings: Any) -> isokron.Preconditioned:
        return build(self.optimizer, params, **{**self.settings, **settings})


# everything that can be stored in fewer bits is, whatever its size
SMALL = {"moments": "8bit", "min_8bit_size": 0, "rounding": "stochastic"}

HEAVY = {"momentum": 0.5, "nesterov": True, "dampening": 0.3}

CASES = [
    Case("adamw", isokron.AdamW, {"lr": 1e-2}, compiles=False),
    Case("adamw-amsgrad", isokron.AdamW, {"lr": 1e-2, "amsgrad": True}, compiles=False),
    Case("adamw-small", isokron.AdamW, {"lr": 1e-2, **SMALL}, compiles=False),
    Case("muon", isokron.Muon, {"lr": 1e-2}),
    Case("muon-grafted", isokron.Muon, {"lr": 1e-2, "graft": "adam", "decay": "l2"}),
    Case("sign", isokron.SignDescent, {"lr": 6e-3}),
    Case("sign-grafted", isokron.SignDescent, {"lr": 1e-1, "graft": "adagrad"}),
    Case("shampoo", isokron.Shampoo, {"lr": 1e-2, "every": 3}),
    Case("shampoo-cut", isokron.Shampoo, {"lr": 1e-2, "every": 2, "max_dim": 8, "damping": 1e-3}),
    Case("shampoo-eigen", isokron.Shampoo, {"lr": 1e-2, "every": 3, "form": "eigen"}),
    Case(
        "shampoo-momentum",
        isokron.Shampoo,
        {"lr": 1e-2, "every": 3, "weight_decay": 0.1, "decay": "momentum", "beta3": 0.7, **HEAVY},
    ),
    Case("shampoo-kl", isokron.Shampoo, {"lr": 1e-2, "statistic": "kl", "every": 4, "start": 2}),
    Case(
        "shampoo-staggered",
        isokron.Shampoo,
        {"lr": 1e-2, "every": 4, "refresh": "staggered", "max_dim": 8},
        compiles=False,  # too many shapes for one compiled function
    ),
    Case("soap", isokron.SOAP, {"lr": 1e-2, "every": 3}, compiles=False),
    Case(
        "soap-delayed",
        isokron.SOAP,
        {"lr": 1e-2, "every": 4, "refresh": 2, "vectors": True, "max_dim": 8},
        compiles=False,
    ),
    Case(
        "soap-averaged",
        isokron.SOAP,
        {"lr": 1e-2, "every": 3, "average": "schedule_free", "betas": (0.0, 0.95)},
        compiles=False,
    ),
    Case(
        "soap-small",
        isokron.SOAP,
        {"lr": 1e-2, "every": 4, "refresh": 2, "factor_dtype": "8bit", **SMALL},
        compiles=False,
    ),
    Case("katie", isokron.Katie, {"lr": 1e-2, "every": 3}),
    Case(
        "katie-small",
        isokron.Katie,
        {"lr": 1e-2, "every": 3, "factor_dtype": torch.bfloat16, **SMALL},
    ),
    Case(
        "katie-symmetric",
        isokron.Katie,
        {"lr": 1e-2, "every": 4, "form": "symmetric", "refresh": "staggered", "max_dim": 8},
    ),
    Case("quad", isokron.Quad, {"lr": 3e-2}, compiles=False),  # too many shapes, vectors included
    Case(
        "quad-old",
        isokron.Quad,
        {"lr": 3e-2, "apply": "old", "every": 3, "warmup": 2, "block_size": 8, "vectors": False},
        compiles=False,
    ),
    Case("skew", isokron.Skew, {"lr": 3e-2, "vectors": False}),
    Case(
        "skew-delayed",
        isokron.Skew,
        {"lr": 3e-2, "every": 4, "refresh": 1, "block_size": 8, "normalize": True},
        compiles=False,
    ),
    Case(
        "soap-polar",
        isokron.SOAP,
        {"lr": 1e-2, "every": 3, "polar": True, "refresh": "staggered", "max_dim": 8, "beta3": 0.7},
        compiles=False,
    ),
    Case("katie-polar", isokron.Katie, {"lr": 2e-2, "every": 3, "polar": True, "max_dim": 8}),
    Case("quad-small", isokron.Quad, {"lr": 3e-2, "graft": "adam", **SMALL}, compiles=False),
    Case("spectral", isokron.Shampoo, {"lr": 1e-2, "route": "spectral"}),
    Case("whitening", Whitening, {"lr": 1e-2, "weight_decay": 0.1}, compiles=False),
    Case("whitening-grafted", Whitening, {"graft": "rmsprop", "nesterov": True}, compiles=False),
]


def natural(model: nn.Module) -> isokron.NaturalGradient:
    return isokron.NaturalGradient(model, lr=1e-2, every=3)


# Every optimizer of a model by name, NaturalGradient too.
MAKERS: dict[str, Callable[[nn.Module], Any]] = {
    **{case.name: lambda model, case=case: case.make(model.parameters()) for case in CASES},
    "natural": natural,
}


class Net(nn.Module):
    """A little of everything: convolution, norm, embedding-like table, linear layers, scalar."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, dtype=dtype)
        self.norm = nn.GroupNorm(2, 6, dtype=dtype)
        self.hidden = nn.Linear(6 * 4, 12, dtype=dtype)
        self.square = nn.Linear(12, 12, bias=False, dtype=dtype)
        self.twin = nn.Linear(12, 12, bias=False, dtype=dtype)
        self.scale = nn.Parameter(torch.ones((), dtype=dtype))
        self.out = nn.Linear(12, 3, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x)).relu().flatten(1)
        h = self.hidden(h).tanh()
        h = h + self.scale * self.twin(self.square(h).tanh())
        return self.out(h)


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(dtype).to(DEVICE)


def randn(*shape: int) -> Tensor:
    """The same numbers on every device."""
    return torch.randn(shape).to(DEVICE)


def batch(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(32, 2, 4, 4, generator=generator)
    target = (x.flatten(1).sum(1) > 0).long() + (x[:, 0, 0, 0] > 1).long()
    return x.to(DEVICE, dtype), target.to(DEVICE)


def loss_of(model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    x, target = batch(seed, dtype)
    return nn.functional.cross_entropy(model(x).float(), target)


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: range,
    dtype: torch.dtype = torch.float32,
) -> float:
    """Train on fresh batches, one seed a step; the mean loss of the last five."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, dtype)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-5:]) / len(losses[-5:])


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.parameters(), second.parameters()))
