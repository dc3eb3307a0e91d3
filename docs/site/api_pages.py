# SPDX-License-Identifier: Apache-2.0
"""The pages of the API: every public name of each door, described by autodoc where it belongs.

A door is a module that users import; ``docs/api/index.md`` lists them, in the order of the site.
Names come from each door's ``__all__``, commands from the command line application. A name that
several doors give is described once, and the others lead there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import torch
import typer

DOORS_PAGE = Path(__file__).resolve().parents[1] / "api" / "index.md"
DOOR = re.compile(r"^\* `(graphshard[\w.]*)`: (.+)$", re.M)

# Values have no docstring.
CONSTANTS = {
    "ALL": "Stands for all nodes, or all edges, where a method takes ids.",
    "NID": "Field that holds the original ids of nodes.",
    "EID": "Field that holds the original ids of edges.",
    "NTYPE": "Field that holds the numbers of node types.",
    "ETYPE": "Field that holds the numbers of relations.",
    "MODELS": "Names of the models.",
    "MESSAGE_OPS": "Operators of message functions.",
    "REDUCE_OPS": "Operators of reduce functions.",
    "SHARES_OF_RANDOM": "Halos of METIS, as shares of those of random parts: least, middle, most.",
    "logger": "The logger of the package, silent until `logging_setup`.",
}


def doors() -> dict[str, str]:
    """Modules that users import, in the order of the site, and what each holds."""
    return dict(DOOR.findall(DOORS_PAGE.read_text(encoding="utf-8")))


def public_names(module: ModuleType) -> list[str]:
    """A module's ``__all__``; where it has none what it defines, or gives under another's name."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and name != "annotations"
        and not inspect.ismodule(value)
        and (
            getattr(value, "__module__", module.__name__) == module.__name__
            or module.__name__.split(".")[1] in ("dgl", "sar")
        )
    ]


def is_described(value: Any) -> bool:
    """Whether a value is a function or class of ours, which autodoc describes."""
    if inspect.ismodule(value) or not (inspect.isclass(value) or callable(value)):
        return False
    module = getattr(value, "__module__", None)
    return module is not None and module.startswith("graphshard")


@functools.cache
def homes() -> dict[int, tuple[str, str]]:
    """The id of each described object -> its door, and its name there.

    That is the innermost door around the module that defines it; else the first that gives it,
    ``graphshard`` itself last.
    """
    modules = {door: importlib.import_module(door) for door in doors()}
    candidates: dict[int, list[tuple[str, str]]] = {}
    for door, module in modules.items():
        for name in public_names(module):
            value = getattr(module, name)
            if is_described(value):
                candidates.setdefault(id(value), []).append((door, name))

    def order(place: tuple[str, str]) -> tuple[int, bool, bool]:
        door, name = place
        value = getattr(modules[door], name)
        around = door != "graphshard" and f"{value.__module__}.".startswith(f"{door}.")
        return (-len(door) if around else 0, door == "graphshard", value.__name__ != name)

    return {key: min(places, key=order) for key, places in candidates.items()}


@functools.cache
def places_by_definition() -> dict[str, str]:
    """The module and name where a thing is defined -> the door and name that describe it."""
    found = {}
    for door, name in homes().values():
        value = getattr(importlib.import_module(door), name)
        if hasattr(value, "__qualname__"):
            found[f"{value.__module__}.{value.__qualname__}"] = f"{door}.{name}"
    return found


def api_pages() -> dict[str, str]:
    """The text of each page, MyST Markdown, by its name within ``api/``."""
    found = homes()
    pages = {f"{door}.md": _page(door, what, found) for door, what in doors().items()}
    pages["commands.md"] = _commands_page()
    return pages


def _page(door: str, what: str, home: dict[int, tuple[str, str]]) -> str:
    """One door: a table of all its names, then those that belong here."""
    module = importlib.import_module(door)
    rows, entries = [], []
    for name in sorted(public_names(module), key=lambda n: (n.lower(), n)):
        value = getattr(module, name)
        row, entry = _row_and_entry(door, name, value, home)
        rows.append(f"   * - {row[0]}\n     - {row[1]}")
        if entry:
            entries.append(entry)
    body = [
        ".. list-table::",
        "   :widths: 35 65",
        "   :class: names",
        "",
        *rows,
        "",
        f".. py:module:: {door}",
        "",
        *entries,
    ]
    return f"# {door}\n\n{what}\n\n```{{eval-rst}}\n" + "\n".join(body) + "\n```\n"


