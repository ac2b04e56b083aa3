"""What is said of a layer is what its dense matrix says."""

import math
from itertools import pairwise

import pytest
import torch

from isokron.curvature import CrossEntropy, fit
from isokron.inspect import Setup, measure, thinned
from isokron.training import make_model, train_


def dense(curvature, name):
    """G ⊗ A of a layer with one block, in float64."""
    known = curvature.layers[name].statistics
    return torch.kron(known["output"][0].double(), known["input"][0].double())


def rank(matrix):
    p = torch.linalg.eigvalsh(matrix).clamp_min(0)
    p = p[p > 0] / p.sum()
    return float((-(p * p.log()).sum()).exp())


def test_numbers_are_those_of_the_dense_matrix(regression, inspected):
    result, curvature = inspected(regression, damping=0.5)
    facts = result.layers[0]
    matrix = dense(curvature, "0")
    values = torch.linalg.eigvalsh(matrix)
    added = 0.5 * float(values.mean())
    assert facts.dimension == len(matrix) == 56
    assert facts.trace == pytest.approx(float(matrix.trace()), rel=1e-5)
    assert facts.damping == pytest.approx(added, rel=1e-5)
    damped = float((values[-1] + added) / (values[0] + added))
    assert facts.condition_damped == pytest.approx(damped, rel=1e-4)
    assert facts.effective_rank == pytest.approx(rank(matrix), rel=1e-4)
    assert facts.kept == int((values > added).sum())
    root = matrix.diagonal().rsqrt()
    assert facts.scaled_rank == pytest.approx(rank(matrix * root[:, None] * root), rel=1e-4)


def test_spectra_fall_from_the_largest_and_keep_both_ends(regression, inspected):
    result, curvature = inspected(regression)
    facts = result.layers[0]
    values = [value for _, value in facts.spectrum]
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(facts.largest, rel=1e-3)
    assert [number for number, _ in facts.spectrum] == list(range(1, len(values) + 1))
    outputs = torch.linalg.eigvalsh(curvature.layers["0"].statistics["output"])[0]
    assert facts.output_spectrum[0][1] == pytest.approx(float(outputs[-1]), rel=1e-3)


def test_long_spectra_are_thinned_geometrically():
    points = thinned(torch.arange(1.0, 100_001))
    assert len(points) <= 200
    assert points[0] == (1, 100_000.0)
    assert points[-1] == (100_000, 1.0)
    steps = [b[0] / a[0] for a, b in pairwise(points[100:])]
    assert max(steps) < 1.2 * min(steps)


def test_a_matrix_of_zeros_has_no_spectrum():
    assert thinned(torch.zeros(3, 3)) == ()


def test_ekfac_has_no_sides_and_no_product_to_scale(reading, inspected):
    result, _ = inspected(reading, method="ekfac", fisher="sampled")
    head = result.layers[-1]
    assert head.name == "head"
    assert head.output_spectrum is head.input_spectrum is head.scaled_rank is None
    assert head.spectrum


def test_curvature_is_that_of_fit_per_prediction(reading):
    setup = Setup(reading, steps=2, examples=20)
    result, curvature = measure(setup)
    model = make_model(reading, setup.seed)
    train_(model, reading, 2, setup.lr, setup.seed)
    batches = [reading.train.batch(part) for part in setup.order.split(8)]
    names = list(curvature)
    expected = fit(model.eval(), batches, CrossEntropy(reading.logits), layers=names)
    assert result.terms == 20 * 4
    for name in names:
        for key, value in expected.layers[name].statistics.items():
            torch.testing.assert_close(curvature.layers[name].statistics[key], value)


def test_layers_whose_gradients_come_summed_or_never_are_left_out_and_named(reading, inspected):
    result, _ = inspected(reading)
    assert [facts.name for facts in result.layers] == ["tokens", "norm", "head"]
    assert [note.partition(":")[0] for note in result.notes] == [
        "places is left out",
        "unused is left out",
    ]


def test_nothing_left_to_inspect_is_an_error_that_says_why(reading, inspected):
    with pytest.raises(ValueError, match=r"no layer is left of 1 .*: places \("):
        inspected(reading, layers=["places"])


def test_terms_are_examples_without_logits(regression, inspected):
    result, _ = inspected(regression)
    assert result.terms == 20


def test_more_examples_than_there_are_means_all(regression, inspected):
    result, _ = inspected(regression, examples=10_000)
    assert result.settings["examples"] == result.terms == 24


def test_dead_layers_have_no_curvature_and_are_no_error(regression):
    setup = Setup(regression, steps=0, examples=20)
    torch.nn.init.zeros_(setup.model[2].weight)
    facts = measure(setup)[0].layers[0]
    assert facts.trace == facts.effective_rank == facts.kept == 0
    assert facts.spectrum == ()
    assert math.isinf(facts.condition)


def test_the_seed_decides_all_and_the_callers_generator_nothing(regression, inspected):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, _ = inspected(regression, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(4)
    assert inspected(regression, seed=1)[0] == first
    assert inspected(regression, seed=2)[0] != first


def test_wrong_shapes_of_logits_are_told(reading, inspected):
    object.__setattr__(reading, "logits", lambda model, batch: (model(batch[0]), batch[0][:, 0]))
    with pytest.raises(
        ValueError, match=r"input batch_size \(40\) to match target batch_size \(8\)"
    ):
        inspected(reading)
