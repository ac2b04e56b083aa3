"""Every type of layer against its definition: factors, eigenvalues and traces, in float64."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from curvature_naive import CROSS_ENTROPY, EXACT, Tailed, batched, kron, labels, truth
from isokron.curvature import Curvature, find_layers, fit
from isokron.curvature.selection import LeftOut

ROWS, TOKENS = 3, 7


def images(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape).double()


DENSE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(3, 4), (3,)),
    "linear without bias": (lambda: nn.Linear(3, 4, bias=False), (3,)),
    "linear on sequences": (lambda: nn.Linear(3, 2), (4, 3)),
    "linear on grids": (lambda: nn.Linear(3, 2, bias=False), (2, 3, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1), (2, 7)),
    "conv1d, same": (lambda: nn.Conv1d(2, 2, 4, padding="same", dilation=2, bias=False), (2, 6)),
    "conv1d, reflect": (lambda: nn.Conv1d(2, 2, 3, padding=2, padding_mode="reflect"), (2, 5)),
    "conv1d, by channel": (lambda: nn.Conv1d(4, 4, 2, groups=4), (4, 4)),
    "conv2d": (lambda: nn.Conv2d(2, 3, (2, 3), stride=(1, 2), padding=(0, 1)), (2, 3, 5)),
    "conv2d, groups": (lambda: nn.Conv2d(4, 6, 2, groups=2, dilation=(1, 2)), (4, 3, 4)),
    "conv2d, circular": (
        lambda: nn.Conv2d(1, 2, 3, padding=(1, 2), padding_mode="circular", stride=2),
        (1, 4, 4),
    ),
    "conv2d, same and replicate": (
        lambda: nn.Conv2d(2, 1, (2, 3), padding="same", padding_mode="replicate"),
        (2, 2, 3),
    ),
    "conv2d, valid": (lambda: nn.Conv2d(1, 2, 2, padding="valid"), (1, 3, 3)),
    "conv3d": (lambda: nn.Conv3d(2, 2, (1, 2, 2), stride=2, padding=1, groups=2), (2, 2, 3, 2)),
}
NORMS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "layer norm": (lambda: nn.LayerNorm(5), (5,)),
    "layer norm on sequences": (lambda: nn.LayerNorm(5), (2, 5)),
    "layer norm over two dimensions": (lambda: nn.LayerNorm((2, 4)), (3, 2, 4)),
    "layer norm without bias": (lambda: nn.LayerNorm(5, bias=False), (2, 5)),
    "rms norm": (lambda: nn.RMSNorm(5), (3, 5)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 2, 3)),
    "group norm of vectors": (lambda: nn.GroupNorm(2, 6), (6,)),
}


def prepared(layer: nn.Module, scale: float = 1.0) -> Tailed:
    """With parameters that are neither 0 nor 1, as those of a norm would be."""
    model = Tailed(layer.double(), scale)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    return model


def fitted(model: nn.Module, x: Tensor, method: str, **options: Any) -> Curvature:
    data = batched(x, labels(len(x)))
    return fit(model, data, CROSS_ENTROPY, method, dtype=torch.float64, **options)


def known(curvature: Curvature, name: str = "layer") -> dict[str, Tensor]:
    return curvature.layers[name].statistics


@pytest.mark.parametrize("name", DENSE)
def test_factors_and_eigenvalues_equal_their_definitions(name: str) -> None:
    build, shape = DENSE[name]
    model, x = prepared(build()), images(*shape)
    want = truth(model, x, labels(ROWS))
    total = want.fisher.diagonal(dim1=1, dim2=2).sum()

    kfac = fitted(model, x, "kfac")
    for side, factor in zip(("output", "input"), want.kfac, strict=True):
        torch.testing.assert_close(known(kfac)[side], factor, **EXACT)
    torch.testing.assert_close(kfac["layer"].to_dense(), kron(*want.kfac), **EXACT)
    reduced = fitted(model, x, "kfac", sharing="reduce")
    for side, factor in zip(("output", "input"), want.reduced, strict=True):
        torch.testing.assert_close(known(reduced)[side], factor, **EXACT)

    ekfac = fitted(model, x, "ekfac")
    basis = kron(known(ekfac)["basis.output"], known(ekfac)["basis.input"])
    values = known(ekfac)["eigenvalues"]
    diagonal = (basis.mT @ want.fisher @ basis).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(values.flatten(1), diagonal, **EXACT)
    torch.testing.assert_close(values.sum(), total, **EXACT)
    torch.testing.assert_close(
        ekfac["layer"].to_dense(), basis @ diagonal.diag_embed() @ basis.mT, **EXACT
    )
    far, near = (want.fisher - kfac["layer"].to_dense()), want.fisher - ekfac["layer"].to_dense()
    assert near.norm() <= far.norm() + 1e-12

    for method, factors in (("shampoo", want.shampoo), ("tkfac", want.tkfac)):
        found = fitted(model, x, method)
        for side, factor in zip(("output", "input"), factors, strict=True):
            torch.testing.assert_close(known(found)[side], factor, **EXACT)
        trace = factors[1].diagonal(dim1=1, dim2=2).sum(1)
        product = kron(*factors) / trace[:, None, None]
        torch.testing.assert_close(found["layer"].to_dense(), product, **EXACT)
    assert fitted(model, x, "shampoo").trace()["layer"] == pytest.approx(float(total), abs=1e-12)


@pytest.mark.parametrize("examples", [40, 1])
def test_sums_over_the_positions_of_large_images_hardly_round(examples: int) -> None:
    """In float32: 92,160 positions, of one batch and of forty."""
    model, x = prepared(nn.Conv2d(1, 3, 3, padding=1)), torch.randn(40, 1, 48, 48).double()
    data = [(part, labels(len(part))) for part in x.split(examples)]
    exact, rounded = (
        known(fit(model, data, CROSS_ENTROPY, "kfac", dtype=dtype))
        for dtype in (torch.float64, torch.float32)
    )
    for side in ("input", "output"):
        error = (rounded[side].double() - exact[side]).abs().max() / exact[side].abs().max()
        assert error < 2e-6


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_the_diagonal_of_their_fisher(name: str) -> None:
    build, shape = NORMS[name]
    model, x = prepared(build(), 0.5), images(*shape)
    each = []
    for n in range(ROWS):
        loss = CROSS_ENTROPY(model, (x[n : n + 1], labels(ROWS)[n : n + 1]))[0].sum()
        each.append(
            torch.stack([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])
        )
    want = torch.stack(each).square().mean(0)
    for method in ("kfac", "ekfac", "tkfac", "shampoo"):
        found = fitted(model, x, method)
        torch.testing.assert_close(known(found)["eigenvalues"][0], want, **EXACT)
        torch.testing.assert_close(
            found["layer"].to_dense()[0], want.flatten().diag_embed(), **EXACT
        )


@pytest.mark.parametrize("padding", [None, 2])
def test_an_embedding_has_a_diagonal_of_counts(padding: int | None) -> None:
    model = prepared(nn.Embedding(TOKENS, 3, padding_idx=padding))
    x = torch.tensor([[0, 2, 2, 5], [5, 5, 1, 2], [6, 0, 0, 0]])
    want = truth(model, x, labels(ROWS))
    learns = (torch.ones_like(x) if padding is None else x != padding).bool()
    g, a = want.grads[0][learns], nn.functional.one_hot(x, TOKENS)[learns].double()
    total = want.fisher.diagonal(dim1=1, dim2=2).sum()

    kfac = known(fitted(model, x, "kfac", layers="layer"))
    torch.testing.assert_close(kfac["output"][0], g.T @ g / ROWS, **EXACT)
    torch.testing.assert_close(kfac["input"][0], a.mean(0), **EXACT)

    ekfac = fitted(model, x, "ekfac", layers="layer")
    basis = kron(known(ekfac)["basis.output"], torch.eye(TOKENS).double()[None])
    diagonal = (basis.mT @ want.fisher @ basis).diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(known(ekfac)["eigenvalues"].flatten(1), diagonal, **EXACT)
    torch.testing.assert_close(known(ekfac)["eigenvalues"].sum(), total, **EXACT)

    left, right = want.shampoo
    shampoo = known(fitted(model, x, "shampoo", layers="layer"))
    torch.testing.assert_close(shampoo["output"], left, **EXACT)
    torch.testing.assert_close(shampoo["input"], right.diagonal(dim1=1, dim2=2), **EXACT)

    tkfac = known(fitted(model, x, "tkfac", layers="layer"))
    torch.testing.assert_close(tkfac["output"][0], g.T @ g / ROWS, **EXACT)
    weight = (a * g.square().sum(1, keepdim=True)).sum(0) / ROWS
    torch.testing.assert_close(tkfac["input"][0], weight, **EXACT)


def test_no_tensor_of_an_embedding_is_vocabulary_by_vocabulary() -> None:
    vocabulary = 20_000  # whose square is 3.2 GB in float64
    model = Tailed(nn.Embedding(vocabulary, 2).double())
    x = torch.randint(vocabulary, (ROWS, 4))
    for method in ("kfac", "ekfac", "tkfac", "shampoo"):
        found = fitted(model, x, method, layers="layer")
        assert max(value.numel() for value in known(found).values()) <= 2 * vocabulary
        moved = found.inverse(0.1).matvec({"layer.weight": torch.ones(vocabulary, 2).double()})
        assert moved["layer.weight"].isfinite().all()


def test_transformers_conv1d_is_a_linear_layer_with_its_weight_turned() -> None:
    transformers = pytest.importorskip("transformers")
    model, x = prepared(transformers.pytorch_utils.Conv1D(4, 3)), images(2, 3)
    want = truth(model, x, labels(ROWS))
    for method, factors in (
        ("kfac", want.kfac),
        ("tkfac", want.tkfac),
        ("shampoo", want.shampoo),
    ):
        found = fitted(model, x, method)
        torch.testing.assert_close(known(found)["output"], factors[0], **EXACT)
        torch.testing.assert_close(known(found)["input"], factors[1], **EXACT)
    moved = fitted(model, x, "kfac").matvec(dict(model.named_parameters()))
    torch.testing.assert_close(
        moved["layer.weight"],
        (
            want.kfac[0][0]
            @ torch.cat([model.layer.weight.T, model.layer.bias[:, None]], 1)
            @ want.kfac[1][0]
        )[:, :-1].T,
        **EXACT,
    )


class Explicit(nn.Module):
    """What nn.MultiheadAttention computes, with a linear layer for each projection."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.heads = attention.num_heads
        size = attention.embed_dim
        packed = attention.in_proj_weight
        for i, part in enumerate("qkv"):
            rows = slice(i * size, (i + 1) * size)
            weight = getattr(attention, f"{part}_proj_weight") if packed is None else packed[rows]
            self._linear(
                part,
                weight,
                None if attention.in_proj_bias is None else attention.in_proj_bias[rows],
            )
        self._linear("out_proj", attention.out_proj.weight, attention.out_proj.bias)

    def _linear(self, name: str, weight: Tensor, bias: Tensor | None) -> None:
        layer = nn.Linear(weight.size(1), weight.size(0), bias=bias is not None).double()
        layer.weight.data.copy_(weight.detach())
        if bias is not None:
            layer.bias.data.copy_(bias.detach())
        self.add_module(name, layer)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for part, x in ((self.q, query), (self.k, key), (self.v, value))
        )
        scores = (q @ k.mT / q.size(-1) ** 0.5).softmax(-1)
        return self.out_proj((scores @ v).transpose(1, 2).flatten(2))


