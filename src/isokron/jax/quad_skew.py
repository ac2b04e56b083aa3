"""Quad and Skew: whitened momentum, with Kronecker factors learned by matrix products only.

P G = QlᵀQl · G · QrᵀQr; what a step computes is written down in docs/white_kron.md. In the state of
a batch "factor.i" is Q of side i, a matrix or its diagonal, and "lipschitz.i" is L, which bounds
its steps. Padding is zero in blocks and factors, and stays so.
"""

import inspect
from collections.abc import Callable
from functools import partial, reduce, wraps
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax

from isokron import white_kron
from isokron.block_layout import Part
from isokron.jax.blocks import Arrays, BlockBatch, Settings, Split, TreeLayout
from isokron.jax.learning_rate import with_learning_rate
from isokron.jax.linalg import across, along, nonzero, norm_bound
from isokron.jax.settings import Static, WhiteKronSettings, is_zero, settle
from isokron.jax.transform import Gradients, Method, State, scale_by_preconditioned
from isokron.white_kron import PROBES, SQUARE_LIMIT, factor_rate

# the names in eformer's White-Kron and in other PSGD libraries
ALIASES = {
    "b1": "momentum",
    "scanned_layers": "stacked",
    "max_size_triangular": "max_size_dense",
    "key": "seed",
}


Transformation = Callable[..., optax.GradientTransformationExtraArgs]


def _published(function: Transformation, like: Transformation | None = None) -> Transformation:
    """Take settings by position in eformer's order, and under its names; each of them once.

    `like`: has the signature, and the list of arguments, of a function that takes keywords only.
    """
    parameters = dict(inspect.signature(like or function).parameters)
    places = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if "learning_rate" in places:
        places[3:3] = ["weight_decay", "weight_decay_mask"]

    @wraps(function)
    def called(*args: Any, **keywords: Any) -> optax.GradientTransformationExtraArgs:
        name = function.__name__
        if len(args) > len(places):
            raise TypeError(f"{name} takes {len(places)} arguments by position, got {len(args)}")
        settings = dict(zip(places, args, strict=False))
        for given, value in keywords.items():
            setting = ALIASES.get(given, given)
            if setting in settings:
                also = [alias for alias, ours in ALIASES.items() if ours == setting]
                names = "".join(f" or {alias!r}" for alias in also)
                raise TypeError(f"{name} got {setting!r}{names} twice; give it once")
            settings[setting] = value
        return function(**settings)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    ordered = [parameters.pop(name).replace(kind=kind) for name in places]
    signature = inspect.Signature([*ordered, *parameters.values()])
    called.__signature__ = signature  # type: ignore[attr-defined]
    if like is not None:
        called.__doc__ = f"{function.__doc__}\n    Args:{str(like.__doc__).split('Args:')[1]}"
    return called


