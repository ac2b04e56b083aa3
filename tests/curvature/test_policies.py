"""Gradients kept in place of output sides give the same curvature, whatever the policy."""

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy, Curvature, fit

LOSS = CrossEntropy()
POLICIES = ["all", "auto", "hybrid"]
METHODS = ["kfac", "tkfac", "shampoo", "ekfac"]
CLASSES, WIDTH, TERMS = 9, 12, 6


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, WIDTH, 3, groups=2), nn.Flatten(), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh())
    model = nn.Sequential(model, nn.Linear(2 * WIDTH, CLASSES)).to(dtype)
    inputs, targets = torch.randn(TERMS, 4, 3).to(dtype), torch.randint(0, CLASSES, (TERMS,))
    return model, [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]


def fitted(method: str, dtype: torch.dtype = torch.float64, **options: object) -> Curvature:
    model, data = problem(dtype)
    return fit(model, data, LOSS, method, dtype=dtype, **options)  # type: ignore[arg-type]


def tangent(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn_like(p) for name, p in problem(dtype)[0].named_parameters()}


def same(found: dict[str, Tensor], right: dict[str, Tensor], rtol: float = 1e-9) -> None:
    assert found.keys() == right.keys()
    for name, value in right.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("method", METHODS)
def test_all_policies_have_the_same_inverses_and_powers(policy: str, method: str) -> None:
    plain, kept = fitted(method), fitted(method, policy=policy)
    for right, found in (
        (plain.damped_inverse(0.03), kept.damped_inverse(0.03)),
        (plain.damped_inverse(0.03, relative=False), kept.damped_inverse(0.03, relative=False)),
        (plain.inverse(0.03), kept.inverse(0.03)),
        (plain.power(-0.5, 0.03, relative=True), kept.power(-0.5, 0.03, relative=True)),
        (plain, kept),
    ):
        same(found.matvec(tangent()), right.matvec(tangent()))
    assert plain.trace() == pytest.approx(kept.trace(), rel=1e-9)
    for mine, theirs in zip(kept.report(), plain.report(), strict=True):
        assert math.isclose(mine["effective_rank"], theirs["effective_rank"], rel_tol=1e-7)


@pytest.mark.parametrize("method", METHODS)
def test_single_layers_may_keep_their_gradients(method: str) -> None:
    plain, kept = fitted(method), fitted(method, policy={"1": "all"})
    assert {r["layer"]: r["columns"] for r in kept.report()} == {"0.0": None, "0.3": None, "1": 6}
    torch.testing.assert_close(kept["1"].to_dense(), plain["1"].to_dense())
    assert kept.layers["1"].method == method
    torch.testing.assert_close(kept["0.3"].to_dense(), plain["0.3"].to_dense())
    with pytest.raises(ValueError, match=r"policy must name layers.*got 'head'; these are 0\.0"):
        fitted(method, policy={"head": "all"})


@pytest.mark.parametrize("policy", ["all", {"1": "all"}])
def test_more_gradients_than_t_max_are_refused(policy: object) -> None:
    with pytest.raises(ValueError, match="more than t_max=5; fit to fewer examples"):
        fitted("kfac", policy=policy, t_max=5)


def test_auto_keeps_gradients_while_they_are_few() -> None:
    columns = {r["layer"]: r["columns"] for r in fitted("kfac", policy="auto").report()}
    # six terms: more than ¾ of 6 outputs a group, fewer than ¾ of 24 and of 9
    assert columns == {"0.0": None, "0.3": TERMS, "1": TERMS}
    columns = {r["layer"]: r["columns"] for r in fitted("kfac", policy="auto", t_max=5).report()}
    assert set(columns.values()) == {None}
    columns = {r["layer"]: r["columns"] for r in fitted("kfac", policy="auto", rho=0.5).report()}
    assert columns == {"0.0": None, "0.3": TERMS, "1": None}
    assert {r["columns"] for r in fitted("kfac", policy="hybrid").report()} == {None}


def test_too_many_gradients_become_a_covariance_to_the_same_bytes() -> None:
    plain, auto = fitted("kfac"), fitted("kfac", policy="auto", t_max=5, store_dtype=torch.bfloat16)
    for name, layer in plain.layers.items():
        for key, value in layer.statistics.items():
            torch.testing.assert_close(auto.layers[name].statistics[key], value)


@pytest.mark.parametrize(("dtype", "off"), [(torch.bfloat16, 0.02), (torch.float16, 2e-3)])
@pytest.mark.parametrize("store", ["auto", "device", "host"])
def test_gradients_may_be_stored_in_half_precision(
    dtype: torch.dtype, off: float, store: str
) -> None:
    plain = fitted("kfac", torch.float32).damped_inverse(0.1)
    kept = fitted("kfac", torch.float32, policy="all", store=store, store_dtype=dtype)
    assert kept.layers["1"].statistics["columns"].dtype is dtype
    found = kept.damped_inverse(0.1).matvec(tangent(torch.float32))
    for name, right in plain.matvec(tangent(torch.float32)).items():
        assert torch.linalg.vector_norm(found[name] - right) < off * torch.linalg.vector_norm(right)


