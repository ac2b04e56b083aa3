"""Polar factors and Newton–Schulz iterations against singular values in float64."""

from functools import partial

import numpy as np
import pytest
import torch

from isokron.linalg import newton_schulz, products, quickest
from isokron.polynomials import POLYNOMIALS, Coefficients, schedule

CLASSIC = POLYNOMIALS["classic"][0]
SAME = ("plain", "symmetric", "gram", "eigh", "auto")  # ways to one and the same polynomial


def naive(matrix: torch.Tensor, triples: list[Coefficients]) -> torch.Tensor:
    """The iteration as the paper writes it, on singular values: x ← ax + bx³ + cx⁵."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for a, b, c in triples:
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


def polar(matrix: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1), (2, 11, 30)])
@pytest.mark.parametrize("name", POLYNOMIALS)
@pytest.mark.parametrize("method", SAME)
@pytest.mark.parametrize("panel", [2, 128])
def test_iteration_is_the_polynomial_of_the_singular_values(
    shape: tuple[int, ...], name: str, method: str, panel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "MIN_PANEL", panel)  # so that small matrices have panels
    matrix = torch.randn(shape, dtype=torch.float64)
    for steps in (0, 1, 5, 9):
        expected = (
            naive(matrix, schedule(name, steps))
            if matrix.ndim == 2
            else torch.stack([naive(one, schedule(name, steps)) for one in matrix])
        )
        computed = newton_schulz(matrix, steps, name, method=method)
        torch.testing.assert_close(computed, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(70, 70), (40, 130), (200, 600), (600, 700)])
@pytest.mark.parametrize("name", ["classic", "polar_express", "cans"])
@pytest.mark.parametrize("method", SAME)
def test_every_method_keeps_the_accuracy_of_float32(
    shape: tuple[int, int], name: str, method: str
) -> None:
    matrix = torch.randn(shape)
    expected = naive(matrix.double(), schedule(name, 5)).float()
    computed = newton_schulz(matrix, 5, name, method=method)
    # a square matrix has singular values which its Gram matrix in float32 knows to a few digits
    near = 5e-3 if method in ("gram", "eigh", "auto") else 1e-5
    torch.testing.assert_close(computed, expected, rtol=0.0, atol=near)


@pytest.mark.parametrize("shape", [(6, 6), (6, 20), (20, 6), (3, 5, 8)])
def test_polar_gives_the_polar_factor_itself(shape: tuple[int, ...]) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(matrix, method="polar"), polar(matrix))


@pytest.mark.parametrize("shape", [(64, 64), (64, 200)])
@pytest.mark.parametrize("rank", [1, 20, 64])
def test_in_float32_polar_is_closer_to_the_polar_factor_than_five_steps(
    shape: tuple[int, int], rank: int
) -> None:
    u, s, vh = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    s[rank:] = 0
    matrix = (u * s @ vh).float()
    truth = u[:, :rank] @ vh[:rank]
    errors = [
        torch.linalg.matrix_norm(
            truth @ vh[:rank].mT - newton_schulz(matrix, method=way).double() @ vh[:rank].mT
        )
        for way in ("polar", "plain")
    ]
    assert errors[0] < errors[1]
    # directions that are only rounding are not blown up beyond one
    assert torch.linalg.matrix_norm(newton_schulz(matrix, method="polar"), 2) < 1.2


def published(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The loop of K. Jordan's Muon; * and @ bind alike, so that c * A @ A is (cA)A."""
    a, b, c = CLASSIC
    tall = matrix.size(-2) > matrix.size(-1)
    x = matrix.to(dtype).mT if tall else matrix.to(dtype)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


