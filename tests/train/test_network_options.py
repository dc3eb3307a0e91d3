# SPDX-License-Identifier: Apache-2.0
"""Encoder, own rows and norms of the networks, beside plain torch on a dense matrix. No process."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from train_cases import GRAPHS, config_of, write_parts

from graphshard.train import FullBatchRun
from graphshard.train._learner import Learner


def learner_of(folder: Path, kind: str, **values: object) -> Learner:
    """A learner in float64 whose norms have other weights than those they begin with."""
    run = FullBatchRun(config_of(write_parts(folder, kind, 1), dropout=0.0, **values))
    with torch.no_grad():
        for name, parameter in run._learner.model.named_parameters():
            if name.startswith("norms."):
                parameter.add_(torch.rand_like(parameter))
    return run._learner


def mean_matrix(num_dst: int, num_src: int, src: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(num_dst, num_src, dtype=torch.float64)
    counts.index_put_((dst, src), torch.ones(src.numel(), dtype=torch.float64), accumulate=True)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


@pytest.mark.parametrize(("encoder", "residual", "norm"), list(product((False, True), repeat=3)))
@pytest.mark.parametrize("model", ["gcn", "sage"])
def test_options_are_those_layers_of_torch(
    model: str, encoder: bool, residual: bool, norm: bool, tmp_path: Path
) -> None:
    options = {"encoder": encoder, "residual": residual, "norm": norm}
    learner = learner_of(tmp_path, "plain", model=model, layers=3, hidden=6, **options)
    graph = GRAPHS["plain"]()
    src, dst = graph.edges()
    num_nodes = graph.num_nodes()
    mean = mean_matrix(num_nodes, num_nodes, src, dst)
    counts = mean * graph.in_degrees()[:, None]
    both = counts * (counts.sum(1)[:, None] * counts.sum(0)[None, :]).clamp(min=1).rsqrt()
    weights = dict(learner.network.named_parameters())
    order = torch.argsort(learner._shard.original_ids["_N"])
    scores = learner.scores()[order]

    h = graph.ndata["feat"]
    if encoder:
        h = F.relu(F.linear(h, weights["encoder.weight"], weights["encoder.bias"]))
    for i in range(3):
        rows = F.relu(h) if i else h
        if model == "gcn":
            h = both @ rows @ weights[f"layers.{i}.weight"] + weights[f"layers.{i}.bias"]
        else:
            h = F.linear(rows, weights[f"layers.{i}.fc_self.weight"])
            h = h + weights[f"layers.{i}.fc_self.bias"]
            h = h + mean @ F.linear(rows, weights[f"layers.{i}.fc_neigh.weight"])
        if residual:
            h = h + F.linear(rows, weights[f"own.{i}.weight"], weights[f"own.{i}.bias"])
        if norm and i < 2:
            h = F.layer_norm(h, (6,), weights[f"norms.{i}.weight"], weights[f"norms.{i}.bias"])
    torch.testing.assert_close(scores, h)
    learner.training_loss(0).backward()
    assert all(parameter.grad is not None for parameter in learner.model.parameters())


def test_norms_of_typed_graphs_are_one_a_type(tmp_path: Path) -> None:
    learner = learner_of(tmp_path, "typed", model="gcn", layers=2, hidden=6, norm=True)
    plain = learner_of(tmp_path, "typed", model="gcn", layers=2, hidden=6)
    network = learner.network
    assert not torch.equal(learner.scores(), plain.scores())
    ntypes = learner._shard.data.node_type_names
    h = {t: torch.rand(5, 6, dtype=torch.float64) for t in ntypes}
    (norms,) = network.norms
    expected = {
        t: F.layer_norm(h[t], (6,), norms[i].weight, norms[i].bias) for i, t in enumerate(ntypes)
    }
    found = network._normalized(norms, h)
    for ntype in ntypes:
        torch.testing.assert_close(found[ntype], expected[ntype])
