"""Triton kernels are compared with torch's operators once on every GPU before they are used there.

They were written without a GPU at hand. Where Triton is missing, or a kernel fails or gives other
results than torch, torch's operators do the work and `verified` says why. ISOKRON_TRITON=0 switches
all of them off.
"""

import functools
import importlib
import os
from typing import Any

import torch

# every remainder by 16, below a chunk of the kernel and beyond
LENGTHS = [*range(1, 34), 1030, 5000]
SHAPES = [(2, 70, 33), (1, 1152, 96)]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Unverified(Exception):
    """Why a kernel is not used."""


@functools.cache
def verified(name: str, device: torch.device) -> tuple[bool, str]:
    """Whether the kernels of triton_<name>.py serve a device, and why or why not."""
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
    except Exception as error:  # whatever a compiler or driver has to say, torch can do the work
        return False, f"{type(error).__name__}: {error}"
    return True, f"the results of torch on {torch.cuda.get_device_name(device)}"


def check_adamw(device: torch.device) -> None:
    """Compare bits with torch's fused operator over two steps."""
    from isokron.kernels.triton_adamw import adamw_

    generator = torch.Generator("cpu").manual_seed(0)
    for amsgrad in (False, True):
        drawn = [_drawn((sum(LENGTHS),), generator) for _ in range(4 + amsgrad)]
        drawn[3:] = [square.square_() for square in drawn[3:]]
        mine = [list(noise.to(device).split(LENGTHS)) for noise in drawn]
        theirs = [[tensor.clone() for tensor in tensors] for tensors in mine]
        rates: dict[str, Any] = {
            "lr": 0.1,
            "beta1": 0.9,
            "beta2": 0.99,
            "weight_decay": 0.0 if amsgrad else 0.1,
            "eps": 1e-8,
        }
        for step in (1.0, 2.0):
            steps = [torch.tensor(step, dtype=torch.float32, device=device)] * len(LENGTHS)
            adamw_(*mine, step=step, amsgrad=amsgrad, maximize=amsgrad, **rates)
            lists: list[Any] = [*theirs[:4], theirs[4] if amsgrad else [], steps]
            torch._fused_adamw_(*lists, amsgrad=amsgrad, maximize=amsgrad, **rates)
        pairs = zip(mine, theirs, strict=True)
        if not all(
            torch.equal(a, b) for ours, others in pairs for a, b in zip(ours, others, strict=True)
        ):
            raise Unverified("its bits are not those of torch's fused AdamW")


def check_symmetric(device: torch.device) -> None:
    """Compare bA + cA² of A = XXᵀ with float64."""
    from isokron.kernels.triton_symmetric import symmetric_matmul

    generator = torch.Generator("cpu").manual_seed(0)
    dtypes = [torch.float32, torch.float16] + [torch.bfloat16] * (device.type == "cuda")
    for shape in SHAPES:
        noise = _drawn(shape, generator) / shape[-1] ** 0.5
        for dtype in dtypes:
            x = noise.to(device, dtype)
            gram = symmetric_matmul(x)
            exact = x.double() @ x.double().mT
            near(gram, exact, dtype)
            square = symmetric_matmul(gram, alpha=2.0, beta=-3.0, add=gram)
            exact = 2 * gram.double() @ gram.double().mT - 3 * gram.double()
            near(square, exact, dtype)


def _drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Whatever the default dtype and device are."""
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def near(computed: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    error = float((computed.double() - exact).abs().max() / exact.abs().max())
    # where the user lets float32 be multiplied as TF32, it has the mantissa of float16
    rounded = dtype is torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if not error < TOLERANCES[torch.float16 if rounded else dtype]:  # NaN is no success
        raise Unverified(f"its products in {dtype} are off by {error:.2g}")


CHECKS = {"adamw": check_adamw, "symmetric": check_symmetric}
