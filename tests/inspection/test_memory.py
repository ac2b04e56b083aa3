"""Bytes by policy are those of the tensors that `fit` keeps under it."""

import pytest
import torch
from torch import nn

from isokron.curvature import CrossEntropy, fit
from isokron.inspect import POLICIES, Setup, measure, page
from isokron.report.render import memory
from isokron.tasks import Examples, Task


class Seer(nn.Module):
    """Two groups of channels at 6 positions, then one position of many outputs."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 8, 3, groups=2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(48, 40)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).flatten(1))


def scores(model, batch):
    return model(batch[0]), batch[1]


@pytest.fixture
def seeing():
    examples = Examples((torch.randn(20, 4, 8), torch.randint(0, 40, (20,))))

    def loss(model, batch):
        return nn.functional.cross_entropy(*scores(model, batch), reduction="none")

    return Task("seeing", lambda: Seer(), examples, examples, loss, 7, logits=scores)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("policy", POLICIES)
def test_bytes_are_those_of_a_fit_under_the_policy(seeing, policy, sharing):
    setup = Setup(seeing, steps=0, examples=20, sharing=sharing)
    result, _ = measure(setup)

    def fitted(dtype):
        options = {"policy": policy, "store_dtype": dtype, "sharing": sharing}
        loss = CrossEntropy(scores)
        return fit(setup.model, [seeing.train.tensors], loss, **options).report(spectra=False)

    records = fitted(torch.float32)
    for facts, record in zip(result.layers, records, strict=True):
        assert facts.output_bytes[policy] + facts.input_bytes == record["bytes"]
    inputs = sum(facts.input_bytes for facts in result.layers)
    total, half = (sum(x["bytes"] for x in fitted(d)) for d in (torch.float32, torch.bfloat16))
    row = [
        str(sum(record["columns"] is not None for record in records)),
        *(memory(size) for size in (total - inputs, half - inputs, total)),
    ]
    cells = "".join(f"<td>{cell}</td>" for cell in row)
    assert f'<th scope="row">{policy}</th>{cells}' in page(result)


def test_places_are_positions_one_by_one_or_together(seeing, inspected):
    for sharing, places in (("expand", 6), ("reduce", 1)):
        conv, _, head = inspected(seeing, steps=0, sharing=sharing)[0].layers
        assert (conv.places, head.places) == (places, 1)
