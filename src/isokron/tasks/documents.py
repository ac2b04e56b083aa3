"""Documents from a file, a folder of texts or a data set by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isokron.tasks.tables import ENDINGS, Row, data_set_rows, decoded, file_rows


@dataclass(frozen=True)
class Document:
    """A text to learn from. `label`: its class as it stands in the data, None if it has none."""

    id: str
    text: str
    label: str | None = None


def read_documents(
    source: str | Path,
    *,
    text: str | None = None,
    label: str | None = None,
    id: str | None = None,
) -> list[Document]:
    """The documents of a file, a folder or a data set.

    .jsonl and .json have an object a line (or a list of them), .csv and .tsv a header, .parquet any
    columns. In a .txt file documents are paragraphs, with blank lines between; in a folder every
    .txt file is one. All else is a name for datasets.load_dataset: `name`, `name:split` or
    `name:configuration:split`, the split being train if none is given.

    text, label, id: names of columns. By default the text is in `text`, or in the only other column
    of strings; ids are in `id` if there is such a column, and numbers of rows from 1 if not.
    """
    if not str(source):
        raise ValueError("data must be a file, a folder or a data set's name, got nothing")
    path = Path(source).expanduser()
    suffix = path.suffix.lower()
    # a name on the hub has no ending that we read
    like_a_path = isinstance(source, Path) or suffix in (*ENDINGS, ".txt") or source[0] in "./~"
    if not path.exists() and like_a_path:
        raise ValueError(f"no file or folder {str(source)!r}; paths are relative to {Path.cwd()}")
    if path.is_dir() or suffix == ".txt":
        if text or label or id:
            raise ValueError(f"{source}: plain text has no columns; leave text, label and id out")
        found = _folder(path) if path.is_dir() else _paragraphs(path)
    elif path.exists() and suffix not in ENDINGS:
        raise ValueError(
            f"{source}: cannot read a file that ends in {suffix!r}; give one of "
            f"{', '.join(ENDINGS)}, .txt or a folder of .txt files"
        )
    else:
        rows = file_rows(path) if path.exists() else data_set_rows(str(source))
        found = _documents(rows, text, label, id)
    if not found:
        raise ValueError(f"{source}: holds no document; give at least one")
    _check_ids(found)
    return [document for _, document in found]


def _documents(
    rows: Iterator[Row], text: str | None, label: str | None, id: str | None
) -> list[tuple[str, Document]]:
    found = []
    for number, (where, row) in enumerate(rows, 1):
        if number == 1:
            id = id or ("id" if "id" in row else None)
            text = text or _text_column(where, row, {label, id})
        assert text is not None
        name = str(number) if id is None else _value(where, row, id, "id")
        of = None if label is None else _value(where, row, label, "label")
        words = _value(where, row, text, "text")
        if not isinstance(row[text], str):
            raise ValueError(
                f"{where}: column {text!r} must hold text, got {type(row[text]).__name__} "
                f"{words:.40}; name the column of texts: text=..."
            )
        found.append((where, Document(name, words, of)))
    return found


def _text_column(where: str, row: dict[str, Any], others: set[str | None]) -> str:
    strings = [name for name, value in row.items() if isinstance(value, str) and name not in others]
    if "text" in row or len(strings) == 1:
        return "text" if "text" in row else strings[0]
    raise ValueError(
        f"{where}: which column holds the text? There are {', '.join(row) or 'none'}; name it: "
        "text=..."
    )


def _value(where: str, row: dict[str, Any], column: str, what: str) -> str:
    if column not in row:
        raise ValueError(
            f"{where}: no column {column!r} for the {what}; there are {', '.join(row) or 'none'}"
        )
    value = row[column]
    if value is None or not str(value).strip():
        raise ValueError(f"{where}: column {column!r} is empty; every document needs its {what}")
    return str(value)


def _check_ids(found: list[tuple[str, Document]]) -> None:
    first: dict[str, str] = {}
    for where, document in found:
        if document.id in first:
            raise ValueError(
                f"{where}: the id {document.id!r} is taken by {first[document.id]}; ids must "
                "differ: choose another column, or mend the data"
            )
        first[document.id] = where


def _paragraphs(path: Path) -> list[tuple[str, Document]]:
    found: list[tuple[str, Document]] = []
    lines: list[str] = []
    for number, line in enumerate([*decoded(path).split("\n"), ""], 1):
        if line.strip():
            lines.append(line.rstrip("\r"))
        elif lines:
            where = f"{path}, line {number - len(lines)}"
            found.append((where, Document(str(len(found) + 1), "\n".join(lines))))
            lines = []
    return found


def _folder(path: Path) -> list[tuple[str, Document]]:
    found = []
    for file in sorted(path.rglob("*.txt")):
        words = decoded(file)
        if not words.strip():
            raise ValueError(f"{file}: is empty; every document needs its text")
        name = file.relative_to(path).with_suffix("").as_posix()
        found.append((str(file), Document(name, words)))
    if not found:
        raise ValueError(f"{path}: the folder holds no .txt file; every such file is a document")
    return found
