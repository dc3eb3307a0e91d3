# SPDX-License-Identifier: Apache-2.0
"""What an aggregation lets go of, and when. 1 and 2 gloo ranks.

Large tensors must go when their last user is done: the garbage collector, which would find them in
a cycle, knows nothing of their size and may come much later.
"""

from __future__ import annotations

import gc
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from shards import graph_of, write_parts
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import graphshard
from case_selection import sampled
from graphshard.dgl.nn import AGNNConv, DotGatConv
from graphshard.fullbatch.softmax import AttentionSum
from graphshard.nn import GATConv, GATv2Conv, SAGEConv
from graphshard.testing import run_ranks

WIDTH = 12
MODES = ("oneshot", "sequential")
LAYERS: dict[str, Any] = {
    "gat": lambda: GATConv(WIDTH, 3, 4, attn_drop=0.2, allow_zero_in_degree=True),
    "gat-relu": lambda: GATConv(WIDTH, 3, 4, activation=torch.relu, allow_zero_in_degree=True),
    "gatv2": lambda: GATv2Conv(WIDTH, 3, 4, allow_zero_in_degree=True),
    "dot-gat": lambda: DotGatConv(WIDTH, 3, 4, allow_zero_in_degree=True),
    "agnn": lambda: AGNNConv(allow_zero_in_degree=True),
    "sage-mean": lambda: SAGEConv(WIDTH, WIDTH, "mean"),
    "sage-pool": lambda: SAGEConv(WIDTH, WIDTH, "pool"),
}


def tensors() -> list[Tensor]:
    """All that python objects hold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        return [found for found in gc.get_objects() if isinstance(found, Tensor)]


def num_tensors(expected: int = 0) -> int:
    """How many there are; a thread of the backend may hold on for a moment to what it has moved."""
    found = len(tensors())
    for _ in range(20):
        if found <= expected:
            break
        time.sleep(0.02)
        found = min(found, len(tensors()))
    return found


def construct(parts: str, rank: int, mode: Any) -> tuple[graphshard.GraphShardManager, Tensor]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)
    generator = torch.Generator().manual_seed(rank)
    return graph, torch.randn(graph.num_nodes(), WIDTH, generator=generator, requires_grad=True)


def count_after_epoch(
    rank: int, world_size: int, parts: str, mode: str, name: str
) -> tuple[int, int]:
    graph, inputs = construct(parts, rank, mode)
    layer = LAYERS[name]()

    def epoch() -> None:
        (layer(graph, inputs).flatten(1) ** 2).sum().backward()

    epoch()  # structure is made on first use
    epoch()
    gc.collect()
    before = num_tensors()
    gc.disable()
    try:
        epoch()
        return before, num_tensors(before)
    finally:
        gc.enable()


@pytest.mark.parametrize(("num_ranks", "mode", "name"), sampled([1, 2], MODES, list(LAYERS)))
def test_an_epoch_leaves_nothing_to_the_garbage_collector(
    tmp_path: Path, num_ranks: int, mode: str, name: str
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, "random")
    for before, after in run_ranks(count_after_epoch, num_ranks, parts, mode, name):
        assert after == before


def count_rows_of_heads(rank: int, world_size: int, parts: str, mode: str) -> tuple[int, int]:
    graph, inputs = construct(parts, rank, mode)
    layer = LAYERS["gat"]()
    gc.collect()

    def alive() -> int:
        return sum(t.shape[1:] == (4, 3) and t.shape[0] > 1 for t in tensors())

    loss = (layer(graph, inputs).flatten(1) ** 2).sum()
    during = alive()
    loss.backward()
    after = alive()
    assert loss.requires_grad  # still here
    return during, after


@pytest.mark.parametrize("mode", MODES)
def test_a_backward_frees_what_the_layer_kept_though_the_loss_lives_on(
    tmp_path: Path, mode: str
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for during, after in run_ranks(count_rows_of_heads, 2, parts, mode):
        assert during > 0
        assert after == 0


def watch_a_pass(rank: int, world_size: int, parts: str, mode: str) -> list[tuple[bool, bool]]:
    """Whether result and gradient of a layer are gone, each time that a shard is worked on."""
    graph, inputs = construct(parts, rank, mode)
    layer = GATConv(WIDTH, 3, 4, activation=torch.relu, allow_zero_in_degree=True)
    found, watched = [], []
    work = AttentionSum.direct_gradients

    def watching(*arguments: Any) -> Any:
        found.append(tuple(ref.expired() for ref in watched))
        return work(*arguments)

    result = layer(graph, inputs)
    watched.append(StorageWeakRef(result.untyped_storage()))
    result.register_hook(lambda g: watched.append(StorageWeakRef(g.untyped_storage())))
    loss = (result * torch.rand(result.shape)).sum()  # which keeps no result
    del result
    with mock.patch.object(AttentionSum, "direct_gradients", watching):
        loss.backward()
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_of_attention_begins_without_result_and_gradient(tmp_path: Path, mode: str) -> None:
    """Each is as large as the memory that a pass works in."""
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for found in run_ranks(watch_a_pass, 2, parts, mode):
        assert found
        assert set(found) == {(True, True)}


def backward_twice(rank: int, world_size: int, parts: str, mode: str, name: str) -> str:
    graph, inputs = construct(parts, rank, mode)
    loss = (LAYERS[name]()(graph, inputs) ** 2).sum()
    loss.backward(retain_graph=True)
    assert inputs.grad is not None
    once = inputs.grad.clone()
    loss.backward()
    torch.testing.assert_close(inputs.grad, 2 * once)
    try:
        loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["gat", "gat-relu", "sage-mean"])
@pytest.mark.parametrize("mode", MODES)
def test_a_graph_that_is_kept_can_be_used_again(tmp_path: Path, mode: str, name: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for error in run_ranks(backward_twice, 2, parts, mode, name):
        assert "Trying to backward through the graph a second time" in error