def _row_and_entry(
    door: str, name: str, value: Any, home: dict[int, tuple[str, str]]
) -> tuple[tuple[str, str], str]:
    """What the table says of a name, and how it is described further down, if it is."""
    full = f"{door}.{name}"
    if inspect.ismodule(value):
        where = f":doc:`{value.__name__}`" if value.__name__ in doors() else "Module."
        return (f"``{name}``", where), ""
    if not (inspect.isclass(value) or callable(value)):
        says = CONSTANTS.get(name, "A constant.")
        shown = f"\n   :value: {value!r}" if isinstance(value, str | tuple) else ""
        entry = f".. py:data:: {name}{shown}\n\n   {says}\n"
        return (f":py:data:`{name} <{full}>`", says), entry
    if not is_described(value):
        own = value.__name__
        is_torch = getattr(torch, own, None) is value
        return (f"``{name}``", f"torch's ``{own}``." if is_torch else "torch's."), ""
    place, own = home[id(value)]
    described = f"{place}.{own}"
    if described != full:
        other = f"``{own}`` of :doc:`{place}`" if place != door else f"Another name of ``{own}``"
        return (f":py:obj:`{name} <{described}>`", f"{other}: {_first_line(value)}"), ""
    if inspect.isclass(value):
        entry = f".. autoclass:: {full}\n"
        members = ", ".join(_members(value, home))
        if members:
            entry += f"   :members: {members}\n"
    else:
        entry = f".. autofunction:: {full}\n"
    return (f":py:obj:`{name} <{full}>`", _first_line(value)), entry


def _members(cls: type, home: dict[int, tuple[str, str]]) -> list[str]:
    """Public methods and properties that are described, up to the next class that has an entry."""
    found: list[str] = []
    seen: set[str] = set()  # what a class overrides is described there
    for base in cls.__mro__:
        if not base.__module__.startswith("graphshard"):
            continue
        if base is not cls and id(base) in home:
            break
        for name, value in vars(base).items():
            member = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if name.startswith("_") or name in seen:
                continue
            seen.add(name)
            is_member = isinstance(member, property) or inspect.isfunction(member)
            of_torch = getattr(torch.nn.Module, name, None)  # says of itself what is true there
            is_torch = of_torch is not None and inspect.getdoc(member) == inspect.getdoc(of_torch)
            if is_member and inspect.getdoc(member) and not is_torch:
                found.append(name)
    return found


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n", 1)[0].strip()


def parameters_by_name() -> dict[str, str]:
    """``door.name``, and ``door.name.member`` of classes, to the names of its parameters."""
    found: dict[str, str] = {}
    for door in doors():
        module = importlib.import_module(door)
        for name in public_names(module):
            value = getattr(module, name)
            found[f"{door}.{name}"] = _parameters(value) if is_described(value) else ""
            if inspect.isclass(value) and homes().get(id(value)) == (door, name):
                for member in _members(value, homes()):
                    found[f"{door}.{name}.{member}"] = _parameters(getattr(value, member))
    return found


def _parameters(value: Any) -> str:
    """Parameter names with plain defaults: nothing that depends on versions of Python or torch."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    words = []
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        default = ""
        if parameter.default is not parameter.empty:
            plain = isinstance(parameter.default, None | bool | int | float | str)
            default = f"={parameter.default!r}" if plain else "=..."
        words.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}")
    return f"({', '.join(words)})"


def commands() -> dict[str, Any]:
    """The commands of ``graphshard`` by name."""
    from graphshard.train.commands import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


# The page that shows a command at work, relative to the page of the commands.
GUIDES = {
    "partition": "../guides/partitioning.md",
    "tables": "../guides/your_own_data.md#several-types-and-keeping-it-a-toml-file",
    "inspect": "../guides/partitioning.md#what-it-cost",
    "verify": "../guides/partitioning.md#is-it-whole",
    "convert": "../guides/partitioning.md#dgls-files",
    "plan": "../guides/training.md#will-it-fit-and-how-long-will-it-take",
    "train": "../guides/training.md",
    "predict": "../guides/predictions.md",
    "trace": "../guides/training.md#where-the-time-goes",
    "serve": "../guides/graph_servers.md",
    "copy": "../guides/clusters.md#the-hosts-and-their-parts",
    "launch": "../guides/clusters.md",
}


def _commands_page() -> str:
    parts = [
        "# Commands\n\nEach takes `--help`. The same from Python: `graphshard.train.commands.run`."
    ]
    for name, command in commands().items():
        summary = (command.help or "").split("\n", 1)[0]
        guide = f" [At work]({GUIDES[name]})." if name in GUIDES else ""
        lines = [f"## graphshard {name}", "", f"{summary}{guide}", ""]
        for parameter in command.params:
            if parameter.name == "help":
                continue
            names = ", ".join([*parameter.opts, *parameter.secondary_opts])
            if parameter.param_type_name == "argument":
                names = str(parameter.metavar or parameter.name)
            text = re.sub(r"\s+", " ", getattr(parameter, "help", None) or "")
            text = re.sub(r"(?<![\w-])--[a-z][a-z-]*", r"`\g<0>`", text)
            kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
            if get_origin(kind) is Literal:
                text += f" One of {', '.join(f'`{choice}`' for choice in get_args(kind))}."
            default = getattr(parameter.default, "value", parameter.default)
            described = getattr(parameter, "show_default", None)
            if isinstance(described, str):
                text += f" Default: {described}."
            elif default is not False and isinstance(default, int | float | str):
                text += f" Default: {'yes' if default is True else default}."
            lines.append(f"* `{names}`: {text}")
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
