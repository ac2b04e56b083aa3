"""Which training labels are wrong? Rankings compared on labels by humans (CIFAR-10N).

    python benchmarks/label_noise.py [--noise aggre_label,random_label1,worse_label]
        [--optimizers adamw,soap] [--seeds 3]

A seed draws 4,800 training images of CIFAR-10 and the initial weights of a small ConvNet, which is
trained on the human labels for 10 epochs with random flips, one thread. Every ranking gives each
training example a number that should be larger for wrong labels; AUC is its area under the ROC
curve, recall the share of the wrong labels among as many top examples as there are wrong labels.
Out-of-fold rankings train three more models on two thirds each, with AdamW only; cleanlab ranks by
their probabilities. Seconds are CPU seconds after training, shared passes counted for every ranking
that needs them. Runs are in docs/benchmarks/label_noise.json, written after each; what is there is
not trained again. Prints tables of all rankings (docs/label_noise.md has the main ones): means, and
standard errors over seeds. Needs cleanlab.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from packaged_data import ColourNet, cifar10_images, cifar10n_labels
from records import Records
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot
from torch.optim.lr_scheduler import LambdaLR

import isokron
from isokron.attribution.evaluate import mislabel_auc, ranks
from isokron.tasks import Examples
from isokron.training import batch_order, warmup_cosine

IMAGES, EPOCHS, BATCH, FOLDS = 4_800, 10, 64, 3  # folds and epochs are whole batches
CLEAN, TEST = 200, 2_000  # test images: queries with right labels, and those for the accuracy
WIDTHS = (16, 32, 64, 64)  # of the ConvNet
CHECKPOINTS = (4, 7)  # epochs; the third checkpoint is the final model
NOISES = ("aggre_label", "random_label1", "worse_label")  # 9, 17 and 40 % wrong
FACTS = ("accuracy", "right_fitted", "wrong_fitted", "train_seconds")
OPTIMIZERS = {"adamw": (isokron.AdamW, 3e-3), "soap": (isokron.SOAP, 1e-3)}


class Trained(NamedTuple):
    """A model, its logits [N, 10] in the training passes of every epoch, and its checkpoints."""

    model: nn.Module
    logits: list[Tensor]
    checkpoints: Sequence[nn.Module]


@dataclass(frozen=True)
class Problem:
    """Images with labels of which some are wrong, and queries with right labels."""

    images: Tensor
    labels: Tensor
    queries: Examples
    optimizer: str
    seed: int


def train(optimizer: str, images: Tensor, labels: Tensor, seed: int) -> Trained:
    torch.manual_seed(seed)
    model, steps = ColourNet(WIDTHS), EPOCHS * len(images) // BATCH
    optimizer_class, lr = OPTIMIZERS[optimizer]
    stepper = optimizer_class(isokron.param_groups(model), lr=lr)
    schedule = LambdaLR(stepper, lambda step: warmup_cosine(step, steps))
    history = [torch.zeros(len(images), 10) for _ in range(EPOCHS)]
    checkpoints: list[nn.Module] = []
    for step, indices in enumerate(batch_order(len(images), BATCH, steps, seed)):
        flip = torch.rand(BATCH, 1, 1, 1) < 0.5
        batch = images[indices]
        logits = model(batch.where(flip, batch.flip(3)))
        cross_entropy(logits, labels[indices]).backward()
        stepper.step()
        schedule.step()
        stepper.zero_grad()
        history[step * EPOCHS // steps][indices] = logits.detach()
        if (step + 1) in [epoch * steps // EPOCHS for epoch in CHECKPOINTS]:
            checkpoints.append(copy.deepcopy(model).eval())
    return Trained(model.eval(), history, checkpoints)


@torch.no_grad()
def predict(model: nn.Module, images: Tensor) -> Tensor:
    return torch.cat([model(part) for part in images.split(256)])


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits, labels, reduction="none")


def margins(values: Tensor, labels: Tensor) -> Tensor:
    """The largest value of another class less that of the label: [N]"""
    label = one_hot(labels, values.size(1)).bool()
    return values.masked_fill(label, -torch.inf).amax(1) - values[label]


def timed(compute: Callable[[], Tensor]) -> tuple[Tensor, float]:
    """The result, and CPU seconds."""
    start = time.process_time()
    return compute(), time.process_time() - start


class Rankings:
    """AUC, recall and seconds of every ranking of one run."""

    def __init__(self, wrong: Tensor) -> None:
        self.wrong = wrong
        self.results: dict[str, list[float]] = {}
        self.values: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor, seconds: float) -> None:
        top = values.topk(int(self.wrong.sum())).indices
        recall = float(self.wrong[top].double().mean())
        self.values[name] = values
        self.results[name] = [mislabel_auc(values, self.wrong), recall, round(seconds, 1)]

    def add_mean(self, name: str, *parts: str) -> None:
        """The mean of the ranks of other rankings."""
        total = torch.stack([ranks(self.values[part]) for part in parts]).mean(0)
        self.add(name, total, sum(self.results[part][2] for part in parts))


def rank_by_outputs(problem: Problem, trained: Trained, rankings: Rankings) -> None:
    """Rankings by the model's outputs, at the end and during training."""
    labels = problem.labels
    logits, seconds = timed(lambda: predict(trained.model, problem.images))
    rankings.add("loss", losses(logits, labels), seconds)
    rankings.add("margin", margins(logits.softmax(1), labels), seconds)
    # these passes were made by training
    mean_loss = torch.stack([losses(logits, labels) for logits in trained.logits]).mean(0)
    rankings.add("loss, mean over epochs", mean_loss, 0)
    mean_margin = torch.stack([margins(logits, labels) for logits in trained.logits]).mean(0)
    rankings.add("margin, mean over epochs", mean_margin, 0)


