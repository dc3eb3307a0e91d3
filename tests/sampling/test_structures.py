# SPDX-License-Identifier: Apache-2.0
"""Blocks are the same edge for edge, however the graph is split and reached. 0 to 4 gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_cases import (
    SAMPLERS,
    Translation,
    assert_same_blocks,
    expected,
    graph_of,
    manager_of,
    sample,
    shuffled,
    write_parts,
)

import graphshard
from case_selection import sampled
from graphshard import comm
from graphshard._base.ranges import RangeMap
from graphshard.sampling import feature_store
from graphshard.sampling.feature_store import Ownership
from graphshard.sampling.graph_store import (
    CollectiveGraphStore,
    ReplicatedGraphStore,
    replicated_bytes,
)
from graphshard.testing import run_ranks

STRUCTURES = {"collective": CollectiveGraphStore, "replicated": ReplicatedGraphStore}


def draw_all(
    rank: int, world_size: int, kind: str, parts: str, transport: str, num_threads: int
) -> dict[str, Any]:
    graph = graph_of(kind)
    manager, translation = manager_of(parts, rank, graph), Translation(parts, world_size)
    torch.set_num_threads(num_threads)
    try:
        structure = STRUCTURES[transport].of(manager)
        return {name: sample(name, structure, graph, rank, translation) for name in SAMPLERS}
    finally:
        torch.set_num_threads(1)


def assert_as_expected(found: list[Any], kind: str) -> None:
    wanted = expected(kind, len(found))
    for name in SAMPLERS:
        for rank, blocks in enumerate(found):
            assert_same_blocks(blocks[name], wanted[name][rank], f"{name}, rank {rank}")


@pytest.mark.parametrize(
    ("ranks", "transport", "kind"),
    sampled(
        [(1, "metis", 4), (2, "random", 1), (3, "empty_part", 4), (4, "metis", 1)],
        list(STRUCTURES),
        ["plain", "typed"],
    ),
)
def test_blocks_are_those_of_one_process(
    tmp_path: Path, kind: str, transport: str, ranks: tuple[int, str, int]
) -> None:
    num_ranks, how, num_threads = ranks
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    found = run_ranks(draw_all, num_ranks, kind, parts, transport, num_threads)
    assert_as_expected(found, kind)


def draw_shuffled(
    rank: int, world_size: int, kind: str, parts: str, transport: str
) -> dict[str, Any]:
    """With edges that do not lie by destination, and ids that take 8 bytes."""
    graph = graph_of(kind)
    all_data = [
        shuffled(graphshard.load_dgl_partition_data(parts, part)) for part in range(world_size)
    ]
    manager, translation = manager_of(all_data[rank], rank, graph), Translation(all_data)
    plain, feature_store._INT32_MAX = feature_store._INT32_MAX, 1
    try:
        size = replicated_bytes(manager)
        structure = STRUCTURES[transport].of(manager)
        assert structure.ownership.wire_dtype == torch.int64
        if isinstance(structure, ReplicatedGraphStore):
            assert structure.num_bytes == size
        return {name: sample(name, structure, graph, rank, translation) for name in SAMPLERS}
    finally:
        feature_store._INT32_MAX = plain


@pytest.mark.parametrize("transport", list(STRUCTURES))
@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_edges_in_any_order_and_wide_ids(tmp_path: Path, kind: str, transport: str) -> None:
    parts = write_parts(tmp_path, graph_of(kind), 2, "random")
    assert_as_expected(run_ranks(draw_shuffled, 2, kind, parts, transport), kind)


def prepared(rank: int, world_size: int, parts: str, transport: str) -> list[int]:
    """Once it has drawn, the first draw of a copy of a store exchanges no more than its second."""
    graph = graph_of("plain")
    structure = STRUCTURES[transport].of(manager_of(parts, rank, graph))
    translation = Translation(parts, world_size)
    found = []
    for name in ("out weighted", "out labor"):
        sample(name, structure, graph, rank, translation)
        copy = structure.on(None)
        for _ in range(2):
            with comm.trace() as counted:
                sample(name, copy, graph, rank, translation)
            found.append(counted.total_calls)
    return found


@pytest.mark.parametrize("transport", list(STRUCTURES))
def test_what_is_prepared_copies_have(tmp_path: Path, transport: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    calls = 8 if transport == "collective" else 0  # two layers, four exchanges each
    assert run_ranks(prepared, 2, parts, transport) == [[calls] * 4] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 9, 12])
def test_ids_are_grouped_by_owner(world_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    ranges = RangeMap.from_sizes([3, 0, 5, 1, 0, 0, 4, 2, 9, 0, 1, 1][:world_size])
    ids = torch.randint(0, ranges.num_ids, (40,), generator=generator)
    for rank in range(world_size):
        ownership = Ownership(rank, world_size, {"n": ranges})
        assert (ownership.first("n"), ownership.num_owned("n")) == (
            ranges.starts[rank],
            ranges.size(rank),
        )
        for some in (ids, ids[:0]):
            grouped = ownership.by_owner("n", some)
            order = torch.arange(some.numel()) if grouped.order is None else grouped.order
            in_order = some[order]
            remote, own = in_order.tensor_split([grouped.num_remote])
            assert torch.equal(grouped.rows[: grouped.num_remote], ranges.local_of(remote).int())
            assert torch.equal(grouped.rows[grouped.num_remote :] + ranges.starts[rank], own)
            counts = torch.bincount(ranges.part_of(some), minlength=world_size)
            counts[rank] = 0
            assert grouped.splits == counts.tolist()
            owner = ranges.part_of(in_order)
            assert torch.equal(owner[: remote.numel()], owner[: remote.numel()].sort().values)
            assert bool((owner[remote.numel() :] == rank).all())
