# SPDX-License-Identifier: Apache-2.0
"""Types of any name on ranks: layers, compared with plain torch. 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import graphshard
from graphshard.nn import GraphConv, HeteroGraphConv
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from type_name_cases import RELATIONS, SIZES, named


def weights() -> dict[Any, Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        etype: torch.randn(2, 3, generator=draw, dtype=torch.float64) for etype in sorted(RELATIONS)
    }


def expected() -> dict[str, Tensor]:
    """What the layers give, by index_add_ on the whole graph."""
    graph, found = named(), {}
    for etype, weight in weights().items():
        src, dst = graph.edges(etype=etype, order="eid")
        rows = graph.nodes[etype[0]].data["feat"][src] @ weight
        start = torch.zeros(SIZES[etype[2]], 3, dtype=torch.float64)
        found[etype[2]] = found.get(etype[2], 0) + start.index_add_(0, dst, rows)
    return found


def layers_on(
    rank: int, world_size: int, parts: str, mode: str
) -> dict[str, tuple[Tensor, Tensor]]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)
    layer = HeteroGraphConv(
        {e: GraphConv(2, 3, norm="none", bias=False).double() for e in sorted(RELATIONS)}
    )
    with torch.no_grad():
        for own, weight in zip(layer.mods.values(), weights().values(), strict=True):
            own.weight.copy_(weight)
    features = {t: data.node_features[f"{t}/feat"] for t in data.node_type_names}
    out = layer(graph, features)
    return {t: (data.node_features[f"{t}/orig_id"], rows.detach()) for t, rows in out.items()}


@pytest.mark.parametrize("mode", ["sequential", "oneshot"])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_layers_of_typed_graphs(tmp_path: Path, num_ranks: int, mode: str) -> None:
    partition_graph(named(), "kg", num_ranks, tmp_path, part_method="random", quiet=True)
    results = run_ranks(layers_on, num_ranks, str(tmp_path / "kg.json"), mode)
    for ntype, rows in expected().items():
        seen = torch.zeros(SIZES[ntype], dtype=torch.int64)
        for of_rank in results:
            ids, own = of_rank[ntype]
            seen[ids] += 1
            assert torch.allclose(own, rows[ids], rtol=1e-10)
        assert bool((seen == 1).all())
