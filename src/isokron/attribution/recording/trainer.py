"""A recorder in the hands of Hugging Face's Trainer.

    with Recorder(model, encoding, folder, len(dataset), accumulation=4) as recorder:
        Trainer(model, args, train_dataset=dataset, callbacks=[trainer_callback(recorder)]).train()
    recorder.store

Every example has its number in a column, which the collator makes a tensor of, and which is taken
out of the model's arguments before it sees them: set remove_unused_columns=False.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from isokron.attribution.recording.recorder import Recorder

Terms = Callable[[Mapping[str, Any]], float]
ITEMS = "num_items_in_batch"


def trainer_callback(recorder: Recorder, column: str = "ids", terms: Terms | None = None) -> Any:
    """A TrainerCallback. `column`: of the examples' numbers, from 0.

    `terms`: of a model's arguments, the number that its mean is taken over; by default what the
    Trainer says, num_items_in_batch, which models that take it divide the sum of all tokens of a
    step by.
    """
    try:
        from transformers import TrainerCallback
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            'trainer_callback needs transformers; install it with: pip install "isokron[hf]"',
            name="transformers",
        ) from None
    if recorder.reduction != "mean":
        raise ValueError(f"Trainer takes means, got a recorder of reduction={recorder.reduction!r}")

    def announce(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = dict(kwargs)
        numbers = rest.pop(column, None)
        if module.training and torch.is_grad_enabled():
            if numbers is None:
                raise ValueError(
                    f"a batch came without {column!r}; give every training example its number "
                    "under this name"
                )
            recorder.batch(numbers, _count(rest))
        return args, rest

    def _count(inputs: Mapping[str, Any]) -> float:
        if terms is not None:
            return float(terms(inputs))
        if ITEMS not in inputs:
            raise ValueError(
                f"the Trainer gives this model no {ITEMS}; give `terms`, a function of the model's "
                "arguments that says what its mean is taken over"
            )
        return float(inputs[ITEMS]) / recorder.accumulation  # it is of all batches of a step

    class Callback(TrainerCallback):
        """Announces batches, and commits after steps."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            _check(recorder, args, kwargs["model"], column)
            recorder.scaler = getattr(kwargs["optimizer"], "scaler", None)
            hook = recorder.model.register_forward_pre_hook(
                announce, with_kwargs=True, prepend=True
            )
            recorder.handles.append(hook)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if getattr(kwargs["optimizer"], "step_was_skipped", False):
                recorder.drop()
            else:
                recorder.commit()

    return Callback()


def _check(recorder: Recorder, args: Any, model: nn.Module, column: str) -> None:
    """Refuse what would go wrong, before the first step."""
    if model is not recorder.model:
        raise ValueError("the Trainer's model must be the recorder's own, got another")
    if not recorder.handles:
        raise ValueError("train inside of the recorder: with recorder: trainer.train()")
    if args.remove_unused_columns:
        raise ValueError(
            f"the Trainer would drop the column {column!r}; set remove_unused_columns=False"
        )
    if args.gradient_accumulation_steps != recorder.accumulation:
        raise ValueError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, and the "
            f"recorder's accumulation {recorder.accumulation}; make them the same"
        )
    if args.world_size > 1 or args.n_gpu > 1:
        raise ValueError("a recorder sees one process and device; train on one, or build a store")
