"""Rows kept in training against those of a pass over the data with the same weights."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from isokron.attribution.collect import collect
from isokron.attribution.encoding import Encoding, encoding
from isokron.attribution.projection import Projection
from isokron.attribution.recording.recorder import SCRATCH, Recorder
from isokron.attribution.scoring import score_store
from isokron.attribution.storage.store import Store
from isokron.curvature import CrossEntropy
from isokron.curvature.sites import find_sites

EXAMPLES, LENGTH = 12, 5


class Words(nn.Module):
    """Tokens [N, S] → logits [N, S, 9]; one layer is used twice, one is attention's."""

    def __init__(self, recompute: bool | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.recompute = recompute
        self.table, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 9, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.table(tokens))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.recompute is None:
            x = self.twice(x)
        else:
            x = checkpoint(self.twice, x, use_reentrant=self.recompute)
        return self.head(self.dropout(x))

    def twice(self, x: Tensor) -> Tensor:
        return self.mix(self.mix(x).tanh()).tanh()


def case(**options: Any) -> tuple[Words, Tensor, Tensor]:
    torch.manual_seed(0)
    model = Words(**options)
    tokens, targets = torch.randint(0, 9, (2, EXAMPLES, LENGTH))
    targets[3, 2:] = -100
    return model, tokens, targets


def encoding_of(model: nn.Module, scope: str = "layer") -> Encoding:
    return encoding(find_sites(model), Projection(4), scope=scope)


