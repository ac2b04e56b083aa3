"""Gradients that hooks make of layers are compared with autograd's, whatever their classes say."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from isokron.curvature import CrossEntropy, Selection, find_layers
from isokron.curvature.backward import Passes
from isokron.curvature.check import check_layers
from isokron.curvature.layers import Layer, pack
from isokron.curvature.statistics import Uses
from own_forward import Causal, LayerNorm2d, Scaled, Standardised

LOSS = CrossEntropy()
WORDS, WIDTH = 11, 8


class Masked(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("mask", (torch.arange(inputs) % 3 > 0).float())

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight * self.mask, self.bias)


class GatedRMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * x * scale * torch.sigmoid(x)


class Shifted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bias


class Uneven(nn.Linear):
    """Right for the first example alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + torch.arange(len(x)))[:, None]


class Pair(nn.Linear):
    """A subclass that returns more than its outputs."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), x


class First(nn.Module):
    def forward(self, pair: Any) -> Tensor:
        return pair[0]


class Again(nn.Module):
    """A layer's weight is used by another product, too."""

    def __init__(self, words: bool) -> None:
        super().__init__()
        self.first = nn.Embedding(WORDS, WIDTH) if words else nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(self.mix(self.first(x)).tanh(), self.first.weight)


class Penalized(CrossEntropy):
    """A loss that looks at a weight itself."""

    def __init__(self, module: nn.Linear) -> None:
        super().__init__()
        self.module = module

    def terms(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return super().terms(outputs, targets) + self.module.weight.square().sum()


class ScaledWords(nn.Embedding):
    """As in Gemma."""

    embed_scale = 1.7

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.embed_scale


class Conv1D(nn.Module):
    """As in GPT-2, with a weight [i, o]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.nf, self.weight = width, nn.Parameter(torch.randn(width, width))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class Tied(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        make = ScaledWords if kind == "scaled" else nn.Embedding
        self.table = make(WORDS, WIDTH, padding_idx=3)
        self.up = nn.Linear(WIDTH, WIDTH, bias=kind != "turned")
        linear = nn.Linear(WIDTH, WIDTH, bias=kind == "linear")
        self.down: Any = Conv1D(WIDTH) if kind == "turned" else linear
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.table.weight.data *= 0.5
        if kind in ("head", "scaled"):
            self.head.weight = self.table.weight
        else:  # of equal layouts, or not
            self.down.weight = self.up.weight
        if kind == "linear":
            self.down.bias = self.up.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.table(x)).tanh()) + self.table(x.roll(1, 1)))


def numbers(*shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(2, *shape), torch.tensor([0, classes - 1])


def words(length: int = 5) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    x = torch.randint(WORDS, (2, length))
    return x, x.roll(-1, 1)


def image(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 3))


def vector(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer, nn.Linear(5, 3))


def vectors() -> Any:
    return numbers(5)


def images() -> Any:
    return numbers(3, 5, 5)


DIFFERS = "off autograd's"
WRONG: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], str, str]] = {
    "scaled": (
        lambda: nn.Sequential(Scaled(5, 5), nn.Linear(5, 3)),
        lambda: numbers(5),
        "0",
        DIFFERS,
    ),
    "shifted": (lambda: vector(Shifted(5, 5)), vectors, "0", DIFFERS),
    "uneven": (lambda: vector(Uneven(5, 5)), vectors, "0", DIFFERS),
    "masked": (
        lambda: nn.Sequential(Masked(5, 5), nn.Linear(5, 3)),
        lambda: numbers(5),
        "0",
        DIFFERS,
    ),
    "standardised": (lambda: image(Standardised(3, 5, 3)), images, "0", DIFFERS),
    "causal": (
        lambda: nn.Sequential(Causal(3, 4, 3), nn.Flatten(), nn.Linear(20, 3)),
        lambda: numbers(3, 5),
        "0",
        "computes 5 positions where its type has 3",
    ),
    "channels": (
        lambda: image(nn.Conv2d(3, 5, 1), LayerNorm2d(5)),
        lambda: numbers(3, 5, 5),
        "1",
        DIFFERS,
    ),
    "channels, by shape": (
        lambda: image(nn.Conv2d(3, 5, 1), LayerNorm2d(5)),
        lambda: numbers(3, 5, 4),
        "1",
        "Given normalized_shape=[5]",
    ),
    "gated": (
        lambda: nn.Sequential(nn.Linear(8, 8), GatedRMSNorm(8), nn.Linear(8, 3)),
        lambda: numbers(8),
        "1",
        DIFFERS,
    ),
    "two outputs": (
        lambda: nn.Sequential(Pair(5, 5), First(), nn.Linear(5, 3)),
        lambda: numbers(5),
        "0",
        "'tuple' object has no attribute",
    ),
    "a weight again": (
        lambda: Again(False),
        lambda: numbers(8, classes=8),
        "first",
        DIFFERS,
    ),
    "an embedding's weight again": (lambda: Again(True), words, "first", DIFFERS),
    "by frequency": (
        lambda: nn.Sequential(nn.Embedding(WORDS, 8, scale_grad_by_freq=True), nn.Linear(8, WORDS)),
        words,
        "0",
        "scale_grad_by_freq",
    ),
    "shared in part": (lambda: Tied("other"), words, "up", "down has its weight too"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_with_another_gradient_is_left_out_with_the_reason(name: str) -> None:
    torch.manual_seed(0)
    make, data, wrong, reason = WRONG[name]
    model, batch = make(), data()
    chosen = find_layers(model, "*")
    selection = check_layers(model, batch, LOSS, chosen)
    left_out = {x.name: x.reason for x in selection.left_out}
    assert reason in left_out[wrong]
    assert len(selection.layers) == len(find_layers(model, "*").layers) - (name != "by frequency")
    assert_equal_gradients(model, batch, selection)
    count = f"gradients of {len(selection.layers)} of {len(chosen.layers)} layers agree"
    assert selection.summary().startswith(count)
    if name != "by frequency":
        with pytest.raises(ValueError, match=rf"strict=True: .*{wrong} \(.*layers='!{wrong}'"):
            check_layers(model, batch, LOSS, chosen, strict=True)


def assert_equal_gradients(model: nn.Module, batch: Any, selection: Selection) -> None:
    """Summed over the batch, of every parameter that is covered."""
    model, matrices = model.eval(), dict[str, Tensor]()

    def fold(layer: Layer, uses: Uses) -> None:
        uses = uses.written()
        if uses.kind == "index":
            hot = functional.one_hot(uses.inputs + 1, layer.columns + 1)[..., 1:].to(uses.grads)
            matrix = torch.einsum("bnso,bnsi->boi", uses.grads, hot)
        elif uses.kind == "diagonal":
            rows = {"weight": uses.grads * uses.inputs, "bias": uses.grads}
            matrix = torch.stack([rows[key].sum((0, 1, 2)) for key in layer.layout.params])[None]
        else:
            matrix = torch.einsum("bnso,bnsi->boi", uses.grads, uses.inputs)
        matrices[layer.name] = matrix

    passes = Passes(model, [batch], LOSS, selection.layers, weighting="linear")
    passes.over(fold)
    names = [name for layer in selection.layers for name in layer.layout.params.values()]
    named = {name: model.get_parameter(name) for name in names}
    trained = [param.requires_grad for param in named.values()]
    params = [param.requires_grad_() for param in named.values()]
    terms, weights = LOSS(model, batch)
    grads = torch.autograd.grad((terms * weights).sum(), params)
    for param, flag in zip(named.values(), trained, strict=True):
        param.requires_grad_(flag)
    by_name = dict(zip(named, grads, strict=True))
    for layer in selection.layers:
        torch.testing.assert_close(matrices[layer.name], pack(layer.layout, by_name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["masked", "standardised", "gated", "a weight again"])
def test_half_precision_hides_no_other_gradient(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make, data, wrong, _ = WRONG[name]
    model, (x, targets) = make().to(dtype), data()
    selection = check_layers(model, (x.to(dtype), targets), LOSS, find_layers(model, "*"))
    assert [x.name for x in selection.left_out] == [wrong]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_that_autograd_makes_in_half_precision_are_no_other_gradient(
    dtype: torch.dtype,
) -> None:
    """Of norms and embeddings on the CPU: bfloat16 numbers stop growing after some hundred."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Embedding(3, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
    ).to(dtype)
    x = torch.randint(3, (2, 1024))
    batch = x, torch.zeros_like(x)  # gradients of all positions point the same way
    selection = check_layers(model, batch, LOSS, find_layers(model, "*"), strict=True)
    assert selection.agreeing == 3


