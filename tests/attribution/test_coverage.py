"""What scores cover, by parameter and by scorer, and which layers are left out or refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from isokron import Attributor, losses
from isokron.attribution.evaluate import spearman

WORDS, WIDTH, LENGTH = 30, 8, 6
LOSS = losses.CrossEntropy()


def words(count: int, length: int = LENGTH) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(WORDS, (count, length + 1))
    return [(row[:-1], row[1:].clone()) for row in tokens]


def gradients(model: nn.Module, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the trained parameters, by autograd: [N, P]"""
    params = [param for param in model.parameters() if param.requires_grad]
    found = []
    for x, target in rows:
        terms, weights = LOSS(model.eval(), (x[None], target[None]))
        grads = torch.autograd.grad((terms * weights).sum(), params)
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)


def language() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WORDS)
    )
    model[0].weight.data.mul_(0.3)
    return model


def plain(scores: Any) -> Tensor:
    return scores.as_subclass(Tensor)


def test_a_store_says_what_it_lacks_and_its_noise_is_that_of_all_layers(tmp_path: Path) -> None:
    model, rows = language(), words(60)
    queries = words(3)
    a = Attributor(tmp_path, model, rows, loss=LOSS, layers="*").fit()
    full = a.score(queries, name="full")
    own = a.self_influence()
    a.build(dim=64)
    stored = a.score(queries, name="stored")
    total = sum(param.numel() for param in model.parameters())
    assert (full.coverage["covered"], full.coverage["total"]) == (total, total)
    assert full.coverage["left_out"] == []
    assert stored.coverage["covered"] == total - WORDS * WIDTH
    assert "left out: 0 (not in the store)" in stored.coverage["summary"]
    for name, scores in (("full", full), ("stored", stored)):
        record = json.loads((tmp_path / "scores" / f"{name}.json").read_text())
        assert record["method"]["coverage"] == scores.coverage
    agreement = float(spearman(plain(stored), plain(full)).mean())
    assert agreement < 0.95
    assert stored.noise.spearman == pytest.approx(agreement, abs=1e-3)
    assert "0 (not in the store)" in a.report().read_text()
    # not the part of it that the layers of the store have
    torch.testing.assert_close(a.self_influence(), own)
    assert bool((a.self_influence(store=True) < own).all())


def test_a_store_of_all_layers_has_the_coverage_of_the_run(tmp_path: Path) -> None:
    a = Attributor(tmp_path, language(), words(20), loss=LOSS).fit().build(dim=64)
    stored = a.score(words(1), save=False)
    assert stored.coverage == a.selection.record()
    assert stored.noise.spearman == pytest.approx(1.0, abs=1e-3)
    torch.testing.assert_close(a.self_influence(), a.store.extra("square"))


def test_scores_of_a_model_with_trained_biases_alone_are_those_of_its_biases(
    tmp_path: Path,
) -> None:
    model, rows = language(), words(7)
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    a = Attributor(tmp_path, model, rows, loss=LOSS).fit(None)
    trained = WIDTH + WORDS
    assert (a.selection.covered, a.selection.total) == (trained, 2 * WORDS * WIDTH + 64 + trained)
    assert "left out: 0 (embedding), 1.weight, 3.weight (frozen)" in a.selection.summary()
    grads = gradients(model, rows)
    torch.testing.assert_close(plain(a.score(rows[:2], save=False)), grads[:2] @ grads.T)
    # their curvature is a diagonal: the mean of squares
    inverse = 1 / (grads.square().sum(0) / (7 * LENGTH))
    a = Attributor(tmp_path / "ekfac", model, rows, loss=LOSS).fit("ekfac")
    scores = a.score(rows[:2], damping=0.0, save=False)
    torch.testing.assert_close(plain(scores), grads[:2] * inverse @ grads.T)
    a.build(dim=16)
    torch.testing.assert_close(a.score(rows[:2], save=False).argsort(), scores.argsort())


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    settings = {"vocab_size": WORDS, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 16}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
    for param in model.parameters():
        param.data.add_(0.1 * torch.randn_like(param))
    return model


@pytest.mark.parametrize("head", ["skip", "lowrank"])
def test_scores_of_a_tied_language_model_have_both_uses_of_the_weight(
    tmp_path: Path, head: str
) -> None:
    model, rows = gpt2(), words(7)
    loss = losses.CrossEntropy(lambda m, batch: (m(batch[0]).logits, batch[1]))
    model.transformer.wpe.requires_grad_(False)  # examples have no positions of their own
    options: dict[str, Any] = {"head": head, "max_side": 29 if head == "lowrank" else 8192}
    layers = "*,!*.wpe"
    a = Attributor(tmp_path, model, rows, loss=loss, layers=layers, strict=True, **options)
    assert a.selection.covered == sum(x.numel() for x in model.parameters() if x.requires_grad)
    assert "(lm_head, transformer.wte share a weight)" in a.selection.summary()
    assert "left out: transformer.wpe (excluded)" in a.selection.summary()
    params = [param for param in model.parameters() if param.requires_grad]
    grads = []
    for x, target in rows:
        terms, weights = loss(model.eval(), (x[None], target[None]))
        found = torch.autograd.grad((terms * weights).sum(), params)
        grads.append(torch.cat([grad.flatten() for grad in found]))
    grads = torch.stack(grads)
    scores = a.fit(None).score(rows[:2], save=False)
    torch.testing.assert_close(plain(scores), grads[:2] @ grads.T, rtol=1e-4, atol=1e-3)
    # positions have their two uses of the weight together
    for by_number, row in zip(scores.tokens, plain(scores), strict=True):
        for number, tokens in by_number.items():
            assert len(tokens) == LENGTH
            assert sum(tokens) == pytest.approx(float(row[number]), abs=1e-3)
    a = Attributor(tmp_path / "kfac", model, rows, loss=loss, layers=layers, **options).fit()
    unit = a.score(rows[:3], unit=True, save=False)
    torch.testing.assert_close(plain(unit).diagonal(), torch.ones(3), rtol=0, atol=1e-3)
    if head == "skip":  # all of a row is stored
        exact = a.score(rows[:2], save=False)
        stored = a.build(dim=64).score(rows[:2], save=False)
        torch.testing.assert_close(plain(stored), plain(exact), rtol=1e-3, atol=1e-3)


def test_gradients_are_compared_where_the_first_examples_have_no_loss(tmp_path: Path) -> None:
    rows = words(7)
    for _, targets in rows[:3]:
        targets.fill_(-100)
    a = Attributor(tmp_path, language(), rows, loss=LOSS)
    assert a.selection.summary().startswith("gradients of 2 of 2 layers agree with autograd")


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, 2 * self.weight, self.bias)


def test_layers_with_another_gradient_are_left_out_or_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(5, 5), nn.Linear(5, 3))
    rows = [(torch.randn(5), torch.tensor(n % 3)) for n in range(7)]
    with pytest.raises(ValueError, match=r"strict=True: gradients of 1 of 2 layers .*: 0 \("):
        Attributor(tmp_path / "strict", model, rows, loss=LOSS, strict=True)
    assert not (tmp_path / "strict").exists()
    a = Attributor(tmp_path / "run", model, rows, loss=LOSS).fit(None)
    assert a.selection.summary().startswith(
        "gradients of 1 of 2 layers agree with autograd; covers 18 of 48 parameters; left out: 0 ("
    )
    a.score(rows[:1])
    assert "gradients of 1 of 2 layers agree with autograd" in a.report().read_text()
