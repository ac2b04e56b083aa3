"""Optimizers by name: those of isokron, or any `module:name`, with options in parentheses."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import isokron
from isokron.optim.settings import GROUP_KEYS, SHARED
from isokron.tasks.catalog import load_object

YARDSTICK = "adamw"  # takes part in every race

# name → (class in isokron, a usual learning rate)
BUILT_IN: dict[str, tuple[str, float]] = {
    "adamw": ("AdamW", 5e-3),
    "muon": ("Muon", 1e-2),
    "shampoo": ("Shampoo", 1e-2),
    "soap": ("SOAP", 1e-2),
    "katie": ("Katie", 1e-2),
    "quad": ("Quad", 1e-2),
    "skew": ("Skew", 1e-2),
    "natural": ("NaturalGradient", 1e-2),
    "sign": ("SignDescent", 5e-3),
}


@dataclass(frozen=True)
class Entrant:
    """An optimizer as the user named it, and how to build it for a model.

    lr: where a search for the best learning rate begins.
    two_rates: whether `lr_scale`, for hidden matrices and everything else, is left open.
    """

    spec: str
    build: Callable[..., Optimizer]  # (model, lr, **options)
    lr: float
    two_rates: bool = False


def split_specs(text: str) -> list[str]:
    """Split `a,b(x=1,y=(2,3)),c` at the commas outside parentheses."""
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
    """`name(option=value, …)` → name and options; the values are Python literals."""
    name, parenthesis, options = spec.partition("(")
    try:
        call = ast.parse(f"_({options}" if parenthesis else "_()", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
            raise ValueError
        if any(keyword.arg is None for keyword in call.keywords):  # a **
            raise ValueError
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
    except (SyntaxError, ValueError):
        raise ValueError(
            f"optimizer {spec!r}: options must read name(option=value, …) with literal values, for "
            "example torch.optim:SGD(momentum=0.9)"
        ) from None


def resolve(spec: str) -> Entrant:
    """Find the optimizer and check its options before any work starts."""
    name, options = parse_spec(spec)
    built_in = ":" not in name
    if "lr" in options:
        value = options["lr"]
        raise ValueError(f"optimizer {spec!r}: lr is no option of an optimizer; give lr={value}")
    lr = BUILT_IN[YARDSTICK][1]
    factory, lr = _built_in(name) if built_in else (load_object(name, "optimizer"), lr)
    if not callable(factory):
        raise ValueError(f"optimizer {spec!r} must be callable, got {type(factory).__name__}")
    if options.get("match_adamw"):
        lr = BUILT_IN[YARDSTICK][1]
    parameters = inspect.signature(factory).parameters
    takes_model = next(iter(parameters), "") == "model"

    def build(model: nn.Module, lr: float, **changes: Any) -> Optimizer:
        keywords = options | changes
        if takes_model:
            return factory(model, lr=lr, **keywords)
        if not built_in:
            if "lr_scale" not in changes:
                return factory(model.parameters(), lr=lr, **keywords)
            return factory(_groups(model, lr, keywords.pop("lr_scale")), lr=lr, **keywords)
        # settings that the constructor does not take are those of parameter groups
        only_groups = (GROUP_KEYS | {"match_adamw"}) - parameters.keys()
        settings = {key: keywords.pop(key) for key in list(keywords) if key in only_groups}
        return factory(isokron.param_groups(model, **settings), lr=lr, **keywords)

    try:
        if built_in:
            # the constructor checks the values, and the options that the signature hands on;
            # names of layers are meant for the task's model
            named = isinstance(options.get("policy"), dict)
            changes = {"layers": None, **({"policy": "dense"} if named else {})}
            patterns = [k for k, v in options.items() if isinstance(v, dict) and k in SHARED]
            unnamed = changes if takes_model else {key: SHARED[key] for key in patterns}
            with torch.random.fork_rng(devices=[]):
                build(nn.Linear(2, 2), lr, **unnamed)
            if options.get("fisher", "empirical") != "empirical":
                raise ValueError("a race makes one backward pass a step; use fisher='empirical'")
        else:
            inspect.signature(factory).bind(None, lr=0.0, **options)
    except TypeError as error:
        choices = [n for n, p in parameters.items() if p.default is not p.empty and n != "lr"]
        problem = f"cannot be called: {error}; its options are {', '.join(choices)}"
        raise ValueError(f"optimizer {spec!r} {problem}") from None
    except ValueError as error:
        raise ValueError(f"optimizer {spec!r}: {error}") from None
    one_rate = takes_model or "lr_scale" in options or options.get("match_adamw")
    return Entrant(spec, build, lr, two_rates=not one_rate)


def _groups(model: nn.Module, lr: float, lr_scale: Mapping[str, float]) -> list[dict[str, Any]]:
    """Groups with a learning rate each, for optimizers that know no `lr_scale`."""
    params: dict[float, list[nn.Parameter]] = {}
    for group in isokron.param_groups(model, lr_scale=lr_scale):
        params.setdefault(group["lr_scale"], []).extend(param for _, param in group["params"])
    return [{"params": group, "lr": lr * scale} for scale, group in params.items()]


def _built_in(name: str) -> tuple[Callable[..., Any], float]:
    if name in BUILT_IN:
        class_name, lr = BUILT_IN[name]
        return getattr(isokron, class_name), lr
    module, dot, attribute = name.rpartition(".")
    close = [f"{module}:{attribute}"] if dot else difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"no optimizer named {name!r}; {hint}built in are {', '.join(BUILT_IN)}; "
        "any other is given as module:name, for example torch.optim:SGD(momentum=0.9)"
    )
