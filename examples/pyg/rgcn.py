# SPDX-License-Identifier: Apache-2.0
"""R-GCN on AIFB, whose nodes have no features; the lines with "# +" are what several ranks need.

On two ranks:

    GRAPHSHARD_DATASETS=folder torchrun --standalone --nproc-per-node 2 examples/pyg/rgcn.py
"""

import torch
import torch.nn.functional as F
from local_datasets import Entities
from torch_geometric.nn import RGCNConv

import graphshard  # +

graphshard.initialize_comms()  # +
torch.manual_seed(1)
dataset = Entities("data/Entities", "AIFB")
data = dataset[0]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = RGCNConv(data.num_nodes, 16, dataset.num_relations, num_bases=30)
        self.conv2 = RGCNConv(16, dataset.num_classes, dataset.num_relations, num_bases=30)

    def forward(self, edge_index, edge_type):
        x = F.relu(self.conv1(None, edge_index, edge_type))
        x = self.conv2(x, edge_index, edge_type)
        return F.log_softmax(x, dim=1)


model = Net()
model = graphshard.pyg.parallelize(model, data)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.0005)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.edge_index, data.edge_type)
    loss = F.nll_loss(out[data.train_idx], data.train_y)
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.edge_index, data.edge_type).argmax(dim=-1)
    train_acc = float((pred[data.train_idx] == data.train_y).float().mean())
    test_acc = float((pred[data.test_idx] == data.test_y).float().mean())
    return train_acc, test_acc


for epoch in range(30):
    loss = train()
    train_acc, test_acc = test()
    if epoch % 10 == 0:
        print(f"Epoch: {epoch:02d}, Loss: {loss:.6f}, Train: {train_acc:.4f}")
print(f"Accuracy: {test_acc:.4f}")
