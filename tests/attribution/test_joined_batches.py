"""Losses that join several batches in one call of the model, as DPO's of chosen and rejected."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from isokron import Attributor

Pair = tuple[Tensor, Tensor]


def joined(model: nn.Module, batch: Pair) -> Tensor:
    chosen, rejected = model(torch.cat(batch)).sum((1, 2)).chunk(2)
    return -functional.logsigmoid(chosen - rejected)


def apart(model: nn.Module, batch: Pair) -> Tensor:
    chosen, rejected = (model(part).sum((1, 2)) for part in batch)
    return -functional.logsigmoid(chosen - rejected)


def test_a_call_with_two_batches_is_refused_with_the_remedy(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    data = [(torch.randint(9, (5,)), torch.randint(9, (5,))) for _ in range(6)]
    with pytest.raises(ValueError, match="with 2 batches as one, call the model for each"):
        Attributor(tmp_path / "joined", model, data, loss=joined)
    a = Attributor(tmp_path / "apart", model, data, loss=apart).fit()
    assert a.score(data[:1], save=False).shape == (1, 6)
