"""What the tensors of a shard must be, told before anything is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from isokron.attribution.storage.manifest import Plan, Record
from isokron.attribution.storage.shards import CODES

# what the store itself calls its tensors
OWN = ("gradients", "example", "position", "ids", "display", "kinds")


def check_rows(plan: Plan, number: int, tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that are not one row each of what the shard's examples have."""
    gradients = tensors["gradients"]
    if gradients.ndim != 2 or gradients.size(1) != plan.width or not gradients.is_floating_point():
        raise ValueError(
            f"gradients must be floating [rows, {plan.width}], as the columns say, got shape "
            f"{tuple(gradients.shape)} of {gradients.dtype} for shard {number}"
        )
    for name, tensor in tensors.items():
        if tensor.ndim < 1 or len(tensor) != len(gradients):
            raise ValueError(
                f"{name} must have a row for each of the {len(gradients)} of gradients, got shape "
                f"{tuple(tensor.shape)} for shard {number}"
            )
        if tensor.dtype not in CODES:
            raise ValueError(f"{name} must have a dtype of {tuple(CODES)}, got {tensor.dtype}")
    for name in ("example", "position"):
        if name in tensors and (tensors[name].ndim, tensors[name].dtype) != (1, torch.int64):
            raise ValueError(
                f"{name} must be int64 [rows], got shape {tuple(tensors[name].shape)} of "
                f"{tensors[name].dtype} for shard {number}"
            )
    if plan.per_token != ("position" in tensors) or "example" not in tensors:
        needs = "needs example and position" if plan.per_token else "has no position"
        raise ValueError(f"a store with per_token={plan.per_token} {needs}, got {list(tensors)}")
    _check_examples(plan, number, tensors["example"].cpu())


def check_extra(names: Mapping[str, Tensor]) -> None:
    for name in names:
        if name in OWN or name.endswith(".offsets") or name.startswith("__"):
            raise ValueError(f"extra must not be named as the store's own, got {name!r}; rename it")


def check_alike(records: list[Record]) -> None:
    """Refuse shards that do not hold the same tensors."""
    first = records[0]
    wanted = _kinds(first)
    for record in records:
        if _kinds(record) != wanted:
            raise ValueError(
                f"shards must hold the same tensors: {first.file} has {wanted}, {record.file} "
                f"{_kinds(record)}; give every shard the same extra and display in a new folder"
            )


def _kinds(record: Record) -> dict[str, tuple[str, list[int]]]:
    return {name: (known["dtype"], known["shape"][1:]) for name, known in record.tensors.items()}


def _check_examples(plan: Plan, number: int, example: Tensor) -> None:
    first, last = plan.span(number)
    if plan.per_token:
        rising = bool((example.diff() >= 0).all())
        if not rising or bool(((example < first) | (example >= last)).any()):
            raise ValueError(
                f"example must rise within {first} to {last - 1} in shard {number}, got "
                f"{example.tolist()[:8]}, …; missing() says which examples belong to a shard"
            )
    elif not example.equal(torch.arange(first, last)):
        raise ValueError(
            f"shard {number} must have one row for each example from {first} to {last - 1} in "
            f"order, got {len(example)} rows; use per_token=True for several"
        )
