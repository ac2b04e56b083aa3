"""The factor on a loss that gradients of outputs have and gradients of parameters have not."""

import sys

import torch
from torch import Tensor


class ScaledLoss:
    """A mixin of optimizers that see gradients of outputs.

    `loss_scale`: the factor, set by hand; 1 leaves it to the GradScaler that steps, if one does.
    """

    loss_scale: float | Tensor = 1.0
    _scaler_scale: float | None = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler.step asks first; False: it unscales gradients of parameters itself.

        It tells its scale only to optimizers that unscale, and not even to these after `unscale_`,
        so its frame is read.
        """
        scaler = sys._getframe(1).f_locals.get("self")
        if isinstance(scaler, torch.amp.GradScaler):
            self._scaler_scale = scaler.get_scale()
            self.end_passes()
        return False

    def end_passes(self) -> None:
        """A scaler is about to step, or to leave the step out: what was seen is for no other."""

    def taken_scale(self) -> float:
        """The factor of this step; from here on no scaler is known."""
        scale, self._scaler_scale = self._scaler_scale, None
        by_hand = float(self.loss_scale)
        return by_hand if scale is None or by_hand != 1.0 else scale
