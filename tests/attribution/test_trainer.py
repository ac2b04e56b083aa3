"""The recorder inside of Hugging Face's Trainer, with a GPT-2 made on the spot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.attribution.collect import collect
from isokron.attribution.encoding import encoding
from isokron.attribution.projection import Projection
from isokron.attribution.recording.recorder import Recorder
from isokron.attribution.recording.trainer import trainer_callback
from isokron.curvature import CrossEntropy
from isokron.curvature.sites import find_sites

transformers = pytest.importorskip("transformers")
EXAMPLES, LENGTH = 18, 6  # the last step of an epoch has one batch, of two


def model_of() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 8, "vocab_size": 11}
    off = {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(**sizes, **off, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)


def data() -> list[dict[str, Any]]:
    tokens = torch.randint(0, 11, (EXAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[4, 3:] = -100
    return [{"input_ids": tokens[k], "labels": labels[k], "ids": k} for k in range(EXAMPLES)]


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.01,
        "eval_strategy": "epoch",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "remove_unused_columns": False,
    }
    callbacks = options.pop("callbacks", [])
    args = transformers.TrainingArguments(**{**settings, **options})
    own = data()
    return transformers.Trainer(
        model, args, train_dataset=own, eval_dataset=own[:3], callbacks=callbacks
    )


def rows_after(model: nn.Module, how: Any) -> Tensor:
    """By a pass of its own, all examples at once."""
    found: list[Tensor] = []
    batch = transformers.default_data_collator(data())

    def forward(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        return model(input_ids=batch["input_ids"]).logits, targets

    collect(model.eval(), [batch], CrossEntropy(forward), how, lambda own, _: found.append(own))
    return torch.cat(found)


def layers(model: nn.Module) -> Any:
    """All but the tables: the head shares one, and positions are those of all examples at once."""
    return find_sites(model, ("transformer.h.*", "transformer.ln_f"))


@pytest.mark.filterwarnings("ignore")
def test_rows_are_those_of_a_pass_over_the_data(tmp_path: Path) -> None:
    model = model_of()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    how = encoding(layers(model), Projection(4))
    right = rows_after(model, how)
    with Recorder(model, how, tmp_path / "store", EXAMPLES, accumulation=2) as recorder:
        callback = trainer_callback(recorder)
        trainer(model, tmp_path, learning_rate=0.0, callbacks=[callback]).train()
    found = recorder.store.rows(range(EXAMPLES))
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert recorder.store.extra("seen").tolist() == [2] * EXAMPLES


@pytest.mark.filterwarnings("ignore")
def test_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    weights = []
    for recorded in (False, True):
        model = model_of()
        if recorded:
            how = encoding(layers(model), Projection(4))
            with Recorder(model, how, tmp_path / "store", EXAMPLES, accumulation=2) as recorder:
                trainer(model, tmp_path, callbacks=[trainer_callback(recorder)]).train()
        else:
            drop = Drop()
            drop.handle = model.register_forward_pre_hook(drop, with_kwargs=True)
            trainer(model, tmp_path).train()
        weights.append(list(model.parameters()))
    before = list(model_of().parameters())
    for plain, watched, first in zip(*weights, before, strict=True):
        assert plain.equal(watched)
        assert not plain.equal(first)


class Drop:
    """Takes the numbers out, as the callback does."""

    handle: Any = None

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {name: value for name, value in kwargs.items() if name != "ids"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"remove_unused_columns": True}, "set remove_unused_columns=False"),
        ({"gradient_accumulation_steps": 3}, "make them the same"),
    ],
)
def test_settings_that_would_go_wrong_are_refused(
    options: dict[str, Any], told: str, tmp_path: Path
) -> None:
    model = model_of()
    how = encoding(layers(model), Projection(4))
    with (
        pytest.raises(ValueError, match=told),
        Recorder(model, how, tmp_path / "store", EXAMPLES, accumulation=2) as recorder,
    ):
        trainer(model, tmp_path, callbacks=[trainer_callback(recorder)], **options).train()
