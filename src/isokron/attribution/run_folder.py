"""A run's folder: what was done in it, in run.json, and where its parts are.

run.json             where model and data come from, the settings of every stage, versions
weights.safetensors  of the model, where it was trained for this run
curvature/           written by `fit`
gradients/           the store written by `build`
scores/              a pair of files for each set of queries
report.html          the page
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from isokron._version import __version__
from isokron.distributed import Ranks
from isokron.distributed.team import in_turn
from isokron.files import write_atomically

logger = logging.getLogger(__name__)

RECORD = "run.json"
WEIGHTS = "weights.safetensors"
# what may be there before run.json: weights, and what a killed process had begun to write
EARLY = (WEIGHTS, f".{WEIGHTS}.tmp", f".{RECORD}.tmp")
FORMAT = {"format": "isokron run", "version": 3}
VERSIONS = {"isokron": __version__, "torch": torch.__version__}


class RunFolder:
    """Begins a run in a folder, or takes up the one that is there; another source is refused.

    source: JSON-able; the model, the data and where they come from.
    """

    def __init__(self, path: Path, source: Mapping[str, Any], ranks: Ranks | None) -> None:
        self.path, self.ranks = path, ranks
        self.curvature, self.gradients, self.scores = (
            path / name for name in ("curvature", "gradients", "scores")
        )
        # whether this process writes what is written once
        self.leads = ranks is None or ranks.rank == 0
        if ranks is not None:
            ranks.agree("a run's model and data", dict(source))
        with in_turn(ranks, f"beginning {path}"):
            if not (path / RECORD).exists():
                check_folder(path)
                path.mkdir(parents=True, exist_ok=True)
                self._write({"source": dict(source), "stages": {}})
            record = read_record(path)
            check_same(path, "source", record["source"], source)
        began = {name: record[name] for name in VERSIONS}
        if began != VERSIONS:
            logger.warning("%s was begun with %s, and this is %s", path, began, VERSIONS)

    def stage(self, name: str) -> dict[str, Any] | None:
        """The settings of a stage that was begun, finished or not."""
        settings: dict[str, Any] | None = read_record(self.path)["stages"].get(name)
        return settings

    def enter(self, name: str, settings: Mapping[str, Any]) -> None:
        """Record the settings of a stage before it begins; refuse other than the recorded ones.

        Callers validate the settings first: what is recorded cannot be taken back.
        """
        if self.ranks is not None:
            self.ranks.agree(f"the settings of {name}", dict(settings))
        with in_turn(self.ranks, f"entering {name}"):
            record = read_record(self.path)
            if name in record["stages"]:
                check_same(self.path, name, record["stages"][name], settings)
            else:
                record["stages"][name] = dict(settings)
                self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        content = {**FORMAT, **VERSIONS, **record}
        text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
        write_atomically(self.path / RECORD, [text.encode()])


def check_folder(path: Path) -> None:
    """Refuse a folder that holds something else than a run."""
    strangers = path.is_file() or (
        path.is_dir() and any(file.name not in EARLY for file in path.iterdir())
    )
    if strangers and not (path / RECORD).exists():
        raise ValueError(
            f"{path} is neither empty nor a run (it has no {RECORD}); give a new folder"
        )


def read_record(folder: Path) -> dict[str, Any]:
    """The validated content of run.json."""
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"no run in {folder}: {RECORD} is missing; begin one with: isokron attribute {folder}"
        ) from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; begin a new run") from None
    head = record if isinstance(record, dict) else {}
    if {name: head.get(name) for name in FORMAT} != FORMAT:
        raise ValueError(
            f"{path} is {head.get('format')!r} of version {head.get('version')!r}, this isokron "
            f"{__version__} reads {FORMAT['format']!r} of version {FORMAT['version']}; begin a new "
            "run"
        )
    return record


def check_same(folder: Path, stage: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Refuse settings that differ, naming each."""
    # as they are read from the file: tuples are lists there
    old, new = (json.loads(json.dumps(dict(settings))) for settings in (old, new))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    if names:
        differ = "; ".join(f"{n} was {old.get(n)!r}, is {new.get(n)!r}" for n in names)
        raise ValueError(f"{folder} has another {stage}: {differ}; give a new folder")
