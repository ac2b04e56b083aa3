"""Curvature of a model: a mapping from layers to operators, and what is done with all of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.curvature.packing import Layout, pack, put_
from isokron.linalg import eigh, lift
from isokron.operators import Dense, Diagonal, Kron, KronEigen

Operator = Kron | KronEigen
SPLITS = ("joint", "sides")


@dataclass(frozen=True, eq=False)
class Layer:
    """What is known of one layer. `statistics`: see isokron.curvature.statistics."""

    name: str
    method: str
    kind: str
    layout: Layout
    statistics: dict[str, Tensor]

    def operator(self) -> Operator:
        """On matrices [B, o, i], the column of a bias last: output side first, then input side."""
        known = self.statistics
        if self.kind == "diagonal":
            return KronEigen((None, None), known["eigenvalues"])
        if self.method == "ekfac":
            return KronEigen(
                (known["basis.output"], known.get("basis.input")), known["eigenvalues"]
            )
        inputs = known["input"]
        if self.method != "kfac":  # both sides have the trace of the whole
            inputs = inputs / _trace(inputs).clamp_min(torch.finfo(inputs.dtype).tiny)
        side = Dense(inputs) if inputs.ndim == 3 else Diagonal(inputs)
        return Kron((Dense(known["output"]), side))


@dataclass(frozen=True)
class Spectrum:
    """A layer's eigenbases, and eigenvalues of either side, or of both together for EK-FAC."""

    bases: tuple[Tensor | None, Tensor | None]
    sides: tuple[Tensor, Tensor] | None  # [B, o], [B, i]
    values: Tensor  # [B, o, i]


class Curvature(Mapping[str, Operator]):
    """name → operator. `power` and `inverse` make another one, `matvec` applies all operators."""

    def __init__(
        self, layers: list[Layer], operators: Mapping[str, Operator] | None = None
    ) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._operators = dict(operators or {})
        self._spectra: dict[str, Spectrum] = {}
        self.notes: dict[str, dict[str, Any]] = {name: {} for name in self.layers}

    def __getitem__(self, name: str) -> Operator:
        if name not in self._operators:
            self._operators[name] = self.layers[name].operator()
        return self._operators[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)

    def spectrum(self, name: str) -> Spectrum:
        """The eigendecomposition of a layer's operator, found once."""
        if name not in self._spectra:
            self._spectra[name] = _spectrum(self[name])
        return self._spectra[name]

    def inverse(self, damping: float, **options: Any) -> "Curvature":
        """(F + λI)⁻¹, with the options of `power`."""
        return self.power(-1.0, damping, **options)

    def power(
        self,
        p: float,
        damping: float = 0.0,
        *,
        split: str = "joint",
        relative: bool = False,
        max_condition: float | None = None,
    ) -> "Curvature":
        """(F + λI)ᵖ, layer by layer.

        `split`: λ is added to the eigenvalues of the whole ("joint"), or to both sides of a
        Kronecker product as π√λ and √λ/π, π² = mean eigenvalue of A over that of G ("sides").
        `relative`: λ is a multiple of each layer's mean eigenvalue. `max_condition`: before,
        eigenvalues are lifted to the largest over it, side by side where there are sides;
        `report` says how many.
        """
        _check_damping(damping, split, max_condition)
        if p != 1:
            _check_apart(list(self.layers.values()))
        made: dict[str, Operator] = {}
        notes: dict[str, dict[str, Any]] = {}
        for name in self:
            values, clipped = self._damped(name, damping, split, relative, max_condition)
            if p < 0 and not bool((values > 0).all()):
                raise ValueError(
                    f"layer {name!r} is singular, its smallest eigenvalue is "
                    f"{float(values.min()):.3g}; give a damping above 0 or a max_condition"
                )
            made[name] = KronEigen(self.spectrum(name).bases, values**p)
            notes[name] = {
                "power": p,
                "damping": damping * self._unit(name) if relative else damping,
                "split": split,
                "condition_before": _condition(self.spectrum(name).values),
                "condition_after": _condition(values),
                "clipped": clipped,
            }
        result = Curvature(list(self.layers.values()), made)
        result.notes = notes
        return result

    def _unit(self, name: str) -> float:
        """A layer's mean eigenvalue, which relative damping is a multiple of."""
        return float(self.spectrum(name).values.mean())

    def _damped(
        self, name: str, damping: float, split: str, relative: bool, most: float | None
    ) -> tuple[Tensor, int]:
        """A layer's eigenvalues [B, o, i], clipped and damped, and how many were clipped."""
        found = self.spectrum(name)
        if relative:
            damping = damping * self._unit(name)
        if found.sides is None:
            if split == "sides" and self.layers[name].kind != "diagonal":
                raise ValueError(
                    f"layer {name!r} has no sides to damp by themselves, its eigenvalues are those "
                    "of EK-FAC; use split='joint'"
                )
            values, count = _lifted(found.values, most)
            return values + damping, count
        (left, lifted), (right, more) = (_lifted(side, most) for side in found.sides)
        if split == "joint":
            return left[:, :, None] * right[:, None, :] + damping, lifted + more
        pi = (right.mean(1) / left.mean(1).clamp_min(1e-300)).sqrt()[:, None]
        root = damping**0.5
        left, right = left + root / pi.clamp_min(1e-300), right + root * pi
        return left[:, :, None] * right[:, None, :], lifted + more

    def matvec(self, tangent: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Every layer's operator on its part of a tangent, given and returned by parameter name."""
        result: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            matrix, operator = pack(layer.layout, tangent), self[name]
            put_(result, layer.layout, operator.apply(matrix.to(_dtype(operator))), tangent)
        return result

    def trace(self) -> dict[str, float]:
        """Of every layer's operator."""
        return {name: float(self.spectrum(name).values.sum()) for name in self}

    def logdet(self, damping: float, **options: Any) -> dict[str, float]:
        """log det(F + λI) of every layer, with the options of `power`."""
        damped = self.power(1.0, damping, **options)
        return {name: float(damped.spectrum(name).values.log().sum()) for name in self}

    def condition(self) -> dict[str, float]:
        """Largest eigenvalue over smallest, of every layer; inf where one is 0."""
        return {name: _condition(self.spectrum(name).values) for name in self}

    def report(self, spectra: bool = True) -> list[dict[str, Any]]:
        """One record a layer: what it is and holds, and what was done to it.

        `spectra`: also condition number, trace and effective rank, exp of the entropy of the
        eigenvalues, which take an eigendecomposition where there was none yet.
        """
        records = []
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
                "bytes": sum(value.nbytes for value in layer.statistics.values()),
            }
            if spectra:
                values = self.spectrum(name).values.double()
                record["trace"] = float(values.sum())
                record["condition"] = _condition(values)
                record["effective_rank"] = _effective_rank(values)
            records.append({**record, **self.notes.get(name, {})})
        return records

    def save(self, folder: str | Path) -> None:
        """Write the statistics, as safetensors and a JSON, whole or not at all."""
        from isokron.curvature.storage import save_curvature

        save_curvature(self, folder)

    @staticmethod
    def load(folder: str | Path, model: nn.Module | None = None) -> "Curvature":
        """What `save` wrote; with a `model`, checked against its layers."""
        from isokron.curvature.storage import load_curvature

        return load_curvature(folder, model)


