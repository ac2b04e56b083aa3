"""Keep the curvature of a Trainer run, and explain the trained model with it.

    python examples/attribute_trainer.py [--steps 60] [--folder runs/explained]

SOAP estimates curvature while it trains, and the Trainer saves it with the optimizer. A callback
copies what attribution needs from every checkpoint, so that old checkpoints may be deleted; later
the training examples behind a query are found without another pass over the data for curvature.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

import isokron

ANIMALS = ("cat", "dog", "owl", "bee", "fox", "hen", "ant", "elk")
SOUNDS = ("meows", "barks", "hoots", "buzzes", "yelps", "clucks", "is silent", "bugles")


class KeepCurvature(TrainerCallback):
    """Copy the optimizer's state, which holds the curvature, from each checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved = Path(args.output_dir) / f"checkpoint-{state.global_step}" / "optimizer.pt"
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(saved, self.folder / f"curvature-{state.global_step:06d}.pt")


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One loss per example, as attribution needs it: the sum over its tokens."""
    tokens = batch["input_ids"]
    logits = model(input_ids=tokens).logits[:, :-1]
    return nn.functional.cross_entropy(logits.mT, tokens[:, 1:], reduction="none").sum(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", default=None, help="where checkpoints and curvature are saved")
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp())

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=24,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    texts = [f"the {animal} {sound}" for animal, sound in zip(ANIMALS, SOUNDS, strict=True)]
    rows: Any = [{"input_ids": torch.tensor(list(text.ljust(20).encode()))} for text in texts]
    arguments = TrainingArguments(
        str(folder / "checkpoints"),
        max_steps=args.steps,
        per_device_train_batch_size=4,
        logging_steps=10,
        save_steps=args.steps // 2,
        save_total_limit=1,
        report_to=[],
        disable_tqdm=True,
    )
    # scores agree better with retraining for a longer mean of second moments: docs/refinement.md
    optimizer = isokron.SOAP(isokron.param_groups(model), lr=1e-2, betas=(0.9, 0.99))
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{**row, "labels": row["input_ids"]} for row in rows],
        optimizers=(optimizer, None),
        callbacks=[KeepCurvature(folder)],
    )
    trainer.train()
    for record in trainer.state.log_history:
        if "loss" in record:
            print(f"step {record['step']:4}  loss {float(record['loss']):.4f}")

    newest = sorted(folder.glob("curvature-*.pt"))[-1]
    attributor = isokron.Attributor(folder / "attribution", model.cpu(), rows, loss=loss)
    attributor.fit(optimizer=torch.load(newest, weights_only=True))
    scores = attributor.score(rows[:3])
    for query, top in zip(texts, scores.top(1), strict=False):
        print(f"{query!r} was taught by {texts[int(top.proponents[0].id)]!r}")


if __name__ == "__main__":
    main()
