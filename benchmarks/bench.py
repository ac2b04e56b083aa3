"""Run the benchmarks: all of them, or a small version of each.

    python benchmarks/bench.py [--only kernels,ablations]      refreshes docs/benchmarks/*.json
    python benchmarks/bench.py --quick                         writes to build/benchmarks instead

Scripts run one after another, from short to long; together they take days, with --quick minutes. A
script that fails is named at the end with the packages or data that it needs. With --quick, figures
are printed beside those of the recorded row. Small versions train shorter and time less often:
compare ratios, not losses.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import figures

HERE = Path(__file__).parent
SCRATCH = HERE.parent / "build" / "benchmarks"


class Script(NamedTuple):
    """How a script is called: arguments of the recorded version, and of the small one."""

    name: str
    full: tuple[str, ...] = ("",)
    quick: str | None = None  # None: has no version of seconds, or needs what `needs` says
    needs: str = ""


SCRIPTS = (
    Script("kernels", ("--rounds 100",), "--only adamw --rounds 10"),
    Script("step_135m", ("--layers 6",), "--layers 1 --optimizers adamw,soap"),
    Script("sharded", ("--ranks 4",), "--ranks 2 --steps 5"),
    Script("full_state", ("", "--to-rank 0"), "--ranks 2"),
    Script("distributed", ("--layout ddp", "--layout fsdp"), "--ranks 1,2 --only soap --cycles 1"),
    Script("natural", ("--steps 40",), "--steps 10 --task digits-tiny"),
    Script("memory", quick="--task digits-tiny --seeds 2"),
    Script("compositions", quick="--races 1 --only polar"),
    Script("unroll", quick="--cases digits --subsets 3 --queries 3"),
    Script(
        "optimizer_curvature", quick="--tasks digits --optimizers SOAP --subsets 3 --queries 20"
    ),
    Script("optimizer_statistics", quick="--layers 1 --steps 10 --optimizers adamw,soap"),
    Script("blocks"),
    Script("projection_quality"),
    Script("lds_table", needs="downloads of MNIST; peers: --dattri, --kronfluence"),
    Script("inspection", quick=""),
    Script(
        "attribution_quality",
        ("--only logistic", "--only removals --data digits --queries 40", "--only transformer"),
    ),
    Script("refinement"),
    Script("width"),
    Script("ablations"),
    Script("bare_parameters", ("--vocab 256,1024 --lr 3e-3,1e-2",), needs="isokron[hf]"),
    Script("optimizers", ("--case c",), needs="isokron[bench]"),
    Script("curvature", ("--threads 1",), needs="isokron[bench]"),
    Script("white_kron", needs="isokron[bench], isokron[bench-jax]"),
    Script("attribution", needs="isokron[hf]; bergson and kronfluence: --bergson, --kronfluence"),
    Script("learning_rate", needs="a download of SmolLM2-135M"),
    Script("language_models", needs="downloads of SmolLM2-135M and stories15M"),
    Script("planted_facts", ("runs/planted_facts",), needs="gguf; a download of SmolLM2-135M"),
    Script("label_noise", needs="a download of CIFAR-10N; cleanlab"),
    Script("tuned_races", ("run", "time", "table"), needs="downloads of enwik8 and CIFAR-10"),
    Script(
        "long_races",
        ("run", "time", "adamw", "table"),
        needs="downloads of enwik8, CIFAR-10, MNIST",
    ),
)
# need arguments that only you know, or hardware: see their first lines
BY_HAND = ("gpu", "lds", "revisions")


def run(script: Script, arguments: str, quick: bool) -> list[str] | None:
    """The lines it prints; None if it failed."""
    folder = {"ISOKRON_BENCHMARKS": str(SCRATCH)} if quick else {}
    command = [sys.executable, str(HERE / f"{script.name}.py"), *arguments.split()]
    print(f"\n{script.name}.py {arguments}", flush=True)
    start, cpu, lines = time.perf_counter(), cpu_seconds(), []
    with subprocess.Popen(
        command,
        env={**os.environ, **folder},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quick else None,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if not quick:
                print(line, end="", flush=True)
    wall = time.perf_counter() - start
    print(f"  {wall:.0f} s, {cpu_seconds() - cpu:.0f} s of CPU, exit code {process.returncode}")
    return None if process.returncode else lines


def cpu_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def recorded_rows(name: str) -> list[str]:
    """What was recorded of a script: its tables or output, and entries of recorded.json."""
    rows: list[str] = []
    if (figures.RECORDS / f"{name}.json").exists():
        rows += figures.read(name)
    entries = figures.recorded_entries().items()
    calls = [key for key, entry in entries if entry["command"].startswith(f"benchmarks/{name}.py")]
    return rows + [row for key in calls for row in figures.read(f"recorded.{key}")]


def label(row: str) -> str:
    """What stands before the first decimal number of a row."""
    words = re.split(r"\d+\.\d", row, maxsplit=1)[0]
    return " ".join(re.sub(r"[|`*±–-]", " ", words).split()).lower()


def ratios(row: str) -> list[str]:
    """The numbers that a × follows or, where there is none, all decimal numbers."""
    times = re.findall(r"(\d+\.\d+)×", row)
    return times or [number for number in figures.numbers_in(row) if "." in number]


def compare(name: str, lines: list[str]) -> None:
    """Print figures beside those of the recorded row with the same label."""
    recorded: dict[str, list[list[str]]] = {}
    for row in recorded_rows(name):
        recorded.setdefault(label(row), []).append(ratios(row))
    for line in lines:
        key, now = label(line), ratios(line)
        alike = [before for before in recorded.get(key, []) if len(before) == len(now)]
        if now and alike:
            print(f"  {key:40.40} now {' '.join(now):40} recorded {' '.join(alike[0])}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small version of each")
    parser.add_argument("--only", default="", help="names of scripts, separated by commas")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [script.name for script in SCRIPTS]
    if unknown := set(names) - {script.name for script in SCRIPTS}:
        parser.error(f"--only: no benchmark {', '.join(sorted(unknown))}")
    left_out, failed = [], []
    for script in SCRIPTS:
        if script.name not in names:
            continue
        if options.quick and script.quick is None:
            left_out.append(script.name)
            continue
        calls = script.full if script.quick is None or not options.quick else (script.quick,)
        for arguments in calls:
            lines = run(script, arguments, options.quick)
            if lines is None:
                failed.append(f"{script.name} {arguments} (needs {script.needs or 'isokron[dev]'})")
            elif options.quick:
                compare(script.name, lines)
    if left_out:
        print(f"\nwithout a small version: {', '.join(left_out)}")
    print(f"by hand: {', '.join(BY_HAND)}")
    if failed:
        sys.exit("failed: " + "; ".join(failed))


if __name__ == "__main__":
    main()
