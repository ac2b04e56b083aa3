"""Examples whose loss or gradient is not finite: refused when they are seen, or skipped."""

import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor, nn

from isokron.attribution.data import Batches, Data, Subject, to_device
from isokron.attribution.run_folder import RECORD, has_results, read_record
from isokron.attribution.score import gradient_passes
from isokron.curvature.backward import unchanged
from isokron.curvature.layers import Layer
from isokron.curvature.losses import Likelihood, Loss, losses_of
from isokron.curvature.statistics import Uses
from isokron.distributed.rank_tasks import share, together

CHOICES = ("raise", "skip")
PAIRS = 8  # at most, of the first examples, of which some may have no loss that counts
LISTED = 3  # names in a message

Reasons = dict[str, str]  # by id


def finite_pairs(
    model: nn.Module, data: Data, loss: Loss | Likelihood, on_bad: str
) -> Iterator[list[int]]:
    """The first examples with a finite loss, by two; others are refused or skipped."""
    if on_bad not in CHOICES:
        raise ValueError(f"on_bad must be one of {CHOICES}, got {on_bad!r}")
    device, pair, pairs = next(model.parameters()).device, list[int](), 0
    for number in range(len(data)):
        with unchanged(model), torch.no_grad():
            total = losses_of(loss, model, to_device(data.batch([number]), device)).sum()
        if on_bad == "raise":
            data.check_losses([number], total[None])
        if bool(total.isfinite()):
            pair.append(number)
        if len(pair) == 2:
            yield pair
            pair, pairs = [], pairs + 1
            if pairs == PAIRS:
                return
    if not pair and not pairs:
        raise FloatingPointError("no training example has a finite loss; check model and loss")
    if pair:
        yield pair


def without_bad(subject: Subject, folder: Path) -> tuple[Subject, Reasons]:
    """The subject without examples whose loss or gradient is not finite, and why they are bad.

    They are found in a pass over the data, unless the run in the folder has them recorded.
    """
    reasons: Reasons | None = None
    if (folder / RECORD).exists() and has_results(folder):
        reasons = read_record(folder)["source"].get("skipped")
    if subject.ranks is not None:
        subject.ranks.agree("the examples that are skipped", reasons)
    reasons = _bad_examples(subject) if reasons is None else reasons
    if reasons:
        listed = ", ".join(f"{name} ({reason})" for name, reason in list(reasons.items())[:LISTED])
        more = f" + {len(reasons) - LISTED} more" * (len(reasons) > LISTED)
        warnings.warn(
            f"{len(reasons)} of {len(subject.data)} training examples are skipped and have no "
            f"scores: {listed}{more}",
            stacklevel=4,
        )
    return replace(subject, data=subject.data.without(reasons)), reasons


@dataclass(frozen=True, eq=False)
class _Scan(Batches):
    """Batches that remember their losses in place of refusing them."""

    def check_losses(self, number: int, losses: Tensor) -> None:
        pass


def _bad_examples(subject: Subject) -> Reasons:
    """Examples without a finite loss and gradient, by a pass over the data that ranks share."""
    data, ranks, plan = subject.data, subject.ranks, subject.data.plan()
    part = share(ranks, len(plan))
    scan = _Scan(subject, plan[part.start : part.stop], "check")
    batches = iter(scan.numbers)
    finite: list[Tensor] = []  # of the current batch, by layer: [N]
    reasons: Reasons = {}

    def fold(layer: Layer, uses: Uses) -> None:
        dense = [uses.grads] if uses.kind == "index" else [uses.grads, uses.inputs]
        finite.extend(values.isfinite().all(3).all(2).all(0) for values in dense)

    def after() -> None:
        losses = passes.losses.tolist()
        rows = torch.stack([torch.ones_like(passes.losses, dtype=torch.bool), *finite]).all(0)
        finite.clear()
        for number, loss, is_finite in zip(next(batches), losses, rows.tolist(), strict=True):
            if not isfinite(loss):
                reasons[data.ids[number]] = f"loss {loss:g}"
            elif not is_finite:
                reasons[data.ids[number]] = "its gradient is not finite"

    with together(ranks, "checking examples"):
        passes = gradient_passes(subject, scan)
        passes.over(fold, after, check=False)
    if ranks is not None:
        texts = ranks.gather_text(json.dumps(reasons))
        reasons = {name: reason for text in texts for name, reason in json.loads(text).items()}
    return {name: reasons[name] for name in data.ids if name in reasons}
