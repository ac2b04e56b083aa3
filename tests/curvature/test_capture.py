"""What capturing leaves behind, which is nothing, and what models may do meanwhile."""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from curvature_naive import CLASSES, CROSS_ENTROPY, EXACT, Tailed, batched, labels
from isokron.curvature import CrossEntropy, Curvature, Event, capture, fit

METHODS = ("kfac", "ekfac", "tkfac", "shampoo")


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def data(count: int = 4) -> list[Any]:
    return batched(torch.randn(count, 3).double(), labels(count))


def fitted(model: nn.Module, given: Any, method: str = "ekfac", **options: Any) -> Curvature:
    return fit(model, given, CROSS_ENTROPY, method, dtype=torch.float64, **options)


def assert_same(found: Curvature, want: Curvature) -> None:
    assert list(found) == list(want)
    for layer in want:
        torch.testing.assert_close(found[layer].to_dense(), want[layer].to_dense(), **EXACT)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """The model and torch are as before, however this ends."""

    def state() -> list[Any]:
        hooks = [
            [dict(value) for key, value in vars(m).items() if "hooks" in key and value is not None]
            for m in model.modules()
        ]
        attributes = [set(vars(m)) for m in model.modules()]
        learns = [p.requires_grad for p in model.parameters()]
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        fast = torch.backends.mha.get_fastpath_enabled()
        return [hooks, attributes, learns, fast, functional.linear, torch.is_grad_enabled(), grads]

    before = state()
    before_backward = [p._backward_hooks for p in model.parameters()]
    try:
        yield
    finally:
        *same, grads = state()
        assert same == before[:-1]
        assert [p._backward_hooks for p in model.parameters()] == before_backward
        for now, then in zip(grads, before[-1], strict=True):
            assert (now is None) == (then is None)
            assert now is None or torch.equal(now, then)


