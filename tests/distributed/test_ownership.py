"""R ranks give the result of one: owned blocks, whole or sharded parameters, every optimizer."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import isokron
from cases import CASES, Case
from processes import mesh, run

STEPS = 7
# every class, and every setting by which something else travels or is kept somewhere else
VARIED = (
    "adamw-amsgrad",
    "adamw-small",
    "muon-grafted",
    "sign-grafted",
    "shampoo-cut",
    "shampoo-staggered",
    "soap-delayed",
    "soap-averaged",
    "soap-small",
    "katie-symmetric",
    "katie-small",
    "quad-old",
    "skew-delayed",
    "whitening-grafted",
)
SHAPES = {
    "matrix": (13, 10),
    "wide": (5, 24),
    "convolution": (8, 2, 2, 2),
    "row": (1, 9),
    "long": (17,),
    "short": (2,),
    "scalar": (),
}


def make(case: Case, **settings: Any) -> tuple[list[nn.Parameter], isokron.Preconditioned]:
    generator = torch.Generator().manual_seed(1)
    params = [
        nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64))
        for shape in SHAPES.values()
    ]
    return params, case.make(params, **settings)


def gradients(step: int, missing: bool = True) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 + step)
    found = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES.values()
    ]
    return [None if missing and i == step % 5 == 2 else grad for i, grad in enumerate(found)]


def stepped(params: list[nn.Parameter], optimizer: isokron.Preconditioned, steps: range) -> None:
    for step in steps:
        for param, grad in zip(params, gradients(step), strict=True):
            param.grad = None if grad is None else like(grad, param)
        optimizer.step()


def like(value: Tensor, param: Tensor) -> Tensor:
    """A whole tensor placed as the parameter is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(param, DTensor):
        return value.clone()
    return distribute_tensor(value, param.device_mesh, param.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(params: list[nn.Parameter], over: Any, layout: str = "") -> list[nn.Parameter]:
    """Parameters as DTensors; `layout`: the sharded dimension for each dimension of the mesh.

    "R" replicates, "S" is the _StridedShard(0) of FSDP2 before a dimension of two tensor-parallel
    ranks, and so are dimensions that a parameter does not have.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard

    def placed(letter: str, ndim: int) -> Any:
        if letter == "S" and ndim:
            return _StridedShard(0, split_factor=2)
        return Shard(int(letter)) if letter.isdigit() and int(letter) < ndim else Replicate()

    layout = layout or "R" * (over.ndim - 1) + "0"
    return [
        nn.Parameter(
            distribute_tensor(
                p.detach(), over, [placed(letter, p.ndim) for letter in layout], src_data_rank=None
            )
        )
        for p in params
    ]


def whole_parameters(numbers: list[int]) -> list[list[Tensor]]:
    """Every rank has all parameters, as under DDP."""
    found = []
    for number in numbers:
        params, optimizer = make(CASES[number])
        optimizer.distribute()
        stepped(params, optimizer, range(STEPS))
        found.append([p.detach() for p in params])
    return found


def sharded_parameters(
    numbers: list[int], shape: tuple[int, ...], layout: str
) -> list[list[Tensor]]:
    """As under FSDP2, or HSDP, or tensor parallelism where the mesh has more dimensions."""
    found = []
    names = ("replicas", "shards", "columns")[: len(shape)] if len(shape) > 2 else None
    for number in numbers:
        case = CASES[number]
        params = sharded(make(case)[0], mesh(*shape, names=names), layout)
        optimizer = case.make(params)
        stepped(params, optimizer, range(STEPS))
        found.append([whole(p.detach()) for p in params])
    return found


@cache
def one_process(number: int) -> list[Tensor]:
    params, optimizer = make(CASES[number])
    stepped(params, optimizer, range(STEPS))
    return [p.detach() for p in params]


def chosen(ranks: int) -> list[int]:
    """All cases on two ranks, and on more those that differ in what ranks do."""
    numbers = [i for i, case in enumerate(CASES) if ranks == 2 or case.name in VARIED]
    assert len(numbers) == (len(CASES) if ranks == 2 else len(VARIED))
    return numbers


@pytest.mark.parametrize("ranks", [2, 3])
def test_owned_blocks_of_whole_parameters_step_as_in_one_process(ranks: int) -> None:
    numbers = chosen(ranks)
    for found in run(ranks, whole_parameters, numbers):
        compare(numbers, found)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [
        ((2,), "0"),
        ((4,), "0"),
        ((2, 2), "R0"),  # HSDP
        ((2, 2), "S0"),  # FSDP2 of what ColwiseParallel has cut
        ((2, 2), "01"),  # FSDP2 of what RowwiseParallel has cut
        ((2, 2), "00"),
        ((2, 2), "10"),
        ((2, 2), "0R"),
        ((2, 1, 2), "R01"),  # HSDP and tensor parallelism
    ],
)
def test_sharded_parameters_step_as_in_one_process(shape: tuple[int, ...], layout: str) -> None:
    ranks = torch.Size(shape).numel()
    # moments in 8 bits are refused for parameters cut by columns
    small = "1" not in layout
    numbers = [i for i in chosen(ranks) if small or not CASES[i].name.endswith("-small")]
    for found in run(ranks, sharded_parameters, numbers, shape, layout):
        compare(numbers, found)


def compare(numbers: list[int], found: list[list[Tensor]]) -> None:
    for number, params in zip(numbers, found, strict=True):
        for name, one, many in zip(SHAPES, one_process(number), params, strict=True):
            torch.testing.assert_close(
                many, one, rtol=1e-9, atol=1e-9, msg=f"{CASES[number].name}: {name}"
            )


def in_pairs(number: int) -> tuple[list[Tensor], list[int]]:
    """Four ranks, of which two and two share: each pair has all the state."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    params, optimizer = make(CASES[number])
    optimizer.distribute(pairs[dist.get_rank() // 2])
    stepped(params, optimizer, range(STEPS))
    blocks = [key for entry in optimizer.state.values() for key in entry if key.count(".") > 1]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, len(blocks))
    return [p.detach() for p in params], everyone


def test_sub_groups_share_inside_and_have_all_the_state_each() -> None:
    number = next(i for i, case in enumerate(CASES) if case.name == "shampoo-cut")
    params, optimizer = make(CASES[number])
    stepped(params, optimizer, range(STEPS))
    keys = [key for entry in optimizer.state.values() for key in entry if key.count(".") > 1]
    for found, counts in run(4, in_pairs, number):
        compare([number], [found])
        assert counts[:2] == counts[2:]
        assert sum(counts[:2]) == len(keys)
        assert min(counts) > 0


def rounded(dtype: torch.dtype) -> list[Tensor]:
    params, optimizer = make(next(case for case in CASES if case.name == "muon"))
    optimizer.distribute(communication_dtype=dtype)
    stepped(params, optimizer, range(STEPS))
    return [p.detach() for p in params]


def test_what_travels_in_half_precision_is_the_same_on_all_ranks() -> None:
    number = next(i for i, case in enumerate(CASES) if case.name == "muon")
    first, second = run(2, rounded, torch.bfloat16)
    assert all(map(torch.equal, first, second))
    wanted = one_process(number)
    largest = max(float((a - b).abs().max()) for a, b in zip(first, wanted, strict=True))
    assert 1e-6 < largest < 1e-2


def half(dtype: torch.dtype | None) -> tuple[list[Tensor], int]:
    """Parameters in bfloat16, and the bytes this rank has sent for a step but for agreements."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(8, 6, generator=generator).bfloat16()) for _ in range(4)]
    optimizer = isokron.SOAP(params, every=2)
    if dist.is_initialized():
        optimizer.distribute(communication_dtype=dtype)
    for _ in range(STEPS):
        for param in params:
            param.grad = torch.randn(8, 6, generator=generator).bfloat16()
        optimizer.step()
    ranks = optimizer._agreement.ranks
    return [p.detach() for p in params], ranks.traffic.sent // STEPS if ranks else 0


def test_directions_of_parameters_in_half_precision_travel_in_float32_unless_told() -> None:
    wanted, _ = half(None)
    elements = 2 * 8 * 6  # of the two blocks that a rank owns
    for found, sent in run(2, half, None):
        assert sent == 4 * elements
        for one, many in zip(wanted, found, strict=True):
            torch.testing.assert_close(many, one, rtol=2**-7, atol=0)  # a last bit of bfloat16
    assert [sent for _, sent in run(2, half, torch.bfloat16)] == [2 * elements] * 2


def changed_midway(kind: str, what: str) -> list[Tensor]:
    """Something changes that makes plans anew: whoever has the state of a block keeps it."""
    case = next(case for case in CASES if case.name == "soap")
    params, optimizer = make(case, max_dim=8)
    if kind == "sharded":
        params = sharded(params, mesh(dist.get_world_size()))
        optimizer = case.make(params, max_dim=8)
    elif kind == "whole":
        optimizer.distribute()
    params[1].requires_grad_(what != "thaw")
    for step in range(8):
        if step == 4:
            params[1].requires_grad_(True)
            optimizer.param_groups[0]["every"] = 5 if what == "every" else 3
        if step == 6 and what == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        for param, grad in zip(params, gradients(step), strict=True):
            there = grad is not None and param.requires_grad
            param.grad = like(grad, param) if there and grad is not None else None
        optimizer.step()
    return [whole(param.detach()) for param in params]


@pytest.mark.parametrize("what", ["thaw", "every", "load"])
@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_blocks_keep_their_owners_and_so_their_state(kind: str, what: str) -> None:
    wanted = changed_midway("alone", what)
    for found in run(2, changed_midway, kind, what):
        for one, many in zip(wanted, found, strict=True):
            torch.testing.assert_close(many, one, rtol=1e-6, atol=1e-6)  # lost state is 0.04 off


def joined_later() -> str:
    """The layers of Quad are clipped each as one, and so are on one rank."""
    weight = nn.Parameter(torch.zeros(16, 16))
    optimizer = isokron.Quad([{"params": [weight], "split": 2}], block_size=8)
    optimizer.distribute()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    optimizer.param_groups[0]["split"] = None
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_what_would_move_state_between_ranks_is_refused() -> None:
    for text in run(2, joined_later):
        assert "set split before the first step" in text


def columns_in_8bit() -> str:
    from torch.distributed.tensor import Shard, distribute_tensor

    weight = nn.Parameter(distribute_tensor(torch.zeros(16, 16), mesh(2), [Shard(1)]))
    optimizer = isokron.AdamW([weight], moments="8bit", min_8bit_size=0)
    weight.grad = torch.ones_like(weight)
    with pytest.raises(ValueError, match="moments='8bit' needs") as caught:
        optimizer.step()
    return str(caught.value)


def test_columns_of_parameters_are_not_stepped_with_moments_in_8_bits() -> None:
    for text in run(2, columns_in_8bit):
        assert "sharded along their first dimension, got dimensions [1] of shape" in text
