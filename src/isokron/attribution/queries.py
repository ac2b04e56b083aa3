"""Queries in a person's words: texts, files of texts, examples by number."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from isokron.attribution.asking import Query
from isokron.tasks import Examples, Shown, Task

PARTS = {"eval": "evaluation", "train": "train"}
NUMBERS = re.compile(r"(eval|train):(.*)", re.DOTALL)
FILES = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")


def read_queries(task: Task, given: Sequence[str]) -> list[Query]:
    """`eval:0,3-5` and `train:7` are examples of the task, `@file` the documents in a file, all
    else is a text itself."""
    found: list[Query] = []
    for text in given:
        numbers = NUMBERS.fullmatch(text)
        if numbers:
            found += _examples(task, numbers[1], numbers[2])
        elif text.startswith("@"):
            found += [_text(task, each) for each in _texts(Path(text[1:]))]
        else:
            found.append(_text(task, text))
    if not found:
        raise ValueError("query: give at least one, such as eval:0 or a text")
    return found


def _examples(task: Task, part: str, numbers: str) -> Iterator[Query]:
    examples: Examples = getattr(task, PARTS[part])
    for number in _numbers(part, numbers, len(examples)):
        batch = examples.batch(torch.tensor([number]))
        name = f"{part}:{number}"
        shown = Shown(title=name) if task.show is None else task.show(batch)[0]
        yield Query(batch, shown, name)


def _numbers(part: str, text: str, count: int) -> Iterator[int]:
    for piece in text.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
        if ends is None:
            raise ValueError(
                f"query {part}:{text} must be numbers such as {part}:0 or {part}:0,3-5, got "
                f"{piece!r}"
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < count:
            raise ValueError(
                f"query {part}:{piece.strip()} must lie between 0 and {count - 1}, the last of the "
                f"task's {PARTS[part]} examples"
            )
        yield from range(first, last + 1)


def _text(task: Task, text: str) -> Query:
    if task.read is None:
        raise ValueError(
            f"query {text!r:.40}: task {task.name!r} reads no texts; ask about one of its "
            "examples, such as eval:0"
        )
    batch = task.read(text)
    shown = Shown(tokens=(text,)) if task.show is None else task.show(batch)[0]
    return Query(batch, shown, text)


def _texts(path: Path) -> list[str]:
    from isokron.tasks.documents import read_documents

    if path.suffix.lower() not in FILES:
        raise ValueError(f"query @{path} must be a file that ends in one of {', '.join(FILES)}")
    return [document.text for document in read_documents(path)]
