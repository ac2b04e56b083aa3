"""Random settings and random events: the numbers of a twin without the event, or a named error.

Every draw makes an optimizer with settings that a seed chooses, and a twin with the same. Both take
steps with the same gradients. Between and around the steps of the first something happens that a
training script does; the twin does without it, or does it in the plainest way.
"""

import contextlib
import copy
import io
import pickle
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from cases import CASES, Case, Net, loss_of, natural, net

DRAWS, STEPS = 100, 8
SETTINGS: dict[str, list[Any]] = {
    "weight_decay": [0.0, 0.1],
    "decay": ["decoupled", "corrected", "l2", "momentum"],
    "maximize": [True, False],
    "graft": [None, "sgd", "adagrad", "rmsprop", "adam"],
    "every": [1, 2, 3, 5],
    "start": [None, 1, 2],
    "warmup": [0, 2],
    "refresh": ["together", "staggered", 1, 2],
    "max_dim": [None, 8, 16],
    "order": [2, None],
    "route": ["auto", "method", "spectral", "adamw"],
    "vectors": [True, False],
    "average": [None, "schedule_free", "primal"],
    "momentum": [0.0, 0.9],
    "nesterov": [True, False],
    "betas": [(0.9, 0.99), (0.0, 0.95), (0.9, 1.0)],
    "use_bias_correction": [True, False],
    "polar": [True, False],
    "amsgrad": [True, False],
    "flat": [True, False],
    "moments": [None, "8bit"],
    "min_8bit_size": [0, 4096],
    "rounding": ["nearest", "stochastic"],
    "state_dtype": [None, torch.float32],
    "workspace": [None, 1000],
    "lr_scale": [1.0, 0.5],
    "tolerated": [0, 3],
}
WRONG: dict[str, Any] = {
    "lr": -1.0,
    "weight_decay": float("nan"),
    "every": 0,
    "betas": (0.9, 1.5),
    "eps": "small",
    "decay": "none",
    "maximize": 2,
    "refresh": -1,
}


@dataclass
class Run:
    """A model, its optimizer, and how far equal numbers may be apart (None: by no bit)."""

    case: Case | None
    settings: dict[str, Any]
    seed: int
    dtype: torch.dtype
    scheduler: Any = None
    saved: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model: Net = net(dtype=self.dtype)
        self.optimizer = self.new_optimizer()
        for group in self.optimizer.param_groups:
            group["nonfinite"] = "raise"

    def new_optimizer(self) -> Any:
        if self.case is None:
            return natural(self.model)
        return self.case.make(self.model.named_parameters(), **self.settings)

    @property
    def params(self) -> list[Tensor]:
        return list(self.model.parameters())

    def gradients_(self, step: int) -> None:
        """The gradients of a step, a few of which are missing."""
        if self.case is None:
            self.optimizer.zero_grad()
            loss_of(self.model, step, self.params[0].dtype).backward()
            return
        generator = torch.Generator().manual_seed(1000 * self.seed + step)
        for i, param in enumerate(self.params):
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = grad if (step + i) % 7 else None

    def step(self, step: int) -> None:
        self.gradients_(step)
        self.optimizer.step()


# Events. Each is called with the run, its twin and the number of the step, and makes the step in
# both: in the twin without the event.

Event = Callable[[Run, Run, int], None]


@contextlib.contextmanager
def defaults() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def medium() -> Iterator[None]:
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


def within(context: Callable[[], Any]) -> Event:
    def event(run: Run, twin: Run, step: int) -> None:
        run.gradients_(step)
        with context():
            run.optimizer.step()
        twin.step(step)

    return event


def plain(run: Run, twin: Run, step: int) -> None:
    run.step(step)
    twin.step(step)


def closure(run: Run, twin: Run, step: int) -> None:
    run.optimizer.step(lambda: run.gradients_(step))
    twin.step(step)


def look(run: Run, twin: Run, step: int) -> None:
    """Everything that reads an optimizer."""
    if run.case is not None:
        run.optimizer.eval()
        run.optimizer.train()
    run.optimizer.statistics()
    repr(run.optimizer)
    run.optimizer.state_dict()
    plain(run, twin, step)


