# SPDX-License-Identifier: Apache-2.0
"""GCN, SAGE, GAT, GATv2, R-GCN and HGT, from the layers of `graphshard.nn`.

``model(graphs, features)`` takes one graph per layer. They may be one whole graph or one sharded
graph, repeated, or sampled blocks or MFGs, in which the destinations of one layer are the sources
of the next; a model does not know which. Features are a tensor, or for a typed graph one per node
type.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base.typing import CanonicalEType
from ..graph import MessagePassingGraph
from ..nn import (
    GATConv,
    GATv2Conv,
    GraphConv,
    HeteroGraphConv,
    RelGraphConv,
    SAGEConv,
    TypedHGTConv,
)
from ..nn.edge_attention import EdgeScoredGATConv, EdgeScoredGATv2Conv
from ..ops import affine, leading_rows, linear
from ._embeddings import OneHotRelGraphConv

ModelFeatures: TypeAlias = Tensor | tuple[Tensor, Tensor] | Mapping[str, Tensor]
"""What a model takes: rows of the only node type, those of an `OneHotRelGraphConv`, or by type."""

_MAX_DENSITY = 0.2
"""Share of non-zeros above which plain dropout of input features is as fast."""


class InputDropout(nn.Module):
    """Dropout on input features at the price of their non-zeros.

    Bag-of-words features are a hundred zeros to one number, and dropping a zero changes nothing. So
    random numbers are drawn for the non-zeros alone. Their places are found once for the tensor
    that `mark_constant` names, else in every call. A tensor that needs a gradient, or has few
    zeros, is treated as ``nn.Dropout`` does. The distribution is the same; the random numbers are
    not.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self._constant: weakref.ref[Tensor] | None = None
        self._version = -1
        self._places: Tensor | None = None

    def mark_constant(self, x: Tensor) -> None:
        """Promise that a tensor is not written to, except in ways that torch counts."""
        self._constant, self._version = weakref.ref(x), -1

    def forward(self, x: Tensor) -> Tensor:
        """``x`` with elements set to zero at random and the others scaled, while training."""
        is_known = isinstance(x, Tensor) and not x.requires_grad and x.is_contiguous()
        if not self.training or self.p == 0.0 or not is_known:
            return F.dropout(x, self.p, self.training)
        places = self._places_of(x)
        if places is None:
            return F.dropout(x, self.p)
        out = torch.zeros_like(x)
        out.view(-1)[places] = F.dropout(x.view(-1)[places], self.p)
        return out

    def _places_of(self, x: Tensor) -> Tensor | None:
        """Flat places of the non-zeros; None if there are too many."""
        is_constant = self._constant is not None and self._constant() is x
        if is_constant and self._version == x._version:
            return self._places
        is_dense = int(torch.count_nonzero(x)) > _MAX_DENSITY * x.numel()
        places = None if is_dense else x.view(-1).nonzero().view(-1)
        if is_constant:
            self._places, self._version = places, x._version
        return places

    def extra_repr(self) -> str:
        return f"p={self.p}"


