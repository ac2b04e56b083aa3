"""Train a Hugging Face GPT-2 (random weights, nothing downloaded) with Muon.

    python examples/train_huggingface.py [--steps 100]

The embedding is tied to the head, GPT-2 keeps its weights transposed, and its query, key and value
are one parameter: `isokron.param_groups` sees all three, and `isokron.describe` shows it.
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import isokron

TEXT = (
    "Observations are folded into statistics, statistics become an operator, "
    "and the operator is applied to a gradient. "
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    args = parser.parse_args()

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    data = torch.frombuffer(bytearray((TEXT * 20).encode()), dtype=torch.uint8).long()

    groups = isokron.param_groups(model)
    print(isokron.describe(groups))
    optimizer = isokron.Muon(groups, lr=5e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, args.steps)
    for step in range(args.steps):
        starts = torch.randint(len(data) - 64, (16,))
        tokens = torch.stack([data[start : start + 64] for start in starts])
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:4}  loss {loss.item():.4f} nats per byte")

    prompt = torch.tensor([list(b"Observations are ")])
    model.eval()
    with torch.no_grad():
        for _ in range(40):
            prompt = torch.cat([prompt, model(prompt[:, -64:]).logits[:, -1:].argmax(-1)], 1)
    print(bytes(prompt[0].tolist()).decode(errors="replace"))


if __name__ == "__main__":
    main()
