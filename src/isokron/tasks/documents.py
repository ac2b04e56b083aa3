"""Documents and prompts from files, folders of texts and data sets by name."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isokron.tasks.catalog import import_optional

Row = tuple[str, dict[str, Any]]  # its place, for errors, and its values by column


@dataclass(frozen=True)
class Document:
    """A text to learn from. label: its class as in the data, None if it has none."""

    id: str
    text: str
    label: str | None = None


def read_documents(
    source: str | Path, *, text: str | None = None, label: str | None = None, id: str | None = None
) -> list[Document]:
    """The documents of a file, a folder or a data set.

    .jsonl and .json have an object a line (or a list of them), .csv and .tsv a header, .parquet any
    columns. In a .txt file documents are paragraphs, with blank lines between; in a folder every
    .txt file is one. Any other source is a name for datasets.load_dataset: `name`, `name:split` or
    `name:configuration:split`, with split train by default.

    Args:
        text: column of texts, which may be empty; by default `text`, or the only other column of
            strings.
        label: column of classes, none by default.
        id: column of ids; by default `id` if there is one, else rows are numbered from 1.
    """
    documents, places = [], dict[str, str]()
    for number, (place, row) in enumerate(_rows(source), 1):
        if number == 1:
            id = id or ("id" if "id" in row else None)
            text = text or _text_column(place, row, {label, id})
        name = str(number) if id is None else _cell(place, row, id, "id")
        if places.setdefault(name, place) != place:
            raise ValueError(
                f"{place}: the id {name!r} is taken by {places[name]}; ids must differ: choose "
                "another column, or correct the data"
            )
        category = None if label is None else _cell(place, row, label, "label")
        documents.append(Document(name, _cell(place, row, text or "", "text", True), category))
    if not documents:
        raise ValueError(f"{source}: contains no document; give at least one")
    return documents


def read_prompts(source: str | Path) -> list[tuple[str, str | None]] | None:
    """The columns `prompt` and `completion`, None where the model is to write the completion.

    A source without a column `prompt` gives None: it contains documents.
    """
    prompts: list[tuple[str, str | None]] = []
    for place, row in _rows(source):
        if "prompt" not in row and not prompts:
            return None
        completion = _cell(place, {"completion": "", **row}, "completion", "text", True)
        prompts.append((_cell(place, row, "prompt", "text"), completion or None))
    return prompts or None


def _rows(source: str | Path) -> Iterator[Row]:
    if not str(source):
        raise ValueError("data must be a file, a folder or a data set's name, got nothing")
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir():
        return _folder(path)
    if path.exists():
        if suffix in READERS:
            return READERS[suffix](path)
        choices = f"give one of {', '.join(READERS)} or a folder of .txt files"
        raise ValueError(f"{source}: cannot read a file that ends in {suffix!r}; {choices}")
    if isinstance(source, Path) or suffix in READERS or source[0] in "./~":
        raise ValueError(f"no file or folder {str(source)!r}; paths are relative to {Path.cwd()}")
    return _data_set(source)


def _text_column(place: str, row: dict[str, Any], others: set[str | None]) -> str:
    strings = [name for name, value in row.items() if isinstance(value, str) and name not in others]
    strings = ["text"] if "text" in row else strings
    if len(strings) == 1:
        return strings[0]
    columns = ", ".join(row) or "none"
    raise ValueError(f"{place}: which column contains the text? {columns}; name it: text=...")


def _cell(place: str, row: dict[str, Any], column: str, what: str, empty: bool = False) -> str:
    if column not in row:
        columns = ", ".join(row) or "none"
        raise ValueError(f"{place}: no column {column!r} for the {what}; there are {columns}")
    value = "" if row[column] is None else row[column]
    if what == "text" and not isinstance(value, str):
        raise ValueError(
            f"{place}: column {column!r} must contain text, got {type(value).__name__} "
            f"{value!s:.40}; name the column of texts: text=..."
        )
    if not empty and not str(value).strip():
        raise ValueError(f"{place}: column {column!r} is empty; every row needs its {what}")
    return str(value)


def _decoded(path: Path) -> str:
    """A file's text, which must be UTF-8, without a byte order mark."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file, "
            "for example with: iconv -f latin1 -t utf-8"
        ) from None


def _paragraphs(path: Path) -> Iterator[Row]:
    content = _decoded(path).replace("\r\n", "\n")
    lines = r"[^\n]*\S[^\n]*"  # that are not blank
    for number, match in enumerate(re.finditer(rf"{lines}(\n{lines})*", content), 1):
        line = content.count("\n", 0, match.start()) + 1
        yield f"{path}, line {line}", {"id": str(number), "text": match[0]}


def _folder(path: Path) -> Iterator[Row]:
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise ValueError(f"{path}: the folder has no .txt file; every such file is a document")
    for file in files:
        name = file.relative_to(path).with_suffix("").as_posix()
        yield str(file), {"id": name, "text": _decoded(file)}


def _json(path: Path) -> Iterator[Row]:
    content = _decoded(path)
    is_list = path.suffix.lower() == ".json" and content.lstrip().startswith("[")
    # splitlines() would also split at characters that JSON allows within a string
    for number, line in enumerate([content] if is_list else content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            rows = json.loads(line) if is_list else [json.loads(line)]
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{path}, line {number + error.lineno - 1}: not JSON, {error.msg} at character "
                f'{error.colno}; give one object a line, such as {{"text": "..."}}'
            ) from None
        for item, row in enumerate(rows, 1):
            place = f"{path}, item {item}" if is_list else f"{path}, line {number}"
            if not isinstance(row, dict):
                got = type(row).__name__
                raise ValueError(f'{place}: must be an object like {{"text": "..."}}, got {got}')
            yield place, row


def _separated(path: Path) -> Iterator[Row]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    file = io.StringIO(_decoded(path), newline="")
    # the default refuses documents of 128 KiB
    limit = csv.field_size_limit(sys.maxsize)
    reader = csv.reader(file, delimiter=delimiter, strict=True)
    line = 1
    try:
        header = next(reader, [])
        line = reader.line_num + 1
        for row in reader:
            if row and (len(row) != len(header) or len(set(header)) < len(header)):
                raise ValueError(
                    f"{path}, line {line}: {len(row)} values for the columns {', '.join(header)}, "
                    'which must differ; put texts that contain a separator in "quotes"'
                )
            if row:
                yield f"{path}, line {line}", dict(zip(header, row, strict=True))
            # a text may span lines: the next row's first
            line = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {line}: {error}; check that quotes are closed, and doubled within text"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Iterator[Row]:
    why = f"{path}: parquet files need the package pyarrow"
    parquet = import_optional("pyarrow.parquet", "data", why)
    try:
        rows = parquet.read_table(path).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise ValueError(f"{path}: not a parquet file: {error}") from None
    yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _data_set(source: str) -> Iterator[Row]:
    why = f"{source!r} is no file or folder, and to load a data set needs the package datasets"
    datasets = import_optional("datasets", "data", why)
    # test[:5%] has a colon of its own
    name, *options = re.split(r":(?![^\[]*\])", source)
    split, configuration = (options or ["train"])[-1], options[0] if len(options) > 1 else None
    try:
        rows = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # of the network, the hub or the data set's own code
        raise ValueError(
            f"{source!r} is no file or folder here, and no data set could be loaded by that name "
            f"(name, name:split or name:configuration:split): {error}"
        ) from error
    yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))


READERS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _json, ".json": _json, ".csv": _separated, ".tsv": _separated, ".parquet": _parquet,
    ".txt": _paragraphs,
}  # fmt: skip
