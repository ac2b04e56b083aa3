"""The documents that a pretrained model learns from, as padded tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from isokron.tasks.data import shuffled
from isokron.tasks.documents import Document, read_documents
from isokron.tasks.pretrained import Pretrained
from isokron.tasks.task import Batch
from isokron.tasks.tokens import Encoder, Part, padded

Data = str | Path | Sequence[Document]


class Corpus:
    """Documents as padded tokens, with their numbers, by which they are shown.

    A batch is tokens [n, longest], how many of each row count [n], and the number of the example.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        data: Data,
        evaluation: Data | float,
        context: int | None,
        long: str,
        marks: bool,
        **columns: str | None,
    ) -> None:
        _check(context, long, marks, pretrained)
        self.pad, self.own_pad = pretrained.pad, pretrained.own_pad
        self.encoder = Encoder(pretrained.tokenizer, context or pretrained.context, long, marks)
        known, unseen = _split(data, evaluation, columns)
        train = list(self.encoder.parts(known))
        held_out = train if unseen is known else list(self.encoder.parts(unseen))
        self.parts = train if held_out is train else train + held_out
        self.ids = [part.id for part in train]
        of = f"-{Path(data).stem}" if isinstance(data, str | Path) else ""
        self.name = pretrained.name + of
        every = self._batch(self.parts, 0)
        self._check_vocabulary(int(every[0].max()), pretrained)
        count = len(train)
        self.train = tuple(tensor[:count] for tensor in every)
        self.evaluation = (
            self.train if held_out is train else tuple(tensor[count:] for tensor in every)
        )
        self.first = tuple(tensor[:1] for tensor in every)

    def _batch(self, parts: Sequence[Part], first: int) -> Batch:
        for part in parts:
            # a language model made a classifier looks for the last token that does not pad
            if self.encoder.marks and not self.own_pad and int(part.tokens[-1]) == self.pad:
                raise ValueError(
                    f"{part.id or 'the query'} ends with token {self.pad}, with which rows are "
                    "padded as the model's configuration names none; set pad_token_id there to a "
                    "token that ends no text"
                )
        tokens, lengths = padded([part.tokens for part in parts], self.pad)
        return tokens, lengths, torch.arange(first, first + len(parts))

    def _check_vocabulary(self, largest: int, pretrained: Pretrained) -> None:
        size = pretrained.vocabulary
        if size is not None and largest >= size:
            raise ValueError(
                f"{pretrained.path}: its tokenizer gives token {largest}, but the model knows "
                f"{size}; model and tokenizer must belong together"
            )

    def read(self, query: str) -> Batch:
        """A query as a batch of one."""
        if not query.strip():
            raise ValueError("a query must have words, got none")
        long = "cut" if self.encoder.long == "cut" else "error"
        once = Encoder(self.encoder.tokenizer, self.encoder.context, long, self.encoder.marks)
        (part,) = once.parts([Document("", query)], "the query")
        self.parts.append(part)
        return self._batch([part], len(self.parts) - 1)

    def shown(self, batch: Batch) -> list[tuple[list[str], str]]:
        """The text of every token, and the name of every example."""
        found = []
        for row, length, number in zip(*(tensor.tolist() for tensor in batch), strict=True):
            tokens = row[:length]
            part = self.parts[number] if number < len(self.parts) else None
            # a batch that was kept from elsewhere may have the number of another query
            if part is None or part.tokens.tolist() != tokens:
                found.append((self.encoder.pieces(tokens), ""))
            else:
                pieces = self.encoder.pieces(tokens, part.document.text, part.start)
                found.append((pieces, part.id))
        return found


def _check(context: int | None, long: str, marks: bool, pretrained: Pretrained) -> None:
    choices = ("error", "cut") if marks else ("error", "cut", "split")
    if long not in choices:
        raise ValueError(f"long must be one of {', '.join(choices)}, got {long!r}")
    most = pretrained.context
    if context is not None and (context < 2 or (most is not None and context > most)):
        raise ValueError(
            f"context must lie between 2 and the {most or 'unlimited'} tokens that the model "
            f"takes, got {context}"
        )


def _split(
    data: Data, evaluation: Data | float, columns: dict[str, str | None]
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Documents to train on and to evaluate on, the same every time."""

    def read(source: Data) -> Sequence[Document]:
        return read_documents(source, **columns) if isinstance(source, str | Path) else source

    documents = read(data)
    if not documents or not (isinstance(evaluation, int | float) or evaluation):
        raise ValueError("data and evaluation must hold at least one document each, got none")
    if not isinstance(evaluation, int | float):
        return documents, read(evaluation)
    if evaluation == 0:
        return documents, documents
    count = max(1, round(evaluation * len(documents)))
    if not 0 < evaluation < 1 or count >= len(documents):
        raise ValueError(
            f"evaluation must be a share of the {len(documents)} documents that leaves some to "
            f"train on, got {evaluation}; give a file of other documents, or 0 to hold none out"
        )
    held_out = set(shuffled([document.id for document in documents], "documents")[-count:])
    return (
        [document for document in documents if document.id not in held_out],
        [document for document in documents if document.id in held_out],
    )
