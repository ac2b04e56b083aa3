"""Gradients kept in place of output sides give the same curvature, whatever the policy."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy, Curvature, fit

LOSS = CrossEntropy()
POLICIES = ["all", "auto", "hybrid"]
METHODS = ["kfac", "tkfac", "shampoo"]
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
@pytest.mark.parametrize("p", [-1.0, -0.5, 0.25, 1.0])
def test_all_policies_have_the_same_powers(policy: str, method: str, p: float) -> None:
    plain, kept = fitted(method), fitted(method, policy=policy)
    for options in ({}, {"split": "sides"}, {"max_condition": 50.0}, {"relative": True}):
        for split in ("joint", "sides"):
            options = {"split": split, **options}
            right, found = (c.power(p, 0.03, **options) for c in (plain, kept))
            same(found.matvec(tangent()), right.matvec(tangent()))
            for mine, theirs in zip(found.report(), right.report(), strict=True):
                for what in ("condition_before", "condition_after", "trace", "effective_rank"):
                    assert math.isclose(mine[what], theirs[what], rel_tol=1e-7)
                assert mine["clipped"] == theirs["clipped"]


@pytest.mark.parametrize("method", METHODS)
def test_all_policies_have_the_same_traces_and_determinants(method: str) -> None:
    plain, kept = fitted(method), fitted(method, policy="all")
    assert plain.trace() == pytest.approx(kept.trace(), rel=1e-9)
    assert plain.logdet(0.1) == pytest.approx(kept.logdet(0.1), rel=1e-9)
    assert plain.logdet(0.1, split="sides") == pytest.approx(kept.logdet(0.1, split="sides"))
    for name in plain:
        torch.testing.assert_close(kept[name].to_dense(), plain[name].to_dense())


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
    plain = fitted("kfac", torch.float32).inverse(0.1)
    kept = fitted("kfac", torch.float32, policy="all", store=store, store_dtype=dtype)
    assert kept.layers["1"].statistics["columns"].dtype is dtype
    found = kept.inverse(0.1).matvec(tangent(torch.float32))
    for name, right in plain.matvec(tangent(torch.float32)).items():
        assert torch.linalg.vector_norm(found[name] - right) < off * torch.linalg.vector_norm(right)


def test_gradients_of_the_same_data_are_inverted_without_what_rounding_adds() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 40, bias=False)  # more data than inputs, fewer than outputs
    data = torch.randn(12, 3), torch.randint(0, 40, (12,))
    kept = fit(model, [data], LOSS, policy="all", layers="*")
    layer = kept.layers[""]
    wide = {key: value.double() for key, value in layer.statistics.items()}
    exact = Curvature([replace(layer, statistics=wide)])
    gradient = wide["columns"][0] @ torch.randn(12, 3).double()
    right = exact.inverse(1e-8).matvec({"weight": gradient})["weight"]

    def error(within: bool) -> float:
        found = kept.inverse(1e-8).matvec({"weight": gradient.float()}, within=within)["weight"]
        return float(torch.linalg.vector_norm(found - right) / torch.linalg.vector_norm(right))

    assert error(within=True) < 1e-4 < 0.05 < error(within=False)


@pytest.mark.parametrize("method", METHODS)
def test_kept_gradients_are_saved_and_loaded_to_the_bit(method: str, tmp_path: Path) -> None:
    kept = fitted(method, torch.float32, policy="all", store_dtype=torch.bfloat16)
    kept.save(tmp_path)
    loaded = Curvature.load(tmp_path, problem()[0])
    assert loaded.report() == kept.report()
    for name, layer in kept.layers.items():
        for key, value in layer.statistics.items():
            assert torch.equal(loaded.layers[name].statistics[key], value)


def test_inverses_of_sides_say_what_they_fell_back_on() -> None:
    kept = fitted("kfac").inverse(0.0, split="sides")  # inputs are fewer than their dimensions
    fallbacks = {r["layer"]: r["fallbacks"] for r in kept.report(spectra=False)}
    assert fallbacks["0.3"] == {"jitter 1e-08": 2}
    damped = fitted("kfac").inverse(0.1, split="sides")
    assert all(r["fallbacks"] == {} for r in damped.report(spectra=False))


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_eigendecompositions_that_had_to_be_tried_again_are_counted(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plain = torch.linalg.eigh

    def faulty(matrix: Tensor, UPLO: str = "L") -> tuple[Tensor, Tensor]:
        if matrix.dtype is torch.float32:
            raise torch.linalg.LinAlgError("injected")
        return plain(matrix, UPLO=UPLO)

    monkeypatch.setattr(torch.linalg, "eigh", faulty)
    found = fitted(method, torch.float32, layers="1")
    inverse = found.inverse(0.1)
    assert inverse.report()[0]["fallbacks"] == {"in float64": 2}
    found.save(tmp_path)
    kept = {"in float64": 2} if method == "ekfac" else {}
    assert Curvature.load(tmp_path).report(spectra=False)[0]["fallbacks"] == kept


def test_what_cannot_be_inverted_is_named() -> None:
    with pytest.raises(ValueError, match=r"output side of layer '0\.0': LowRank is singular"):
        fitted("kfac", policy="all").inverse(0.0, split="sides")
    with pytest.raises(ValueError, match=r"layer '0\.0' is singular.*max_condition"):
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


def test_ekfac_needs_whole_output_sides() -> None:
    with pytest.raises(ValueError, match=r"policy='all'.*use policy='none', or method='kfac'"):
        fitted("ekfac", policy="all")
