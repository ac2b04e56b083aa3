"""`full_state_dict` gives what one process would have, and never a part or a mixture of parts."""

import ctypes
import gc
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ownership import like, sharded, whole
from torch import Tensor, nn
from torch import distributed as dist

import cases
import isokron
from isokron.distributed import full_state_dict, is_sharded
from isokron.distributed.attendance import longest_wait
from isokron.tasks.speeches import ByteTransformer
from processes import mesh, outcomes, run

STEPS = 5
NAMES = ("soap", "soap-delayed", "soap-averaged", "quad", "adamw-amsgrad")
CASES = {case.name: case for case in cases.CASES if case.name in NAMES}
# of equal ones different ranks are the owners, and so each rank has state in another order
SHAPES = ((13, 10), (13, 10), (13, 10), (5, 24), (8, 2, 2, 2), (1, 9), (17,), (2,), ())
LAYOUTS: dict[str, tuple[int, ...]] = {"ddp": (), "fsdp": (2,), "fsdp4": (4,), "hsdp": (2, 2)}
State = dict[int, dict[str, Tensor]]


def made() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [nn.Parameter(values) for values in drawn]


def placed(name: str, layout: str) -> tuple[list[nn.Parameter], isokron.Preconditioned]:
    """Parameters and the optimizer of this case, on this rank."""
    params = made()
    if LAYOUTS[layout]:
        params = sharded(params, mesh(*LAYOUTS[layout]))
    optimizer = CASES[name].make(params)
    if layout == "ddp":
        optimizer.distribute()
    return params, optimizer


def trained(params: list[nn.Parameter], optimizer: isokron.Preconditioned) -> None:
    generator = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        for i, param in enumerate(params):
            grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
            param.grad = None if i == step % 4 else like(grad, param)
        optimizer.step()


def alone(name: str) -> dict[str, Any]:
    """The state dict of one process."""
    params = made()
    optimizer = CASES[name].make(params)
    trained(params, optimizer)
    return optimizer.state_dict()


def gathered(optimizer: isokron.Preconditioned) -> State:
    """The state of all ranks by other means: torch's full tensors, and pickled objects."""
    packed = optimizer.state_dict()["state"]
    part: State = {}
    for number in sorted(packed):
        keys = sorted(packed[number], key=lambda key: (not is_sharded(packed[number][key]), key))
        part[number] = {key: whole(packed[number][key]) for key in keys}
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return {n: {k: v for each in parts for k, v in each[n].items()} for n in part}


def compare(state: State, wanted: State) -> None:
    """To the bit."""
    assert list(state) == sorted(wanted)
    for number, entry in wanted.items():
        assert state[number].keys() == entry.keys()
        for key, value in entry.items():
            assert type(state[number][key]) is Tensor
            assert state[number][key].dtype == value.dtype
            assert torch.equal(state[number][key], value), f"{number} {key}"


def after_steps(name: str, layout: str) -> dict[int, list[str]]:
    params, optimizer = placed(name, layout)
    trained(params, optimizer)
    state = optimizer.full_state_dict()["state"]
    compare(state, gathered(optimizer))
    return {number: sorted(entry) for number, entry in state.items()}


def ranks_of(layout: str) -> int:
    return torch.Size(LAYOUTS[layout]).numel() if LAYOUTS[layout] else 3


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_it_is_what_all_ranks_have_under_the_keys_of_one_process(name: str, layout: str) -> None:
    wanted = {number: sorted(entry) for number, entry in alone(name)["state"].items()}
    for keys in run(ranks_of(layout), after_steps, name, layout):
        assert keys == wanted


def after_loading(name: str, layout: str, saved: dict[str, Any]) -> None:
    _, optimizer = placed(name, layout)
    optimizer.load_state_dict(saved)
    compare(optimizer.full_state_dict()["state"], saved["state"])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_the_state_of_one_process_comes_back_to_the_bit(name: str, layout: str) -> None:
    run(ranks_of(layout), after_loading, name, layout, alone(name))


