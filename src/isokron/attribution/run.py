"""A run directory: what was done in it, in run.json, and where its parts are.

run.json             where model and data come from, settings of all stages, versions
weights.safetensors  of the model, where it was trained for this run
curvature/           of `fit`: see isokron.curvature
gradients/           of `build`: a store
scores/              of `score`: a pair of files for each set of queries
report.html          of `report`
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from isokron._version import __version__
from isokron.attribution.subject import Subject
from isokron.distributed import Ranks
from isokron.distributed.team import in_turn
from isokron.files import write_atomically

logger = logging.getLogger(__name__)

RECORD = "run.json"
WEIGHTS = "weights.safetensors"
# what may be there before run.json: weights, and what one that was killed had begun to write
EARLY = (WEIGHTS, f".{WEIGHTS}.tmp", f".{RECORD}.tmp")
FORMAT = "isokron run"
VERSION = 1


@dataclass(frozen=True, eq=False)
class Run:
    """A folder, and the subject that is explained in it; made by `begin`."""

    folder: Path
    subject: Subject
    ranks: Ranks | None = None

    @staticmethod
    def begin(
        folder: str | Path,
        subject: Subject,
        source: Mapping[str, Any] | None = None,
        ranks: Ranks | None = None,
    ) -> "Run":
        """Take up a run, or begin one. `source`: JSON-able, where model and data come from, by
        which the run can be repeated; a run of another model or other data is refused. `ranks`:
        processes that share the work, in a folder they all have."""
        run = Run(Path(folder), subject, ranks)
        made_of = {
            "task": subject.task.name,
            "given": dict(source or {}),
            "layers": list(subject.layers),
            "examples": len(subject.train),
            **subject.digests(),
        }
        if ranks is not None:
            ranks.agree("a run's model and data", made_of)
        with in_turn(ranks, f"beginning {folder}"):
            if not run._path.exists():
                run._make(made_of)
            record = read_record(run.folder)
            check_same(run.folder, "source", record["source"], made_of)
        versions = {name: record[name] for name in versions_here()}
        if versions != versions_here():
            logger.warning(
                "%s was begun with %s, and this is %s", folder, versions, versions_here()
            )
        return run

    @property
    def leads(self) -> bool:
        """Whether this process writes what is written once."""
        return self.ranks is None or self.ranks.rank == 0

    @property
    def record(self) -> dict[str, Any]:
        return read_record(self.folder)

    @property
    def _path(self) -> Path:
        return self.folder / RECORD

    @property
    def curvature(self) -> Path:
        return self.folder / "curvature"

    @property
    def gradients(self) -> Path:
        return self.folder / "gradients"

    @property
    def scores(self) -> Path:
        return self.folder / "scores"

    def stage(self, name: str) -> dict[str, Any] | None:
        """The settings of a stage that was begun, finished or not."""
        found: dict[str, Any] | None = self.record["stages"].get(name)
        return found

    def enter(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write down the settings of a stage before it begins; refuse others than those there."""
        if self.ranks is not None:
            self.ranks.agree(f"the settings of {name}", dict(settings))
        with in_turn(self.ranks, f"entering {name}"):
            record = self.record
            there = record["stages"].get(name)
            if there is None:
                record["stages"][name] = dict(settings)
                self._write(record)
            else:
                check_same(self.folder, name, there, settings)

    def _make(self, made_of: Mapping[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if any(path.name not in EARLY for path in self.folder.iterdir()):
            raise ValueError(
                f"{self.folder} is neither empty nor a run, it has no {RECORD}; give a new folder"
            )
        self._write({"source": made_of, "stages": {}})

    def _write(self, record: Mapping[str, Any]) -> None:
        head = {"format": FORMAT, "version": VERSION, **versions_here()}
        whole = {**head, **record}
        content = json.dumps(whole, indent=1, ensure_ascii=False).encode() + b"\n"
        write_atomically(self._path, [content])


def versions_here() -> dict[str, str]:
    return {"isokron": __version__, "torch": torch.__version__}


def read_record(folder: Path) -> dict[str, Any]:
    """run.json, checked to be one."""
    path = folder / RECORD
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"no run in {folder}: {RECORD} is missing; begin one") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}; begin a new run") from None
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no record of a run; begin a new run")
    kind = record.get("format"), record.get("version")
    if kind != (FORMAT, VERSION):
        raise ValueError(
            f"{path} is {kind[0]!r} of version {kind[1]!r}, this isokron {__version__} reads "
            f"{FORMAT!r} of version {VERSION}; begin a new run"
        )
    return record


def check_same(folder: Path, stage: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Refuse settings that differ, naming each."""
    there, here = (json.loads(json.dumps(dict(each))) for each in (there, here))
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    if names:
        differ = "; ".join(f"{n} was {there.get(n)!r}, is {here.get(n)!r}" for n in names)
        raise ValueError(f"{folder} has another {stage}: {differ}; give a new folder")
