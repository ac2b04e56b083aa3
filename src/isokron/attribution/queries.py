"""Queries from texts, prompts with completions, files, and examples by number."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isokron.attribution.arguments import check_queries
from isokron.attribution.data import Data
from isokron.tasks import Examples, Shown, Task

PARTS = {"eval": "evaluation", "train": "train"}
NUMBERS = re.compile(r"(eval|train):(.*)", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Query:
    """A batch whose loss is explained, and how it is displayed.

    words: the command-line options of this query.
    """

    batch: Any
    shown: tuple[Shown, ...]
    name: str
    words: tuple[str, ...] = ()


def read_queries(
    task: Task,
    model: nn.Module | None,
    texts: Sequence[str] = (),
    prompts: Sequence[tuple[str, str | None]] = (),
    ids: Sequence[str] = (),
) -> list[Query]:
    """The queries of a command line.

    Args:
        task: reads texts and prompts, and has the examples.
        model: writes the completions that are None; otherwise it may be None.
        texts: `eval:0,3-5` and `train:7` are examples of the task, `@file` reads texts, or prompts
            with completions, from a file; anything else is a text.
        prompts: pairs of a prompt and a completion; only the completion has a loss.
        ids: names of the training examples.
    """
    queries: list[Query] = []
    for text in texts:
        numbers = NUMBERS.fullmatch(text)
        if numbers:
            queries += _examples(task, numbers[1], numbers[2], ids)
        elif text.startswith("@"):
            queries += _file(task, model, text[1:])
        else:
            queries.append(_text(task, text))
    queries += [_prompt(task, model, *pair) for pair in prompts]
    if not queries:
        raise ValueError("no query: give an example such as eval:0, a text or a prompt")
    return queries


def _examples(task: Task, part: str, numbers: str, ids: Sequence[str]) -> Iterator[Query]:
    examples: Examples | None = getattr(task, PARTS[part])
    if examples is None:
        raise ValueError(
            f"query {part}:{numbers}: {task.name} has no evaluation examples; use a text, a "
            "prompt, or a training example such as train:0"
        )
    for piece in numbers.split(","):
        ends = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", piece)
        if ends is None:
            raise ValueError(
                f"query {part}:{numbers} must be numbers such as {part}:0 or {part}:0,3-5, got "
                f"{piece!r}"
            )
        first, last = int(ends[1]), int(ends[2] or ends[1])
        if not first <= last < len(examples):
            raise ValueError(
                f"query {part}:{piece.strip()} must lie between 0 and {len(examples) - 1}, the "
                f"last of the task's {PARTS[part]} examples"
            )
        for number in range(first, last + 1):
            batch, name = examples.batch(torch.tensor([number])), f"{part}:{number}"
            title = ids[number] if part == "train" and ids else name
            shown = Shown(title=title) if task.show is None else task.show(batch)[0]
            yield Query(batch, (shown,), name, ("--query", name))


def _text(task: Task, text: str) -> Query:
    if task.read is None:
        raise ValueError(
            f"query {text!r:.40}: task {task.name!r} reads no texts; use one of its examples, "
            "such as eval:0"
        )
    batch = task.read(text)
    shown = Shown(tokens=(text,)) if task.show is None else task.show(batch)[0]
    return Query(batch, (shown,), text, ("--query", text))


def _prompt(task: Task, model: nn.Module | None, prompt: str, completion: str | None) -> Query:
    if task.prompt is None:
        raise ValueError(
            f"prompt {prompt!r:.40}: task {task.name!r} takes no prompts, only Hugging Face "
            "language models do; give the text as a query"
        )
    batch, shown = task.prompt(model, prompt, completion)
    words: tuple[str, ...] = ("--prompt", prompt)
    if completion is not None:
        words += ("--completion", completion)
    return Query(batch, (shown,), prompt + (completion or ""), words)


def _file(task: Task, model: nn.Module | None, path: str) -> list[Query]:
    # imported only if needed, since it loads readers of several formats
    from isokron.tasks.documents import read_documents, read_prompts

    # any other name would be looked for among the data sets of a hub
    if not Path(path).expanduser().exists():
        raise ValueError(
            f"query @{path}: there is no file or folder {path!r}; paths are relative to "
            f"{Path.cwd()}; a text that begins with @ must be given in a file"
        )
    pairs = read_prompts(path)
    if pairs:
        return [_prompt(task, model, *pair) for pair in pairs]
    return [_text(task, document.text) for document in read_documents(Path(path))]


def as_queries(queries: Any, data: Data, show: Callable[[Any], list[Shown]]) -> list[Query]:
    """Queries from `Query` values, or from examples like those of the training set.

    Every element of a list, a data set or the data set of a DataLoader is one query.
    """
    if isinstance(queries, Query):
        return [queries]
    if isinstance(queries, str) or (isinstance(queries, list) and str in map(type, queries)):
        raise ValueError(
            "queries must be examples like those of the training set, got a text; read texts with "
            "isokron.attribution.read_queries(task, model, texts)"
        )
    if isinstance(queries, Examples):
        batches: list[Any] = [queries.batch(torch.tensor([n])) for n in range(len(queries))]
    else:
        # of a DataLoader, the data set in its order
        source = getattr(queries, "dataset", queries)
        if not hasattr(source, "__getitem__") or not hasattr(source, "__len__"):
            raise ValueError(
                "queries must be a list or data set of examples, each a query, got "
                f"{type(queries).__name__}"
            )
        is_dict = isinstance(source, Mapping)
        items = [source] if is_dict else [source[number] for number in range(len(source))]
        if items and all(isinstance(item, Query) for item in items):
            return items
        check_queries(queries, items, data.example)
        batches = [data.collate([item]) for item in items]
    if not batches:
        raise ValueError("queries must have at least one example, got none")
    return [Query(batch, tuple(show(batch)), f"query {n}") for n, batch in enumerate(batches)]