def test_inverses_of_gradients_in_fewer_bits_than_the_statistics() -> None:
    plain, kept = fitted("kfac"), fitted("kfac", policy="all", store_dtype=torch.float16)
    for name, right in plain.inverse(0.03).matvec(tangent()).items():
        found = kept.inverse(0.03).matvec(tangent())[name]
        assert torch.linalg.vector_norm(found - right) < 0.01 * torch.linalg.vector_norm(right)


@pytest.mark.parametrize("method", METHODS)
def test_kept_gradients_are_saved_and_loaded_to_the_bit(method: str, tmp_path: Path) -> None:
    kept = fitted(method, torch.float32, policy="all", store_dtype=torch.bfloat16)
    kept.save(tmp_path)
    loaded = Curvature.load(tmp_path, problem(torch.float32)[0])
    assert loaded.report() == kept.report()
    for name, layer in kept.layers.items():
        for key, value in layer.statistics.items():
            assert torch.equal(loaded.layers[name].statistics[key], value)


def test_inverses_of_sides_say_what_they_fell_back_on() -> None:
    kept = fitted("kfac").damped_inverse(0.0)  # inputs are fewer than their dimensions
    fallbacks = {r["layer"]: r["fallbacks"] for r in kept.report(spectra=False)}
    assert fallbacks["0.3"] == {"jitter 1e-08": 2}
    damped = fitted("kfac").damped_inverse(0.1)
    assert all(r["fallbacks"] == {} for r in damped.report(spectra=False))


def test_what_cannot_be_inverted_is_named() -> None:
    with pytest.raises(ValueError, match=r"output side of layer '0\.0': LowRank is singular"):
        fitted("kfac", policy="all").damped_inverse(0.0)
    with pytest.raises(ValueError, match=r"layer '0\.0' is singular"):
        fitted("kfac", policy="all").inverse(0.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "some"}, "policy must be one of"),
        ({"policy": "auto", "rho": 0.0}, "rho must be positive, got 0.0"),
        ({"policy": "auto", "t_max": -1}, "t_max must be positive, got -1"),
        ({"policy": "all", "store": "disk"}, "storage must be one of"),
        ({"policy": "all", "store_dtype": torch.int8}, "store_dtype must be one of"),
    ],
)
def test_policies_that_are_not_right_are_errors(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fitted("kfac", **options)


@pytest.mark.parametrize("terms", [3, 6, 30])
@pytest.mark.parametrize("positions", [1, 2])
def test_corrected_eigenvalues_of_kept_gradients_are_those_of_the_dense_fisher(
    terms: int, positions: int
) -> None:
    """(F + λI)⁻¹ of F = Q Λ Qᵀ with every Q_A of A and Q_G of G, from its definition."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 8).double()
    inputs, targets = (
        torch.randn(terms, positions, 4).double(),
        torch.randint(8, (terms, positions)),
    )
    loss = CrossEntropy()
    kept = fit(layer, [(inputs, targets)], loss, "ekfac", dtype=torch.float64, policy="all")
    rows = torch.nn.functional.pad(inputs, (0, 1), value=1.0)
    slopes = layer(inputs).softmax(-1) - nn.functional.one_hot(targets, 8)
    slopes = slopes.detach()
    left = torch.linalg.eigh(torch.einsum("nso,nsp->op", slopes, slopes)).eigenvectors
    right = torch.linalg.eigh(torch.einsum("nsi,nsj->ij", rows, rows)).eigenvectors
    grads = torch.einsum("nso,nsi->noi", slopes, rows)  # an example's gradient, M = N·S terms
    values = (left.T @ grads @ right).square().sum(0) / (terms * positions)
    basis = torch.kron(left.contiguous(), right.contiguous())
    dense = basis @ values.flatten().diag() @ basis.T
    torch.testing.assert_close(kept[""].to_dense()[0], dense, rtol=1e-11, atol=1e-12)
    wanted = torch.linalg.inv(dense + 0.01 * torch.eye(len(dense)).double())
    found = kept.inverse(0.01)[""].to_dense()[0]
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    clipped = kept.inverse(0.01, max_condition=50.0)
    values = (values + 0.01).clamp_min(float(values.max() + 0.01) / 50)
    wanted = basis @ values.reciprocal().flatten().diag() @ basis.T
    torch.testing.assert_close(clipped[""].to_dense()[0], wanted, rtol=1e-10, atol=1e-10)
    assert kept.layers[""].method == kept.report()[0]["method"] == "ekfac"


def test_gradients_outside_of_those_kept_have_their_trace() -> None:
    """Labels drawn anew for the second pass: gradients leave the span of the first."""
    options = {"fisher": "sampled", "seed": 1}
    plain, kept = (fitted("ekfac", policy=rule, **options) for rule in ("dense", "all"))
    assert plain.trace() == pytest.approx(kept.trace(), rel=1e-12)
    last = kept["0.3"].eigenvalues[:, -1]  # type: ignore[union-attr]
    assert bool((last > 1e-6).any())


@pytest.mark.parametrize("policy", POLICIES)
def test_a_report_has_the_condition_of_each_side(policy: str) -> None:
    records = (fitted("kfac", policy=rule).report() for rule in ("dense", policy))
    for plain, kept in zip(*records, strict=True):
        for side in ("condition_output", "condition_input"):
            assert (kept[side] > 1e12) == (plain[side] > 1e12)
            if plain[side] < 1e12:
                assert kept[side] == pytest.approx(plain[side])
