"""The text of `--help`: usage, description, options by panel, and commands to copy."""

from __future__ import annotations

import inspect
import os
import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

INDENT = 30  # most columns of names
WIDEST = 100  # columns of a line
# panels that come before others: what to explain stands next to the model and its data
FIRST = ("Arguments", "Options", "Model and data", "Queries")
EXAMPLES = "\n\nExamples:\n"  # begins the last part of a command's docstring
NO_BREAK = "\xa0"  # a space at which no line ends
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "PATH", bool: ""}


def metavar_of(hint: Any) -> str:
    """What an option of this type takes, as help shows it; nothing for a flag."""
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    if get_origin(hint) is Literal:
        return "|".join(kinds)
    # list[str], and a type or None
    return metavar_of(kinds[0]) if kinds else METAVARS[hint]


class CommandHelp(TyperCommand):
    """A command with its help in plain sections, without boxes."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        # typer shows a required argument as {RUN}
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]


class GroupHelp(TyperGroup):
    """The list of commands, by panel."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))


def help_text(command: Any, ctx: Any) -> str:
    """Help of a command or of the list of commands, as wide as the terminal."""
    width = min(shutil.get_terminal_size().columns, WIDEST)
    description, _, examples = inspect.cleandoc(command.help or "").partition(EXAMPLES)
    lines = [f"{heading('Usage:')} {command.get_usage(ctx).partition(' ')[2]}", ""]
    for paragraph in description.split("\n\n"):
        lines += [*textwrap.wrap(paragraph, width), ""]
    panels: dict[str, list[tuple[str, str]]] = {panel: [] for panel in FIRST}
    for name in command.list_commands(ctx) if isinstance(command, TyperGroup) else ():
        subcommand = command.commands[name]
        first = inspect.cleandoc(subcommand.help).split("\n\n")[0]
        panels.setdefault(subcommand.rich_help_panel, []).append((name, first))
    *params, help_option = command.get_params(ctx)
    for param in params:
        panel = param.rich_help_panel
        if param.param_type_name == "argument":
            panels.setdefault("Arguments", []).append((param.metavar, param.help))
        else:
            panels.setdefault(panel or "Options", []).append(option_help(param))
    if isinstance(command, TyperGroup):
        panels["Options"] = panels.pop("Options")
    # the last panel with options, since every command has --help
    *_, last = ["Options", *(name for name in panels if panels[name] and name != "Arguments")]
    panels[last].append(option_help(help_option))
    indent = min(INDENT, 4 + max(len(name) for rows in panels.values() for name, _ in rows))
    for panel, rows in panels.items():
        if rows:
            lines += [heading(f"{panel}:"), *two_columns(rows, indent, width), ""]
    commands = [f"  {line}" for line in textwrap.dedent(examples).splitlines() if line.strip()]
    return "\n".join([*lines, heading("Examples:"), *commands])


def option_help(param: Any) -> tuple[str, str]:
    """`--steps N`, and what it does with its default."""
    # --help before -h, which typer has in any order
    names = ", ".join([*sorted(param.opts, key=len, reverse=True), *param.secondary_opts])
    text = param.help or ""
    if param.required:
        text += " [required]"
    elif param.default is not None and param.default is not False:
        text += f" [default:{NO_BREAK}{param.default}]"
    return f"{names} {param.metavar or ''}".rstrip(), text


def two_columns(rows: Iterable[tuple[str, str]], indent: int, width: int) -> list[str]:
    """Names and texts side by side; a text begins on a new line after a long name."""
    lines: list[str] = []
    for name, text in rows:
        start = f"  {name}".ljust(indent)
        if len(start) > indent:
            lines, start = [*lines, start], " " * indent
        wrapped = textwrap.fill(
            text,
            width,
            initial_indent=start,
            subsequent_indent=" " * indent,
            break_on_hyphens=False,
        )
        lines.append(wrapped.replace(NO_BREAK, " "))
    return lines


def heading(text: str) -> str:
    """Bold, where a terminal shows it; typer.echo removes it elsewhere."""
    plain = os.environ.get("TERM") == "dumb" or "NO_COLOR" in os.environ
    return text if plain else typer.style(text, bold=True)
