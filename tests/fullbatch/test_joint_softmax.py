# SPDX-License-Identifier: Apache-2.0
"""Edge softmax over several relations together, on a sharded graph. 1, 2 and 3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shards import features, own_nodes, typed_graph, write_parts
from torch import Tensor

import graphshard
from graphshard import function as fn
from graphshard.testing import run_ranks

WIDTH = 4
RELATIONS = (("a", "likes", "b"), ("a", "sells", "b"), ("a", "knows", "a"))


def attend(graph: Any, inputs: dict[str, Tensor], norm_by: str) -> dict[str, Tensor]:
    """Attention whose weights are normalised over the edges of all relations."""
    with graph.local_scope():
        for ntype, rows in inputs.items():
            graph.nodes[ntype].data["h"] = rows
        logits = {}
        for etype in graph.canonical_etypes:
            view = graph[etype]
            view.apply_edges(fn.u_dot_v("h", "h", "e"))
            # Far from 0, so that a wrong peak shows; and other ranges for other relations.
            logits[etype] = view.edata["e"] * 3.0 - 900.0 * (etype in RELATIONS)
        for etype, weights in graphshard.edge_softmax(graph, logits, norm_by=norm_by).items():
            graph.edges[etype].data["w"] = weights
        functions = {t: (fn.u_mul_e("h", "w", "m"), fn.sum("m", "o")) for t in logits}
        graph.multi_update_all(functions, "sum")
        return {t: graph.nodes[t].data["o"] for t in ("a", "b")}


def results(graph: Any, inputs: dict[str, Tensor], norm_by: str) -> dict[str, Tensor]:
    """Outputs, and gradients of a sum of cubes of them, by name."""
    leaves = {t: rows.clone().requires_grad_() for t, rows in inputs.items()}
    outputs = attend(graph, leaves, norm_by)
    loss = torch.stack([(rows**3).sum() for rows in outputs.values()]).sum()
    loss.backward()
    found = {f"out {t}": rows.detach() for t, rows in outputs.items()}
    for ntype, rows in leaves.items():
        found[f"grad {ntype}"] = torch.zeros_like(rows) if rows.grad is None else rows.grad
    return found


def rank_results(rank: int, world_size: int, path: str, mode: str, norm_by: str) -> dict[str, Any]:
    torch.set_default_dtype(torch.float64)
    data = graphshard.load_dgl_partition_data(path, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)  # type: ignore[arg-type]
    nodes = own_nodes(data)
    whole = features(typed_graph(), WIDTH, ties=False)
    inputs = {t: rows[nodes[t]] for t, rows in whole.items()}
    return {"nodes": nodes, **results(graph, inputs, norm_by)}


@pytest.mark.parametrize("norm_by", ["dst", "src"])
@pytest.mark.parametrize("mode", ["sequential", "oneshot"])
@pytest.mark.parametrize(("num_ranks", "how"), [(1, "metis"), (2, "random"), (3, "empty_part")])
def test_n_ranks_equal_one_process(
    tmp_path: Path, num_ranks: int, how: str, mode: str, norm_by: str
) -> None:
    graph = typed_graph()
    path = write_parts(tmp_path, graph, num_ranks, how)
    expected = results(graph, features(graph, WIDTH, ties=False), norm_by)
    for found in run_ranks(rank_results, num_ranks, path, mode, norm_by):
        for name, value in expected.items():
            rows = found["nodes"][name.split()[1]]
            torch.testing.assert_close(found[name], value[rows], rtol=1e-10, atol=1e-10)
