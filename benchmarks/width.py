"""Does the best learning rate of a narrow model carry over to a wide one?

    python benchmarks/width.py [--tasks speeches-tiny,llama-bpe]

Two families of models with 2 layers, on speeches: byte transformers with heads of 16 dimensions,
all parameters with one learning rate; and the Llama of task llama-bpe with heads of 40 dimensions,
its embedding tied to its head, everything but hidden matrices with 3 times their rate. 50 steps of
8 x 64 bytes or tokens, linear warmup and a cosine, one seed, one thread. Learning rates are powers
of two; a sweep is extended until its best rate has a worse one on either side. Every width but the
base is swept with `param_groups(model, base_shapes=base)` and without; with it, logits of a tied
head are divided by the growth of the width. Prints the best rates, and by how much more an update
of the byte transformer changes outputs as the width grows; writes the losses of the widest one to
docs/width.svg. Runs are in docs/benchmarks/width.json, written after each; what is there is not
trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
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
from isokron.tasks.llama import MODEL
from isokron.tasks.speeches import CONTEXT, ByteTransformer
from isokron.training import batch_order, warmup_cosine

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
Sweeps = dict[tuple[str, int, bool], Losses]  # by optimizer, width, with base_shapes or without


def byte_transformer(width: int, scaled: bool) -> nn.Module:
    # heads of one size at every width: their softmax needs no other scale
    return ByteTransformer(CONTEXT, layers=2, width=width, heads=width // 16)


def llama(width: int, scaled: bool) -> nn.Module:
    import transformers

    size = MODEL["hidden_size"] // MODEL["num_attention_heads"]
    heads = width // size
    sizes = {
        "hidden_size": width,
        "intermediate_size": MODEL["intermediate_size"] * width // MODEL["hidden_size"],
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(MODEL | sizes)))
    if scaled:  # the head is stepped as the embedding that it is
        growth = width / FAMILIES["llama-bpe"].base
        model.lm_head.register_forward_hook(lambda module, inputs, logits: logits / growth)
    return model


@dataclass(frozen=True)
class Family:
    """Models of one task in several widths, and how they are trained."""

    build: Callable[[int, bool], nn.Module]  # (width, with base_shapes)
    base: int
    widths: tuple[int, ...]
    optimizers: tuple[str, ...]
    first: range  # exponents of the rates tried first at the base width
    settings: dict[str, Any] = field(default_factory=dict)  # of param_groups

    def model(self, width: int, scaled: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return self.build(width, scaled)

    def groups(self, model: nn.Module, scaled: bool) -> list[dict[str, Any]]:
        base = self.model(self.base) if scaled else None
        return isokron.param_groups(model, base_shapes=base, **self.settings)


FAMILIES = {
    "speeches-tiny": Family(byte_transformer, 64, (256, 512), tuple(CLASSES), range(-9, -4)),
    "llama-bpe": Family(
        llama,
        80,
        (240,),
        ("adamw", "shampoo"),
        range(-8, -5),
        {"lr_scale": {"matrices": 1.0, "*": 3.0}},
    ),
}
read_task = cache(load)


def train(task: str, optimizer: str, width: int, scaled: bool, exponent: int) -> dict[str, Any]:
    """The loss on held-out windows after training; None if it diverged."""
    family, data = FAMILIES[task], read_task(task)
    model = family.model(width, scaled)
    stepper = CLASSES[optimizer](family.groups(model, scaled), lr=2.0**exponent)
    schedule = LambdaLR(stepper, lambda step: warmup_cosine(step, STEPS))
    for indices in batch_order(len(data.train), BATCH, STEPS, seed=0):
        loss = data.losses(model, data.train.batch(indices)).mean()
        if not math.isfinite(loss.item()):
            return {"loss": None}
        loss.backward()
        stepper.step()
        schedule.step()
        stepper.zero_grad()
    with torch.no_grad():
        final = data.losses(model, data.held_out.batch(torch.arange(WINDOWS))).mean().item()
    return {"loss": final if math.isfinite(final) else None}


def sweep(
    records: Records, task: str, optimizer: str, width: int, scaled: bool, exponents: Iterable[int]
) -> Losses:
    """Losses at these rates, and at further ones until the best is not at an end."""
    losses: Losses = {}
    queue = list(exponents)
    while queue:
        exponent = queue.pop()
        key: dict[str, Any] = {
            "task": task,
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
    parser.add_argument("--tasks", default=",".join(FAMILIES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    tasks = args.tasks.split(",")
    print("\n".join(tables(tasks)))
    if "speeches-tiny" in tasks:
        base, sweeps = swept(Records("width"), "speeches-tiny")
        svg = standalone(plot(base, sweeps, max(FAMILIES["speeches-tiny"].widths)))
        write_atomically(FOLDER.parent / "width.svg", [svg.encode()])


def swept(records: Records, task: str) -> tuple[dict[str, Losses], Sweeps]:
    """Sweeps at the base width, and at the others with base_shapes and without."""
    family = FAMILIES[task]
    base = {
        name: sweep(records, task, name, family.base, False, family.first)
        for name in family.optimizers
    }
    sweeps: Sweeps = {}
    for width, scaled, name in product(family.widths, (True, False), family.optimizers):
        best = best_rate(base[name])
        # without base_shapes the best rate falls as a power of the width, from ½ to 1
        middle = best if scaled else best - round(0.7 * math.log2(width / family.base))
        start = dict.fromkeys((*neighbours(middle), middle, best))
        sweeps[name, width, scaled] = sweep(records, task, name, width, scaled, start)
    return base, sweeps


def tables(tasks: Sequence[str] = tuple(FAMILIES)) -> list[str]:
    """Best rates with their losses; the loss at the base's best rate; changes of outputs."""
    records, lines = Records("width"), []
    for task in tasks:
        lines += ["", *rate_tables(records, task)]
    if "speeches-tiny" in tasks:
        lines += ["", *change_table(records, "speeches-tiny")]
    return lines[1:]


