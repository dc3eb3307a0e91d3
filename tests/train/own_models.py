# SPDX-License-Identifier: Apache-2.0
"""Networks as users write them, for ``--model own_models:Net``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from graphshard.nn import GraphConv, HeteroGraphConv, SAGEConv
from graphshard.train import ModelSchema


class Net(nn.Module):
    """GraphSAGE, with graphs of one relation and of several."""

    def __init__(
        self,
        schema: ModelSchema,
        hidden: int,
        layers: int,
        dropout: float,
        out: int,
        aggregator: str = "mean",
    ) -> None:
        super().__init__()
        self.target = schema.target if schema.is_typed else None
        self.inputs = nn.ModuleDict(
            {t: nn.Linear(w, hidden) for t, w in schema.node_widths.items()}
        )
        widths = [hidden] * layers + [out]
        self.layers = nn.ModuleList(
            self._layer(schema, widths[i], widths[i + 1], aggregator) for i in range(layers)
        )
        self.dropout = nn.Dropout(dropout)

    @staticmethod
    def _layer(schema: ModelSchema, width: int, out: int, aggregator: Any) -> nn.Module:
        if not schema.is_typed:
            return SAGEConv(width, out, aggregator)
        return HeteroGraphConv(
            {etype: SAGEConv(width, out, aggregator) for etype in schema.canonical_etypes}
        )

    def forward(self, graphs: Sequence[Any], features: Tensor | Mapping[str, Tensor]) -> Any:
        h: Any
        if isinstance(features, Tensor):
            h = next(iter(self.inputs.values()))(features)
        else:
            h = {t: self.inputs[t](rows) for t, rows in features.items()}
        for index, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            h = layer(graph, h)
            if index + 1 < len(self.layers):
                if isinstance(h, Tensor):
                    h = self.dropout(F.relu(h))
                else:
                    h = {t: self.dropout(F.relu(rows)) for t, rows in h.items()}
        if isinstance(self.target, tuple):  # of a task on edges
            return {ntype: h[ntype] for ntype in self.target}
        return h if self.target is None else h[self.target]


class Layered(Net):
    """The same, one layer after another."""

    def first_rows(self, features: Any) -> Any:
        if isinstance(features, Tensor):
            return next(iter(self.inputs.values()))(features)
        return {t: self.inputs[t](rows) for t, rows in features.items()}

    def layer_rows(self, index: int, graph: Any, rows: Any) -> Any:
        if index and isinstance(rows, Tensor):
            rows = self.dropout(F.relu(rows))
        elif index:
            rows = {t: self.dropout(F.relu(of_type)) for t, of_type in rows.items()}
        return self.layers[index](graph, rows)

    def last_rows(self, rows: Any) -> Any:
        if isinstance(self.target, tuple):
            return {ntype: rows[ntype] for ntype in self.target}
        return rows if self.target is None else rows[self.target]


class Misfit(Net):
    """It gives something else than what it is asked for."""

    def __init__(self, schema: ModelSchema, gives: str, **arguments: Any) -> None:
        super().__init__(schema, **arguments)
        self.gives = gives

    def forward(self, graphs: Sequence[Any], features: Any) -> Any:
        rows = super().forward(graphs, features)
        of_first = rows if isinstance(rows, Tensor) else next(iter(rows.values()))
        return {
            "wide": of_first.repeat(1, 2),
            "few": of_first[:-1],
            "tuple": (rows, rows),
            "array": of_first.detach().numpy(),
            "detached": of_first.detach(),
            "one type": of_first,
            "by type": {"paper": of_first},
        }[self.gives]


class WithoutForward(nn.Module):
    """A class that is not ready."""

    def __init__(self, schema: ModelSchema, **arguments: Any) -> None:
        super().__init__()


class OwnGCN(nn.Module):
    """What the network called gcn is, but for where weight decay falls."""

    def __init__(
        self, schema: ModelSchema, hidden: int, layers: int, dropout: float, out: int
    ) -> None:
        super().__init__()
        widths = [schema.node_widths[str(schema.target)], *[hidden] * (layers - 1), out]
        self.layers = nn.ModuleList(
            GraphConv(a, b) for a, b in zip(widths, widths[1:], strict=False)
        )

    def forward(self, graphs: Sequence[Any], h: Tensor) -> Tensor:
        for index, (layer, graph) in enumerate(zip(self.layers, graphs, strict=True)):
            h = layer(graph, F.relu(h) if index else h)
        return h


class Stranger(nn.Module):
    """It does not take what it is called with."""

    def __init__(self, width: int) -> None:
        super().__init__()


NOT_A_CLASS = 3
