# SPDX-License-Identifier: Apache-2.0
"""options_of: options of a command, made from the fields of the dataclass that it fills.

A field's name, type, choices, default and help stand in its dataclass, and nowhere else.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer

_Command = TypeVar("_Command", bound=Callable[..., None])


def options_of(*kinds: type) -> Callable[[_Command], _Command]:
    """Give a command, as keywords, an option for each field that it has no parameter for.

    Args:
        kinds: Dataclasses whose fields are annotated with type and help. A field that they do not
            all have alike is an option without a default; the command looks which was given.
    """

    def decorated(command: _Command) -> _Command:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        (rest,) = (p.name for p in parameters.values() if p.kind is p.VAR_KEYWORD)
        del parameters[rest]
        fields: dict[str, list[tuple[Any, Any]]] = {}
        for kind in kinds:
            hints = get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                fields.setdefault(field.name, []).append((hints[field.name], field.default))
        for name, found in fields.items():
            if name not in parameters:
                is_common = len(found) == len(kinds) and len(set(found)) == 1
                parameters[name] = _parameter(name, found, is_common)
        signature = inspect.Signature(list(parameters.values()))
        command.__signature__ = signature  # type: ignore[attr-defined]
        return command

    return decorated


def _parameter(name: str, found: list[tuple[Any, Any]], is_common: bool) -> inspect.Parameter:
    """The option for a field, given as (annotation, default) in each dataclass that has it."""
    hint, default = found[0]
    kind = get_args(hint)[0]
    flags = []
    if kind is bool or bool in get_args(kind):
        flag = f"--{name.replace('_', '-')}"
        flags = [flag if default is False else f"{flag}/--no-{flag[2:]}"]
    if any(get_origin(choice) is tuple for choice in get_args(kind)):
        kind = str  # numbers between commas
    if name.endswith("_dir"):
        kind = Path
    if not is_common or default is None:
        kind |= None
    texts = dict.fromkeys(get_args(each)[1] for each, _ in found)
    option = typer.Option(*flags, help=" ".join(texts))
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default if is_common else None,
        annotation=Annotated[kind, option],
    )
