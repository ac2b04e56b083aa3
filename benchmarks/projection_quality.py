"""Scores from stored parts of gradients against exact ones, by the kind of projection.

    python benchmarks/projection_quality.py [--only speeches-tiny,mnist,digits,speeches-deep]
        [--projections entries,sketch]

Every projection has the same number of numbers per example: Σ min(dim², size) over the layers. A
record has the mean over queries of Spearman's ρ with exact scores, for one data set, curvature,
projection, dimension and seed, and of the number of common examples among the ten with the largest
scores ("common"). "entries" is the store of the package; the others were tried and
are computed here, from complete whitened gradients W [o, i] of each layer:

    sketch             entries times random signs, added up in dim² places (count sketch)
    gaussian           P W Rᵀ with Gaussian P, R of dim rows (LoGra)
    orthogonal         the same with orthonormal rows
    pca                P, R: leading eigenvectors of the mean of WWᵀ and WᵀW (LoGra's PCA)
    random entries     dim² random entries of W
    half and half      half of the numbers are the largest entries, the others a sketch of the rest
    across layers      the largest entries of all layers together, by their share of the whole row
    squares            the largest entries by the mean of W² instead of W²/|W|²
    eigenbasis         the largest entries of W in the eigenbases of K-FAC's sides, not Cholesky's

Where a side is shorter than dim, the other one has more rows. Results:
docs/benchmarks/projection_quality.json.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from attribution_quality import decoder, single
from records import Records
from torch import Tensor

from isokron import tasks
from isokron.attribution import Attributor, Query
from isokron.attribution.evaluate import spearman
from isokron.attribution.projection import collect, encoders
from isokron.tasks import Examples, Shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DATA = ("speeches-tiny", "mnist", "digits", "speeches-deep")
DECODERS = {"speeches-tiny": (2, 64), "speeches-deep": (4, 32)}  # layers, width
DIMS, SEEDS = (8, 16, 32), (0, 1, 2)
ASKED, SCORED, CHOSEN_ON, STEPS = 20, 1000, 128, 600


def classifier(data: str) -> Attributor:
    """The model of a task, trained for some hundred steps; its first examples are scored."""
    task = tasks.load(data)
    torch.manual_seed(0)
    model, generator = task.model(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        numbers = torch.randint(0, len(task.train), (64,), generator=generator)
        optimizer.zero_grad()
        task.losses(model, task.train.batch(numbers)).mean().backward()
        optimizer.step()
    scored = Examples(task.train.batch(torch.arange(SCORED)))
    return Attributor(tempfile.mkdtemp(), model, task=replace(task, train=scored, ids=()))


@dataclass(frozen=True, eq=False)
class Layer:
    """Whitened gradients of the scored examples and of the queries: [N, o, i], [Q, o, i]"""

    rows: Tensor
    asked: Tensor

    def products(self, encode: Callable[[Tensor], Tensor]) -> Tensor:
        return encode(self.asked) @ encode(self.rows).mT

    def entries(self, chosen: Tensor) -> Tensor:
        return self.products(lambda w: w.flatten(1)[:, chosen])

    def width(self, dim: int) -> int:
        return min(dim * dim, prod(self.rows.shape[1:]))

    def rotated(self, left: Tensor, right: Tensor) -> Layer:
        return Layer(left @ self.rows @ right.mT, left @ self.asked @ right.mT)


def sketch(flat: Tensor, width: int, generator: torch.Generator) -> Tensor:
    """[n, size] → [n, width]"""
    size = flat.size(1)
    places = torch.randperm(size, generator=generator) % width
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return torch.zeros(len(flat), width).index_add_(1, places, flat * signs)


def sketched(layer: Layer, width: int, seed: int, entries: Tensor | None = None) -> Tensor:
    def encode(w: Tensor) -> Tensor:
        flat = w.flatten(1) if entries is None else w.flatten(1)[:, entries]
        complete = flat.size(1) <= width
        return flat if complete else sketch(flat, width, torch.Generator().manual_seed(seed))

    return layer.products(encode)


def sides(layer: Layer, dim: int) -> tuple[int, int]:
    """Rows of the two matrices of a layer."""
    outputs, inputs = layer.rows.shape[1:]
    left = min(outputs, max(dim, dim * dim // inputs))
    return left, min(inputs, max(1, dim * dim // left))


def gaussian(layer: Layer, dim: int, seed: int, orthogonal: bool = False) -> Tensor:
    generator, matrices = torch.Generator().manual_seed(seed), []
    for rows, size in zip(sides(layer, dim), layer.rows.shape[1:], strict=True):
        matrix = torch.randn(rows, size, generator=generator) / rows**0.5
        if rows == size:
            matrix = torch.eye(size)
        elif orthogonal:
            matrix = torch.linalg.qr(matrix.mT)[0].mT * (size / rows) ** 0.5
        matrices.append(matrix)
    return layer.products(lambda w: (matrices[0] @ w @ matrices[1].mT).flatten(1))


def pca(layer: Layer, dim: int, sample: Tensor) -> Tensor:
    w, matrices = layer.rows[sample], []
    moments = torch.einsum("noi,npi->op", w, w), torch.einsum("noi,noj->ij", w, w)
    for rows, moment in zip(sides(layer, dim), moments, strict=True):
        matrices.append(torch.linalg.eigh(moment)[1].flip(1)[:, :rows].mT)
    return layer.products(lambda w: (matrices[0] @ w @ matrices[1].mT).flatten(1))


def largest(layer: Layer, sample: Tensor, lengths: Tensor | None = None) -> Tensor:
    """All entries, the largest first. lengths: |W|² to divide squares by, default the layer's."""
    squares = layer.rows[sample].flatten(1).square()
    lengths = squares.sum(1).clamp_min(1e-30) if lengths is None else lengths
    return (squares / lengths[:, None]).sum(0).argsort(descending=True, stable=True)


