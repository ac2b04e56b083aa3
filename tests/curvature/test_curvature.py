"""What is done with fitted curvature: damped powers, products, files, and what is refused."""

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import forked
from isokron.curvature import CrossEntropy, Curvature, fit, planned_bytes, save, side_damping
from isokron.curvature.layers import pack
from isokron.curvature.selection import find_layers

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
        assert math.isclose(curvature.trace()[name], dense.trace().item(), rel_tol=1e-9)


@pytest.mark.parametrize("method", ["kfac", "tkfac", "shampoo"])
def test_damping_of_two_sides_is_split_by_pi(method: str) -> None:
    _, curvature = fitted(method)
    inverse = curvature.damped_inverse(0.4)
    for name, operator in curvature.items():
        left, right = (factor.to_dense()[0] for factor in operator.factors)
        means = [side.trace() / len(side) for side in (left, right)]
        pi, root = math.sqrt(means[1] / means[0]), math.sqrt(0.4 * means[0] * means[1])
        eyes = [torch.eye(len(side), dtype=torch.float64) for side in (left, right)]
        sides = left + root / pi * eyes[0], right + root * pi * eyes[1]
        expected = torch.kron(*(torch.linalg.inv(side) for side in sides))
        torch.testing.assert_close(inverse[name].to_dense()[0], expected)
        added = side_damping(operator, 0.4)
        assert torch.cat(added).tolist() == pytest.approx([root / pi, root * pi])
        record = next(r for r in inverse.report(spectra=False) if r["layer"] == name)
        assert math.isclose(record["damping"], root**2)


def test_damping_of_eigenvalues_is_added_to_them() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)).double()
    curvature = fit(model, problem()[1], LOSS, "ekfac", dtype=torch.float64)
    inverse = curvature.damped_inverse(0.4)
    for name, operator in curvature.items():
        dense = operator.to_dense()[0]
        damping = 0.4 * dense.trace() / len(dense)
        expected = torch.linalg.inv(dense + damping * torch.eye(len(dense)))
        torch.testing.assert_close(inverse[name].to_dense()[0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", METHODS)
def test_a_dead_layer_has_the_inverse_zero_and_stops_no_other(
    method: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4))
    model = nn.Sequential(model, nn.Linear(4, 3)).to(dtype)
    model[0][0].bias.data.fill_(-100.0)  # nothing comes through the first layer, or back to it
    data = [(x.to(dtype), y) for x, y in problem()[1]]
    curvature = fit(model, data, LOSS, method, dtype=dtype)
    inverse = curvature.damped_inverse(0.1)
    gradient = {name: torch.ones_like(param) for name, param in model.named_parameters()}
    moved = inverse.matvec(gradient)
    assert all(value.isfinite().all() for value in moved.values())
    assert not moved["0.0.weight"].any()
    assert moved["1.weight"].any()
    dead = {record["layer"]: record["dead"] for record in inverse.report(spectra=False)}
    assert dead == {"0.0": 1, "0.2": 0, "0.3": 0, "1": 0}
    assert [record["dead"] for record in curvature.report()] == [1, 0, 0, 0]
    if method != "ekfac":
        assert all(bool((side == 1).all()) for side in side_damping(curvature["0.0"], 0.1))


def test_gradients_too_small_to_be_inverted_are_dead_and_smaller_ones_than_usual_are_not() -> None:
    model, data = nn.Linear(5, 3), [(x.float(), y) for x, y in problem()[1]]
    for scale, dead in ((1e-12, 0), (1e-20, 1)):

        def loss(model: nn.Module, batch: tuple[Tensor, Tensor], scale: float = scale) -> Tensor:
            terms = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
            return terms * scale

        inverse = fit(model, data, loss).damped_inverse()
        assert inverse.report(spectra=False)[0]["dead"] == dead
        gradient = {name: torch.full_like(p, scale) for name, p in model.named_parameters()}
        moved = inverse.matvec(gradient)["weight"]
        assert moved.isfinite().all()
        assert bool(moved.any()) != bool(dead)


def test_relative_damping_is_a_multiple_of_the_mean_eigenvalue() -> None:
    _, curvature = fitted("ekfac")
    relative = curvature.inverse(0.5, relative=True)
    for name, layer in curvature.layers.items():
        mean = curvature.trace()[name] / math.prod(layer.layout.shape)
        expected = curvature.inverse(0.5 * mean)[name].to_dense()
        torch.testing.assert_close(relative[name].to_dense(), expected)


def test_the_effective_rank_counts_equal_eigenvalues() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    curvature = fit(model, [(torch.eye(3).double(), torch.tensor([0, 1, 0]))], LOSS, "kfac")
    # A is I/3, and G of softmax over two classes has rank one
    assert math.isclose(curvature.report()[0]["effective_rank"], 3.0, rel_tol=1e-4)


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


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["damped_inverse", "inverse", "power"])
def test_a_saved_inverse_is_loaded_as_an_inverse(method: str, how: str, tmp_path: Path) -> None:
    model, curvature = fitted(method)
    powered = getattr(curvature, how)(0.5)
    powered.save(tmp_path)
    loaded = Curvature.load(tmp_path, model)
    tangent = {name: torch.randn_like(param) for name, param in model.named_parameters()}
    want, found = powered.matvec(tangent), loaded.matvec(tangent)
    assert all(torch.equal(found[name], value) for name, value in want.items())
    assert [r.get("damping") for r in loaded.report()] == [
        r.get("damping") for r in powered.report()
    ]


