# SPDX-License-Identifier: Apache-2.0
"""Features on sampled graphs: all of them lazily, those that were named ahead of time.

[Note: lazy features]
    Whatever a sampler of this package draws has every feature of the graph that it was drawn from:
    ``blocks[0].srcdata["feat"]`` is there without being asked for, as with DGL. A column costs
    nothing until it is read; it is gathered then, from the tensor that the graph had when the
    batch was drawn. What ``prefetch_node_feats`` and its kin name is read by the loader, in its
    own thread, before the training loop gets the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from ..graph import EID, NID, Block, Graph

FeatureNames: TypeAlias = Sequence[str] | Mapping[Any, Sequence[str]] | None
"""Names of features; on a typed graph also type to names."""


def set_all_lazy(graph: Graph, blocks: Sequence[Block]) -> None:
    """Give blocks that were drawn from a graph all its features, lazily.

    Args:
        blocks: Blocks with the graph's node types, and its relations in the same order.
    """
    for block in blocks:
        for ntype in graph.ntypes:
            set_lazy(graph.nodes[ntype].data, block.srcnodes[ntype].data, NID)
            set_lazy(graph.nodes[ntype].data, block.dstnodes[ntype].data, NID)
        # Along out-edges messages run against the graph's edges, so names differ and order does not
        for etype, of_block in zip(graph.canonical_etypes, block.canonical_etypes, strict=True):
            set_lazy(graph.edges[etype].data, block.edges[of_block].data, EID)


def without_features(graph: Graph) -> Graph:
    """A graph with the nodes and edges of another one, and no features."""
    counts = {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
    return Graph(counts, dict(zip(graph.canonical_etypes, graph.relations, strict=True)))


def set_lazy(source: Any, target: Any, id_field: str, names: Iterable[str] | None = None) -> None:
    """Give one frame of a sampled graph columns of the frame that its rows are from, lazily.

    Args:
        source: Features of one type of the graph.
        target: Features of the same type of the sampled graph; what it has already stays.
        id_field: Field of ``target`` with the row numbers; where it is absent nothing happens.
        names: Which columns, where they exist; all by default.
    """
    if id_field not in target:
        return
    rows = target.frame.unread(id_field)
    for name in source if names is None else names:
        if name in source and name not in target:
            target.frame.set_lazy(name, source[name], rows)


def read_named(space: Any, types: Sequence[Any], names: FeatureNames) -> None:
    """Gather the lazy columns of these names; ``space`` is ``nodes`` or ``edges`` of a graph."""
    for kind in types:
        data = space[kind].data
        for name in names_for(names, kind):
            if name in data:
                data[name]


def check_named(
    names_of: Callable[[Any], Collection[str]],
    types: Sequence[Any],
    names: FeatureNames,
    what: str,
) -> None:
    """Raise unless every feature that is named exists.

    Args:
        names: Names of features; those without a type must be had by some type.

    Raises:
        TypeError: A name in place of a list of names.
        ValueError: There is no such feature, or type.
    """
    by_key = names if isinstance(names, Mapping) else {None: names or ()}
    for key, of_key in by_key.items():
        if isinstance(of_key, str):
            raise TypeError(f"{what} must hold lists of names (got {of_key!r}); use [{of_key!r}]")
        meant = [kind for kind in types if key is None or _means(key, kind)]
        if not meant:
            raise ValueError(f"{what} names the type {key!r}; the graph has {list(types)}")
        for name in of_key:
            if not any(name in names_of(kind) for kind in meant):
                present = sorted({field for kind in meant for field in names_of(kind)})
                of = "" if key is None else f" of {key!r}"
                raise ValueError(
                    f"{what} names {name!r}{of}, which the graph does not have (it has {present})"
                )


def names_for(names: FeatureNames, kind: Any) -> Sequence[str]:
    """The names that are meant for one type."""
    if isinstance(names, Mapping):
        return [name for key, of_key in names.items() if _means(key, kind) for name in of_key]
    return names or ()


def set_node_lazy_features(g: Graph, feature_names: FeatureNames) -> None:
    """Check that a sampled graph has features of nodes, as those of whole graphs always do.

    DGL needs to be told which features shall come along. Here all do, gathered when they are read,
    so that there is nothing to set; the names are checked.

    Args:
        feature_names: Names, or on a typed graph node type to names.

    Raises:
        ValueError: It has no such feature.
    """
    check_named(lambda t: g.nodes[t].data, g.ntypes, feature_names, "feature_names")


def set_edge_lazy_features(g: Graph, feature_names: FeatureNames) -> None:
    """As `set_node_lazy_features`, of edges."""
    check_named(lambda t: g.edges[t].data, g.canonical_etypes, feature_names, "feature_names")


def set_src_lazy_features(g: Block, feature_names: FeatureNames) -> None:
    """As `set_node_lazy_features`, of the source nodes of a block."""
    check_named(lambda t: g.srcnodes[t].data, g.srctypes, feature_names, "feature_names")


def set_dst_lazy_features(g: Block, feature_names: FeatureNames) -> None:
    """As `set_node_lazy_features`, of the destination nodes of a block."""
    check_named(lambda t: g.dstnodes[t].data, g.dsttypes, feature_names, "feature_names")


def _means(key: Any, kind: Any) -> bool:
    """Whether a user's key stands for a node type, or a relation (or the same turned round)."""
    return key == kind or (isinstance(kind, tuple) and key in (kind[1], kind[::-1]))
