"""Train a GPT-2 (random weights, nothing downloaded) with the Hugging Face Trainer and SOAP.

    python examples/train_huggingface.py --folder runs/gpt2 --steps 40
    python examples/train_huggingface.py --folder runs/gpt2 --steps 80    # continues at step 40

The embedding is tied to the head, GPT-2 stores its weights transposed, and query, key and value are
one parameter: `isokron.param_groups` finds all three. The Trainer clips gradients, schedules the
learning rate and saves the optimizer; a resumed run continues with the same bits.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import isokron

TEXT = (
    "Observations are folded into statistics, statistics become an operator, "
    "and the operator is applied to a gradient. "
)
LENGTH = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--folder", default=None, help="where checkpoints are")
    args = parser.parse_args()
    folder = args.folder or tempfile.mkdtemp()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    data = torch.frombuffer(bytearray((TEXT * 20).encode()), dtype=torch.uint8).long()
    windows = data.unfold(0, LENGTH, 3)  # [windows, LENGTH]
    rows = [{"input_ids": window, "labels": window} for window in windows]

    optimizer = isokron.SOAP(isokron.param_groups(model), lr=5e-3, weight_decay=0.1)
    print(isokron.describe(optimizer))
    arguments = TrainingArguments(
        folder,
        max_steps=args.steps,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant_with_warmup",  # does not depend on the number of steps
        warmup_steps=5,
        logging_steps=5,
        save_steps=20,
        report_to=[],
        disable_tqdm=True,
    )
    # no scheduler of our own: the Trainer makes the one that its arguments name
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    resume = any(Path(folder).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=resume)
    for record in trainer.state.log_history:
        if "loss" in record:
            print(f"step {record['step']:4}  loss {float(record['loss']):.4f} nats per byte")

    prompt = torch.tensor([list(b"Observations are ")])
    model.eval()
    with torch.no_grad():
        for _ in range(40):
            prompt = torch.cat([prompt, model(prompt[:, -LENGTH:]).logits[:, -1:].argmax(-1)], 1)
    print(bytes(prompt[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
