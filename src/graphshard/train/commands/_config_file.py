# SPDX-License-Identifier: Apache-2.0
"""``--config run.toml``: a file that gives options of commands; those of the line win.

Keys are the names of options, with dashes or underscores. What stands above all tables is for every
command that reads the file, what stands in ``[train]`` for ``graphshard train`` alone. A list is
for options that take numbers between commas, or can be repeated; a table for those that take
name=value.
"""

from __future__ import annotations

import difflib
import inspect
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..._base.toml import toml_values

_HELP = (
    "A TOML file of options, or a URI of one: keys by their names, in a table of the command or "
    "above all."
)


def config_option(command: str) -> inspect.Parameter:
    """The parameter ``--config`` of a command; what the file says becomes defaults."""

    def read(context: typer.Context, value: str | None) -> None:
        if value is not None and not context.resilient_parsing:
            context.default_map = options_of_file(value, command, context)

    option = typer.Option(
        "--config",
        help=_HELP,
        show_default="none",
        metavar="FILE.toml",
        is_eager=True,
        callback=read,
    )
    return inspect.Parameter(
        "config",
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[str | None, option],
    )


def options_of_file(path: str, command: str, context: typer.Context) -> dict[str, Any]:
    """What a file says for a command: values by the name of the parameter.

    Raises:
        ValueError: The file is no TOML, or has a key that is no option; names the nearest one.
        OSError: The file cannot be read.
    """
    from ...data.remote_files import is_file, read_file, shown  # no other command needs it

    name_of_file = shown(path)
    if not is_file(path):
        raise FileNotFoundError(f"there is no file of options {name_of_file}")
    content = toml_values(read_file(path), name_of_file)
    root = context.find_root().command
    commands: Mapping[str, Any] = getattr(root, "commands", {})
    values: dict[str, Any] = {}
    tables = {k: v for k, v in content.items() if k in commands and isinstance(v, Mapping)}
    names = {name: _parameters(each) for name, each in commands.items()}
    names.setdefault(command, _parameters(context.command))
    for where, table in [
        ("", {k: v for k, v in content.items() if k not in tables}),
        *tables.items(),
    ]:
        for key, value in table.items():
            name = key.replace("-", "_")
            of_command = where or command
            if name not in names[of_command]:
                is_table = not where and isinstance(value, Mapping)
                raise ValueError(_unknown(name_of_file, key, where, command, names, is_table))
            if of_command == command:
                values[name] = _value(names[command][name], value, f"{key} in {name_of_file}")
    return values


def _parameters(command: Any) -> dict[str, Any]:
    """Options and arguments of a command by name, without those that a file cannot give."""
    return {p.name: p for p in command.params if p.name not in ("config", "help")}


def _unknown(
    path: str,
    key: str,
    where: str,
    command: str,
    names: Mapping[str, Mapping[str, Any]],
    is_table: bool,
) -> str:
    of_command = where or command
    name = key.replace("-", "_")
    text = f"{path} must have options of graphshard {of_command} alone (got {key!r}"
    text += f" in [{where}])" if where else ")"
    others = [other for other, own in names.items() if name in own]
    if not where and others:
        return f"{text}, which is one of {others[0]}; put it into the table [{others[0]}]"
    words = list(names) if is_table else [n.replace("_", "-") for n in names[of_command]]
    nearest = difflib.get_close_matches(key.replace("_", "-"), words, 1, cutoff=0.0)
    return f"{text}; did you mean {nearest[0]}?"


def _value(parameter: Any, value: Any, what: str) -> Any:
    """A value of TOML as the option takes it."""
    takes_many = bool(getattr(parameter, "multiple", False)) or parameter.nargs != 1
    if isinstance(value, Mapping):
        value = json.dumps(value)
    elif isinstance(value, list) and takes_many:
        return [_word(part, what) for part in value]
    if isinstance(value, list):
        return ",".join(_word(part, what) for part in value)
    if isinstance(value, bool) and not getattr(parameter, "is_flag", False):
        raise ValueError(f"{what} must not be true or false (got {value}); write what it takes")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{what} must be finite (got {value})")
    if not isinstance(value, str | int | float):
        raise ValueError(f"{what} must be a text, a number, a list or a table (got {value!r})")
    if getattr(parameter, "is_flag", False) and not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false (got {value!r})")
    return [_word(value, what)] if takes_many else value


def _word(value: Any, what: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str | int | float):
        raise ValueError(f"{what} must hold texts and numbers (got {value!r})")
    return str(value)
