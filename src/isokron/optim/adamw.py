"""AdamW: the yardstick, as a drop-in for torch.optim.AdamW(fused=True), to the bit."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isokron.optim.engine import Params, Preconditioned


class AdamW(Preconditioned):
    """AdamW on every parameter; checkpoints interchange with torch.optim.AdamW's.

    `state_dtype`: None keeps the moments in the parameter's dtype, as torch does; torch.float32
    gives half-precision parameters float32 moments. `nonfinite`: unlike the other optimizers'
    steps, this one takes about as long as reading the gradients, so checking them is by option.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        maximize: bool = False,
        decay: str = "decoupled",
        nonfinite: str = "ignore",
        state_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            maximize=maximize,
            decay=decay,
            nonfinite=nonfinite,
            state_dtype=state_dtype,
        )

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        return False
