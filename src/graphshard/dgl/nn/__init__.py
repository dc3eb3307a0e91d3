# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.nn``: the layers of `graphshard.nn`, and those that DGL alone has.

Constructor arguments and names of parameters are DGL's, so that a ``state_dict`` moves both ways.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...graph import edge_softmax as edge_softmax
from ...nn import *  # noqa: F403
from ..graphs._points import *  # noqa: F403
from .attention_convs import *  # noqa: F403
from .edge_convs import *  # noqa: F403
from .explain import GNNExplainer as GNNExplainer
from .propagation import *  # noqa: F403
from .small_modules import *  # noqa: F403
from .whole_graphs import *  # noqa: F403


def layers_of_dgl(module: str) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module of layers: a name that it lacks is looked up in DGL."""

    def find(name: str) -> Any:
        stands_for_dgl = getattr(sys.modules.get("dgl"), "__name__", "dgl") != "dgl"
        if name[:1].isupper() and not stands_for_dgl:
            try:
                from dgl.nn import pytorch as layers
            except (ImportError, OSError):
                layers = None
            layer = getattr(layers, name, None)
            if isinstance(layer, type) and issubclass(layer, torch.nn.Module):
                return layer
        raise AttributeError(
            f"module {module!r} has no attribute {name!r}; layers that DGL alone has are there "
            "where DGL is installed"
        )

    return find


__getattr__ = layers_of_dgl(__name__)
from . import pytorch as pytorch  # noqa: E402 (it has the names above)
