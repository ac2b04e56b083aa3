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
from isokron.distributed.parcels import columns_to_rows, sum_
from isokron.optim import modes, thin
from isokron.optim.modes import bytes_sent, mode_of
from processes import run

MODES = ("covariance", "gather", "gram", "auto")
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
    model: nn.Module, ranks: Ranks | None, reduce: str = "auto", **settings: Any
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
        model = Net(settings.get("method", "kfac"), dtype)
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


CASES = [{"reduce": mode} for mode in MODES] + [
    {"reduce": mode, "method": "ekfac"} for mode in MODES if mode != "gram"
]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_with_unequal_counts_are_one_rank_that_saw_all(ranks: int) -> None:
    found = run(ranks, many_ranks, CASES)
    for case, each in zip(CASES, zip(*found, strict=True), strict=True):
        assert_bit_equal(list(each))
        assert_same(each[0][0], one_rank(method=case.get("method", "kfac")), 1e-10)


def test_float32_is_as_near_as_its_rounding() -> None:
    found = run(2, many_ranks, CASES, torch.float32)
    for case, each in zip(CASES, zip(*found, strict=True), strict=True):
        assert_bit_equal(list(each))
        wanted = one_rank(method=case.get("method", "kfac"), dtype=torch.float32)
        assert_same(each[0][0], wanted, 1e-4)


def test_ranks_that_do_not_share_are_not_one_rank() -> None:
    """What the tests above would say if curvature stayed that of each rank's own examples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = run(2, many_ranks, [{"ranks": None}])
    with pytest.raises(AssertionError, match="relative error"):
        assert_same(found[0][0][0], one_rank(), 1e-3)


def grams() -> tuple[float, float]:
    """Relative errors of two ways to UᵀU, with vectors of equal number on all ranks."""
    ranks = ranks_of(timeout=60)
    whole = torch.randn(ranks.size * 3, 10, generator=torch.Generator().manual_seed(0)).double()
    own = whole[3 * ranks.rank : 3 * ranks.rank + 3][None]
    local = own @ own.mT  # [1, 3, 3]: what one might be tempted to add up
    sum_(ranks, [local])
    rows = columns_to_rows(ranks, own, [3] * ranks.size)
    right = rows.mT @ rows
    sum_(ranks, [right])
    wanted = whole @ whole.mT
    spectrum = torch.linalg.eigvalsh(wanted)
    few = torch.cat([torch.zeros(3 * (ranks.size - 1)), torch.linalg.eigvalsh(local[0])])
    wrong = (few - spectrum).norm() / spectrum.norm()
    return float(wrong), float((right[0] - wanted).norm() / wanted.norm())


def test_gram_matrices_of_ranks_do_not_add_up_but_those_of_rows_do() -> None:
    for wrong, right in run(2, grams):
        assert wrong > 0.3
        assert right < 1e-14


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


def all_kinds(reduce: str) -> list[Tensor]:
    model = Kinds()
    optimizer = natural(model, layers="*", ranks=ranks_of(timeout=60), reduce=reduce, **KINDS)
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


@pytest.mark.parametrize("reduce", ["auto", "gather"])
def test_embeddings_attention_and_norms_are_shared_too(reduce: str) -> None:
    model = Kinds()
    optimizer = isokron.NaturalGradient(model, layers="*", **KINDS)
    for step in range(3):
        optimizer.zero_grad()
        model(Kinds.batch(step)).square().sum().mul(1 / 12).backward()
        optimizer.step()
    found = run(2, all_kinds, reduce)
    assert all(map(torch.equal, *found))
    assert_same(found[0], parameters(model), 1e-9)


def resumed(saved: bytes, weights: list[Tensor], reduce: str) -> list[Tensor]:
    model = Net()
    optimizer = natural(model, ranks=ranks_of(timeout=60), reduce=reduce)
    with torch.no_grad():
        for param, value in zip(model.parameters(), weights, strict=True):
            param.copy_(value)
    optimizer.load_state_dict(torch.load(io.BytesIO(saved), weights_only=True))
    train(DistributedDataParallel(model), optimizer, range(3, 5))
    return parameters(model)


def saving(reduce: str) -> tuple[list[Tensor], bytes, int]:
    model = Net()
    optimizer = natural(
        model, **SETTINGS, reduction="global_mean", ranks=ranks_of(timeout=60), reduce=reduce
    )
    train(DistributedDataParallel(model), optimizer, range(3))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    own = optimizer.state[model.wide.weight]
    return parameters(model), buffer.getvalue(), own.get("columns", own["input"]).size(1)


@pytest.mark.parametrize("reduce", ["auto", "gram"])
def test_a_checkpoint_goes_on_with_another_number_of_ranks(reduce: str) -> None:
    (weights, saved, rows), _ = run(2, saving, reduce)
    assert rows == (20 if reduce == "gram" else 5)  # half of the columns' 40 rows, or A of 4 + 1
    for ranks in (1, 4):
        for params in run(ranks, resumed, saved, weights, reduce):
            assert_same(params, one_rank(), 1e-10)
    if reduce == "gram":
        with pytest.raises(ValueError, match=r"'wide'.* kept as columns.*distribute\(reduce="):
            isokron.NaturalGradient(Net()).load_state_dict(
                torch.load(io.BytesIO(saved), weights_only=True)
            )


DAMPINGS = [10.0**-n for n in range(2, 11)]


def side(rows: int, count: int, decay: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Columns U, A, a gradient in the span of both, and one that is outside of U's."""
    torch.manual_seed(rows)
    weights = torch.logspace(0, -decay, count, dtype=torch.float64)
    columns = (torch.randn(1, rows, count, dtype=torch.float64) * weights).float().double()
    inputs = torch.randn(40, 9, dtype=torch.float64)
    inside = columns @ torch.randn(1, count, 40, dtype=torch.float64) @ inputs
    outside, span = torch.randn_like(inside), torch.linalg.qr(columns).Q
    for _ in range(2):
        outside = outside - span @ (span.mT @ outside)
    return columns, inputs.mT @ inputs / 40, inside / inside.norm(), outside / outside.norm()