@pytest.mark.parametrize("kind", ["head", "scaled", "linear", "turned"])
def test_uses_of_a_weight_by_several_layers_are_summed(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = Tied(kind), words()
    selection = check_layers(model, batch, LOSS, find_layers(model, "*"), strict=True)
    assert selection.covered == selection.total
    assert not selection.left_out
    pair = "head, table" if kind in ("head", "scaled") else "up, down"
    assert f"of {selection.total} parameters ({pair} share a weight)" in selection.summary()
    assert_equal_gradients(model, batch, selection)


@pytest.mark.parametrize("name", ["weight", "spectral", "orthogonal", "pruned", "old"])
def test_a_computed_weight_is_left_out_with_its_sources(name: str) -> None:
    torch.manual_seed(0)
    linear: Any = nn.Linear(5, 5)
    if name == "pruned":
        prune.l1_unstructured(linear, "weight", 0.5)
    elif name == "old":
        linear.weight_g = nn.Parameter(linear.weight.norm(dim=1, keepdim=True).detach())
        linear.weight_v = nn.Parameter(linear.weight.detach().clone())
        del linear.weight
        linear.register_forward_pre_hook(_weight_from_parts)
        linear.weight = None
    elif name == "orthogonal":
        linear = parametrizations.orthogonal(linear)
    else:
        linear = getattr(parametrizations, f"{name}_norm")(linear)
    model = nn.Sequential(linear, nn.Linear(5, 3))
    source = {"pruned": "weight_orig", "old": "weight_g, weight_v"}.get(name, "parametrizations.")
    for patterns in (None, "!0", "*"):
        selection = check_layers(model, numbers(5), LOSS, find_layers(model, patterns))
        assert [layer.name for layer in selection.layers] == ["1"]
        reasons = {item.name: item.reason for item in selection.left_out}
        assert reasons["0"].startswith(f"its weight is computed from {source}")
        left = sum(item.parameters for item in selection.left_out)
        assert selection.covered + left == selection.total


def _weight_from_parts(module: Any, _: Any) -> None:
    direction = module.weight_v / module.weight_v.norm(dim=1, keepdim=True)
    module.__dict__["weight"] = module.weight_g * direction


def test_a_loss_that_looks_at_a_weight_has_another_gradient() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    selection = check_layers(model, numbers(5), Penalized(model[0]), find_layers(model))
    assert [layer.name for layer in selection.layers] == ["2"]


class Everything(nn.Module):
    """Layers of all types, with dropout and, on request, checkpoints and autocast."""

    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.table = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=how == "sparse")
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2, groups=2)
        self.group, self.rms = nn.GroupNorm(2, WIDTH), nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention = nn.TransformerEncoderLayer(WIDTH, 2, 12, batch_first=True)
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def block(self, x: Tensor) -> Tensor:
        x = x + self.group(self.conv(x.mT)).mT
        x = x + self.mix(self.mix(self.drop(self.rms(x))).tanh())
        return x + self.attention(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.how == "autocast"):
            y = self.table(x)
            if self.how in ("reentrant", "checkpoint"):
                y = checkpoint(self.block, y, use_reentrant=self.how == "reentrant")
            else:
                y = self.block(y)
            return self.head(self.norm(y))


