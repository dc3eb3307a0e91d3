# SPDX-License-Identifier: Apache-2.0
"""Edges on disk: which are repeated or without a reverse, beside pandas. No process group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphshard.partition.edge_lists import (
    EdgeList,
    count_repeated,
    find_first_edges,
    find_lone_edges,
    in_both_directions,
)

pandas = pytest.importorskip("pandas", reason="pandas is the oracle, and is not installed")


def edge_list(src: Any, dst: Any, num_nodes: tuple[int, int], at_once: int = 97) -> EdgeList:
    def batches() -> Iterator[tuple[Any, Any]]:
        for first in range(0, len(src), at_once):
            yield src[first : first + at_once], dst[first : first + at_once]

    return EdgeList(*num_nodes, len(src), batches)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize(
    ("num_edges", "num_src", "num_dst"), [(0, 3, 3), (1, 1, 1), (700, 40, 40), (900, 9, 70)]
)
def test_all_edges_at_once_are_as_pandas_has_them(
    tmp_path: Path, num_edges: int, num_src: int, num_dst: int, dtype: type
) -> None:
    rng = np.random.default_rng(num_edges)
    src = rng.integers(0, num_src, num_edges).astype(dtype)
    dst = rng.integers(0, num_dst, num_edges).astype(dtype)
    edges = edge_list(src, dst, (num_src, num_dst))
    frame = pandas.DataFrame({"src": src, "dst": dst, "edge": np.arange(num_edges)})
    first = frame.groupby(["src", "dst"])["edge"].transform("min")
    assert count_repeated(edges, tmp_path) == frame.duplicated(["src", "dst"]).sum()
    out = np.full(num_edges, -1)
    find_first_edges(edges, tmp_path, out)
    assert out.tolist() == first.tolist()
    if num_src == num_dst:
        frame["low"], frame["high"] = frame[["src", "dst"]].min(axis=1), frame.max(axis=1)
        frame["high"] = frame[["src", "dst"]].max(axis=1)
        find_first_edges(edges, tmp_path, out, is_ordered=False)
        assert out.tolist() == frame.groupby(["low", "high"])["edge"].transform("min").tolist()
        pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
        lone = np.zeros(num_edges, bool)
        find_lone_edges(edges, tmp_path, lone)
        expected = [a != b and (b, a) not in pairs for a, b in zip(src, dst, strict=True)]
        assert lone.tolist() == expected
        both = list(in_both_directions(edges, tmp_path))
        found = [pair for a, b in both for pair in zip(a.tolist(), b.tolist(), strict=True)]
        assert found == sorted(pairs | {(b, a) for a, b in pairs})
    assert not list(tmp_path.iterdir())