def differing(what: str) -> str:
    """One rank knows of other state than the others."""
    params, optimizer = placed("soap", "ddp" if what != "sharded" else "fsdp")
    trained(params, optimizer)
    if dist.get_rank() == 1:
        if what == "delay":
            optimizer.param_groups[0]["refresh"] = 1
        elif what == "steps":
            for batch in optimizer._layouts[0].batches:
                batch.exchange.step += 1
                batch.step += 1
        else:
            optimizer.param_groups[0]["average"] = "primal"
    with pytest.raises(RuntimeError) as caught:
        optimizer.full_state_dict()
    return str(caught.value)


@pytest.mark.parametrize("what", ["delay", "steps", "sharded"])
def test_ranks_that_have_different_state_say_so_and_gather_nothing(what: str) -> None:
    difference = {"delay": "next.basis", "steps": "4 steps", "sharded": "average"}[what]
    for text in run(2, differing, what):
        assert (
            "SOAP: state of parameter number 0 of shape (13, 10) must be the same on all 2 ranks"
            in text
        )
        assert difference in text


def to_one(layout: str) -> None:
    """Rank 1 alone gets it, by each of the ways to ask; so does an optimizer of torch."""
    params, optimizer = placed("soap-averaged", layout)
    trained(params, optimizer)
    wanted, here = gathered(optimizer), dist.get_rank() == 1
    groups = optimizer.state_dict()["param_groups"]
    for full in (optimizer.full_state_dict(to_rank=1), full_state_dict(optimizer, to_rank=1)):
        if here:
            compare(full["state"], wanted)
            assert full["param_groups"] == groups
        else:
            assert full == {}
    theirs = torch.optim.AdamW([nn.Parameter(torch.ones(2))])
    assert bool(full_state_dict(theirs, to_rank=1)) == here


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_gets_it_and_the_others_nothing(layout: str) -> None:
    run(ranks_of(layout), to_one, layout)


def wrong_rank() -> list[str]:
    params, optimizer = placed("soap", "ddp")
    trained(params, optimizer)
    texts = []
    for to_rank in (2, -1, True, dist.get_rank()):
        with pytest.raises((ValueError, RuntimeError)) as caught:
            optimizer.full_state_dict(to_rank=to_rank)
        texts.append(str(caught.value))
    return texts


def test_a_rank_that_there_is_not_is_refused_and_so_are_several() -> None:
    for beyond, below, truth, several in run(2, wrong_rank):
        assert beyond == "to_rank must be None, for all ranks, or one of the ranks 0 to 1, got 2"
        assert "got -1" in below
        assert "got True" in truth
        assert "to_rank must be the same on all 2 ranks, but rank 0 has 0 against 1" in several
    alone = isokron.AdamW([nn.Parameter(torch.ones(2))])
    assert alone.full_state_dict(to_rank=0)["state"] == {}
    with pytest.raises(ValueError, match="ranks 0 to 0, got 1"):
        alone.full_state_dict(to_rank=1)


def several_parties() -> None:
    """Pairs of ranks share some parameters, and all ranks the others, sharded and whole."""
    params = [*sharded(made(), mesh(2, 2)), *sharded(made(), mesh(4)), *made()]
    optimizer = isokron.SOAP(params, every=3, average="schedule_free")
    optimizer.distribute()
    for param in params:
        drawn = torch.Generator().manual_seed(3)
        param.grad = like(torch.randn(param.shape, generator=drawn, dtype=torch.float64), param)
    optimizer.step()
    wanted = gathered(optimizer)
    compare(optimizer.full_state_dict()["state"], wanted)
    full = optimizer.full_state_dict(to_rank=2)
    assert bool(full) == (dist.get_rank() == 2)
    if full:
        compare(full["state"], wanted)


def test_parameters_that_different_ranks_share_come_together() -> None:
    run(4, several_parties)


