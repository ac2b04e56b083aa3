"""EK-FAC of isokron and of kronfluence against retrained models: the same model, subsets, queries.

    python benchmarks/lds.py --kronfluence PYTHON [--subsets 50] [--repeats 5] [--queries 100]

A perceptron of two hidden layers learns handwritten digits (1,437 images of 8×8). Models are
trained alike on random halves of them, `repeats` a half with seeds of their own; LDS is the mean
over queries of Spearman's ρ between summed scores of the halves and minus the losses of their
models. Both take the loss of an image as a term, so that eigenvalues, and dampings by a number, are
in the same units. Of drawn labels ("sampled") it is the mean of several draws. Differences are
paired by query; ± is their standard error, and that of a mean. The last column is Spearman's ρ of
both's scores, the mean over queries.
"""

import argparse
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from attribution_quality import curvature_of, kronecker_scores, opened
from records import recorded
from safetensors.torch import load_file, save_file
from timing import conditions
from torch import Tensor, nn

from isokron import tasks
from isokron.attribution import Attributor
from isokron.attribution.evaluate import lds_by_query, random_subsets, retrain, spearman
from isokron.tasks import Examples, Task

WIDTH, EPOCHS, BATCH, RATE = 64, 30, 64, 1e-3
ABSOLUTE = 1e-8  # kronfluence's default damping
DRAWS = 3  # of labels, as there


def perceptron_task() -> Task:
    task = tasks.load("digits")
    train, evaluation = (
        Examples((part.tensors[0].flatten(1), part.tensors[1]))
        for part in (task.train, task.held_out)
    )

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, WIDTH),
            nn.ReLU(),
            nn.Linear(WIDTH, 10),
        )

    return replace(task, name="digits-perceptron", model=model, train=train, evaluation=evaluation)


def trained(task: Task, indices: Tensor, seed: int) -> nn.Module:
    """By AdamW, for as many epochs whatever the examples are."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=1e-2)
    for _ in range(EPOCHS):
        for some in indices[torch.randperm(len(indices))].split(BATCH):
            optimizer.zero_grad()
            task.losses(model, task.train.batch(some)).mean().backward()
            optimizer.step()
    return model.eval()


def peer_scores(python: str, folder: Path, run: Attributor, queries: Examples) -> dict[str, Tensor]:
    given, out = folder / "given.safetensors", folder / "scores.safetensors"
    sets = {"train": run.data.source, "query": queries}
    data = {
        f"{name}.{xy}": each
        for name, of in sets.items()
        for xy, each in zip("xy", of.tensors, strict=True)
    }
    save_file({**run.subject.model.state_dict(), **data}, given)
    program = Path(__file__).with_name("kronfluence_images.py")
    subprocess.run([python, program, given, out], check=True, capture_output=True)
    return load_file(out)


def own_scores(run: Attributor, queries: Examples) -> dict[str, Tensor]:
    """[draws, Q, N] by labels and damping."""
    found: dict[str, list[Tensor]] = {}
    for fisher in ("empirical", "sampled", "exact"):
        for seed in range(DRAWS if fisher == "sampled" else 1):
            curvature = curvature_of(run, "ekfac", fisher=fisher, seed=seed)
            ways = {
                "relative": curvature.damped_inverse(0.1),
                "absolute": curvature.inverse(ABSOLUTE),
            }
            for name, inverse in ways.items():
                scores = kronecker_scores(run, queries, inverse)
                found.setdefault(f"{fisher} {name}", []).append(scores)
    return {name: torch.stack(each) for name, each in found.items()}


def shown(values: Tensor) -> str:
    return f"{float(values.mean()):6.3f} ± {float(values.std()) / len(values) ** 0.5:.3f}"


def mean_lds(draws: Tensor, members: Tensor, losses: Tensor) -> Tensor:
    """By query, the mean of all draws. [draws, Q, N] → [Q]"""
    return torch.stack([lds_by_query(scores, members, losses) for scores in draws]).mean(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kronfluence", metavar="PYTHON", required=True)
    parser.add_argument("--subsets", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--queries", type=int, default=100)
    args = parser.parse_args()
    with recorded("lds"):
        print(conditions())
        task = perceptron_task()
        everything = torch.arange(len(task.train))
        run = opened(task, trained(task, everything, 0))
        queries = Examples(task.held_out.batch(torch.arange(args.queries)))
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            theirs = peer_scores(args.kronfluence, Path(folder), run, queries)
            halves = random_subsets(args.subsets, len(everything))
            asked = [queries.batch(torch.arange(args.queries))]
            losses = retrain(
                Path(folder) / "models", task, trained, halves, asked, repeats=args.repeats
            )
        print(
            f"{task.name}: {len(everything)} examples, {args.queries} queries, "
            f"{args.subsets} halves, {args.repeats} models each, "
            f"{time.perf_counter() - start:.0f} s"
        )
        print(
            f"{'LDS, labels and damping':24}{'isokron':>16}{'kronfluence':>18}{'difference':>18}  ρ"
        )
        for name, scores in own_scores(run, queries).items():
            own = mean_lds(scores, halves, losses)
            row = f"{name:24}{shown(own):>16}"
            if name in theirs:
                other = mean_lds(theirs[name], halves, losses)
                same = spearman(scores, theirs[name]).mean()
                row += f"{shown(other):>18}{shown(own - other):>18}  {float(same):.4f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
