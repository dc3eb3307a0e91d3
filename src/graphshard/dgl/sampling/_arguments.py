# SPDX-License-Identifier: Apache-2.0
"""Arguments of the functions on graphs: nodes by type, numbers by relation, edges to a frontier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError
from ...graph import EID, Graph, edge_subgraph
from ...graph.structure import as_integers, check_ids
from ...sampling.graph_store import DrawOptions, EdgeDir
from ...sampling.lazy_features import set_lazy, without_features


def ids_of(g: Graph, ids: Any, count: int, what: str) -> Tensor:
    """Ids in the graph's idtype, from a tensor, an array, a list or one number.

    Raises:
        DGLError: They are no integers, or out of range.
    """
    found = as_integers(ids, what)
    check_ids(found, count, "an id", what)
    return found.to(device=g.device, dtype=g.idtype)


def nodes_by_type(g: Graph, nodes: Any) -> dict[str, Tensor]:
    """Nodes by type, of the types that are given.

    Raises:
        DGLError: Ids without a type on a graph of several, an unknown type, or ids that are none.
        ValueError: An empty dictionary.
    """
    if not isinstance(nodes, Mapping):
        if len(g.ntypes) != 1:
            raise GraphTypeError(
                f"nodes must be a dictionary from type to ids, since the graph has {g.ntypes}"
            )
        nodes = {g.ntypes[0]: nodes}
    if not nodes:
        raise GraphValueError("nodes must name a type (got an empty dictionary); give it no ids")
    for ntype in nodes:
        if ntype not in g.ntypes:
            raise GraphValueError(f"no node type {ntype!r}; the graph has {g.ntypes}")
    return {t: ids_of(g, i, g.num_nodes(t), f"nodes of type {t!r}") for t, i in nodes.items()}


def edges_by_relation(g: Graph, edges: Any, what: str) -> dict[CanonicalEType, Tensor]:
    """Edge ids by relation; None is no edges. Errors as `nodes_by_type`."""
    if edges is None:
        return {}
    if not isinstance(edges, Mapping):
        if len(g.canonical_etypes) != 1:
            raise GraphTypeError(
                f"{what} must be a dictionary from relation to ids, since the graph has "
                f"{g.canonical_etypes}"
            )
        edges = {g.canonical_etypes[0]: edges}
    named = {g.to_canonical_etype(etype): ids for etype, ids in edges.items()}
    return {t: ids_of(g, i, g.num_edges(t), f"{what} of {t}") for t, i in named.items()}


def number_by_relation(g: Graph, number: Any, what: str) -> dict[CanonicalEType, int]:
    """A number per relation, at least -1, which means all.

    Raises:
        DGLError: Another number, or a dictionary that leaves a relation out.
    """
    given = number
    if not isinstance(number, Mapping):
        given = dict.fromkeys(g.canonical_etypes, number)
    found = {}
    for etype, one in given.items():
        if isinstance(one, bool) or not hasattr(one, "__index__") or int(one) < -1:
            raise GraphValueError(
                f"{what} must be an integer of at least -1, which means all (got {one!r})"
            )
        found[g.to_canonical_etype(etype)] = int(one)
    missing = [etype for etype in g.canonical_etypes if etype not in found]
    if missing:
        raise GraphValueError(
            f"a dictionary for {what} must name every relation (missing {missing}); give 0 for "
            "those that shall have no edges"
        )
    return found


def options_for(edge_dir: str, replace: bool = False) -> DrawOptions:
    """How to draw.

    Raises:
        DGLError: An unknown direction.
    """
    return DrawOptions(replace=bool(replace), edge_dir=checked_dir(edge_dir))


def checked_dir(edge_dir: str) -> EdgeDir:
    """A direction, ``"in"`` or ``"out"``.

    Raises:
        DGLError: It is none.
    """
    if edge_dir == "in":
        return "in"
    if edge_dir == "out":
        return "out"
    raise GraphValueError(f"edge_dir must be 'in' or 'out' (got {edge_dir!r})")


def frontier_of(
    g: Graph,
    eids: Mapping[CanonicalEType, Tensor],
    copy_ndata: bool,
    copy_edata: bool,
    output_device: torch.device | str | None,
) -> Graph:
    """The graph of all nodes and some edges.

    Args:
        g: The graph.
        eids: Relation to ids of edges; none of the relations that are left out.
        copy_ndata: Whether it has the features of nodes.
        copy_edata: Whether it has the features of edges, and their ids as ``edata[EID]``.
        output_device: Where it shall be; None: where ``g`` is.
    """
    found: Graph = edge_subgraph(without_features(g), eids, relabel_nodes=False, store_ids=True)
    for ntype in g.ntypes if copy_ndata else ():
        found.nodes[ntype].data.update(g.nodes[ntype].data)
    for etype in g.canonical_etypes:
        if copy_edata:
            set_lazy(g.edges[etype].data, found.edges[etype].data, EID)
        else:
            found.edges[etype].data.clear()
    return found if output_device is None else found.to(output_device)
