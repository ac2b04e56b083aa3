"""Quad: momentum made white by symmetric factors, which a quadratic step keeps positive."""

from torch import Tensor

from isokron.optim.white_kron import WhiteKron
from isokron.optim.whitening import Pull


class Quad(WhiteKron):
    """P μ̂ with P = Ql² ⊗ Qr², and Q ← MQM, M = I − plr/2L·(T − t₂I): see docs/white_kron.md.

    `momentum`: μ, which is what gets whitened. `lr_style`: "adam" divides by 5, for learning rates
    that suit AdamW; None does not. `normalize`: μ̂/(‖μ̂‖ + 10⁻⁶) is whitened, by layer.
    `block_size`: matrices are cut into blocks of it. `max_size_dense`: dimensions above it are not
    cut, and have a diagonal factor. `preconditioner_lr`: plr at first, which falls to its floor.
    `noise_scale`: of the noise that factors see; `damping`: the same relative to max|G| of a block.
    `every`: factors are updated in each step up to `warmup`, then in every so many. `apply`: the
    direction of the "new" factors, or more cheaply that of the "old" ones. `dtype`: of moment and
    factors, torch.bfloat16 halves them. `seed`: None takes fixed probes and noise, a number draws
    them. `vectors`: False leaves them to AdamW, whose `betas` these are. `shared`: docs/engine.md.
    """

    symmetric = True
    pace = 0.5

    def move_dense(self, factor: Tensor, pull: Pull, probes: Tensor) -> Tensor:
        return pull.around(factor)

    def move_diagonal(self, factor: Tensor, pull: Tensor) -> Tensor:
        return factor * pull.square()
