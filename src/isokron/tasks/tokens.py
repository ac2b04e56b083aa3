"""Documents as tokens, and tokens as the pieces of text that they stand for."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from isokron.tasks.documents import Document

AT_ONCE = 256  # documents: enough for a fast tokenizer's threads, few enough to hold


@dataclass(frozen=True, eq=False)
class Part:
    """Tokens of one example [length], and with which token of its document they start."""

    id: str
    document: Document
    start: int
    tokens: Tensor


class Encoder:
    """A tokenizer that knows how long an example may be, and what to do with longer ones.

    long: "error" refuses a longer document, "cut" keeps its first tokens, "split" makes several
    examples of it, each beginning with the last token of the one before: every token but the first
    is then predicted once. marks: a cut document keeps the tokenizer's mark of its end, as
    classifiers need.
    """

    def __init__(self, tokenizer: Any, context: int | None, long: str, marks: bool) -> None:
        self.tokenizer, self.long, self.marks = tokenizer, long, marks
        self.context = context or sys.maxsize

    def parts(self, documents: Sequence[Document], what: str = "document") -> Iterator[Part]:
        """The examples that documents make, in order."""
        for first in range(0, len(documents), AT_ONCE):
            some = documents[first : first + AT_ONCE]
            encoded = self.encoded([document.text for document in some])["input_ids"]
            for document, ids in zip(some, encoded, strict=True):
                name = f"{what} {document.id!r}" if document.id else what
                if len(ids) > self.context and self.long == "error":
                    choices = "cut" if self.marks or not document.id else "cut or split"
                    raise ValueError(
                        f"{name} has {len(ids)} tokens, more than the {self.context} of the "
                        f"model's context; shorten it, or set long to {choices}"
                    )
                yield from self._parts(document, torch.tensor(ids, dtype=torch.int32), name)

    def encoded(self, texts: list[str], **options: Any) -> Any:
        """Texts in the tokenizer's hands; cut by it where the mark of their end is to be kept."""
        if self.marks and self.long == "cut" and self.context < sys.maxsize:
            options |= {"truncation": True, "max_length": self.context}
        # verbose: no warning of long texts, of which we tell ourselves
        return self.tokenizer(texts, verbose=False, **options)

    def _parts(self, document: Document, tokens: Tensor, name: str) -> Iterator[Part]:
        least = 1 if self.marks else 2  # the first token of a language model is not predicted
        if len(tokens) < least:
            raise ValueError(
                f"{name} must have {least} tokens or more to learn from, got {len(tokens)} in "
                f"{document.text!r:.40}; leave it out"
            )
        if len(tokens) <= self.context:
            yield Part(document.id, document, 0, tokens)
        elif self.long == "cut":
            yield Part(document.id, document, 0, tokens[: self.context].clone())
        else:
            starts = range(0, len(tokens) - 1, self.context - 1)
            for k, start in enumerate(starts):
                own = tokens[start : start + self.context].clone()
                yield Part(f"{document.id}#{k}", document, start, own)

    def pieces(self, tokens: list[int], text: str | None = None, start: int = 0) -> list[str]:
        """The text of every token: its place in the document, if that is known, or decoded.

        Together they are the document's text from the first of these tokens on; what lies between
        two tokens belongs to the later one, and marks of the tokenizer's own are empty.
        """
        if text is not None and self.tokenizer.is_fast:
            options = {"return_offsets_mapping": True, "return_special_tokens_mask": True}
            found = {name: rows[0] for name, rows in self.encoded([text], **options).items()}
            where = slice(start, start + len(tokens))
            if found["input_ids"][where] == tokens:
                return _placed(text, found, where)
        return self._decoded(tokens)

    def _decoded(self, tokens: list[int]) -> list[str]:
        # a token may change how its neighbour is written, and a character may take several tokens:
        # decode each with those before it, from the last place where characters were whole
        def decode(first: int, last: int) -> str:
            options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
            return self.tokenizer.decode(tokens[first:last], **options)

        found, before, whole = [], 0, 0
        for k in range(1, len(tokens) + 1):
            known, longer = decode(before, whole), decode(before, k)
            # of half a character some tokenizers tell nothing, and others that it is broken
            broken = longer.endswith("\ufffd") and k < len(tokens)
            complete = len(longer) > len(known) and not broken
            found.append(longer[len(known) :] if complete else "")
            if complete:
                before, whole = whole, k
        return found


def _placed(text: str, found: Any, where: slice) -> list[str]:
    ends, end = [], 0
    for (_, last), mark in zip(found["offset_mapping"], found["special_tokens_mask"], strict=True):
        end = end if mark else max(end, last)
        ends.append(end)
    if not text[end:].strip():  # blanks at the end of a text belong to its last token
        ends = [len(text) if at == end else at for at in ends]
    starts = [0, *ends[:-1]]
    return [text[a:b] for a, b in zip(starts[where], ends[where], strict=True)]


def padded(rows: Sequence[Tensor], pad: int) -> tuple[Tensor, Tensor]:
    """Tokens [n, longest], filled up on the right, and how many of each row count [n]."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)
    return tokens, lengths
