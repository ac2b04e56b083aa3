import pytest
import torch

from isokron.linalg import newton_schulz
from isokron.linalg.polar import POLYNOMIALS


def naive(matrix: torch.Tensor, steps: int, a: float, b: float, c: float) -> torch.Tensor:
    """The iteration as the paper writes it, on singular values: x ← ax + bx³ + cx⁵."""
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt()
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


@pytest.mark.parametrize("shape", [(5, 5), (4, 9), (9, 4), (1, 6), (6, 1)])
@pytest.mark.parametrize("name", POLYNOMIALS)
def test_iteration_is_the_polynomial_of_the_singular_values(
    shape: tuple[int, int], name: str
) -> None:
    matrix = torch.randn(shape, dtype=torch.float64)
    expected = naive(matrix, 5, *POLYNOMIALS[name])
    torch.testing.assert_close(newton_schulz(matrix, 5, name), expected, rtol=1e-10, atol=1e-12)


def test_a_batch_is_its_matrices_one_by_one() -> None:
    matrices = torch.randn(2, 3, 4, 7, dtype=torch.float64)
    together = newton_schulz(matrices)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(together[i, j], newton_schulz(matrices[i, j]))


def test_exact_polynomial_converges_to_the_polar_factor() -> None:
    matrix = torch.randn(6, 10, dtype=torch.float64)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(newton_schulz(matrix, 40, "exact"), u @ vh)


def test_one_triple_a_step_is_a_schedule() -> None:
    matrix = torch.randn(4, 6, dtype=torch.float64)
    triples = [POLYNOMIALS["classic"]] * 3 + [POLYNOMIALS["exact"]] * 2
    first = newton_schulz(matrix, 3, "classic")
    # the second leg must not be normalised again, so compare on the singular values
    u, s, vh = torch.linalg.svd(first, full_matrices=False)
    a, b, c = POLYNOMIALS["exact"]
    for _ in range(2):
        s = a * s + b * s**3 + c * s**5
    torch.testing.assert_close(newton_schulz(matrix, 5, triples), u * s @ vh)


def test_dtype_is_that_of_the_iteration_and_not_of_the_result() -> None:
    matrix = torch.randn(8, 8)
    half = newton_schulz(matrix, dtype=torch.bfloat16)
    assert half.dtype is torch.float32
    assert torch.equal(half, half.bfloat16().float())
    assert newton_schulz(matrix.bfloat16()).dtype is torch.bfloat16


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("exponent", [-120, -60, 60, 120])
def test_the_scale_of_a_matrix_does_not_matter(exponent: int, dtype: torch.dtype | None) -> None:
    matrix = torch.randn(2, 8, 12)
    scaled = newton_schulz(matrix * 2.0**exponent, dtype=dtype)
    assert torch.equal(scaled, newton_schulz(matrix, dtype=dtype))


def test_zero_and_empty_matrices_stay_what_they_are() -> None:
    for shape in [(3, 4), (2, 0, 5), (0, 3, 4)]:
        assert torch.equal(newton_schulz(torch.zeros(shape)), torch.zeros(shape))


def test_a_batch_larger_than_a_chunk_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = torch.randn(7, 4, 6, dtype=torch.float64)
    whole = newton_schulz(matrices)
    monkeypatch.setattr("isokron.linalg.polar.CPU_CHUNK", 2 * 4 * 6 * 8)
    torch.testing.assert_close(newton_schulz(matrices), whole)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"coefficients": "cubic"}, "coefficients must be one of"),
        ({"coefficients": (1.0, 2.0)}, "one triple"),
        ({"coefficients": [(1.0, 2.0, 3.0)] * 2, "steps": 3}, "one a step"),
        ({"steps": -1}, "steps must be"),
    ],
)
def test_wrong_arguments_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        newton_schulz(torch.ones(2, 2), **settings)
    with pytest.raises(ValueError, match="needs matrices"):
        newton_schulz(torch.ones(3))
