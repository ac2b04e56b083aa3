"""The exact Fisher of a softmax head, in closed form: no backward pass, however many classes.

Where logits are a linear layer's outputs themselves, the Hessian of a term in them is
H = diag(p) − ppᵀ, and with the inputs ā of that layer, one term at a time,

    K-FAC     G = Σ H/M
    TKFAC     A = Σ tr(H) āāᵀ/M,  G = Σ |ā|² H/M, and so is Shampoo
    EK-FAC    Λ = Σ (Q_Gᵀ H Q_G)_jj (āQ_A)²/M,  (…)_jj = Σ_c p_c Q_cj² − (pQ_j)²
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from isokron.curvature.sites import Site
from isokron.curvature.statistics import Sums, Uses, reduced
from isokron.curvature.views import Linear


class Heads:
    """While it lasts, remembers the uses of linear layers, to say which of them made the logits."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = [
            site
            for site in sites
            if isinstance(site.view, Linear) and not isinstance(site.module, nn.MultiheadAttention)
        ]
        self.handles: list[RemovableHandle] = []
        self.uses: list[tuple[Site, Tensor, Tensor, tuple[int, int]]] = []

    def __enter__(self) -> "Heads":
        for site in self.sites:
            self.handles.append(site.module.register_forward_hook(self._hook(site)))
        return self

    def __exit__(self, *error: Any) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self.uses.clear()

    def _hook(self, site: Site) -> Any:
        def seen(_: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            if args:
                versions = args[0]._version, out._version
                self.uses.append((site, args[0].detach(), out.detach(), versions))

        return seen

    def of(self, logits: Tensor) -> tuple[Site, Tensor, Tensor] | None:
        """The site whose only outputs are these logits, its inputs, and its outputs."""
        for site, inputs, outputs, versions in self.uses:
            same = (
                outputs.data_ptr() == logits.data_ptr()
                and outputs.numel() == logits.numel()
                and outputs.size(-1) == logits.size(-1)
                and outputs.is_contiguous()
                and logits.is_contiguous()
                and versions == (inputs._version, outputs._version)
            )
            if same and sum(other is site for other, *_ in self.uses) == 1:
                return site, inputs, outputs
        return None


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
    found = spread.clamp_min(0).mT @ (inputs @ right).square()
    total = sums.into("eigenvalues", found)
    total += found


def output_side(found: dict[str, Tensor]) -> Tensor:
    """G = diag(S1) − S of S = Σ ppᵀ, and what other batches have summed."""
    squares = found.pop("softmax")
    side = torch.diag_embed(squares.sum(2)) - squares
    return side + found["output"] if "output" in found else side
