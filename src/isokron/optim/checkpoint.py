"""Optimizer state that is saved and loaded to the bit, with errors that name the key."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from isokron.distributed import (
    BlockExchange,
    StepAgreement,
    dtensor_from,
    fill_,
    gather_rows,
    is_sharded,
    local,
    shard_rows,
    unshard_rows,
)
from isokron.linalg.device_transfer import as_tensor
from isokron.optim.blocks import Batch
from isokron.optim.checkpoint_header import checked, not_finite
from isokron.optim.layout import GroupLayout
from isokron.optim.refresh import is_under_way
from isokron.optim.settings import param_name, plain

Entry = Mapping[str, Any]


class _Shielded:
    """A value hidden from torch's loader, which would cast it to its parameter's dtype."""

    def __init__(self, value: Any) -> None:
        self.value = value


@contextmanager
def loading(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While torch loads a state dict: values are not cast, and an error leaves all as it was."""
    # registered last, so that it runs after the user's own hooks
    handle = optimizer.register_load_state_dict_pre_hook(_shield)
    before = {"state": optimizer.state, "param_groups": optimizer.param_groups}
    try:
        yield
    except Exception:
        optimizer.__setstate__(before)
        raise
    finally:
        handle.remove()


def _shield(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A load_state_dict pre-hook: check all, and hide values from casting."""
    current = optimizer.param_groups
    state_dict = checked(type(optimizer).__name__, state_dict, current, set(optimizer.defaults))
    problem = not_finite(type(optimizer).__name__, state_dict, current)
    values = [value for entry in state_dict["state"].values() for value in entry.values()]
    if any(isinstance(value, Tensor) and is_sharded(value) for value in values):
        problem = optimizer._agreement.reported(current, problem, "load_state_dict()")
    if problem:
        raise ValueError(problem)
    state = {
        param: {key: _Shielded(value) for key, value in entry.items()}
        for param, entry in state_dict["state"].items()
    }
    merged = [
        {
            **{k: v for k, v in old.items() if k != "params"},
            **{k: saved_value(v) for k, v in new.items()},
        }
        for old, new in zip(current, state_dict["param_groups"], strict=True)
    ]
    return {**state_dict, "state": state, "param_groups": merged}


def unshield(state: MutableMapping[Tensor, Any]) -> bool:
    """Undo `_shield`; whether there was anything to undo."""
    shielded = [
        param
        for param, entry in state.items()
        if any(isinstance(v, _Shielded) for v in entry.values())
    ]
    for param in shielded:
        state[param] = {key: value.value for key, value in state[param].items()}
    return bool(shielded)


def with_own_bytes(value: Any) -> Any:
    """A view as a tensor whose storage is its part of the memory: torch.save writes storages."""
    if not isinstance(value, Tensor) or is_sharded(value):
        return value
    if value.untyped_storage().nbytes() == value.nbytes:
        return value
    return from_dlpack(value) if value.device.type in ("cpu", "cuda") else value.clone()


def asks_for_state(groups: Sequence[Entry], agreement: StepAgreement | None = None) -> bool:
    """Whether torch.distributed.checkpoint calls step() only to make the state to load into.

    It does so before any other step, with lr and all gradients 0.
    """
    grads = [p.grad for group in groups for p in group["params"] if p.grad is not None]
    if not grads or any(float(group["lr"]) for group in groups):
        return False
    moving = "a gradient is not 0" if any(bool(local(grad).any()) for grad in grads) else None
    if agreement is not None:  # ranks whose part of the gradients is 0 must not return alone
        moving = agreement.reported(groups, moving, "the first optimizer.step()")
    return moving is None


def saved_groups(groups: Sequence[Entry]) -> list[dict[str, Any]]:
    """Groups without NumPy's numbers, which torch.load refuses, and with dtypes by name.

    torch's full state dicts may hold no dtypes.
    """
    return [
        {
            k: str(v) if isinstance(v, torch.dtype) else v if isinstance(v, list) else plain(v)
            for k, v in group.items()
        }
        for group in groups
    ]


def saved_value(value: Any) -> Any:
    """Undo `saved_groups` for one value."""
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def state_facts(
    optimizer: str,
    groups: Sequence[Entry],
    layouts: Sequence[GroupLayout],
    members_of: Callable[[Tensor], tuple[int, ...]],
) -> dict[tuple[int, ...], list[tuple[str, Any]]]:
    """What ranks must agree on: the steps and keys of every shared parameter, by its ranks."""
    facts: dict[tuple[int, ...], list[tuple[str, Any]]] = {}
    for group, layout in zip(groups, layouts, strict=True):
        entries, shared = layout.entries(), _shared_keys(layout)
        for i, param in enumerate(group["params"]):
            members = members_of(param)
            if members and param in entries:
                keys = sorted(entries[param].keys() | shared.get(param, set()))
                about = f"{float(entries[param]['step']):g} steps, {' '.join(keys)}"
                name = f"{optimizer}: state of parameter {param_name(group, i)}"
                facts.setdefault(members, []).append((name, about))
    return facts


Entries = Iterator[tuple[Tensor, str, Tensor]]  # parameter, key, value


def sharded_entries(layouts: Sequence[GroupLayout]) -> Entries:
    """The state of blocks that ranks share, as DTensors over them. All ranks must call it."""
    for exchange, key, stacked in _shared_state(layouts):
        chunks = shard_rows(exchange, stacked)
        for param, number, chunk in zip(exchange.params, exchange.numbers, chunks, strict=True):
            shape = stacked.shape[1:]
            value = dtensor_from(chunk, shape, exchange.ranks) if shape else chunk
            yield param, f"{key}.{number}", value


def full_entries(layouts: Sequence[GroupLayout]) -> Entries:
    """The state of blocks that ranks share, whole. All ranks must call it."""
    for exchange, key, stacked in _shared_state(layouts):
        for i, row in gather_rows(exchange, stacked):
            yield exchange.params[i], f"{key}.{exchange.numbers[i]}", row


def _shared_state(
    layouts: Sequence[GroupLayout],
) -> Iterator[tuple[BlockExchange, str, Tensor]]:
    for batch in (batch for layout in layouts for batch in layout.batches):
        if batch.exchange is not None and batch.exchange.ranks.size > 1:
            for key, stacked in batch.saved().items():
                yield batch.exchange, key, stacked


def load_(
    layout: GroupLayout, state: Mapping[Tensor, Any], group: Mapping[str, Any], optimizer: str
) -> None:
    """Copy saved state into the tensors of a layout; what has none starts afresh."""
    _check_shapes(layout, state, group, optimizer)
    for batch in layout.batches:
        _load_batch_(batch, state, group)
    for params in layout.adamw:
        params.adopt_([_state_of(state.get(param), adamw=True) for param in params.params])
    if layout.averages is not None:
        for i, param in enumerate(layout.averages.params):
            saved = state.get(param) or {}
            for key, value in layout.averages.entry(i).items():
                if key in saved:
                    fill_(value, as_tensor(saved[key]))


def _load_batch_(batch: Batch, state: Mapping[Tensor, Any], group: Mapping[str, Any]) -> None:
    exchange = batch.exchange
    saved = [_state_of(state.get(row.param), adamw=False) for row in batch.rows]
    for i, entry in enumerate(saved):
        batch.step[i] = float(entry.get("step", 0))
    if exchange is not None:
        shared = [_state_of(state.get(param), adamw=False) for param in exchange.params]
        exchange.step[:] = torch.tensor(
            [float(entry.get("step", 0)) for entry in shared], dtype=torch.float64, device="cpu"
        )
    for key, stacked in batch.saved().items():
        if exchange is not None:
            keys = [f"{key}.{number}" for number in exchange.numbers]
            values = [entry.get(k) for entry, k in zip(shared, keys, strict=True)]
            if all(value is not None and is_sharded(value) for value in values):
                chunks = [local(value) for value in values if value is not None]
                stacked.copy_(unshard_rows(exchange, chunks, stacked))
                continue
        for i, (row, entry) in enumerate(zip(batch.rows, saved, strict=True)):
            if f"{key}.{row.number}" in entry:
                stacked[i].copy_(entry[f"{key}.{row.number}"])
    if batch.coming and any(key.startswith("next.") for entry in saved for key in entry):
        turns = batch.turns(batch.all_rows).tolist()
        batch.pending = {i for i, turn in enumerate(turns) if is_under_way(int(turn), group)}


def _state_of(saved: Entry | None, adamw: bool) -> Entry:
    """A parameter's state; {} where it was stepped by AdamW and now is not, or the reverse."""
    saved = saved or {}
    differs = any("." in key for key in saved) if adamw else "exp_avg" in saved
    return {} if differs else saved


def _check_shapes(
    layout: GroupLayout, state: Mapping[Tensor, Any], group: Mapping[str, Any], optimizer: str
) -> None:
    for _, where, saved, expected in _pairs(layout, state, group, optimizer):
        for key in saved.keys() & expected.keys():
            value = as_tensor(saved[key])
            shape = value.shape
            differs = value.is_floating_point() != expected[key].is_floating_point()
            if differs and key != "step":  # which others save as a whole number
                raise ValueError(
                    f"{where}: {key!r} is in {value.dtype} in the state and in "
                    f"{expected[key].dtype} here; set moments before the first step"
                )
            if shape != expected[key].shape:
                raise ValueError(
                    f"{where}: {key!r} has shape {tuple(shape)} in the state and "
                    f"{tuple(expected[key].shape)} here; the blocks or the model differ"
                )


def check_keys(
    layout: GroupLayout, state: Mapping[Tensor, Any], group: Mapping[str, Any], optimizer: str
) -> None:
    """Refuse a checkpoint of another optimizer, other settings or other blocks."""
    shared = _shared_keys(layout)
    for param, where, saved, expected in _pairs(layout, state, group, optimizer):
        differing = set(saved) ^ set(expected)
        differing -= shared.get(param, set()) - set(expected)
        # only of delayed refreshes, which may be switched on or off
        differing = {key for key in differing if not key.startswith("next.")}
        if differing:
            key = min(differing)
            problem = "missing from the checkpoint" if key in expected else "not part of this state"
            raise ValueError(
                f"{where}: {key!r} is {problem} (the checkpoint has {', '.join(sorted(saved))}; "
                f"this optimizer {', '.join(sorted(expected))}); load it into the optimizer, "
                "settings and model that saved it (a saved convolution with a factor for every "
                "dimension needs order=None)"
            )


def _shared_keys(layout: GroupLayout) -> dict[Tensor, set[str]]:
    """By parameter, the keys of all its blocks, whichever rank owns them."""
    keys: dict[Tensor, set[str]] = {}
    for batch in layout.batches:
        if batch.exchange is not None:
            for param, number in zip(batch.exchange.params, batch.exchange.numbers, strict=True):
                keys.setdefault(param, set()).update(f"{key}.{number}" for key in batch.saved())
    return keys


def _pairs(
    layout: GroupLayout, state: Mapping[Tensor, Any], group: Mapping[str, Any], optimizer: str
) -> Iterator[tuple[Tensor, str, Entry, Mapping[str, Tensor]]]:
    """For every parameter with state: itself, its name in errors, its saved and expected state."""
    expected = layout.entries()
    for i, param in enumerate(group["params"]):
        if state.get(param) and param in expected:
            where = f"{optimizer}: state of parameter {param_name(group, i)}"
            yield param, where, state[param], expected[param]