def losses(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """The sum over an example's tokens: [n]"""
    each = F.cross_entropy(model(tokens).mT, targets, reduction="none")
    return each.sum(1)


def rows_after(model: nn.Module, how: Encoding, tokens: Tensor, targets: Tensor) -> Tensor:
    """By a pass of its own."""
    found: list[Tensor] = []
    collect(model, [(tokens, targets)], CrossEntropy(), how, lambda own, _: found.append(own))
    return torch.cat(found)


def shuffled(size: int) -> list[Tensor]:
    order = torch.randperm(EXAMPLES, generator=torch.Generator().manual_seed(1))
    return list(order.split(size))


def rows_of(store: Store) -> Tensor:
    return store.rows(range(len(store)))


def close(found: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("loss", ["mean", "sum", "tokens"])
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("scope", ["layer", "global"])
def test_rows_are_those_of_a_pass_over_the_data(
    loss: str, accumulation: int, scope: str, tmp_path: Path
) -> None:
    model, tokens, targets = case()
    how = encoding_of(model, scope)
    right = rows_after(model, how, tokens, targets)
    reduction = "sum" if loss == "sum" else "mean"
    options = {"reduction": reduction, "accumulation": accumulation, "per_shard": 5}
    with Recorder(model, how, tmp_path / "store", EXAMPLES, **options) as recorder:
        for step, numbers in enumerate(shuffled(2)):
            mine = targets[numbers]
            terms = float(mine.ne(-100).sum()) if loss == "tokens" else None
            recorder.batch(numbers, terms)
            total = losses(model, tokens[numbers], mine)
            divided = {"mean": len(numbers), "sum": 1, "tokens": terms}[loss]
            (total.sum() / divided / (1 if loss == "sum" else accumulation)).backward()
            losses(model.eval(), tokens[numbers], mine).sum().backward()  # not of training
            model.train()
            if (step + 1) % accumulation == 0:
                recorder.commit()
    close(rows_of(recorder.store), right)
    assert recorder.store.extra("seen").tolist() == [1] * EXAMPLES
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == [
        "manifest.json",
        *(path.name for path in sorted((tmp_path / "store").glob("shard-*"))),
    ]
    close(score_store(recorder.store, right).of, right @ right.mT)


@pytest.mark.parametrize("recompute", [True, False])
def test_layers_that_are_computed_again_count_once(recompute: bool, tmp_path: Path) -> None:
    model, tokens, targets = case(recompute=recompute)
    how = encoding_of(model)
    with Recorder(model, how, tmp_path, EXAMPLES, reduction="sum") as recorder:
        for numbers in shuffled(4):
            recorder.batch(numbers)
            losses(model, tokens[numbers], targets[numbers]).sum().backward()
            recorder.commit()
    plain, _, _ = case()
    close(rows_of(recorder.store), rows_after(plain, encoding_of(plain), tokens, targets))


def test_several_passes_back_add_up(tmp_path: Path) -> None:
    model, tokens, targets = case()
    how = encoding_of(model)
    with Recorder(model, how, tmp_path, EXAMPLES, reduction="sum") as recorder:
        recorder.batch(range(EXAMPLES))
        total = losses(model, tokens, targets).sum()
        (0.25 * total).backward(retain_graph=True)
        (0.75 * total).backward()
        recorder.commit()
    close(rows_of(recorder.store), rows_after(model, how, tokens, targets))


def trained(recorded: Callable[[nn.Module, Any], Any] | None) -> tuple[nn.Module, Any]:
    """Two epochs with dropout, momentum, a schedule, and an evaluation after every step."""
    model, tokens, targets = case(dropout=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    torch.manual_seed(2)
    recorder = recorded(model, optimizer) if recorded else None
    if recorder:
        recorder.__enter__()
    for numbers in shuffled(4) * 2:
        if recorder:
            recorder.batch(numbers)
        losses(model, tokens[numbers], targets[numbers]).mean().backward()
        optimizer.step()
        schedule.step()
        if recorder:
            recorder.commit()
        optimizer.zero_grad()
        model.eval()
        losses(model, tokens, targets).mean().backward()  # with gradients, for the sake of it
        optimizer.zero_grad()
        model.train()
    if recorder:
        recorder.__exit__(None, None, None)
    return model, recorder


def test_training_is_the_same_bit_by_bit(tmp_path: Path) -> None:
    plain, _ = trained(None)
    watched, recorder = trained(
        lambda model, _: Recorder(model, encoding_of(model), tmp_path, EXAMPLES)
    )
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert one.equal(other)
    assert recorder.store.extra("seen").tolist() == [2] * EXAMPLES


def steps(model: nn.Module, optimizer: Any, recorder: Recorder, *data: Tensor) -> list[Tensor]:
    """Two steps on all examples; the rows before each, by a pass of their own."""
    found = []
    for _ in range(2):
        found.append(rows_after(model, recorder.encoding, *data))
        recorder.batch(range(EXAMPLES))
        losses(model, *data).mean().backward()
        optimizer.step()
        recorder.commit()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] /= 2
    return found


def test_the_last_row_is_kept(tmp_path: Path) -> None:
    model, *data = case()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Recorder(model, encoding_of(model), tmp_path, EXAMPLES) as recorder:
        _, last = steps(model, optimizer, recorder, *data)
    close(rows_of(recorder.store), last)


def test_rows_are_summed_with_the_learning_rates_of_their_layers(tmp_path: Path) -> None:
    model, *data = case()
    slow = list(model.head.parameters())
    fast = [param for name, param in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.SGD([{"params": fast, "lr": 0.2}, {"params": slow, "lr": 0.03}])
    options = {"keep": "sum", "optimizer": optimizer}
    with Recorder(model, encoding_of(model), tmp_path, EXAMPLES, **options) as recorder:
        first, second = steps(model, optimizer, recorder, *data)
    right = 0.2 * first + 0.1 * second
    head = recorder.store.columns("head")
    right[:, head] = 0.03 * (first + second)[:, head]
    close(rows_of(recorder.store), right)


def test_the_scale_of_mixed_precision_is_taken_out_and_skipped_steps_are_not_kept(
    tmp_path: Path,
) -> None:
    model, tokens, targets = case()
    how = encoding_of(model)
    right = rows_after(model, how, tokens, targets)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2)
    with Recorder(model, how, tmp_path, EXAMPLES, scaler=scaler) as recorder:
        for factor in (1.0, 1.0, 1.0, float("inf")):
            recorder.batch(range(EXAMPLES))
            scaler.scale(losses(model, tokens, targets).mean() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
            recorder.commit()
            optimizer.zero_grad()
    close(rows_of(recorder.store), right)
    assert recorder.skipped == 1
    assert recorder.store.extra("seen").tolist() == [3] * EXAMPLES


def test_a_gradient_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model, tokens, targets = case()
    weights = torch.ones(4)
    weights[2] = float("inf")
    with Recorder(model, encoding_of(model), tmp_path, EXAMPLES, unseen="zero") as recorder:
        recorder.batch([5, 7, 9, 11])
        (losses(model, tokens[:4], targets[:4]) * weights).mean().backward()
        with pytest.raises(FloatingPointError, match="gradient of example 9 is not finite"):
            recorder.commit()
    assert not rows_of(recorder.store).any()


def test_mistakes_are_told(tmp_path: Path) -> None:
    model, tokens, targets = case()
    recorder = Recorder(model, encoding_of(model), tmp_path / "one", EXAMPLES)
    with pytest.raises(RuntimeError, match="inside of `with` only"):
        recorder.batch([0])
    with recorder:
        with pytest.raises(RuntimeError, match="without a batch"):
            recorder.commit()
        with pytest.raises(ValueError, match="from 0 to 11, got 12"):
            recorder.batch([12])
        recorder.batch([0, 1])
        with pytest.raises(RuntimeError, match="2 batches were announced without commit"):
            recorder.batch([2, 3])
        with pytest.raises(RuntimeError, match="no gradient came"):
            recorder.commit()
        recorder.batch([0, 1, 2])
        with pytest.raises(ValueError, match="saw 2 examples, and 3 were announced"):
            losses(model, tokens[:2], targets[:2]).mean().backward()
        recorder.drop()
        recorder.batch(range(11))
        losses(model, tokens[:11], targets[:11]).mean().backward()
        recorder.commit()
        with pytest.raises(ValueError, match=r"1 of 12 examples were never seen, such as \[11\]"):
            recorder.finish()
        recorder.unseen = "zero"
    assert recorder.finish().extra("seen").tolist() == [1] * 11 + [0]
    with pytest.raises(ValueError, match="give the optimizer"):
        Recorder(model, encoding_of(model), tmp_path / "two", EXAMPLES, keep="sum")
    model.head.requires_grad_(False)
    with pytest.raises(ValueError, match="'head' is frozen"):
        Recorder(model, encoding_of(model), tmp_path / "two", EXAMPLES)


def test_examples_that_never_came_have_no_row(tmp_path: Path) -> None:
    model, tokens, targets = case()
    options = {"unseen": "zero", "ids": [f"text {k}" for k in range(EXAMPLES)]}
    with Recorder(model, encoding_of(model), tmp_path, EXAMPLES, **options) as recorder:
        recorder.batch(range(1, EXAMPLES))
        losses(model, tokens[1:], targets[1:]).mean().backward()
        recorder.commit()
    rows = rows_of(recorder.store)
    assert rows.any(1).tolist() == [False] + [True] * (EXAMPLES - 1)
    assert recorder.store.ids()[3] == "text 3"
    with pytest.raises(ValueError, match="has a finished store"):
        Recorder(model, encoding_of(model), tmp_path, EXAMPLES)


def test_hooks_go_and_copies_of_the_model_have_none(tmp_path: Path) -> None:
    model, tokens, targets = case()

    def fails() -> None:
        with Recorder(model, encoding_of(model), tmp_path, EXAMPLES) as recorder:
            recorder.batch(range(EXAMPLES))
            for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
                losses(other, tokens, targets).mean().backward()
            assert recorder.announced[0].finished() is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not (tmp_path / "manifest.json").exists()
    assert not (tmp_path / SCRATCH).exists()


def test_what_a_killed_training_left_is_written_over(tmp_path: Path) -> None:
    model, tokens, targets = case()
    killed = Recorder(model, encoding_of(model), tmp_path, EXAMPLES).__enter__()
    assert killed.scratch is not None
    killed.scratch.rows.fill_(7.0)
    for handle in killed.handles:
        handle.remove()
    with Recorder(model, encoding_of(model), tmp_path, EXAMPLES, unseen="zero") as recorder:
        recorder.batch(range(6))
        losses(model, tokens[:6], targets[:6]).mean().backward()
        recorder.commit()
    right = rows_after(model, recorder.encoding, tokens, targets)
    close(rows_of(recorder.store)[:6], right[:6])
    assert not rows_of(recorder.store)[6:].any()


def test_a_disk_that_is_too_small_is_told_before_training(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    model, _, _ = case()
    recorder = Recorder(model, encoding_of(model), tmp_path, EXAMPLES)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match="could not reserve"):
            recorder.__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / SCRATCH).exists()
