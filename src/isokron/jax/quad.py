"""Quad: momentum whitened by symmetric factors that a quadratic step keeps positive."""

from typing import Any

import optax

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
    damping: float = 0.0,
    every: int = 1,
    warmup: int = 0,
    apply: str = "new",
    key: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """P μ̂, P = QlᵀQl ⊗ QrᵀQr, with Q ← MQM, M = I − plr/2L·(T − t₂I): see docs/white_kron.md.

    `lr_style`: "adam" divides by 5, to take Adam's learning rates; None does not.
    `max_size_dense`: dimensions above it, by default 16384, have a diagonal factor.
    `dtype`: of the state, "float32" or "bfloat16"; the work is done in float32 at least.
    `scanned_layers`: a tree of flags, or the top of one: leaves that stack layers on axis 0.
    `block_size`: matrices are cut into blocks of it, by default 256.
    `pipeline_axis_name`: the mesh axis over which blocks are spread; its size is the mesh's.
    `noise_scale`: of the noise that factors see; `damping`: the same, relative to the block's RMS.
    `every`: factors are updated in every step up to `warmup`, then in every `every`-th.
    `apply`: the direction of the "new" factors, or more cheaply that of the "old" ones.
    `key`: None takes fixed probes and noise; a key or an integer draws them.
    """
    return scale_by_white_kron(QUAD, **locals())
