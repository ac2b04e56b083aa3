"""Ranks agree over connections of their own: all hear of what one finds, and no wait is endless."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import isokron
from isokron.distributed.process_group import control_group
from processes import mesh, outcomes, run

# rank 1 stops in the middle of a step, for which rank 0 waits two seconds; the timeout of their
# process group is torch's, half an hour
ENDING = """
import sys, time
import torch
from torch import distributed as dist, nn
import isokron

rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
weights = [nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(6, 3))]
optimizer = isokron.Shampoo(weights)
optimizer.distribute(timeout=2.0)
for weight in weights:
    weight.grad = torch.ones_like(weight)
if rank:
    optimizer.direction = lambda *_: time.sleep(300)
optimizer.step()
"""


def test_a_process_that_gave_up_ends(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, str(rank), str(tmp_path / "store")],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, text = ranks[0].communicate(timeout=150)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[0].returncode == 1
    assert (
        "RankLost: rank 0 of 2 waited in all_gather for ranks that did not come within 2 s" in text
    )


def skipping(what: str) -> None:
    """Rank 1 leaves out a step and goes on to the next backward pass, or to a collective."""
    rank = dist.get_rank()
    net = nn.parallel.DistributedDataParallel(nn.Linear(3, 4))
    optimizer = isokron.SOAP(net.parameters())
    optimizer.distribute(timeout=3.0)
    for step in range(4):
        optimizer.zero_grad()
        net(torch.ones(2, 3)).square().sum().backward()
        if not (rank and step == 2):
            optimizer.step()
        elif what == "collective":
            dist.all_reduce(torch.ones(7))


@pytest.mark.parametrize("what", ["backward", "collective"])
def test_a_rank_that_leaves_out_a_step_is_missed(what: str) -> None:
    first, _ = outcomes(2, skipping, what, seconds=50, awaited=1)
    assert "rank 0 of 2 waited in optimizer.step() number 3 for ranks that did not" in str(first)


def begun(timeout: float) -> None:
    weight = nn.Parameter(torch.ones(4, 5))
    optimizer = isokron.Shampoo([weight])
    optimizer.distribute(timeout=timeout)
    weight.grad = torch.ones_like(weight)
    if dist.get_rank():
        time.sleep(60)
    optimizer.step()


def test_a_rank_that_never_steps_is_missed() -> None:
    first, _ = outcomes(2, begun, 2.0, seconds=50, awaited=1)
    assert "rank 0 waited for ranks 0, 1 to share an optimizer's steps" in str(first)
    assert "within 2 s" in str(first)


def failing(what: str) -> tuple[str, bool]:
    """One rank of three has something that cannot be stepped on."""
    odd = dist.get_rank() == 1
    table = nn.Embedding(6, 4, sparse=odd and what == "sparse")
    params: list[Tensor] = [table.weight]
    table(torch.tensor([1, 2])).sum().backward()
    if what == "placed":
        from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

        def placed(placement: Placement) -> Tensor:
            return distribute_tensor(torch.ones(6, 4), mesh(3), [placement], src_data_rank=None)

        weight = nn.Parameter(placed(Shard(0)))
        weight.grad = placed(Replicate() if odd else Shard(0))
        params = [weight]
    optimizer = isokron.Shampoo(params)
    if what != "placed":
        optimizer.distribute(timeout=100)
    if odd and what == "own":
        optimizer._check_step = lambda: 1 // 0  # type: ignore[method-assign]
    before = [param.detach().clone() for param in params]
    with pytest.raises(Exception) as caught:  # noqa: PT011
        optimizer.step()
    unchanged = all(map(torch.equal, before, params)) and not optimizer.state
    return f"{type(caught.value).__name__}: {caught.value}", unchanged


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("sparse", "RuntimeError: Shampoo does not support sparse gradients"),
        ("placed", "ValueError: parameter 0 is placed as"),
        ("own", "ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_what_one_rank_raises_all_hear_of_at_once(what: str, words: str) -> None:
    for rank, (text, unchanged) in enumerate(run(3, failing, what, seconds=60)):
        assert text.startswith(words if rank == 1 else f"RankFailed: {words}")
        assert text.endswith("(rank 1); no rank has stepped") == (rank != 1)
        assert unchanged


def replicas(what: str) -> tuple[str, int, Tensor]:
    """HSDP: ranks 0 and 1 have the shards of one copy, 2 and 3 those of another."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def placed(value: Tensor) -> Tensor:
        return distribute_tensor(value, mesh(2, 2), [Replicate(), Shard(0)], src_data_rank=None)

    odd, text = dist.get_rank() == 3, ""
    weight = nn.Parameter(placed(torch.eye(8, 6)))
    optimizer = isokron.SOAP([weight], lr=1e-2, nonfinite="skip", every=2)
    for step in range(3):
        weight.grad = placed(torch.randn(8, 6, generator=torch.Generator().manual_seed(step)))
        if odd and step == 1 and what == "infinite":
            weight.grad.to_local().fill_(torch.nan)  # type: ignore[attr-defined]
        optimizer.param_groups[0]["lr"] = 0.2 if odd and step == 1 and what == "settings" else 0.1
        try:
            optimizer.step()
        except RuntimeError as error:
            text = str(error)
    return text, optimizer.skipped_steps, weight.detach().full_tensor()  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["settings", "infinite"])
