"""What `optimizer.statistics()` costs when it is called after every step, and what it says.

    python benchmarks/optimizer_statistics.py [--layers 2] [--steps 20] [--optimizers adamw,soap]
    python benchmarks/optimizer_statistics.py --values

Two equal optimizers take turns on the shapes of a transformer with random gradients, and one of
them is asked for its statistics after every step. `recording` and `calls` are the processor times
of what is recorded in a step and of the call after it, as shares of the mean plain step; `ratio` is
the median over steps of the ratio of both optimizers' times of a step, which is noisy on a busy
machine. The error of AdamW's sampled update is measured beside them. With --values: the numbers
after training on digits, at a usual learning rate and at a hundred times that. Results are in
docs/benchmarks/optimizer_statistics.json.
"""

from __future__ import annotations

import argparse
import operator
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from records import Records
from step_135m import WIDTH, Layer
from timing import conditions
from torch import Tensor, nn

from isokron.optim.statistics import Recorder
from isokron.optimizers_by_name import resolve, split_specs
from isokron.race.train import train
from isokron.tasks import load

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


@contextmanager
def recording_timed(seconds: list[float]) -> Iterator[None]:
    """Append the time of everything that a step records."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            start = time.process_time()
            value = function(*arguments)
            seconds.append(time.process_time() - start)
            return value

        return call

    record = Recorder.record
    Recorder.record = timed(record)  # type: ignore[method-assign]
    try:
        yield
    finally:
        Recorder.record = record  # type: ignore[method-assign]


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
    steps_by = {False: list[float](), True: list[float]()}
    calls, recordings = list[float](), list[float]()
    with recording_timed(recordings):
        for step in range(UNTIMED + steps):
            if step == UNTIMED:
                recordings.clear()
            for params, optimizer, asked in contestants[:: 1 if step % 2 else -1]:
                for param, grad in zip(params, drawn[step % 3], strict=True):
                    param.grad = grad
                steps_by[asked].append(seconds_of(optimizer.step))
                if asked:
                    calls.append(seconds_of(optimizer.statistics))
    plain, recorded = (steps_by[asked][UNTIMED:] for asked in (False, True))
    result = {
        "recording": sum(recordings) / sum(plain),
        "calls": sum(calls[UNTIMED:]) / sum(plain),
        "ratio": statistics.median(map(operator.truediv, recorded, plain)),
        "step_seconds": statistics.fmean(plain),
    }
    if spec == "adamw":
        optimizer = contestants[1][1]
        sampled = optimizer.statistics()
        sizes = [sum(p.numel() for p in group["params"]) for group in optimizer.param_groups]
        squares = sum(n * s["update_rms"] ** 2 for n, s in zip(sizes, sampled, strict=True))
        result["sampled_over_exact_rms"] = (squares / sum(sizes)) ** 0.5 / exact_rms(optimizer)
    return result


def values(records: Records, specs: list[str]) -> None:
    """Statistics after 200 steps on digits, of the group with the most state."""
    task = load("digits")
    for spec in specs:
        entrant = resolve(spec)
        usual = 3e-3 if spec == "adamw" else entrant.lr
        for lr in (usual, 100 * usual):
            run = train(task, entrant, lr, seed=0, steps=200)
            groups = run.statistics or [{"state_bytes": 0}]
            numbers = max(groups, key=lambda group: group["state_bytes"])
            loss = run.final if run.status == "finished" else None
            key = {"values": spec, "lr": lr}
            records.runs = [run for run in records.runs if not key.items() <= run.items()]
            records.runs.append({**key, "loss": loss, **numbers})
            records.save()


def tables() -> list[str]:
    """The cost of statistics, and their values after training."""
    runs = Records("optimizer_statistics").runs
    lines = ["| optimizer | recording | call | sum | plain step | ratio |", "|---" * 6 + "|"]
    for run in (run for run in runs if "optimizer" in run):
        shares = [100 * share for share in (run["recording"], run["calls"])]
        cells = [f"{share:.1f}%" for share in (*shares, sum(shares))]
        step = f"{1e3 * run['step_seconds']:.0f} ms | {run['ratio']:.3f}"
        lines.append(f"| {run['optimizer']} | {' | '.join(cells)} | {step} |")
        if "sampled_over_exact_rms" in run:
            lines.append(f"sampled over exact RMS: {run['sampled_over_exact_rms']:.3f}")
    names = ("lr", "loss", "update_rms", "adam_cosine", "condition_median", "condition_max")
    lines += ["", f"| optimizer | {' | '.join(names)} |", "|---" * 7 + "|"]
    for run in (run for run in runs if "values" in run):
        numbers = [run.get(name) for name in names]
        cells = ["–" if x is None else f"{x:,.0f}" if x > 1000 else f"{x:.3g}" for x in numbers]
        lines.append(f"| {run['values']} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--optimizers", default=OPTIMIZERS)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--values", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    records = Records("optimizer_statistics")
    print(conditions())
    specs = split_specs(args.optimizers)
    if args.values:
        values(records, specs)
    for spec in specs if not args.values else ():
        key = {"optimizer": spec, "layers": args.layers, "steps": args.steps}
        records.runs = [run for run in records.runs if run.get("optimizer") != spec]
        run = {**key, **measure(spec, args.layers, args.steps)}
        records.runs.append(run)
        records.save()
    print("\n".join(tables()))


if __name__ == "__main__":
    main()
