"""Skew: momentum made white by factors that a small rotation keeps nearly symmetric."""

from typing import Any

import optax

from isokron.jax.descent import descend
from isokron.jax.factors import SKEW
from isokron.jax.transform import scale_by_white_kron


def scale_by_skew(
    lr_style: str | None = "adam",
    b1: float = 0.95,
    normalize_grads: bool = False,
    max_size_dense: int | None = None,
    preconditioner_lr: float = 0.7,
    preconditioner_init_scale: float = 1.0,
    dtype: Any = None,
    scanned_layers: Any = None,
    block_size: int | None = None,
    pipeline_axis_name: str | None = None,
    pipeline_axis_size: int | None = None,
    params_partition_specs: Any = None,
    noise_scale: float = 1e-9,
    *,
    damping: float = 0.0,
    every: int = 1,
    warmup: int = 0,
    apply: str = "new",
    key: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """P μ̂ with P = QlᵀQl ⊗ QrᵀQr, and Q ← MQ, then a Procrustes step: see docs/white_kron.md.

    The arguments are those of scale_by_quad.
    """
    settings = dict(locals())
    return scale_by_white_kron(SKEW, **settings)


def skew(
    learning_rate: optax.ScalarOrSchedule = 0.001,
    lr_style: str | None = "adam",
    b1: float = 0.95,
    weight_decay: float = 0.1,
    weight_decay_mask: Any = None,
    normalize_grads: bool = False,
    max_size_dense: int | None = None,
    preconditioner_lr: float = 0.7,
    preconditioner_init_scale: float = 1.0,
    dtype: Any = None,
    scanned_layers: Any = None,
    block_size: int | None = None,
    pipeline_axis_name: str | None = None,
    pipeline_axis_size: int | None = None,
    params_partition_specs: Any = None,
    noise_scale: float = 1e-9,
    *,
    damping: float = 0.0,
    every: int = 1,
    warmup: int = 0,
    apply: str = "new",
    key: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """scale_by_skew, then decayed weights, then the learning rate.

    `weight_decay_mask`: a tree of flags, or a function of the parameters: which of them decay.
    """
    return descend(scale_by_skew, locals())