@_published
def scale_by_quad(
    lr_style: str | None = "adam",
    momentum: float = 0.95,
    normalize_grads: bool = False,
    max_size_dense: int | Static = Static(16384),
    preconditioner_lr: float = 0.7,
    preconditioner_init_scale: float = 1.0,
    dtype: Any = None,
    stacked: Any = Static(0),
    block_size: int | Static = Static(256),
    pipeline_axis_name: str | None = None,
    pipeline_axis_size: int | Static | None = None,
    params_partition_specs: Any = None,
    noise_scale: float = 1e-9,
    *,
    normalize: bool = False,
    damping: float = 0.0,
    every: int = 1,
    apply: str = "new",
    seed: Any = None,
    **shared: Unpack[WhiteKronSettings],
) -> optax.GradientTransformationExtraArgs:
    """P μ̂ with P = Ql² ⊗ Qr², and Q ← MQM, M = I − plr/2L·(T − t₂I).

    Args:
        lr_style: "adam" divides by 5, for learning rates that suit Adam; None does not.
        momentum: rate of the first moment μ; or `b1`.
        normalize_grads: whether μ̂ is divided by its norm, leaf by leaf.
        max_size_dense: longer dimensions are not cut and have a diagonal factor; or
            `max_size_triangular`.
        preconditioner_lr: learning rate of the factors, plr.
        preconditioner_init_scale: of the first factors, a multiple of the identity.
        dtype: of momentum and factors: "bfloat16", "float32" or "float64"; None is float32, or
            float64 where a parameter is.
        stacked: leading dimensions that count matrices: a number, or a tree of numbers; or
            `scanned_layers`, flags of leaves that stack layers on axis 0.
        block_size: matrices are cut into blocks of this size.
        pipeline_axis_name: mesh axis over which blocks are spread.
        pipeline_axis_size: its size, where there is no mesh to ask.
        params_partition_specs: how parameters are sharded, where their types do not tell.
        noise_scale: of the noise that factors see, which bounds P where there is no gradient.
        normalize: whether μ̂ is divided by its norm, layer by layer of a stack.
        damping: noise relative to the largest entry of a block, on top.
        every: steps from one update of the factors to the next.
        apply: the direction of the "new" factors, or, with fewer products, of the "old" ones.
        seed: None takes fixed probes and noise; an integer or a JAX key draws them; or `key`.
        **shared: `preconditioner_lr_floor`, what plr decays to, 0.4 by default; and `warmup`, how
            many steps at first each update the factors, from which on `every` counts.
    """
    return scale_by_preconditioned(WHITE_KRON, _settled("Quad", locals()))


@partial(_published, like=scale_by_quad)
def scale_by_skew(**settings: Any) -> optax.GradientTransformationExtraArgs:
    """P μ̂ with P = QlᵀQl ⊗ QrᵀQr, and Q ← MQ, M = I − plr/L·(T − t₂I), then a Procrustes step.

    Its settings are those of scale_by_quad.
    """
    arguments = inspect.signature(scale_by_quad).bind(**settings)
    arguments.apply_defaults()
    return scale_by_preconditioned(WHITE_KRON, _settled("Skew", arguments.arguments))


quad = _published(with_learning_rate(scale_by_quad))
skew = _published(with_learning_rate(scale_by_skew))


def _settled(optimizer: str, arguments: dict[str, Any]) -> dict[str, Any]:
    settings = settle(optimizer, arguments, WhiteKronSettings, ALIASES)
    if settings["normalize"] and settings["normalize_grads"]:
        raise ValueError("normalize must be False with normalize_grads=True, got True; give one")
    if settings["apply"] == "old" and not is_zero(settings["damping"]):
        raise ValueError(
            f"damping must be 0 with apply='old', which adds no noise, got "
            f"{settings['damping']!r}; use apply='new'"
        )
    dtype = settings["dtype"]
    stored = None if dtype is None else jnp.dtype(dtype)
    # in Quad Q is symmetric, and stays so
    return settings | {"state_dtype": stored, "symmetric": optimizer == "Quad"}


def _splits(shape: tuple[int, ...], settings: Settings) -> list[Split]:
    """Vectors stay whole; matrices are cut, but for sides too long to have a dense factor."""
    merged = white_kron.matrix_shape(shape)
    dense = white_kron.dense_sides(merged, settings["max_size_dense"])
    return [(Part((), shape, merged), tuple(settings["block_size"] if d else None for d in dense))]


def _init(batch: BlockBatch, dtype: Any, settings: Settings) -> State:
    """Q = scale·I in the dtype it is stored in, L = 0 in the one that is worked in."""
    state = {}
    for i, (size, dense) in enumerate(zip(batch.shape, batch.dense, strict=True)):
        ones = jnp.arange(size) < jnp.asarray(batch.sizes[:, i : i + 1])  # [B, size]
        factor = jnp.eye(size) * ones[:, None] if dense else ones
        factor = settings["preconditioner_init_scale"] * factor
        state[f"factor.{i}"] = factor.astype(settings["state_dtype"] or dtype)
        state[f"lipschitz.{i}"] = jnp.zeros(batch.rows, dtype)
    return state


