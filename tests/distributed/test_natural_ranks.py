"""NaturalGradient on many ranks against one rank that has seen all examples."""

import io
import warnings
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import isokron
from isokron.distributed import Ranks, ranks_of
from processes import run

COUNTS = {1: [12], 2: [3, 9], 4: [2, 5, 1, 4]}  # examples of every rank, 12 in all
SETTINGS: dict[str, Any] = {"lr": 0.1, "damping": 1e-2, "kl_clip": 1e-2, "every": 2}


class Net(nn.Module):
    """A convolution in groups, a wide layer, one used twice, and a norm for AdamW."""

    def __init__(self, method: str = "kfac", dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        # Λ of EK-FAC is measured in bases, which are known only where eigenvalues are apart: with
        # 12 examples, 40 outputs would have a space of zeros, whose basis is a matter of rounding
        width = 40 if method == "kfac" else 5
        self.conv = nn.Conv2d(2, 4, 2, groups=2)
        self.wide = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.shared = nn.Linear(width, width)
        self.out = nn.Linear(width, 3, bias=False)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.wide(self.conv(x).tanh().mean((2, 3)))).tanh()
        return self.out(self.shared(self.shared(h).tanh()))


def losses(model: nn.Module, step: int, rows: slice = slice(None)) -> Tensor:
    """Of 12 examples a step, or some of them: a weight for each, so that no two are alike."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(12, 2, 3, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(3, (12,), generator=generator)
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(
        model(inputs[rows].to(dtype)), labels[rows], reduction="none"
    )


def own_rows() -> slice:
    counts, rank = COUNTS[dist.get_world_size()], dist.get_rank()
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def parameters(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@cache
def one_rank(
    steps: int = 5, dtype: torch.dtype = torch.float64, method: str = "kfac", **settings: Any
) -> list[Tensor]:
    model = Net(method, dtype)
    optimizer = isokron.NaturalGradient(model, method=method, **{**SETTINGS, **settings})
    for step in range(steps):
        optimizer.zero_grad()
        losses(model, step).mean().backward()
        optimizer.step()
    return parameters(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """Under DDP, whose average is to be the mean over all examples."""
    for step in steps:
        optimizer.zero_grad()
        (losses(model, step, own_rows()).sum() * dist.get_world_size() / 12).backward()
        optimizer.step()


def natural(
    model: nn.Module, ranks: Ranks | None, reduce: str | None = None, **settings: Any
) -> isokron.NaturalGradient:
    optimizer = isokron.NaturalGradient(model, **settings)
    if ranks is not None:
        optimizer.distribute(ranks, reduce=reduce)
    return optimizer


def many_ranks(
    many: list[dict[str, Any]], dtype: torch.dtype = torch.float64, steps: int = 5
) -> list[tuple[list[Tensor], dict[str, Any]]]:
    """Parameters and state after training with each of the settings."""
    found = []
    for settings in many:
        model = Net("kfac" if "t_max" in settings else settings.get("method", "kfac"), dtype)
        wrapped = DistributedDataParallel(model)
        optimizer = natural(
            model,
            **{**SETTINGS, "reduction": "global_mean", "ranks": ranks_of(timeout=60), **settings},
        )
        train(wrapped, optimizer, range(steps))
        found.append((parameters(model), optimizer.state_dict()["state"]))
    return found


def assert_same(found: list[Tensor], wanted: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, wanted, strict=True):
        error = (mine - theirs).norm() / theirs.norm()
        assert error < tolerance, f"relative error {error:.2g}"


def assert_bit_equal(ranks: list[Any]) -> None:
    for params, state in ranks[1:]:
        assert all(map(torch.equal, params, ranks[0][0]))
        assert state.keys() == ranks[0][1].keys()
        for index, entry in state.items():
            assert all(torch.equal(value, ranks[0][1][index][k]) for k, value in entry.items())


CASES: list[dict[str, Any]] = [
    {},
    {"policy": "all"},
    {"policy": "auto", "rho": 2.0},
    {"method": "ekfac"},
    {"method": "tkfac"},
    {"method": "tkfac", "policy": "all", "max_condition": 1e4},
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_unequal_counts_are_one_rank_that_saw_all(ranks: int) -> None:
    found = run(ranks, many_ranks, CASES)
    for case, each in zip(CASES, zip(*found, strict=True), strict=True):
        assert_bit_equal(list(each))
        # the policy is no other optimizer
        assert_same(each[0][0], one_rank(**{**case, "policy": "dense"}), 1e-10)


REDUCED: list[dict[str, Any]] = [
    {},
    {"policy": "all"},
    # 36 columns of 40 outputs after three steps: a thin basis
    *({"policy": "all", "t_max": 38, "layers": "wide", "method": m} for m in ("ekfac", "tkfac")),
]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_way_to_reduce_takes_the_same_steps(ranks: int) -> None:
    """Sums of g̃g̃ᵀ, all g̃, or all g̃ with Gram matrices of shards: the Grams of ranks are not it."""
    ways = ("covariance", "gather", "gram")
    cases = [{**case, "reduce": way} for case in REDUCED for way in ways]
    found = run(ranks, many_ranks, cases, torch.float64, 3)
    for i in range(0, len(cases), len(ways)):
        for place in range(i, i + len(ways)):
            assert_bit_equal([of_rank[place] for of_rank in found])
            assert_same(found[0][place][0], found[0][i][0], 1e-12)
    for params, _ in found[0][: 2 * len(ways)]:
        assert_same(params, one_rank(3), 1e-10)
    unshared = run(ranks, many_ranks, [{"reduce": "none"}], torch.float64, 3)
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(unshared[0][0][0], one_rank(3), 1e-3)


def test_an_unknown_way_to_reduce_is_refused() -> None:
    optimizer = isokron.NaturalGradient(Net())
    with pytest.raises(ValueError, match=r"reduce must be one of None, 'covariance', .* got 'sum'"):
        optimizer.distribute(reduce="sum")


def test_float32_is_as_near_as_its_rounding() -> None:
    found = run(2, many_ranks, CASES, torch.float32)
    for case, each in zip(CASES, zip(*found, strict=True), strict=True):
        assert_bit_equal(list(each))
        wanted = one_rank(**{**case, "policy": "dense"}, dtype=torch.float32)
        assert_same(each[0][0], wanted, 1e-4)


def test_ranks_that_do_not_share_are_not_one_rank() -> None:
    """What the tests above would say if curvature stayed that of each rank's own examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(2, many_ranks, [{"ranks": None}])
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(found[0][0][0], one_rank(), 1e-3)


