"""Trainers people use: the optimizer goes in, and a stopped training resumes to the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch

import isokron

transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
pytest.importorskip("accelerate", reason="pip install accelerate")


def trainer(folder: Path, steps: int, make: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = transformers.GPT2LMHeadModel(config)
    tokens = torch.randint(32, (32, 16))
    optimizer = make(isokron.param_groups(model))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, schedule),
    )


@pytest.mark.parametrize("make", [isokron.AdamW, isokron.Muon, isokron.SignDescent])
def test_a_hugging_face_trainer_resumes_to_the_same_bits(make: Any, tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", 6, make)
    whole.train()
    trainer(tmp_path / "parts", 3, make).train()
    rest = trainer(tmp_path / "parts", 6, make)
    rest.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-3"))
    for mine, theirs in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def bare_and_grouped(folder: Path, make: Any, vocab: int, lr: float) -> list[float]:
    """Final losses under the Trainer's own groups of bare parameters, and under param_groups."""
    zipf = 1 / torch.arange(1, vocab + 1)
    tokens = torch.multinomial(zipf, 64 * 16, True, generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens.view(64, 16)]
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=12,
        per_device_train_batch_size=4,
        logging_steps=12,  # the mean over all steps
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    losses = []
    for bare in (True, False):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        given: dict[str, Any] = {"optimizer_cls_and_kwargs": (make, {"lr": lr})}
        if not bare:
            given = {"optimizers": (make(isokron.param_groups(model), lr=lr), None)}
        run = transformers.Trainer(model, arguments, train_dataset=rows, **given)
        run.train()
        losses.append(next(float(e["loss"]) for e in run.state.log_history if "loss" in e))
    return losses


@pytest.mark.parametrize(
    ("make", "vocab"),
    [(isokron.SOAP, 20000), (isokron.Muon, 1024), (isokron.Shampoo, 128)],  # 128: as an MLP has it
)
def test_bare_parameters_train_as_well_as_param_groups(
    make: Any, vocab: int, tmp_path: Path
) -> None:
    with pytest.warns(UserWarning, match=rf"number 0 of shape \({vocab}, 32\)"):
        bare, grouped = bare_and_grouped(tmp_path, make, vocab, 1e-2)
    assert bare < grouped + 0.05  # with the method, the tied head costs about 0.4
