"""Every Triton kernel on CPU tensors in Triton's interpreter; test_triton.py runs this file.

It needs its own process, because the interpreter is selected when Triton is imported. The
interpreter converts bfloat16 incorrectly: AdamW converts by integer operations instead, and the
products are tested in float32 and float16 only.
"""

import os

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("run by test_triton.py with TRITON_INTERPRET=1", allow_module_level=True)

import triton

from isokron.kernels import adamw as dispatch
from isokron.kernels import triton_adamw, triton_symmetric, verify
from isokron.kernels.triton_adamw import adamw_
from isokron.kernels.triton_symmetric import newton_schulz_, symmetric_matmul
from isokron.kernels.triton_symmetric_tma import symmetric_matmul_tma
from isokron.linalg import newton_schulz

Array = NDArray[np.float32]

# Up to 3.8 the interpreter rounds tl.fma twice, unlike any GPU; the model then follows it.
FUSED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9)

SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.995, "weight_decay": 0.1, "eps": 1e-8}
# every remainder by 16, below a chunk, at its end and beyond
SIZES = [*range(1, 17), *range(1023, 1040), 2056]
CANARY = -123.0


def fma(a: Array, b: Array | np.float32, c: Array) -> Array:
    """ab + c rounded once: in float64 the product is exact, and the sum is rounded to odd."""
    if not FUSED:
        return a * b + c
    product, c = a.astype(np.float64) * np.float64(b), c.astype(np.float64)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = total.view(np.int64)
    away = np.where((error > 0) == (total > 0), 1, -1)
    bits = np.where((error != 0) & (bits % 2 == 0), bits + away, bits)
    return bits.view(np.float64).astype(np.float32)


def model(
    p: Array, g: Array, m: Array, v: Array, largest: Array | None, step: int, maximize: bool = False
) -> tuple[Array, ...]:
    """AdamW by the order of operations and the roundings of torch's CUDA kernel."""
    lr, beta1, beta2, decay, eps = (np.float32(value) for value in SETTINGS.values())
    g = -g if maximize else g
    p = fma(p, -(lr * decay), p)
    m = fma(m, beta1, fma(g, -beta1, g))
    v = fma(v, beta2, fma(g * g, -beta2, g * g))
    powers = torch.tensor([beta1, beta2]).pow(torch.tensor([step] * 2).float()).numpy()
    scale, root = lr / (1 - powers[0]), np.sqrt(1 - powers[1])
    used = v if largest is None else np.where(largest < v, v, largest)
    p = p - (m * scale) / (np.sqrt(used) / root + eps)
    return (p, m, v) if largest is None else (p, m, v, used)


