"""The settings every optimizer shares: what there is, what it is called, what it is by default."""

from typing import Any, Literal, TypedDict

import torch

# Every group carries these; an optimizer's own arguments override them and add to them.
SHARED: dict[str, Any] = {
    "lr_scale": 1.0,  # the group's factor on the one schedule of all groups
    # who steps: "method": matrices get the method, the rest AdamW; "auto": the same, but matrices
    # shaped as tables go to AdamW; "adamw": all AdamW; "spectral": matrices get the polar factor of
    # their moment, which is Muon's direction, the rest AdamW
    "route": "auto",
    "max_rows": 30_000,  # of "auto": a matrix of more rows is a table; None: no limit
    "vectors": False,  # whether the method takes vectors too
    "stacked": 0,  # leading dimensions that count matrices, as in [experts, m, n]
    "split": None,  # parts of a fused projection: sizes, or a number of equal parts
    "split_dim": 0,  # the dimension of one matrix along which `split` cuts
    "max_dim": None,  # longer dimensions are cut into blocks
    "weight_decay": 0.0,
    "decay": "decoupled",  # or "corrected": times lr / its peak; or "l2": into the gradient
    "momentum": 0.0,
    "nesterov": False,
    # whether means that start at zero are divided by 1 − βᵗ: moments, and factors of the method;
    # AdamW, which steps the rest, always does it
    "use_bias_correction": True,
    "graft": None,  # whose step length: "sgd", "adagrad", "rmsprop", "adam" or the method's own
    "every": 1,  # steps between refreshes
    "start": None,  # the first refresh; then at start·2, start·4, … up to every. None: at every
    "warmup": 0,  # steps at first that each refresh; `start` and `every` count from there
    # "together": all blocks refresh in the same step; "staggered": blocks take turns; a whole
    # number n: a refresh runs on a thread and takes effect n steps later
    "refresh": "together",
    "tolerated": 3,  # failed refreshes in a row that keep the operator as it is and do not raise
    "average": None,  # "schedule_free" or "primal" averaging of iterates
    "average_beta": 0.9,  # gradients are taken at βx + (1−β)z, x the average and z the iterate
    "average_decay": 0.99,  # of "primal": x ← decay·x + (1−decay)·z
    "betas": (0.9, 0.999),  # of AdamW; β₂ also of grafting
    "eps": 1e-8,
    "amsgrad": False,
    "flat": False,  # whether AdamW moves small tensors, and their gradients, into one buffer
    "maximize": False,
    "nonfinite": "raise",  # or "skip" the step, or "ignore" (no check)
    "state_dtype": torch.float32,  # at least this wide; None: the parameter's own
    "workspace": 32 << 20,  # bytes of the gradients or factors that are worked on at once
    "mode": "train",  # with averaging: whether parameters are where gradients are taken, or "eval"
}

CHOICES: dict[str, tuple[Any, ...]] = {
    "route": ("auto", "method", "adamw", "spectral"),
    "decay": ("decoupled", "corrected", "l2"),
    "graft": (None, "sgd", "adagrad", "rmsprop", "adam"),
    "average": (None, "schedule_free", "primal"),
    "nonfinite": ("raise", "skip", "ignore"),
    "mode": ("train", "eval"),
}

# what the blocks and the state of a group depend on; changing one makes a new plan
LAYOUT = (
    "route",
    "max_rows",
    "vectors",
    "stacked",
    "split",
    "split_dim",
    "max_dim",
    "graft",
    "every",
    "average",
    "amsgrad",
    "flat",
    "state_dtype",
    "workspace",
)


class AdamWShared(TypedDict, total=False):
    """The shared settings that AdamW's constructor takes besides its own; see docs/engine.md."""

    lr_scale: float
    route: Literal["auto", "method", "adamw", "spectral"]
    max_rows: int | None
    vectors: bool
    stacked: int
    split: tuple[int, ...] | int | None
    split_dim: int
    decay: Literal["decoupled", "corrected", "l2"]
    warmup: int
    refresh: Literal["together", "staggered"] | int
    tolerated: int
    average: Literal["schedule_free", "primal"] | None
    average_beta: float
    average_decay: float
    flat: bool
    maximize: bool
    nonfinite: Literal["raise", "skip", "ignore"]
    state_dtype: torch.dtype | None
    workspace: int


class Shared(AdamWShared, total=False):
    """Those of the other optimizers' constructors."""

    eps: float
    amsgrad: bool
    use_bias_correction: bool


class HeavyBall(Shared, total=False):
    """Shared settings of optimizers whose first moment is betas[0]: momentum on the update."""

    momentum: float
    nesterov: bool
