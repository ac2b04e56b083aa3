"""How far scores can be trusted: against retrained models, wrong labels, and projections.

    python benchmarks/attribution_quality.py [--only logistic,removals,transformer] [--data mnist]
        [--subsets 40] [--queries 100]

"logistic": multinomial logistic regression, trained by L-BFGS to its minimum with λ/2·‖θ‖², so that
a model has no luck in it and half of the examples are no more than a perturbation. LDS is the mean
over queries of Spearman's ρ between summed scores of random halves of the training examples and
minus the loss of models trained on them, with its standard error. "Hessian" is the influence
function itself, by the whole Hessian and the λ of training; the others are Kronecker-factored. The
AUC is that of finding the 10 % of the labels that were made wrong.

"removals": the change of a query's loss in a model trained without its top proponent, and what is
predicted of it: the score over the number of loss terms, and the predicted nats of --verify.

"transformer": decoders of bytes, trained for some hundred steps. Spearman's ρ of a store's scores
with exact ones, by dimension, the mean over queries.
"""

import argparse
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from records import recorded
from timing import conditions
from torch import Tensor, nn

from isokron import tasks
from isokron.attribution import Attributor, Query
from isokron.attribution.evaluate import (
    lds_by_query,
    mislabel_auc,
    random_subsets,
    retrain,
    spearman,
    with_flipped_labels,
)
from isokron.attribution.score import exact_scores, query_gradients
from isokron.attribution.verify import calibrate
from isokron.curvature import Curvature, fit
from isokron.tasks import Examples, Shown, Task
from isokron.tasks.speeches import ByteTransformer

DECAY = 0.01  # λ
DIMS = (8, 16, 32)
SEEDS = (0, 1, 2)  # of projections
# layers, width
DECODERS = {"speeches-tiny": (2, 64), "twice as deep": (4, 64), "and half as wide": (4, 32)}
STEPS, WINDOWS, SCORED, ASKED = 300, 4000, 400, 20


def linear_task(data: str) -> Task:
    """The images of a task, and a linear model of their pixels."""
    task = tasks.load(data)
    pixels = task.train.tensors[0][0].numel()

    def model() -> nn.Module:
        made = nn.Sequential(nn.Flatten(), nn.Linear(pixels, 10))
        for param in made.parameters():
            nn.init.zeros_(param)
        return made

    return replace(task, name=f"{data}-linear", model=model)


def minimum(task: Task, indices: Tensor, seed: int) -> nn.Module:
    """The model that no step improves; the seed changes nothing."""
    model, batch = task.model(), task.train.batch(indices)
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=300,
        tolerance_grad=1e-6,
        tolerance_change=1e-10,
        line_search_fn="strong_wolfe",
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = task.losses(model, batch).mean()
        for param in model.parameters():
            loss = loss + DECAY / 2 * param.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


def hessian_scores(run: Attributor, queries: Examples) -> Tensor:
    """⟨∇_q, (H + λI)⁻¹ ∇_t⟩, H = mean of (diag p − ppᵀ) ⊗ x̄x̄ᵀ. [Q, N]"""
    weights = torch.cat(
        [param.detach().view(10, -1) for param in run.subject.model.parameters()], 1
    )

    def seen(examples: Examples) -> tuple[Tensor, Tensor]:
        images = examples.tensors[0].flatten(1)
        return torch.cat([images, torch.ones(len(images), 1)], 1), examples.tensors[1]

    x, labels = seen(run.data.source)
    p = (x @ weights.mT).softmax(1)
    size = x.size(1)
    hessian = torch.zeros(10, size, 10, size)
    for a in range(10):
        for b in range(a + 1):
            inner = p[:, a] * (float(a == b) - p[:, b])
            hessian[a, :, b] = (x * inner[:, None]).mT @ x / len(x)
            hessian[b, :, a] = hessian[a, :, b]
    whole = hessian.view(10 * size, 10 * size)
    whole.diagonal().add_(DECAY)
    asked, wanted = seen(queries)
    own = (asked @ weights.mT).softmax(1) - nn.functional.one_hot(wanted, 10)
    rows = (own[:, :, None] * asked[:, None]).flatten(1)
    turned = torch.cholesky_solve(rows.mT, torch.linalg.cholesky(whole)).mT
    residual = p - nn.functional.one_hot(labels, 10)
    products = turned.view(-1, 10, size) @ x.mT  # [Q, 10, N]
    return (products * residual.mT).sum(1)


