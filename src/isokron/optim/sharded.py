"""AdamW whose state is spread over the ranks (ZeRO 1 and 2), with the bits of one process.

gradients → reduce_scatter → AdamW on the pieces a rank owns → all_gather → parameters
(Rajbhandari et al., 1910.02054)
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from isokron.distributed.exchange import Gathering
from isokron.distributed.gradients import AHEAD, AtStep, InBackward
from isokron.distributed.partial import full_is_asked_for, is_receiver, partial_state, rank_in
from isokron.distributed.places import sum_of_bits
from isokron.distributed.ranks import TIMEOUT
from isokron.distributed.world import beside, ranks_of
from isokron.optim import checkpoint
from isokron.optim.agreement import (
    check_arguments,
    everybodys,
    plain_settings,
    unfit,
)
from isokron.optim.engine import Params
from isokron.optim.groups import check_group, check_param, check_spelling, note_peak_, param_name
from isokron.optim.owned import whole_state
from isokron.optim.settings import SHARED
from isokron.optim.shards import Shards

logger = logging.getLogger(__name__)
WHO = "ShardedAdamW"


class ShardedAdamW(torch.optim.Optimizer):
    """AdamW for models of which every rank has a copy; it averages gradients, so wrap nothing.

    `reduce`: "step" averages gradients at the step, "backward" while they appear, and drops the
    whole ones. `group`: a process group; None is all processes. `bucket_bytes`: how much travels at
    once. `communication_dtype`: in which gradients are added; None: the parameter's. `timeout`:
    seconds to wait for other ranks. `nonfinite`: "raise", "skip" the step or "ignore", on all ranks
    alike. `state_dtype`: as of AdamW. See docs/sharded.md.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        state_dtype: torch.dtype | None = None,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        reduce: Literal["step", "backward"] = "step",
        group: Any = None,
        bucket_bytes: int = 25 << 20,
        communication_dtype: torch.dtype | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        if isinstance(params, nn.Module):
            raise TypeError(f"{WHO} takes parameters, got a module; pass model.parameters()")
        check_arguments(WHO, reduce, nonfinite, bucket_bytes, communication_dtype)
        self.reduce, self.nonfinite, self.communication_dtype = (
            reduce,
            nonfinite,
            communication_dtype,
        )
        self.ranks = ranks_of(group, timeout)
        # what ranks agree on must neither meet what others send nor stand in line behind it
        self._control = beside(self.ranks)
        self._shards = Shards(self.ranks, bucket_bytes)
        kind = AtStep if reduce == "step" else InBackward
        self._gradients: AtStep | InBackward = kind(
            self.ranks, self._shards.params, self._shards.buckets, communication_dtype
        )
        self._unsure = True  # whether ranks may have different parameters or counts
        self.skipped_steps = 0
        own = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        kept = {key: SHARED[key] for key in ("lr_scale", "decay", "maximize")}
        super().__init__(params, {"lr": lr, **own, **kept, "state_dtype": state_dtype})
        self._lay_out()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at any time, on all ranks; who owns what of the others stays."""
        check_spelling(WHO, param_group, [*self.defaults, "name", "initial_lr"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if isinstance(group["lr"], Tensor):
            group["lr"] = group["lr"].clone()  # groups that share it would all scale it in turn
        try:
            check_group(WHO, {**SHARED, **group})
            if len(set(group["params"])) < len(group["params"]):
                raise ValueError(
                    f"{WHO}: a parameter is in a group twice and would be stepped twice; pass it "
                    "once"
                )
            for i, param in enumerate(group["params"]):
                check_param(WHO, param_name(group, i), param, SHARED)
                if type(param.data) is not Tensor:
                    raise TypeError(
                        f"{WHO}: parameter {param_name(group, i)} must be a plain tensor of which "
                        f"every rank has a copy, got a {type(param.data).__name__}; give what is "
                        "sharded already to isokron.AdamW"
                    )
        except Exception:
            self.param_groups.pop()
            raise
        if self._shards.params:
            self._lay_out()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """`closure`: computes the loss and its gradients; it must do so alike on all ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step()
        return loss

    def _step(self) -> None:
        present, groups = self._agree(), self._groups()
        if not present:
            return
        shards, gradients = self._shards, self._gradients
        shards.prepare(present, groups, self.state, self._names())
        try:
            ready = gradients.averaged()
            if self.nonfinite != "ignore":
                ready = iter(list(ready))  # nothing may change before all has been looked at
                if self._to_be_skipped():
                    return
            for group in self.param_groups:
                note_peak_(group)
            shards.count_(present)
            flying: deque[Gathering] = deque()
            for bucket in ready:
                section = gradients.sections[bucket.number]
                flying.append(shards.step_(bucket, section, present, groups))
                if len(flying) > AHEAD:
                    shards.write_(flying.popleft(), present)
            while flying:
                shards.write_(flying.popleft(), present)
            shards.finish(present)
        finally:
            gradients.release()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, averaged or not."""
        super().zero_grad(set_to_none)
        self._gradients.clear(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """g ← g·min(1, max_norm/(‖g‖ + 10⁻⁶)), g all averaged gradients; returns ‖g‖.

        Right before the step, on all ranks. ‖g‖ does not depend on the number of ranks: the squares
        of pieces are added in one order, in float64.
        """
        self._agree()
        self._gradients.hold()
        sections = self._gradients.sections
        pieces = [piece for bucket in self._shards.buckets for piece in bucket.pieces]
        squares = torch.zeros(len(pieces), dtype=torch.float64)
        for at, piece in enumerate(pieces):
            if piece.owner == self.ranks.rank and piece.bucket in sections:
                part = sections[piece.bucket][piece.start : piece.start + piece.length]
                squares[at] = torch.linalg.vector_norm(part, dtype=torch.float64).square()
        norm = self._control.all_reduce_(squares.to(self._control.device)).sum().sqrt().cpu()
        scale = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
        for section in sections.values():
            section.mul_(scale)
        return norm

    def state_dict(self) -> dict[str, Any]:
        """This rank's part, for torch.distributed.checkpoint; cannot be pickled by itself."""
        packed = super().state_dict()
        if self.ranks.size == 1:
            return packed
        if full_is_asked_for():
            raise RuntimeError(
                f"{WHO}: full_state_dict=True would take one rank's part for the whole; save "
                "isokron.distributed.full_state_dict(optimizer), called on all ranks"
            )
        return partial_state(packed)

    @torch.no_grad()
    def full_state_dict(self, to_rank: int | None = None) -> dict[str, Any]:
        """The state of all ranks, as isokron.AdamW and torch have it; all must call it.

        All get it, or `to_rank` alone, counted in all processes: the others get {}.
        """
        receives, shards, groups = is_receiver(to_rank), self._shards, self._groups()
        active = [bucket for bucket in shards.buckets if bucket.number not in shards.idle]
        self._control.agree(
            f"{WHO}: to_rank, which buckets have state, and steps",
            [to_rank, [b.number for b in active], [float(step) for step in shards.steps]],
        )
        to = None if to_rank is None else rank_in(self.ranks, to_rank)
        if to_rank is not None and to is None:
            return {}
        where = (active, shards.owned, shards.params, groups, to, shards.bucket_bytes)
        full = whole_state(self.ranks, *where)
        if not receives:
            return {}
        state = {i: {"step": shards.steps[i].clone(), **full[i]} for i in sorted(full)}
        return {"state": state, "param_groups": super().state_dict()["param_groups"]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume, to the bit, from a full state dict or what torch.distributed.checkpoint loaded.

        Whatever the number of ranks that saved it.
        """
        with checkpoint.taking_over(self):
            super().load_state_dict(dict(state_dict))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Called by torch's load_state_dict."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no group here has a use for it
        foreign = SHARED.keys() - self.defaults.keys()  # settings of isokron.AdamW
        for group in self.param_groups:
            for key in foreign & group.keys():
                del group[key]
            for key, value in self.defaults.items():
                group.setdefault(key, value)
        checkpoint.unshield(self.state)
        self._unsure = True
        self._shards.build(self._groups(), self.state, self._names())

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            f"{WHO} holds one rank's part and a process group and cannot be pickled or copied; "
            "save isokron.distributed.full_state_dict(optimizer), called on all ranks"
        )

    def _groups(self) -> list[dict[str, Any]]:
        """The group of every parameter."""
        return [group for group in self.param_groups for _ in group["params"]]

    def _names(self) -> list[str]:
        """How errors call every parameter."""
        groups = self.param_groups
        return [param_name(group, i) for group in groups for i in range(len(group["params"]))]

    def _lay_out(self) -> None:
        """Give the pieces of parameters that are new to owners, the same on all ranks."""
        first, names = len(self._shards.params), self._names()
        new = [param for group in self.param_groups for param in group["params"]][first:]
        told = {
            "arguments": [
                *(self.reduce, self.nonfinite, self._shards.bucket_bytes),
                str(self.communication_dtype),
            ],
            "parameters": [
                [names[first + i], list(p.shape), str(p.dtype), p.requires_grad]
                for i, p in enumerate(new)
            ],
        }
        self._control.agree(f"{WHO}: arguments and parameters", told)
        self._shards.add(new)
        self._gradients.watch(first)
        self._unsure = True
        self._shards.build(self._groups(), self.state, names)

    def _agree(self) -> set[int]:
        """The numbers of the parameters that have gradients; raises unless all ranks agree."""
        present, shards = self._gradients.present(), self._shards
        value = {
            "settings": [plain_settings(group) for group in self.param_groups],
            "without gradients": [i for i in range(len(shards.params)) if i not in present],
            **self._gradients.facts(),
        }
        if self._unsure:
            value["steps"] = [float(step) for step in shards.steps]
            value["sums of the parameters' bits"] = list(map(sum_of_bits, shards.params))
        self._control.agree(f"{WHO}: what a step starts from", value)
        self._unsure = False
        return present

    def _to_be_skipped(self) -> bool:
        """Raise, or say to skip, if any rank owns an average that is not finite."""
        rank, names, buckets = self.ranks.rank, self._names(), self._shards.buckets
        own = self._gradients.sections.items()
        numbers = {i for b, section in own for i in unfit(buckets[b], section, rank)}
        every = everybodys(self._control, [names[i] for i in numbers])
        if not every:
            return False
        wrong = f"non-finite average gradient of parameter {', '.join(every)}"
        if self.nonfinite == "raise":
            raise FloatingPointError(
                f"{WHO}: {wrong}; nothing was changed. Clip or unscale gradients before the step, "
                'or pass nonfinite="skip"'
            )
        self.skipped_steps += 1
        logger.warning("skipped a step: %s", wrong)
        return True
