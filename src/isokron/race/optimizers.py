"""Optimizers by name: isokron's own, or any `module:name`, with options in parentheses."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from isokron.tasks.loading import load_object

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

YARDSTICK = "adamw"
ADAMW_LRS = (3e-4, 1e-3, 3e-3, 1e-2)
STRUCTURED_LRS = (3e-3, 1e-2, 3e-2)

# name → (class in isokron, learning rates to try)
BUILT_IN: dict[str, tuple[str, tuple[float, ...]]] = {
    "adamw": ("AdamW", ADAMW_LRS),
    "muon": ("Muon", STRUCTURED_LRS),
    "shampoo": ("Shampoo", STRUCTURED_LRS),
    "soap": ("SOAP", STRUCTURED_LRS),
    "katie": ("Katie", STRUCTURED_LRS),
    "quad": ("Quad", STRUCTURED_LRS),
    "skew": ("Skew", STRUCTURED_LRS),
    "natural": ("NaturalGradient", STRUCTURED_LRS),
    "sign": ("SignDescent", (3e-4, 1e-3, 3e-3, 1e-2)),
}


@dataclass(frozen=True)
class Entrant:
    """An optimizer as the user named it, and how to build it for a model."""

    spec: str
    build: Callable[[nn.Module, float], Optimizer]
    lrs: tuple[float, ...]


def split_specs(text: str) -> list[str]:
    """`a,b(x=1,y=(2,3)),c` → its parts, by the commas outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    if any(not part.strip() for part in parts):
        raise ValueError(f"optimizers {text!r} has an empty name; write for example adamw,muon")
    return [part.strip() for part in parts]


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """`name(option=value, …)` → name and options, the values being Python literals."""
    name, parenthesis, rest = spec.partition("(")
    if not parenthesis:
        return name, {}
    problem = f"optimizer {spec!r}: options must read name(option=value, …) with literal values"
    try:
        call = ast.parse(f"_({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError(problem)
        options = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
        if len(options) != len(call.keywords):
            raise ValueError(problem)
    except (SyntaxError, ValueError):
        raise ValueError(f"{problem}, for example torch.optim:SGD(momentum=0.9)") from None
    return name.strip(), options


def resolve(spec: str) -> Entrant:
    """Find the optimizer and check its options before any work starts."""
    name, options = parse_spec(spec)
    if "lr" in options:
        raise ValueError(f"optimizer {spec!r}: give learning rates with --lr, not as an option")
    if ":" in name:
        factory = load_object(name, "optimizer")
        if not callable(factory):
            raise ValueError(f"optimizer {spec!r} must be callable, got {type(factory).__name__}")
        takes_model = _first_parameter(factory) == "model"
        _check_options(spec, factory, options)

        def build(model: nn.Module, lr: float) -> Optimizer:
            return factory(model if takes_model else model.parameters(), lr=lr, **options)

        return Entrant(spec, build, ADAMW_LRS)
    if name not in BUILT_IN:
        module, dot, attribute = name.rpartition(".")
        close = [f"{module}:{attribute}"] if dot else difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ValueError(
            f"no optimizer named {name!r}; {hint}built in are {', '.join(BUILT_IN)}; "
            "any other is given as module:name, for example torch.optim:SGD(momentum=0.9)"
        )
    class_name, lrs = BUILT_IN[name]
    import isokron

    ours = getattr(isokron, class_name)
    _check_options(spec, ours, options)
    takes_model = _first_parameter(ours) == "model"
    _try(spec, ours, lrs[0], options, takes_model)

    def build_ours(model: nn.Module, lr: float) -> Optimizer:
        return ours(model if takes_model else isokron.param_groups(model), lr=lr, **options)

    return Entrant(spec, build_ours, lrs)


def _first_parameter(factory: Callable[..., Any]) -> str:
    try:
        return next(iter(inspect.signature(factory).parameters), "")
    except (TypeError, ValueError):  # compiled callables may hide their signature
        return ""


def _check_options(spec: str, factory: Callable[..., Any], options: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(None, lr=0.0, **options)
    except TypeError as error:
        raise ValueError(_cannot(spec, factory, error)) from None


def _try(
    spec: str,
    ours: Callable[..., Optimizer],
    lr: float,
    options: dict[str, Any],
    takes_model: bool,
) -> None:
    """Build it once: what the signature leaves to the engine, and every value, is checked there."""
    from torch import nn

    try:
        tiny = nn.Linear(2, 2)
        if takes_model:  # names of layers are those of the task's model
            ours(tiny, lr=lr, **{**options, "layers": None})
        else:
            ours([tiny.weight], lr=lr, **options)
    except TypeError as error:
        raise ValueError(_cannot(spec, ours, error)) from None
    except ValueError as error:
        raise ValueError(f"optimizer {spec!r}: {error}") from None


def _cannot(spec: str, factory: Callable[..., Any], error: Exception) -> str:
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(factory).parameters.values()
    names = [p.name for p in parameters if p.kind not in variable]
    options = ", ".join(name for name in names if name not in ("params", "model", "lr", "self"))
    return f"optimizer {spec!r} cannot be called: {error}; its options are {options}"
