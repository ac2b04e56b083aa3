"""Ordinary training under DDP and FSDP2, and what happens when ranks differ or die."""

import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import isokron
from cases import CASES, Case, build
from isokron.optim.quad_skew import fixed_numbers
from processes import outcomes, run
from white_kron_naive import Naive

NAMES = ("adamw", "muon", "shampoo", "soap", "katie", "quad", "skew")
CHOSEN = [case for case in CASES if case.name in NAMES]
EXAMPLES, STEPS = 12, 6


class Attention(nn.Module):
    """A block of a language model, with fused projections, norms and tied ends."""

    def __init__(self, width: int = 12, inner: int = 29, vocabulary: int = 19) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, inner)  # which no number of ranks divides
        self.down = nn.Linear(inner, width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value))
        x = x + self.down(torch.tanh(self.up(x)))
        logits: Tensor = self.head(x)
        return logits


def model(inner: int = 29) -> Attention:
    torch.manual_seed(3)
    return Attention(inner=inner).double()


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(19, (EXAMPLES, 7), generator=generator)


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """With two learning rates."""
    return isokron.param_groups(net, lr_scale={"matrices": 1.0, "*": 2.0})


def train(net: nn.Module, optimizer: Any, rank: int, ranks: int) -> None:
    for step in range(STEPS):
        own = batch(step).chunk(ranks)[rank]
        logits = net(own[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), own[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def settings(name: str) -> dict[str, Any]:
    """Few directions have been seen at first: a refresh would turn rounding into directions."""
    return {"every": 3, "start": 3} if name in ("shampoo", "soap", "katie") else {}


def chosen(ranks: int) -> list[Case]:
    """All on two ranks; how the parts of a model are cut among more is the same for all."""
    return [case for case in CHOSEN if ranks == 2 or case.name in ("adamw", "soap", "quad")]


@cache
def one_process(number: int) -> list[Tensor]:
    net, case = model(), CHOSEN[number]
    train(net, case.make(groups_of(net), **settings(case.name)), 0, 1)
    return [p.detach() for p in net.parameters()]


def wrapped(kind: str) -> list[list[Tensor]]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.nn.parallel import DistributedDataParallel

    found = []
    for case in chosen(dist.get_world_size()):
        net = model()
        outer: nn.Module = net
        if kind == "fsdp":
            for part in (net.qkv, net.up, net):
                fully_shard(part)
        else:
            outer = DistributedDataParallel(net)
        optimizer = case.make(groups_of(net), **settings(case.name))
        if kind == "ddp":
            optimizer.distribute()
        train(outer, optimizer, dist.get_rank(), dist.get_world_size())
        params = [p.detach() for p in net.parameters()]
        found.append([p.full_tensor() if isinstance(p, DTensor) else p for p in params])
    return found


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_their_own_data_train_as_one_process_with_all(kind: str, ranks: int) -> None:
    everyone = run(ranks, wrapped, kind)
    names = [name for name, _ in model().named_parameters()]
    for case, *everyones in zip(chosen(ranks), *everyone, strict=True):
        wanted = one_process(CHOSEN.index(case))
        for found in everyones:
            for name, one, many in zip(names, wanted, found, strict=True):
                torch.testing.assert_close(
                    many, one, rtol=1e-6, atol=1e-7, msg=f"{case.name}: {name}"
                )


def normalized(kind: str) -> list[Tensor]:
    """Quad with `normalize` on gradients that are given, of shards or of whole parameters."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    net = nn.Sequential(nn.Linear(33, 50, bias=False), nn.Linear(20, 35, bias=False)).double()
    if kind == "fsdp":
        fully_shard(net)
    params = list(net.parameters())
    settings: dict[str, Any] = {"block_size": 16, "noise_scale": 0.0, "weight_decay": 0.0}
    optimizer = build(isokron.Quad, params, lr=1.0, normalize=True, **settings)
    if kind == "ddp":
        optimizer.distribute()
    with torch.no_grad():
        for param in params:
            param.zero_()
    torch.manual_seed(5)
    for scale in (1.0, 30.0, 0.1):
        for param in params:
            grad = scale * torch.randn(param.shape, dtype=torch.float64)
            if kind == "fsdp":
                grad = distribute_tensor(grad, param.device_mesh, param.placements)
            param.grad = grad
        optimizer.step()
    return [p.full_tensor() if kind == "fsdp" else p.detach() for p in params]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_layer_that_ranks_have_parts_of_is_normalized_as_a_whole(kind: str) -> None:
    def probes(size: int) -> np.ndarray:
        return fixed_numbers((4, size), torch.empty(0, dtype=torch.float64)).numpy()

    shapes = [(50, 33), (35, 20)]
    naive = [Naive(shape, False, False, probes, largest=64, normalize=True) for shape in shapes]
    torch.manual_seed(5)
    expected = [np.zeros(shape) for shape in shapes]
    for scale in (1.0, 30.0, 0.1):
        for i, shape in enumerate(shapes):
            grad = scale * torch.randn(shape, dtype=torch.float64)
            expected[i] -= naive[i].direction(grad.numpy())
    for found in run(2, normalized, kind):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, torch.from_numpy(other), rtol=1e-7, atol=1e-9)


def flattened(original: bool) -> tuple[list[str], float, float]:
    """What methods say to FSDP1's flat shards, and how far AdamW on them is from one process."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    torch.manual_seed(0)
    net, whole = nn.Linear(6, 4), nn.Linear(6, 4)
    whole.load_state_dict(net.state_dict())
    wrapped = FullyShardedDataParallel(net, use_orig_params=original, device_id=torch.device("cpu"))
    said = []
    makers = (isokron.SOAP, isokron.Muon, isokron.Quad, isokron.Katie, isokron.Shampoo)
    for make in (*makers, isokron.ShardedAdamW):
        try:
            make(wrapped.parameters())
        except ValueError as error:
            said.append(str(error))
    with pytest.raises(ValueError, match=r"flattened .*fully_shard.* isokron"):
        isokron.param_groups(wrapped)
    build(isokron.SOAP, wrapped.parameters(), route="adamw")  # as good as AdamW
    data, losses = torch.randn(8, 6), []
    for module in (whole, wrapped):
        optimizer = isokron.AdamW(module.parameters(), lr=0.1)
        for _ in range(3):
            loss = module(data).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(module(data).square().mean()))
    return said, *losses


@pytest.mark.parametrize("original", [False, True])
def test_flat_shards_of_fsdp1_are_refused_by_all_but_adamw(original: bool) -> None:
    for said, one, many in run(2, flattened, original):
        assert len(said) == 6
        assert all("flattened by FSDP1" in each and "fully_shard" in each for each in said)
        assert many == pytest.approx(one, rel=1e-5)


def differing(what: str) -> str:
    rank = dist.get_rank()
    params = [nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(5, 4))]
    if what == "order" and rank:
        params.reverse()
    optimizer = isokron.Shampoo(params, lr=1e-3 if rank and what == "settings" else 1e-2)
    optimizer.distribute(timeout=20)
    for param in params:
        param.grad = torch.ones_like(param)
    if what == "gradients" and rank:
        params[1].grad = None
    if what == "averages":
        params[0].grad = torch.full_like(params[0], 1.0 + rank)
    if what == "values" and rank:
        params[0].data[0, 0] += 1e-7
    if what == "frozen" and rank:
        params[1].requires_grad_(False)
    if what == "infinite" and rank:
        params[0].grad = torch.full_like(params[0], torch.inf)
    with pytest.raises((RuntimeError, FloatingPointError)) as caught:
        optimizer.step()
    assert all(torch.allclose(param, torch.ones_like(param)) for param in params)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("order", "parameters of group 0 must be the same on all 3 ranks"),
        ("settings", "settings of group 0 must be the same on all 3 ranks"),
        ("gradients", "parameters of group 0 that have gradients must be the same"),
        ("averages", "gradients must be the same on all 3 ranks, but their norms are from"),
        ("values", "values of the parameters of group 0 must be the same on all 3 ranks"),
        ("frozen", "parameters of group 0 must be the same on all 3 ranks"),
        ("infinite", "non-finite gradient of parameter number 0 of shape (4, 5)"),
    ],
)
def test_ranks_that_differ_all_raise_before_anything_changes(what: str, words: str) -> None:
    for text in run(3, differing, what):
        assert words in text


