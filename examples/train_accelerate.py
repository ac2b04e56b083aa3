"""Train a GPT-2 (random weights, nothing downloaded) with accelerate, stop it and resume it.

    python examples/train_accelerate.py [--epochs 4] [--folder runs/accelerate]
    torchrun --nproc-per-node 2 examples/train_accelerate.py --folder runs/accelerate

`prepare()` wraps the optimizer, `accumulate()` makes it step after every second batch, and
`save_state()` stores it with the model, the schedule and the random numbers. A run that is loaded
half-way ends with the same weights as one that was not stopped, in one process: on several,
accelerate does not restore the order in which it shuffles the data.
"""

import argparse
import tempfile
from typing import Any

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import set_seed  # type: ignore[import-untyped]
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import isokron

TEXT = "Observations are folded into statistics, and statistics become an operator. "
LENGTH = 32


def train(accelerator: Accelerator, epochs: int, folder: str, resume: bool) -> list[torch.Tensor]:
    """Train for `epochs`, or for the second half of them from the state that is in `folder`."""
    set_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=LENGTH,
        n_embd=48,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    text = torch.tensor(list((TEXT * 10).encode()))
    windows: Any = text.unfold(0, LENGTH, 5)  # [windows, LENGTH]
    loader: Any = DataLoader(windows, batch_size=8, shuffle=True, drop_last=True)

    optimizer = isokron.SOAP(isokron.param_groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 40))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    if resume:
        accelerator.load_state(folder)
    for epoch in range(epochs // 2 if resume else 0, epochs):
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}  loss {loss.item():.4f}")
        # at the end of an epoch: inside of one, order and dropout would not be those of this run
        if epoch + 1 == epochs // 2:
            accelerator.save_state(folder)
            accelerator.wait_for_everyone()  # nobody reads before it is written
    return [param.detach().clone() for param in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument(
        "--folder", default=None, help="where the state is saved; all processes need the same"
    )
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    folder = args.folder or tempfile.mkdtemp()
    straight = train(accelerator, args.epochs, folder, resume=False)
    accelerator.free_memory()
    accelerator.print(f"once more, from epoch {args.epochs // 2}")
    resumed = train(accelerator, args.epochs, folder, resume=True)
    same = all(map(torch.equal, straight, resumed))
    accelerator.print(f"the same weights: {same}")


if __name__ == "__main__":
    main()
