# SPDX-License-Identifier: Apache-2.0
"""Wide rows taken some columns at a time: the same numbers, the same bytes. 2 and 3 gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shards import graph_of, own_nodes, write_parts
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard.fullbatch import column_blocks
from graphshard.fullbatch.column_blocks import WHOLE, most_blocks
from graphshard.nn import HeteroGraphConv, SAGEConv
from graphshard.testing import run_ranks

WIDTH = 70


def test_blocks_cover_every_column_once() -> None:
    wide = torch.arange(2 * WIDTH).view(2, WIDTH)
    rows = 4 * (1 << 20) // (WIDTH * 8)
    blocks = column_blocks.column_blocks(rows, [wide], most_blocks(WIDTH, WIDTH))
    assert len(blocks) == 4
    assert torch.equal(torch.cat([b.of(wide) for b in blocks], dim=1), wide)
    assert column_blocks.column_blocks(10, [wide], 4) == [WHOLE]
    assert column_blocks.column_blocks(10**9, [wide[:, :20]], most_blocks(20, 20)) == [WHOLE]


def run(rank: int, world_size: int, parts: str, kind: str, smallest: int) -> dict[str, Any]:
    before = column_blocks._SMALLEST_BLOCK
    column_blocks._SMALLEST_BLOCK = smallest
    try:
        data = graphshard.load_dgl_partition_data(parts, rank)
        graph = graphshard.construct_full_graph(data, mode="sequential")
        torch.manual_seed(0)
        layer: Any = SAGEConv(WIDTH, WIDTH, "mean")
        if kind == "typed":
            layer = HeteroGraphConv({e: SAGEConv(WIDTH, WIDTH, "gcn") for e in graph.etypes})
        layer = layer.double()
        generator = torch.Generator().manual_seed(1)
        inputs = {}
        for ntype, nodes in own_nodes(data).items():
            whole = torch.randn(30, WIDTH, generator=generator, dtype=torch.float64)
            inputs[ntype] = whole[nodes].requires_grad_()
        with comm.trace() as trace:
            outputs = layer(graph, inputs) if kind == "typed" else layer(graph, inputs["_N"])
            outputs = outputs if kind == "typed" else {"_N": outputs}
            sum((out**2).sum() for out in outputs.values()).backward()
        found: dict[str, Tensor] = {f"out {t}": o.detach() for t, o in outputs.items()}
        found |= {f"grad {t}": x.grad for t, x in inputs.items() if x.grad is not None}
        return {"rows": found, "bytes": dict(trace.bytes_sent), "calls": dict(trace.calls)}
    finally:
        column_blocks._SMALLEST_BLOCK = before


@pytest.mark.parametrize(("num_ranks", "how"), [(2, "random"), (3, "empty_part")])
@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_blocks_change_messages_not_results(
    tmp_path: Path, num_ranks: int, how: str, kind: str
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    whole = run_ranks(run, num_ranks, parts, kind, 1 << 30)
    blocks = run_ranks(run, num_ranks, parts, kind, 1)
    for a, b in zip(whole, blocks, strict=True):
        assert a["bytes"].get("send") == b["bytes"].get("send")
        assert b["calls"].get("send", 0) == 4 * a["calls"].get("send", 0)
        assert a["rows"].keys() == b["rows"].keys()
        for name, rows in a["rows"].items():
            torch.testing.assert_close(b["rows"][name], rows, atol=1e-12, rtol=1e-12)
