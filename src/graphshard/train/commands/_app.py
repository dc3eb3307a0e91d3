# SPDX-License-Identifier: Apache-2.0
"""The application: its commands, and how their errors are shown.

A help text must be quick: a command is imported when it is called, and imports what it needs for
its work when it runs. torch alone takes seconds.

Wrong input is one line on standard error and exit code 2, without a traceback. Set the environment
variable GRAPHSHARD_TRACEBACK to see one.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ...errors import GraphShardError, RankError
from ..launch import WRONG_INPUT_ERRORS, ExitCode, show_warning, stop_on_signals
from ._options import CommandOfDGL, CommandWithDefaults

# The module of each command, in the order of the help text.
_MODULES = {
    **dict.fromkeys(("partition", "tables", "inspect", "verify", "convert"), "_partitions"),
    **{name: f"_{name}" for name in ("plan", "train", "predict", "trace")},
    **dict.fromkeys(("serve", "copy", "launch"), "_cluster_commands"),
}


@functools.cache
def _command(name: str) -> Any:
    module = importlib.import_module(f"{__package__}.{_MODULES[name]}")
    alone = typer.Typer(add_completion=False)
    kind = CommandOfDGL if name in ("copy", "launch") else CommandWithDefaults
    function = getattr(module, name)
    # typer breaks lines of all paragraphs but the first where the docstring does.
    paragraphs = (inspect.getdoc(function) or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    alone.command(name, cls=kind, help=text)(function)
    return typer.main.get_command(alone)


class CommandsByName(Mapping[str, Any]):
    """The commands, each of which is imported and made when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(_MODULES)

    def __len__(self) -> int:
        return len(_MODULES)


class GroupOfCommands(TyperGroup):
    """The commands by name."""

    commands: Any

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        self.commands = CommandsByName()

    def get_help_option(self, ctx: Any) -> Any:
        """The flag ``--help``, off: to read None as a flag typer would import pydantic."""
        option: Any = super().get_help_option(ctx)
        option.default = False
        return option


app = typer.Typer(
    name="graphshard",
    cls=GroupOfCommands,
    help="Partition graphs and train graph neural networks on the parts.",
    no_args_is_help=True,
    add_completion=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        from ..._base.version import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command line of this process and end it.

    SIGTERM and SIGHUP are taken as Ctrl-C is, so that nothing temporary stays behind.
    """
    with stop_on_signals():
        code = run(sys.argv[1:])
    sys.exit(code)


def run(arguments: Sequence[str]) -> int:
    """Run a command line; returns the exit code."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = show_warning
            result = app(args=list(arguments), prog_name="graphshard", standalone_mode=False)
        if result == ExitCode.INTERRUPTED:  # typer's way to say so
            return _interrupted()
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return _interrupted()
    except Exception as error:
        return _explained(error)


def _explained(error: Exception) -> int:
    """Show an error as its kind deserves; returns the exit code."""
    if type(error).__name__ == "Abort":  # typer's word for Ctrl-C, and for any EOFError
        if not isinstance(error.__cause__, EOFError):
            return _interrupted()
        error = error.__cause__
    if os.environ.get("GRAPHSHARD_TRACEBACK"):
        raise error
    usage = getattr(error, "format_message", None)
    if usage is not None:  # typer's errors, whichever package it takes them from
        context = getattr(error, "ctx", None)
        command = "graphshard" if context is None else context.command_path
        text = usage().replace(": Value error, ", ": ")  # words of pydantic, by which typer checks
        _say(f"{text} (see {command} --help)")
        return ExitCode.WRONG_INPUT
    if isinstance(error, RankError):
        sys.stderr.write(f"error: {error}\n")
        return ExitCode.FAILED
    if isinstance(error, (*WRONG_INPUT_ERRORS, ImportError)):
        _say(str(error))
        return ExitCode.WRONG_INPUT
    if isinstance(error, GraphShardError):
        _say(str(error))
        return ExitCode.FAILED
    raise error


def _interrupted() -> int:
    sys.stderr.write("interrupted\n")
    return ExitCode.INTERRUPTED


def _say(text: str) -> None:
    sys.stderr.write(f"error: {' '.join(text.split())}\n")
