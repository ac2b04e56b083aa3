"""Rows of gradients kept while a model is trained, so that no pass over the data is needed after.

with Recorder(model, encoding(sites, Projection(32)), folder, len(data)) as recorder:
    for numbers, batch in loader:
        recorder.batch(numbers)                 # before the forward pass
        loss(model, batch).mean().backward()
        optimizer.step()
        recorder.commit()
        optimizer.zero_grad()
score_store(recorder.store, queries)
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.attribution.building import shard_size
from isokron.attribution.encoding import Encoding
from isokron.attribution.recording.announced import Announced, Inside, Seen
from isokron.attribution.recording.scratch import Scratch
from isokron.attribution.storage.manifest import MANIFEST
from isokron.attribution.storage.store import Store
from isokron.attribution.storage.writer import StoreWriter
from isokron.curvature.sites import Site

SCRATCH = ".rows.tmp"
CHOICES = {"reduction": ("mean", "sum"), "keep": ("last", "sum"), "unseen": ("raise", "zero")}


class Recorder:
    """Keeps the rows of `examples` training examples, and makes a store of them when it is left.

    A row is the gradient of the sum of an example's losses, as in any store. `reduction`: what the
    loss is of those in a batch, by which gradients are brought back to that. `accumulation`: how
    many batches make a step at most; a mean is divided by it too. `scaler`: of mixed precision, by
    whose scale gradients are divided; steps that it skips are not kept. `keep`: the row of the last
    epoch, or the sum over all, each times the learning rate that `optimizer` has for the layer
    (TracIn, 2002.08484). `unseen`: what to do about examples that never came.

    Only passes that were announced, of layers in training, are seen, with dropout as it fell, and
    training goes on bit by bit as without. `ids`, `settings`, `dtype`, `per_shard`: of the store.
    """

    store: Store

    def __init__(
        self,
        model: nn.Module,
        encoding: Encoding,
        folder: str | Path,
        examples: int,
        *,
        reduction: str = "mean",
        accumulation: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        keep: str = "last",
        optimizer: torch.optim.Optimizer | None = None,
        unseen: str = "raise",
        ids: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
        dtype: torch.dtype = torch.float32,
        per_shard: int | None = None,
    ) -> None:
        for name, value in (("reduction", reduction), ("keep", keep), ("unseen", unseen)):
            if value not in CHOICES[name]:
                raise ValueError(f"{name} must be one of {CHOICES[name]}, got {value!r}")
        if accumulation < 1:
            raise ValueError(f"accumulation must be at least 1, got {accumulation}")
        if keep == "sum" and optimizer is None:
            raise ValueError("keep='sum' weighs by learning rates; give the optimizer")
        if len(ids) not in (0, examples):
            raise ValueError(f"ids must name all {examples} examples, got {len(ids)}")
        if (Path(folder) / MANIFEST).exists():
            raise ValueError(f"{folder} has a finished store in it; give a new folder")
        self.model, self.encoding, self.examples = model, encoding, examples
        self.reduction, self.accumulation, self.scaler = reduction, accumulation, scaler
        self.keep, self.optimizer, self.unseen, self.ids = keep, optimizer, unseen, ids
        _check_learning(self._sites())
        self.writer = StoreWriter.open(
            folder,
            settings={**(settings or {}), "recorded": {"reduction": reduction, "keep": keep}},
            columns=encoding.columns(),
            examples=examples,
            examples_per_shard=per_shard or shard_size(encoding, examples),
            dtype=dtype,
        )
        self.scratch: Scratch | None = None
        self.announced: list[Announced] = []
        self.handles: list[Any] = []
        self.skipped = 0  # steps

    def __enter__(self) -> "Recorder":
        path = self.writer.folder / SCRATCH
        self.scratch = Scratch(path, self.examples, self.encoding.width)
        attention: dict[nn.Module, list[Site]] = {}
        for site in self._sites():
            if isinstance(site.module, nn.MultiheadAttention):
                attention.setdefault(site.module, []).append(site)
            else:
                hook = site.module.register_forward_hook(Seen(self.current, site), with_kwargs=True)
                self.handles.append(hook)
        for module, sites in attention.items():
            inside = Inside(self.current, sites)
            self.handles.append(module.register_forward_pre_hook(inside.enter))
            self.handles.append(module.register_forward_hook(inside.leave, always_call=True))
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        """Remove the hooks, and unless there was an error write the store."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        if kind is None:
            self.finish()
        elif self.scratch is not None:
            self.scratch.close()

    def batch(self, numbers: Tensor | Sequence[int], terms: float | None = None) -> None:
        """Say which examples the next pass is of, by their numbers from 0, in their order.

        `terms`: what the sum of losses is divided by in a mean: as many as there are examples, if
        it is not given. For a mean over tokens, give the number of those that count; what the loss
        is divided by for accumulation is no part of it.
        """
        if self.scratch is None or not self.handles:
            raise RuntimeError("a recorder records inside of `with` only; enter it first")
        if len(self.announced) >= self.accumulation:
            raise RuntimeError(
                f"{len(self.announced) + 1} batches were announced without commit(), and "
                f"accumulation is {self.accumulation}; call commit() after every optimizer step, "
                "drop() where there is none, or give the accumulation"
            )
        found = torch.as_tensor(numbers, dtype=torch.int64).cpu().flatten()
        outside = found[(found < 0) | (found >= self.examples)]
        if len(outside) or not len(found):
            got = int(outside[0]) if len(outside) else "none"
            raise ValueError(f"numbers must be from 0 to {self.examples - 1}, got {got}")
        if terms is not None and (self.reduction == "sum" or not 0 < terms < float("inf")):
            raise ValueError(
                f"terms is what a mean is taken over, a number above 0, got {terms} for "
                f"reduction={self.reduction!r}"
            )
        count = float(len(found) if terms is None else terms) * self.accumulation
        factor = count if self.reduction == "mean" else 1.0
        if self.scaler is not None:
            factor /= self.scaler.get_scale()
        factors = {site.name: factor * self._weight(site) for site in self._sites()}
        self.announced.append(Announced(self.encoding, found, factors))

    def commit(self) -> None:
        """Keep what was seen since the last step, after the optimizer's."""
        if not self.announced:
            raise RuntimeError("commit() without a batch; call batch() before the forward pass")
        assert self.scratch is not None
        done = [(each.numbers, each.finished()) for each in self.announced]
        self.drop()
        for numbers, rows in done:
            if rows is None:
                raise RuntimeError(
                    "no gradient came of a batch that was announced; call batch() before the "
                    "forward pass of a model in training, and drop() where none goes back"
                )
            finite = rows.isfinite().all(1).cpu()
            if not bool(finite.all()):
                if self.scaler is not None:  # which did not step either
                    self.skipped += 1
                    return
                bad = int(numbers[~finite][0])
                raise FloatingPointError(
                    f"the gradient of example {bad} is not finite; look at its data, or give the "
                    "scaler if there is one"
                )
        for numbers, rows in done:
            assert rows is not None
            put = self.scratch.put if self.keep == "last" else self.scratch.add
            put(numbers, rows.cpu())

    def drop(self) -> None:
        """Forget what was seen since the last step, where the optimizer makes none."""
        for each in self.announced:
            each.watcher.on = False
        self.announced.clear()

    def finish(self) -> Store:
        """The store of all rows, in the order of examples; leaving the recorder does this."""
        if hasattr(self, "store"):
            return self.store
        if self.announced:
            raise RuntimeError("the last batch was not committed; call commit() or drop()")
        assert self.scratch is not None
        seen, rows = self.scratch.seen, self.scratch.rows
        never = (seen == 0).nonzero()[:, 0].tolist()
        if never and self.unseen == "raise":
            raise ValueError(
                f"{len(never)} of {self.examples} examples were never seen, such as {never[:5]}; "
                "train on all, or set recorder.unseen = 'zero', and their scores are 0, and call "
                "recorder.finish() again: the rows of all others are still there"
            )
        for number in range(self.writer.plan.shards):
            first, last = self.writer.plan.span(number)
            names = self.ids[first:last] or [str(k) for k in range(first, last)]
            extra = {"seen": seen[first:last]}
            self.writer.write(number, rows[first:last], ids=names, extra=extra)
        self.store = self.writer.finish()
        self.scratch.close()
        return self.store

    def _sites(self) -> list[Site]:
        return [encoder.site for encoder in self.encoding.encoders.values()]

    def _weight(self, site: Site) -> float:
        """The learning rate of a layer where rows are summed; it is read before the step."""
        if self.keep == "last":
            return 1.0
        assert self.optimizer is not None
        own = {id(param) for param in site.module.parameters()}
        for group in self.optimizer.param_groups:
            if any(id(param) in own for param in group["params"]):
                return float(group["lr"])
        raise ValueError(f"the optimizer has no parameter of layer {site.name!r}; leave it out")

    def current(self, module: nn.Module) -> Announced | None:
        """The batch that a pass now is of, if it is one of training."""
        ready = self.announced and module.training and torch.is_grad_enabled()
        return self.announced[-1] if ready else None


def _check_learning(sites: list[Site]) -> None:
    for site in sites:
        if not any(param.requires_grad for param in site.module.parameters()):
            raise ValueError(f"layer {site.name!r} is frozen and learns nothing; leave it out")
