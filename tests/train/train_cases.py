# SPDX-License-Identifier: Apache-2.0
"""Small graphs with a classification task, cut into parts, and one run on a rank."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import graphshard
from graphshard.partition import partition_graph
from graphshard.train import FullBatchConfig, FullBatchRun, SampledConfig, SampledRun

NUM_NODES = 40
NUM_CLASSES = 3


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def set_task(graph: graphshard.Graph, ntype: str, num_train: int = 12) -> None:
    """Labels, and masks of nodes drawn at random; one node is in a mask but has no label."""
    count = graph.num_nodes(ntype)
    data = graph.nodes[ntype].data
    label = torch.randint(0, NUM_CLASSES, (count,), generator=_random(3))
    label[5] = -1
    order = torch.randperm(count, generator=_random(4))
    data["label"] = label
    bounds = [0, num_train, num_train + 8, count]
    for split, start, stop in zip(("train", "val", "test"), bounds, bounds[1:], strict=False):
        mask = torch.zeros(count, dtype=torch.bool)
        mask[order[start:stop]] = True
        data[f"{split}_mask"] = mask


def plain_graph() -> graphshard.Graph:
    """Features that are mostly zeros, self loops, parallel edges, relations on the edges."""
    src = torch.randint(0, NUM_NODES, (150,), generator=_random(1))
    dst = torch.randint(0, NUM_NODES, (150,), generator=_random(2))
    src, dst = torch.cat([src, src[:4]]), torch.cat([dst, dst[:4]])
    graph = graphshard.add_self_loop(graphshard.graph((src, dst), num_nodes=NUM_NODES))
    feat = torch.rand(NUM_NODES, 20, generator=_random(5), dtype=torch.float64)
    graph.ndata["feat"] = torch.where(feat < 0.9, 0.0, feat)
    graph.edata["etype"] = torch.randint(0, 4, (graph.num_edges(),), generator=_random(6))
    set_task(graph, "_N")
    return graph


def knowledge_graph() -> graphshard.Graph:
    """The same without features."""
    graph = plain_graph()
    del graph.ndata["feat"]
    return graph


def typed_graph() -> graphshard.Graph:
    """Authors have features, papers and places have none; places write nothing."""
    sizes = {"author": 30, "paper": NUM_NODES, "place": 4}

    def edges(source: str, target: str, count: int) -> tuple[Tensor, Tensor]:
        return (
            torch.randint(0, sizes[source], (count,), generator=_random(count)),
            torch.randint(0, sizes[target], (count,), generator=_random(count + 1)),
        )

    graph = graphshard.heterograph(
        {
            ("author", "writes", "paper"): edges("author", "paper", 70),
            ("paper", "rev_writes", "author"): edges("paper", "author", 60),
            ("paper", "cites", "paper"): edges("paper", "paper", 80),
            ("paper", "at", "place"): edges("paper", "place", 20),
        },
        sizes,
    )
    graph.nodes["author"].data["feat"] = torch.rand(
        30, 7, generator=_random(9), dtype=torch.float64
    )
    set_task(graph, "paper")
    return graph


def of_several_labels() -> graphshard.Graph:
    """Nodes with any of four labels; the last label is on no node."""
    graph = plain_graph()
    label = (torch.rand(NUM_NODES, 4, generator=_random(7)) < 0.4).long()
    label[:, 3] = 0
    label[5] = -1
    graph.ndata["label"] = label
    return graph


def of_values() -> graphshard.Graph:
    """Nodes with two values, of which one is large."""
    graph = plain_graph()
    value = torch.rand(NUM_NODES, 2, generator=_random(8), dtype=torch.float64)
    value[:, 1] = 1000 * value[:, 1] + 5e4
    value[5, 0] = float("nan")
    graph.ndata["label"] = value
    return graph


def typed_values() -> graphshard.Graph:
    """Papers with a value, in float32."""
    graph = typed_graph()
    value = torch.rand(NUM_NODES, generator=_random(10))
    value[5] = float("nan")
    graph.nodes["paper"].data["label"] = value
    return graph


def set_edge_task(graph: graphshard.Graph, etype: Any, seed: int) -> None:
    """Labels of edges, and masks of edges drawn at random; one edge in a mask has no label."""
    count = graph.num_edges(etype)
    data = graph.edges[etype].data
    data["label"] = torch.randint(0, NUM_CLASSES, (count,), generator=_random(seed))
    data["feat"] = torch.rand(count, 2, generator=_random(seed + 1), dtype=torch.float64)
    order = torch.randperm(count, generator=_random(seed + 2))
    data["label"][order[0]] = -1
    third = count // 4
    for i, split in enumerate(("train", "val", "test")):
        mask = torch.zeros(count, dtype=torch.bool)
        mask[order[i * third : (i + 1) * third]] = True
        data[f"{split}_mask"] = mask


def edge_classes() -> graphshard.Graph:
    """A plain graph with classes of edges."""
    graph = plain_graph()
    del graph.ndata["label"]
    set_edge_task(graph, ("_N", "_E", "_N"), 20)
    return graph


def edge_values() -> graphshard.Graph:
    """Papers that cite papers, and authors who write them with a share of the work."""
    graph = typed_graph()
    set_edge_task(graph, ("author", "writes", "paper"), 30)
    label = torch.rand(graph.num_edges("writes"), generator=_random(33), dtype=torch.float64)
    graph.edges["writes"].data["label"] = label
    return graph


def set_links(graph: graphshard.Graph, etype: Any, seed: int) -> None:
    """Edges of three splits, and a few that are in none."""
    count = graph.num_edges(etype)
    order = torch.randperm(count, generator=_random(seed))
    bounds = [0, count // 2, count // 2 + count // 5, count - 5]
    for split, start, stop in zip(("train", "val", "test"), bounds, bounds[1:], strict=False):
        mask = torch.zeros(count, dtype=torch.bool)
        mask[order[start:stop]] = True
        graph.edges[etype].data[f"{split}_mask"] = mask


def plain_links() -> graphshard.Graph:
    """A plain graph with both directions of every edge."""
    graph = graphshard.to_bidirected(plain_graph())
    graph.ndata["feat"] = plain_graph().ndata["feat"]
    set_links(graph, ("_N", "_E", "_N"), 40)
    return graph


def relation_links() -> graphshard.Graph:
    """A knowledge graph with the inverse of each relation, without features."""
    src = torch.randint(0, NUM_NODES, (90,), generator=_random(41))
    dst = torch.randint(0, NUM_NODES, (90,), generator=_random(42))
    etype = torch.randint(0, 3, (90,), generator=_random(43))
    ends = torch.cat([src, dst]), torch.cat([dst, src])
    graph = graphshard.graph(ends, num_nodes=NUM_NODES)
    graph.edata["etype"] = torch.cat([etype, etype + 3])
    set_links(graph, ("_N", "_E", "_N"), 44)
    for split in ("train", "val", "test"):
        graph.edata[f"{split}_mask"][90:] = False
    return graph


def typed_links() -> graphshard.Graph:
    """Authors and the papers that they write, with the reverse relation of the same edges."""
    graph = typed_graph()
    src, dst = graph.edges(etype="writes")
    typed = {etype: graph.edges(etype=etype) for etype in graph.canonical_etypes}
    typed["paper", "rev_writes", "author"] = dst, src
    sizes = {ntype: graph.num_nodes(ntype) for ntype in graph.ntypes}
    both = graphshard.heterograph(typed, sizes)
    both.nodes["author"].data["feat"] = graph.nodes["author"].data["feat"]
    set_links(both, ("author", "writes", "paper"), 45)
    return both


def several_links() -> graphshard.Graph:
    """Links of two relations: authors write papers, which cite papers."""
    graph = typed_links()
    set_links(graph, ("paper", "cites", "paper"), 48)
    return graph


def several_edge_classes() -> graphshard.Graph:
    """Classes of edges of two relations, of which one has features, and both have categories."""
    graph = typed_graph()
    for seed, name in ((50, "writes"), (60, "cites")):
        set_edge_task(graph, name, seed)
        count = graph.num_edges(name)
        graph.edges[name].data["categories"] = torch.randint(
            0, 4, (count, 1 + seed // 60), generator=_random(seed + 5)
        )
    del graph.edges["cites"].data["feat"]
    return graph


def edge_categories() -> graphshard.Graph:
    """Classes of nodes, and edges with features and two columns of categories."""
    graph = plain_graph()
    count = graph.num_edges()
    graph.edata["feat"] = torch.rand(count, 2, generator=_random(70), dtype=torch.float64)
    graph.edata["categories"] = torch.stack(
        [torch.randint(0, n, (count,), generator=_random(70 + n)) for n in (3, 9)], dim=1
    )
    del graph.edata["etype"]
    return graph


def typed_categories() -> graphshard.Graph:
    """A typed graph, of which two relations have categories, and none features."""
    graph = typed_graph()
    for name in ("writes", "cites"):
        count = graph.num_edges(name)
        graph.edges[name].data["categories"] = torch.randint(
            0, 5, (count, 1), generator=_random(80 + len(name))
        )
    return graph


def bipartite_links() -> graphshard.Graph:
    """Users and what they buy: no relation leads to users."""
    generator = torch.Generator().manual_seed(46)
    ends = torch.randint(0, 12, (2, 120), generator=generator)
    graph = graphshard.heterograph(
        {("user", "buys", "item"): tuple(ends)}, {"user": 12, "item": 12}
    )
    for ntype in graph.ntypes:
        graph.nodes[ntype].data["feat"] = torch.rand(12, 3, generator=generator)
    set_links(graph, ("user", "buys", "item"), 47)
    return graph


GRAPHS = {
    "several_links": several_links,
    "several_edge_classes": several_edge_classes,
    "edge_categories": edge_categories,
    "typed_categories": typed_categories,
    "bipartite_links": bipartite_links,
    "plain_links": plain_links,
    "relation_links": relation_links,
    "typed_links": typed_links,
    "edge_classes": edge_classes,
    "edge_values": edge_values,
    "plain": plain_graph,
    "knowledge": knowledge_graph,
    "typed": typed_graph,
    "several_labels": of_several_labels,
    "values": of_values,
    "typed_values": typed_values,
}


def assignment(graph: graphshard.Graph, num_parts: int, how: str) -> Any:
    """What to pass as ``part_method``."""
    if num_parts == 1 or how == "random":
        return "random"
    parts = {}
    for ntype in graph.ntypes:
        count = graph.num_nodes(ntype)
        if how == "empty_part":  # the last rank has no node
            part = torch.arange(count) % (num_parts - 1)
        else:  # "no_train": the last rank has nodes, none of them to train on
            part = torch.arange(count) % num_parts
            train = graph.nodes[ntype].data.get("train_mask")
            if how == "few_edges":  # the last rank has nodes, and no edge into them to train on
                train = torch.zeros(count, dtype=torch.bool)
                for etype in graph.canonical_etypes:
                    data = graph.edges[etype].data
                    if etype[2] == ntype and "train_mask" in data:
                        train[graph.edges(etype=etype)[1][data["train_mask"]].long()] = True
            if train is not None:
                part[train] = part[train] % (num_parts - 1)
        parts[ntype] = part
    return parts if len(parts) > 1 else next(iter(parts.values()))


def write_parts(folder: Path, kind: str, num_parts: int, how: str = "random") -> str:
    """Partition one of `GRAPHS`; returns the path of the JSON."""
    graph = GRAPHS[kind]()
    target = folder / f"{kind}-{num_parts}-{how}"
    method = assignment(graph, num_parts, how)
    partition_graph(graph, "g", num_parts, str(target), part_method=method, quiet=True)
    return str(target / "g.json")


SHORT: dict[str, Any] = {
    "dtype": "float64",
    "epochs": 5,
    "hidden": 6,
    "timeout": 30.0,
    "device": "cpu",
    "both_directions": False,  # the graphs as they are
}


def config_of(data: str, **values: Any) -> FullBatchConfig:
    """A short run in float64."""
    return FullBatchConfig(data=data, **{**SHORT, **values})


def train_on_rank(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the result and the state: what ``run_ranks`` carries."""
    run = FullBatchRun(FullBatchConfig(**values))
    result = run.train()
    return {
        "result": result.as_dict(),
        "shared": run._learner.shared_state(),
        "local": run._learner.local_state(),
    }


def as_values(config: FullBatchConfig | SampledConfig) -> dict[str, Any]:
    return dataclasses.asdict(config)


def sampled_config_of(data: str, **values: Any) -> SampledConfig:
    """A short sampled run in float64, in which everything is drawn in one step."""
    return SampledConfig(data=data, **{"batch_size": 0, **SHORT, **values})


def train_sampled_on_rank(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """As `train_on_rank`, on samples."""
    run = SampledRun(SampledConfig(**values))
    result = run.train()
    return {
        "result": result.as_dict(),
        "shared": run._learner.shared_state(),
        "local": run._learner.local_state(),
    }
