# SPDX-License-Identifier: Apache-2.0
"""Adjacency against SciPy: formats, order, degrees, reversal; and what it refuses. No process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from ops_cases import GRAPHS, adjacency

from graphshard.ops import Adjacency


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("name", list(GRAPHS))
def test_formats_are_scipys(name: str, idtype: torch.dtype, way: str) -> None:
    src, dst, num_src, num_dst = GRAPHS[name]
    adj = adjacency(name, idtype)
    for compressed, keys, others, shape in (
        (adj.csc(), dst, src, (num_dst, num_src)),
        (adj.csr(), src, dst, (num_src, num_dst)),
    ):
        indptr, indices, eids = compressed
        assert indptr.dtype == indices.dtype == idtype
        expected = scipy.sparse.coo_array((np.ones(len(keys)), (keys, others)), shape=shape)
        assert indptr.diff().tolist() == expected.tocsr().sum(axis=1).astype(int).tolist()
        order = np.argsort(np.array(keys, dtype=np.int64), kind="stable")
        found = order if eids is None else eids.numpy()
        assert found.tolist() == order.tolist()
        assert indices.tolist() == np.array(others, dtype=np.int64)[order].tolist()
    assert adj.in_degrees().tolist() == np.bincount(dst, minlength=num_dst).tolist()
    assert adj.out_degrees().tolist() == np.bincount(src, minlength=num_src).tolist()


def test_reverse_shares_what_is_built(way: str) -> None:
    adj = adjacency("odd")
    indptr, indices, _ = adj.csc()
    back = adj.reverse()
    assert back.csr()[0].data_ptr() == indptr.data_ptr()
    assert back.csr()[1].data_ptr() == indices.data_ptr()
    assert (back.num_src, back.num_dst) == (adj.num_dst, adj.num_src)
    assert [t.tolist() for t in back.reverse().coo()] == [t.tolist() for t in adj.coo()]


def test_ids_come_when_somebody_reads_them(way: str) -> None:
    adj = adjacency("odd")
    whole = adjacency("odd")
    for form in ("csc", "csr"):
        indptr, others, _ = getattr(whole, form)()
        short = getattr(adj, form)(ids=False)
        assert torch.equal(short[0], indptr)
        assert torch.equal(short[1], others)
    if way == "kernels":
        assert adj.memory_bytes() < whole.memory_bytes()
        assert not adj.has_sequential_csc()
    back = adj.reverse().astype(torch.int32).astype(torch.int64).reverse()
    for found in (adj, back):
        for form in ("csr", "csc"):
            for mine, theirs in zip(getattr(found, form)(), getattr(whole, form)(), strict=True):
                assert torch.equal(mine, theirs)
    assert adj.memory_bytes() == whole.memory_bytes()


def test_edges_without_destinations_know_them_all_the_same(way: str) -> None:
    """What from_csc was given is enough for every other format, and stays all that is kept."""
    indptr, indices = torch.tensor([0, 2, 2, 4]), torch.tensor([3, 1, 0, 2])
    adj = Adjacency.from_csc(indptr, indices, None, 4, 3)
    assert adj.csr()[1].tolist() == [2, 0, 2, 0]
    assert not adj.formats()["coo"]
    assert adj.coo()[1].tolist() == [0, 0, 2, 2]


def test_from_csc_keeps_ids_and_sorts_within_rows(way: str) -> None:
    indptr, indices = torch.tensor([0, 2, 2, 4]), torch.tensor([3, 1, 0, 2])
    adj = Adjacency.from_csc(indptr, indices, torch.tensor([3, 1, 0, 2]), 4, 3)
    src, dst = adj.coo()
    assert src.tolist() == [0, 1, 2, 3]
    assert dst.tolist() == [2, 0, 2, 0]
    assert adj.csc()[2].tolist() == [1, 3, 0, 2]  # type: ignore[union-attr]
    plain = Adjacency.from_csc(indptr, indices, None, 4, 3)
    assert plain.coo()[0].tolist() == [3, 1, 0, 2]


def test_moves(way: str) -> None:
    adj = adjacency("odd")
    narrow = adj.astype(torch.int32)
    assert narrow.idtype == torch.int32
    assert narrow.coo()[0].tolist() == adj.coo()[0].tolist()
    assert adj.to("cpu").num_edges == adj.num_edges
    assert adj.memory_bytes() > 0


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (([0, 5], [0, 1], 2, 2), ValueError, r"5"),
        (([0, -1], [0, 1], 2, 2), ValueError, r"-1"),
        (([0], [0, 1], 2, 2), ValueError, r"got 1 and 2"),
        (([0.5], [1.0], 2, 2), TypeError, r"float"),
    ],
)
def test_wrong_edges(arguments: Any, error: type[Exception], text: str) -> None:
    src, dst, num_src, num_dst = arguments
    with pytest.raises(error, match=text):
        Adjacency(torch.tensor(src), torch.tensor(dst), num_src, num_dst)
