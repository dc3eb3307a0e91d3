# SPDX-License-Identifier: Apache-2.0
"""One layer on a sampled block, forward and backward: processor seconds of one thread.

    python benchmarks/blocks.py                                  # sage, gat, gatv2
    python benchmarks/two_trees.py ../before --case block        # beside another tree

80,000 sources, of which the first 20,000 are the destinations, 200,000 edges, 128 columns (4 heads
of 32), whose gradients are asked for as in all layers but the first. The least of 25 steps.
"""

from __future__ import annotations

import argparse
import json
import time

import torch

SOURCES, DESTINATIONS, EDGES, WIDTH, HEADS = 80_000, 20_000, 200_000, 128, 4
STEPS = 25


def seconds_of(layer: str) -> float:
    """Processor seconds of one step."""
    import graphshard as gs
    from graphshard.nn import GATConv, GATv2Conv, SAGEConv

    torch.set_num_threads(1)
    torch.manual_seed(0)
    ends = torch.randint(SOURCES, (EDGES,)), torch.randint(DESTINATIONS, (EDGES,))
    block = gs.create_block(ends, num_src_nodes=SOURCES, num_dst_nodes=DESTINATIONS)
    heads = WIDTH, WIDTH // HEADS, HEADS
    module: torch.nn.Module
    if layer == "sage":
        module = SAGEConv(WIDTH, WIDTH, "mean")
    elif layer == "gat":
        module = GATConv(*heads, allow_zero_in_degree=True)
    else:
        module = GATv2Conv(*heads, allow_zero_in_degree=True, share_weights=True)
    x = torch.randn(SOURCES, WIDTH, requires_grad=True)
    grad = torch.randn_like(module(block, x))
    seconds = []
    for _ in range(STEPS):
        start = time.process_time()
        module(block, x).backward(grad)
        seconds.append(time.process_time() - start)
        x.grad = None
        module.zero_grad()
    return min(seconds)


def main() -> None:
    """Print a line of JSON for each layer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--layer", choices=["sage", "gat", "gatv2"], action="append")
    args = parser.parse_args()
    for layer in args.layer or ["sage", "gat", "gatv2"]:
        print(json.dumps({"layer": layer, "seconds": seconds_of(layer)}))


if __name__ == "__main__":
    main()
