"""Learning rates that carry over: from AdamW (docs/from_adamw.md), and across width (muP)."""

from collections.abc import Mapping
from math import sqrt
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from isokron.optim.spectral import spectral_scale
from isokron.optim.wrapped_models import named_parameters

if TYPE_CHECKING:
    from isokron.optim.layout import Traits

Shape = tuple[int, ...]

# of AdamW's one learning rate, with match_adamw: for what the method steps, and for all else
METHOD_MULTIPLE, REST_MULTIPLE = 2.0, 4.0


def read_base_shapes(
    base_shapes: nn.Module | Mapping[str, Any], named: Mapping[str, Tensor]
) -> dict[str, Shape]:
    """The shape that every parameter has in the narrow model, checked against the wide one."""
    if isinstance(base_shapes, nn.Module):
        base_shapes = named_parameters(base_shapes)
    if not isinstance(base_shapes, Mapping):
        raise TypeError(
            "param_groups: base_shapes must be the narrow model or a mapping of parameter names to "
            f"shapes, got {type(base_shapes).__name__}"
        )
    shapes: dict[str, Shape] = {}
    for name, param in named.items():
        if name not in base_shapes:
            raise ValueError(
                f"param_groups: base_shapes must have every trainable parameter, but has no "
                f"{name!r}; make it from a narrow model of the same structure"
            )
        base, shape = tuple(getattr(base_shapes[name], "shape", base_shapes[name])), param.shape
        if len(base) != len(shape) or not all(0 < b <= s for b, s in zip(base, shape, strict=True)):
            raise ValueError(
                f"param_groups: base_shapes[{name!r}] must have {len(shape)} dimensions, each at "
                f"least 1 and at most that of the parameter, {tuple(shape)}, got {base}; the base "
                "is the narrowest model, at whose width the learning rate is chosen"
            )
        shapes[name] = base
    return shapes


def scale_by_width_(group: dict[str, Any], traits: "Traits") -> None:
    """Scale `lr_scale` and `weight_decay` of a group to its width.

    An update U of a matrix [m, n] changes outputs of size one by about lr·‖U‖₂√(n/m), which does
    not depend on the width if lr ∝ √(m/n)/‖U‖₂ (Yang, Simon and Bernstein, 2310.17813). Decoupled
    decay is divided by the same factor, so that lr·λ is the same at every width.

    `group["fans"]`: (outputs m, inputs n) of the group's matrices, and those at the base width.
    """
    fans, base_fans = group.pop("fans")
    rate, base_rate = (
        sqrt(rows / cols) / update_norm(rows, cols, group, traits)
        for rows, cols in (fans, base_fans)
    )
    factor = rate / base_rate
    # not in place: several groups may have the same tensor
    group["lr_scale"] = group["lr_scale"] * factor
    if group["decay"] != "l2":
        group["weight_decay"] = group["weight_decay"] / factor


def check_multiples(who: str, settings: Mapping[str, Any]) -> None:
    if settings.get("match_adamw") and "lr_scale" in settings:
        method, rest = f"{METHOD_MULTIPLE:g}", f"{REST_MULTIPLE:g}"
        raise ValueError(
            f"{who}: match_adamw must be False where lr_scale is given, because it sets the "
            f"multiples of lr itself, {method} for what the method steps and {rest} for "
            "everything else; keep one of the two"
        )


def scale_from_adamw_(group: dict[str, Any], traits: "Traits") -> None:
    """Let a group of a method take AdamW's one learning rate."""
    if traits.takes is takes_none:
        return
    taken = {traits.takes(param, group) for param in group["params"]}
    if len(taken) > 1:
        raise ValueError(
            "match_adamw must be of groups that either the method or AdamW steps, got a group with "
            f"both, {group.get('name', 'without a name')!r}; leave `route` to param_groups, or "
            "name what AdamW shall step in adamw="
        )
    group["lr_scale"] = group["lr_scale"] * (METHOD_MULTIPLE if True in taken else REST_MULTIPLE)


def takes_none(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Of an optimizer that steps everything by AdamW."""
    return False


def update_norm(rows: int, cols: int, group: Mapping[str, Any], traits: "Traits") -> float:
    """‖U‖₂ of an update [m, n] at lr = 1, up to a constant.

    AdamW's updates have entries of size one and low rank: √(mn). A method's update is made of
    blocks of full rank, which respond to the same activations: √Σ‖Uᵢ‖₂².
    """
    if not traits.takes(group["params"][0], group):
        return sqrt(rows * cols)
    if group["route"] == "spectral":
        return spectral_scale(rows, cols, group["scale"])
    blocks = traits.cut((rows, cols), {**group, "stacked": 0, "split": None})
    return sqrt(sum(traits.norm(block.shape, group) ** 2 for block in blocks))
