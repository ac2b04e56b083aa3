"""The folder of a run.

run.json             source of model and data, settings of every stage, versions
weights.safetensors  weights of a model that was trained for this run
curvature/           written by `fit`
gradients/           the store, written by `build`
scores/              two files for each set of queries
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
from isokron.distributed.rank_tasks import in_turn
from isokron.files import check_free, check_same, write_json

logger = logging.getLogger(__name__)

RECORD = "run.json"
WEIGHTS = "weights.safetensors"
FORMAT = {"format": "isokron run", "version": 3}
VERSIONS = {"isokron": __version__, "torch": torch.__version__}


class RunFolder:
    """Begins a run in a folder, or continues the one in it if its source is the same.

    A run without results is replaced by one with another source.

    source: JSON-able; identifies the model and the data.
    """

    def __init__(self, path: Path, source: Mapping[str, Any], ranks: Ranks | None) -> None:
        self.path, self.source, self.ranks = path, source, ranks
        self.curvature, self.gradients, self.scores = (
            path / name for name in ("curvature", "gradients", "scores")
        )
        # whether this process writes the files that all ranks share
        self.leads = ranks is None or ranks.rank == 0
        if ranks is not None:
            ranks.agree("a run's model and data", dict(source))
        with in_turn(ranks, f"beginning {path}"):
            check_free(path, RECORD, ours=[WEIGHTS])
            # other ranks must not undo what the first one has entered
            if self.leads and not has_results(path) and not self._is_recorded():
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
        """Record the settings of a stage before it begins; refuse others than those recorded.

        Callers validate the settings first, since a recorded stage cannot be changed.
        """
        if self.ranks is not None:
            self.ranks.agree(f"the settings of {name}", dict(settings))
        with in_turn(self.ranks, f"entering {name}"):
            record = read_record(self.path)
            check_same(self.path, "source", record["source"], self.source)
            earlier = record["stages"].get(name)
            # an unrolled run that was never scored has computed nothing
            is_empty = earlier == {"method": "unroll"} and not has_results(self.path)
            if earlier is None or is_empty:
                record["stages"][name] = dict(settings)
                self._write(record)
            else:
                check_same(self.path, name, earlier, settings)

    def _is_recorded(self) -> bool:
        exists = (self.path / RECORD).exists()
        # compared as JSON, in which tuples are lists
        return exists and read_record(self.path)["source"] == json.loads(json.dumps(self.source))

    def _write(self, record: Mapping[str, Any]) -> None:
        write_json(self.path / RECORD, {**FORMAT, **VERSIONS, **record})


def has_results(folder: Path) -> bool:
    """Whether a run has computed anything but the weights of its model."""
    return any(path.name not in (RECORD, WEIGHTS) for path in folder.glob("[!.]*"))


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