def _condition(values: Tensor) -> float:
    least = float(values.min())
    return float(values.max()) / least if least > 0 else float("inf")


def _effective_rank(values: Tensor) -> float:
    """exp(−Σ p log p), p the eigenvalues over their sum."""
    p = values.clamp_min(0).flatten()
    total = p.sum()
    if total == 0:
        return 0.0
    p = p[p > 0] / total
    return float((-(p * p.log()).sum()).exp())


def _spectrum(operator: Operator) -> Spectrum:
    if isinstance(operator, KronEigen):
        left, right = operator.bases
        return Spectrum((left, right), None, operator.eigenvalues)
    bases: list[Tensor | None] = []
    sides: list[Tensor] = []
    for factor in operator.factors:
        if isinstance(factor, Diagonal):
            bases.append(None)
            sides.append(factor.values.clamp_min(0))
        else:
            values, basis = eigh(factor.to_dense())
            bases.append(basis)
            sides.append(values.clamp_min(0))
    left, right = sides
    return Spectrum((bases[0], bases[1]), (left, right), left[:, :, None] * right[:, None, :])


def _lifted(values: Tensor, most: float | None) -> tuple[Tensor, int]:
    """Eigenvalues lifted to the largest of their block over `most`, and how many were."""
    values = values.clamp_min(0)
    if most is None:
        return values, 0
    found = lift(values.flatten(1), most)
    return found.values.view_as(values), int(found.lifted.sum())


def _check_apart(layers: list[Layer]) -> None:
    """Refuse layers that share a weight: their operators add up, and powers of them do not."""
    owners: dict[tuple[str, tuple[int, int] | None], str] = {}
    for layer in layers:
        for key, param in layer.layout.params.items():
            other = owners.setdefault((param, layer.layout.rows.get(key)), layer.name)
            if other != layer.name:
                raise ValueError(
                    f"layers {other!r} and {layer.name!r} share {param!r}, and a sum's inverse "
                    "is not that of its parts; fit with `layers` that name one of them"
                )


def _check_damping(damping: float, split: str, max_condition: float | None) -> None:
    if not damping >= 0 or damping == float("inf"):
        raise ValueError(f"damping must be a finite number of at least 0, got {damping!r}")
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")
    if max_condition is not None and not max_condition >= 1:
        raise ValueError(f"max_condition must be None or at least 1, got {max_condition!r}")


def _trace(side: Tensor) -> Tensor:
    """[B, i, i] → [B, 1, 1]; [B, i] → [B, 1]"""
    if side.ndim == 2:
        return side.sum(1, keepdim=True)
    return side.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]


def _dtype(operator: Operator) -> torch.dtype:
    if isinstance(operator, KronEigen):
        return operator.eigenvalues.dtype
    return operator.factors[0].to_dense().dtype