def reordered(named: bool) -> str:
    """Shards of equal shapes in another order on one rank."""
    from torch.distributed.fsdp import fully_shard

    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    fully_shard(net)
    params = list(net.named_parameters())
    if dist.get_rank():
        params.reverse()
    optimizer = isokron.Shampoo(params if named else [param for _, param in params])
    net(torch.ones(2, 4)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)
    return ""


def test_shards_of_equal_shapes_in_another_order_are_known_by_their_names() -> None:
    for text in run(2, reordered, True):
        assert "parameters of group 0 must be the same on all 2 ranks" in text
        assert '[["0.weight", [4, 4]' in text
    assert run(2, reordered, False) == ["", ""]  # as docs/distributed.md says


def failing() -> tuple[str, bool]:
    """A refresh fails for the rank that owns the block, more often than is tolerated."""
    weight = nn.Parameter(torch.ones(4, 5))
    optimizer = build(isokron.Katie, [("weight", weight)], every=1, tolerated=0)
    optimizer.distribute()
    gradients = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(0))
    eigh, before = torch.linalg.eigh, weight.detach().clone()
    with pytest.MonkeyPatch.context() as patch:
        for step, gradient in enumerate(gradients):
            if step == 1:  # only the owner decomposes anything
                patch.setattr(torch.linalg, "eigh", lambda x, UPLO: eigh(x * torch.nan, UPLO))
            weight.grad, before = gradient.clone(), weight.detach().clone()
            try:
                optimizer.step()
            except FloatingPointError as error:
                return str(error), torch.equal(weight, before)
    return "", False


