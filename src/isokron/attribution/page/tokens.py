"""A text whose pieces are coloured by their scores, each to be read exactly."""

import math
import unicodedata
from collections.abc import Iterable, Sequence
from html import escape

from isokron.attribution.answers import Found
from isokron.pages.numbers import signed
from isokron.tasks import Shown

LEVELS = 5  # of colour each way, as in attribution.css
SHARE = 0.98  # of tokens that are below the deepest colour: one outlier must not pale the rest
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # categories of Unicode that leave no mark, or break lines
LINES, COLUMNS = 12, 62  # about what a column shows before it is cut


def scale_of(found: Iterable[Found]) -> float:
    """The score at which colours are deepest, the same for all examples of an answer; 0: none."""
    sizes = sorted(abs(score) for each in found for score in each.tokens if math.isfinite(score))
    return sizes[min(len(sizes) - 1, int(SHARE * len(sizes)))] if sizes else 0.0


def level(score: float, scale: float) -> str:
    """The class of a token: p1 … p5, n1 … n5, or none."""
    if not scale or not math.isfinite(score):
        return ""
    depth = round(LEVELS * min(1.0, abs(score) / scale))
    return f"{'p' if score > 0 else 'n'}{depth}" if depth else ""


def scored_text(shown: Shown, scores: Sequence[float], scale: float, label: str) -> str:
    """Context and tokens. The strongest token is in the tab order, and arrow keys lead on."""
    if len(scores) != len(shown.tokens):
        return plain_text(shown)
    pairs = _joined(shown.tokens, scores)
    strongest = max(range(len(pairs)), key=lambda k: abs(pairs[k][1]), default=-1)
    pieces = "".join(_token(*pair, scale, k == strongest) for k, pair in enumerate(pairs))
    return _box(shown, pieces, f'class="text tokens" role="group" aria-label="{escape(label)}"')


def _token(piece: str, score: float, scale: float, stop: bool) -> str:
    """No more than needed: a page may have a million of them. `stop`: in the tab order."""
    colour = level(score, scale)
    kind = f' class="{colour}"' if colour else ""
    tab = ' tabindex="0"' if stop else ""
    return f'<b{kind} data-s="{signed(score)}"{tab}>{readable(piece)}</b>'


def plain_text(shown: Shown) -> str:
    """Where tokens have no scores."""
    if not shown.text:
        return ""
    return _box(shown, readable("".join(shown.tokens)), 'class="text"')


def readable(text: str) -> str:
    """Escaped; line ends are marked, and characters that cannot be seen become pictures."""
    return escape(_seen(text)).replace("\n", '<span class="nl"></span>\n')


def snippet(text: str, limit: int = 90) -> str:
    """The beginning in one line."""
    line = _seen(" ".join(text[: 4 * limit].split()))
    return line if len(line) <= limit else line[: limit - 1].rstrip() + "…"


def _joined(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, float]]:
    """Pieces that can be seen: bytes of one character count together, with its last one."""
    found, carried, pending = [], 0.0, False
    for piece, score in zip(tokens, scores, strict=True):
        carried, pending = carried + score, True
        if piece:
            found.append((piece, carried))
            carried, pending = 0.0, False
    return [*found, ("∎", carried)] if pending else found


def _seen(text: str) -> str:
    return text if text.isprintable() else "".join(map(_picture, text))


def _picture(character: str) -> str:
    """Control characters, marks of direction and halves of characters, so that they are seen."""
    code = ord(character)
    if character in "\n\t\u200c\u200d" or unicodedata.category(character) not in UNSEEN:
        return character
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def _box(shown: Shown, pieces: str, attributes: str) -> str:
    context = f'<span class="context">{readable(shown.context)}</span>' if shown.context else ""
    lines = sum(1 + len(line) // COLUMNS for line in shown.text.split("\n"))
    if lines <= LINES + 2:
        return f'<div {attributes} dir="auto">{context}{pieces}</div>'
    cut = attributes.replace('class="text', 'class="long text', 1)
    return (
        f'<div {cut} dir="auto">{context}{pieces}</div>'
        f'<label class="more"><input type="checkbox"> show all, about {lines:,} lines</label>'
    )
