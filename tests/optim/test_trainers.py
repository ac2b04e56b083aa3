"""Trainers people use: the optimizer goes in, and a stopped training resumes to the same bits."""

import os
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import cases
import isokron
import processes

# every optimizer, and the settings that change what a checkpoint must hold
NAMES = (
    *("adamw", "adamw-small", "muon", "sign", "shampoo", "soap", "soap-delayed", "soap-averaged"),
    *("katie", "quad", "skew", "natural-kfac", "natural-ekfac"),
)
CASES = {case.name: case for case in cases.CASES}


def make_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    if name in CASES:
        return CASES[name].make(isokron.param_groups(model))
    return isokron.NaturalGradient(model, method=name.removeprefix("natural-"), every=2)


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(map(torch.equal, first.parameters(), second.parameters()))


# Hugging Face


def gpt2(vocab: int = 32, width: int = 16, **settings: Any) -> Any:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=16,
        n_embd=width,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        **settings,
    )
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config)


def trainer(folder: Path, model: Any, tokens: Tensor, settings: dict[str, Any], **how: Any) -> Any:
    pytest.importorskip("accelerate", reason="pip install accelerate")
    import transformers

    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], **how)


@pytest.mark.parametrize("name", NAMES)
def test_a_hugging_face_trainer_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    resumes_to_the_same_bits(name, tmp_path, gpt2, {})


@pytest.mark.parametrize("name", ["soap-averaged", "natural-kfac"])
def test_evaluations_in_between_change_nothing(name: str, tmp_path: Path) -> None:
    """The Trainer calls eval() and train() of an optimizer that has them."""

    def without_dropout() -> Any:
        return gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)

    settings = {"eval_strategy": "steps", "eval_steps": 3}  # checkpoints follow evaluations
    evaluated = resumes_to_the_same_bits(name, tmp_path / "evaluated", without_dropout, settings)
    assert equal(evaluated, resumes_to_the_same_bits(name, tmp_path / "not", without_dropout, {}))


def resumes_to_the_same_bits(name: str, folder: Path, make_model: Any, extra: Any) -> nn.Module:
    def run(part: str, steps: int, checkpoint: str | None = None) -> nn.Module:
        model, tokens = make_model(), torch.randint(32, (32, 16))
        optimizer = make_optimizer(name, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        settings = {"max_steps": steps, "save_steps": 3, "gradient_accumulation_steps": 2}
        how = {"optimizers": (optimizer, schedule)}
        run = trainer(folder / part, model, tokens, {**settings, **extra}, **how)
        run.train(resume_from_checkpoint=checkpoint)
        if isinstance(optimizer, isokron.Preconditioned):
            optimizer.eval()  # the Trainer leaves averages as its last evaluation did
        return model

    straight = run("straight", 6)
    stopped = run("parts", 3)
    resumed = run("parts", 6, str(folder / "parts" / "checkpoint-3"))
    assert equal(resumed, straight)
    assert not equal(stopped, straight)
    return straight


def under_ddp(folder: Path, steps: int, consolidates: bool = True) -> Any:
    """A Trainer, of which rank 0 alone asks the optimizer for its state."""
    from transformers import TrainerCallback

    class Consolidate(TrainerCallback):
        def on_step_end(
            self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any
        ) -> None:
            if control.should_save and consolidates:
                optimizer.optimizer.consolidate_state_dict()

    model, tokens = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), torch.arange(512) % 31
    optimizer = isokron.SOAP(isokron.param_groups(model), every=2)
    settings = {"max_steps": steps, "save_steps": 3, "lr_scheduler_type": "constant"}
    how = {"optimizers": (optimizer, None), "callbacks": [Consolidate()]}
    run = trainer(folder, model, tokens.view(32, 16), settings, **how)
    optimizer.distribute(timeout=60.0 if consolidates else 1.0)
    return run


def saved_by_one_rank(folder: Path) -> None:
    # accelerate asks for it, though there is a process group
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "2"}
    straight, first, second = (
        under_ddp(folder / part, n) for part, n in (("a", 6), ("b", 3), ("b", 6))
    )
    straight.train()
    first.train()
    second.train(resume_from_checkpoint=True)
    assert equal(straight.model, second.model)
    assert not equal(straight.model, first.model)
    under_ddp(folder / "c", 3, consolidates=False).train()


def test_a_trainer_on_ranks_saves_what_they_consolidate(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    error = processes.outcomes(2, saved_by_one_rank, tmp_path, awaited=1)[0]
    assert "rank 0 has waited 1 s in optimizer.state_dict() for rank 1" in str(error)
    assert "optimizer.consolidate_state_dict() on all" in str(error)


def test_a_function_of_the_model_makes_the_optimizer_of_a_trainer(tmp_path: Path) -> None:
    """`optimizer_cls_and_kwargs` takes a function without arguments that returns it."""

    def of_model(model: nn.Module, **settings: Any) -> isokron.SOAP:
        return isokron.SOAP(isokron.param_groups(model), **settings)

    tokens, settings = torch.randint(32, (32, 16)), {"max_steps": 3, "save_strategy": "no"}
    first, second = gpt2(), gpt2()
    by_function = {"optimizer_cls_and_kwargs": (lambda: of_model, {"lr": 1e-2})}
    trainer(tmp_path, first, tokens, settings, **by_function).train()
    by_object = {"optimizers": (of_model(second, lr=1e-2), None)}
    trainer(tmp_path, second, tokens, settings, **by_object).train()
    assert equal(first, second)
    assert not equal(first, gpt2())


def bare_and_grouped(folder: Path, make: Any, vocab: int, lr: float) -> list[float]:
    """Final losses under the Trainer's own groups of bare parameters, and under param_groups."""
    zipf = 1 / torch.arange(1, vocab + 1)
    tokens = torch.multinomial(zipf, 64 * 16, True, generator=torch.Generator().manual_seed(0))
    losses = []
    for bare in (True, False):
        model = gpt2(vocab, 32)
        how: dict[str, Any] = {"optimizer_cls_and_kwargs": (make, {"lr": lr})}
        if not bare:
            how = {"optimizers": (make(isokron.param_groups(model), lr=lr), None)}
        # logged once, the mean over all steps
        settings = {"max_steps": 12, "logging_steps": 12, "save_strategy": "no"}
        run = trainer(folder, model, tokens.view(64, 16), settings, **how)
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


# accelerate and Lightning, on a small classifier with dropout


def classifier(dropout: float = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout)),
        *(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)),
    )


