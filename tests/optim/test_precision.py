"""Neither autocast nor the precision that a script gives its model's products reaches a step."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import isokron
from cases import MAKERS, Whitening, equal, loss_of, natural, net
from isokron.linalg import precision
from isokron.linalg.precision import full_precision, is_switched
from isokron.optim.functional_step import FunctionalStep

Around = Callable[[], AbstractContextManager[Any]]
OPERATIONS = [("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul")]


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


def precisions() -> list[str]:
    return [precision._get(*operation) for operation in OPERATIONS]


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """The precision of products is the process's: no other test may see what is set here."""
    # torch's own test modules, which another file imports, forbid to set it
    with torch.backends.__allow_nonbracketed_mutation():
        yield
    torch.set_float32_matmul_precision("highest")
    for operation in OPERATIONS:
        precision._set(*operation, "none")


def stepped(make: Callable[[nn.Module], Any], around: Around, steps: int = 9) -> nn.Module:
    """A model after steps within a context; its gradients are computed outside of it."""
    model = net()
    optimizer = make(model)
    for seed in range(steps):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        with around():
            optimizer.step()
    return model


every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@every_maker
def test_a_step_inside_autocast_is_the_step(make: Callable[[nn.Module], Any]) -> None:
    assert equal(stepped(make, autocast), stepped(make, nullcontext))


@pytest.mark.parametrize("name", ["AdamW", "Muon", "SOAP", "Shampoo"])
def test_a_functional_step_inside_autocast_is_the_step(name: str) -> None:
    def functional(around: Around) -> list[Tensor]:
        model = net()
        params = dict(model.named_parameters())
        step = FunctionalStep(getattr(isokron, name)(model.parameters(), lr=1e-2), params)
        weights = {key: value.detach() for key, value in params.items()}
        state = step.initial_state(weights)
        for count in range(1, 5):
            grads = {key: torch.cos(value + count) for key, value in weights.items()}
            with around():
                weights, state = step(weights, state, grads, count)
        return list(weights.values())

    assert all(map(torch.equal, functional(autocast), functional(nullcontext)))


def test_the_closure_of_a_step_has_the_autocast_of_its_caller() -> None:
    model = net()
    optimizer = isokron.SOAP(model.parameters())
    dtypes = []

    def closure() -> Tensor:
        dtypes.append(model.square(torch.ones(2, 12)).dtype)
        return loss_of(model, 0)

    with autocast():
        optimizer.step(closure)
    assert dtypes == [torch.bfloat16]


class Block(nn.Module):
    """One block of a small GPT between an embedding and a head."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(96, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 96, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return self.head(x + self.down(nn.functional.gelu(self.up(self.norms[1](x)))))


@pytest.mark.parametrize("name", ["SOAP", "Quad", "NaturalGradient"])
def test_a_transformer_under_autocast_with_its_steps_inside_of_it_or_not(name: str) -> None:
    def trained(inside: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Block()
        with_model = name == "NaturalGradient"
        params: Any = model if with_model else isokron.param_groups(model)
        optimizer = getattr(isokron, name)(params, lr=1e-3)
        for _ in range(20):
            tokens = torch.randint(0, 96, (4, 17))
            with autocast():
                logits = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            with autocast() if inside else nullcontext():
                optimizer.step()
            optimizer.zero_grad()
        return model

    assert equal(trained(True), trained(False))


def by_name(name: str) -> None:
    torch.set_float32_matmul_precision(name)


def of_cuda() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def of_onednn() -> None:
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"


def of_all() -> None:
    torch.backends.fp32_precision = "tf32"


of_each = pytest.mark.skipif(
    not precision.PER_BACKEND, reason="before torch 2.9 one precision is all backends'"
)
REDUCED = [
    pytest.param(lambda: by_name("high"), id="high"),
    pytest.param(lambda: by_name("medium"), id="medium"),
    pytest.param(of_cuda, id="cuda"),
    pytest.param(of_onednn, id="onednn", marks=of_each),
    pytest.param(of_all, id="all", marks=of_each),
]


class Watched(Whitening):
    """Notes the precision of products in every hook of a method."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.noted: dict[str, set[str]] = {}

    def note(self, hook: str) -> None:
        self.noted.setdefault(hook, set()).update(precisions()[1:])

    def observe(self, *args: Any) -> None:
        self.note("observe")
        super().observe(*args)

    def refresh(self, *args: Any) -> dict[str, Tensor]:
        self.note("refresh")
        return super().refresh(*args)

    def direction(self, *args: Any) -> Tensor:
        self.note("direction")
        return super().direction(*args)


@pytest.mark.parametrize("reduce", REDUCED)
@pytest.mark.parametrize("refresh", ["together", 2])
def test_products_of_a_step_are_in_float32(reduce: Callable[[], None], refresh: str | int) -> None:
    reduce()
    before = precisions()
    model = net()
    optimizer = Watched(model.parameters(), every=4, refresh=refresh)
    for seed in range(9):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()
        assert precisions() == before
        assert not any(
            job.running() for b in optimizer._layouts[0].batches for job in b.jobs.values()
        )
    assert optimizer.noted.keys() == {"observe", "refresh", "direction"}
    assert all(values <= {"ieee", "none"} for values in optimizer.noted.values())
    if reduce is of_all:
        torch.backends.fp32_precision = "ieee"  # a setting of the whole process still reaches all
        assert precisions() == ["ieee"] * 3


@every_maker
def test_a_step_is_the_same_whatever_the_precision_of_products(
    make: Callable[[nn.Module], Any],
) -> None:
    def medium() -> AbstractContextManager[Any]:
        by_name("medium")
        return nullcontext()

    def highest() -> AbstractContextManager[Any]:
        by_name("highest")
        return nullcontext()

    assert equal(stepped(make, medium, 5), stepped(make, highest, 5))


def test_the_statistics_of_a_natural_gradient_are_in_float32() -> None:
    noted = set()

    class Noting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
            if function in (torch.baddbmm, Tensor.baddbmm_, Tensor.addmm_, Tensor.matmul):
                noted.update(precisions()[1:])
            return function(*args, **(kwargs or {}))

    by_name("high")
    model = net()
    optimizer = natural(model)
    loss = loss_of(model, 0)
    with Noting():
        loss.backward()
        optimizer.step()
    assert noted == {"ieee"}
    assert precisions()[1:] == ["tf32", "tf32"]


def test_threads_that_leave_in_any_order_restore_the_precision_once() -> None:
    by_name("medium")
    first, second = full_precision(), full_precision()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "highest"
    assert is_switched()
    second.__exit__(None, None, None)
    assert torch.get_float32_matmul_precision() == "medium"
    assert not is_switched()


def test_without_autocast_and_in_float32_there_is_nothing_to_enter() -> None:
    assert isinstance(full_precision(), nullcontext)
