"""Quad and Skew against their peers: time of a step, time to compile it, bytes of state.

    python benchmarks/white_kron.py [--only jax|torch] [--case a,b] [--method quad] [--rounds 15]

jax: against eformer's, with its default settings (state and work in bfloat16) and in float32. A
step is jitted, donates parameters and state, and changes the parameters. Contestants take turns in
compiling and in stepping; times are medians. With every=10 a turn is ten steps, one of which
updates the factors. Ratios are to eformer with its default settings.
torch: against the PSGD of heavyball and of kron-torch, updating their factors as often. Both have
one factor a dimension however long it is; so has "whole", otherwise blocks are of 256. All tensors
get the method, embeddings too.
A section whose peer is not installed is left out with a message.
"""

import argparse
import functools
import importlib.metadata
import itertools
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from records import recorded
from timing import interleaved

from isokron.race.race import machine

Shapes = list[tuple[int, ...]]


def transformer(width: int, layers: int, vocabulary: int) -> Shapes:
    """Matrices, biases and norms of one that is four times as wide inside."""
    norm: Shapes = [(width,), (width,)]
    attention: Shapes = [(width, 3 * width), (3 * width,), (width, width), (width,)]
    perceptron: Shapes = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
    return [(vocabulary, width), *(2 * norm + attention + perceptron) * layers, *norm]


MIXED: Shapes = [*[(256, 256)] * 8, *[(256, 512)] * 4, *[(512, 256)] * 4]
SMALL: Shapes = [(64, 8)] * 16
CASES: dict[str, tuple[str, Shapes]] = {
    "a": ("multiples of 256", MIXED),
    "b": ("transformer of width 192", transformer(192, 3, 1280)),
    "c": ("16 of 64×8", SMALL),
    "d": ("transformer of width 320", transformer(320, 1, 1024)),
}


class Contestant:
    """A compiled optax transformation with its parameters and gradients."""

    def __init__(self, optimizer: Any, shapes: Shapes, steps: int) -> None:
        import jax
        import optax

        keys = jax.random.split(jax.random.key(0), 2 * len(shapes))
        draws = [jax.random.normal(key, shape) for key, shape in zip(keys, 2 * shapes, strict=True)]
        self.params, grads = draws[: len(shapes)], draws[len(shapes) :]
        self.state = optimizer.init(self.params)
        self.steps = steps

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(self.params, self.state, grads)
        self.compiled = lowered.compile()
        self.compile = time.perf_counter() - start
        self.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))
        self.grads, self.wait = grads, jax.block_until_ready

    def turn(self) -> None:
        for _ in range(self.steps):
            self.params, self.state = self.compiled(self.params, self.state, self.grads)
        self.wait(self.params)


def jax_section(cases: list[str], methods: list[str], rounds: int, compilations: int) -> None:
    try:
        import jax
        from eformer.optimizers._tx import white_kron as eformer  # type: ignore[import-not-found]

        import isokron.jax
    except ImportError as error:
        print(f"jax is left out: {error}")
        return
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "eformer")]
    print(f"{machine()}, {', '.join(versions)}, {jax.default_backend()}")
    for case in cases:
        name, shapes = CASES[case]
        for method in methods:
            peer, ours = getattr(eformer, method), getattr(isokron.jax, method)
            makers: dict[str, tuple[Callable[[], Any], int]] = {
                "eformer": (peer, 1),
                "eformer, float32": (functools.partial(peer, dtype="float32"), 1),
                "isokron": (ours, 1),
                'isokron, apply="old"': (functools.partial(ours, apply="old"), 1),
                "isokron, every=10": (functools.partial(ours, every=10), 10),
            }
            contestants: dict[str, Contestant] = {}
            compiling: dict[str, list[float]] = {key: [] for key in makers}
            for _ in range(compilations):
                for key, (make, steps) in makers.items():
                    jax.clear_caches()
                    contestants[key] = Contestant(make(), shapes, steps)
                    compiling[key].append(contestants[key].compile)
            seconds = {key: statistics.median(times) for key, times in compiling.items()}
            turns = {key: contestant.turn for key, contestant in contestants.items()}
            took = interleaved(turns, rounds, 3)
            print(f"\n{method}, {name}, {sum(map(math.prod, shapes)) / 1e6:.2f}M parameters")
            print(
                f"{'':22}{'ms':>9}{'ratio':>7}{'compile s':>11}{'ratio':>7}{'MiB':>9}{'ratio':>7}"
            )
            first = contestants["eformer"]
            for key, contestant in contestants.items():
                step = took[key] / contestant.steps
                print(
                    f"{key:22}{1e3 * step:9.2f}{step / took['eformer']:7.2f}"
                    f"{seconds[key]:11.2f}{seconds[key] / seconds['eformer']:7.2f}"
                    f"{contestant.bytes / 2**20:9.2f}{contestant.bytes / first.bytes:7.2f}"
                )


