"""What happens to a whole leaf: its momentum before the blocks, the clip after them."""

import jax
import jax.numpy as jnp

from isokron.white_kron import CLIP


def first_moment(
    grad: jax.Array, moment: jax.Array, b1: jax.typing.ArrayLike, finite: jax.Array
) -> jax.Array:
    """μ ← b₁μ + (1 − b₁)g where g is finite; else μ as it was."""
    return jnp.where(finite, b1 * moment + (1 - b1) * grad, moment)


def normalized(grad: jax.Array, layers: int) -> jax.Array:
    """g/(‖g‖ + 10⁻⁶), every layer by itself."""
    axes = layer_axes(grad, layers)
    many = grad.size / max(layers, 1)
    return grad / (root_mean_square(grad, axes) * many**0.5 + 1e-6)


def clipped(direction: jax.Array, layers: int) -> jax.Array:
    """Every layer scaled to a root mean square of 1.1 at most."""
    size = root_mean_square(direction, layer_axes(direction, layers))
    return direction * (CLIP / jnp.maximum(size, CLIP))


def layer_axes(array: jax.Array, layers: int) -> tuple[int, ...]:
    """The axes of one layer; a single layer has all."""
    return tuple(range(1 if layers > 1 else 0, array.ndim))


def root_mean_square(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """√mean x², kept to broadcast, as max|x| times that of x/max|x|: x² of a large x overflows."""
    largest = jnp.max(jnp.abs(array), axis=axes, keepdims=True)
    scaled = array / jnp.where(largest > 0, largest, 1)
    return largest * jnp.sqrt(jnp.mean(jnp.square(scaled), axis=axes, keepdims=True))
