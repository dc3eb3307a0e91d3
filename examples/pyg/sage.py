# SPDX-License-Identifier: Apache-2.0
"""GraphSAGE from PyG's models, on Cora; the lines with "# +" are what several ranks need.

On two ranks:

    torchrun --standalone --nproc-per-node 2 examples/pyg/sage.py
"""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from local_datasets import Planetoid
from torch_geometric.nn import GraphSAGE

import graphshard  # +

graphshard.initialize_comms()  # +
torch.manual_seed(1)
dataset = Planetoid("data/Planetoid", "Cora", transform=T.NormalizeFeatures())
data = dataset[0]

model = GraphSAGE(dataset.num_features, 64, 2, dataset.num_classes, dropout=0.5)
model = graphshard.pyg.parallelize(model, data)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)

for epoch in range(100):
    model.train()
    optimizer.zero_grad()
    out = model(data.x, data.edge_index)[data.train_mask]
    loss = F.cross_entropy(out, data.y[data.train_mask])
    loss.backward()
    optimizer.step()
    if epoch % 20 == 0:
        print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}")

model.eval()
pred = model(data.x, data.edge_index).argmax(dim=1)
test_acc = (pred == data.y)[data.test_mask].float().mean()
print(f"Accuracy: {test_acc:.4f}")
