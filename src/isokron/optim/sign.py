"""Sign descent: every element of a matrix moves by the learning rate (Signum, 1802.04434)."""

from collections.abc import Mapping, Sequence
from math import prod, sqrt
from typing import Any

from torch import Tensor

from isokron.optim.layout import Traits
from isokron.optim.preconditioned import Params, Preconditioned
from isokron.optim.settings import Average, Graft, Nonfinite, checked_keywords, keywords_of


class SignDescent(Preconditioned):
    """W ← W − lr(sign(M) + λW), M the first moment: steepest descent in the largest-entry norm.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        momentum: Decay rate of M.
        nesterov: Take (1−β)G + βM in place of M.
        weight_decay: λ.
        graft: Take the step length of "sgd", "adagrad", "rmsprop" or "adam" instead.
        betas: Of AdamW, which steps what is not a matrix, and of grafting.
        eps: Of AdamW and of grafting.
        average: "schedule_free" or "primal" averages of the iterates; see docs/engine.md.
        nonfinite: On a gradient that is not finite: "raise", "skip" the step or "ignore" it.
    """

    @checked_keywords()
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 3e-4,
        *,
        momentum: float = 0.9,
        nesterov: bool = False,
        weight_decay: float = 0.1,
        graft: Graft = None,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        average: Average = None,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        # the sign of a moment does not depend on its scale
        settings = keywords_of(locals())
        super().__init__(params, lr, Traits(debias=False, norm=sign_norm), **settings)

    def direction(
        self, moment: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]
    ) -> Tensor:
        return moment.sign()


def sign_norm(shape: Sequence[int], group: Mapping[str, Any]) -> float:
    """√(mn): signs of a gradient of low rank are nearly of low rank themselves."""
    return sqrt(prod(shape))
