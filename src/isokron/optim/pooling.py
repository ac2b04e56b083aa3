"""What the layers of all ranks have seen, as if one rank had; and work that ranks do for all."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import isqrt, sqrt
from typing import Any

import torch
from torch import Tensor

from isokron.distributed import Ranks, assign
from isokron.distributed.agreement import APART
from isokron.distributed.parcels import Form, columns_to_rows, gather, sum_
from isokron.distributed.ranks import fingerprint
from isokron.distributed.world import beside
from isokron.linalg import halved, unhalve_
from isokron.optim.modes import mode_of
from isokron.optim.rows import Keeps, Rows

SIDES = ("output", "input")
SCALED = ("output", "eigenvalues", "columns")  # sums of squares of gradients
FIT, SKIP, FAIL = range(3)

Counts = list[tuple[int, int]]  # terms and places of every rank


class Pooling:
    """`reduce`: see isokron.optim.modes. Every method that says "all ranks" is a collective."""

    def __init__(self, ranks: Ranks, reduce: str) -> None:
        self.ranks, self.reduce = ranks, reduce
        # where what ranks agree on does not meet what DDP sends
        self.control = replace(beside(ranks), traffic=ranks.traffic)
        self.met = False

    def keeps(self, thin: bool, fixed: bool) -> Keeps:
        """Which vectors a rank does not sum up before it knows how many others have.

        `thin`: whether the output side is kept as columns, or may be if it is not `fixed` yet.
        """

        def keep(side: str, width: int, count: int) -> bool:
            if side == "output" and thin and fixed:
                return True
            return mode_of(width, count, self.reduce, thin and side == "output") != "covariance"

        return keep

    def mode(self, side: str, width: int, terms: int, thin: bool, fixed: bool) -> str:
        """How a side is shared; what its state has once begun with stays."""
        if side == "output" and fixed:
            return "gram" if thin else mode_of(width, terms, self.reduce, False)
        return mode_of(width, terms, self.reduce, thin and side == "output")

    def meet(
        self, facts: Mapping[str, Any], counts: Counts, norm: float, wrong: Exception | str | None
    ) -> tuple[list[Counts], str | None]:
        """Everybody's counts, layer by layer, and why all leave this step out, if one does.

        All ranks. Raises on all where `facts` or gradients, of length `norm`, differ, and where one
        rank has something `wrong` to raise.
        """
        if not self.met:  # else not even the lengths of what follows are sure to be equal
            for what, fact in facts.items():
                self.control.agree(f"NaturalGradient: {what}", fact)
        self.met = True
        status = FIT if wrong is None else SKIP if isinstance(wrong, str) else FAIL
        length = torch.tensor([norm], dtype=torch.float64).view(torch.int64)
        flat = [number for pair in counts for number in pair]
        mine = torch.tensor([fingerprint(facts), status, int(length), *flat])
        everyone = self.control.all_gather(mine.to(self.control.device)).cpu()
        if len(set(everyone[:, 0].tolist())) > 1:
            for what, fact in facts.items():
                self.control.agree(f"NaturalGradient: {what}", fact)
        if isinstance(wrong, Exception):
            raise wrong
        unfit = wrong
        for rank, other in enumerate(everyone[:, 1].tolist()):
            if other == FAIL:
                raise RuntimeError(
                    f"NaturalGradient: rank {rank} cannot step, its error says why; nothing was "
                    "changed"
                )
            if other == SKIP and unfit is None:
                unfit = f"rank {rank} leaves it out"
        if unfit is None:
            _check_equal(everyone[:, 2].contiguous().view(torch.float64).tolist())
        pairs = everyone[:, 3:].view(len(everyone), -1, 2).tolist()
        return [[(each[i][0], each[i][1]) for each in pairs] for i in range(len(counts))], unfit

    def share(
        self,
        taken: Mapping[str, Rows],
        factors: Mapping[str, float],
        counts: Mapping[str, Counts],
        thin: Callable[[str], tuple[bool, bool]],
    ) -> dict[str, dict[str, Tensor]]:
        """Sums over all ranks, of gradients times the factor their own rank has. All ranks.

        `thin`: whether a layer is kept as columns or may be, and whether that is settled.
        """
        summed: list[Tensor] = []
        halves: list[tuple[Rows, str, Tensor]] = []
        sent: list[tuple[Rows, str, Tensor, list[int]]] = []
        columns: dict[str, Tensor] = {}
        for name, sums in taken.items():
            sums.pop("places", None)
            for key in SCALED:
                if key in sums:
                    sums[key] *= factors[name] ** 2
            places = [pair[1] for pair in counts[name]]
            for side in SIDES:
                vectors = sums.kept(side) if sums.rows.get(side) else None
                if vectors is not None:
                    vectors = vectors * factors[name] if side == "output" else vectors
                    sums.rows[side] = [vectors]
                elif side not in sums or sums[side].ndim != 3:
                    continue
                width = (sums[side] if vectors is None else vectors).size(2)
                mode = self.mode(side, width, sum(places), *thin(name))
                if mode == "covariance" or vectors is None:
                    sums.fold(side)
                    halves.append((sums, side, halved(sums.pop(side))))
                elif mode == "gather":
                    sent.append((sums, side, vectors, places))
                else:
                    total = sqrt(sum(pair[0] for pair in counts[name]))
                    columns[name] = columns_to_rows(self.ranks, vectors / total, places)
                    columns[name] = columns[name].to(vectors.device)
                    del sums.rows[side]
            summed += sums.values()
        sum_(self.ranks, [*summed, *(half for _, _, half in halves)])
        for sums, side, half in halves:
            size = isqrt(2 * half.size(1))  # of d(d+1)/2
            sums[side] = unhalve_(half.new_zeros(len(half), size, size), half)
        self._gather(sent)
        return {
            name: {**sums, **({"columns.output": columns[name]} if name in columns else {})}
            for name, sums in taken.items()
        }

    def _gather(self, sent: Sequence[tuple[Rows, str, Tensor, list[int]]]) -> None:
        """Everybody's vectors to everybody, who add up their products in the same order."""
        forms: list[list[Form]] = [
            [((len(own), places[r], own.size(2)), own.dtype) for _, _, own, places in sent]
            for r in range(self.ranks.size)
        ]
        found = gather(self.ranks, [own for _, _, own, _ in sent], forms) if sent else []
        for i, (sums, side, own, _) in enumerate(sent):
            sums.rows[side] = [torch.cat([of[i].to(own.device) for of in found], 1)]
            sums.fold(side)

    def decompose(
        self, matrices: Sequence[Tensor], work: Callable[[Tensor], tuple[Tensor, Tensor]]
    ) -> list[tuple[Tensor, Tensor]]:
        """Eigenvalues and bases, each found by one rank, by cost d³, and sent to all. All ranks."""
        costs = [float(len(m) * m.size(-1) ** 3) for m in matrices]
        owners = assign(costs, range(len(costs)), [0.0] * self.ranks.size)
        own: list[Tensor] = []
        forms: list[list[Form]] = [[] for _ in range(self.ranks.size)]
        for matrix, owner in zip(matrices, owners, strict=True):
            if owner == self.ranks.rank:
                own += work(matrix)
            shape = tuple(matrix.shape)
            forms[owner] += [(shape[:-1], matrix.dtype), (shape, matrix.dtype)]
        found = [iter(several) for several in gather(self.ranks, own, forms)]
        return [
            (next(found[owner]).to(matrix.device), next(found[owner]).to(matrix.device))
            for matrix, owner in zip(matrices, owners, strict=True)
        ]

    def same(self, numbers: Sequence[float]) -> list[float]:
        """Those of the first rank, to the bit, on all ranks."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.ranks.device)
        return self.ranks.all_gather(mine)[0].tolist()

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        mine = torch.tensor(numbers, dtype=torch.float64, device=self.ranks.device)
        return self.ranks.all_reduce_(mine).tolist()


def _check_equal(norms: Sequence[float]) -> None:
    """Gradients of unequal length are not those of one loss: nobody has averaged them."""
    for rank, norm in enumerate(norms):
        if abs(norm - norms[0]) > APART * max(abs(norm), abs(norms[0])):
            raise RuntimeError(
                f"NaturalGradient: gradients must be the same on all ranks, but their norm is "
                f"{norms[0]:.6g} on rank 0 and {norm:.6g} on rank {rank}; wrap the model in "
                "DistributedDataParallel, or all-reduce gradients before step()"
            )
