"""Find a Python object by `module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(spec: str, what: str) -> Any:
    """The object `name` of a module or file; `what` says in errors what was looked for."""
    home, _, name = spec.rpartition(":")
    if not home or not name:
        raise ValueError(
            f"{what} {spec!r} is not of the form module:name; "
            "write for example package.module:name or path/to/file.py:name"
        )
    module = _from_file(Path(home), what) if home.endswith(".py") else _from_name(home, what)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(n for n in sorted(vars(module)) if not n.startswith("_"))
            raise ValueError(f"{what}: {home} has no {name!r}; it has {public:.200}")
        found = getattr(found, part)
    return found


def _from_name(home: str, what: str) -> ModuleType:
    try:
        return importlib.import_module(home)
    except ModuleNotFoundError as error:
        # only the module asked for is a wrong spec; one that it imports is the user's to install
        if error.name is None or not (home == error.name or home.startswith(f"{error.name}.")):
            raise
        raise ValueError(
            f"{what}: no module named {home!r}; install it, or give a file: path/to/file.py:name"
        ) from None


def _from_file(path: Path, what: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{what}: no file {str(path)!r}; paths are relative to {Path.cwd()}")
    name = f"isokron_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{what}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickling look their module up by name
    spec.loader.exec_module(module)
    return module
