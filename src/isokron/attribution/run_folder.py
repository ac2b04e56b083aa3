"""The folder of a run.

run.json             source of model and data, fingerprint, settings of finished stages, versions
weights.safetensors  weights of a model that was trained for this run
curvature/           written by `fit`
gradients/           the store, written by `build`
scores/              two files for each set of queries
report.html          the page
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isokron._version import __version__
from isokron.attribution.fingerprint import Fingerprint, Fingerprints
from isokron.attribution.store import SCHEMA, read_schema
from isokron.curvature.save import INDEX
from isokron.digest import weights_digest
from isokron.distributed import Ranks
from isokron.distributed.rank_tasks import in_turn
from isokron.files import check_free, check_same, clear_beside, locked, read_json, write_json

logger = logging.getLogger(__name__)

RECORD = "run.json"
WEIGHTS = "weights.safetensors"
FORMAT = {"format": "isokron run", "version": 4}
VERSIONS = {"isokron": __version__, "torch": torch.__version__}


class RunFolder:
    """Begins a run in a folder, or continues the one in it if its fingerprint is the same.

    A run without results is replaced by one with another source or fingerprint.

    source: JSON-able; where the model and the data come from.
    """

    def __init__(
        self,
        path: Path,
        source: Mapping[str, Any],
        fingerprints: Fingerprints,
        ranks: Ranks | None,
    ) -> None:
        # compared as JSON, in which tuples are lists
        self.path, self.fingerprints, self.ranks = path, fingerprints, ranks
        self.source: dict[str, Any] = json.loads(json.dumps(dict(source)))
        self.curvature, self.gradients, self.scores = (
            path / name for name in ("curvature", "gradients", "scores")
        )
        # whether this process writes the files that all ranks share
        self.leads = ranks is None or ranks.rank == 0
        self.claimed: Fingerprint | None = None
        self.claim()
        record = read_record(path)
        began = {name: record[name] for name in VERSIONS}
        if began != VERSIONS:
            logger.warning("%s was begun with %s, and this is %s", path, began, VERSIONS)

    def claim(self) -> None:
        """Refuse results of another fingerprint than now; without results, it is recorded."""
        now = self.fingerprints.now()
        if self.claimed is not None and self.claimed.digests() == now.digests():
            return
        if self.claimed is not None and has_results(self.path):
            raise ValueError(
                f"the model has other weights than the results in {self.path} belong to "
                f"({now.weights}, not {self.claimed.weights}): it was trained on or changed; make "
                "a new Attributor with a new folder"
            )
        if self.ranks is not None:
            self.ranks.agree("a run's model and data", {**self.source, **now.digests()})
        with in_turn(self.ranks, f"beginning {self.path}"):
            check_free(self.path, RECORD, ours=[WEIGHTS])
            # other ranks must not undo what the first one has entered
            if self.leads and not has_results(self.path):
                with locked(self.path / RECORD):
                    self._begin(now)
            if self.leads and os.access(self.path, os.W_OK):
                # what killed processes left
                for name in (RECORD, WEIGHTS):
                    clear_beside(self.path / name)
            record = read_record(self.path)
            old, new = {**record["source"], **_digests(record, now)}, {**self.source}
            check_same(self.path, "source", old, {**new, **now.digests()})
            self.fingerprints.check_loss(self.path, record["fingerprint"])
        # as it was recorded first, so that all files have the same numbers
        self.claimed, self.fingerprint = now, record["fingerprint"]

    def _begin(self, now: Fingerprint) -> None:
        """Write a new record unless there are results, or the one there is the same."""
        stages: dict[str, Any] = {}
        if has_results(self.path):
            return
        if (self.path / RECORD).exists():
            record = read_record(self.path)
            if record["source"] == self.source:
                stages = record["stages"]
                same = _digests(record, now) == now.digests()
                if same and not now.loss_differences(record["fingerprint"]):
                    return
        self.fingerprints.refuse_random()
        self._write({"source": self.source, "fingerprint": now.record(), "stages": stages})

    def stage(self, name: str) -> dict[str, Any] | None:
        """The settings of a finished stage."""
        settings: dict[str, Any] | None = read_record(self.path)["stages"].get(name)
        return settings

    def has_curvature(self) -> bool:
        return (self.curvature / INDEX).exists()

    def begun_store(self) -> dict[str, Any] | None:
        """The settings of `build` that a store in the folder has, finished or not."""
        if not (self.gradients / SCHEMA).exists():
            return self.stage("build")
        settings: dict[str, Any] = read_schema(self.gradients).settings["build"]
        return settings

    def check_stage(self, name: str, settings: Mapping[str, Any]) -> None:
        """Refuse other settings than those of the finished stage."""
        if self.ranks is not None:
            self.ranks.agree(f"the settings of {name}", dict(settings))
        with in_turn(self.ranks, f"entering {name}"):
            self._checked_record(name, settings)

    @contextmanager
    def finish(self, name: str, settings: Mapping[str, Any]) -> Iterator[bool]:
        """Record a stage after the body has written its results; others wait meanwhile.

        The value is whether the stage is recorded already, maybe by another process.
        """
        with in_turn(self.ranks, f"finishing {name}"), locked(self.path / RECORD):
            record = self._checked_record(name, settings)
            yield name in record["stages"]
            if name not in record["stages"]:
                record["stages"][name] = dict(settings)
                self._write(record)

    def _checked_record(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        record = read_record(self.path)
        assert self.claimed is not None
        old = {**record["source"], **_digests(record, self.claimed)}
        check_same(self.path, "source", old, {**self.source, **self.claimed.digests()})
        earlier = record["stages"].get(name)
        # an unrolled run that was never scored has computed nothing
        if earlier == {"method": "unroll"} and not has_results(self.path):
            del record["stages"][name]
        elif earlier is not None:
            check_same(self.path, name, earlier, settings)
        return record

    def _write(self, record: Mapping[str, Any]) -> None:
        write_json(self.path / RECORD, {**FORMAT, **VERSIONS, **record})


def _digests(record: Mapping[str, Any], now: Fingerprint) -> dict[str, Any]:
    return {name: record["fingerprint"].get(name) for name in now.digests()}


def check_retrained(folder: Path, model: nn.Module) -> None:
    """Refuse weights that were trained again, and are not those that a run's results belong to."""
    if not has_results(folder):
        return
    old, new = read_record(folder)["fingerprint"]["weights"], weights_digest(model)
    if old != new:
        raise ValueError(
            f"{folder} has results of the weights {old}, its {WEIGHTS} is not there, and training "
            f"it again gave {new}, as with another number of threads or on another machine; give "
            "a new folder"
        )


def has_results(folder: Path) -> bool:
    """Whether a run has computed anything but the weights of its model."""
    return any(path.name not in (RECORD, WEIGHTS) for path in folder.glob("[!.]*"))


def read_record(folder: Path) -> dict[str, Any]:
    """The validated content of run.json."""
    path = folder / RECORD
    try:
        record = read_json(path, "begin a new run")
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(
            f"no run in {folder}: {RECORD} is missing; begin one with: isokron attribute {folder}"
        ) from None
    if {name: record.get(name) for name in FORMAT} != FORMAT:
        raise ValueError(
            f"{path} is {record.get('format')!r} of version {record.get('version')!r}, this "
            f"isokron {__version__} reads {FORMAT['format']!r} of version {FORMAT['version']}; "
            "begin a new run"
        )
    return read_json(path, "begin a new run", ("source", "fingerprint", "stages", *VERSIONS))
