# SPDX-License-Identifier: Apache-2.0
"""Sampled training of GraphSAGE on the Cora citation graph by several workers, exact inference.

    torchrun --standalone --nproc-per-node 2 examples/sampled.py
    torchrun --standalone --nproc-per-node 2 examples/sampled.py --device cuda

The model, and the way Cora is cut into one part per worker, are those of full_batch.py. There a
step is on the whole graph. Here each worker takes some of its training nodes, draws a few
neighbours of each and of their neighbours, wherever those are, and makes a step on what was drawn.
In the end the very same model runs on the whole graph. `main` is all there is to read.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from full_batch import GraphSAGE, join_workers, partition_cora, sum_over_workers

import graphshard as gs

FANOUTS, BATCH_SIZE, LEARNING_RATE, WEIGHT_DECAY, EPOCHS = [10, 10], 35, 0.01, 5e-4, 40


def main() -> None:
    """Partition, train on samples, evaluate on everything."""
    parser = argparse.ArgumentParser(description="Sampled training on Cora.")
    build = Path(__file__).resolve().parent.parent / "build"
    parser.add_argument("--out", type=Path, default=build / "examples" / "sampled")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N, or auto")
    args = parser.parse_args()

    # 1. As in full_batch.py: each worker has one part, and together they have the whole graph. It
    #    stays on the CPU, which draws; batches go to the device.
    device = join_workers(args.device)
    data = gs.load_dgl_partition_data(partition_cora(args.out), gs.rank())
    graph = gs.construct_full_graph(data)
    features = gs.suffix_key_lookup(data.node_features, "feat")
    labels = gs.suffix_key_lookup(data.node_features, "label")
    train, test = (
        gs.suffix_key_lookup(data.node_features, f"{split}_mask").bool()
        for split in ("train", "test")
    )

    # 2. The loader. Seeds are named by their ids in the partitioned graph, of which this worker
    #    owns one range. Batches come with the features of their inputs and the labels of their
    #    outputs, from whichever worker has them, while the step before is still being made.
    sampler = gs.DistNeighborSampler(
        FANOUTS,
        input_node_features={"features": features},
        output_node_features={"labels": labels},
        output_device=device,
    )
    seeds = graph.ndata[gs.NID][train]
    loader = gs.DataLoader(graph, seeds, sampler, BATCH_SIZE, shuffle=True, seed=0)

    torch.manual_seed(gs.rank())
    model = GraphSAGE(features.shape[1], num_classes=7).to(device)
    gs.sync_params(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)

    # 3. All workers make the same number of steps, also if one has more seeds: the others then get
    #    empty batches, which weigh nothing. global_mean makes this worker's share of the mean loss
    #    over the seeds of all, so that the summed gradients are those of that mean.
    for epoch in range(1, EPOCHS + 1):
        model.train()
        total = 0.0
        for blocks in loader:
            scores = model(blocks, blocks[0].srcdata["features"])
            losses = F.cross_entropy(scores, blocks[-1].dstdata["labels"], reduction="none")
            optimizer.zero_grad()
            gs.sampling.global_mean(losses, blocks).backward()
            gs.gather_grads(model)
            optimizer.step()
            total += float(losses.detach().sum())
        if epoch % 20 == 0:
            total, num_seeds = sum_over_workers(total, seeds.numel())
            if gs.rank() == 0:
                print(f"epoch {epoch:3d}: {len(loader)} steps, loss {total / num_seeds:.4f}")

    # 4. The same model on the sharded graph, with all neighbours: exact. `inference` does it for
    #    300 nodes at a time, so that memory is bounded however many edges there are. It computes
    #    where the graph is.
    scores = gs.inference(model.cpu(), graph, features, batch_size=300)
    right = scores.argmax(dim=1) == labels
    num_right, num_test = sum_over_workers(float(right[test].sum()), float(test.sum()))
    if gs.rank() == 0:
        print(f"test accuracy {100 * num_right / num_test:.1f} % on {num_test:.0f} nodes")
    loader.close()
    gs.shutdown_comms()


if __name__ == "__main__":
    main()
