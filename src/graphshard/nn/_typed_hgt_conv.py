# SPDX-License-Identifier: Apache-2.0
"""TypedHGTConv: the heterogeneous graph transformer's layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import function as fn
from .._base.typing import CanonicalEType
from ..graph import MessagePassingGraph, edge_softmax
from ..ops import leading_rows, linear


class TypedHGTConv(nn.Module):
    r"""Layer of the heterogeneous graph transformer.

    From `Heterogeneous Graph Transformer <https://arxiv.org/abs/2003.01332>`_, without its relative
    temporal encoding. DGL's ``HGTConv`` is the same on a graph of one relation with numbers of
    types; this one takes rows by node type, as PyG's does:

    .. math::
        h'_i = \beta_T A_T\, \mathrm{gelu}\Big(\sum_{(j, r) \in N(i)} \alpha_{jri} \,
        V_S h_j W^{msg}_r \Big) + (1 - \beta_T) h_i, \qquad
        \alpha_{jri} = \mathrm{softmax}_{(j, r) \in N(i)} \Big(\frac{\mu_r}{\sqrt{d}}
        \big\langle K_S h_j W^{att}_r,\, Q_T h_i \big\rangle\Big)

    for each head, over the edges of all relations :math:`r` from a node type :math:`S` to the node
    type :math:`T` of :math:`i`. The part with :math:`h_i` is left out where widths differ.

    Args:
        in_feats: Node type to the width of its input rows.
        out_feats: Width of the output, all heads together; a multiple of ``num_heads``.
        canonical_etypes: Relations of the graph.

    Shape:
        ``feat`` node type to ``[num_nodes, in_feats]`` (of a block, source nodes, destination nodes
        first); output node type to ``[num_dst, out_feats]``, for types that ``feat`` has.

    Raises:
        ValueError: ``out_feats`` is no multiple of ``num_heads``.

    Example:
        >>> import torch
        >>> from graphshard.graph import heterograph
        >>> from graphshard.nn import TypedHGTConv
        >>> plays, likes = ("user", "plays", "game"), ("user", "likes", "game")
        >>> g = heterograph({plays: ([0, 1], [0, 0]), likes: ([1], [0])})
        >>> layer = TypedHGTConv({"user": 4, "game": 3}, 8, 2, [plays, likes])
        >>> layer(g, {"user": torch.ones(2, 4), "game": torch.ones(1, 3)})["game"].shape
        torch.Size([1, 8])
    """

    def __init__(
        self,
        in_feats: Mapping[str, int],
        out_feats: int,
        num_heads: int,
        canonical_etypes: Sequence[CanonicalEType],
    ) -> None:
        super().__init__()
        if out_feats % num_heads:
            raise ValueError(
                f"out_feats must be a multiple of num_heads (got {out_feats} and {num_heads})"
            )
        self._ntypes, self._etypes = tuple(in_feats), tuple(canonical_etypes)
        self._num_heads, self._head_width = num_heads, out_feats // num_heads
        self._in_feats = dict(in_feats)
        self._out_feats = out_feats
        widths = list(in_feats.values())
        self.keys, self.queries, self.values = (
            nn.ModuleList(nn.Linear(width, out_feats) for width in widths) for _ in range(3)
        )
        self.outputs = nn.ModuleList(nn.Linear(out_feats, out_feats) for _ in widths)
        shape = len(self._etypes), num_heads, self._head_width, self._head_width
        self.attention, self.message = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.priority = nn.Parameter(torch.ones(len(self._etypes), num_heads))
        self.skip = nn.Parameter(torch.ones(len(widths)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew, as torch's Linear does; relations' by Glorot, for each head."""
        for layers in (self.keys, self.queries, self.values, self.outputs):
            for layer in layers:
                layer.reset_parameters()  # type: ignore[operator]
        bound = math.sqrt(3 / self._head_width)
        nn.init.uniform_(self.attention, -bound, bound)
        nn.init.uniform_(self.message, -bound, bound)
        nn.init.ones_(self.priority)
        nn.init.ones_(self.skip)

    def forward(self, graph: MessagePassingGraph, feat: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Apply the layer; see the class for shapes."""
        heads = self._num_heads, self._head_width
        number = {ntype: index for index, ntype in enumerate(self._ntypes)}
        own = {
            t: leading_rows(feat[t], graph.num_dst_nodes(t)) if graph.is_block else feat[t]
            for t in self._ntypes
            if t in feat and t in graph.dsttypes
        }
        relations = [
            (index, etype)
            for index, etype in enumerate(self._etypes)
            if etype in graph.canonical_etypes and etype[0] in feat and etype[2] in own
        ]
        with graph.local_scope():
            sources = dict.fromkeys(etype[0] for _, etype in relations)
            keys = {t: linear(feat[t], self.keys[number[t]]).unflatten(1, heads) for t in sources}
            values = {
                t: linear(feat[t], self.values[number[t]]).unflatten(1, heads) for t in sources
            }
            for ntype in dict.fromkeys(etype[2] for _, etype in relations):
                queries = linear(own[ntype], self.queries[number[ntype]]).unflatten(1, heads)
                graph.dstnodes[ntype].data["query"] = queries
            scores = {}
            for index, etype in relations:
                scale = (self.priority[index] / math.sqrt(heads[1])).view(-1, 1, 1)
                data = graph.srcnodes[etype[0]].data
                data[f"key {index}"] = _times(keys[etype[0]], scale * self.attention[index])
                data[f"value {index}"] = _times(values[etype[0]], self.message[index])
                graph.apply_edges(fn.u_dot_v(f"key {index}", "query", "score"), etype=etype)
                scores[etype] = graph.edges[etype].data.pop("score")
            weights = edge_softmax(graph, scores) if scores else {}
            functions = {}
            for index, etype in relations:
                graph.edges[etype].data["weight"] = weights[etype]
                message = fn.u_mul_e(f"value {index}", "weight", "m")
                functions[etype] = message, fn.sum("m", "sum")
            if functions:
                graph.multi_update_all(functions, "sum")
            sums = {t: graph.dstnodes[t].data.get("sum") for t in own}
        return {t: self._joined(number[t], rows, sums[t]) for t, rows in own.items()}

    def _joined(self, number: int, own: Tensor, sums: Tensor | None) -> Tensor:
        """What a node makes of the sum of its messages, and of itself."""
        if sums is None:
            flat = own.new_zeros(own.shape[0], self._out_feats)
        else:
            flat = sums.flatten(1)
        rows: Tensor = linear(F.gelu(flat), self.outputs[number])
        if own.shape[1] != self._out_feats:
            return rows
        share = self.skip[number].sigmoid()
        return share * rows + (1 - share) * own

    def extra_repr(self) -> str:
        return f"in={self._in_feats}, out={self._out_feats}, num_heads={self._num_heads}"


def _times(rows: Tensor, matrices: Tensor) -> Tensor:
    """Rows ``[n, heads, d]`` times the matrix of each head ``[heads, d, e]``."""
    return torch.bmm(rows.transpose(0, 1), matrices.to(rows.dtype)).transpose(0, 1)