class Attends(nn.Module):
    def __init__(self, layer: nn.Module, first: bool = True, explicit: bool = False) -> None:
        super().__init__()
        self.layer, self.first, self.explicit = layer, first, explicit

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        if self.explicit:
            return Tailed.tail(Tailed(self), self.layer(*given))
        swapped: dict[int, Tensor] = {}  # the very same tensor for the very same argument
        turned = [x if self.first else swapped.setdefault(id(x), x.transpose(0, 1)) for x in given]
        y = self.layer(*turned, need_weights=False)[0]
        return Tailed.tail(Tailed(self), y if self.first else y.transpose(0, 1))


ATTENTION: dict[str, tuple[dict[str, Any], str]] = {
    "self": ({}, "xxx"),
    "self, without bias": ({"bias": False}, "xxx"),
    "cross": ({}, "xzz"),
    "three inputs": ({}, "xzw"),
    "unpacked": ({"kdim": 3, "vdim": 5}, "xkv"),
}


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_its_four_projections(name: str, first: bool) -> None:
    options, letters = ATTENTION[name]
    layer = nn.MultiheadAttention(4, 2, batch_first=first, **options).double()
    for param in layer.parameters():
        nn.init.normal_(param)
    tensors = {
        "x": images(3, 4),
        "z": images(2, 4),
        "w": images(2, 4),
        "k": images(2, 3),
        "v": images(2, 5),
    }
    given = tuple(tensors[letter] for letter in letters)
    data = [(given, labels(ROWS))]
    packed, apart = Attends(layer, first), Attends(Explicit(layer), explicit=True)
    torch.testing.assert_close(packed(given), apart(given), **EXACT)
    for method in ("kfac", "ekfac", "tkfac", "shampoo"):
        found = fit(packed, data, CROSS_ENTROPY, method, dtype=torch.float64)
        want = fit(apart, data, CROSS_ENTROPY, method, dtype=torch.float64)
        assert list(found) == ["layer.q", "layer.k", "layer.v", "layer.out_proj"]
        for part in found:
            torch.testing.assert_close(found[part].to_dense(), want[part].to_dense(), **EXACT)
        tangent = {name: torch.randn_like(param) for name, param in packed.named_parameters()}
        moved = found.matvec(tangent)
        assert moved.keys() == tangent.keys()
        if "layer.in_proj_weight" in tangent:
            block = want["layer.k"].to_dense()[0]
            side = tangent["layer.in_proj_weight"][4:8]
            if layer.in_proj_bias is not None:
                side = torch.cat([side, tangent["layer.in_proj_bias"][4:8, None]], 1)
            right = (block @ side.flatten()).view(side.shape)[:, :4]
            torch.testing.assert_close(moved["layer.in_proj_weight"][4:8], right, **EXACT)


