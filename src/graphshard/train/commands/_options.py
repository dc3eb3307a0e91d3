# SPDX-License-Identifier: Apache-2.0
"""What commands have in common: options made of dataclasses, and which partition a path means.

A field's name, type, choices, default and help stand in its dataclass, and nowhere else.
`CommandWithDefaults` is a command whose help is shown as it is written, with all defaults.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape
from typer.core import TyperCommand

from ..._base.settings import OnlyWith, Unset, notes_of
from ._config_file import config_option

_Command = TypeVar("_Command", bound=Callable[..., None])

PartitionPath = Annotated[Path, typer.Argument(help="The partition's JSON.", metavar="PARTS.json")]


class CommandWithDefaults(TyperCommand):
    """A command whose help texts are no markup, and whose flags show that they are off."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        self.help = escape(self.help or "")
        for option in self.params:
            text = getattr(option, "help", None)
            if text is not None:
                option.help = escape(text)  # type: ignore[attr-defined]
            is_on_only = getattr(option, "is_flag", False) and not option.secondary_opts
            if is_on_only and option.default is False:
                option.show_default = "no"  # type: ignore[attr-defined]


class CommandOfDGL(CommandWithDefaults):
    """A command that takes the names of its options with underscores, too, as DGL's do."""

    def __init__(self, *args: Any, **values: Any) -> None:
        super().__init__(*args, **values)
        for option in self.params:
            for name in tuple(option.opts):
                if "-" in name.lstrip("-"):
                    option.opts.append(f"--{name[2:].replace('-', '_')}")


def options_of(*kinds: type) -> Callable[[_Command], _Command]:
    """Make options of a command's parameters, and of fields that it has no parameter for.

    Both are annotated with type and help, and with `Unset` where words say the default better. A
    parameter that has an option or argument of typer's keeps it.

    Args:
        kinds: Dataclasses, whose fields the command takes as keywords. One that they do not all
            have alike is an option without a default; the command looks which was given.
    """

    def decorated(command: _Command) -> _Command:
        parameters = dict(inspect.signature(command, eval_str=True).parameters)
        parameters["config"] = config_option(command.__name__)
        for name, parameter in list(parameters.items()):
            if parameter.kind is parameter.VAR_KEYWORD:
                del parameters[name]
            elif isinstance(get_args(parameter.annotation)[1], str):
                variants = {"": (parameter.annotation, parameter.default)}
                parameters[name] = _parameter(name, variants, True)
        fields: dict[str, dict[str, tuple[Any, Any]]] = {}
        for kind in kinds:
            hints = get_type_hints(kind, include_extras=True)
            for field in dataclasses.fields(kind):
                variants = fields.setdefault(field.name, {})
                variants[getattr(kind, "mode", "")] = hints[field.name], field.default
        for name, variants in fields.items():
            if name not in parameters:
                is_common = len(variants) == len(kinds) and len(set(variants.values())) == 1
                parameters[name] = _parameter(name, variants, is_common)

        @functools.wraps(command)
        def without_file(*args: Any, config: Any = None, **values: Any) -> None:
            command(*args, **values)  # the file has been read: see `config_option`

        signature = inspect.Signature(list(parameters.values()))
        without_file.__signature__ = signature  # type: ignore[attr-defined]
        return cast(_Command, without_file)

    return decorated


def _parameter(
    name: str, variants: dict[str, tuple[Any, Any]], is_common: bool
) -> inspect.Parameter:
    """The option for a field, given as (annotation, default) by the mode that has it.

    It has no default, only a text that says it, where it must be known whether it was given: a
    field that has an effect with some values of others alone, or in some of the modes, or whose
    default a command chooses.
    """
    hint, default = next(iter(variants.values()))
    is_common = is_common and not notes_of(hint, OnlyWith) and not notes_of(hint, Unset)
    kind = get_args(hint)[0]
    flags = []
    if kind is bool or bool in get_args(kind):
        flag = f"--{name.replace('_', '-')}"
        flags = [flag if default is False else f"{flag}/--no-{flag[2:]}"]
    if any(get_origin(choice) in (tuple, Mapping) for choice in get_args(kind)):
        kind = str  # numbers, or name=value, between commas
    if name.endswith("_dir") or name == "run":
        kind = Path
    may_be_none = not is_common or default is None
    if may_be_none:
        kind |= None
    texts = dict.fromkeys(get_args(each)[1] for each, _ in variants.values())
    show_default: str | bool = True
    if may_be_none or notes_of(hint, Unset):
        shown = {mode: _shown(*each) for mode, each in variants.items()}
        same = set(shown.values())
        by_mode = "; ".join(f"{mode}: {text}" for mode, text in shown.items())
        show_default = (same.pop() if len(same) == 1 else by_mode) or False
    option = typer.Option(*flags, help=" ".join(texts), show_default=show_default)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=default if is_common else None,
        annotation=Annotated[kind, option],
    )


def _shown(hint: Any, default: Any) -> str:
    """A field's default, for the reader; nothing where its help says it."""
    for note in notes_of(hint, Unset):
        return note.text
    if default is None:
        return ""
    return {True: "yes", False: "no"}[default] if isinstance(default, bool) else str(default)


def partition_json(path: Path) -> Path:
    """The path of a partition's JSON; it without its ending, or the folder of just one, will do.

    Raises:
        ValueError: It is a folder of several partitions.
    """
    if path.is_dir() and (path / "META.json").exists():  # of PyG's Partitioner
        return path / "META.json"
    if path.is_dir():
        notes = (".dataset.json", ".tables.json")
        files = [p for p in sorted(path.glob("*.json")) if not p.name.endswith(notes)]
        if len(files) == 1 and (path / "part0").is_dir():
            return files[0]
        if len(files) > 1 and (path / "part0").is_dir() and not any(path.glob("*.npy")):
            raise ValueError(
                f"{path} must be one partition (got {', '.join(p.name for p in files)}); name the "
                "JSON of one"
            )
    # A name without a folder is that of a data set, whatever lies here.
    elif len(path.parts) > 1 and not path.exists():
        with_ending = path.with_name(f"{path.name}.json")
        if with_ending.is_file():
            return with_ending
    return path


def is_partition(path: Path) -> bool:
    """Whether a path means a partition, and not a data set."""
    return partition_json(path).suffix == ".json"