def test_a_curvature_is_saved_in_several_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("isokron.curvature.save.FILE_BYTES", 300)
    _, curvature = fitted("kfac")
    curvature.save(tmp_path)
    assert len(list(tmp_path.glob("factors-*"))) > 1
    loaded = Curvature.load(tmp_path)
    for name in curvature:
        assert torch.equal(loaded[name].to_dense(), curvature[name].to_dense())


def test_one_flipped_byte_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    fitted("kfac")[1].save(tmp_path)
    (file,) = tmp_path.glob("factors-*")
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)
    message = rf"{file.name} is damaged.*delete the folder and run `isokron fit` again"
    with pytest.raises(ValueError, match=message):
        Curvature.load(tmp_path)


@pytest.mark.parametrize("method", METHODS)
def test_statistics_take_the_bytes_that_were_planned(method: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 30), nn.LayerNorm(30), nn.Linear(30, 5))
    data = [(torch.randint(50, (8, 4)), torch.randint(5, (8, 4)))]
    curvature = fit(model, data, LOSS, method, layers="*")
    planned = planned_bytes(find_layers(model, "*").layers, method)
    held = sum(record["bytes"] for record in curvature.report(spectra=False))
    # the counts of an embedding's columns are no part of EK-FAC's result
    assert held == planned["statistics"] - (4 * 50 if method == "ekfac" else 0)
    inverse = curvature.damped_inverse()
    # tensors of the inverse that are not those of the statistics
    old = {id(v) for layer in curvature.layers.values() for v in layer.statistics.values()}
    parts = [p for o in inverse.values() for p in (getattr(o, "factors", ()) or (o,))]
    new = {id(t): t for part in parts for t in vars(part).values() if isinstance(t, Tensor)}
    assert sum(t.nbytes for key, t in new.items() if key not in old) == planned["decompositions"]
    assert planned["peak"] > planned["statistics"] + planned["decompositions"]


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


def test_a_checkpoint_that_does_not_fit_is_refused_by_layer_and_both_shapes(tmp_path: Path) -> None:
    fitted("kfac")[1].save(tmp_path / "bias")
    for model, message in (
        (
            problem(bias=False)[0],
            r"layer '0' is .*'0\.bias': \(4,\).* in .*curvature.json and .*model",
        ),
        (problem(width=7)[0], r"layer '0' is .*'0\.weight': \(4, 5\).* and .*weight': \(7, 5\)"),
        (nn.Sequential(nn.Linear(5, 4)), r"layer '2' is .*'2\.weight': \(3, 4\).* and None in"),
    ):
        with pytest.raises(ValueError, match=message):
            Curvature.load(tmp_path / "bias", model)
    model, data = problem(bias=False)
    fit(model, data, LOSS).save(tmp_path / "none")
    with pytest.raises(ValueError, match=r"curvature.json and .*'0\.bias': \(4,\)"):
        Curvature.load(tmp_path / "none", problem()[0])
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    batch = [(torch.randn(3, 2, 4), torch.randint(4, (3, 2)))]
    loss = CrossEntropy(lambda m, b: (m(b[0], b[0], b[0])[0], b[1]))
    fit(attention, batch, loss).save(tmp_path / "packed")
    Curvature.load(tmp_path / "packed", attention)
    with pytest.raises(ValueError, match=r"layer 'q' is .*'in_proj_weight': \(4, 4\)"):
        Curvature.load(tmp_path / "packed", nn.MultiheadAttention(8, 2))


