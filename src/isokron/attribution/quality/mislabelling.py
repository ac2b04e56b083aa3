"""Whether wrong labels stand out: by the influence of an example on itself, or by its loss."""

import json
from dataclasses import asdict

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor

from isokron.attribution.asking import Ask
from isokron.attribution.influence import on_oneself
from isokron.attribution.quality.labels import labels_of, with_flipped_labels
from isokron.attribution.quality.ranks import auc
from isokron.attribution.quality.retraining import Train, seed_of, trained
from isokron.attribution.run import Run, check_same
from isokron.attribution.subject import Subject
from isokron.attribution.verbs import Fit, Progress, silent
from isokron.curvature import fit as fit_curvature
from isokron.files import write_atomically
from isokron.tasks import Task


def mislabel_auc(self_influence: Tensor, flipped: Tensor) -> float:
    """How likely a flipped example has a larger self-influence, or loss, than one that is right."""
    return auc(self_influence, flipped)


def mislabelled(
    run: Run,
    task: Task,
    train: Train,
    fraction: float,
    seed: int,
    ask: Ask,
    progress: Progress = silent,
) -> dict[str, float] | None:
    """AUCs of self-influence and of losses for a model trained where labels are flipped.

    None for a fraction of 0, and tasks without labels.
    """
    if not fraction or labels_of(task) is None:
        return None
    path = run.folder / "evaluation" / "mislabelled.safetensors"
    head = {"fraction": fraction, "seed": seed, "ask": asdict(ask), "fit": run.stage("fit")}
    if path.exists():
        with safe_open(path, "pt") as file:
            check_same(path, "evaluation", json.loads(file.metadata()["settings"]), head)
            there = {name: file.get_tensor(name) for name in ("own", "losses", "flipped")}
    else:
        there = _measured(run, task, train, fraction, seed, ask, progress)
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, [save(there, {"settings": json.dumps(head)})])
    wrong = there["flipped"].bool()
    return {
        "self-influence": mislabel_auc(there["own"], wrong),
        "loss": mislabel_auc(there["losses"], wrong),
    }


def _measured(
    run: Run, task: Task, train: Train, fraction: float, seed: int, ask: Ask, progress: Progress
) -> dict[str, Tensor]:
    wrong, flipped = with_flipped_labels(task, fraction, seed_of("flipped", seed))
    model = trained(wrong, train, torch.arange(len(wrong.train)), seed_of("mislabelled", seed))
    subject = Subject(wrong, model, run.subject.layers)
    how = Fit(**(run.stage("fit") or {}))
    curvature = fit_curvature(
        model,
        subject.counted(lambda done, total: progress("fit mislabelled", done, total)),
        subject.loss,
        how.method,
        fisher=how.fisher,
        sharing=how.sharing,
        layers=subject.layers or None,
        seed=how.seed,
    )
    own, losses = on_oneself(
        subject,
        ask.inverse(curvature),
        subject.counted(lambda done, total: progress("self-influence", done, total)),
    )
    return {"own": own, "losses": losses, "flipped": flipped.to(torch.uint8)}
