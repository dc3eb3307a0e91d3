# SPDX-License-Identifier: Apache-2.0
"""A graph with several node types and relations, sharded: HeteroGraphConv in full batch.

    torchrun --standalone --nproc-per-node 2 examples/typed_graph.py

Authors write papers, papers cite papers, venues publish papers. What a paper is about cannot be
seen from its own features, only from its authors, its citations and its venue, so the model has to
use the relations. The script also counts exchanges: a layer needs one in each direction, however
many relations it has.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard as gs
from graphshard.comm import all_reduce, barrier, trace

NUM_NODES = {"author": 400, "paper": 800, "venue": 20}
NUM_TOPICS, WIDTH, HIDDEN, EPOCHS = 4, 8, 16, 40


def make_graph() -> gs.Graph:
    """Four relations; nodes that are joined mostly have the same topic."""
    rng = torch.Generator().manual_seed(0)
    topic = {
        ntype: torch.randint(NUM_TOPICS, (count,), generator=rng)
        for ntype, count in NUM_NODES.items()
    }

    def join(source: str, target: str, num_edges: int) -> tuple[Tensor, Tensor]:
        src = torch.randint(NUM_NODES[source], (num_edges,), generator=rng)
        dst = torch.randint(NUM_NODES[target], (num_edges,), generator=rng)
        same = topic[source][src] == topic[target][dst]
        kept = same | (torch.rand(num_edges, generator=rng) < 0.05)
        return src[kept], dst[kept]

    writes = join("author", "paper", 8000)
    graph = gs.heterograph(
        {
            ("author", "writes", "paper"): writes,
            ("paper", "written_by", "author"): writes[::-1],
            ("paper", "cites", "paper"): join("paper", "paper", 6000),
            ("venue", "publishes", "paper"): join("venue", "paper", 4000),
        },
        NUM_NODES,
    )
    for ntype, count in NUM_NODES.items():
        rows = torch.randn(count, WIDTH, generator=rng)
        if ntype != "paper":
            rows[:, :NUM_TOPICS] += 2 * F.one_hot(topic[ntype], NUM_TOPICS)
        graph.nodes[ntype].data["feat"] = rows
    graph.nodes["paper"].data["label"] = topic["paper"]
    draw = torch.rand(NUM_NODES["paper"], generator=rng)
    graph.nodes["paper"].data["train_mask"] = draw < 0.3
    graph.nodes["paper"].data["test_mask"] = draw >= 0.5
    return graph


class TypedSAGE(nn.Module):
    """Two layers of one GraphSAGE per relation, summed at each node type."""

    def __init__(self, relations: list[str]) -> None:
        super().__init__()
        self.first = gs.nn.HeteroGraphConv(
            {name: gs.nn.SAGEConv(WIDTH, HIDDEN, "mean") for name in relations}
        )
        self.second = gs.nn.HeteroGraphConv(
            {name: gs.nn.SAGEConv(HIDDEN, NUM_TOPICS, "mean") for name in relations}
        )

    def forward(self, graph: gs.GraphShardManager, rows: dict[str, Tensor]) -> Tensor:
        """Scores of this worker's papers."""
        found = self.first(graph, rows)
        # Nothing points at venues: the first layer gives them no rows, and the second leaves out
        # the relation that would start at them.
        return self.second(graph, {ntype: F.relu(h) for ntype, h in found.items()})["paper"]


def sum_over_workers(*numbers: float) -> list[float]:
    """Each number, added up over all workers."""
    return all_reduce(torch.tensor(numbers, dtype=torch.float64)).tolist()


def main() -> None:
    """Partition, train, count, evaluate."""
    parser = argparse.ArgumentParser(description="Full-batch training on a typed graph.")
    build = Path(__file__).resolve().parent.parent / "build"
    parser.add_argument("--out", type=Path, default=build / "examples" / "typed_graph")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    args = parser.parse_args()
    folder, device = args.out, gs.choose_device(args.device)

    if device.type == "cuda":
        torch.cuda.set_device(device)
    gs.initialize_comms(backend="auto", timeout=60)
    if gs.rank() == 0:
        # The nodes of every type are balanced without being asked.
        gs.partition_graph(
            make_graph(), "library", gs.world_size(), folder, balance_split=True, quiet=True
        )
    barrier()

    data = gs.load_dgl_partition_data(folder / "library.json", gs.rank(), device)
    graph = gs.construct_full_graph(data, mode="oneshot")
    rows = {ntype: data.node_features[f"{ntype}/feat"] for ntype in graph.ntypes}
    labels = data.node_features["paper/label"]
    train, test = (data.node_features[f"paper/{name}_mask"] for name in ("train", "test"))
    (num_train,) = sum_over_workers(float(train.sum()))

    torch.manual_seed(0)
    model = TypedSAGE(graph.etypes).to(device)
    gs.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(EPOCHS):
        with trace() as sent:
            loss = F.cross_entropy(model(graph, rows)[train], labels[train], reduction="sum")
            optimizer.zero_grad()
            (loss / num_train).backward()
        gs.gather_grads(model)
        optimizer.step()

    with torch.no_grad():
        right = model(graph, rows).argmax(dim=1) == labels
    num_right, num_test = sum_over_workers(float(right[test].sum()), float(test.sum()))
    if gs.rank() == 0:
        # In one-shot mode a layer fetches the rows of all its source types together. The first
        # layer needs no gradient of its input, so nothing goes back for it.
        num_exchanges = sent.calls.get("all_to_all", 0)
        print(
            f"{num_exchanges} exchanges in an epoch, for {len(graph.etypes)} relations in 2 layers"
        )
        print(f"test accuracy {100 * num_right / num_test:.1f} % on {num_test:.0f} papers")
    gs.shutdown_comms()


if __name__ == "__main__":
    main()
