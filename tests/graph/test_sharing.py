# SPDX-License-Identifier: Apache-2.0
"""Graphs between processes: one start of a process (spawned with ``--all``); else in this one."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from graph_oracle import assert_same_graph, gs, typed_pair

from graphshard.dgl import batch


def through(graph: Any) -> Any:
    return pickle.loads(bytes(ForkingPickler.dumps(graph)))  # noqa: S301


def answer(given: Any, requests: Any, results: Any) -> None:
    graph = requests.get()
    graph.ndata["h"] += 1
    results.put((given, graph.batch_num_nodes().tolist()))
    requests.get()


def test_processes_share_a_graph(run_all: bool) -> None:
    context = torch.multiprocessing.get_context("spawn" if run_all else "fork")
    requests, results = context.Queue(), context.Queue()
    typed, _ = typed_pair()
    both = batch([gs.graph(([0, 1], [1, 2])), gs.graph(([0], [1]))])
    both.ndata["h"] = torch.zeros(5)
    process = context.Process(target=answer, args=(typed, requests, results))
    process.start()
    try:
        requests.put(both)
        back, counts = results.get(timeout=60)
        assert counts == [3, 2]
        assert torch.equal(both.ndata["h"], torch.ones(5))
        assert_same_graph(back, typed)
        requests.put(None)
        process.join(60)
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_what_arrives_is_what_was_sent(idtype: torch.dtype) -> None:
    graph = typed_pair()[0].astype(idtype)
    graph.create_formats_()
    twin = through(graph.formats(["csc", "coo"]))
    assert_same_graph(twin, graph)
    assert twin.formats() == {"created": ["coo", "csc"], "not created": []}
    plain = gs.graph(([0, 1], [1, 2]), idtype=idtype)
    twin = through(plain)
    twin.srcdata["x"] = torch.zeros(3)
    assert twin.dstdata["x"] is twin.ndata["x"]
    block = through(gs.to_block(plain, torch.tensor([1, 2], dtype=idtype)))
    assert block.srcdata["_ID"].tolist() == [1, 2, 0]
    twin.add_edges(0, 0)
    assert (twin.num_edges(), plain.num_edges()) == (3, 2)


def test_pickling_to_a_file_stays_refused() -> None:
    with pytest.raises(TypeError, match=r"no pickle; .*queues and arguments of torch.multip"):
        pickle.dumps(gs.graph(([0], [1])))
