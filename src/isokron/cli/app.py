"""The application: its commands, its version, and the exit codes of errors."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from isokron._version import __version__
from isokron.cli import processes
from isokron.cli.attribution import attribute, build, fit, query, report, score
from isokron.cli.demo import demo
from isokron.cli.errors import OPTIONS, complain, reported
from isokron.cli.evaluate import evaluate
from isokron.cli.info import info, tasks
from isokron.cli.inspect import inspect
from isokron.cli.plan import plan
from isokron.cli.race import race

EXAMPLES = """
Train neural networks faster, and see which training examples made them say what they say.

Examples:

  isokron demo

  isokron race --task digits --optimizers adamw,muon

  isokron race --task speeches-small --optimizers muon,sign --steps 500 --seeds 3

  isokron inspect --task digits

  isokron attribute runs/digits --task digits --query eval:0-4
"""

app = typer.Typer(
    help=EXAMPLES,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, race, attribute, fit, build, score, query, report, evaluate),
    *(inspect, plan, tasks, info),
)
for command in COMMANDS:
    app.command()(command)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"isokron {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    call: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    name = call.invoked_subcommand
    with reported(2):
        processes.check_shared(name)
    # errors of the library name arguments, those of the command line its options
    params = call.command.commands[name].params if name else []  # type: ignore[attr-defined]
    OPTIONS.clear()
    OPTIONS.update({p.name: p.opts[0] for p in params if p.opts[0].startswith("--")})


def main() -> NoReturn:
    """Run the command line; exit 0 done, 1 failed work, 2 wrong call, 130 interrupted."""
    # By default waiting threads spin for milliseconds, and on a shared machine take the time of the
    # threads they wait for: steps were seen to take fifty times as long. Read once, by torch.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # a terminal without × still shows the numbers
            stream.reconfigure(errors="replace")
    # modules named in specs are looked for in the current folder, as `python -m` does
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with reported(2):
            processes.join()
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
    except KeyboardInterrupt:
        code = complain("interrupted", 130)
    except typer.Exit as stopped:
        code = stopped.exit_code
    except Exception as error:
        # typer's own complaints about the call; its exception class has moved between versions
        if not hasattr(error, "format_message"):
            raise
        code = complain(error.format_message(), 2)
    processes.leave(code if isinstance(code, int) else 0)
