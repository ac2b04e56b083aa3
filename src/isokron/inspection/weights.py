"""Weights from a safetensors file into a model, every one of them or none."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn


def load_weights_(model: nn.Module, path: Path) -> None:
    """Set all parameters and buffers from the file, whose names must be the model's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"weights {path.name!r} cannot be read as safetensors: {error}; write them with "
            "safetensors.torch.save_model(model, path)"
        ) from None
    own = model.state_dict()
    missing = [name for name in own if name not in found and not _shared(name, own, found)]
    if missing:
        raise ValueError(f"weights {path.name!r} lack {missing[0]!r}{_and_more(missing)}")
    unexpected = [name for name in found if name not in own]
    if unexpected:
        raise ValueError(
            f"weights {path.name!r} hold {unexpected[0]!r}, which the model does not have"
            f"{_and_more(unexpected)}"
        )
    for name, value in found.items():
        if value.shape != own[name].shape:
            raise ValueError(
                f"weights {path.name!r}: {name!r} has shape {tuple(value.shape)}, and "
                f"{tuple(own[name].shape)} in the model"
            )
        if not bool(value.isfinite().all()):
            raise ValueError(f"weights {path.name!r}: {name!r} is not finite")
    model.load_state_dict(found, strict=False)


def _shared(name: str, own: dict[str, Tensor], found: dict[str, Tensor]) -> bool:
    """Whether a tensor is there under another name: safetensors keeps one of those that share."""
    place = own[name].data_ptr()
    return any(o in found and own[o].data_ptr() == place != 0 for o in own if o != name)


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
