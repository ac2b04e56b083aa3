"""Statistics of a layer: the sums over data that K-FAC, EK-FAC, TKFAC and Shampoo are made of.

With ā = [a; 1] where there is a bias and g̃ the gradient of a loss term, M the terms, P the uses:

    K-FAC     A = Σ āāᵀ/P,  G = Σ g̃g̃ᵀ/M               F ≈ G ⊗ A
    TKFAC     A = Σ |g̃|²āāᵀ/M,  G = Σ |ā|²g̃g̃ᵀ/M        F ≈ G ⊗ A / tr A
    Shampoo   L = Σ ∇∇ᵀ/M,  R = Σ ∇ᵀ∇/M, ∇ of an example  F ≈ L ⊗ R / tr R
    EK-FAC    Λ = Σ (Q_Gᵀ∇Q_A)^{⊙2}/M in K-FAC's bases

Where logits are a linear layer's outputs themselves, the Hessian of a term in them is
H = diag(p) − ppᵀ, which takes no backward pass. Term by term it stands for g̃g̃ᵀ, and tr H for |g̃|².

Martens & Grosse 1503.05671, George et al. 1806.03884, Gao et al. 2011.10741, Gupta et al.
1802.09568, Morwani et al. 2406.17748; shared weights: Eschenhagen et al. 2311.00636.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isokron.curvature.events import Event
from isokron.linalg import gram_, mirror_
from isokron.operators import (
    centered_factor,
    storage_device,
    store,
    woodbury_policy,
)
from isokron.operators.kron import is_thin, with_outside
from isokron.operators.low_rank import inner_product

# Rows of at most NARROW entries are summed SUMMED at a time: BLAS adds one after the other to the
# total of all batches, by which float32 is off by 1e-4 after some hundred thousand positions.
NARROW, SUMMED = 64, 2048
CHUNK = 2**20  # entries of per-example gradients held at a time, which stay in a shared cache
SQUARE = ("input", "output", "softmax")  # sums of which only the lower half is computed


@dataclass(frozen=True)
class Uses:
    """All uses of one weight in a batch.

    inputs: [B, N, S, i], or numbers of columns [B, N, S] where `kind` is "index"; grads:
    [B, N, S, o], in whose place a "softmax" has its probabilities. `counted`: [N, S], the positions
    that a gradient reaches, None where all do. `bias`: every input has a one after it, which is
    not written down: a copy of all inputs would cost more than it says. `positions`: [N, S], where
    in an example of `length` positions the tokens of an expert are, −1 for none; None where all
    positions are. `source`: equal for layers of the same input.
    """

    inputs: Tensor
    grads: Tensor
    kind: str
    counted: Tensor | None = None
    bias: bool = False
    positions: Tensor | None = None
    length: int = 0
    source: tuple[Any, ...] = ()

    def written(self) -> "Uses":
        """The same with the ones of a bias among the inputs."""
        if not self.bias:
            return self
        ones = self.inputs.new_ones(()).expand(*self.inputs.shape[:-1], 1)
        return replace(self, inputs=torch.cat([self.inputs, ones], -1), bias=False)

    def places(self) -> tuple[Tensor, Tensor]:
        """Inputs and gradients of the positions that count: [B, P, i] or [B, P], [B, P, o]."""
        inputs, grads = self.inputs.flatten(1, 2), self.grads.flatten(1, 2)
        where = None if self.counted is None else self.counted.flatten()
        if self.kind == "index":  # a padding never learns
            where = inputs[0] >= 0 if where is None else where & (inputs[0] >= 0)
        if where is None:
            return inputs, grads
        numbers = where.nonzero()[:, 0]
        if len(numbers) == len(where):  # not a copy of everything
            return inputs, grads
        # several times as fast on the CPU as inputs[:, where]
        return inputs.index_select(1, numbers), grads.index_select(1, numbers)


def joined(
    events: Sequence[Event], dtype: torch.dtype, weighted: Tensor | None = None, masks: bool = True
) -> Uses:
    """The uses of one weight side by side, as if they were positions of one.

    weighted: [N], False for examples without a term that counts. masks: find what counts.
    """
    layer = events[0].layer
    sizes = sorted({event.grads.size(1) for event in events})
    if len(sizes) > 1:
        raise ValueError(
            f"layer {layer.name!r} was used on {' and on '.join(map(str, sizes))} examples in one "
            "batch; give it as many at every use, or leave it out of `layers`"
        )
    inputs, grads = events[0].inputs, events[0].grads
    if len(events) > 1:
        inputs = torch.cat([event.inputs for event in events], 2)
        grads = torch.cat([event.grads for event in events], 2)
    if layer.kind != "index":
        inputs = inputs.to(dtype)
    counted = None
    if masks and not (weighted is None and all(map(_is_vector, events))):
        counted = torch.cat([_counted(event, weighted) for event in events], 1)
        counted = None if bool(counted.all()) else counted
    routed = [event.tokens for event in events if event.tokens is not None]
    positions = torch.cat(routed, 1) if routed and routed[0].ndim == 2 else None
    bias = layer.kind == "dense" and layer.layout.bias
    source = *(event.source or layer.name for event in events), *grads.shape[1:3]
    return Uses(
        inputs, grads.to(dtype), layer.kind, counted, bias, positions, events[0].count, source
    )


def _is_vector(event: Event) -> bool:
    return event.vector and event.grads.size(2) == 1


def _counted(event: Event, weighted: Tensor | None) -> Tensor:
    """Which positions of a layer count, [N, S]: those that a gradient reaches, which padding does
    not have, whatever it is padded to. A vector is no padding, even if a ReLU passes nothing on."""
    examples, places = event.grads.shape[1:3]
    if _is_vector(event) and (weighted is None or len(weighted) == examples):
        ones = event.grads.new_ones(examples, places, dtype=torch.bool)
        return ones if weighted is None else weighted[:, None]
    # grads.any(3), several times as fast on the CPU
    return event.grads.abs().amax(3).ne(0).any(0)


def reduced(uses: Uses) -> Uses:
    """One position an example: inputs averaged, gradients summed (2311.00636)."""
    if uses.kind not in ("dense", "softmax") or uses.grads.size(2) == 1:
        return uses
    inputs, grads, counted = uses.inputs, uses.grads.sum(2, keepdim=True), uses.counted
    if counted is None:
        return replace(uses, inputs=inputs.mean(2, keepdim=True), grads=grads)
    weight = counted.to(inputs.dtype)[:, :, None]
    mean = (inputs * weight).sum(2, keepdim=True) / weight.sum(1)[:, None].clamp_min(1)
    return replace(uses, inputs=mean, grads=grads, counted=counted.any(1, keepdim=True))


class Sums(dict[str, Tensor]):
    """Named sums that begin with the first thing added."""

    def empty(self) -> bool:
        return not self

    def tensors(self) -> list[Tensor]:
        """All there is."""
        return list(self.values())

    def scale_gradients_(self, factor: float, inputs: bool) -> None:
        """As if gradients had been `factor` times as long. inputs: are weighted by them (TKFAC)."""
        for key in self.keys() - ({"places", "bias"} if inputs else {"places", "bias", "input"}):
            self[key] *= factor**2

    def into(self, name: str, like: Tensor) -> Tensor:
        """The sum under this name, zeros in the shape of `like` if there is none."""
        return self.setdefault(name, torch.zeros_like(like))

    def gram(self, name: str, rows: Tensor) -> None:
        """Add XᵀX, its lower half: `mirrored` has both. [B, n, d]"""
        # the other half is the same by symmetry, and would double the work of every batch
        blocks, _, size = rows.shape
        if name not in self:
            self[name] = rows.new_zeros(blocks, size, size)
        if size > NARROW:
            gram_(self[name], rows.mT, 1.0, 1.0)
            return
        whole = rows.size(1) // SUMMED * SUMMED
        total = rows[:, whole:].mT @ rows[:, whole:]
        if whole:
            parts = rows[:, :whole].reshape(blocks, -1, SUMMED, size)
            total += (parts.mT @ parts).sum(1)
        self[name] += total

    def count(self, name: str, columns: Tensor, values: Tensor, size: int) -> None:
        """Add values to the columns they belong to. [B, P], [B, P, ...] → [B, size, ...]"""
        if name not in self:
            self[name] = values.new_zeros(len(values), size, *values.shape[2:])
        for total, column, value in zip(self[name], columns, values, strict=True):
            valid = column >= 0
            total.index_add_(0, column[valid], value[valid])


def covariances_(sums: Sums, uses: Uses, columns: int) -> None:
    """K-FAC: Σ āāᵀ and Σ g̃g̃ᵀ, and how many positions there were."""
    output_covariance_(sums, uses)
    input_covariance_(sums, uses, columns)


def output_covariance_(sums: Sums, uses: Uses) -> None:
    sums.gram("softmax" if uses.kind == "softmax" else "output", uses.places()[1])


def input_covariance_(sums: Sums, uses: Uses, columns: int) -> None:
    inputs, grads = uses.places()
    if uses.kind == "index":
        sums.count("input", inputs, torch.ones_like(grads[..., 0]), columns)
    else:
        sums.gram("input", inputs)
        if uses.bias:
            row = torch.nn.functional.pad(inputs.sum(1, keepdim=True), (0, 1), value=inputs.size(1))
            sums.into("bias", row).add_(row)
    # known on the host without asking a device
    total = sums.into("places", torch.zeros((), dtype=torch.float64, device="cpu"))
    total += grads.size(1)


def traced_(sums: Sums, uses: Uses, columns: int) -> None:
    """TKFAC: Σ |g̃|²āāᵀ and Σ |ā|²g̃g̃ᵀ, position by position."""
    inputs, grads = uses.written().places()
    length = torch.linalg.vector_norm(grads, dim=2, keepdim=True)
    if uses.kind == "index":
        sums.count("input", inputs, length[..., 0].square(), columns)
        sums.gram("output", grads)
    else:
        sums.gram("input", inputs * length)
        sums.gram("output", grads * torch.linalg.vector_norm(inputs, dim=2, keepdim=True))


def gradients_(sums: Sums, uses: Uses, columns: int) -> None:
    """Shampoo: Σ ∇∇ᵀ and Σ ∇ᵀ∇ of the gradients of examples."""
    if uses.kind == "index":
        column, rows = by_column(uses)
        sums.gram("output", rows[None])
        sums.count("input", column[None], rows.square().sum(1)[None], columns)
        return
    if uses.grads.size(2) == 1:
        traced_(sums, replace(uses, counted=None), columns)
        return
    for part in example_gradients(uses.written().inputs, uses.grads):  # [B, n, o, i]
        sums.gram("output", part.mT.flatten(1, 2))
        sums.gram("input", part.flatten(1, 2))


def eigenvalues_(sums: Sums, uses: Uses, bases: Sequence[Tensor | None], columns: int) -> None:
    """EK-FAC: Σ (Q_Gᵀ∇Q_A)^{⊙2}, of a thin Q_G with a row of the rest. bases: None for I."""
    left, right = bases
    if uses.kind == "index":
        column, rows = by_column(uses)
        values = rows.mT[None] if left is None else inner_product(left, rows.mT[None], -2)
        values = values.square()
        if left is not None and is_thin(left):
            values = with_outside(values, rows.square().sum(1)[None, None], left)
        sums.count("by_column", column[None], values.mT, columns)  # [1, columns, o]
        return
    inputs = uses.written().inputs if right is None else _rotated(uses.inputs, right, uses.bias)
    if left is None or not is_thin(left):
        _squares_(sums, inputs, uses.grads if left is None else _rotated(uses.grads, left))
        return
    inside = Sums()
    _squares_(inside, inputs, inner_product(left, uses.grads, -1))
    values = with_outside(inside["eigenvalues"], _column_squares(inputs, uses.grads), left)
    sums.into("eigenvalues", values).add_(values)


def _squares_(sums: Sums, inputs: Tensor, grads: Tensor) -> None:
    """Σ (Σ_s g̃āᵀ)^{⊙2} of examples. [B, N, S, i], [B, N, S, o] → [B, o, i]"""
    blocks, _, places, outputs = grads.shape
    total = sums.into("eigenvalues", inputs.new_zeros(blocks, outputs, inputs.size(3)))
    if places == 1:  # never a gradient of one example
        total += grads[:, :, 0].square().mT @ inputs[:, :, 0].square()
        return
    for part in example_gradients(inputs, grads, CHUNK // 4):
        if part.size(1) == 1:
            total.addcmul_(part[:, 0], part[:, 0])
        else:
            total += part.square_().sum(1)


def _column_squares(inputs: Tensor, grads: Tensor) -> Tensor:
    """Σ_n‖Σ_s g̃ā_j‖² = Σ_n ā_jᵀ(g̃g̃ᵀ)ā_j, without a gradient. → [B, 1, i]"""
    total = inputs.new_zeros(len(inputs), 1, inputs.size(3))
    count = max(1, CHUNK // inputs.size(2) ** 2)
    for g, a in zip(grads.split(count, 1), inputs.split(count, 1), strict=True):
        total[:, 0] += (g @ g.mT @ a * a).sum((1, 2))
    return total


def _rotated(rows: Tensor, basis: Tensor, bias: bool = False) -> Tensor:
    """Rows in a basis, XQ, or [X, 1]Q with a bias. [B, N, S, d], [B, d, d]"""
    flat = rows.flatten(1, 2)  # one large product a block: a small one an example is slower
    rotated = torch.baddbmm(basis[:, -1:], flat, basis[:, :-1]) if bias else flat @ basis
    return rotated.unflatten(1, rows.shape[1:3])


def diagonal_(sums: Sums, uses: Uses, rows: Sequence[str]) -> None:
    """Squares of the gradients of examples, of weights that have one input and output each."""
    grads = {"weight": (uses.grads * uses.inputs).sum(2), "bias": uses.grads.sum(2)}  # [1, N, d]
    squares = torch.stack([grads[row].square().sum(1) for row in rows], 1)  # [1, rows, d]
    sums.into("eigenvalues", squares).add_(squares)


def softmax_traced_(sums: Sums, uses: Uses, sharing: str) -> None:
    """Both sides of TKFAC and Shampoo, of a softmax: rows √w·p in the place of gradients."""
    uses = uses.written()
    if sharing == "reduce":
        uses = replace(uses, inputs=reduced(uses).inputs.expand_as(uses.inputs))
    inputs, rows = uses.places()
    weight = rows.sum(2, keepdim=True).square()
    trace = (weight - rows.square().sum(2, keepdim=True)).clamp_min(0)
    sums.gram("input", inputs * trace.sqrt())
    sums.gram("softmax", rows * inputs.square().sum(2, keepdim=True).sqrt())


def softmax_eigenvalues_(sums: Sums, uses: Uses, left: Tensor, right: Tensor) -> None:
    """EK-FAC's Λ = Σ (Q_Gᵀ H Q_G)_jj (āQ_A)² of a softmax, (…)_jj = Σ_c p_c Q_cj² − (pQ_j)²."""
    inputs, rows = uses.written().places()
    spread = (rows * rows.sum(2, keepdim=True)) @ left.square() - (rows @ left).square()
    values = spread.clamp_min(0).mT @ (inputs @ right).square()
    sums.into("eigenvalues", values).add_(values)


