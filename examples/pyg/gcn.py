# SPDX-License-Identifier: Apache-2.0
"""GCN on Cora, as PyG's introduction writes it; the lines with "# +" are what several ranks need.

On two ranks:

    torchrun --standalone --nproc-per-node 2 examples/pyg/gcn.py
"""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from local_datasets import Planetoid
from torch_geometric.nn import GCNConv

import graphshard  # +

graphshard.initialize_comms()  # +
torch.manual_seed(1)
dataset = Planetoid("data/Planetoid", "Cora", transform=T.NormalizeFeatures())
data = dataset[0]


class GCN(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GCNConv(dataset.num_features, 16)
        self.conv2 = GCNConv(16, dataset.num_classes)

    def forward(self, data):
        x, edge_index = data.x, data.edge_index
        x = self.conv1(x, edge_index)
        x = F.relu(x)
        x = F.dropout(x, training=self.training)
        x = self.conv2(x, edge_index)
        return F.log_softmax(x, dim=1)


model = GCN()
model = graphshard.pyg.parallelize(model, data)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

model.train()
for epoch in range(200):
    optimizer.zero_grad()
    out = model(data)
    loss = F.nll_loss(out[data.train_mask], data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    if epoch % 20 == 0:
        print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}")

model.eval()
pred = model(data).argmax(dim=1)
correct = (pred[data.test_mask] == data.y[data.test_mask]).sum()
print(f"Accuracy: {int(correct) / int(data.test_mask.sum()):.4f}")
