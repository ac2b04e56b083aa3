"""Quad and Skew: whitened momentum; the Kronecker factors are learned with matrix products only.

P μ̂ = QlᵀQl · μ̂ · QrᵀQr, without inverse, root or eigendecomposition. Blocks: [B, m, n] or [B, n].
The factor Q of a side is dense, [B, n, n], or diagonal, [B, n]; L, [B], bounds the steps it takes.
docs/white_kron.md describes the algorithm; isokron.jax has the same.
"""

import random
from collections.abc import Mapping, MutableMapping, Sequence
from functools import lru_cache, partial
from itertools import product
from math import inf, prod
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from isokron.block_layout import Block, cut_blocks
from isokron.linalg import along, multiply, norm_bound, surely_all, symmetric_product
from isokron.operators import Dense, Diagonal, Factor, Kron
from isokron.optim.blocks import Batch, BatchRow, BatchStep
from isokron.optim.layout import Traits
from isokron.optim.moments import counted, first_moment_, norms, sums_by_owner
from isokron.optim.param_groups import gets_method
from isokron.optim.preconditioned import Params, Preconditioned
from isokron.optim.settings import (
    Average,
    Graft,
    Nonfinite,
    Refresh,
    check_choices,
    check_number,
    checked_keywords,
    is_whole,
    keywords_of,
    require,
)
from isokron.white_kron import (
    ADAM_DIVISOR,
    BALANCE_EVERY,
    BLOCK_SIZE,
    CLIP,
    GOLDEN,
    GROWTH_LIMIT,
    MAX_SIZE_DENSE,
    PROBES,
    SQUARE_LIMIT,
    dense_sides,
    factor_rate,
    matrix_shape,
    spans,
    uniform,
)

CHOICES = {
    "lr_style": ("adam", None),
    "apply": ("new", "old"),
    "dtype": (None, torch.bfloat16, torch.float32, torch.float64),
}
GROUP_SETTINGS: dict[str, Any] = {
    "normalize": False,
    "max_size_dense": MAX_SIZE_DENSE,
    "preconditioner_lr_floor": 0.4,
    "preconditioner_init_scale": 1.0,
    "noise_scale": 1e-9,
    "damping": 0.0,
    "seed": None,
}
NORM_EPS = 1e-6

# a factor in the state → its version when it was multiplied out, and QᵀQ
Products = MutableMapping[Tensor, tuple[int, Factor]]


