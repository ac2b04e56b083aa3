"""Kronecker-factored curvature for PyTorch: optimizers that use it, and attribution that explains.

Names are imported on first use (PEP 562), so `import isokron` costs nothing and needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from isokron._version import __version__

if TYPE_CHECKING:
    from isokron import (
        attribution,
        curvature,
        distributed,
        jax,
        kernels,
        linalg,
        losses,
        operators,
        optim,
        race,
        tasks,
    )
    from isokron.attribution import Attributor
    from isokron.optim import (
        SOAP,
        AdamW,
        Katie,
        Muon,
        NaturalGradient,
        Preconditioned,
        Quad,
        Shampoo,
        ShardedAdamW,
        SignDescent,
        Skew,
        Traits,
    )
    from isokron.optim.param_groups import describe, param_groups
    from isokron.tasks import Task

_HOMES = {
    "SOAP": "isokron.optim",
    "AdamW": "isokron.optim",
    "Attributor": "isokron.attribution",
    "Katie": "isokron.optim",
    "Muon": "isokron.optim",
    "NaturalGradient": "isokron.optim",
    "Preconditioned": "isokron.optim",
    "Quad": "isokron.optim",
    "Shampoo": "isokron.optim",
    "ShardedAdamW": "isokron.optim",
    "SignDescent": "isokron.optim",
    "Skew": "isokron.optim",
    "Traits": "isokron.optim",
    "describe": "isokron.optim",
    "param_groups": "isokron.optim",
    "Task": "isokron.tasks",
}
_FOLDERS = (
    "attribution",
    "curvature",
    "distributed",
    "jax",
    "kernels",
    "linalg",
    "losses",
    "operators",
    "optim",
    "race",
    "tasks",
)

__all__ = [
    "SOAP",
    "AdamW",
    "Attributor",
    "Katie",
    "Muon",
    "NaturalGradient",
    "Preconditioned",
    "Quad",
    "Shampoo",
    "ShardedAdamW",
    "SignDescent",
    "Skew",
    "Task",
    "Traits",
    "__version__",
    "attribution",
    "curvature",
    "describe",
    "distributed",
    "jax",
    "kernels",
    "linalg",
    "losses",
    "operators",
    "optim",
    "param_groups",
    "race",
    "tasks",
]


if not TYPE_CHECKING:  # so that a type checker still sees which names there are

    def __getattr__(name: str) -> Any:
        if name in _FOLDERS:
            return importlib.import_module(f"isokron.{name}")
        if name in _HOMES:
            return getattr(importlib.import_module(_HOMES[name]), name)
        alike = [other for other in __all__ if other.lower() == name.lower()]
        _, text = importlib.import_module("isokron.names").hint("isokron", name, ())
        hint = f"here: {text}" if text else f"it has {', '.join(__all__)}"
        hint = f"did you mean {alike[0]}?" if alike and not text else hint
        raise AttributeError(f"module 'isokron' has no attribute {name!r}; {hint}")


def __dir__() -> list[str]:
    return sorted(__all__)
