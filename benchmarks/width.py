"""Does the best learning rate of a narrow model carry over to a wide one?

    python benchmarks/width.py [--widths 256,512] [--optimizers adamw,muon]

Byte transformers of 2 layers and heads of 16 dimensions are trained on speeches: 50 steps of 8 x 64
bytes, linear warmup and a cosine, one seed, one thread. Learning rates are powers of two; a sweep
is extended until its best rate has a worse one on either side. Width 64 is the base; every other
width is swept with `param_groups(model, base_shapes=base)` and without. Prints the best rates, and
by how much more an update changes outputs as the width grows; writes the losses of the widest model
to docs/width.svg. Runs are in docs/benchmarks/width.json, written after each; what is there is not
trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from records import FOLDER, Records
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron.files import write_atomically
from isokron.report.charts import Line, Mark, Plot, standalone
from isokron.tasks import load
from isokron.tasks.speeches import CONTEXT, ByteTransformer
from isokron.training import batch_order, warmup_cosine

BASE = 64
STEPS, BATCH = 50, 8
WINDOWS = 64  # for evaluation
CLASSES = {
    "adamw": isokron.AdamW,
    "muon": isokron.Muon,
    "soap": isokron.SOAP,
    "shampoo": isokron.Shampoo,
    "katie": isokron.Katie,
}
Losses = dict[int, float]  # by learning rate, as an exponent of 2; infinite where a run diverged


def make_model(width: int) -> ByteTransformer:
    torch.manual_seed(0)
    # heads of one size at every width: their softmax needs no other scale
    return ByteTransformer(CONTEXT, layers=2, width=width, heads=width // 16)


def train(optimizer: str, width: int, scaled: bool, exponent: int) -> dict[str, Any]:
    """The loss on held-out windows after training; None if it diverged."""
    task, model = load("speeches-tiny"), make_model(width)
    groups = isokron.param_groups(model, base_shapes=make_model(BASE) if scaled else None)
    stepper = CLASSES[optimizer](groups, lr=2.0**exponent)
    schedule = LambdaLR(stepper, lambda step: warmup_cosine(step, STEPS))
    for indices in batch_order(len(task.train), BATCH, STEPS, seed=0):
        loss = task.losses(model, task.train.batch(indices)).mean()
        if not math.isfinite(loss.item()):
            return {"loss": None}
        loss.backward()
        stepper.step()
        schedule.step()
        stepper.zero_grad()
    with torch.no_grad():
        final = task.losses(model, task.held_out.batch(torch.arange(WINDOWS))).mean().item()
    return {"loss": final if math.isfinite(final) else None}


def sweep(
    records: Records, optimizer: str, width: int, scaled: bool, exponents: Iterable[int]
) -> Losses:
    """Losses at these rates, and at further ones until the best is not at an end."""
    losses: Losses = {}
    queue = list(exponents)
    while queue:
        exponent = queue.pop()
        key: dict[str, Any] = {
            "optimizer": optimizer,
            "width": width,
            "scaled": scaled,
            "exponent": exponent,
        }
        loss = records.once(partial(train, **key), **key)["loss"]
        losses[exponent] = math.inf if loss is None else loss
        if not queue:
            queue = [near for near in neighbours(best_rate(losses)) if near not in losses]
    return losses


def best_rate(losses: Losses) -> int:
    return min(losses, key=losses.__getitem__)


def neighbours(exponent: int) -> tuple[int, int]:
    return exponent - 1, exponent + 1


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", default="256,512")
    parser.add_argument("--optimizers", default=",".join(CLASSES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    optimizers = args.optimizers.split(",")
    widths = [int(width) for width in args.widths.split(",")]
    base, sweeps = swept(Records("width"), optimizers, widths)
    print("\n".join(tables(optimizers, widths)))
    svg = standalone(plot(base, sweeps, max(widths)))
    write_atomically(FOLDER.parent / "width.svg", [svg.encode()])


Sweeps = dict[tuple[str, int, bool], Losses]  # by optimizer, width, with base_shapes or without


def swept(
    records: Records, optimizers: Sequence[str], widths: Sequence[int]
) -> tuple[dict[str, Losses], Sweeps]:
    """Sweeps at the base width, and at the others with base_shapes and without."""
    base = {name: sweep(records, name, BASE, False, range(-9, -4)) for name in optimizers}
    sweeps: Sweeps = {}
    for width, scaled, name in product(widths, (True, False), optimizers):
        best = best_rate(base[name])
        # without base_shapes the best rate falls as a power of the width, from ½ to 1
        middle = best if scaled else best - round(0.7 * math.log2(width / BASE))
        start = dict.fromkeys((*neighbours(middle), middle, best))
        sweeps[name, width, scaled] = sweep(records, name, width, scaled, start)
    return base, sweeps


def tables(
    optimizers: Sequence[str] = tuple(CLASSES), widths: Sequence[int] = (256, 512)
) -> list[str]:
    """Best rates with their losses; the loss at the base's best rate; changes of outputs."""
    records = Records("width")
    base, sweeps = swept(records, optimizers, widths)
    columns = list(product(widths, (True, False)))
    heads = [f"{width}, {'base_shapes' if scaled else 'without'}" for width, scaled in columns]
    lines = [f"| best rate, loss | {BASE} | {' | '.join(heads)} |", "|---" * (2 + len(heads)) + "|"]
    for name in optimizers:
        best = [base[name], *(sweeps[name, *column] for column in columns)]
        cells = [f"2^{best_rate(losses)}, {min(losses.values()):.4f}" for losses in best]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| at the best rate of {BASE} | {' | '.join(optimizers)} |"]
    lines.append("|---" * (1 + len(optimizers)) + "|")
    for (width, scaled), head in zip(columns, heads, strict=True):
        at_best = [sweeps[name, width, scaled].get(best_rate(base[name])) for name in optimizers]
        cells = ["not run" if loss is None else f"{loss:.4f}" for loss in at_best]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return [*lines, "", *change_table(records, optimizers, (128, *widths))]