def test_parts_of_attention_are_named_by_patterns() -> None:
    model = Attends(nn.MultiheadAttention(4, 2, batch_first=True).double())
    x = images(3, 4)
    data = [((x, x, x), labels(ROWS))]
    whole = fit(model, data, CROSS_ENTROPY, dtype=torch.float64)
    some = fit(model, data, CROSS_ENTROPY, layers=["*.v", "layer.out_proj"], dtype=torch.float64)
    assert list(some) == ["layer.v", "layer.out_proj"]
    for name in some:
        torch.testing.assert_close(some[name].to_dense(), whole[name].to_dense(), **EXACT)


@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_in_eval_mode_shows_all_its_layers(norm_first: bool) -> None:
    layer = (
        nn.TransformerEncoderLayer(4, 2, 6, batch_first=True, norm_first=norm_first).double().eval()
    )
    model, x = Tailed(layer), images(3, 4)
    each = []
    for n in range(ROWS):
        loss = CROSS_ENTROPY(model, (x[n : n + 1], labels(ROWS)[n : n + 1]))[0].sum()
        each.append(torch.autograd.grad(loss, [*model.parameters()]))
    squares = {
        name: torch.stack([g[i] for g in each]).square().mean(0).sum()
        for i, (name, _) in enumerate(model.named_parameters())
    }
    found = fitted(model, x, "ekfac")
    assert len(found) == 8
    traces = found.trace()
    attention = sum(value for name, value in squares.items() if "self_attn.in_proj" in name)
    got = sum(traces[f"layer.self_attn.{part}"] for part in "qkv")
    assert got == pytest.approx(float(attention), abs=1e-12)
    for name in ("linear1", "linear2", "norm1", "norm2", "self_attn.out_proj"):
        want = sum(float(v) for key, v in squares.items() if key.startswith(f"layer.{name}."))
        assert traces[f"layer.{name}"] == pytest.approx(want, abs=1e-12), name