class NodeClassifier(nn.Module):
    """Layers one after the other, with a ReLU and dropout between them.

    ``penalized_parameters()`` are those on which the model's paper puts an L2 penalty,
    ``exchanged_width()`` is a bound on the columns of the rows that ranks exchange.
    """

    input_dropout: nn.Module
    layers: nn.ModuleList
    dropout: nn.Module
    _widths: list[int]  # of what goes into each layer, and comes out of the last
    _sends_inputs = False  # whether a layer sends its rows before the matrix, however wide
    encoder: nn.Linear | None
    own: nn.ModuleList | None
    norms: nn.ModuleList | None

    def __init__(self) -> None:
        super().__init__()
        # Values of the class would hide the modules that are set later.
        self.encoder = self.own = self.norms = None

    def add_own_rows_and_norms(self, residual: bool, norm: bool) -> None:
        """Widen a network of one node type, before it is trained.

        Args:
            residual: Add to what each layer gives a node its own row times a matrix, with a bias.
            norm: Normalise the rows that hidden layers give (LayerNorm).
        """
        if residual:
            self.own = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(self._widths))
        if norm:
            self.norms = nn.ModuleList(nn.LayerNorm(width) for width in self._widths[1:-1])

    def add_encoder(self, in_feats: int) -> None:
        """Put a linear layer and a ReLU of each node by itself before a network of one node type.

        A sum over neighbours of what these make of each tells more than the sum of their features.

        Args:
            in_feats: Width of the features; the network was made for what the encoder gives.
        """
        self.encoder = nn.Linear(in_feats, self._widths[0])

    def forward(self, graphs: Sequence[MessagePassingGraph], features: Any) -> Any:
        """Scores ``[num_dst, num_classes]``."""
        if len(self.layers) != len(graphs):
            raise ValueError(
                f"a model of {len(self.layers)} layers needs {len(self.layers)} graphs (got "
                f"{len(graphs)}); repeat a whole graph: [graph] * layers"
            )
        h = self.first_rows(features)
        for index, graph in enumerate(graphs):
            h = self.layer_rows(index, graph, h)
        return self.last_rows(h)

    def first_rows(self, features: Any) -> Any:
        """What goes into the first layer, of each node by itself."""
        if self.encoder is not None:
            features = F.relu(linear(features, self.encoder))
        return self.input_dropout(features)

    def layer_rows(self, index: int, graph: MessagePassingGraph, h: Any) -> Any:
        """What a layer gives, of what the one before it gave, or `first_rows`."""
        rows = self.input_rows(index, h)
        h = self._layer(self.layers[index], graph, rows)
        if self.own is not None:
            own = leading_rows(rows, graph.num_dst_nodes()) if graph.is_block else rows
            h = h + linear(own, self.own[index])
        if self.norms is not None and index < len(self.norms):
            h = self._normalized(self.norms[index], h)
        return h

    def input_rows(self, index: int, h: Any) -> Any:
        """What goes into a layer, of what the one before it gave, of each node by itself."""
        return self._between(h) if index else h

    def last_rows(self, h: Any) -> Any:
        """What the network gives, of what its last layer gave, of each node by itself."""
        return h

    def _normalized(self, norm: nn.Module, h: Any) -> Any:
        return norm(h)

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h)

    def _between(self, h: Any) -> Any:
        return self.dropout(F.relu(h))

    def penalized_parameters(self) -> list[nn.Parameter]:
        """The first layer's, and the encoder's."""
        encoder = [] if self.encoder is None else list(self.encoder.parameters())
        return [*encoder, *self.layers[0].parameters()]

    @property
    def table_width(self) -> int:
        """Width of rows that are learnt for nodes without features."""
        return self._widths[0] if self.encoder is None else self.encoder.in_features

    def exchanged_width(self) -> int:
        """A layer sends its rows before or after the matrix, whichever is narrower, if it may."""
        if self._sends_inputs:
            return max(self._widths[:-1])
        return max(min(pair) for pair in pairwise(self._widths))


class GCN(NodeClassifier):
    """Graph convolutional network.

    From Kipf and Welling, `Semi-Supervised Classification with Graph Convolutional Networks
    <https://arxiv.org/abs/1609.02907>`_: dropout on the input of each layer, L2 on the first.

    Edges may have ``edata['weight']`` ``[num_edges]``, a further factor of each message.

    Args:
        first_weight: Whether the first layer has a matrix. Sparse features come as rows of one;
            where that is as wide as the first layer, it is the layer's own.
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int,
        num_classes: int,
        layers: int = 2,
        dropout: float = 0.5,
        first_weight: bool = True,
    ) -> None:
        super().__init__()
        self._widths = [in_feats, *[hidden] * (layers - 1), num_classes]
        self.layers = nn.ModuleList(
            GraphConv(*pair, weight=first_weight or index > 0)
            for index, pair in enumerate(pairwise(self._widths))
        )
        self.input_dropout, self.dropout = InputDropout(dropout), nn.Dropout(dropout)

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h, edge_weight=graph.edata.get("weight"))


class SAGE(NodeClassifier):
    """GraphSAGE.

    From Hamilton et al., `Inductive Representation Learning on Large Graphs
    <https://arxiv.org/abs/1706.02216>`_.

    Edges may have ``edata['weight']`` ``[num_edges]``, a further factor of each message.

    Args:
        dropout: Probability, on the input of each layer.
        aggregator: ``"mean"``, ``"gcn"`` or ``"pool"``; see `graphshard.nn.SAGEConv`.
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int,
        num_classes: int,
        layers: int = 2,
        dropout: float = 0.5,
        aggregator: Literal["mean", "gcn", "pool"] = "mean",
    ) -> None:
        super().__init__()
        self._widths = [in_feats, *[hidden] * (layers - 1), num_classes]
        self._sends_inputs = aggregator == "pool"
        self.layers = nn.ModuleList(SAGEConv(*pair, aggregator) for pair in pairwise(self._widths))
        self.input_dropout, self.dropout = InputDropout(dropout), nn.Dropout(dropout)

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h, edge_weight=graph.edata.get("weight"))

    def penalized_parameters(self) -> list[nn.Parameter]:
        """All."""
        return list(self.parameters())


