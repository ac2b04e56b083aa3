"""The exact Fisher of a softmax head: in closed form what class by class gives."""

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


def test_flattened_logits_are_the_heads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    passes = count_passes(monkeypatch)
    flat = [(x, y.flatten()) for x, y in data()]
    found = fit(
        model(lambda logits: logits.flatten(0, 1)),
        flat,
        CrossEntropy(),
        fisher="exact",
        layers="head",
        dtype=torch.float64,
    )
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
    for split in ("joint", "sides"):
        for p in (-1.0, -0.5, 1.0):
            right = plain.power(p, 0.1, split=split)["head"].to_dense()
            torch.testing.assert_close(kept.power(p, 0.1, split=split)["head"].to_dense(), right)


def test_a_softmax_too_large_for_eigenvalues_has_inverses_by_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = fitted(policy="all", layers="head")
    right = kept.inverse(0.1, split="sides")["head"].to_dense()
    monkeypatch.setattr("isokron.curvature.spectra.LARGE", 3)
    kept = fitted(policy="all", layers="head")
    inverse = kept.inverse(0.1, split="sides")
    torch.testing.assert_close(inverse["head"].to_dense(), right)
    assert inverse.report(spectra=False)[0]["condition_after"] is None
    assert kept.report()[0]["condition"] is None
    with pytest.raises(ValueError, match=r"layer 'head': eigenvalues of a softmax over 7 classes"):
        kept.inverse(0.1)
    with pytest.raises(ValueError, match="singular to rounding"):
        kept.inverse(0.0, split="sides")


def test_a_vocabulary_is_never_squared() -> None:
    torch.manual_seed(0)
    head = nn.Linear(4, 50_000, bias=False)
    batch = torch.randn(3, 4), torch.randint(0, 50_000, (3,))
    kept = fit(head, [batch], CrossEntropy(), fisher="exact", policy="hybrid")
    gradient = {"weight": torch.randn(50_000, 4)}
    moved = kept.inverse(1e-4, split="sides").matvec(gradient)["weight"]
    assert moved.isfinite().all()
    assert kept.report(spectra=False)[0]["bytes"] < 2_000_000
