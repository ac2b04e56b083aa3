"""The application: its commands, their options and its exit codes."""

import inspect as introspection
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter
from typing import Annotated, Any, NoReturn, get_args, get_type_hints

import typer

from isokron._version import __version__
from isokron.cli import process
from isokron.cli.attribution import attribute, build, fit, query, report, score
from isokron.cli.demo import demo
from isokron.cli.encoding import configure_output, echo
from isokron.cli.evaluate import evaluate
from isokron.cli.help import CommandHelp, GroupHelp, metavar_of
from isokron.cli.info import info, tasks
from isokron.cli.inspect import inspect
from isokron.cli.plan import plan
from isokron.cli.race import race

ABOUT = """
Train neural networks faster, and find the training examples behind what a model says.

Examples:
  isokron demo
  isokron race --task digits --optimizers adamw,muon
  isokron inspect --task digits
  isokron attribute runs/digits --task digits --query eval:0-4
"""
COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {
    "Start": (demo, tasks, info),
    "Optimizers": (race, inspect, plan),
    "Attribution": (attribute, fit, build, score, query, report, evaluate),
}


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """The command for typer: an argument that is a dataclass becomes one option per field."""
    arguments = introspection.signature(command, eval_str=True).parameters.values()
    groups: dict[str, Any] = {a.name: a.annotation for a in arguments if is_dataclass(a.annotation)}

    @wraps(command)
    def call(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        command(**values)

    parameters: list[Parameter] = []
    for argument in arguments:
        group = groups.get(argument.name)
        parameters += [argument] if group is None else field_options(group)
    for parameter in parameters:
        hint, info = get_args(parameter.annotation)
        info.metavar = metavar_of(hint) if info.metavar is None else info.metavar
    keywords = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in parameters]
    call.__signature__ = introspection.Signature(keywords)  # type: ignore[attr-defined]
    return call


def field_options(group: Any) -> Iterator[Parameter]:
    """The options that are fields of a dataclass; see `isokron.cli.source.option`."""
    hints = get_type_hints(group)
    for field in fields(group):
        # a flag that is not named would also get a --no-flag
        names = [f"--{field.name.replace('_', '-')}"] if hints[field.name] is bool else []
        option = typer.Option(*names, **{"rich_help_panel": group.panel, **field.metadata})
        yield Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=field.default,
            annotation=Annotated[hints[field.name], option],
        )


app = typer.Typer(
    cls=GroupHelp,
    help=ABOUT,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for panel, commands in COMMANDS.items():
    for command in commands:
        app.command(cls=CommandHelp, rich_help_panel=panel)(with_options(command))


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        echo(f"isokron {__version__}")
        raise typer.Exit


def main() -> NoReturn:
    """Run the command line; exit 0 done, 1 failed work, 2 wrong call, 130 interrupted."""
    # Waiting threads spin for milliseconds by default. On a busy machine they slow down the threads
    # they wait for, by up to fifty times. torch reads this variable once, on import.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # commands show their own progress; these libraries read the variables once, on import
    for library in ("HF_HUB", "HF_DATASETS"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")
    configure_output()
    # import modules from the current folder, like `python -m`
    if "" not in sys.path:
        sys.path.insert(0, "")
    arguments = sys.argv[1:] or ["--help"]
    try:
        process.join(arguments)
        code = app(arguments, standalone_mode=False) or 0
    except (KeyboardInterrupt, typer.Abort):
        process.complain("interrupted")
        code = 130
    except Exception as error:
        commands: Any = typer.main.get_command(app)
        # errors of the library name arguments: translate them to options
        called = commands.commands.get(arguments[0])
        options = {name: name for name in commands.commands}
        if called is not None:
            options = {p.name: p.opts[0] for p in called.params}
        code = process.report(error, options)
    process.leave(code)