def keep_gradients(run: Run, twin: Run, step: int) -> None:
    """Gradients that stay from step to step and are written in place."""
    run.optimizer.zero_grad(set_to_none=False)
    twin.step(step)
    if run.case is None:
        loss_of(run.model, step, run.params[0].dtype).backward()
    else:
        for param, other in zip(run.params, twin.params, strict=True):
            if param.grad is None or other.grad is None:
                param.grad = None if other.grad is None else other.grad.clone()
            else:
                param.grad.copy_(other.grad)
    run.optimizer.step()


def deep_copy(run: Run, twin: Run, step: int) -> None:
    run.model, run.optimizer = copy.deepcopy((run.model, run.optimizer))
    plain(run, twin, step)


def unpickle(run: Run, twin: Run, step: int) -> None:
    run.model, run.optimizer = pickle.loads(pickle.dumps((run.model, run.optimizer)))
    plain(run, twin, step)


def reload(run: Run, twin: Run, step: int) -> None:
    """A checkpoint, through a file into a new optimizer."""
    buffer = io.BytesIO()
    torch.save(run.optimizer.state_dict(), buffer)
    buffer.seek(0)
    run.optimizer = run.new_optimizer()
    run.optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    plain(run, twin, step)


def go_back(run: Run, twin: Run, step: int) -> None:
    """Steps that are taken back by loading an earlier state dict of the same optimizer."""
    saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    for other in (100, 101, 102):
        run.step(other)
    run.model.load_state_dict(saved[0])
    run.optimizer.load_state_dict(saved[1])
    plain(run, twin, step)


def freeze(run: Run, twin: Run, step: int) -> None:
    """A frozen parameter is one without a gradient, whose layer NaturalGradient does not see."""
    for one in (run, twin):
        one.gradients_(step)
        one.model.square.weight.grad = None
        one.model.square.weight.requires_grad_(one is twin and run.case is not None)
        one.optimizer.step()
        one.model.square.weight.requires_grad_(True)


def schedule(run: Run, twin: Run, step: int) -> None:
    """A scheduler sets what can be set by hand."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda _: 0.5)
    for mine, theirs in zip(run.optimizer.param_groups, twin.optimizer.param_groups, strict=True):
        theirs["lr"], theirs["initial_lr"] = mine["lr"], mine["initial_lr"]
    plain(run, twin, step)
    for mine, theirs in zip(run.optimizer.param_groups, twin.optimizer.param_groups, strict=True):
        mine["lr"] = theirs["lr"] = scheduler.base_lrs[0]
        mine.pop("initial_lr")
        theirs.pop("initial_lr")


def plain_numbers(run: Run, twin: Run, step: int) -> None:
    """Settings as NumPy's numbers and lists are those of Python."""
    for group in run.optimizer.param_groups:
        for key, value in list(group.items()):
            if type(value) is float:
                group[key] = numpy.float64(value)
            elif type(value) is tuple:
                group[key] = list(value)
    plain(run, twin, step)


def replaced_state(run: Run, twin: Run, step: int) -> None:
    """Entries of the state that are replaced by equal ones."""
    if run.case is not None:
        run.optimizer.state_dict()  # waits for refreshes
        for param, entry in list(run.optimizer.state.items()):
            run.optimizer.state[param] = {key: value.clone() for key, value in entry.items()}
    plain(run, twin, step)


def converted(run: Run, twin: Run, step: int, dtype: torch.dtype) -> None:
    """The twin is made for a model of another dtype and loads the state."""
    saved = copy.deepcopy(twin.optimizer.state_dict())
    run.model.to(dtype)
    twin.model.to(dtype)
    twin.optimizer = twin.new_optimizer()
    twin.optimizer.load_state_dict(saved)
    plain(run, twin, step)


def refused(run: Run, names: tuple[str, ...]) -> None:
    """A step that raises an error which names the optimizer and what is wrong."""
    with pytest.raises((ValueError, FloatingPointError, RuntimeError)) as caught:
        run.optimizer.step()
    assert type(run.optimizer).__name__ in str(caught.value)
    assert any(name in str(caught.value) for name in names), str(caught.value)


def infinite_gradient(run: Run, twin: Run, step: int) -> None:
    run.gradients_(step)
    run.model.out.weight.grad = torch.full_like(run.model.out.weight, torch.inf)
    refused(run, ("out.weight",))
    plain(run, twin, step)