def test_copies_of_shards_agree_too(what: str) -> None:
    everyone = run(4, replicas, what)
    for text, skipped, weight in everyone:
        assert torch.equal(weight, everyone[0][2])
        if what == "settings":
            assert "settings of group 0 must be the same on all 4 ranks" in text
            assert "on rank 3" in text
        else:
            assert (text, skipped) == ("", 1)


def begun_apart(rank: int) -> str:
    """HSDP as FSDP2 makes it, from another seed on one rank, or on none."""
    from torch.distributed.fsdp import fully_shard

    over = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(int(dist.get_rank() == rank))
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    fully_shard(net, mesh=over)
    before = [param.detach().to_local().clone() for param in net.parameters()]  # type: ignore[attr-defined]
    optimizer = isokron.SOAP(isokron.param_groups(net))
    net(torch.ones(2, 6)).square().sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        after = [param.detach().to_local() for param in net.parameters()]  # type: ignore[attr-defined]
        return str(error) if all(map(torch.equal, before, after)) else "changed"
    return ""


def test_copies_of_shards_must_begin_alike() -> None:
    words = "copies of sharded parameters must have the same values, but those of rank 3 differ"
    for text in outcomes(4, begun_apart, 3):
        assert words in str(text)
    assert outcomes(4, begun_apart, -1) == [("",)] * 4


def look_alike() -> int:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    weights = []
    for columns in (4, 5):
        over = dist.device_mesh.init_device_mesh("cpu", (2, 2))
        placements = [Replicate(), Shard(0)]
        value = distribute_tensor(torch.eye(6, columns), over, placements, src_data_rank=None)
        weights.append(nn.Parameter(value))
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer = isokron.SOAP(weights)
    optimizer.step()
    owners = optimizer._agreement.owners.values()
    return len({owner for of_param in owners for owner in of_param.values()})


def test_meshes_that_look_alike_have_one_load() -> None:
    """torch may give a tensor either of them, by what it has in its caches."""
    assert outcomes(4, look_alike) == [(2,)] * 4


def kept() -> tuple[bool, bool]:
    group = control_group((0, 1), 30.0).group
    again, other = control_group((0, 1), 30.0).group, control_group((0, 1), 31.0).group
    return group is again, group is other


def test_optimizers_of_all_ranks_have_one_group() -> None:
    assert run(2, kept) == [(True, False)] * 2


def among_others() -> tuple[tuple[int, ...], str, float]:
    """Two of three ranks share, and one of them is in a group more than the other."""
    rank = dist.get_rank()
    dist.new_group([1])
    pair = dist.new_group([1, 2])
    weight = nn.Parameter(torch.ones(4, 5))
    weight.grad = torch.ones_like(weight)
    text = ""
    for lr in (0.1, 0.1 + rank):
        optimizer = isokron.Shampoo([weight], lr=lr)
        if rank:
            optimizer.distribute(pair, timeout=20)
        try:
            optimizer.step()
        except RuntimeError as error:
            text = str(error)
    members = [ranks.members for ranks in optimizer._agreement._controls.values()]
    return (members or [()])[0], text, float(weight.sum())


