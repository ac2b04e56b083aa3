"""The influence of examples on themselves: large for what is rare, or labelled wrongly."""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from isokron.attribution.asking import Asker
from isokron.attribution.influence import on_oneself
from isokron.attribution.run import Run
from isokron.attribution.verbs import Progress, silent
from isokron.files import write_atomically


def self_influence(asker: Asker, progress: Progress = silent) -> Tensor:
    """⟨∇, H⁻¹∇⟩ of every training example: [N].

    A whitened store of examples has it as squared lengths of rows. Without one, gradients are made
    once more, batch by batch.
    """
    store, subject = asker.store, asker.run.subject
    if asker.whitened and store is not None and not store.plan.per_token:
        parts = [block.float().square().sum(1) for _, block in store.blocks(asker.memory)]
        return torch.cat(parts)
    found, _ = on_oneself(
        subject, asker.inverse, lambda done, total: progress("score", done, total)
    )
    return found


def write_self(run: Run, found: Tensor) -> Path:
    """Into self.safetensors, under `self_influence`."""
    path = run.folder / "self.safetensors"
    write_atomically(path, [save({"self_influence": found.contiguous()})])
    return path
