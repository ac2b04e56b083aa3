"""A model by name, on the meta device: shapes, and no weights in memory."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isokron.planning.families import FAMILIES, make_family
from isokron.tasks import Task, load
from isokron.tasks import names as task_names
from isokron.tasks.catalog import load_object


def names() -> list[str]:
    """The built-in families."""
    return list(FAMILIES)


def make_model(spec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A family, a built-in task's model, what `module:function` makes, or of a Hugging Face folder
    what its config.json says; parameters in `dtype`, on the meta device."""
    if spec in FAMILIES:
        model = make_family(spec)
    elif (Path(spec).expanduser() / "config.json").is_file():
        model = _from_config(Path(spec).expanduser())
    elif ":" in spec:
        model = _users(spec)
    else:
        model = _of_task(spec)
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"model {spec!r} has no parameter that is trained")
    return model.to("meta", dtype)


def _of_task(name: str) -> nn.Module:
    tasks = task_names()
    if name not in tasks and f"{name}-tiny" not in tasks:
        close = difflib.get_close_matches(name, [*FAMILIES, *tasks], n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no model named {name!r}; {hint}built in are {', '.join(FAMILIES)} and the tasks "
            f"{', '.join(tasks)}; others are given as module:function, path/to/file.py:function "
            "or a folder with a Hugging Face config.json"
        )
    task = load(name)
    with torch.device("meta"):
        return task.model()


def _users(spec: str) -> nn.Module:
    function = load_object(spec, "model")
    with torch.device("meta"):
        made: Any = function() if callable(function) else function
        made = made.model() if isinstance(made, Task) else made
    if not isinstance(made, nn.Module):
        raise ValueError(
            f"model {spec!r} must return a torch.nn.Module, got {type(made).__name__}; end the "
            "function with: return model"
        )
    return made


def _from_config(folder: Path) -> nn.Module:
    """The class that the folder's config.json names, or else the one transformers takes for it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Hugging Face models need the package transformers; install it with: "
            'pip install "isokron[hf]" (in a clone: pip install ".[hf]")',
            name=error.name,
        ) from None
    config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
    kinds = [getattr(transformers, name, None) for name in config.architectures or ()]
    with torch.device("meta"):
        if kinds and kinds[0] is not None:
            return kinds[0](config)
        return transformers.AutoModel.from_config(config)
