"""Train a small transformer on many processes, stop, and go on with another number of them.

    python examples/train_distributed.py
    torchrun --nproc-per-node 2 examples/train_distributed.py --shard --checkpoint runs/d
    torchrun --nproc-per-node 4 examples/train_distributed.py --shard --checkpoint runs/d

Whole parameters (DDP), or shards of them (`--shard`, FSDP2). Each rank owns some blocks: it alone
keeps and refreshes their state, and the directions it finds go to all that need them.
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

VOCABULARY, LENGTH, BATCH = 32, 16, 64


class Model(nn.Module):
    """One layer of attention over token and place embeddings."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        hidden = self.tokens(x) + self.places.weight[: x.size(1)]
        logits: Tensor = self.head(self.layer(hidden, src_mask=mask, is_causal=True))
        return logits


def batch(step: int) -> Tensor:
    """Counting upwards from a random start, by a random stride. [BATCH, LENGTH + 1]"""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(VOCABULARY, (2, BATCH, 1), generator=generator)
    return (start + (1 + stride % 3) * torch.arange(LENGTH + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--shard", action="store_true", help="FSDP2 in place of DDP")
    parser.add_argument("--checkpoint", type=Path, help="go on from here if it is there, save here")
    args = parser.parse_args()
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if ranks > 1:
        distributed.init_process_group("gloo")

    torch.manual_seed(0)
    model = Model()
    wrapped: nn.Module = model
    if ranks > 1 and args.shard:
        fully_shard(model.layer)
        fully_shard(model)
    elif ranks > 1:
        wrapped = DistributedDataParallel(model)
    optimizer = isokron.SOAP(isokron.param_groups(model), lr=1e-2, every=5)
    if ranks > 1 and not args.shard:
        optimizer.distribute()  # shards need no word: they are owned by those that have them

    begin = 0
    # torch writes .metadata last: a folder without it was not finished
    done = sorted(args.checkpoint.glob("*/.metadata")) if args.checkpoint else []
    if done:
        weights, state = get_state_dict(model, optimizer)
        saved: dict[str, Any] = {"model": weights, "optimizer": state, "step": torch.zeros(())}
        state_dict_loader.load(saved, checkpoint_id=done[-1].parent)
        weights, state = saved["model"], saved["optimizer"]
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
        begin = int(saved["step"])
        if rank == 0:
            print(f"goes on from step {begin} of {done[-1].parent}")

    for step in range(begin, begin + args.steps):
        own = batch(step).chunk(ranks)[rank]
        logits = wrapped(own[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 in (0, 9):
            print(f"step {step} loss {loss.item():.3f}")

    held = {t.untyped_storage().data_ptr(): t for t in local_state(optimizer)}
    print(f"rank {rank} keeps {sum(t.untyped_storage().nbytes() for t in held.values()) >> 10} KiB")
    if args.checkpoint:
        weights, state = get_state_dict(model, optimizer)
        saved = {"model": weights, "optimizer": state, "step": torch.tensor(float(step + 1))}
        state_dict_saver.save(saved, checkpoint_id=args.checkpoint / f"step-{step + 1:06d}")
    if ranks > 1:
        distributed.barrier()
        distributed.destroy_process_group()


def local_state(optimizer: isokron.SOAP) -> list[Tensor]:
    """What this process keeps of the optimizer's state."""
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return [value.to_local() if hasattr(value, "to_local") else value for value in values]


if __name__ == "__main__":
    main()
