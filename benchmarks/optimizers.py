"""Step time and state memory of Shampoo and SOAP: isokron against its peers, at equal settings.

    python benchmarks/optimizers.py [--case b,c] [--every 1,10] [--rounds 3] [--only NAME,NAME]

All precondition both sides of every matrix whole, in float32, with momentum, decoupled weight
decay and no grafting; vectors get Adam. A step's time is the mean over a refresh cycle (`every`
steps), the contestants taking turns cycle by cycle, and the median over cycles. "between" is the
median step without a refresh: each cycle's slowest step is left out. "of GEMM" compares it with
the products the method cannot do without, at the speed of the fastest product measured here.
"""

import argparse
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from records import recorded
from timing import conditions, interleaved
from torch import Tensor

from naive import PlainShampoo, PlainSOAP

CASES: dict[str, list[tuple[int, ...]]] = {
    "b": [(512, 512)] * 12 + [(512, 2048)] * 12 + [(512,)] * 24,
    "c": [(512, 512)] * 8,
}
LR, BETA, WEIGHT_DECAY, MAX_DIM = 1e-3, 0.95, 0.01, 2048
BETAS = (BETA, BETA)
HEAVYBALL_COMPILE: str | None = "default"
# m×n products, in units of mn(m+n) FLOPs: G into the basis and back 4, Gram matrices by half 1;
# Shampoo applies its two roots once: 2, and the Gram matrices
UNITS = {"SOAP": 5, "Shampoo": 3}


class Steps(Protocol):
    """What a contestant needs to have."""

    state: Any

    def step(self) -> object: ...


Builder = Callable[[list[Tensor], int], list[Steps]]


def adamw(params: list[Tensor]) -> Steps:
    return torch.optim.AdamW(params, LR, BETAS, weight_decay=WEIGHT_DECAY, fused=True)


def by_rank(optimizer: Callable[[list[Tensor], int], Steps]) -> Builder:
    """Matrices to an optimizer, vectors to AdamW."""

    def build(params: list[Tensor], every: int) -> list[Steps]:
        vectors = [param for param in params if param.ndim < 2]
        matrices = [param for param in params if param.ndim == 2]
        return [optimizer(matrices, every), *([adamw(vectors)] if vectors else [])]

    return build


def plain(
    optimizer: type[PlainShampoo] | type[PlainSOAP],
) -> Callable[[list[Tensor], int], Steps]:
    return lambda matrices, every: optimizer(matrices, LR, BETA, WEIGHT_DECAY, every)


def ours(name: str) -> Builder:
    """isokron.SOAP or Shampoo; all blocks refresh in the same step, as those of the peers do."""

    def build(params: list[Tensor], every: int) -> list[Steps]:
        settings = {"weight_decay": WEIGHT_DECAY, "graft": None, "refresh": "together"}
        optimizer = getattr(package("isokron"), name)
        return [optimizer(params, LR, betas=BETAS, every=every, max_dim=MAX_DIM, **settings)]

    return build


def heavyball(name: str) -> Builder:
    """heavyball.SOAP or KLShampoo: batched over equal shapes, parts of the step compiled."""

    def build(params: list[Tensor], every: int) -> list[Steps]:
        heavyball = package("heavyball")
        heavyball.utils.compile_mode = HEAVYBALL_COMPILE
        optimizer = getattr(heavyball, name)(
            params,
            LR,
            BETAS,
            shampoo_beta=BETA,
            weight_decay=WEIGHT_DECAY,
            # it adds up 1/frequency until that passes a whole number: rounding must not delay it
            precondition_frequency=every / (1 + 1e-9),
            max_precond_dim=MAX_DIM,
            merge_dims=False,
        )
        return [optimizer]

    return build


def pytorch_optimizer_soap(params: list[Tensor], every: int) -> list[Steps]:
    settings = {"precondition_frequency": every, "max_precondition_dim": MAX_DIM}
    soap = package("pytorch_optimizer").SOAP
    return [soap(params, LR, BETAS, weight_decay=WEIGHT_DECAY, **settings)]


def pytorch_optimizer_shampoo(matrices: list[Tensor], every: int) -> Steps:
    """Sums GGᵀ up without decay, and would give every vector a matrix of its own: hence by_rank.

    Its momentum mixes the last preconditioned update into the gradient and so into the statistics:
    with stale roots that diverges within a cycle, hence off. Its buffer is kept even so.
    """
    return package("pytorch_optimizer").Shampoo(
        matrices,
        LR,
        momentum=0.0,
        weight_decay=WEIGHT_DECAY,
        weight_decouple=True,
        preconditioning_compute_steps=every,
    )


