"""Curvature of a model: a mapping from layers to operators, with damped inverses and powers.

One definition of damping serves everything that is built on it: for a layer of two sides

    H = (G + √λ/π I) ⊗ (A + π√λ I),  π² = mean eigenvalue of A over that of G,

and Λ + λ for the eigenvalues of EK-FAC and of diagonal layers; λ is `damping` times the mean
eigenvalue of the layer (Martens & Grosse 1503.05671, section 6.3).
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from isokron.curvature.layer_report import CurvatureReport, layer_record, log_line
from isokron.curvature.layers import Layout, pack, unpack
from isokron.linalg import eigh, factorize, lift
from isokron.operators import (
    CholeskyInverse,
    Dense,
    Diagonal,
    Factor,
    Kron,
    KronEigen,
    LowRank,
)
from isokron.operators.kron import is_thin
from isokron.operators.low_rank import LARGE, wide

logger = logging.getLogger(__name__)
Operator = Kron | KronEigen


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """The statistics of one layer; see isokron.curvature.statistics. `terms`: M; `policy`: of fit.

    The output side is "output" [B, o, o]; or "columns" U [B, o, T] for UUᵀ; or "mean" [B, o] and
    "columns" of a softmax for diag(mean) − UUᵀ.
    """

    name: str
    method: str
    layout: Layout
    statistics: dict[str, Tensor]
    policy: str = "dense"
    terms: float = 0.0

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
        if "columns" not in statistics:
            return Kron((Dense(statistics["output"]), side))
        columns = statistics["columns"]
        if "mean" in statistics:
            return Kron((LowRank(statistics["mean"], columns, -1), side))
        zeros = torch.zeros(len(columns), 1, dtype=torch.float64, device=inputs.device)
        return Kron((LowRank(zeros, columns), side))


class Spectrum(NamedTuple):
    """Eigenvalues [B, o, i] on the eigenbases of both sides, Q_G and Q_A, None for I.

    `sides`: eigenvalues [B, o] and [B, i] of each side, where values are their products. A thin Q_G
    has a row more, see `KronEigen`.
    """

    bases: tuple[Tensor | None, Tensor | None]
    values: Tensor
    sides: tuple[Tensor, Tensor] | None = None

    @property
    def copies(self) -> Tensor:
        """How many eigenvalues each row stands for, [o, 1]."""
        return KronEigen(self.bases, self.values).copies


def _side_eigenvalues(factor: Factor) -> tuple[Tensor, Tensor | None]:
    """Eigenvalues [B, n], and their vectors, None for I."""
    if isinstance(factor, Diagonal):
        return factor.values.clamp_min(0), None
    if isinstance(factor, LowRank) and factor.sign > 0 and is_thin(factor.columns):
        values, basis = factor.eigen()  # of UUᵀ: fits have no diagonal here
        dtype = wide(basis.dtype)
        return torch.nn.functional.pad(values, (0, 1)).to(dtype), basis.to(dtype)
    values, basis = eigh(factor.to_dense())
    return values.clamp_min(0), basis  # below zero is rounding


def _large_outputs(operator: Operator) -> int:
    """Outputs of a softmax's low-rank side that is too large to be made dense, else 0."""
    side = operator.factors[0] if isinstance(operator, Kron) else None
    outputs = side.columns.size(-2) if isinstance(side, LowRank) and side.sign < 0 else 0
    return outputs if outputs > LARGE else 0


def condition_number(values: Tensor) -> float:
    """Largest over smallest; inf where one is 0."""
    least = float(values.min())
    return float(values.max()) / least if least > 0 else float("inf")


def _effective_rank(values: Tensor, copies: Tensor) -> float:
    """exp(−Σ p log p), p the eigenvalues over their sum."""
    values = values.double().clamp_min(0)
    if not values.any():
        return 0.0
    shares = values / (values * copies).sum()
    return float((-(copies * torch.special.xlogy(shares, shares)).sum()).exp())


def mean_eigenvalue(part: Operator | Factor) -> Tensor:
    """Of an operator, or of one side: [B] in float64, without any decomposition."""
    if isinstance(part, Kron):
        left, right = (mean_eigenvalue(factor) for factor in part.factors)
        return left.to(right.device) * right
    if isinstance(part, KronEigen):
        values = part.copies * part.eigenvalues.double()
        return values.sum((1, 2)) / (part.copies.sum() * values.size(2))
    if isinstance(part, Diagonal):
        return part.values.double().mean(1)
    if isinstance(part, LowRank):
        outputs = part.columns.size(-2)
        squares = torch.linalg.vector_norm(part.columns, dim=(1, 2), dtype=torch.float64).square()
        diagonal = part.diagonal.double().expand(-1, outputs).mean(1)
        return diagonal + part.sign * squares.to(diagonal.device) / outputs
    return part.to_dense().diagonal(0, 1, 2).double().mean(1)


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
    """What is computed in. Columns of an output side may be stored in less."""
    if not isinstance(operator, Kron):
        return operator.eigenvalues.dtype
    return next(v for v in vars(operator.factors[1]).values() if isinstance(v, Tensor)).dtype


