"""AdamW: the yardstick, as a drop-in for torch.optim.AdamW(fused=True), to the bit."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from isokron.optim.engine import Params, Preconditioned
from isokron.optim.settings import Shared


class AdamW(Preconditioned):
    """AdamW on every parameter; checkpoints interchange with torch.optim.AdamW's.

    `eps`, `amsgrad`, `maximize` and all other `shared` settings: see docs/engine.md.

    `state_dtype`: None keeps the moments in the parameter's dtype, as torch does; torch.float32
    gives half-precision parameters float32 moments. `nonfinite`: unlike the other optimizers'
    steps, this one takes about as long as reading the gradients, so checking them is by option.
    """

    elementwise = True

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 1e-2,
        **shared: Unpack[Shared],
    ) -> None:
        own: Shared = {"nonfinite": "ignore", "state_dtype": None}
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay, **{**own, **shared})

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        return False
