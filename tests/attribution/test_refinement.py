"""Refined scores against a dense solve with the Gauss–Newton matrix, in float64."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from letters import Model, attributor, loss, task
from torch import Tensor
from torch.func import functional_call

from isokron.attribution import Attributor, Query
from isokron.attribution.queries import read_queries
from isokron.curvature.layers import Layer, unpack

LAYERS = "*,!table"


def opened(folder: Path, method: str = "kfac", **options: Any) -> Attributor:
    return attributor(folder, layers=LAYERS, **options).fit(method)


def asked(a: Attributor) -> list[Query]:
    return read_queries(task(), a.subject.model, ["eval:0-2", "train:3", "abc"], ids=a.data.ids)


def shifted_logits(model: Model, layers: list[Layer], shift: Tensor, letters: Tensor) -> Tensor:
    """Logits of the model with its layers moved by a vector: [N·S, 9]"""
    weights = {}
    for layer, part in zip(layers, shift.split([x.parameters for x in layers]), strict=True):
        for key, value in unpack(layer.layout, part.view(layer.shape)).items():
            name = layer.layout.params[key]
            weights[name] = model.get_parameter(name) + value
    return functional_call(model, weights, (letters[:, :-1],)).flatten(0, 1)


def dense_scores(a: Attributor, queries: list[Query], damping: float) -> Tensor:
    """∇_qᵀ(G + D)⁻¹∇_t, G = Σ Jᵀ(diag p − ppᵀ)J / M with all blocks between layers."""
    torch.manual_seed(0)
    model, layers = Model().double(), a.subject.layers
    zeros = torch.zeros(sum(layer.parameters for layer in layers)).double()

    def parts(letters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Jacobians, probabilities and the gradient of the summed loss."""
        compute = lambda shift: shifted_logits(model, layers, shift, letters)  # noqa: E731
        jacobian, p = torch.autograd.functional.jacobian(compute, zeros), compute(zeros).softmax(1)
        hot = torch.nn.functional.one_hot(letters[:, 1:].flatten(), 9)
        return jacobian, p, torch.einsum("tc,tcp->p", p - hot, jacobian)

    matrix, terms, rows = torch.zeros(len(zeros), len(zeros)).double(), 0, []
    for (letters,) in (a.data.batch([n]) for n in range(len(a.data))):
        jacobian, p, row = parts(letters)
        hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
        matrix += torch.einsum("tap,tab,tbq->pq", jacobian, hessian, jacobian)
        terms += len(p)
        rows.append(row)
    curvature = a.curvature
    assert curvature is not None
    levels = []
    for layer in layers:
        mean = curvature[layer.name].to_dense().double().diagonal(dim1=-2, dim2=-1).mean()
        levels.append((damping * mean).expand(layer.parameters))
    damped = matrix / terms + torch.diag(torch.cat(levels))
    targets = torch.stack([parts(query.batch[0])[2] for query in queries])
    return (targets @ torch.linalg.solve(damped, torch.stack(rows).mT)).detach()


def off(scores: Tensor, right: Tensor) -> float:
    difference = scores.as_subclass(Tensor).double() - right
    return float(difference.norm() / right.norm())


@pytest.mark.parametrize("method", ["kfac", "ekfac", "shampoo"])
def test_many_steps_give_the_scores_of_the_dense_solve(method: str, tmp_path: Path) -> None:
    a = opened(tmp_path, method)
    queries = asked(a)
    right = dense_scores(a, queries, 0.1)
    fitted, refined = (a.score(queries, damping=0.1, refine=n, save=False) for n in (0, 60))
    assert off(refined, right) < 5e-3
    assert off(fitted, right) > 0.1
    assert refined.refinement["residual_after"] <= 1e-3 < refined.refinement["residual_before"]
    assert refined.refinement["steps"] == 60
    few = a.score(queries, damping=0.1, refine=4, save=False)
    assert off(refined, right) < off(few, right) < off(fitted, right)


def test_refined_scores_have_a_default_damping_of_ten(tmp_path: Path) -> None:
    a = opened(tmp_path)
    refined = a.score(asked(a), refine=30, save=False)
    assert off(refined, dense_scores(a, asked(a), 10.0)) < 5e-3


def test_curvature_of_another_scale_is_warned_of(tmp_path: Path) -> None:
    a = opened(tmp_path)
    assert a.curvature is not None
    for layer in a.curvature.layers.values():
        layer.statistics[min(layer.statistics.keys() & {"output", "eigenvalues"})] *= 1e-4
    with pytest.warns(UserWarning, match="fit with fisher='exact' or 'sampled'"):
        a.score(asked(a), refine=1, save=False)


