"""AdamW on the pieces of parameters that this rank owns, and their state under any format."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from isokron.distributed.buckets import Bucket, Piece, cuts
from isokron.distributed.complete import Divided, Part, completed
from isokron.distributed.ranks import Ranks
from isokron.optim.fused import FusedList
from isokron.optim.groups import state_dtype

Entry = Mapping[str, Any]


def moments(group: Mapping[str, Any]) -> list[str]:
    """What AdamW keeps for every element, by torch.optim.AdamW's names."""
    return ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * group["amsgrad"]


class Owned:
    """The pieces of one bucket that this rank steps with the settings of one group."""

    def __init__(
        self, pieces: Sequence[Piece], flats: Mapping[int, Tensor], group: Mapping[str, Any]
    ) -> None:
        self.pieces = list(pieces)
        self.views = [flats[p.parameter][p.offset : p.offset + p.length] for p in pieces]
        dtype = state_dtype(self.views[0], group)
        self.fused = FusedList(self.views, dtype, group["amsgrad"])

    def entry(self, at: int) -> dict[str, Tensor]:
        """The state of one piece: {"exp_avg.2": …} for the parameter's piece number 2."""
        number = self.pieces[at].number
        return {f"{key}.{number}": values[at] for key, values in self.fused.state.items()}

    def step_(self, section: Tensor, present: set[int], group: Mapping[str, Any]) -> None:
        """One step along the averaged gradients in this rank's section of the bucket."""
        for piece, view in zip(self.pieces, self.views, strict=True):
            if piece.parameter in present:
                view.grad = section[piece.start : piece.start + piece.length].to(view.dtype)
        self.fused.step_(group)
        for view in self.views:
            view.grad = None


def piece_state(
    where: str, saved: Entry, pieces: Sequence[Piece], param: Tensor, group: Mapping[str, Any]
) -> dict[int, dict[str, Any]]:
    """What a saved entry of a parameter says of these pieces of it, by the pieces' numbers.

    The entry may be whole, as AdamW's, or in pieces, these and perhaps others. Any other is
    refused.
    """
    if not saved:
        return {piece.number: {} for piece in pieces}
    names = moments(group)
    whole = "exp_avg" in saved
    shapes: dict[str, tuple[int, ...]]
    shapes = {f"{name}.{k}": (n,) for name in names for k, (_, n) in enumerate(cuts(param.numel()))}
    needed = {f"{name}.{piece.number}" for name in names for piece in pieces}
    if whole:
        shapes = dict.fromkeys(names, tuple(param.shape))
        needed = set(names)
    differing = sorted((needed | {"step"}) - set(saved)) + sorted(
        saved.keys() - shapes.keys() - {"step"}
    )
    if differing:
        key = differing[0]
        lies = "missing from the checkpoint" if key not in saved else "not part of this state"
        raise ValueError(
            f"{where}: {key!r} is {lies} (the checkpoint has {', '.join(sorted(saved))}); load "
            "what isokron.distributed.full_state_dict or torch.distributed.checkpoint saved of "
            "this model and these settings"
        )
    for key in saved.keys() & shapes.keys():
        if (shape := tuple(saved[key].shape)) != shapes[key]:
            raise ValueError(
                f"{where}: {key!r} has shape {shape} in the checkpoint and {shapes[key]} here; the "
                "models differ"
            )
    found: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        cut, entry = slice(piece.offset, piece.offset + piece.length), {"step": saved["step"]}
        for name in names:
            if whole:
                entry[name] = saved[name].reshape(-1)[cut]
            else:
                entry[name] = saved[f"{name}.{piece.number}"]
        found[piece.number] = entry
    return found


def whole_state(
    ranks: Ranks,
    buckets: Sequence[Bucket],
    owned: Mapping[int, Sequence[Owned]],
    params: Sequence[Tensor],
    groups: Sequence[Mapping[str, Any]],
    to: int | None,
    bucket_bytes: int,
) -> dict[int, dict[str, Tensor]]:
    """The moments of whole parameters, from the owners of their pieces to all ranks or to one.

    `groups`: of every parameter.
    """
    here = {
        (piece.parameter, name, piece.number): values[at]
        for several in owned.values()
        for each in several
        for name, values in each.fused.state.items()
        for at, piece in enumerate(each.pieces)
    }
    parts: dict[tuple[int, str], list[Part]] = {}
    for piece in sorted((p for b in buckets for p in b.pieces), key=lambda p: p.parameter):
        at = (0, piece.offset, piece.offset + piece.length)
        for name in moments(groups[piece.parameter]):
            mine = here.get((piece.parameter, name, piece.number))
            parts.setdefault((piece.parameter, name), []).append(Part(piece.owner, *at, mine))
    divided = {
        (i, name): Divided(
            (params[i].numel(),), state_dtype(params[i], groups[i]), params[i].device, each
        )
        for (i, name), each in parts.items()
    }
    full: dict[int, dict[str, Tensor]] = {}
    for (i, name), flat in completed(ranks, divided, to, bucket_bytes).items():
        alone = flat is parts[i, name][0].here  # the state itself
        full.setdefault(i, {})[name] = (flat.clone() if alone else flat).view(params[i].shape)
    return full
