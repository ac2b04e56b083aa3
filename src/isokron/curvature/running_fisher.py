"""The Fisher of a layer as a running mean over training, and its damped inverse.

Statistics are those of isokron.curvature.statistics: A `input` and G `output`, or `columns` U of
G = UUᵀ. A refresh finds A = Q_A d_A Q_Aᵀ and G = Q_G d_G Q_Gᵀ, and a step divides by the
eigenvalues h of the damped Fisher,

    V = Q_G [(Q_Gᵀ M Q_A) ⊘ h] Q_Aᵀ,   h = d_G d_Aᵀ + λ,  or Λ + λ for EK-FAC and norms.

Eigenvalues h below max(h)/κ are lifted to it. Columns have a thin Q_G; outside of its span d_G = 0.

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
from isokron.curvature.statistics import GradientRows, Sums
from isokron.distributed import Ranks
from isokron.distributed.rank_tasks import gather
from isokron.linalg import eigh, lift, on_host
from isokron.linalg.device_transfer import as_tensor
from isokron.operators import store, woodbury_policy
from isokron.operators.low_rank import gram, pieces

Pair = tuple[Tensor, Tensor]  # eigenvalues and eigenvectors
NAMES = ("values", "basis")
COUNTS = ("terms", "places", "refreshes", "step", "count")  # on the host
# What rounding leaves, in units of the precision of the statistics. Chosen on gradients of real and
# random layers, with sides from 4 to 1024 and damping from 1e-2 to 1e-8, against float64.
NULL = 2.0  # of the largest eigenvalue: what is smaller may be a zero
MIXED = 0.2  # of an error of a factor, relative to its largest eigenvalue; 0.11 was seen
ROTATED = 8.0  # of the length of a rotated gradient


class RunningFisher:
    """Running statistics and eigenbases of one layer: `state`, flat and plain tensors.

    Args:
        method: "kfac", "ekfac" or "tkfac"; where columns are kept, "ekfac" is "kfac".
        policy: which output sides are kept as columns, see `woodbury_policy`. "auto" forms G from
            them when there are too many.
        rho: most columns of "auto", as a share of the outputs.
        t_max: most columns. Otherwise the best half is kept past it, which is exact for
            o ≤ t_max/2.
        storage: where columns are kept, see `store`.
    """

    def __init__(
        self,
        layer: Layer,
        method: str = "kfac",
        policy: str = "dense",
        *,
        rho: float = 0.75,
        t_max: int = 1024,
        storage: str = "auto",
    ) -> None:
        outputs = layer.shape[1]
        keeps = woodbury_policy(outputs, 1, policy, rho=rho, t_max=t_max)
        most = rho * outputs if policy == "auto" else 2 * outputs
        self.capacity = int(min(t_max, most)) if keeps and layer.kind != "diagonal" else 0
        self.layer, self.method, self.policy = layer, method, policy
        self.storage = storage
        self.state: dict[str, Tensor] = {}
        self.fallbacks: Counter[str] = Counter()
        self.lost = 0.0  # largest share of the trace that was dropped with columns

    @property
    def has_statistics(self) -> bool:
        """Whether anything was observed."""
        return bool(self.state) and float(self.state["terms"]) > 0

    @property
    def has_inverse(self) -> bool:
        """Whether there is an inverse to step by."""
        return self.has_statistics and bool(self.state.get("refreshes", True))

    @property
    def thin(self) -> bool:
        """Whether G is kept as columns."""
        return "columns" in self.state if self.state else self.capacity > 0

    def make_sums(self) -> Sums:
        """For what is observed in one step. How many gradients all ranks have is not known yet."""
        if not self.thin:
            return Sums()
        return GradientRows(self.layer.name, "all", 1.0, sys.maxsize, "device", None)

    def shapes(self, thin: bool, momentum: bool) -> dict[str, tuple[int, ...]]:
        """Of all tensors of the state."""
        blocks, outputs, inputs = size = self.layer.shape
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("terms", "places", "step"), ())
        shapes |= {"momentum": size} if momentum else {}
        if self.layer.kind == "diagonal" or (self.method == "ekfac" and not self.capacity):
            shapes["eigenvalues"] = size
        if self.layer.kind == "diagonal":
            return shapes
        square = (blocks, inputs, inputs)
        shapes["input"] = square if self.layer.kind == "dense" else square[:2]
        shapes |= {"basis.input": square} if self.layer.kind == "dense" else {}
        rank = min(self.capacity, outputs) if thin else outputs
        shapes |= {"values.input": square[:2], "values.output": (blocks, rank), "refreshes": ()}
        shapes["basis.output"] = (blocks, outputs, rank)
        if thin:
            return {**shapes, "columns": (blocks, outputs, self.capacity), "count": ()}
        return {**shapes, "output": (blocks, outputs, outputs)}

    def make_(self, like: Tensor, momentum: float) -> None:
        """Zeros for all that will ever be known, so that checkpoints have one form."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        for key, shape in self.shapes(self.capacity > 0, momentum > 0).items():
            place, kind = ("cpu", torch.float64) if key in COUNTS else (like.device, dtype)
            self.state[key] = torch.zeros(shape, dtype=kind, device=place)
        if self.capacity:
            self.state["columns"] = store(self.state["columns"], storage=self.storage)

    def widen_(self, like: Tensor) -> None:
        """Follow a model that is in float64 now; columns stay as they are stored."""
        for key, value in self.state.items():
            wide = torch.promote_types(value.dtype, like.dtype)
            if value.dtype is not wide and key not in (*COUNTS, "columns"):
                self.state[key] = value.to(wide)

    def load_(self, entry: Mapping[str, Any], like: Tensor) -> None:
        """Take over a checkpoint, in memory of its own; {}: nothing is known yet."""
        state = {key: as_tensor(value).clone() for key, value in entry.items()}
        wanted = self.shapes("columns" in state, "momentum" in state) if state else {}
        for key in sorted(state.keys() | wanted.keys()):
            shapes = [tuple(state[key].shape) if key in state else None, wanted.get(key)]
            if shapes[0] != shapes[1]:
                raise ValueError(
                    f"NaturalGradient: {key!r} of layer {self.layer.name!r} has shape {shapes[0]} "
                    f"in the checkpoint and {shapes[1]} here; load it into the model and settings "
                    "that saved it"
                )
            if key not in (*COUNTS, "columns"):
                state[key] = state[key].to(like.device)
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
            else:
                state[key].lerp_(value, weights["places" if key == "input" else "terms"])

    def _append_(self, columns: Tensor, weight: float) -> None:
        """UUᵀ ← (1−w)UUᵀ + wU'U'ᵀ: columns side by side, each times the root of its weight."""
        held, count = self.state["columns"], int(self.state["count"])
        held[..., :count] *= math.sqrt(1 - weight)
        columns = columns * math.sqrt(weight)
        if self.policy == "auto" and count + columns.size(2) > self.capacity:
            output = self._make_dense_()
            output.baddbmm_(columns.to(output), columns.mT.to(output))
            return
        outputs = held.size(1)
        if count + columns.size(2) > self.capacity >= 2 * outputs:
            # o columns are exact, and take one decomposition of o×o
            wide = torch.cat([held[..., :count].double(), columns.to(held.device).double()], 2)
            values, basis = eigh(wide @ wide.mT)
            held[..., :outputs] = (basis * values.clamp_min(0).sqrt()[:, None]).to(held.dtype)
            self.state["count"].fill_(outputs)
            return
        for part in columns.split(max(1, self.capacity // 2), 2):
            if count + part.size(2) > self.capacity:
                count = self._compress_(count)
            held[..., count : count + part.size(2)] = part
            count += part.size(2)
        self.state["count"].fill_(count)

    def _compress_(self, count: int) -> int:
        """The best half as many columns: U B of the largest s of UᵀU = B s Bᵀ."""
        columns, half = self.state["columns"], self.capacity // 2
        values, basis = eigh(gram(columns[..., :count], columns.device))
        lost = float(values[:, :-half].clamp_min(0).sum() / values.sum())
        self.lost = max(self.lost, lost)
        for start, part in pieces(columns[..., :count], columns.device, torch.float64):
            rows = slice(start, start + part.size(1))
            columns[:, rows, :half] = (part @ basis[..., -half:]).to(columns.dtype)
        return half

    def _make_dense_(self) -> Tensor:
        """G = UUᵀ in place of U, and no basis until the next refresh."""
        state = self.state
        columns = state.pop("columns")[..., : int(state.pop("count"))].to(state["input"])
        state["output"] = columns @ columns.mT
        for key in ("values.output", "basis.output"):
            state[key] = columns.new_zeros(self.shapes(False, False)[key])
        state["refreshes"].zero_()
        return state["output"]

    def matrices(self) -> dict[str, Tensor]:
        """Symmetric matrices whose eigenbases a refresh needs: of columns U, UᵀU."""
        state, matrices = self.state, {}
        if self.layer.kind == "dense":
            matrices["input"] = state["input"]
        if self.thin:
            columns = state["columns"][..., : int(state["count"])]
            matrices["output"] = gram(columns, state["input"].device)
        elif self.layer.kind != "diagonal":
            matrices["output"] = state["output"]
        return matrices

    def refresh_(self, pairs: Mapping[str, Pair]) -> None:
        """Take the eigenbases of `matrices`. The columns of an embedding have counts, no basis."""
        state = self.state
        new = {"values.input": state["input"]} if "input" not in pairs else {}
        for side, (values, basis) in pairs.items():
            new |= {f"values.{side}": values, f"basis.{side}": basis}
        if self.thin:
            # Q = U B s^(−½), in float64, with zeros where singular values √s are rounding of U
            rank = min(new["values.output"].size(1), state["basis.output"].size(2))
            squares = new.pop("values.output")[:, -rank:]
            noise = (ROTATED * torch.finfo(state["basis.output"].dtype).eps) ** 2
            noise += 16 * torch.finfo(torch.float64).eps
            real = squares > noise * squares.amax(1, keepdim=True)
            squares = torch.where(real, squares, 0.0)
            scale = torch.where(real, squares.rsqrt(), 0.0)[:, None]
            mix = new.pop("basis.output")[:, :, -rank:] * scale
            state["values.output"].zero_()[:, :rank] = squares
            columns, basis = state["columns"][..., : len(mix[0])], state["basis.output"].zero_()
            for start, part in pieces(columns, mix.device, torch.float64):
                basis[:, start : start + part.size(1), :rank] = (part @ mix).to(basis)
        if self.method == "tkfac":
            trace, tiny = new["values.input"].sum(-1, keepdim=True), torch.finfo(torch.float32).tiny
            new["values.input"] = new["values.input"] / trace.clamp_min(tiny)
        if "eigenvalues" in state:
            new["eigenvalues"] = self._carried(new)
        for key, value in new.items():
            state[key].copy_(value)
        state["refreshes"] += 1

    def _carried(self, new: Mapping[str, Tensor]) -> Tensor:
        """Λ as the diagonal, in the new basis, of the operator it stands for: its sum stays.

        Λ ← (Q_G'ᵀQ_G)^{⊙2} Λ (Q_AᵀQ_A')^{⊙2}; the first is d_G d_Aᵀ.
        """
        state = self.state
        if not state["refreshes"]:
            return new["values.output"][:, :, None] * new["values.input"][:, None, :]
        values = (new["basis.output"].mT @ state["basis.output"]).square() @ state["eigenvalues"]
        if "basis.input" in new:
            values = values @ (state["basis.input"].mT @ new["basis.input"]).square()
        return values

    def bases(self) -> tuple[Tensor | None, Tensor | None] | None:
        """In which EK-FAC measures Λ; None: not at all."""
        if not self.has_inverse or "eigenvalues" not in self.state or self.layer.kind == "diagonal":
            return None
        return self.state["basis.output"], self.state.get("basis.input")

    def eigenvalues(self, damping: float) -> Tensor:
        """h, not lifted. [B, o, i], or [B, k + 1, i] of columns, where d_G = 0 is the last"""
        if "eigenvalues" in self.state:
            return self.state["eigenvalues"] + damping
        left, right = self.state["values.output"], self.state["values.input"]
        left = torch.nn.functional.pad(left, (0, 1)) if self.thin else left
        return left[:, :, None] * right[:, None, :] + damping

    def direction(self, matrix: Tensor, damping: float, max_condition: float | None) -> Tensor:
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
            rotated = _thin_inverse(rotated, left, damped)
        else:
            inner = without_rounding(left.mT @ rotated, state["values.output"], damped, -2)
            rotated = left @ (inner / damped)
        return rotated if right is None else rotated @ right.mT

    def record(self, damping: float, max_condition: float | None) -> dict[str, Any]:
        """What a report says of the layer, as `Curvature.report` does."""
        state, (blocks, outputs, inputs) = self.state, self.layer.shape
        terms = float(state["terms"]) if state else 0.0
        columns = int(state["count"]) if state and self.thin else None
        record = layer_record(
            self.layer.name, self.method, self.layer.layout, state, self.policy, terms, columns
        )
        record |= {"damping": damping, "fallbacks": dict(self.fallbacks), "lost": self.lost}
        if not self.has_inverse:
            return record
        plain, damped = self.eigenvalues(0.0), self.eigenvalues(damping)
        # how many eigenvalues each row stands for: the last one for all outside of the columns
        copies = torch.ones(damped.size(1), 1, device=damped.device)
        if self.thin:
            rank = int((state["values.output"] > 0).any(0).sum())
            copies[rank:-1], copies[-1] = 0, outputs - rank
        floor = damped.amax((1, 2), keepdim=True) / (max_condition or math.inf)
        clipped, counted = (damped < floor) * copies, copies[:, 0] > 0
        sides = [] if "eigenvalues" in state else [state["values.input"]]
        sides += [state["values.output"]] if sides and not self.thin else []
        limits = [NULL * torch.finfo(side.dtype).eps * side.max() for side in sides]
        singular = any(bool(side.min() <= least) for side, least in zip(sides, limits, strict=True))
        record["condition"] = math.inf if singular else condition_number(plain[:, counted])
        record["condition_after"] = condition_number(damped.maximum(floor)[:, counted])
        record["clipped"] = float(clipped.sum()) / (blocks * outputs * inputs)
        return record


def without_rounding(x: Tensor, values: Tensor, damped: Tensor, dim: int) -> Tensor:
    """x in an eigenbasis, without what only rounding can have put where eigenvalues are 0.

    A gradient lies in the span of the factors that its own data make, and 1/λ would turn the
    rounding outside of it into a step. To first order, an error E of a factor F moves E·F⁺x of x to
    its null space: what is there and is not larger than for |E| = ε·max d counts as 0. What comes
    from where h is hardly above λ is divided by λ here as there, and may stay.
    x: [B, o, i]; values: eigenvalues along `dim`; damped: h.
    """
    other = -1 if dim == -2 else -2
    peak, eps = values.amax(1, keepdim=True), torch.finfo(x.dtype).eps
    null, reach = values <= NULL * eps * peak, damped.amax(other)
    curved = (1 - reach.amin(1, keepdim=True) / reach)[:, : values.size(1)]
    moved = torch.where(null, 0.0, curved * peak / torch.where(null, 1.0, values))
    # sums of squares along `dim`: where eigenvalues are 0, of what rounding moves there, of all
    weights = torch.stack([null.to(x), moved.square(), curved.square()], 1)  # [B, 3, n]
    squares = x.square()
    sums = weights @ squares if dim == -2 else weights @ squares.mT
    # rounding of the other side's rotation has the size of all columns, not of this one
    bound = torch.maximum(MIXED**2 * sums[:, 1], ROTATED**2 * sums[:, 2].mean(1, keepdim=True))
    dropped = null.unsqueeze(other) & (sums[:, 0] <= eps**2 * bound).unsqueeze(dim)
    return x.masked_fill(dropped, 0.0)


def _thin_inverse(rotated: Tensor, basis: Tensor, damped: Tensor) -> Tensor:
    """Q [(QᵀN) ⊘ h] + (N − QQᵀN) ⊘ h₀. N: [B, o, i], Q: [B, o, k], h and h₀: [B, k + 1, i]"""
    inside, outside = damped[:, :-1], damped[:, -1:]
    inner = basis.mT @ rotated
    outer = rotated - basis @ inner
    # sums over many outputs have left some of the span in it: once more, and nothing is left
    again = basis.mT @ outer
    norms = [
        torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in (rotated, outer, again)
    ]
    usual = norms[0].square().mean(1, keepdim=True).sqrt()
    least = ROTATED * torch.finfo(rotated.dtype).eps * torch.maximum(norms[0], usual)
    real = (norms[1].square() - norms[2].square() > least.square())[:, None]
    mixed = (inner + again) / inside - torch.where(real, again / outside, 0.0)
    return basis @ mixed + torch.where(real, outer / outside, 0.0)


def decompose(
    fishers: Sequence[RunningFisher], ranks: Ranks | None = None
) -> list[dict[str, Pair] | None]:
    """The eigenbases that each layer's refresh needs, or None where they are not finite.

    With ranks, each is computed by one: the largest first, by the rank that has least to do.
    """
    matrices = {
        f"{i}.{side}": matrix
        for i, fisher in enumerate(fishers)
        for side, matrix in fisher.matrices().items()
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
