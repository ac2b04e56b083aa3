"""Checks of NaturalGradient: settings, layers, gradients, and agreement of ranks."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.fit import FISHERS
from isokron.curvature.layers import Layer
from isokron.curvature.selection import MAX_SIDE, find_layers
from isokron.curvature.statistics import Sums
from isokron.distributed import Ranks, is_sharded
from isokron.linalg import on_host
from isokron.operators.low_rank import DTYPES, STORAGES
from isokron.optim.gradient_checks import check_sums, check_types, gradient_sums, wide_dtype
from isokron.optim.settings import check_number, is_number, param_name

CHOICES = {
    "method": ("kfac", "ekfac", "tkfac"),
    "fisher": FISHERS,
    "reduction": ("mean", "sum", "global_mean"),
    "nonfinite": ("raise", "skip", "ignore"),
    "store": STORAGES,
}
# settings that shape what is observed, so that a resumed run must have those of the checkpoint
SAME = ("fisher", "policy", "rho", "t_max", "o_max", "store", "store_dtype")
REDUCTIONS = (None, "covariance", "gather", "gram", "none")  # of `distribute`
UNEQUAL = 1e-4  # by how much norms of equal gradients may differ, on unlike machines
Groups = Sequence[Mapping[str, Any]]
# by parameter: the entry of `optimizer.state`, and what was in it
Shown = Mapping[Tensor, tuple[Mapping[str, Any], Mapping[str, Any]]]


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise one ValueError that names the argument, the rule and the value."""

    def need(ok: bool, name: str, rule: str) -> None:
        if not ok:
            value = arguments[name]
            raise ValueError(f"NaturalGradient: {name} must be {rule}, got {name}={value!r}")

    for name, choices in CHOICES.items():
        need(arguments[name] in choices, name, f"one of {', '.join(map(repr, choices))}")
    for name in ("lr", "weight_decay"):
        check_number("NaturalGradient", name, arguments[name])
    damping = arguments["damping"]
    pair = damping if isinstance(damping, tuple | list) else (damping,)
    need(pair is not damping or len(pair) == 2, "damping", "a number or a pair (λ_G, λ_A)")
    above = [("damping", value) for value in pair]
    above += [("lr_scale", arguments.get("lr_scale", 1.0))]  # of the group alone
    above += [] if arguments["kl_clip"] is None else [("kl_clip", arguments["kl_clip"])]
    for name, value in above:
        check_number("NaturalGradient", name, value, "above 0")
    for name, least in {"every": 1, "statistics_every": 1, "t_max": 2, "o_max": 1}.items():
        counted = type(arguments[name]) is int and arguments[name] >= least
        unset = name == "t_max" and arguments[name] is None
        need(counted or unset, name, f"a whole number of at least {least}")
    dtypes = (None, *DTYPES)
    need(arguments["store_dtype"] in dtypes, "store_dtype", f"one of {dtypes}")
    need(is_number(arguments["momentum"], below=1), "momentum", "at least 0 and below 1")
    beta, condition = arguments["factor_beta"], arguments["max_condition"]
    need(is_number(beta) and beta <= 1, "factor_beta", "at least 0 and at most 1")
    rule = "None or at least 1"
    need(condition is None or is_number(condition, least=1), "max_condition", rule)