def opened(task: Task, model: nn.Module) -> Attributor:
    """A run in a folder that is forgotten."""
    return Attributor(tempfile.mkdtemp(), model, task=task, layers="*")


def single(examples: Examples) -> list[Any]:
    return [examples.batch(torch.tensor([number])) for number in range(len(examples))]


def kronecker_scores(run: Attributor, queries: Examples, inverse: Curvature | None) -> Tensor:
    """[Q, N]"""
    subject = run.subject
    asked = query_gradients(subject, single(queries), inverse)
    order = [number for batch in run.data.plan() for number in batch]
    assert order == list(range(len(run.data)))
    batches = subject.batches(run.data.plan())
    return exact_scores(subject, batches, asked).scores


def curvature_of(run: Attributor, method: str = "kfac", **options: Any) -> Curvature:
    subject = run.subject
    batches = subject.batches(run.data.plan())
    return fit(subject.model, batches, subject.loss, method, selection=run.selection, **options)


def logistic(data: str, count: int, asked: int) -> None:
    task = linear_task(data)
    everything = torch.arange(len(task.train))
    run = opened(task, minimum(task, everything, 0))
    queries = Examples(task.held_out.batch(torch.arange(asked)))
    batch = queries.batch(torch.arange(asked))
    logits = run.subject.model(batch[0])
    right = float((logits.argmax(1) == batch[1]).float().mean())
    print(
        f"\n{task.name}: {len(everything)} examples, λ = {DECAY}, {right:.0%} of {asked} unseen "
        f"right; {count} models of random halves"
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        halves = random_subsets(count, len(everything))
        losses = retrain(Path(folder), task, minimum, halves, [batch])
    print(f"  retrained in {time.perf_counter() - start:.0f} s")
    show = partial(_show, halves, losses)
    show("Hessian, λ", hessian_scores(run, queries))
    for method, fisher in (("ekfac", "exact"), ("kfac", "exact"), ("kfac", "empirical")):
        curvature = curvature_of(run, method, fisher=fisher)
        ways = {
            "λ": curvature.inverse(DECAY),
            "0.1 of the mean": curvature.damped_inverse(0.1),
        }
        for name, inverse in ways.items():
            scores = kronecker_scores(run, queries, inverse)
            show(f"{method}, {fisher} Fisher, {name}", scores)
    show("gradients alone", kronecker_scores(run, queries, None))
    wrong, flipped = with_flipped_labels(task, 0.1, seed=0)
    fooled = opened(wrong, minimum(wrong, everything, 0)).fit()
    own = fooled.self_influence()
    fooled_losses = task.losses(fooled.subject.model, wrong.train.batch(everything)).detach()
    print(
        f"  10 % wrong labels: AUC {mislabel_auc(own, flipped):.3f} by self-influence (kfac), "
        f"{mislabel_auc(fooled_losses, flipped):.3f} by loss"
    )


def removals(data: str, asked: int) -> None:
    """Predicted nats against models trained without the top proponent of a query."""
    task = linear_task(data)
    everything = torch.arange(len(task.train))
    model = minimum(task, everything, 0)
    run = opened(task, model).fit()
    queries = [
        Query(batch, (Shown(),), "")
        for batch in single(Examples(task.held_out.batch(torch.arange(asked))))
    ]
    scores = run.score(queries, save=False).as_subclass(Tensor)
    inverse = run.inverse()
    assert inverse is not None
    ratios: dict[str, list[float]] = {"score ÷ terms": [], "predicted nats": []}
    for query, row in zip(queries, scores, strict=True):
        best = row.topk(10).indices.tolist()
        others = minimum(task, everything[everything != best[0]], 0)
        with torch.no_grad():
            losses = [float(task.losses(m, query.batch).sum()) for m in (others, model)]
        change, score = losses[0] - losses[1], float(row[best[0]])
        ratios["score ÷ terms"].append(score / len(everything) / change)
        nats = calibrate(run.subject, query.batch, best, inverse, float(row[best].sum()))
        if nats is not None:
            ratios["predicted nats"].append(nats * score / change)
    print(f"\n{task.name}: over the real change, one example left out, {asked} queries")
    for name, values in ratios.items():
        low, middle, high = torch.tensor(values).quantile(torch.tensor([0.1, 0.5, 0.9])).tolist()
        print(f"  {name}: median {middle:.2f}, {low:.2f} to {high:.2f}; {len(values)} queries")


def _show(members: Tensor, losses: Tensor, name: str, scores: Tensor) -> None:
    lds = lds_by_query(scores, members, losses)
    error = float(lds.std()) / len(lds) ** 0.5
    print(f"  LDS {float(lds.mean()):.3f} ± {error:.3f}  {name}", flush=True)


def decoder(layers: int, width: int) -> Attributor:
    """Trained on random windows of speeches; the first of them are scored."""
    task = tasks.load("speeches")
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randperm(len(task.train), generator=generator)[:WINDOWS]
    train = Examples(task.train.batch(chosen))
    task = replace(task, train=train, ids=())
    torch.manual_seed(0)
    model = ByteTransformer(64, layers, width, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, STEPS)
    for _ in range(STEPS):
        numbers = torch.randint(0, len(train), (16,), generator=generator)
        optimizer.zero_grad()
        task.losses(model, train.batch(numbers)).mean().backward()
        optimizer.step()
        schedule.step()
    scored = Examples(train.batch(torch.arange(SCORED) * (len(train) // SCORED)))
    return Attributor(tempfile.mkdtemp(), model, task=replace(task, train=scored))


def transformer() -> None:
    print(
        f"\ndecoders of bytes, {STEPS} steps, {SCORED} windows scored for {ASKED} queries, damping "
        f"0.1: Spearman of a store's with exact scores at dim = {', '.join(map(str, DIMS))}, mean "
        f"and range of {len(SEEDS)} seeds"
    )
    for name, (layers, width) in DECODERS.items():
        trained = decoder(layers, width)
        assert trained.task is not None
        unseen = Examples(trained.task.held_out.batch(torch.arange(ASKED)))
        queries = [Query(batch, (Shown(),), "") for batch in single(unseen)]
        with torch.no_grad():
            loss = float(trained.task.losses(trained.subject.model, unseen.tensors).mean())
        print(f"  {name}: {layers} layers of width {width}, {loss:.2f} {trained.task.unit}")
        for method in ("kfac", "ekfac"):
            model = trained.subject.model
            run = Attributor(tempfile.mkdtemp(), model, task=trained.task).fit(method)
            exact = run.score(queries, store=False, save=False)
            rows = torch.tensor(
                [
                    [
                        float(spearman(run.projected_scores(queries, p, seed=seed), exact).mean())
                        for p in DIMS
                    ]
                    for seed in SEEDS
                ]
            )
            columns = zip(rows.mean(0), rows.amin(0), rows.amax(0), strict=True)
            values = "   ".join(f"{mean:.3f} ({low:.3f}–{high:.3f})" for mean, low, high in columns)
            print(f"    {method:<9} {values}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="logistic,removals,transformer")
    parser.add_argument("--data", default="mnist", help="mnist or digits")
    parser.add_argument("--subsets", type=int, default=40)
    parser.add_argument("--queries", type=int, default=100)
    options = parser.parse_args()
    with recorded("attribution_quality"):
        print(conditions())
        chosen = options.only.split(",")
        if "logistic" in chosen:
            logistic(options.data, options.subsets, options.queries)
        if "removals" in chosen:
            removals(options.data, options.queries)
        if "transformer" in chosen:
            transformer()


if __name__ == "__main__":
    main()