class Block(nn.Module):
    """All that is patched or hooked: attention, linear layers, a norm, a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.conv = nn.Conv1d(4, 4, 3, padding=1)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(self.embed(x).mT).mT
        return self.head(self.encoder(x).mean(1))


def tokens(count: int = 3) -> list[Any]:
    return batched(torch.randint(5, (count, 4)), labels(count))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("fisher", ["empirical", "sampled", "exact"])
def test_fit_leaves_a_model_as_it_was(fast: bool, fisher: str) -> None:
    model = Block().double().eval()
    model.head.bias.requires_grad_(False)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    torch.backends.mha.set_fastpath_enabled(fast)
    try:
        with untouched(model):
            fitted(model, tokens(), fisher=fisher)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("how", ["fit", "capture"])
def test_an_exception_leaves_a_model_as_it_was(where: str, how: str) -> None:
    model = Block().double().eval()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        scores = model(batch[0])
        if where == "forward":
            raise ArithmeticError("in forward")
        return functional.cross_entropy(Broken.apply(scores), batch[1], reduction="none")

    def observed() -> None:
        if how == "fit":
            fit(model, tokens(), loss)
        else:
            with capture(model):
                loss(model, tokens()[0]).sum().backward()

    with untouched(model), pytest.raises(ArithmeticError, match=where):
        observed()


def test_capture_shows_inputs_and_gradients_of_outputs() -> None:
    model = network()
    (x, y) = data(4)[0]
    with untouched(model), capture(model) as events:
        hidden = model[0](x)
        scores = model[2](torch.tanh(hidden))
        hidden.retain_grad()
        scores.retain_grad()
        loss = functional.cross_entropy(scores, y, reduction="sum")
        torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        grads = torch.autograd.grad(loss, [scores, hidden])
    assert [event.layer.name for event in events][:2] == ["2", "0"]
    last, first = events[:2]
    assert torch.equal(first.inputs[0, :, 0], x)
    assert torch.equal(last.grads[0, :, 0], grads[0])
    assert torch.equal(first.grads[0, :, 0], grads[1])
    assert not first.grads.requires_grad
    assert not first.inputs.requires_grad


def test_a_sink_takes_events_and_none_are_kept() -> None:
    model, taken = network(), list[Event]()
    with capture(model, "0", sink=taken.append) as events:
        CROSS_ENTROPY(model, data()[0])[0].sum().backward()
    assert not events
    assert [event.layer.name for event in taken] == ["0"]


def test_nothing_is_seen_after_the_context_has_ended() -> None:
    model = network()
    with capture(model) as events:
        loss = CROSS_ENTROPY(model, data()[0])[0].sum()
    loss.backward()
    CROSS_ENTROPY(model, data()[0])[0].sum().backward()
    assert not events


def test_captures_nest() -> None:
    model = Block().double()
    plain = functional.linear
    with untouched(model), capture(model) as outer:
        with capture(model, "encoder.*") as inner:
            loss = CROSS_ENTROPY(model, tokens()[0])[0].sum()
            torch.autograd.grad(loss, [*model.parameters()])
        assert functional.linear is plain  # replaced only while attention runs
        seen = len(outer)
        loss = CROSS_ENTROPY(model, tokens()[0])[0].sum()
        torch.autograd.grad(loss, [*model.parameters()])
    assert len(outer) == 2 * seen
    assert seen == len({e.layer.name for e in outer})
    assert {e.layer.name for e in inner} == {
        e.layer.name for e in outer if e.layer.name.startswith("encoder.")
    }
    for event in inner:
        same = next(e for e in outer if e.layer.name == event.layer.name)
        assert torch.equal(event.grads, same.grads)
        assert torch.equal(event.inputs, same.inputs)


def test_a_pass_without_gradients_is_not_seen() -> None:
    model = Block().double()
    with capture(model) as events, torch.no_grad():
        model(tokens()[0][0])
    assert not events


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_uses_of_one_module_add_up_like_positions(method: str, sharing: str) -> None:
    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            return Tailed.tail(
                Tailed(self), torch.stack([self.layer(x[:, s]) for s in range(3)], 1)
            )

    model = Thrice()
    x = torch.randn(4, 3, 3).double()
    given = batched(x, labels(4))
    want = fitted(Tailed(model.layer), given, method, sharing=sharing)
    assert_same(fitted(model, given, method, sharing=sharing), want)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "inplace",
    [nn.ReLU(inplace=True), nn.SiLU(inplace=True), nn.Dropout(0.0, inplace=True)],
    ids=lambda m: type(m).__name__,
)
def test_an_activation_in_place_changes_nothing(method: str, inplace: nn.Module) -> None:
    model, given = network(), data()
    model[1] = type(inplace)()
    model.eval()
    want = fitted(model, given, method)
    model[1] = inplace
    assert_same(fitted(model, given, method), want)


def test_attention_and_convolutions_before_something_in_place() -> None:
    class Changes(nn.Module):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.conv = nn.Conv1d(3, 4, 1)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
            self.inplace = inplace

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            x = x.mul_(2) if self.inplace else x * 2
            x = self.attention(x.mT, x.mT, x.mT)[0]
            x = x.add_(1) if self.inplace else x + 1
            return Tailed.tail(Tailed(self), x)

    given = batched(torch.randn(3, 3, 2).double(), labels(3))
    assert_same(fitted(Changes(True).double(), given), fitted(Changes(False).double(), given))


def test_an_input_changed_in_place_after_use_is_an_error() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            x += self.layer(x)
            return x

    model = Residual()
    with (
        untouched(model),
        pytest.raises(RuntimeError, match="input of 'layer' was changed in place"),
    ):
        fitted(model, data())


class Checkpointed(nn.Module):
    """`layer` is used twice, each time in a checkpoint of its own."""

    def __init__(self, use: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.layer = nn.Linear(3, 3), nn.Linear(3, 3)
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        self.use = use

    def block(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        return x + self.attention(x, x, x, need_weights=False)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.use(self.block, self.use(self.block, x)).sum(1)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(method: str, fisher: str, reentrant: bool) -> None:
    def again(block: Callable[..., Tensor], x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=reentrant)

    given = batched(torch.randn(3, 2, 3).double(), labels(3))
    plain, saving = Checkpointed(lambda block, x: block(x)).double(), Checkpointed(again).double()
    with untouched(saving):
        found = fitted(saving, given, method, fisher=fisher)
    assert_same(found, fitted(plain, given, method, fisher=fisher))


@pytest.mark.parametrize("around", ["forward", "fit"])
def test_autocast_changes_the_model_and_not_the_statistics(around: str) -> None:
    model, given = Block().eval(), tokens()

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "forward"):
            return model(batch[0]), batch[1]

    want = fit(model, given, CROSS_ENTROPY, "ekfac")
    with torch.autocast("cpu", torch.bfloat16, enabled=around == "fit"):
        found = fit(model, given, CrossEntropy(forward), "ekfac")
    for layer in want:
        assert all(v.dtype == torch.float32 for v in found.layers[layer].statistics.values()), layer
        right = want.trace()[layer]
        assert found.trace()[layer] == pytest.approx(right, rel=0.1), layer


@pytest.mark.parametrize("method", METHODS)
def test_products_of_statistics_are_not_under_autocast(method: str) -> None:
    model, x = nn.Linear(16, CLASSES, bias=False), torch.randn(32, 16).bfloat16().float()
    known: list[Curvature] = []
    for outside in (True, False):

        def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
            with torch.autocast("cpu", torch.bfloat16):
                return model(batch[0]), batch[1]

        with torch.autocast("cpu", torch.bfloat16, enabled=outside):
            known.append(fit(model, [(x, labels(32))], CrossEntropy(forward), method))
    torch.testing.assert_close(known[0][""].to_dense(), known[1][""].to_dense())


@pytest.mark.parametrize("frozen", [["0"], ["2"], ["0", "2"]])
def test_frozen_parameters_have_curvature_all_the_same(frozen: list[str]) -> None:
    model, given = network(), data()
    want = fitted(model, given)
    for name in frozen:
        model.get_submodule(name).requires_grad_(False)
    with untouched(model):
        assert_same(fitted(model, given, layers="*"), want)
        with torch.no_grad():  # of the caller
            assert_same(fitted(model, given, layers="*"), want)


def test_train_mode_without_dropout_is_eval_mode() -> None:
    model, given = Block().double(), tokens()
    want = fitted(model.eval(), given)
    assert_same(fitted(model.train(), given), want)
    assert model.training


def test_a_model_in_half_precision_has_statistics_in_full() -> None:
    model, x = network().bfloat16(), torch.randn(4, 3).bfloat16()
    found = fit(model, [(x, labels(4))], CROSS_ENTROPY, "ekfac", fisher="sampled")
    for layer in found.values():
        assert layer.to_dense().dtype == torch.float32
    tangent = dict(model.named_parameters())
    assert all(value.dtype == torch.bfloat16 for value in found.matvec(tangent).values())


@pytest.mark.parametrize("fisher", ["empirical", "exact"])
def test_the_graph_of_a_batch_is_gone_before_the_next(fisher: str) -> None:
    class Mark:
        def __call__(self, grad: Tensor) -> None: ...

    class Marking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            assert all(mark() is None for mark in marks)
            y, mark = torch.tanh(self.layer(x)), Mark()
            y.register_hook(mark)
            marks.append(weakref.ref(mark))
            return y

    marks: list[weakref.ref[Mark]] = []
    fit(Marking(), batched(torch.randn(6, 3), labels(6)), CrossEntropy(), fisher=fisher)
    assert len(marks) > 1


def test_inputs_by_keyword_are_seen() -> None:
    class Keyword(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    layer, given = nn.Linear(3, CLASSES).double(), data()
    found, want = fitted(Keyword(layer), given), fitted(layer, given)
    torch.testing.assert_close(found["layer"].to_dense(), want[""].to_dense(), **EXACT)


def test_threads_observe_models_of_their_own_and_leave_torch_as_it_was() -> None:
    """One thread enters attention while the other is in it, and leaves it last."""
    plain, inside, both, done = functional.linear, *(threading.Event() for _ in range(3))
    x, found = torch.randn(2, 3, 4), {}

    def observe(name: str, *steps: Callable[[], Any]) -> None:
        model = nn.MultiheadAttention(4, 2, batch_first=True)
        with capture(model) as events:
            model.register_forward_pre_hook(lambda *_: [step() for step in steps] and None)
            model(x, x, x)[0].sum().backward()
        found[name] = [event.layer.module is model for event in events]

    def first() -> None:
        observe("first", inside.set, both.wait)
        done.set()

    def second() -> None:
        inside.wait()
        observe("second", both.set, done.wait)

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"first": [True] * 4, "second": [True] * 4}
    assert functional.linear is plain
    assert torch.backends.mha.get_fastpath_enabled()
