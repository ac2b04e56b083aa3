"""The Fisher of a layer as a running mean over training, and its damped inverse.

Statistics are those of isokron.curvature.statistics: A `input` and G `output`, or unit `columns` U
and their `lengths` l with G = U diag(l²) Uᵀ. A refresh finds A = Q_A d_A Q_Aᵀ and G = Q_G d_G Q_Gᵀ,
and a step divides by the eigenvalues h of the damped Fisher,

    V = Q_G [(Q_Gᵀ M Q_A) ⊘ h] Q_Aᵀ,   h = d_G d_Aᵀ + λ,  or Λ + λ for EK-FAC and norms.

A pair (λ_G, λ_A) damps the sides, h = (d_G + λ_G)(d_A + λ_A)ᵀ, and EK-FAC and norms by λ_G λ_A.
Eigenvalues h below max(h)/κ are lifted to it. Fewer columns than outputs have a thin Q_G, outside
of which d_G and Λ are what the trace lacks, evenly (`with_outside`).

Martens & Grosse 1503.05671, George et al. 1806.03884.
"""

import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isokron.curvature.curvature import condition_number
from isokron.curvature.layer_report import layer_record
from isokron.curvature.layers import Layer
from isokron.curvature.null_space import NULL, thin_inverse, without_rounding
from isokron.curvature.statistics import GradientRows, Sums
from isokron.distributed import Ranks
from isokron.distributed.rank_tasks import gather, share
from isokron.linalg import eigh, lift, on_host
from isokron.linalg.device_transfer import as_tensor
from isokron.operators import store, woodbury_policy
from isokron.operators.kron import is_thin, with_outside
from isokron.operators.low_rank import LARGE, gram, pieces, thin_mix

Pair = tuple[Tensor, Tensor]  # eigenvalues and eigenvectors
Damping = float | Sequence[float]  # λ, or λ_G and λ_A
EXACT = 512  # outputs up to which twice as many columns are kept by default, and no G is lost
SKETCH = 128  # columns of wider layers: a refresh takes no more than a few steps at 4,000 outputs
NAMES = ("values", "basis")
COUNTS = ("terms", "places", "refreshes", "step", "count")  # on the host
EPS = torch.finfo(torch.float64).eps


