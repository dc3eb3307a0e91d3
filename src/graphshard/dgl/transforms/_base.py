# SPDX-License-Identifier: Apache-2.0
"""BaseTransform: what is called with a graph and returns a graph; and Compose, several of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...graph import Graph, heterograph


class BaseTransform:
    """Base of all transforms: subclasses implement ``__call__``."""

    def __call__(self, g: Graph) -> Graph:
        """The changed graph."""
        raise NotImplementedError(f"{type(self).__name__} must implement __call__(g)")

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class Compose(BaseTransform):
    """Several transforms, one after another.

    Args:
        transforms: The transforms, first to last.

    Example:
        >>> from graphshard.graph import graph
        >>> from graphshard.dgl.transforms import AddReverse, AddSelfLoop, Compose
        >>> Compose([AddReverse(), AddSelfLoop()])(graph(([0], [1]))).num_edges()
        4
    """

    def __init__(self, transforms: Sequence[Callable[[Graph], Graph]]) -> None:
        self.transforms = transforms

    def __call__(self, g: Graph) -> Graph:
        for transform in self.transforms:
            g = transform(g)
        return g

    def __repr__(self) -> str:
        inner = ",\n".join(f"  {transform}" for transform in self.transforms)
        return f"{type(self).__name__}([\n{inner}\n])"


def with_edges(g: Graph, edges: Mapping[Any, Any], copy_edata: bool = True) -> Graph:
    """A graph with the nodes of ``g`` and their features, and other relations.

    Args:
        g: Graph.
        edges: Relation -> (sources, destinations).
        copy_edata: Whether to carry over the edge features of relations that ``g`` has too.
    """
    counts = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
    new = heterograph(edges, counts, idtype=g.idtype, device=g.device)
    for ntype in g.ntypes:
        new.nodes[ntype].data.update(g.nodes[ntype].data)
    for etype in g.canonical_etypes if copy_edata else ():
        if etype in new.canonical_etypes:
            new.edges[etype].data.update(g.edges[etype].data)
    return new


def spaces_with(g: Graph, name: str, what: str) -> list[Any]:
    """The feature dictionaries of the types that have a feature; ``what`` is nodes or edges.

    Raises:
        KeyError: no type has it.
    """
    if what == "nodes":
        spaces = [g.nodes[ntype].data for ntype in g.ntypes]
    else:
        spaces = [g.edges[etype].data for etype in g.canonical_etypes]
    found = [fields for fields in spaces if name in fields]
    if not found:
        raise KeyError(f"no feature {name!r} on any type of {what}")
    return found