HOW = ["", "checkpoint", "reentrant", "sparse", "autocast", "float64", "bfloat16", "float16"]


@pytest.mark.parametrize("how", HOW)
def test_layers_of_all_types_agree_and_the_model_is_as_before(how: str) -> None:
    torch.manual_seed(0)
    model, batch = Everything(how).train(), words(9)
    model = model.to(getattr(torch, how)) if "float" in how else model
    model.norm.requires_grad_(False)
    model.mix.weight.grad = torch.ones_like(model.mix.weight)
    grad, before = model.mix.weight.grad, copy.deepcopy(model.state_dict())
    trained = [param.requires_grad for param in model.parameters()]
    fired: list[int] = []
    model.mix.bias.register_post_accumulate_grad_hook(lambda _: fired.append(1))
    selection = check_layers(model, batch, LOSS, find_layers(model, "*"), strict=True)
    assert selection.covered == selection.total
    assert selection.compared == len(selection.layers) == 15
    assert model.mix.weight.grad is grad
    assert bool((grad == 1).all())
    assert all(p.grad is None for p in model.parameters() if p is not model.mix.weight)
    assert [param.requires_grad for param in model.parameters()] == trained
    assert all(module.training for module in model.modules())
    assert not any(param._backward_hooks for param in model.parameters())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    if how != "reentrant":  # a step of an optimizer within .backward() is none of the check's
        assert not fired


