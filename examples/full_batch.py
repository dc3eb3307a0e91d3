# SPDX-License-Identifier: Apache-2.0
"""Exact full-batch training of GraphSAGE on the Cora citation graph, by several workers.

    torchrun --standalone --nproc-per-node 2 examples/full_batch.py
    torchrun --standalone --nproc-per-node 2 examples/full_batch.py --device cuda

The graph is cut into as many parts as there are workers. Each worker holds one part and trains on
the whole graph together with the others: the loss, the gradients and the accuracy are those that
one process would compute. Read the file from top to bottom; `main` is at the end.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard as gs
from graphshard.comm import all_reduce, barrier
from graphshard.graph import MessagePassingGraph

HIDDEN, DROPOUT, LEARNING_RATE, WEIGHT_DECAY, EPOCHS = 16, 0.5, 0.03, 5e-4, 40


# The model is plain PyTorch. A layer takes any graph: a whole one, one part of a sharded graph, or
# a sampled block, of which each layer needs its own. So the model takes a graph for each layer, and
# the same class serves here and in sampled.py. Nothing in it knows how many workers there are.
class GraphSAGE(nn.Module):
    """Two GraphSAGE layers that average over the neighbours."""

    def __init__(self, in_feats: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            [
                gs.nn.SAGEConv(in_feats, HIDDEN, aggregator_type="mean"),
                gs.nn.SAGEConv(HIDDEN, num_classes, aggregator_type="mean"),
            ]
        )

    def forward(self, graphs: Sequence[MessagePassingGraph], features: Tensor) -> Tensor:
        """Scores ``[num_nodes, num_classes]`` of the nodes that the last layer's graph ends at."""
        h = features
        for index, conv in enumerate(self.convs):
            h = conv(graphs[index], F.dropout(h, DROPOUT, self.training))
            if index < len(self.convs) - 1:
                h = F.relu(h)
        return h


def join_workers(device_name: str) -> torch.device:
    """Meet the other workers; returns the device of this one.

    torchrun tells each its rank and where the others are. Where every worker has a GPU to itself
    NCCL is used, else gloo.
    """
    device = gs.choose_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    gs.initialize_comms(backend="auto", timeout=60)
    return device


def partition_cora(folder: Path) -> Path:
    """Cut Cora into one part per worker; returns the JSON that describes the parts.

    One worker writes, the others wait. In real work this is a step of its own, done once:
    ``graphshard partition --data cora --parts 2 --out FOLDER``.
    """
    if gs.rank() == 0:
        cora = gs.data.load_dataset("cora", row_normalize=True)
        gs.partition_graph(cora.graph, "cora", num_parts=gs.world_size(), out_path=folder)
    barrier()
    return folder / "cora.json"


def sum_over_workers(*numbers: float) -> list[float]:
    """Each number, added up over all workers."""
    return all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()


def main() -> None:
    """Partition, train, evaluate."""
    parser = argparse.ArgumentParser(description="Full-batch training on Cora.")
    build = Path(__file__).resolve().parent.parent / "build"
    parser.add_argument("--out", type=Path, default=build / "examples" / "full_batch")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    args = parser.parse_args()

    # 1. Meet the other workers.
    device = join_workers(args.device)
    parts = partition_cora(args.out)

    # 2. Read this worker's part, and only that: features and labels of its nodes, the edges into
    #    them. construct_full_graph then tells every worker which of its rows the others need.
    data = gs.load_dgl_partition_data(parts, gs.rank(), device)
    graph = gs.construct_full_graph(data)
    graphs = [graph, graph]  # the whole graph for both layers
    features = gs.suffix_key_lookup(data.node_features, "feat")
    labels = gs.suffix_key_lookup(data.node_features, "label")
    masks = {
        split: gs.suffix_key_lookup(data.node_features, f"{split}_mask").bool()
        for split in ("train", "test")
    }
    (num_train,) = sum_over_workers(float(masks["train"].sum()))
    print(
        f"worker {gs.rank()} of {gs.world_size()}: {graph.num_nodes()} of "
        f"{data.node_map().num_ids} nodes, {graph.mode} aggregation"
    )

    # 3. The same weights everywhere; other dropout on each worker's nodes.
    torch.manual_seed(gs.rank())
    model = GraphSAGE(features.shape[1], num_classes=7).to(device)
    gs.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    # 4. An epoch is one step on the whole graph. Each worker sums the loss over its own training
    #    nodes and divides by the number of those on all workers, so the shares add up to the mean
    #    loss, and the summed gradients are the gradients of that mean.
    for epoch in range(1, EPOCHS + 1):
        model.train()
        scores = model(graphs, features)
        mine = masks["train"]
        loss = F.cross_entropy(scores[mine], labels[mine], reduction="sum") / num_train
        optimizer.zero_grad()
        loss.backward()
        gs.gather_grads(model)
        optimizer.step()
        if epoch % 20 == 0:
            (mean_loss,) = sum_over_workers(float(loss.detach()))
            if gs.rank() == 0:
                print(f"epoch {epoch:3d}: training loss {mean_loss:.4f}")

    # 5. Inference is one more forward. Every worker must take part in it.
    model.eval()
    with torch.no_grad():
        right = model(graphs, features).argmax(dim=1) == labels
    num_right, num_test = sum_over_workers(
        float(right[masks["test"]].sum()), float(masks["test"].sum())
    )
    if gs.rank() == 0:
        print(f"test accuracy {100 * num_right / num_test:.1f} % on {num_test:.0f} nodes")
    gs.shutdown_comms()


if __name__ == "__main__":
    main()