def check_same(group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of other observations."""
    for name in (*SAME, "loss"):
        if saved[name] != group[name]:
            raise ValueError(
                f"NaturalGradient: {name} must be {saved[name]!r}, as in the checkpoint, got "
                f"{name}={group[name]!r}; make the optimizer anew with what was saved"
            )


def check_shown(state: Mapping[Tensor, Any], shown: Shown) -> None:
    """Refuse changes of `optimizer.state` other than in place, which would be lost."""
    for param, (entry, tensors) in shown.items():
        same = state.get(param) is entry and entry.keys() == tensors.keys()
        if not (same and all(entry[key] is value for key, value in tensors.items())):
            raise RuntimeError(
                "NaturalGradient: optimizer.state shows the curvature of layers, and entries of it "
                "cannot be deleted or replaced; write into their tensors, or make the optimizer "
                f"anew (the parameter has shape {tuple(param.shape)})"
            )


def check_not_sharded(group: Mapping[str, Any]) -> None:
    for i, param in enumerate(group["params"]):
        if is_sharded(param):
            raise ValueError(
                f"NaturalGradient: parameter {param_name(group, i)} is a DTensor, but layers must "
                "have whole weights; wrap the model in DistributedDataParallel, or take Shampoo or "
                "SOAP with fully_shard"
            )


def choose_layers(model: nn.Module, patterns: list[str] | None, head: str) -> list[Layer]:
    """The layers named, or all with dense inputs; none whose parameters another layer has too."""
    # routers and experts are not called as modules; they go to AdamW, as unknown types do
    layers = [
        layer
        for layer in find_layers(model, patterns or "*", head=head).layers
        if layer.observed == "module" or isinstance(layer.module, nn.MultiheadAttention)
    ]
    if patterns is None:
        layers = [x for x in layers if x.kind == "dense" and x.shape[2] <= MAX_SIDE]
    names: dict[Tensor, set[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, set()).add(name)
    tied = {name for same in names.values() if len(same) > 1 for name in same}
    # the Fisher of a tied weight is not that of either layer
    layers = [layer for layer in layers if not tied & set(layer.layout.params.values())]
    if not layers:
        raise ValueError(
            f"no layer to precondition in {type(model).__name__} with layers={patterns!r}: linear "
            f"layers of at most {MAX_SIDE:,} inputs and outputs, convolutions and attention are by "
            "default, embeddings and norms when they are named, tied weights never; use AdamW, or "
            "name layers"
        )
    return layers


def _squares(param: Tensor, group: Mapping[str, Any]) -> bool:
    """AdamW squares gradients, and the length of a step is that of ⟨V, M̂⟩."""
    return True


def find_problem(groups: Groups, observed: Mapping[str, Sums]) -> str | None:
    """Why to skip a step, or None; raises unless nonfinite is "skip". One device sync."""
    check_types("NaturalGradient", groups)
    mode = groups[0]["nonfinite"]
    if mode == "ignore":
        return None
    groups = [{**group, "nonfinite": mode} for group in groups]
    layers = {name: [x for x in sums.tensors() if x.ndim] for name, sums in observed.items()}
    tensors = [x for values in layers.values() for x in values]
    # NaN and infinity make a sum non-finite, and one sync reads all sums
    grad_sums = gradient_sums(groups)
    totals = on_host([*grad_sums, *(x.sum(dtype=wide_dtype(x)) for x in tensors)])
    if problem := check_sums("NaturalGradient", groups, _squares, totals[: len(grad_sums)]):
        return problem
    if all(math.isfinite(total) for (total,) in totals[len(grad_sums) :]):
        return None
    for name, values in layers.items():
        if all(bool(x.isfinite().all()) for x in values):  # only their sum has overflowed
            continue
        problem = f"inputs or gradients of outputs of layer {name!r} are not finite"
        if mode == "skip":
            return problem
        raise FloatingPointError(
            f"NaturalGradient: {problem}; nothing was changed. Look for what overflows, or pass "
            'nonfinite="skip"'
        )
    return None


def compare_ranks(
    ranks: Ranks,
    groups: Groups,
    layers: Mapping[str, Layer],
    observed: Mapping[str, float],
    skip: str | None,
) -> tuple[str | None, list[list[float]]]:
    """Why ranks skip a step, if one does, and the loss terms of every rank by observed layer.

    Raises on all ranks where they are about to do different things.
    """
    facts = {
        "layers": {name: layer.shape for name, layer in layers.items()},
        "settings": [
            {
                key: float(value) if isinstance(value, Tensor) else repr(value)
                for key, value in group.items()
                if key not in ("params", "param_names")
            }
            for group in groups
        ],
        "observed layers": list(observed),
        "parameters with a gradient": [
            param_name(group, i)
            for group in groups
            for i, param in enumerate(group["params"])
            if param.grad is not None
        ],
    }
    ranks.agree("NaturalGradient: what ranks step with", facts)
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    norms = [torch.linalg.vector_norm(grad, dtype=wide_dtype(grad)) for grad in grads]
    norm = math.hypot(*(value for (value,) in on_host(norms)))
    numbers = [float(skip is not None), norm, *observed.values()]
    # DDP gives all ranks the same gradients; equal norms show that somebody has averaged them
    sent = torch.tensor(numbers, dtype=torch.float64, device=ranks.device)
    everyone = ranks.all_gather(sent).tolist()
    for rank, (skips, length, *_) in enumerate(everyone):
        if skips:
            return skip or f"rank {rank} skips it", []
        if abs(length - norm) > UNEQUAL * max(length, norm):
            raise RuntimeError(
                f"NaturalGradient: gradients must be the same on all ranks, but their norm is "
                f"{norm:.6g} on rank {ranks.rank} and {length:.6g} on rank {rank}; wrap the model "
                "in DistributedDataParallel, or all-reduce gradients before step()"
            )
    return None, [counts for _, _, *counts in everyone]
