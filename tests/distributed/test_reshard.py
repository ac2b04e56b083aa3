"""Checkpoints of many processes: written by some ranks, taken up by others, to the same result."""

import io
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ownership import SHAPES, gradients, like, whole
from torch import Tensor, nn

import isokron
from cases import CASES, build
from processes import mesh, run

NAMES = ("adamw", "adamw-small", "shampoo-staggered", "soap-delayed", "soap-averaged", "soap-small")
NAMES = (*NAMES, "katie", "skew-delayed")
CHOSEN = [case for case in CASES if case.name in NAMES]
FIRST, SECOND = range(5), range(5, 9)


class Model(nn.Module):
    """Parameters of ugly shapes, whose gradients are given."""

    def __init__(self, seed: int = 1) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, shape in SHAPES.items():
            start = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(start))


def made(number: int, kind: str, seed: int = 1) -> tuple[Model, isokron.Preconditioned]:
    model = Model(seed)
    if kind in ("sharded", "tensor parallel", "vectors"):
        model.scalar.data = model.scalar.data.view(1)  # FSDP2 has no scalars
    if kind in ("sharded", "tensor parallel"):
        from torch.distributed.fsdp import fully_shard

        over = mesh(2, 2, names=("dp", "tp")) if kind == "tensor parallel" else None
        if over is not None:
            # moments in 8 bits are refused for parameters cut by columns
            columns = not CHOSEN[number].name.endswith("-small")
            cut_for_tensor_parallelism(model, over["tp"], columns)
        fully_shard(model, mesh=over and over["dp"])
    optimizer = CHOSEN[number].make(isokron.param_groups(model))
    if kind == "whole":
        optimizer.distribute()
    return model, optimizer


def cut_for_tensor_parallelism(model: Model, over: Any, columns: bool) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    cuts = {"matrix": Shard(0), "long": Shard(0)}
    if columns:
        cuts |= {"wide": Shard(1), "convolution": Shard(1)}
    for name in (*cuts, "short"):  # the others are plain parameters for FSDP2
        placement = cuts.get(name, Replicate())
        whole = getattr(model, name).data
        shards = distribute_tensor(whole, over, [placement], src_data_rank=None)
        model.register_parameter(name, nn.Parameter(shards))


def trained(model: Model, optimizer: isokron.Preconditioned, steps: range) -> None:
    for step in steps:
        for param, grad in zip(model.parameters(), gradients(step), strict=True):
            param.grad = None if grad is None else like(grad.view(param.shape), param)
        optimizer.step()
        optimizer.zero_grad()


def result(model: Model, optimizer: isokron.Preconditioned) -> list[Tensor]:
    optimizer.eval()  # the average, where there is one
    return [whole(param.detach()).clone() for param in model.parameters()]


