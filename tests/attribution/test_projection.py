"""Random projections: the published generator, and entries that depend only on their place."""

import hashlib

import pytest
import torch

from isokron.attribution import projection
from isokron.attribution.projection import Projection, philox

KINDS = ("rademacher", "normal")
# Random123, kat_vectors: counter, key, result of philox4x32-10
KNOWN = [
    "00000000 00000000 00000000 00000000 00000000 00000000 6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "ffffffff ffffffff ffffffff ffffffff ffffffff ffffffff 408f276d 41c83b0e a20bc7c6 6d5451fd",
    "243f6a88 85a308d3 13198a2e 03707344 a4093822 299f31d0 d16cfe09 94fdcceb 5001e420 24126ea1",
]
SIGNS = [
    [1, -1, 1, 1, -1, -1, 1, 1],
    [-1, 1, 1, -1, -1, 1, -1, 1],
    [-1, 1, 1, -1, 1, 1, 1, 1],
    [1, 1, 1, -1, -1, 1, 1, -1],
]
NORMALS = [1.2610171, 1.5270307, 0.53413683, 0.08791062, 0.11491688, 0.02055312]


def philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    """The paper's algorithm in Python's own unbounded integers."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ left, y % 2**32, (x >> 32) ^ d ^ right, x % 2**32
        left, right = (left + 0x9E3779B9) % 2**32, (right + 0xBB67AE85) % 2**32
    return [a, b, c, d]


@pytest.mark.parametrize("known", KNOWN)
def test_philox_gives_the_published_answers(known: str) -> None:
    words = [int(word, 16) for word in known.split()]
    counter = tuple(torch.tensor([word]) for word in words[:4])
    assert [int(word) for word in philox(counter, (words[4], words[5]))] == words[6:]


def test_philox_in_tensors_is_philox_in_unbounded_integers() -> None:
    counters = torch.randint(0, 2**32, (500, 4))
    key = [0xDEADBEEF, 0x80000001]
    found = torch.stack(philox(counters.unbind(1), tuple(key)), 1)
    assert found.tolist() == [philox_of_integers(row, key) for row in counters.tolist()]


def test_an_entry_is_the_bit_of_its_row_and_column() -> None:
    key = hashlib.sha256(b'["isokron projection", 1, 7, "fc", "input"]').digest()
    key = [int.from_bytes(key[:4], "little"), int.from_bytes(key[4:8], "little")]
    matrix = Projection(4, seed=7).matrix("fc", "input", 300)
    for row, column in [(0, 0), (3, 127), (2, 128), (1, 299)]:
        word = philox_of_integers([column // 128, 0, row, 0], key)[column % 128 // 32]
        assert matrix[row, column] == (0.5 if word >> column % 32 & 1 else -0.5)


def test_matrices_of_this_generator_never_change() -> None:
    """Stores were built with these; other values need another GENERATOR."""
    assert projection.GENERATOR == "philox4x32-10 v1"
    signs = Projection(4, "rademacher", 3).matrix("layer.0", "output", 8).sign().int().tolist()
    assert signs == SIGNS
    normals = Projection(1, "normal", 3).matrix("layer.0", "output", 6)
    torch.testing.assert_close(normals, torch.tensor([NORMALS]), rtol=0, atol=2e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_smaller_projection_is_a_prefix_of_a_larger(kind: str) -> None:
    large = Projection(64, kind).matrix("fc", "input", 50, dtype=torch.float64)
    small = Projection(16, kind).matrix("fc", "input", 20, dtype=torch.float64)
    torch.testing.assert_close(small * 4, large[:16, :20] * 8, rtol=1e-15, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_how_many_are_generated_at_once_changes_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Projection(33, kind)
    at_once = random.matrix("fc", "input", 700)
    monkeypatch.setattr(projection, "CALLS", 7)
    assert random.matrix("fc", "input", 700).equal(at_once)


@pytest.mark.parametrize("kind", KINDS)
def test_entries_have_mean_0_and_variance_1_and_are_uncorrelated(kind: str) -> None:
    rows, columns = 4000, 40
    matrix = Projection(rows, kind).matrix("fc", "input", columns, dtype=torch.float64)
    entries, error = matrix * rows**0.5, (rows * columns) ** -0.5
    assert abs(entries.mean()) < 4 * error
    assert abs(entries.square().mean() - 1) < 4 * 2**0.5 * error
    # E[PᵀP] = I; its entries have deviation 1/√rows, on the diagonal at most √2 times that
    assert (matrix.mT @ matrix - torch.eye(columns)).abs().max() < 5 * 2**0.5 * rows**-0.5
    rows_apart = entries[:-1] * entries[1:]
    assert abs(rows_apart.mean()) < 4 * error


def test_normal_entries_have_the_tails_of_a_normal() -> None:
    entries = Projection(1, "normal").matrix("fc", "input", 400_000)[0].double()
    for bound, mass in [(1, 0.317311), (2, 0.045500), (3, 0.002700)]:
        share = (entries.abs() > bound).double().mean()
        assert abs(share - mass) < 4 * (mass / 400_000) ** 0.5
    assert abs(entries.pow(4).mean() - 3) < 4 * (96 / 400_000) ** 0.5


@pytest.mark.parametrize("kind", KINDS)
def test_inner_products_are_kept_on_average(kind: str) -> None:
    x, y = torch.randn(2, 12, 15, dtype=torch.float64)
    found = []
    for seed in range(300):
        made = Projection(8, kind, seed)
        left = made.matrix("fc", "output", 12, dtype=torch.float64)
        right = made.matrix("fc", "input", 15, dtype=torch.float64)
        found.append(((left @ x @ right.mT) * (left @ y @ right.mT)).sum())
    products = torch.stack(found)
    assert abs(products.mean() - (x * y).sum()) < 4 * products.std() / 300**0.5


def test_other_names_sides_and_seeds_make_other_matrices() -> None:
    made = [
        Projection(8, seed=seed).matrix(layer, side, 200)
        for seed, layer, side in [
            (0, "fc", "input"),
            (1, "fc", "input"),
            (-1, "fc", "input"),
            (0, "fc1", "input"),
            (0, "fc", "output"),
        ]
    ]
    for k, one in enumerate(made):
        for other in made[:k]:
            assert abs((one * other).sum(1).mean()) < 4 * 200**0.5 / 8 / 8**0.5


def test_bfloat16_is_the_float32_matrix_rounded() -> None:
    made = Projection(10, "normal")
    low = made.matrix("fc", "input", 30, dtype=torch.bfloat16)
    assert low.equal(made.matrix("fc", "input", 30).bfloat16())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Projection(0), "dim must be a whole number of at least 1, got 0"),
        (lambda: Projection(2.0), "dim must be .* got 2.0"),
        (lambda: Projection(2, "gauss"), "kind must be one of .*normal.* got 'gauss'"),
        (lambda: Projection(2, seed="a"), "seed whole, got .* and 'a'"),
        (lambda: Projection(2).matrix("fc", "left", 3), "a side of .* got 3, 'left' and"),
        (lambda: Projection(2).matrix("fc", "input", 0), "size of at least 1.* got 0,"),
        (
            lambda: Projection(2).matrix("fc", "input", 3, dtype=torch.int64),
            "floating dtype, got 3, 'input' and torch.int64 for layer 'fc'",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
