"""Optimizers by name: those of isokron, or any `module:name`, with options in parentheses."""

from __future__ import annotations

import ast
import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import isokron
from isokron.optim.settings import GROUP_KEYS, SHARED
from isokron.tasks.catalog import load_object

YARDSTICK = "adamw"  # takes part in every race
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
    "sign": ("SignDescent", ADAMW_LRS),
}


@dataclass(frozen=True)
class Entrant:
    """An optimizer as the user named it, how to build it for a model, and its default sweep."""

    spec: str
    build: Callable[..., Optimizer]  # (model, lr, **options)
    lrs: tuple[float, ...]


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
    factory, lrs = _built_in(name) if built_in else (load_object(name, "optimizer"), ADAMW_LRS)
    if not callable(factory):
        raise ValueError(f"optimizer {spec!r} must be callable, got {type(factory).__name__}")
    if options.get("match_adamw"):
        lrs = ADAMW_LRS
    parameters = inspect.signature(factory).parameters
    takes_model = next(iter(parameters), "") == "model"

    def build(model: nn.Module, lr: float, **changes: Any) -> Optimizer:
        keywords = options | changes
        if takes_model or not built_in:
            return factory(model if takes_model else model.parameters(), lr=lr, **keywords)
        # settings that the constructor does not take are those of parameter groups
        only_groups = (GROUP_KEYS | {"match_adamw"}) - parameters.keys()
        settings = {key: keywords.pop(key) for key in options if key in only_groups}
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
                build(nn.Linear(2, 2), lrs[0], **unnamed)
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
    return Entrant(spec, build, lrs)


def _built_in(name: str) -> tuple[Callable[..., Any], tuple[float, ...]]:
    if name in BUILT_IN:
        class_name, lrs = BUILT_IN[name]
        return getattr(isokron, class_name), lrs
    module, dot, attribute = name.rpartition(".")
    close = [f"{module}:{attribute}"] if dot else difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(
        f"no optimizer named {name!r}; {hint}built in are {', '.join(BUILT_IN)}; "
        "any other is given as module:name, for example torch.optim:SGD(momentum=0.9)"
    )
