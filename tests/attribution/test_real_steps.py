"""Real steps change a query's loss as autograd and retraining say, and the model not at all."""

from pathlib import Path
from statistics import median

import logistic
import torch
from torch import Tensor, nn

from isokron import Attributor
from isokron.attribution import read_queries
from isokron.attribution.data import Data, Subject
from isokron.attribution.verify import calibrate, verify
from isokron.curvature.losses import CrossEntropy
from isokron.tasks import Examples


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    return model.train(), (torch.randn(20, 4), torch.randint(0, 3, (20,)))


def subject(model: nn.Module, inputs: Tensor, targets: Tensor) -> Subject:
    data = Data(Examples((inputs, targets)))
    return Subject(model, [], CrossEntropy(), data, torch.device("cpu"))


def test_changes_are_those_of_a_step_against_the_gradient() -> None:
    model, (inputs, targets) = problem()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    query = inputs[:1], targets[:1]
    groups: dict[str, list[int]] = {"proponents": [0], "random": [5, 6], "opponents": []}
    changes = verify(subject(model, inputs, targets), query, groups, share=1e-3)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert changes["opponents"] is None
    model.eval()
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(model(query[0]), query[1]))
    assert changes["before"] is not None
    assert abs(changes["before"] - loss) < 1e-5
    # a step on the query itself lowers its loss by the share, unless another group allows less
    assert changes["proponents"] is not None
    assert -1.05e-3 * loss < changes["proponents"] < -1e-4 * loss


def test_half_precision_takes_a_step_that_is_not_lost_in_rounding() -> None:
    model, (inputs, targets) = problem()
    model = model.to(torch.float16)
    half = inputs.to(torch.float16)
    query = half[:1], targets[:1]
    changes = verify(subject(model, half, targets), query, {"proponents": [0]})
    assert changes["proponents"] is not None
    assert changes["proponents"] < 0


def test_predicted_nats_are_those_of_models_trained_without_an_example(tmp_path: Path) -> None:
    """Scores over the number of loss terms overstate these removals 3 to 8 times."""
    examples = 300
    task = logistic.digits(examples)
    model = logistic.fit(task, torch.arange(examples), 0)
    a = Attributor(tmp_path, model, task=task).fit()
    inverse = a.inverse(0.1)
    assert inverse is not None
    queries = read_queries(task, model, ["eval:0-5"])
    scores = a.score(queries, save=False).as_subclass(Tensor)

    def loss_of(network: nn.Module, query: int) -> float:
        with torch.no_grad():
            return float(task.losses(network, queries[query].batch).sum())

    ratios, overstated = [], []
    for query, row in enumerate(scores):
        best = row.topk(5).indices.tolist()
        total = float(row[best].sum())
        nats = calibrate(a.subject, queries[query].batch, best, inverse, total)
        assert nats is not None
        left_out = best[0]
        rest = torch.tensor([number for number in range(examples) if number != left_out])
        change = loss_of(logistic.fit(task, rest, 0), query) - loss_of(model, query)
        ratios.append(nats * float(row[left_out]) / change)
        overstated.append(float(row[left_out]) / examples / change)
    assert 0.5 < median(ratios) < 2
    assert median(overstated) > 3
    assert not any(param.requires_grad is False for param in model.parameters())


def test_what_is_not_linear_has_no_predicted_nats(tmp_path: Path) -> None:
    task = logistic.digits(100)
    model = logistic.fit(task, torch.arange(100), 0)
    a = Attributor(tmp_path, model, task=task).fit()
    (query,) = read_queries(task, model, ["eval:0"])
    inverse = a.inverse(0.1)
    assert inverse is not None
    assert calibrate(a.subject, query.batch, [3], inverse, -1e6) is None  # of the other sign
    assert calibrate(a.subject, query.batch, [3], inverse, 0.0) is None


def test_steps_are_measured_where_the_loss_is_almost_zero() -> None:
    """A cross-entropy of 1e-6 in float32 is a multiple of 1.2e-7, more than a step changes it."""
    model, (inputs, targets) = problem()
    with torch.no_grad():
        model[3].weight.mul_(0)
        model[3].bias.copy_(torch.tensor([14.0, 0.0, 0.0]))
    query = inputs[:1], torch.zeros(1, dtype=torch.int64)
    changes = verify(subject(model, inputs, targets * 0), query, {"proponents": [0, 1]})
    before, change = changes["before"], changes["proponents"]
    assert before is not None
    assert change is not None
    assert 1e-6 < before < 3e-6
    assert -0.02 * before < change < -0.005 * before