def rank_out_of_fold(problem: Problem, rankings: Rankings) -> list[int]:
    """Probabilities by models that were not trained on the example (Northcutt, 1911.00068).

    Returns how many labels cleanlab calls wrong, and how many of them are.
    """
    images, labels = problem.images, problem.labels

    def probabilities() -> Tensor:
        folds = torch.arange(IMAGES) % FOLDS
        p = torch.zeros(IMAGES, 10)
        for fold in range(FOLDS):
            training, left_out = folds != fold, folds == fold
            seed = problem.seed + 100 * (fold + 1)
            model = train(problem.optimizer, images[training], labels[training], seed).model
            p[left_out] = predict(model, images[left_out]).softmax(1)
        return p

    p, seconds = timed(probabilities)
    label = one_hot(labels, 10).bool()
    rankings.add("out-of-fold self-confidence", -p[label], seconds)
    # confident learning compares with the mean self-confidence of each class
    thresholds = torch.stack([p[labels == c, c].mean() for c in range(10)])
    rankings.add("out-of-fold, less class thresholds", -(p - thresholds)[label], seconds)
    rankings.add("out-of-fold margin", margins(p, labels), seconds)
    return rank_by_cleanlab(p, labels, rankings, seconds)


def rank_by_cleanlab(p: Tensor, labels: Tensor, rankings: Rankings, spent: float) -> list[int]:
    """cleanlab's own scores of out-of-fold probabilities [N, 10], which took `spent` seconds."""
    import cleanlab.filter  # type: ignore[import-not-found, unused-ignore]
    import cleanlab.rank  # type: ignore[import-not-found, unused-ignore]

    arrays = labels.numpy(), p.double().numpy()

    def quality(method: str, adjusted: bool) -> Tensor:
        score = cleanlab.rank.get_label_quality_scores
        return torch.as_tensor(score(*arrays, method=method, adjust_pred_probs=adjusted))

    for method, adjusted in (
        ("self_confidence", False),
        ("self_confidence", True),
        ("normalized_margin", False),
        ("normalized_margin", True),
        ("confidence_weighted_entropy", False),  # cleanlab cannot adjust it
    ):
        values, seconds = timed(partial(quality, method, adjusted))
        name = f"cleanlab, {method.replace('_', ' ')}{', adjusted' if adjusted else ''}"
        rankings.add(name, -values, spent + seconds)
    start = time.process_time()
    issues = torch.as_tensor(cleanlab.filter.find_label_issues(*arrays, n_jobs=1))
    seconds = time.process_time() - start
    # what it calls wrong first, then the others; quality is in 0..1
    listed = issues.double() - quality("self_confidence", adjusted=False)
    rankings.add("cleanlab, find_label_issues first", listed, spent + seconds)
    return [int(issues.sum()), int((issues & rankings.wrong).sum())]


