"""Train a small transformer in Flax (nnx) with isokron.jax.soap in an optax chain.

    python examples/train_flax.py [--steps 60]

The kernels of hidden layers get SOAP; embeddings, head, norms and biases get AdamW, as
`isokron.param_groups` does in PyTorch. JAX parameters do not say what they are, so the function
`route` decides by name.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from isokron.jax import soap

TEXT = "Observations are folded into statistics, and statistics become an operator. "
LENGTH, WIDTH, HEADS = 32, 64, 4


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        # one matrix each: a fused projection would be preconditioned as one matrix
        self.query, self.key, self.value, self.out = (
            nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs) for _ in range(4)
        )
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h = self.norm1(x)
        split = (*h.shape[:2], HEADS, WIDTH // HEADS)  # [batch, length, heads, width of a head]
        heads = (layer(h).reshape(split) for layer in (self.query, self.key, self.value))
        x = x + self.out(jax.nn.dot_product_attention(*heads, is_causal=True).reshape(h.shape))
        return x + self.down(jax.nn.gelu(self.up(self.norm2(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens = nnx.Embed(128, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, 128, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def route(params: Any) -> Any:
    """The optimizer of each parameter, by its path."""

    def by_path(path: Any, _: jax.Array) -> str:
        name = jax.tree_util.keystr(path)
        return "soap" if "blocks" in name and "kernel" in name else "adamw"

    return jax.tree_util.tree_map_with_path(by_path, params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    text = jnp.array(list((TEXT * 8).encode()))
    model = Model(nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 5, args.steps, 1e-3)
    steppers = {
        "soap": soap(schedule, weight_decay=0.1),
        "adamw": optax.adamw(schedule, b2=0.95),
    }
    optimizer = nnx.Optimizer(model, optax.multi_transform(steppers, route), wrt=nnx.Param)

    def loss_of(model: Model, tokens: jax.Array) -> jax.Array:
        logits = model(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @nnx.jit
    def train_step(model: Model, optimizer: nnx.Optimizer[Model], tokens: jax.Array) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(model, tokens)
        optimizer.update(model, grads)
        return loss

    for step in range(args.steps):
        starts = jax.random.randint(jax.random.key(step), (16, 1), 0, len(text) - LENGTH)
        loss = train_step(model, optimizer, text[starts + jnp.arange(LENGTH)])
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {loss:.4f}")


if __name__ == "__main__":
    main()
