"""Curvature of a model: a mapping from layers to operators, and what is done with all of them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from isokron.curvature.layer import Layer, Operator
from isokron.curvature.packing import pack, put_
from isokron.curvature.sides import inverse_by_sides
from isokron.curvature.spectra import Spectrum, damped, spectrum_of, within_reach
from isokron.operators import Kron, KronThin

SPLITS = ("joint", "sides")


class Curvature(Mapping[str, Operator]):
    """name → operator. `power` and `inverse` make another one, `matvec` applies all operators."""

    def __init__(
        self, layers: list[Layer], operators: Mapping[str, Operator] | None = None
    ) -> None:
        self.layers = {layer.name: layer for layer in layers}
        self._operators = dict(operators or {})
        self._spectra: dict[str, Spectrum] = {}
        self.notes: dict[str, dict[str, Any]] = {name: {} for name in self.layers}
        # of eigendecompositions: how many needed what
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
        """The eigendecomposition of a layer's operator, found once."""
        if name not in self._spectra:
            try:
                self._spectra[name] = spectrum_of(self[name], self.retries[name])
            except ValueError as error:
                raise ValueError(f"layer {name!r}: {error}") from None
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
        pseudo: bool = False,
    ) -> "Curvature":
        """(F + λI)ᵖ, layer by layer.

        `split`: λ is added to the eigenvalues of the whole ("joint"), or to both sides of a
        Kronecker product as π√λ and √λ/π, π² = mean eigenvalue of A over that of G ("sides").
        `relative`: λ is a multiple of each layer's mean eigenvalue. `max_condition`: before,
        eigenvalues are lifted to the largest over it, side by side where there are sides;
        `report` says how many. `pseudo`: eigenvalues that are zero to rounding stay zero, as in a
        pseudoinverse.

        Inverses of sides are by Cholesky, which where a side is singular adds jitter to it, and
        `report` says so; everything else is by eigenvalues, where what is singular is an error.
        """
        _check_damping(damping, split, max_condition)
        if p != 1:
            _check_apart(list(self.layers.values()))
        made: dict[str, Operator] = {}
        notes: dict[str, dict[str, Any]] = {}
        for name in self:
            operator = self[name]
            plain = max_condition is None and not pseudo
            if p == -1 and split == "sides" and plain and isinstance(operator, Kron):
                made[name], notes[name] = self._by_sides(name, damping, relative)
            else:
                how = damping, split, relative, max_condition, pseudo
                made[name], notes[name] = self._by_eigenvalues(name, p, *how)
        result = Curvature(list(self.layers.values()), made)
        result.notes, result.retries = notes, self.retries
        return result

    def _by_eigenvalues(
        self,
        name: str,
        p: float,
        damping: float,
        split: str,
        relative: bool,
        most: float | None,
        pseudo: bool,
    ) -> tuple[Operator, dict[str, Any]]:
        found = self.spectrum(name)
        if split == "sides" and found.sides is None and self.layers[name].kind != "diagonal":
            raise ValueError(
                f"layer {name!r} has no sides to damp by themselves, its eigenvalues are those "
                "of EK-FAC; use split='joint'"
            )
        damping = damping * found.mean() if relative else damping
        lifted, clipped = damped(found, damping, split, most)
        if p < 0 and not pseudo and not lifted.least() > 0:
            raise ValueError(
                f"layer {name!r} is singular, its smallest eigenvalue is {lifted.least():.3g}; "
                "give a damping above 0 or a max_condition"
            )
        return lifted.power(p, pseudo), {
            "power": p,
            "damping": damping,
            "split": split,
            "condition_before": found.condition(),
            "condition_after": lifted.condition(),
            "clipped": clipped,
        }

    def _by_sides(
        self, name: str, damping: float, relative: bool
    ) -> tuple[Operator, dict[str, Any]]:
        operator = self[name]
        assert isinstance(operator, Kron)
        found = inverse_by_sides(operator, damping, relative, name)
        return found.operator, {
            "power": -1.0,
            "damping": found.damping[0] * found.damping[1],
            "damping_output": found.damping[0],
            "damping_input": found.damping[1],
            "split": "sides",
            "condition_before": found.before,
            "condition_after": found.after,
            "clipped": 0,
            "fallbacks": {rung: n for rung, n in found.rungs.items() if rung != "as given"},
        }

    def matvec(self, tangent: Mapping[str, Tensor], *, within: bool = False) -> dict[str, Tensor]:
        """Every layer's operator on its part of a tangent, given and returned by parameter name.

        `within`: the tangent is made of the gradients that were fitted, such as their mean. Where
        these are kept themselves (see `policy` of `fit`), what of it lies outside their span is
        rounding, which inverses would make large; then it is left out.
        """
        result: dict[str, Tensor] = {}
        for name, layer in self.layers.items():
            matrix, operator = pack(layer.layout, tangent).to(layer.dtype), self[name]
            if within and isinstance(operator, KronThin):
                product = operator.apply_within(matrix)
            else:
                product = operator.apply(matrix)
            put_(result, layer.layout, product, tangent)
        return result

    def trace(self) -> dict[str, float]:
        """Of every layer's operator."""
        return {name: self.spectrum(name).trace() for name in self}

    def logdet(self, damping: float, **options: Any) -> dict[str, float]:
        """log det(F + λI) of every layer, with the options of `power`."""
        lifted = self.power(1.0, damping, **options)
        return {name: lifted.spectrum(name).logdet() for name in self}

    def condition(self) -> dict[str, float]:
        """Largest eigenvalue over smallest, of every layer; inf where one is 0."""
        return {name: self.spectrum(name).condition() for name in self}

    def report(self, spectra: bool = True) -> list[dict[str, Any]]:
        """One record a layer: what it is and holds, and what was done to it.

        `spectra`: also condition number, trace and effective rank, exp of the entropy of the
        eigenvalues, which take an eigendecomposition where there was none yet; None for a softmax
        too large for one.
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
                "terms": layer.terms,
                "policy": layer.policy,
                "columns": layer.columns,
                "bytes": sum(value.nbytes for value in layer.statistics.values()),
            }
            if spectra:
                known = self.spectrum(name) if within_reach(self[name]) else None
                record["trace"] = known and known.trace()
                record["condition"] = known and known.condition()
                record["effective_rank"] = known and known.effective_rank()
            note = self.notes.get(name, {})
            fallbacks = {**self.retries[name], **note.get("fallbacks", {})}
            records.append({**record, **note, "fallbacks": fallbacks})
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
