"""Shampoo and SOAP as one would write them from the papers: a plain loop over matrices."""

from collections import defaultdict

import torch
from torch import Tensor


class PlainShampoo:
    """L ← βL + (1-β)GGᵀ, R ← βR + (1-β)GᵀG; P = (L+εI)^(-1/4) M (R+εI)^(-1/4)."""

    def __init__(
        self, matrices: list[Tensor], lr: float, beta: float, weight_decay: float, every: int
    ) -> None:
        self.lr, self.beta, self.weight_decay = lr, beta, weight_decay
        self.matrices, self.every, self.steps = matrices, every, 0
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        for param in self.matrices:
            grad, state = param.grad, self.state[param]
            assert grad is not None
            if not state:
                rows, columns = param.shape
                state["momentum"] = torch.zeros_like(param)
                state["left"] = torch.zeros(rows, rows)
                state["right"] = torch.zeros(columns, columns)
            state["momentum"].lerp_(grad, 1 - self.beta)
            state["left"].lerp_(grad @ grad.T, 1 - self.beta)
            state["right"].lerp_(grad.T @ grad, 1 - self.beta)
            if self.steps % self.every == 0:
                state["left_root"] = self.inverse_fourth_root(state["left"])
                state["right_root"] = self.inverse_fourth_root(state["right"])
            param.mul_(1 - self.lr * self.weight_decay)
            param.sub_(self.lr * (state["left_root"] @ state["momentum"] @ state["right_root"]))
        self.steps += 1

    @staticmethod
    def inverse_fourth_root(matrix: Tensor, eps: float = 1e-6) -> Tensor:
        eigenvalues, basis = torch.linalg.eigh(matrix)
        return basis * (eigenvalues.clamp(min=0) + eps) ** -0.25 @ basis.T


class PlainSOAP:
    """Adam in the eigenbases of L and R, as in the reference: QR refresh, no update at step one."""

    def __init__(
        self, matrices: list[Tensor], lr: float, beta: float, weight_decay: float, every: int
    ) -> None:
        self.lr, self.beta, self.weight_decay = lr, beta, weight_decay
        self.matrices, self.every, self.steps = matrices, every, 0
        self.state: dict[Tensor, dict[str, Tensor]] = defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        for param in self.matrices:
            grad, state = param.grad, self.state[param]
            assert grad is not None
            if not state:
                state["momentum"] = torch.zeros_like(param)
                state["second"] = torch.zeros_like(param)
                for side, gram in (("left", grad @ grad.T), ("right", grad.T @ grad)):
                    state[side] = (1 - self.beta) * gram
                    state[side + "_basis"] = torch.linalg.eigh(gram).eigenvectors.flip(1)
                continue
            left, right = state["left_basis"], state["right_basis"]
            projected = left.T @ grad @ right
            state["momentum"].lerp_(grad, 1 - self.beta)
            state["second"].lerp_(projected.square(), 1 - self.beta)
            # momentum is kept in the original space and projected anew every step
            direction = (left.T @ state["momentum"] @ right) / (state["second"].sqrt() + 1e-8)
            bias_correction = (1 - self.beta**self.steps) ** 0.5 / (1 - self.beta**self.steps)
            param.sub_(self.lr * bias_correction * (left @ direction @ right.T))
            param.mul_(1 - self.lr * self.weight_decay)
            state["left"].lerp_(grad @ grad.T, 1 - self.beta)
            state["right"].lerp_(grad.T @ grad, 1 - self.beta)
            if self.steps % self.every == 0:
                self.refresh(state)
        self.steps += 1

    @staticmethod
    def refresh(state: dict[str, Tensor]) -> None:
        """One power iteration and QR, columns by descending Rayleigh quotient."""
        for dim, side in enumerate(("left", "right")):
            basis = state[side + "_basis"]
            product = state[side] @ basis
            order = (basis * product).sum(0).argsort(descending=True)
            state["second"] = state["second"].index_select(dim, order)
            state[side + "_basis"] = torch.linalg.qr(product[:, order]).Q
