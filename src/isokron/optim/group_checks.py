"""Checks of a parameter group when it is added, when it is loaded, and when a setting changes."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isokron.optim.layout import GroupLayout, Traits
from isokron.optim.settings import (
    RULES,
    check_adamw,
    check_group,
    check_param,
    param_name,
    plain,
    refresh_delay,
    require,
)

Group = Mapping[str, Any]


def check_settings_(
    optimizer: str, group: dict[str, Any], traits: Traits, read_lr: bool = True
) -> None:
    """Check all settings of a group, and make Python's numbers and tuples of what can be one.

    `read_lr`: also a tensor, for which a device has to be waited for.
    """
    for key, value in group.items():
        if key not in ("params", "param_names"):
            group[key] = plain(value)
    unread = not read_lr and isinstance(group["lr"], Tensor)
    check_group(optimizer, {**group, "lr": 0.0} if unread else group, sums=traits.heavy_ball)
    if refresh_delay(group) and not traits.operator:
        raise ValueError(
            f"{optimizer}: refresh must be 'together' or 'staggered' for a method that "
            f"names no operator, got refresh={group['refresh']!r}"
        )
    if group["polar"]:
        rule = "False for a method without roots or eigenbases (SOAP, Shampoo and Katie have them)"
        rooted = bool(traits.operator) and traits.work == "eigen"
        require(rooted, optimizer, group, "polar", rule)
        rule = "False where vectors=True; vectors have no polar factor"
        require(not group["vectors"], optimizer, group, "polar", rule)
    if traits.check is not None:
        traits.check(group)


def check_params(optimizer: str, group: Group, traits: Traits) -> None:
    """Refuse parameters that cannot be stepped with the settings of their group."""
    elementwise = traits.elementwise or group["route"] == "adamw"
    for i, param in enumerate(group["params"]):
        name = param_name(group, i)
        check_param(optimizer, name, param, group, elementwise)
        if not traits.takes(param, group):
            check_adamw(optimizer, name, group)


def check_changes_(
    optimizer: str, group: dict[str, Any], traits: Traits, layout: GroupLayout | None
) -> None:
    """Check what has changed since the layout was made or this was called."""
    changed = layout is None or [
        key for key, value in layout.values.items() if group[key] is not value
    ]
    if changed == ["lr"]:  # of every step, under a schedule
        rate = group["lr"] = plain(group["lr"])
        rule, holds = RULES["lr"]
        require(isinstance(rate, Tensor) or holds(rate), optimizer, group, "lr", rule)
    else:
        check_settings_(optimizer, group, traits, read_lr=layout is None)
        if layout is None or not layout.fits(group) or group["betas"][1] == 1:
            check_params(optimizer, group, traits)
    if layout is not None:
        layout.values.update({key: group[key] for key in layout.values})
