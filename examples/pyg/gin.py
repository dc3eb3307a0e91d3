# SPDX-License-Identifier: Apache-2.0
"""GIN for nodes, with batch normalisation; the lines with "# +" are what several ranks need.

On two ranks:

    torchrun --standalone --nproc-per-node 2 examples/pyg/gin.py
"""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from local_datasets import Planetoid
from torch.nn import BatchNorm1d, Linear, ReLU, Sequential
from torch_geometric.nn import GINConv

import graphshard  # +

graphshard.initialize_comms()  # +
torch.manual_seed(1)
dataset = Planetoid("data/Planetoid", "Cora", split="full", transform=T.NormalizeFeatures())
data = dataset[0]


class GIN(torch.nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers):
        super().__init__()
        self.convs = torch.nn.ModuleList()
        for _ in range(num_layers):
            mlp = Sequential(
                Linear(in_channels, hidden_channels),
                BatchNorm1d(hidden_channels),
                ReLU(),
                Linear(hidden_channels, hidden_channels),
            )
            self.convs.append(GINConv(mlp, train_eps=True))
            in_channels = hidden_channels
        self.lin = Linear(hidden_channels, out_channels)

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.lin(x)


model = GIN(dataset.num_features, 32, dataset.num_classes, num_layers=2)
model = graphshard.pyg.parallelize(model, data)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

for epoch in range(60):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)
    loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    if epoch % 20 == 0:
        print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}")

model.eval()
pred = model(data.x, data.edge_index).argmax(dim=1)
test_acc = (pred == data.y)[data.test_mask].float().mean()
print(f"Accuracy: {test_acc:.4f}")
