# SPDX-License-Identifier: Apache-2.0
"""GNNExplainer: which features and which edges a prediction hangs on.

From `GNNExplainer: Generating Explanations for Graph Neural Networks
<https://arxiv.org/abs/1903.03894>`_. A mask over the columns of the features and one over the edges
are learned, under which the model still predicts the same, and which are small and near 0 or 1.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ...graph import EID, NID, Graph
from ..graphs._neighborhoods import khop_in_subgraph


class GNNExplainer(nn.Module):
    """Explains predictions of a model for nodes, or for graphs.

    ``alpha1`` and ``beta1`` weigh the sizes of the masks of edges and of features in the loss,
    ``alpha2`` and ``beta2`` their entropies.

    Args:
        model: Called as ``model(graph=graph, feat=feat, **kwargs)``, and with ``eweight=``
            ``[num_edges]``; gives logits.
    """

    def __init__(
        self,
        model: nn.Module,
        num_hops: int,
        lr: float = 0.01,
        num_epochs: int = 100,
        *,
        alpha1: float = 0.005,
        alpha2: float = 1.0,
        beta1: float = 1.0,
        beta2: float = 0.1,
        log: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.num_hops, self.lr, self.num_epochs = model, num_hops, lr, num_epochs
        self.alpha1, self.alpha2, self.beta1, self.beta2 = alpha1, alpha2, beta1, beta2
        self.log = log

    def explain_node(
        self, node_id: int, graph: Graph, feat: Tensor, **kwargs: Any
    ) -> tuple[Tensor, Graph, Tensor, Tensor]:
        """Explain the prediction for a node.

        Args:
            **kwargs: For the model; of tensors with a row for each node or edge, it gets those of
                the subgraph.

        Returns:
            The node's id in the subgraph, the subgraph of ``num_hops`` hops, and masks between 0
            and 1 of ``[dim]`` and of the subgraph's edges.
        """
        near, center = khop_in_subgraph(graph, node_id, self.num_hops)
        nodes, edges = near.ndata[NID].long(), near.edata[EID].long()
        rows = {graph.num_edges(): edges, graph.num_nodes(): nodes}
        for name, value in kwargs.items():
            if isinstance(value, Tensor) and value.dim() and len(value) in rows:
                kwargs[name] = value[rows[len(value)]]
        return center, near, *self._masks(near, feat[nodes], center, kwargs)

    def explain_graph(self, graph: Graph, feat: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Explain the prediction for a graph."""
        return self._masks(graph, feat, torch.tensor([0], device=feat.device), kwargs)

    def _masks(
        self, graph: Graph, feat: Tensor, row: Tensor, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        self.model = self.model.to(graph.device)
        self.model.eval()
        with torch.no_grad():
            label = self.model(graph=graph, feat=feat, **kwargs).argmax(-1)[row]
        of_feat = nn.Parameter(torch.randn(1, feat.shape[1], device=feat.device) * 0.1)
        std = nn.init.calculate_gain("relu") * math.sqrt(2.0 / (2 * len(feat)))
        of_edges = nn.Parameter(torch.randn(graph.num_edges(), device=feat.device) * std)
        optimizer = torch.optim.Adam([of_feat, of_edges], lr=self.lr)
        loss = feat.new_zeros(())
        for _ in range(self.num_epochs):
            optimizer.zero_grad()
            edges, columns = of_edges.sigmoid(), of_feat.sigmoid()
            logits = self.model(graph=graph, feat=feat * columns, eweight=edges, **kwargs)
            loss = -logits.log_softmax(-1)[row, label].squeeze()
            loss = loss + self.alpha1 * edges.sum() + self.alpha2 * _entropy(edges)
            loss = loss + self.beta1 * columns.mean() + self.beta2 * _entropy(columns)
            loss.backward()
            optimizer.step()
        if self.log:
            print(f"Explained in {self.num_epochs} steps, loss {loss.item():.4f}")  # noqa: T201
        return of_feat.detach().sigmoid().squeeze(), of_edges.detach().sigmoid()


def _entropy(mask: Tensor) -> Tensor:
    eps = 1e-15
    return (-mask * (mask + eps).log() - (1 - mask) * (1 - mask + eps).log()).mean()
