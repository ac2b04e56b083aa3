"""Results belong to weights, data and what the loss does; others are refused, or begin anew."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import isokron
from isokron import digest
from isokron.attribution import Attributor
from isokron.attribution.fingerprint import Fingerprint, measured_loss

CE = isokron.losses.CrossEntropy()


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def brier(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).softmax(1) - functional.one_hot(batch[1], 3)).square().sum(1)


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    """The same losses and gradients, and another Fisher."""
    return cross_entropy(model, batch) / 2, torch.full((len(batch[0]),), 2.0)


def scaled(factor: float) -> Callable[[list[Any]], Any]:
    def collate(examples: list[Any]) -> Any:
        x, y = zip(*examples, strict=True)
        return torch.stack(x) * factor, torch.stack(y)

    return collate


def network(activation: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), activation or nn.Tanh(), nn.Linear(8, 3))


def examples(count: int = 20) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 6, generator=generator)
    return list(zip(x, x[:, :3].argmax(1), strict=True))


def train(model: nn.Module, steps: int = 30) -> None:
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    x, y = map(torch.stack, zip(*examples(), strict=True))
    for _ in range(steps):
        adam.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        adam.step()


def run(folder: Path, model: nn.Module | None = None, **settings: Any) -> Attributor:
    settings = {"loss": cross_entropy, **settings}
    return Attributor(folder, model or network(), examples(), **settings)


OTHERS: dict[str, dict[str, Any]] = {
    "loss": {"loss": brier},
    "weights of terms": {"loss": weighted},
    "collate": {"collate": scaled(1.01)},
    "model code": {"model": network(nn.GELU())},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_results_of_another_loss_are_refused(other: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path).fit()
    run(tmp_path, collate=scaled(1.0))  # does the same
    with pytest.raises(ValueError, match=r"another loss, collate function or model code, .* new"):
        run(tmp_path, **other)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_without_results_another_loss_begins_anew(other: dict[str, Any], tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, **other).fit()
    run(tmp_path, **other)
    with pytest.raises(ValueError, match="another loss, collate function or model code"):
        run(tmp_path)


def changed(fingerprint: Fingerprint, factor: float) -> dict[str, Any]:
    loss = {name: [x * factor for x in numbers] for name, numbers in fingerprint.loss.items()}
    return {**fingerprint.record(), "loss": loss}


def test_numbers_are_compared_with_a_tolerance(tmp_path: Path) -> None:
    now = run(tmp_path).fingerprints.now()
    assert len(now.loss["losses"]) == 2
    assert now.tolerance == 1e-3
    assert not now.loss_differences(changed(now, 1 + 5e-4))
    assert len(now.loss_differences(changed(now, 1 + 2e-3))) == len(now.loss) == 4
    assert now.loss_differences({**now.record(), "loss": {}})


def test_a_model_in_half_precision_has_a_larger_tolerance(tmp_path: Path) -> None:
    half = run(tmp_path / "half", network().half(), collate=lambda rows: _halved(rows))
    assert half.fingerprints.now().tolerance == 8 * torch.finfo(torch.float16).eps

    def autocast(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return cross_entropy(model, batch)

    assert run(tmp_path / "cast", loss=autocast).fingerprints.now().tolerance > 7e-3


def _halved(rows: list[Any]) -> Any:
    x, y = zip(*rows, strict=True)
    return torch.stack(x).half(), torch.stack(y)


def test_losses_of_a_model_that_knows_its_data_may_differ_as_they_round(tmp_path: Path) -> None:
    model = network()
    with torch.no_grad():
        model[2].bias.copy_(torch.tensor([16.0, 0.0, 0.0]))
        model[2].weight.mul_(1e-2)
    data = [(x, torch.tensor(0)) for x, _ in examples()]
    now = Attributor(tmp_path, model, data, loss=CE).fingerprints.now()
    assert max(x for x in now.loss["losses"] if x is not None) < 1e-6
    assert not now.loss_differences(changed(now, 1.1))


def test_a_loss_that_is_not_a_number_is_named_and_not_measured(tmp_path: Path) -> None:
    data = [(torch.full((6,), torch.nan), torch.tensor(0)), *examples()]
    with pytest.raises(FloatingPointError, match="example '0' has a loss of nan"):
        Attributor(tmp_path, network(), data, loss=cross_entropy)
    with pytest.warns(UserWarning, match="1 of .* examples are skipped"):
        a = Attributor(tmp_path, network(), data, loss=cross_entropy, on_bad="skip")
    assert None not in a.fingerprints.now().loss["losses"]


def test_embeddings_and_norms_are_measured_too(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4), nn.Flatten(), nn.Linear(12, 3))
    data = [(torch.tensor([n, 1, n]), torch.tensor(n % 3)) for n in range(9)]
    a = Attributor(tmp_path, model, data, loss=CE, layers="*")
    numbers, _ = measured_loss(a.subject)
    for number in range(2):
        model.zero_grad()
        x, y = data[number]
        functional.cross_entropy(model(x[None]), y[None]).backward()
        for name, module in (("0", model[0]), ("1", model[1]), ("3", model[3])):
            grads = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
            norm = float(torch.stack(grads).sum().sqrt())
            assert numbers[f"gradient norms of {name!r}"][number] == pytest.approx(norm, rel=1e-4)


def test_random_augmentation_is_refused(tmp_path: Path) -> None:
    class Augmented(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 20

        def __getitem__(self, number: int) -> Any:
            x, y = examples()[number]
            return x + 0.1 * torch.rand(()), y

    with pytest.raises(ValueError, match=r"example '0' differs the second time.*deterministic"):
        Attributor(tmp_path, network(), Augmented(), loss=CE)
    noisy = lambda rows: scaled(float(1 + torch.rand(())))(rows)  # noqa: E731
    with pytest.raises(ValueError, match=r"example '0' differs the second time.*deterministic"):
        Attributor(tmp_path, network(), examples(), loss=CE, collate=noisy)
    assert not list(tmp_path.iterdir())


def test_a_random_loss_is_told_as_such(tmp_path: Path) -> None:
    def noisy(model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch) * (1 + torch.rand(()))

    for _ in range(2):
        with pytest.raises(ValueError, match=r"loss must be the same whenever .* deterministic"):
            run(tmp_path, loss=noisy)
    run(tmp_path).fit()
    with pytest.raises(ValueError, match=r"loss must be the same whenever .* deterministic"):
        run(tmp_path, loss=noisy)


CALLS: dict[str, Callable[[Attributor], Any]] = {
    "fit": lambda a: a.fit(),
    "build": lambda a: a.build(dim=4),
    "score": lambda a: a.score(examples(1)),
    "score exactly": lambda a: a.score(examples(1), store=False, save=False),
    "self-influence": lambda a: a.self_influence(),
    "projected": lambda a: a.projected_scores(a.queries(examples(1)), 4),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_model_that_was_trained_on_is_refused(
    call: Callable[[Attributor], Any], tmp_path: Path
) -> None:
    model = network()
    a = run(tmp_path / "run", model).fit().build(dim=4)
    call(a)
    scores = a.score(examples(1), save=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    train(model)
    for compute in (lambda: call(a), lambda: scores.by_layer, lambda: scores.tokens):
        with pytest.raises(ValueError, match=r"model has other weights .* a new folder"):
            compute()
    model.load_state_dict(before)
    call(a)


def test_weights_are_those_of_the_first_stage(tmp_path: Path) -> None:
    model, trained = network(), network()
    train(trained)
    right = run(tmp_path / "right", trained).fit().build(dim=4)
    a = run(tmp_path / "run", model)
    train(model)
    a.fit().build(dim=4)
    scores, wanted = (x.score(examples(2), save=False) for x in (a, right))
    assert torch.equal(scores, wanted)
    run(tmp_path / "run", trained)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: p.data.add_(1e-3),  # raises no version of the parameter
        lambda p: setattr(p, "data", p.data + 1e-3),
        lambda p: p.detach().mul_(2),
    ],
)
def test_changes_of_weights_are_seen_however_they_are_made(change: Callable[..., Any]) -> None:
    model = network()
    before = digest.weights_digest(model)
    with torch.no_grad():
        for param in model.parameters():
            change(param)
    assert digest.weights_digest(model) != before == digest.weights_digest(network())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_number_changed_beside_autograd_is_seen(dtype: torch.dtype) -> None:
    model = nn.Sequential(*(nn.Linear(7, 5) for _ in range(20))).to(dtype)
    model[3].weight.data = model[3].weight.data.T.contiguous().T
    model[5].bias.data = torch.randn(7).to(dtype)[2:]
    for place, param in enumerate(model.parameters()):
        before = digest.weights_digest(model)
        param.data[place % 5].add_(1)
        assert digest.weights_digest(model) != before


def test_compiled_models_have_the_weights_of_bare_ones(tmp_path: Path) -> None:
    run(tmp_path).fit().score(examples()[:2])
    compiled: Any = torch.compile(network(), backend="eager")
    run(tmp_path, compiled).fit().score(examples()[:2])


def test_a_second_call_hashes_no_weights(tmp_path: Path, monkeypatch) -> None:
    llama = pytest.importorskip("transformers")
    size = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    config = llama.LlamaConfig(vocab_size=50_000, num_attention_heads=4, **size)
    model = llama.LlamaForCausalLM(config)
    assert sum(param.numel() for param in model.parameters()) > 25e6
    hashed: list[Any] = []
    update = digest.update_hash

    def counted(total: Any, value: Any, *more: Any) -> None:
        hashed.append(value)
        update(total, value, *more)

    monkeypatch.setattr(digest, "update_hash", counted)
    digest.weights_digest(model)
    first = len(hashed)
    assert first > len(list(model.parameters()))
    digest.weights_digest(model)
    assert len(hashed) == first
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    digest.weights_digest(model)
    assert len(hashed) > first


def test_all_files_carry_the_fingerprint(tmp_path: Path) -> None:
    a = run(tmp_path).fit().build(dim=4)
    now = json.loads(json.dumps(a.fingerprints.now().record()))
    curvature = json.loads((tmp_path / "curvature" / "curvature.json").read_text())
    store = json.loads((tmp_path / "gradients" / "schema.json").read_text())
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["fingerprint"] == curvature["fingerprint"] == now
    assert store["settings"]["fingerprint"] == now


@pytest.mark.parametrize("part", ["curvature", "gradients"])
@pytest.mark.parametrize("other", ["weights", "data", "loss"])
def test_a_folder_from_another_run_is_refused(part: str, other: str, tmp_path: Path) -> None:
    trained = network()
    train(trained, 1)
    runs = {
        "weights": lambda path: run(path, trained),
        "data": lambda path: Attributor(path, network(), examples()[::-1], loss=cross_entropy),
        "loss": lambda path: run(path, loss=brier),
    }
    runs[other](tmp_path / "other").fit().build(dim=4)
    run(tmp_path / "run").fit().build(dim=4)
    (tmp_path / "run" / part).rename(tmp_path / "away")
    (tmp_path / "other" / part).rename(tmp_path / "run" / part)
    with pytest.raises(ValueError, match=rf"{part}.*(weights|{other})"):
        run(tmp_path / "run").score(examples(1), store=part == "gradients")
