"""The application: its commands, its version, and how errors become exit codes."""

from __future__ import annotations

import io
import os
import sys
from typing import Annotated, NoReturn

import typer

from isokron._version import __version__
from isokron.cli import several
from isokron.cli.attribute import attribute
from isokron.cli.build import build
from isokron.cli.demo import demo
from isokron.cli.errors import complain, reported
from isokron.cli.evaluate import evaluate
from isokron.cli.fit import fit
from isokron.cli.info import info
from isokron.cli.inspect import inspect
from isokron.cli.plan import plan
from isokron.cli.query import query
from isokron.cli.race import race
from isokron.cli.repeat import repeat
from isokron.cli.report import report
from isokron.cli.score import score
from isokron.cli.tasks import tasks

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
app.command()(demo)
app.command()(race)
app.command()(attribute)
app.command()(fit)
app.command()(build)
app.command()(score)
app.command()(query)
app.command()(report)
app.command()(evaluate)
app.command()(repeat)
app.command()(inspect)
app.command()(plan)
app.command()(tasks)
app.command()(info)


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
    with reported(2):
        several.check_shared(call.invoked_subcommand)


def main() -> NoReturn:
    """Run the command line; exit 0 done, 1 failed work, 2 wrong call, 130 interrupted."""
    # By default threads spin for milliseconds while they wait, and on a shared machine steal the
    # time of those they wait for: steps were seen to take fifty times as long. Brief spinning
    # costs little alone and keeps its speed in company. Read once, when torch is loaded.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without × still shows the numbers
    # modules named in specs are looked for in the current folder, as `python -m` does
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with reported(2):
            several.join()
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
    several.leave(code if isinstance(code, int) else 0)
