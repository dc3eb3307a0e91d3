# SPDX-License-Identifier: Apache-2.0
"""Programs that import dgl and sar, run as they are: ``python -m graphshard.dgl train.py``.

`install` makes ``dgl`` and ``sar`` names of `graphshard.dgl` and `graphshard.sar` in this process,
modules below them included, and in those that it starts by multiprocessing. What is installed under
these names is neither imported nor changed. `main` runs a script or a module after that, as the
interpreter itself would.
"""

from __future__ import annotations

import builtins
import dis
import importlib
import importlib.abc
import importlib.machinery
import multiprocessing.spawn
import os
import runpy
import sys
import zipfile
from collections.abc import Callable, Sequence
from types import ModuleType, TracebackType
from typing import Any

PACKAGES = {"dgl": "graphshard.dgl", "sar": "graphshard.sar"}

_GUIDES = {"dgl": "docs/guides/dgl_names.md", "sar": "docs/guides/migrating_from_sar.md"}

_IMPORT_FROM = dis.opmap["IMPORT_FROM"]


def is_installed() -> bool:
    """Whether ``import dgl`` is `graphshard.dgl` in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Let ``dgl`` and ``sar`` be the packages here, from now on; a second call changes nothing.

    Raises:
        ImportError: Another package of one of these names is imported already.
    """
    for name, ours in PACKAGES.items():
        loaded = sys.modules.get(name)
        if loaded is not None and loaded is not sys.modules.get(ours):
            raise ImportError(
                f"{name} is imported already, from {getattr(loaded, '__file__', 'elsewhere')}, and "
                f"cannot become {ours}; start the process anew and do this first",
                name=name,
            )
    if is_installed():
        return
    sys.meta_path.insert(0, _Finder())
    _add_aliases()
    plain = multiprocessing.spawn.get_preparation_data

    def get_preparation_data(name: str) -> dict[str, Any]:
        data = plain(name)
        if name == "ignore":
            # For a fork server, which would import the program without the names here. Its
            # children import it.
            data.pop("init_main_from_path", None)
        return {"graphshard": _InstallHere(), **data}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


def load_ipython_extension(ipython: object) -> None:
    """What ``%load_ext graphshard.dgl`` calls."""
    install()


class _InstallHere:
    """The first of what a spawned process reads, before it imports the program: calls `install`."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return install, ()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds ``dgl.nn`` where ``graphshard.dgl.nn`` is: the same module object."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in PACKAGES:
            return None
        ours = _our_name(fullname)
        try:
            module = importlib.import_module(ours)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{ours}.".startswith(f"{error.name}."):
                raise  # something that the module itself imports
            text = f"No module named {fullname!r}: {_not_here(*fullname.rpartition('.')[::2])}"
            raise ModuleNotFoundError(text, name=fullname) from None
        # Not yet an alias: a module that a finder has entered itself is loaded by its own spec.
        return importlib.machinery.ModuleSpec(fullname, self, loader_state=module.__spec__)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return sys.modules[_our_name(spec.name)]

    def exec_module(self, module: ModuleType) -> None:
        """Has run already: only its own spec, which the import has exchanged, is put back."""
        spec = module.__spec__
        assert spec is not None
        module.__spec__ = spec.loader_state
        _name_what_is_missing(module, spec.name)
        _add_aliases()


def _our_name(name: str) -> str:
    top, dot, rest = name.partition(".")
    return f"{PACKAGES[top]}{dot}{rest}"


def _not_here(alias: str, name: str) -> str:
    """What is said of a name that a module lacks; a package's table ``INSTEAD`` says more."""
    top, _, module_path = alias.partition(".")
    instead = vars(sys.modules[PACKAGES[top]]).get("INSTEAD", {}).get(module_path)
    text = f"{alias}.{name} is not here; see {_GUIDES[top]}"
    return text if instead is None else f"{text}. {instead}"


def _add_aliases() -> None:
    """Enter the modules that are loaded under their second names, too."""
    for name, ours in PACKAGES.items():
        for full_name, module in list(sys.modules.items()):
            if full_name == ours or full_name.startswith(f"{ours}."):
                alias = name + full_name.removeprefix(ours)
                if alias not in sys.modules:
                    sys.modules[alias] = module
                    _name_what_is_missing(module, alias)


