# SPDX-License-Identifier: Apache-2.0
"""write_module_of_cells: a function from a cell of a notebook, as a module for other processes.

A rank is a process of its own, which the notebook's names do not reach, and nothing here is
pickled. So the function's source is copied from its cell, with all that it uses:

* functions and classes of other cells, by their source;
* what was imported, by an import;
* plain values and tensors of the notebook, as `run_ranks` sends its arguments.

Anything else that the function uses, such as a graph or a model that a cell made, is an error that
names it: ranks make such things themselves, or load them.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import linecache
import symtable
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from ._values import encode_value, save_value

VALUES = "__graphshard_values__"
"""Name, in the module, of the dictionary of the notebook's values."""


def is_from_a_cell(fn: object) -> bool:
    """Whether a function was defined in a cell of a notebook, or typed into an interpreter."""
    return (
        isinstance(fn, FunctionType)
        and fn.__module__ == "__main__"
        and "<" not in fn.__qualname__
        and getattr(sys.modules["__main__"], "__file__", None) is None
    )


def write_module_of_cells(fn: Callable[..., Any], file: Path) -> None:
    """Write the module that has a function of a cell, and its values beside it (`save_value`)."""
    module = _Module(vars(sys.modules["__main__"]))
    module.add(fn.__name__, fn, fn.__name__)
    save_value(file.with_suffix(""), module.values)
    header = ["from __future__ import annotations"]
    if module.values:
        header += [
            "from pathlib import Path as _Path",
            "from graphshard.testing._values import load_value as _load_value",
            f"{VALUES} = _load_value(_Path({str(file.with_suffix(''))!r}))",
        ]
    file.write_text("\n".join([*header, *module.lines]) + "\n", encoding="utf-8")


class _Module:
    """The lines of the module: names in the order in which they depend on one another."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self.namespace = namespace
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self._seen: set[str] = set()

    def add(self, name: str, value: object, user: str) -> None:
        """Add what defines a name that ``user`` uses, after all that it needs itself."""
        if name in self._seen:
            return
        self._seen.add(name)
        if isinstance(value, ModuleType):
            self.lines.append(f"import {value.__name__} as {name}")
        elif isinstance(value, FunctionType | type) and value.__module__ == "__main__":
            source, used = _definition(value)
            for other in used:
                used_value = self.namespace.get(other)
                if other in self.namespace and not _is_builtin(other, used_value):
                    self.add(other, used_value, value.__name__)
            self.lines.append(source)
            if name != value.__name__:
                self.lines.append(f"{name} = {value.__name__}")
        elif (line := _import_of(name, value)) is not None:
            self.lines.append(line)
        else:
            self._add_value(name, value, user)

    def _add_value(self, name: str, value: object, user: str) -> None:
        try:
            encode_value(value, {}, name)
        except TypeError as error:
            raise TypeError(
                f"{user} uses {name}, which does not reach the ranks: {error}, as do functions, "
                f"classes and imports of cells; make {name} inside {user}, or load it there"
            ) from None
        self.values[name] = value
        self.lines.append(f"{name} = {VALUES}[{name!r}]")


def _definition(value: Any) -> tuple[str, set[str]]:
    """The source of a function or class of a cell, decorators and all, and the names in it."""
    for file in _files_of(value):
        text = "".join(linecache.getlines(file))
        for node in reversed(ast.parse(text).body if text else []):
            if isinstance(node, _DEFINITIONS) and node.name == value.__name__:
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                source = "\n".join(text.splitlines()[first - 1 : node.end_lineno])
                return source, _globals_of(symtable.symtable(source, file, "exec"))
    raise TypeError(
        f"the text of {value.__name__} was not found; define it at the top level of a cell"
    )


def _globals_of(table: symtable.SymbolTable) -> set[str]:
    """Names that a definition reads from around it, not those of its own variables."""
    at_top = table.get_type() == "module"
    names = {
        symbol.get_name()
        for symbol in table.get_symbols()
        if symbol.is_referenced() and (at_top or symbol.is_global())
    }
    return names.union(*(_globals_of(child) for child in table.get_children()))


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _files_of(value: Any) -> list[str]:
    """Names under which the text of a definition may be kept, the likeliest first.

    A function knows the name of its cell, and so do the methods of a class. A class without methods
    is looked for in all cells, from the last.
    """
    functions = [value, *vars(value).values()] if isinstance(value, type) else [value]
    functions = [inspect.unwrap(f) for f in functions if isinstance(f, FunctionType)]
    files = [function.__code__.co_filename for function in functions]
    return [*files, *reversed(_cells())] if isinstance(value, type) else files


def _cells() -> list[str]:
    """Names of the cells whose text is kept: they have no time at which a file changed."""
    entries = linecache.cache.items()
    return [name for name, entry in entries if len(entry) == 4 and entry[1] is None]


def _import_of(name: str, value: object) -> str | None:
    """The line that imports a value: as a cell did, or from where it says that it is."""
    for file in reversed(_cells()):
        text = "".join(linecache.getlines(file))
        with contextlib.suppress(SyntaxError):
            for node in ast.parse(text).body:
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    for alias in node.names:
                        is_name = name == (alias.asname or alias.name)
                        if is_name and _attribute(node.module, alias.name) is value:
                            return f"from {node.module} import {alias.name} as {name}"
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    is_named = isinstance(module, str) and qualname.isidentifier()
    if is_named and _attribute(str(module), qualname) is value:
        return f"from {module} import {qualname} as {name}"
    return None


def _is_builtin(name: str, value: Any) -> bool:
    """Whether a name is Python's own, also where IPython has wrapped it, as it does ``open``."""
    builtin = getattr(builtins, name, None)
    return builtin is not None and (inspect.unwrap(value) if callable(value) else value) is builtin


def _attribute(module: str, name: str) -> object:
    return getattr(sys.modules.get(module), name, None)
