"""Where a pretrained model is: in a folder, in the folder of an adapter's base, or on the hub."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ADAPTER = "adapter_config.json"  # written by peft
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True)
class Location:
    """path: of the model, or of an adapter's base; local: whether that is a folder.

    adapter: a folder with an adapter, or ""; saved: modules that are with the adapter in full, such
    as a head. tokenizer: the folder or name that has it.
    """

    path: str
    local: bool
    tokenizer: str
    adapter: str = ""
    saved: tuple[str, ...] = ()

    def adapted(self, model: Any) -> Any:
        """The model with its adapter, whose weights alone can be trained."""
        if not self.adapter:
            return model
        try:
            from peft import PeftModel
        except ImportError:
            raise ModuleNotFoundError(
                f"{self.adapter} has an adapter, which needs the package peft; install it with: "
                "pip install peft"
            ) from None
        try:
            adapted = PeftModel.from_pretrained(model, self.adapter, is_trainable=True)
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise ValueError(
                f"the adapter in {self.adapter!r} cannot be loaded: {error}"
            ) from error
        # the model itself, with the names and the arguments that it has without peft
        return adapted.get_base_model()


def locate(model: str | Path) -> Location:
    """The location of a folder or a name on the hub; what looks like a folder must be one."""
    folder = Path(model).expanduser()
    if not folder.is_dir() or not str(model):
        _check_name(model, folder)
        return Location(str(model), local=False, tokenizer=str(model))
    if not (folder / ADAPTER).exists():
        return Location(str(folder), local=True, tokenizer=str(folder))
    try:
        config = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
        base = locate(config["base_model_name_or_path"])
        saved = tuple(config.get("modules_to_save") or ())
        if not any((folder / weights).exists() for weights in ADAPTER_WEIGHTS):
            raise ValueError(f"there is no {ADAPTER_WEIGHTS[0]}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder} has an adapter of peft that cannot be used: {error}; save it again, or "
            "merge it into its base with merge_and_unload() and save that model"
        ) from None
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    tokenizer = str(folder) if has_tokenizer else base.tokenizer
    return Location(base.path, base.local, tokenizer, str(folder), saved)


def _check_name(model: str | Path, folder: Path) -> None:
    """Refuse what cannot be a name on the hub, or lies in a folder that is there."""
    name = str(model)
    looks_local = isinstance(model, Path) or not name or name[0] in "./~" or name.count("/") > 1
    if looks_local or folder.exists() or ("/" in name and folder.parent.is_dir()):
        raise ValueError(
            f"no folder {str(folder)!r} with a model; give the folder that save_pretrained "
            f"wrote, or a name on the hub; paths are relative to {Path.cwd()}"
        )
