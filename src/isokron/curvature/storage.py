"""Curvature on disk: factors as safetensors, and a small JSON that says what they are.

The JSON names the file of the factors, and is replaced as one: whoever reads while another writes,
or after one was killed, finds the old curvature or the new, whole.
"""

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import nn

from isokron._version import __version__
from isokron.curvature.curvature import Curvature
from isokron.curvature.layer import Layer
from isokron.curvature.packing import Layout
from isokron.curvature.sites import find_sites
from isokron.files import write_atomically

FORMAT = 2
INDEX = "curvature.json"


def save_curvature(curvature: Curvature, folder: str | Path) -> None:
    """Write it into a folder, which is made if need be; nothing of an older one is left."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{layer.name}/{key}": value.detach().cpu().contiguous()
        for layer in curvature.layers.values()
        for key, value in layer.statistics.items()
    }
    content = save(tensors)
    name = f"factors-{hashlib.sha256(content).hexdigest()[:16]}.safetensors"
    index = {
        "format": FORMAT,
        "isokron": __version__,
        "factors": name,
        "layers": [
            {
                "name": layer.name,
                "method": layer.method,
                "kind": layer.kind,
                "layout": asdict(layer.layout),
                "statistics": sorted(layer.statistics),
                "policy": layer.policy,
                "terms": layer.terms,
                "retries": layer.retries,
            }
            for layer in curvature.layers.values()
        ],
        "report": curvature.report(spectra=False),
    }
    write_atomically(folder / name, [content])
    write_atomically(folder / INDEX, [json.dumps(index, indent=1).encode()])
    for old in folder.glob("factors-*.safetensors"):
        if old.name != name:
            old.unlink()


def load_curvature(folder: str | Path, model: nn.Module | None = None) -> Curvature:
    """Read it back. With a `model`, every layer is checked against the model's own."""
    index = _index(Path(folder))
    try:
        layers = _layers(index, Path(folder) / index["factors"])
    except (KeyError, TypeError) as error:
        path = Path(folder) / INDEX
        raise ValueError(f"{path} lacks {error}; fit the curvature anew") from None
    if model is not None:
        check_against(layers, model)
    return Curvature(layers)


def _layers(index: dict[str, Any], path: Path) -> list[Layer]:
    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} cannot be read: {error}; fit the curvature anew") from None
    layers = []
    for record in index["layers"]:
        found = {}
        for key in record["statistics"]:
            name = f"{record['name']}/{key}"
            if name not in tensors:
                raise ValueError(f"layer {record['name']!r}: {key!r} is missing from {path}")
            found[key] = tensors[name]
        layer = Layer(
            record["name"],
            record["method"],
            record["kind"],
            _layout(record["layout"]),
            found,
            record["policy"],
            record["terms"],
            record["retries"],
        )
        _check_shapes(layer)
        layers.append(layer)
    return layers


def check_against(layers: list[Layer], model: nn.Module) -> None:
    """Refuse layers that the model does not have, or has otherwise."""
    sites = {site.name: site for site in find_sites(model)}
    for layer in layers:
        if layer.name not in sites:
            raise ValueError(
                f"layer {layer.name!r} of the checkpoint is not in the model, which has "
                f"{', '.join(list(sites)[:6])}, …; load it with the model it was fitted to"
            )
        mine, theirs = sites[layer.name].layout, layer.layout
        if mine.bias != theirs.bias:
            has = "has a bias column" if theirs.bias else "has no bias column"
            raise ValueError(
                f"layer {layer.name!r}: the checkpoint {has}, the model's layer "
                f"{'has' if mine.bias else 'has no'} bias; fit the curvature of this model anew"
            )
        if mine.shape != theirs.shape:
            raise ValueError(
                f"layer {layer.name!r}: blocks, outputs and inputs are {theirs.shape} in the "
                f"checkpoint and {mine.shape} in the model"
            )


def _check_shapes(layer: Layer) -> None:
    blocks, outputs, inputs = layer.layout.shape
    square = {"output": outputs, "basis.output": outputs, "input": inputs, "basis.input": inputs}
    for key, value in layer.statistics.items():
        wanted: tuple[int, ...] = (blocks, outputs, inputs)
        if key in square:
            wanted = (blocks, square[key], square[key])
            if key == "input" and layer.kind == "index":
                wanted = wanted[:2]
        elif key == "mean":
            wanted = blocks, outputs
        elif key == "columns":
            wanted = blocks, outputs, layer.columns or 0
        if tuple(value.shape) != wanted:
            raise ValueError(
                f"layer {layer.name!r}: {key!r} has shape {tuple(value.shape)} in the checkpoint, "
                f"and its layer says {wanted}"
            )


def _index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"no curvature in {folder}: {INDEX} is missing; save one first")
    try:
        index = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}; fit the curvature anew") from None
    if index.get("format") != FORMAT:
        raise ValueError(
            f"{path} has format {index.get('format')!r} (isokron {index.get('isokron')}), this "
            f"isokron {__version__} reads {FORMAT}; fit the curvature anew"
        )
    return index


def _layout(record: dict[str, Any]) -> Layout:
    return Layout(
        record["form"],
        record["params"],
        {key: tuple(shape) for key, shape in record["shapes"].items()},
        record["groups"],
        {key: (rows[0], rows[1]) for key, rows in record["rows"].items()},
    )
