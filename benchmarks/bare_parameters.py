"""Loss of a small GPT-2 under the Hugging Face Trainer: bare parameters against param_groups.

    python benchmarks/bare_parameters.py [--vocab 50257,1024] [--lr 3e-3] [--steps 20]
        [--only SOAP,Muon] [--ways bare,grouped]

"bare" is `Trainer(optimizer_cls_and_kwargs=(isokron.SOAP, {"lr": lr}))`, which passes plain
parameters; "method" is the same with route="method", which preconditions embedding and head too;
"grouped" is `Trainer(optimizers=(SOAP(isokron.param_groups(model), lr), None))`.
The tokens are a Markov chain over a Zipf-distributed vocabulary; nothing is downloaded.
`--lr default` leaves out the learning rate. Losses are the mean of the last three steps.
"""

import argparse
import tempfile
import warnings
from typing import Any

import torch
from records import recorded
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import isokron

OPTIMIZERS = ("AdamW", "SOAP", "Shampoo", "Katie", "Muon", "Quad", "Skew")
WAYS = ("method", "bare", "grouped")


def markov_text(vocab: int, rows: int, length: int) -> Tensor:
    """Each token has four successors; tokens are drawn with probability ∝ 1/rank. [rows, length]"""
    generator = torch.Generator().manual_seed(0)
    zipf = 1 / torch.arange(1, vocab + 1)
    successors = torch.multinomial(zipf, 4 * vocab, replacement=True, generator=generator)
    successors = successors.view(vocab, 4)
    tokens = [torch.multinomial(zipf, rows, replacement=True, generator=generator)]
    while len(tokens) < length:
        choice = torch.randint(4, (rows,), generator=generator)
        tokens.append(successors[tokens[-1], choice])
    return torch.stack(tokens, 1)


def final_loss(
    name: str, way: str, vocab: int, data: Tensor, steps: int, lr: float | None
) -> float:
    torch.manual_seed(0)
    special = {"bos_token_id": 0, "eos_token_id": 0}
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=vocab, n_positions=64, **special)
    model = GPT2LMHeadModel(config)
    make = getattr(isokron, name)
    options: dict[str, Any] = {} if lr is None else {"lr": lr}
    given: dict[str, Any] = {"optimizer_cls_and_kwargs": (make, options)}
    groups: list[dict[str, Any]] = isokron.param_groups(model)
    if way == "method":  # the Trainer's groups have no weight decay by default
        groups = [{"params": list(model.parameters()), "route": "method", "weight_decay": 0.0}]
    if way != "bare":
        given = {"optimizers": (make(groups, **options), None)}
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        rows = [{"input_ids": row, "labels": row} for row in data]
        trainer = Trainer(model, arguments, train_dataset=rows, **given)
        trainer.log = lambda logs, *_: trainer.state.log_history.append(logs)  # no printing
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return sum(map(float, losses[-3:])) / 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", default="50257,1024")
    parser.add_argument("--lr", default="3e-3", help="learning rates, or `default`")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--only", default=",".join(OPTIMIZERS))
    args = parser.parse_args()
    ways = args.ways.split(",")
    warnings.simplefilter("ignore")
    with recorded("bare_parameters"):
        print(f"{'vocab':>6} {'lr':>8} {'optimizer':10} {' '.join(f'{way:>7}' for way in ways)}")
        for vocab in map(int, args.vocab.split(",")):
            data = markov_text(vocab, 512, 64)
            for lr in args.lr.split(","):
                rate = None if lr == "default" else float(lr)
                for name in args.only.split(","):
                    losses = [final_loss(name, way, vocab, data, args.steps, rate) for way in ways]
                    figures = " ".join(f"{loss:7.3f}" for loss in losses)
                    print(f"{vocab:6} {lr:>8} {name:10} {figures}", flush=True)


if __name__ == "__main__":
    main()
