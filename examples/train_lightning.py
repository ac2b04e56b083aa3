"""Train a small network on handwritten digits with Lightning and Shampoo, stop it and resume it.

    python examples/train_lightning.py [--epochs 6] [--folder runs/lightning]

`configure_optimizers` returns the optimizer and a schedule that Lightning drives step by step. A
run that is resumed from a checkpoint ends with the same weights as one that was not stopped.
"""

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import isokron


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Linear(64, 128), nn.GELU(), nn.Dropout(0.1)),
            *(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 10)),
        )

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = cross_entropy(self.layers(batch[0]), batch[1])
        if index == 0:
            print(f"epoch {self.current_epoch}  loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = isokron.Shampoo(isokron.param_groups(self), lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        }

    # Lightning does not store random numbers, on which dropout and the order of batches depend
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["random"] = torch.get_rng_state()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        torch.set_rng_state(checkpoint["random"])


def train(epochs: int, folder: Path, checkpoint: Path | None = None) -> nn.Module:
    """Train for `epochs`, from the start or from a checkpoint; one is saved after each epoch."""
    lightning.seed_everything(0, verbose=False)
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 16  # [1797, 64]
    loader = DataLoader(TensorDataset(images, torch.tensor(digits.target)), 64, shuffle=True)
    model = Digits()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader, ckpt_path=checkpoint)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--folder", default=None, help="where checkpoints are saved")
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp())
    straight = train(args.epochs, folder)
    checkpoint = folder / f"epoch={args.epochs // 2 - 1}.ckpt"
    print(f"once more, from {checkpoint.name}")
    resumed = train(args.epochs, folder, checkpoint)
    same = all(map(torch.equal, straight.parameters(), resumed.parameters()))
    print(f"the same weights: {same}")


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main()
