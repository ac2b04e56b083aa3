"""The state of NaturalGradient: that of layers under their first parameters, and of AdamW."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from isokron.curvature.running_fisher import RunningFisher
from isokron.optim.adamw import AdamW
from isokron.optim.natural_step import LayerParams


def layer_entries(
    fishers: Mapping[str, RunningFisher], params: LayerParams
) -> dict[Tensor, dict[str, Any]]:
    """What `optimizer.state` shows of layers. Those that share a parameter have a prefix each."""
    entries: dict[Tensor, dict[str, Any]] = {}
    for name, fisher in fishers.items():
        first, prefix = _home(fisher, params[name])
        state = {prefix + key: value for key, value in fisher.state.items()}
        if state:
            entries.setdefault(first, {}).update(state)
            # torch.distributed.checkpoint expects an entry of every parameter
            for param in params[name].values():
                entries.setdefault(param, {"step": fisher.state["step"]})
    return entries


def load_layers_(
    fishers: Mapping[str, RunningFisher],
    params: LayerParams,
    state: Mapping[Any, Any],
    keys: Mapping[Tensor, Any],
) -> None:
    """Take over the entries of a checkpoint; keys: of parameters in it."""
    for name, fisher in fishers.items():
        first, prefix = _home(fisher, params[name])
        entry = state.get(keys[first], {})
        part = {k.removeprefix(prefix): v for k, v in entry.items() if k.startswith(prefix)}
        fisher.load_(part, first)


def add_adamw_(packed: dict[str, Any], adamw: AdamW) -> None:
    """Put AdamW's state into a state dict, whose second group is AdamW's."""
    part, group = adamw.state_dict(), packed["param_groups"][1]
    numbers = group["params"]
    packed["state"] |= {numbers[i]: entry for i, entry in part["state"].items()}
    packed["param_groups"][1] = {**part["param_groups"][0], "params": numbers}


def load_adamw_(adamw: AdamW, state: Mapping[Any, Any], group: Mapping[str, Any]) -> None:
    """Take it out again."""
    numbers = dict(enumerate(group["params"]))
    entries = {i: state[key] for i, key in numbers.items() if key in state}
    adamw.load_state_dict({"state": entries, "param_groups": [{**group, "params": list(numbers)}]})


def _home(fisher: RunningFisher, params: Mapping[str, Tensor]) -> tuple[Tensor, str]:
    """The parameter under which a layer's state is shown, and the prefix of its keys."""
    shared = bool(fisher.layer.layout.rows)
    name = fisher.layer.name.rpartition(".")[2]
    return next(iter(params.values())), f"{name}." if shared else ""