def pytorch_optimizer_scalable_shampoo(params: list[Tensor], every: int) -> list[Steps]:
    """Its default, a coupled Newton iteration, takes a CPU twice as long as use_svd.

    A momentum for grafting is kept even without it.
    """
    scalable = package("pytorch_optimizer").ScalableShampoo(
        params,
        LR,
        BETAS,
        moving_average_for_momentum=True,
        weight_decay=WEIGHT_DECAY,
        decoupled_weight_decay=True,
        start_preconditioning_step=1,
        preconditioning_compute_steps=every,
        block_size=MAX_DIM,
        shape_interpretation=False,
        graft_type=0,
        nesterov=False,
        use_svd=True,
    )
    return [scalable]


CONTESTANTS: dict[str, dict[str, Builder]] = {
    "SOAP": {
        "isokron SOAP": ours("SOAP"),
        "heavyball SOAP": heavyball("SOAP"),
        "pytorch-optimizer SOAP": pytorch_optimizer_soap,
        "plain loop SOAP": by_rank(plain(PlainSOAP)),
    },
    "Shampoo": {
        "isokron Shampoo": ours("Shampoo"),
        "heavyball KLShampoo": heavyball("KLShampoo"),  # the only Shampoo it has
        "pytorch-optimizer Shampoo": by_rank(pytorch_optimizer_shampoo),
        "pytorch-optimizer ScalableShampoo": pytorch_optimizer_scalable_shampoo,
        "plain loop Shampoo": by_rank(plain(PlainShampoo)),
    },
}
YARDSTICK = "torch AdamW fused"


def package(name: str) -> ModuleType:
    """Imported when first asked for, so that a missing peer costs only its own rows."""
    return importlib.import_module(name)


class Contestant:
    """Optimizers on parameters of their own, fed with the same gradients in turn as all others."""

    def __init__(self, build: Builder, gradients: list[list[Tensor]], every: int) -> None:
        self.params = [torch.randn_like(grad).requires_grad_() for grad in gradients[0]]
        self.optimizers = build(self.params, every)
        self.gradients, self.turn = gradients, 0
        self.cycles: list[list[float]] = []  # seconds of each step

    def step(self) -> float:
        """Seconds of one step. The gradient is a fresh copy: some peers overwrite or drop it."""
        for param, grad in zip(
            self.params, self.gradients[self.turn % len(self.gradients)], strict=True
        ):
            param.grad = grad.clone()
        self.turn += 1
        start = time.perf_counter()
        for optimizer in self.optimizers:
            optimizer.step()
        return time.perf_counter() - start

    def per_step(self) -> float:
        return statistics.median(statistics.mean(cycle) for cycle in self.cycles)

    def between(self) -> float | None:
        """Median step without a refresh, or None where every step has one."""
        steps = [seconds for cycle in self.cycles for seconds in sorted(cycle)[:-1]]
        return statistics.median(steps) if steps else None

    def state_bytes(self) -> int:
        """Bytes of the storages that the state reaches, the parameters' own left out."""
        held: dict[int, int] = {}
        for optimizer in self.optimizers:
            storages(list(optimizer.state.values()), held, set())
        own = {param.untyped_storage().data_ptr() for param in self.params}
        return sum(size for pointer, size in held.items() if pointer not in own)


