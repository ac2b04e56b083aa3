"""Train a small transformer with DDP or FSDP2, and resume it with another number of processes.

    torchrun --nproc-per-node 2 examples/train_distributed.py
    torchrun --nproc-per-node 2 examples/train_distributed.py --shard --checkpoint runs/d
    torchrun --nproc-per-node 4 examples/train_distributed.py --shard --checkpoint runs/d

Parameters are whole on every rank (DDP) or sharded (`--shard`, FSDP2). Each rank owns some blocks:
it alone stores and refreshes their state, and sends their directions to the ranks that need them.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isokron

VOCABULARY, LENGTH = 32, 16
KEYS = ("model_state_dict", "optim_state_dict")


class Model(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        hidden = self.tokens(x) + self.positions.weight[: x.size(1)]
        logits: Tensor = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


def batch(step: int) -> Tensor:
    """Counting upwards from a random start, by a random stride. [64, LENGTH + 1]"""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(VOCABULARY, (2, 64, 1), generator=generator)
    return (start + (1 + stride % 3) * torch.arange(LENGTH + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shard", action="store_true", help="FSDP2 instead of DDP")
    parser.add_argument("--checkpoint", type=Path, help="folder to resume from and to save in")
    args = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model()
    if ranks > 1 and args.shard:
        for module in (model.layer, model):
            fully_shard(module)
    # after fully_shard, which replaces the parameters
    optimizer = isokron.SOAP(isokron.param_groups(model), lr=1e-2, every=5)
    wrapped = DistributedDataParallel(model) if ranks > 1 and not args.shard else model
    if wrapped is not model:
        optimizer.distribute()  # FSDP2 needs no call: DTensors say which rank has what

    # torch writes .metadata last: a folder without it is not complete
    complete = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []
    begin = load_(model, optimizer, complete[-1].parent) if complete else 0
    for step in range(begin, begin + args.steps):
        tokens = batch(step).chunk(ranks)[rank]
        logits = wrapped(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 in (0, 9):
            print(f"step {step} loss {loss.item():.3f}")
    if args.checkpoint:
        saved = dict(zip(KEYS, get_state_dict(model, optimizer), strict=True))
        state_dict_saver.save(saved, checkpoint_id=args.checkpoint / f"step-{step + 1:06d}")
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def load_(model: nn.Module, optimizer: isokron.SOAP, folder: Path) -> int:
    """Load weights and optimizer state, saved by any number of ranks; return the next step."""
    saved: dict[str, Any] = dict(zip(KEYS, get_state_dict(model, optimizer), strict=True))
    state_dict_loader.load(saved, checkpoint_id=folder)
    set_state_dict(model, optimizer, **saved)
    return int(folder.name.removeprefix("step-"))


if __name__ == "__main__":
    main()
