# SPDX-License-Identifier: Apache-2.0
r"""Embeddings of nodes without features, learned from random walks, on graph servers.

    python examples/distributed_embeddings.py            # standalone: one process, no servers

    graphshard partition --data cora --parts 2 --out build/examples/cora
    graphshard launch --local 2 --num-trainers 2 --part-config build/examples/cora/cora.json \
        "examples/distributed_embeddings.py --part-config build/examples/cora/cora.json"

As DeepWalk does (Perozzi, Al-Rfou and Skiena, KDD 2014, https://arxiv.org/abs/1403.6652), with
negative samples: nodes that are close on a walk get rows with a large dot product. The rows are
spread over the hosts, and a step sends gradients only to the owners of rows that it read. In the
end a linear classifier on the rows tells how good they are; it sees no features of papers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import graphshard as gs
import graphshard.dgl as dgl
from graphshard.servers import DistEmbedding, DistGraph, SparseAdagrad

WIDTH, WALK, WINDOW, NEGATIVES, BATCH_SIZE, LEARNING_RATE = 64, 10, 4, 1, 256, 0.25


def random_walks(g: DistGraph, nodes: Tensor) -> Tensor:
    """Walks ``[len(nodes), WALK + 1]`` from nodes; those that meet go on together."""
    walks = [nodes]
    for _ in range(WALK):
        places, index = walks[-1].unique(return_inverse=True)
        src, dst = dgl.distributed.sample_neighbors(g, places, 1).edges()
        following = places.clone()  # a node without neighbours keeps its walk
        following[torch.searchsorted(places, dst)] = src
        walks.append(following[index])
    return torch.stack(walks, 1)


def close_pairs(walks: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes, and others that are at most `WINDOW` steps away on the same walk."""
    pairs = [(walks[:, :-gap], walks[:, gap:]) for gap in range(1, WINDOW + 1)]
    first = torch.cat([one.reshape(-1) for one, _ in pairs])
    second = torch.cat([other.reshape(-1) for _, other in pairs])
    return torch.cat([first, second]), torch.cat([second, first])


def loss_of(rows: DistEmbedding, contexts: DistEmbedding, walks: Tensor, num_nodes: int) -> Tensor:
    """Skip-gram with negative samples, the mean over pairs; each row is read once."""
    nodes, others = close_pairs(walks)
    random = torch.randint(num_nodes, (NEGATIVES * len(nodes),))
    ids, place = nodes.unique(return_inverse=True)
    context_ids, context_place = torch.cat([others, random]).unique(return_inverse=True)
    left = rows(ids).index_select(0, place)
    right = contexts(context_ids).index_select(0, context_place)
    close, far = right.split([len(others), len(random)])
    near = F.logsigmoid((left * close).sum(1)).sum()
    apart = F.logsigmoid(-(left.repeat(NEGATIVES, 1) * far).sum(1)).sum()
    return -(near + apart) / len(nodes)


def accuracy_of(rows: Tensor, labels: Tensor, train: Tensor, test: Tensor) -> float:
    """Of a linear classifier on rows."""
    rows = F.normalize(rows)
    linear = torch.nn.Linear(rows.shape[1], int(labels.max()) + 1)
    optimizer = torch.optim.Adam(linear.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(200):
        optimizer.zero_grad()
        F.cross_entropy(linear(rows[train]), labels[train]).backward()
        optimizer.step()
    return float((linear(rows[test]).argmax(1) == labels[test]).float().mean())


def main() -> None:
    """Connect, walk, learn, evaluate."""
    parser = argparse.ArgumentParser(description="Embeddings on graph servers.")
    parser.add_argument("--ip-config", help="the hosts, where launch does not say it")
    parser.add_argument("--part-config", type=Path)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--out", type=Path, default=Path("build/examples/distributed_embeddings"))
    args = parser.parse_args()
    if args.part_config is None:  # standalone
        cora = gs.data.load_dataset("cora").graph
        args.part_config = args.out / "cora.json"
        dgl.distributed.partition_graph(cora, "cora", 2, args.out, quiet=True)

    dgl.distributed.initialize(args.ip_config)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        torch.distributed.init_process_group("gloo")
    g = DistGraph(args.part_config.stem, part_config=args.part_config)
    torch.manual_seed(g.rank())

    # 1. Two rows for each node: its own, and the one for where it is the context of another.
    def small(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return (torch.rand(shape, dtype=dtype) - 0.5) / WIDTH

    rows = DistEmbedding(g.num_nodes(), WIDTH, "rows", init_func=small)
    contexts = DistEmbedding(g.num_nodes(), WIDTH, "contexts", init_func=small)
    optimizer = SparseAdagrad([rows, contexts], lr=LEARNING_RATE)

    # 2. Each trainer walks from a share of the nodes; all make as many steps.
    everything = torch.ones(g.num_nodes(), dtype=torch.bool)
    mine = dgl.distributed.node_split(everything, g.get_partition_book())
    num_trainers = dgl.distributed.get_num_clients()
    num_steps = g.most_steps(-(-len(mine) * num_trainers // BATCH_SIZE))
    for epoch in range(1, args.epochs + 1):
        for seeds in mine[torch.randperm(len(mine))].tensor_split(num_steps):
            loss = loss_of(rows, contexts, random_walks(g, seeds), g.num_nodes())
            (loss / num_trainers).backward()
            optimizer.step()
        if epoch % 5 == 0 and g.rank() == 0:
            print(f"epoch {epoch:3d}: loss {float(loss.detach()):.4f}", flush=True)
    g.barrier()

    # 3. The rows are read like any tensor.
    if g.rank() == 0:
        train, test = (
            g.ndata[f"{split}_mask"][:].nonzero().view(-1) for split in ("train", "test")
        )
        accuracy = accuracy_of(rows.weight[:], g.ndata["label"][:], train, test)
        print(f"test accuracy {100 * accuracy:.1f} % on {len(test)} nodes")
    g.barrier()
    dgl.distributed.exit_client()


if __name__ == "__main__":
    main()
