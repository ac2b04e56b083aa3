"""The exact Fisher of a softmax head in closed form, and heads too large for a matrix."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy, Curvature, fit

METHODS = ["kfac", "ekfac", "tkfac", "shampoo"]
CLASSES = 7


class Tokens(nn.Module):
    """Sequences [N, S, 3] → logits [N, S, classes]. `after`: what becomes of the head's outputs."""

    def __init__(self, after: Any = None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, CLASSES)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.body(x).tanh())
        return logits if self.after is None else self.after(logits)


def model(after: Any = None) -> nn.Module:
    torch.manual_seed(0)
    return Tokens(after).double()


def data(masked: bool = True) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    inputs, targets = torch.randn(4, 6, 3).double(), torch.randint(0, CLASSES, (4, 6))
    if masked:
        targets[0, 3:] = -100
        targets[2] = -100
    return [(inputs[:3], targets[:3]), (inputs[3:], targets[3:])]


def fitted(after: Any = None, method: str = "kfac", **options: Any) -> Curvature:
    options = {"fisher": "exact", "dtype": torch.float64, **options}
    return fit(model(after), data(), CrossEntropy(), method, **options)


def one_more(logits: Tensor) -> Tensor:
    return logits * 1.0  # no layer's outputs any more, so that classes are gone through


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_it_is_what_class_by_class_gives(method: str, sharing: str) -> None:
    closed, slow = (fitted(after, method, sharing=sharing) for after in (None, one_more))
    for name in slow:
        torch.testing.assert_close(closed[name].to_dense(), slow[name].to_dense())


def test_views_of_logits_are_the_heads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    views = model(lambda logits: logits.flatten(0, 1).view(logits.shape))
    found = fit(views, data(), CrossEntropy(), fisher="exact", layers="head", dtype=torch.float64)
    assert not passes
    torch.testing.assert_close(found["head"].to_dense(), fitted()["head"].to_dense())


def count_passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    passes: list[int] = []
    plain = Tensor.backward

    def backward(self: Tensor, *args: Any, **options: Any) -> None:
        passes.append(1)
        plain(self, *args, **options)

    monkeypatch.setattr(Tensor, "backward", backward)
    return passes


def test_a_head_alone_needs_no_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    alone = fitted(layers="head")
    assert not passes
    torch.testing.assert_close(alone["head"].to_dense(), fitted()["head"].to_dense())


@pytest.mark.parametrize(
    ("after", "apart"),
    [
        (
            lambda logits: logits.mul_(2.0),
            lambda logits: logits * 2.0,
        ),  # its memory, not its values
        (lambda logits: logits[..., :4], lambda logits: logits[..., :4] * 1.0),
        (
            lambda logits: logits.softmax(-1),
            lambda logits: logits.exp().div(logits.exp().sum(-1, keepdim=True)),
        ),
    ],
)
def test_logits_that_are_not_the_heads_outputs_are_gone_through(after: Any, apart: Any) -> None:
    torch.manual_seed(1)
    batch = torch.randn(4, 3).double(), torch.randint(0, 4, (4,))
    found, right = (
        fit(model(each), [batch], CrossEntropy(), fisher="exact", dtype=torch.float64)
        for each in (after, apart)
    )
    torch.testing.assert_close(found["head"].to_dense(), right["head"].to_dense())


@pytest.mark.parametrize("method", ["kfac", "tkfac", "shampoo"])
@pytest.mark.parametrize("policy", ["all", "auto"])
def test_probabilities_may_stand_for_a_covariance(method: str, policy: str) -> None:
    options = {"rho": 9.0} if policy == "auto" else {}
    kept = fitted(None, method, policy=policy, layers="head", **options)
    plain = fitted(None, method, layers="head")
    assert kept.report()[0]["columns"] == 15
    torch.testing.assert_close(kept["head"].to_dense(), plain["head"].to_dense())
    for right, found in (
        (plain.damped_inverse(0.1), kept.damped_inverse(0.1)),
        (plain.inverse(0.1), kept.inverse(0.1)),
        (plain.power(-0.5, 0.1), kept.power(-0.5, 0.1)),
    ):
        torch.testing.assert_close(found["head"].to_dense(), right["head"].to_dense())


def test_a_softmax_too_large_for_eigenvalues_is_inverted_by_woodbury(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = fitted(layers="head").damped_inverse(0.1)["head"].to_dense()
    monkeypatch.setattr("isokron.curvature.curvature.LARGE", 3)
    kept = fitted(policy="all", layers="head")
    torch.testing.assert_close(kept.damped_inverse(0.1)["head"].to_dense(), right)
    assert kept.report()[0]["condition"] is None
    with pytest.raises(ValueError, match=r"layer 'head': eigenvalues of a low-rank side of 7 outp"):
        kept.inverse(0.1)
    with pytest.raises(ValueError, match="is singular"):
        kept.damped_inverse(0.0)


@pytest.mark.parametrize("fisher", ["exact", "empirical"])
def test_a_head_of_a_language_model_never_takes_a_matrix_of_its_vocabulary(fisher: str) -> None:
    """49,152² numbers would be 9.7 GB in float32, and the head's weight is 113 MB."""
    script = f"""
import resource, torch
from torch import nn
from isokron.curvature import CrossEntropy, fit
torch.manual_seed(0)
head = nn.Linear(576, 49152, bias=False)
batches = [(torch.randn(32, 576), torch.randint(49152, (32,))) for _ in range(4)]
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
curvature = fit(head, batches, CrossEntropy(), fisher={fisher!r}, policy="all")
moved = curvature.damped_inverse(0.1).matvec({{"weight": torch.randn(49152, 576)}})
assert moved["weight"].isfinite().all() and moved["weight"].any()
assert curvature.report(spectra=False)[0]["columns"] == 128
if {fisher!r} == "empirical":  # eigenvalues of 128 columns, also with a bound on the condition
    assert curvature.damped_inverse(0.1, max_condition=1e4).notes[""]["clipped"] >= 0
    assert curvature.report()[0]["effective_rank"] > 1
print(peak() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.5e9