class Tied(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 3)
        self.head = nn.Linear(3, TOKENS, bias=False)
        if shared:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)).cumsum(1))


def test_uses_of_a_tied_weight_count_in_the_head() -> None:
    model = Tied(True).double()
    for patterns in (None, "*", "head", "!embed"):
        selection = find_layers(model, patterns)
        assert [layer.name for layer in selection.layers] == ["head"]
        assert [layer.name for layer in selection.layers[0].tied] == ["embed"]
        assert not selection.left_out
    assert selection.summary() == "covers 21 of 21 parameters (head, embed share a weight)"


@pytest.mark.parametrize("method", ["kfac", "ekfac", "tkfac", "shampoo"])
def test_curvature_of_a_tied_weight_has_the_gradients_of_all_its_uses(method: str) -> None:
    model = Tied(True).double()
    x = torch.randint(TOKENS, (ROWS, 4))
    batch = x, x.roll(-1, 1)
    found = fit(model, [batch], CROSS_ENTROPY, method, dtype=torch.float64)
    trace = 0.0
    for n in range(ROWS):
        terms, _ = CROSS_ENTROPY(model, tuple(part[n : n + 1] for part in batch))
        (grad,) = torch.autograd.grad(terms.sum(), [model.head.weight])
        trace += float(grad.square().sum()) / batch[1].numel()
    if method in ("ekfac", "shampoo"):  # of whole gradients
        assert found.trace()["head"] == pytest.approx(trace)
    else:
        assert trace / 20 < found.trace()["head"] < 20 * trace