def _normalized(moments: Arrays, layout: TreeLayout, settings: Settings) -> Arrays:
    """μ̂/(‖μ̂‖ + 10⁻⁶), every layer by itself, or every leaf."""
    if not (settings["normalize"] or settings["normalize_grads"]):
        return moments
    norms = layout.norms(moments)
    if settings["normalize_grads"]:
        leaf = np.repeat(range(len(layout.layers)), [at.stop - at.start for at in layout.layers])
        zeros = jnp.zeros(len(layout.layers), norms.dtype)
        tops = nonzero(zeros.at[leaf].max(norms))
        squares = zeros.at[leaf].add(jnp.square(norms / tops[leaf]))
        norms = (tops * jnp.sqrt(squares))[leaf]
    return layout.scaled(moments, 1 / (norms + 1e-6))


def _clipped(directions: Arrays, layout: TreeLayout, settings: Settings) -> Arrays:
    """Every layer scaled to a root mean square of 1.1 at most, and divided."""
    rms = layout.norms(directions) / jnp.sqrt(layout.entries)
    divisor = white_kron.ADAM_DIVISOR if settings["lr_style"] == "adam" else 1.0
    scales = white_kron.CLIP / jnp.maximum(rms, white_kron.CLIP) / divisor
    return layout.scaled(directions, scales.astype(rms.dtype))


Bound = Callable[[jax.Array, jax.Array], jax.Array]  # (A, its scale) → ‖A‖₂ from below


def step_factor(
    factor: jax.Array,
    gram: tuple[jax.Array, ...],
    target: jax.Array,
    rate: jax.Array,
    bound: Bound,
    symmetric: bool,
) -> jax.Array:
    """One step of Q with M = I − z(T − t₂I). [B, n, n], or [B, n] for diagonal Q and T

    Quad, where Q is symmetric: P = MQM, z = plr/2L, Q ← (P + Pᵀ)/2.
    Skew: Q ← procrustes(MQ), z = plr/L. `rate`: plr/L. `gram`: matrices whose product is T.
    """
    z = across(rate / 2 if symmetric else rate, factor)
    grow = 1 + z * across(target, factor)  # M X = (1 + z t₂) X − z T X
    if factor.ndim == 2:
        diagonal = grow - z * gram[0]
        return factor * (jnp.square(diagonal) if symmetric else diagonal)
    once = grow * factor - z * reduce(lambda x, matrix: matrix @ x, reversed(gram), factor)
    if not symmetric:
        return procrustes(once, bound)
    twice = grow * once - z * reduce(jnp.matmul, gram, once)
    return (twice + twice.mT) / 2


def procrustes(factor: jax.Array, bound: Bound) -> jax.Array:
    """Q ← Q + a(RQ + ½aRRQ), R = (Qᵀ − Q)/max|Qᵀ − Q|: turns Q toward symmetric positive.

    a = (1/8)/‖R‖, and no more than −tr(RQ)/tr(RRQ), where the trace of Q is largest. [B, n, n]
    """
    generator = factor.mT - factor
    top = jnp.max(jnp.abs(generator), axis=(1, 2))
    generator = generator / across(nonzero(top), generator)
    turned = jnp.einsum("bij,bjk->bik", generator, factor)
    twice = jnp.einsum("bij,bjk->bik", generator, turned)
    # tr(RX) = Σ Rᵢⱼ Xⱼᵢ and Rᵢⱼ = −Rⱼᵢ
    slope = -jnp.sum(generator * factor, axis=(1, 2))
    bend = -jnp.sum(generator * turned, axis=(1, 2))
    angle = 1 / (8 * nonzero(bound(generator, jnp.ones_like(top))))
    angle = jnp.where(bend < 0, jnp.minimum(angle, slope / jnp.where(bend < 0, -bend, 1)), angle)
    angle = across(jnp.where(slope > 0, angle, 0), factor)
    return factor + angle * (turned + angle / 2 * twice)


