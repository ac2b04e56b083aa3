"""Checks of what an Attributor is called with: its keywords, folder, model, data and loss."""

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn

from isokron.curvature.losses import CrossEntropy, Likelihood, Loss
from isokron.names import answered
from isokron.tasks import Task

P = ParamSpec("P")
R = TypeVar("R")
Ids = Sequence[str]
Lengths = Sequence[int] | None


def plain_numbers(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: numbers of numpy are numbers of Python, as in the files of a run.

    Unknown keywords are answered, by `isokron.names`.
    """

    def plain(value: Any) -> Any:
        is_number = getattr(value, "shape", None) == () and hasattr(value, "item")
        return value.item() if is_number else value

    @functools.wraps(method)
    def called(*args: P.args, **keywords: P.kwargs) -> R:
        keyed: Any = {name: plain(value) for name, value in keywords.items()}
        return method(args[0], *map(plain, args[1:]), **keyed)  # type: ignore[arg-type]

    return answered(called)


def check_folder(folder: Any, model: Any) -> None:
    """Refuse another order of arguments, in particular a call without the folder."""
    order = "write Attributor('runs/mine', model, train_set, loss=…)"
    if not isinstance(folder, str | os.PathLike):
        got = type(folder).__name__
        raise TypeError(f"folder must be the path of the run's folder, got a {got}; {order}")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got a {type(model).__name__}; {order}")


def with_task(
    task: Task | None, train_set: Any, loss: Any, ids: Ids, lengths: Lengths
) -> tuple[Any, Loss | Likelihood, Ids, Lengths]:
    """Training set, loss, ids and lengths, where a task has what is not given."""
    if task is not None:
        if loss is None:
            loss = task.losses if task.logits is None else CrossEntropy(task.logits)
        if train_set is None:
            train_set = task.train
            ids, lengths = ids or task.ids, task.lengths if lengths is None else lengths
    if train_set is None:
        raise ValueError("train_set must be a data set, got None; give one, or a task")
    return train_set, _checked_loss(loss), ids, lengths


def _checked_loss(loss: Any) -> Loss | Likelihood:
    """Refuse torch's losses, which take outputs and targets and would fail in a pass far away."""
    function = loss.func if isinstance(loss, functools.partial) else loss
    name = getattr(function, "__name__", type(loss).__name__)
    from_torch = (getattr(function, "__module__", None) or "").startswith("torch.")
    if isinstance(loss, nn.Module):
        got = f"the module {name}"
    elif from_torch or isinstance(loss, type):
        got = f"torch's function {name}" if from_torch else f"the class {name}"
    elif loss is None or not (callable(loss) or isinstance(loss, Likelihood)):
        got = repr(loss)
    else:
        return loss
    raise ValueError(
        "loss must be one of isokron.losses or a function (model, batch) → loss per "
        f"example, got {got}; give loss=isokron.losses.CrossEntropy(), SquaredError() or "
        "BinaryCrossEntropy()"
    )


def check_queries(queries: Any, items: Sequence[Any], example: Any) -> None:
    """Refuse queries that are no list of examples like `example`, of the training set."""
    others = [item for item in items if not _is_like(item, example)]
    if not others and not isinstance(queries, Mapping):
        return
    if _is_like(queries, example):
        raise ValueError(
            f"queries must be a list of examples, got one example, {_form(queries)}; put it into "
            "a list: [example]"
        )
    raise ValueError(
        "queries must be a list of examples like those of the training set, each "
        f"{_form(example)}, got {_form(others[0])}"
    )


def _is_like(value: Any, example: Any) -> bool:
    """Whether both are mappings, tuples of like values, or arrays of as many dimensions."""
    if isinstance(value, Mapping) or isinstance(example, Mapping):
        return isinstance(value, Mapping) and isinstance(example, Mapping)
    both = isinstance(value, tuple | list) and isinstance(example, tuple)
    if both and not (_is_flat(value) and _is_flat(example)):
        return len(value) == len(example) and all(map(_is_like, value, example))
    return _dimensions(value) == _dimensions(example)


def _is_flat(value: Sequence[Any]) -> bool:
    """Whether all are numbers, such as the tokens of a text."""
    return all(isinstance(part, int | float) for part in value)


def _dimensions(value: Any) -> int:
    """0 for numbers and objects; −1 for a list of other things than numbers."""
    if isinstance(value, tuple | list):
        return 1 if _is_flat(value) else -1
    return len(getattr(value, "shape", ()))


def _form(value: Any) -> str:
    """A short description of an example."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value))}"
    if isinstance(value, tuple | list) and not _is_flat(value):
        return f"({', '.join(map(_form, value))}{',' * (len(value) == 1)})"
    shape = getattr(value, "shape", None)
    if shape is None:
        return f"a {type(value).__name__}"
    return f"{'a tensor' if isinstance(value, Tensor) else 'an array'} {list(shape)}"