class GAT(NodeClassifier):
    """Graph attention network.

    From Velickovic et al., `Graph Attention Networks <https://arxiv.org/abs/1710.10903>`_. Hidden
    layers put their heads side by side; the last layer has one head. Dropout falls on the input of
    each layer and on the attention.

    Args:
        hidden: Width of one head of the hidden layers.
        heads: Heads of the hidden layers.
        edge_feats: Width of ``edata['feat']``, which the scores read, too; 0: they read none.
    """

    _kind: type[GATConv] | type[GATv2Conv] = GATConv
    _kind_with_edges: type[EdgeScoredGATConv] | type[EdgeScoredGATv2Conv] = EdgeScoredGATConv

    def __init__(
        self,
        in_feats: int,
        hidden: int,
        num_classes: int,
        layers: int = 2,
        heads: int = 8,
        dropout: float = 0.6,
        edge_feats: int = 0,
    ) -> None:
        super().__init__()
        widths = [in_feats, *[hidden * heads] * (layers - 1)]
        drops = [0.0, *[dropout] * (layers - 1)]  # the input's is drawn here
        self.input_dropout = InputDropout(dropout)
        self._reads_edges = edge_feats > 0

        def layer_of(index: int, out_width: int, num_heads: int) -> nn.Module:
            arguments = widths[index], out_width, num_heads, drops[index], dropout
            if edge_feats:
                return self._kind_with_edges(*arguments, edge_feats=edge_feats)
            return self._kind(*arguments)

        self.layers = nn.ModuleList(layer_of(i, hidden, heads) for i in range(layers - 1))
        self.layers.append(layer_of(layers - 1, num_classes, 1))
        self._widths = [*widths, num_classes]

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        rows = layer(graph, h, graph.edata["feat"]) if self._reads_edges else layer(graph, h)
        return rows.flatten(1)

    def _between(self, h: Any) -> Any:
        return F.elu(h)

    def penalized_parameters(self) -> list[nn.Parameter]:
        """All but the biases."""
        return [p for name, p in self.named_parameters() if not name.endswith("bias")]

    def exchanged_width(self) -> int:
        """All heads of a layer side by side."""
        return max(self._widths[1:])


class GATv2(GAT):
    """The same with scores that depend on both ends jointly.

    From Brody et al., `How Attentive are Graph Attention Networks?
    <https://arxiv.org/abs/2105.14491>`_.
    """

    _kind = GATv2Conv
    _kind_with_edges = EdgeScoredGATv2Conv


class RGCN(NodeClassifier):
    """Relational graph convolutional network, on a graph whose edges carry a relation number.

    From Schlichtkrull et al., `Modeling Relational Data with Graph Convolutional Networks
    <https://arxiv.org/abs/1703.06103>`_.

    Edges need ``edata['etype']``, integers ``[num_edges]``, and may have ``edata['norm']``
    ``[num_edges, 1]``, in the paper 1 over the number of edges of the same relation into the same
    node.

    Args:
        in_feats: Width of the features. None: nodes have none, and the first layer is a
            `OneHotRelGraphConv`: features are then its pair of rows, and without ``num_bases`` the
            first graph is its graph of pairs.
        num_bases: Matrices that the relations share; 0: each relation has its own.
        dropout: Probability, on the output of the hidden layers.
    """

    _sends_inputs = True

    def __init__(
        self,
        in_feats: int | None,
        hidden: int,
        num_classes: int,
        num_rels: int,
        layers: int = 2,
        num_bases: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [*[hidden] * (layers - 1), num_classes]
        if in_feats is not None:
            widths.insert(0, in_feats)
        kind: Literal["basis"] | None = "basis" if num_bases else None
        self.layers = nn.ModuleList(
            RelGraphConv(*pair, num_rels, regularizer=kind, num_bases=num_bases or None)
            for pair in pairwise(widths)
        )
        if in_feats is None:
            first = OneHotRelGraphConv(widths[0], num_rels, num_bases)
            self.layers.insert(0, first)
            widths.insert(0, first.in_width)
        self.input_dropout, self.dropout = nn.Identity(), nn.Dropout(dropout)
        self._widths = widths

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h, graph.edata["etype"], graph.edata.get("norm"))

    def start_with_own_rows(self) -> None:
        """Let a node's own row go through each layer as it is, where both are as wide, at first.

        What links are told by is then there from the first step, whatever messages bring.
        """
        for layer in self.layers:
            if isinstance(layer, RelGraphConv) and len({*layer.loop_weight.shape}) == 1:
                nn.init.eye_(layer.loop_weight)

    @property
    def one_hot(self) -> OneHotRelGraphConv | None:
        """The first layer, if nodes have no features."""
        first = self.layers[0]
        return first if isinstance(first, OneHotRelGraphConv) else None


