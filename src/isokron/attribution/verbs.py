"""What is done in a run: fit curvature, build a store of gradients, score queries against it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from isokron.attribution.building import build_store
from isokron.attribution.encoding import SCOPES, Encoding, encoding
from isokron.attribution.projection import Projection
from isokron.attribution.run import Run
from isokron.attribution.sides import check_separable
from isokron.attribution.storage.store import Store
from isokron.curvature import Curvature
from isokron.curvature import fit as fit_curvature
from isokron.curvature.division import Division
from isokron.distributed.team import in_turn, team

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Progress = Callable[[str, int, int], None]  # stage, examples done, of how many


def silent(stage: str, done: int, total: int) -> None:
    """No progress display."""


@dataclass(frozen=True)
class Fit:
    """How curvature is fitted: see isokron.curvature.fit. `examples`: to so many of the training
    examples, evenly spread; None for all."""

    method: str = "kfac"
    fisher: str = "empirical"
    sharing: str = "expand"
    seed: int = 0
    examples: int | None = None


@dataclass(frozen=True)
class Build:
    """What a store keeps. `dim`: p of the projection, None for whole gradients; `whiten`: curvature
    is folded in, with `damping` as a multiple of the mean eigenvalue; `tokens`: rows by token."""

    dim: int | None = 32
    kind: str = "rademacher"
    scope: str = "layer"
    seed: int = 0
    whiten: bool = True
    damping: float = 0.1
    dtype: str = "float32"
    tokens: bool = False

    def __post_init__(self) -> None:
        for name, choices in (("dtype", tuple(DTYPES)), ("scope", SCOPES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {choices}, got {getattr(self, name)!r}")
        if not self.damping >= 0:
            raise ValueError(f"damping must be at least 0, got {self.damping!r}")
        if self.scope == "global" and self.dim is None:
            raise ValueError("scope='global' is a projection of all layers; give it a dim")
        if self.dim is not None:
            self.projection()

    def projection(self) -> Projection | None:
        return None if self.dim is None else Projection(self.dim, self.kind, self.seed)


def fit(run: Run, settings: Fit | None = None, progress: Progress = silent) -> Curvature:
    """The curvature of the model on its training examples; loaded where it is there already."""
    settings = settings or Fit()
    subject, count = run.subject, settings.examples
    if count is not None and not 1 <= count <= len(subject.train):
        raise ValueError(
            f"examples to fit must be from 1 to the {len(subject.train)} of the run, got {count}"
        )
    run.enter("fit", asdict(settings))
    there = (run.curvature / "curvature.json").exists()
    if run.ranks is not None:
        run.ranks.agree("whether the curvature is there", there)
    if there:
        return Curvature.load(run.curvature, subject.model)
    batches = subject.counted(lambda done, total: progress("fit", done, total), count)
    found = fit_curvature(
        subject.model,
        batches,
        subject.loss,
        settings.method,
        fisher=settings.fisher,
        sharing=settings.sharing,
        layers=subject.layers or None,
        seed=settings.seed,
        division=Division(team(run.ranks)),
    )
    with in_turn(run.ranks, "saving the curvature"):
        if run.leads:
            found.save(run.curvature)
    return found


def build(
    run: Run,
    settings: Build | None = None,
    progress: Progress = silent,
    memory: int | None = None,
    per_shard: int | None = None,
) -> Store:
    """The store of all training examples' gradients; finished shards of an earlier call stay.

    `memory`: bytes that may be used for gradients.
    """
    settings = settings or Build()
    known = run.stage("fit")
    if settings.whiten and known is not None:
        check_separable(known["method"])
    how = encoding_of(run, settings)
    run.enter("build", asdict(settings))
    subject, total = run.subject, len(run.subject.train)
    return build_store(
        run.gradients,
        subject.model,
        subject.train,
        subject.loss,
        how,
        ids=subject.ids,
        show=subject.show(),
        settings={"build": asdict(settings), "fit": run.stage("fit") if settings.whiten else None}
        | subject.digests(),
        tokens=settings.tokens,
        dtype=DTYPES[settings.dtype],
        batch_size=subject.batch_size,
        per_shard=per_shard,
        memory=memory,
        progress=lambda done: progress("build", done, total),
        ranks=run.ranks,
    )


def encoding_of(run: Run, settings: Build) -> Encoding:
    """How gradients become rows of the run's store."""
    whiten = None
    if settings.whiten:
        whiten = fitted(run, "a whitened store")
    return encoding(
        run.subject.sites,
        settings.projection(),
        scope=settings.scope,
        whiten=whiten,
        damping=settings.damping,
    )


def fitted(run: Run, what: str) -> Curvature:
    """The curvature of the run, which `what` needs."""
    if not (run.curvature / "curvature.json").exists():
        raise ValueError(f"{what} needs curvature, and {run.folder} has none; fit it first")
    return Curvature.load(run.curvature, run.subject.model)