def balance(left: jax.Array, right: jax.Array) -> jax.Array:
    """What to multiply Ql by, and divide Qr by, so that max|Ql| = max|Qr| and P stays. [B]"""
    sizes = [jnp.max(jnp.abs(x), axis=tuple(range(1, x.ndim))) for x in (left, right)]
    positive = (sizes[0] > 0) & (sizes[1] > 0)
    return jnp.sqrt(jnp.where(positive, sizes[1] / nonzero(sizes[0]), 1))


def whiten(blocks: jax.Array, factors: list[jax.Array], symmetric: bool) -> jax.Array:
    """P G = QlᵀQl G QrᵀQr. [B, m, n] or [B, n]"""
    for side, factor in enumerate(factors):
        if factor.ndim == 2:
            blocks = blocks * along(jnp.square(factor), blocks, side)
            continue
        # products with a transpose are slower, and a symmetric Q needs none
        transpose = factor if symmetric else factor.mT
        blocks = transpose @ (factor @ blocks) if side == 0 else blocks @ transpose @ factor
    return blocks


def fixed_numbers(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Numbers of mean square 1 that are the same on every device, of full rank. [m, n] or [n]"""
    # from integers, because cosines and the like take long to compile
    row = jnp.arange(shape[0], dtype=jnp.uint32)[:, None] if len(shape) == 2 else jnp.uint32(0)
    bits = white_kron.scramble(row, jnp.arange(shape[-1], dtype=jnp.uint32))
    return white_kron.uniform(bits.astype(dtype))


def _numbers(shape: tuple[int, ...], settings: Settings, dtype: Any) -> jax.Array:
    """Fixed numbers, or normal ones drawn from a seed or a key and the step."""
    seed = settings["seed"]
    if seed is None:
        return fixed_numbers(shape, dtype)
    is_key = isinstance(seed, jax.Array) and (
        seed.ndim == 1 or jnp.issubdtype(seed.dtype, jax.dtypes.prng_key)
    )
    key = jax.random.fold_in(seed if is_key else jax.random.key(seed), settings["count"])
    return jax.random.normal(jax.random.fold_in(key, shape[-1]), shape, dtype)


def _noisy(blocks: jax.Array, settings: Settings) -> jax.Array:
    """G + noise, so that what is never observed has a scale too."""
    scale, damping = settings["noise_scale"], settings["damping"]
    if not is_zero(damping):
        largest = jnp.max(jnp.abs(blocks), axis=tuple(range(1, blocks.ndim)), keepdims=True)
        scale = scale + damping * largest
    if is_zero(scale):
        return blocks
    return blocks + scale * _numbers(blocks.shape[1:], settings, blocks.dtype)


def _growth_limit(sides: int, settings: Settings) -> Any:
    """The largest entry that Q may have."""
    # with "old" factors noise would be in the direction and move parameters without gradients;
    # there P is limited to 1/noise_scale, as noise would limit it
    if settings["apply"] == "new" or is_zero(settings["noise_scale"]):
        return white_kron.GROWTH_LIMIT
    floor = jnp.maximum(jnp.asarray(settings["noise_scale"], jnp.float32), 1e-30)
    return jnp.minimum(white_kron.GROWTH_LIMIT, floor ** (-0.5 / sides))


def _balance_due(settings: Settings) -> jax.Array:
    """At every hundredth step, or the first update after it."""
    count, period = settings["count"], white_kron.BALANCE_EVERY
    last = count - jnp.where(count <= settings["warmup"], 1, settings["every"])
    return count // period != jnp.maximum(last, 0) // period


def _factors(state: State) -> list[jax.Array]:
    """Q of every side in the dtype that is worked in, which is that of L."""
    sides = sum(key.startswith("factor.") for key in state)
    return [state[f"factor.{i}"].astype(state[f"lipschitz.{i}"].dtype) for i in range(sides)]


def _observe(grads: Gradients, state: State, settings: Settings) -> State:
    if settings["apply"] == "new":
        return {}
    return {"white": whiten(grads.moment, _factors(state), settings["symmetric"])}


def _direction(grads: Gradients, state: State, settings: Settings) -> tuple[jax.Array, State]:
    if "white" in state:
        return state["white"], {}
    return whiten(grads.moment, _factors(state), settings["symmetric"]), {}


def _refresh(grads: Gradients, state: State, settings: Settings) -> State:
    """Factors after one step on the blocks W = PG; blocks that are zero teach nothing.

    T = WWᵀ, t₂ = n on the left; T = WᵀW, t₂ = m on the right.
    ℓ = ‖T‖₂ + t₂, L ← max(0.95L + 0.05ℓ, ℓ), then a step of length plr/L.
    """
    sizes, symmetric = grads.sizes, settings["symmetric"]
    factors, learned = _factors(state), {}
    white = state.get("white")
    if white is None:
        white = whiten(_noisy(grads.moment, settings), factors, symmetric)
    largest = jnp.max(jnp.abs(white), axis=tuple(range(1, white.ndim)))
    observed = largest > 0
    # so that the squares of whatever is finite are finite
    white = white * across(SQUARE_LIMIT / jnp.maximum(largest, SQUARE_LIMIT), white)
    scale = jnp.square(jnp.minimum(largest, SQUARE_LIMIT))
    white = white if white.ndim == 3 else white[:, :, None]
    count, initial = settings["count"].astype(white.dtype), settings["preconditioner_lr"]
    floor, smaller, larger = settings["preconditioner_lr_floor"], jnp.minimum, jnp.maximum
    rate = factor_rate(count, initial, floor, minimum=smaller, maximum=larger)
    limit = _growth_limit(len(factors), settings)
    left = jnp.ones_like(largest)
    if len(factors) == 2:
        # P does not see the balance, so it may as well come after the step as before
        left = jnp.where(_balance_due(settings), balance(*factors), 1)
    for i, factor in enumerate(factors):
        target = sizes[:, 1 - i] if len(factors) == 2 else jnp.ones_like(largest)
        turned = white if i == 0 else white.mT  # [B, n, k]
        n, k = turned.shape[1:]
        probes = _numbers((PROBES, n), settings, white.dtype)
        bound = partial(norm_bound, probes=probes, size=sizes[:, i])
        gram: tuple[jax.Array, ...]
        if factor.ndim == 2:
            gram = (jnp.sum(jnp.square(turned), axis=2),)
            norm = jnp.max(gram[0], axis=1)
        else:
            product = jnp.einsum("bik,bjk->bij", turned, turned)
            # multiplying by W twice is cheaper where it is narrow
            gram = (turned, turned.mT) if 2 * k < n else (product,)
            norm = bound(product, scale)
        old = state[f"lipschitz.{i}"]
        lipschitz = jnp.maximum(0.95 * old + 0.05 * (norm + target), norm + target)
        new = step_factor(factor, gram, target, rate / lipschitz, bound, symmetric)
        new = jnp.clip(new, -limit, limit) * across(left if i == 0 else 1 / left, new)
        learned[f"factor.{i}"] = jnp.where(across(observed, new), new, factor)
        learned[f"lipschitz.{i}"] = jnp.where(observed, lipschitz, old)
    return learned


WHITE_KRON = Method(
    _init,
    _direction,
    _observe,
    _refresh,
    splits=_splits,
    prepare=_normalized,
    finish=_clipped,
    operator=("factor", "lipschitz"),
    padded=True,
    heavy_ball=False,
    squares=False,
    fallible=False,
)
