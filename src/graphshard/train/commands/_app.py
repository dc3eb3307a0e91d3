# SPDX-License-Identifier: Apache-2.0
"""The application: its commands, and how their errors are shown.

What a command needs for its work it imports when it is run: to show a help text must be quick, and
torch alone takes seconds to import.

Wrong input is one line on standard error and exit code 2, without a traceback. Set the environment
variable GRAPHSHARD_TRACEBACK to see one.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from ...errors import GraphShardError, RankError
from ..launch import WRONG_INPUT_ERRORS, ExitCode, show_warning, stop_on_signals
from ._cluster_commands import copy, launch, serve
from ._options import CommandOfDGL, CommandWithDefaults
from ._partitions import convert, inspect, partition, tables, verify
from ._plan import plan
from ._predict import predict
from ._trace import trace
from ._train import train

app = typer.Typer(
    name="graphshard",
    help="Partition graphs and train graph neural networks on the parts.",
    no_args_is_help=True,
    add_completion=False,
)
_COMMANDS = (
    *(partition, tables, inspect, verify, convert, plan, train, predict, trace),
    *(serve, copy, launch),
)
for command in _COMMANDS:
    app.command(cls=CommandOfDGL if command in (copy, launch) else CommandWithDefaults)(command)


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
