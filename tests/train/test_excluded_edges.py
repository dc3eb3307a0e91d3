# SPDX-License-Identifier: Apache-2.0
"""A step's own edges carry no messages in it, and ranks share edges evenly. Gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_link_tasks import CASES, LINKS, REVERSE, WRITES, write
from train_cases import as_values, sampled_config_of

from graphshard.graph import NID
from graphshard.testing import run_ranks
from graphshard.train import SampledConfig, SampledRun

PLAIN = ("_N", "_E", "_N")


def look_at_batches(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """Whether any batch holds an edge that it must not hold, and how many edges ranks take."""
    run = SampledRun(SampledConfig(**values))
    order, shard = run._order, run._shard
    assert order is not None
    seen, leaks, drawn = 0, 0, 0
    for blocks in run._loader:
        edges, _ = run._edges_of(blocks)
        seen += len(edges)
        number = edges.etype.tolist()
        pairs = {*zip(edges.src.tolist(), edges.dst.tolist(), number, strict=True)}
        half = shard.links.num_relations // 2 if shard.links is not None else 0
        if shard.relation is not None:
            back = {(v, u, (r + half) % (2 * half)) for u, v, r in pairs}
        else:
            back = {(v, u, r) for u, v, r in pairs}
        for block in blocks:
            for etype in block.canonical_etypes:
                if etype == ("pair", "read_by", "node"):
                    continue
                src, dst = block.edges(etype=etype)
                ids = (
                    block.srcnodes[etype[0]].data[NID][src.long()].tolist(),
                    block.dstnodes[etype[2]].data[NID][dst.long()].tolist(),
                )
                data = block.edges[etype].data
                numbers = data["etype"].tolist() if "etype" in data else [0] * len(ids[0])
                there = [*zip(*ids, numbers, strict=True)]
                drawn += len(there)
                if etype in (PLAIN, WRITES):
                    leaks += sum(pair in pairs for pair in there)
                if etype in (PLAIN, REVERSE):
                    leaks += sum(pair in back for pair in there)
    run._close()
    return {"seen": seen, "leaks": leaks, "drawn": drawn, "steps": len(run._loader)}


@pytest.mark.parametrize(
    ("kind", "model", "num_parts", "how"),
    [
        ("plain_links", "sage", 3, "empty_part"),
        ("typed_links", "rgcn", 2, "few_edges"),
        ("relation_links", "rgcn", 2, "random"),
        pytest.param("typed_links", "sage", 5, "empty_part", marks=pytest.mark.exhaustive),
        pytest.param("relation_links", "rgcn", 5, "few_edges", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize(
    "transport", ["collective", pytest.param("replicated", marks=pytest.mark.exhaustive)]
)
def test_no_batch_has_its_own_edges_or_their_reverses(
    kind: str, model: str, num_parts: int, how: str, transport: str, tmp_path: Path
) -> None:
    more = {"fanouts": (-1, -1), "batch_size": 5, "transport": transport, "num_bases": 2}
    if model != "rgcn":
        del more["num_bases"]
    values = {**LINKS, **CASES[kind][0], "model": model, **more}
    config = sampled_config_of(write(tmp_path, kind, num_parts, how), **values)
    found = run_ranks(look_at_batches, num_parts, as_values(config))
    assert [rank["leaks"] for rank in found] == [0] * num_parts
    assert all(rank["drawn"] for rank in found)
    counts = [rank["seen"] for rank in found]
    assert max(counts) - min(counts) <= 1
    assert {rank["steps"] for rank in found} == {-(-max(counts) // 5)}


def test_with_exclude_targets_off_they_are_there(tmp_path: Path) -> None:
    more = {"fanouts": (-1, -1), "batch_size": 5, "exclude_targets": False}
    values = {**LINKS, **CASES["plain_links"][0], **more}
    config = sampled_config_of(write(tmp_path, "plain_links", 1), **values)
    assert look_at_batches(0, 1, as_values(config))["leaks"] > 0


@pytest.mark.parametrize("both", [True, False])
def test_added_directions_are_hidden_too(both: bool, tmp_path: Path) -> None:
    values = {**LINKS, "model": "sage", "both_directions": both, "fanouts": (-1, -1)}
    run = SampledRun(sampled_config_of(write(tmp_path, "typed_links", 1), **values))
    order: Any = run._order
    shard = run._shard
    hidden = order._hidden
    assert set(hidden) == {WRITES, REVERSE}
    edges = run._edges
    for etype, back in ((WRITES, False), (REVERSE, True)):
        of_type = shard.data.edges[etype]
        there = torch.stack([of_type.src.long(), of_type.dst.long()])
        for row in range(len(edges)):
            pair = torch.stack([edges.src[row], edges.dst[row]])
            pair = pair.flip(0) if back else pair
            expected = (there == pair.view(2, 1)).all(0).nonzero().view(-1)
            assert hidden[etype].of_rows(torch.tensor([row])).tolist() == expected.tolist()
    run._close()
