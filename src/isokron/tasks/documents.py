"""Documents and prompts from files, folders of texts and data sets by name."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from isokron.tasks.catalog import import_optional

Row = dict[str, Any]  # values by column


@dataclass(frozen=True)
class Document:
    """A training text. label: its class as in the data, or None."""

    id: str
    text: str
    label: str | None = None


def read_documents(
    source: str | Path, *, text: str | None = None, label: str | None = None, id: str | None = None
) -> list[Document]:
    """The documents of a file, a folder or a data set.

    .jsonl and .json have one object per line (or a list of objects), .csv and .tsv a header,
    .parquet any columns. In a .txt file, documents are paragraphs separated by blank lines; in a
    folder, every .txt file is a document. Any other source is a name for datasets.load_dataset:
    `name`, `name:split` or `name:configuration:split`, by default with split train.

    Args:
        source: path or name.
        text: column of texts, which may be empty; default: `text`.
        label: column of classes; default: none.
        id: column of ids; default: `id` if there is one, otherwise rows are numbered from 1.
    """
    documents: dict[str, Document] = {}
    for number, (place, row) in enumerate(_rows(source), 1):
        if number == 1 and "id" in row:
            id = id or "id"
        name = str(number) if id is None else _cell(place, row, id)
        if name in documents:
            raise ValueError(f"{place}: an earlier row has the id {name!r} too; ids must differ")
        category = None if label is None else _cell(place, row, label)
        documents[name] = Document(name, _cell(place, row, text or "text", is_text=True), category)
    if not documents:
        raise ValueError(f"{source}: contains no document; in a folder, every .txt file is one")
    return list(documents.values())


def read_prompts(source: str | Path) -> list[tuple[str, str | None]] | None:
    """The columns `prompt` and `completion`, with None for an empty completion.

    Returns None for a source without a column `prompt`, which contains documents.
    """
    prompts: list[tuple[str, str | None]] = []
    for place, row in _rows(source):
        if "prompt" not in row and not prompts:
            return None
        completion = _cell(place, {"completion": "", **row}, "completion", is_text=True)
        prompts.append((_cell(place, row, "prompt"), completion or None))
    return prompts or None


def _cell(place: str, row: Row, column: str, *, is_text: bool = False) -> str:
    """A value as a string. is_text: it must be a string, and may be empty."""
    if column not in row:
        raise ValueError(f"{place}: no column {column!r}; there are {', '.join(row) or 'none'}")
    value = "" if row[column] is None else row[column]
    if is_text and not isinstance(value, str):
        got = f"{type(value).__name__} {value!s:.40}"
        raise ValueError(f"{place}: column {column!r} must contain text, got {got}")
    if not is_text and not str(value).strip():
        raise ValueError(f"{place}: column {column!r} is empty; every row needs a value there")
    return str(value)


def _rows(source: str | Path) -> Iterator[tuple[str, Row]]:
    """Every row of a source with its position, for errors."""
    number = 0
    try:
        for number, row in enumerate(_read(source), 1):
            if not isinstance(row, dict):
                got = type(row).__name__
                raise ValueError(f"{source}, row {number}: must be an object, got {got}")
            yield f"{source}, row {number}", row
    except (csv.Error, json.JSONDecodeError) as error:
        suffix = Path(source).suffix
        raise ValueError(f"{source}, row {number + 1}: not valid {suffix}: {error}") from None


def _read(source: str | Path) -> Iterable[Any]:
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    if path.is_dir() and str(source):
        return _folder(path)
    if path.is_file() and suffix in READERS:
        return READERS[suffix](path)
    if path.exists() or suffix in READERS or isinstance(source, Path) or source[0] in "/~.":
        raise ValueError(
            f"no file or folder {str(source)!r} that can be read; give one of {', '.join(READERS)} "
            f"or a folder of .txt files; paths are relative to {Path.cwd()}"
        )
    return _data_set(source)


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


def _folder(path: Path) -> Iterator[Row]:
    for file in sorted(path.rglob("*.txt")):
        yield {"id": file.relative_to(path).with_suffix("").as_posix(), "text": _decoded(file)}


def _paragraphs(path: Path) -> Iterator[Row]:
    lines = _decoded(path).replace("\r\n", "\n").split("\n")
    for is_blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
        if not is_blank:
            yield {"text": "\n".join(paragraph)}


def _json(path: Path) -> Iterable[Any]:
    content = _decoded(path)
    # splitlines() would also split at characters that JSON allows within a string
    lines = (line for line in content.split("\n") if line.strip())
    is_list = path.suffix.lower() == ".json" and content.lstrip().startswith("[")
    return json.loads(content) if is_list else map(json.loads, lines)


def _separated(path: Path) -> Iterator[Row]:
    csv.field_size_limit(sys.maxsize)  # the default refuses documents of 128 KiB
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    file = io.StringIO(_decoded(path), newline="")
    reader = csv.DictReader(file, delimiter=delimiter, strict=True)
    for row in reader:
        columns = reader.fieldnames or ()
        # csv puts surplus values under None, fills missing ones with None, merges equal columns
        if None in row or None in row.values() or len(row) < len(columns):
            rule = f"needs a value for each of the columns {', '.join(columns)}, which must differ"
            raise csv.Error(f'{rule}; put texts that contain a separator in "quotes"')
        yield row


def _parquet(path: Path) -> Any:
    why = f"{path}: parquet files need the package pyarrow"
    return import_optional("pyarrow.parquet", "data", why).read_table(path).to_pylist()


def _data_set(source: str) -> Any:
    why = f"{source!r} is not a file or folder, and loading a data set needs the package datasets"
    datasets = import_optional("datasets", "data", why)
    # a split such as test[:5%] may contain a colon
    name, *options = re.split(r":(?![^\[]*\])", source)
    split, configuration = (options or ["train"])[-1], options[0] if len(options) > 1 else None
    try:
        return datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # from the network, the hub or the code of the data set
        raise ValueError(
            f"{source!r} is not a file or folder, and no data set of that name could be loaded "
            f"(name, name:split or name:configuration:split): {error}"
        ) from error


READERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    ".jsonl": _json, ".json": _json, ".csv": _separated, ".tsv": _separated, ".parquet": _parquet,
    ".txt": _paragraphs,
}  # fmt: skip
