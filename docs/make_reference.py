# SPDX-License-Identifier: Apache-2.0
"""Write docs/reference.md: every public name, its arguments, the first line of its docstring.

    python docs/make_reference.py

Names come from each package's ``__all__``, commands from the command line application. A test
compares the file with what this script would write, so run it after a change to either.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import typer

TARGET = Path(__file__).with_name("reference.md")

# Sections in the order of the page: module, what it holds.
MODULES = {
    "graphshard": "What `import graphshard as gs` gives; the packages below say the rest.",
    "graphshard.graph": "Graphs and the message-passing protocol.",
    "graphshard.function": "Built-in message and reduce functions.",
    "graphshard.nn": "Layers.",
    "graphshard.partition": "Partitioning, on disk and back.",
    "graphshard.fullbatch": "Graphs that span ranks.",
    "graphshard.sampling": "Mini-batches, also of a graph that spans ranks.",
    "graphshard.servers": "Rows and graphs on the hosts of a cluster.",
    "graphshard.pyg": "PyG's layers on a graph that spans ranks; needs `graphshard[pyg]`.",
    "graphshard.comm": "Communication.",
    "graphshard.data": "Data sets.",
    "graphshard.train": "Training runs.",
    "graphshard.train.launch": "To a cluster and onto it; the commands `copy` and `launch`.",
    "graphshard.train.ray": "Training on graph servers under Ray Train; needs `graphshard[ray]`.",
    "graphshard.ops": "Sparse operators.",
    "graphshard.ops.reference": "The same operators in plain torch.",
    "graphshard.testing": "Helpers for tests.",
    "graphshard.errors": "Exceptions that a caller can act on.",
    "graphshard.dgl": "The names of DGL: `import graphshard.dgl as dgl`.",
    "graphshard.dgl.nn": "The names of `dgl.nn` and `dgl.nn.pytorch`.",
    "graphshard.dgl.transforms": "The names of `dgl.transforms`.",
    "graphshard.dgl.sampling": "The names of `dgl.sampling`.",
    "graphshard.dgl.dataloading": "The names of `dgl.dataloading`.",
    "graphshard.dgl.dataloading.negative_sampler": "Samplers of edges that are not there.",
    "graphshard.dgl.data": "The names of `dgl.data`.",
    "graphshard.dgl.distributed": "The names of `dgl.distributed`.",
    "graphshard.dgl.convert": "The names of `dgl.convert`.",
    "graphshard.dgl.random": "The names of `dgl.random`.",
    "graphshard.dgl.backend": "The names of `dgl.backend`.",
    "graphshard.dgl.base": "The names of `dgl.base`.",
    "graphshard.dgl.init": "The names of `dgl.init`.",
    "graphshard.dgl.utils": "The names of `dgl.utils`.",
    "graphshard.sar": "The names of SAR: `import graphshard.sar as sar`.",
    "graphshard.sar.comm": "The names of `sar.comm`.",
    "graphshard.sar.core": "The names of `sar.core`.",
    "graphshard.sar.config": "The names of `sar.config`.",
}

# Values have no docstring.
CONSTANTS = {
    "ALL": "stands for all nodes, or all edges, where a method takes ids",
    "NID": "field that holds the original ids of nodes",
    "EID": "field that holds the original ids of edges",
    "NTYPE": "field that holds the numbers of node types",
    "ETYPE": "field that holds the numbers of relations",
    "MODELS": "names of the models",
    "MESSAGE_OPS": "operators of message functions",
    "REDUCE_OPS": "operators of reduce functions",
    "logger": "the logger of the package, silent until `logging_setup`",
}

HEAD = """\
# Reference

Every public name, with its arguments and the first line of its docstring. For the rest of the
docstring, with shapes, errors and an example: `help(name)`.

Written by `docs/make_reference.py`; do not edit. Back to the [index](index.md).
"""


def public_names(module: ModuleType) -> list[str]:
    """A module's ``__all__``; where it has none what it defines, or gives under another's name."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not inspect.ismodule(value)
        and (
            getattr(value, "__module__", module.__name__) == module.__name__
            or module.__name__.split(".")[1] in ("dgl", "sar")
        )
    ]


