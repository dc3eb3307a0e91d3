# SPDX-License-Identifier: Apache-2.0
"""Edges that stay in a part's file say what the same edges in memory say."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

import graphshard as gs
from graphshard.fullbatch import ExtendedEdges, RelationEdges, StoredEdges, _stored_edges
from graphshard.fullbatch.topology import LocalEdges
from graphshard.ops.sampling import SourcePieces
from graphshard.partition import partition_graph

SIZES = {"a": 60, "b": 25}
ETYPES = [("a", "x", "a"), ("a", "y", "b"), ("b", "z", "a")]


def parts_of(folder: Path, is_typed: bool) -> str:
    """Three parts, the last of them without a node."""
    generator = torch.Generator().manual_seed(4)

    def ends(src: str, dst: str) -> tuple[Tensor, Tensor]:
        draw = [torch.randint(0, SIZES[t], (200,), generator=generator) for t in (src, dst)]
        return draw[0], draw[1]

    etypes = ETYPES if is_typed else ETYPES[:1]
    sizes = SIZES if is_typed else {"a": SIZES["a"]}
    graph = gs.heterograph({e: ends(e[0], e[2]) for e in etypes}, num_nodes_dict=sizes)
    assigned = {t: torch.randint(0, 2, (n,), generator=generator) for t, n in sizes.items()}
    method = assigned if is_typed else assigned["a"]
    partition_graph(graph, "g", 3, str(folder), part_method=method, quiet=True)
    return str(folder / "g.json")


def assert_alike(edges: StoredEdges, same: LocalEdges, num_src: int, rank: int) -> None:
    for name in ("src_part", "src", "dst"):
        assert torch.equal(getattr(edges, name).long(), getattr(same, name).long()), name
    pieces = list(edges.pieces())
    assert [some.start for some, *_ in pieces[1:]] == [some.stop for some, *_ in pieces[:-1]]
    for i, name in enumerate(("src_part", "src", "dst"), 1):
        column = torch.cat([torch.empty(0).long(), *(piece[i].long() for piece in pieces)])
        assert torch.equal(column, getattr(same, name).long())
    assert edges.num_edges == same.num_edges
    assert edges.num_cut(rank) == same.num_cut(rank)
    assert torch.equal(edges.in_degrees(), same.in_degrees())
    values = torch.arange(edges.num_dst) ** 3
    (own, others), (own_same, others_same) = (
        e.sum_by_source(values, num_src, 3, rank) for e in (edges, same)
    )
    assert torch.equal(own, own_same)
    for part in range(3):
        read = [torch.unique(e.rows_read(part).long()) for e in (edges, same)]
        assert part == rank or torch.equal(*read)
        if part != rank:
            for mine, theirs in zip(others[part], others_same[part], strict=True):
                assert torch.equal(mine, theirs)


@pytest.mark.parametrize("is_typed", [False, True])
def test_stored_edges_are_those_in_memory(is_typed: bool, tmp_path: Path) -> None:
    path = parts_of(tmp_path, is_typed)
    generator = torch.Generator().manual_seed(9)
    with mock.patch.object(_stored_edges, "_PIECE", 17):
        for rank in range(3):
            data = gs.load_dgl_partition_data(path, rank)
            for etype, edges in data.edges.items():
                assert isinstance(edges, StoredEdges)
                num_src, num_dst = data.num_owned(etype[0]), data.num_owned(etype[2])
                same = LocalEdges(edges.src_part, edges.src, edges.dst, num_dst)
                assert_alike(edges, same, num_src, rank)
                starts = torch.tensor(data.node_map(etype[0]).starts)
                ids = starts[same.src_part.long()] + same.src
                pieces = SourcePieces([edges.piece(int(starts[rank]))], torch.int64)
                assert torch.equal(pieces[:], ids)
                if not num_dst:
                    continue
                part = torch.randint(0, 2, (30,), generator=generator)
                src = (torch.rand(30, generator=generator) * starts.diff()[part]).long()
                dst = torch.randint(0, num_dst, (30,), generator=generator)
                longer = ExtendedEdges(edges, RelationEdges(part, src, dst))
                columns = zip((part, src, dst), ("src_part", "src", "dst"), strict=True)
                same = LocalEdges(*(torch.cat([getattr(same, n), c]) for c, n in columns), num_dst)
                assert_alike(longer, same, num_src, rank)
                indptr, sources, eids = longer.lists(starts[:-1].int())
                order = torch.argsort(same.dst, stable=True)
                assert torch.equal(eids.long(), order)
                assert torch.equal(sources.long(), (starts[same.src_part.long()] + same.src)[order])
                assert torch.equal(indptr.diff().long(), same.in_degrees())
