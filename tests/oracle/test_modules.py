"""Modules of all kinds against autograd: equal to the oracle, or left out with the reason."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from autograd_oracle import Case, check, drawn
from isokron.curvature import CrossEntropy
from own_forward import Causal, LayerNorm2d, Scaled, Standardised

# a first segment in a reentrant checkpoint has no inputs that require gradients
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")

WORDS, CLASSES = 11, 3
Build = Callable[[], nn.Module]


class Net(nn.Module):
    """Modules, and a function of them and of the inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.function(self, x)
        return result


class ScaledEmbedding(nn.Embedding):
    def forward(self, words: Tensor) -> Tensor:
        return super().forward(words) * 3.0


class LoRALinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 7)
        self.A, self.B = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(7, 2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x @ self.A.T @ self.B.T


def headed(*modules: nn.Module) -> Build:
    """With a head on all outputs of an example."""
    return lambda: nn.Sequential(*modules, nn.Flatten(), nn.LazyLinear(CLASSES))


def tied() -> nn.Module:
    table, head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS, bias=False)
    head.weight = table.weight
    table.weight.data *= 0.3
    return nn.Sequential(table, nn.Linear(8, 8), nn.Tanh(), head)


def by_function() -> nn.Module:
    def forward(net: Any, x: Tensor) -> Tensor:
        return functional.linear(net.mix(net.table(x)), net.table.weight)

    return Net(forward, table=nn.Embedding(WORDS, 8), mix=nn.Linear(8, 8))


def attention(first: bool, **options: Any) -> Build:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = x if first else x.transpose(0, 1)
        y = net.mix(x, x, x, need_weights=False)[0]
        return net.head(y.mean(1 if first else 0))

    mix = nn.MultiheadAttention(8, 2, batch_first=first, **options)
    return lambda: Net(forward, mix=mix, head=nn.Linear(8, CLASSES))


def repeated() -> nn.Module:
    forward = lambda net, x: net.out(net.mix(torch.tanh(net.mix(x))))  # noqa: E731
    return Net(forward, mix=nn.Linear(5, 5), out=nn.Linear(5, CLASSES))


def checkpointed(reentrant: bool) -> Build:
    def forward(net: Any, x: Tensor) -> Tensor:
        x = net.first(x)
        return net.out(checkpoint(net.inner, x, use_reentrant=reentrant))

    def build() -> nn.Module:
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        return Net(forward, first=nn.Linear(5, 6), inner=inner, out=nn.Linear(6, CLASSES))

    return build


