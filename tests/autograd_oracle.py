"""Scores by definition: from autograd, one example at a time in float64, and dense matrices."""

import contextlib
import copy
import functools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron import Attributor
from isokron.curvature import Selection
from isokron.curvature.layers import Layer, pack
from isokron.curvature.losses import terms_and_weights

DAMPING = 0.1


@dataclass
class Case:
    """left_out: names of layers or modules that are expected to be, and a part of the reason."""

    model: nn.Module
    examples: list[Any]
    loss: Any
    collate: Callable[[list[Any]], Any] | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


class Oracle:
    def __init__(
        self, case: Case, layers: list[Layer], collate: Callable[[list[Any]], Any]
    ) -> None:
        self.model = copy.deepcopy(case.model).double().eval().requires_grad_()
        self.layers, self.loss, self.collate = layers, case.loss, collate
        self.modules = dict(self.model.named_modules())

    def total(self, example: Any) -> tuple[Tensor, float]:
        """Σ of the loss terms of an example, and how many there are."""
        terms, weights = terms_and_weights(self.loss(self.model, doubled(self.collate([example]))))
        return (terms * weights).sum(), float(weights.sum())

    def gradients(self, examples: list[Any]) -> dict[str, Tensor]:
        """[N, B, o, i] by layer."""
        rows: dict[str, list[Tensor]] = {layer.name: [] for layer in self.layers}
        for example in examples:
            self.model.zero_grad()
            self.total(example)[0].backward()
            by_name = {
                name: torch.zeros_like(param) if param.grad is None else param.grad
                for name, param in self.model.named_parameters()
            }
            for layer in self.layers:
                rows[layer.name].append(pack(layer.layout, by_name))
        return {name: torch.stack(parts) for name, parts in rows.items()}

    def kfac(self, examples: list[Any]) -> dict[str, tuple[Tensor, ...]]:
        """G [B, o, o] and A [B, i, i] of layers that are called as modules, or Λ of a norm."""
        layers = [x for x in self.layers if x.observed == "module" and not x.tied]
        grads = self.gradients(examples)
        terms = sum(self.total(example)[1] for example in examples)
        sides: dict[str, tuple[Tensor, ...]] = {
            x.name: (grads[x.name].square().sum(0) / terms,) for x in layers if x.kind == "diagonal"
        }
        layers = [x for x in layers if x.kind != "diagonal"]
        uses = [use for example in examples for use in self.uses(layers, example)]
        for layer in layers:
            blocks, outputs, inputs = layer.shape
            left, right = torch.zeros(blocks, outputs, outputs), torch.zeros(blocks, inputs, inputs)
            left, right, count = left.double(), right.double(), 0
            for other, x, g, counts in uses:
                for place in counts.nonzero()[:, 0].tolist() if other is layer else ():
                    a, b = self.input(layer, x, place), g[place]
                    if a.any():  # a padding word has no column
                        left += b[:, :, None] * b[:, None]
                        right += a[:, :, None] * a[:, None]
                        count += 1
            sides[layer.name] = left / terms, right / max(1, count)
        return sides

    def uses(self, layers: list[Layer], example: Any) -> list[tuple[Layer, Tensor, Tensor, Tensor]]:
        """Layers with x, g̃ [P, B, o] and [P], whether a gradient reaches a position of the layer,
        or of another with the same input."""
        uses: list[tuple[Layer, Tensor, Tensor, Tensor]] = []

        def observe(layer: Layer, x: Tensor, grad: Tensor) -> None:
            g = self.rows(layer, grad)
            uses.append((layer, x, g, g.flatten(1).any(1) | (grad.ndim == 2 and len(grad) == 1)))

        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hook = functools.partial(self.watch, functools.partial(observe, layer))
                hooks.enter_context(self.modules[layer.name].register_forward_hook(hook))
            self.total(example)[0].backward()
        return [
            (layer, x, g, torch.stack([c for _, y, _, c in uses if torch.equal(x, y)]).any(0))
            for layer, x, g, _ in uses
        ]

    @staticmethod
    def watch(observe: Callable[..., None], _: nn.Module, args: Any, y: Tensor) -> None:
        x = args[0].detach().clone()
        if y.requires_grad:  # a reentrant checkpoint computes without a graph first
            y.register_hook(lambda grad: observe(x, grad))

    def rows(self, layer: Layer, y: Tensor) -> Tensor:
        """Outputs by position, [P, B, o]."""
        conv = isinstance(self.modules[layer.name], nn.modules.conv._ConvNd)
        flat = y.flatten(2)[0].mT if conv else y.reshape(-1, y.size(-1))
        return flat.unflatten(1, (layer.shape[0], -1))

    def input(self, layer: Layer, x: Tensor, place: int) -> Tensor:
        """ā of a position is read off the layer: row o of ∂y_o/∂W. [B, i]"""
        y = self.rows(layer, self.modules[layer.name](x))[place]
        names = dict(self.model.named_parameters())
        params = {name: names[name] for name in layer.layout.params.values()}
        blocks = []
        for block in range(len(y)):
            grads = torch.autograd.grad(y[block, 0], [*params.values()], retain_graph=True)
            blocks.append(pack(layer.layout, dict(zip(params, grads, strict=True)))[block, 0])
        return torch.stack(blocks)


