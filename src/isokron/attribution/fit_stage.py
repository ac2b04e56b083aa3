"""The curvature of a run: computed once, saved with its fingerprint, and damped."""

import warnings
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from isokron.attribution.data import Subject
from isokron.attribution.fingerprint import Fingerprints
from isokron.attribution.run_folder import RunFolder
from isokron.curvature import Curvature
from isokron.curvature.fit import FISHERS, METHODS, SHARINGS
from isokron.curvature.losses import Likelihood
from isokron.curvature.optimizer_state import curvature_from_optimizer, read_checkpoint
from isokron.digest import hash_of


class FitStage:
    """The stage "fit" of a run's folder."""

    def __init__(self, subject: Subject, folder: RunFolder, fingerprints: Fingerprints) -> None:
        self.subject, self.folder, self.fingerprints = subject, folder, fingerprints
        self._inverses: dict[float, Curvature] = {}

    @property
    def method(self) -> str | None:
        """The method of the finished stage; "none" and "unroll" have no curvature."""
        return (self.folder.stage("fit") or {}).get("method")

    def enter(self, settings: Mapping[str, Any]) -> None:
        """Refuse other settings than those of the finished stage."""
        self.folder.check_stage("fit", settings)
        # cached values may belong to an earlier call
        self.__dict__.pop("curvature", None)
        self._inverses.clear()

    def run(self, settings: Mapping[str, Any], compute: Callable[[], Curvature]) -> None:
        """Compute and save the curvature, unless the stage is finished."""
        self.enter(settings)
        if self.method is not None and self._is_saved():
            return
        curvature, is_saved = compute(), False
        curvature.fingerprint = self.folder.fingerprint
        with self.folder.finish("fit", settings) as is_recorded:
            if self.folder.leads:
                # another process may have been faster, with other rounding errors
                is_saved = is_recorded and self.folder.has_curvature()
                if not is_saved:
                    curvature.save(self.folder.curvature)
        if not is_saved:
            self.curvature = curvature

    def _is_saved(self) -> bool:
        saved = self.folder.has_curvature()
        if self.subject.ranks is not None:
            self.subject.ranks.agree("whether the curvature is there", saved)
        return saved

    @cached_property
    def curvature(self) -> Curvature | None:
        """The result of the stage; None stands for the identity."""
        if self.method is None:
            warnings.warn(
                "fit() was not called: H is the identity, and scores are products of gradients; "
                "call fit() for curvature, or fit(None) to score without",
                stacklevel=4,  # a cached property is called by functools
            )
        if self.method in (None, "none", "unroll"):
            return None
        path = self.folder.curvature
        if not self._is_saved():
            run = self.folder.path
            raise ValueError(f"the curvature of {run} is not finished; run: isokron fit {run}")
        curvature = Curvature.load(path, self.subject.model)
        self.fingerprints.check(path, "curvature", curvature.fingerprint)
        return curvature

    def inverse(self, damping: float) -> Curvature | None:
        """H⁻¹, damped by `damping` of each layer's mean eigenvalue."""
        if self.curvature is None:
            return None
        # Cholesky factors take no longer to compute than to read from disk
        if damping not in self._inverses:
            self._inverses[damping] = self.curvature.damped_inverse(damping)
        return self._inverses[damping]

    def from_optimizer(self, optimizer: Any) -> None:
        """The curvature that an optimizer has kept, without a pass over the data."""
        path = Path(optimizer) if isinstance(optimizer, str | Path) else None
        saved = optimizer if path is None else read_checkpoint(path)
        curvature, origin = curvature_from_optimizer(self.subject.model, self.subject.layers, saved)
        statistics = {name: layer.statistics for name, layer in curvature.layers.items()}
        settings: dict[str, Any] = {"method": origin.method, "fisher": "empirical"}
        settings["optimizer"] = {"name": origin.name, "step": origin.step}
        settings["optimizer"]["digest"] = hash_of(statistics)[:16]
        earlier = self.folder.stage("fit") or {}
        if earlier.get("optimizer") == settings["optimizer"]:
            settings = earlier  # the checkpoint may be in another place now
        elif path is not None:
            settings["checkpoint"] = str(path.resolve())
        self.run(settings, lambda: curvature)


def check_fit(settings: Mapping[str, Any], count: int, loss: Any) -> None:
    """Refuse settings of `Attributor.fit` that no curvature has. count: examples of the run."""
    for name, choices in (("method", METHODS), ("fisher", FISHERS), ("sharing", SHARINGS)):
        if settings[name] not in choices:
            raise ValueError(f"{name} must be one of {choices}, got {settings[name]!r}")
    examples, fisher = settings["examples"], settings["fisher"]
    if examples is not None and not 1 <= examples <= count:
        raise ValueError(
            f"examples to fit must be from 1 to the {count} of the run, got {examples}"
        )
    if fisher != "empirical" and not isinstance(loss, Likelihood):
        raise ValueError(
            f"fisher {fisher!r} needs a loss that knows its distribution, such as "
            "isokron.losses.CrossEntropy(), or a task with logits; use 'empirical'"
        )