def rate_tables(records: Records, task: str) -> list[str]:
    family, (base, sweeps) = FAMILIES[task], swept(records, task)
    columns = list(product(family.widths, (True, False)))
    heads = [f"{width}, {'base_shapes' if scaled else 'without'}" for width, scaled in columns]
    lines = [f"| {task}: best rate, loss | {family.base} | {' | '.join(heads)} |"]
    lines.append("|---" * (2 + len(heads)) + "|")
    for name in family.optimizers:
        best = [base[name], *(sweeps[name, *column] for column in columns)]
        cells = [f"2^{best_rate(losses)}, {min(losses.values()):.4f}" for losses in best]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"| at the best rate of {family.base} | {' | '.join(family.optimizers)} |"]
    lines.append("|---" * (1 + len(family.optimizers)) + "|")
    for (width, scaled), head in zip(columns, heads, strict=True):
        at_best = [sweeps[name, width, scaled].get(best_rate(base[name])) for name in base]
        cells = ["not run" if loss is None else f"{loss:.4f}" for loss in at_best]
        lines.append(f"| {head} | {' | '.join(cells)} |")
    return lines


def output_change(task: str, optimizer: str, width: int) -> dict[str, Any]:
    """RMS of UX over that of X, U the update of step 8 at lr = 1 and X a hidden matrix's inputs.

    The geometric mean over all hidden matrices, without base_shapes.
    """
    data, model, lr = read_task(task), FAMILIES[task].model(width), 1e-4
    stepper = CLASSES[optimizer](isokron.param_groups(model), lr=lr, weight_decay=0.0)
    inputs: dict[nn.Module, Tensor] = {}
    blocks = model.get_submodule("blocks")
    layers = [layer for layer in blocks.modules() if isinstance(layer, nn.Linear)]
    for layer in layers:
        layer.register_forward_hook(lambda layer, x, _: inputs.update({layer: x[0].detach()}))
    for indices in batch_order(len(data.train), BATCH, 8, seed=0):
        before = [layer.weight.detach().clone() for layer in layers]
        data.losses(model, data.train.batch(indices)).mean().backward()
        stepper.step()
        stepper.zero_grad()
    logs = []
    for layer, old in zip(layers, before, strict=True):
        change = inputs[layer] @ (layer.weight.detach() - old).T / lr
        ratio = change.square().mean() / inputs[layer].square().mean()
        logs.append(0.5 * ratio.log().item())
    return {"change": math.exp(statistics.fmean(logs))}


def change_table(records: Records, task: str) -> list[str]:
    """By which factor outputs change more than at the base width, and what lr_scale assumes."""
    family = FAMILIES[task]
    widths = (2 * family.base, *family.widths)
    lines = ["| | " + " | ".join(f"{width}: measured | rule" for width in widths) + " |"]
    lines.append("|---" * (1 + 2 * len(widths)) + "|")
    for name in family.optimizers:
        changes = {
            width: records.once(
                partial(output_change, task, name, width),
                task=task,
                measure="change",
                optimizer=name,
                width=width,
            )["change"]
            for width in (family.base, *widths)
        }
        cells = []
        for width in widths:
            groups = CLASSES[name](family.groups(family.model(width), True)).param_groups
            by_name = {n: group for group in groups for n in group["param_names"]}
            scale = by_name["blocks.0.query.weight"]["lr_scale"]
            cells.append(f"{changes[width] / changes[family.base]:.2f} | {1 / scale:.2f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def plot(base: dict[str, Losses], sweeps: Sweeps, width: int) -> Plot:
    """Excess loss over the best of its sweep, by rate relative to the best at the base width."""
    narrow = FAMILIES["speeches-tiny"].base
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
        f"Learning rates of width {narrow} at width {width}",
        f"Loss above the best of the sweep at width {width}, by the learning rate divided by the "
        f"best one at width {narrow}. Thick lines: with base_shapes; thin lines: without. A ring "
        "marks the best rate.",
        f"learning rate / best learning rate at width {narrow}",
        "nats per byte above the best",
        lines,
        marks,
        x_log=True,
    )


if __name__ == "__main__":
    main()
