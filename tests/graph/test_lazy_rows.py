# SPDX-License-Identifier: Apache-2.0
"""Lazy columns of a frame: read as tensors, gathered once and only when read. No process group."""

from __future__ import annotations

import pytest
import torch

from graphshard.graph import create_block, graph
from graphshard.graph.frame import Frame, LazyRows


def lazy_frame(source: torch.Tensor) -> Frame:
    frame = Frame(3, what="rows of a test")
    frame.set_lazy("x", source, torch.tensor([4, 0, 4], dtype=torch.int32))
    return frame


def test_reads_as_the_gathered_tensor() -> None:
    source = torch.randn(5, 2)
    frame = lazy_frame(source)
    assert "x" in frame
    assert list(frame) == ["x"]
    assert torch.equal(frame["x"], source[[4, 0, 4]])
    assert frame["x"] is frame["x"]
    assert dict(frame.items())["x"] is frame["x"]


def test_nothing_is_gathered_before_it_is_read() -> None:
    source = torch.zeros(5, 2)
    frame = lazy_frame(source)
    assert frame.schemes["x"] == ((2,), torch.float32)
    assert "LazyRows(shape=(3, 2)" in repr(frame)
    source += 1  # seen, since nobody has read yet
    assert torch.equal(frame["x"], torch.ones(3, 2))
    source += 1
    assert torch.equal(frame["x"], torch.ones(3, 2))


def test_scopes_share_what_was_gathered() -> None:
    frame = lazy_frame(torch.randn(5, 2))
    inner = frame.scope()
    assert inner["x"] is frame["x"]
    del inner["x"]
    assert "x" in frame


def test_some_rows_can_be_replaced() -> None:
    source = torch.randn(5, 2)
    frame = lazy_frame(source)
    frame.set_rows("x", torch.tensor([1]), torch.zeros(1, 2), "node")
    assert torch.equal(frame["x"], source[[4, 0, 4]] * torch.tensor([[1.0], [0.0], [1.0]]))
    assert bool((source[0] != 0).all())


def test_stays_lazy_when_it_moves() -> None:
    source = torch.randn(5, 2)
    moved = lazy_frame(source).to("meta")
    assert isinstance(moved._columns["x"], LazyRows)
    assert moved["x"].device.type == "meta"
    assert moved["x"].shape == (3, 2)
    read = lazy_frame(source)
    read["x"]
    assert isinstance(read.to("meta")._columns["x"], torch.Tensor)


def test_wrong_number_of_rows() -> None:
    with pytest.raises(ValueError, match="one row for each of the 3 rows of a test"):
        Frame(3, what="rows of a test").set_lazy("x", torch.zeros(5), torch.tensor([0]))


def test_gradients_flow_to_the_source() -> None:
    source = torch.randn(5, 2, requires_grad=True)
    frame = lazy_frame(source)
    with torch.no_grad():
        frame["x"]
    frame["x"].sum().backward()
    assert source.grad is not None
    assert source.grad[:, 0].tolist() == [1, 0, 0, 0, 2]


def test_layers_and_slices_see_tensors() -> None:
    import graphshard.function as fn

    block = create_block(([0, 1, 2], [0, 1, 1]), num_src_nodes=3, num_dst_nodes=2)
    source = torch.randn(6, 2)
    block.srcnodes["_N"].data.frame.set_lazy("h", source, torch.tensor([5, 3, 1]))
    with block.local_scope():
        block.update_all(fn.copy_u("h", "m"), fn.sum("m", "out"))
        assert torch.allclose(block.dstdata["out"], torch.stack([source[5], source[3] + source[1]]))
    g = graph(([0], [1]))
    g.nodes["_N"].data.frame.set_lazy("h", source, torch.tensor([2, 0]))
    assert torch.equal(g.nodes[[1]].data["h"], source[[0]])
    assert torch.equal(g.local_var().ndata["h"], source[[2, 0]])
    assert torch.equal(g.int().ndata["h"], source[[2, 0]])