@pytest.mark.parametrize("shape", [(8, 8), (7, 19), (19, 7), (3, 6, 10), (96, 130)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_reference_is_the_published_loop_to_the_bit(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    matrix = torch.randn(shape)
    expected = published(matrix, dtype)
    assert torch.equal(newton_schulz(matrix, method="reference", dtype=dtype), expected.float())
    if dtype is torch.bfloat16:
        assert torch.equal(newton_schulz(matrix, method="reference"), expected.float())
        assert torch.equal(newton_schulz(matrix.bfloat16(), method="reference"), expected)


@pytest.mark.parametrize("shape", [(8, 8), (7, 19), (19, 7), (96, 130), (256, 100)])
def test_plain_in_bfloat16_is_torchs_muon_to_the_bit(shape: tuple[int, ...]) -> None:
    muon = pytest.importorskip("torch.optim._muon", reason="torch has one since 2.9")
    matrix = torch.randn(shape)
    expected = muon._zeropower_via_newtonschulz(matrix, CLASSIC, 5, 1e-7)
    computed = newton_schulz(matrix, method="plain", dtype=torch.bfloat16)
    assert torch.equal(computed, expected.float())


def remez(low: float, high: float) -> Coefficients:
    """The odd quintic closest to 1 on [low, high]: its error alternates at four points."""
    points = np.array([low, (3 * low + high) / 4, (low + 3 * high) / 4, high])
    for _ in range(60):
        system = np.stack([points, points**3, points**5, [1, -1, 1, -1]], axis=1)
        a, b, c, _ = np.linalg.solve(system, np.ones(4))
        points[1:3] = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))  # where p′ = 0
    return float(a), float(b), float(c)


def test_cans_is_what_remez_finds_step_by_step() -> None:
    low, high = 1e-3, 1.0
    for triple in schedule("cans", 6):
        a, b, c = remez(low, high)
        np.testing.assert_allclose(triple, (a, b, c), rtol=1e-6)
        low = a * low + b * low**3 + c * low**5
        high = 2 - low


@pytest.mark.parametrize(
    ("name", "steps", "error"),
    [("classic", 5, 0.54), ("polar_express", 5, 0.16), ("cans", 5, 0.12), ("cans", 8, 1e-7)],
)
def test_schedules_bring_all_singular_values_near_one(name: str, steps: int, error: float) -> None:
    x = torch.logspace(-3, 0, 10_001, dtype=torch.float64)
    for a, b, c in schedule(name, steps):
        x = a * x + b * x**3 + c * x**5
    assert 0.9 * error < (1 - x).abs().max() < error or error < 1e-6


def test_gram_matrices_are_taken_only_where_rounding_permits() -> None:
    classic, cpu = schedule("classic", 5), torch.device("cpu")
    for rows in (16, 256, 512, 1024, 4096):
        for cols in (rows, 2 * rows, 8 * rows):
            # Gram matrices square the condition: not in half precision, and not for many steps
            steep, flat = schedule("polar_express", 12), schedule((1.5, -0.5, 0.0), 1)
            half = [(torch.bfloat16, classic), (torch.bfloat16, flat), (torch.float16, flat)]
            for dtype, triples in (*half, (torch.float32, steep)):
                assert quickest(rows, cols, cpu, dtype, triples) in ("plain", "symmetric")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gram_is_refused_in_half_precision_and_the_remedy_works(dtype: torch.dtype) -> None:
    matrix = torch.randn(8, 30)
    with pytest.raises(ValueError, match=f"with method='gram', got {dtype}.*dtype=torch.float32"):
        newton_schulz(matrix, method="gram", dtype=dtype)
    if dtype is torch.bfloat16:  # whose default on an accelerator is half precision too
        with pytest.raises(ValueError, match="method='plain'"):
            newton_schulz(matrix.to("meta"), method="gram")
    exact = newton_schulz(matrix.double())
    for remedy in ({"method": "gram", "dtype": torch.float32}, {"method": "plain"}):
        torch.testing.assert_close(
            newton_schulz(matrix, **remedy).double(), exact, rtol=0, atol=1e-3
        )


def test_where_decompositions_fail_products_take_over(monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(6, 20, dtype=torch.float64)
    expected = naive(matrix, schedule("classic", 5))
    eigh = torch.linalg.eigh
    monkeypatch.setattr(
        torch.linalg, "eigh", lambda *a, **k: [x * torch.nan for x in eigh(*a, **k)]
    )
    torch.testing.assert_close(newton_schulz(matrix, 5, "classic", method="eigh"), expected)


def test_a_compiled_graph_has_no_decompositions() -> None:
    matrix = torch.randn(200, 600)
    polar = torch.compile(lambda x: newton_schulz(x, 5, "classic"), fullgraph=True, backend="eager")
    torch.testing.assert_close(polar(matrix), newton_schulz(matrix, 5, "classic"))


def test_a_batch_is_its_matrices_one_by_one() -> None:
    matrices = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    together = newton_schulz(matrices)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], newton_schulz(matrices[i, j]))


