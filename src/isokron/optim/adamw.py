"""AdamW with the bits of torch.optim.AdamW(fused=True), in one process or sharded over many."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from isokron.distributed import TIMEOUT, is_flat_shard, is_sharded, ranks_of
from isokron.distributed.gradient_buckets import BUCKET_BYTES, GradientBuckets
from isokron.linalg import on_host
from isokron.optim.adamw_lists import PartList
from isokron.optim.gradient_checks import check_sums, gradient_sums
from isokron.optim.layout import Traits
from isokron.optim.lr_transfer import takes_none
from isokron.optim.preconditioned import Params, Preconditioned
from isokron.optim.settings import param_name


class AdamW(Preconditioned):
    """AdamW on every parameter; checkpoints interchange with torch.optim.AdamW's.

    The positional arguments are torch's, in torch's order.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate.
        betas: rates of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: λ of p ← p − lr·λ·p.
        amsgrad: divide by the largest second moment so far.
        maximize: climb instead of descend.
        flat: move small parameters into one buffer; see docs/adamw.md.
        nonfinite: "ignore", "raise" or "skip" the step. Not checked by default, because a step
            takes about as long as reading the gradients.
        state_dtype: None keeps moments in the parameter's dtype, as torch does; torch.float32
            gives parameters in half precision float32 moments.
        capturable: must be False.
        differentiable: must be False.
        settings: other settings of parameter groups, such as `decay`; see docs/engine.md. `fused`
            and `foreach` are taken and ignored; the results are those of fused=True.
    """

    _buckets: GradientBuckets | None = None

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        flat: bool = False,
        nonfinite: Literal["raise", "skip", "ignore"] = "ignore",
        state_dtype: torch.dtype | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        **settings: Any,
    ) -> None:
        for name, asked in (("capturable", capturable), ("differentiable", differentiable)):
            if asked:
                raise ValueError(
                    f"AdamW: {name} must be False, got {name}={asked!r}; "
                    f"torch.optim.AdamW({name}=True) has it"
                )
        moments = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        settings |= {"maximize": maximize, "flat": flat}
        settings |= {"nonfinite": nonfinite, "state_dtype": state_dtype}
        traits = Traits(takes=takes_none, check=_check_adamw, elementwise=True)
        super().__init__(params, lr, traits, **moments, **settings)

    def distribute(
        self,
        group: Any = None,
        *,
        gradients: Literal["whole", "sharded"] = "whole",
        bucket_bytes: int = BUCKET_BYTES,
        communication_dtype: torch.dtype | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        """Divide the moments over processes that have the same parameters: 1/R of them each.

        Call it on all processes before the first step. See docs/sharded.md.

        Args:
            group: a process group; None is all processes.
            gradients: "whole": every rank has the averaged gradients in `.grad`, as under DDP
                (ZeRO 1). "sharded": gradients are averaged here, during the backward pass, and a
                rank keeps the rows that it steps (ZeRO 2); do not wrap the model in DDP.
            bucket_bytes: bytes of sharded gradients that travel together.
            communication_dtype: in which sharded gradients are added; None: the parameter's.
            timeout: seconds that a process waits for others.
        """
        if gradients not in ("whole", "sharded"):
            raise ValueError(
                f"{type(self).__name__}: gradients must be 'whole' or 'sharded', got {gradients!r}"
            )
        ranks = ranks_of(group, timeout)
        super().distribute(ranks, communication_dtype=communication_dtype, timeout=timeout)
        self._buckets = None
        if gradients == "sharded":
            for params in self.param_groups:
                self._check_whole(params)
            self._buckets = GradientBuckets(ranks, communication_dtype, bucket_bytes)
            self._buckets.add(*_named(self.param_groups))

    def _check_whole(self, group: Mapping[str, Any]) -> None:
        """Refuse a group whose gradients cannot be sharded."""
        who = type(self).__name__
        if group["average"]:
            raise ValueError(
                f"{who}: average must be None with gradients='sharded', got {group['average']!r}; "
                "average under DDP, with gradients='whole'"
            )
        for name, param in zip(*_named([group]), strict=True):
            if is_sharded(param) or is_flat_shard(param):
                kind = "a DTensor" if is_sharded(param) else "flattened by FSDP1"
                raise ValueError(
                    f"{who}: gradients='sharded' needs whole parameters on every rank, but "
                    f"parameter {name} is {kind}; shard the model with FSDP2 (fully_shard) and "
                    "take isokron.AdamW without distribute()"
                )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group at any time, on all ranks."""
        super().add_param_group(param_group)
        if self._buckets is None:
            return
        group = self.param_groups[-1]
        try:
            self._check_whole(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._buckets.add(*_named([group]))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; those of a `flat` group become zero where they are."""
        if self._buckets is not None:
            self._buckets.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """g ← g·min(1, max_norm/(‖g‖ + 10⁻⁶)), g all gradients; returns ‖g‖.

        As torch.nn.utils.clip_grad_norm_, also where gradients are sharded: then of the averages
        of all ranks, and all ranks must call it.
        """
        if self._buckets is not None:
            return self._buckets.clip_norm_(max_norm)
        params = [param for group in self.param_groups for param in group["params"]]
        return torch.nn.utils.clip_grad_norm_(params, max_norm)

    def _check_step(self) -> str | None:
        if self._buckets is None:
            return super()._check_step()
        self._buckets.average_()
        self._hand_over(self._buckets)
        averaged = [
            {
                **group,
                "params": [SimpleNamespace(grad=self._buckets.rows(p)) for p in group["params"]],
            }
            for group in self.param_groups
        ]
        sums = on_host(gradient_sums(averaged))
        return check_sums(type(self).__name__, averaged, self._squares, sums)

    def _hand_over(self, buckets: GradientBuckets) -> None:
        """Let every list of parameters take its gradients from the buckets."""
        lists = [part_list for layout in self._current_layouts() for part_list in layout.adamw]
        for part_list in lists:
            assert isinstance(part_list, PartList)
            part_list.buckets = buckets


class ShardedAdamW(AdamW):
    """AdamW with `distribute(gradients="sharded")`: moments and gradients divided over ranks.

    Args:
        params: parameters, named parameters or groups of them.
        lr: learning rate.
        group: a process group; None is all processes.
        bucket_bytes: bytes of gradients that travel together.
        communication_dtype: in which gradients are added; None: the parameter's.
        timeout: seconds that a process waits for others.
        nonfinite: "raise", "skip" the step or "ignore", on all ranks alike.
        settings: the other arguments of AdamW.
    """

    checkpoint_as = "AdamW"

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        *,
        group: Any = None,
        bucket_bytes: int = BUCKET_BYTES,
        communication_dtype: torch.dtype | None = None,
        timeout: float = TIMEOUT,
        nonfinite: Literal["raise", "skip", "ignore"] = "raise",
        **settings: Any,
    ) -> None:
        super().__init__(params, lr, nonfinite=nonfinite, **settings)
        self.distribute(
            group,
            gradients="sharded",
            bucket_bytes=bucket_bytes,
            communication_dtype=communication_dtype,
            timeout=timeout,
        )


def _check_adamw(group: Mapping[str, Any]) -> None:
    if not group["use_bias_correction"]:
        raise ValueError(
            "AdamW: use_bias_correction must be True for AdamW, which always corrects bias, got "
            "use_bias_correction=False"
        )


def _named(groups: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Tensor]]:
    """The parameters of groups, and the names that errors use for them."""
    names = [param_name(group, i) for group in groups for i in range(len(group["params"]))]
    return names, [param for group in groups for param in group["params"]]
