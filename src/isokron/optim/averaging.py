"""Averages of iterates: gradients are taken near the average, and the average is the result.

z ← z + δ,  x ← (1−c)x + cz,  y = βx + (1−β)z

δ is the optimizer's own step at y. Schedule-free (Defazio et al., 2405.15682): c = γ²/Σγ², γ the
learning rate. Primal: c = 1 − decay, an exponential mean. A parameter holds y while training and
x for evaluation; both are made from x and z alone, so going back and forth changes no bit.
"""

from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from isokron.optim.settings import learning_rate, state_dtype


class Averages:
    """x and z of the parameters of one group, and the weight x has gathered. [n]"""

    def __init__(self, params: Sequence[Tensor], group: Mapping[str, Any]) -> None:
        self.params = params
        self.iterate = [_wide_copy(p, group) for p in params]
        self.average = [_wide_copy(p, group) for p in params]
        self.beta = group["average_beta"]  # of the y that parameters are
        self.weight = torch.zeros(len(params), dtype=torch.float64, device="cpu")

    def entry(self, i: int) -> dict[str, Tensor]:
        return {
            "iterate": self.iterate[i],
            "average": self.average[i],
            "average_weight": self.weight[i],
        }

    def before(self) -> list[Tensor | None]:
        """Where the parameters that are about to step stand now."""
        self._follow_("train", [p.grad is not None for p in self.params])
        return [p.detach().clone() if p.grad is not None else None for p in self.params]

    def after_(self, before: Sequence[Tensor | None], group: Mapping[str, Any]) -> None:
        """Take the step that was made at y for a step of z, then move the average and y."""
        self.beta = group["average_beta"]
        for i, old in enumerate(before):
            if old is None:
                continue
            param, iterate, average = self.params[i], self.iterate[i], self.average[i]
            iterate.add_(param.to(iterate.dtype) - old)
            average.lerp_(iterate, self._share(i, group))
            param.copy_(self._shown(i, "train"))

    def show_(self, mode: str, group: Mapping[str, Any]) -> None:
        """Let the parameters be y ("train") or x ("eval"), where they are the other."""
        self._follow_(group["mode"], [True] * len(self.params))
        self.beta = group["average_beta"]
        for i, param in enumerate(self.params):
            param.copy_(self._shown(i, mode))

    def _shown(self, i: int, mode: str) -> Tensor:
        return (
            self.average[i] if mode == "eval" else self.iterate[i].lerp(self.average[i], self.beta)
        )

    def _follow_(self, shown: str, chosen: Sequence[bool]) -> None:
        """Move x and z as far as parameters were moved since: weights that were loaded or edited.

        Where they were not, the difference is 0, to the bit.
        """
        for i in compress(range(len(self.params)), chosen):
            param, iterate = self.params[i], self.iterate[i]
            moved = param.to(iterate.dtype) - self._shown(i, shown).to(param.dtype)
            iterate.add_(moved)
            self.average[i].add_(moved)

    def _share(self, i: int, group: Mapping[str, Any]) -> float:
        """c, the newest iterate's share of the average."""
        if group["average"] == "primal":
            return 1 - group["average_decay"]
        weight = float(learning_rate(group)) ** 2
        self.weight[i] += weight
        return weight / float(self.weight[i]) if weight else 0.0


def _wide_copy(param: Tensor, group: Mapping[str, Any]) -> Tensor:
    return param.detach().to(state_dtype(param, group), copy=True)
