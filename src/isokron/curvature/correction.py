"""EK-FAC: the eigenbases of K-FAC's sides, and eigenvalues of a second look at the data."""

from collections import Counter

from torch import Tensor

from isokron.curvature import heads, statistics
from isokron.curvature.division import Segments
from isokron.curvature.folding import Folding, Layers, added, check_finite
from isokron.curvature.passes import Passes
from isokron.curvature.settling import settled, shared
from isokron.curvature.sites import Site
from isokron.curvature.statistics import Sums, Uses
from isokron.linalg import eigh


def decompose_(own: dict[str, Tensor], retries: Counter[str]) -> None:
    """EK-FAC: in the place of both sides their eigenbases; none of numbers of columns."""
    # a side is gone before the next is decomposed; products with a basis that lies in memory
    # otherwise, as it does after a journey, round otherwise
    own["basis.output"] = eigh(own.pop("output"), retries)[1].contiguous()
    inputs = own.pop("input")
    if inputs.ndim == 3:
        own["basis.input"] = eigh(inputs, retries)[1].contiguous()


def correct_(
    found: dict[str, dict[str, Tensor]],
    sites: list[Site],
    passes: Passes,
    folding: Folding,
    terms: float,
    layers_of: list[list[str]],
) -> None:
    """EK-FAC: Λ, of a second look at the data."""
    division = folding.division
    bases = {
        name: (own["basis.output"], own.get("basis.input"))
        for name, own in found.items()
        if "basis.output" in own
    }

    def fresh() -> Layers:
        return {name: Sums() for name in bases}

    segments = Segments(division, folding.segments.batches, fresh, added)

    def take(site: Site, uses: Uses) -> None:
        if uses.kind == "softmax":
            heads.eigenvalues_(segments.now[site.name], uses, bases[site.name])
        elif site.name in bases:
            own = segments.now[site.name]
            statistics.eigenvalues_(own, uses, bases[site.name], site.columns)

    kept = folding.again()
    if division.workers is not None and "no" in division.workers.texts("yes" if kept else "no"):
        kept = None
    with division.together("a second pass over the data"):
        if kept is None:
            passes.over(take, segments.advance)
        else:
            with passes.plain():
                for some in kept:
                    for site, uses in some.uses or ():
                        take(site, uses)
                    segments.advance(some.done)
        tree = segments.finish()
    device = next(passes.model.parameters()).device
    own_layers = [[name for name in names if name in bases] for names in layers_of]
    sums = settled(division, tree, own_layers, device)
    values = {}
    with division.together("the eigenvalues of layers"):
        for name, own in sums.items():
            whole = own["columns"].mT if "columns" in own else own["eigenvalues"]
            values[name] = {"eigenvalues": (whole / terms).contiguous()}
            check_finite(name, values[name])
    for name, known in shared(division, values, own_layers, device).items():
        found[name].update(known)
        check_finite(name, found[name])