def save(folder: Path, kind: str, some: int | None = None) -> None:
    """The state of all optimizers, or of the first ones."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    for number in range(len(CHOSEN))[:some]:
        model, optimizer = made(number, kind)
        trained(model, optimizer, FIRST)
        weights, state = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder / str(number))


def resume(folder: Path, kind: str) -> list[list[Tensor]]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    found = []
    for number in range(len(CHOSEN)):
        model, optimizer = made(number, kind, seed=2)
        weights, state = get_state_dict(model, optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder / str(number))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=loaded["model"],
            optim_state_dict=loaded["optimizer"],
        )
        trained(model, optimizer, SECOND)
        found.append(result(model, optimizer))
    return found


@cache
def uninterrupted() -> list[list[Tensor]]:
    found = []
    for number in range(len(CHOSEN)):
        model, optimizer = made(number, "alone")
        trained(model, optimizer, FIRST)
        trained(model, optimizer, SECOND)
        found.append(result(model, optimizer))
    return found


def compare(found: list[list[Tensor]], wanted: list[list[Tensor]]) -> None:
    for case, many, one in zip(CHOSEN, found, wanted, strict=True):
        for name, a, b in zip(SHAPES, many, one, strict=True):
            torch.testing.assert_close(
                a.view(b.shape), b, rtol=1e-8, atol=1e-8, msg=f"{case.name}: {name}"
            )


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_saved_by_two_ranks_it_goes_on_with_one_and_with_four(kind: str, tmp_path: Path) -> None:
    run(2, save, tmp_path / "saved", kind)
    wanted = uninterrupted()
    for ranks in (1, 4):
        for found in run(ranks, resume, tmp_path / "saved", kind):
            compare(found, wanted)


@pytest.mark.parametrize(
    ("ranks", "kind", "others"),
    [
        (4, "tensor parallel", [(1, "vectors"), (4, "sharded")]),
        (4, "sharded", [(4, "tensor parallel")]),
        (1, "vectors", [(4, "tensor parallel")]),
    ],
)
def test_state_goes_to_a_mesh_of_two_dimensions_and_back(
    ranks: int, kind: str, others: list[tuple[int, str]], tmp_path: Path
) -> None:
    run(ranks, save, tmp_path / "saved", kind)
    for other_ranks, other in others:
        for found in run(other_ranks, resume, tmp_path / "saved", other):
            compare(found, uninterrupted())


def test_shards_go_on_as_whole_parameters(tmp_path: Path) -> None:
    """Of a model without scalars, whatever the number of ranks."""
    run(3, save, tmp_path / "saved", "whole")
    (found,) = run(1, resume, tmp_path / "saved", "alone")
    compare(found, uninterrupted())


def full(kind: str) -> list[bool]:
    """What one process would have is given to all, and goes on; a part cannot be saved."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    same = []
    for number, case in enumerate(CHOSEN):
        model, optimizer = made(number, kind)
        trained(model, optimizer, FIRST)
        loaded = saved_and_loaded(optimizer.full_state_dict())
        options = StateDictOptions(full_state_dict=True)
        named = saved_and_loaded(get_optimizer_state_dict(model, optimizer, options=options))
        if not case.name.startswith("adamw"):
            with pytest.raises(TypeError, match="holds one rank's part"):
                saved_and_loaded({"optimizer": optimizer.state_dict()})
        # torch cannot distribute what FSDP2 has cut after tensor parallelism into unequal shards
        others = [made(number, kind, seed=2) for _ in range(1 if kind == "tensor parallel" else 2)]
        for other, _ in others:
            other.load_state_dict(model.state_dict())
        others[0][1].load_state_dict(loaded)
        if len(others) > 1:
            set_optimizer_state_dict(*others[1], named, options=options)
        trained(model, optimizer, SECOND)
        wanted = result(model, optimizer)
        for other in others:
            trained(*other, SECOND)
            same.append(all(map(torch.equal, wanted, result(*other))))
    return same


def saved_and_loaded(value: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=True)
    return loaded


@pytest.mark.parametrize(("ranks", "kind"), [(2, "whole"), (2, "sharded"), (4, "tensor parallel")])
def test_the_full_state_loads_anywhere_and_a_part_refuses_to_be_saved(
    ranks: int, kind: str
) -> None:
    for same in run(ranks, full, kind):
        assert all(same)


def foreign(folder: Path) -> list[str]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_optimizer_state_dict,
        set_optimizer_state_dict,
    )

    texts = []
    model, optimizer = made(NAMES.index("adamw"), "whole")
    other = isokron.Shampoo(isokron.param_groups(model))
    other.distribute()
    state: dict[str, Any] = {"optimizer": get_optimizer_state_dict(model, other)}
    try:
        dcp.load(state, checkpoint_id=folder / "0")
    except dcp.CheckpointException as error:
        texts.append(str(error))
    trained(model, optimizer, FIRST)
    plain = get_optimizer_state_dict(model, optimizer)
    try:
        set_optimizer_state_dict(model, other, plain)
    except Exception as error:
        texts.append(str(error))
    return texts


def test_a_foreign_checkpoint_is_refused_by_its_first_key(tmp_path: Path) -> None:
    run(2, save, tmp_path / "saved", "whole", 1)
    for texts in run(2, foreign, tmp_path / "saved"):
        assert len(texts) == 2
        assert "Missing key in checkpoint state_dict: optimizer.state." in texts[0]
        assert "Shampoo: the checkpoint is of isokron.AdamW, not of Shampoo" in texts[1]


def asked_in_every_way(name: str) -> list[str]:
    """A model with one matrix, of which one rank owns all there is."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = nn.Linear(6, 4)
    optimizer = build(getattr(isokron, name), model.parameters(), state_dtype=torch.float32)
    optimizer.distribute()
    model(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    with pytest.raises(TypeError, match="holds one rank's part"):
        saved_and_loaded(optimizer.state_dict())
    get_optimizer_state_dict(model, optimizer, options=StateDictOptions(cpu_offload=True))
    full = StateDictOptions(full_state_dict=True)
    state = saved_and_loaded(get_optimizer_state_dict(model, optimizer, options=full))["state"]
    return sorted(f"{param}.{key}" for param, entry in state.items() for key in entry)


@pytest.mark.parametrize("name", ["AdamW", "SOAP"])
def test_a_rank_that_owns_everything_answers_as_the_others_do(name: str) -> None:
    first, second = run(2, asked_in_every_way, name)
    assert first == second
    assert "bias.exp_avg" in first
    assert ("weight.exp_avg" if name == "AdamW" else "weight.basis.0.0") in first
