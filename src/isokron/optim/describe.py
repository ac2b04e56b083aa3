"""A table of who steps which parameters."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from isokron.optim.engine import Preconditioned
from isokron.optim.routing import param_groups
from isokron.optim.settings import SHARED
from isokron.optim.tables import gets_method

HEADER = ("group", "stepped by", "tensors", "elements", "decay", "lr scale", "such as")


def describe(subject: Preconditioned | nn.Module | Iterable[Mapping[str, Any]]) -> str:
    """Who steps what, one line a group, as a table to print.

    `subject`: an optimizer, parameter groups, or a model, of which `param_groups` makes groups.
    "decay" and "lr scale" are the group's own, "-" where it leaves them to the optimizer.
    """
    if isinstance(subject, Preconditioned):
        groups: Iterable[Mapping[str, Any]] = subject.param_groups
    elif isinstance(subject, nn.Module):
        groups = param_groups(subject)
    else:
        groups = _checked(subject)
    rows = [line for group in groups for line in _lines(group, subject)]
    widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
    return "\n".join(_aligned(cells, widths) for cells in (HEADER, *rows))


def _checked(groups: Any) -> list[Mapping[str, Any]]:
    several = list(groups) if isinstance(groups, Sequence) else []
    if not several or not all(
        isinstance(group, Mapping) and "params" in group for group in several
    ):
        raise TypeError(
            "describe takes an isokron optimizer, its param_groups, the groups of "
            f"isokron.param_groups or a model, got {type(groups).__name__}"
        )
    return several


def _lines(group: Mapping[str, Any], subject: Any) -> list[tuple[str, ...]]:
    """One line, or two where the shapes of a group's parameters decide who steps them."""
    pairs = [p if isinstance(p, tuple) else ("", p) for p in group["params"]]
    names = group.get("param_names") or [name for name, _ in pairs]
    params = [param for _, param in pairs]
    settings = {**SHARED, **group, "params": params}
    method = type(subject).__name__ if isinstance(subject, Preconditioned) else "the method"
    if settings["route"] == "spectral":
        method = "spectral descent"
    steppers: dict[str, list[int]] = {}
    for i, param in enumerate(params):
        taken = (
            subject.takes(param, group)
            if isinstance(subject, Preconditioned)
            else gets_method(param, settings)
        )
        steppers.setdefault(method if taken else "AdamW", []).append(i)
    return [
        (
            str(group.get("name", "parameters")),
            stepper,
            str(len(numbers)),
            f"{sum(params[i].numel() for i in numbers):,}",
            _shown(group.get("weight_decay")),
            _shown(group.get("lr_scale")),
            _example(names[numbers[0]], params[numbers[0]]),
        )
        for stepper, numbers in steppers.items()
    ]


def _shown(value: Any) -> str:
    return "-" if value is None else f"{float(value):g}"


def _example(name: str, param: Tensor) -> str:
    return f"{name} {list(param.shape)}".strip()


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Text to the left, numbers to the right."""
    pairs = zip(HEADER, cells, widths, strict=True)
    numeric = HEADER[2:6]
    return "  ".join(
        cell.rjust(width) if title in numeric else cell.ljust(width) for title, cell, width in pairs
    ).rstrip()