def inverse(columns: Tensor, covariance: Tensor, inside: Tensor, damping: float) -> Tensor:
    """(UUᵀ ⊗ A + λI)⁻¹ of what is in the span of U, naively, in float64."""
    basis, roots, _ = torch.linalg.svd(columns, full_matrices=False)
    values, right = torch.linalg.eigh(covariance)
    curvature = roots.square()[:, :, None] * values
    return basis @ ((basis.mT @ inside @ right) / (curvature + damping)) @ right.mT


def applied(rows: int, count: int, decay: float) -> list[tuple[float, float, float]]:
    """Relative errors in float32 for gradients in the span of U, outside, and both."""
    ranks = ranks_of(timeout=60)
    columns, covariance, inside, outside = side(rows, count, decay)
    first, end = rows * ranks.rank // ranks.size, rows * (ranks.rank + 1) // ranks.size
    state = {"columns": columns[:, first:end].float()}
    pair = torch.linalg.eigh(thin.gram_of(state, ranks))
    state |= thin.basis_of(state, *pair, rows)
    values, basis = torch.linalg.eigh(covariance.float()[None])
    state |= {"values.input": values, "basis.input": basis}
    found = []
    for damping in DAMPINGS:
        within, beyond = inverse(columns, covariance, inside, damping), outside / damping
        errors = []
        for grad, wanted in ((inside, within), (outside, beyond), (inside + outside, None)):
            wanted = within + beyond if wanted is None else wanted
            direction = thin.direction(grad.float(), state, damping, ranks)
            errors.append(float((direction - wanted).norm() / wanted.norm()))
        found.append((errors[0], errors[1], errors[2]))
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("rows", "count", "decay"), [(60, 12, 0.0), (400, 100, 1.0), (3000, 8, 0)])
def test_columns_are_inverted_to_float32_precision_at_any_damping(
    rows: int, count: int, decay: float, ranks: int
) -> None:
    for errors in run(ranks, applied, rows, count, decay):
        assert max(map(max, errors)) < 1e-5  # some 80 units of float32


class Wide(nn.Module):
    """A layer whose output side is kept as columns: 48 wide with 12 examples."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(5, 48)
        self.to(dtype)

    def step(self, rows: slice, damping: float, **shared: Any) -> Tensor:
        torch.manual_seed(1)
        inputs, targets = torch.randn(12, 5)[rows], torch.randn(12, 48)[rows]
        optimizer = natural(
            self, lr=1.0, damping=damping, momentum=0.0, kl_clip=None, reduction="sum", **shared
        )
        dtype = self.out.weight.dtype
        before = self.out.weight.detach().clone()
        (self.out(inputs.to(dtype)) - targets.to(dtype)).square().sum().backward()
        if dist.is_initialized():
            for param in self.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
        optimizer.step()
        return (before - self.out.weight).detach()


def wide_steps() -> list[Tensor]:
    ranks = ranks_of(timeout=60)
    return [
        Wide(torch.float32).step(own_rows(), damping, ranks=ranks, reduce="gram")
        for damping in (1e-2, 1e-5, 1e-8)
    ]


def test_a_layer_kept_as_columns_takes_the_exact_step_at_small_damping() -> None:
    for rank in run(2, wide_steps):
        for step, damping in zip(rank, (1e-2, 1e-5, 1e-8), strict=True):
            wanted = Wide(torch.float64).step(slice(None), damping, ranks=None)
            assert_same([step.double()], [wanted], 1e-5)


def shortened() -> tuple[list[Tensor], int]:
    model = Net()
    optimizer = natural(
        model, **SETTINGS, reduction="global_mean", ranks=ranks_of(timeout=60), reduce="gram"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thin, "MOST", 16)
        train(DistributedDataParallel(model), optimizer, range(5))
    return parameters(model), optimizer.state[model.wide.weight]["columns"].size(2)


def test_columns_that_are_too_many_are_shortened_alike_on_any_number_of_ranks() -> None:
    ((one, _),) = run(1, shortened)
    assert not all(map(torch.allclose, one, one_rank()))
    for params, columns in run(2, shortened):
        assert columns <= 16
        assert_same(params, one, 1e-8)


def counted(reduce: str) -> tuple[int, int, int]:
    """Bytes sent in a step that looks and does not refresh, and what the costs of sides say."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modes, "LARGE", 30)  # so that "auto" has all three of them
        return sent_and_foreseen(reduce)


