"""Curvature on disk: safetensors, and a JSON index with the sha256 of every file.

The index names the files and is replaced last, in one step: whoever reads while another process
writes, or after one was killed, finds the old curvature or the new one.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from isokron._version import __version__
from isokron.curvature.curvature import Curvature, LayerCurvature
from isokron.curvature.layers import Layout, all_layers
from isokron.digest import weights_digest
from isokron.files import locked, read_json, write_atomically
from isokron.operators import CholeskyInverse, Dense, Diagonal, Kron, KronEigen, LowRank

FORMAT = 5
INDEX = "curvature.json"
FILE_BYTES = 2**28  # tensors of one file, which is in memory twice while it is written or read
REMEDY = "delete the folder and run `isokron fit` again"
TYPES = {
    kind.__name__: kind
    for kind in (LayerCurvature, Layout, CholeskyInverse, Dense, Diagonal, Kron, KronEigen, LowRank)
}


def save_curvature(curvature: Curvature, folder: str | Path) -> None:
    """Write it into a folder, which is made if need be; files of an older one are removed."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    layers, operators = list(curvature.layers.values()), None
    # an inverse or power is its operators: statistics would double its size
    if curvature.derived:
        layers, operators = [replace(layer, statistics={}) for layer in layers], dict(curvature)
    tensors: dict[str, Tensor] = {}
    content = {
        "layers": _encode(tuple(layers), "layers", tensors),
        "operators": _encode(operators, "operators", tensors),
        "notes": curvature.notes,
    }
    head = {"format": FORMAT, "isokron": __version__, "fingerprint": curvature.fingerprint}
    # the trace of an inverse would take as long as multiplying it out
    report = [] if curvature.derived else curvature.report(spectra=False)
    # the files of one index are not removed by the writer of another
    with locked(folder / INDEX):
        checksums = {}
        for chunk in _chunks(tensors):
            data = save({key: value.detach().cpu().contiguous() for key, value in chunk.items()})
            digest = hashlib.sha256(data).hexdigest()
            name = f"factors-{digest[:16]}.safetensors"
            write_atomically(folder / name, [data])
            checksums[name] = digest
        index = {**head, "sha256": checksums, **content, "report": report}
        write_atomically(folder / INDEX, [json.dumps(index, indent=1).encode()])
        # only now, since a kill before this must leave the files of the old index
        for old in folder.glob("factors-*.safetensors"):
            if old.name not in checksums:
                old.unlink()


def load_curvature(folder: str | Path, model: nn.Module | None = None) -> Curvature:
    """Read it back, with all checksums verified.

    With a `model`, its weights are checked to be those of the fit, and tensors are on its device.
    """
    folder = Path(folder)
    index = _index(folder / INDEX)
    try:
        device = torch.device("cpu") if model is None else next(model.parameters()).device
        tensors = _read(folder, index["sha256"], device)
        layers, operators = (_decode(index[key], tensors) for key in ("layers", "operators"))
        curvature = Curvature(list(layers), operators, index["notes"], index["fingerprint"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} lacks {error}; {REMEDY}") from None
    if model is not None:
        _check_against(curvature, model, folder / INDEX)
        old, new = curvature.fingerprint.get("weights"), weights_digest(model)
        if old not in (None, new):
            raise ValueError(
                f"the curvature in {folder} was fitted to a model with the weights {old}, and this "
                f"model has {new}; fit it to this model, or load the weights of that one"
            )
    return curvature


def _check_against(curvature: Curvature, model: nn.Module, path: Path) -> None:
    """Refuse layers that the model does not have, or has in another shape."""
    layouts = {layer.name: layer.layout for layer in all_layers(model)[0]}
    for name, layer in curvature.layers.items():
        if layer.layout != layouts.get(name):
            saved, actual = (
                layout and {param: layout.shapes[key] for key, param in layout.params.items()}
                for layout in (layer.layout, layouts.get(name))
            )
            raise ValueError(
                f"layer {name!r} is {saved} in {path} and {actual} in the model; load it with the "
                f"model it was fitted to, or {REMEDY}"
            )


def _chunks(tensors: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors of one file each."""
    chunk: dict[str, Tensor] = {}
    for key, value in tensors.items():
        if chunk and sum(tensor.nbytes for tensor in chunk.values()) + value.nbytes > FILE_BYTES:
            yield chunk
            chunk = {}
        chunk[key] = value
    yield chunk


def _read(folder: Path, checksums: dict[str, str], device: torch.device) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, digest in checksums.items():
        path = folder / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error}; {REMEDY}") from None
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"{path} is damaged: its sha256 is not that in {INDEX}; {REMEDY}")
        # in memory of their own: products of tensors that begin elsewhere may round otherwise
        tensors |= {key: tensor.clone().to(device) for key, tensor in load(data).items()}
    return tensors


def _encode(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """As JSON: tensors by their key, dataclasses by their type, tuples as lists."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"$tensor": key}
    if is_dataclass(value):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return {"$type": type(value).__name__, **_encode(parts, key, tensors)}
    if isinstance(value, dict):
        return {name: _encode(part, f"{key}/{name}", tensors) for name, part in value.items()}
    if isinstance(value, tuple):
        return [_encode(part, f"{key}/{i}", tensors) for i, part in enumerate(value)]
    return value


def _decode(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return tuple(_decode(part, tensors) for part in value)
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    parts = {key: _decode(part, tensors) for key, part in value.items() if key != "$type"}
    return TYPES[value["$type"]](**parts) if "$type" in value else parts


def _index(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise FileNotFoundError(
            f"no curvature in {path.parent}: {INDEX} is missing; save one first"
        )
    index = read_json(path, REMEDY)
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {index.get('format')!r} (isokron {index.get('isokron')}), this "
            f"isokron {__version__} reads {FORMAT}; {REMEDY}"
        )
    return index
