"""What Quad and Skew share: momentum made white by factors that learn from it as they go."""

import random
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from itertools import product
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from isokron.operators import Dense, Diagonal, Factor, Kron
from isokron.optim.blocks import Batch, Block, Observed, cut_blocks
from isokron.optim.clipping import clip_by_layer_, normalized_by_layer
from isokron.optim.engine import Params, Preconditioned
from isokron.optim.groups import check_number
from isokron.optim.moments import counted, first_moment_
from isokron.optim.settings import Shared
from isokron.optim.whitening import (
    Pull,
    Sides,
    balance_,
    fixed_numbers,
    growth_limit,
    learned,
    whiten,
)
from isokron.optim.writing import Update
from isokron.white_kron import (
    ADAM_DIVISOR,
    BALANCE_EVERY,
    BLOCK_SIZE,
    CLIP,
    GROWTH_LIMIT,
    MAX_SIZE_DENSE,
    PROBES,
    dense_sides,
    factor_rate,
    matrix_shape,
    spans,
)

DTYPES = (None, torch.bfloat16, torch.float32, torch.float64)
CHOICES = {"lr_style": ("adam", None), "apply": ("new", "old"), "dtype": DTYPES}


# Q → its version when it was multiplied out, and QᵀQ
Products = MutableMapping[Tensor, tuple[int, Factor]]


