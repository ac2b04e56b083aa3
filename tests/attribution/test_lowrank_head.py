"""A large output head by its gradients, against dense float64 matrices; weights may be tied."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron import Attributor, losses

OUTPUTS, WIDTH, EXAMPLES, LENGTH, DAMPING = 12, 6, 7, 3, 0.1
Data = list[tuple[Tensor, Tensor]]


class Words(nn.Module):
    """Tokens [N, S] → logits [N, S, 12]."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(OUTPUTS, WIDTH)
        self.body, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def hidden(self, tokens: Tensor) -> Tensor:
        return self.body(self.table(tokens)).tanh()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.hidden(tokens))


def data() -> Data:
    torch.manual_seed(1)
    tokens = torch.randint(OUTPUTS, (EXAMPLES, LENGTH + 1))
    targets = tokens[:, 1:].clone()
    targets[2, 1:] = -100
    return list(zip(tokens[:, :-1], targets, strict=True))


def attributor(folder: Path, tied: bool = False, **options: Any) -> Attributor:
    torch.manual_seed(0)
    options = {"head": "lowrank", "max_side": 8, **options}
    return Attributor(folder, Words(tied), data(), loss=losses.CrossEntropy(), **options)


def naive(model: Any, fisher: str, method: str = "kfac") -> Tensor:
    """⟨∇_q, H⁻¹∇_t⟩ of the head's weight: Kronecker factors by loops over terms.

    A tied weight has a gradient g at the embedding of token t too, g e_tᵀ transposed: a use of
    inputs √i g/|g| with gradients |g|/√i e_t, which the closed form of the exact Fisher leaves out.
    """
    model = model.double()
    tied = model.head.weight is model.table.weight
    output, inputs = (torch.zeros(n, n).double() for n in (OUTPUTS, WIDTH))
    terms, places, gradients = 0, 0, []
    eye = torch.eye(OUTPUTS).double()
    for tokens, targets in data():
        counts = (targets >= 0).nonzero()[:, 0].tolist()
        embedded = model.table(tokens).detach().requires_grad_()
        hidden = model.body(embedded).tanh()
        logits = hidden @ model.head.weight.detach().T
        loss = nn.functional.cross_entropy(logits, targets, reduction="sum", ignore_index=-100)
        (slopes,) = torch.autograd.grad(loss, embedded)
        gradient = torch.zeros(OUTPUTS, WIDTH).double()
        for n in counts:
            x, p = hidden[n].detach(), logits[n].detach().softmax(0)
            g = p - eye[targets[n]]
            output += p.diag() - p.outer(p) if fisher == "exact" else g.outer(g)
            inputs += x.outer(x)
            gradient += g.outer(x)
            terms, places = terms + 1, places + 1
            if tied:
                e, slope = eye[tokens[n]], slopes[n]
                gradient += e.outer(slope)
                if fisher != "exact":
                    length = slope.norm() / WIDTH**0.5
                    output += length**2 * e.outer(e)
                    inputs += slope.outer(slope) / length**2
                    places += 1
        gradients.append(gradient.flatten())
    output, inputs = output / terms, inputs / places
    rows = torch.stack(gradients)
    if method == "ekfac" and fisher != "exact":  # a closed-form head is K-FAC
        bases = (torch.linalg.eigh(side).eigenvectors.contiguous() for side in (output, inputs))
        rotated = rows @ torch.kron(*bases)
        values = rotated.square().sum(0) / terms
        return rotated / (values + DAMPING * values.mean()) @ rotated.T
    # √(λ)/π and π√λ with λ = 0.1 of the mean eigenvalue: √0.1 of each side's own mean
    damped = [
        side + DAMPING**0.5 * side.trace() / len(side) * torch.eye(len(side)).double()
        for side in (output, inputs)
    ]
    return rows @ torch.linalg.solve(torch.kron(*damped), rows.mT)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fisher", ["empirical", "exact"])
@pytest.mark.parametrize("method", ["kfac", "ekfac"])
def test_scores_of_a_lowrank_head_are_those_of_dense_matrices(
    method: str, fisher: str, tied: bool, tmp_path: Path
) -> None:
    a = attributor(tmp_path, tied).fit(method, fisher=fisher)
    assert a.lowrank == ["head"]
    left_out = [(item.name, item.parameters) for item in a.selection.left_out]
    assert left_out == ([] if tied else [("table", OUTPUTS * WIDTH)])
    scores = a.score(data(), by_layer=True)
    right = naive(a.subject.model, fisher, method)
    parts = scores.by_layer[:, scores.layers.index("head")].double()
    torch.testing.assert_close(parts, right, rtol=1e-4, atol=1e-4 * float(right.abs().max()))
    a.subject.model.float()
    again = attributor(tmp_path, tied)  # saved and loaded
    torch.testing.assert_close(
        again.score(data(), save=False).as_subclass(Tensor), scores.as_subclass(Tensor)
    )
    cosines = a.score(data(), unit=True, save=False)
    torch.testing.assert_close(
        cosines.diagonal().as_subclass(Tensor), torch.ones(EXAMPLES), rtol=0, atol=1e-3
    )


def test_a_head_is_left_out_and_said_by_default(tmp_path: Path) -> None:
    a = attributor(tmp_path, head="skip")
    assert "head (12 outputs)" in a.selection.summary()


def test_a_lowrank_head_is_scored_exactly_beside_a_store(tmp_path: Path) -> None:
    a = attributor(tmp_path).fit().build(dim=100)
    stored, exact = (a.score(data(), store=use, by_layer=True, save=False) for use in (True, False))
    assert stored.layers == ("body",)
    torch.testing.assert_close(
        stored.by_layer[:, 0], exact.by_layer[:, exact.layers.index("body")], rtol=1e-3, atol=1e-3
    )


def test_the_memory_plan_counts_a_heads_gradients_and_not_a_square(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20_000))
    rows = [(torch.randn(4), number) for number in range(5)]
    loss = losses.CrossEntropy()
    a = Attributor(tmp_path, model, rows, loss=loss, head="lowrank", memory=2**27)
    assert a.memory_plan("kfac").parts["statistics"] < 2**22  # 20,000² would take 1.6 GB
    a.fit().score(rows[:1])


def test_memory_is_planned_where_the_probed_example_has_no_loss(tmp_path: Path) -> None:
    rows = data()
    rows[-1][1].fill_(-100)
    torch.manual_seed(0)
    loss, options = losses.CrossEntropy(), {"head": "lowrank", "max_side": 8}
    a = Attributor(tmp_path, Words(), rows, loss=loss, **options)
    assert a.memory_plan("kfac", a.queries(rows[:1])).peak > 0
    assert a.fit().score(rows[:1]).shape == (1, EXAMPLES)


def test_more_terms_than_a_head_can_keep_are_refused_before_any_pass(tmp_path: Path) -> None:
    rows = [(torch.randn(4), 0)] * 9000
    model = nn.Sequential(nn.Linear(4, 9))
    loss = losses.CrossEntropy()
    a = Attributor(tmp_path, model, rows, loss=loss, head="lowrank", max_side=8)
    with pytest.raises(ValueError, match=r"9,000 loss terms.*8,192.*fit to fewer examples"):
        a.fit()
    assert a.folder.stage("fit") is None
    a.fit(examples=8000)
