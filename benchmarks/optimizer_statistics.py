"""What `optimizer.statistics()` costs when it is called after every step.

    python benchmarks/optimizer_statistics.py [--layers 4] [--steps 40] [--optimizers adamw,soap]

Two equal optimizers take turns on the shapes of a transformer with random gradients, and one of
them is asked for its statistics after every step. Both do the same work in the same step, so that
the median over steps of the ratio of their processor times is what recording costs. What the calls
cost is their mean time, because every tenth looks at the factors too, over that of a plain step.
The error of AdamW's sampled update is measured beside it. Results: docs/benchmarks/statistics.json.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from records import Records
from step_135m import WIDTH, Layer
from timing import conditions
from torch import Tensor, nn

from isokron.optimizers_by_name import resolve, split_specs

OPTIMIZERS = "adamw,muon,shampoo,soap,katie,quad"
VOCABULARY = 8192
UNTIMED = 10  # the first steps allocate the state


def contestant(spec: str, layers: int) -> tuple[list[nn.Parameter], Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *(Layer() for _ in range(layers)))
    return list(model.parameters()), resolve(spec).build(model, 1e-3)


def gradients(params: list[nn.Parameter], number: int) -> list[Tensor]:
    """Noise whose rows differ in size."""
    generator = torch.Generator().manual_seed(number)
    sizes = [
        torch.linspace(0.1, 1, len(param)).view(-1, *[1] * (param.ndim - 1)) for param in params
    ]
    return [
        1e-3 * s * torch.randn(p.shape, generator=generator)
        for s, p in zip(sizes, params, strict=True)
    ]


def seconds_of(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def exact_rms(optimizer: Any) -> float:
    """Of AdamW's update over all elements, in float64."""
    squares, elements = 0.0, 0
    for group in optimizer.param_groups:
        beta1, beta2 = group["betas"]
        for state in map(optimizer.state.get, group["params"]):
            count = float(state["step"])
            second = (state["exp_avg_sq"].double() / (1 - beta2**count)).sqrt() + group["eps"]
            update = state["exp_avg"].double() / (1 - beta1**count) / second
            squares, elements = squares + float(update.square().sum()), elements + update.numel()
    return float((squares / elements) ** 0.5)


def measure(spec: str, layers: int, steps: int) -> dict[str, float]:
    contestants = [(*contestant(spec, layers), asked) for asked in (False, True)]
    drawn = [gradients(contestants[0][0], number) for number in range(3)]
    steps_by, calls = {False: list[float](), True: list[float]()}, []
    for step in range(UNTIMED + steps):
        for params, optimizer, asked in contestants[:: 1 if step % 2 else -1]:
            for param, grad in zip(params, drawn[step % 3], strict=True):
                param.grad = grad
            steps_by[asked].append(seconds_of(optimizer.step))
            if asked:
                calls.append(seconds_of(optimizer.statistics))
    plain, recorded = (steps_by[asked][UNTIMED:] for asked in (False, True))
    result = {
        "recording": statistics.median(map(operator.truediv, recorded, plain)) - 1,
        "calls": statistics.fmean(calls[UNTIMED:]) / statistics.fmean(plain),
        "step_seconds": statistics.fmean(plain),
    }
    if spec == "adamw":
        optimizer = contestants[1][1]
        sampled = optimizer.statistics()
        sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
        squares = sum(n * s["update_rms"] ** 2 for n, s in zip(sizes, sampled, strict=True))
        result["sampled_over_exact_rms"] = (squares / sum(sizes)) ** 0.5 / exact_rms(optimizer)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--optimizers", default=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = Records("statistics")
    print(conditions())
    for spec in split_specs(args.optimizers):
        key = {"optimizer": spec, "layers": args.layers, "steps": args.steps}
        records.runs = [run for run in records.runs if run["optimizer"] != spec]
        run = {**key, **measure(spec, args.layers, args.steps)}
        records.runs.append(run)
        records.save()
        print(f"{spec}: recording {run['recording']:.1%}, calls {run['calls']:.1%} of a step of "
              f"{1e3 * run['step_seconds']:.0f} ms", flush=True)  # fmt: skip
        if "sampled_over_exact_rms" in run:
            print(f"sampled over exact RMS: {run['sampled_over_exact_rms']:.4f}")


if __name__ == "__main__":
    main()
