"""A step of an optimizer as a function (θ, s, g) → (θ, s) that autograd can differentiate.

Elementwise methods (AdamW, and torch.optim.SGD) work on one vector per list of parameters. Methods
of blocks run the engine's own code on copies of the state. Statistics, roots and eigenbases are
those of the run and count as constants: derivatives go through the moments and the weights only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from isokron.optim.adamw_lists import FusedList
from isokron.optim.blocks import Batch, BatchStep, Copies, writable, write_back
from isokron.optim.flat_buffer import FlatList
from isokron.optim.moments import BASES, SECOND_MOMENTS, SYMMETRIC, heavy_ball_
from isokron.optim.natural_gradient import NaturalGradient
from isokron.optim.preconditioned import Preconditioned
from isokron.optim.settings import decay_rate, learning_rate, note_peak_, refresh_delay

# √v has no derivative at v = 0. This floor is far below ε², so that steps stay as they are.
FLOOR = 1e-30
CONSTANT = SYMMETRIC | BASES

Group = dict[str, Any]
State = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """Parameters that are stepped together: a batch of blocks, or a list for an elementwise method.

    group: number of the parameter group; names: of the parameters of a list.
    """

    group: int
    names: tuple[str, ...] = ()
    batch: Batch | None = None


class FunctionalStep:
    """Steps of an optimizer as a function; the optimizer and its parameters are not stepped.

    Works for torch.optim.SGD and for AdamW, Muon, SOAP, Shampoo, Katie, SignDescent and the
    engine itself (momentum), with float32 or float64 parameters, in one process.

    Args:
        optimizer: a new optimizer; its learning rates are multiplied by the `scale` of a step.
        params: its parameters by name.
    """

    def __init__(self, optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.names = {param: name for name, param in params.items()}
        for group in self.groups:
            _check(optimizer, group)
        for param in (param for group in self.groups for param in group["params"]):
            if param.dtype not in (torch.float32, torch.float64) or param not in self.names:
                raise ValueError(
                    f"{type(optimizer).__name__}: unrolling needs float32 or float64 parameters of "
                    f"the model, got {param.dtype} of shape {tuple(param.shape)}"
                )
        self.parts = self._parts()
        views = (view for part in self.parts if part.batch is not None for view in part.batch.views)
        self.cut = {self.names[view.param] for view in views}

    def _parts(self) -> list[Part]:
        if not isinstance(self.optimizer, Preconditioned):
            groups = enumerate(self.groups)
            return [Part(i, tuple(self.names[p] for p in group["params"])) for i, group in groups]
        parts = []
        for i, layout in enumerate(self.optimizer._current_layouts()):
            parts += [Part(i, batch=batch) for batch in layout.batches]
            for listed in layout.adamw:
                assert isinstance(listed, FusedList | FlatList)
                parts.append(Part(i, tuple(self.names[param] for param in listed.params)))
        return parts

    def initial_state(self, params: Mapping[str, Tensor]) -> list[State]:
        """The state before the first step, one dict per part."""
        states: list[State] = []
        for part in self.parts:
            if part.batch is not None:
                state = {key: value.clone() for key, value in part.batch.state.items()}
                states.append({**state, "refreshed": part.batch.refreshed.clone()})
            else:
                zeros = torch.zeros_like(_joined(params, part.names))
                keys = ("momentum",) if isinstance(self.optimizer, SGD) else ("mean", "square")
                states.append({key: zeros.clone() for key in keys})
        return states

    def __call__(
        self,
        params: Mapping[str, Tensor],
        states: Sequence[State],
        grads: Mapping[str, Tensor],
        count: int,
        scale: float = 1.0,
    ) -> tuple[dict[str, Tensor], list[State]]:
        """Parameters and state after step number `count` (from 1) at `scale` times the lr."""
        # blocks are written in place, into copies
        stepped = {n: value.clone() if n in self.cut else value for n, value in params.items()}
        new_states = []
        for part, state in zip(self.parts, states, strict=True):
            lr = self.groups[part.group]["lr"]
            group = {**self.groups[part.group], "lr": scale * lr, "initial_lr": lr}
            if part.batch is not None:
                new_states.append(
                    self._step_blocks(part.batch, stepped, state, grads, group, count)
                )
                continue
            update = sgd_update if isinstance(self.optimizer, SGD) else adamw_update
            vectors = _joined(params, part.names), _joined(grads, part.names)
            weights, new_state = update(*vectors, state, group, count)
            sizes = [params[name].numel() for name in part.names]
            for name, values in zip(part.names, weights.split(sizes), strict=True):
                stepped[name] = values.view(params[name].shape)
            new_states.append(new_state)
        return stepped, new_states

    def _step_blocks(
        self,
        batch: Batch,
        stepped: dict[str, Tensor],
        state: State,
        grads: Mapping[str, Tensor],
        group: Group,
        count: int,
    ) -> State:
        """One step of a batch of blocks, as `Preconditioned._step_blocks` takes it.

        Writes the weights into `stepped` and returns the new state.
        """
        optimizer, names = self.optimizer, self.names
        assert isinstance(optimizer, Preconditioned)
        note_peak_(group)
        work = {
            key: value.clamp_min(FLOOR) if key in SECOND_MOMENTS else value.clone()
            for key, value in state.items()
        }
        batch.step.fill_(count)
        batch.refreshed.copy_(work.pop("refreshed"))
        shape = (len(batch.rows), *[1] * len(batch.shape))
        work["step"] = torch.full(shape, float(count), dtype=batch.dtype, device=batch.device)

        def rows(tensors: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([view.read(tensors[names[view.param]]) for view in batch.views])

        grad = -rows(grads) if group["maximize"] else rows(grads)
        if group["weight_decay"] and group["decay"] == "l2":
            grad = grad + group["weight_decay"] * rows(stepped)
        if group["route"] != "spectral":
            optimizer.observe(grad, work, group)
        # what is refreshed from constants is constant
        work |= {k: v.detach() for k, v in work.items() if k.split(".")[0] in CONSTANT}
        step = BatchStep(batch, batch.views, batch.all_rows, None, work, grad)
        step.direction = optimizer._direction(step, group)
        if "velocity" in work:
            step.direction = heavy_ball_(work["velocity"], step.direction, group)
        if optimizer._refresher.unread:
            optimizer._settle()
            optimizer._refresher.raise_error()
        lr, decay = learning_rate(group), decay_rate(group)
        copies: Copies = {}
        for view, direction in zip(step.views, step.directions_of_views(), strict=True):
            block = view.split(writable(stepped[names[view.param]], view.block, copies))
            block.mul_(1 - lr * decay).sub_(direction, alpha=lr)
        write_back(copies)
        return {**{key: work[key] for key in batch.state}, "refreshed": batch.refreshed.clone()}


def adamw_update(
    weights: Tensor, grad: Tensor, state: State, group: Group, count: int
) -> tuple[Tensor, State]:
    """AdamW on vectors, by the formula of `isokron.optim.adamw_lists`."""
    note_peak_(group)
    beta1, beta2 = group["betas"]
    if group["maximize"]:
        grad = -grad
    if group["weight_decay"] and group["decay"] == "l2":
        grad = grad + group["weight_decay"] * weights
    mean = torch.lerp(state["mean"], grad, 1 - beta1)
    square = beta2 * state["square"].clamp_min(FLOOR) + (1 - beta2) * grad * grad
    deviation = square.sqrt() / (1 - beta2**count) ** 0.5 + group["eps"]
    lr = learning_rate(group)
    weights = (1 - lr * decay_rate(group)) * weights - lr / (1 - beta1**count) * mean / deviation
    return weights, {"mean": mean, "square": square}


def sgd_update(
    weights: Tensor, grad: Tensor, state: State, group: Group, count: int
) -> tuple[Tensor, State]:
    """torch.optim.SGD on vectors: B ← μB + (1−τ)G, W ← W − lr·B, or W − lr(G + μB)."""
    grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * weights
    rate = group["momentum"]
    # torch starts with B = G, whatever the dampening τ is
    new = grad if count == 1 else (1 - group["dampening"]) * grad
    momentum = rate * state["momentum"] + new if rate else state["momentum"]
    direction = grad + rate * momentum if group["nesterov"] else momentum if rate else grad
    return weights - group["lr"] * direction, {"momentum": momentum}


def _joined(tensors: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def _check(optimizer: Optimizer, group: Mapping[str, Any]) -> None:
    """Refuse optimizers and settings whose steps are not differentiated."""
    who = type(optimizer).__name__
    if isinstance(optimizer, SGD):
        return
    if not isinstance(optimizer, Preconditioned) or isinstance(optimizer, NaturalGradient):
        raise ValueError(
            f"unrolling takes torch.optim.SGD or isokron's AdamW, Muon, SOAP, Shampoo and Katie, "
            f"got {who}; write your own step for isokron.attribution.unroll.TrainingRun"
        )
    if type(optimizer).directions is not Preconditioned.directions or optimizer._is_shared():
        why = "shares state among ranks" if optimizer._is_shared() else "has coupled blocks"
        raise ValueError(f"{who} cannot be unrolled: it {why}; use AdamW, Muon or SOAP")
    wanted = {"average": None, "amsgrad": False, "moments": None, "rounding": "nearest"}
    wanted |= {"factor_dtype": None}
    for key, value in wanted.items():
        if group.get(key, value) != value:
            raise ValueError(f"{who}: unrolling needs {key}={value!r}, got {group[key]!r}")
    if refresh_delay(group):
        refresh = group["refresh"]
        raise ValueError(
            f"{who}: unrolling needs refresh='together' or 'staggered', got {refresh!r}"
        )
