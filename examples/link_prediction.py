# SPDX-License-Identifier: Apache-2.0
"""Link prediction with R-GCN and DistMult, in mini-batches of edges.

    python examples/link_prediction.py
    python examples/link_prediction.py --data FOLDER/fb15k-237
    python examples/link_prediction.py --data FOLDER/fb15k-237 --device cuda

A knowledge graph is a list of facts (head, relation, tail). The model learns to complete
(head, relation, ?) and, by the inverse relation, (?, relation, tail). An R-GCN turns the
neighbourhood of an entity into a vector; DistMult scores a fact by those of its head and its tail
and one of its relation. Read the file from top to bottom; `main` is at the end.

By default the facts are the citations of the bundled Cora graph. A folder holds train.npy,
valid.npy and test.npy, each ``[num_facts, 3]`` with the columns head, relation, tail.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard as gs
from graphshard.dgl.dataloading import DataLoader, NeighborSampler, as_edge_prediction_sampler
from graphshard.dgl.dataloading.negative_sampler import Uniform


@dataclass
class Facts:
    """What is known, in three splits of ``[num_facts, 3]``: head, relation, tail."""

    train: Tensor
    valid: Tensor
    test: Tensor
    num_entities: int
    num_relations: int
    loops: bool = True  # whether an entity may be related to itself
    features: Tensor | None = None  # of the entities; without any, their vectors are learned

    @classmethod
    def of_cora(cls) -> Facts:
        """Who cites or is cited by whom: one relation; 5 % to validate, 10 % to test."""
        cora = gs.data.load_dataset("cora", row_normalize=True).graph
        src, dst = cora.edges()
        pairs = torch.stack([src, dst], 1)[src < dst]
        pairs = pairs[torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))]
        facts = torch.stack([pairs[:, 0], torch.zeros_like(pairs[:, 0]), pairs[:, 1]], 1)
        part = len(facts) // 20
        splits = facts.split([len(facts) - 3 * part, part, 2 * part])
        return cls(*splits, cora.num_nodes(), 1, loops=False, features=cora.ndata["feat"])

    @classmethod
    def of_folder(cls, folder: Path) -> Facts:
        """Facts from files."""
        splits = [
            torch.from_numpy(np.load(folder / f"{name}.npy")).long()
            for name in ("train", "valid", "test")
        ]
        every = torch.cat(splits)
        return cls(*splits, int(every[:, [0, 2]].max()) + 1, int(every[:, 1].max()) + 1)

    def both_ways(self, facts: Tensor) -> Tensor:
        """The facts, followed by their inverses: (tail, inverse relation, head)."""
        head, relation, tail = facts.T
        inverse = torch.stack([tail, relation + self.num_relations, head], 1)
        return torch.cat([facts, inverse])


class LinkPredictor(nn.Module):
    """R-GCN layers over vectors of entities, and a vector for each relation and its inverse."""

    def __init__(
        self, facts: Facts, dim: int, num_layers: int, num_bases: int, dropout: float
    ) -> None:
        super().__init__()
        num_types = 2 * facts.num_relations
        if facts.features is None:
            self.entities = nn.Embedding(facts.num_entities, dim)
            nn.init.normal_(self.entities.weight, std=dim**-0.5)
        else:
            self.entities = nn.Linear(facts.features.shape[1], dim)
        self.relations = nn.Embedding(num_types, dim)
        nn.init.ones_(self.relations.weight)
        self.convs = nn.ModuleList(
            gs.nn.RelGraphConv(dim, dim, num_types, "basis", num_bases) for _ in range(num_layers)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, blocks: list[gs.Block], input_nodes: Tensor) -> Tensor:
        """Vectors ``[num_dst, dim]`` of the last block's destinations.

        A block may also be the whole graph: what is trained on samples is evaluated exactly.
        """
        h = self.entities(blocks[0].srcdata.get("feat", input_nodes))
        for layer, (conv, block) in enumerate(zip(self.convs, blocks, strict=True)):
            # The mean over the neighbours that are there, of whatever relation.
            degree = block.in_degrees().clamp(min=1)
            norm = (1 / degree)[block.edges()[1]]
            new = conv(block, h, block.edata["relation"], norm)
            h = h[: block.num_dst_nodes()] + (F.relu(new) if layer + 1 < len(blocks) else new)
        return h

    def score_tails(self, h: Tensor, head: Tensor, relation: Tensor, loops: bool) -> Tensor:
        """DistMult: ``[num_facts, num_nodes]`` scores of all nodes as tails."""
        score = self.dropout(h[head] * self.relations(relation)) @ h.T
        return score if loops else score.scatter(1, head[:, None], -torch.inf)


def train_epoch(
    model: LinkPredictor, optimizer: torch.optim.Optimizer, loader: DataLoader, loops: bool
) -> float:
    """One pass over the facts in both directions; returns the mean loss."""
    model.train()
    losses = []
    for input_nodes, pairs, _, blocks in loader:
        h = model(blocks, input_nodes)
        # All nodes of the batch compete to be the tail: the ends of its facts, and those that the
        # negative sampler brought in, which are here for that only.
        head, tail = pairs.edges()
        score = model.score_tails(h, head, pairs.edata["relation"], loops)
        loss = F.cross_entropy(score, tail)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return float(np.mean(losses))


@torch.no_grad()
def evaluate(
    model: LinkPredictor, graph: gs.Graph, facts: Facts, split: Tensor
) -> dict[str, float]:
    """Filtered ranks of the true tails of some facts and of their inverses.

    "Filtered": other tails that are known to be true do not count. A tail that shares its score
    with others ranks in their middle.
    """
    model.eval()
    nodes = torch.arange(facts.num_entities, device=graph.device)
    h = model([graph] * len(model.convs), nodes)
    known = facts.both_ways(torch.cat([facts.train, facts.valid, facts.test])).to(graph.device)
    known_key, order = torch.sort(known[:, 0] * 2 * facts.num_relations + known[:, 1])
    known_tail = known[order, 2]
    ranks = []
    for part in facts.both_ways(split).to(graph.device).split(1024):
        head, relation, tail = part.T
        score = model.score_tails(h, head, relation, facts.loops)
        true = score.gather(1, tail[:, None])
        key = head * 2 * facts.num_relations + relation
        first, last = (torch.searchsorted(known_key, key, right=right) for right in (False, True))
        count = last - first
        row = torch.arange(len(part), device=graph.device).repeat_interleave(count)
        begin = (first - count.cumsum(0) + count).repeat_interleave(count)
        place = begin + torch.arange(len(row), device=graph.device)
        score[row, known_tail[place]] = -torch.inf
        ranks.append(1 + (score > true).sum(1) + (score == true).sum(1) / 2)
    rank = torch.cat(ranks)
    return {"MRR": (1 / rank).mean().item()} | {
        f"Hits@{k}": (rank <= k).float().mean().item() for k in (1, 3, 10)
    }


def main() -> None:
    """Build the graph, train, evaluate."""
    parser = argparse.ArgumentParser(description="Link prediction with R-GCN and DistMult.")
    parser.add_argument("--data", default="cora", help="cora, or a folder of facts")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--fanouts", type=int, nargs="+", default=[10])
    parser.add_argument("--bases", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--negatives", type=int, default=1, help="random nodes per fact")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = gs.choose_device(args.device)

    facts = Facts.of_cora() if args.data == "cora" else Facts.of_folder(Path(args.data))
    head, relation, tail = facts.both_ways(facts.train).T
    graph = gs.graph((head, tail), num_nodes=facts.num_entities)
    graph.edata["relation"] = relation
    if facts.features is not None:
        graph.ndata["feat"] = facts.features
    num_facts = len(facts.train)
    sampler = as_edge_prediction_sampler(
        NeighborSampler(args.fanouts),
        # An edge would give away the fact that it stands for, and so would its inverse.
        exclude="reverse_id",
        reverse_eids=torch.arange(2 * num_facts).roll(num_facts),
        negative_sampler=Uniform(args.negatives),
    )
    loader = DataLoader(
        graph,
        torch.arange(graph.num_edges()),
        sampler,
        batch_size=args.batch_size,
        shuffle=True,
        seed=args.seed,
        device=device,
    )
    graph = graph.to(device)  # on which is evaluated; the loader draws from the one on the CPU
    model = LinkPredictor(facts, args.dim, len(args.fanouts), args.bases, args.dropout).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    start = time.perf_counter()
    for epoch in range(1, args.epochs + 1):
        loss = train_epoch(model, optimizer, loader, facts.loops)
        line = f"epoch {epoch}: loss {loss:.3f}, {time.perf_counter() - start:.0f} s"
        if epoch % args.eval_every == 0:
            line += f", validation MRR {evaluate(model, graph, facts, facts.valid)['MRR']:.3f}"
        print(line, flush=True)
    result = evaluate(model, graph, facts, facts.test)
    print("test, filtered: " + ", ".join(f"{name} {value:.3f}" for name, value in result.items()))


if __name__ == "__main__":
    main()
