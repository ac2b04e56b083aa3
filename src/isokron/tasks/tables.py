"""Rows of a table by name of column, from files of several kinds and from data sets."""

from __future__ import annotations

import csv
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDINGS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
Row = tuple[str, dict[str, Any]]  # where it stands, for errors, and its values


def file_rows(path: Path) -> Iterator[Row]:
    """The rows of a file with one of ENDINGS."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _parquet(path)
    content = decoded(path)
    if suffix in (".csv", ".tsv"):
        return _separated(path, content, "\t" if suffix == ".tsv" else ",")
    if suffix == ".json" and content.lstrip().startswith("["):
        return _list(path, content)
    return _lines(path, content)


def data_set_rows(source: str) -> Iterator[Row]:
    """The rows of a data set: `name`, `name:split` or `name:configuration:split`."""
    datasets = _import(
        "datasets",
        f"{source!r} is no file or folder, and to load a data set of that name needs the package "
        "datasets",
    )
    name, *rest = re.split(r":(?![^\[]*\])", source)  # test[:5%] has a colon of its own
    if len(rest) > 2:
        raise ValueError(f"{source!r}: write name, name:split or name:configuration:split")
    split = rest[-1] if rest else "train"
    configuration = rest[0] if len(rest) == 2 else None
    try:
        rows = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # of the network, the hub or the data set's own making
        raise ValueError(
            f"{source!r} is no file or folder here, and no data set could be loaded by that name: "
            f"{error}"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{source}, row {number}", row


def decoded(path: Path) -> str:
    """A file's text, which must be UTF-8; a byte order mark is left out."""
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ValueError(
            f"{path}, line {line}: byte 0x{data[error.start]:02x} is not UTF-8; convert the file, "
            "for example with: iconv -f latin1 -t utf-8"
        ) from None


def _lines(path: Path, content: str) -> Iterator[Row]:
    # not splitlines(), which takes characters for ends of lines that JSON may have in a string
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"{where}: not JSON, {error.msg} at character {error.pos + 1}; every line must "
                    'be one object, such as {"text": "..."}'
                ) from None
            yield where, _object(where, row)


def _list(path: Path, content: str) -> Iterator[Row]:
    try:
        rows = json.loads(content)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {error.lineno}: not JSON, {error.msg}; give a list of objects, or one "
            "object a line"
        ) from None
    for number, row in enumerate(rows, 1):
        where = f"{path}, item {number}"
        yield where, _object(where, row)


def _object(where: str, row: Any) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise ValueError(
            f"{where}: must be an object with named values, got {type(row).__name__}; write for "
            'example {"text": "..."}'
        )
    return row


def _separated(path: Path, content: str, delimiter: str) -> Iterator[Row]:
    limit = csv.field_size_limit(sys.maxsize)  # documents are longer than cells of tables
    try:
        reader = csv.reader(io.StringIO(content, newline=""), delimiter=delimiter, strict=True)
        header, begins = next(reader, []), 0
        if len(set(header)) < len(header):
            twice = next(name for name in header if header.count(name) > 1)
            raise ValueError(f"{path}, line 1: two columns are named {twice!r}; rename one")
        while True:
            begins = reader.line_num + 1
            row = next(reader, None)
            if row is None:
                return
            if row and len(row) != len(header):
                raise ValueError(
                    f"{path}, line {begins}: {len(row)} values for the {len(header)} columns "
                    f'{", ".join(header)}; put texts that hold a separator in "quotes"'
                )
            if row:
                yield f"{path}, line {begins}", dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ValueError(
            f"{path}, line {begins}: {error}; check that quotes are closed, and doubled within text"
        ) from None
    finally:
        csv.field_size_limit(limit)


def _parquet(path: Path) -> Iterator[Row]:
    parquet = _import("pyarrow.parquet", f"{path}: parquet files need the package pyarrow")
    try:
        file = parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are kinds of these
        raise ValueError(f"{path}: not a parquet file: {error}") from None
    with file:
        number = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                number += 1
                yield f"{path}, row {number}", row


def _import(module: str, why: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f'{why}; install it with: pip install "isokron[data]" (in a clone: ".[data]")',
            name=error.name,
        ) from None
