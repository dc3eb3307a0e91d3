# SPDX-License-Identifier: Apache-2.0
"""PNA with the histogram of in-degrees, on Cora; the lines with "# +" are what several ranks need.

On two ranks:

    torchrun --standalone --nproc-per-node 2 examples/pyg/pna.py
"""

import torch
import torch.nn.functional as F
import torch_geometric.transforms as T
from local_datasets import Planetoid
from torch.nn import Linear
from torch_geometric.nn import BatchNorm, PNAConv
from torch_geometric.utils import degree

import graphshard  # +

graphshard.initialize_comms()  # +
torch.manual_seed(1)
dataset = Planetoid("data/Planetoid", "Cora", split="full", transform=T.NormalizeFeatures())
data = dataset[0]
deg = torch.bincount(degree(data.edge_index[1], num_nodes=data.num_nodes, dtype=torch.long))


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lin1 = Linear(dataset.num_features, 32)
        self.conv = PNAConv(
            32,
            32,
            aggregators=["mean", "min", "max", "std"],
            scalers=["identity", "amplification", "attenuation"],
            deg=deg,
        )
        self.norm = BatchNorm(32)
        self.lin2 = Linear(32, dataset.num_classes)

    def forward(self, x, edge_index):
        x = F.dropout(self.lin1(x).relu(), p=0.5, training=self.training)
        x = self.norm(self.conv(x, edge_index)).relu()
        x = F.dropout(x, p=0.5, training=self.training)
        return self.lin2(x)


model = Net()
model = graphshard.pyg.parallelize(model, data)  # +
optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)

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
