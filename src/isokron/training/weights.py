"""Weights from a safetensors file into a model, every one of them or none."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from isokron.files import write_atomically


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


def save_weights(model: nn.Module, path: Path, note: str) -> None:
    """All parameters and buffers, whole or not at all, with a note on how they came about."""
    from safetensors.torch import save

    own: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():  # of those that share memory, the first
        own.setdefault(tensor.data_ptr() or id(tensor), (name, tensor))
    tensors = {name: tensor.contiguous() for name, tensor in own.values()}
    write_atomically(path, [save(tensors, {"note": note})])


def note_of(path: Path) -> str | None:
    """The note that a file was saved with; None where there is no such file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return (file.metadata() or {}).get("note")
    except (SafetensorError, OSError):
        return None
