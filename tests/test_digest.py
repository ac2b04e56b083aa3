"""Digests: equal for equal values, in every process; other for any change of content."""

import datetime
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from isokron.attribution.data import Data
from isokron.digest import hash_of

Pair = namedtuple("Pair", "x y")


@dataclass
class Example:
    x: Tensor
    y: int


class Slots:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Plain(Slots):
    """With a __dict__."""


def long(middle: float) -> Tensor:
    values = torch.zeros(2000)
    values[1000] = middle
    return values


MAKERS: dict[str, Callable[[float], Any]] = {
    "dataclass": lambda value: Example(long(value), 1),
    "namedtuple": lambda value: Pair(long(value), 1),
    "slots": lambda value: Slots(long(value), 1),
    "object": lambda value: Plain(long(value), 1),
    "nested": lambda value: {"a": [Plain([Slots(1, {"b": long(value)})], 2)]},
    "numpy": lambda value: long(value).numpy(),
    "numpy objects": lambda value: np.array([{"x": value}, None], dtype=object),
    "strings": lambda value: [str(value)],
    "set": lambda value: {str(value), "b", "c", 1},
    "bytes": lambda value: str(value).encode(),
    "date": lambda value: datetime.date(2000, 1, 1 + int(value)),
    "image": lambda value: Image.new("L", (3, 2), int(value)),
    "generator": lambda value: torch.Generator().manual_seed(int(value)),
    "model": lambda value: constant(value),
    "partial": lambda value: partial(constant, value=value),
    "closure": lambda value: lambda: value,
    "default": lambda value: lambda x=value: x,
    "half": lambda value: torch.tensor([value, 1.0], dtype=torch.bfloat16),
}


def constant(value: float) -> nn.Module:
    layer = nn.Linear(2, 2)
    for param in layer.parameters():
        nn.init.constant_(param, value)
    return layer


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_a_digest_depends_on_content_and_on_nothing_else(make: Callable[[float], Any]) -> None:
    assert hash_of(make(1.0)) == hash_of(make(1.0))
    assert hash_of(make(1.0)) != hash_of(make(2.0))


DIFFERENT: list[tuple[Any, Any]] = [
    ([[1], 2], [[1, 2]]),
    (["ab"], ["a", "b"]),
    (1, 1.0),
    (True, 1),
    ("1", 1),
    (np.zeros(2, np.float32), np.zeros(2, np.int32)),
    (Image.new("L", (2, 3)), Image.new("L", (3, 2))),
    (torch.zeros(2), torch.zeros(1, 2)),
    (Slots(1, 2), Plain(1, 2)),
    ({"a": 1}, {"b": 1}),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_other_values_have_other_digests(one: Any, other: Any) -> None:
    assert hash_of(one) != hash_of(other)


SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_digest import MAKERS, hash_of
print(hash_of({name: make(1.0) for name, make in MAKERS.items()}))
"""


def test_digests_are_the_same_in_every_process() -> None:
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)]
    wanted = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    again = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert wanted == again


RATE = 0.1


def trains() -> float:
    return helper() * RATE


def helper() -> float:
    return 1.0


def test_a_function_is_its_code_and_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    before = hash_of(trains)
    monkeypatch.setattr(sys.modules[__name__], "RATE", 0.2)
    assert hash_of(trains) != before
    monkeypatch.undo()
    assert hash_of(trains) == before
    monkeypatch.setattr(sys.modules[__name__], "helper", lambda: 2.0)
    assert hash_of(trains) != before


def test_an_object_that_contains_itself_has_a_digest() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [2]
    other.append(other)
    assert hash_of(loop) != hash_of(other)


def test_what_has_no_content_is_refused_by_name() -> None:
    data = Data([Example(torch.ones(1), 1), Plain(threading.Lock(), 1)], collate=lambda rows: rows)
    with pytest.raises(TypeError, match=r"example '1' of train_set: a _thread.lock has no digest"):
        data.digest()


def test_data_of_objects_are_known_by_all_their_numbers() -> None:
    one = [Example(torch.randn(2000), number % 3) for number in range(8)]
    two = [Example(example.x.clone(), example.y) for example in one]
    assert Data(one, collate=list).digest() == Data(two, collate=list).digest()
    for example in two:
        example.x[10:1900] = torch.randn(1890)
    assert Data(one, collate=list).digest() != Data(two, collate=list).digest()