class WhiteKron(Preconditioned):
    """The engine of Quad and Skew, which differ in how a factor moves."""

    symmetric: ClassVar[bool]  # whether Q stays symmetric
    pace: ClassVar[float]  # of the factors: z = pace·plr/L

    @checked_keywords(GROUP_SETTINGS)
    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        lr_style: Literal["adam"] | None = "adam",
        block_size: int = BLOCK_SIZE,
        preconditioner_lr: float = 0.7,
        every: int = 1,
        refresh: Refresh = "together",
        apply: Literal["new", "old"] = "new",
        dtype: torch.dtype | None = None,
        graft: Graft = None,
        average: Average = None,
        nonfinite: Nonfinite = "raise",
    ) -> None:
        self._products: Products = WeakTensorKeyDictionary()
        settings = keywords_of(locals())
        traits = Traits(
            cut=white_kron_blocks,
            takes=takes_vectors,
            check=partial(check_white_kron, type(self).__name__),
            operator=("factor", "lipschitz"),
            moment=debiased_moment,
            work="products",
        )
        super().__init__(params, lr, traits, **settings, vectors=True, **GROUP_SETTINGS)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._products = WeakTensorKeyDictionary()
        super().__setstate__(state)

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
        """Update μ; state["corrected"] is μ̂, the bias-corrected moment, during this step."""
        corrected = grad
        if "moment" in state:
            mean = state["moment"].to(grad.dtype)
            step = counted(state, group)
            beta = group["momentum"]
            ratio = beta if group["nesterov"] else 1.0
            corrected = first_moment_(mean, grad, beta, ratio, step)
            state["moment"].copy_(mean)  # after the bias correction, which must not see rounding
        state["corrected"] = state["mean"] = corrected

    def directions(self, steps: Sequence[BatchStep], group: Mapping[str, Any]) -> None:
        """Normalise moments by layer before factors see them; clip directions by layer after."""
        if group["route"] == "spectral":
            super().directions(steps, group)
            return
        if group["normalize"]:
            moments = [step.state["corrected"] for step in steps]
            unit = normalized_by_layer(moments, [step.batch_rows for step in steps])
            for step, normalized in zip(steps, unit, strict=True):
                step.state["corrected"] = normalized
        if group["apply"] == "old":
            for step in steps:
                step.state["white"] = self._white(step.state, group)
        super().directions(steps, group)
        if steps and not group["graft"]:
            clip_by_layer_(steps, CLIP, ADAM_DIVISOR if group["lr_style"] == "adam" else 1.0)

    def refresh(
        self, state: dict[str, Tensor], group: Mapping[str, Any], first: bool
    ) -> dict[str, Tensor]:
        """One step of the factors on W = P(μ̂ + noise); those of blocks of zeros stay."""
        factors, step = _factors(state), state["step"].flatten()
        if group["apply"] == "old":
            white = state["white"]
        else:
            white = whiten(self._noisy(state["corrected"], step, group), factors, self.symmetric)
        largest = torch.linalg.vector_norm(white.flatten(1), inf, dim=1)
        nonzero = largest > 0
        usual = surely_all(nonzero & (largest <= SQUARE_LIMIT))
        if not usual:
            # so that the squares of finite numbers are finite
            white = white * _per_block(SQUARE_LIMIT / largest.clamp_min(SQUARE_LIMIT), white)
        white = white if white.ndim == 3 else white.unsqueeze(2)
        scale = largest.clamp_max(SQUARE_LIMIT).square()
        limit = growth_limit(group["apply"], group["noise_scale"], len(factors))
        fresh = {}
        for i, factor in enumerate(factors):
            bound, side = state[f"lipschitz.{i}"], white.mT if i else white
            moved, grown = self._learn_side(factor, bound, side, scale, step, group)
            moved.clamp_(-limit, limit)
            if not usual:
                observed = nonzero.view(-1, *[1] * (factor.ndim - 1))
                moved = torch.where(observed, moved, factor)
                grown = torch.where(nonzero, grown, bound)
            fresh[f"factor.{i}"], fresh[f"lipschitz.{i}"] = moved, grown
        # balance at every hundredth step, or at the first refresh after it
        last = torch.where(step <= group["warmup"], step - 1, step - group["every"]).clamp_min(0)
        due = (step / BALANCE_EVERY).floor() > (last / BALANCE_EVERY).floor()
        balance_([fresh[f"factor.{i}"] for i in range(len(factors))], due)
        return fresh

    def _learn_side(
        self,
        factor: Tensor,
        bound: Tensor,
        white: Tensor,
        scale: Tensor,
        step: Tensor,
        group: Mapping[str, Any],
    ) -> tuple[Tensor, Tensor]:
        """Q and L of a side of size n after one step on W, [B, n, k], with max|W|² = scale.

        T = WWᵀ, or its diagonal for a diagonal Q; ℓ = ‖T‖₂ + k; L ← max(0.95L + 0.05ℓ, ℓ).
        Quad: Q ← MQM. Skew: Q ← MQ, and a Procrustes step. M = I − z(T − kI).
        """
        columns = white.size(2)
        start, floor = group["preconditioner_lr"], group["preconditioner_lr_floor"]
        plr = factor_rate(step, start, floor, maximum=torch.clamp_min)
        if factor.ndim == 2:
            squares = white.square().sum(2)
            steepness = squares.amax(1) + columns
        else:
            gram = symmetric_product(white, white.mT)
            probes = _numbers((PROBES, white.size(1)), white, step, group["seed"])
            steepness = norm_bound(gram, scale, probes) + columns
        grown = torch.maximum(0.95 * bound + 0.05 * steepness, steepness)
        rate = self.pace * plr / grown
        if factor.ndim == 2:
            diagonal = 1 - rate[:, None] * (squares - columns)  # of M
            return factor * (diagonal.square() if self.symmetric else diagonal), grown
        pull = Pull(white, gram, rate)
        if self.symmetric:
            return pull.around(factor), grown
        return procrustes(pull.before(factor), probes), grown

    def direction(self, grad: Tensor, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        return state["white"] if group["apply"] == "old" else self._white(state, group)

    def _white(self, state: dict[str, Tensor], group: Mapping[str, Any]) -> Tensor:
        """P μ̂"""
        # factors that are used for several steps are multiplied out, which halves the products
        factors = _factors(state)
        if group["every"] == 1:
            return whiten(state["corrected"], factors, self.symmetric)
        operators: list[Factor] = []
        for i, factor in enumerate(factors):
            stored = state[f"factor.{i}"]
            version, operator = self._products.get(stored, (-1, None))
            if operator is None or version != stored._version:
                diagonal = factor.ndim == 2
                operator = Diagonal(factor.square()) if diagonal else Dense(factor.mT @ factor)
                self._products[stored] = stored._version, operator
            operators.append(operator)
        return Kron(tuple(operators)).apply(state["corrected"])

    def _noisy(self, corrected: Tensor, step: Tensor, group: Mapping[str, Any]) -> Tensor:
        """μ̂ + noise, so that directions without gradients have a scale too."""
        if group["noise_scale"] == 0 and group["damping"] == 0:
            return corrected
        size = group["noise_scale"]
        if group["damping"]:
            largest = corrected.abs().flatten(1).amax(1)
            size = size + group["damping"] * largest.view(-1, *[1] * (corrected.ndim - 1))
        return corrected + size * _numbers(corrected.shape[1:], corrected, step, group["seed"])


class Quad(WhiteKron):
    """P μ̂ with P = Ql² ⊗ Qr², and Q ← MQM, M = I − plr/2L·(T − t₂I): see docs/white_kron.md.

    Args:
        params: Parameters, named parameters or parameter groups.
        lr: Learning rate.
        momentum: Decay rate of μ, which is whitened.
        betas: Of AdamW, which steps what the method does not take, and of grafting.
        eps: Of AdamW and of grafting.
        weight_decay: λ of W ← W − lr·λW.
        lr_style: "adam" divides the direction by 5, so that learning rates of AdamW suit.
        block_size: Matrices are cut into blocks of this size.
        preconditioner_lr: plr at first; it falls to `preconditioner_lr_floor`.
        every: Steps between updates of the factors; with `warmup` in the group, after so many.
        refresh: "together", "staggered", or a delay in steps; see docs/shampoo.md.
        apply: The direction of the "new" factors, or more cheaply of the "old" ones.
        dtype: Of momentum and factors; torch.bfloat16 halves them.
        graft: Take the step length of "sgd", "adagrad", "rmsprop" or "adam", without a clip.
        average: "schedule_free" or "primal" averages of the iterates; see docs/engine.md.
        nonfinite: On a gradient that is not finite: "raise", "skip" the step or "ignore" it.

    Group settings besides the shared ones of docs/engine.md:
        vectors: True here; False leaves vectors and scalars to AdamW.
        normalize: Whiten μ̂/(‖μ̂‖ + 10⁻⁶) by layer.
        max_size_dense: Longer dimensions are not cut, and have a diagonal factor.
        preconditioner_lr_floor: Least plr.
        preconditioner_init_scale: Q = scale · I at first.
        noise_scale: Of the noise that the factors see.
        damping: The same, relative to max|μ̂| of a block.
        seed: None: fixed probes and noise; a number draws them.
    """

    symmetric = True
    pace = 0.5  # M acts from both sides


class Skew(WhiteKron):
    """P μ̂ with P = QlᵀQl ⊗ QrᵀQr, and Q ← MQ, M = I − plr/L·(T − t₂I), then a Procrustes step.

    It takes the arguments of Quad, and its factors move faster: see docs/white_kron.md.
    """

    symmetric = False
    pace = 1.0


def check_white_kron(optimizer: str, group: Mapping[str, Any]) -> None:
    check_choices(optimizer, group, CHOICES)
    for name in ("preconditioner_lr", "preconditioner_init_scale"):
        check_number(optimizer, name, group[name], "above 0")
    for name in ("preconditioner_lr_floor", "noise_scale", "damping"):
        check_number(optimizer, name, group[name])
    for name in ("block_size", "max_size_dense"):
        require(is_whole(group[name], 1), optimizer, group, name, "a whole number of at least 1")
    seed, scale = group["seed"], group["preconditioner_init_scale"]
    rule = "None or a whole number of at least 0"
    require(seed is None or is_whole(seed), optimizer, group, "seed", rule)
    require(group["preconditioner_lr"] <= 1, optimizer, group, "preconditioner_lr", "at most 1")
    require(isinstance(group["normalize"], bool), optimizer, group, "normalize", "True or False")
    rule = f"at most {GROWTH_LIMIT:g}"
    require(scale <= GROWTH_LIMIT, optimizer, group, "preconditioner_init_scale", rule)
    rule = "None here; `block_size` cuts matrices"
    require(group["max_dim"] is None, optimizer, group, "max_dim", rule)
    rule = "0 with apply='old', which adds no noise"
    require(group["damping"] == 0 or group["apply"] == "new", optimizer, group, "damping", rule)


def takes_vectors(param: Tensor, group: Mapping[str, Any]) -> bool:
    """Vectors and scalars too, which have a diagonal factor."""
    scalar = group["vectors"] and group["route"] in ("auto", "method") and param.numel() <= 1
    return scalar or gets_method(param, group)


def white_kron_blocks(shape: Sequence[int], group: Mapping[str, Any]) -> list[Block]:
    """Vectors are one block; matrices are cut along the sides that have dense factors."""
    layers = cut_blocks(
        shape, stacked=group["stacked"], split=group["split"], split_dim=group["split_dim"]
    )
    blocks = []
    for layer in layers:
        merged = matrix_shape(layer.merged)
        sides = [
            [
                slice(start + i * width, start + (i + 1) * width)
                for start, width, count in spans(size, group["block_size"] if dense else size)
                for i in range(count)
            ]
            for size, dense in _sides(merged, group)
        ]
        blocks += [Block(layer.part, layer.index, merged, cut) for cut in product(*sides)]
    return blocks


class Pull:
    """M = I − z(T − t₂I), T = WWᵀ, which moves a factor. W: [B, n, k], z: [B]"""

    def __init__(self, white: Tensor, gram: Tensor, rate: Tensor) -> None:
        self.rate = rate[:, None, None]
        self.grow = 1 + self.rate * white.size(2)  # M X = (1 + z t₂) X − z T X
        # multiplying by a thin W twice is cheaper than by T once
        self.thin = white if 2 * white.size(2) < white.size(1) else None
        if self.thin is None:
            self.matrix = gram.mul_(-self.rate)
            self.matrix.diagonal(dim1=1, dim2=2).add_(self.grow[:, 0])

    def before(self, factor: Tensor) -> Tensor:
        """M Q"""
        if self.thin is None:
            return self.matrix @ factor
        return (self.grow * factor).baddbmm_(self.rate * self.thin, self.thin.mT @ factor, alpha=-1)

    def around(self, factor: Tensor) -> Tensor:
        """M Q M, symmetric as Q is."""
        left = self.before(factor)
        if self.thin is None:
            both = left @ self.matrix
        else:
            scaled = self.rate * (left @ self.thin)
            both = (self.grow * left).baddbmm_(scaled, self.thin.mT, alpha=-1)
        return both.lerp(both.mT, 0.5)


def whiten(blocks: Tensor, factors: Sequence[Tensor], symmetric: bool) -> Tensor:
    """P G. A symmetric Q is its own transpose."""
    for dim, factor in enumerate(factors, -len(factors)):
        if factor.ndim == 2:
            blocks = blocks * along(factor.square(), blocks, dim)
        else:
            transposed = factor if symmetric else factor.mT
            blocks = multiply(multiply(blocks, factor, dim), transposed, dim)
    return blocks


def procrustes(factor: Tensor, probes: Tensor) -> Tensor:
    """Q ← Q + a(RQ + ½aRRQ), R = (Qᵀ − Q)/max|Qᵀ − Q|: turns Q toward symmetric positive.

    a = (1/8)/‖R‖, and no more than −tr(RQ)/tr(RRQ), where the trace of Q is largest. [B, n, n]
    """

    def dot(x: Tensor, y: Tensor) -> Tensor:
        """Σ XᵢⱼYᵢⱼ. [B]"""
        return torch.linalg.vecdot(x.flatten(1), y.flatten(1))

    # −R instead of R: its rows are in memory as those of Q are
    skew = factor - factor.mT
    top = skew.amax((1, 2))  # of its absolute values too
    skew /= torch.where(top > 0, top, 1)[:, None, None]
    turned = skew @ factor
    # tr(RX) = Σ Rᵢⱼ Xⱼᵢ and Rᵢⱼ = −Rⱼᵢ
    slope, bend = dot(skew, factor), -dot(skew, turned)
    norm = norm_bound(skew, torch.ones_like(top), -probes)  # the bound of R from the probes
    angle = 1 / (8 * torch.where(norm > 0, norm, 1))
    angle = torch.where(bend < 0, angle.minimum(slope / torch.where(bend < 0, -bend, 1)), angle)
    angle = torch.where(slope > 0, angle, 0)[:, None, None]
    return factor.addcmul(turned, -angle).addcmul_(skew @ turned, angle.square() / 2)


def balance_(factors: Sequence[Tensor], due: Tensor) -> None:
    """Scale Ql and Qr, where it is due, so that max|Ql| = max|Qr|; P stays. due: [B]"""
    if len(factors) != 2 or surely_all(~due):
        return
    left, right = (factor.abs().flatten(1).amax(1) for factor in factors)
    scale = torch.where(due & (left > 0) & (right > 0), right / left, 1).sqrt()
    for factor, by in zip(factors, (scale, 1 / scale), strict=True):
        factor.mul_(_per_block(by, factor))


def growth_limit(apply: str, noise_scale: float, sides: int) -> float:
    """Largest entry of Q. With "old" factors, which see no noise, it keeps P ≤ 1/noise_scale."""
    if apply == "new" or noise_scale == 0:
        return GROWTH_LIMIT
    return min(GROWTH_LIMIT, noise_scale ** (-0.5 / sides))


def fixed_numbers(shape: Sequence[int], like: Tensor) -> Tensor:
    """white_kron.uniform of white_kron.scramble: mean square 1, of full rank. [m, n] or [n]"""
    small = prod(shape) <= BLOCK_SIZE**2  # else kept numbers would take much memory
    numbers = _fixed_numbers if small else _fixed_numbers.__wrapped__
    return numbers(tuple(shape), like.dtype, like.device)


@lru_cache(64)
def _fixed_numbers(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """(i+1)(j+1)(i+j+1) = (i+1)²(j+1) + (i+1)·j(j+1), in integers of 32 bits that wrap around."""

    def low(numbers: Tensor) -> Tensor:
        """The lower 32 bits, as a signed integer."""
        return (((numbers + 2**31) & (2**32 - 1)) - 2**31).to(torch.int32)

    column = torch.arange(shape[-1], device=device)
    rows = shape[0] if len(shape) == 2 else 1
    row = torch.arange(1, rows + 1, device=device)[:, None]
    bits = low(row * row) * low((column + 1) * GOLDEN)
    bits += low(row) * low(column * (column + 1) * GOLDEN)
    unsigned = bits.to(dtype)
    return uniform(torch.where(bits < 0, unsigned + 2.0**32, unsigned)).view(*shape)


def _numbers(shape: Sequence[int], like: Tensor, step: Tensor, seed: int | None) -> Tensor:
    """Numbers of mean square 1: fixed, or normals by seed and step. [*shape] or [B, *shape]"""
    if seed is None:
        return fixed_numbers(shape, like)
    steps, which = step.long().unique(return_inverse=True)
    drawn = []
    for number in steps.tolist():
        # a generator uses only 32 bits of its seed
        mixed = random.Random(f"{seed} {number}").getrandbits(32)
        generator = torch.Generator().manual_seed(mixed)
        drawn.append(torch.randn(*shape, generator=generator, dtype=like.dtype))
    return torch.stack(drawn).to(like.device)[which]


def _sides(shape: Sequence[int], group: Mapping[str, Any]) -> list[tuple[int, bool]]:
    """The size of each side, and whether its factor is dense."""
    return list(zip(shape, dense_sides(tuple(shape), group["max_size_dense"]), strict=True))


def _factors(state: Mapping[str, Tensor]) -> list[Tensor]:
    """The factors in the dtype of the computation, which is that of L."""
    count = sum(key.startswith("factor.") for key in state)
    return [state[f"factor.{i}"].to(state[f"lipschitz.{i}"].dtype) for i in range(count)]


def _per_block(values: Tensor, blocks: Tensor) -> Tensor:
    """One number per block, shaped to broadcast. [B] → [B, 1, ...]"""
    return values.to(blocks).view(-1, *[1] * (blocks.ndim - 1))


# Norms of layers. A layer is a parameter, or one matrix of a stacked or split parameter; its blocks
# may be in several batches.


def debiased_moment(grad: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> Tensor:
    """μ̂ before it is normalised, which is what grafting takes. [B, ...]"""
    return state["mean"]


def clip_by_layer_(steps: Sequence[BatchStep], most: float, divisor: float) -> None:
    """P ← P·min(1, most/rms(P))/divisor, the root mean square being that of a layer."""
    directions = [step.direction for step in steps]
    layers = _layers([step.batch_rows for step in steps])
    energies = [norms(x).square() for x in directions]
    sizes = [torch.full_like(e, x[0].numel()) for e, x in zip(energies, directions, strict=True)]
    mean = sums_by_owner(energies, layers) / sums_by_owner(sizes, layers)
    scale = most / mean.sqrt().clamp_min(most) / divisor
    for direction, by in zip(directions, scale.split([len(x) for x in directions]), strict=True):
        direction.mul_(_per_block(by, direction))


def normalized_by_layer(
    blocks: Sequence[Tensor], rows: Sequence[Sequence[BatchRow]]
) -> list[Tensor]:
    """G/(‖G‖ + 10⁻⁶), the norm being that of a layer. blocks: one [B, ...] a batch"""
    if not blocks:
        return []
    lengths = sums_by_owner([norms(x).square() for x in blocks], _layers(rows)).sqrt() + NORM_EPS
    parts = lengths.split([len(x) for x in blocks])
    return [x / _per_block(part, x) for x, part in zip(blocks, parts, strict=True)]


def _layers(rows: Sequence[Sequence[BatchRow]]) -> list[int]:
    """The number of every row's layer, over all batches."""
    numbers: dict[tuple[Tensor, int], int] = {}
    keys = [(row.param, row.block.part) for batch in rows for row in batch]
    return [numbers.setdefault(key, len(numbers)) for key in keys]
