# SPDX-License-Identifier: Apache-2.0
"""Partitions that DGL writes, and older forms of them, for several tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from partition_cases import add_features, as_dicts, bipartite, plain, quietly, random_ids
from torch import Tensor

from dgl_peer import dgl
from graphshard.data import to_dgl
from graphshard.graph import Graph, heterograph
from graphshard.graph.dgl_files import load_tensors, save_tensors


def two_types() -> Graph:
    """Of a size at which DGL no longer keeps the edges of a relation in any order."""
    return heterograph(
        {
            ("author", "writes", "paper"): (random_ids(60, 300, 2), random_ids(80, 300, 3)),
            ("paper", "by", "author"): (random_ids(80, 300, 4), random_ids(60, 300, 5)),
            ("paper", "cites", "paper"): (random_ids(80, 400, 6), random_ids(80, 400, 7)),
        },
        {"author": 60, "paper": 80},
    )


GRAPHS = {"plain": plain, "typed": two_types, "bipartite": bipartite}


def dgl_writes(
    name: str, path: Path, num_parts: int, **options: Any
) -> tuple[Graph, Path, tuple[dict[str, Tensor], dict[Any, Tensor]]]:
    """A graph, the JSON of DGL's partition of it, and DGL's mapping to the original ids."""
    graph = add_features(GRAPHS[name]())
    torch.manual_seed(0)
    dgl.seed(0)
    mapping = quietly(
        dgl.distributed.partition_graph,
        to_dgl(graph),
        name,
        num_parts,
        str(path),
        part_method="random",
        return_mapping=True,
        **options,
    )
    return graph, path / f"{name}.json", as_dicts(graph, mapping)


def dgl_loads(config: Path, part: int) -> tuple[Any, ...]:
    found: tuple[Any, ...] = quietly(dgl.distributed.load_partition, str(config), part)
    return found


def assert_bits(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> None:
    """The same names, dtypes, shapes and bytes; DGL has bytes for bools."""
    assert set(one) == set(two)
    for name in one:
        first, second = (
            t.to(torch.uint8) if t.dtype == torch.bool else t for t in (one[name], two[name])
        )
        assert (first.dtype, first.shape) == (second.dtype, second.shape), name
        flat = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (first, second))
        assert torch.equal(*flat), name


def assert_same_part(ours: tuple[Any, ...], theirs: tuple[Any, ...]) -> None:
    """What our loader and DGL's give for a part, bit for bit, local ids included."""
    graph, node_feats, edge_feats, book, name, ntypes, etypes = ours
    their_graph, their_nodes, their_edges, their_book, *rest = theirs
    assert [name, ntypes, etypes] == rest
    assert book.metadata() == their_book.metadata()
    for one, two in zip(graph.edges(), their_graph.edges(order="eid"), strict=True):
        assert torch.equal(one, two)
    for data, their_data in ((graph.ndata, their_graph.ndata), (graph.edata, their_graph.edata)):
        assert_bits({n: data[n] for n in their_data if n != "orig_id"}, _without(their_data))
    assert_bits(_without(node_feats), _without(their_nodes))
    assert_bits(_without(edge_feats), _without(their_edges))


def _without(features: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without the ids before partitioning, which only ours have in every case."""
    found = {name: features[name] for name in features.keys()}  # noqa: SIM118
    return {name: value for name, value in found.items() if not name.endswith("orig_id")}


def made_old(config: Path, mapping: tuple[dict[str, Tensor], dict[Any, Tensor]]) -> None:
    """Turn a partition into the form that DGL before 1.0 wrote.

    Relations are named alone; types of a plain graph are left out, its maps are ends of blocks, and
    its features have no type; `inner_node` is int32 and `inner_edge` int8; and the ids before
    partitioning are in the graph.
    """
    content = json.loads(config.read_text())
    is_plain = len(content["ntypes"]) == 1
    counts = [len(ids) for ids in mapping[0].values()]
    for part in range(content["num_parts"]):
        files = content[f"part-{part}"]
        path = str(config.parent / files["part_graph"])
        (graph,), _ = dgl.load_graphs(path)
        book, *_ = dgl.distributed.load_partition_book(str(config), part)
        for data, to_types, of_type in (
            (graph.ndata, book.map_to_per_ntype, list(mapping[0].values())),
            (graph.edata, book.map_to_per_etype, list(mapping[1].values())),
        ):
            types, ids = to_types(data["_ID"])
            offsets = [0, *torch.tensor([len(m) for m in of_type]).cumsum(0).tolist()]
            data["orig_id"] = torch.empty_like(ids)
            for number, original in enumerate(of_type):
                here = types == number
                data["orig_id"][here] = original[ids[here]] + offsets[number]
        graph.ndata["inner_node"] = graph.ndata["inner_node"].int()
        graph.edata["inner_edge"] = graph.edata["inner_edge"].char()
        graph.ndata.pop("part_id")
        dgl.save_graphs(path, [graph])
        for kind in ("node_feats", "edge_feats"):
            path = str(config.parent / files[kind])
            old = {}
            for name, feature in load_tensors(path).items():
                owner, _, short = name.rpartition("/")
                owner = owner.split(":")[1] if kind == "edge_feats" else owner
                old[short if is_plain else f"{owner}/{short}"] = feature
            save_tensors(path, old)
    assert counts
    for key in ("edge_map", "etypes"):
        content[key] = {name.split(":")[1]: value for name, value in content[key].items()}
    if is_plain:
        for key in ("node_map", "edge_map"):
            (blocks,) = content[key].values()
            content[key] = [stop for _, stop in blocks]
        del content["ntypes"], content["etypes"]
    config.write_text(json.dumps(content))