def rank_by_influence(problem: Problem, trained: Trained, rankings: Rankings) -> None:
    """Self-influence and influence on clean examples, for H = I, K-FAC and EK-FAC."""
    data = Examples((problem.images, problem.labels))
    queries = list(zip(*problem.queries.tensors, strict=True))

    def attributor(folder: str, model: nn.Module, **options: Any) -> isokron.Attributor:
        loss = isokron.losses.CrossEntropy()
        return isokron.Attributor(folder, model, data, loss=loss, batch_size=BATCH, **options)

    earlier, spent = torch.zeros(IMAGES), 0.0
    for model in trained.checkpoints:
        with TemporaryDirectory() as folder:
            norms, seconds = timed(attributor(folder, model).self_influence)
        earlier, spent = earlier + norms, spent + seconds
    loss, forward = rankings.values["loss"], rankings.results["loss"][2]
    for name, method, layers in (
        ("identity", None, None),
        ("K-FAC", "kfac", None),
        ("EK-FAC", "ekfac", None),
        ("K-FAC of the head", "kfac", "head"),
    ):
        with TemporaryDirectory() as folder:
            start = time.process_time()
            a = attributor(folder, trained.model, layers=layers)
            if method is not None:
                a.fit(method)
            fitting = time.process_time() - start
            influence, seconds = timed(a.self_influence)
            scores, asking = timed(partial(a.score, queries, mode="mean", save=False))
        cost = fitting + seconds
        rankings.add(f"self-influence, {name}", influence, cost)
        if method is None:
            three = earlier + influence
            rankings.add("self-influence, identity, 3 checkpoints", three, spent + cost)
        else:
            # removing an example raises its loss by influence / N, to first order
            left_out = loss + influence / IMAGES
            rankings.add(f"loss + self-influence / N, {name}", left_out, cost + forward)
        harm = -scores.as_subclass(Tensor)[0]
        rankings.add(f"harm to clean examples, {name}", harm, fitting + asking)
        cosine = harm / influence.clamp_min(1e-30).sqrt()
        rankings.add(f"harm to clean examples, cosine, {name}", cosine, cost + asking)