def test_a_refresh_that_fails_too_often_for_its_owner_ends_all_before_anything_changes() -> None:
    for text, unchanged in run(2, failing):
        assert "tolerated=0 refreshes in a row failed for parameter 'weight'" in text
        assert unchanged


def skipping() -> tuple[int, float]:
    params = [nn.Parameter(torch.ones(4, 5))]
    optimizer = isokron.Shampoo(params, nonfinite="skip")
    optimizer.distribute()
    params[0].grad = torch.full_like(params[0], torch.nan if dist.get_rank() else 1.0)
    optimizer.step()
    return optimizer.skipped_steps, float(params[0].sum())


def test_what_one_rank_skips_all_skip() -> None:
    assert run(2, skipping) == [(1, 20.0)] * 2


def dying(folder: Path) -> None:
    """Rank 1 is killed in its fifth step, after a checkpoint of the fourth."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.fsdp import fully_shard

    net = model()
    fully_shard(net)
    optimizer = isokron.SOAP(isokron.param_groups(net), every=2)
    optimizer._agreement.timeout = 20.0
    for step in range(6):
        own = batch(step).chunk(2)[dist.get_rank()]
        net(own).square().mean().backward()
        if step == 4:
            weights, state = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)
            if dist.get_rank() == 1:
                optimizer.direction = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
        optimizer.step()
        optimizer.zero_grad()


def loading(folder: Path) -> float:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    net = model()
    optimizer = isokron.SOAP(isokron.param_groups(net), every=2)
    weights, state = get_state_dict(net, optimizer)
    loaded = {"model": weights, "optimizer": state}
    dcp.load(loaded, checkpoint_id=folder)
    set_state_dict(
        net, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"]
    )
    steps = {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()}
    assert steps == {4.0}
    return float(next(iter(steps)))


def test_a_killed_rank_ends_the_others_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    begun = time.monotonic()
    first, second = outcomes(2, dying, tmp_path / "saved")
    assert second == -signal.SIGKILL
    assert "waited in all_to_all for ranks that did not come" in str(first)
    assert time.monotonic() - begun < 60  # the timeout is 20 s; loading and saving take the rest
    assert run(1, loading, tmp_path / "saved") == [4.0]
