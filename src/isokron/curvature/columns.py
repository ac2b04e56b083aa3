"""Output sides kept as the gradients they are made of while a policy says so: U of UUᵀ/M.

With T gradients of o entries, T < o, powers of G take T×T matrices in place of o×o (Woodbury).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from isokron.curvature.statistics import Sums
from isokron.operators import centered_factor, storage_device, store, woodbury_policy
from isokron.operators.woodbury import POLICIES

KEPT = ("output", "softmax")  # sums of rows gᵀg that may stay rows


@dataclass(frozen=True)
class Policy:
    """Which output sides stay gradients (`name`, `rho`, `t_max`: see woodbury_policy), and where
    and in what precision these are stored."""

    name: str = "none"
    rho: float = 0.75
    t_max: int = 8192
    store: str = "auto"
    dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.name not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {self.name!r}")
        for argument, value in (("rho", self.rho), ("t_max", self.t_max)):
            if not value > 0:
                raise ValueError(f"{argument} must be positive, got {value!r}")
        storage_device(0, "cpu", self.store)
        store(torch.zeros(1), self.dtype)

    def keeps(self, outputs: int, rows: int) -> bool:
        return woodbury_policy(outputs, rows, self.name, rho=self.rho, t_max=self.t_max)

    @property
    def may_change(self) -> bool:
        """Whether more rows may make a covariance of those kept so far: none is rounded then."""
        return self.name == "auto"


class Columns(Sums):
    """Sums in which the rows of an output side stay what they are until there are too many."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy
        self.rows: dict[str, list[Tensor]] = {name: [] for name in KEPT}

    def gram(self, name: str, rows: Tensor) -> None:
        kept = self.rows.get(name)
        if kept is None or name in self:
            super().gram(name, rows)
            return
        if not rows.size(1) and kept:
            return
        count = rows.size(1) + sum(part.size(1) for part in kept)
        if count and self.policy.keeps(rows.size(2), count):
            held = sum(part.nbytes for part in kept) + rows.nbytes
            where = storage_device(held, rows.device, self.policy.store)
            dtype = rows.dtype if self.policy.may_change else self.policy.dtype
            # a copy, for rows may be a view of what the next batch writes to
            own = store(rows, dtype, "host" if where != rows.device else "device")
            kept.append(own.clone() if own.data_ptr() == rows.data_ptr() else own)
            return
        for part in (*kept, rows):
            super().gram(name, part.to(rows))
        kept.clear()

    def kept(self, terms: float) -> dict[str, Tensor]:
        """{"columns": U/√M}, and "mean" for those of a softmax; nothing where rows were summed."""
        some = [name for name in KEPT if self.rows[name]]
        if not some:
            return {}
        if len(some) > 1 or any(name in self for name in KEPT):  # the head of some batches only
            for name in some:
                for part in self.rows[name]:
                    super().gram(name, part)
            return {}
        scaled = [_scaled(part, terms, self.policy) for part in self.rows[some[0]]]
        # once they went to the host, later ones did too: all belong there
        columns = torch.cat([part.to(scaled[-1].device) for part in scaled], 1).mT  # [B, o, T]
        if some == ["softmax"]:
            return {"columns": columns, "mean": centered_factor(columns).diagonal}
        return {"columns": columns}


def _scaled(rows: Tensor, terms: float, policy: Policy) -> Tensor:
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32)) / math.sqrt(terms)
    where = "host" if policy.store == "host" else "device"
    return store(wide, policy.dtype or rows.dtype, where)
