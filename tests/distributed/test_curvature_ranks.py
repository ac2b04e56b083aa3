"""Curvature fitted by several processes is that of one, and the same bytes every time."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from isokron.curvature import CrossEntropy, Curvature, fit
from isokron.distributed import Ranks
from isokron.distributed.rank_tasks import RankFailed
from processes import run

CLASSES = 5
FITS: dict[str, dict[str, Any]] = {
    "kfac": {},
    "reduced": {"sharing": "reduce"},
    "exact": {"fisher": "exact"},
    "exact ekfac": {"fisher": "exact", "method": "ekfac"},
    "ekfac": {"method": "ekfac"},
    "drawn": {"method": "ekfac", "fisher": "sampled", "seed": 3},
    "tkfac": {"method": "tkfac"},
    "shampoo": {"method": "shampoo"},
    "low rank": {"policy": "all"},
    "auto": {"policy": "auto", "rho": 20.0, "t_max": 90},  # the 84 terms of `rare` and its like
    "auto, too many": {"policy": "auto", "rho": 10.0},  # not for one rank of two
    "auto ekfac": {"policy": "auto", "rho": 20.0, "method": "ekfac"},
    "low-rank ekfac": {"policy": {"rare": "all"}, "method": "ekfac"},
    "low-rank head": {"policy": {"head": "all"}, "fisher": "exact", "method": "ekfac"},
}


class Tokens(nn.Module):
    """Tokens [N, S] → logits [N, S, classes]; `rare` is used by batches that have a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(6, 4), nn.LayerNorm(4)
        self.body, self.rare, self.head = nn.Linear(4, 7), nn.Linear(7, 7), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(self.norm(self.embed(x))).tanh()
        if bool((x == 0).any()):
            hidden = hidden + self.rare(hidden).tanh()
        return self.head(hidden)


def problem() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    model = Tokens().double()
    inputs, targets = torch.randint(1, 6, (21, 4)), torch.randint(CLASSES, (21, 4))
    inputs[0] = torch.tensor([0, 1, 2, 0])
    targets[3, 2:] = -100
    return model, list(zip(inputs.split(3), targets.split(3), strict=True))


def fitted(name: str, ranks: Ranks | None, batches: int = 7) -> Curvature:
    model, data = problem()
    return fit(
        model, data[:batches], CrossEntropy(), dtype=torch.float64, ranks=ranks, **FITS[name]
    )


def statistics(batches: int = 7) -> dict[str, dict[str, Tensor]]:
    """Of every fit by all ranks, twice the same bytes."""
    ranks = Ranks(dist.group.WORLD, 60.0) if dist.is_initialized() else None
    found = {}
    for name in FITS:
        one, two = (fitted(name, ranks, batches) for _ in range(2))
        found[name] = flat(one)
        assert all(torch.equal(value, flat(two)[key]) for key, value in found[name].items())
    return found


def flat(curvature: Curvature) -> dict[str, Tensor]:
    """Statistics by name; of EK-FAC the matrix, since signs of eigenvectors are free."""
    return {f"{name}": operator.to_dense() for name, operator in curvature.items()}


@pytest.mark.parametrize("count", [1, 2, 3])
def test_curvature_by_ranks_is_that_of_one_process(count: int) -> None:
    alone = statistics()
    everyone = run(count, statistics)
    for found in everyone:
        for name, matrices in alone.items():
            for layer, want in matrices.items():
                off = (found[name][layer] - want).abs().max()
                assert off <= 1e-10 * want.abs().max(), (name, layer)
                assert torch.equal(found[name][layer], everyone[0][name][layer])


def test_ranks_without_a_batch_add_nothing() -> None:
    alone = statistics(2)
    for found in run(3, statistics, 2):
        for name, matrices in alone.items():
            for layer, want in matrices.items():
                torch.testing.assert_close(found[name][layer], want, rtol=1e-10, atol=1e-14)


def written(folder: Path) -> None:
    ranks = Ranks(dist.group.WORLD, 60.0)
    fitted("ekfac", ranks).save(folder / str(ranks.rank))


def test_every_rank_would_save_the_same_bytes(tmp_path: Path) -> None:
    run(2, written, tmp_path)
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / rank).iterdir()} for rank in "01"
    )
    assert one == two


def refused(given: dict[str, Any]) -> str:
    model, data = problem()
    batches = given.pop("batches", data)
    with pytest.raises((ValueError, FloatingPointError, RuntimeError)) as caught:
        fit(model, batches, CrossEntropy(), ranks=Ranks(dist.group.WORLD, 60.0), **given)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ({"batches": iter(())}, ("must have a length and slices",) * 2),
        # 84 terms less two: neither rank has too many alone
        ({"policy": {"head": "all"}, "t_max": 60}, ("more than t_max=60",) * 2),
        ({"policy": {"head": "all"}, "t_max": 3}, ("more than t_max=3",) * 2),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_all(
    given: dict[str, Any], messages: tuple[str, ...]
) -> None:
    for found, message in zip(run(2, refused, given), messages, strict=True):
        assert message in found


def spoiled() -> str:
    """The last batch, which only the last rank has, has no finite input."""
    model, data = problem()
    model = nn.Linear(4, CLASSES).double()
    data = [(x.double() / (7 - i - 1 if i < 6 else 0.0), y[:, 0]) for i, (x, y) in enumerate(data)]
    with pytest.raises((FloatingPointError, RankFailed)) as caught:
        fit(model, data, CrossEntropy(), ranks=Ranks(dist.group.WORLD, 60.0), policy="dense")
    return str(caught.value)


def test_values_that_are_not_finite_on_one_rank_are_an_error_on_all() -> None:
    first, last = run(2, spoiled)
    assert "rank 1 of 2 failed in a pass over the data" in first
    assert "example 0 of batch " in last
    assert "has a loss of nan" in last


def routed() -> dict[str, dict[str, Tensor]]:
    """A mixture whose first batch is all one token, so that its rank has experts without any."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 6, "vocab_size": 9, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 3}
    config = transformers.MixtralConfig(**sizes, **heads, num_experts_per_tok=1)
    model = transformers.MixtralForCausalLM(config).double()
    model.set_experts_implementation("eager")
    data = [torch.full((2, 5), 3), torch.randint(9, (2, 5))]
    loss = CrossEntropy(lambda model, x: (model(input_ids=x).logits[:, :-1], x[:, 1:]))
    ranks = Ranks(dist.group.WORLD, 60.0) if dist.is_initialized() else None
    options: dict[str, Any] = {"layers": "*experts*", "dtype": torch.float64, "ranks": ranks}
    return {m: flat(fit(model, data, loss, m, **options)) for m in ("kfac", "ekfac", "tkfac")}


def test_experts_that_have_tokens_on_some_ranks_only_are_those_of_one_process() -> None:
    alone = routed()
    for found in run(2, routed):
        for method, matrices in alone.items():
            for layer, want in matrices.items():
                torch.testing.assert_close(found[method][layer], want, rtol=1e-10, atol=1e-14)