def test_no_steps_change_nothing(tmp_path: Path) -> None:
    a = opened(tmp_path)
    plain, zero = a.score(asked(a), save=False), a.score(asked(a), refine=0, save=False)
    assert plain.as_subclass(Tensor).equal(zero.as_subclass(Tensor))
    assert zero.refinement is None


def test_blocks_of_queries_and_means_are_solved_alike(tmp_path: Path) -> None:
    a = opened(tmp_path)
    queries = asked(a)
    together = a.score(queries, refine=5, save=False).as_subclass(Tensor)
    alone = [a.score([query], refine=5, save=False).as_subclass(Tensor) for query in queries]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-3, atol=1e-4)
    # solves are linear, but conjugate gradients are so only when they have converged
    mean = a.score(queries, refine=60, mode="mean", save=False).as_subclass(Tensor)
    single = a.score(queries, refine=60, save=False).as_subclass(Tensor)
    assert off(mean, single.double().mean(0, keepdim=True)) < 1e-2


def test_layers_and_tokens_add_up_to_the_refined_score(tmp_path: Path) -> None:
    a = opened(tmp_path)
    scores = a.score(asked(a), refine=5, by_layer=True)
    plain = scores.as_subclass(Tensor)
    torch.testing.assert_close(scores.by_layer.sum(1), plain, rtol=1e-3, atol=1e-4)
    for row, answer, tokens in zip(plain, scores.answers, scores.tokens, strict=True):
        for item in answer["proponents"]:
            example = item["example"]
            assert item["score"] == pytest.approx(float(row[example]))
            assert sum(item["tokens"]) == pytest.approx(float(row[example]), rel=1e-3, abs=1e-3)
            assert sum(tokens[example]) == pytest.approx(float(row[example]), rel=1e-3, abs=1e-3)
            assert item["cosine"] is None


def test_residuals_are_in_the_files_and_on_the_page(tmp_path: Path) -> None:
    a = opened(tmp_path)
    a.score(asked(a), refine=3, name="refined", verify=True)
    record = json.loads((tmp_path / "scores" / "refined.json").read_text())
    refine = record["method"]["refine"]
    assert refine["steps"] == 3
    assert 0 < refine["residual_after"] < refine["residual_before"]
    assert all(answer["verify"] and answer["calibration"] is None for answer in record["answers"])
    page = a.report().read_text(encoding="utf-8")
    assert f"refined, residual {refine['residual_before']:.2g} → " in page


def test_memory_of_whole_gradients_is_planned(tmp_path: Path) -> None:
    a = opened(tmp_path)
    queries = asked(a)
    plain, refined = (a.memory_plan(queries=queries, refine=n) for n in (0, 5))
    size = 4 * sum(layer.parameters for layer in a.subject.layers)
    assert refined.parts["solutions"] == len(queries) * size
    assert refined.parts["queries"] >= refined.block * 5 * size
    assert refined.peak > plain.peak


@pytest.mark.parametrize("refine", [-1, 2.0, True, "3"])
def test_a_wrong_number_of_steps_is_refused(refine: Any, tmp_path: Path) -> None:
    a = opened(tmp_path)
    with pytest.raises(ValueError, match="refine must be a whole number of at least 0"):
        a.score(asked(a), refine=refine)


def test_what_cannot_be_refined_is_refused_with_the_remedy(tmp_path: Path) -> None:
    a = opened(tmp_path / "stored").build(dim=4)
    with pytest.raises(ValueError, match=r"score exactly \(store=False\)"):
        a.score(asked(a), refine=2)
    a.score(asked(a), refine=2, store=False, save=False)
    with pytest.raises(ValueError, match="does not go with unit"):
        a.score(asked(a), refine=2, store=False, unit=True)
    examples = task().train
    plain = attributor(tmp_path / "plain", task=None, train_set=examples, loss=loss, layers=LAYERS)
    with pytest.raises(ValueError, match=r"give loss=isokron.losses.CrossEntropy\(\)"):
        plain.fit().score([(examples.tensors[0][0],)], refine=2)
    with pytest.raises(ValueError, match=r"call fit\(\) first"):
        attributor(tmp_path / "unfitted", layers=LAYERS).score(asked(a), refine=2)
    with pytest.raises(ValueError, match="layers='!table'"):
        attributor(tmp_path / "table").fit().score(asked(a), refine=2)