def recurrent(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.out(net.rnn(x)[0][:, -1])
    return result


def pair(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.out(net.mix(x[:, :4], x[:, 4:]))
    return result


def residual(net: Any, x: Tensor) -> Tensor:
    result: Tensor = net.out(x + net.inner(x).relu_())
    return result


def vectors(*modules: nn.Module) -> Build:
    return lambda: nn.Sequential(*modules, nn.LazyLinear(CLASSES))


def language(*modules: nn.Module) -> Build:
    return lambda: nn.Sequential(nn.Embedding(WORDS, 8), *modules, nn.Linear(8, WORDS))


GRID, LINE, ROW, TABLE = (4, 6, 6), (4, 7), (5,), (4, 8)
COMPUTED = {"0": "its weight is computed", "0.parametrizations.weight": "ParametrizationList"}
# what builds the model, the shape of an example (None: words), what is left out and why
MODULES: dict[str, tuple[Build, tuple[int, ...] | None, dict[str, str]]] = {
    "mlp": (vectors(nn.Linear(5, 7), nn.Tanh()), ROW, {}),
    "mlp without bias": (vectors(nn.Linear(5, 7, bias=False), nn.GELU()), ROW, {}),
    "relu in place": (lambda: Net(residual, inner=nn.Linear(5, 5), out=nn.Linear(5, 3)), ROW, {}),
    "linear of a sequence": (headed(nn.Linear(8, 6), nn.ReLU()), TABLE, {}),
    "linear twice": (repeated, ROW, {}),
    "identity and dropout": (headed(nn.Linear(8, 6), nn.Dropout(0.5), nn.Identity()), TABLE, {}),
    "conv1d": (headed(nn.Conv1d(4, 3, 3, stride=2, padding=1)), LINE, {}),
    "conv1d, even and same": (headed(nn.Conv1d(4, 3, 4, padding="same", dilation=2)), LINE, {}),
    "conv1d, reflect": (headed(nn.Conv1d(4, 3, 3, padding=2, padding_mode="reflect")), LINE, {}),
    "conv2d": (headed(nn.Conv2d(4, 3, (2, 3), padding=(0, 1)), nn.Tanh()), GRID, {}),
    "conv2d, dilated groups": (headed(nn.Conv2d(4, 6, 3, dilation=2, groups=2)), GRID, {}),
    "conv2d, depthwise": (headed(nn.Conv2d(4, 4, 3, groups=4), nn.ReLU()), GRID, {}),
    "conv2d, circular": (
        headed(nn.Conv2d(4, 2, 3, padding="same", padding_mode="circular")),
        GRID,
        {},
    ),
    "conv2d, max pool": (headed(nn.Conv2d(4, 3, 3), nn.ReLU(), nn.MaxPool2d(2)), GRID, {}),
    "conv2d, channels last": (
        headed(nn.Conv2d(4, 3, 3).to(memory_format=torch.channels_last)),
        GRID,
        {},
    ),
    "conv3d": (headed(nn.Conv3d(4, 2, (2, 3, 3))), (4, 2, 4, 4), {}),
    "conv transposed": (
        headed(nn.ConvTranspose2d(4, 2, 2)),
        (4, 3, 3),
        {"0": "ConvTranspose2d"},
    ),
    "batch norm": (
        headed(nn.Conv2d(4, 3, 3), nn.BatchNorm2d(3)),
        GRID,
        {"1": "BatchNorm2d"},
    ),
    "group norm": (headed(nn.GroupNorm(2, 4)), GRID, {}),
    "instance norm": (
        headed(nn.InstanceNorm2d(4, affine=True)),
        GRID,
        {"0": "InstanceNorm2d"},
    ),
    "layer norm": (headed(nn.LayerNorm(8), nn.Linear(8, 3)), TABLE, {}),
    "layer norm of a table": (headed(nn.LayerNorm((4, 8))), TABLE, {}),
    "layer norm without bias": (headed(nn.LayerNorm(8, bias=False)), TABLE, {}),
    "rms norm": (headed(nn.RMSNorm(8)), TABLE, {}),
    "prelu": (vectors(nn.Linear(5, 7), nn.PReLU()), ROW, {"1": "PReLU"}),
    "embedding": (language(), None, {}),
    "embedding with padding": (
        lambda: nn.Sequential(nn.Embedding(WORDS, 8, padding_idx=3), nn.Linear(8, WORDS)),
        None,
        {},
    ),
    "embedding, norm, mlp": (language(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()), None, {}),
    "embedding scaled by frequency": (
        lambda: nn.Sequential(nn.Embedding(WORDS, 8, scale_grad_by_freq=True), nn.Linear(8, WORDS)),
        None,
        {"0": ""},
    ),
    "embedding that scales": (
        lambda: nn.Sequential(ScaledEmbedding(WORDS, 8), nn.Linear(8, WORDS)),
        None,
        {"0": "ScaledEmbedding"},
    ),
    "embedding tied to the head": (tied, None, {}),
    "embedding's weight in a function": (by_function, None, {"table": ""}),
    "attention": (attention(True), TABLE, {}),
    "attention, positions first": (attention(False), TABLE, {}),
    "attention without bias": (attention(True, bias=False), TABLE, {}),
    "attention, unpacked": (attention(True, kdim=8, vdim=8, add_bias_kv=True), TABLE, {"mix": ""}),
    "encoder layer": (
        headed(nn.TransformerEncoderLayer(8, 2, 12, 0.5, batch_first=True)),
        TABLE,
        {},
    ),
    "lstm": (
        lambda: Net(recurrent, rnn=nn.LSTM(8, 6, batch_first=True), out=nn.Linear(6, 3)),
        TABLE,
        {"rnn": "LSTM"},
    ),
    "bilinear": (
        lambda: Net(pair, mix=nn.Bilinear(4, 4, 5), out=nn.Linear(5, 3)),
        (8,),
        {"mix": "Bilinear"},
    ),
    "checkpoint": (checkpointed(False), ROW, {}),
    "reentrant checkpoint": (checkpointed(True), ROW, {}),
    "scaled linear": (vectors(Scaled(5, 7)), ROW, {"0": "off autograd's"}),
    "weight standardisation": (headed(Standardised(4, 3, 3)), GRID, {"0": "off autograd's"}),
    "causal convolution": (headed(Causal(4, 3, 3)), LINE, {"0": "positions"}),
    "channels-first layer norm": (headed(LayerNorm2d(4)), GRID, {"0": ""}),
    "linear with adapters": (vectors(LoRALinear()), ROW, {"0": ""}),
    "weight norm": (vectors(parametrizations.weight_norm(nn.Linear(5, 7))), ROW, COMPUTED),
    "spectral norm": (vectors(parametrizations.spectral_norm(nn.Linear(5, 7))), ROW, COMPUTED),
}


def padded(examples: list[Tensor], side: str, more: int) -> Tensor:
    size = more + max(map(len, examples))
    ends = [(size - len(x), 0) if side == "left" else (0, size - len(x)) for x in examples]
    return torch.stack([functional.pad(x, end) for x, end in zip(examples, ends, strict=True)])


def outputs(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """Of words, the targets are functions of them, and word 0 is padding."""
    if isinstance(batch, Tensor):
        return model(batch), torch.where(batch == 0, -100, (batch * 3) % WORDS)
    return model(batch[0]), batch[1]


def by_terms(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    return CrossEntropy(outputs)(model, batch)


def by_example(model: nn.Module, batch: Any) -> Tensor:
    terms, weights = by_terms(model, batch)
    return (terms * weights).flatten(1).sum(1) if terms.ndim > 1 else terms


LOSSES = {"example": by_example, "terms": by_terms, "likelihood": CrossEntropy(outputs)}


def built(name: str) -> Case:
    build, shape, left_out = MODULES[name]
    torch.manual_seed(0)
    model, options = build(), drawn(name)
    collate = None
    if shape is None:
        words = [torch.randint(1, WORDS, (size,)) for size in (3, 5, 2, 4, 1, 5, 6)]
        examples: list[Any] = words
        collate = lambda xs: padded(xs, options["side"], options["more"])  # noqa: E731
        options["layers"] = "*"
    else:
        examples = [
            (torch.randn(shape, dtype=options["dtype"]), torch.tensor(i % CLASSES))
            for i in range(7)
        ]
        model(examples[0][0].float()[None])  # lazy shapes
    model = model.to(options["dtype"])
    for param in model.parameters():  # norms are neither 0 nor 1, biases not 0
        param.data.add_(0.1 * torch.randn_like(param))
    keywords = {"batch_size": options["batch_size"], "layers": options["layers"]}
    return Case(model, examples, LOSSES[options["loss"]], collate, left_out, keywords)


@pytest.mark.parametrize("name", MODULES)
def test_scores_are_those_of_autograd(name: str, tmp_path: Path) -> None:
    check(built(name), tmp_path)
