"""Hugging Face language models and classifiers as tasks, from a folder or the hub."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.documents import Document, read_documents
from isokron.tasks.model_location import locate
from isokron.tasks.task import Batch, Examples, Logits, Shown, Task, mean_cross_entropy
from isokron.tasks.tokens import completion_pieces, decoded_pieces, text_pieces

Data = str | Path | Sequence[Document]
CHUNK = 256  # documents tokenized at a time: enough for threads, few enough for memory
UNLIMITED = 10**9  # tokenizers without a limit report a larger one


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
    dtype: torch.dtype | str = torch.float32,
    chat: bool | None = None,
) -> Task:
    """Predict the next token of documents with a causal language model.

    Args:
        model: a folder, which is loaded without network access, or a name on the hub. A folder
            with an adapter of peft, such as LoRA, is loaded with its base.
        data: documents, or a source for read_documents.
        text: column of texts; see read_documents.
        id: column of ids; see read_documents.
        context: maximum tokens of an example; default: the model's maximum.
        long: how to treat longer documents: "error", "cut" to their first tokens, or "split" into
            several examples that overlap by one token, so that each token is predicted once.
        evaluation: documents, or the fraction of `data` to hold out; 0 for none.
        batch_size: examples per training step.
        dtype: dtype of the loaded weights; "auto" for the one they are stored in.
        chat: put prompts into the tokenizer's chat template; default: if there is one.
    """
    pretrained = Pretrained(model, "AutoModelForCausalLM", dtype, context, long)
    pretrained.chat = bool(pretrained.tokenizer.chat_template) if chat is None else chat

    def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, tokens, counted = pretrained.scores(network, batch)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        counted = counted & (positions >= batch[3][:, None])
        # one target per position, none for the last: curvature masks positions without a target
        return scores, F.pad(tokens.masked_fill(~counted, -100)[:, 1:], (0, 1), value=-100)

    @torch.no_grad()
    def said(network: nn.Module, batch: Batch) -> str:
        scores, targets = logits(network, batch)
        rows = zip(scores.argmax(-1), targets, strict=True)
        return "\n".join(pretrained.tokenizer.decode(row[target != -100]) for row, target in rows)

    documents = _split(data, evaluation, text=text, id=id)
    fields: dict[str, Any] = {"unit": "nats per token", "prompt": pretrained.prompt}
    return pretrained.task(*documents, logits, batch_size, said=said, **fields)


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
    dtype: torch.dtype | str = torch.float32,
) -> Task:
    """Predict the class of documents with a sequence classifier.

    A query is `text => label`, or `text` for the class that the model predicts.

    Args:
        model: a folder, which is loaded without network access, or a name on the hub. A folder
            with an adapter of peft, such as LoRA, is loaded with its base.
        data: documents, or a source for read_documents.
        text: column of texts; see read_documents.
        label: column of classes, by the names in the model's configuration or by number.
        id: column of ids; see read_documents.
        context: maximum tokens of an example; default: the model's maximum.
        long: how to treat longer documents: "error" or "cut".
        evaluation: documents, or the fraction of `data` to hold out; 0 for none.
        batch_size: examples per training step.
        dtype: dtype of the loaded weights; "auto" for the one they are stored in.
    """
    pretrained = Pretrained(model, "AutoModelForSequenceClassification", dtype, context, long)
    problem = pretrained.config.problem_type
    if len(pretrained.classes) < 2 or problem not in (None, "single_label_classification"):
        raise ValueError(
            f"{pretrained.path}: a classifier must choose one of several classes, got a model for "
            f"{problem or 'regression'}; write your own Task for other losses"
        )

    def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, targets = pretrained.scores(network, batch)[0], batch[3]
        # a query without a label has the class that the model predicts
        return scores, torch.where(targets < 0, scores.detach().argmax(-1), targets)

    @torch.no_grad()
    def said(network: nn.Module, batch: Batch) -> str:
        numbers = logits(network, batch)[0].argmax(-1).tolist()
        return ", ".join(pretrained.classes[number] for number in numbers)

    documents = _split(data, evaluation, text=text, id=id, label=label)
    return pretrained.task(*documents, logits, batch_size, unit="cross-entropy", said=said)


class Pretrained:
    """A pretrained model with its tokenizer.

    A batch is tokens [n, longest], padded on the right, the length of each row [n], the index of
    its text [n] (−1 for none) and its target [n]: the class for a classifier, the first token with
    a loss for a language model.

    kind: the transformers class that loads the model. context, long: see language_model.
    """

    chat = False  # put prompts into the chat template

    def __init__(
        self, model: str | Path, kind: str, dtype: torch.dtype | str, context: int | None, long: str
    ) -> None:
        why = "Hugging Face models need the package transformers"
        self.transformers = import_optional("transformers", "hf", why)
        self.kind, self.dtype, self.long = kind, dtype, long
        self.location = locate(model)
        self.path = self.location.path
        self.config = self._from("AutoConfig", self.path)
        self.tokenizer = self._from("AutoTokenizer", self.location.tokenizer)
        config, tokenizer = self.config.get_text_config(), self.tokenizer
        self.vocabulary: int = getattr(config, "vocab_size", UNLIMITED)
        limits = (getattr(config, "max_position_embeddings", 0), tokenizer.model_max_length)
        self.limit: int = min(n for n in (*limits, UNLIMITED) if n and n > 0)
        # padding is masked, so that any token of the model will do
        pads = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        self.pad: int = next(n for n in pads if n is not None and 0 <= n < self.vocabulary)
        if context is not None and not 2 <= context <= self.limit:
            rule = f"between 2 and the model's {self.limit}"
            raise ValueError(f"context must lie {rule}, got {context}")
        self.context = context or self.limit
        is_classifier = kind == "AutoModelForSequenceClassification"
        choices = ("error", "cut") if is_classifier else ("error", "cut", "split")
        if long not in choices:
            raise ValueError(f"long must be one of {', '.join(choices)}, got {long!r}")
        names = self.config.id2label if is_classifier else {}
        self.classes: list[str] = [names[number] for number in sorted(names)]
        # not verbose, since `_starts` reports texts that are too long
        self.options: dict[str, Any] = {"verbose": False}
        if is_classifier and long == "cut":
            # cut by the tokenizer, which keeps its end-of-text token
            self.options |= {"truncation": True, "max_length": self.context}
        self.texts: list[tuple[str, str, int]] = []  # id, text and first token of every example
        self.skipped: list[str] = []

    def _from(self, kind: str, path: str, **options: Any) -> Any:
        load, local = getattr(self.transformers, kind).from_pretrained, Path(path).is_dir()
        try:
            # a folder is loaded without network access
            return load(path, local_files_only=local, **options)
        except (OSError, ValueError) as error:
            here = "" if local else f"there is no such folder in {Path.cwd()}, and on the hub: "
            raise ValueError(f"model {path!r} cannot be loaded: {here}{error}") from error

    def load(self) -> nn.Module:
        """The model with its weights, in evaluation mode."""
        model, info = self._from(self.kind, self.path, dtype=self.dtype, output_loading_info=True)
        absent = {k for k in info["missing_keys"] if not {*self.location.saved} & {*k.split(".")}}
        if absent:
            missing = ", ".join(sorted(absent)[:4])
            raise ValueError(f"{self.path}: has no weights for {missing}; train the model first")
        # classifiers based on language models find the last token by it
        model.config.get_text_config().pad_token_id = self.pad
        for module in model.modules():
            for name, child in module.named_children():
                # GPT-2's activation is eight operations; torch has the same formula in one
                if type(child).__name__ == "NewGELUActivation":
                    setattr(module, name, nn.GELU(approximate="tanh"))
        return self.location.adapted(model).eval()

    def task(
        self,
        documents: Sequence[Document],
        unseen: Sequence[Document] | None,
        logits: Logits,
        batch_size: int,
        **fields: Any,
    ) -> Task:
        train = Examples(self.tokens(documents))
        ids = [name for name, _, _ in self.texts]
        return Task(
            name=Path(self.location.adapter or self.path).resolve().name,
            model=self.load,
            train=train,
            evaluation=None if unseen is None else Examples(self.tokens(unseen)),
            loss=mean_cross_entropy(logits),
            batch_size=min(batch_size, len(train)),
            logits=logits,
            show=self.show,
            read=self.read,
            ids=ids,
            lengths=train.tensors[1].tolist(),
            skipped=tuple(self.skipped),
            trained=True,
            **fields,
        )

    def tokens(self, documents: Sequence[Document]) -> Batch:
        """A batch of all documents; those without a token to predict are skipped."""
        first, rows, targets = len(self.texts), [], []
        for begin in range(0, len(documents), CHUNK):
            chunk = documents[begin : begin + CHUNK]
            encoded = self.tokenizer([document.text for document in chunk], **self.options)
            for document, tokens in zip(chunk, encoded["input_ids"], strict=True):
                # a language model does not predict the first token
                if not document.text.strip() or len(tokens) < (1 if self.classes else 2):
                    self.skipped.append(document.id)
                    continue
                starts = self._starts(document, len(tokens))
                for number, start in enumerate(starts):
                    name = f"{document.id}#{number}" if len(starts) > 1 else document.id
                    self.texts.append((name, document.text, start))
                    row = tokens[start : start + self.context]
                    rows.append(torch.tensor(row, dtype=torch.int32))
                    targets.append(self._class(document) if self.classes else 1)
        if not rows:
            raise ValueError("data, evaluation and queries must have two tokens or more, got none")
        padded = pad_sequence(rows, batch_first=True, padding_value=self.pad)
        if int(padded.max()) >= self.vocabulary:
            raise ValueError(
                f"{self.path}: the tokenizer gives token {int(padded.max())}, but the model has "
                f"only {self.vocabulary}; model and tokenizer must belong together"
            )
        lengths = torch.tensor([len(row) for row in rows])
        return padded, lengths, torch.arange(first, len(self.texts)), torch.tensor(targets)

    def _starts(self, document: Document, length: int) -> range:
        """The first tokens of the examples into which a document of `length` tokens is split."""
        if length <= self.context or self.long == "cut":
            return range(1)
        if self.long == "split" and document.id:
            # examples overlap by one token, so that each token is predicted once
            return range(0, length - 1, self.context - 1)
        remedy = "long='cut'"
        if document.id and not self.classes:
            remedy += " or long='split'"
        raise ValueError(
            f"{_name(document)} has {length} tokens, more than the {self.context} of the model's "
            f"context; shorten it, or use {remedy}"
        )

    def _class(self, document: Document) -> int:
        if document.label is None and not document.id:
            return -1  # the class that the model predicts
        labels = {str(number): number for number in range(len(self.classes))}
        labels |= {name: number for number, name in enumerate(self.classes)}
        if document.label not in labels:
            raise ValueError(
                f"{_name(document)} has the label {document.label!r}, which the model does not "
                f"know; it knows {', '.join(self.classes)}, or 0 to {len(self.classes) - 1}"
            )
        return labels[document.label]

    def read(self, query: str) -> Batch:
        """A query as a batch of one: a text, or `text => label` for a classifier."""
        text, arrow, label = query.rpartition("=>")
        if arrow and self.classes:
            return self.tokens([Document("", text.strip(), label.strip())])
        return self.tokens([Document("", query)])

    def show(self, batch: Batch) -> list[Shown]:
        """The tokens of every example as text, its class and its id."""
        displays = []
        for row, length, number, target in zip(*(column.tolist() for column in batch), strict=True):
            name, text, start = self.texts[number] if number >= 0 else ("", "", 0)
            if text and self.tokenizer.is_fast:
                texts = text_pieces(self.tokenizer, text, self.options)[start : start + length]
            else:
                texts = decoded_pieces(self.tokenizer, row[:length])
            first = 0 if self.classes else target
            label = self.classes[target] if self.classes and target >= 0 else ""
            context = "".join(texts[:first])
            displays.append(Shown(tuple(texts[first:]), context, label=label, title=name))
        return displays

    def scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, tokens [n, longest] and a mask [n, longest] that is False for padding."""
        tokens, lengths = batch[:2]
        width = int(lengths.max())
        positions = torch.arange(width, device=tokens.device)
        tokens, counted = tokens[:, :width].long(), positions < lengths[:, None]
        accepted = inspect.signature(model.forward).parameters
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        # RoBERTa and others count positions from their padding index on
        shifted = any(
            isinstance(module, nn.Embedding) and module.padding_idx is not None
            for name, module in model.named_modules()
            if "position" in name
        )
        if "position_ids" in accepted and not shifted:
            # by default, models embed positions once per batch, which sums over examples
            options["position_ids"] = positions.expand_as(tokens)
        output = model(input_ids=tokens, attention_mask=counted.long(), **options)
        return output.logits, tokens, counted

    def prompt(
        self, model: nn.Module, prompt: str, completion: str | None = None, max_new_tokens: int = 32
    ) -> tuple[Batch, Shown]:
        """A batch of one in which only the completion has a loss, and how to display it.

        Without a completion, the model generates it greedily.
        """
        if not prompt.strip():
            raise ValueError(f"prompt must have words, got {prompt!r}")
        tokenizer, context = self.tokenizer, prompt
        if self.chat:
            context = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
            )
        # a chat template contains the special tokens
        options = {"add_special_tokens": not self.chat, "verbose": False}
        tokens = tokenizer(context + (completion or ""), **options)["input_ids"]
        if completion is None and not self.chat and tokens[-1] == tokenizer.eos_token_id:
            tokens.pop()  # the text continues after the prompt
        if len(tokens) + (completion is None) > self.limit:
            raise ValueError(
                f"prompt {prompt!r:.40} and its completion have {len(tokens)} tokens or more, but "
                f"the model takes {self.limit}; shorten them"
            )
        if completion is None:
            first = len(tokens)
            tokens += self.generate(model, tokens, min(max_new_tokens, self.limit - first))
            texts = decoded_pieces(tokenizer, tokens, first)
        else:
            context, texts = completion_pieces(tokenizer, context, completion, options)
            first = len(tokens) - len(texts)
        if not texts:
            reason = "the completion has no token, or the model ends the text at once"
            raise ValueError(f"prompt {prompt!r:.40}: {reason}; give another completion")
        row = torch.tensor([tokens], dtype=torch.int32)
        batch = (row, *(torch.tensor([number]) for number in (len(tokens), -1, first)))
        return batch, Shown(tuple(texts), context, generated=completion is None)

    @torch.no_grad()
    def generate(self, model: Any, tokens: list[int], most: int) -> list[int]:
        """A greedy continuation of at most `most` tokens, without the end-of-text token."""
        settings = (self.tokenizer, self.config, getattr(model, "generation_config", None))
        named = [getattr(setting, "eos_token_id", None) for setting in settings]
        ends: set[Any] = {n for end in named for n in (end if isinstance(end, list) else [end])}
        ends -= {None}
        # a new configuration: the model's own may sample, or penalize repetitions
        greedy = self.transformers.GenerationConfig(
            max_new_tokens=most, eos_token_id=sorted(ends) or None, pad_token_id=self.pad
        )
        inputs = torch.tensor([tokens], device=next(model.parameters()).device)
        modes = [(module, module.training) for module in model.modules()]
        model.eval()
        try:
            # with a mask, since the prompt may contain the token that pads
            mask = torch.ones_like(inputs)
            row = model.generate(inputs, attention_mask=mask, generation_config=greedy)[0].tolist()
        finally:
            for module, training in modes:
                module.training = training
        return list(takewhile(lambda token: token not in ends, row[len(tokens) :]))


def _name(document: Document) -> str:
    return f"document {document.id!r}" if document.id else "the query"


def _split(
    data: Data, evaluation: Data | float, **columns: Any
) -> tuple[Sequence[Document], Sequence[Document] | None]:
    """Documents to train on and to evaluate on; the split depends on the ids only."""
    documents = read_documents(data, **columns) if isinstance(data, str | Path) else data
    if isinstance(evaluation, str | Path):
        return documents, read_documents(evaluation, **columns)
    if not isinstance(evaluation, int | float):
        return documents, evaluation
    if evaluation == 0:
        return documents, None
    count = max(1, round(evaluation * len(documents)))
    if not 0 < evaluation < 1 or count >= len(documents):
        raise ValueError(
            f"evaluation must be a fraction of the {len(documents)} documents that leaves some to "
            f"train on, got {evaluation}; give a file of other documents, or 0 to hold none out"
        )
    held_out = set(shuffled([document.id for document in documents], "documents")[-count:])
    training = [document for document in documents if document.id not in held_out]
    return training, [document for document in documents if document.id in held_out]