def decoder(layout: str) -> None:
    """A transformer: torch is given the same state, and one process goes on with it."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, twin = (ByteTransformer(context=16, layers=3, width=32, heads=2) for _ in range(2))
    names = [name for name, _ in model.named_parameters()]
    if layout == "fsdp":
        fully_shard(model, mesh=mesh(2))
    settings: dict[str, Any] = {"every": 2, "average": "schedule_free"}
    optimizer = isokron.SOAP(isokron.param_groups(model), **settings)
    if layout == "ddp":
        optimizer.distribute()
    text = torch.randint(256, (4, 17), generator=torch.Generator().manual_seed(1))
    for _ in range(3):
        optimizer.zero_grad()
        logits = model(text[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
        optimizer.step()
    full = optimizer.full_state_dict()
    compare(full["state"], gathered(optimizer))
    other = isokron.SOAP(isokron.param_groups(twin), **settings)
    other.load_state_dict(full)
    compare(other.full_state_dict()["state"], full["state"])
    options = StateDictOptions(full_state_dict=True)
    by_name = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    numbers = get_optimizer_state_dict(twin, other, options=options)["state"]
    assert by_name.keys() == numbers.keys() == set(names)
    for name in names:
        compare({0: by_name[name]}, {0: numbers[name]})


@pytest.mark.parametrize("layout", ["ddp", "fsdp"])
def test_a_decoder_on_two_ranks_goes_on_in_one_process(layout: str) -> None:
    run(2, decoder, layout)


def resident(what: str) -> int:
    """Bytes: VmRSS, or its peak VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(f"{what}:")]
    return int(line.split()[1]) << 10


def grown(layout: str, to_rank: int | None) -> tuple[int, int]:
    """By how much the peak of resident memory grows, and the size of what came."""
    params = [nn.Parameter(torch.ones(512, 512)) for _ in range(12)]
    head = [nn.Parameter(torch.ones(4096, 512))]
    if layout == "fsdp":
        over = mesh(dist.get_world_size())
        params, head = sharded(params, over), sharded(head, over)
    groups = [{"params": params}, {"params": head, "route": "adamw"}]
    average = "schedule_free" if layout == "fsdp" else None
    optimizer: Any = isokron.SOAP(groups, every=9, start=9, average=average)
    if layout == "sharded":
        optimizer = isokron.ShardedAdamW([*params, *head])
    elif layout == "ddp":
        optimizer.distribute()
    for param in [*params, *head]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide what is asked for
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak
    before = resident("VmRSS")
    full = optimizer.full_state_dict() if to_rank is None else optimizer.full_state_dict(to_rank)
    peak = resident("VmHWM") - before
    tensors = [value for entry in full.get("state", {}).values() for value in entry.values()]
    return peak, sum(tensor.numel() * tensor.element_size() for tensor in tensors)


# Python, threads of gloo, what malloc rounds, and what faster ranks have sent on a busy machine
SLACK = 24 << 20


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("layout", "to_rank"),
    [("ddp", None), ("ddp", 1), ("fsdp", None), ("fsdp", 0), ("sharded", None), ("sharded", 0)],
)
def test_it_takes_the_state_and_one_part_of_it(
    layout: str, to_rank: int | None, ranks: int
) -> None:
    results = outcomes(ranks, grown, layout, to_rank)
    full = max((outcome[0][1] for outcome in results if isinstance(outcome, tuple)), default=0)
    for rank, outcome in enumerate(results):
        assert isinstance(outcome, tuple), outcome
        peak, size = outcome[0]
        assert (size > 40 << 20) == (to_rank in (None, rank))
        # a rank's part is a copy until it is gathered, and a batch is sent and received
        allowed = size + full // ranks + 2 * (32 << 20) + SLACK
        assert peak <= allowed, f"{peak / 2**20:.0f} MiB for {size / 2**20:.0f}"