class Fenced:
    """Tensors as views into larger ones, some at unaligned addresses, surrounded by canaries."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.buffers = [t.new_full((t.numel() + 32,), CANARY) for t in tensors]
        # every third tensor is not aligned to 16 bytes
        starts = [1 if i % 3 == 2 else 16 for i in range(len(tensors))]
        self.inner = [
            buffer[start : start + t.numel()].view(t.shape)
            for buffer, start, t in zip(self.buffers, starts, tensors, strict=True)
        ]
        for inner, tensor in zip(self.inner, tensors, strict=True):
            inner.copy_(tensor)

    def assert_unhurt(self) -> None:
        for buffer, inner in zip(self.buffers, self.inner, strict=True):
            outside = torch.ones_like(buffer, dtype=torch.bool)
            outside[inner.storage_offset() : inner.storage_offset() + inner.numel()] = False
            assert (buffer[outside] == CANARY).all()


def random_lists(sizes: list[int], count: int) -> list[list[Tensor]]:
    """Parameters, gradients and first moments; the further lists, of squares, are not negative."""
    lists = [[torch.randn(n) for n in sizes] for _ in range(count)]
    return [[t.square() for t in ts] if i > 2 else ts for i, ts in enumerate(lists)]


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize(("amsgrad", "maximize"), [(False, False), (True, True)])
def test_adamw_has_the_bits_of_the_model_and_writes_nowhere_else(
    amsgrad: bool, maximize: bool
) -> None:
    start = random_lists(SIZES, 4 + amsgrad)
    fenced = [Fenced(tensors) for tensors in start]
    expected = [[t.numpy() for t in tensors] for tensors in start]
    for step in (1, 2, 1000):
        inner = [fence.inner for fence in fenced]
        adamw_(*inner, step=step, amsgrad=amsgrad, maximize=maximize, **SETTINGS)
        for i in range(len(SIZES)):
            p, g, m, v, *largest = (arrays[i] for arrays in expected)
            new = model(p, g, m, v, largest[0] if amsgrad else None, step, maximize)
            for arrays, value in zip([expected[0], *expected[2:]], new, strict=True):
                arrays[i] = value
    for fence, arrays in zip(fenced, expected, strict=True):
        fence.assert_unhurt()
        for got, want in zip(fence.inner, arrays, strict=True):
            assert same_bits(got, torch.from_numpy(want))


def test_adamw_agrees_with_that_of_torch() -> None:
    ours, g, *state = random_lists([5, 1030], 5)
    theirs, their_state = [p.clone() for p in ours], [[t.clone() for t in ts] for ts in state]
    steps = [torch.zeros(()) for _ in ours]
    for step in (1, 2, 3):
        adamw_(ours, g, *state, step=step, amsgrad=True, **SETTINGS)
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            theirs, g, *their_state, steps, amsgrad=True, maximize=False, **SETTINGS
        )
    for a, b in zip(ours + state[2], theirs + their_state[2], strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=1e-7)


def test_a_maximum_stays_where_it_or_the_second_moment_is_not_a_number() -> None:
    p, m, v, largest = (torch.ones(5) for _ in range(4))
    largest[4] = torch.nan
    g = torch.tensor([1.0, torch.nan, 30.0, 0.0, 1.0])
    adamw_([p], [g], [m], [v], [largest], step=1, amsgrad=True, **SETTINGS)
    assert v[1].isnan()
    assert v[2] > 5
    assert v[3] < 1
    assert largest[:4].tolist() == [1.0, 1.0, v[2].item(), 1.0]
    assert largest[4].isnan()


def test_without_weight_decay_an_infinite_parameter_stays_infinite() -> None:
    p, g, m, v = (torch.full((3,), value) for value in (torch.inf, 1.0, 0.0, 0.0))
    adamw_([p], [g], [m], [v], step=1, **SETTINGS | {"weight_decay": 0.0})
    assert (p == torch.inf).all()


def test_bfloat16_parameters_and_gradients_are_rounded_to_nearest_even() -> None:
    p, g, m, v = random_lists(SIZES, 4)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3.38e38])
    p[11][:7] = special[: p[11].numel()]  # every kind of number, in a tensor of 12 and one of 1024
    p[17][:7] = special
    low_p, low_g = ([t.bfloat16() for t in ts] for ts in (p, g))
    fenced = Fenced(low_p)
    arrays = [[t.float().numpy() for t in ts] for ts in (low_p, low_g, m, v)]
    with np.errstate(invalid="ignore", over="ignore"):
        expected = [model(*row, None, 3) for row in zip(*arrays, strict=True)]
    adamw_(fenced.inner, low_g, m, v, step=3, **SETTINGS)
    fenced.assert_unhurt()
    for i, (want_p, want_m, want_v) in enumerate(expected):
        want = torch.from_numpy(want_p).bfloat16()
        assert torch.equal(fenced.inner[i].isnan(), want.isnan())
        keep = ~want.isnan()
        assert torch.equal(fenced.inner[i][keep].view(torch.int16), want[keep].view(torch.int16))
        assert same_bits(m[i], torch.from_numpy(want_m))
        assert same_bits(v[i], torch.from_numpy(want_v))


def test_what_is_not_a_number_stays_so_in_bfloat16() -> None:
    # all bits but the sign, which GPUs write: rounding up would carry it over to minus zero
    nan = torch.full((9,), 2**31 - 1, dtype=torch.int32).view(torch.float32)
    p, m, v = torch.ones(9, dtype=torch.bfloat16), torch.zeros(9), torch.zeros(9)
    adamw_([p], [nan], [m], [v], step=1, **SETTINGS)
    assert m.view(torch.int32)[0] == 2**31 - 1
    assert p.isnan().all()


def test_tables_are_kept_while_the_addresses_are() -> None:
    p, g, m, v = random_lists([7, 3000], 4)
    triton_adamw._address_table.cache_clear()
    triton_adamw._chunk_table.cache_clear()
    for step in (1, 2, 3):
        adamw_(p, g, m, v, step=step, **SETTINGS)
    assert triton_adamw._address_table.cache_info().misses == 1
    moved_away = [t.clone() for t in g]
    adamw_(p, moved_away, m, v, step=4, **SETTINGS)
    assert triton_adamw._address_table.cache_info().misses == 2
    assert triton_adamw._chunk_table.cache_info().misses == 1


def test_tensors_unaligned_in_any_list_are_grouped_apart() -> None:
    cpu = torch.device("cpu")
    table, groups = triton_adamw._address_table(cpu, 0, ((16, 32, 52, 64), (160, 168, 176, 80)))
    assert table.tolist() == [[16, 32, 52, 64], [160, 168, 176, 80]]
    assert groups == [(True, (0, 3)), (False, (1, 2))]
    assert triton_adamw._address_table(cpu, 0, ((16,),))[1] == [(True, (0,))]


def test_empty_lists_and_empty_tensors_are_nothing_to_do() -> None:
    adamw_([], [], [], [], step=1, **SETTINGS)
    p, g, m, v = random_lists([0, 3, 0], 4)
    p[2] = torch.ones(4)[3:3]  # nothing, at an odd address
    before = p[1].clone()
    adamw_(p, g, m, v, step=1, **SETTINGS)
    assert not torch.equal(p[1], before)


@pytest.mark.parametrize(
    ("which", "wrong", "message"),
    [
        (1, torch.ones(3, 2).T, "grads must be contiguous"),
        (1, torch.ones(5), "grads must have the sizes"),
        (
            0,
            torch.ones(6, dtype=torch.float16),
            "params must all be torch.float32 or torch.bfloat16",
        ),
        (2, torch.ones(6, dtype=torch.bfloat16), "exp_avgs must all be torch.float32, got"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused(which: int, wrong: Tensor, message: str) -> None:
    lists = [[torch.ones(6)] for _ in range(4)]
    lists[which] = [wrong]
    with pytest.raises(ValueError, match=message):
        adamw_(*lists, step=1, **SETTINGS)


# [B, m, k]; m and k end inside tiles, at their ends, past them
SHAPES = [(1, 1, 8), (2, 64, 32), (2, 200, 136)]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}


def symmetric(*shape: int) -> Tensor:
    x = torch.randn(*shape, shape[-1])
    return x + x.mT


def framed(x: Tensor) -> tuple[Tensor, Tensor]:
    """A view for the result XXᵀ inside a buffer of canaries, and the buffer."""
    batch, rows, _ = x.shape
    buffer = x.new_full((batch, rows + 2, rows + 5), CANARY)
    return buffer[:, 1:-1, 2 : rows + 2], buffer


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_right_and_written_nowhere_else(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    add = symmetric(*shape[:2]).to(dtype)
    for c in (None, add):
        out, buffer = framed(x)
        symmetric_matmul(x, out, 0.5, 2.0, c)
        want = 0.5 * x.double() @ x.double().mT + (0 if c is None else 2 * c.double())
        bound = TOLERANCE[dtype] * want.abs().max().item()
        torch.testing.assert_close(out.double(), want, rtol=0, atol=bound)
        out.fill_(CANARY)
        assert (buffer == CANARY).all()


def test_tiles_across_the_diagonal_are_copies_and_only_upper_ones_are_read() -> None:
    x = torch.randn(2, 300, 40).half()
    tiles = torch.arange(300) // 128
    add = symmetric(2, 300).half()
    add[:, tiles[:, None] > tiles[None, :]] = torch.nan
    out = symmetric_matmul(x, beta=1.0, add=add)
    assert out.isfinite().all()
    apart = tiles[:, None] != tiles[None, :]
    assert torch.equal(out[:, apart], out.mT[:, apart])


def test_no_matrix_of_a_batch_reaches_another() -> None:
    x = torch.randn(3, 100, 40)
    x[1] = torch.nan
    out = symmetric_matmul(x)
    assert out[[0, 2]].isfinite().all()


def test_any_layout_and_the_addend_as_target() -> None:
    x = torch.randn(2, 70, 90).mT[:, ::2]
    torch.testing.assert_close(symmetric_matmul(x), x @ x.mT)
    add = symmetric(2, 45)
    want = 3 * x @ x.mT - add
    assert symmetric_matmul(x, add, alpha=3, beta=-1, add=add) is add
    torch.testing.assert_close(add, want)
    assert symmetric_matmul(x[:, :0]).shape == (2, 0, 0)
    assert (symmetric_matmul(x[:, :, :0]) == 0).all()


def test_the_table_holds_every_tile_once() -> None:
    for tiles in (1, 2, 8, 9, 33):
        table = triton_symmetric.tile_table(torch.device("cpu"), tiles)
        pairs = {(row, column) for row, column in table.tolist()}
        assert len(pairs) == len(table) == tiles * (tiles + 1) // 2
        assert all(0 <= row <= column < tiles for row, column in pairs)


def test_a_wrong_product_is_refused() -> None:
    with pytest.raises(ValueError, match="needs \\[B, m, k\\]"):
        symmetric_matmul(torch.ones(3, 4))
    with pytest.raises(ValueError, match="float32, float16 or bfloat16"):
        symmetric_matmul(torch.ones(1, 3, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match="out must be"):
        symmetric_matmul(torch.ones(1, 3, 4), torch.ones(1, 3, 4))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 8, 8), (2, 64, 32), (2, 200, 136)])
def test_products_by_descriptors_are_right_and_written_nowhere_else(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    add = symmetric(*shape[:2]).to(dtype)
    for c in (None, add):
        buffer = x.new_full((shape[0], shape[1] + 2, shape[1] + 16), CANARY)
        out = buffer[:, 1:-1, 8:-8]  # in rows that begin at multiples of 16 bytes
        symmetric_matmul_tma(x, out, 0.5, 2.0, c)
        want = 0.5 * x.double() @ x.double().mT + (0 if c is None else 2 * c.double())
        bound = TOLERANCE[dtype] * want.abs().max().item()
        torch.testing.assert_close(out.double(), want, rtol=0, atol=bound)
        out.fill_(CANARY)
        assert (buffer == CANARY).all()


def test_products_by_descriptors_keep_a_batch_apart_and_take_the_addend_as_target() -> None:
    x = torch.randn(3, 104, 40)
    add = symmetric(3, 104)
    want = 3 * x @ x.mT - add
    x[1] = torch.nan
    assert symmetric_matmul_tma(x, add, alpha=3, beta=-1, add=add) is add
    torch.testing.assert_close(add[[0, 2]], want[[0, 2]])
    assert add[1].isnan().all()
    assert symmetric_matmul_tma(x[:, :0]).shape == (3, 0, 0)
    assert (symmetric_matmul_tma(x[:, :, :0]) == 0).all()


def test_rows_that_no_descriptor_can_address_are_refused() -> None:
    x = torch.randn(2, 8, 8)
    for wrong in (torch.randn(2, 8, 6), x.mT, torch.randn(2, 8, 12)[:, :, 1:9]):
        with pytest.raises(
            ValueError, match=r"x must have contiguous rows .* use symmetric_matmul"
        ):
            symmetric_matmul_tma(wrong)
    with pytest.raises(ValueError, match="out must have contiguous rows"):
        symmetric_matmul_tma(torch.randn(2, 6, 8))
    with pytest.raises(ValueError, match=r"add must be torch\.float32 of shape"):
        symmetric_matmul_tma(x, add=torch.randn(2, 8, 6))


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_newton_schulz_is_the_plain_iteration(steps: int) -> None:
    x = torch.randn(2, 70, 100)
    x /= x.norm(dim=(-2, -1), keepdim=True)
    want = newton_schulz(x, steps)
    assert newton_schulz_(x, [(3.4445, -4.7750, 2.0315)] * steps) is x
    torch.testing.assert_close(x, want, rtol=0, atol=2e-5)


def test_the_verification_on_a_gpu_runs_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "SHAPES", [(2, 70, 33)])
    verify.check_symmetric(torch.device("cpu"))
    # torch's CPU operator rounds in another order than its CUDA kernel, and that is detected
    with pytest.raises(verify.Unverified, match="bits"):
        verify.check_adamw(torch.device("cpu"))


def test_wrong_products_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    true = triton_symmetric.symmetric_matmul

    def wrong(x: Tensor, **settings: object) -> Tensor:
        return true(x, **settings).triu_()

    monkeypatch.setattr(triton_symmetric, "symmetric_matmul", wrong)
    with pytest.raises(verify.Unverified, match="off by"):
        verify.check_symmetric(torch.device("cpu"))


def test_the_dispatch_counts_steps_and_leaves_to_torch_what_it_cannot_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "verified", lambda name, device: (True, ""))
    count, steps = dispatch.StepCount(), (torch.zeros(()),) * 3
    lists = [[torch.randn(n) for n in (5, 64, 1030)] for _ in range(2)]
    lists += [[torch.zeros_like(p) for p in lists[0]] for _ in range(2)]
    straight = [[tensor.clone() for tensor in tensors] for tensors in lists]
    for step in (1, 2, 3):
        steps[0].add_(1)
        assert dispatch._by_triton(
            count, (*lists, (), steps), amsgrad=False, maximize=False, **SETTINGS
        )
        adamw_(*straight, step=step, **SETTINGS)
    for dispatched, direct in zip(lists, straight, strict=True):
        assert all(map(torch.equal, dispatched, direct))
    for wrong in (torch.randn(2, 8).mT, torch.randn(16).double(), torch.randn(16).half()):
        params = [torch.randn(wrong.shape)]
        state = [[torch.zeros_like(params[0])] for _ in range(2)]
        refused = (params, [wrong], *state, (), steps[:1])
        assert not dispatch._by_triton(count, refused, amsgrad=False, maximize=False, **SETTINGS)
