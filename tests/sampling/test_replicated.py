# SPDX-License-Identifier: Apache-2.0
"""ReplicatedGraphStore: no communication, memory held once per host, several hosts; choosing it.

1 to 3 gloo ranks. That ranks are on other hosts is played by giving them other directories.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    DRAW_SEED,
    SAMPLERS,
    Translation,
    assert_same_blocks,
    expected,
    graph_of,
    left_behind,
    manager_of,
    plain_graph,
    sample,
    typed_graph,
    write_parts,
)

import graphshard
from graphshard import comm
from graphshard.comm import _shared_memory
from graphshard.comm._shared_memory import Hosts, directory_with_room
from graphshard.comm.group import group_state
from graphshard.partition import load_partition
from graphshard.sampling import NeighborSampler
from graphshard.sampling.graph_store import (
    CollectiveGraphStore,
    ReplicatedGraphStore,
    choose_graph_store,
    replicated_bytes,
)
from graphshard.testing import run_ranks


def traffic(rank: int, world_size: int, parts: str) -> list[int]:
    """Calls of the first and of a second draw of each kind; what is left in between."""
    graph = typed_graph()
    structure = ReplicatedGraphStore.of(manager_of(parts, rank, graph))
    translation = Translation(parts, world_size)
    again = 0
    first = []
    for name in ("uniform", "out", "weighted", "labor"):
        with comm.trace() as counted:
            sample(name, structure, graph, rank, translation)
        first.append(min(1, counted.total_calls))
        with comm.trace() as counted:
            sample(name, structure, graph, rank, translation)
        again += counted.total_calls
    return [*first, again, len(left_behind())]


def test_draws_send_nothing_but_on_first_use(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, typed_graph(), 2, "random")
    assert run_ranks(traffic, 2, parts) == [[0, 1, 1, 1, 0, 0]] * 2


def on_hosts(rank: int, world_size: int, kind: str, parts: str, folder: str) -> dict[str, Any]:
    """Ranks 0 and 2 share a host, rank 1 has another one; parts travel 100 bytes at a time."""
    place = Path(folder) / f"host{rank % 2}"
    place.mkdir(exist_ok=True)
    plain, _shared_memory._MESSAGE_BYTES = _shared_memory._MESSAGE_BYTES, 300
    try:
        graph = graph_of(kind)
        structure = ReplicatedGraphStore.of(manager_of(parts, rank, graph), directory=place)
        translation = Translation(parts, world_size)
        found = {name: sample(name, structure, graph, rank, translation) for name in SAMPLERS}
        return {"blocks": found, "hosts": list(structure._hosts.leader), "left": left_behind(place)}
    finally:
        _shared_memory._MESSAGE_BYTES = plain


@pytest.mark.parametrize(("kind", "how"), [("plain", "random"), ("typed", "empty_part")])
def test_several_hosts_each_hold_the_whole_graph(tmp_path: Path, kind: str, how: str) -> None:
    wanted = expected(kind, 3)
    parts = write_parts(tmp_path, graph_of(kind), 3, how)
    for rank, found in enumerate(run_ranks(on_hosts, 3, kind, parts, str(tmp_path))):
        assert found["hosts"] == [0, 1, 0]
        assert found["left"] == []
        for name in SAMPLERS:
            assert_same_blocks(found["blocks"][name], wanted[name][rank], f"{name}, rank {rank}")


def shared(rank: int, world_size: int, parts: str) -> list[Any]:
    """What one rank writes the others read: memory is held once."""
    structure = ReplicatedGraphStore.of(manager_of(parts, rank))
    sides = list(structure._edges.lists.values())
    pieces = [piece for side in sides for piece in side.neighbors.pieces]
    arrays = [*(side.indptr for side in sides), *(piece.others for piece in pieces)]
    arrays += structure._edges.original_ids.values()
    if rank == 0:
        torch._foreach_copy_(arrays, [torch.full_like(array, 99) for array in arrays])
    comm.barrier()
    text = Path("/proc/self/maps").read_text()
    maps = set(re.findall(r"/graphshard-[0-9a-f]{32}", text))
    # Of this partition: a rank that ran another test before may have that one's still.
    folder = re.escape(str(Path(parts).parent))
    parts_mapped = set(re.findall(rf"r--s .*{folder}/(part\d)/graph.safetensors", text))
    seen = all(bool((array == 99).all()) for array in arrays)
    comm.barrier()
    del structure, arrays, sides, pieces
    after = re.findall(r"/graphshard-[0-9a-f]{32}", Path("/proc/self/maps").read_text())
    return [seen, len(maps), len(parts_mapped), len(after)]


def test_memory_is_held_once_per_host_and_then_given_back(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    # Three files: original ids, those of halo nodes, and pointers; sources are in the parts' own.
    assert run_ranks(shared, 2, parts) == [[True, 3, 2, 0]] * 2


def copies(rank: int, world_size: int, parts: str) -> list[Any]:
    """A copy makes what it lacks over its own group, and the original is not disturbed."""
    graph = plain_graph()
    structure = ReplicatedGraphStore.of(manager_of(parts, rank, graph))
    copy = structure.on(dist.new_group(list(range(world_size))))
    translation = Translation(parts, world_size)
    one = sample("out labor", copy, graph, rank, translation)
    with comm.trace() as counted:
        two = sample("out labor", structure, graph, rank, translation)
    assert_same_blocks(one, two, "copies")
    return [copy.num_bytes == structure.num_bytes, counted.total_calls > 0]


def test_copies_over_other_groups(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    assert run_ranks(copies, 2, parts) == [[True, True]] * 2


def new_weights(rank: int, world_size: int, parts: str) -> list[int]:
    """Weights that allow every second edge, then the others, set anew and written in place."""
    manager = manager_of(parts, rank)
    structure = ReplicatedGraphStore.of(manager)
    translation = Translation(parts, world_size)
    etype = structure.canonical_etypes[0]
    own = manager.original_edge_ids[etype]
    data = manager.edges[etype].data
    found = []
    for turn in range(3):
        allowed = (own % 2 == turn % 2).float()
        if turn < 2:
            data["w"] = allowed
        else:
            data["w"].copy_(allowed)
        _, _, (block,) = NeighborSampler([-1], prob="w").sample(
            structure, torch.arange(25), draw_seed=DRAW_SEED
        )
        eids = translation.old(etype, block.edata[graphshard.EID])
        found += [int(eids.numel()), int((eids % 2 != turn % 2).sum())]
    return found


def test_weights_may_be_set_anew(tmp_path: Path) -> None:
    graph = plain_graph()
    parts = write_parts(tmp_path, graph, 2, "random")
    half = graph.num_edges() // 2
    assert run_ranks(new_weights, 2, parts) == [[half, 0] * 3] * 2


def error_of(rank: int, world_size: int, parts: str, case: str) -> str:
    manager = manager_of(parts, rank, plain_graph())
    if rank == 1 and case == "missing":
        del manager.edges["_E"].data["w"]
    elif rank == 1 and case == "dtype":
        manager.edges["_E"].data["w"] = manager.edges["_E"].data["w"].double()
    try:
        if case == "mfg":
            manager = graphshard.construct_mfgs(
                graphshard.load_dgl_partition_data(parts, rank), torch.empty(0).long(), 1
            )[0]
        if case in ("transport", "budget"):
            choose_graph_store(manager, *(("local",) if case == "transport" else ("auto", -1)))
        elif case == "room":
            ReplicatedGraphStore.of(manager, directory=str(Path(parts).parent / "nowhere"))
        else:
            structure = ReplicatedGraphStore.of(manager)
            sampler = NeighborSampler([2], prob="w")
            sampler.sample(structure, torch.arange(3), draw_seed=DRAW_SEED)
    except (ValueError, OSError) as caught:
        return str(caught)
    return "no error"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("missing", r"rank 1: sampling by 'w' needs an edge feature"),
        ("dtype", r"what sampling needs first must be the same on all ranks.*torch.float64"),
        ("mfg", r"rank 0: neighbours and features come from a whole graph"),
        ("transport", r"rank 0: transport must be one of auto, collective.*\(got 'local'\)"),
        ("budget", r"rank 0: memory_budget must be a number of bytes, at least 0 \(got -1\)"),
        ("room", r"rank 0: .*No such file or directory: .*nowhere"),
    ],
)
def test_what_is_wrong_is_an_error_on_all_ranks(tmp_path: Path, case: str, text: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error in run_ranks(error_of, 2, parts, case):
        assert re.search(text, error, re.DOTALL), error


def test_a_directory_must_have_room(tmp_path: Path) -> None:
    assert directory_with_room(tmp_path, 10) == tmp_path
    with pytest.raises(OSError, match=r"needs 10{20} bytes \(free: .*\d\); make room"):
        directory_with_room(tmp_path, 10**20)


def find_hosts(rank: int, world_size: int, folder: str) -> list[Any]:
    state = group_state()
    unwritable = Path(folder) / "missing"
    hosts = Hosts.find(state, unwritable if rank == 0 else folder)
    everywhere = Hosts.find(state)
    return [
        list(hosts.leader),
        hosts.leaders,
        hosts.here,
        hosts.is_leader,
        everywhere.here,
        left_behind(folder),
    ]


def test_hosts_are_found_by_trying(tmp_path: Path) -> None:
    everyone = [0, 1, 2]
    assert run_ranks(find_hosts, 3, str(tmp_path)) == [
        [[0, 1, 1], [0, 1], [0], True, everyone, []],
        [[0, 1, 1], [0, 1], [1, 2], True, everyone, []],
        [[0, 1, 1], [0, 1], [1, 2], False, everyone, []],
    ]


def chosen(rank: int, world_size: int, parts: str) -> list[Any]:
    """What is chosen just below and at the size of the graph, which ranks may see differently."""
    manager = manager_of(parts, rank)
    size = replicated_bytes(manager)
    found: list[Any] = [size]
    for transport, budget in (
        ("auto", size),
        ("auto", size - rank),
        ("auto", None),
        ("collective", 10**12),
        ("replicated", 0),
    ):
        structure = choose_graph_store(manager, transport, budget)
        found.append(type(structure).__name__)
        if isinstance(structure, ReplicatedGraphStore):
            assert structure.num_bytes == size
        else:
            assert isinstance(structure, CollectiveGraphStore)
    return found


@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_the_structure_that_fits_is_chosen(tmp_path: Path, kind: str) -> None:
    graph = graph_of(kind)
    parts = write_parts(tmp_path, graph, 2, "random")
    replicated, collective = "ReplicatedGraphStore", "CollectiveGraphStore"
    size = 8 * graph.num_nodes() + sum(
        4 * (graph.num_nodes(etype[2]) + 1 + graph.num_edges(etype))
        for etype in graph.canonical_etypes
    )
    for part in range(2):
        size += 4 * int((~load_partition(parts, part)[0].ndata["inner_node"]).sum())
    wanted = [size, replicated, collective, replicated, collective, replicated]
    assert run_ranks(chosen, 2, parts) == [wanted] * 2