def _name_what_is_missing(module: ModuleType, alias: str) -> None:
    """Let a name that a module lacks, or a module below it, be an error that says where to look."""
    names = vars(module)
    lookup = names.get("__getattr__")

    def find(name: str) -> Any:
        if lookup is not None:
            try:
                return lookup(name)
            except AttributeError:
                pass
        text = f"module {alias!r} has no attribute {name!r}"
        if not name.startswith("__"):
            reason = _not_here(alias, name)
            is_module = f"{module.__name__}.{name}" in sys.modules
            frame = sys._getframe(1)
            runs_from_import = frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
            if runs_from_import and not is_module:
                # An AttributeError would become an ImportError without this text.
                text = f"cannot import name {name!r} from {alias!r}: {reason}"
                raise ImportError(text, name=alias, path=names.get("__file__"))
            text = f"{text}: {reason}"
        raise AttributeError(text, name=name, obj=module)

    names["__getattr__"] = find
    names.setdefault("__path__", [])  # else a module below it is "not a package", and no more said


# ------------------------------------------------------------------ running a program


class _ScriptLoader(importlib.machinery.SourceFileLoader):
    """Compiles a script each time, as the interpreter does: no ``__pycache__`` beside it."""

    def get_code(self, fullname: str) -> Any:
        return self.source_to_code(self.get_data(self.path), self.path)


def main(package: str) -> None:
    """Run what the command line names, ``train.py`` or ``-m module``, as the main program.

    Raises:
        SystemExit: The command line names nothing that can be run.
    """
    usage = f"usage: python -m {package} (SCRIPT | -m MODULE) [ARGS ...]"
    program = sys.argv[1:]
    if program[:1] in (["-h"], ["--help"]):
        print(f"{usage}\n\nRuns a program that imports dgl or sar: both are graphshard's.")  # noqa: T201
        return
    is_module = program[:1] == ["-m"]
    if len(program) < 1 + is_module or (program[0].startswith("-") and not is_module):
        sys.stderr.write(f"{usage}\n")
        raise SystemExit(2)
    install()
    try:
        if is_module:
            sys.argv[:] = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv[:] = program
            _run_script(program[0])
    except BaseException as error:
        inside = _without_our_frames(error.__traceback__)
        if is_module and inside is None and isinstance(error, ImportError):  # there is no such one
            raise SystemExit(f"{sys.executable}: {error}") from None
        _show_without_our_frames(error, inside)
        raise


def _run_script(path: str) -> None:
    full_path = os.path.abspath(path)
    is_package = os.path.isdir(path) or zipfile.is_zipfile(path)
    if not getattr(sys.flags, "safe_path", sys.flags.isolated):
        # The first is the current folder, after ``python -m``.
        sys.path[0] = full_path if is_package else os.path.dirname(os.path.realpath(path))
    if is_package:
        runpy.run_path(path, run_name="__main__")
        return
    loader = _ScriptLoader("__main__", full_path)
    module = ModuleType("__main__")
    vars(module).update(
        __annotations__={},
        __builtins__=builtins,
        __cached__=None,
        __file__=full_path,
        __loader__=loader,
    )
    try:
        loader.get_data(full_path)
    except OSError as error:
        sys.stderr.write(
            f"{sys.executable}: can't open file {full_path!r}: [Errno {error.errno}] "
            f"{error.strerror}\n"
        )
        raise SystemExit(2) from None
    sys.modules["__main__"] = module
    loader.exec_module(module)


def _without_our_frames(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback from the first frame of the program on; None if it did not come to that."""
    outside = {__name__, "runpy", "importlib._bootstrap", "importlib._bootstrap_external"}
    while traceback is not None and traceback.tb_frame.f_globals.get("__name__") in outside:
        traceback = traceback.tb_next
    return traceback


def _show_without_our_frames(error: BaseException, inside: TracebackType | None) -> None:
    """Have the interpreter show an error, when it leaves the program, as it came out of it."""
    hook = sys.excepthook

    def show(kind: type[BaseException], shown: BaseException, traceback: Any) -> None:
        if shown is error:
            shown.__traceback__ = traceback = inside
        hook(kind, shown, traceback)

    sys.excepthook = show
