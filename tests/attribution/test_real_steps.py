"""A real step on examples changes a query's loss as autograd says, and the model not at all."""

import torch
from torch import Tensor, nn

from isokron.attribution.verify import verify
from isokron.curvature.losses import CrossEntropy


def problem() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    return model.train(), (torch.randn(20, 4), torch.randint(0, 3, (20,)))


def test_changes_are_those_of_a_step_against_the_gradient() -> None:
    model, (inputs, targets) = problem()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    query = inputs[:1], targets[:1]
    changes = verify(
        model,
        CrossEntropy(),
        query,
        lambda numbers: (inputs[list(numbers)], targets[list(numbers)]),
        {"proponents": [0], "random": [5, 6], "opponents": []},
        share=1e-3,
    )
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
    changes = verify(
        model,
        CrossEntropy(),
        (half[:1], targets[:1]),
        lambda numbers: (half[list(numbers)], targets[list(numbers)]),
        {"proponents": [0]},
    )
    assert changes["proponents"] is not None
    assert changes["proponents"] < 0
