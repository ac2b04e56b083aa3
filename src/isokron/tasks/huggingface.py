"""Hugging Face language models and classifiers as tasks, from a folder or by name."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from isokron.tasks.catalog import import_optional, shuffled
from isokron.tasks.documents import Document, read_documents
from isokron.tasks.task import Batch, Examples, Task
from isokron.tasks.tokens import Corpus

Data = str | Path | Sequence[Document]
UNLIMITED = 10**9  # tokenizers without a limit have a larger one


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
    trained: bool = True,
    chat: bool | None = None,
) -> Task:
    """Predict the next token of documents with a causal language model.

    Args:
        model: a folder, which is loaded without the network, or a name on the hub.
        data: documents, or where read_documents finds them; text, id: its columns.
        context: tokens of an example at most; by default as many as the model takes.
        long: what to do with longer documents: "error"; "cut" keeps their first tokens; "split"
            makes several examples of one that share a token, so that each is predicted once.
        evaluation: documents, or the share of `data` that is held out; 0 for none.
        dtype: of the loaded weights; "auto" for the one they are stored in.
        trained: refuse a folder that lacks weights; False initializes them at random.
        chat: put prompts into the tokenizer's chat template; by default if it has one.
    """
    pretrained = Pretrained(model, "AutoModelForCausalLM", dtype, trained)
    corpus = Corpus(pretrained, context, long)
    if chat and not corpus.chat:
        raise ValueError(f"chat=True: the tokenizer of {pretrained.path} has no chat template")
    corpus.chat = corpus.chat if chat is None else chat

    def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, tokens, counted = pretrained.scores(network, batch)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        counted = counted & (positions >= batch[3][:, None])
        # one target per position, and none for the last: curvature sees which positions count
        return scores, F.pad(tokens.masked_fill(~counted, -100)[:, 1:], (0, 1), value=-100)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores, targets = logits(network, batch)
        terms = F.cross_entropy(scores.float().flatten(0, 1), targets.flatten(), reduction="none")
        return terms.view_as(targets).sum(1) / (targets != -100).sum(1)

    def said(network: nn.Module, batch: Batch) -> str:
        rows = zip(*_predicted(network, logits, batch), strict=True)
        return "\n".join(pretrained.tokenizer.decode(row[target != -100]) for row, target in rows)

    functions = {"logits": logits, "loss": loss, "prompt": corpus.prompt, "said": said}
    source = (data, evaluation, {"text": text, "id": id})
    return _task(pretrained, corpus, source, batch_size, unit="nats per token", **functions)


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
    trained: bool = True,
) -> Task:
    """Predict the class of documents with a sequence classifier.

    A query is `text => label`, or `text` to ask about the class that the model predicts.

    Args:
        label: column of classes, by the names in the model's configuration or by number.
        long: what to do with documents of more than `context` tokens: "error" or "cut".
        model, data, text, id, context, evaluation, dtype, trained: see language_model.
    """
    pretrained = Pretrained(model, "AutoModelForSequenceClassification", dtype, trained)
    config = pretrained.config
    if config.num_labels < 2 or config.problem_type not in (None, "single_label_classification"):
        raise ValueError(
            f"{pretrained.path}: a classifier must choose one of several classes, got "
            f"{config.num_labels} outputs for {config.problem_type or 'a number'}; write a Task of "
            "your own for other losses"
        )
    numbers = sorted(config.label2id.items(), key=lambda pair: int(pair[1]))
    classes = {str(name): int(number) for name, number in numbers}
    corpus = Corpus(pretrained, context, long, classes)

    def logits(network: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        scores, targets = pretrained.scores(network, batch)[0], batch[3]
        # a query without a label is about the class that the model predicts
        return scores, torch.where(targets < 0, scores.detach().argmax(-1), targets)

    def loss(network: nn.Module, batch: Batch) -> Tensor:
        scores, targets = logits(network, batch)
        return F.cross_entropy(scores.float(), targets, reduction="none")

    def said(network: nn.Module, batch: Batch) -> str:
        numbers = _predicted(network, logits, batch)[0].tolist()
        return ", ".join(corpus.names.get(number, str(number)) for number in numbers)

    functions = {"logits": logits, "loss": loss, "said": said}
    source = (data, evaluation, {"text": text, "id": id, "label": label})
    return _task(pretrained, corpus, source, batch_size, unit="cross-entropy", **functions)


class Pretrained:
    """A pretrained model's configuration and tokenizer; `load` reads the weights.

    kind: the class of transformers that loads the model.
    """

    def __init__(
        self, model: str | Path, kind: str, dtype: torch.dtype | str, trained: bool
    ) -> None:
        why = "Hugging Face models need the package transformers"
        self.transformers = import_optional("transformers", "hf", why)
        self.kind, self.dtype, self.trained = kind, dtype, trained
        folder = Path(model).expanduser()
        # the network is not asked for a folder
        self.local = folder.is_dir() and str(model) != ""
        self.path = str(folder) if self.local else str(model)
        if not self.local and (isinstance(model, Path) or not model or model[0] in "./~"):
            raise ValueError(
                f"no folder {self.path!r} with a model; give the folder that save_pretrained "
                f"wrote, or a name on the hub; paths are relative to {Path.cwd()}"
            )
        self.config, self.tokenizer = self._from("AutoConfig"), self._from("AutoTokenizer")
        config, tokenizer = self.config.get_text_config(), self.tokenizer
        self.vocabulary: int = getattr(config, "vocab_size", UNLIMITED)
        limits = (getattr(config, "max_position_embeddings", 0), tokenizer.model_max_length)
        self.context = min((n for n in limits if n and 0 < n < UNLIMITED), default=sys.maxsize)
        # rows are filled up with any token of the model, or with the one that it looks for
        pads = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        self.pad = next((n for n in pads if n is not None and 0 <= n < self.vocabulary), 0)
        self.pad_is_named = self.pad == config.pad_token_id

    def _from(self, kind: str, **options: Any) -> Any:
        load = getattr(self.transformers, kind).from_pretrained
        try:
            return load(self.path, local_files_only=self.local, **options)
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{self.path}: {kind} cannot load it: {reason}") from error

    def load(self) -> nn.Module:
        """The model with its weights, in evaluation mode."""
        logging = self.transformers.utils.logging
        # the command line shows progress of its own
        switch = logging.enable_progress_bar if logging.is_progress_bar_enabled() else lambda: None
        logging.disable_progress_bar()
        try:
            model, info = self._from(self.kind, dtype=self.dtype, output_loading_info=True)
        finally:
            switch()
        missing = sorted(info["missing_keys"])
        if missing and self.trained:
            raise ValueError(
                f"{self.path}: has no weights for {', '.join(missing[:4])}, so the model is not "
                "trained for this; train it first, or set trained=False to start from random ones"
            )
        # language models with a classifier's head find the last token by it
        model.config.get_text_config().pad_token_id = self.pad
        for module in model.modules():
            for name, child in module.named_children():
                # GPT-2's activation takes eight operations; torch's has the same formula
                if type(child).__name__ == "NewGELUActivation":
                    setattr(module, name, nn.GELU(approximate="tanh"))
        return model

    def scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, tokens [n, longest] and which of them are no padding [n, longest]."""
        tokens, lengths = batch[:2]
        width = int(lengths.max())
        positions = torch.arange(width, device=tokens.device)
        tokens, counted = tokens[:, :width].long(), positions < lengths[:, None]
        accepted = inspect.signature(model.forward).parameters
        options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
        # RoBERTa and others count positions from after their padding token's
        shifted = any(
            isinstance(module, nn.Embedding) and module.padding_idx is not None
            for name, module in model.named_modules()
            if "position" in name
        )
        if "position_ids" in accepted and not shifted:
            # models look 0, 1, 2 … up once for all examples, whose gradients would come summed
            options["position_ids"] = positions.expand_as(tokens)
        out = model(input_ids=tokens, attention_mask=counted.long(), **options)
        return out.logits, tokens, counted

    @torch.no_grad()
    def generate(self, model: nn.Module, tokens: list[int], most: int) -> list[int]:
        """The likeliest continuation, up to `most` tokens or an end of text, which is left out."""
        settings = (self.tokenizer, self.config, getattr(model, "generation_config", None))
        named = [getattr(setting, "eos_token_id", None) for setting in settings]
        ends = {n for end in named for n in (end if isinstance(end, list) else [end])}
        accepted = inspect.signature(model.forward).parameters
        options: dict[str, Any] = {"use_cache": True} if "past_key_values" in accepted else {}
        inputs = torch.tensor([tokens]).to(next(model.parameters()).device)
        written: list[int] = []
        with _evaluation_mode(model):
            while len(written) < most:
                out = model(input_ids=inputs, **options)
                likeliest = out.logits[:, -1:].argmax(-1)  # [1, 1]
                if int(likeliest) in ends:
                    break
                written.append(int(likeliest))
                inputs = likeliest if options else torch.cat([inputs, likeliest], 1)
                if options:
                    options["past_key_values"] = out.past_key_values
        return written