def side_damping(operator: Kron, damping: float, relative: bool = True) -> tuple[Tensor, Tensor]:
    """√λ/π and π√λ, which are added to the output side and to the input side: [B] each.

    `relative`: λ is `damping` times the mean eigenvalue of the layer, else `damping` itself. A dead
    block gets 1 on both sides: its gradients are zero, and any positive number serves.
    """
    left, right = (mean_eigenvalue(factor) for factor in operator.factors)
    left, dead, dtype = left.to(right.device), dead_blocks(operator), operator_dtype(operator)
    scale = damping * float((left * right).mean()) if relative else damping
    sides = split_damping(left.masked_fill(dead, 0.0), right, scale)
    output, inputs = (side.masked_fill(dead, 1.0).to(dtype) for side in sides)
    return output, inputs


def split_damping(left: Tensor, right: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """√λ/π and π√λ, π² = mean eigenvalue of A over that of G: [B] each. left, right: these means.

    In float64: products of means underflow in float32 long before the means do. Where a mean is 0,
    π is 1: gradients are zero then, and any number serves.
    """
    dead = (left <= 0) | (right <= 0)
    pi = torch.where(dead, 1.0, right / torch.where(dead, 1.0, left)).sqrt()
    return damping**0.5 / pi, damping**0.5 * pi


class Curvature(Mapping[str, Operator]):
    """name → operator. `inverse` and `power` make another one, `matvec` applies all operators.

    `operators`: of an inverse or power, in place of those the statistics make. `notes`: what
    `report` adds to the record of a layer. `fingerprint`: JSON-able, what it was fitted to:
    "weights" has the digest of the model's.
    """

    def __init__(
        self,
        layers: list[LayerCurvature],
        operators: Mapping[str, Operator] | None = None,
        notes: Mapping[str, dict[str, Any]] | None = None,
        fingerprint: Mapping[str, Any] | None = None,
    ) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self.derived = operators is not None
        self.notes, self.fingerprint = dict(notes or {}), dict(fingerprint or {})
        self._operators = dict(operators or {})
        self._spectra: dict[str, Spectrum] = {}

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
        if name in self._spectra:
            return self._spectra[name]
        operator = self[name]
        if _large_outputs(operator):
            raise ValueError(
                f"layer {name!r}: eigenvalues of a low-rank side of {_large_outputs(operator)} "
                f"outputs, more than {LARGE}, are not computed; use damped_inverse(damping), which "
                "does without them if max_condition is None"
            )
        if isinstance(operator, KronEigen):
            left_basis, right_basis = operator.bases
            spectrum = Spectrum((left_basis, right_basis), operator.eigenvalues)
        else:
            (left, left_basis), (right, right_basis) = map(_side_eigenvalues, operator.factors)
            values = left[:, :, None] * right[:, None, :]
            if left_basis is not None and not is_thin(left_basis):
                left_basis = left_basis.to(values)  # of columns in fewer bits than the statistics
            spectrum = Spectrum((left_basis, right_basis), values, (left, right))
        self._spectra[name] = spectrum
        return spectrum

    def damped_inverse(
        self, damping: float = 0.1, relative: bool = True, max_condition: float | None = None
    ) -> "Curvature":
        """H⁻¹ of every layer, by the definition of damping above.

        K-FAC, TKFAC and Shampoo are the Cholesky factors of both sides, applied by triangular
        solves, or by Woodbury where gradients are kept: no eigenvectors. A side that is singular
        gets jitter, and `report` says so. A dead layer, whose gradients are all zero, has the
        inverse 0. `max_condition` κ: eigenvalues of H below their maximum/κ are lifted to it, which
        takes an eigendecomposition.
        """
        _check(damping, self.layers.values())
        inverses = {
            name: _inverse_by_sides(operator, damping, relative, name)
            if isinstance(operator, Kron) and max_condition is None
            else self._power(name, -1.0, damping, relative, max_condition, split=True)
            for name, operator in self.items()
        }
        return self._derived(inverses)

    def inverse(
        self, damping: float, relative: bool = False, max_condition: float | None = None
    ) -> "Curvature":
        """(F + λI)⁻¹ by eigenvalues; see `power`."""
        return self.power(-1.0, damping, relative, max_condition)

    def power(
        self,
        p: float,
        damping: float = 0.0,
        relative: bool = False,
        max_condition: float | None = None,
    ) -> "Curvature":
        """(F + λI)ᵖ, layer by layer, by eigenvalues. A layer that is singular then is an error.

        `relative`: λ is `damping` times each layer's mean eigenvalue. `max_condition` κ:
        eigenvalues of F + λI below their maximum/κ are lifted to it.
        """
        _check(damping, self.layers.values() if p != 1 else ())
        powers = {name: self._power(name, p, damping, relative, max_condition) for name in self}
        return self._derived(powers)

    def _power(
        self,
        name: str,
        p: float,
        damping: float,
        relative: bool,
        max_condition: float | None = None,
        split: bool = False,
    ) -> tuple[Operator, dict[str, Any]]:
        """`split`: λ is on both sides, where there are two."""
        operator, spectrum = self[name], self.spectrum(name)
        bases, values, sides = spectrum
        if split and sides is not None and isinstance(operator, Kron):
            added = side_damping(operator, damping, relative)
            left, right = (side + new[:, None] for side, new in zip(sides, added, strict=True))
            values = left[:, :, None] * right[:, None, :]
            damping = float((added[0] * added[1]).mean())
        else:
            damping = damping * float(mean_eigenvalue(operator).mean()) if relative else damping
            values = values.clamp_min(0) + damping  # below zero is rounding
        note: dict[str, Any] = {"power": p, "damping": damping, "max_condition": max_condition}
        if max_condition is not None:
            lifted = lift(values.flatten(1), max_condition)
            clipped = (lifted.values.view_as(values) > values) * spectrum.copies
            note["clipped"] = float(clipped.sum() / (spectrum.copies.expand_as(values).sum()))
            values = lifted.values.view_as(values)
        note["condition_after"] = condition_number(values)
        if p < 0 and (relative or split) and bool(dead_blocks(operator).all()):
            return KronEigen(bases, torch.zeros_like(values)), note
        least = float(values.min())
        if p < 0 and not least > 0:
            raise ValueError(
                f"layer {name!r} is singular, its smallest eigenvalue is {least:.3g}; give a "
                "damping above 0"
            )
        return KronEigen(bases, values**p), note

    def _derived(self, results: Mapping[str, tuple[Operator, dict[str, Any]]]) -> "Curvature":
        operators = {name: operator for name, (operator, _) in results.items()}
        notes = {name: note for name, (_, note) in results.items()}
        derived = Curvature(list(self.layers.values()), operators, notes, self.fingerprint)
        derived.log()
        return derived

    def log(self) -> None:
        """One line a layer, at level INFO: T, policy, damping, what was clipped, fallbacks."""
        for name in self.layers if logger.isEnabledFor(logging.INFO) else ():
            logger.info("%s", log_line(self._record(name) | self.notes.get(name, {})))

    def _record(self, name: str) -> dict[str, Any]:
        """What a report says of a layer without looking at its operator."""
        layer = self.layers[name]
        bases = layer.statistics.get("basis.output")
        columns = layer.statistics.get("columns", bases if is_thin(bases) else None)
        count = None if columns is None else columns.size(2)
        record = layer_record(
            name, layer.method, layer.layout, layer.statistics, layer.policy, layer.terms, count
        )
        return {**record, "fallbacks": {}}

    def matvec(self, tangent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every layer's operator on its part of a tangent, both by parameter name."""
        result: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            layout, operator = layer.layout, self[name]
            moved = operator.apply(pack(layout, tangent).to(operator_dtype(operator)))
            # layers that share a parameter add up in it
            for key, value in unpack(layout, moved).items():
                param = layout.params[key]
                total = result.setdefault(param, torch.zeros_like(tangent[param]))
                part = layout.part(key, total)
                part += value.reshape(part.shape).to(total.dtype)
        return result

    def trace(self) -> dict[str, float]:
        """Of every layer's operator."""
        shapes = {name: layer.layout.shape[1:] for name, layer in self.layers.items()}
        return {n: float(mean_eigenvalue(self[n]).sum()) * o * i for n, (o, i) in shapes.items()}

    def report(self, spectra: bool = True) -> CurvatureReport:
        """One record a layer: its shape and statistics, and the damping applied to it.

        `dead`: how many blocks saw only zeros. `spectra`: also condition number and effective rank,
        exp of the entropy of the eigenvalues, which take an eigendecomposition where there was none
        yet; None for a head too large for one.
        """
        records, traces = CurvatureReport(), self.trace()
        for name in self.layers:
            record = self._record(name)
            record |= {"dead": int(dead_blocks(self[name]).sum()), "trace": traces[name]}
            if spectra:
                record |= _spectral(None if _large_outputs(self[name]) else self.spectrum(name))
            records.append({**record, **self.notes.get(name, {})})
        return records

    def save(self, folder: str | Path) -> None:
        """Write the statistics, or the operators of an inverse or power, all or nothing."""
        from isokron.curvature.save import save_curvature

        save_curvature(self, folder)

    @staticmethod
    def load(folder: str | Path, model: nn.Module | None = None) -> "Curvature":
        """What `save` wrote, its checksums verified; `model` must have the weights of the fit."""
        from isokron.curvature.save import load_curvature

        return load_curvature(folder, model)


def _spectral(spectrum: Spectrum | None) -> dict[str, float | None]:
    """What a report says of the eigenvalues of a layer, and of both sides where it has two."""
    names = "condition", "effective_rank", "condition_output", "condition_input"
    record: dict[str, float | None] = dict.fromkeys(names)
    if spectrum is not None:
        record["condition"] = condition_number(spectrum.values)
        record["effective_rank"] = _effective_rank(spectrum.values, spectrum.copies)
        for name, side in zip(names[2:], spectrum.sides or (), strict=False):
            record[name] = condition_number(side)
    return record


def _inverse_by_sides(
    operator: Kron, damping: float, relative: bool, layer: str
) -> tuple[Kron, dict[str, Any]]:
    """(G + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹, and what Cholesky had to fall back on."""
    added = side_damping(operator, damping, relative)
    fallbacks = Counter[str]()
    inverses = [
        _inverse_side(factor, value, f"the {side} side of layer {layer!r}", fallbacks)
        for factor, value, side in zip(operator.factors, added, ("output", "input"), strict=True)
    ]
    # zeros on one side make the product zero; input sides are never low-rank
    dead, side = dead_blocks(operator), inverses[1]
    if bool(dead.any()) and isinstance(side, Diagonal):
        inverses[1] = Diagonal(side.values.masked_fill(dead[:, None], 0.0))
    elif bool(dead.any()):
        inverses[1] = Dense(side.to_dense().masked_fill(dead[:, None, None], 0.0))
    numbers = [float(value.mean()) for value in added]
    return Kron(tuple(inverses)), {
        "power": -1.0,
        "damping": numbers[0] * numbers[1],
        "damping_output": numbers[0],
        "damping_input": numbers[1],
        "fallbacks": dict(fallbacks),
    }


def _inverse_side(factor: Factor, damping: Tensor, what: str, fallbacks: Counter[str]) -> Factor:
    """`damping`: [B]"""
    if isinstance(factor, Dense):
        matrix = factor.matrix.clone()
        matrix.diagonal(0, 1, 2).add_(damping[:, None])
        cholesky = factorize(matrix, name=what)
        fallbacks.update(rung for rung in cholesky.rungs if rung != "as given")
        # contiguous, as a saved one is loaded: products round alike
        return CholeskyInverse(cholesky.lower.to(matrix.dtype).contiguous())
    if isinstance(factor, Diagonal):
        values = factor.values + damping[:, None]
        if not bool((values > 0).all()):
            raise ValueError(f"{what} is singular; give a damping above 0")
        return Diagonal(values.reciprocal())
    assert isinstance(factor, LowRank)
    try:
        if factor.diagonal.size(-1) > 1:  # a softmax, of one block as heads are
            return factor.inverse(float(damping[0]))
        diagonal = factor.diagonal + damping[:, None].to(factor.diagonal)
        return LowRank(diagonal, factor.columns, factor.sign).inverse()
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


def _check(damping: float, layers: Iterable[LayerCurvature]) -> None:
    """Refuse bad damping, and layers that share a weight: sums have no inverse of their parts."""
    if not damping >= 0 or damping == float("inf"):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
    owners: dict[tuple[str, tuple[int, int] | None], str] = {}
    for layer in layers:
        for key, param in layer.layout.params.items():
            owner = owners.setdefault((param, layer.layout.rows.get(key)), layer.name)
            if owner != layer.name:
                raise ValueError(
                    f"layers {owner!r} and {layer.name!r} share {param!r}, and a sum's inverse "
                    "is not that of its parts; fit with `layers` that name one of them"
                )