def by_hand(reduction: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Without DDP: losses of own examples, and gradients that the user adds up or averages."""
    model, size = Net(), dist.get_world_size()
    optimizer = natural(model, **SETTINGS, reduction=reduction, ranks=ranks_of(timeout=60))
    states = {}
    for step in range(4):
        optimizer.zero_grad()
        terms = losses(model, step, own_rows())
        (terms.sum() if reduction == "sum" else terms.mean()).backward()
        for param in model.parameters():
            dist.all_reduce(param.grad)
            if reduction == "mean":
                param.grad /= size
        optimizer.step()
        if step == 0:
            states = {k: v.clone() for k, v in optimizer.state[model.wide.weight].items()}
    return parameters(model), states


def test_sums_are_summed() -> None:
    model = Net()
    optimizer = isokron.NaturalGradient(model, **SETTINGS, reduction="sum")
    for step in range(4):
        optimizer.zero_grad()
        losses(model, step).sum().backward()
        optimizer.step()
    for params, _ in run(4, by_hand, "sum"):
        assert_same(params, parameters(model), 1e-10)


def test_means_of_ranks_weigh_examples_in_the_gradient_and_not_in_the_curvature() -> None:
    """3 and 9 examples: DDP's average gives those of the first rank a third each of one half."""
    (params, state), _ = run(2, by_hand, "mean")
    model = Net()
    optimizer = isokron.NaturalGradient(model, **SETTINGS)
    for step in range(4):
        halves = [losses(model, step, slice(0, 3)).mean(), losses(model, step, slice(3, 12)).mean()]
        weighed = torch.autograd.grad(sum(halves) / 2, list(model.parameters()))
        optimizer.zero_grad()
        losses(model, step).mean().backward()  # of which the curvature is
        for param, grad in zip(model.parameters(), weighed, strict=True):
            param.grad = grad
        optimizer.step()
        if step == 0:
            mine = optimizer.state[model.wide.weight]
            for key in ("input", "output"):
                torch.testing.assert_close(state[key], mine[key], rtol=1e-10, atol=1e-14)
    assert_same(params, parameters(model), 1e-10)
    with pytest.raises(AssertionError, match="relative error"):  # the mean over all is another
        assert_same(params, one_rank(4), 1e-3)


def all_kinds(policy: str) -> list[Tensor]:
    model = Kinds()
    optimizer = natural(model, layers="*", ranks=ranks_of(timeout=60), policy=policy, **KINDS)
    wrapped = DistributedDataParallel(model)
    for step in range(3):
        optimizer.zero_grad()
        wrapped(Kinds.batch(step)[own_rows()]).square().sum().mul(1 / 6).backward()
        optimizer.step()
    return parameters(model)


KINDS: dict[str, Any] = {"reduction": "global_mean", **SETTINGS, "momentum": 0.0}


class Kinds(nn.Module):
    """An embedding, attention and a norm, all preconditioned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(7, 4, padding_idx=0), nn.LayerNorm(4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.double()

    @staticmethod
    def batch(step: int) -> Tensor:
        return torch.randint(7, (12, 3), generator=torch.Generator().manual_seed(step))

    def forward(self, numbers: Tensor) -> Tensor:
        x = self.norm(self.embed(numbers))
        return self.attend(x, x, x)[0]


@pytest.mark.parametrize("policy", ["dense", "all"])
def test_embeddings_attention_and_norms_are_shared_too(policy: str) -> None:
    model = Kinds()
    optimizer = isokron.NaturalGradient(model, layers="*", **KINDS)
    for step in range(3):
        optimizer.zero_grad()
        model(Kinds.batch(step)).square().sum().mul(1 / 12).backward()
        optimizer.step()
    found = run(2, all_kinds, policy)
    assert all(map(torch.equal, *found))
    assert_same(found[0], parameters(model), 1e-9)


def resumed(saved: bytes, weights: list[Tensor], policy: str) -> list[Tensor]:
    model = Net()
    optimizer = natural(model, ranks=ranks_of(timeout=60), policy=policy)
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    train(DistributedDataParallel(model), optimizer, range(3, 5))
    return parameters(model)


def saving(policy: str) -> tuple[list[Tensor], bytes]:
    model = Net()
    optimizer = natural(
        model, **SETTINGS, reduction="global_mean", ranks=ranks_of(timeout=60), policy=policy
    )
    train(DistributedDataParallel(model), optimizer, range(3))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    assert ("columns" in optimizer.state[model.wide.weight]) == (policy == "all")
    return parameters(model), buffer.getvalue()


@pytest.mark.parametrize("policy", ["dense", "all"])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(policy: str) -> None:
    (weights, saved), _ = run(2, saving, policy)
    for ranks in (1, 4):
        for params in run(ranks, resumed, saved, weights, policy):
            assert_same(params, one_rank(), 1e-10)


def exact() -> list[Tensor]:
    model = Net()
    optimizer = natural(
        model, ranks_of(timeout=60), **SETTINGS, fisher="exact", reduction="global_mean"
    )
    wrapped = DistributedDataParallel(model)
    rows, size = own_rows(), dist.get_world_size()
    for step in range(3):
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(12, 2, 3, 3, generator=generator, dtype=torch.float64)
        labels = torch.randint(3, (12,), generator=generator)
        logits = wrapped(inputs[rows])
        optimizer.observe(logits)
        loss = nn.functional.cross_entropy(logits, labels[rows], reduction="sum")
        (loss * size / 12).backward()
        optimizer.step()
    return parameters(model)


def test_the_exact_fisher_of_ranks_is_that_of_one() -> None:
    (one,) = run(1, exact)
    for params in run(2, exact):
        assert_same(params, one, 1e-10)


def test_fsdp2_is_refused_with_the_remedy() -> None:
    for text in run(2, sharded):
        assert "is a DTensor" in text
        assert "DistributedDataParallel, or take Shampoo or SOAP with fully_shard" in text


def sharded() -> str:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model)
    with pytest.raises(ValueError, match="NaturalGradient") as refused:
        isokron.NaturalGradient(model)
    return str(refused.value)