def test_an_embedding_cannot_have_the_uses_of_a_head_that_is_too_large() -> None:
    model = Tied(True)
    selection = find_layers(model, "*", max_side=5)
    assert [layer.name for layer in selection.layers] == ["embed"]
    assert selection.left_out == [LeftOut("head", f"{TOKENS} outputs", 0)]
    lowrank = find_layers(model, "*", max_side=5, head="lowrank")
    assert [layer.name for layer in lowrank.layers] == ["head"]
    assert not lowrank.left_out


@pytest.mark.parametrize(
    "name", ["llama.modeling_llama.LlamaRMSNorm", "gemma2.modeling_gemma2.Gemma2RMSNorm"]
)
def test_root_mean_square_norms_of_transformers_have_their_diagonal(name: str) -> None:
    pytest.importorskip("transformers")
    home, _, kind = name.rpartition(".")
    layer = getattr(importlib.import_module(f"transformers.models.{home}"), kind)(5)
    model, x = prepared(layer), images(2, 5)
    squares = torch.zeros(5, dtype=torch.float64)
    for row, label in zip(x, labels(ROWS), strict=True):
        loss = nn.functional.cross_entropy(model(row[None]), label[None], reduction="sum")
        (grad,) = torch.autograd.grad(loss, [layer.weight])
        squares += grad.square() / ROWS
    found = known(fitted(model, x, "kfac"))["eigenvalues"]
    torch.testing.assert_close(found[0, 0], squares, rtol=1e-4, atol=1e-6)  # it is in float32


def test_an_embedding_with_a_forward_of_its_own_is_not_known() -> None:
    class Scaled(nn.Embedding):
        def forward(self, numbers: Tensor) -> Tensor:
            return super().forward(numbers) * 3.0

    model = Tailed(nn.Sequential(Scaled(4, 3), nn.Linear(3, 2))).double()
    found = find_layers(model, "*")
    assert [layer.name for layer in found.layers] == ["layer.1"]
    assert found.left_out == [LeftOut("layer.0", "Scaled", 12)]


