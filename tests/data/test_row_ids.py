# SPDX-License-Identifier: Apache-2.0
"""RowIds against dictionaries of Python: cells in any batches, with and without the extension."""

from __future__ import annotations

import random

import numpy as np
import pyarrow as pa
import pytest
import torch

from graphshard._base.kernels import extension_available, force_extension, kernels_for
from graphshard.data._array_graph import EdgeEnds
from graphshard.data._row_ids import IdColumn, RowIds, count_repeated, number_pairs

POOLS = {
    "integers": ["0", "7", "-7", "12", " 7", "7 ", str(2**62), str(-(2**63))],
    "large": ["0", "7", str(2**63), str(2**64 - 1), str(2**63 - 1)],
    "large and negative": ["-1", "3", str(2**64 - 1), str(2**63), "-9"],
    "too large": ["1", str(2**64), "2"],
    "padded": ["7", "07", "-0", "0", "+7", " 07", " 7"],
    "names": ["a", "b ", " b", "", "7", " 7", "0x10", "1e3", "ü", "x" * 40, "x" * 41],
}


def value_of(cell: str) -> str:
    """What a cell names: an integer as a program writes it, whatever is around it; else itself."""
    bare = cell.strip()
    digits = bare.removeprefix("-")
    is_integer = digits.isdecimal() and digits.isascii() and bare == str(int(bare))
    return bare if is_integer else cell


@pytest.mark.parametrize("pool", list(POOLS))
@pytest.mark.parametrize("is_native", [True, False])
def test_numbers_are_those_of_a_dictionary_in_any_batches(pool: str, is_native: bool) -> None:
    draw = random.Random(pool)
    for _ in range(8):
        cells = draw.choices(POOLS[pool], k=draw.randint(1, 30))
        expected: dict[str, int] = {}
        rows = [expected.setdefault(value_of(cell), len(expected)) for cell in cells]
        others = draw.choices(POOLS["names"] + POOLS[pool] + POOLS["large and negative"], k=30)
        column = IdColumn("a.csv, column 'id'", True)
        with force_extension(is_native and extension_available()):
            for size in (1, 3, 100):
                ids = RowIds("user")
                found = [
                    ids.add(pa.array(cells[i : i + size]), column)
                    for i in range(0, len(cells), size)
                ]
                assert np.concatenate(found).tolist() == rows
                assert len(ids) == len(expected)
                looked_up = [
                    ids.find(pa.array(others[i : i + size]), column)
                    for i in range(0, len(others), size)
                ]
                wanted = [expected.get(value_of(cell), -1) for cell in others]
                assert np.concatenate(looked_up).tolist() == wanted
                assert list(map(str, ids.arrow().to_pylist())) == list(expected)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("spread", [1, 1000, 2**40])
def test_many_integers(is_native: bool, spread: int) -> None:
    draw = np.random.default_rng(0)
    keys = draw.integers(-2000, 2000, 20_000) * spread
    distinct, first = np.unique(keys, return_index=True)
    numbers = {int(keys[i]): n for n, i in enumerate(np.sort(first))}
    column = IdColumn("a.parquet", False)
    with force_extension(is_native and extension_available()):
        ids = RowIds("user")
        for number, batch in enumerate(np.array_split(keys, 7)):
            if number == 1:
                ids.expect(len(keys))
            rows = ids.add(pa.array(batch), column)
            assert rows.tolist() == [numbers[int(key)] for key in batch]
        more = draw.integers(-3000, 3000, 5000) * spread + draw.integers(0, 2, 5000)
        wanted = [numbers.get(int(k), -1) for k in more]
        assert ids.find(pa.array(more), column).tolist() == wanted
        narrow = np.empty(len(more), np.int32)
        assert ids.find(pa.array(more), column, narrow) is narrow
        assert narrow.tolist() == wanted
    assert len(ids) == len(distinct)


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("has_zero", [True, False])
def test_integers_that_meet_in_one_line_of_the_table(is_native: bool, has_zero: bool) -> None:
    undone = pow(0xD6E8FEB86659FD93, -1, 2**64)  # of the factor that makes places of keys
    mixed = [number * undone % 2**64 for number in range(1, 3000)]
    keys = np.array([bits ^ bits >> 32 for bits in mixed], np.uint64)
    others = np.array([0, 1, 2**63, *(keys + np.uint64(1)).tolist()], np.uint64)
    if has_zero:
        keys = np.append(keys, np.uint64(0))
    numbers = {int(key): number for number, key in enumerate(keys)}
    column = IdColumn("a.parquet", False)
    with force_extension(is_native and extension_available()):
        ids = RowIds("user")
        for batch in np.array_split(keys, 5):
            rows = ids.add(pa.array(batch), column)
            assert rows.tolist() == [numbers[int(key)] for key in batch]
        assert ids.find(pa.array(keys), column).tolist() == list(range(len(keys)))
        wanted = [numbers.get(int(key), -1) for key in others]
        assert ids.find(pa.array(others), column).tolist() == wanted
        assert ids.arrow().to_pylist() == keys.tolist()


