# SPDX-License-Identifier: Apache-2.0
"""A typed graph as one set of nodes and edges with type numbers, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Literal, overload

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphValueError
from .._graph import Graph, graph, heterograph
from ..structure import EID, ETYPE, NID, NTYPE
from ._transforms import check_plain, node_counts, select_fields


@overload
def to_homogeneous(
    g: Graph,
    ndata: Sequence[str] | None = ...,
    edata: Sequence[str] | None = ...,
    store_type: bool = ...,
    return_count: Literal[False] = ...,
) -> Graph: ...


@overload
def to_homogeneous(
    g: Graph,
    ndata: Sequence[str] | None = ...,
    edata: Sequence[str] | None = ...,
    store_type: bool = ...,
    *,
    return_count: Literal[True],
) -> tuple[Graph, list[int], list[int]]: ...


def to_homogeneous(
    g: Graph,
    ndata: Sequence[str] | None = None,
    edata: Sequence[str] | None = None,
    store_type: bool = True,
    return_count: bool = False,
) -> Graph | tuple[Graph, list[int], list[int]]:
    """Forget the types: one graph whose nodes and edges are numbered type after type.

    The types come in the order of ``ntypes`` and ``canonical_etypes``. ``ndata[NID]`` and
    ``edata[EID]`` hold each node's and edge's id within its type.

    Args:
        g: Graph.
        ndata: Node features to concatenate over all types that have nodes, which must all have them
            in one row shape and dtype; None carries none over.
        edata: The same for edge features and relations.
        store_type: Whether to store type numbers (int64) as ``ndata[NTYPE]`` and ``edata[ETYPE]``.
        return_count: Whether to return the number of nodes and edges of each type as well.

    Returns:
        The graph; with ``return_count`` a triple of graph, node counts and edge counts.

    Raises:
        ValueError: A type lacks a feature that was asked for, or has it in another form.

    Example:
        >>> g = heterograph({('u', 'r', 'v'): ([0, 1], [0, 0])})
        >>> to_homogeneous(g).edges()
        (tensor([0, 1]), tensor([2, 2]))
    """
    check_plain(g, "to_homogeneous")
    counts = node_counts(g)
    offsets = dict(zip(counts, accumulate(counts.values(), initial=0), strict=False))
    ends = [
        (src + offsets[source], dst + offsets[destination])
        for (source, _, destination), (src, dst) in (
            (etype, g.edges(etype=etype, order="eid")) for etype in g.canonical_etypes
        )
    ]
    num_edges = [g.num_edges(etype) for etype in g.canonical_etypes]
    pair = torch.cat([src for src, _ in ends]), torch.cat([dst for _, dst in ends])
    new = graph(pair, num_nodes=sum(counts.values()))
    for name in ndata or ():
        columns = {f"nodes of type {t!r}": g.nodes[t].data.get(name) for t in g.ntypes}
        new.ndata[name] = _joined(name, columns, list(counts.values()))
    for name in edata or ():
        columns = {f"edges of {e}": g.edges[e].data.get(name) for e in g.canonical_etypes}
        new.edata[name] = _joined(name, columns, num_edges)
    new.ndata[NID], ntype_ids = _numbers(g, list(counts.values()))
    new.edata[EID], etype_ids = _numbers(g, num_edges)
    if store_type:
        new.ndata[NTYPE], new.edata[ETYPE] = ntype_ids, etype_ids
    return (new, list(counts.values()), num_edges) if return_count else new


def _joined(name: str, columns: dict[str, Tensor | None], counts: Sequence[int]) -> Tensor:
    """The columns of types that have rows; where none has, those that there are."""
    filled = {what for what, count in zip(columns, counts, strict=True) if count}
    filled = filled or {what for what, column in columns.items() if column is not None}
    columns = {what: column for what, column in columns.items() if what in filled}
    forms = {
        what: None if column is None else (tuple(column.shape[1:]), column.dtype)
        for what, column in columns.items()
    }
    if len(set(forms.values())) != 1 or None in forms.values():
        raise GraphValueError(
            f"feature {name!r} must be on every type that has any nodes or edges, with one row "
            f"shape and dtype, to be joined (got {forms})"
        )
    return torch.cat([column for column in columns.values() if column is not None])


def _numbers(g: Graph, counts: list[int]) -> tuple[Tensor, Tensor]:
    """(id within its type, type) of every node or edge, type after type."""
    total = sum(counts)
    types = torch.arange(len(counts), device=g.device).repeat_interleave(
        torch.tensor(counts, dtype=torch.int64, device=g.device), output_size=total
    )
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int64, device=g.device)
    ids = torch.arange(total, device=g.device) - starts[types]
    return ids.to(g.idtype), types


def to_heterogeneous(
    g: Graph,
    ntypes: Sequence[str],
    etypes: Sequence[str],
    ntype_field: str = NTYPE,
    etype_field: str = ETYPE,
    metagraph: Iterable[CanonicalEType] | Any = None,
) -> Graph:
    """Split a graph by the type numbers that its nodes and edges carry; undoes `to_homogeneous`.

    Edges with one type number are still told apart by the types of their ends: ``etypes[i]`` may
    become several relations. Nodes and edges of a type keep their order. ``ndata[NID]`` and
    ``edata[EID]`` of the result hold their ids in ``g``.

    Args:
        g: Graph with one node type and one relation; all features are carried over, except the type
            numbers and ids.
        ntypes: Name of each node type number.
        etypes: Name of each edge type number; a name may occur several times.
        ntype_field: Node feature that holds type numbers.
        etype_field: Edge feature that holds type numbers.
        metagraph: The relations that the result is to have, as triples, or as a NetworkX
            ``MultiDiGraph`` whose edge keys are names; None takes those that occur. Only with it
            can a relation without edges come back.

    Returns:
        The typed graph, types and relations in sorted order.

    Raises:
        KeyError: There are no type numbers.
        ValueError: The graph is typed already, a number has no name, an edge belongs to no relation
            of ``metagraph``, or there are no edges and no ``metagraph``.

    Example:
        >>> g = heterograph({('u', 'r', 'v'): ([0, 1], [0, 0])})
        >>> to_heterogeneous(to_homogeneous(g), g.ntypes, g.etypes).canonical_etypes
        [('u', 'r', 'v')]
    """
    if g.is_block or not g.is_homogeneous:
        raise GraphValueError(
            "to_heterogeneous takes a graph with one node type and one relation "
            f"(got {g.canonical_etypes})"
        )
    if len(set(ntypes)) < len(ntypes):
        raise GraphValueError(f"ntypes must name every node type differently (got {list(ntypes)})")
    ntype_ids = _type_numbers(g.ndata[ntype_field], ntypes, "ntypes", "nodes")
    etype_ids = _type_numbers(g.edata[etype_field], etypes, "etypes", "edges")
    same_name = torch.tensor([list(etypes).index(name) for name in etypes], dtype=torch.int64)
    etype_ids = same_name.to(g.device)[etype_ids]
    groups = {name: (ntype_ids == i).nonzero().squeeze(1) for i, name in enumerate(ntypes)}
    local = torch.empty_like(ntype_ids)
    for ids in groups.values():
        local[ids] = torch.arange(ids.shape[0], device=g.device)

    src, dst = (end.long() for end in g.edges(order="eid"))
    # one number per (source type, edge type, destination type)
    keys = (ntype_ids[src] * len(etypes) + etype_ids) * len(ntypes) + ntype_ids[dst]
    wanted = _relations(keys, ntypes, etypes, metagraph)
    members = {etype: (keys == key).nonzero().squeeze(1) for etype, key in wanted.items()}
    if sum(ids.shape[0] for ids in members.values()) < keys.shape[0]:
        left = ~torch.isin(keys, torch.tensor(list(wanted.values()), device=g.device))
        stray = _triple(int(keys[left][0]), ntypes, etypes)
        raise GraphValueError(
            f"metagraph must hold the relation of every edge (there is none for {stray})"
        )
    counts = {name: int(ids.shape[0]) for name, ids in groups.items()}
    pairs = {etype: (local[src[ids]], local[dst[ids]]) for etype, ids in members.items()}
    new = heterograph(pairs, num_nodes_dict=counts, idtype=g.idtype, device=g.device)

    nodes = {name: value for name, value in g.ndata.items() if name not in (ntype_field, NID)}
    for ntype, ids in groups.items():
        select_fields(nodes, new.nodes[ntype].data, ids)
        new.nodes[ntype].data[NID] = ids.to(g.idtype)
    edges = {name: value for name, value in g.edata.items() if name not in (etype_field, EID)}
    for etype, ids in members.items():
        select_fields(edges, new.edges[etype].data, ids)
        new.edges[etype].data[EID] = ids.to(g.idtype)
    return new


def _type_numbers(numbers: Tensor, names: Sequence[str], argument: str, what: str) -> Tensor:
    numbers = numbers.long()
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(names):
        raise GraphValueError(
            f"{argument} must name every type number of the {what} (got {len(names)} names for "
            f"numbers {int(numbers.min())} to {int(numbers.max())})"
        )
    return numbers


def _relations(
    keys: Tensor, ntypes: Sequence[str], etypes: Sequence[str], metagraph: Any
) -> dict[CanonicalEType, int]:
    """The key of each relation that the result has."""
    if metagraph is None:
        present = torch.unique(keys).tolist()
        if not present:
            raise GraphValueError(
                "a graph without edges does not say which relations it has; give metagraph"
            )
        return {_triple(key, ntypes, etypes): key for key in present}
    if hasattr(metagraph, "edges"):
        metagraph = [(s, name, d) for s, d, name in metagraph.edges(keys=True)]
    ntype_number = {name: i for i, name in enumerate(ntypes)}
    etype_number = {name: list(etypes).index(name) for name in etypes}
    out = {}
    for source, name, destination in metagraph:
        unknown = {source, destination} - set(ntypes) | ({name} - set(etypes))
        if unknown:
            raise GraphValueError(
                f"metagraph must use the names in ntypes and etypes (got {unknown})"
            )
        middle = ntype_number[source] * len(etypes) + etype_number[name]
        key = middle * len(ntypes) + ntype_number[destination]
        out[(source, name, destination)] = key
    return out


def _triple(key: int, ntypes: Sequence[str], etypes: Sequence[str]) -> CanonicalEType:
    middle, destination = divmod(key, len(ntypes))
    source, name = divmod(middle, len(etypes))
    return ntypes[source], etypes[name], ntypes[destination]
