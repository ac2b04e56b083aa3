"""Output sides of heads: the exact Fisher of a softmax, and gradients in place of a matrix o×o.

Where logits are a linear layer's outputs themselves, the Hessian of a term in them is
H = diag(p) − ppᵀ, which takes no backward pass; with the inputs ā of that layer, term by term,

    K-FAC     G = Σ H/M
    TKFAC     A = Σ tr(H) āāᵀ/M,  G = Σ |ā|² H/M, and so is Shampoo
    EK-FAC    Λ = Σ (Q_Gᵀ H Q_G)_jj (āQ_A)²/M,  (…)_jj = Σ_c p_c Q_cj² − (pQ_j)²

T gradients U of o outputs, T < o, make G = UUᵀ of rank T: powers take T×T matrices (Woodbury).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from isokron.curvature.statistics import Sums, Uses, mirrored, reduced
from isokron.operators import centered_factor, storage_device, store, woodbury_policy


def covariance_(sums: Sums, uses: Uses) -> None:
    """K-FAC's G. `uses`: rows √w·p of terms of weight w in the place of gradients."""
    sums.gram("softmax", uses.places()[1])


def traced_(sums: Sums, uses: Uses, sharing: str) -> None:
    """Both sides of TKFAC and Shampoo."""
    uses = uses.written()
    if sharing == "reduce":
        uses = replace(uses, inputs=reduced(uses).inputs.expand_as(uses.inputs))
    inputs, rows = uses.places()
    weight = rows.sum(2, keepdim=True).square()
    trace = (weight - rows.square().sum(2, keepdim=True)).clamp_min(0)
    sums.gram("input", inputs * trace.sqrt())
    sums.gram("softmax", rows * inputs.square().sum(2, keepdim=True).sqrt())


def eigenvalues_(sums: Sums, uses: Uses, bases: Sequence[Tensor | None]) -> None:
    """EK-FAC's Λ."""
    inputs, rows = uses.written().places()
    left, right = bases
    assert left is not None  # inputs and outputs of a head are dense
    assert right is not None
    spread = (rows * rows.sum(2, keepdim=True)) @ left.square() - (rows @ left).square()
    values = spread.clamp_min(0).mT @ (inputs @ right).square()
    total = sums.into("eigenvalues", values)
    total += values


def output_side(sums: dict[str, Tensor]) -> Tensor:
    """G = diag(S1) − S of S = Σ ppᵀ, plus what batches without a closed form have summed."""
    squares = sums.pop("softmax")
    side = torch.diag_embed(squares.sum(2)) - squares
    return side + sums["output"] if "output" in sums else side


@dataclass(frozen=True)
class Policy:
    """Whether an output side stays the gradients it is made of (see woodbury_policy), and where and
    in what precision these are stored."""

    name: str = "none"
    rho: float = 0.75
    t_max: int = 8192
    store: str = "auto"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        woodbury_policy(1, 1, self.name, rho=self.rho, t_max=self.t_max)  # checks all three
        storage_device(0, "cpu", self.store)
        store(torch.zeros(1), self.dtype)

    def keeps(self, layer: str, outputs: int, count: int) -> bool:
        """Whether `count` gradients of a layer stay; more than t_max are refused."""
        keep = woodbury_policy(outputs, count, self.name, rho=self.rho, t_max=self.t_max)
        if keep and count > self.t_max:
            raise ValueError(
                f"layer {layer!r}: policy {self.name!r} keeps the gradients of its outputs, and "
                f"there are {count:,}, more than t_max={self.t_max:,}; fit to fewer examples, "
                "raise t_max, or leave the layer out"
            )
        return keep

    def stored(self, dtype: torch.dtype) -> torch.dtype:
        """What rows are held in: not rounded while more of them may still make a covariance."""
        return dtype if self.name == "auto" else self.dtype or dtype


class GradientRows(Sums):
    """Sums in which the rows gᵀ of an output side stay apart while the policy keeps them."""

    def __init__(self, layer: str, policy: Policy) -> None:
        super().__init__()
        self.layer, self.policy = layer, policy
        # gradients of outputs, and probabilities in their place; [B, n, o] each
        self.rows: dict[str, list[Tensor]] = {"output": [], "softmax": []}

    def empty(self) -> bool:
        return super().empty() and not any(self.rows.values())

    def gram(self, name: str, rows: Tensor) -> None:
        parts = self.rows.get(name)
        if parts is None or name in self:
            super().gram(name, rows)
            return
        count = rows.size(1) + self.count_rows(name)
        if count and not self.policy.keeps(self.layer, rows.size(2), count):
            self.fold(name, rows)
            super().gram(name, rows)
            return
        held = sum(part.nbytes for part in parts) + rows.nbytes
        where = storage_device(held, rows.device, self.policy.store)
        place = "device" if where == rows.device else "host"
        part = store(rows, self.policy.stored(rows.dtype), place)
        # a copy, since rows may be a view of memory that the next batch writes to
        parts.append(part.clone() if part.data_ptr() == rows.data_ptr() else part)

    def count_rows(self, name: str) -> int:
        return sum(part.size(1) for part in self.rows[name])

    def fold(self, name: str, like: Tensor) -> None:
        """Sum up the rows held so far, on the device and in the dtype of `like`."""
        parts, self.rows[name] = self.rows[name], []
        for part in parts:
            super().gram(name, part.to(like))

    def columns(self, terms: float, like: Tensor) -> dict[str, Tensor]:
        """{"columns": U/√M [B, o, T]}, and "mean" for those of a softmax; {} if rows were summed.
        The rows are gone then."""
        names = [name for name, parts in self.rows.items() if parts]
        if len(names) != 1 or any(name in self for name in self.rows):
            for name in names:  # a closed-form head in some batches only
                self.fold(name, like)
            return {}
        parts, scaled = self.rows[names[0]], []
        # each part is freed when it has been scaled: at most two copies are held
        while parts:
            part = parts.pop(0)
            wide = part.to(torch.promote_types(part.dtype, torch.float32)) / math.sqrt(terms)
            scaled.append(store(wide, self.policy.dtype or part.dtype, "device"))
        # once rows went to the host, later ones did too: all belong there
        columns = torch.cat([part.to(scaled[-1].device) for part in scaled], 1).mT
        if names == ["softmax"]:
            return {"columns": columns, "mean": centered_factor(columns, like.device).diagonal}
        return {"columns": columns}


def means_of(layer: str, sums: Sums, terms: float, like: Tensor) -> dict[str, Tensor]:
    """Sums over positions for inputs of K-FAC, else over terms. The sums are gone then."""
    columns = sums.columns(terms, like) if isinstance(sums, GradientRows) else {}
    means = mirrored(sums)
    if "softmax" in means:
        means["output"] = output_side(means)
    places = means.pop("places", None)
    for name, value in means.items():
        value.div_(float(places) if name == "input" and places is not None else terms)
    means.update(columns)
    check_finite(layer, means)
    return means


def check_finite(layer: str, tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        # without a copy of the size of the value, which isfinite() makes
        if not bool(torch.stack(value.aminmax()).isfinite().all()):
            raise FloatingPointError(
                f"layer {layer!r}: {name} statistics are not finite; look for NaN or Inf in the "
                "data, or for losses that overflow in half precision"
            )
