"""Curvature of a model: a mapping from layers to operators, with damped inverses and powers.

One definition of damping serves everything that is built on it: for a layer of two sides

    H = (G + √λ/π I) ⊗ (A + π√λ I),  π² = mean eigenvalue of A over that of G,

and Λ + λ for the eigenvalues of EK-FAC and of diagonal layers; λ is `damping` times the mean
eigenvalue of the layer (Martens & Grosse 1503.05671, section 6.3).
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.packing import Layout, pack, put_
from isokron.curvature.spectrum import Operator, Spectrum, has_spectrum, spectrum_of
from isokron.linalg import factorize
from isokron.operators import (
    CholeskyInverse,
    Dense,
    Diagonal,
    Factor,
    Kron,
    KronEigen,
    LowRank,
)


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """The statistics of one layer; see isokron.curvature.statistics. `terms`: M; `policy`: of fit.

    The output side is "output" [B, o, o]; or "columns" U [B, o, T] for UUᵀ; or "mean" [B, o] and
    "columns" of a softmax for diag(mean) − UUᵀ.
    """

    name: str
    method: str
    kind: str
    layout: Layout
    statistics: dict[str, Tensor]
    policy: str = "none"
    terms: float = 0.0
    retries: dict[str, int] = field(default_factory=dict)  # of eigendecompositions, by remedy

    @property
    def columns(self) -> int | None:
        """T, where gradients stand for the output side."""
        return self.statistics["columns"].size(2) if "columns" in self.statistics else None

    def operator(self) -> Operator:
        """On matrices [B, o, i], the column of a bias last: output side first, then input side."""
        statistics = self.statistics
        # EK-FAC, or a diagonal layer, whose basis is I
        if "eigenvalues" in statistics:
            bases = statistics.get("basis.output"), statistics.get("basis.input")
            return KronEigen(bases, statistics["eigenvalues"])
        inputs = statistics["input"]
        # both sides of TKFAC and Shampoo have the trace of the whole
        if self.method != "kfac":
            trace = inputs.sum(1) if inputs.ndim == 2 else inputs.diagonal(0, 1, 2).sum(1)
            trace = trace.clamp_min(torch.finfo(inputs.dtype).tiny)
            inputs = inputs / trace.view(-1, *[1] * (inputs.ndim - 1))
        side = Dense(inputs) if inputs.ndim == 3 else Diagonal(inputs)
        return Kron((self._output(), side))

    def _output(self) -> Dense | LowRank:
        statistics = self.statistics
        if "columns" not in statistics:
            return Dense(statistics["output"])
        columns, device = statistics["columns"], statistics["input"].device
        if "mean" in statistics:
            return LowRank(statistics["mean"], columns, -1)
        return LowRank(torch.zeros(len(columns), 1, dtype=torch.float64, device=device), columns)


def mean_eigenvalue(part: Operator | Factor) -> Tensor:
    """Of an operator, or of one side: [B] in float64, without any decomposition."""
    if isinstance(part, Kron):
        left, right = (mean_eigenvalue(factor) for factor in part.factors)
        return left.to(right.device) * right
    if isinstance(part, KronEigen):
        return part.eigenvalues.double().mean((1, 2))
    if isinstance(part, Diagonal):
        return part.values.double().mean(1)
    if isinstance(part, Dense | CholeskyInverse):
        return part.to_dense().diagonal(0, 1, 2).double().mean(1)
    assert isinstance(part, LowRank)
    outputs = part.columns.size(-2)
    squares = torch.linalg.vector_norm(part.columns, dim=(1, 2), dtype=torch.float64).square()
    diagonal = part.diagonal.double().expand(-1, outputs).mean(1)
    return diagonal + part.sign * squares.to(diagonal.device) / outputs


def dead_blocks(operator: Operator) -> Tensor:
    """[B] bool: blocks whose inputs or gradients were all zero, or too small to have an inverse."""
    parts = operator.factors if isinstance(operator, Kron) else (operator,)
    # an inverse of what is below this overflows; 1e-31 in float32
    limits = torch.finfo(operator_dtype(operator))
    means = [mean_eigenvalue(part) for part in parts]
    return torch.stack(
        [mean.to(means[-1].device) <= limits.tiny / limits.eps for mean in means]
    ).any(0)


def operator_dtype(operator: Operator) -> torch.dtype:
    """What is computed in. Columns may be stored in less."""
    if not isinstance(operator, Kron):
        return operator.eigenvalues.dtype
    side = operator.factors[1]
    if isinstance(side, CholeskyInverse):
        return side.lower.dtype
    assert isinstance(side, Dense | Diagonal)
    return side.matrix.dtype if isinstance(side, Dense) else side.values.dtype


def side_damping(operator: Kron, damping: float, relative: bool = True) -> tuple[Tensor, Tensor]:
    """√λ/π and π√λ, which are added to the output side and to the input side: [B] each.

    `relative`: λ is `damping` times the mean eigenvalue of the layer, else `damping` itself. A dead
    block gets 1 on both sides: its gradients are zero, and any positive number serves.
    """
    # in float64: products of means underflow in float32 long before the means do
    left, right = (mean_eigenvalue(factor) for factor in operator.factors)
    left, dead, dtype = left.to(right.device), dead_blocks(operator), operator_dtype(operator)
    scale = damping * float((left * right).mean()) if relative else damping
    pi = (right / left.masked_fill(dead, 1.0)).masked_fill(dead, 1.0).sqrt()
    root = torch.full_like(pi, scale**0.5).masked_fill(dead, 1.0)
    return (root / pi).to(dtype), (root * pi).to(dtype)


class Curvature(Mapping[str, Operator]):
    """name → operator. `inverse` and `power` make another one, `matvec` applies all operators."""

    def __init__(
        self,
        layers: list[LayerCurvature],
        operators: Mapping[str, Operator] | None = None,
        notes: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.layers = {layer.name: layer for layer in layers}
        # whether operators are other than those the statistics make
        self.derived = operators is not None
        self._operators = dict(operators or {})
        self._spectra: dict[str, Spectrum] = {}
        self.notes = {name: dict((notes or {}).get(name, {})) for name in self.layers}
        # of eigendecompositions: how many needed which remedy
        self.retries = {layer.name: Counter(layer.retries) for layer in layers}

    def __getitem__(self, name: str) -> Operator:
        if name not in self._operators:
            self._operators[name] = self.layers[name].operator()
        return self._operators[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def spectrum(self, name: str) -> Spectrum:
        """The eigendecomposition of a layer's operator, computed once."""
        if name not in self._spectra:
            try:
                self._spectra[name] = spectrum_of(self[name], self.retries[name])
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from None
        return self._spectra[name]

    def damped_inverse(self, damping: float = 0.1, relative: bool = True) -> "Curvature":
        """H⁻¹ of every layer, by the definition of damping above.

        K-FAC, TKFAC and Shampoo are the Cholesky factors of both sides, applied by triangular
        solves, or by Woodbury where gradients are kept: no eigenvectors. A side that is singular
        gets jitter, and `report` says so. A dead layer, whose gradients are all zero, has the
        inverse 0.
        """
        _check(damping, self.layers.values())
        inverses: dict[str, Operator] = {}
        notes: dict[str, dict[str, Any]] = {}
        for name, operator in self.items():
            if isinstance(operator, Kron):
                inverses[name], notes[name] = _inverse_by_sides(operator, damping, relative, name)
            else:
                inverses[name], notes[name] = self._power(name, -1.0, damping, relative)
        return self._derived(inverses, notes)

    def inverse(self, damping: float, relative: bool = False) -> "Curvature":
        """(F + λI)⁻¹ by eigenvalues; see `power`."""
        return self.power(-1.0, damping, relative)

    def power(self, p: float, damping: float = 0.0, relative: bool = False) -> "Curvature":
        """(F + λI)ᵖ, layer by layer, by eigenvalues. A layer that is singular then is an error.

        `relative`: λ is `damping` times each layer's mean eigenvalue.
        """
        _check(damping, self.layers.values() if p != 1 else ())
        powers = {name: self._power(name, p, damping, relative) for name in self}
        operators = {name: operator for name, (operator, _) in powers.items()}
        return self._derived(operators, {name: note for name, (_, note) in powers.items()})

    def _power(
        self, name: str, p: float, damping: float, relative: bool
    ) -> tuple[Operator, dict[str, Any]]:
        if relative:
            damping = damping * float(mean_eigenvalue(self[name]).mean())
        damped = self.spectrum(name).damped(damping)
        note = {"power": p, "damping": damping, "condition_after": damped.condition()}
        if p < 0 and relative and bool(dead_blocks(self[name]).all()):
            return KronEigen((None, None), torch.zeros_like(damped.values)), note
        if p < 0 and not damped.least() > 0:
            raise ValueError(
                f"layer {name!r} is singular, its smallest eigenvalue is {damped.least():.3g}; "
                "give a damping above 0"
            )
        return damped.power(p), note

    def _derived(
        self, operators: Mapping[str, Operator], notes: Mapping[str, dict[str, Any]]
    ) -> "Curvature":
        result = Curvature(list(self.layers.values()), operators, notes)
        result.retries = self.retries
        return result

    def matvec(self, tangent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every layer's operator on its part of a tangent, both by parameter name."""
        result: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            matrix = pack(layer.layout, tangent).to(operator_dtype(self[name]))
            put_(result, layer.layout, self[name].apply(matrix), tangent)
        return result

    def trace(self) -> dict[str, float]:
        """Of every layer's operator."""
        sizes = {name: layer.layout.shape for name, layer in self.layers.items()}
        return {
            name: float(mean_eigenvalue(self[name]).sum()) * o * i
            for name, (_, o, i) in sizes.items()
        }

    def logdet(self, damping: float, relative: bool = False) -> dict[str, float]:
        """log det(F + λI) of every layer; see `power`."""
        damped = self.power(1.0, damping, relative)
        return {name: damped.spectrum(name).logdet() for name in self}

    def condition(self) -> dict[str, float]:
        """Largest eigenvalue over smallest, of every layer; inf where one is 0."""
        return {name: self.spectrum(name).condition() for name in self}

    def report(self, spectra: bool = True) -> list[dict[str, Any]]:
        """One record a layer: its shape and statistics, and the damping applied to it.

        `dead`: how many blocks saw only zeros. `spectra`: also condition number and effective rank,
        exp of the entropy of the eigenvalues, which take an eigendecomposition where there was none
        yet; None for a softmax too large for one.
        """
        records, traces = [], self.trace()
        for name, layer in self.layers.items():
            blocks, outputs, inputs = layer.layout.shape
            record: dict[str, Any] = {
                "layer": name,
                "method": layer.method,
                "kind": layer.kind,
                "blocks": blocks,
                "outputs": outputs,
                "inputs": inputs,
                "bias": layer.layout.bias,
                "terms": layer.terms,
                "policy": layer.policy,
                "columns": layer.columns,
                "bytes": sum(value.nbytes for value in layer.statistics.values()),
                "dead": int(dead_blocks(self[name]).sum()),
                "trace": traces[name],
            }
            if spectra:
                spectrum = self.spectrum(name) if has_spectrum(self[name]) else None
                record["condition"] = spectrum and spectrum.condition()
                record["effective_rank"] = spectrum and spectrum.effective_rank()
            note = self.notes[name]
            fallbacks = {**self.retries[name], **note.get("fallbacks", {})}
            records.append({**record, **note, "fallbacks": fallbacks})
        return records

    def save(self, folder: str | Path) -> None:
        """Write the statistics, or the operators of an inverse or power, all or nothing."""
        from isokron.curvature.save import save_curvature

        save_curvature(self, folder)

    @staticmethod
    def load(folder: str | Path, model: nn.Module | None = None) -> "Curvature":
        """What `save` wrote, its checksums verified; with a `model`, checked against its layers."""
        from isokron.curvature.save import load_curvature

        return load_curvature(folder, model)


def _inverse_by_sides(
    operator: Kron, damping: float, relative: bool, layer: str
) -> tuple[Kron, dict[str, Any]]:
    """(G + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹, and what Cholesky had to fall back on."""
    added = side_damping(operator, damping, relative)
    inverses, rungs = [], Counter[str]()
    for factor, value, side in zip(operator.factors, added, ("output", "input"), strict=True):
        inverse, climbed = _inverse_side(factor, value, f"{side} side of layer {layer!r}")
        inverses.append(inverse)
        rungs.update(rung for rung in climbed if rung != "as given")
    # zeros on one side make the product zero
    inverses[1] = _zeroed(inverses[1], dead_blocks(operator))
    numbers = [float(value.mean()) for value in added]
    return Kron(tuple(inverses)), {
        "power": -1.0,
        "damping": numbers[0] * numbers[1],
        "damping_output": numbers[0],
        "damping_input": numbers[1],
        "fallbacks": dict(rungs),
    }


def _inverse_side(factor: Factor, damping: Tensor, what: str) -> tuple[Factor, tuple[str, ...]]:
    """`damping`: [B]"""
    if isinstance(factor, Dense):
        matrix = factor.matrix.clone()
        matrix.diagonal(0, 1, 2).add_(damping[:, None])
        cholesky = factorize(matrix, name=f"the {what}")
        # contiguous, as a saved one is loaded: products round alike
        return CholeskyInverse(cholesky.lower.to(matrix.dtype).contiguous()), cholesky.rungs
    if isinstance(factor, Diagonal):
        values = factor.values + damping[:, None]
        if not bool((values > 0).all()):
            raise ValueError(f"the {what} is singular; give a damping above 0")
        return Diagonal(values.reciprocal()), ()
    assert isinstance(factor, LowRank)
    try:
        if factor.diagonal.size(-1) > 1:  # a softmax, of one block as heads are
            return factor.inverse(float(damping[0])), ()
        diagonal = factor.diagonal + damping[:, None].to(factor.diagonal)
        return LowRank(diagonal, factor.columns, factor.sign).inverse(), ()
    except ValueError as error:
        raise ValueError(f"the {what}: {error}") from None


def _zeroed(factor: Factor, blocks: Tensor) -> Factor:
    if not bool(blocks.any()):
        return factor
    if isinstance(factor, CholeskyInverse):
        return Dense(factor.to_dense().masked_fill(blocks[:, None, None], 0.0))
    assert isinstance(factor, Diagonal)  # input sides are never low-rank
    return Diagonal(factor.values.masked_fill(blocks[:, None], 0.0))


def _check(damping: float, layers: Iterable[LayerCurvature]) -> None:
    """Refuse bad damping, and layers that share a weight: sums have no inverse of their parts."""
    if not damping >= 0 or damping == float("inf"):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
    owners: dict[tuple[str, tuple[int, int] | None], str] = {}
    for layer in layers:
        for key, param in layer.layout.params.items():
            other = owners.setdefault((param, layer.layout.rows.get(key)), layer.name)
            if other != layer.name:
                raise ValueError(
                    f"layers {other!r} and {layer.name!r} share {param!r}, and a sum's inverse "
                    "is not that of its parts; fit with `layers` that name one of them"
                )
