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
    "max_dim": None,  # longer dimensions than this are `oversize`
    "oversize": "cut",  # into blocks; or "identity": kept whole, and left alone by the operator
    "weight_decay": 0.0,
    "decay": "decoupled",  # or "corrected": times lr / its peak; or "l2": into the gradient
    "momentum": 0.0,
    "dampening": 0.0,  # of momentum that acts on the update
    "nesterov": False,
    "beta3": None,  # the first moment's rate for the newest gradient; as for the others by default
    # whether means that start at zero are divided by 1 − βᵗ: moments, and factors of the method;
    # AdamW, which steps the rest, always does it
    "use_bias_correction": True,
    "graft": None,  # whose step length: "sgd", "adagrad", "rmsprop", "adam" or the method's own
    "graft_by": "block",  # lengths are compared by "block" or by "parameter"
    "every": 1,  # steps between refreshes
    "start": None,  # the first refresh; then at start·2, start·4, … up to every. None: at every
    "warmup": 0,  # steps at first that each refresh; `start` and `every` count from there
    "stagger": False,  # whether blocks take turns to refresh, so that no step stalls
    "delay": 0,  # steps a refresh may take on a thread of its own; 0: within its step
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
    "oversize": ("cut", "identity"),
    "decay": ("decoupled", "corrected", "l2"),
    "graft": (None, "sgd", "adagrad", "rmsprop", "adam"),
    "graft_by": ("block", "parameter"),
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
    "oversize",
    "graft",
    "graft_by",
    "every",
    "stagger",
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
    oversize: Literal["cut", "identity"]
    decay: Literal["decoupled", "corrected", "l2"]
    graft_by: Literal["block", "parameter"]
    warmup: int
    stagger: bool
    delay: int
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
    dampening: float
    nesterov: bool
    beta3: float | None
