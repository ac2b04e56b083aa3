"""What stands in `.grad` once a gradient has been sent: this rank keeps only rows of the average.

Without it torch's functions would take a gradient that has been sent for none at all.
"""

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from isokron.distributed.gradient_buckets import GradientBuckets


class ShardedGradient(Tensor):
    """No values. Autograd adds a gradient to it, which `local` has until it is sent; `buckets` has
    this rank's rows of the average. Any other operation but zero_() is an error."""

    local: Tensor | None
    param: "weakref.ref[Tensor]"
    buckets: "weakref.ref[GradientBuckets]"

    @staticmethod
    def __new__(cls, param: Tensor, buckets: "GradientBuckets") -> "ShardedGradient":
        gradient: ShardedGradient = Tensor._make_wrapper_subclass(
            cls, param.shape, strides=param.stride(), dtype=param.dtype, device=param.device
        )
        gradient.local = None
        gradient.param, gradient.buckets = weakref.ref(param), weakref.ref(buckets)
        return gradient

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        gradient = args[0]
        buckets = gradient.buckets() if isinstance(gradient, cls) else None
        if buckets is not None and func is torch.ops.aten.add_.Tensor:
            added = args[1]
            gradient.local = added.clone() if gradient.local is None else gradient.local + added
        elif buckets is not None and func is torch.ops.aten.zero_.default:
            gradient.local = None
            buckets.zero_(gradient.param())
        else:
            raise RuntimeError(
                f"{func.overloadpacket.__name__} of a sharded gradient: it has been sent, and a "
                "rank keeps some rows of the average only; call optimizer.clip_grad_norm_(max_norm)"
                " to clip, optimizer.zero_grad() before the model is changed, and for whole "
                "gradients distribute(gradients='whole') under DDP"
            )
        return gradient

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"ShardedGradient(shape={tuple(self.shape)})"
