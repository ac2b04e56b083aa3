"""What is known of one layer, and the operator that it makes."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from isokron.curvature.packing import Layout
from isokron.operators import Dense, Diagonal, Kron, KronEigen, KronThin, LowRank

Operator = Kron | KronEigen | KronThin


@dataclass(frozen=True, eq=False)
class Layer:
    """`statistics`: see isokron.curvature.statistics; `terms`: M; `policy`: of `fit`.

    The output side is "output" [B, o, o]; or "columns" [B, o, T], of which it is the product with
    their transpose; or "mean" [B, o] and "columns" of a softmax, diag(mean) less that product.
    """

    name: str
    method: str
    kind: str
    layout: Layout
    statistics: dict[str, Tensor]
    policy: str = "none"
    terms: float = 0.0
    retries: dict[str, int] = field(default_factory=dict)  # of eigendecompositions, by what helped

    @property
    def columns(self) -> int | None:
        """T, where gradients stand for the output side."""
        return self.statistics["columns"].size(2) if "columns" in self.statistics else None

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in. Columns may be stored in less."""
        side = self.statistics.get("input")
        return (self.statistics["eigenvalues"] if side is None else side).dtype

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
        return Kron((self._output(), side))

    def _output(self) -> Dense | LowRank:
        known = self.statistics
        if "columns" not in known:
            return Dense(known["output"])
        if "mean" in known:
            return LowRank(known["mean"], known["columns"], -1)
        blocks = len(known["columns"])
        zeros = torch.zeros(blocks, 1, dtype=torch.float64, device=known["input"].device)
        return LowRank(zeros, known["columns"])


def _trace(side: Tensor) -> Tensor:
    """[B, i, i] → [B, 1, 1]; [B, i] → [B, 1]"""
    if side.ndim == 2:
        return side.sum(1, keepdim=True)
    return side.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
