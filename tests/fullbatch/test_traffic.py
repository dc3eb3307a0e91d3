# SPDX-License-Identifier: Apache-2.0
"""What is sent per epoch, to the byte, and in how many operations. Uses 2 and 3 gloo ranks.

The formula: in one exchange a rank sends, for every other rank, each of its rows that the other
one reads, once. Forward it sends its own rows, backward the gradients of its halo rows. An
aggregation of the partition's features is exchanged in the first epoch only, and has no backward.
Partial sums, of which fewer travel, are in `test_partial_sums`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import PLAIN, plain_graph, typed_graph, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import comm
from graphshard.nn import GATConv, GraphConv, HeteroGraphConv, SAGEConv
from graphshard.testing import run_ranks

WIDTHS = (6, 8, 10, 12)
NUM_HEADS = 2


def sage_layers() -> list[nn.Module]:
    return [SAGEConv(a, b, "mean") for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]


def gat_layers() -> list[nn.Module]:
    widths = zip(WIDTHS, WIDTHS[1:], strict=False)
    return [GATConv(a, b // NUM_HEADS, NUM_HEADS, allow_zero_in_degree=True) for a, b in widths]


def run_epoch(graph: Any, layers: list[nn.Module], inputs: Tensor) -> None:
    h = inputs
    for layer in layers:
        h = layer(graph, h).flatten(1)
    (h**2).sum().backward()


def rows_read(data: graphshard.PartitionData) -> tuple[int, int]:
    """(rows of this rank that others read, rows of others that this rank reads), by definition."""
    edges = data.edges[PLAIN]
    read = {
        (int(p), int(s))
        for p, s in zip(edges.src_part, edges.src, strict=True)
        if int(p) != data.rank
    }
    halo = torch.tensor([float(len(read))])
    owners = torch.zeros(data.num_parts)
    for part, _ in read:
        owners[part] += 1
    torch.distributed.all_reduce(owners)
    return int(owners[data.rank]), int(halo[0])


def measure(
    rank: int, world_size: int, parts: str, model: str, mode: str, epochs: int
) -> list[dict[str, Any]]:
    """Per epoch, the calls and bytes of each kind; and the rows that this rank sends and reads."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    sent_rows, halo_rows = rows_read(data)
    name, _, kept = mode.partition("-")
    inputs = torch.randn(data.num_owned(), WIDTHS[0])
    data = replace(data, node_features={"_N/feat": inputs})
    options = {"rematerialize": not kept, "partial_sums": False}
    graph = graphshard.construct_full_graph(data, mode=name, **options)
    torch.manual_seed(0)
    layers = sage_layers() if model == "sage" else gat_layers()
    found = []
    for _ in range(epochs):
        with comm.trace() as trace:
            run_epoch(graph, layers, inputs)
        found.append(
            {
                "calls": dict(trace.calls),
                "bytes": dict(trace.bytes_sent),
                "sent_rows": sent_rows,
                "halo_rows": halo_rows,
            }
        )
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_shot_sage_sends_the_formula(tmp_path: Path, num_ranks: int) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, "random")
    for epochs in run_ranks(measure, num_ranks, parts, "sage", "oneshot", 3):
        first, later = epochs[0], epochs[2]
        sent, halo = first["sent_rows"], first["halo_rows"]
        hidden = sum(WIDTHS[1:-1]) * 4
        assert later["bytes"] == {"all_to_all": (sent + halo) * hidden}
        assert first["bytes"]["all_to_all"] == (sent + halo) * hidden + sent * WIDTHS[0] * 4
        assert later["calls"] == {"all_to_all": 2 * (len(WIDTHS) - 2)}


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_shot_gat_needs_one_exchange_per_layer_and_direction(
    tmp_path: Path, num_ranks: int
) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, "random")
    for first, second in run_ranks(measure, num_ranks, parts, "gat", "oneshot", 2):
        sent, halo = second["sent_rows"], second["halo_rows"]
        row = sum(width + NUM_HEADS for width in WIDTHS[2:]) * 4
        assert second["bytes"] == {"all_to_all": (sent + halo) * row}
        assert second["calls"] == {"all_to_all": 2 * (len(WIDTHS) - 2)}
        # Features travel in place of their projections, once, and have no gradient.
        assert first["bytes"]["all_to_all"] == (sent + halo) * row + sent * WIDTHS[0] * 4


