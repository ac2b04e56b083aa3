"""Sums that processes have of their segments become sums of all: each layer's at one of them."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isokron.curvature.division import Division, Tree, rounds
from isokron.curvature.folding import TERMS, Layers, added
from isokron.curvature.statistics import Sums


def total(division: Division, tree: Tree[Layers]) -> float:
    """The loss terms of all segments."""
    own = {f"{first} {last}": sums.pop(TERMS) for first, last, sums in tree.parts}
    if division.workers is not None:
        sent = {span: sums["terms"] for span, sums in own.items() if "terms" in sums}
        own = {
            f"{first} {last}": Sums(terms=there[f"{first} {last}"].cpu())
            if f"{first} {last}" in there
            else Sums()
            for rank, there in enumerate(division.workers.gather(sent))
            for first, last in division.held(rank)
        }
    whole = Tree(added)
    for span, sums in own.items():
        first, last = map(int, span.split())
        whole.put(first, last, {TERMS: sums})
    return float(whole.parts[0][2][TERMS].get("terms", 0.0))


def settled(
    division: Division, tree: Tree[Layers], layers: Sequence[Sequence[str]], device: torch.device
) -> Layers:
    """The sums of this process's own layers. `layers`: those of every process. What it has of the
    others goes to them, one of each at a time."""
    if division.workers is None:
        return tree.parts[0][2]
    found = {}
    for names in rounds(layers):
        outgoing: list[dict[str, Tensor]] = [
            {
                f"{first} {key}": sums[name].pop(key)
                for first, _, sums in tree.parts
                for key in list(sums[name])
            }
            if name is not None
            else {}
            for name in names
        ]
        incoming = division.workers.exchange(outgoing)
        del outgoing
        own = names[division.rank]
        if own is not None:
            found[own] = _joined(division, own, incoming, device)
    return found


def _joined(
    division: Division, name: str, incoming: list[dict[str, Tensor]], device: torch.device
) -> Sums:
    """One layer's sums of all."""
    whole = Tree(added)
    for rank, there in enumerate(incoming):
        for first, last in division.held(rank):
            start = f"{first} "
            keys = [key for key in there if key.startswith(start)]
            sums = Sums({key.removeprefix(start): there.pop(key).to(device) for key in keys})
            whole.put(first, last, {name: sums})
    return whole.parts[0][2][name]


def shared(
    division: Division,
    own: Mapping[str, Mapping[str, Tensor]],
    layers: Sequence[Sequence[str]],
    device: torch.device,
) -> dict[str, dict[str, Tensor]]:
    """The tensors of all layers, at all processes."""
    if division.workers is None:
        return {name: dict(tensors) for name, tensors in own.items()}
    found = {}
    for names in rounds(layers):
        mine = names[division.rank]
        every = division.workers.gather({} if mine is None else own[mine])
        for name, tensors in zip(names, every, strict=True):
            if name is not None:
                found[name] = {key: value.to(device) for key, value in tensors.items()}
    return found