def sparse_gradient(run: Run, twin: Run, step: int) -> None:
    run.gradients_(step)
    run.model.out.weight.grad = torch.ones_like(run.model.out.weight).to_sparse()
    refused(run, ("out.weight",))
    run.model.out.weight.grad = None
    plain(run, twin, step)


def other_shape(run: Run, twin: Run, step: int) -> None:
    if run.optimizer.state.get(run.model.out.weight):
        weight = run.model.out.weight.data
        run.optimizer.zero_grad()
        run.model.out.weight.data = weight.T.contiguous()
        for param in run.params:
            param.grad = torch.ones_like(param)
        refused(run, ("out.weight",))
        run.optimizer.zero_grad()
        run.model.out.weight.data = weight
    plain(run, twin, step)


def wrong_setting(run: Run, twin: Run, step: int) -> None:
    group = run.optimizer.param_groups[0]
    choice = random.Random(run.seed + step)
    key = choice.choice([key for key in WRONG if key in group])
    right, group[key] = group[key], WRONG[key]
    run.gradients_(step)
    refused(run, (key,))
    group[key] = right
    plain(run, twin, step)


def forget_one(run: Run, twin: Run, step: int) -> None:
    """The state of one parameter is deleted: the others step as they would, it starts afresh."""
    weight = run.model.hidden.weight
    if not run.optimizer.state.get(weight) or run.case is None:
        plain(run, twin, step)
        return
    del run.optimizer.state[weight]
    run.gradients_(step)
    has_gradient = weight.grad is not None
    run.optimizer.step()
    twin.step(step)
    assert float(run.optimizer.state[weight]["step"]) == has_gradient
    twin.model.hidden.weight.data.copy_(weight.detach())
    twin.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))


EVENTS: dict[str, Event] = {
    "autocast": within(lambda: torch.autocast("cpu", torch.bfloat16)),
    "medium": within(medium),
    "defaults": within(defaults),
    "closure": closure,
    "look": look,
    "keep_gradients": keep_gradients,
    "deep_copy": deep_copy,
    "unpickle": unpickle,
    "reload": reload,
    "go_back": go_back,
    "freeze": freeze,
    "schedule": schedule,
    "plain_numbers": plain_numbers,
    "replaced_state": replaced_state,
    "to_bfloat16": partial(converted, dtype=torch.bfloat16),
    "to_double": partial(converted, dtype=torch.float64),
    "infinite_gradient": infinite_gradient,
    "sparse_gradient": sparse_gradient,
    "other_shape": other_shape,
    "wrong_setting": wrong_setting,
    "forget_one": forget_one,
}


def compared(run: Run, twin: Run) -> None:
    for (name, mine), theirs in zip(run.model.named_parameters(), twin.params, strict=True):
        assert mine.dtype is theirs.dtype
        assert torch.equal(mine, theirs), f"{name}: {float((mine - theirs).abs().max()):.2e}"
    mine, theirs = run.optimizer.state_dict()["state"], twin.optimizer.state_dict()["state"]
    late = theirs.keys() - mine.keys()  # was frozen, and has not had a gradient since
    assert mine.keys() <= theirs.keys()
    assert not any(float(theirs[number]["step"]) for number in late)
    for number, entry in mine.items():
        assert entry.keys() == theirs[number].keys()
        for key, value in entry.items():
            assert torch.equal(value, theirs[number][key]), (number, key)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_an_event_changes_no_number_or_is_refused(seed: int) -> None:
    choice = random.Random(seed)
    case = choice.choice([*CASES, None])
    names = choice.sample(list(SETTINGS), 4) if case else []
    if case and "whitening" in case.name and "vectors" in names:
        names.remove("vectors")  # it is of matrices
    settings = {name: choice.choice(SETTINGS[name]) for name in names}
    dtype = choice.choice([torch.float32, torch.float32, torch.float64, torch.bfloat16])
    events = dict(zip(choice.sample(range(STEPS), 4), choice.sample(list(EVENTS), 4), strict=True))
    print(case and case.name, settings, dtype, events)  # shown where the test fails
    problem = ""
    try:
        run, twin = (Run(case, settings, seed, dtype) for _ in range(2))
    except ValueError as error:  # settings that contradict each other
        problem = str(error)
    if problem:
        assert any(name in problem for name in names), problem
        return
    for step in range(STEPS):
        EVENTS[events[step]](run, twin, step) if step in events else plain(run, twin, step)
        compared(run, twin)