class WhiteKron(Preconditioned):
    """P μ̂ with P = QlᵀQl ⊗ QrᵀQr, each layer's root mean square clipped to 1.1.

    The arguments, and what a step computes, are those of isokron.jax: docs/white_kron.md.
    """

    keeps_moment = True
    settles = True
    refresh_work = "products"
    operator = ("factor", "lipschitz")
    shaping = ("dtype", "block_size", "max_size_dense")
    symmetric: ClassVar[bool]  # whether Q stays so
    pace: ClassVar[float]  # of the factors: z = pace·plr/L

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-2,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        lr_style: str | None = "adam",
        normalize: bool = False,
        block_size: int = BLOCK_SIZE,
        max_size_dense: int = MAX_SIZE_DENSE,
        preconditioner_lr: float = 0.7,
        preconditioner_lr_floor: float = 0.4,
        preconditioner_init_scale: float = 1.0,
        noise_scale: float = 1e-9,
        damping: float = 0.0,
        every: int = 1,
        apply: str = "new",
        dtype: torch.dtype | None = None,
        seed: int | None = None,
        graft: str | None = None,
        betas: tuple[float, float] = (0.9, 0.99),
        **shared: Unpack[Shared],
    ) -> None:
        self._products: Products = WeakTensorKeyDictionary()
        super().__init__(
            params,
            lr,
            momentum=momentum,
            weight_decay=weight_decay,
            lr_style=lr_style,
            normalize=normalize,
            block_size=block_size,
            max_size_dense=max_size_dense,
            preconditioner_lr=preconditioner_lr,
            preconditioner_lr_floor=preconditioner_lr_floor,
            preconditioner_init_scale=preconditioner_init_scale,
            noise_scale=noise_scale,
            damping=damping,
            every=every,
            apply=apply,
            dtype=dtype,
            seed=seed,
            graft=graft,
            betas=betas,
            **{"vectors": True, **shared},
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._products = WeakTensorKeyDictionary()
        super().__setstate__(state)

    def move_dense(self, factor: Tensor, pull: Pull, probes: Tensor) -> Tensor:
        """A dense factor after one step. [B, n, n]"""
        raise NotImplementedError

    def move_diagonal(self, factor: Tensor, pull: Tensor) -> Tensor:
        """A diagonal one. [B, n]"""
        raise NotImplementedError

    def check(self, group: Mapping[str, Any]) -> None:
        who = type(self).__name__

        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ValueError(f"{who}: {name} must be {rule}, got {name}={group[name]!r}")

        for name, choices in CHOICES.items():
            need(group[name] in choices, name, f"one of {choices}")
        for name in ("preconditioner_lr", "preconditioner_init_scale"):
            check_number(who, name, group[name], "above 0")
        for name in ("preconditioner_lr_floor", "noise_scale", "damping"):
            check_number(who, name, group[name])
        for name in ("block_size", "max_size_dense"):
            whole = isinstance(group[name], int) and not isinstance(group[name], bool)
            need(whole and group[name] >= 1, name, "a whole number of at least 1")
        seed = group["seed"]
        whole = isinstance(seed, int) and not isinstance(seed, bool)
        need(seed is None or (whole and seed >= 0), "seed", "None or a whole number of at least 0")
        need(isinstance(group["normalize"], bool), "normalize", "True or False")
        need(group["preconditioner_lr"] <= 1, "preconditioner_lr", "at most 1")
        scale = "preconditioner_init_scale"
        need(group[scale] <= GROWTH_LIMIT, scale, f"at most {GROWTH_LIMIT:g}")
        need(group["max_dim"] is None, "max_dim", "None here; `block_size` cuts matrices")
        still = group["damping"] == 0 or group["apply"] == "new"
        need(still, "damping", "0 with apply='old', which adds no noise")

    def takes(self, param: Tensor, group: Mapping[str, Any]) -> bool:
        """Vectors and scalars too, which have a diagonal factor."""
        scalar = group["vectors"] and group["route"] in ("auto", "method") and param.numel() <= 1
        return scalar or super().takes(param, group)

    def cut(self, shape: Sequence[int], group: Mapping[str, Any]) -> list[Block]:
        """Vectors whole; matrices in blocks, but for sides too large to have a dense factor."""
        if group["route"] == "spectral":
            return super().cut(shape, group)
        wholes = cut_blocks(
            shape, stacked=group["stacked"], split=group["split"], split_dim=group["split_dim"]
        )
        blocks = []
        for whole in wholes:
            merged = matrix_shape(whole.merged)
            sides = [
                _slices(size, group["block_size"] if dense else size)
                for size, dense in _sides(merged, group)
            ]
            blocks += [Block(whole.part, whole.index, merged, cut) for cut in product(*sides)]
        return blocks

    def init_state(self, batch: Batch, group: Mapping[str, Any]) -> dict[str, Tensor]:
        dtype = group["dtype"] or batch.dtype
        state = {"moment": batch.zeros().to(dtype)} if group["momentum"] else {}
        for i, (size, dense) in enumerate(_sides(batch.shape, group)):
            eyes = batch.eyes(size, dtype)
            start = eyes if dense else eyes.diagonal(dim1=1, dim2=2).clone()
            state[f"factor.{i}"] = start * group["preconditioner_init_scale"]
            state[f"lipschitz.{i}"] = eyes.new_zeros(len(eyes), dtype=batch.dtype)
        return state

    def observe(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> None:
        """What is to be whitened goes along to `refresh` and `direction` as "seen"."""
        seen = grad
        if "moment" in state:
            mean = state["moment"].to(grad.dtype)
            step = counted(state, group)
            seen = first_moment_(mean, grad, group["momentum"], group["nesterov"], step)
            state["moment"].copy_(mean)  # the bias is taken off what is not rounded yet
        state["seen"] = seen

    def observed(self, batches: Iterable[Observed], group: Mapping[str, Any]) -> Iterable[Observed]:
        if group["normalize"]:
            batches = list(batches)
            seen = [each for each in batches if "seen" in each.state]
            blocks = [each.state["seen"] for each in seen]
            unit = normalized_by_layer(blocks, [each.batch.rows_of(each.tiles) for each in seen])
            for each, normalized in zip(seen, unit, strict=True):
                each.state["seen"] = normalized
        for each in batches:
            if group["apply"] == "old" and "seen" in each.state:
                each.state["white"] = self._white(each.state, group)
            yield each

    def refresh(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> dict[str, Tensor]:
        sides, seen = _worked(state), state["seen"]
        step = state["step"].flatten()
        limit = growth_limit(group["apply"], group["noise_scale"], len(sides.factors))
        if group["apply"] == "old":
            white = state["white"]
        else:
            white = whiten(self._noisy(seen, step, group), sides.factors, self.symmetric)
        start, floor = group["preconditioner_lr"], group["preconditioner_lr_floor"]
        plr = factor_rate(step, start, floor, maximum=torch.clamp_min)

        def probes(size: int) -> Tensor:
            return _numbers((PROBES, size), seen, step, group["seed"])

        sides = learned(self, white, sides, plr, probes, limit)
        # at every hundredth step, or the first refresh after it
        last = torch.where(step <= group["warmup"], step - 1, step - group["every"]).clamp_min(0)
        balance_(sides.factors, (step / BALANCE_EVERY).floor() > (last / BALANCE_EVERY).floor())
        return {
            **{f"factor.{i}": each for i, each in enumerate(sides.factors)},
            **{f"lipschitz.{i}": each for i, each in enumerate(sides.lipschitz)},
        }

    def direction(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        return state["white"] if group["apply"] == "old" else self._white(state, group)

    def _white(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """P μ̂. Factors that stay for some steps are multiplied out, which halves the products."""
        sides = _worked(state)
        if group["every"] == 1:
            return whiten(state["seen"], sides.factors, self.symmetric)
        return Kron(self._operators(state, sides.factors)).apply(state["seen"])

    def _operators(self, state: dict[str, Tensor], worked: list[Tensor]) -> tuple[Factor, ...]:
        """QᵀQ of every side, kept for as long as Q is what it was."""
        operators: list[Factor] = []
        for i, factor in enumerate(worked):
            stored = state[f"factor.{i}"]
            version, operator = self._products.get(stored, (-1, None))
            if operator is None or version != stored._version:
                diagonal = factor.ndim == 2
                operator = Diagonal(factor.square()) if diagonal else Dense(factor.mT @ factor)
                self._products[stored] = stored._version, operator
            operators.append(operator)
        return tuple(operators)

    def settle_(self, updates: Sequence[Update], group: Mapping[str, Any]) -> None:
        if group["route"] != "spectral":
            clip_by_layer_(updates, CLIP, ADAM_DIVISOR if group["lr_style"] == "adam" else 1.0)

    def _noisy(self, seen: Tensor, step: Tensor, group: Mapping[str, Any]) -> Tensor:
        """G + noise, so that what is never observed has a scale too."""
        if group["noise_scale"] == 0 and group["damping"] == 0:
            return seen
        size = group["noise_scale"]
        if group["damping"]:
            largest = seen.abs().flatten(1).amax(1)
            size = size + group["damping"] * largest.view(-1, *[1] * (seen.ndim - 1))
        return seen + size * _numbers(seen.shape[1:], seen, step, group["seed"])


def _sides(shape: Sequence[int], group: Mapping[str, Any]) -> list[tuple[int, bool]]:
    """Each side's size, and whether its factor is dense."""
    return list(zip(shape, dense_sides(tuple(shape), group["max_size_dense"]), strict=True))


def _slices(size: int, width: int) -> list[slice]:
    return [
        slice(start + i * each, start + (i + 1) * each)
        for start, each, many in spans(size, width)
        for i in range(many)
    ]


def _worked(state: Mapping[str, Tensor]) -> Sides:
    """In the dtype that is worked in, which is that of L."""
    count = sum(key.startswith("factor.") for key in state)
    lipschitz = [state[f"lipschitz.{i}"] for i in range(count)]
    return Sides([state[f"factor.{i}"].to(lipschitz[i].dtype) for i in range(count)], lipschitz)


def _numbers(shape: Sequence[int], like: Tensor, step: Tensor, seed: int | None) -> Tensor:
    """Of mean square 1: fixed ones, or normals of the seed and of each row's step. [..., *shape]"""
    if seed is None:
        return fixed_numbers(shape, like)
    steps, which = step.long().unique(return_inverse=True)
    drawn = []
    for number in steps.tolist():
        # a generator takes 32 bits of its seed and no more
        mixed = random.Random(f"{seed} {number}").getrandbits(32)
        generator = torch.Generator().manual_seed(mixed)
        drawn.append(torch.randn(*shape, generator=generator, dtype=like.dtype))
    return torch.stack(drawn).to(like.device)[which]
