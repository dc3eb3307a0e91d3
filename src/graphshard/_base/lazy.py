# SPDX-License-Identifier: Apache-2.0
"""Names of a package whose modules are imported when one of them is first used.

So ``graphshard --help`` need not import torch, which takes seconds. Such a package names its
modules, and imports from them for type checkers alone::

    if TYPE_CHECKING:
        from ._file import function

    __all__ = ["function"]


    def __getattr__(name: str) -> Any:
        return lazy_name(__name__, ("_file",), __all__, name)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Collection, Sequence
from typing import Any


def lazy_name(package: str, modules: Sequence[str], public: Collection[str], name: str) -> Any:
    """What a public name of a package is: one of its modules, or what the first has that has it.

    From then on the package has the name itself.

    Args:
        package: Name of the package.
        modules: Names of modules in it, or ``".name"`` of one beside it; quick ones first.
        public: What may be asked for, besides the modules.

    Raises:
        AttributeError: The package has no such name.
    """
    if name in modules:
        return importlib.import_module(f"{package}.{name}")
    if name in public:
        for module in modules:
            found = importlib.import_module(f".{module}", package)
            if hasattr(found, name):
                value = getattr(found, name)
                setattr(sys.modules[package], name, value)
                return value
    raise AttributeError(f"module {package!r} has no attribute {name!r}")
