# SPDX-License-Identifier: Apache-2.0
"""edge_softmax: attention weights out of logits, on any graph that speaks the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from torch import Tensor

from ..._base.typing import CanonicalEType, NormBy
from ...errors import GraphTypeError, GraphUnsupportedError, GraphValueError
from ...ops import Adjacency
from ...ops import edge_softmax as adjacency_edge_softmax
from ..structure import ALL, is_all
from ._protocol import MessagePassingGraph


@overload
def edge_softmax(
    graph: MessagePassingGraph, logits: Tensor, eids: Any = ..., norm_by: NormBy = ...
) -> Tensor: ...


@overload
def edge_softmax(
    graph: MessagePassingGraph, logits: Mapping[Any, Any], eids: Any = ..., norm_by: NormBy = ...
) -> dict[CanonicalEType, Any]: ...


def edge_softmax(
    graph: MessagePassingGraph, logits: Any, eids: Any = ALL, norm_by: NormBy = "dst"
) -> Any:
    r"""Softmax over the edges that share an end.

    .. math:: a_{uv} = \frac{\exp(z_{uv})}{\sum_{w \in N(v)} \exp(z_{wv})}

    Args:
        graph: Any graph of the protocol.
        logits: ``[num_edges, ...]`` values of the only relation; or relation -> values, and then
            edges of all given relations that share a node are normalised together.
        eids: Edge ids that ``logits`` is about; other edges do not exist for the softmax. All by
            default.
        norm_by: ``"dst"``: over the in-edges of a node. ``"src"``: over its out-edges.

    Returns:
        Weights in the form and shape of ``logits``; on a sharded graph they may be deferred.

    Raises:
        ValueError: unknown ``norm_by``, relation or edge, or a wrong number of rows.
        TypeError: single logits on a graph of several relations.
        NotImplementedError: ``eids`` with several relations, or where the graph lacks it.

    Example:
        >>> import torch
        >>> from graphshard.graph import graph
        >>> g = graph(([0, 1, 2], [1, 2, 2]))
        >>> edge_softmax(g, torch.tensor([5.0, 0.0, 0.0]))
        tensor([1.0000, 0.5000, 0.5000])
    """
    if norm_by not in ("dst", "src"):
        raise GraphValueError(f"norm_by must be 'dst' or 'src' (got {norm_by!r})")
    if isinstance(logits, Mapping):
        if not is_all(eids):
            raise GraphUnsupportedError(
                "edge_softmax takes eids on a single relation only; slice the graph by relation"
            )
        return _typed(graph, logits, norm_by)
    if len(graph.canonical_etypes) != 1:
        raise GraphTypeError(
            f"logits must be a dictionary from relation to values because the graph has the "
            f"relations {graph.canonical_etypes} (got {type(logits).__name__})"
        )
    if is_all(eids):
        _check_rows(logits, graph.num_edges(), graph.canonical_etypes[0])
        return graph._edge_softmax(0, logits, norm_by)
    if isinstance(eids, Tensor) and eids.is_floating_point() and bool((eids == eids.floor()).all()):
        eids = eids.long()  # torch.Tensor([0, 1]), as DGL's documentation has it
    rows = graph._edge_ids(eids, 0)
    _check_rows(logits, int(rows.shape[0]), graph.canonical_etypes[0])
    src, dst = (end.index_select(0, rows) for end in graph.all_edges("uv"))
    chosen = Adjacency(src, dst, graph.num_src_nodes(), graph.num_dst_nodes(), check=False)
    return adjacency_edge_softmax(chosen, logits, norm_by)


def _typed(
    graph: MessagePassingGraph, logits: Mapping[Any, Any], norm_by: NormBy
) -> dict[CanonicalEType, Any]:
    schema = graph._schema
    by_relation = {schema.relation(etype): values for etype, values in logits.items()}
    ends = schema.dst_of if norm_by == "dst" else schema.src_of
    groups: dict[int, list[int]] = {}
    for relation, values in by_relation.items():
        etype = schema.canonical_etypes[relation]
        _check_rows(values, graph.num_edges(etype), etype)
        groups.setdefault(ends[relation], []).append(relation)
    weights: dict[int, Any] = {}
    for relations in groups.values():
        if len(relations) == 1:
            (relation,) = relations
            weights[relation] = graph._edge_softmax(relation, by_relation[relation], norm_by)
            continue
        values = [by_relation[relation] for relation in relations]
        joint = graph._edge_softmax_joint(relations, values, norm_by)
        weights.update(zip(relations, joint, strict=True))
    return {schema.canonical_etypes[relation]: weights[relation] for relation in by_relation}


def _check_rows(logits: Any, num_edges: int, etype: CanonicalEType) -> None:
    shape = getattr(logits, "shape", None)
    if shape is None:
        raise GraphTypeError(f"logits must be a tensor (got {type(logits).__name__})")
    if len(shape) == 0 or shape[0] != num_edges:
        raise GraphValueError(
            f"logits must have one row for each of the {num_edges} edges of relation {etype} (got "
            f"shape {tuple(shape)})"
        )
