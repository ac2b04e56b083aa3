"""AdamW: the yardstick, as a drop-in for torch.optim.AdamW(fused=True), to the bit."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from isokron.optim.engine import Params, Preconditioned
from isokron.optim.settings import AdamWShared


class AdamW(Preconditioned):
    """AdamW on every parameter; checkpoints interchange with torch.optim.AdamW's.

    The arguments, in their order, are torch's. `fused` and `foreach` change nothing: the results
    are always those of fused=True. `capturable` and `differentiable` must be False. `maximize` and
    all other `shared` settings: see docs/engine.md.

    `state_dtype`: None keeps the moments in the parameter's dtype, as torch does; torch.float32
    gives half-precision parameters float32 moments. `nonfinite`: unlike the other optimizers'
    steps, this one takes about as long as reading the gradients, so checking them is by option.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        fused: bool | None = None,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **shared: Unpack[AdamWShared],
    ) -> None:
        for name, asked in (("capturable", capturable), ("differentiable", differentiable)):
            if asked:
                raise ValueError(
                    f"AdamW: {name} must be False, got {name}={asked!r}; "
                    f"torch.optim.AdamW({name}=True) has it"
                )
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        own = {"nonfinite": "ignore", "state_dtype": None}
        super().__init__(params, lr, **given, **{**own, **shared})

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        return False