def test_some_ranks_share_whatever_other_groups_they_are_in() -> None:
    first, *pair = run(3, among_others)
    assert first[:2] == ((), "")
    for members, text, total in pair:
        assert members == (1, 2)
        assert "settings of group 0 must be the same on all 2 ranks, but rank 1 has" in text
        assert "on rank 2" in text
        assert total == pair[0][2]


def unlike() -> str:
    """The first parameter is a DTensor on a mesh of the ranks that have the second whole."""
    from torch.distributed.tensor import Shard, distribute_tensor

    rank, over = dist.get_rank(), mesh(dist.get_world_size())
    shard = nn.Parameter(distribute_tensor(torch.ones(4, 3), over, [Shard(0)], src_data_rank=None))
    whole = nn.Parameter(torch.full((3, 5), 1.0 + 1e-6 * rank))
    optimizer = isokron.SOAP([shard, whole])
    optimizer.distribute(over.get_group())
    for param in (shard, whole):
        param.grad = torch.ones_like(param)
    assert optimizer._agreement.place(shard).ranks == optimizer._agreement.place(whole).ranks  # type: ignore[union-attr]
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert len(optimizer._agreement._controls) == 1
    return str(caught.value)


def test_values_of_whole_parameters_are_compared_beside_sharded_ones() -> None:
    for text in run(2, unlike):
        assert "values of the parameters of group 0 must be the same on all 2 ranks" in text


def broadcast(name: str) -> tuple[int, bool]:
    """State of rank 0 alone, as torch gathers it, given back to an optimizer made anew."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )
    from torch.distributed.fsdp import fully_shard

    def made() -> tuple[nn.Module, isokron.Preconditioned]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        fully_shard(net)
        optimizer: isokron.Preconditioned = getattr(isokron, name)(isokron.param_groups(net))
        return net, optimizer

    def train(net: nn.Module, optimizer: isokron.Preconditioned, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
            net(inputs).square().sum().backward()
            optimizer.step()

    (net, optimizer), (other, loaded) = made(), made()
    train(net, optimizer, range(3))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(net, optimizer, options=options)
    other.load_state_dict(net.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, loaded, state, options=options)
    for each in ((net, optimizer), (other, loaded)):
        train(*each, range(3, 5))
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    same = [torch.equal(one.to_local(), two.to_local()) for one, two in pairs]  # type: ignore[attr-defined]
    return len(state), all(same)


@pytest.mark.parametrize("name", ["SOAP", "Quad", "Skew"])
def test_state_of_rank_0_is_broadcast_by_torch_and_resumes(name: str) -> None:
    first, second = run(2, broadcast, name)
    assert first[0] > 0 == second[0]
    assert [first[1], second[1]] == [True, True]


def saving(folder: Path) -> list[bool]:
    """Steps of SOAP while torch writes, on a thread, what there was before them."""
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard

    own = dist.new_group(backend="gloo")
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    fully_shard(net)
    optimizer = isokron.SOAP(isokron.param_groups(net))
    right = []
    for step in range(3):
        optimizer.zero_grad()
        net(torch.ones(2, 4)).square().sum().backward()
        saved = {name: value.clone() for name, value in net.state_dict().items()}
        writing = checkpoint.async_save(
            net.state_dict(), checkpoint_id=folder / str(step), process_group=own
        )
        optimizer.step()
        writing.result()
        loaded = {name: torch.zeros_like(value) for name, value in saved.items()}
        checkpoint.load(loaded, checkpoint_id=folder / str(step))
        right += [torch.equal(loaded[k].to_local(), saved[k].to_local()) for k in saved]
    return right


def test_steps_go_on_while_a_checkpoint_is_written_on_a_group_of_its_own(tmp_path: Path) -> None:
    assert run(2, saving, tmp_path) == [[True] * 12] * 2