def sent_and_foreseen(reduce: str) -> tuple[int, int, int]:
    model, ranks = Net(), ranks_of(timeout=60)
    optimizer = natural(
        model,
        **{**SETTINGS, "every": 4, "statistics_every": 3, "reduction": "global_mean"},
        ranks=ranks,
        reduce=reduce,
    )
    wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, range(3))
    before = ranks.traffic.sent
    train(wrapped, optimizer, range(3, 4))
    sent, size = ranks.traffic.sent - before, ranks.size
    sides = {"conv": (2, 4, 2, 4), "wide": (1, 1, 40, 4), "shared": (1, 2, 40, 40)}
    sides["out"] = (1, 1, 3, 40)  # blocks, uses an example, outputs, inputs
    most = [0] * size  # what each rank gathers
    wanted = (3 + 2 * len(sides)) * 8 * (size - 1)  # the fingerprint, two states, two counts each
    wanted += 2 * 8 * (size - 1)  # of kl_clip
    modes_seen = set()
    for name, (blocks, uses, outputs, inputs) in sides.items():
        counts = [uses * count for count in COUNTS[size]]
        for side, width in (("output", outputs), ("input", inputs)):
            mode = mode_of(width, sum(counts), reduce, side == "output")
            modes_seen.add(mode)
            if mode == "gather":
                most = [m + blocks * width * 8 * c for m, c in zip(most, counts, strict=True)]
            else:
                wanted += blocks * bytes_sent(mode, width, counts, 8, ranks.rank)
        # QᵀN of all rows twice, squares of columns, and rows of V
        if mode_of(outputs, sum(counts), reduce) == "gram":
            state = optimizer.state[getattr(model, name).weight]
            rank, i = state["basis.output"].size(2), inputs + (name != "out")
            wanted += 2 * blocks * (2 * rank + 2) * i * 8 * (size - 1) // size
            wanted += blocks * -(-outputs // size) * i * 8 * (size - 1)
        if name != "out":  # Σaᵀ and n, of a bias
            wanted += 2 * blocks * (inputs + 1) * 8 * (size - 1) // size
    wanted += max(most) * (size - 1)
    return sent, wanted, len(modes_seen)


@pytest.mark.parametrize("reduce", MODES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_are_those_of_the_costs(reduce: str, ranks: int) -> None:
    for sent, wanted, modes_seen in run(ranks, counted, reduce):
        assert abs(sent - wanted) < 32  # whole bytes of every part of what is summed at once
        assert modes_seen == (3 if reduce in ("auto", "gram") else 1)


def test_the_mode_is_the_cheapest_that_fits() -> None:
    assert mode_of(1000, 750) == "covariance"
    assert mode_of(1000, 749) == "gather"
    assert mode_of(16384, 100) == "gather"
    assert mode_of(16385, 100) == "gram"
    assert mode_of(16385, 16385) == "covariance"
    assert mode_of(16385, 100, gram=False) == "gather"
    assert mode_of(10, 1, "gram", gram=False) == "gather"
    assert mode_of(10, 9, "gram") == "gram"
    assert mode_of(10, 10, "gram") == "covariance"
    for mode in ("covariance", "gather"):
        assert mode_of(10, 1, mode) == mode_of(10**6, 10**6, mode) == mode
    for width, terms, ranks in ((64, 32, 4), (64, 40, 2), (64, 1024, 4), (320, 120, 8)):
        even = [terms // ranks] * ranks
        costs = {mode: bytes_sent(mode, width, even, 4) for mode in ("covariance", "gather")}
        assert mode_of(width, terms) == min(costs, key=lambda mode: costs[mode])
        assert bytes_sent("gram", width, even, 4) * ranks == costs["gather"]