class RunningFisher:
    """Running statistics and eigenbases of one layer: `state`, flat and plain tensors.

    Args:
        method: "kfac", "ekfac" or "tkfac".
        policy: which output sides are kept as columns, see `woodbury_policy`. T of "auto" is their
            capacity, so that no G is ever formed of them.
        rho: most columns of "auto", as a share of the outputs.
        t_max: capacity, past which the best half is kept; None: 2·o up to 512 outputs, else 128.
        o_max: most outputs that "hybrid" has a dense G of.
        storage: where columns are kept, see `store`.
        dtype: of columns, see `store`.
    """

    def __init__(
        self,
        layer: Layer,
        method: str = "kfac",
        policy: str = "dense",
        *,
        rho: float = 0.75,
        t_max: int | None = None,
        o_max: int = LARGE,
        storage: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        outputs = layer.shape[1]
        terms = min(2 * outputs, t_max or (2 * outputs if outputs <= EXACT else SKETCH))
        limits: Any = {"rho": rho, "t_max": t_max or terms, "o_max": o_max}
        keeps = woodbury_policy(outputs, terms, policy, **limits) and layer.kind != "diagonal"
        self.capacity = terms if keeps else 0
        self.thin = 0 < self.capacity < outputs
        self.layer, self.method, self.policy = layer, method, policy
        self.storage, self.dtype = storage, dtype
        self.state: dict[str, Tensor] = {}
        self.fallbacks: Counter[str] = Counter()

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed."""
        return bool(self.state) and float(self.state["terms"]) > 0

    @property
    def has_inverse(self) -> bool:
        """Whether there is an inverse to step by."""
        return self.has_statistics and bool(self.state.get("refreshes", True))

    def make_sums(self, rows: bool | None = None) -> Sums:
        """For what is observed in a step. rows: keep gradients, by default if columns are kept."""
        if not (self.capacity if rows is None else rows):
            return Sums()
        return GradientRows(self.layer.name, "all", 1.0, sys.maxsize, "device", None)

    def shapes(self, momentum: bool) -> dict[str, tuple[int, ...]]:
        """Of all tensors of the state."""
        blocks, outputs, inputs = size = self.layer.shape
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("terms", "places", "step"), ())
        shapes |= {"momentum": size} if momentum else {}
        if self.layer.kind == "diagonal":
            return {**shapes, "eigenvalues": size}
        square = (blocks, inputs, inputs)
        shapes["input"] = square if self.layer.kind == "dense" else square[:2]
        shapes |= {"basis.input": square} if self.layer.kind == "dense" else {}
        rank, rows = (self.capacity, self.capacity + 1) if self.thin else (outputs, outputs)
        shapes |= {"values.input": square[:2], "values.output": (blocks, rows), "refreshes": ()}
        shapes["basis.output"] = (blocks, outputs, rank)
        if self.method == "ekfac":
            shapes["eigenvalues"] = (blocks, rows, inputs)
        if not self.capacity:
            return {**shapes, "output": (blocks, outputs, outputs)}
        shapes |= {"columns": (blocks, outputs, self.capacity), "count": ()}
        return {**shapes, "lengths": (blocks, self.capacity), "outside": (blocks,)}

    def make_(self, like: Tensor, momentum: float) -> None:
        """Zeros for all that will ever be known, so that checkpoints have one form."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        for key, shape in self.shapes(momentum > 0).items():
            place, kind = ("cpu", torch.float64) if key in COUNTS else (like.device, dtype)
            self.state[key] = torch.zeros(shape, dtype=kind, device=place)
        if self.capacity:
            self.state["columns"] = store(self.state["columns"], self.dtype, self.storage)

    def widen_(self, like: Tensor) -> None:
        """Follow a model that is in float64 now; columns stay as they are stored."""
        for key, value in self.state.items():
            wide = torch.promote_types(value.dtype, like.dtype)
            if value.dtype is not wide and key not in (*COUNTS, "columns"):
                self.state[key] = value.to(wide)

    def load_(self, entry: Mapping[str, Any], like: Tensor) -> None:
        """Take over a checkpoint, in memory of its own; {}: nothing is known yet."""
        state = {key: as_tensor(value).clone() for key, value in entry.items()}
        wanted = self.shapes("momentum" in state) if state else {}
        for key in sorted(state.keys() | wanted.keys()):
            shapes = [tuple(state[key].shape) if key in state else None, wanted.get(key)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"NaturalGradient: {key!r} of layer {self.layer.name!r} has shape {shapes[0]} "
                    f"in the checkpoint and {shapes[1]} here; load it into the model and settings "
                    "that saved it"
                )
            if key not in COUNTS:
                state[key] = state[key].to(like.device)
            if key == "columns":
                state[key] = store(state[key], None, self.storage)
        self.state = state

    def fold_(self, means: Mapping[str, Tensor], terms: float, places: float, beta: float) -> None:
        """A ← Σ w āāᵀ / Σ w: w is 1 for what is new, and × β for all before at every call."""
        state, weights = self.state, {}
        for key, count in (("terms", terms), ("places", places)):
            state[key].mul_(beta).add_(count)
            weights[key] = count / (float(state[key]) or 1.0)
        for key, value in means.items():
            if key == "columns":
                self._append_(value, weights["terms"])
            elif key == "output" and self.capacity:  # summed over ranks as a covariance
                squares, basis = eigh(value.double())
                real = (squares > 16 * EPS * squares.amax(1, keepdim=True)).any(0)
                self._append_(
                    (basis * squares.clamp_min(0).sqrt()[:, None])[..., real], weights["terms"]
                )
            else:
                state[key].lerp_(value, weights["places" if key == "input" else "terms"])

    def _append_(self, columns: Tensor, weight: float) -> None:
        """UUᵀ ← (1−w)UUᵀ + wU'U'ᵀ: columns side by side, each with its length.

        Lengths are apart, since rounding to half precision would stop a slow decay.
        """
        state, count, outputs = self.state, int(self.state["count"]), columns.size(1)
        state["lengths"] *= math.sqrt(1 - weight)
        state["outside"] *= 1 - weight
        norms = torch.linalg.vector_norm(columns, dim=1)
        units = columns / norms.clamp_min(torch.finfo(norms.dtype).tiny)[:, None]
        lengths = norms * math.sqrt(weight)
        if count + columns.size(2) > self.capacity >= outputs:
            # o columns are exact, and take one decomposition of o×o
            wide = (units * lengths[:, None]).double()
            squares, basis = eigh(self._covariance(count).to(wide) + wide @ wide.mT)
            count, units, lengths = 0, basis, squares.clamp_min(0).sqrt()
        parts = zip(
            *(x.split(max(1, self.capacity // 2), -1) for x in (units, lengths)), strict=True
        )
        for unit, length in [(units, lengths)] if self.capacity >= outputs else parts:
            if count + unit.size(2) > self.capacity:
                count = self._compress_(count)
            state["columns"][..., count : count + unit.size(2)] = unit
            state["lengths"][:, count : count + unit.size(2)] = length
            count += unit.size(2)
        state["count"].fill_(count)

    def _covariance(self, count: int) -> Tensor:
        """G of the first columns, in float64."""
        like, lengths = self.state["lengths"], self.state["lengths"][:, None, :count]
        columns = self.state["columns"][..., :count].to(like.device, torch.float64) * lengths
        return columns @ columns.mT

    def _compress_(self, count: int) -> int:
        """The best half as many columns: Q √s of the largest s of G = Q s Qᵀ."""
        state, half = self.state, self.capacity // 2
        pair = eigh(self._gram(count))
        squares = self._write_basis_(pair, half, state["columns"])
        trace = state["lengths"][:, :count].double().square().sum(1)
        state["outside"] += (trace - squares.sum(1)).clamp_min(0).to(state["outside"])
        state["lengths"][:, :half] = squares.sqrt().to(state["lengths"])
        return half

    def _gram(self, count: int, ranks: Ranks | None = None) -> Tensor:
        """diag(l) UᵀU diag(l), in float64. With ranks, each multiplies rows of U of its own."""
        columns, lengths = self.state["columns"][..., :count], self.state["lengths"][:, :count]
        if ranks is not None:  # Σ U_[r]ᵀU_[r] over shards of rows, not of columns, is UᵀU
            rows = share(ranks, columns.size(1))
            columns = columns[:, rows.start : rows.stop]
        product = gram(columns, lengths.device)
        if ranks is not None:
            total = product.to(ranks.near(product.device))
            product = ranks.all_reduce_(total, what="Gram matrices").to(product.device)
        return lengths[:, :, None] * product * lengths[:, None]

    def _write_basis_(self, pair: Pair, most: int, target: Tensor) -> Tensor:
        """The `most` best eigenvectors of G as first columns of `target`; their eigenvalues."""
        state, size = self.state, pair[0].size(1)
        eps = torch.finfo(state["basis.output"].dtype).eps
        squares, mix = thin_mix(pair[0].double(), pair[1].double(), min(most, size), eps)
        mix = state["lengths"][:, :size, None] * mix
        squares = torch.nn.functional.pad(squares, (0, most - squares.size(1)))
        mix = torch.nn.functional.pad(mix, (0, most - mix.size(2)))
        for start, part in pieces(state["columns"][..., :size], mix.device, torch.float64):
            target[:, start : start + part.size(1), :most] = (part @ mix).to(target)
        return squares

    def matrices(self, ranks: Ranks | None = None) -> dict[str, Tensor]:
        """Symmetric matrices whose eigenbases a refresh needs: of thin columns U, UᵀU."""
        state, matrices = self.state, {}
        if self.layer.kind == "dense":
            matrices["input"] = state["input"]
        if self.layer.kind == "diagonal":
            return matrices
        if self.thin:
            matrices["output"] = self._gram(int(state["count"]), ranks)
        elif self.capacity:
            matrices["output"] = self._covariance(int(state["count"]))
        else:
            matrices["output"] = state["output"]
        return matrices

    def refresh_(self, pairs: Mapping[str, Pair]) -> None:
        """Take the eigenbases of `matrices`. The columns of an embedding have counts, no basis."""
        state = self.state
        new = {"values.input": state["input"]} if "input" not in pairs else {}
        for side, (values, basis) in pairs.items():
            new |= {f"values.{side}": values, f"basis.{side}": basis}
        if self.thin:
            basis = new["basis.output"] = torch.empty_like(state["basis.output"])
            squares = self._write_basis_(pairs["output"], self.capacity, basis)[..., None]
            totals = squares.sum(1, keepdim=True) + state["outside"][:, None, None]
            new["values.output"] = with_outside(squares, totals, basis)[..., 0]
        if self.method == "tkfac":
            trace, tiny = new["values.input"].sum(-1, keepdim=True), torch.finfo(torch.float32).tiny
            new["values.input"] = new["values.input"] / trace.clamp_min(tiny)
        if "eigenvalues" in state:
            new["eigenvalues"] = self._carried({key: x.to(state[key]) for key, x in new.items()})
        for key, value in new.items():
            state[key].copy_(value)
        state["refreshes"] += 1

    def _carried(self, new: Mapping[str, Tensor]) -> Tensor:
        """Λ as the diagonal, in the new basis, of the operator it stands for: its sum stays.

        Λ ← (Q_G'ᵀQ_G)^{⊙2} Λ (Q_AᵀQ_A')^{⊙2}; the first is d_G d_Aᵀ.
        """
        state, left = self.state, new["basis.output"]
        if not state["refreshes"]:
            return new["values.output"][:, :, None] * new["values.input"][:, None, :]
        values, overlap = state["eigenvalues"], (left.mT @ state["basis.output"]).square()
        if "basis.input" in new:
            values = values @ (state["basis.input"].mT @ new["basis.input"]).square()
        if not is_thin(left):
            return overlap @ values
        # what of a new direction is outside of the old basis
        overlap = torch.nn.functional.pad(overlap, (0, 1))
        overlap[..., -1] = 1 - overlap.sum(-1)
        totals = values.sum(1, keepdim=True)
        totals += (left.size(1) - left.size(2) - 1) * values[:, -1:]
        return with_outside(overlap @ values, totals, left)

    def bases(self) -> tuple[Tensor | None, Tensor | None] | None:
        """In which EK-FAC measures Λ; None: not at all."""
        if not self.has_inverse or "eigenvalues" not in self.state or self.layer.kind == "diagonal":
            return None
        return self.state["basis.output"], self.state.get("basis.input")

    def eigenvalues(self, damping: Damping) -> Tensor:
        """h, not lifted. [B, o, i], or [B, k + 1, i] of a thin basis: the last is outside of it"""
        pair = damping if isinstance(damping, Sequence) else (0.0, 0.0)
        joint = 0.0 if isinstance(damping, Sequence) else damping
        if "eigenvalues" in self.state:
            return self.state["eigenvalues"] + (joint or math.prod(pair))
        left, right = self.state["values.output"] + pair[0], self.state["values.input"] + pair[1]
        return left[:, :, None] * right[:, None, :] + joint

    def direction(self, matrix: Tensor, damping: Damping, max_condition: float | None) -> Tensor:
        """H⁻¹M. [B, o, i]"""
        state, damped = self.state, self.eigenvalues(damping)
        if max_condition is not None:
            damped = lift(damped.flatten(1), max_condition).values.view_as(damped)
        if self.layer.kind == "diagonal":
            return matrix / damped
        left, right, rotated = state["basis.output"], state.get("basis.input"), matrix
        if right is not None:
            rotated = without_rounding(matrix @ right, state["values.input"], damped, -1)
        if self.thin:
            rotated = thin_inverse(rotated, left, damped)
        else:
            inner = without_rounding(left.mT @ rotated, state["values.output"], damped, -2)
            rotated = left @ (inner / damped)
        return rotated if right is None else rotated @ right.mT

    def record(self, damping: Damping, max_condition: float | None) -> dict[str, Any]:
        """What a report says of the layer, as `Curvature.report` does."""
        state, (blocks, outputs, inputs) = self.state, self.layer.shape
        terms = float(state["terms"]) if state else 0.0
        columns = int(state["count"]) if state and self.capacity else None
        record = layer_record(
            self.layer.name, self.method, self.layer.layout, state, self.policy, terms, columns
        )
        if isinstance(damping, Sequence):
            record["damping_output"], record["damping_input"] = damping
        record["damping"] = math.prod(damping) if isinstance(damping, Sequence) else damping
        record |= {"max_condition": max_condition, "fallbacks": dict(self.fallbacks), "lost": 0.0}
        if columns:
            outside, inside = state["outside"], state["lengths"].square().sum(1)
            record["lost"] = float((outside / (outside + inside)).nan_to_num().max())
        if not self.has_inverse:
            return record
        plain, damped = self.eigenvalues(0.0), self.eigenvalues(damping)
        # how many eigenvalues each row stands for: the last one for all outside of the columns
        copies = torch.ones(damped.size(1), 1, device=damped.device)
        if self.thin:
            copies[-1] = outputs - self.capacity
        floor = damped.amax((1, 2), keepdim=True) / (max_condition or math.inf)
        sides = {key: state[f"values.{key}"] for key in ("output", "input") if "refreshes" in state}
        for key, side in sides.items():
            least = NULL * torch.finfo(side.dtype).eps * side.max()
            record[f"condition_{key}"] = math.inf if side.min() <= least else condition_number(side)
        singular = "eigenvalues" not in state and math.inf in (
            record[f"condition_{key}"] for key in sides
        )
        record["condition"] = math.inf if singular else condition_number(plain)
        record["condition_after"] = condition_number(damped.maximum(floor))
        record["clipped"] = float(((damped < floor) * copies).sum()) / (blocks * outputs * inputs)
        return record


def decompose(
    fishers: Sequence[RunningFisher], ranks: Ranks | None = None, shares: bool = False
) -> list[dict[str, Pair] | None]:
    """The eigenbases that each layer's refresh needs, or None where they are not finite.

    With ranks, each is computed by one: the largest first, by the rank that has least to do.
    shares: Gram matrices of columns are computed by all of them.
    """
    matrices = {
        f"{i}.{side}": matrix
        for i, fisher in enumerate(fishers)
        for side, matrix in fisher.matrices(ranks if shares else None).items()
    }
    loads = [0] * (1 if ranks is None else ranks.size)
    eigenpairs: dict[str, Tensor] = {}
    for key in sorted(matrices, key=lambda key: -matrices[key].size(-1)):
        owner = loads.index(min(loads))
        loads[owner] += matrices[key].size(-1) ** 3
        if ranks is None or owner == ranks.rank:
            fallbacks = fishers[int(key.partition(".")[0])].fallbacks
            # in float64: eigenvectors of float32 would put more rounding into null spaces
            pair = (part.to(matrices[key]) for part in eigh(matrices[key].double(), fallbacks))
            # contiguous as a checkpoint is loaded: products with another layout round otherwise
            eigenpairs |= {f"{key}.{n}": x.contiguous() for n, x in zip(NAMES, pair, strict=True)}
    if ranks is not None:
        eigenpairs = {
            key: value for part in gather(ranks, eigenpairs) for key, value in part.items()
        }
    pairs: list[dict[str, Pair] | None] = [{} for _ in fishers]
    finite = on_host([eigenpairs[f"{key}.values"].sum() for key in matrices])
    for (key, matrix), (total,) in zip(matrices.items(), finite, strict=True):
        number, _, side = key.partition(".")
        of_layer = pairs[int(number)]
        values, basis = (eigenpairs[f"{key}.{name}"].to(matrix.device) for name in NAMES)
        if not math.isfinite(total):
            pairs[int(number)] = None
        elif of_layer is not None:
            of_layer[side] = values.clamp_min(0), basis  # below zero is rounding
    return pairs