def torch_section(cases: list[str], methods: list[str], rounds: int, compilations: int) -> None:
    try:
        import heavyball  # type: ignore[import-not-found]
        import kron_torch  # type: ignore[import-not-found]
        import torch
        from timing import conditions
    except ImportError as error:
        print(f"torch is left out: {error}")
        return
    import isokron

    heavyball.utils.compile_mode = "default"  # without trying out kernels, which takes minutes
    torch._dynamo.config.recompile_limit = 64  # for kron-torch, which compiles shape by shape
    peers = {
        "heavyball": lambda params, every: heavyball.PSGDKron(
            params, preconditioner_update_probability=1 / every
        ),
        "kron-torch": lambda params, every: kron_torch.Kron(
            params, preconditioner_update_probability=1 / every
        ),
    }
    versions = [f"{name} {importlib.metadata.version(name)}" for name in peers]
    print(f"{conditions()}, {', '.join(versions)}")

    def turn(optimizer: torch.optim.Optimizer, grads: list[torch.Tensor], steps: int) -> None:
        for _ in range(steps):
            for param, grad in zip(optimizer.param_groups[0]["params"], grads, strict=True):
                param.grad = grad.clone()  # the peers write into it
            optimizer.step()

    for case, every in itertools.product(cases, (1, 10)):
        name, shapes = CASES[case]
        makers: dict[str, Callable[..., torch.optim.Optimizer]] = dict(peers)
        for method in methods:
            make_ours = getattr(isokron, method.title())

            def ours(params: list[Any], make: Any = make_ours, **settings: Any) -> Any:
                # the peers precondition every tensor, whatever its shape looks like
                return make([{"params": params, "route": "method"}], **settings)

            makers[method] = ours
            makers[f'{method}, apply="old"'] = functools.partial(ours, apply="old")
            makers[f"{method}, whole"] = functools.partial(ours, block_size=8192)
        generator = torch.Generator().manual_seed(0)
        grads = [1e-3 * torch.randn(shape, generator=generator) for shape in shapes]
        contestants = {}
        for key, make in makers.items():
            weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
            contestants[key] = functools.partial(turn, make(weights, every=every), grads, every)
        took = interleaved(contestants, rounds, 2)
        print(f"\n{name}, {sum(map(math.prod, shapes)) / 1e6:.2f}M parameters, every={every}")
        print(f"{'':22}{'ms':>9}{'to heavyball':>14}{'to kron-torch':>15}")
        for key, seconds in took.items():
            ratios = [seconds / took[peer] for peer in peers]
            print(f"{key:22}{1e3 * seconds / every:9.2f}{ratios[0]:14.2f}{ratios[1]:15.2f}")


SECTIONS: dict[str, Callable[[list[str], list[str], int, int], None]] = {
    "jax": jax_section,
    "torch": torch_section,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SECTIONS, help="one section (default: all)")
    parser.add_argument("--case", default="a,b,c,d", help="sets of shapes (default: all)")
    parser.add_argument("--method", default="quad,skew")
    parser.add_argument("--rounds", type=int, default=15, help="timed steps of each contestant")
    parser.add_argument("--compilations", type=int, default=3, help="of each contestant in jax")
    arguments = parser.parse_args()
    with recorded("white_kron"):
        for name, section in SECTIONS.items():
            if arguments.only in (None, name):
                section(
                    arguments.case.split(","),
                    arguments.method.split(","),
                    arguments.rounds,
                    arguments.compilations,
                )


if __name__ == "__main__":
    main()
