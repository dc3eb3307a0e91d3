# SPDX-License-Identifier: Apache-2.0
"""What remote rows in bfloat16 and int8 cost in precision and save in bytes, on Cora.

    python benchmarks/halo_dtype.py

Three layers, hidden 64, float32, one-shot. Errors are those of the outputs and of the gradients of
all weights against one process in float64, as norms relative to the norm of the exact ones; bytes
are those that a later epoch sends for rows and their gradients, all ranks together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from _common import markdown_table, write_result
from torch import Tensor, nn

HIDDEN, CLASSES, HEADS = 64, 7, 4


def make_layers(model: str, width: int) -> nn.ModuleList:
    """Three layers; initial weights depend on torch's seed alone."""
    from graphshard.nn import GATConv, SAGEConv

    widths = [width, HIDDEN, HIDDEN, CLASSES]
    pairs = list(zip(widths, widths[1:], strict=False))
    torch.manual_seed(0)
    if model == "sage":
        return nn.ModuleList(SAGEConv(a, b, "mean") for a, b in pairs)
    return nn.ModuleList(
        GATConv(a, b // HEADS if i < 2 else b, HEADS, allow_zero_in_degree=True)
        for i, (a, b) in enumerate(pairs)
    )


def forward(layers: nn.ModuleList, graph: Any, h: Tensor) -> Tensor:
    """Output of the network on every row."""
    for i, layer in enumerate(layers):
        h = layer(graph, h)
        if h.dim() == 3:
            h = h.flatten(1) if i < 2 else h.mean(1)
        h = F.elu(h) if i < 2 else h
    return h


def squared(tensors: Sequence[Tensor]) -> float:
    """Sum of the squares of all entries."""
    return sum(float(t.double().square().sum()) for t in tensors)


def measure(rank: int, world_size: int, parts: str, model: str, halo: str) -> list[float]:
    """(error of outputs, error of gradients, megabytes of an epoch)."""
    import graphshard as gs

    cora = gs.data.load_dataset("cora", row_normalize=True)
    data = gs.load_dgl_partition_data(parts, rank)
    dtype = None if halo == "float32" else getattr(torch, halo)
    graph = gs.construct_full_graph(data, mode="oneshot", halo_dtype=dtype)
    nodes = graph.original_ids["_N"]
    x, y = cora.graph.ndata["feat"], cora.graph.ndata["label"]

    exact = make_layers(model, x.shape[1]).double()
    expected = forward(exact, cora.graph, x.double())
    F.cross_entropy(expected, y).backward()

    layers = make_layers(model, x.shape[1])
    h = x[nodes].clone()
    for _ in range(2):
        layers.zero_grad()
        with gs.comm.trace() as trace:
            out = forward(layers, graph, h)
            (F.cross_entropy(out, y[nodes], reduction="sum") / len(y)).backward()
    gs.gather_grads(layers)
    sums = torch.tensor(
        [squared([out.detach() - expected[nodes].detach()]), float(trace.total_bytes)],
        dtype=torch.float64,
    )
    off, sent = gs.comm.all_reduce(sums).tolist()
    pairs = [(p.grad, q.grad) for p, q in zip(layers.parameters(), exact.parameters(), strict=True)]
    known = [(p, q) for p, q in pairs if p is not None and q is not None]
    grads = squared([p - q for p, q in known]) / squared([q for _, q in known])
    return [(off / squared([expected.detach()])) ** 0.5, grads**0.5, sent / 1e6]


def main() -> None:
    """Write the table."""
    import graphshard as gs
    from graphshard.testing import run_ranks

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cora = gs.data.load_dataset("cora", row_normalize=True)
        for num_parts in (2, 4):
            where = f"{folder}/{num_parts}"
            gs.partition_graph(cora.graph, "cora", num_parts, where, quiet=True)
            for model in ("sage", "gat"):
                for halo in ("float32", "bfloat16", "int8"):
                    parts = f"{where}/cora.json"
                    out, grad, sent = run_ranks(measure, num_parts, parts, model, halo)[0]
                    cells = [f"{out:.1e}", f"{grad:.1e}", f"{sent:.2f}"]
                    rows.append([model.upper(), num_parts, halo, *cells])
    header = ["model", "parts", "rows travel as", "outputs off by", "gradients off by", "MB sent"]
    how = (
        "Relative errors (norms of the difference) of the outputs and of the gradients of all "
        "weights after three layers on Cora, hidden 64, against one process in float64, and "
        "megabytes sent in an epoch."
    )
    body = [how, "", *markdown_table(header, rows)]
    write_result("halo_dtype", "How far off rows are that travel in fewer bits", body)


if __name__ == "__main__":
    main()