def half_and_half(layer: Layer, dim: int, seed: int, sample: Tensor) -> Tensor:
    width, order = layer.width(dim), largest(layer, sample)
    half = width if width == len(order) else width // 2
    exact = layer.entries(order[:half])
    if half == width:
        return exact
    return exact + sketched(layer, width - half, seed, order[half:])


def across_layers(layers: Mapping[str, Layer], dim: int, sample: Tensor) -> Tensor:
    flat = [layer.rows.flatten(1) for layer in layers.values()]
    rows, width = torch.cat(flat, 1), sum(layer.width(dim) for layer in layers.values())
    asked = torch.cat([layer.asked.flatten(1) for layer in layers.values()], 1)
    joined = Layer(rows[:, None], asked[:, None])
    return joined.entries(largest(joined, sample)[:width])


def eigenbases(run: Attributor, complete: Mapping[str, Layer]) -> dict[str, Layer]:
    """W in the eigenbases of the damped sides: V^(−½)Qᵀ∇ = V^(−½)QᵀL · L⁻¹∇ on either side."""
    inverse, rotated = run.inverse(), {}
    assert inverse is not None
    for name, layer in complete.items():
        factors = getattr(inverse[name], "factors", ())
        turns = []
        for factor in factors:
            lower = factor.lower[0].double()
            values, vectors = torch.linalg.eigh(lower @ lower.mT)
            turns.append(((vectors * values.rsqrt()).mT @ lower).float())
        rotated[name] = layer.rotated(*turns) if turns else layer
    return rotated


def whitened(run: Attributor, queries: list[Query]) -> dict[str, Layer]:
    subject = run.subject
    by_name, parts = encoders(subject.layers, run.inverse()), list[Tensor]()

    def rows(batches: Any) -> list[Tensor]:
        parts.clear()
        collect(subject.model, batches, subject.loss, by_name, lambda r, *_: parts.append(r))
        widths = [encoder.width for encoder in by_name.values()]
        return list(torch.cat(parts).split(widths, 1))

    examples = rows(subject.batches([[n] for n in range(len(run.data))]))
    asked = rows([query.batch for query in queries])
    shapes = [(-1, layer.shape[0] * layer.shape[1], layer.shape[2]) for layer in subject.layers]
    parts_by_layer = zip(by_name, shapes, examples, asked, strict=True)
    return {name: Layer(a.view(shape), b.view(shape)) for name, shape, a, b in parts_by_layer}


def summed(layers: Mapping[str, Layer], products: Callable[[Layer], Tensor]) -> Tensor:
    return torch.stack([products(layer) for layer in layers.values()]).sum(0)


