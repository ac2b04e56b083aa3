"""Sign descent: every element of a matrix moves by the learning rate (Signum, 1802.04434)."""

from collections.abc import Mapping
from typing import Any, Unpack

from torch import Tensor

from isokron.optim.engine import Params, Preconditioned
from isokron.optim.settings import Shared


class SignDescent(Preconditioned):
    """W ← W − lr(sign(M) + λW), M the first moment: steepest descent in the largest-entry norm."""

    debias = False  # the sign of a moment does not depend on its scale

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-4,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.1,
        graft: str | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(
            params,
            lr,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            graft=graft,
            betas=betas,
            **shared,
        )

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return moment.sign()
