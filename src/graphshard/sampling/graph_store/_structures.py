# SPDX-License-Identifier: Apache-2.0
"""structure_of: the structure behind whatever a user calls a graph."""

from __future__ import annotations

from typing import Any

from ...fullbatch import GraphShardManager
from ...graph import Graph
from ._collective import CollectiveStructure
from ._structure import LocalStructure, Structure


def structure_of(graph: Any) -> Structure:
    """How neighbours of a graph are drawn.

    Args:
        graph: A `Graph`, a `GraphShardManager` (then collective, and kept with the manager), or a
            structure itself.

    Raises:
        TypeError: Something else.
    """
    if isinstance(graph, Graph):
        return LocalStructure.of(graph)
    if isinstance(graph, GraphShardManager):
        kept = vars(graph).get("_sampling_structure")
        if not isinstance(kept, CollectiveStructure):
            kept = vars(graph)["_sampling_structure"] = CollectiveStructure.of(graph)
        return kept
    if hasattr(graph, "draw") and hasattr(graph, "canonical_etypes"):
        return graph
    raise TypeError(f"can sample from a Graph or a GraphShardManager (got {type(graph).__name__})")