def _task(
    pretrained: Pretrained,
    corpus: Corpus,
    source: tuple[Data, Data | float, dict[str, str | None]],
    batch_size: int,
    **functions: Any,
) -> Task:
    documents, unseen = _split(*source)
    train = corpus.add(documents)
    evaluation = None if unseen is None else Examples(corpus.add(unseen))
    largest = max(int(part.tokens.max()) for part in corpus.parts)
    if largest >= pretrained.vocabulary:
        raise ValueError(
            f"{pretrained.path}: its tokenizer gives token {largest}, but the model has "
            f"{pretrained.vocabulary}; model and tokenizer must belong together"
        )
    suffix = f"-{Path(source[0]).stem}" if isinstance(source[0], str | Path) else ""
    return Task(
        name=Path(pretrained.path).resolve().name + suffix,
        model=pretrained.load,
        train=Examples(train),
        evaluation=evaluation,
        batch_size=min(batch_size, len(train[0])),
        show=corpus.show,
        read=corpus.read,
        ids=[part.id for part in corpus.parts[: len(train[0])]],
        lengths=train[1].tolist(),
        skipped=tuple(corpus.skipped),
        trained=pretrained.trained,
        **functions,
    )


def _split(
    data: Data, evaluation: Data | float, columns: dict[str, str | None]
) -> tuple[Sequence[Document], Sequence[Document] | None]:
    """Documents to train on and to evaluate on, the same every time."""

    def read(source: Data) -> Sequence[Document]:
        return read_documents(source, **columns) if isinstance(source, str | Path) else source

    documents = read(data)
    if not isinstance(evaluation, int | float):
        return documents, read(evaluation)
    if evaluation == 0:
        return documents, None
    count = max(1, round(evaluation * len(documents)))
    if not 0 < evaluation < 1 or count >= len(documents):
        raise ValueError(
            f"evaluation must be a share of the {len(documents)} documents that leaves some to "
            f"train on, got {evaluation}; give a file of other documents, or 0 to hold none out"
        )
    held_out = set(shuffled([document.id for document in documents], "documents")[-count:])
    training = [document for document in documents if document.id not in held_out]
    return training, [document for document in documents if document.id in held_out]


@torch.no_grad()
def _predicted(
    model: nn.Module, logits: Callable[..., tuple[Tensor, Tensor]], batch: Batch
) -> tuple[Tensor, Tensor]:
    """The likeliest classes and the targets, on the CPU."""
    device = next(model.parameters()).device
    with _evaluation_mode(model):
        scores, targets = logits(model, tuple(tensor.to(device) for tensor in batch))
    return scores.argmax(-1).cpu(), targets.cpu()


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