def example_gradients(inputs: Tensor, grads: Tensor, held: int = CHUNK) -> Iterator[Tensor]:
    """∇ = Σ_s g̃āᵀ of some examples at a time. [B, N, S, i], [B, N, S, o] → [B, n, o, i]

    `held`: entries at a time; what only looks at each once is faster with few, near the core.
    """
    size = inputs.size(0) * inputs.size(3) * grads.size(3)
    count = max(1, held // size)
    for g, a in zip(grads.split(count, 1), inputs.split(count, 1), strict=True):
        yield g.mT @ a


def by_column(uses: Uses) -> tuple[Tensor, Tensor]:
    """Gradients summed over equal columns within an example: the columns [R], and rows [R, o]."""
    # a padding has column −1, and is left out
    numbers = uses.inputs[0]  # [N, S]
    example = torch.arange(len(numbers), device=numbers.device)[:, None]
    span = int(numbers.max()) + 2
    keys, where = (example * span + numbers + 1).flatten().unique(return_inverse=True)
    grads = uses.grads[0].flatten(0, 1)
    rows = grads.new_zeros(len(keys), grads.size(1)).index_add_(0, where, grads)
    columns = keys % span - 1
    valid = columns >= 0
    return columns[valid], rows[valid]


def mirrored(sums: Sums) -> dict[str, Tensor]:
    """The sums, with both halves of those that are square. They are taken out of `sums`.

    Σāāᵀ is put together here, of Σaaᵀ and the row (Σaᵀ, n) below it: in rows that are longer by
    one the products of every batch would be slower by a fifth.
    """
    if "by_column" in sums:  # Λ of an embedding
        sums["eigenvalues"] = sums.pop("by_column").mT.contiguous()
    row = sums.pop("bias", None)
    if row is not None:
        inner = sums.pop("input")
        sums["input"] = inner.new_empty(len(inner), row.size(2), row.size(2))
        sums["input"][:, :-1, :-1] = inner
        sums["input"][:, -1:] = row
    return {
        name: mirror_(value) if value.ndim == 3 and name in SQUARE else value
        for name, value in [(name, sums.pop(name)) for name in list(sums)]
    }


class GradientRows(Sums):
    """Sums in which the rows gᵀ of an output side stay apart while the policy keeps them.

    policy, rho, t_max, o_max: see `woodbury_policy`. storage, dtype: where and in what precision
    rows are kept, see `store`.
    """

    def __init__(
        self,
        layer: str,
        policy: str,
        rho: float,
        t_max: int,
        storage: str,
        dtype: torch.dtype | None,
        o_max: int = 16384,
    ) -> None:
        super().__init__()
        self.layer, self.policy, self.rho, self.t_max = layer, policy, rho, t_max
        self.o_max = o_max
        self.storage, self.dtype = storage, dtype
        # gradients of outputs, and probabilities in their place; [B, n, o] each
        self.rows: dict[str, list[Tensor]] = {"output": [], "softmax": []}
        # each refuses a wrong value, before any pass
        self.keeps(1, 1)
        storage_device(0, "cpu", storage)
        store(torch.zeros(1), dtype)

    def empty(self) -> bool:
        return super().empty() and not any(self.rows.values())

    def tensors(self) -> list[Tensor]:
        return [*self.values(), *(rows for parts in self.rows.values() for rows in parts)]

    def scale_gradients_(self, factor: float, inputs: bool) -> None:
        super().scale_gradients_(factor, inputs)
        self.rows = {key: [part * factor for part in parts] for key, parts in self.rows.items()}

    def gram(self, name: str, rows: Tensor) -> None:
        if name not in self.rows or name in self:
            super().gram(name, rows)
            return
        if not rows.size(1):  # no position counts in this batch: a gradient of zeros
            rows = rows.new_zeros(len(rows), 1, rows.size(2))
        parts = self.rows[name]
        count = rows.size(1) + sum(part.size(1) for part in parts)
        if count and not self.keeps(rows.size(2), count):
            self.fold(name, rows)
            super().gram(name, rows)
            return
        held = sum(part.nbytes for part in parts) + rows.nbytes
        on_device = storage_device(held, rows.device, self.storage) == rows.device
        # not rounded while more of them may still make a covariance
        dtype = None if self.policy == "auto" else self.dtype
        part = rows
        if dtype is not None or not on_device:  # which checks their range, and waits for a device
            part = store(rows, dtype, "device" if on_device else "host")
        # a copy, since rows may be a view of memory that the next batch writes to
        parts.append(part.clone() if part.data_ptr() == rows.data_ptr() else part)

    def keeps(self, outputs: int, count: int) -> bool:
        """Whether `count` gradients stay; more than t_max are refused."""
        limits: Any = {"rho": self.rho, "t_max": self.t_max, "o_max": self.o_max}
        keep = woodbury_policy(outputs, count, self.policy, **limits)
        if keep and count > self.t_max:
            raise ValueError(
                f"layer {self.layer!r}: policy {self.policy!r} keeps the gradients of its outputs, "
                f"and there are {count:,}, more than t_max={self.t_max:,}; fit to fewer examples, "
                "raise t_max, or leave the layer out"
            )
        return keep

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
            scaled.append(store(wide, self.dtype or part.dtype, "device"))
        # once rows went to the host, later ones did too: all belong there
        columns = torch.cat([part.to(scaled[-1].device) for part in scaled], 1).mT
        if names == ["softmax"]:
            return {"columns": columns, "mean": centered_factor(columns, like.device).diagonal}
        return {"columns": columns}


def means_of(sums: Sums, terms: float, like: Tensor) -> dict[str, Tensor]:
    """Sums over positions for inputs of K-FAC, else over terms. The sums are gone then."""
    columns = sums.columns(terms, like) if isinstance(sums, GradientRows) else {}
    means = mirrored(sums)
    if "softmax" in means:
        # diag(S1) − S of S = Σ ppᵀ, plus what batches without a closed form have summed
        squares = means.pop("softmax")
        side = torch.diag_embed(squares.sum(2)) - squares
        means["output"] = side + means["output"] if "output" in means else side
    places = means.pop("places", None)
    for name, value in means.items():
        # no position counts where no gradient reaches any, as behind a weight that begins at zero
        value.div_(max(1.0, float(places)) if name == "input" and places is not None else terms)
    means.update(columns)
    return means


def check_finite(layer: str, tensors: Mapping[str, Tensor]) -> None:
    for name, value in tensors.items():
        # without a copy of the size of the value, which isfinite() makes
        if not bool(torch.stack(value.aminmax()).isfinite().all()):
            raise FloatingPointError(
                f"layer {layer!r}: {name} statistics are not finite; look for NaN or Inf in the "
                "data, or for losses that overflow in half precision"
            )
