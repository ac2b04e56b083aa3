"""The state dict of one process, put together from what ranks have of it."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from isokron.distributed import Place, Ranks, Sharing, agreed_trouble, is_sharded, local
from isokron.distributed.complete import Divided, Name, Part, completed
from isokron.distributed.partial import rank_in
from isokron.distributed.places import rows_of
from isokron.optim.groups import param_name
from isokron.optim.plan import Plan

Groups = Sequence[Mapping[str, Any]]
WHAT = "optimizer.full_state_dict()"
Entries = dict[int, dict[str, Any]]  # of the state, by the parameter's number


def full_state(
    who: str,
    entries: Mapping[int, Mapping[str, Any]],
    groups: Groups,
    plans: Sequence[Plan],
    sharing: Sharing,
    to_rank: int | None,
) -> Entries:
    """Entries of plain whole tensors, on all ranks or on `to_rank`; others have what they had."""
    params = [param for group in groups for param in group["params"]]
    places = [sharing.place(param) for param in params]
    state: Entries = {number: dict(entry) for number, entry in sorted(entries.items())}
    parties: dict[Ranks, dict[Name, Divided]] = {}
    for place in places:
        if place is not None:
            parties.setdefault(place.ranks, {})
    for number, entry in state.items():
        place = places[number]
        if place is not None:
            parties[place.ranks] |= _shards(number, params[number], place, entry)
    _add_blocks(parties, {param: i for i, param in enumerate(params)}, state, plans)
    for ranks, divided in parties.items():
        shared = [place is not None and place.ranks == ranks for place in places]
        facts = _facts(who, state, groups, shared, divided)
        told = [("to_rank", to_rank), *facts]
        agreed_trouble(sharing.control(tuple(sorted(ranks.members))), told, None, what=WHAT)
    for ranks, divided in parties.items():
        to = None if to_rank is None else rank_in(ranks, to_rank)
        if to_rank is None or to is not None:
            ordered = {name: divided[name] for name in sorted(divided)}
            for (number, key), tensor in completed(ranks, ordered, to).items():
                state[number][key] = tensor
    return state


def _shards(number: int, param: Tensor, place: Place, entry: dict[str, Any]) -> dict[Name, Divided]:
    """The DTensors of an entry; those of which everybody has the whole become plain ones."""
    shards = {}
    for key, value in entry.items():
        if not is_sharded(value):
            continue
        here, rank = local(value), place.ranks.rank
        if is_sharded(param) and place.dim is None:
            entry[key] = here
            continue
        dim, bounds = rows_of(value.shape, place)
        parts = [
            Part(r, dim, bounds[r], bounds[r + 1], here if r == rank else None)
            for r in range(place.ranks.size)
        ]
        shards[number, key] = Divided(tuple(value.shape), value.dtype, value.device, parts)
    return shards


def _add_blocks(
    parties: dict[Ranks, dict[Name, Divided]],
    numbers: Mapping[Tensor, int],
    entries: Entries,
    plans: Sequence[Plan],
) -> None:
    """The state of blocks, which their owners have."""
    for batch in (batch for plan in plans for batch in plan.batches):
        if batch.shared is None:
            continue
        travel, stored = batch.shared.travel, batch.stored()
        for row, owner in zip(batch.shared.rows, travel.owners, strict=True):
            number = numbers[row.param]
            for key, values in stored.items():
                name, shape = f"{key}.{row.number}", tuple(values.shape[1:])
                here = entries[number].get(name)
                parts = [Part(owner, 0, 0, shape[0] if shape else 1, here)]
                parties[travel.ranks][number, name] = Divided(
                    shape, values.dtype, values.device, parts
                )


def _facts(
    who: str,
    entries: Entries,
    groups: Groups,
    shared: Sequence[bool],
    divided: Mapping[Name, Divided],
) -> list[tuple[str, str]]:
    """What ranks must agree in: of every parameter they share, the steps, keys and owners."""
    keys: dict[int, dict[str, str]] = {
        number: dict.fromkeys(entry, "") for number, entry in entries.items()
    }
    for (number, key), tensor in divided.items():
        keys[number][key] = f"@{tensor.parts[0].rank}" if len(tensor.parts) == 1 else "@all"
    names = [param_name(group, i) for group in groups for i in range(len(group["params"]))]
    facts = []
    for number in (number for number, here in enumerate(shared) if here):
        told = " ".join(key + owner for key, owner in sorted(keys.get(number, {}).items()))
        steps = f"{float(entries[number]['step']):g} steps, " if number in entries else "no state"
        facts.append((f"{who}: state of parameter {names[number]}", steps + told))
    return facts