@pytest.mark.parametrize(
    ("model", "mode", "row_bytes"),
    [
        # A sum is linear: the backward sends gradients home and fetches nothing again.
        ("sage", "sequential", lambda sent, halo: (sent + halo) * sum(WIDTHS[1:-1]) * 4),
        (
            "gat",
            "sequential",
            lambda sent, halo: (2 * sent + halo) * sum(w + NUM_HEADS for w in WIDTHS[1:]) * 4,
        ),
        (
            "gat",
            "sequential-kept",
            lambda sent, halo: (sent + halo) * sum(w + NUM_HEADS for w in WIDTHS[1:]) * 4,
        ),
    ],
)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sequential_sends_the_formula(
    tmp_path: Path,
    num_ranks: int,
    model: str,
    mode: str,
    row_bytes: Callable[[int, int], int],
) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, "random")
    for epochs in run_ranks(measure, num_ranks, parts, model, mode, 3):
        later = epochs[2]
        assert set(later["bytes"]) == {"send"}
        assert later["bytes"]["send"] == row_bytes(later["sent_rows"], later["halo_rows"])


def measure_typed(
    rank: int, world_size: int, parts: str, mode: str, layer: str, constant: bool = False
) -> dict[str, Any]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    torch.manual_seed(0)
    make = {"sage": lambda: SAGEConv(6, 8, "mean"), "gcn": lambda: GraphConv(8, 4, norm="right")}
    conv = HeteroGraphConv({etype: make[layer]() for etype in data.edge_type_names})
    width = 6 if layer == "sage" else 8
    inputs = {
        t: torch.randn(data.num_owned(t), width, requires_grad=not constant)
        for t in data.node_type_names
    }
    data = replace(data, node_features={f"{t}/feat": rows for t, rows in inputs.items()})
    graph = graphshard.construct_full_graph(data, mode=mode, partial_sums=False)
    sent = {}
    for ntype in data.node_type_names:
        read = {
            (int(p), int(s))
            for etype, e in data.edges.items()
            for p, s in zip(e.src_part, e.src, strict=True)
            if etype[0] == ntype and int(p) != rank
        }
        owners = torch.zeros(world_size)
        for part, _ in read:
            owners[part] += 1
        torch.distributed.all_reduce(owners)
        sent[ntype] = int(owners[rank]) + len(read)
    for _ in range(2):
        with comm.trace() as trace:
            outputs = conv(graph, inputs)
            sum((out**2).sum() for out in outputs.values()).backward()
    return {
        "calls": dict(trace.calls),
        "bytes": dict(trace.bytes_sent),
        "expected": sum(sent.values()) * width * 4,
    }


@pytest.mark.parametrize("layer", ["sage", "gcn"])
def test_one_shot_exchanges_all_source_types_once(tmp_path: Path, layer: str) -> None:
    """Also where the layer narrows first: its raw inputs travel, not one product per relation."""
    parts = write_parts(tmp_path, typed_graph(), 3, "random")
    for found in run_ranks(measure_typed, 3, parts, "oneshot", layer):
        assert found["calls"] == {"all_to_all": 2}
        assert found["bytes"] == {"all_to_all": found["expected"]}


def test_sequential_exchanges_each_source_type_once(tmp_path: Path) -> None:
    """Relations that aggregate the same rows share one pass over the shards."""
    parts = write_parts(tmp_path, typed_graph(), 3, "random")
    for found in run_ranks(measure_typed, 3, parts, "sequential", "sage"):
        assert found["bytes"] == {"send": found["expected"]}


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
def test_constant_inputs_of_a_typed_layer_are_fetched_once(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, typed_graph(), 3, "random")
    for found in run_ranks(measure_typed, 3, parts, mode, "sage", True):
        assert found["calls"] == {}  # in the second epoch
