# SPDX-License-Identifier: Apache-2.0
"""GCN, SAGE, GAT and R-GCN, from the layers of `graphshard.nn`.

``model(graphs, features)`` takes one graph per layer. They may be one whole graph or one sharded
graph, repeated, or sampled blocks or MFGs, in which the destinations of one layer are the sources
of the next; a model does not know which. Features are a tensor, or for a typed graph one per node
type.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base.typing import CanonicalEType
from ..graph import MessagePassingGraph
from ..nn import GATConv, GraphConv, HeteroGraphConv, RelGraphConv, SAGEConv
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
        if not self.training or self.p == 0.0 or x.requires_grad or not x.is_contiguous():
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

    def forward(self, graphs: Sequence[MessagePassingGraph], features: Any) -> Any:
        """Scores ``[num_dst, num_classes]``."""
        h = self.input_dropout(features)
        if len(self.layers) != len(graphs):
            raise ValueError(
                f"a model of {len(self.layers)} layers needs {len(self.layers)} graphs (got "
                f"{len(graphs)}); repeat a whole graph: [graph] * layers"
            )
        for index, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            h = self._layer(layer, graph, self._between(h) if index else h)
        return h

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h)

    def _between(self, h: Any) -> Any:
        return self.dropout(F.relu(h))

    def penalized_parameters(self) -> list[nn.Parameter]:
        """The first layer's."""
        return list(self.layers[0].parameters())

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
    """

    def __init__(
        self, in_feats: int, hidden: int, num_classes: int, layers: int = 2, dropout: float = 0.5
    ) -> None:
        super().__init__()
        self._widths = [in_feats, *[hidden] * (layers - 1), num_classes]
        self.layers = nn.ModuleList(GraphConv(*pair) for pair in pairwise(self._widths))
        self.input_dropout, self.dropout = InputDropout(dropout), nn.Dropout(dropout)

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h, edge_weight=graph.edata.get("weight"))


class SAGE(NodeClassifier):
    """GraphSAGE.

    From Hamilton et al., `Inductive Representation Learning on Large Graphs
    <https://arxiv.org/abs/1706.02216>`_.

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
    """

    def __init__(
        self,
        in_feats: int,
        hidden: int,
        num_classes: int,
        layers: int = 2,
        heads: int = 8,
        dropout: float = 0.6,
    ) -> None:
        super().__init__()
        widths = [in_feats, *[hidden * heads] * (layers - 1)]
        drops = [0.0, *[dropout] * (layers - 1)]  # the input's is drawn here
        self.input_dropout = InputDropout(dropout)
        self.layers = nn.ModuleList(
            GATConv(widths[i], hidden, heads, drops[i], dropout) for i in range(layers - 1)
        )
        self.layers.append(GATConv(widths[-1], num_classes, 1, drops[-1], dropout))
        self._widths = [*widths, num_classes]

    def _layer(self, layer: nn.Module, graph: MessagePassingGraph, h: Any) -> Any:
        return layer(graph, h).flatten(1)

    def _between(self, h: Any) -> Any:
        return F.elu(h)

    def penalized_parameters(self) -> list[nn.Parameter]:
        """All but the biases."""
        return [p for name, p in self.named_parameters() if not name.endswith("bias")]

    def exchanged_width(self) -> int:
        """All heads of a layer side by side."""
        return max(self._widths[1:])


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

    @property
    def one_hot(self) -> OneHotRelGraphConv | None:
        """The first layer, if nodes have no features."""
        first = self.layers[0]
        return first if isinstance(first, OneHotRelGraphConv) else None


class TypedRGCN(NodeClassifier):
    """The same model on a graph with several node types or relations.

    A node type's features first pass through a matrix of its own into the hidden width; embeddings
    come in that width. Each layer sums, over the relations into a node type, the mean of the
    sources times the relation's matrix, and adds the node's own row times a matrix of its type.

    Args:
        feature_widths: Width of the features of each node type that has them; the other types
            are expected in width ``hidden``.
    """

    _sends_inputs = True

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
        super().__init__()
        self.target = target
        self._projected = tuple(feature_widths)
        self.projections = nn.ModuleList(
            nn.Linear(width, hidden, bias=False) for width in feature_widths.values()
        )
        self._widths = [*[hidden] * layers, num_classes]
        self.layers = nn.ModuleList(
            _TypedLayer(*pair, canonical_etypes, ntypes, num_bases)
            for pair in pairwise(self._widths)
        )
        self.input_dropout, self.dropout = nn.Identity(), nn.Dropout(dropout)

    def forward(
        self, graphs: Sequence[MessagePassingGraph], features: Mapping[str, Tensor]
    ) -> Tensor | dict[str, Tensor]:
        """Scores ``[num_dst, num_classes]`` of the target type; of several by type."""
        h = dict(features)
        for ntype, projection in zip(self._projected, self.projections, strict=True):
            h[ntype] = projection(features[ntype])
        rows = super().forward(graphs, h)
        if isinstance(self.target, str):
            return rows[self.target]
        return {ntype: rows[ntype] for ntype in self.target}

    def _between(self, h: Any) -> Any:
        return {ntype: self.dropout(F.relu(rows)) for ntype, rows in h.items()}

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
            own = h[ntype][: graph.num_dst_nodes(ntype)] if graph.is_block else h[ntype]
            rows = own @ self.loop_weight[index] + self.bias[index]
            out[ntype] = rows + gathered[ntype] if ntype in gathered else rows
        return out
