"""Models in wrappers: their parameters are those of the model inside, under its names.

DDP, DataParallel and DeepSpeed hold the model as `module`, torch.compile as `_orig_mod`, activation
checkpointing as `_checkpoint_wrapped_module`; the last two may also be around single layers.
"""

from torch import Tensor, nn

from isokron.distributed import is_flat_shard

ANYWHERE = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
WRAPPERS = ("module", *ANYWHERE)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that wrappers around it, if any, only call."""
    children = dict(module.named_children())
    if len(children) > 1 or any(True for _ in module.parameters(recurse=False)):
        return module
    inner = next((child for name, child in children.items() if name in WRAPPERS), None)
    return module if inner is None else unwrapped(inner)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by the names that they have without wrappers."""
    params: dict[str, Tensor] = {
        ".".join(part for part in name.split(".") if part not in ANYWHERE): param
        for name, param in unwrapped(model).named_parameters()
    }
    if any(map(is_flat_shard, params.values())):
        raise ValueError(
            "param_groups: FSDP1 (FullyShardedDataParallel) has flattened the model's parameters, "
            "so that matrices, norms and biases cannot be told apart; shard the model with FSDP2 "
            "(torch.distributed.fsdp.fully_shard), or give its parameters to isokron.AdamW"
        )
    return params
