# SPDX-License-Identifier: Apache-2.0
"""Loaders of sharded data under Lightning, on 2 gloo ranks; skipped where it is not installed."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg_nn

import graphshard
import graphshard.pyg
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parent))

import loader_graphs as lg

pl = pytest.importorskip("lightning", reason="the package lightning is not installed")

NUM_EPOCHS = 2


def fitted(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    from lightning.pytorch.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import DDPStrategy

    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size}
    os.environ |= {name: str(value) for name, value in names.items()}
    whole = lg.plain_data()
    data = graphshard.pyg.shard(whole, torch.arange(lg.NUM_NODES) % 2)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = pyg_nn.GraphSAGE(3, 8, 2, 4)
            self.seen: list[torch.Tensor] = []
            self.validated: list[torch.Tensor] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            seeds = batch.n_id[: batch.batch_size]
            self.seen.append(seeds)
            out = self.net(batch.x, batch.edge_index)[: batch.batch_size]
            return F.cross_entropy(out, seeds % 4)

        def validation_step(self, batch: Any, index: int) -> None:
            self.validated.append(batch.n_id[: batch.batch_size])

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    options = {"batch_size": 4, "num_workers": 1}
    mask = torch.zeros(data.num_nodes, dtype=torch.bool)
    mask[: 12 - 4 * rank] = True  # the ranks have 12 and 8 seeds
    train = graphshard.pyg.NeighborLoader(data, [3, 2], mask, shuffle=True, **options)
    valid = graphshard.pyg.NeighborLoader(data, [-1], ~mask, **options)
    model = Model()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=DDPStrategy(process_group_backend="gloo"),
        plugins=[TorchElasticEnvironment()],
        use_distributed_sampler=False,
        max_epochs=NUM_EPOCHS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(model, train, valid)
    assert trainer.train_dataloader is train
    assert trainer.global_step == NUM_EPOCHS * len(train)
    assert len(train) == 3
    seeds = data.n_id[mask].sort().values
    for epoch in torch.cat(model.seen).split(len(seeds)):
        assert torch.equal(epoch.sort().values, seeds)
    every = data.n_id[~mask]
    assert torch.equal(torch.cat(model.validated)[-len(every) :].sort().values, every)
    return {name: p.detach() for name, p in model.net.named_parameters()}


@pytest.mark.filterwarnings("ignore")  # Lightning's advice, on workers of loaders among others
def test_lightning_trains_with_the_loaders_as_they_are(tmp_path: Path) -> None:
    one, other = run_ranks(fitted, 2, str(tmp_path), timeout=120)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name])