def output_change(optimizer: str, width: int) -> dict[str, Any]:
    """RMS of UX over that of X, U the update of step 8 at lr = 1 and X a hidden matrix's inputs.

    The geometric mean over all hidden matrices, without base_shapes.
    """
    task, model, lr = load("speeches-tiny"), make_model(width), 1e-4
    stepper = CLASSES[optimizer](isokron.param_groups(model), lr=lr, weight_decay=0.0)
    inputs: dict[nn.Module, Tensor] = {}
    layers = [layer for layer in model.blocks.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, x, _: inputs.update({layer: x[0].detach()}))
    for indices in batch_order(len(task.train), BATCH, 8, seed=0):
        before = [layer.weight.detach().clone() for layer in layers]
        task.losses(model, task.train.batch(indices)).mean().backward()
        stepper.step()
        stepper.zero_grad()
    logs = []
    for layer, old in zip(layers, before, strict=True):
        change = inputs[layer] @ (layer.weight.detach() - old).T / lr
        ratio = change.square().mean() / inputs[layer].square().mean()
        logs.append(0.5 * ratio.log().item())
    return {"change": math.exp(statistics.fmean(logs))}


def change_table(records: Records, optimizers: Sequence[str], widths: Sequence[int]) -> list[str]:
    """By which factor outputs change more than at the base width, and what lr_scale assumes."""
    lines = ["| | " + " | ".join(f"{width}: measured | rule" for width in widths) + " |"]
    lines.append("|---" * (1 + 2 * len(widths)) + "|")
    for name in optimizers:
        changes = {
            width: records.once(
                partial(output_change, name, width), measure="change", optimizer=name, width=width
            )["change"]
            for width in (BASE, *widths)
        }
        cells = []
        for width in widths:
            groups = isokron.param_groups(make_model(width), base_shapes=make_model(BASE))
            by_name = {n: g for g in CLASSES[name](groups).param_groups for n in g["param_names"]}
            scale = by_name["blocks.0.query.weight"]["lr_scale"]
            cells.append(f"{changes[width] / changes[BASE]:.2f} | {1 / scale:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def plot(base: dict[str, Losses], sweeps: Sweeps, width: int) -> Plot:
    """Excess loss over the best of its sweep, by rate relative to the best at the base width."""
    lines, marks = [], []
    for colour, name in enumerate(base):
        for scaled in (True, False):
            losses = sweeps[name, width, scaled]
            low, centre = min(losses.values()), best_rate(base[name])
            points = [
                (2.0 ** (exponent - centre), loss - low)
                for exponent, loss in sorted(losses.items())
                if math.isfinite(loss)
            ]
            lines.append(Line(name, colour, points, thin=not scaled))
            marks += [
                Mark(colour, x, y, f"{name}, rate × {x:g}: +{y:.3f} nats", ring=y == 0)
                for x, y in points
            ]
    return Plot(
        "width",
        f"Learning rates of width {BASE} at width {width}",
        f"Loss above the best of the sweep at width {width}, by the learning rate divided by the "
        f"best one at width {BASE}. Thick lines: with base_shapes; thin lines: without. A ring "
        "marks the best rate.",
        f"learning rate / best learning rate at width {BASE}",
        "nats per byte above the best",
        lines,
        marks,
        x_log=True,
    )


if __name__ == "__main__":
    main()
