"""Train a GPT-2 (random weights, nothing downloaded) with accelerate, stop it and resume it.

    python examples/train_accelerate.py [--steps 40] [--folder runs/accelerate]
    accelerate launch --num_processes 2 examples/train_accelerate.py

`prepare()` wraps the optimizer, `accumulate()` makes it step after every second batch, and
`save_state()` stores it with the model, the schedule and the random numbers. A run that is loaded
half-way ends with the same weights as one that was not stopped.
"""

import argparse
import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import isokron

TEXT = "Observations are folded into statistics, and statistics become an operator. "
LENGTH = 32


def train(accelerator: Accelerator, steps: int, folder: str, resume: bool) -> list[torch.Tensor]:
    """Train for `steps` steps, or for the second half of them from the state that is in `folder`."""
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
    windows = torch.tensor(list((TEXT * 30).encode())).unfold(0, LENGTH, 5)  # [windows, LENGTH]
    loader = DataLoader(windows, batch_size=16, shuffle=True, drop_last=True)

    optimizer = isokron.SOAP(isokron.param_groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 40))
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    begin = steps // 2 if resume else 0
    if resume:
        accelerator.load_state(folder)
    step, epoch = begin, begin // (len(loader) // 2)
    done = begin % (len(loader) // 2)  # steps of this epoch
    while step < steps:
        loader.set_epoch(epoch)  # accelerate shuffles by the number of the epoch
        for tokens in accelerator.skip_first_batches(loader, 2 * done):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            if step % 5 == 0:
                accelerator.print(f"step {step:4}  loss {loss.item():.4f}")
            step += 1
            if step == steps // 2 and not resume:
                accelerator.save_state(folder)
            if step == steps:
                break
        epoch, done = epoch + 1, 0
    return [param.detach().clone() for param in model.parameters()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--folder", default=None, help="where the state is saved")
    args = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2)
    folder = args.folder or tempfile.mkdtemp()
    straight = train(accelerator, args.steps, folder, resume=False)
    accelerator.wait_for_everyone()
    accelerator.free_memory()
    accelerator.print(f"once more, from step {args.steps // 2}")
    resumed = train(accelerator, args.steps, folder, resume=True)
    same = all(map(torch.equal, straight, resumed))
    accelerator.print(f"the same weights: {same}")


if __name__ == "__main__":
    main()
