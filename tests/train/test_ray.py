# SPDX-License-Identifier: Apache-2.0
"""`graphshard.train.ray` on a cluster of two Ray nodes, which are processes of this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from graphshard.data import load_dataset
from graphshard.partition import partition_graph

PROGRAM = """
import os, sys, time

os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
import ray.train
from ray.cluster_utils import Cluster

import graphshard.train.ray


def train(config):
    import ray.train
    import torch

    import graphshard.dgl as dgl
    from graphshard.servers import DistGraph, DistNodeDataLoader, initialize, node_split

    initialize(timeout=60)
    g = DistGraph("cora")
    seeds = node_split(g.ndata["train_mask"], g.get_partition_book())
    sampler = dgl.dataloading.NeighborSampler(
        [10, 25], prefetch_node_feats=["feat"], prefetch_labels=["label"]
    )
    loader = DistNodeDataLoader(g, seeds, sampler, batch_size=35, shuffle=True, seed=0)
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        [dgl.nn.SAGEConv(1433, 16, "mean"), dgl.nn.SAGEConv(16, 7, "mean")]
    )
    optimizer = torch.optim.Adam(layers.parameters(), lr=0.03)
    losses = []
    for epoch in range(config["epochs"]):
        for _, _, blocks in loader:
            h = torch.relu(layers[0](blocks[0], blocks[0].srcdata["feat"]))
            label = blocks[-1].dstdata["label"]
            loss = torch.nn.functional.cross_entropy(layers[1](blocks[1], h), label)
            optimizer.zero_grad()
            loss.backward()
            for parameter in layers.parameters():
                torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            losses.append(loss.item())
    if config["fail"] and torch.distributed.get_rank() == 1:
        raise RuntimeError("on purpose")
    text = f"{os.environ['GRAPHSHARD_HOST']} {len(losses)} {losses[0]} {losses[-1]}"
    with open(f"{config['folder']}/rank{torch.distributed.get_rank()}", "w") as file:
        file.write(text)


cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
folder, part_config, fail = sys.argv[1], sys.argv[2], sys.argv[3] == "fail"
fitted = graphshard.train.ray.trainer(
    train,
    part_config,
    num_hosts=2,
    num_trainers=2,
    train_loop_config={"epochs": 4, "folder": folder, "fail": fail},
    run_config=ray.train.RunConfig(storage_path=folder + "/results"),
)
try:
    fitted.fit()
    print("fitted")
except Exception as error:
    print("failed:", error)
ray.shutdown()
cluster.shutdown()
"""


def run(tmp_path: Path, how: str) -> str:
    partition_graph(load_dataset("cora").graph, "cora", 2, tmp_path / "data", quiet=True)
    part_config = str(tmp_path / "data" / "cora.json")
    (tmp_path / "train.py").write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path), part_config, how],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": "/tmp"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="a Ray cluster on one machine needs Linux")
def test_two_trainers_on_each_of_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed (pip install graphshard[ray])")
    assert "fitted" in run(tmp_path, "well")
    hosts = []
    for rank in range(4):
        host, count, first, last = (tmp_path / f"rank{rank}").read_text().split()
        hosts.append(host)
        assert int(count) == 4
        assert float(last) < 0.7 * float(first)
    assert sorted(hosts) == ["0", "0", "1", "1"]


@pytest.mark.exhaustive
@pytest.mark.timeout(400)
@pytest.mark.skipif(sys.platform != "linux", reason="a Ray cluster on one machine needs Linux")
def test_a_trainer_that_raises_ends_the_job(tmp_path: Path) -> None:
    pytest.importorskip("ray.train", reason="Ray is not installed (pip install graphshard[ray])")
    printed = run(tmp_path, "fail")
    assert "failed:" in printed
    assert "on purpose" in printed


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import graphshard.train.ray

    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "ray.train", None)
    with pytest.raises(ImportError, match=r"pip install .graphshard\[ray\]"):
        graphshard.train.ray.trainer(print, "cora.json", num_hosts=1)
    with pytest.raises(ValueError, match="num_trainers must be at least 1 \\(got 0\\)"):
        graphshard.train.ray.trainer(print, "cora.json", num_hosts=1, num_trainers=0)