def examples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(32, 8, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 1).long())


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

    def run(first: int, last: int) -> nn.Module:
        accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = classifier()
        optimizer = make_optimizer(name, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
        loader = DataLoader(examples(), 8, shuffle=True)
        wrapped, optimizer, loader, schedule = accelerator.prepare(
            model, optimizer, loader, schedule
        )
        if first:
            accelerator.load_state(str(tmp_path))
        for epoch in range(first, last):
            for inputs, targets in loader:
                with accelerator.accumulate(wrapped):
                    accelerator.backward(cross_entropy(wrapped(inputs), targets))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
            if epoch == 1:
                accelerator.save_state(str(tmp_path))
        return model

    straight = run(0, 4)
    resumed = run(2, 4)
    assert equal(resumed, straight)


def fit_by_lightning(name: str, loader: Any, epochs: int, save: Path, load: Any = None) -> Any:
    lightning = pytest.importorskip("lightning", reason="pip install lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layers = classifier()

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return cross_entropy(self.layers(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = make_optimizer(name, self.layers)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        # Lightning does not store random numbers
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["random"] = torch.get_rng_state()

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            torch.set_rng_state(checkpoint["random"])

    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    trainer.fit(module, loader, ckpt_path=load)
    trainer.save_checkpoint(save)
    return module.layers


@pytest.mark.parametrize("name", NAMES)
def test_lightning_resumes_to_the_same_bits(name: str, tmp_path: Path) -> None:
    loader = DataLoader(examples(), 8, shuffle=True)
    straight = fit_by_lightning(name, loader, 4, tmp_path / "straight.ckpt")
    stopped = fit_by_lightning(name, loader, 2, tmp_path / "half.ckpt")
    resumed = fit_by_lightning(name, loader, 4, tmp_path / "end.ckpt", tmp_path / "half.ckpt")
    assert equal(resumed, straight)
    assert not equal(stopped, straight)


@pytest.mark.parametrize("name", ["soap", "natural-kfac"])
def test_lightning_takes_the_steps_of_a_plain_loop(name: str, tmp_path: Path) -> None:
    """It clears gradients between the forward and the backward pass, inside of a closure."""
    loader = DataLoader(examples(), 8)
    fitted = fit_by_lightning(name, loader, 3, tmp_path / "end.ckpt")
    model = classifier()
    optimizer = make_optimizer(name, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 20)
    for _ in range(3):
        for index, (inputs, targets) in enumerate(loader):
            (cross_entropy(model(inputs), targets) / 2).backward()
            if index % 2:
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    assert equal(fitted, model)


# torchtitan: state dicts with flattened keys, by torch.distributed.checkpoint


@pytest.mark.parametrize("name", NAMES)
def test_a_flattened_state_dict_resumes_to_the_same_bits(name: str) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        inputs, targets = examples().tensors
        for _ in range(steps):
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()
            optimizer.zero_grad()

    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    straight, resumed = classifier(0.0), classifier(0.0)
    optimizer, fresh = make_optimizer(name, straight), make_optimizer(name, resumed)
    step(straight, optimizer, 4)
    resumed.load_state_dict(straight.state_dict())
    saved = get_optimizer_state_dict(straight, optimizer, options=flat)
    assert all(key.startswith(("state.", "param_groups.")) for key in saved)
    set_optimizer_state_dict(resumed, fresh, deepcopy(saved), options=flat)
    step(straight, optimizer, 3)
    step(resumed, fresh, 3)
    assert equal(resumed, straight)


# FSDP2 in accelerate and the Trainer: the optimizer is made first, and its parameters are replaced


def losses_under_fsdp2(name: str, replaced: bool) -> list[float]:
    model = classifier().eval()
    if replaced:
        optimizer = make_optimizer(name, model)
        names = {param: key for key, param in model.named_parameters()}
        keys = [[names[param] for param in group["params"]] for group in optimizer.param_groups]
    fully_shard(model, mesh=processes.mesh(2))
    if replaced:
        sharded = dict(model.named_parameters())
        for group, of_group in zip(optimizer.param_groups, keys, strict=True):
            group["params"] = [sharded[key] for key in of_group]
    else:
        optimizer = make_optimizer(name, model)
    inputs, targets = examples().tensors
    losses = []
    for _ in range(5):
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", [name for name in NAMES if "natural" not in name])
def test_parameters_may_be_replaced_by_their_shards_before_the_first_step(name: str) -> None:
    replaced = processes.run(2, losses_under_fsdp2, name, True)
    assert replaced == processes.run(2, losses_under_fsdp2, name, False)
    assert replaced[0][-1] < replaced[0][0]
