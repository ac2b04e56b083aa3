"""Quad: momentum made white by symmetric factors, which a quadratic step keeps positive."""

from typing import Any

import optax

from isokron.jax.descent import descend
from isokron.jax.factors import QUAD
from isokron.jax.transform import scale_by_white_kron


def scale_by_quad(
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
    """P μ̂ with P = Ql² ⊗ Qr², and Q ← MQM, M = I − plr/2L·(T − t₂I): see docs/white_kron.md.

    `lr_style`: "adam" divides by 5, for learning rates that suit Adam; None does not.
    `max_size_dense`: dimensions above it, by default 16384, have a diagonal factor.
    `dtype`: of the state, "bfloat16" or "float32"; None is float32, or what parameters have more.
    `scanned_layers`: a tree of flags, or the top of one: leaves that stack layers on axis 0.
    `block_size`: matrices are cut into blocks of it, by default 256.
    `pipeline_axis_name`: the mesh axis over which blocks are spread; its size is the mesh's.
    `params_partition_specs`: how parameters are sharded, where their types do not tell.
    `noise_scale`: of the noise that factors see; `damping`: the same relative to max|G| of a block.
    `every`: factors are updated in each step up to `warmup`, then in every so many.
    `apply`: the direction of the "new" factors, or more cheaply that of the "old" ones.
    `key`: None takes fixed probes and noise; a key or an integer draws them.
    """
    settings = dict(locals())
    return scale_by_white_kron(QUAD, **settings)


def quad(
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
    """scale_by_quad, then decayed weights, then the learning rate.

    `weight_decay_mask`: a tree of flags, or a function of the parameters: which of them decay.
    """
    return descend(scale_by_quad, locals())
