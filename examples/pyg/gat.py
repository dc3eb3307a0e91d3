# SPDX-License-Identifier: Apache-2.0
"""GAT on Cora with PyG's layers; the lines with "# +" are what several ranks need.

On two ranks:

    torchrun --standalone --nproc-per-node 2 examples/pyg/gat.py
"""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from local_datasets import Planetoid
from torch_geometric.nn import GATConv

import graphshard  # +

graphshard.initialize_comms()  # +
torch.manual_seed(1)
dataset = Planetoid("data/Planetoid", "Cora", transform=T.NormalizeFeatures())
data = dataset[0]


class GAT(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, heads):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden_channels, heads, dropout=0.6)
        self.conv2 = GATConv(hidden_channels * heads, out_channels, concat=False, dropout=0.6)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.6, training=self.training)
        x = F.elu(self.conv1(x, edge_index))
        x = F.dropout(x, p=0.6, training=self.training)
        return self.conv2(x, edge_index)


model = GAT(dataset.num_features, 8, dataset.num_classes, heads=8)
model = graphshard.pyg.parallelize(model, data)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)


def train():
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def test():
    model.eval()
    pred = model(data.x, data.edge_index).argmax(dim=-1)
    accs = []
    for mask in [data.train_mask, data.val_mask, data.test_mask]:
        accs.append(int((pred[mask] == data.y[mask]).sum()) / int(mask.sum()))
    return accs


best_val_acc = test_acc = 0
for epoch in range(200):
    loss = train()
    train_acc, val_acc, tmp_test_acc = test()
    if val_acc > best_val_acc:
        best_val_acc = val_acc
        test_acc = tmp_test_acc
    if epoch % 20 == 0:
        print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Val: {val_acc:.4f}")
print(f"Accuracy: {test_acc:.4f}")