def test_one_gradient_of_autograd_is_held_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    import isokron.curvature.check as check

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)), nn.Linear(64, 3))
    plain, results = torch.autograd.grad, []

    def grad(*args: Any, **options: Any) -> tuple[Tensor | None, ...]:
        results.append(plain(*args, **options))
        return results[-1]

    monkeypatch.setattr(check.torch.autograd, "grad", grad)
    check_layers(model, numbers(64), LOSS, find_layers(model))
    held = [x.untyped_storage().nbytes() for grads in results for x in grads if x is not None]
    assert len(held) == 2 * 2 * 13
    assert sum(held) == 4 * len(held)


def test_a_gradient_that_is_zero_but_for_rounding_agrees() -> None:
    """The bias of keys moves all scores of a query alike, which a softmax does not see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), nn.Linear(16, 3))
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)
    x = torch.randn(2, 50, 16), torch.randint(3, (2, 50))
    selection = check_layers(model, x, LOSS, find_layers(model), strict=True)
    assert "0.self_attn.k" in [layer.name for layer in selection.layers]
    assert {item.reason for item in selection.left_out} == {"frozen"}


@pytest.mark.parametrize("trained", ["bias", "weight"])
def test_frozen_parameters_of_a_layer_are_not_covered(trained: str) -> None:
    torch.manual_seed(0)
    model = Everything()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith(trained))
    selection = check_layers(model, words(9), LOSS, find_layers(model), strict=True)
    learned = sum(param.numel() for param in model.parameters() if param.requires_grad)
    embedding = model.table.weight.numel() * (trained == "weight")
    assert selection.covered == learned - embedding
    left = sum(item.parameters for item in selection.left_out)
    assert selection.covered + left == selection.total
    assert_equal_gradients(model, words(9), selection)
    # a pattern takes in a layer that is frozen altogether, and of others what is trained
    every = check_layers(model, words(9), LOSS, find_layers(model, "*"), strict=True)
    norm = model.rms.weight.numel() * (trained == "bias")
    assert every.covered == learned + norm + model.table.weight.numel() * (trained == "bias")


class LoRALinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int, rank: int) -> None:
        super().__init__(inputs, outputs)
        self.a = nn.Parameter(torch.randn(rank, inputs))
        self.b = nn.Parameter(torch.randn(outputs, rank))
        self.weight.requires_grad_(False)
        self.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.a.T @ self.b.T


def test_adapters_within_a_subclass_are_left_out_and_not_covered_by_its_frozen_weight() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(LoRALinear(5, 7, 2), nn.Linear(7, 3))
    selection = check_layers(model, numbers(5), LOSS, find_layers(model), strict=True)
    assert [layer.name for layer in selection.layers] == ["1"]
    assert [(x.name, x.reason, x.parameters) for x in selection.left_out] == [
        ("0", "frozen", 42),
        ("0", "LoRALinear", 24),
    ]


def test_a_gradient_that_is_not_finite_is_left_to_what_uses_it() -> None:
    torch.manual_seed(0)
    model, (x, targets) = nn.Sequential(nn.Linear(5, 3)), numbers(5)
    x[0, 0] = float("nan")
    assert len(check_layers(model, (x, targets), LOSS, find_layers(model)).layers) == 1
