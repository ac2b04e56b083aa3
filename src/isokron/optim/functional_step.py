"""A step of an optimizer as a function (θ, s, g) → (θ, s) that autograd can differentiate.

Elementwise methods (AdamW, and torch.optim.SGD) work on vectors of many parameters. Methods
of blocks run the engine's own code on copies of the state. SOAP's eigenbases are those of the run
and count as constants: they have no derivative where eigenvalues are equal.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from isokron.linalg.precision import full_precision
from isokron.optim.blocks import Batch, BatchStep, Copies, writable, write_back
from isokron.optim.moments import BASES, SECOND_MOMENTS, heavy_ball_
from isokron.optim.natural_gradient import NaturalGradient
from isokron.optim.preconditioned import Preconditioned
from isokron.optim.settings import (
    added_decay,
    decay_rate,
    learning_rate,
    note_peak_,
    refresh_delay,
)

# √v has no derivative at v = 0. This floor is far below ε², so that steps stay as they are.
FLOOR = 1e-30

Group = dict[str, Any]
State = dict[str, Tensor]


class Blocks(NamedTuple):
    """A batch of blocks of a parameter group."""

    batch: Batch
    group: int


class Vector(NamedTuple):
    """Parameters that an elementwise method steps as one vector.

    Their groups may differ in learning rate and in decoupled weight decay, lr and decay: [n].
    """

    names: list[str]
    group: int
    lr: Tensor
    decay: Tensor


class FunctionalStep:
    """Steps of an optimizer as a function; the optimizer and its parameters are not stepped.

    Works for torch.optim.SGD and for AdamW, Muon, SOAP, Shampoo, Katie and the engine itself
    (momentum), with float32 or float64 parameters, in one process.

    Args:
        optimizer: a new optimizer; its learning rates are multiplied by the `scale` of a step.
        params: its parameters by name.
    """

    def __init__(self, optimizer: Optimizer, params: Mapping[str, Tensor]) -> None:
        self.optimizer, self.groups = optimizer, optimizer.param_groups
        self.names = {param: name for name, param in params.items()}
        for group in self.groups:
            _check(optimizer, group)
        stepped = [p for group in self.groups for p in group["params"] if p.requires_grad]
        for param in stepped:
            if param.dtype not in (torch.float32, torch.float64) or param not in self.names:
                raise ValueError(
                    f"{type(optimizer).__name__}: unrolling needs float32 or float64 parameters of "
                    f"the model, got {param.dtype} of shape {tuple(param.shape)}"
                )
        self.parts = self._parts()
        views = [
            view for part in self.parts if isinstance(part, Blocks) for view in part.batch.views
        ]
        self.cut = {self.names[view.param] for view in views}

    def _parts(self) -> list[Blocks | Vector]:
        blocks: list[Blocks] = []
        if isinstance(self.optimizer, Preconditioned):
            layouts = self.optimizer._current_layouts()
            blocks = [
                Blocks(batch, i) for i, layout in enumerate(layouts) for batch in layout.batches
            ]
            elementwise = [[p for x in layout.adamw for p in x.params] for layout in layouts]
        else:
            elementwise = [[p for p in g["params"] if p.requires_grad] for g in self.groups]
        # one vector for all groups that can share it: many small ones take longer
        shared: dict[Any, list[tuple[int, Tensor]]] = {}
        for i, params in enumerate(elementwise):
            for param in params:
                key = (*_shared(self.groups[i]), param.dtype, param.device)
                shared.setdefault(key, []).append((i, param))
        vectors = []
        for pairs in shared.values():
            rates = [self._rates(self.groups[i], param) for i, param in pairs]
            lr, decay = (torch.cat(rows) for rows in zip(*rates, strict=True))
            vectors.append(Vector([self.names[p] for _, p in pairs], pairs[0][0], lr, decay))
        return [*blocks, *vectors]

    def _rates(self, group: Group, param: Tensor) -> tuple[Tensor, Tensor]:
        """Learning rate and decoupled decay at the peak, for every entry of a parameter."""
        lr, decay = group["lr"], 0.0
        if isinstance(self.optimizer, Preconditioned):
            lr = learning_rate(group)
            decay = 0.0 if group["decay"] == "l2" else group["weight_decay"]
        vector = torch.ones_like(param.detach()).flatten()
        return lr * vector, decay * vector

    def initial_state(self, params: Mapping[str, Tensor]) -> list[State]:
        """The state before the first step, one dict per part."""
        states: list[State] = []
        for part in self.parts:
            if isinstance(part, Blocks):
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
        with full_precision():
            return self._step(params, states, grads, count, scale)

    def _step(
        self,
        params: Mapping[str, Tensor],
        states: Sequence[State],
        grads: Mapping[str, Tensor],
        count: int,
        scale: float,
    ) -> tuple[dict[str, Tensor], list[State]]:
        # blocks are written in place, into copies
        stepped = {n: value.clone() if n in self.cut else value for n, value in params.items()}
        groups: list[Group] = []
        for group in self.groups:
            groups.append({**group, "lr": scale * group["lr"], "initial_lr": group["lr"]})
            if isinstance(self.optimizer, Preconditioned):
                note_peak_(groups[-1])
        new_states = []
        for part, state in zip(self.parts, states, strict=True):
            if isinstance(part, Blocks):
                group = groups[part.group]
                new_states.append(
                    self._step_blocks(part.batch, stepped, state, grads, group, count)
                )
                continue
            weights, grad = _joined(params, part.names), _joined(grads, part.names)
            direct = sgd_direction if isinstance(self.optimizer, SGD) else adamw_direction
            group = groups[part.group]
            direction, new_state = direct(weights, grad, state, group, count)
            lr, decay = scale * part.lr, part.decay
            if group.get("decay") == "corrected":
                decay = decay * (group["lr"] / group["peak_lr"])
            weights = (1 - lr * decay) * weights - lr * direction
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
        if added := added_decay(group, "l2"):
            grad = grad + added * rows(stepped)
        kinds = {key: key.split(".")[0] for key in work}
        fixed = bool(BASES & set(kinds.values()))  # bases, and the statistics they are made from
        if fixed:
            work |= {key: work[key].detach() for key in work if kinds[key] in {"cov", *BASES}}
        if group["route"] != "spectral":
            with torch.set_grad_enabled(torch.is_grad_enabled() and not fixed):
                optimizer.observe(grad, work, group)
        # KL-Shampoo has observed with the roots that a refresh writes over
        work |= {key: work[key].clone() for key in kinds if kinds[key] == "root"}
        step = BatchStep(batch, batch.views, batch.all_rows, None, work, grad)
        step.direction = optimizer._direction(step, group)
        if added := added_decay(group, "momentum"):
            step.direction = step.direction + added * rows(stepped)
        if "velocity" in work:
            step.direction = heavy_ball_(work["velocity"], step.direction, group)
        if optimizer._refresher.unread:
            optimizer._settle()
            optimizer._refresher.raise_error()
        lr, decay = learning_rate(group), decay_rate(group, "momentum")
        copies: Copies = {}
        for view, direction in zip(step.views, step.directions_of_views(), strict=True):
            block = view.split(writable(stepped[names[view.param]], view.block, copies))
            block.mul_(1 - lr * decay).sub_(direction, alpha=lr)
        write_back(copies)
        return {**{key: work[key] for key in batch.state}, "refreshed": batch.refreshed.clone()}


def adamw_direction(
    weights: Tensor, grad: Tensor, state: State, group: Group, count: int
) -> tuple[Tensor, State]:
    """AdamW on vectors, by the formula of `isokron.optim.adamw_lists`."""
    beta1, beta2 = group["betas"]
    grad = -grad if group["maximize"] else grad
    if group["weight_decay"] and group["decay"] == "l2":
        grad = grad + group["weight_decay"] * weights
    mean = torch.lerp(state["mean"], grad, 1 - beta1)
    square = beta2 * state["square"].clamp_min(FLOOR) + (1 - beta2) * grad.square()
    deviation = (square / (1 - beta2**count)).sqrt() + group["eps"]
    return mean / (1 - beta1**count) / deviation, {"mean": mean, "square": square}


def sgd_direction(
    weights: Tensor, grad: Tensor, state: State, group: Group, count: int
) -> tuple[Tensor, State]:
    """torch.optim.SGD on vectors: B ← μB + (1−τ)G; B, or G + μB with Nesterov."""
    grad = (-grad if group["maximize"] else grad) + group["weight_decay"] * weights
    rate = group["momentum"]
    # torch starts with B = G, whatever the dampening τ is
    new = grad if count == 1 else (1 - group["dampening"]) * grad
    momentum = rate * state["momentum"] + new if rate else state["momentum"]
    direction = grad + rate * momentum if group["nesterov"] else momentum if rate else grad
    return direction, {"momentum": momentum}


def _shared(group: Group) -> tuple[Any, ...]:
    """All that a vector's direction depends on, as the settings that its groups must share."""
    if "dampening" in group:
        names = ("momentum", "dampening", "nesterov", "maximize", "weight_decay")
        return tuple(group[name] for name in names)
    added = group["weight_decay"] if group["decay"] == "l2" else 0.0
    return (tuple(group["betas"]), group["eps"], group["maximize"], group["decay"], added)


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
    if group.get("coefficients", "") is None:  # the method would differ where a graph is kept
        raise ValueError(f"{who}: unrolling needs coefficients, such as 'classic', got None")
    if refresh_delay(group):
        refresh = group["refresh"]
        raise ValueError(
            f"{who}: unrolling needs refresh='together' or 'staggered', got {refresh!r}"
        )