def projections(run: Attributor, queries: list[Query]) -> dict[str, Callable[[int, int], Tensor]]:
    """Scores [Q, N] by the name of a projection; of a dimension and a seed."""
    complete = whitened(run, queries)

    def sample(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(run.data), generator=generator)[:CHOSEN_ON]

    def chosen(layers: Mapping[str, Layer], dim: int, seed: int, plain: bool = False) -> Tensor:
        numbers = sample(seed)
        lengths = torch.ones(len(numbers)) if plain else None
        return summed(layers, lambda x: x.entries(largest(x, numbers, lengths)[: x.width(dim)]))

    def random_entries(layer: Layer, dim: int, seed: int) -> Tensor:
        generator, size = torch.Generator().manual_seed(seed), prod(layer.rows.shape[1:])
        return layer.entries(torch.randperm(size, generator=generator)[: layer.width(dim)])

    ways: dict[str, Callable[[int, int], Tensor]] = {
        "entries": lambda dim, seed: run.projected_scores(queries, dim, seed=seed),
        "sketch": lambda dim, seed: summed(complete, lambda x: sketched(x, x.width(dim), seed)),
        "gaussian": lambda dim, seed: summed(complete, lambda x: gaussian(x, dim, seed)),
        "orthogonal": lambda dim, seed: summed(complete, lambda x: gaussian(x, dim, seed, True)),
        "pca": lambda dim, seed: summed(complete, lambda x: pca(x, dim, sample(seed))),
        "random entries": lambda dim, seed: summed(
            complete, lambda x: random_entries(x, dim, seed)
        ),
        "half and half": lambda dim, seed: summed(
            complete, lambda x: half_and_half(x, dim, seed, sample(seed))
        ),
        "across layers": lambda dim, seed: across_layers(complete, dim, sample(seed)),
        "squares": partial(chosen, complete, plain=True),
    }
    inverse = run.inverse()
    if any(hasattr(operator, "factors") for operator in (inverse or {}).values()):
        ways["eigenbasis"] = partial(chosen, eigenbases(run, complete))
    return ways


def agreement(exact: Tensor, compute: Callable[[], Tensor]) -> dict[str, float]:
    scores = compute()
    pairs = zip(scores.topk(10).indices.tolist(), exact.topk(10).indices.tolist(), strict=True)
    common = [len({*first} & {*second}) for first, second in pairs]
    return {
        "spearman": float(spearman(scores, exact).mean()),
        "common": sum(common) / len(common),
    }


def measure(records: Records, data: str, chosen: list[str]) -> None:
    trained = decoder(*DECODERS[data]) if data in DECODERS else classifier(data)
    assert trained.task is not None
    unseen = Examples(trained.task.held_out.batch(torch.arange(ASKED)))
    queries = [Query(batch, (Shown(),), "") for batch in single(unseen)]
    for method in ("kfac", "ekfac"):
        model = trained.subject.model
        run = Attributor(tempfile.mkdtemp(), model, task=trained.task).fit(method)
        exact = run.score(queries, store=False, save=False).as_subclass(Tensor)
        ways = projections(run, queries)
        for name in chosen or ways:
            if name not in ways:  # an eigenbasis under EK-FAC
                continue
            scores = ways[name]
            for dim in DIMS:
                for seed in SEEDS:
                    key = {"data": data, "curvature": method, "projection": name}
                    compute = partial(agreement, exact, partial(scores, dim, seed))
                    records.once(compute, **key, dim=dim, seed=seed)


def tables() -> list[str]:
    """Spearman correlations, and how many of the ten largest scores agree: means over seeds."""
    records = Records("projection_quality")
    names = list(dict.fromkeys(run["projection"] for run in records.runs))
    lines = []
    for column, digits in (("spearman", 3), ("common", 1)):
        for method in ("kfac", "ekfac"):
            lines += [f"| {column}, {method} | " + " | ".join(DATA) + " |", "|---" * 5 + "|"]
            for name in names:
                cells = []
                for data in DATA:
                    key = {"data": data, "curvature": method, "projection": name}
                    runs = [records.select(**key, dim=dim) for dim in DIMS]
                    complete = all(same and column in same[0] for same in runs)
                    means = [fmean(run[column] for run in same) for same in runs if complete]
                    cells.append(", ".join(f"{mean:.{digits}f}" for mean in means))
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(DATA))
    records = Records("projection_quality")
    parser.add_argument("--projections", default="", help="default: all")
    options = parser.parse_args()
    chosen = options.projections.split(",") if options.projections else []
    for data in options.only.split(","):
        measure(records, data, chosen)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
