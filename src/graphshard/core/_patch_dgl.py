# SPDX-License-Identifier: Apache-2.0
"""patch_dgl: let layers of DGL that call its ``edge_softmax`` run on graphs of this package.

The layers of `graphshard.nn` need none of it.
"""

from __future__ import annotations

import sys
from typing import Any

from ..graph import MessagePassingGraph, edge_softmax

_LAYERS = "dgl.nn.pytorch.conv."


def patched_edge_softmax(graph: Any, *args: Any, **kwargs: Any) -> Any:
    """`edge_softmax` on a graph of this package, DGL's own on a graph of DGL.

    Args:
        graph: Either.
        *args: As for `edge_softmax`: logits, eids, norm_by.
        **kwargs: The same.
    """
    if isinstance(graph, MessagePassingGraph):
        return edge_softmax(graph, *args, **kwargs)
    return sys.modules["dgl"].nn.functional.edge_softmax(graph, *args, **kwargs)


def patch_dgl() -> None:
    """Redirect the ``edge_softmax`` of DGL's layers, where the program has imported DGL.

    Every layer of ``dgl.nn.pytorch.conv`` that normalises over edges then runs on a `Graph`, a
    `Block` and a `GraphShardManager` too; on DGL's graphs it computes what it did before. Nothing
    happens in a program without DGL, or the second time. ``RelGraphConv`` needs no patch: the
    parameters of message functions are found without being named.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_LAYERS) and hasattr(module, "edge_softmax"):
            vars(module)["edge_softmax"] = patched_edge_softmax
