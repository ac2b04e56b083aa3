"""The answers of a page with their anchors, and where each training example comes up."""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

from isokron.attribution.answers import Answer, Found
from isokron.attribution.page.recorded import Recorded
from isokron.attribution.page.tokens import snippet

SIDES = ("for", "against")
MODES = {"mean": "Mean of {} queries", "nearest": "Nearest of {} queries"}


@dataclass(frozen=True, eq=False)
class Entry:
    """One answer. `anchor` depends on the set's name and the answer's place in it only."""

    anchor: str
    answer: Answer
    group: Recorded

    @property
    def title(self) -> str:
        """What a reader calls it."""
        if self.group.ask.mode == "individual":
            return snippet(self.answer.query) or self.anchor
        return MODES[self.group.ask.mode].format(f"{len(self.answer.shown):,}")

    @property
    def found(self) -> tuple[Found, ...]:
        return self.answer.proponents + self.answer.opponents

    @property
    def labels(self) -> set[str]:
        return {shown.label for shown in self.answer.shown if shown.label}


@dataclass(frozen=True, eq=False)
class Place:
    """A training example in an answer."""

    entry: Entry
    side: str
    found: Found

    @property
    def anchor(self) -> str:
        return place_anchor(self.entry, self.side, self.found)


Places = dict[int, list[Place]]


def entries_of(groups: Sequence[Recorded]) -> list[Entry]:
    return [
        Entry(f"{_plain(group.name)}.{k}", answer, group)
        for group in groups
        for k, answer in enumerate(group.each)
    ]


def places_of(entries: Sequence[Entry]) -> Places:
    """By example, all its places in the order of the page."""
    found: Places = {}
    for entry in entries:
        for side, some in zip(
            SIDES, (entry.answer.proponents, entry.answer.opponents), strict=True
        ):
            for each in some:
                found.setdefault(each.example, []).append(Place(entry, side, each))
    return found


def place_anchor(entry: Entry, side: str, found: Found) -> str:
    return f"{entry.anchor}.{side}.{found.example}"


def _plain(name: str) -> str:
    """A name that can stand in a link as it is; others by their digest."""
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return f"set-{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:12]}"