def reference() -> str:
    """The text of docs/reference.md."""
    parts = [HEAD]
    home: dict[int, str] = {}  # id of an object -> the section that describes it
    modules = {name: importlib.import_module(name) for name in MODULES}
    for name, module in reversed(modules.items()):
        if name == "graphshard":
            continue
        for public in public_names(module):
            home.setdefault(id(getattr(module, public)), name)
    parts.append("\n".join(f"- [`{name}`](#{_anchor(name)}): {MODULES[name]}" for name in modules))
    parts.append(f"- [commands](#commands): `graphshard {'`, `'.join(_commands())}`")
    parts[-2:] = ["\n".join(parts[-2:])]
    for name, module in modules.items():
        parts.append(f"## {name}\n\n{MODULES[name]}")
        lines = [
            line
            for public in sorted(public_names(module), key=lambda n: (n.lower(), n))
            for line in _entry(name, public, getattr(module, public), home)
        ]
        parts.append("\n".join(lines))
    parts.append(
        "## commands\n\nEach takes `--help`. The same from Python: `graphshard.train.commands.run`."
    )
    parts += [_command(name, command) for name, command in _commands().items()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _entry(section: str, name: str, value: Any, home: dict[int, str]) -> Iterator[str]:
    """The lines about one name: where it is described, or what it is."""
    if inspect.ismodule(value):
        place = value.__name__
        yield f"- module `{name}`: {_link(place)}" if place in MODULES else f"- module `{name}`"
        return
    if not (inspect.isclass(value) or callable(value)):
        shown = f" = {value!r}" if isinstance(value, str | tuple) else ""
        yield f"- `{name}{shown}`: {CONSTANTS.get(name, 'a constant')}"
        return
    if value.__module__ is None or value.__module__.startswith("torch") or inspect.isbuiltin(value):
        public = getattr(torch, value.__name__, None) is value
        yield f"- `{name}`: torch's{f' `{value.__name__}`' if public else ''}"
        return
    described = home.get(id(value), section)
    if described != section:
        yield f"- `{name}`: {_link(described)}"
        return
    own = getattr(value, "__name__", name)
    if own != name and own in public_names(importlib.import_module(section)):
        yield f"- `{name}`: another name of `{own}`"
        return
    kind = "class " if inspect.isclass(value) else ""
    yield f"- {kind}`{name}{_arguments(value)}`: {_summary(value)}"
    if inspect.isclass(value):
        for member, what in _members(value, home).items():
            yield f"  - `{member}`: {what}"


def _members(cls: type, home: dict[int, str]) -> dict[str, str]:
    """Public methods and properties that are described, up to the next class that has an entry."""
    found: dict[str, str] = {}
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
            if isinstance(member, property):
                if inspect.getdoc(member):
                    found[name] = _first_line(member)
            elif inspect.isfunction(member) and member.__doc__:
                found[f"{name}{_arguments(member)}"] = _first_line(member)
    bases = [b.__name__ for b in cls.__mro__[1:] if id(b) in home]
    if bases and not issubclass(cls, Exception):
        found["..."] = f"and what `{bases[0]}` has"
    return found


def _arguments(value: Any) -> str:
    """Parameter names with plain defaults: nothing that depends on versions of Python or torch."""
    if inspect.isclass(value):
        maker = next(base for base in value.__mro__ if "__init__" in vars(base))
        is_ours = maker.__module__.startswith("graphshard")
        if not is_ours or getattr(value, "_is_protocol", False):
            return ""
        value = maker.__init__
    parameters = list(inspect.signature(value).parameters.values())
    words = []
    starred = False
    for parameter in parameters:
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            words.append("*")
            starred = True
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
        default = ""
        if parameter.default is not parameter.empty:
            plain = isinstance(parameter.default, None | bool | int | float | str)
            default = f"={parameter.default!r}" if plain else "=..."
        words.append(f"{stars.get(parameter.kind, '')}{parameter.name}{default}")
    return f"({', '.join(words)})"


def _summary(value: Any) -> str:
    return _first_line(value) if inspect.getdoc(value) else ""


def _first_line(value: Any) -> str:
    return (inspect.getdoc(value) or "").split("\n", 1)[0].strip()


def _commands() -> dict[str, Any]:
    from graphshard.train.commands import app

    group: Any = typer.main.get_command(app)
    return dict(group.commands)


def _command(name: str, command: Any) -> str:
    first = (command.help or "").split("\n", 1)[0]
    lines = [f"### graphshard {name}", "", first, ""]
    for parameter in command.params:
        if parameter.name == "help":
            continue
        names = ", ".join([*parameter.opts, *parameter.secondary_opts])
        if parameter.param_type_name == "argument":
            names = str(parameter.metavar or parameter.name)
        text = re.sub(r"\s+", " ", getattr(parameter, "help", None) or "")
        default = getattr(parameter.default, "value", parameter.default)
        if default is not False and isinstance(default, int | float | str):
            text += f" Default: {'yes' if default is True else default}."
        lines.append(f"- `{names}`: {text}")
    return "\n".join(lines)


def _link(module: str) -> str:
    return f"see [{module}](#{_anchor(module)})"


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


if __name__ == "__main__":
    TARGET.write_text(reference(), encoding="utf-8")
