# SPDX-License-Identifier: Apache-2.0
"""Layers that DGL alone has, for scripts that import this package as ``dgl``.

They are written against the same protocol, so DGL's own classes run on the graphs of this package.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn


def layers_of_dgl(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of layers: a name that it lacks is looked up in DGL.

    Args:
        module: Name of the module.
    """

    def find(name: str) -> Any:
        if name[:1].isupper() and not _stands_for_dgl():
            try:
                from dgl.nn import pytorch as layers
            except (ImportError, OSError):
                layers = None
            found = getattr(layers, name, None)
            if isinstance(found, type) and issubclass(found, nn.Module):
                return found
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; layers that DGL alone has are there "
            "where DGL is installed"
        )

    return find


def _stands_for_dgl() -> bool:
    """Whether this package is itself imported by the name dgl."""
    return getattr(sys.modules.get("dgl"), "__name__", "dgl") != "dgl"
