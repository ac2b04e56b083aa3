"""What K-FAC's statistics take: covariances, or the gradients they are made of, by policy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from isokron.inspection.results import LayerFacts
from isokron.operators import woodbury_policy

POLICIES = ("none", "all", "hybrid", "auto")
FLOAT, HALF = 4, 2  # bytes of a number


@dataclass(frozen=True)
class PolicyBytes:
    """Of all layers under one policy. gradients: layers whose output side is kept as those.

    outputs_half: with the gradients, but not the covariances, in half precision.
    """

    policy: str
    gradients: int
    outputs: int
    outputs_half: int
    inputs: int

    @property
    def total(self) -> int:
        return self.outputs + self.inputs


def keeps_gradients(layer: LayerFacts, examples: int, policy: str) -> bool:
    """Whether the policy keeps the T = places · examples gradients of the layer's outputs."""
    has_sides = layer.kind != "diagonal"
    return has_sides and woodbury_policy(layer.outputs, layer.places * examples, policy)


def output_bytes(layer: LayerFacts, examples: int, policy: str, number: int = FLOAT) -> int:
    """Covariance o×o in float32, or gradients o×T in numbers of `number` bytes. One per block."""
    if layer.kind == "diagonal":
        return 0
    if keeps_gradients(layer, examples, policy):
        return layer.blocks * layer.outputs * layer.places * examples * number
    return layer.blocks * layer.outputs**2 * FLOAT


def input_bytes(layer: LayerFacts) -> int:
    """Covariance i×i; counts of columns for an embedding; all there is for a norm."""
    if layer.kind == "diagonal":
        return layer.dimension * FLOAT
    return layer.blocks * layer.inputs ** (1 if layer.kind == "index" else 2) * FLOAT


def by_policy(layers: Iterable[LayerFacts], examples: int) -> list[PolicyBytes]:
    """Every policy over the same layers and number of examples."""
    layers = list(layers)
    return [
        PolicyBytes(
            policy,
            sum(keeps_gradients(layer, examples, policy) for layer in layers),
            sum(output_bytes(layer, examples, policy) for layer in layers),
            sum(output_bytes(layer, examples, policy, HALF) for layer in layers),
            sum(map(input_bytes, layers)),
        )
        for policy in POLICIES
    ]
