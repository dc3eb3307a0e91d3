# SPDX-License-Identifier: Apache-2.0
"""PyG's NeighborLoader over a graph that spans workers: the model and the loop are PyG's.

    torchrun --standalone --nproc-per-node 2 examples/pyg_sampled.py
    torchrun --standalone --nproc-per-node 2 examples/pyg_sampled.py --device cuda

Besides imports, three lines differ from a program for one process, marked below: the group,
`shard`, and the model that adds gradients up. The loader comes from ``graphshard.pyg`` in the place
of ``torch_geometric.loader``, and needs no pyg-lib. Needs ``pip install "graphshard[pyg]"``.
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch_geometric.nn import GraphSAGE

import graphshard
from graphshard.comm import all_reduce
from graphshard.pyg import NeighborLoader


def train(
    model: torch.nn.Module,
    loader: NeighborLoader,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> float:
    """One epoch; the mean loss of this worker's batches."""
    model.train()
    total = 0.0
    for batch in loader:
        batch = batch.to(device)
        optimizer.zero_grad()
        out = model(batch.x, batch.edge_index)[: batch.batch_size]
        loss = F.cross_entropy(out, batch.y[: batch.batch_size])
        loss.backward()
        optimizer.step()
        total += float(loss.detach())
    return total / len(loader)


def main() -> None:
    """Train and test."""
    parser = argparse.ArgumentParser(description="PyG's GraphSAGE on samples of Cora.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    device = graphshard.choose_device(parser.parse_args().device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    graphshard.initialize_comms(backend="auto")  # (1) who the workers are, as torchrun started them
    cora = graphshard.data.load_dataset("cora", row_normalize=True)
    data = graphshard.data.to_pyg(cora.graph)  # or Planetoid(...)[0], Reddit(...)[0], ...
    data = graphshard.pyg.shard(data)  # (2) this worker's nodes, and edges that reach the others
    torch.manual_seed(0)
    loader = NeighborLoader(
        data,
        num_neighbors=[10, 10],
        input_nodes=data.train_mask,
        batch_size=35,
        shuffle=True,
        num_workers=1,
    )
    model = GraphSAGE(data.num_features, 64, 2, cora.num_classes, dropout=0.5).to(device)
    model = DistributedDataParallel(model)  # (3) the mean of the workers' gradients
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
    for epoch in range(1, 31):
        loss = train(model, loader, optimizer, device)
        if epoch % 15 == 0 and graphshard.rank() == 0:
            print(f"epoch {epoch:3d}: loss {loss:.4f}")

    model.eval()
    data = data.to(device)
    with torch.no_grad():  # exactly, on the whole graph
        right: Tensor = (model.module(data.x, data.edge_index).argmax(1) == data.y)[data.test_mask]
    num_right, num_test = all_reduce(torch.tensor([int(right.sum()), right.numel()])).tolist()
    if graphshard.rank() == 0:
        print(f"test accuracy {100 * num_right / num_test:.1f} % on {num_test} nodes")
    loader.close()
    graphshard.shutdown_comms()


if __name__ == "__main__":
    main()
