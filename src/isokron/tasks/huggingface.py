"""Hugging Face language models and classifiers as tasks, from a folder or by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isokron.tasks.corpus import Corpus, Data
from isokron.tasks.documents import Document
from isokron.tasks.pretrained import Pretrained, unpadded
from isokron.tasks.shown import Shown
from isokron.tasks.task import Batch, Examples, Task


def language_model(
    model: str | Path,
    data: Data,
    *,
    text: str | None = None,
    id: str | None = None,
    context: int | None = None,
    long: str = "error",
    evaluation: Data | float = 0.1,
    batch_size: int = 8,
    dtype: torch.dtype = torch.float32,
    trained: bool = True,
) -> Task:
    """Predict the next token of documents with a causal language model.

    model: a folder, of which alone it is loaded, or a name on the hub. data, text, id: see
    isokron.tasks.documents. context: tokens of an example at most, by default as many as the model
    takes; `long`: what becomes of longer documents, "error", "cut" or "split".
    evaluation: documents, or the share of `data` that is held out for it; with 0 all documents are
    trained on, and looked at again. trained=False: weights that the folder lacks start at random.
    The loss of an example is the mean over its tokens; `logits` tells them one by one.
    """
    pretrained = Pretrained(model, "AutoModelForCausalLM", dtype, trained)
    examples = Corpus(pretrained, data, evaluation, context, long, False, text=text, id=id)

    def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, tokens, kept = pretrained.scores(network, batch)
        # one target a position, the last of them none: curvature sees which positions count
        return scores, F.pad(tokens.masked_fill(~kept, -100)[:, 1:], (0, 1), value=-100)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores, targets = logits(network, batch)
        terms = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), reduction="none")
        return terms.view_as(targets).sum(1) / (targets != -100).sum(1)

    def show(batch: Batch) -> list[Shown]:
        return [
            Shown(tokens=tuple(pieces[1:]), context=pieces[0], title=title)
            for pieces, title in examples.shown(batch)
        ]

    return Task(
        name=examples.name,
        model=lambda: pretrained.load(examples.first),
        train=Examples(examples.train),
        evaluation=Examples(examples.evaluation),
        loss=loss,
        batch_size=min(batch_size, len(examples.ids)),
        unit="nats per token",
        sample=lambda network: continued(network, pretrained, examples),
        logits=logits,
        show=show,
        read=examples.read,
        ids=examples.ids,
        trained=trained,
    )


def classifier(
    model: str | Path,
    data: Data,
    *,
    text: str | None = None,
    label: str = "label",
    id: str | None = None,
    context: int | None = None,
    long: str = "error",
    evaluation: Data | float = 0.1,
    batch_size: int = 8,
    dtype: torch.dtype = torch.float32,
    trained: bool = True,
) -> Task:
    """Tell the class of documents with a sequence classifier.

    label: the column of classes, by the names that the model's configuration has for them or by
    number. A query is `text => label`, or `text` to ask for the label that the model itself gives.
    All else is as for language_model, but that documents cannot be split.
    """
    pretrained = Pretrained(model, "AutoModelForSequenceClassification", dtype, trained)
    classes = Classes(pretrained.config, pretrained.name)
    examples = Corpus(
        pretrained, data, evaluation, context, long, True, text=text, id=id, label=label
    )
    count = len(examples.ids)
    labels = torch.tensor([classes.number(part.document) for part in examples.parts])

    def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, targets = pretrained.scores(network, batch[:3])[0], batch[3]
        # a query without a label is about the one that the model gives
        return scores, torch.where(targets < 0, scores.detach().argmax(-1), targets)

    def show(batch: Batch) -> list[Shown]:
        return [
            Shown(tokens=tuple(pieces), title=title, label=classes.names.get(target, ""))
            for (pieces, title), target in zip(
                examples.shown(batch[:3]), batch[3].tolist(), strict=True
            )
        ]

    def read(query: str) -> Batch:
        words, arrow, name = query.rpartition("=>")
        target = classes.number(Document("", words, name.strip())) if arrow else -1
        return *examples.read(words.strip() if arrow else query), torch.tensor([target])

    unseen = (*examples.evaluation, labels[examples.evaluation[2]])
    return Task(
        name=examples.name,
        model=lambda: pretrained.load(examples.first),
        train=Examples((*examples.train, labels[:count])),
        evaluation=Examples(unseen),
        loss=lambda network, batch: F.cross_entropy(*logits(network, batch), reduction="none"),
        batch_size=min(batch_size, count),
        unit="cross-entropy",
        sample=lambda network: predicted(network, logits, unseen, classes),
        logits=logits,
        show=show,
        read=read,
        ids=examples.ids,
        trained=trained,
    )


class Classes:
    """The classes of a classifier by name and by number."""

    def __init__(self, config: Any, name: str) -> None:
        if config.num_labels < 2 or config.problem_type not in (
            None,
            "single_label_classification",
        ):
            raise ValueError(
                f"{name}: a classifier must choose one of several classes, got "
                f"{config.num_labels} outputs for {config.problem_type or 'a number'}; make a Task "
                "of your own for other losses"
            )
        known = sorted((int(number), str(name)) for name, number in config.label2id.items())
        self.names = dict(known)
        self.numbers = {name: number for number, name in known}

    def number(self, document: Document) -> int:
        """The class of a document, which may be named or numbered."""
        label = document.label
        if label in self.numbers:
            return self.numbers[label]
        if label is not None and label.isdecimal() and int(label) in self.names:
            return int(label)
        of = f"document {document.id!r}" if document.id else "the query"
        raise ValueError(
            f"{of} has the label {label!r}, which the model does not know; it knows "
            f"{', '.join(self.numbers)}, or 0 to {len(self.names) - 1}"
        )


@torch.no_grad()
def continued(model: nn.Module, pretrained: Pretrained, examples: Corpus, length: int = 40) -> str:
    """How the model goes on, by its likeliest tokens, from where a document begins."""
    tokens, _ = unpadded(tuple(tensor[:1] for tensor in examples.evaluation))
    tokens = tokens[:, :8]
    for _ in range(min(length, examples.encoder.context - tokens.shape[1])):
        batch = tokens, torch.tensor([tokens.shape[1]])
        chosen = pretrained.scores(model, batch)[0][:, -1].argmax(-1)
        tokens = torch.cat([tokens, chosen[:, None]], 1)
    return "".join(examples.encoder.pieces(tokens[0].tolist()))


@torch.no_grad()
def predicted(
    model: nn.Module,
    logits: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]],
    batch: Batch,
    classes: Classes,
    most: int = 64,
) -> str:
    """How many labels are right, and the first few."""
    scores, labels = logits(model, tuple(tensor[:most] for tensor in batch))
    found = scores.argmax(-1)
    right = (found == labels).float().mean().item()
    names = [classes.names.get(number, str(number)) for number in found[:8].tolist()]
    return f"{right:.1%} of {len(labels)} texts right; the first ones are {', '.join(names)}"