class TypedClassifier(NodeClassifier):
    """A network on a graph with several node types or relations.

    A node type's features first pass through a matrix of its own into the width of the first
    layer; embeddings come in that width.

    Args:
        feature_widths: Width of the features of each node type that has them.
        width: That of the first layer.
    """

    _sends_inputs = True

    def __init__(
        self, feature_widths: Mapping[str, int], target: str | Sequence[str], width: int
    ) -> None:
        super().__init__()
        self.target = target
        self._projected = tuple(feature_widths)
        self.projections = nn.ModuleList(
            nn.Linear(in_width, width, bias=False) for in_width in feature_widths.values()
        )
        #: Whether a ReLU follows these matrices.
        self.encodes = False

    def first_rows(self, features: Mapping[str, Tensor]) -> Any:
        h = dict(features)
        for ntype, projection in zip(self._projected, self.projections, strict=True):
            h[ntype] = projection(features[ntype])
            if self.encodes:
                h[ntype] = F.relu(h[ntype])
        return super().first_rows(h)

    def last_rows(self, rows: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Scores ``[num_dst, num_classes]`` of the target type; of several by type."""
        if isinstance(self.target, str):
            return self._finished(rows[self.target])
        return {ntype: self._finished(rows[ntype]) for ntype in self.target}

    def _finished(self, rows: Tensor) -> Tensor:
        """What the network makes of rows of the last layer."""
        return rows

    def _between(self, h: Any) -> Any:
        return {ntype: self.dropout(F.relu(rows)) for ntype, rows in h.items()}


class TypedRGCN(TypedClassifier):
    """`RGCN` on a graph with several node types or relations.

    Each layer sums, over the relations into a node type, the mean of the sources times the
    relation's matrix, and adds the node's own row times a matrix of its type.
    """

    def __init__(
        self,
        feature_widths: Mapping[str, int],
        canonical_etypes: Sequence[CanonicalEType],
        ntypes: Sequence[str],
        target: str | Sequence[str],
        hidden: int,
        num_classes: int,
        layers: int = 2,
        num_bases: int = 0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(feature_widths, target, hidden)
        self._widths = [*[hidden] * layers, num_classes]
        self.layers = nn.ModuleList(
            _TypedLayer(*pair, canonical_etypes, ntypes, num_bases)
            for pair in pairwise(self._widths)
        )
        self.input_dropout, self.dropout = nn.Identity(), nn.Dropout(dropout)

    def penalized_parameters(self) -> list[nn.Parameter]:
        """The first layer's, and the matrices before it."""
        return [*self.projections.parameters(), *self.layers[0].parameters()]


class _TypedLayer(nn.Module):
    """One layer of `TypedRGCN`."""

    def __init__(
        self,
        in_feats: int,
        out_feats: int,
        canonical_etypes: Sequence[CanonicalEType],
        ntypes: Sequence[str],
        num_bases: int,
    ) -> None:
        super().__init__()
        self._etypes, self._ntypes = tuple(canonical_etypes), tuple(ntypes)
        num_matrices = num_bases or len(self._etypes)
        self.weight = nn.Parameter(torch.empty(num_matrices, in_feats, out_feats))
        self.loop_weight = nn.Parameter(torch.empty(len(self._ntypes), in_feats, out_feats))
        for matrix in (*self.weight, *self.loop_weight):
            nn.init.xavier_uniform_(matrix, gain=nn.init.calculate_gain("relu"))
        if num_bases:
            self.coeff = nn.Parameter(torch.empty(len(self._etypes), num_bases))
            nn.init.xavier_uniform_(self.coeff, gain=nn.init.calculate_gain("relu"))
        self._basis = bool(num_bases)
        self.bias = nn.Parameter(torch.zeros(len(self._ntypes), out_feats))
        self.relations = HeteroGraphConv(
            {
                etype: GraphConv(in_feats, out_feats, norm="right", weight=False, bias=False)
                for etype in self._etypes
            }
        )

    def forward(self, graph: MessagePassingGraph, h: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = self.weight
        if self._basis:
            weight = (self.coeff @ weight.flatten(1)).unflatten(1, weight.shape[1:])
        kwargs = {etype: {"weight": weight[i]} for i, etype in enumerate(self._etypes)}
        gathered = self.relations(graph, h, mod_kwargs=kwargs)
        out = {}
        for index, ntype in enumerate(self._ntypes):
            if ntype not in h or ntype not in graph.dsttypes:
                continue
            own = leading_rows(h[ntype], graph.num_dst_nodes(ntype)) if graph.is_block else h[ntype]
            rows = affine([(own, self.loop_weight[index])], self.bias[index])
            out[ntype] = rows + gathered[ntype] if ntype in gathered else rows
        return out


class TypedNetwork(TypedClassifier):
    """GCN, SAGE, GAT or GATv2 on a graph with several node types or relations.

    Each relation has a layer of its own, and what they give to a node type is summed, as is the
    node's own row times a matrix of its type. GCN takes means, so that nothing depends on how many
    edges a source has besides those of a sample. GAT is then a relational graph attention network,
    with the softmax over the edges of a relation: WIRGAT in Busbridge et al., `Relational Graph
    Attention Networks <https://arxiv.org/abs/1904.05811>`_.

    Edges may have ``weight`` ``[num_edges]``, which GCN and SAGE multiply messages with.

    Args:
        kind: ``"gcn"``, ``"sage"``, ``"gat"`` or ``"gatv2"``.
        heads: Of hidden layers with attention; ``hidden`` is then the width of one.
        aggregator: Of SAGE.
        edge_feats: Width of ``feat`` of the relations whose edges have it, for attention.
    """

    def __init__(
        self,
        kind: str,
        feature_widths: Mapping[str, int],
        canonical_etypes: Sequence[CanonicalEType],
        ntypes: Sequence[str],
        target: str | Sequence[str],
        hidden: int,
        num_classes: int,
        layers: int = 2,
        heads: int = 1,
        dropout: float = 0.5,
        aggregator: Literal["mean", "gcn", "pool"] = "mean",
        edge_feats: Mapping[CanonicalEType, int] | None = None,
    ) -> None:
        self._has_heads = kind in ("gat", "gatv2")
        width = hidden * heads if self._has_heads else hidden
        super().__init__(feature_widths, target, width)
        self._widths = [*[width] * layers, num_classes]
        self._ntypes = tuple(ntypes)

        edge_feats = dict(edge_feats or {}) if self._has_heads else {}

        def layer_of(
            etype: CanonicalEType, in_width: int, out_width: int, num_heads: int
        ) -> nn.Module:
            if kind == "gcn":
                return GraphConv(in_width, out_width, norm="right")
            if kind == "sage":
                return SAGEConv(in_width, out_width, aggregator)
            arguments = in_width, out_width // num_heads, num_heads, 0.0, dropout
            if etype in edge_feats:
                with_edges = EdgeScoredGATConv if kind == "gat" else EdgeScoredGATv2Conv
                return with_edges(*arguments, edge_feats=edge_feats[etype])
            return GATConv(*arguments) if kind == "gat" else GATv2Conv(*arguments)

        heads_of_layers = [heads] * (layers - 1) + [1]
        self.layers = nn.ModuleList(
            _SumOfRelations(
                {etype: layer_of(etype, *pair, num_heads) for etype in canonical_etypes},
                {ntype: nn.Linear(*pair) for ntype in ntypes},
                "edge_feat" if self._has_heads else "edge_weight",
                set(edge_feats) if self._has_heads else set(canonical_etypes),
            )
            for pair, num_heads in zip(pairwise(self._widths), heads_of_layers, strict=True)
        )
        self.input_dropout, self.dropout = nn.Identity(), nn.Dropout(dropout)

    def add_norms(self) -> None:
        """Normalise the rows that hidden layers give (LayerNorm, one a node type)."""
        self.norms = nn.ModuleList(
            nn.ModuleList(nn.LayerNorm(width) for _ in self._ntypes) for width in self._widths[1:-1]
        )

    def _normalized(self, norm: nn.Module, h: Any) -> Any:
        assert isinstance(norm, nn.ModuleList)
        norms = dict(zip(self._ntypes, norm, strict=True))
        return {ntype: norms[ntype](rows) for ntype, rows in h.items()}

    def _between(self, h: Any) -> Any:
        activation = F.elu if self._has_heads else F.relu
        return {ntype: self.dropout(activation(rows)) for ntype, rows in h.items()}

    def penalized_parameters(self) -> list[nn.Parameter]:
        """All but the biases."""
        return [p for name, p in self.named_parameters() if not name.endswith("bias")]


class _SumOfRelations(nn.Module):
    """One layer of `TypedNetwork`.

    Args:
        argument: What layers of relations take of edges, ``"edge_weight"`` or ``"edge_feat"``.
        readers: Relations whose layers take it, where their edges have it.
    """

    def __init__(
        self,
        relations: Mapping[CanonicalEType, nn.Module],
        own: Mapping[str, nn.Module],
        argument: str,
        readers: Collection[CanonicalEType],
    ) -> None:
        super().__init__()
        self.relations = HeteroGraphConv(relations, "sum")
        self._ntypes = tuple(own)
        self.own = nn.ModuleList(own.values())
        self._argument, self._readers = argument, tuple(readers)

    def forward(self, graph: MessagePassingGraph, h: Mapping[str, Tensor]) -> dict[str, Tensor]:
        name = {"edge_weight": "weight", "edge_feat": "feat"}[self._argument]
        arguments = {
            etype: {self._argument: graph.edges[etype].data[name]}
            for etype in self._readers
            if name in graph.edges[etype].data
        }
        gathered = self.relations(graph, h, mod_kwargs=arguments)
        out = {}
        for ntype, layer in zip(self._ntypes, self.own, strict=True):
            if ntype not in h or ntype not in graph.dsttypes:
                continue
            own = leading_rows(h[ntype], graph.num_dst_nodes(ntype)) if graph.is_block else h[ntype]
            rows = linear(own, layer)
            out[ntype] = rows + gathered[ntype].flatten(1) if ntype in gathered else rows
        return out


class HGT(TypedClassifier):
    """Heterogeneous graph transformer; see `graphshard.nn.TypedHGTConv`.

    Features pass through a linear layer of their type and a ReLU, and the rows of the target type
    through one more linear layer after the last. On a graph of one node type, features are a
    tensor.

    Args:
        hidden: Width of all heads together.
        heads: A divisor of it.
        dropout: Probability, on the output of each layer.
    """

    def __init__(
        self,
        feature_widths: Mapping[str, int],
        canonical_etypes: Sequence[CanonicalEType],
        ntypes: Sequence[str],
        target: str | Sequence[str],
        hidden: int,
        num_classes: int,
        layers: int = 2,
        heads: int = 1,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(feature_widths, target, hidden)
        widths = dict.fromkeys(ntypes, hidden)
        self._widths = [hidden] * (layers + 1)
        self.layers = nn.ModuleList(
            TypedHGTConv(widths, hidden, heads, canonical_etypes) for _ in range(layers)
        )
        self.output = nn.Linear(hidden, num_classes)
        self.input_dropout, self.dropout = nn.Identity(), nn.Dropout(dropout)

    def first_rows(self, features: Mapping[str, Tensor] | Tensor) -> Any:
        if not isinstance(features, Mapping):
            assert isinstance(self.target, str)
            features = {self.target: features}
        return super().first_rows(features)

    def _finished(self, rows: Tensor) -> Tensor:
        scores: Tensor = self.output(self.dropout(rows))
        return scores

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        if layer is self.layers[0]:
            h = {ntype: F.relu(rows) for ntype, rows in h.items()}
        return layer(graph, h)

    def _between(self, h: Any) -> Any:
        return {ntype: self.dropout(rows) for ntype, rows in h.items()}

    def penalized_parameters(self) -> list[nn.Parameter]:
        """All but the biases."""
        return [p for name, p in self.named_parameters() if not name.endswith("bias")]

    def exchanged_width(self) -> int:
        """Keys and values."""
        return 2 * max(self._widths)