@cache
def load_images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Normalized training images with their right labels, and some test images with theirs."""
    images, labels = cifar10_images("train")
    test_images, test_labels = (tensor[: CLEAN + TEST] for tensor in cifar10_images("test"))
    mean, std = images.mean((0, 2, 3), keepdim=True), images.std((0, 2, 3), keepdim=True)
    return ((images - mean) / std, labels), ((test_images - mean) / std, test_labels)


def measure(noise: str, optimizer: str, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    (images, clean), (test_images, test_labels) = load_images()
    chosen = torch.randperm(len(images), generator=generator)[:IMAGES]
    labels, wrong = cifar10n_labels(noise)[chosen], (cifar10n_labels(noise) != clean)[chosen]
    queries = Examples((test_images[:CLEAN], test_labels[:CLEAN]))
    problem = Problem(images[chosen], labels, queries, optimizer, seed)
    start = time.process_time()
    trained = train(optimizer, problem.images, labels, seed)
    seconds = time.process_time() - start
    guesses = predict(trained.model, test_images[CLEAN:]).argmax(1)
    accuracy = float((guesses == test_labels[CLEAN:]).double().mean())
    fitted = predict(trained.model, problem.images).argmax(1) == labels
    rankings, issues = Rankings(wrong), list[int]()
    rank_by_outputs(problem, trained, rankings)
    rank_by_influence(problem, trained, rankings)
    rankings.add_mean(
        "ranks of mean loss and harm, EK-FAC",
        "loss, mean over epochs",
        "harm to clean examples, EK-FAC",
    )
    if optimizer == "adamw":
        issues = rank_out_of_fold(problem, rankings)
        rankings.add_mean(
            "ranks of out-of-fold and harm, EK-FAC",
            "out-of-fold self-confidence",
            "harm to clean examples, EK-FAC",
        )
        rankings.add_mean(
            "ranks of out-of-fold and mean loss",
            "out-of-fold self-confidence",
            "loss, mean over epochs",
        )
    # of right and of wrong labels: how many the model reproduces
    memorized = {"right_fitted": float(fitted[~wrong].double().mean())}
    memorized["wrong_fitted"] = float(fitted[wrong].double().mean())
    facts = {"wrong": int(wrong.sum()), "accuracy": accuracy, "train_seconds": round(seconds, 1)}
    called_wrong = {"cleanlab_issues": issues} if issues else {}
    return {**facts, **memorized, **called_wrong, "rankings": rankings.results}


def tables() -> list[str]:
    """For every optimizer two Markdown tables: AUC, its gain over the loss and seconds; recall."""
    records, lines = Records("label_noise"), []
    for optimizer in dict.fromkeys(run["optimizer"] for run in records.runs):
        groups = [records.select(noise=noise, optimizer=optimizer) for noise in NOISES]
        groups = [runs for runs in groups if runs]
        heads, shares = [], []
        for runs in groups:
            mean = {key: mean_and_error([run[key] for run in runs]) for key in FACTS}
            share = f"{statistics.mean(run['wrong'] for run in runs) / IMAGES:.0%} wrong"
            lines.append(f"{optimizer}, {share}, {len(runs)} seeds: {mean}")
            lists = [run["cleanlab_issues"] for run in runs if "cleanlab_issues" in run]
            if lists:
                called, right = (statistics.mean(counts) for counts in zip(*lists, strict=True))
                total = statistics.mean(run["wrong"] for run in runs)
                found = f"{right / called:.3f} of them are, {right / total:.3f} of all wrong labels"
                lines.append(f"cleanlab calls {called:.1f} labels wrong: {found}")
            heads += [f"{share}: AUC", "less the loss's"]
            shares.append(share)
        lines.append(f"| ranking | {' | '.join(heads)} | seconds |")
        lines.append("|---" * (len(heads) + 2) + "|")
        rows = []
        recall_rows = []
        for name in groups[0][0]["rankings"]:
            cells: list[str] = []
            recall_cells: list[str] = []
            levels: list[float] = []
            spent: list[float] = []
            for runs in groups:
                results = [run["rankings"][name] for run in runs]
                aucs, recalls, seconds = zip(*results, strict=True)
                # paired: rankings of a run share its images and its model
                gains = [run["rankings"][name][0] - run["rankings"]["loss"][0] for run in runs]
                cells += [mean_and_error(aucs), signed(gains)]
                recall_cells.append(mean_and_error(recalls))
                levels.append(statistics.mean(aucs))
                spent += seconds
            row = f"| {name} | {' | '.join(cells)} | {statistics.mean(spent):.1f} |"
            rows.append((statistics.mean(levels), row))
            recall_row = f"| {name} | {' | '.join(recall_cells)} |"
            recall_rows.append((statistics.mean(levels), recall_row))
        lines += [row for _, row in sorted(rows, reverse=True)]
        lines += [f"| recall | {' | '.join(shares)} |", "|---" * (len(shares) + 1) + "|"]
        lines += [row for _, row in sorted(recall_rows, reverse=True)]
    return lines


def signed(values: Sequence[float]) -> str:
    sign = "−" if statistics.mean(values) < 0 else "+"
    return sign + mean_and_error(values).removeprefix("-")


def mean_and_error(values: Sequence[float]) -> str:
    """The mean and, with two values or more, its standard error."""
    mean = f"{statistics.mean(values):.3f}"
    if len(values) == 1:
        return mean
    return f"{mean} ± {statistics.stdev(values) / len(values) ** 0.5:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--noise", default=",".join(NOISES))
    parser.add_argument("--optimizers", default=",".join(OPTIMIZERS))
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    records, noises = Records("label_noise"), args.noise.split(",")
    optimizers = args.optimizers.split(",")
    # one seed of everything first
    for seed in range(args.seeds):
        for optimizer in optimizers:
            for noise in noises:
                key: dict[str, Any] = {"noise": noise, "optimizer": optimizer, "seed": seed}
                records.once(partial(measure, **key), **key)
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
