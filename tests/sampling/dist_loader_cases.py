# SPDX-License-Identifier: Apache-2.0
"""Features, models and losses for the tests of `DataLoader` over sharded graphs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import graphshard
from graphshard.nn import GATConv, HeteroGraphConv, SAGEConv
from graphshard.sampling import MiniBatch

Rows = dict[str, Tensor]
WIDTH, CLASSES = 6, 3


def inputs_of(graph: graphshard.Graph) -> Rows:
    generator = torch.Generator().manual_seed(3)
    return {
        t: torch.randn(graph.num_nodes(t), WIDTH, generator=generator, dtype=torch.float64)
        for t in graph.ntypes
    }


def labels_of(graph: graphshard.Graph) -> Rows:
    return {t: torch.arange(graph.num_nodes(t)) % CLASSES for t in graph.ntypes}


def model_of(kind: str, etypes: list[str]) -> nn.ModuleList:
    torch.manual_seed(0)
    if kind == "plain":
        layers: list[nn.Module] = [
            GATConv(WIDTH, 4, 2, allow_zero_in_degree=True),
            SAGEConv(8, CLASSES, "mean"),
        ]
    else:
        sizes = [(WIDTH, 8), (8, CLASSES)]
        layers = [HeteroGraphConv({e: SAGEConv(*size, "mean") for e in etypes}) for size in sizes]
    return nn.ModuleList(layers).double()


def run(model: nn.ModuleList, graphs: Any, inputs: Rows) -> Rows:
    h: Any = inputs
    for layer, graph in zip(model, graphs, strict=True):
        if len(inputs) == 1:
            (ntype,) = inputs
            h = {ntype: layer(graph, h[ntype]).flatten(1).tanh()}
        else:
            width = 8 if layer is model[0] else CLASSES
            found = layer(graph, h)
            h = {t: found.get(t, h[t].new_zeros(graph.num_dst_nodes(t), width)).tanh() for t in h}
    return h


def losses_of(outputs: Rows, labels: Rows) -> Tensor:
    """One number per row, the types one after another."""
    return torch.cat(
        [nn.functional.cross_entropy(outputs[t], labels[t], reduction="none") for t in outputs]
    )


def grads_of(model: nn.Module) -> list[Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def own(manager: Any, by_type: Rows) -> Rows:
    return {t: rows[manager.original_ids[t]] for t, rows in by_type.items()}


def by_name(manager: Any, name: str, by_type: Rows) -> dict[str, Any]:
    rows = own(manager, by_type)
    return {name: next(iter(rows.values())) if len(rows) == 1 else rows}


def attached(batch: MiniBatch) -> tuple[Rows, Rows]:
    first, last = batch[0], batch[-1]
    return (
        {t: first.srcnodes[t].data["x"] for t in first.srctypes},
        {t: last.dstnodes[t].data["y"] for t in last.dsttypes},
    )
