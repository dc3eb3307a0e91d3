# SPDX-License-Identifier: Apache-2.0
"""What pictures show: parts against sets of plain numbers, and lines of blocks. No process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import graphshard
from graphshard.partition import load_partition_stats, partition_graph
from graphshard.partition.format import read_config
from graphshard.train.commands._partition_picture import count_pairs, plot_partition
from graphshard.train.commands._train import sparkline


def of_two_types() -> tuple[graphshard.Graph, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"user": 30, "item": 20}
    relations = {("user", "buys", "item"): 120, ("item", "bought_by", "user"): 90}
    edges = {
        (src, name, dst): (
            torch.randint(sizes[src], (count,), generator=generator),
            torch.randint(sizes[dst], (count,), generator=generator),
        )
        for (src, name, dst), count in relations.items()
    }
    owners = {t: torch.randint(3, (n,), generator=generator) for t, n in sizes.items()}
    return graphshard.heterograph(edges, sizes), owners


@pytest.mark.parametrize("num_parts", [3, 4])  # of 4, one part is empty
def test_edges_and_rows_of_pairs(tmp_path: Path, num_parts: int) -> None:
    graph, owners = of_two_types()
    path = tmp_path / "g.json"
    partition_graph(graph, "g", num_parts, tmp_path, part_method=owners)
    pairs = count_pairs(read_config(path))

    edges = np.zeros((num_parts, num_parts), dtype=int)
    rows: dict[tuple[int, int], set[tuple[str, int]]] = {}
    for src_type, name, dst_type in graph.canonical_etypes:
        sources, targets = (ids.tolist() for ids in graph.edges(etype=(src_type, name, dst_type)))
        for source, target in zip(sources, targets, strict=True):
            reader, owner = int(owners[dst_type][target]), int(owners[src_type][source])
            edges[reader, owner] += 1
            rows.setdefault((reader, owner), set()).add((src_type, source))
    assert pairs.edges.tolist() == edges.tolist()
    for reader, owner in np.ndindex(num_parts, num_parts):
        expected = len(rows.get((reader, owner), ())) if reader != owner else 0
        assert pairs.rows[reader, owner] == expected
    stats = load_partition_stats(path)
    assert pairs.edges.sum() - np.trace(pairs.edges) == stats.edge_cut


@pytest.mark.parametrize("num_parts", [1, 2, 40])
def test_any_number_of_parts_is_drawn(tmp_path: Path, num_parts: int) -> None:
    graph = graphshard.graph(([0, 1, 2, 2], [1, 2, 0, 1]), num_nodes=3)
    owners = torch.arange(3) % num_parts
    partition_graph(graph, "$g", num_parts, tmp_path, part_method=owners)
    path = tmp_path / "$g.json"
    plot_partition(read_config(path), load_partition_stats(path), tmp_path / "g.png")
    assert (tmp_path / "g.png").read_bytes().startswith(b"\x89PNG")


def test_a_line_of_blocks_shows_how_numbers_fall() -> None:
    assert sparkline([7, 6, 5, 4, 3, 2, 1, 0]) == "█▇▆▅▄▃▂▁"
    assert sparkline([1.0, float("nan"), 3.0]) == "▁ █"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([float("inf")]) == ""
    long = sparkline([*range(16_000)])  # means of a thousand each
    assert (len(long), long[0], long[-1]) == (16, "▁", "█")
    assert list(long) == sorted(long)