def test_ends_are_of_64_bits_once_a_number_needs_them() -> None:
    ends = EdgeEnds(4)
    for first, largest in ((0, 5), (2, 2**31 - 1), (4, 2**31), (6, 9)):
        for column, end in zip(ends.room(2, largest), (first, -first), strict=True):
            column[:] = end, end + 1
        is_wide = largest > 2**31 - 1 or first == 6
        kept = ends.keep(np.array([True, False]) if first == 2 else None)
        assert [column.dtype for column in kept] == [np.int64 if is_wide else np.int32] * 2
    src, dst = ends.arrays()
    assert src.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert dst.tolist() == [0, 1, -2, -4, -3, -6, -5]


def test_more_ids_than_the_rows_of_a_table_can_hold_are_refused() -> None:
    if not extension_available():
        pytest.skip("there is no extension")
    table = kernels_for(torch.device("cpu")).IntegerTable()
    keys = np.arange(3)
    with pytest.raises(TypeError):
        table.look_up(keys, np.zeros(3, np.int32), True)  # new numbers are of int64
    table.look_up(keys, np.zeros(3, np.int64), True)
    with pytest.raises(TypeError):
        table.look_up(keys, np.zeros(3, np.int16), False)


@pytest.mark.parametrize("is_native", [True, False])
def test_repeated_edges(is_native: bool) -> None:
    draw = np.random.default_rng(1)
    with force_extension(is_native and extension_available()):
        large = 3_000_000_000  # so that pairs of nodes need 63 bits
        for num_edges, num_nodes in (
            *((0, 1), (1, 1), (5, 1), (1000, 30), (50_000, 400), (50_000, 90_000)),
            *((2, large), (50_000, large)),
        ):
            src, dst = draw.integers(0, num_nodes, (2, num_edges))
            src, dst = (
                np.concatenate([ends, ends[::3], np.zeros(num_edges % 7, np.int64)])
                for ends in (src, dst)
            )
            pairs = set(zip(src.tolist(), dst.tolist(), strict=True))
            assert count_repeated(src, dst, num_nodes, num_nodes) == len(src) - len(pairs)
            if num_nodes < 2**31:
                ends = src.astype(np.int32), dst.astype(np.int32)
                assert count_repeated(*ends, num_nodes, num_nodes) == len(src) - len(pairs)


@pytest.mark.parametrize("copies", [2, 3, 500])
def test_edges_of_which_most_are_repeated(copies: int) -> None:
    """Many more than those that a first look leaves over, in one part and in several."""
    draw = np.random.default_rng(3)
    for num_edges in (2000, 120_000):
        distinct = draw.choice(400_000**2, num_edges // copies, replace=False)
        codes = draw.permutation(np.repeat(distinct, copies))
        src, dst = (end.astype(np.int32) for end in np.divmod(codes, 400_000))
        assert count_repeated(src, dst, 400_000, 400_000) == len(codes) - len(distinct)


@pytest.mark.parametrize("is_ordered", [True, False])
@pytest.mark.parametrize("is_native", [True, False])
def test_pairs_are_numbered_by_their_first_edge(
    is_native: bool, is_ordered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphshard.data._row_ids._PAIRS_AT_ONCE", 100)
    src, dst = np.random.default_rng(2).integers(0, 30, (2, 1000))
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    if not is_ordered:
        pairs = [(min(pair), max(pair)) for pair in pairs]
    numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
    with force_extension(is_native and extension_available()):
        num_pairs, number = number_pairs(src, dst, is_ordered)
    assert num_pairs == len(numbers)
    assert number.tolist() == [numbers[pair] for pair in pairs]
