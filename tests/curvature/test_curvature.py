"""What is done with fitted curvature: damped powers, products, files, and what is refused."""

import errno
import json
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import forked
from isokron.curvature import (
    CrossEntropy,
    Curvature,
    fisher_vector_product,
    fit,
    ggn_vector_product,
    hessian_vector_product,
)
from isokron.curvature.packing import pack

LOSS = CrossEntropy()
METHODS = ["kfac", "ekfac", "tkfac", "shampoo"]


def problem(bias: bool = True, width: int = 4) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    layers = [nn.Linear(5, width, bias), nn.Tanh(), nn.Linear(width, 3)]
    model = nn.Sequential(*layers).double()
    inputs, targets = torch.randn(9, 5, dtype=torch.float64), torch.randint(0, 3, (9,))
    return model, [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]


def fitted(method: str) -> tuple[nn.Module, Curvature]:
    model, data = problem()
    return model, fit(model, data, LOSS, method, fisher="exact", dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("p", [-1.0, -0.5, 0.5, 1.0])
def test_a_damped_power_is_that_of_the_dense_matrix(method: str, p: float) -> None:
    model, curvature = fitted(method)
    powered = curvature.power(p, 0.1)
    tangent = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    found = powered.matvec(tangent)
    for name, layer in curvature.layers.items():
        dense = curvature[name].to_dense()[0]
        values, basis = torch.linalg.eigh(dense)
        expected = (basis * (values.clamp_min(0) + 0.1) ** p) @ basis.T
        vector = pack(layer.layout, tangent).flatten()
        torch.testing.assert_close(
            pack(layer.layout, found).flatten(), expected @ vector, rtol=1e-9, atol=1e-9
        )
        total = (values.clamp_min(0) + 0.1).log().sum().item()
        assert math.isclose(curvature.logdet(0.1)[name], total, rel_tol=1e-9)
        assert math.isclose(curvature.trace()[name], dense.trace().item(), rel_tol=1e-9)


def test_damping_by_sides_is_pi_times_its_root_on_each() -> None:
    _, curvature = fitted("kfac")
    inverse = curvature.inverse(0.04, split="sides")
    for name, layer in curvature.layers.items():
        left, right = layer.statistics["output"][0], layer.statistics["input"][0]
        pi = math.sqrt((right.trace() / len(right)) / (left.trace() / len(left)))
        eyes = [torch.eye(len(side), dtype=torch.float64) for side in (left, right)]
        sides = left + 0.2 / pi * eyes[0], right + 0.2 * pi * eyes[1]
        expected = torch.kron(*(torch.linalg.inv(side) for side in sides))
        torch.testing.assert_close(inverse[name].to_dense()[0], expected)


def test_relative_damping_is_a_multiple_of_the_mean_eigenvalue() -> None:
    _, curvature = fitted("ekfac")
    relative = curvature.inverse(0.5, relative=True)
    for name, layer in curvature.layers.items():
        mean = curvature.trace()[name] / math.prod(layer.layout.shape)
        expected = curvature.inverse(0.5 * mean)[name].to_dense()
        torch.testing.assert_close(relative[name].to_dense(), expected)


def test_condition_numbers_are_clipped_and_the_clipped_counted() -> None:
    _, curvature = fitted("ekfac")
    inverse = curvature.inverse(0.0, max_condition=10.0)
    for name, record in zip(curvature, inverse.report(), strict=True):
        values = curvature[name].eigenvalues
        assert record["clipped"] == int((values < values.max() / 10).sum()) > 0
        assert math.isclose(record["condition_after"], 10.0, rel_tol=1e-9)
        assert math.isclose(record["condition_before"], curvature.condition()[name])


def test_the_effective_rank_counts_equal_eigenvalues() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    curvature = fit(model, [(torch.eye(3).double(), torch.tensor([0, 1, 0]))], LOSS, "kfac")
    # A is I/3, and G of softmax over two classes has rank one
    assert math.isclose(curvature.report()[0]["effective_rank"], 3.0, rel_tol=1e-4)


def test_exact_products_are_those_of_dense_matrices() -> None:
    model, data = problem()
    params = dict(model.named_parameters())
    sizes = [param.numel() for param in params.values()]

    def by_name(vector: Tensor) -> dict[str, Tensor]:
        parts = zip(params.items(), vector.split(sizes), strict=True)
        return {name: part.view_as(param) for (name, param), part in parts}

    inputs = torch.cat([batch[0] for batch in data])
    targets = torch.cat([batch[1] for batch in data])

    def losses(vector: Tensor) -> Tensor:
        outputs = functional_call(model, by_name(vector), (inputs,))
        return nn.functional.cross_entropy(outputs, targets, reduction="none")

    def outputs(vector: Tensor) -> Tensor:
        return functional_call(model, by_name(vector), (inputs,))

    point = torch.cat([param.detach().flatten() for param in params.values()])
    jacobian, slopes = jacrev(outputs)(point), jacrev(losses)(point)
    p = outputs(point).softmax(-1)
    middle = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    dense = {
        hessian_vector_product: hessian(lambda v: losses(v).mean())(point),
        ggn_vector_product: torch.einsum("nci,ncd,ndj->ij", jacobian, middle, jacobian) / 9,
        fisher_vector_product: slopes.T @ slopes / 9,
    }
    vector = torch.randn(sum(sizes), dtype=torch.float64)
    for product, matrix in dense.items():
        found = product(model, data, LOSS, by_name(vector))
        flat = torch.cat([found[name].flatten() for name in params])
        torch.testing.assert_close(flat, matrix @ vector, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("method", METHODS)
def test_what_is_saved_is_loaded_to_the_bit(method: str, tmp_path: Path) -> None:
    model, curvature = fitted(method)
    curvature.save(tmp_path / "new" / "folder")
    loaded = Curvature.load(tmp_path / "new" / "folder", model)
    assert list(loaded) == list(curvature)
    for name in curvature:
        mine, theirs = curvature.layers[name], loaded.layers[name]
        assert mine.layout == theirs.layout
        assert all(torch.equal(value, theirs.statistics[k]) for k, value in mine.statistics.items())


def test_saving_again_leaves_one_set_of_factors(tmp_path: Path) -> None:
    for method in ("kfac", "ekfac"):
        fitted(method)[1].save(tmp_path)
    assert len(list(tmp_path.glob("factors-*"))) == 1
    assert Curvature.load(tmp_path).layers["0"].method == "ekfac"


def test_a_kill_while_saving_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    script = (
        "import sys, itertools; sys.path[:0] = sys.argv[2:]\n"
        "from test_curvature import fitted\n"
        "both = [fitted(method)[1] for method in ('kfac', 'ekfac')]\n"
        "print('ready', flush=True)\n"
        "for each in itertools.cycle(both): each.save(sys.argv[1])\n"
    )
    folder = tmp_path / "saved"
    fitted("kfac")[1].save(folder)
    with forked.server(tmp_path, ("torch",)) as server:
        for wait in (0.0, 0.013, 0.031):
            here = Path(__file__).parents[:2]
            process = server.start("-c", script, folder, *here, folder=tmp_path)
            while not process.out:
                assert process.poll() is None, process.err
                time.sleep(0.005)
            time.sleep(wait)
            process.kill(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
            assert Curvature.load(folder).layers["0"].method in ("kfac", "ekfac")


def test_a_full_disk_leaves_the_old_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted("kfac")[1].save(tmp_path)
    before = sorted(tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        fitted("ekfac")[1].save(tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert Curvature.load(tmp_path).layers["0"].method == "kfac"


def test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_both_sides(tmp_path: Path) -> None:
    fitted("kfac")[1].save(tmp_path)
    with pytest.raises(ValueError, match=r"layer '0': the checkpoint has a bias column, the model"):
        Curvature.load(tmp_path, problem(bias=False)[0])
    with pytest.raises(
        ValueError, match=r"layer '0'.*\(1, 4, 6\) in the checkpoint and \(1, 7, 6\)"
    ):
        Curvature.load(tmp_path, problem(width=7)[0])
    with pytest.raises(ValueError, match="layer '2' of the checkpoint is not in the model"):
        Curvature.load(tmp_path, nn.Sequential(nn.Linear(5, 4)))


def test_files_that_are_not_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"curvature\.json is missing"):
        Curvature.load(tmp_path)
    fitted("kfac")[1].save(tmp_path)
    path = tmp_path / "curvature.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        Curvature.load(tmp_path)
    index["layers"][0]["layout"]["shapes"]["weight"] = [4, 9]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="layer '0': 'input' has shape"):
        Curvature.load(tmp_path)
    index["layers"][0]["statistics"].append("basis.output")
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"'basis\.output' is missing"):
        Curvature.load(tmp_path)
    index["layers"] = [{"name": "0"}]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lacks 'statistics'; fit the curvature anew"):
        Curvature.load(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Curvature.load(tmp_path)


def test_a_broken_file_of_factors_is_refused(tmp_path: Path) -> None:
    fitted("kfac")[1].save(tmp_path)
    (file,) = tmp_path.glob("factors-*")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="cannot be read"):
        Curvature.load(tmp_path)


def test_layers_that_share_a_weight_have_no_inverse_of_their_own() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)).double()
    model[1].weight = model[0].weight
    data = [(torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 2], [3, 4]]))]
    curvature = fit(model, data, LOSS, "kfac", dtype=torch.float64)
    curvature.matvec({"0.weight": torch.ones(5, 4).double()})
    with pytest.raises(ValueError, match=r"'0' and '1' share '0\.weight'"):
        curvature.inverse(1.0)
    fit(model, data, LOSS, "kfac", layers="1").inverse(1.0)


def test_what_cannot_be_inverted_is_refused_by_name() -> None:
    model = nn.Linear(4, 2).double()
    data = [(torch.ones(3, 4).double(), torch.tensor([0, 1, 0]))]
    curvature = fit(model, data, LOSS, "kfac", dtype=torch.float64)
    with pytest.raises(ValueError, match="is singular, its smallest eigenvalue is"):
        curvature.inverse(0.0)
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0, got -1"):
        curvature.inverse(-1.0)
    with pytest.raises(ValueError, match="split must be one of"):
        curvature.inverse(1.0, split="both")
    with pytest.raises(ValueError, match="max_condition must be None or at least 1"):
        curvature.inverse(1.0, max_condition=0.5)
    with pytest.raises(ValueError, match="has no sides to damp"):
        fitted("ekfac")[1].inverse(1.0, split="sides")
    with pytest.raises(ValueError, match="tangent must name parameters"):
        hessian_vector_product(model, data, LOSS, {"weigth": torch.zeros(2, 4)})
