"""Curvature of optimizers against means of the gradients that they have seen, in dense matrices."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from isokron.curvature import find_layers
from isokron.curvature.curvature import Curvature
from isokron.curvature.optimizer_state import Origin, curvature_from_optimizer

STEPS = 6
BETA = 0.95
OPTIMIZERS = ["SOAP", "Shampoo", "Katie", "AdamW", "NaturalGradient"]


class Net(nn.Module):
    """A convolution, a norm, and linear layers with a bias and without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 2, groups=2), nn.LayerNorm(16)
        self.mix, self.head = nn.Linear(16, 5), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mix(self.norm(self.conv(x).tanh().flatten(1))).tanh())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = x.flatten(1)[:, :16].view(-1, 4, 4)
        return self.head(self.attention(y, y, y, need_weights=False)[0].mean(1))


def trained(
    name: str,
    model: nn.Module | None = None,
    steps: int = STEPS,
    groups: Any = None,
    **options: Any,
) -> tuple[nn.Module, Any, dict[str, list[Tensor]]]:
    """A model, its optimizer and the gradients of every parameter, in float64."""
    torch.manual_seed(0)
    model = model or Net()
    if name == "NaturalGradient":
        optimizer = isokron.NaturalGradient(model, 0.01, **options)
    else:
        params = model.named_parameters() if groups is None else groups(model)
        optimizer = getattr(isokron, name)(params, 0.01, **options)
    gradients: dict[str, list[Tensor]] = {key: [] for key, _ in model.named_parameters()}
    for _ in range(steps):
        x, labels = torch.randn(12, 2, 3, 3), torch.randint(0, 3, (12,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        for key, param in model.named_parameters():
            if param.grad is not None:
                gradients[key].append(param.grad.detach().double().clone())
        optimizer.step()
    return model, optimizer, gradients


def mean(values: list[Tensor], beta: float = BETA) -> Tensor:
    """A running mean, corrected for its start at 0."""
    weights = [beta ** (len(values) - 1 - i) for i in range(len(values))]
    total = sum(w * value for w, value in zip(weights, values, strict=True))
    assert isinstance(total, Tensor)
    return total / sum(weights)


def taken(model: nn.Module, optimizer: Any, layers: str = "*") -> tuple[Curvature, Origin]:
    return curvature_from_optimizer(model, find_layers(model, layers).layers, optimizer)


def close(values: Tensor, right: Tensor) -> None:
    scale = float(right.abs().max())
    torch.testing.assert_close(values.double(), right.double(), rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("max_dim", [None, 4])
def test_factors_of_shampoo_are_means_of_its_gradients(max_dim: int | None) -> None:
    model, optimizer, gradients = trained("Shampoo", max_dim=max_dim)
    curvature, origin = taken(model, optimizer)
    assert origin == ("Shampoo", STEPS, "shampoo")
    weight, bias = gradients["mix.weight"], gradients["mix.bias"]
    variance = mean([g.square() for g in bias])
    left, right = mean([g @ g.mT for g in weight]), mean([g.mT @ g for g in weight])
    if max_dim:  # the diagonal blocks of the factors of the whole
        left = left * same_block(5, max_dim)
        right = right * same_block(16, max_dim)
    left = left + torch.diag(variance)
    right = torch.block_diag(right, variance.sum())
    close(curvature["mix"].to_dense()[0], torch.kron(left, right) / right.trace())
    assert float(left.trace()) == pytest.approx(float(right.trace()), rel=1e-6)
    norm = torch.cat(
        [mean([g.square() for g in gradients[f"norm.{k}"]]) for k in ("weight", "bias")]
    )
    close(curvature["norm"].to_dense()[0], torch.diag(norm))


def same_block(size: int, max_dim: int) -> Tensor:
    part = torch.arange(size) // max_dim
    return (part[:, None] == part).double()


def test_groups_of_a_convolution_have_their_rows_of_the_output_side() -> None:
    model, optimizer, gradients = trained("Shampoo")
    conv = taken(model, optimizer)[0]["conv"].to_dense()
    weight, bias = [g.flatten(1) for g in gradients["conv.weight"]], gradients["conv.bias"]
    variance = mean([g.square() for g in bias])
    left = mean([g @ g.mT for g in weight]) + torch.diag(variance)
    right = torch.block_diag(mean([g.mT @ g for g in weight]), variance.sum())
    for group, rows in enumerate((slice(0, 2), slice(2, 4))):
        close(conv[group], torch.kron(left[rows, rows], right) / right.trace())


def test_one_block_of_soap_is_its_eigenbasis_and_second_moments() -> None:
    model, optimizer, gradients = trained("SOAP")
    curvature, origin = taken(model, optimizer)
    assert origin == ("SOAP", STEPS, "ekfac")
    entry = optimizer.state_dict()["state"][4]
    left, right = entry["basis.0.0"].double(), entry["basis.1.0"].double()
    variance = entry["variance.0"].double() / (1 - BETA**STEPS)
    basis = torch.kron(left, right)
    bias = mean([g.square() for g in gradients["mix.bias"]])
    dense = curvature["mix"].to_dense()[0].view(5, 17, 5, 17)
    weights = dense[:, :16, :, :16].reshape(80, 80)
    close(weights, basis @ torch.diag(variance.flatten()) @ basis.mT)
    # of the bias, the diagonal in the basis of outputs
    turned = left.mT @ torch.diag(bias) @ left
    close(dense[:, 16, :, 16], left @ torch.diag(turned.diagonal()) @ left.mT)
    assert not dense[:, :16, :, 16].any()


def test_blocks_of_soap_side_by_side_get_common_bases_and_keep_their_trace() -> None:
    model, optimizer, _ = trained("SOAP", max_dim=4, every=1)
    operator = taken(model, optimizer)[0]["mix"]
    left, right = (basis[0].double() for basis in operator.bases)
    eye = torch.eye(17).double()
    close(left.mT @ left, eye[:5, :5])
    close(right.mT @ right, eye)
    entry = optimizer.state_dict()["state"][4]
    for row in range(2):
        for column in range(4):
            number = row * 4 + column
            rows, columns = slice(4 * row, 4 * row + 4), slice(4 * column, 4 * column + 4)
            rows = slice(4, 5) if row else rows
            bases = [entry[f"basis.{side}.{number}"].double() for side in (0, 1)]
            values = entry[f"variance.{number}"].double() / (1 - BETA**STEPS)
            block = torch.kron(*bases) @ torch.diag(values.flatten()) @ torch.kron(*bases).mT
            common = torch.kron(left[rows, rows], right[columns, columns])
            expected = (common.mT @ block @ common).diagonal().view(values.shape)
            close(operator.eigenvalues[0, rows, columns], expected)


def test_factors_of_katie_are_partial_traces_of_its_covariance() -> None:
    model, optimizer, _ = trained("Katie", max_dim=None)
    entry = optimizer.state_dict()["state"][6]  # the head, without a bias
    left, right = (entry[f"cov.{side}.0"].double() for side in (0, 1))
    left, right = ((f.tril() + f.tril(-1).mT) / (1 - BETA**STEPS) for f in (left, right))
    scale = (entry["variance.0"].double() / (1 - BETA**STEPS)).sqrt().flatten()
    covariance = (scale[:, None] * torch.kron(left, right) * scale).view(3, 5, 3, 5)
    statistics = taken(model, optimizer)[0].layers["head"].statistics
    close(statistics["output"][0], torch.einsum("aibi->ab", covariance))
    close(statistics["input"][0], torch.einsum("aiaj->ij", covariance))


def test_second_moments_of_adamw_are_a_diagonal() -> None:
    model, optimizer, gradients = trained("AdamW")
    curvature, origin = taken(model, optimizer)
    assert origin == ("AdamW", STEPS, "diagonal")
    weight, bias = (
        mean([g.square() for g in gradients[f"mix.{k}"]], 0.999) for k in ("weight", "bias")
    )
    close(
        curvature["mix"].to_dense()[0].diagonal().view(5, 17), torch.cat([weight, bias[:, None]], 1)
    )


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac"])
def test_natural_gradient_has_the_statistics_that_it_keeps(method: str) -> None:
    model, optimizer, _ = trained("NaturalGradient", method=method, steps=25)
    curvature, origin = taken(model, optimizer, "mix,head")
    assert origin == ("NaturalGradient", 25, method)
    names = [
        name for group in optimizer.state_dict()["param_groups"] for name in group["param_names"]
    ]
    entry = optimizer.state_dict()["state"][names.index("mix.weight")]
    if method == "ekfac":
        basis = torch.kron(entry["basis.output"][0], entry["basis.input"][0])
        right = basis @ torch.diag(entry["eigenvalues"].flatten()) @ basis.mT
    else:
        right = torch.kron(entry["output"][0], entry["input"][0])
        right = right / entry["input"][0].trace() if method == "tkfac" else right
    close(curvature["mix"].to_dense()[0], right)


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_natural_gradient_with_few_columns_has_what_they_stand_for(method: str) -> None:
    options = {"policy": "all", "t_max": 3}  # of the 5 outputs of "mix"
    model, optimizer, _ = trained("NaturalGradient", method=method, steps=25, **options)
    curvature, _ = taken(model, optimizer, "mix,head")
    entry = optimizer.state[model.get_parameter("mix.weight")]
    if method == "kfac":
        columns = (entry["columns"] * entry["lengths"][:, None])[0, :, : int(entry["count"])]
        right = torch.kron(columns @ columns.mT, entry["input"][0])
    else:
        left, side, values = (
            entry[key][0] for key in ("basis.output", "basis.input", "eigenvalues")
        )
        inside = torch.kron(left, side)
        right = inside @ torch.diag(values[:-1].flatten()) @ inside.mT
        beyond = torch.eye(len(left)).to(left) - left @ left.mT
        right = right + torch.kron(beyond, side @ torch.diag(values[-1]) @ side.mT)
    close(curvature["mix"].to_dense()[0], right)


def test_packed_projections_have_their_rows() -> None:
    model, optimizer, gradients = trained("Shampoo", Attention())
    curvature = taken(model, optimizer)[0]
    rows = gradients["attention.in_proj_weight"]
    bias = mean([g.square() for g in gradients["attention.in_proj_bias"]])
    for i, part in enumerate("qkv"):
        where = slice(4 * i, 4 * i + 4)
        statistics = curvature.layers[f"attention.{part}"].statistics
        left = mean([(g @ g.mT)[where, where] for g in rows]) + torch.diag(bias[where])
        close(statistics["output"][0], left)
        close(statistics["input"][0, :4, :4], mean([g.mT @ g for g in rows]))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("groups", [None, isokron.param_groups, lambda m: list(m.parameters())])
def test_an_optimizer_and_its_file_give_the_same_bytes(
    name: str, groups: Any, tmp_path: Any
) -> None:
    model, optimizer, _ = trained(name, groups=groups)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    saved = torch.load(tmp_path / "c", weights_only=True)
    layers = "mix,head" if name == "NaturalGradient" else "*"
    live, read, plain = (taken(model, x, layers)[0] for x in (optimizer, saved, saved["optimizer"]))
    live.save(tmp_path / "live")
    read.save(tmp_path / "read")
    one, other = (
        {path.name: path.read_bytes() for path in (tmp_path / side).iterdir()}
        for side in ("live", "read")
    )
    assert one == other
    loaded = Curvature.load(tmp_path / "live", model).damped_inverse(0.1)
    inverse = plain.damped_inverse(0.1)
    for layer in loaded:
        assert loaded[layer].to_dense().equal(inverse[layer].to_dense())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_of_other_shapes_is_refused_by_name_and_shape(name: str) -> None:
    narrow = nn.Sequential(nn.Flatten(), nn.Linear(18, 4), nn.Tanh(), nn.Linear(4, 3))
    wide = nn.Sequential(nn.Flatten(), nn.Linear(18, 6), nn.Tanh(), nn.Linear(6, 3))
    saved = trained(name, narrow)[1].state_dict()
    taken(narrow, saved)
    with pytest.raises(ValueError, match=r"'1(\.weight)?'.*\(.*4.*\).*give the") as caught:
        taken(wide, saved)
    assert "6" in str(caught.value)


def test_what_is_no_curvature_of_the_model_is_refused() -> None:
    model, optimizer, _ = trained("SOAP")
    other = Attention()
    cases: list[tuple[nn.Module, Any, str]] = [
        (other, optimizer, "is none of the model's"),
        (other, optimizer.state_dict(), "that the model lacks"),
        (model, {"weights": 1}, "optimizer must be an optimizer of isokron"),
        (model, 3, "optimizer must be an optimizer of isokron"),
        (model, torch.optim.AdamW(model.parameters()), "a state of another library"),
        (model, isokron.SOAP(model.parameters()), "has made no step"),
        (model, trained("Muon", model)[1], "must keep second moments"),
        (model, trained("SOAP", model, groups=lambda m: m.mix.parameters())[1], "no state of"),
    ]
    for wrong_model, wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            taken(wrong_model, wrong)
    unnamed = trained("SOAP", model, groups=lambda m: [{"params": [p]} for p in m.parameters()])[1]
    taken(model, unnamed)
    with pytest.raises(ValueError, match="has no names of parameters"):
        taken(model, unnamed.state_dict())
    for setting in ("moments", "factor_dtype"):
        groups = partial(isokron.param_groups, min_8bit_size=1, **{setting: "8bit"})
        with pytest.raises(ValueError, match="kept in 8 bits"):
            taken(model, trained("SOAP", model, groups=groups)[1])


def test_a_checkpoint_of_another_shape_is_refused() -> None:
    optimizer = trained("Shampoo")[1]
    wider = Net()
    wider.head = nn.Linear(5, 4, bias=False)
    with pytest.raises(ValueError, match="do not fit the model's shape"):
        taken(wider, optimizer.state_dict())


def test_factors_of_other_statistics_and_moments_in_8_bits_are_refused() -> None:
    eight = partial(isokron.param_groups, min_8bit_size=1, moments="8bit")
    model, kullback, _ = trained("Shampoo", statistic="kl")
    with pytest.raises(ValueError, match="statistic='kl'"):
        taken(model, kullback)
    with pytest.raises(ValueError, match="kept in 8 bits"):
        taken(model, trained("AdamW", model, groups=eight)[1])
