# SPDX-License-Identifier: Apache-2.0
"""Which rows of a table are for training, validation and testing, in four ways.

By a column of names (`split_by_names`), by columns of masks (`split_by_masks`), by lists of rows
(`split_by_rows`), by fractions drawn at random (`split_by_fractions`), and by time
(`split_by_time`). Each returns three masks over the rows. Fractions and times share out the rows
that take part: those with a label, for a task on labels.

Counts are exact. Of n rows and fractions f the sets get ``f n`` rows, rounded down, and those with
the largest remainders one more, the first of equal ones; where fractions sum to less than 1, the
rest is one more such set, and its rows are in none. Fractions are read as the decimals that they
are written as, so that 0.1 of 10 rows is one row.

Random fractions are a function of the seed and the rows' numbers alone: each row has the key that
`graphshard.ops.counter_random` gives it. They are stratified, where there are classes: the rows of
the training set are shared out among the classes by their sizes, exactly and with largest
remainders again, and then, among the rows that are left, those of validation, and of testing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from ..ops import counter_random
from . import _columns
from ._columns import family_of
from ._row_ids import Int64Array

if TYPE_CHECKING:
    import pyarrow as pa

Masks = dict[str, NDArray[np.bool_]]
"""A mask over the rows for each of `SPLITS`."""

SPLITS = ("train", "val", "test")

Zeros: TypeAlias = Callable[[int, type[bool]], NDArray[np.bool_]]
_KeyedRows: TypeAlias = tuple[Int64Array, NDArray[np.uint64], Int64Array]
"""Numbers of rows, the key of each, and its stratum."""

_BLOCK_ROWS = 1 << 20
_MOST_BITS = 20
_SIGN = np.uint64(1 << 63)

_SPLIT_DOMAIN = 0x2545F4914F6CDD1D
_NAMES = {
    "train": "train",
    "training": "train",
    "val": "val",
    "valid": "val",
    "validation": "val",
    "dev": "val",
    "test": "test",
    "testing": "test",
}


def split_by_names(
    column: pa.Array | pa.ChunkedArray, name: str = "split", *, zeros: Zeros = np.zeros
) -> Masks:
    """The split that a column of names says.

    Names are train (or training), val (valid, validation, dev) and test (testing), in any case,
    with blanks around them or not. Null and "" are rows of no split.

    Args:
        name: Of the column, for errors.
        zeros: Makes a mask.

    Raises:
        ValueError: It is no text, has other names, or no training row.
    """
    from pyarrow import compute

    masks = {split: zeros(len(column), bool) for split in SPLITS}
    others: dict[str, int] = {}
    for start, piece in _columns.pieces(column):
        if family_of(piece.type) not in ("text", "null"):
            raise ValueError(
                f"column '{name}' must say train, val or test (got {piece.type}); convert it to "
                "these names, or give a column of true and false for each"
            )
        if family_of(piece.type) == "null":
            continue
        encoded = piece.dictionary_encode()
        place = compute.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False)
        for number, text in enumerate(encoded.dictionary.to_pylist()):
            spoken = text.strip().lower()
            rows = start + np.flatnonzero(place == number)
            if spoken in _NAMES:
                masks[_NAMES[spoken]][rows] = True
            elif spoken:
                others[text] = others.get(text, 0) + len(rows)
                if len(others) > 10:
                    break
    if others:
        few = list(others.items())[:10]
        shown = ", ".join(f"{count} times {text!r}" for text, count in few)
        raise ValueError(
            f"column '{name}' must say train, val (valid, validation) or test (got {shown}"
            f"{', ...' if len(others) > 10 else ''}); rename them, or leave the cell empty for "
            "rows of no split"
        )
    return _with_training(masks, f"column '{name}'")


def split_by_masks(
    columns: Mapping[str, tuple[str, pa.Array | pa.ChunkedArray]], *, zeros: Zeros = np.zeros
) -> Masks:
    """The split that up to three columns of true and false, or 1 and 0, say.

    Args:
        columns: For some of `SPLITS` the name of the column, for errors, and its values. Null is
            false.
        zeros: Makes a mask.

    Raises:
        ValueError: A column has other values or another length, or no row is for training.
    """
    _check_keys(columns)
    lengths = {len(column) for _, column in columns.values()}
    if len(lengths) != 1:
        raise ValueError(
            f"columns of masks must have one length (got {sorted(lengths)}); take them from one "
            "table"
        )
    num_rows = lengths.pop()
    masks = {split: zeros(num_rows, bool) for split in SPLITS}
    for split, (name, column) in columns.items():
        for start, piece in _columns.pieces(column):
            if family_of(piece.type) not in ("boolean", "number", "null"):
                raise ValueError(
                    f"column '{name}' must be true or false, or 1 or 0 (got {piece.type}); for one "
                    "column of the names train, val and test, give it as the column of the split"
                )
            values = _columns.numbers(piece)
            is_in = values == 1
            wrong = ~(is_in | (values == 0) | np.isnan(values))
            if wrong.any():
                row = int(wrong.argmax())
                raise ValueError(
                    f"column '{name}' must be true or false, or 1 or 0 (got {values[row]:g} in row "
                    f"{start + row}, from 0); write 1 for rows of the {split} set"
                )
            masks[split][start : start + len(piece)] = is_in
    return _with_training(masks, f"column '{columns['train'][0]}'")


def split_by_rows(
    num_rows: int, rows: Mapping[str, NDArray[np.integer[Any]]], *, zeros: Zeros = np.zeros
) -> Masks:
    """The split that lists of row numbers say, as read from files of ids.

    Args:
        rows: For some of `SPLITS` the numbers of its rows, in any order; twice is as once.
        zeros: Makes a mask.

    Raises:
        ValueError: A number is no row, or no row is for training.
    """
    _check_keys(rows)
    masks = {split: zeros(num_rows, bool) for split in SPLITS}
    for split, numbers in rows.items():
        numbers = np.asarray(numbers)
        wrong = (numbers < 0) | (numbers >= num_rows)
        if wrong.any():
            raise ValueError(
                f"rows of the {split} set must be from 0 to {num_rows - 1} (got "
                f"{int(numbers[wrong][0])}); check that the ids are of this table"
            )
        masks[split][numbers.astype(np.int64)] = True
    return _with_training(masks, "the list of training rows")


def split_by_fractions(
    num_rows: int,
    fractions: Sequence[float],
    *,
    seed: int = 0,
    takes_part: NDArray[np.bool_] | None = None,
    classes: NDArray[np.int64] | None = None,
    zeros: Zeros = np.zeros,
) -> Masks:
    """A random split with given shares of the rows.

    Args:
        fractions: Of training, validation and test; those left out are 0. They sum to at most 1.
        takes_part: Which rows are shared out; None: all.
        classes: Of each row, by which the split is stratified; rows with -1 take no part.
        zeros: Makes a mask.

    Raises:
        ValueError: The fractions cannot be, or the training set would be empty.
    """
    shares = checked_fractions(fractions)
    state = counter_random.key_state(seed, _SPLIT_DOMAIN)

    def blocks() -> Iterator[_KeyedRows]:
        for start in range(0, num_rows, _BLOCK_ROWS):
            rows = np.arange(start, min(start + _BLOCK_ROWS, num_rows))
            if takes_part is not None:
                rows = rows[takes_part[start : start + len(rows)]]
            stratum = np.zeros(len(rows), np.int64) if classes is None else classes[rows]
            if classes is not None:
                rows, stratum = rows[stratum >= 0], stratum[stratum >= 0]
            keys = counter_random.states(state, torch.from_numpy(rows)).numpy().view(np.uint64)
            yield rows, keys, stratum

    sizes = np.zeros(0, np.int64)
    for _, _, stratum in blocks():
        counts = np.bincount(stratum, minlength=len(sizes))
        counts[: len(sizes)] += sizes
        sizes = counts
    num_chosen = int(sizes.sum())
    left, ranks = sizes, []
    for count in _counts(num_chosen, shares):
        left = left - _proportional(count, left)
        ranks.append(sizes - left)
    return _with_training(
        _masks_of_ranks(num_rows, blocks, np.stack(ranks), zeros),
        _of_rows(num_chosen, fractions),
    )


def split_by_time(
    times: pa.Array | pa.ChunkedArray,
    fractions: Sequence[float],
    *,
    takes_part: NDArray[np.bool_] | None = None,
    name: str = "time",
    zeros: Zeros = np.zeros,
) -> Masks:
    """A split with the oldest rows for training and the newest for testing.

    Rows of equal time stay together, in the set in which the first of them falls. Rows without a
    time are in no set; where fractions sum to less than 1, so are the newest.

    Args:
        times: Dates, timestamps, or numbers.
        fractions: As for `split_by_fractions`.
        takes_part: Which rows are shared out; None: all.
        name: Of the column, for errors.
        zeros: Makes a mask.

    Raises:
        ValueError: The column has no order of time, the fractions cannot be, the training set would
            be empty, or so many rows have one time that a set is left without rows.
    """
    shares = checked_fractions(fractions)

    def blocks() -> Iterator[_KeyedRows]:
        for first, piece in _columns.pieces(times):
            keys, has_time = _sortable(piece, name)
            if takes_part is not None:
                has_time = has_time & takes_part[first : first + len(piece)]
            rows = np.flatnonzero(has_time)
            yield first + rows, keys[rows], np.zeros(len(rows), np.int64)

    num_chosen = sum(len(rows) for rows, _, _ in blocks())
    counts = _counts(num_chosen, shares)
    ranks = np.cumsum(counts)[:, None]
    masks = _masks_of_ranks(len(times), blocks, ranks, zeros)
    for split, count in zip(SPLITS, counts, strict=True):
        if count and not masks[split].any():
            num_times = len(np.unique(np.concatenate([keys for _, keys, _ in blocks()])))
            raise ValueError(
                f"column '{name}' must have enough different times for the {split} set (got "
                f"{num_times} among {num_chosen} rows, and rows of one time stay together); choose "
                "other fractions, or a split at random"
            )
    return _with_training(masks, _of_rows(num_chosen, fractions))


def _masks_of_ranks(
    num_rows: int, blocks: Callable[[], Iterator[_KeyedRows]], ranks: Int64Array, zeros: Zeros
) -> Masks:
    """The rows up to the first rank of their stratum, those from there to the second, and so on.

    Args:
        blocks: Rows that take part, the key and the stratum of each, whenever it is called.
        ranks: ``[num_splits, num_strata]``: how many keys of a stratum are in this split or one
            before. Rows with the key of the last of them are all in it.
    """
    masks = {split: zeros(num_rows, bool) for split in SPLITS}
    last = _keys_of_ranks(num_rows, blocks, ranks)
    for rows, keys, stratum in blocks():
        is_before = np.zeros(len(rows), bool)
        for split, of_split, keys_of_split in zip(SPLITS, ranks, last, strict=True):
            is_inside = (of_split[stratum] > 0) & (keys <= keys_of_split[stratum])
            masks[split][rows[is_inside & ~is_before]] = True
            is_before |= is_inside
    return masks


def _keys_of_ranks(
    num_rows: int, blocks: Callable[[], Iterator[_KeyedRows]], ranks: Int64Array
) -> NDArray[np.uint64]:
    """The key of each rank, from 1, among those of its stratum; any for rank 0.

    Keys are counted by their highest bits, then those that begin as the one that is sought by their
    next bits, until few are left, which are put in order: so it is not kept which keys there are.
    """
    num_splits, num_strata = ranks.shape
    prefix = np.zeros(ranks.shape, np.uint64)
    if not num_strata:
        return prefix
    most_bits = max(_MOST_BITS - (num_strata - 1).bit_length(), 1)
    left, depth = ranks.copy(), 0
    of_splits = np.arange(num_splits)
    num_near = num_splits * num_rows
    while depth < 64 and num_near > _BLOCK_ROWS:
        bits = min(most_bits, 64 - depth)
        counts = np.zeros((num_splits, num_strata << bits), np.int64)
        for split, keys, stratum in _beginning_so(blocks, prefix, depth):
            places = keys >> np.uint64(64 - depth - bits) & np.uint64((1 << bits) - 1)
            # Before any bit is known, the keys of one split are those of all.
            counts[split if depth else slice(None)] += np.bincount(
                stratum << bits | places.astype(np.int64), minlength=num_strata << bits
            )
        totals = np.cumsum(counts.reshape(num_splits, num_strata, -1), axis=2)
        place = (totals >= left[:, :, None]).argmax(axis=2)
        grid = of_splits[:, None], np.arange(num_strata), place
        of_place = counts.reshape(totals.shape)[grid]
        left = left - (totals[grid] - of_place)
        prefix = (prefix << np.uint64(bits) if depth else prefix) | place.astype(np.uint64)
        depth += bits
        num_near = int(of_place.sum())
    if depth == 64:
        return prefix
    near: list[list[tuple[NDArray[np.uint64], Int64Array]]] = [[] for _ in of_splits]
    for split, keys, stratum in _beginning_so(blocks, prefix, depth):
        near[split].append((keys, stratum))
    for split in of_splits.tolist():
        pieces = near[split if depth else 0]
        if not pieces:
            continue
        keys, stratum = map(np.concatenate, zip(*pieces, strict=True))
        order = np.lexsort((keys, stratum))
        starts = np.searchsorted(stratum[order], np.arange(num_strata))
        has_one = ranks[split] > 0
        prefix[split, has_one] = keys[order[(starts + left[split] - 1)[has_one]]]
    return prefix


def _beginning_so(
    blocks: Callable[[], Iterator[_KeyedRows]], prefix: NDArray[np.uint64], depth: int
) -> Iterator[tuple[int, NDArray[np.uint64], Int64Array]]:
    """For each split the keys whose first bits are those of its stratum, and their strata.

    With a depth of 0 they are the same for all, and come for the first alone.
    """
    for _, keys, stratum in blocks():
        if depth == 0:
            yield 0, keys, stratum
            continue
        for split, of_split in enumerate(prefix):
            is_alike = keys >> np.uint64(64 - depth) == of_split[stratum]
            yield split, keys[is_alike], stratum[is_alike]


def checked_fractions(fractions: Sequence[float]) -> tuple[Fraction, Fraction, Fraction]:
    """Fractions as they are written, 0 where left out.

    Raises:
        ValueError: They are not one to three numbers from 0 that sum to at most 1.
    """
    rule = (
        f"fractions must be one to three numbers from 0, of training, validation and test, that "
        f"sum to at most 1 (got {', '.join(map(str, fractions))}"
    )
    try:
        shares = [Fraction(str(fraction)) for fraction in fractions]
    except ValueError:
        raise ValueError(f"{rule}); write for example 0.6,0.2,0.2") from None
    if not 1 <= len(shares) <= 3 or min(shares) < 0:
        raise ValueError(f"{rule}); write for example 0.6,0.2,0.2")
    if sum(shares) > 1 + Fraction(1, 10**9):
        raise ValueError(f"{rule}, which sum to {float(sum(shares)):g}); make one smaller")
    if shares[0] == 0:
        raise ValueError(f"{rule}); training needs a fraction above 0")
    total = max(sum(shares), Fraction(1))
    first, second, third = [*(share / total for share in shares), Fraction(0), Fraction(0)][:3]
    return first, second, third


def _counts(num_rows: int, shares: Iterable[Fraction]) -> list[int]:
    """How many rows each set gets, by largest remainder."""
    exact = [share * num_rows for share in shares]
    exact.append(num_rows - sum(exact, Fraction(0)))
    counts = [int(number) for number in exact]
    order = sorted(range(4), key=lambda place: counts[place] - exact[place])
    for place in order[: num_rows - sum(counts)]:
        counts[place] += 1
    return counts[:3]


def _proportional(count: int, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """``count`` rows shared out among strata by their sizes, by largest remainder."""
    total = int(sizes.sum())
    if total == 0:
        return np.zeros_like(sizes)
    products = [count * int(size) for size in sizes]
    taken = np.array([product // total for product in products], np.int64)
    remainders = [product % total for product in products]
    order = sorted(range(len(remainders)), key=lambda place: -remainders[place])
    taken[order[: count - int(taken.sum())]] += 1
    return taken


def _sortable(piece: pa.Array, name: str) -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """Exact numbers in the order of time, and which rows have one."""
    import pyarrow as pa

    family = family_of(piece.type)
    if family not in ("time", "number", "null"):
        raise ValueError(
            f"column '{name}' must hold dates, timestamps or numbers to split by time (got "
            f"{piece.type}); convert it to one of them"
        )
    if family == "null" or _columns.is_real(piece.type):
        reals = _columns.numbers(piece) + 0.0  # no -0.0
        has_time = ~np.isnan(reals)
        bits = np.where(has_time, reals, 0.0).view(np.uint64)
        return np.where(bits >> np.uint64(63), ~bits, bits | _SIGN), has_time
    has_time = _columns.is_valid(piece)
    if family == "time":
        narrow = pa.types.is_date32(piece.type) or pa.types.is_time32(piece.type)
        piece = piece.cast(pa.int32()) if narrow else piece
        piece = piece.cast(pa.int64())
    numbers = piece.fill_null(0).to_numpy(zero_copy_only=False)
    if numbers.dtype == np.uint64:
        return numbers, has_time
    return numbers.astype(np.int64).view(np.uint64) ^ _SIGN, has_time


def _check_keys(given: Mapping[str, Any]) -> None:
    if not set(given) <= set(SPLITS) or "train" not in given:
        raise ValueError(
            f"a split must be given for train, and may be for val and test (got {sorted(given)}); "
            "name the training rows"
        )


def _with_training(masks: Masks, source: str) -> Masks:
    if len(masks["train"]) and not masks["train"].any():
        raise ValueError(
            f"a split must have training rows (got none from {source}); put some rows into train"
        )
    return masks


def _of_rows(num_rows: int, fractions: Sequence[float]) -> str:
    return f"fractions {', '.join(map(str, fractions))} of {num_rows} rows that take part"
