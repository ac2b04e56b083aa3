"""Output to terminals and files: all text that a user's data may be part of is printed by `echo`.

Control characters and direction marks are made visible, since a terminal obeys them: they can set
its title or its clipboard, or hide what follows. Characters that its encoding lacks are spelled.
"""

from __future__ import annotations

import codecs
import io
import json
import logging
import os
import sys
import unicodedata
import warnings
from typing import Any

from isokron.report.render import visible

# what stands for characters that messages and tables are written with
SPELLINGS = {
    **{"×": "x", "·": "*", "±": "+/-", "−": "-", "–": "-", "—": "-", "→": "->", "…": "..."},
    **{"≤": "<=", "≥": ">=", "≈": "~", "µ": "u", "μ": "mu", "κ": "kappa", "λ": "lambda"},
    **{"ρ": "rho", "β": "beta", "ε": "eps", "⊗": "(x)", "‖": "|", "√": "sqrt", "Σ": "sum"},
    **{"²": "^2", "³": "^3", "⁻": "^-", "¹": "1", "ᵀ": "^T", "‘": "'", "’": "'"},
    **{"“": '"', "”": '"', "│": "|", "─": "-", "━": "-"},
}
HANDLER = "isokron.spelling"


def configure_output() -> None:
    """Let stdout and stderr spell out characters that their encoding lacks, instead of failing.

    A terminal that announces itself as plain, by TERM=dumb or LC_ALL=C, gets ASCII alone. Files and
    pipes have the encoding that Python chose, which is UTF-8 for LC_ALL=C.
    """
    codecs.register_error(HANDLER, _spelled)
    plain = os.environ.get("TERM") == "dumb" or os.environ.get("LC_ALL") in ("C", "POSIX")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = "ascii" if plain and stream.isatty() else None
            stream.reconfigure(encoding=encoding, errors=HANDLER)
    # messages may quote data, too
    warnings.showwarning = lambda message, *_, **__: warn(str(message))
    logging.basicConfig(handlers=[Messages()])


class Messages(logging.Handler):
    """Prints log records in one line each."""

    def emit(self, record: logging.LogRecord) -> None:
        warn(record.getMessage())


def warn(message: str) -> None:
    echo(f"isokron: warning: {' '.join(message.split())}", err=True)


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print to stdout or stderr in its encoding; typer.echo takes UTF-8 where that is ASCII."""
    print(visible(text), file=sys.stderr if err else sys.stdout, end=end, flush=True)


def is_utf8() -> bool:
    """Whether stdout can show every character."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def printable(text: str) -> str:
    """The text as stdout will show it, so that columns can be aligned by its length."""
    return visible(text) if is_utf8() else "".join(map(spelling, visible(text)))


def json_text(value: Any) -> str:
    """JSON in which invisible characters are escaped, so that `echo` prints it as it is."""
    text = json.dumps(value, ensure_ascii=not is_utf8())
    unseen = {character for character in set(text) if visible(character) != character}
    # json.dumps escapes all of them but DEL
    escapes = {ord(character): json.dumps(character)[1:-1] for character in unseen}
    return text.translate({**escapes, 0x7F: "\\u007f"})


def spelling(character: str) -> str:
    """ASCII for a character: its spelling, its letters without accents, or a question mark."""
    if character.isascii():
        return character
    letters = unicodedata.normalize("NFKD", character).encode("ascii", "ignore").decode()
    return SPELLINGS.get(character) or letters or "?"


def _spelled(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(map(spelling, error.object[error.start : error.end])), error.end
