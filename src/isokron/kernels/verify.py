"""Verification of the Triton kernels against torch, once per GPU, before they are used there.

The kernels were written without access to a GPU. If Triton is missing, or a kernel fails or differs
from torch, torch's operators are used instead. ISOKRON_TRITON=0 disables all kernels.
"""

import functools
import importlib
import os
from typing import Any

import torch
from torch import Tensor

# every remainder modulo 16, less than a chunk of the kernel and more
LENGTHS = [*range(1, 34), 1030, 5000]
SHAPES = [(2, 70, 33), (1, 1152, 96)]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Unverified(Exception):
    """A kernel's result differs from torch's."""


@functools.cache
def verified(name: str, device: torch.device) -> tuple[bool, str]:
    """Whether the kernels of triton_<name>.py can be used on a device, and the reason."""
    if os.environ.get("ISOKRON_TRITON") == "0":
        return False, "switched off by ISOKRON_TRITON=0"
    if device.type != "cuda":
        return False, "no CUDA device"
    try:
        importlib.import_module("triton")
    except ImportError:
        return False, "Triton is not installed: pip install 'isokron[triton]'"
    try:
        CHECKS[name](device)
    except Unverified as reason:
        return False, str(reason)
    except Exception as error:  # any failure of compiler or driver: torch is used instead
        return False, f"{type(error).__name__}: {error}"
    return True, f"same results as torch on {torch.cuda.get_device_name(device)}"


def check_adamw(device: torch.device) -> None:
    """Compare two steps with torch's fused operator, bit for bit."""
    from isokron.kernels.triton_adamw import adamw_

    generator = torch.Generator("cpu").manual_seed(0)
    for flag in (False, True):
        settings: dict[str, Any] = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
        settings |= {"amsgrad": flag, "maximize": flag, "weight_decay": 0.0 if flag else 0.1}
        noise = [_noise((sum(LENGTHS),), generator) for _ in range(4 + flag)]
        noise[3:] = [square.square_() for square in noise[3:]]
        ours = [list(tensor.to(device).split(LENGTHS)) for tensor in noise]
        torchs = [[tensor.clone() for tensor in tensors] for tensors in ours]
        for step in (1.0, 2.0):
            steps = [torch.tensor(step, dtype=torch.float32, device=device)] * len(LENGTHS)
            adamw_(*ours, step=step, **settings)
            lists: list[Any] = [*torchs[:4], torchs[4] if flag else [], steps]
            torch._fused_adamw_(*lists, **settings)
        if not all(all(map(torch.equal, *pair)) for pair in zip(ours, torchs, strict=True)):
            raise Unverified("its bits are not those of torch's fused AdamW")


def check_symmetric(device: torch.device) -> None:
    """Compare A = XXᵀ and 2A² − 3A with float64."""
    from isokron.kernels.triton_symmetric import symmetric_matmul

    generator = torch.Generator("cpu").manual_seed(0)
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device.type == "cuda")
    for shape in SHAPES:
        noise = _noise(shape, generator) / shape[-1] ** 0.5
        for dtype in dtypes:
            x = noise.to(device, dtype)
            gram = symmetric_matmul(x)
            _check_close(gram, x.double() @ x.double().mT)
            square = symmetric_matmul(gram, alpha=2.0, beta=-3.0, add=gram)
            _check_close(square, 2 * gram.double() @ gram.double().mT - 3 * gram.double())


def _noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    # the user may have set another default dtype or device
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _check_close(computed: Tensor, exact: Tensor) -> None:
    error = float((computed.double() - exact).abs().max() / exact.abs().max())
    dtype = computed.dtype
    # if the user allows TF32 for float32 products, they have the mantissa of float16
    tf32 = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if not error < TOLERANCES[torch.float16 if tf32 else dtype]:  # also raises for NaN
        raise Unverified(f"its products in {dtype} are off by {error:.2g}")


CHECKS = {"adamw": check_adamw, "symmetric": check_symmetric}
