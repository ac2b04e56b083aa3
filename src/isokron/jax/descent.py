"""From the direction of a method to its users' optimizer."""

from collections.abc import Callable, Mapping
from typing import Any

import optax


def descend(
    scale_by: Callable[..., optax.GradientTransformationExtraArgs], given: Mapping[str, Any]
) -> optax.GradientTransformationExtraArgs:
    """scale_by, then decayed weights, then the learning rate. `given`: an alias's arguments."""
    own = dict(given)
    rate, decay, mask = (
        own.pop(name) for name in ("learning_rate", "weight_decay", "weight_decay_mask")
    )
    return optax.chain(
        scale_by(**own),
        optax.add_decayed_weights(decay, mask),
        optax.scale_by_learning_rate(rate),
    )
