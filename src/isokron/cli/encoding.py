"""Output to terminals and files that cannot show all characters."""

from __future__ import annotations

import codecs
import io
import os
import sys
import unicodedata

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


def echo(text: str = "", *, err: bool = False, end: str = "\n") -> None:
    """Print to stdout or stderr in its encoding; typer.echo takes UTF-8 where that is ASCII."""
    print(text, file=sys.stderr if err else sys.stdout, end=end, flush=True)


def is_utf8() -> bool:
    """Whether stdout can show every character."""
    return (getattr(sys.stdout, "encoding", None) or "utf-8").lower().startswith("utf")


def printable(text: str) -> str:
    """The text as stdout will show it, so that columns can be aligned by its length."""
    return text if is_utf8() else "".join(map(spelling, text))


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
