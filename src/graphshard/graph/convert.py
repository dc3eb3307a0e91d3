# SPDX-License-Identifier: Apache-2.0
"""Graphs from, and to, the forms that other libraries use: edge_index, SciPy, NetworkX, DGL."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Hashable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType, EType
from ..errors import GraphTypeError, GraphValueError
from ._block import Block, create_block
from ._graph import Graph, graph, heterograph
from .local_graph import LocalGraph

if TYPE_CHECKING:
    import networkx
    import scipy.sparse
    from dgl import DGLGraph


def require(module: str, install: str, feature: str) -> ModuleType:
    """Import an optional package for a feature that cannot do without it.

    Warnings that the package gives while it is imported for the first time are not ours to fix and
    not the caller's to read, so they are dropped.

    Args:
        install: What ``pip install`` takes, such as ``graphshard[pyg]``.
        feature: What the caller asked for, the subject of the error message.

    Raises:
        ImportError: The package is missing or cannot be loaded.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{feature} needs the package {package!r}, which could not be imported ({error}); "
            f'install it with: pip install "{install}"'
        ) from error


EdgeAttributes: TypeAlias = Tensor | Mapping[str, Tensor] | None


def from_edge_index(
    edge_index: Tensor | Mapping[CanonicalEType, Tensor],
    num_nodes: int | Mapping[str, int] | None = None,
    edge_attr: EdgeAttributes | Mapping[CanonicalEType, EdgeAttributes] = None,
    *,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Graph of PyG's ``edge_index``; the id of an edge is its column.

    Args:
        edge_index: [2, num_edges] integers, row 0 sources, row 1 destinations; for a typed graph
            one such tensor per relation.
        num_nodes: Number of nodes, per type for a typed graph; None takes the largest id plus one.
        edge_attr: [num_edges, ...] tensor, stored as ``edata['edge_attr']``, or a dict of them,
            each stored under its name; for a typed graph a dict of either per relation.
        idtype: int32 or int64; None keeps that of ``edge_index``.
        device: Where the graph is to live; None keeps that of ``edge_index``.

    Returns:
        The graph; attribute tensors are shared unless they have to move.

    Raises:
        ValueError: A tensor is not [2, num_edges], or an id or count is out of range.
        TypeError: Ids are not integers.

    Example:
        >>> g = from_edge_index(torch.tensor([[0, 1], [1, 2]]), num_nodes=4)
        >>> g.num_nodes(), g.num_edges()
        (4, 2)
    """
    if isinstance(edge_index, Mapping):
        if isinstance(num_nodes, int):
            raise GraphTypeError(f"num_nodes must be a dict of node types (got {num_nodes})")
        pairs = {
            etype: _rows(index, f"edge_index of {etype}") for etype, index in edge_index.items()
        }
        g = heterograph(pairs, num_nodes_dict=num_nodes, idtype=idtype, device=device)
        if edge_attr is not None and not isinstance(edge_attr, Mapping):
            raise GraphTypeError("edge_attr of a typed graph must be a dict of relations")
        for etype, attributes in (edge_attr or {}).items():
            _store(g, etype, attributes)
        return g
    if isinstance(num_nodes, Mapping):
        raise GraphTypeError("num_nodes must be an integer, since edge_index has no types")
    g = graph(_rows(edge_index, "edge_index"), num_nodes=num_nodes, idtype=idtype, device=device)
    _store(g, None, edge_attr)
    return g


def _rows(edge_index: Any, what: str) -> tuple[Tensor, Tensor]:
    if not isinstance(edge_index, Tensor) or edge_index.ndim != 2 or edge_index.shape[0] != 2:
        got = tuple(edge_index.shape) if isinstance(edge_index, Tensor) else type(edge_index)
        raise GraphValueError(f"{what} must be a tensor of shape [2, num_edges] (got {got})")
    return edge_index[0], edge_index[1]


def _store(g: Graph, etype: EType | None, attributes: Any) -> None:
    if attributes is None:
        return
    named = attributes if isinstance(attributes, Mapping) else {"edge_attr": attributes}
    for name, value in named.items():
        g.edges[g.to_canonical_etype(etype)].data[name] = value.to(g.device)


def to_edge_index(g: Graph, etype: EType | None = None) -> Tensor | dict[CanonicalEType, Tensor]:
    """[2, num_edges] int64 edges in edge id order.

    Args:
        etype: The relation; None means the only one, or, of several, all.

    Returns:
        One tensor, or for all of several relations a dict of them.
    """
    if etype is None and len(g.canonical_etypes) > 1:
        return {each: _edge_index(g, each) for each in g.canonical_etypes}
    return _edge_index(g, etype)


def _edge_index(g: Graph, etype: EType | None) -> Tensor:
    src, dst = g.edges(etype=etype, order="eid")
    return torch.stack([src, dst]).long()


def from_scipy(
    sp_mat: Any,
    eweight_name: str | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Graph of a SciPy sparse matrix: entry (i, j) is an edge from node i to node j.

    Every stored entry is an edge, explicit zeros and repeated entries too; edge ids follow the
    order of ``sp_mat.tocoo()``.

    Args:
        sp_mat: Square sparse matrix or array; for a typed graph a dict with a matrix, not
            necessarily square, per relation.
        eweight_name: Field of ``edata`` to keep the values in; None drops them.
        idtype: int32 or int64; None means int64.
        device: Where the graph is to live.

    Raises:
        ValueError: A matrix is not square where it must be, or two disagree on a number of nodes.
        TypeError: ``sp_mat`` is no sparse matrix.

    Example:
        >>> import scipy.sparse
        >>> g = from_scipy(scipy.sparse.eye(3), eweight_name='w')
    """
    typed = isinstance(sp_mat, Mapping)
    matrices = sp_mat if typed else {DEFAULT_CANONICAL_ETYPE: sp_mat}
    counts: dict[str, int] = {}
    edges: dict[CanonicalEType, Any] = {}
    for etype, matrix in matrices.items():
        if not hasattr(matrix, "tocoo"):
            raise GraphTypeError(
                f"sp_mat must be a SciPy sparse matrix (got {type(matrix).__name__})"
            )
        coo = matrix.tocoo()
        for ntype, size in zip((etype[0], etype[2]), coo.shape, strict=True):
            if counts.setdefault(ntype, size) != size:
                raise GraphValueError(
                    f"sp_mat{f' of {etype}' if typed else ''} must have one row per source node "
                    f"and one column per destination node (got shape {coo.shape}, but there are "
                    f"{counts[ntype]} nodes of type {ntype!r})"
                )
        edges[etype] = coo
    if typed:
        g = heterograph(edges, num_nodes_dict=counts, idtype=idtype, device=device)
    else:
        coo = edges[DEFAULT_CANONICAL_ETYPE]
        g = graph(coo, num_nodes=counts[DEFAULT_NTYPE], idtype=idtype, device=device)
    if eweight_name is not None:
        for etype, coo in edges.items():
            # A copy: a matrix may be read-only, or change later.
            weights = torch.from_numpy(np.array(coo.data))
            g.edges[etype].data[eweight_name] = weights.to(g.device)
    return g


def to_scipy(
    g: LocalGraph,
    eweight_name: str | None = None,
    etype: EType | None = None,
    fmt: str = "coo",
) -> scipy.sparse.spmatrix:
    """SciPy sparse matrix of one relation: an edge from node i to node j is entry (i, j).

    Args:
        eweight_name: Field of ``edata`` with one number per edge; None gives every edge a 1.
        fmt: ``'coo'`` keeps every edge as its own entry, in edge id order; ``'csr'``, ``'csc'`` and
            the other formats of SciPy add parallel edges up.

    Returns:
        [num_src_nodes, num_dst_nodes] matrix.

    Raises:
        ValueError: The field has several numbers per edge.
        KeyError: There is no such field.
    """
    sparse = require("scipy.sparse", "scipy", "to_scipy")
    source, _, destination = etype = g.to_canonical_etype(etype)
    src, dst = g.edges(etype=etype, order="eid")
    if eweight_name is None:
        weights = np.ones(len(src))
    else:
        value = g.edges[etype].data[eweight_name].detach().cpu()
        if value.ndim != 1:
            raise GraphValueError(
                f"edge field {eweight_name!r} must have one number per edge to be a matrix (got "
                f"shape {tuple(value.shape)})"
            )
        weights = (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    shape = (g.num_src_nodes(source), g.num_dst_nodes(destination))
    matrix = sparse.coo_matrix((weights, (src.cpu().numpy(), dst.cpu().numpy())), shape=shape)
    return matrix.asformat(fmt)


def from_networkx(
    nx_graph: networkx.Graph,
    node_attrs: Sequence[str] | None = None,
    edge_attrs: Sequence[str] | None = None,
    edge_id_attr_name: str | None = None,
    idtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Graph:
    """Graph of a NetworkX graph; an undirected edge becomes two directed ones.

    Nodes are numbered in the sorted order of their labels. Edges come in NetworkX's own order, node
    by node, unless they carry their ids.

    Args:
        node_attrs: Node attributes to stack into ``ndata``; each must be a number or an array, and
            every node must have it. Python's reals become float64, as NetworkX holds them.
        edge_attrs: The same for edges; both directions of an undirected edge get its attributes.
        edge_id_attr_name: Edge attribute with the id of each edge, 0 to num_edges - 1; for a
            directed graph only.
        idtype: int32 or int64; None means int64.
        device: Where the graph is to live.

    Raises:
        ValueError: An attribute is missing somewhere, or edge ids are not a numbering of the edges.
        TypeError: Labels cannot be sorted, or attributes cannot be stacked into a tensor.
    """
    try:
        order = sorted(nx_graph.nodes)
    except TypeError as error:
        raise GraphTypeError(
            f"node labels must be sortable ({error}); number them first with "
            "networkx.convert_node_labels_to_integers"
        ) from error
    number = {label: i for i, label in enumerate(order)}
    edges = list(_directed_edges(nx_graph))
    if edge_id_attr_name is not None:
        if not nx_graph.is_directed():
            raise GraphValueError(
                "edge_id_attr_name needs a directed graph, since an undirected edge becomes two; "
                "call to_directed() and number those"
            )
        edges = _by_id(edges, edge_id_attr_name)
    src = torch.tensor([number[u] for u, _, _ in edges], dtype=torch.int64)
    dst = torch.tensor([number[v] for _, v, _ in edges], dtype=torch.int64)
    g = graph((src, dst), num_nodes=len(order), idtype=idtype, device=device)
    for name in node_attrs or ():
        rows = stack_attribute(name, "node", [(n, nx_graph.nodes[n]) for n in order])
        g.ndata[name] = rows.to(g.device)
    for name in edge_attrs or ():
        g.edata[name] = _stacked(name, edges).to(g.device)
    return g


_NxEdge: TypeAlias = tuple[Hashable, Hashable, Mapping[str, Any]]


def _directed_edges(nx_graph: Any) -> Iterator[_NxEdge]:
    for u, neighbours in nx_graph.adjacency():
        for v, attributes in neighbours.items():
            if nx_graph.is_multigraph():
                for each in attributes.values():
                    yield u, v, each
            else:
                yield u, v, attributes


def _by_id(edges: list[_NxEdge], name: str) -> list[_NxEdge]:
    ids = _stacked(name, edges).reshape(-1).tolist()
    if sorted(ids) != list(range(len(edges))):
        raise GraphValueError(
            f"edge attribute {name!r} must number the edges 0 to {len(edges) - 1}, each once"
        )
    return [edges[i] for i in np.argsort(ids, kind="stable")]


def _stacked(name: str, edges: list[_NxEdge]) -> Tensor:
    return stack_attribute(name, "edge", [((u, v), a) for u, v, a in edges])


def stack_attribute(name: str, what: str, owners: list[tuple[Any, Mapping[str, Any]]]) -> Tensor:
    """``[num_owners, ...]``: one attribute of many nodes or edges, each with its label."""
    for owner, attributes in owners:
        if name not in attributes:
            raise GraphValueError(
                f"every {what} must have the attribute {name!r} ({owner!r} has not)"
            )
    values = [attributes[name] for _, attributes in owners]
    if not values:
        return torch.zeros(0)
    try:
        if isinstance(values[0], Tensor):
            return torch.stack(values)
        if isinstance(values[0], np.ndarray | np.generic):
            return torch.from_numpy(np.asarray(values))
        numbers = torch.tensor(values)
        if numbers.is_floating_point() or numbers.is_complex():  # as Python has them, not rounded
            exact = torch.float64 if numbers.is_floating_point() else torch.complex128
            return torch.tensor(values, dtype=exact)
        return numbers
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphTypeError(
            f"{what} attribute {name!r} must be numbers, or arrays of one shape ({error})"
        ) from error


def to_networkx(
    g: Graph,
    node_attrs: Sequence[str] | None = None,
    edge_attrs: Sequence[str] | None = None,
) -> networkx.MultiDiGraph:
    """NetworkX graph of a graph, with the edge id as the attribute ``id``.

    Nodes of a typed graph are numbered type after type. Each has its type as ``label``; each edge
    has its relation as ``triples``.

    Args:
        node_attrs: Node features to copy, a tensor per node; on a typed graph, from the types that
            have them.
        edge_attrs: The same for edge features.

    Returns:
        ``MultiDiGraph`` whose nodes are 0 to num_nodes - 1.

    Raises:
        ValueError: The graph is a block.
        KeyError: No type has such a field.
        ImportError: NetworkX is not installed.
    """
    networkx_module = require("networkx", "networkx", "to_networkx")
    if g.is_block:
        raise GraphValueError("to_networkx takes a graph (got a block); use block_to_graph first")
    nodes = [g.nodes[ntype].data for ntype in g.ntypes]
    edges = [g.edges[etype].data for etype in g.canonical_etypes]
    for what, names, spaces in (("node", node_attrs, nodes), ("edge", edge_attrs, edges)):
        for name in names or ():
            if not any(name in fields for fields in spaces):
                raise KeyError(f"no {what} feature {name!r} on any type")
    typed = not g.is_homogeneous
    out = networkx_module.MultiDiGraph()
    first: dict[str, int] = {}
    for ntype in g.ntypes:
        first[ntype] = out.number_of_nodes()
        columns = _columns(g.nodes[ntype].data, node_attrs)
        label = {"label": ntype} if typed else {}
        for node in range(g.num_nodes(ntype)):
            row = {name: values[node] for name, values in columns.items()}
            out.add_node(first[ntype] + node, **label, **row)
    for etype in g.canonical_etypes:
        columns = _columns(g.edges[etype].data, edge_attrs)
        kind: dict[str, Any] = {"triples": etype} if typed else {}
        pair = (end.tolist() for end in g.edges(etype=etype))
        for i, (u, v) in enumerate(zip(*pair, strict=True)):
            row = {name: values[i] for name, values in columns.items()}
            out.add_edge(first[etype[0]] + u, first[etype[2]] + v, id=i, **kind, **row)
    return out


def _columns(
    fields: Mapping[str, Tensor], names: Sequence[str] | None
) -> dict[str, tuple[Tensor, ...]]:
    """The rows of those of the named features that there are."""
    present = [name for name in names or () if name in fields]
    return {name: fields[name].detach().cpu().unbind(0) for name in present}


def from_dgl(g: DGLGraph) -> Any:
    """Graph of a ``DGLGraph``, or `Block` of a ``DGLBlock``.

    Types, edge ids, id dtype, device, features and, of a batched graph, the numbers of nodes and
    edges of each graph are the same. DGL need not be importable: the object is asked only for what
    every DGL release answers.

    Args:
        g: DGL graph; node and edge feature tensors are shared, not copied.
    """
    ours = SimpleNamespace(graph=graph, heterograph=heterograph, create_block=create_block)
    return _rebuilt(g, ours)


def to_dgl(g: Graph | Block) -> DGLGraph:
    """``DGLGraph`` of a graph, or ``DGLBlock`` of a block; the reverse of `from_dgl`.

    Args:
        g: Graph or block, whole in this process; feature tensors are shared, not copied.

    Returns:
        The DGL graph. DGL sorts node types and relations of a graph by name.

    Raises:
        ImportError: DGL is not installed (the extra ``graphshard[dgl]``).
        TypeError: A graph of several ranks, of which this one has a part.
    """
    if not isinstance(g, LocalGraph):
        raise TypeError(
            f"to_dgl takes a graph or a block that is whole in this process (got "
            f"{type(g).__name__}); DGL has no graph that spans ranks: write the parts for it with "
            "graphshard convert"
        )
    return _rebuilt(g, require("dgl", "graphshard[dgl]", "to_dgl"))


def _rebuilt(g: Any, library: Any) -> Any:
    """A graph or block made anew by the functions of another library, which have DGL's names."""
    edges = {etype: g.edges(etype=etype, order="eid") for etype in g.canonical_etypes}
    kind = {"idtype": g.idtype, "device": g.device}
    sides: list[tuple[str, Any]]
    if g.is_block:
        num_src = {ntype: g.num_src_nodes(ntype) for ntype in g.srctypes}
        num_dst = {ntype: g.num_dst_nodes(ntype) for ntype in g.dsttypes}
        new = library.create_block(edges, num_src, num_dst, **kind)
        sides = [("srcnodes", g.srctypes), ("dstnodes", g.dsttypes)]
    else:
        if list(edges) == [DEFAULT_CANONICAL_ETYPE]:
            pair = edges[DEFAULT_CANONICAL_ETYPE]
            new = library.graph(pair, num_nodes=g.num_nodes(), **kind)
        else:
            num_nodes = {ntype: g.num_nodes(ntype) for ntype in g.ntypes}
            new = library.heterograph(edges, num_nodes, **kind)
        sides = [("nodes", g.ntypes)]
        if g.batch_size > 1:
            new.set_batch_num_nodes({t: g.batch_num_nodes(t) for t in g.ntypes})
            new.set_batch_num_edges({t: g.batch_num_edges(t) for t in g.canonical_etypes})
    sides.append(("edges", g.canonical_etypes))
    for view, kinds in sides:
        for each in kinds:
            for name, value in dict(getattr(g, view)[each].data).items():
                getattr(new, view)[each].data[name] = value
    return new
