# SPDX-License-Identifier: Apache-2.0
"""Kernels of partitions made while edges pass by, against NumPy and SciPy. No process group."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from graphshard._base.kernels import force_extension
from graphshard.partition._edge_files import (
    EdgeSorter,
    SortedEdges,
    SpillFile,
    batch_ends,
    combined,
    kernels,
    map_ahead,
)

RNG = np.random.default_rng(7)
START = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _numbers_of_its_own() -> None:
    """A test's numbers do not depend on which tests ran before it."""
    RNG.bit_generator.state = START


@pytest.fixture(
    params=[pytest.param(True, marks=pytest.mark.compiled), False], ids=["compiled", "numpy"]
)
def either(request: pytest.FixtureRequest) -> Iterator[None]:
    """The compiled kernels, and those that stand for them."""
    with force_extension(request.param):
        yield


both = pytest.mark.usefixtures("either")


def sorted_by_row(
    folder: Path, rows: Any, cols: Any, num_rows: int, *, batch: int = 1 << 20, **options: Any
) -> SortedEdges:
    made: dict[str, Any] = {"value_dtype": np.int64, "memory": 1 << 26, "num_threads": 1}
    made |= options
    merges = made.pop("merges", False)
    values = made.pop("values", None)
    drops = made.pop("drops_loops", False)
    sorter = EdgeSorter(folder, num_rows, len(rows), **made)
    for first in range(0, len(rows), batch):
        some = slice(first, first + batch)
        more = {} if values is None else {"values": values[some]}
        sorter.add(rows[some], cols[some], first_value=first, drops_loops=drops, **more)
    return sorter.finish(merges=merges)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("value_dtype", [None, np.uint32, np.int64])
def test_sorted_as_a_stable_sort_has_it(tmp_path: Path, dtype: type, value_dtype: type) -> None:
    rows: Any = RNG.integers(0, 5000, 40_000).astype(dtype)
    cols: Any = RNG.integers(0, 5000, 40_000).astype(dtype)
    edges = sorted_by_row(tmp_path, rows, cols, 5000, batch=7001, value_dtype=value_dtype)
    order = np.argsort(rows, kind="stable")
    assert edges.num_edges == 40_000
    np.testing.assert_array_equal(edges.degrees(0, 5000), np.bincount(rows, minlength=5000))
    np.testing.assert_array_equal(edges.cols(0, 40_000), cols[order])
    if value_dtype is not None:
        np.testing.assert_array_equal(edges.values(0, 40_000), order)
    indptr = np.append(0, np.cumsum(np.bincount(rows, minlength=5000)))
    assert [edges.first_edge(row) for row in (0, 17, 4999, 5000)] == indptr[
        [0, 17, 4999, 5000]
    ].tolist()
    # Some rows, in blocks.
    blocks = [block for block, _ in edges.blocks(100, 4000, most_edges=999)]
    np.testing.assert_array_equal(
        np.concatenate([block.cols for block in blocks]), cols[order][indptr[100] : indptr[4000]]
    )
    assert [block.first_edge for block in blocks] == [indptr[b.first_row] for b in blocks]