def doubled(batch: Any) -> Any:
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: doubled(value) for key, value in batch.items()}
    return type(batch)(doubled(x) for x in batch) if isinstance(batch, tuple | list) else batch


def solved(sides: tuple[Tensor, ...], grads: Tensor) -> Tensor:
    """H⁻¹∇ of gradients [N, B, o, i], H = (G + √λ/π) ⊗ (A + π√λ), or Λ + λ; 0 of a dead block."""
    if len(sides) == 1:
        (values,) = sides
        return grads / (values + DAMPING * values.mean())
    results = torch.zeros_like(grads)
    means = [side.diagonal(dim1=1, dim2=2).mean(1) for side in sides]
    root = (DAMPING * (means[0] * means[1]).mean()).sqrt()
    for block, (left, right) in enumerate(zip(*sides, strict=True)):
        g, a = (mean[block] for mean in means)
        if g > 0 and a > 0:
            left = left + root * (g / a).sqrt() * torch.eye(len(left)).double()
            right = right + root * (a / g).sqrt() * torch.eye(len(right)).double()
            columns = grads[:, block].flatten(1).mT
            solution = torch.linalg.solve(torch.kron(left, right), columns)
            results[:, block] = solution.mT.view_as(results[:, block])
    return results


def drawn(name: str) -> dict[str, Any]:
    """Options of a case, from its name."""
    draw = random.Random(name)
    return {
        "dtype": draw.choice([torch.float32, torch.float64]),
        "batch_size": draw.choice([1, 2, 3, 8]),
        "layers": draw.choice([None, "*"]),
        "frozen": draw.random() < 0.3,
        "loss": draw.choice(["example", "terms", "likelihood"]),
        "more": draw.choice([0, 2]),
        "side": draw.choice(["left", "right"]),
    }


def check(case: Case, folder: Path, tolerance: float = 2e-4) -> Selection:
    """Every score is that of the oracle, and what is left out is as expected."""
    train, queries = case.examples[2:], case.examples[:2]
    a = Attributor(
        folder / "plain", case.model, train, loss=case.loss, collate=case.collate, **case.options
    )
    reasons = {item.name: item.reason for item in a.selection.left_out}
    assert reasons.keys() == case.left_out.keys(), reasons
    for name, reason in case.left_out.items():
        assert reason in reasons[name], (name, reasons[name])
    total = a.selection.covered + sum(item.parameters for item in a.selection.left_out)
    assert total == a.selection.total
    oracle = Oracle(case, a.subject.layers, a.data.collate)
    t, q = oracle.gradients(train), oracle.gradients(queries)
    want = sum(q[name].flatten(1) @ t[name].flatten(1).mT for name in t)
    compare(a.fit(None).score(queries, save=False, store=False), want, tolerance)

    b = Attributor(
        folder / "kfac", case.model, train, loss=case.loss, collate=case.collate, **case.options
    )
    b.fit("kfac")
    assert b.curvature is not None
    sides = oracle.kfac(train)
    for layer in a.subject.layers:
        if layer.name not in sides:  # what is no module's output is taken as it is
            statistics = b.curvature.layers[layer.name].statistics
            sides[layer.name] = statistics["output"].double(), statistics["input"].double()
    want = sum(solved(sides[name], q[name]).flatten(1) @ t[name].flatten(1).mT for name in t)
    found = b.score(queries, save=False, store=False, damping=DAMPING)
    compare(found, want, tolerance * 5)
    return a.selection


def compare(scores: Tensor, want: Any, tolerance: float) -> None:
    found = scores.as_subclass(Tensor).double()
    error = float((found - want).abs().max() / want.abs().max())
    assert error < tolerance, error