def test_exact_polynomial_converges_to_the_polar_factor() -> None:
    matrix = torch.randn(6, 10, dtype=torch.float64)
    torch.testing.assert_close(newton_schulz(matrix, 40, "exact"), polar(matrix))


def test_one_triple_a_step_is_a_schedule() -> None:
    matrix = torch.randn(4, 6, dtype=torch.float64)
    triples = schedule("classic", 3) + schedule("exact", 2)
    torch.testing.assert_close(newton_schulz(matrix, 5, triples), naive(matrix, triples))


def test_dtype_is_that_of_the_iteration_and_not_of_the_result() -> None:
    matrix = torch.randn(8, 8)
    half = newton_schulz(matrix, dtype=torch.bfloat16)
    assert half.dtype is torch.float32
    assert torch.equal(half, half.bfloat16().float())
    assert newton_schulz(matrix.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("method", [*SAME, "polar"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [-120, -60, 60, 120])
def test_the_scale_of_a_matrix_does_not_matter(
    exponent: int, dtype: torch.dtype | None, method: str
) -> None:
    if method == "gram" and dtype is not None:
        dtype = torch.float32  # half precision is refused
    matrix = torch.randn(2, 8, 12)
    scaled = newton_schulz(matrix * 2.0**exponent, dtype=dtype, method=method)
    assert torch.equal(scaled, newton_schulz(matrix, dtype=dtype, method=method))


@pytest.mark.parametrize("method", [*SAME, "polar", "reference"])
def test_zero_and_empty_matrices_stay_what_they_are(method: str) -> None:
    for shape in [(3, 4), (2, 0, 5), (0, 3, 4)]:
        assert torch.equal(newton_schulz(torch.zeros(shape), method=method), torch.zeros(shape))


@pytest.mark.parametrize("method", [*SAME, "polar"])
def test_one_bad_matrix_spoils_no_other(method: str) -> None:
    matrices = torch.randn(3, 4, 6)
    expected = newton_schulz(matrices, method=method)
    matrices[1, 2, 3] = torch.nan
    spoiled = newton_schulz(matrices, method=method)
    assert spoiled[1].isnan().all()
    torch.testing.assert_close(spoiled[[0, 2]], expected[[0, 2]])


def test_a_batch_larger_than_a_chunk_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = torch.randn(7, 4, 6, dtype=torch.float64)
    expected = newton_schulz(matrices)
    monkeypatch.setattr("isokron.linalg.polar.CPU_CHUNK", 2 * 4 * 6 * 8)
    torch.testing.assert_close(newton_schulz(matrices), expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficients": "cubic"}, "coefficients must be one of"),
        ({"coefficients": (1.0, 2.0)}, "one triple"),
        ({"coefficients": [(1.0, 2.0, 3.0)] * 2, "steps": 3}, "one a step"),
        ({"steps": -1}, "steps must be"),
        ({"method": "svd"}, "method must be one of"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.ones(2, 2), **settings)
    with pytest.raises(ValueError, match="needs matrices"):
        newton_schulz(torch.ones(3))


@pytest.mark.parametrize("shape", [(3, 5), (2, 5, 3)])
def test_the_differentiable_method_is_the_plain_one_with_a_derivative(
    shape: tuple[int, ...],
) -> None:
    matrix = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    polar = partial(newton_schulz, steps=3, method="differentiable")
    assert torch.equal(polar(matrix).detach(), newton_schulz(matrix, 3, method="plain"))
    assert torch.autograd.gradcheck(polar, matrix)


@pytest.mark.parametrize("method", [*SAME, "polar", "reference"])
def test_no_gradient_flows_and_none_is_needed(method: str) -> None:
    weight = torch.randn(600, 700, requires_grad=True)
    assert not newton_schulz(weight, 1, method=method).requires_grad


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_what_is_not_real_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=f"floating-point matrices, got {dtype}"):
        newton_schulz(torch.ones(2, 3).to(dtype))