def storages(thing: object, held: dict[int, int], seen: set[int]) -> None:
    """Add {address: bytes} of every tensor in nested containers and in objects' attributes."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        held[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    inside: Iterable[object] = ()
    if isinstance(thing, dict):
        inside = thing.values()
    elif isinstance(thing, list | tuple | set):
        inside = thing
    elif not isinstance(thing, type | ModuleType) and hasattr(thing, "__dict__"):
        inside = vars(thing).values()
    for part in inside:
        storages(part, held, seen)


def sample_gradients(shapes: Sequence[tuple[int, ...]], count: int) -> list[list[Tensor]]:
    """Noise with scales falling tenfold along every dimension, so that the spectra are not flat."""

    def sample(shape: tuple[int, ...]) -> Tensor:
        grad = 0.01 * torch.randn(shape)
        for dim, size in enumerate(shape):
            scales = torch.logspace(0, -1, size)
            grad *= scales.unflatten(0, (size,) + (1,) * (len(shape) - 1 - dim))
        return grad

    return [[sample(shape) for shape in shapes] for _ in range(count)]


def peak_gemm() -> float:
    """FLOPs a second of the faster float32 product: one of 2048³, or 16 of 512³ in a batch."""
    large, small = torch.randn(2048, 2048), torch.randn(16, 512, 512)
    took = interleaved({"large": lambda: large @ large, "small": lambda: small @ small}, 5, 1)
    return max(2 * 2048**3 / took["large"], 16 * 2 * 512**3 / took["small"])


def line_up(
    method: str, gradients: list[list[Tensor]], every: int, only: list[str]
) -> dict[str, Contestant]:
    """The contestants that can be built here; each that cannot is named with its reason."""
    ready: dict[str, Contestant] = {}
    builders: dict[str, Builder] = {YARDSTICK: lambda params, every: [adamw(params)]}
    for name, build in (builders | CONTESTANTS[method]).items():
        if only and not any(word.lower() in name.lower() for word in only):
            continue
        try:
            ready[name] = Contestant(build, gradients, every)
        except (ImportError, AttributeError) as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    return ready


def race(contestants: dict[str, Contestant], every: int, cycles: int) -> float:
    """Warm up over two refreshes (the first is an eigh), then time whole cycles in turn.

    Gives the best of the products timed in the same turns, in FLOPs a second.
    """
    for name, contestant in contestants.items():
        print(f"  warming up {name}", file=sys.stderr)
        for _ in range(every + 2):
            contestant.step()
    peak = 0.0
    for cycle in range(cycles):
        peak = max(peak, peak_gemm())
        for name, contestant in contestants.items():
            contestant.cycles.append([contestant.step() for _ in range(every)])
            mean = statistics.mean(contestant.cycles[-1])
            print(f"  cycle {cycle + 1}/{cycles} {name}: {1e3 * mean:.1f} ms", file=sys.stderr)
    return peak


def report(contestants: dict[str, Contestant], flops: float, peak: float) -> None:
    """flops: what the method must do between refreshes."""
    peers = [
        contestant.per_step()
        for name, contestant in contestants.items()
        if name != YARDSTICK and not name.startswith("isokron")
    ]
    print(f"{'':34}{'ms/step':>9}{'ratio':>7}{'between':>9}{'of GEMM':>9}{'state MiB':>11}")
    for name, contestant in contestants.items():
        per_step, between = contestant.per_step(), contestant.between()
        ratio = f"{per_step / min(peers):.2f}" if peers else "–"
        plain = f"{1e3 * between:.1f}" if between else "–"
        ours = name.startswith("isokron")
        fraction = f"{flops / peak / between:.0%}" if between and ours else "–"
        if not all(param.isfinite().all() for param in contestant.params):
            print(f"{name} diverged: its figures mean little", file=sys.stderr)
        mebibytes = contestant.state_bytes() / 2**20
        print(f"{name:34}{1e3 * per_step:9.1f}{ratio:>7}{plain:>9}{fraction:>9}{mebibytes:11.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", default="b,c", help="b (15.7M parameters, 48 tensors), c (8)")
    parser.add_argument("--every", default="1,10", help="steps between refreshes")
    parser.add_argument("--method", default="SOAP,Shampoo")
    parser.add_argument("--only", default="", help="contestants whose name has one of these words")
    parser.add_argument("--rounds", type=int, default=3, help="timed cycles; twice that at every=1")
    args = parser.parse_args()
    only = [word for word in args.only.split(",") if word]
    with recorded("optimizers"):
        print(conditions())
        for case in args.case.split(","):
            shapes = CASES[case]
            matrices = [shape for shape in shapes if len(shape) == 2]
            unit = sum(m * n * (m + n) for m, n in matrices)
            for every in map(int, args.every.split(",")):
                for method in args.method.split(","):
                    torch.manual_seed(0)
                    contestants = line_up(method, sample_gradients(shapes, 5), every, only)
                    peak = race(contestants, every, args.rounds if every > 1 else 2 * args.rounds)
                    flops = UNITS[method] * unit
                    print(
                        f"\n{method}, case {case}, every={every}: {flops / 1e9:.1f} GFLOP a step, "
                        f"{1e3 * flops / peak:.1f} ms at {peak / 1e9:.0f} GFLOP/s"
                    )
                    report(contestants, flops, peak)


if __name__ == "__main__":
    main()
