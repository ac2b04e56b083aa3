"""When operators are first refreshed: the same batch whole and in four parts, and three races.

    python benchmarks/start.py [--races runs/start] [--seeds 3]

A GPT-2 of two layers is trained for six steps twice, on batches in one piece and accumulated from
four: gradients differ by rounding alone. Printed are the cosines of the updates of its matrices,
step by step. With --races, tiny tasks are raced with every start too, in folders that go on where
they were stopped.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from records import recorded
from timing import conditions
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import isokron

STARTS = (1, 2, 3, 5)
METHODS = ("SOAP", "Shampoo", "Katie")
TASKS = {"digits-tiny": 100, "mnist-tiny": 150, "speeches-tiny": 150}
RATES = "3e-3,1e-2,3e-2"


def updates(name: str, parts: int, **settings: Any) -> list[Tensor]:
    """Of all matrices together, by step."""
    torch.manual_seed(0)
    size = {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 512, "n_positions": 32}
    drops = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(**size, **drops, **ends))
    optimizer = getattr(isokron, name)(isokron.param_groups(model), lr=1e-3, **settings)
    groups = [group for group in optimizer.param_groups if group["route"] == "method"]
    matrices = [matrix for group in groups for matrix in group["params"]]
    found = []
    for _ in range(6):
        tokens = torch.randint(512, (8, 32))
        optimizer.zero_grad()
        for part in tokens.chunk(parts):
            (model(part, labels=part).loss / parts).backward()
        before = torch.cat([matrix.detach().flatten() for matrix in matrices])
        optimizer.step()
        found.append(torch.cat([matrix.detach().flatten() for matrix in matrices]) - before)
    return found


def cosines() -> None:
    print("| | start | cosine of updates in steps 1 to 6 |\n|---|---|---|")
    cases: list[tuple[str, int | None]] = [(name, start) for name in METHODS for start in STARTS]
    for name, start in [("AdamW", None), ("Muon", None), *cases]:
        settings = {} if start is None else {"start": start}
        pairs = zip(updates(name, 1, **settings), updates(name, 4, **settings), strict=True)
        shown = ", ".join(f"{torch.cosine_similarity(a, b, dim=0):.3f}" for a, b in pairs)
        print(f"| {name} | {start or '-'} | {shown} |", flush=True)


def race(folder: Path, seeds: int) -> None:
    names = [f"{name.lower()}(start={start})" for name in METHODS for start in STARTS]
    print(f"| final loss | {' | '.join(names)} |\n|---|{'---|' * len(names)}")
    for task, steps in TASKS.items():
        out = folder / task
        command = [sys.executable, "-m", "isokron", "race", "--task", task, "--lr", RATES]
        command += ["--steps", str(steps), "--seeds", str(seeds), "--out", str(out)]
        command += ["--optimizers", ",".join(names), *(["--resume"] if out.exists() else [])]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        standings = json.loads((out / "race.json").read_text())["standings"]
        loss = {standing["optimizer"]: standing["final"] for standing in standings}
        print(f"| {task} | {' | '.join(f'{loss[name]:.4f}' for name in names)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--races", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    with recorded("start"):
        print(conditions())
        cosines()
        if given.races:
            race(given.races, given.seeds)


if __name__ == "__main__":
    main()