def test_memory_batches_and_threads_change_nothing(tmp_path: Path) -> None:
    """With little memory a bucket is sorted a window at a time; one node has most of the edges."""
    rows = np.where(RNG.random(300_000) < 0.7, 5, RNG.integers(0, 900, 300_000))
    cols = RNG.integers(0, 900, 300_000)
    texts = []
    for number, options in enumerate(
        ({}, {"memory": 1 << 20}, {"num_threads": 3}, {"batch": 50_001, "memory": 1 << 20})
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        sorted_by_row(folder, rows, cols, 900, **options)
        texts.append({path.name: path.read_bytes() for path in sorted(folder.iterdir())})
    assert set(texts[0]) == {"degrees.u32", "cols.u32", "values.i64"}
    assert all(text == texts[0] for text in texts[1:])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_batches_that_several_threads_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """Large batches to files in turn, small ones between them at once."""
    monkeypatch.setattr("graphshard.partition._edge_files._LEAST_WRITTEN_APART", 500)
    monkeypatch.setattr("graphshard.partition._edge_files._BUCKET_EDGES", 3000)
    sorter = EdgeSorter(
        tmp_path, 700, 60_000, value_dtype=np.int64, memory=1 << 26, num_threads=threads
    )
    rows, cols = RNG.integers(0, 700, (2, 60_000))
    first = 0
    while first < len(rows):
        some = slice(first, first + int(RNG.choice([3, 400, 600, 5000])))
        sorter.add(rows[some], cols[some], first_value=first)
        first = some.stop
    edges = sorter.finish()
    order = np.argsort(rows, kind="stable")
    np.testing.assert_array_equal(edges.degrees(0, 700), np.bincount(rows, minlength=700))
    np.testing.assert_array_equal(edges.cols(0, 60_000), cols[order])
    np.testing.assert_array_equal(edges.values(0, 60_000), order)
    assert {path.name for path in tmp_path.iterdir()} == {"degrees.u32", "cols.u32", "values.i64"}


@both
@pytest.mark.parametrize("threads", [1, 3])
def test_merged_as_scipy_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """In several buckets, some of which are merged at a time."""
    monkeypatch.setattr("graphshard.partition._edge_files._BUCKET_EDGES", 1000)
    rows, cols = RNG.integers(0, 60, (2, 9000))
    weights = RNG.integers(1, 9, 9000).astype(np.uint32)
    options: dict[str, Any] = {"value_dtype": np.uint32, "values": weights, "num_threads": threads}
    edges = sorted_by_row(tmp_path, rows, cols, 60, merges=True, batch=999, **options)
    assert len(edges.starts) > 5
    expected = scipy.sparse.coo_array((weights, (rows, cols)), shape=(60, 60)).tocsr()
    expected.sort_indices()
    np.testing.assert_array_equal(edges.degrees(0, 60), np.diff(expected.indptr))
    np.testing.assert_array_equal(edges.cols(0, edges.num_edges), expected.indices)
    np.testing.assert_array_equal(edges.values(0, edges.num_edges), expected.data)


@both
def test_edges_that_came_first_are_counted_apart(tmp_path: Path) -> None:
    """Whether a bucket is sorted at once or a window at a time, and in many batches."""
    rows = np.where(RNG.random(300_000) < 0.7, 5, RNG.integers(0, 900, 300_000))
    for number, memory in enumerate((1 << 26, 1 << 20)):
        (folder := tmp_path / str(number)).mkdir()
        sorter = EdgeSorter(folder, 900, 300_000, value_dtype=None, memory=memory, num_threads=2)
        for first in range(0, 300_000, 50_000):
            if first == 100_000:
                sorter.split()
            sorter.add(rows[first : first + 50_000], rows[first : first + 50_000])
        edges = sorter.finish()
        np.testing.assert_array_equal(edges.degrees(0, 900), np.bincount(rows, minlength=900))
        firsts = [block.firsts for block, _ in edges.blocks(3, 890, most_edges=1000)]
        expected = np.bincount(rows[:100_000], minlength=900)[3:890]
        np.testing.assert_array_equal(np.concatenate(firsts), expected)


@both
def test_new_numbers_and_loops(tmp_path: Path) -> None:
    rows, cols = RNG.integers(0, 50, (2, 4000))
    numbers = RNG.permutation(120).astype(np.uint32)
    sorter = EdgeSorter(tmp_path, 120, 4000, value_dtype=np.int64, memory=1 << 24, num_threads=1)
    sorter.add(rows, cols, numbers=numbers, first_row=70, num_ids=50, first_col=10, num_col_ids=50)
    edges = sorter.finish()
    new_rows = numbers[rows + 70]
    order = np.argsort(new_rows, kind="stable")
    np.testing.assert_array_equal(edges.cols(0, 4000), numbers[cols + 10][order])
    np.testing.assert_array_equal(edges.values(0, 4000), order)
    (folder := tmp_path / "loops").mkdir()
    edges = sorted_by_row(folder, rows, cols, 50, value_dtype=None, drops_loops=True)
    assert edges.num_edges == int((rows != cols).sum())


@both
@pytest.mark.parametrize("bad", [-1, 50])
def test_an_id_out_of_range(tmp_path: Path, bad: int) -> None:
    sorter = EdgeSorter(tmp_path, 50, 3, value_dtype=None, memory=1 << 24, num_threads=1)
    for ends in (([0, bad], [1, 1]), ([1, 1], [0, bad])):
        with pytest.raises(IndexError, match="below the number of nodes"):
            sorter.add(*(np.array(ids) for ids in ends))


@both
def test_no_edges_and_no_nodes(tmp_path: Path) -> None:
    for number, num_rows in enumerate((0, 1, 70)):
        (folder := tmp_path / str(number)).mkdir()
        none = np.zeros(0, dtype=np.int64)
        edges = sorted_by_row(folder, none, none, num_rows)
        assert edges.num_edges == 0
        assert [len(block.cols) for block, _ in edges.blocks()] == [0] * (num_rows > 0)


def test_batches_cut_heavy_rows_apart() -> None:
    degrees = RNG.integers(0, 9, 1000).astype(np.uint32)
    degrees[[3, 500]] = 4000
    ends = batch_ends(degrees, 64, 300)
    starts = np.append(0, ends[:-1])
    totals = np.append(0, np.cumsum(degrees, dtype=np.int64))
    assert ends[-1] == 1000
    assert (ends > starts).all()
    assert (ends - starts <= 64).all()
    heavy = totals[ends] - totals[starts] > 300
    assert (ends - starts)[heavy].tolist() == [1, 1]
    assert set(range(64, 1000, 64)) <= set(ends.tolist())
    # Rows that are read at once may end anywhere that a batch ends.
    np.testing.assert_array_equal(
        np.append(batch_ends(degrees[:512], 64, 300), 512 + batch_ends(degrees[512:], 64, 300)),
        ends,
    )


@both
def test_hashes_tell_order_and_symmetry() -> None:
    src, dst = RNG.integers(0, 1000, (2, 50_000))
    hashes = [kernels().hash_edges(src, dst, 0, 0, 0, threads) for threads in (1, 3)]
    assert hashes[0] == hashes[1]
    assert hashes[0][1] != 0
    ends = np.concatenate([src, dst]), np.concatenate([dst, src])
    order = RNG.permutation(100_000)
    assert kernels().hash_edges(ends[0][order], ends[1][order], 0, 0, 0, 1)[1] == 0
    assert kernels().hash_edges(src[::-1].copy(), dst[::-1].copy(), 0, 0, 0, 1) != hashes[0]
    halves = [kernels().hash_edges(src[:7], dst[:7], 0, 0, 0, 1)]
    halves.append(kernels().hash_edges(src[7:], dst[7:], 0, 0, 7, 1))
    assert tuple(sum(some) % 2**64 for some in zip(*halves, strict=True)) == hashes[0]


def test_spill_in_several_files_written_in_any_order(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path / "edges", 2, 8, num_files=3)
    batches = [np.arange(10 * batch, 10 * batch + 5) for batch in range(7)]
    writes = [spill.reserve(np.array([2, 3])) for _ in batches]
    for batch in RNG.permutation(7).tolist():
        writes[batch](batches[batch].view(np.uint8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges", "edges-1", "edges-2"]
    for bucket, some in enumerate((slice(0, 2), slice(2, 5))):
        expected = np.concatenate([numbers[some] for numbers in batches])
        np.testing.assert_array_equal(spill.read(bucket).view(np.int64), expected)
    spill.remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_maps_in_order_and_little_ahead(threads: int) -> None:
    taken: list[int] = []

    def items() -> Iterator[int]:
        for item in range(40):
            taken.append(item)
            yield item

    def square(item: int) -> int:
        time.sleep(0.001 * (item % 3))
        if item == 33:
            raise ValueError("no more")
        return item * item

    made = []
    with pytest.raises(ValueError, match="no more"):
        for result in map_ahead(square, items(), threads):
            made.append(result)
            assert len(taken) <= len(made) + threads
    assert made == [item * item for item in range(33)]


def test_spill_read_back_by_bucket(tmp_path: Path) -> None:
    spill = SpillFile(tmp_path / "edges", 3, 8)
    expected: list[list[int]] = [[], [], []]
    for batch in range(5):
        counts = RNG.integers(0, 6, 3)
        numbers = np.arange(counts.sum()) + 100 * batch
        for bucket, some in enumerate(np.split(numbers, np.cumsum(counts)[:-1])):
            expected[bucket] += some.tolist()
        spill.append(numbers.view(np.uint8), counts)
    spill.save()
    again = SpillFile.reopen(tmp_path / "edges", 8)
    for bucket in range(3):
        assert again.count(bucket) == len(expected[bucket])
        assert again.read(bucket).view(np.int64).tolist() == expected[bucket]
        parts = [part.view(np.int64).tolist() for part in again.segments(bucket, 2)]
        assert [number for part in parts for number in part] == expected[bucket]
        assert max(map(len, parts)) <= 2


# -- nodes that move ---------------------------------------------------------------------------


@pytest.mark.parametrize("most", [0, 200, 1 << 20])
def test_small_batches_combined(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.partition._edge_files._COMBINED_BYTES", most)
    batches, expected = [], [[], [], [], []]  # type: ignore[var-annotated]
    for _ in range(30):
        buckets = np.sort(RNG.integers(0, 4, RNG.integers(0, 9)))
        values = RNG.integers(0, 10**9, len(buckets))
        counts = np.bincount(buckets, minlength=4)
        room = np.concatenate([values.view(np.uint8), np.zeros(5, dtype=np.uint8)])
        batches.append((room, counts))
        for bucket, value in zip(buckets, values, strict=True):
            expected[bucket].append(value)
    made = list(combined(batches, 8))
    assert len(made) == 1 or most < 1 << 20
    found: list[list[int]] = [[], [], [], []]
    for records, counts in made:
        values, start = records.view(np.int64), 0
        for bucket, count in enumerate(counts):
            found[bucket] += values[start : start + count].tolist()
            start += count
    assert found == expected


def symmetric(num_nodes: int, num_edges: int) -> scipy.sparse.csr_array:
    src, dst = RNG.integers(0, num_nodes, (2, num_edges))
    keep = src != dst
    ones = np.ones(int(keep.sum()), dtype=np.int64)
    matrix = scipy.sparse.coo_array((ones, (src[keep], dst[keep])), shape=(num_nodes,) * 2).tocsr()
    return (matrix + matrix.T).tocsr()


def block_of(matrix: scipy.sparse.csr_array, weighted: bool = True) -> tuple[Any, Any, Any]:
    degrees = np.diff(matrix.indptr).astype(np.uint32)
    weights = matrix.data.astype(np.uint32) if weighted else None
    return degrees, matrix.indices.astype(np.uint32), weights


def drawn(node: int, label: int) -> int:
    """Decides between labels that weigh the same."""
    number = (label * 0x9E3779B97F4A7C15 ^ node * 0xC2B2AE3D27D4EB4F) % 2**64
    number = (number ^ number >> 29) * 0xBF58476D1CE4E5B9 % 2**64
    return number ^ number >> 32


@pytest.mark.compiled
@pytest.mark.parametrize("threads", [1, 3])
def test_what_one_of_many_tasks_throws_is_raised_and_the_next_call_works(threads: int) -> None:
    num_nodes = 60_000
    degrees = np.ones(num_nodes, dtype=np.uint32)
    ends = np.array([20_000, num_nodes])
    for wrong in (None, 59_000, None):
        cols = (np.arange(num_nodes, dtype=np.uint32) + 1) % np.uint32(num_nodes)
        labels = np.arange(num_nodes, dtype=np.uint32)
        sizes, limits = np.ones((num_nodes, 1), dtype=np.uint32), np.array([4], dtype=np.uint32)
        arguments = (degrees, cols, None, ends, 0, None, labels, sizes, limits, None, threads)
        if wrong is None:
            assert kernels().propagate_labels(*arguments) > 0
            assert int(sizes.sum()) == num_nodes
        else:
            cols[wrong] = num_nodes
            with pytest.raises(IndexError, match="below the number of nodes"):
                kernels().propagate_labels(*arguments)


@pytest.mark.parametrize("threads", [1, 3])
def test_labels_as_chosen_one_by_one(threads: int) -> None:
    """One batch per node: the pass is that of a loop in Python."""
    num_nodes, most = 300, 12
    matrix = symmetric(num_nodes, 2000)
    labels = np.arange(num_nodes, dtype=np.uint32)
    sizes = np.ones((num_nodes, 1), dtype=np.uint32)
    limits, favourites = np.array([most], dtype=np.uint32), labels.copy()
    mine, loads = labels.tolist(), [1] * num_nodes
    ends = np.arange(1, num_nodes + 1)
    for _ in range(2):
        moved = 0
        for node in range(num_nodes):
            weights: dict[int, int] = {}
            for i in range(matrix.indptr[node], matrix.indptr[node + 1]):
                label = mine[matrix.indices[i]]
                weights[label] = weights.get(label, 0) + int(matrix.data[i])
            best, own = mine[node], mine[node]
            for label, weight in weights.items():
                is_drawn = best != own and drawn(node, label) > drawn(node, best)
                least = weights.get(best, 0)
                if loads[label] < most and (weight > least or (weight == least and is_drawn)):
                    best = label
            if best != own:
                loads[own] -= 1
                loads[best] += 1
                mine[node] = best
                moved += 1
        arguments = (*block_of(matrix), ends, 0, None, labels, sizes, limits, favourites, threads)
        assert kernels().propagate_labels(*arguments) == moved
        np.testing.assert_array_equal(labels, mine)
        np.testing.assert_array_equal(sizes[:, 0], loads)
        np.testing.assert_array_equal(np.bincount(labels, minlength=num_nodes), loads)


@pytest.mark.compiled
@pytest.mark.parametrize("weighted", [False, True])
def test_batches_are_what_matters_and_not_threads(weighted: bool) -> None:
    matrix = symmetric(3000, 30_000)
    node_weights = RNG.integers(0, 4, (3000, 2)).astype(np.uint32)
    limits = np.array([30, 40], dtype=np.uint32)
    ends = np.append(np.arange(512, 3000, 512), 3000)
    made: list[tuple[Any, Any, Any]] = []
    for threads in (1, 2, 5):
        labels, sizes = np.arange(3000, dtype=np.uint32), node_weights.copy()
        block = block_of(matrix, weighted)
        for _ in range(3):
            kernels().propagate_labels(
                *block, ends, 0, node_weights, labels, sizes, limits, None, threads
            )
        for j in range(2):
            of_labels = np.bincount(labels, weights=node_weights[:, j], minlength=3000)
            np.testing.assert_array_equal(sizes[:, j], of_labels)
        assert (sizes <= limits).all()
        assert len(np.unique(labels)) < 1500
        parts = RNG.integers(0, 3, 3000).astype(np.uint16) if not made else made[0][2].copy()
        before = parts.copy()
        loads = np.stack(
            [np.bincount(parts, weights=node_weights[:, j], minlength=3) for j in range(2)], axis=1
        ).astype(np.int64)
        most = (loads.sum(axis=0) // 3 * 21) // 20
        kernels().refine_parts(*block, ends, 0, node_weights, parts, loads, most, 0, threads)
        for j in range(2):
            np.testing.assert_array_equal(
                loads[:, j], np.bincount(parts, weights=node_weights[:, j], minlength=3)
            )
        made.append((labels, parts, before))
    for labels, parts, _ in made[1:]:
        np.testing.assert_array_equal(labels, made[0][0])
        np.testing.assert_array_equal(parts, made[0][1])


def cut_of(matrix: scipy.sparse.csr_array, parts: Any) -> int:
    coo = matrix.tocoo()
    return int(coo.data[parts[coo.row] != parts[coo.col]].sum())


@pytest.mark.compiled
def test_refinement_lowers_the_cut_and_keeps_limits() -> None:
    matrix = symmetric(600, 6000)
    parts = (np.arange(600) % 4).astype(np.uint16)
    loads = np.full((4, 1), 150)
    ends = np.arange(1, 601)
    cuts = [cut_of(matrix, parts)]
    for _ in range(3):
        kernels().refine_parts(
            *block_of(matrix), ends, 0, None, parts, loads, np.array([160]), 0, 1
        )
        cuts.append(cut_of(matrix, parts))
        assert loads.max() <= 160
    assert cuts == sorted(cuts, reverse=True)
    assert cuts[-1] < cuts[0]
    # A part that is too heavy gives nodes away, if they may raise the cut so far.
    parts = np.zeros(600, dtype=np.uint16)
    loads = np.array([[600], [0], [0], [0]])
    for allowed, most in ((0, 600), (1 << 20, 160)):
        kernels().refine_parts(
            *block_of(matrix), ends, 0, None, parts, loads, np.array([160]), allowed, 1
        )
        assert loads.max() == most
    np.testing.assert_array_equal(loads[:, 0], np.bincount(parts, minlength=4))


def searched(matrix: Any, parts: Any, most: int, num_free: int, **other: Any) -> tuple[int, Any]:
    """What `search_moves` says that it gained, and the loads."""
    loads = np.bincount(parts, weights=other.get("of_nodes"), minlength=4).astype(np.int64)[:, None]
    of_nodes = other.get("of_nodes")
    weights = None if of_nodes is None else of_nodes[:, None].astype(np.uint32)
    gained = kernels().search_moves(
        matrix.indptr.astype(np.int64),
        matrix.indices.astype(np.uint32),
        matrix.data.astype(np.uint32),
        *(weights, parts, loads, np.array([most]), num_free, other.get("patience", 100), 10, 100),
        other.get("threads", 1),
    )
    return gained, loads[:, 0]


@pytest.mark.compiled
@pytest.mark.parametrize("is_weighted", [False, True])
def test_searches_gain_what_they_say_and_keep_limits(is_weighted: bool) -> None:
    matrix = symmetric(600, 3000)
    start = (np.arange(600) % 4).astype(np.uint16)
    of_nodes = RNG.integers(0, 4, 600) if is_weighted else None
    total = 600 if of_nodes is None else int(of_nodes.sum())
    most = max(total // 4 + 12, int(np.bincount(start, weights=of_nodes).max()))
    made = []
    for num_free in (0, 400, 600, 600):
        parts = start.copy()
        gained, loads = searched(matrix, parts, most, num_free, of_nodes=of_nodes)
        assert 2 * gained == cut_of(matrix, start) - cut_of(matrix, parts)
        np.testing.assert_array_equal(parts[num_free:], start[num_free:])
        np.testing.assert_array_equal(loads, np.bincount(parts, weights=of_nodes, minlength=4))
        assert loads.max() <= most
        made.append((gained, parts))
    assert 0 == made[0][0] < made[1][0] < made[2][0]
    np.testing.assert_array_equal(made[2][1], made[3][1])


def shuffled_grid(side: int) -> tuple[Any, Any]:
    """A grid whose nodes have other numbers, and these, row by row."""
    ids = RNG.permutation(side * side).reshape(side, side)
    pairs = [(ids[:-1], ids[1:]), (ids[:, :-1], ids[:, 1:])]
    src, dst = (np.concatenate([pair[end].ravel() for pair in pairs]) for end in (0, 1))
    ends = (np.append(src, dst), np.append(dst, src))
    return scipy.sparse.csr_array((np.ones(len(ends[0])), ends), shape=(side**2,) * 2), ids.ravel()


@pytest.mark.compiled
def test_searches_straighten_what_single_moves_leave() -> None:
    """A grid cut along a staircase; straight, the cut is half of that, if searches begin well."""
    side = 24
    row, col = np.divmod(np.arange(side**2), side)
    most, ends = side**2 // 2 + side, np.arange(1, side**2 + 1)
    cuts = []
    for _ in range(20):
        matrix, numbers = shuffled_grid(side)
        parts = np.empty(side**2, dtype=np.uint16)
        parts[numbers] = row + col >= side
        loads = np.bincount(parts, minlength=4)[:, None]
        for _ in range(10):
            moved = kernels().refine_parts(
                *block_of(matrix), ends, 0, None, parts, loads, np.array([most]), 0, 1
            )
        assert moved == 0
        assert cut_of(matrix, parts) > 2 * 1.7 * side
        searched(matrix, parts, most, side**2)
        cuts.append(cut_of(matrix, parts) / 2 / side)
    assert min(cuts) <= 1.25
    assert np.mean(cuts) <= 1.7


@pytest.mark.compiled
@pytest.mark.parametrize("rows_of_part", [3, 50])
def test_searches_by_any_number_of_threads_make_the_same_moves(rows_of_part: int) -> None:
    """Where boundaries are long, so that many search at once, and where they are short."""
    side = 200
    matrix, numbers = shuffled_grid(side)
    start = np.empty(side**2, dtype=np.uint16)
    start[numbers] = np.arange(side**2) // side // rows_of_part % 4
    made = []
    for threads in (1, 2, 5):
        parts = start.copy()
        gained, loads = searched(matrix, parts, side**2 // 3, side**2, threads=threads)
        assert 2 * gained == cut_of(matrix, start) - cut_of(matrix, parts) >= 0
        np.testing.assert_array_equal(loads, np.bincount(parts, minlength=4))
        assert loads.max() <= side**2 // 3
        made.append(parts)
    assert (rows_of_part == 3) == bool((made[0] != start).any())
    for other in made[1:]:
        np.testing.assert_array_equal(made[0], other)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indptr": [0, 2, 1, 2]}, "ascend"),
        ({"indptr": [0, 1, 2, 3]}, "end with the number of edges"),
        ({"cols": [1, 3]}, "below the number of nodes"),
        ({"parts": [0, 1, 2]}, "below that of parts"),
        ({"num_free": 4}, "num_free"),
        ({"patience": 0}, "positive"),
        ({"share": 0}, "share"),
    ],
)
def test_searches_refuse_what_is_no_graph(change: dict[str, Any], message: str) -> None:
    given = {"indptr": [0, 1, 2, 2], "cols": [1, 0], "parts": [0, 1, 1]}
    given |= {"num_free": 3, "patience": 9, "share": 9} | change
    with pytest.raises((ValueError, IndexError), match=message):
        kernels().search_moves(
            np.array(given["indptr"]),
            np.array(given["cols"], dtype=np.uint32),
            *(None, None, np.array(given["parts"], dtype=np.uint16), np.array([[1], [2]])),
            *(np.array([3]), given["num_free"], given["patience"], 9, given["share"], 1),
        )


def halos_of(src: Any, dst: Any, parts: Any, num_parts: int) -> Any:
    """Distinct sources of each part's nodes that others own."""
    is_cut = parts[src] != parts[dst]
    pairs = np.unique(np.stack([parts[dst], src])[:, is_cut], axis=1)
    return np.bincount(pairs[0], minlength=num_parts)


def on_boundary(src: Any, dst: Any, parts: Any) -> Any:
    """Nodes with an edge to another part, or from one."""
    is_cut = parts[src] != parts[dst]
    return np.unique(np.concatenate([src[is_cut], dst[is_cut]]))


@pytest.mark.compiled
@pytest.mark.parametrize("is_directed", [False, True])
@pytest.mark.parametrize("num_parts", [3, 9])
def test_halos_counted_and_made_smaller(tmp_path: Path, num_parts: int, is_directed: bool) -> None:
    src, dst = RNG.integers(0, 1200, (2, 2500))
    src, dst = src[src != dst], dst[src != dst]
    if not is_directed:
        src, dst = np.concatenate([src, dst]), np.concatenate([dst, src])
    sorter = EdgeSorter(tmp_path, 1200, 5000, value_dtype=None, memory=1 << 24, num_threads=1)
    sorter.add(dst, src)
    if is_directed:
        sorter.split()
        sorter.add(src, dst)
    ((block, _),) = sorter.finish().blocks()
    edges = (block.degrees, block.cols, block.firsts)
    start = RNG.integers(0, num_parts, 1200).astype(np.uint16)
    start[RNG.random(1200) < 0.1] = 0  # the largest halo
    before = halos_of(src, dst, start, num_parts)
    limits = np.bincount(start, minlength=num_parts)[:1]
    prices = 256 * before // before.max()
    of_threads = []
    for threads in (1, 3):
        parts, halos = start.copy(), np.zeros(num_parts, dtype=np.int64)
        table = np.empty((1200, (num_parts + 3) // 4), dtype=np.uint8)
        near = np.ones(1200, dtype=np.uint8)
        for _ in range(2):  # once for all nodes, then for those near other parts
            halos[:] = 0
            cut = kernels().count_halos(*edges, 0, parts, near, table, halos, threads)
            assert cut == int((parts[src] != parts[dst]).sum())
            np.testing.assert_array_equal(halos, before)
            np.testing.assert_array_equal(np.flatnonzero(near), on_boundary(src, dst, parts))
        counts = np.zeros((1200, num_parts), dtype=np.int64)
        np.add.at(counts, (src, parts[dst]), 1)
        codes = (table[:, :, None] >> (2 * np.arange(4, dtype=np.uint8)) & 3).reshape(1200, -1)
        np.testing.assert_array_equal(codes[:, :num_parts], np.minimum(counts, 2))
        loads = np.bincount(parts, minlength=num_parts)[:, None]
        ends = np.append(np.arange(100, 1200, 100), 1200)
        budget = np.array([5])
        moved = kernels().limit_halos(
            *(*edges, ends, 0, None, parts, loads, limits, near, table, halos),
            *(int(before.max()), 256, budget, threads),
        )
        assert moved > 0
        assert near[on_boundary(src, dst, parts)].all()
        after = halos_of(src, dst, parts, num_parts)
        # A node with more than two edges into a part may have left its halo unnoticed.
        assert (after <= halos).all()
        assert halos.max() <= before.max()
        # In all it has become cheaper. An edge costs 256; both of its ends may be there.
        of_edge = 256 if is_directed else 128
        costs = [
            of_edge * int((some[src] != some[dst]).sum()) + int(prices @ of_parts)
            for some, of_parts in ((start, before), (parts, after))
        ]
        assert costs[1] <= costs[0] - moved
        np.testing.assert_array_equal(loads[:, 0], np.bincount(parts, minlength=num_parts))
        assert loads.max() <= limits[0]
        of_threads.append(parts)
    np.testing.assert_array_equal(*of_threads)


@pytest.mark.compiled
@pytest.mark.parametrize("threads", [1, 4])
def test_contracted_as_a_product_of_matrices(threads: int) -> None:
    matrix = symmetric(20_000, 60_000)
    clusters = RNG.integers(0, 40, 20_000).astype(np.uint32)
    num_edges = matrix.nnz
    rows, cols, weights = (np.empty(num_edges, dtype=np.uint32) for _ in range(3))
    degrees, ends, data = block_of(matrix)
    count = kernels().contract(degrees, ends, data, 0, clusters, rows, cols, weights, threads)
    made = scipy.sparse.coo_array(
        (weights[:count].astype(np.int64), (rows[:count], cols[:count])), shape=(40, 40)
    ).toarray()
    member = scipy.sparse.csr_array(
        (np.ones(20_000, dtype=np.int64), (clusters, np.arange(20_000))), shape=(40, 20_000)
    )
    expected = (member @ matrix @ member.T).toarray()
    np.fill_diagonal(expected, 0)
    np.testing.assert_array_equal(made, expected)


# -- ids in parts ------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("num_nodes", [4000, 60_000])
def test_orders_by_keys(num_nodes: int, threads: int) -> None:
    keys = RNG.integers(0, 50, num_nodes)
    first = RNG.permutation(num_nodes).astype(np.uint32)
    for dtype in (np.uint8, np.uint16, np.uint32, np.int64):
        ordered = np.empty(num_nodes, dtype=np.uint32)
        kernels().order_by_key(keys.astype(dtype), 50, first, ordered, threads)
        np.testing.assert_array_equal(ordered, first[np.argsort(keys[first], kind="stable")])
    kernels().order_by_key(keys, 50, None, ordered, threads)
    np.testing.assert_array_equal(ordered, np.argsort(keys, kind="stable"))
    with pytest.raises(IndexError, match="keys must be below"):
        kernels().order_by_key(keys, 49, None, ordered, threads)
    with pytest.raises(IndexError):
        kernels().order_by_key(keys, 50, np.zeros(num_nodes, np.uint32), ordered, threads)
    # Keys that are nearly as many as the nodes.
    keys = RNG.integers(0, num_nodes - 7, num_nodes)
    kernels().order_by_key(keys, num_nodes, first, ordered, threads)
    np.testing.assert_array_equal(ordered, first[np.argsort(keys[first], kind="stable")])


@both
@pytest.mark.parametrize("threads", [1, 3])
def test_readers(threads: int) -> None:
    src, dst = RNG.integers(0, 900, (2, 60_000))
    dst %= 500
    parts = RNG.integers(0, 3, 1000).astype(np.uint16)
    ranges = (100, 900, 40, 500)
    owner, reader = parts[src + 100], parts[dst + 40]
    is_cut = owner != reader
    pairs = np.zeros((3, 3), dtype=np.int64)
    kernels().count_cut(src, dst, parts, *ranges, pairs, threads)
    expected = np.zeros((3, 3), dtype=np.int64)
    np.add.at(expected, (owner[is_cut], reader[is_cut]), 1)
    np.testing.assert_array_equal(pairs, expected)
    masks = np.zeros(1000, dtype=np.uint8)
    digits = np.array([[8, 0, 1], [7, 8, 0], [0, 8, 8]], dtype=np.uint8)
    kernels().mark_readers(src, dst, parts, *ranges, digits, masks, threads)
    bits = np.zeros((1000, 9), dtype=bool)
    bits[src[is_cut] + 100, digits[owner, reader][is_cut]] = True
    np.testing.assert_array_equal(masks, np.packbits(bits[:, :8], axis=1)[:, 0])
    degrees = np.zeros(1000, dtype=np.uint32)
    kernels().count_ids(dst, 40, 500, degrees, threads)
    np.testing.assert_array_equal(degrees, np.bincount(dst + 40, minlength=1000))


@both
@pytest.mark.parametrize("dtype", [np.uint32, np.int64])
def test_local_ids_of_marked_nodes(dtype: type) -> None:
    ids: Any = RNG.integers(0, 1000, 700).astype(dtype)
    bits, ranks = np.zeros(16, dtype=np.uint64), np.empty(16, dtype=np.int64)
    outside = (ids < 200) | (ids >= 450)
    assert kernels().mark_outside(ids, 200, 450, bits) == outside.sum()
    halo = np.unique(ids[outside])
    assert kernels().rank_words(bits, ranks) == len(halo)
    listed = np.empty(1024, dtype=np.int64)
    assert kernels().list_marked(bits, 0, 16, listed) == len(halo)
    np.testing.assert_array_equal(listed[: len(halo)], halo)
    expected = np.where(outside, 250 + np.searchsorted(halo, ids), ids.astype(np.int64) - 200)
    for local in (np.empty(700, dtype=np.int32), np.empty(700, dtype=np.int64)):
        kernels().find_local_ids(ids, 200, 450, bits, ranks, local)
        np.testing.assert_array_equal(local, expected)
    unmarked: Any = np.setdiff1d(np.arange(450, 1000), halo)[:1].astype(dtype)
    with pytest.raises(IndexError, match="must be marked"):
        kernels().find_local_ids(unmarked, 200, 450, bits, ranks, local[:1])


@both
def test_cut_edges_by_owner() -> None:
    degrees = RNG.integers(0, 6, 40).astype(np.uint32)
    cols = RNG.integers(0, 100, degrees.sum()).astype(np.uint32)
    ends = np.array([20, 20, 70, 100])
    dtype = np.dtype([("src", np.uint32), ("dst", np.uint32), ("edge", np.int64)])
    records, counts = np.zeros(len(cols) * 16, dtype=np.uint8), np.empty(4, dtype=np.int64)
    kernels().find_cut_edges(degrees, cols, 25, 5000, ends, 2, records, counts)
    owners = np.searchsorted(ends, cols, side="right")
    keep = np.flatnonzero(owners != 2)
    keep = keep[np.argsort(owners[keep], kind="stable")]
    np.testing.assert_array_equal(counts, np.bincount(owners[owners != 2], minlength=4))
    made = records.view(dtype)[: len(keep)]
    np.testing.assert_array_equal(made["src"], cols[keep])
    np.testing.assert_array_equal(made["dst"], np.repeat(np.arange(25, 65), degrees)[keep])
    np.testing.assert_array_equal(made["edge"], 5000 + keep)
