# SPDX-License-Identifier: Apache-2.0
"""PyG's own GCN on a graph that spans workers: the model and the loop are PyG's.

    torchrun --standalone --nproc-per-node 2 examples/pyg_full_batch.py
    torchrun --standalone --nproc-per-node 2 examples/pyg_full_batch.py --device cuda

Three lines differ from a program for one process, marked below: the group, `shard`, and the model
that adds gradients up. Needs ``pip install "graphshard[pyg]"``. Cora comes with graphshard; with
PyG's own copy, write ``Planetoid(root, "Cora", transform=T.NormalizeFeatures())[0]``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.data import Data
from torch_geometric.nn import GCNConv

import graphshard
from graphshard.comm import all_reduce


# As PyG's tutorial has it. Nothing in it knows how many workers there are.
class Net(nn.Module):
    """Two GCN layers."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.conv1 = GCNConv(num_features, 16)
        self.conv2 = GCNConv(16, num_classes)

    def forward(self, data: Data) -> Tensor:
        """Scores ``[num_nodes, num_classes]``."""
        x = F.dropout(data.x, training=self.training)
        x = F.relu(self.conv1(x, data.edge_index))
        x = F.dropout(x, training=self.training)
        return self.conv2(x, data.edge_index)


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="PyG's GCN on Cora.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    device = graphshard.choose_device(parser.parse_args().device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    graphshard.initialize_comms(backend="auto")  # (1) who the workers are, as torchrun started them
    cora = graphshard.data.load_dataset("cora", row_normalize=True)
    data = graphshard.data.to_pyg(cora.graph)
    num_train = int(data.train_mask.sum())
    data = graphshard.pyg.shard(data)  # (2) this worker's nodes, and edges that reach the others
    data = data.to(device)
    torch.manual_seed(0)
    model = Net(data.num_features, cora.num_classes).to(device)
    model = DistributedDataParallel(model)  # (3) the mean of the workers' gradients
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03, weight_decay=5e-4)

    # DistributedDataParallel averages over workers, so the share of a worker is its sum over its
    # own training nodes, times the number of workers, by the number of all training nodes.
    share = graphshard.world_size() / num_train
    for epoch in range(1, 81):
        model.train()
        optimizer.zero_grad()
        out = model(data)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask], reduction="sum")
        (loss * share).backward()
        optimizer.step()
        if epoch % 40 == 0:
            mean = float(all_reduce(loss.detach())) / num_train
            if graphshard.rank() == 0:
                print(f"epoch {epoch:3d}: training loss {mean:.4f}")

    model.eval()
    with torch.no_grad():
        right = (model(data).argmax(dim=1) == data.y)[data.test_mask]
    num_right, num_test = all_reduce(torch.tensor([int(right.sum()), right.numel()])).tolist()
    if graphshard.rank() == 0:
        print(f"test accuracy {100 * num_right / num_test:.1f} % on {num_test} nodes")
    graphshard.shutdown_comms()


if __name__ == "__main__":
    main()
