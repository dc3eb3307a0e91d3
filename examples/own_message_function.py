# SPDX-License-Identifier: Apache-2.0
"""A layer of one's own, with a learned message function, on a sharded graph and on a whole one.

    torchrun --standalone --nproc-per-node 2 examples/own_message_function.py

The message of an edge is what a small network makes of the rows at both ends and of the edge's own
features. graphshard does not know this network. It runs the function on one part of the graph at
a time, runs it again in the backward instead of keeping its results, and finds the parameters that
it used. At the end every worker compares what it got with one process that holds the whole graph.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import graphshard as gs
from graphshard import function as fn
from graphshard.comm import all_reduce, barrier
from graphshard.graph import EdgeBatch, MessagePassingGraph

NUM_NODES, NUM_EDGES, WIDTH, HIDDEN = 300, 2400, 6, 5


class EdgeNetworkConv(nn.Module):
    """``h'_i = mean over the edges (j, i) of tanh(network([h_j - h_i, w_ji]))``."""

    def __init__(self, in_feats: int, out_feats: int) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(in_feats + 1, HIDDEN), nn.ReLU())
        self.last = nn.Linear(HIDDEN, out_feats)

    def message(self, edges: EdgeBatch) -> dict[str, Tensor]:
        """Messages of a batch of edges: any torch code, with one row per edge."""
        pair = torch.cat([edges.src["h"] - edges.dst["h"], edges.data["w"]], dim=1)
        return {"m": torch.tanh(self.last(self.network(pair)))}

    def forward(self, graph: MessagePassingGraph, h: Tensor, weight: Tensor) -> Tensor:
        """Rows ``[num_nodes, out_feats]``, from ``[num_nodes, in]`` and ``[num_edges, 1]``."""
        with graph.local_scope():  # fields set in here are gone afterwards
            graph.ndata["h"] = h
            graph.edata["w"] = weight
            graph.update_all(self.message, fn.mean("m", "out"))
            return graph.dstdata["out"]


def make_graph() -> gs.Graph:
    """The same graph in every process; float64, so that equal means equal to 1e-10."""
    graph = gs.data.random_graph(NUM_NODES, NUM_EDGES, seed=1)
    rng = torch.Generator().manual_seed(0)
    graph.ndata["x"] = torch.randn(NUM_NODES, WIDTH, generator=rng, dtype=torch.float64)
    graph.edata["w"] = torch.rand(NUM_EDGES, 1, generator=rng, dtype=torch.float64)
    return graph


def largest_difference(a: list[Tensor], b: list[Tensor]) -> float:
    """Over all entries, and all workers."""
    gaps = [(x - y).abs().max() for x, y in zip(a, b, strict=True)]
    return float(all_reduce(torch.stack(gaps).max().detach(), "max"))


def main() -> None:
    """Run the layer on the shards and on the whole; compare."""
    parser = argparse.ArgumentParser(description="A user-defined message function.")
    build = Path(__file__).resolve().parent.parent / "build"
    parser.add_argument("--out", type=Path, default=build / "examples" / "own_message_function")
    folder = parser.parse_args().out

    gs.initialize_comms(timeout=60)
    whole = make_graph()
    if gs.rank() == 0:
        gs.partition_graph(
            whole, "random", gs.world_size(), folder, part_method="random", quiet=True
        )
    barrier()

    # The sharded graph: features came with the part, rows in the part's order.
    data = gs.load_dgl_partition_data(folder / "random.json", gs.rank())
    graph = gs.construct_full_graph(data, mode="sequential")
    x = gs.suffix_key_lookup(data.node_features, "x")
    weight = gs.suffix_key_lookup(data.edge_features, "w")

    torch.manual_seed(0)
    layer = EdgeNetworkConv(WIDTH, 3).double()
    gs.sync_params(layer)
    mine = layer(graph, x, weight)
    (mine**2).sum().backward()
    gs.gather_grads(layer)
    gradients = [parameter.grad.clone() for parameter in layer.parameters()]

    # The same layer on the whole graph. "orig_id" says which of its nodes are this worker's.
    layer.zero_grad()
    everything = layer(whole, whole.ndata["x"], whole.edata["w"])
    (everything**2).sum().backward()
    orig_id = gs.suffix_key_lookup(data.node_features, "orig_id")

    output_gap = largest_difference([mine], [everything[orig_id]])
    gradient_gap = largest_difference(gradients, [p.grad for p in layer.parameters()])
    if gs.rank() == 0:
        print(f"{graph}")
        print(f"largest difference from one process: outputs {output_gap:.0e}")
        print(f"largest difference from one process: gradients {gradient_gap:.0e}")
    gs.shutdown_comms()


if __name__ == "__main__":
    main()