def forsaken() -> None:
    """Rank 1 does not come to gather the state."""
    params = sharded(made(), mesh(2))
    optimizer = CASES["soap-averaged"].make(params)
    optimizer.distribute(timeout=2.0)
    trained(params, optimizer)
    if dist.get_rank() == 0:
        optimizer.full_state_dict()
    time.sleep(100)


def test_it_waits_no_longer_than_the_optimizer_does() -> None:
    outcome = str(outcomes(2, forsaken, awaited=1)[0])
    assert "RankLost: rank 0 has waited 2 s in optimizer.state_dict() for rank 1; every" in outcome


def lonely(folder: Path) -> tuple[str, list[str]]:
    """Rank 0 alone saves, as scripts without shared state do; then all do what the error says."""
    params = made()
    optimizer = CASES["soap"].make(params)
    optimizer.distribute(timeout=1.0)
    trained(params, optimizer)
    dist.barrier()  # both are done: no rank is slow
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("isokron.distributed.attendance")
    logger.addHandler(handler)
    text = ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        text = str(caught.value)
    logger.removeHandler(handler)
    dist.barrier()
    compare(optimizer.full_state_dict()["state"], gathered(optimizer))
    trained(params, optimizer)  # nothing is left that a step would stumble upon
    return text, told


def test_state_dict_on_one_rank_alone_ends_soon_and_says_what_to_call(tmp_path: Path) -> None:
    (text, told), others = run(2, lonely, tmp_path)
    assert others == ("", [])
    for message in (text, *told):
        assert "in optimizer.state_dict() for rank 1; every rank has a part of the state" in message
        assert "optimizer.full_state_dict(to_rank=0) on all" in message
        assert "optimizer.consolidate_state_dict() on all" in message
    assert "rank 0 has waited 1 s" in text


@pytest.mark.parametrize(("timeout", "seconds"), [(300.0, 30.0), (20.0, 20.0), (3000.0, 300.0)])
def test_ranks_that_do_not_call_state_dict_are_missed_soon(timeout: float, seconds: float) -> None:
    assert longest_wait(timeout) == seconds


def consolidated(name: str, layout: str, folder: Path, to: int) -> None:
    params, optimizer = placed(name, layout)
    trained(params, optimizer)
    wanted = gathered(optimizer)
    optimizer.consolidate_state_dict(to)
    for group in optimizer.param_groups:
        group["lr"] = 0.125  # as a schedule does after the step
    if dist.get_rank() == to:  # alone, and twice
        optimizer.state_dict()
        torch.save(optimizer.state_dict(), folder / "optimizer.pt")
        saved = torch.load(folder / "optimizer.pt", weights_only=True)
        compare(saved["state"], wanted)
        assert {group["lr"] for group in saved["param_groups"]} == {0.125}
    else:
        with pytest.raises(TypeError, match="one rank's part"):
            torch.save(optimizer.state_dict(), folder / "part.pt")
    trained(params, optimizer)
    part = optimizer.state_dict()  # of all again
    assert any(is_sharded(v) for entry in part["state"].values() for v in entry.values())
    optimizer.load_state_dict(torch.load(folder / "optimizer.pt", weights_only=True))


@pytest.mark.parametrize(("layout", "to"), [("ddp", 0), ("fsdp", 1), ("hsdp", 0)])
@pytest.mark.parametrize("name", ["soap-delayed", "soap-averaged", "adamw-amsgrad"])
def test_one_rank_alone_saves_what_has_been_consolidated(
    name: str, layout: str, to: int, tmp_path: Path
) -> None:
    run(4 if layout == "hsdp" else 2, consolidated, name, layout, tmp_path, to)


def test_one_process_has_nothing_to_consolidate() -> None:
    params = made()
    optimizer = CASES["soap"].make(params)
    optimizer.consolidate_state_dict()
    trained(params, optimizer)
    optimizer.consolidate_state_dict()
    compare(optimizer.state_dict()["state"], alone("soap")["state"])