class Language(nn.Module):
    """Embeddings, two blocks and a head of many outputs."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 4)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(4, 6), "norm": nn.LayerNorm(6), "down": nn.Linear(6, 4)})
            for _ in range(2)
        )
        self.wide = nn.Conv1d(4, 2, 10)  # 41 inputs with the bias
        self.head = nn.Linear(4, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


BLOCKS = [f"blocks.{i}.{part}" for i in (0, 1) for part in ("up", "norm", "down")]
PATTERNS: dict[str, tuple[Any, dict[str, Any], list[str]]] = {
    "by default": (None, {}, BLOCKS),
    "without a limit": (None, {"max_side": None}, [*BLOCKS, "wide", "head"]),
    "with the head": (None, {"head": "lowrank"}, [*BLOCKS, "head"]),
    "several": ("*.up,*.down", {}, [x for x in BLOCKS if "norm" not in x]),
    "a list": (["*.up", "*.1.down, *.norm"], {}, [x for x in BLOCKS if x != "blocks.0.down"]),
    "a block": ("blocks.0", {}, BLOCKS[:3]),
    "excluded": ("!*.norm", {}, [x for x in BLOCKS if "norm" not in x]),
    "a block excluded": ("blocks,!blocks.0", {}, BLOCKS[3:]),
    "all": ("*", {}, ["embed", *BLOCKS, "wide"]),  # but the head
    "all and the head": ("*", {"head": "lowrank"}, ["embed", *BLOCKS, "wide", "head"]),
    "the head by name": ("head", {}, ["head"]),
    "an embedding": ("embed,blocks.0.up", {}, ["embed", "blocks.0.up"]),
    "a large one": ("wide", {}, ["wide"]),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_are_selected_by_patterns_and_size(name: str) -> None:
    patterns, options, names = PATTERNS[name]
    model = Language()
    selection = find_layers(model, patterns, **{"max_side": 40, **options})
    assert [layer.name for layer in selection.layers] == names
    count = sum(
        param.numel()
        for key, param in model.named_parameters()
        if any(key.startswith(f"{layer}.") for layer in names)
    )
    assert selection.covered == count
    assert selection.covered + sum(x.parameters for x in selection.left_out) == selection.total


def test_the_summary_names_what_is_left_out_and_why() -> None:
    summary = find_layers(Language(tied=True), "!*.norm", max_side=40).summary()
    assert summary == (
        "covers 116 of 422 parameters; left out: embed (embedding), "
        "blocks.0.norm, blocks.1.norm (excluded), wide (41 inputs), head (50 outputs)"
    )
    summary = find_layers(Language(), "wide").summary()
    assert "blocks.0.up, blocks.0.norm + 5 more (not named in layers)" in summary
    assert find_layers(nn.Linear(2, 3)).summary() == "covers 9 of 9 parameters"
    for size, text in ((2000, "covers 4.0 of 4.0 M"), (40_000, "covers 1.6 of 1.6 B")):
        with torch.device("meta"):
            model = nn.Linear(size, size, bias=False)
        assert find_layers(model, max_side=None).summary().startswith(text)


def test_a_head_that_is_taken_in_owns_a_tied_weight() -> None:
    selection = find_layers(Language(tied=True), max_side=40, head="lowrank")
    assert [layer.name for layer in selection.layers] == [*BLOCKS, "head"]
    assert [layer.name for layer in selection.layers[-1].tied] == ["embed"]
    with pytest.raises(ValueError, match="head must be 'skip' or 'lowrank', got 'low'"):
        find_layers(Language(), head="low")


def test_frozen_layers_of_a_model_that_is_trained_in_part_are_left_out() -> None:
    model = Language()
    model.blocks[0].requires_grad_(False)
    selection = find_layers(model)
    assert [x.name for x in selection.layers] == [*BLOCKS[3:], "wide", "head"]
    assert {x.name for x in selection.left_out if x.reason == "frozen"} == set(BLOCKS[:3])
    assert [x.name for x in find_layers(model, "blocks.0").layers] == BLOCKS[:3]
    model.requires_grad_(False)
    assert len(find_layers(model).layers) == len(BLOCKS) + 2


def test_a_quantized_layer_is_left_out() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2, bias=False))
    model[1].weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.uint8), requires_grad=False)
    assert find_layers(model).left_out == [LeftOut("1", "Linear", 6)]
