"""A pretrained model of transformers, its tokenizer, and how it is called on padded tokens."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from isokron.tasks.task import Batch

UNLIMITED = 10**9  # tokenizers that know no limit tell of a larger one


class Pretrained:
    """What a folder or a name on the hub holds; the weights are read when `load` is called.

    kind: the class of transformers that loads the model. trained: it is an error if the folder
    lacks some of its weights, which then would start at random.
    """

    def __init__(self, model: str | Path, kind: str, dtype: torch.dtype, trained: bool) -> None:
        self.transformers = _transformers()
        self.path = str(model)
        self.name = Path(model).name
        self.kind, self.dtype, self.trained = kind, dtype, trained
        folder = Path(model).expanduser()
        local = folder.is_dir() and self.path != ""
        if local:
            self.path, self.name = str(folder), folder.resolve().name
        elif isinstance(model, Path) or folder.exists() or self.path[0] in "./~":
            raise ValueError(
                f"no folder {self.path!r} with a model; give the folder that save_pretrained "
                f"wrote, or a name on the hub; paths are relative to {Path.cwd()}"
            )
        # a folder is all there is: nothing is asked of the network
        self.where = {"local_files_only": local}
        self.config = self._from("AutoConfig")
        self.tokenizer = self._from("AutoTokenizer")
        self.pad = self._pad()
        # the model was not made with this one, and may take it for padding at the end of a text
        self.own_pad = self.pad == self.config.get_text_config().pad_token_id
        self.options: dict[str, Any] | None = None

    def _from(self, kind: str, **options: Any) -> Any:
        try:
            return getattr(self.transformers, kind).from_pretrained(
                self.path, **self.where, **options
            )
        except (OSError, ValueError) as error:
            reason = str(error).strip().split("\n")[0]
            raise ValueError(f"{self.path}: {kind} cannot load it: {reason}") from error

    def _pad(self) -> int:
        """What rows are filled up with. Attention leaves it out, and any token will do but for
        models that look for it, of which the configuration names it."""
        wanted = (
            self.config.get_text_config().pad_token_id,
            self.tokenizer.pad_token_id,
            self.tokenizer.eos_token_id,
        )
        size = self.vocabulary or UNLIMITED
        return next((n for n in wanted if n is not None and 0 <= n < size), 0)

    @property
    def vocabulary(self) -> int | None:
        """How many tokens the model knows, if it tells."""
        return getattr(self.config.get_text_config(), "vocab_size", None)

    @property
    def context(self) -> int | None:
        """Tokens that the model takes at most, None if there is no limit."""
        limits = (
            getattr(self.config.get_text_config(), "max_position_embeddings", None),
            self.tokenizer.model_max_length,
        )
        return min((n for n in limits if isinstance(n, int) and 0 < n < UNLIMITED), default=None)

    def load(self, example: Batch) -> nn.Module:
        """The model with its weights, ready for evaluation; `example` is tried on it."""
        with _quiet(self.transformers):
            model, info = self._from(self.kind, dtype=self.dtype, output_loading_info=True)
        missing = sorted(info["missing_keys"])
        if missing and self.trained:
            raise ValueError(
                f"{self.path}: has no weights for {', '.join(missing[:4])}, so the model is not "
                "trained for this; train it first, or set trained=False to start from random ones"
            )
        # by which classifiers made of language models find the last token
        model.config.get_text_config().pad_token_id = self.pad
        with_one_gelu_(model)
        self.options = _options(model, example)
        return model

    def scores(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """What the model says, the tokens [n, longest], and which of them count [n, longest]."""
        if self.options is None:
            self.options = _options(model, batch)
        tokens, kept = unpadded(batch)
        options = dict(self.options)
        if options.pop("position_ids", False):
            places = torch.arange(tokens.shape[1], device=tokens.device)
            options["position_ids"] = places.expand_as(tokens)
        out = model(input_ids=tokens, attention_mask=kept.long(), **options)
        return out.logits, tokens, kept


def with_one_gelu_(model: nn.Module) -> None:
    """GPT-2's activation, eight operations and as many copies there, by torch's own of the same
    formula: a seventh of the time of a pass through a small model."""
    for module in model.modules():
        for name, child in module.named_children():
            if type(child).__name__ == "NewGELUActivation":
                setattr(module, name, nn.GELU(approximate="tanh"))


def unpadded(batch: Batch) -> tuple[Tensor, Tensor]:
    """The tokens as wide as the longest of this batch, and which of them count."""
    tokens, lengths = batch[:2]
    width = int(lengths.max())
    places = torch.arange(width, device=tokens.device)
    return tokens[:, :width].long(), places < lengths[:, None]


def _options(model: nn.Module, example: Batch) -> dict[str, Any]:
    """What else to call this model with: no cache, and places if examples would share theirs."""
    accepted = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in accepted else {}
    if "position_ids" in accepted and _shares_places(model, example):
        options["position_ids"] = True
    return options


@torch.no_grad()
def _shares_places(model: nn.Module, example: Batch) -> bool:
    """Whether an embedding is asked for places 0, 1, 2 … once for all examples of a batch.

    Its gradients would come summed over examples. Models that count places otherwise, as those do
    that begin past the number of a padding token, or that have none, are left to themselves.
    """
    tokens, kept = unpadded(tuple(tensor[:1].expand(2, *tensor.shape[1:]) for tensor in example))
    places = torch.arange(tokens.shape[1], device=tokens.device)
    shared = []

    def asked(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()))
        shared.append(given.numel() == len(places) and torch.equal(given.flatten(), places))

    hooks = [
        module.register_forward_pre_hook(asked, with_kwargs=True)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        model(input_ids=tokens, attention_mask=kept.long())
    finally:
        for hook in hooks:
            hook.remove()
    return any(shared)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """No progress bars among what a command prints."""
    logging = transformers.utils.logging
    shown: Callable[[], bool] = logging.is_progress_bar_enabled
    if not shown():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Hugging Face models need the package transformers; install it with: "
            'pip install "isokron[hf]" (in a clone: pip install ".[hf]")',
            name=error.name,
        ) from None
