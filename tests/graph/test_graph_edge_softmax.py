# SPDX-License-Identifier: Apache-2.0
"""edge_softmax on graphs against DGL's; the kernel's own tests are in tests/ops. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_oracle import dgl, gs, plain_pair, rand, typed_pair


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_some_edges(norm_by: Any) -> None:
    ours, theirs = plain_pair()
    eids = torch.tensor([1, 0, 6, 9, 3])
    logits = rand(5, 2)
    torch.testing.assert_close(
        gs.edge_softmax(ours, logits, eids, norm_by),
        dgl.ops.edge_softmax(theirs, logits, eids, norm_by),
    )
    with pytest.raises(ValueError, match=r"an edge id must be in \[0, 10\).*got 10"):
        gs.edge_softmax(ours, logits, [0, 1, 2, 3, 10])
    with pytest.raises(ValueError, match="each of the 2 edges"):
        gs.edge_softmax(ours, logits, [0, 1])


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_blocks(norm_by: Any) -> None:
    edges = ([0, 1, 4, 4, 2, 3], [0, 0, 1, 1, 1, 3])
    logits = rand(6, 2)
    torch.testing.assert_close(
        gs.edge_softmax(gs.create_block(edges, 5, 4), logits, norm_by=norm_by),
        dgl.ops.edge_softmax(dgl.create_block(edges, 5, 4), logits, norm_by=norm_by),
    )


def test_relations_that_share_a_destination_are_normalised_together() -> None:
    ours, theirs = typed_pair()
    logits = {
        etype: rand(ours.num_edges(etype), 3, seed=i)
        for i, etype in enumerate(ours.canonical_etypes)
    }
    mine, expected = gs.edge_softmax(ours, logits), dgl.ops.edge_softmax(theirs, logits)
    assert mine.keys() == expected.keys()
    for etype in logits:
        torch.testing.assert_close(mine[etype], expected[etype])


def test_relations_that_share_a_source() -> None:
    g, _ = typed_pair()
    logits = {etype: rand(g.num_edges(etype), 2) for etype in g.canonical_etypes}
    weights = gs.edge_softmax(g, logits, norm_by="src")
    totals = torch.zeros(5, 2, dtype=torch.float64)
    for etype in g.canonical_etypes:
        if etype[0] == "user":
            totals.index_add_(0, g.edges(etype=etype)[0], weights[etype])
    has_edges = sum(g.out_degrees(etype=name) for name in ("follows", "plays", "rates")) > 0
    torch.testing.assert_close(totals[has_edges], torch.ones_like(totals[has_edges]))


def test_some_relations_alone() -> None:
    g, _ = typed_pair()
    logits = rand(4)
    weights = gs.edge_softmax(g, {"plays": logits})
    assert list(weights) == [("user", "plays", "game")]
    torch.testing.assert_close(
        weights[("user", "plays", "game")], gs.edge_softmax(g["plays"], logits)
    )


@pytest.mark.parametrize("norm_by", ["dst", "src"])
def test_gradcheck(norm_by: Any) -> None:
    g, _ = plain_pair()
    logits = rand(10, 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: gs.edge_softmax(g, z, norm_by=norm_by), logits)
    typed, _ = typed_pair()
    names = ["follows", "liked"]
    values = [rand(typed.num_edges(name)).requires_grad_() for name in names]
    assert torch.autograd.gradcheck(
        lambda *z: tuple(
            gs.edge_softmax(typed, dict(zip(names, z, strict=True)), norm_by=norm_by).values()
        ),
        values,
    )


def test_mistakes() -> None:
    g, _ = plain_pair()
    typed, _ = typed_pair()
    with pytest.raises(ValueError, match="norm_by must be 'dst' or 'src'"):
        gs.edge_softmax(g, rand(10), norm_by="both")  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"each of the 10 edges .*\(9,\)"):
        gs.edge_softmax(g, rand(9))
    with pytest.raises(TypeError, match=r"logits must be a tensor \(got list\)"):
        gs.edge_softmax(g, [0.0] * 10)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="dictionary from relation to values"):
        gs.edge_softmax(typed, rand(5))
    with pytest.raises(NotImplementedError, match="slice the graph by relation"):
        gs.edge_softmax(typed, {"plays": rand(1)}, eids=[0])
    with pytest.raises(ValueError, match="no relation 'walks'"):
        gs.edge_softmax(typed, {"walks": rand(1)})