def test_files_that_are_not_right_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"curvature\.json is missing"):
        Curvature.load(tmp_path)
    fitted("kfac")[1].save(tmp_path)
    path = tmp_path / "curvature.json"
    index = json.loads(path.read_text())
    path.write_text(json.dumps({**index, "format": 99}))
    with pytest.raises(ValueError, match="has format 99"):
        Curvature.load(tmp_path)
    del index["operators"]
    path.write_text(json.dumps(index))
    with pytest.raises(ValueError, match="lacks 'operators'; delete the folder"):
        Curvature.load(tmp_path)
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        Curvature.load(tmp_path)


def test_a_broken_file_of_factors_is_refused(tmp_path: Path) -> None:
    fitted("kfac")[1].save(tmp_path)
    (file,) = tmp_path.glob("factors-*")
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ValueError, match="is damaged"):
        Curvature.load(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="cannot be read"):
        Curvature.load(tmp_path)


def test_what_cannot_be_inverted_is_refused_by_name() -> None:
    model = nn.Linear(4, 2).double()
    data = [(torch.ones(3, 4).double(), torch.tensor([0, 1, 0]))]
    curvature = fit(model, data, LOSS, "kfac", dtype=torch.float64)
    with pytest.raises(ValueError, match="is singular, its smallest eigenvalue is"):
        curvature.inverse(0.0)
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0, got -1"):
        curvature.inverse(-1.0)
    with pytest.raises(ValueError, match="damping must be a finite number of at least 0, got inf"):
        curvature.damped_inverse(float("inf"))


@pytest.mark.parametrize("method", ["kfac", "tkfac", "ekfac"])
@pytest.mark.parametrize("by_sides", [True, False])
def test_inverses_with_a_bounded_condition_number_are_the_dense_ones(
    method: str, by_sides: bool
) -> None:
    model, batches = problem()
    curvature = fit(model, batches, LOSS, method, dtype=torch.float64)
    inverse = (
        curvature.damped_inverse(1e-3, relative=False, max_condition=50.0)
        if by_sides
        else curvature.inverse(1e-3, max_condition=50.0)
    )
    report = {record["layer"]: record for record in inverse.report(spectra=False)}
    for name, operator in curvature.items():
        split = by_sides and method != "ekfac"
        if split:
            sides = [factor.to_dense()[0] for factor in operator.factors]
            added = side_damping(operator, 1e-3, relative=False)
            sides = [
                s + float(x) * torch.eye(len(s)).double() for s, x in zip(sides, added, strict=True)
            ]
            dense = torch.kron(*sides)
        else:
            dense = operator.to_dense()[0]
            dense = dense + 1e-3 * torch.eye(len(dense)).double()
        values, basis = torch.linalg.eigh(dense)
        floor = values.max() / 50
        clipped = (values < floor).double().mean()
        wanted = basis @ torch.diag(1 / values.clamp_min(floor)) @ basis.mT
        torch.testing.assert_close(inverse[name].to_dense()[0], wanted, rtol=1e-7, atol=1e-9)
        assert report[name]["clipped"] == pytest.approx(float(clipped))
        assert report[name]["condition_after"] <= 50 * (1 + 1e-9)


def test_two_writers_do_not_remove_each_others_factors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = problem()
    one, other = (fit(model, data, LOSS) for _ in range(2))
    for layer in other.layers.values():
        for value in layer.statistics.values():
            value.mul_(1 + 1e-6)  # as of another order of summation
    write, begun, finished = save.write_atomically, threading.Event(), threading.Event()

    def delayed(path: Path, parts: Iterable[bytes | memoryview]) -> None:
        if threading.current_thread().name == "other" and path.name == save.INDEX:
            begun.set()
            finished.wait(0.3)  # in vain: one writer waits for the other
        write(path, parts)

    monkeypatch.setattr(save, "write_atomically", delayed)
    thread = threading.Thread(target=other.save, args=(tmp_path,), name="other")
    thread.start()
    assert begun.wait(20)
    one.save(tmp_path)
    finished.set()
    thread.join()
    Curvature.load(tmp_path, model)
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_curvature_of_another_model_is_refused(tmp_path: Path) -> None:
    model, data = problem()
    fit(model, data, LOSS).save(tmp_path)
    Curvature.load(tmp_path, model)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    with pytest.raises(
        ValueError, match=r"fitted to a model with the weights \w+, .* has \w+; fit"
    ):
        Curvature.load(tmp_path, model)
    Curvature.load(tmp_path)


def test_an_index_of_an_older_format_is_refused_with_the_remedy(tmp_path: Path) -> None:
    model, data = problem()
    fit(model, data, LOSS).save(tmp_path)
    path = tmp_path / save.INDEX
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 4}))
    with pytest.raises(ValueError, match=r"has format 4 .* reads 5; delete the folder and run"):
        Curvature.load(tmp_path, model)
