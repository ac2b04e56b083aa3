"""Documents, queries and prompts as padded tokens, and tokens as pieces of text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from isokron.tasks.display import Shown
from isokron.tasks.documents import Document
from isokron.tasks.task import Batch

if TYPE_CHECKING:
    from isokron.tasks.huggingface import Pretrained

AT_ONCE = 256  # documents: enough for a fast tokenizer's threads, few enough for memory
OFFSETS = {"return_offsets_mapping": True, "return_special_tokens_mask": True}


@dataclass(frozen=True, eq=False)
class Part:
    """The tokens [length] of an example, from token `start` of its document on.

    target: a classifier's class; of a language model, the first token that has a loss.
    """

    document: Document
    id: str
    tokens: Tensor
    target: int
    start: int = 0
    shown: Shown | None = None


class Corpus:
    """Documents as a model's tokens. A batch is tokens [n, longest], padded on the right, how many
    of each row count [n], the numbers of the parts [n] and their targets [n].

    context: tokens of an example at most, None for as many as the model takes.
    long: what to do with longer documents, see language_model.
    classes: a classifier's, by name; None for a language model.
    """

    def __init__(
        self,
        pretrained: Pretrained,
        context: int | None,
        long: str,
        classes: Mapping[str, int] | None = None,
    ) -> None:
        choices = ("error", "cut", "split") if classes is None else ("error", "cut")
        if long not in choices:
            raise ValueError(f"long must be one of {', '.join(choices)}, got {long!r}")
        limit = pretrained.context
        if context is not None and not 2 <= context <= limit:
            raise ValueError(f"context must lie between 2 and the model's {limit}, got {context}")
        self.pretrained, self.tokenizer = pretrained, pretrained.tokenizer
        self.context, self.long, self.classes = context or limit, long, classes
        self.names = {number: name for name, number in (classes or {}).items()}
        # not verbose: long texts get an error of our own
        self.options: dict[str, Any] = {"verbose": False}
        if classes is not None and long == "cut" and self.context < sys.maxsize:
            # the tokenizer cuts so that a text keeps the mark of its end
            self.options |= {"truncation": True, "max_length": self.context}
        self.chat = bool(self.tokenizer.chat_template)
        self.parts: list[Part] = []
        self.skipped: list[str] = []

    def add(self, documents: Sequence[Document]) -> Batch:
        """A batch of all documents but those without a token to predict, which are skipped."""
        first = len(self.parts)
        for k in range(0, len(documents), AT_ONCE):
            chunk = documents[k : k + AT_ONCE]
            texts = [document.text for document in chunk]
            rows = self.tokenizer(texts, **self.options)["input_ids"]
            for document, row in zip(chunk, rows, strict=True):
                # the first token of a language model's text is not predicted
                if document.text.strip() and len(row) > (self.classes is None):
                    self.parts += self._cut(document, torch.tensor(row, dtype=torch.int32))
                else:
                    self.skipped.append(document.id)
        if len(self.parts) == first:
            raise ValueError("data, evaluation and queries must have two tokens or more, got none")
        return self._batch(first)

    def _cut(self, document: Document, tokens: Tensor) -> Iterator[Part]:
        target = 1 if self.classes is None else self._class(document)
        if len(tokens) <= self.context or self.long == "cut":
            yield Part(document, document.id, tokens[: self.context].clone(), target)
        elif self.long == "split" and document.id:
            for k, start in enumerate(range(0, len(tokens) - 1, self.context - 1)):
                row = tokens[start : start + self.context].clone()
                yield Part(document, f"{document.id}#{k}", row, target, start)
        else:
            choices = "cut or split" if self.classes is None and document.id else "cut"
            raise ValueError(
                f"{_name(document)} has {len(tokens)} tokens, more than the {self.context} of the "
                f"model's context; shorten it, or set long to {choices}"
            )

    def _class(self, document: Document) -> int:
        """The class that a document is labelled with; −1 of a query: the one that is predicted."""
        classes = self.classes or {}
        numbers = {**{str(number): number for number in self.names}, **classes}
        if document.label is None and not document.id:
            return -1
        if document.label not in numbers:
            raise ValueError(
                f"{_name(document)} has the label {document.label!r}, which the model does not "
                f"know; it knows {', '.join(classes)}, or 0 to {len(classes) - 1}"
            )
        return numbers[document.label]

    def _batch(self, first: int) -> Batch:
        """All parts from number `first` on."""
        parts = self.parts[first:]
        rows, pad = [part.tokens for part in parts], self.pretrained.pad
        for part in parts if self.classes is not None and not self.pretrained.pad_is_named else ():
            # a language model with a classifier's head looks for the last token that is not `pad`
            if int(part.tokens[-1]) == pad:
                raise ValueError(
                    f"{_name(part.document)} ends with token {pad}, which pads rows since the "
                    "model's configuration names no other; set pad_token_id there"
                )
        return (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad),
            torch.tensor([len(row) for row in rows]),
            torch.arange(first, len(self.parts)),
            torch.tensor([part.target for part in parts]),
        )

    def read(self, query: str) -> Batch:
        """A query as a batch of one: a text, or of a classifier `text => label`."""
        text, arrow, label = query.rpartition("=>")
        labelled = arrow and self.classes is not None
        document = Document("", text.strip(), label.strip()) if labelled else Document("", query)
        return self.add([document])

    def prompt(
        self, model: nn.Module, prompt: str, completion: str | None = None, max_new_tokens: int = 32
    ) -> tuple[Batch, Shown]:
        """A batch of one in which only the completion has a loss; without a completion the model
        writes it, taking the likeliest token each time."""
        if not prompt.strip() or completion == "" or max_new_tokens < 1:
            raise ValueError(
                "prompt and completion must have words, and max_new_tokens be positive, got "
                f"{prompt!r:.40}, {completion!r:.40} and {max_new_tokens}"
            )
        context, generated, limit = prompt, completion is None, self.pretrained.context
        if self.chat:
            options = {"tokenize": False, "add_generation_prompt": True}
            message = {"role": "user", "content": prompt}
            context = self.tokenizer.apply_chat_template([message], **options)
        # a chat template contains the tokenizer's marks
        tokens, first, texts = _joined(self.tokenizer, context, completion or "", not self.chat)
        if len(tokens) + generated > limit:
            raise ValueError(
                f"prompt {prompt!r:.40} and its completion have {len(tokens) + generated} tokens "
                f"or more, but the model takes {limit}; shorten them"
            )
        if generated:
            tokens += self.pretrained.generate(model, tokens, min(max_new_tokens, limit - first))
            texts = [context, *[""] * (first - 1), *_decoded(self.tokenizer, tokens)[first:]]
        if len(tokens) <= first:
            reason = "the model ends its text at once" if generated else "the completion is empty"
            raise ValueError(f"prompt {prompt!r:.40}: {reason}; give another completion")
        shown = Shown(tuple(texts[first:]), "".join(texts[:first]), generated=generated)
        row = torch.tensor(tokens, dtype=torch.int32)
        self.parts.append(Part(Document("", shown.text), "", row, first, shown=shown))
        return self._batch(len(self.parts) - 1), shown

    def show(self, batch: Batch) -> list[Shown]:
        """The pieces of text of every example, its class and its id."""
        displays = []
        for row, length, number, target in zip(*(column.tolist() for column in batch), strict=True):
            tokens = row[:length]
            part = self.parts[number] if number < len(self.parts) else None
            # a batch saved by another process may have the number of another query
            if part is None or part.tokens.tolist() != tokens:
                part = Part(Document("", ""), "", batch[0], target)
            texts = self._pieces(tokens, part)
            first, label = (target, "") if self.classes is None else (0, self.names.get(target, ""))
            shown = Shown(tuple(texts[first:]), "".join(texts[:first]), None, label, part.id)
            displays.append(part.shown or shown)
        return displays

    def _pieces(self, tokens: list[int], part: Part) -> list[str]:
        """The text of every token: its place in the document, or decoded if that is unknown."""
        text, place = part.document.text, slice(part.start, part.start + len(tokens))
        if text and self.tokenizer.is_fast:
            encoded = self.tokenizer(text, **OFFSETS, **self.options)
            if encoded["input_ids"][place] == tokens:
                return _placed(text, encoded)[place]
        return _decoded(self.tokenizer, tokens)


def _name(document: Document) -> str:
    return f"document {document.id!r}" if document.id else "the query"


def _joined(
    tokenizer: Any, context: str, completion: str, marks: bool
) -> tuple[list[int], int, list[str]]:
    """The tokens of context + completion, the first of the completion, and pieces of text.

    marks: add the tokenizer's marks, such as a beginning of text.
    """
    # the joined text is tokenized, as a document is: a token with characters of both belongs to the
    # completion
    options = {"add_special_tokens": marks, "verbose": False}
    before = tokenizer(context, **options)["input_ids"]
    if not completion:
        # the text goes on: without the mark of its end
        while marks and len(before) > 1 and before[-1] == tokenizer.eos_token_id:
            before.pop()
        return before, len(before), []
    text = context + completion
    if tokenizer.is_fast:
        encoded = tokenizer(text, **OFFSETS, **options)
        tokens, texts = encoded["input_ids"], _placed(text, encoded)
        inside = [end > len(context) for end in accumulate(map(len, texts))]
    else:
        # without offsets: where the tokens of both texts begin to differ
        tokens = tokenizer(text, **options)["input_ids"]
        texts = _decoded(tokenizer, tokens)
        inside = [tokens[: k + 1] != before[: k + 1] for k in range(len(tokens))]
    # a text's first token is not predicted
    return tokens, max(1, [*inside, True].index(True)), texts


def _placed(text: str, encoded: Any) -> list[str]:
    """The text of every token by its offsets; the tokenizer's marks are empty."""
    # what lies between two tokens belongs to the later one, blanks at the end to the last
    ends, end = [], 0
    offsets, marks = encoded["offset_mapping"], encoded["special_tokens_mask"]
    for (_, last), mark in zip(offsets, marks, strict=True):
        end = end if mark else max(end, last)
        ends.append(end)
    if not text[end:].strip():
        ends = [len(text) if place == end else place for place in ends]
    return [text[first:last] for first, last in zip([0, *ends[:-1]], ends, strict=True)]


def _decoded(tokenizer: Any, tokens: list[int]) -> list[str]:
    """The text of every token without a document; the tokenizer's marks are empty."""

    # a token may change how its neighbour is written, and a character may take several tokens:
    # decode each with those before it, from the last complete character on
    def decode(first: int, last: int) -> str:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        text: str = tokenizer.decode(tokens[first:last], **options)
        return text

    texts, before, complete = [], 0, 0
    for k in range(1, len(tokens) + 1):
        shorter, longer = decode(before, complete), decode(before, k)
        # half a character is nothing to some tokenizers and a broken one to others
        broken = longer.endswith("\ufffd") and k < len(tokens)
        texts.append("" if broken else longer[len(shorter) :])
        if texts[-1]:
            before, complete = complete, k
    return texts
