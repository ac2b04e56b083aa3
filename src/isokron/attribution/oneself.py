"""The influence of examples on themselves: large for what is rare, or labelled wrongly."""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from isokron.attribution.asking import Asker
from isokron.attribution.influence import on_oneself
from isokron.attribution.run import Run
from isokron.attribution.verbs import Progress, silent
from isokron.distributed.team import in_turn, share, side_by_side, together
from isokron.files import write_atomically


def self_influence(asker: Asker, progress: Progress = silent) -> Tensor:
    """⟨∇, H⁻¹∇⟩ of every training example: [N].

    A whitened store of examples has it as squared lengths of rows. Without one, gradients are made
    once more, batch by batch.
    """
    store, subject, ranks = asker.store, asker.run.subject, asker.run.ranks
    with together(ranks, "scoring examples"):
        if asker.whitened and store is not None and not store.plan.per_token:
            blocks = store.blocks(asker.memory, share(ranks, len(store.shards)))
            parts = [block.float().square().sum(1) for _, block in blocks]
            found = torch.cat(parts) if parts else torch.empty(0)
        else:
            batches = subject.counted(lambda done, total: progress("score", done, total))
            own = share(ranks, len(batches))
            found, _ = on_oneself(subject, asker.inverse, batches[own.start : own.stop])
    return side_by_side(ranks, found)


def write_self(run: Run, found: Tensor) -> Path:
    """Into self.safetensors, under `self_influence`."""
    path = run.folder / "self.safetensors"
    with in_turn(run.ranks, "writing scores"):
        if run.leads:
            write_atomically(path, [save({"self_influence": found.contiguous()})])
    return path
