# SPDX-License-Identifier: Apache-2.0
"""What samples are made with: edges drawn at random, ids numbered anew, rows collected.

`draw_neighbors` draws a few of the edges of each row, at random and the same everywhere. `IdTable`
gives new, consecutive ids to the nodes of a sample, in the order in which they appear.
`group_by_range` sorts what is asked by the rank that owns it, `ungroup` puts answers back in order.
`copy_rows` moves rows of one table to places of another, without a tensor in between.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .._base.kernels import empty, empty_like, kernels_for, num_threads
from .._base.typing import INDEX_DTYPES
from . import _check, reference

_NO_LIMIT = 2**31 - 1
WEIGHT_DTYPES = (torch.float32, torch.float64, torch.bool, torch.uint8)
"""Degrees are below it; as a fanout it draws all edges."""


@dataclass(frozen=True, eq=False)
class SourcePiece:
    """Sources of edges at positions that follow one another, in numbers of their own.

    Args:
        sources: ``[n]`` int32 or int64.
        own: Of numbers below it the id is ``shift`` more.
        others: ``[m]``, the ids of further numbers, in their order.
    """

    sources: Tensor
    own: int
    shift: int
    others: Tensor

    def at(self, places: Tensor) -> Tensor:
        """int64 ids at some places."""
        numbers = self.sources.index_select(0, places).to(torch.int64)
        is_other = numbers >= self.own
        ids = numbers + self.shift
        ids[is_other] = self.others[numbers[is_other] - self.own].to(torch.int64)
        return ids


class SourcePieces:
    """The source of each edge, as `draw_neighbors` takes them, in pieces: one after another.

    Args:
        pieces: At least one.
        dtype: Of ids: int32 or int64.
    """

    device = torch.device("cpu")

    def __init__(self, pieces: Sequence[SourcePiece], dtype: torch.dtype) -> None:
        self.pieces, self.dtype = tuple(pieces), dtype
        counts = [piece.sources.numel() for piece in pieces]
        self._starts = torch.tensor([0, *itertools.accumulate(counts)])
        self.shape = torch.Size((sum(counts),))
        self._arrays = (
            self._starts,
            [piece.sources for piece in pieces],
            [piece.own for piece in pieces],
            [piece.shift for piece in pieces],
            [piece.others for piece in pieces],
        )

    def numel(self) -> int:
        return self.shape[0]

    def __getitem__(self, positions: Tensor | slice) -> Tensor:
        """The ids of some sources."""
        if isinstance(positions, slice):
            positions = torch.arange(*positions.indices(self.numel()))
        positions = positions.to(torch.int64)
        if len(self.pieces) == 1:
            return self.pieces[0].at(positions).to(self.dtype)
        ids = torch.empty(positions.shape, dtype=self.dtype)
        number = torch.bucketize(positions, self._starts[1:], right=True)
        for i, piece in enumerate(self.pieces):
            (chosen,) = torch.nonzero(number == i, as_tuple=True)
            ids[chosen] = piece.at(positions[chosen] - self._starts[i]).to(self.dtype)
        return ids

    def write(self, drawing: Any, edges: Tensor, picked: Tensor, threads: int) -> None:
        """Let a drawing of the compiled kernels write what it has counted."""
        drawing.write_pieces(*self._arrays, edges, picked, threads)


def draw_neighbors(
    indptr: Tensor,
    rows: Tensor,
    fanout: int,
    key: int,
    row_ids: Tensor,
    *,
    indices: Tensor | SourcePieces,
    replace: bool = False,
    prob: Tensor | None = None,
    prob_ids: Tensor | None = None,
    labor_ids: Tensor | None = None,
    excluded: Tensor | None = None,
    eids: Tensor | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw up to ``fanout`` edges of each row of a compressed sparse structure.

    What is drawn for a row is a function of ``key``, the row's id, and the row's edges in their
    order, and of nothing else: not of the other rows, of the number of threads, or of whether the
    compiled kernels are there.

    Without ``prob``, every set of ``fanout`` edges is equally likely. With it, edges are drawn one
    after another, each by its weight among those left. With ``replace``, ``fanout`` independent
    draws are made, of equal edges or by weight. A row with no more edges than ``fanout`` gives all
    of them once, unless ``replace``.

    With ``labor_ids``, edges are kept independently, with the number that decides shared by all
    edges of one source: ``r(source) < min(1, c w)``, where c makes the expected number of edges of
    the row ``fanout``. Rows then tend to keep the same sources, so that fewer distinct ones are
    drawn for equally good estimates. This is LABOR-0 of Balin and Catalyurek, Layer-neighbor
    sampling (NeurIPS 2023), https://arxiv.org/abs/2210.13339; its iterations, which make edges of
    popular sources likelier still, are left undone. Cost: like that of weighted drawing, of the
    order of the edges of the rows; uniform drawing costs what it draws.

    Args:
        indptr: [num_rows + 1] int32 or int64, where the edges of each row begin and end.
        rows: [n] the rows to draw for, int32 or int64; one may come several times.
        fanout: How many edges to draw per row, or -1 for all with a positive weight.
        key: 64 bits that name this draw; another key draws independently.
        row_ids: [n] what a row is called in every run and on every rank, int32 or int64.
        indices: [E] the source of each edge, int32 or int64; or `SourcePieces`, where ``check`` is
            false and there are no ``eids``.
        replace: Whether one edge may be drawn several times for a row.
        prob: [E] float32, float64, bool or uint8 weights by position, not by edge id; they need not
            sum to one. An edge whose weight is not positive and finite is never drawn.
        prob_ids: [E] int32 or int64, which entry of ``prob``, then of any length, is the weight of
            the edge at each position: with edge ids ``prob`` is by edge id, and nothing is copied.
        labor_ids: [E] int32 or int64, what the source of each edge is called in every run and on
            every rank; with original ids as sources, ``indices``.
        excluded: Edges that are not there for this draw: a bool or uint8 mask [E] by position, or
            int32 or int64 positions, strictly ascending, which cost nothing per edge.
        eids: [E] of the dtype of ``indptr``, the id of the edge at each position; given, ids are
            returned in the place of positions.
        check: False where the caller has made the arguments itself, ``excluded`` as int64
            positions; then only what the kernel notices is an error.

    Returns:
        ``(counts, positions, picked)``: how many edges were drawn for each row, int64 [n]; their
        positions, of the dtype of ``indptr``, grouped by row in the order of ``rows``, ascending
        within a row, or with ``replace`` in the order of drawing; and ``indices[positions]``. With
        ``eids``, ``eids[positions]`` takes the place of the positions.

    Raises:
        TypeError: An argument is not a tensor, or not of the dtypes above.
        ValueError: Shapes or devices do not fit together, ``fanout`` is below -1, or 2^31 - 1 and
            more with ``replace``, ``key`` needs more than 64 bits, a row is out of range,
            ``excluded`` does not ascend, or ``labor_ids`` come with ``replace``.

    Example:
        >>> indptr, indices = torch.tensor([0, 2, 5]), torch.tensor([1, 2, 0, 1, 2])
        >>> rows = torch.tensor([1, 0])
        >>> counts, positions, picked = draw_neighbors(indptr, rows, 2, 7, rows, indices=indices)
        >>> counts, picked[2:]
        (tensor([2, 2]), tensor([1, 2]))
    """
    mask, skipped = None, excluded
    if check:
        if isinstance(indices, SourcePieces):
            raise TypeError("indices must be a tensor where check is true (got SourcePieces)")
        _check_structure(indptr, indices)
        _check_rows(indptr, rows, row_ids)
        # Torch indexes by what lies there.
        rows, row_ids = rows.resolve_neg(), row_ids.resolve_neg()
        _check_draw(fanout, key, replace, prob, prob_ids, labor_ids, eids, indptr, indices)
        mask, skipped = _check_excluded(excluded, indices.shape[0], indices)
    num_edges = indices.shape[0]
    prob = None if prob is None else prob.detach().contiguous()
    if prob is not None and prob.dtype == torch.bool:
        prob = prob.view(torch.uint8)
    prob_ids = None if prob_ids is None else prob_ids.contiguous()
    labor_ids = None if labor_ids is None else labor_ids.contiguous()
    eids = None if eids is None else eids.contiguous()
    if fanout < 0:
        labor_ids = None  # all that have a weight, as without
    fanout = min(fanout, _NO_LIMIT - 1)
    kernels = kernels_for(indices.device)
    if kernels is None:
        _check_range(indptr, rows, num_edges)
        if mask is not None:
            (skipped,) = torch.nonzero(mask, as_tuple=True)
        counts, positions, picked = reference.draw_neighbors(
            indptr,
            rows,
            fanout,
            key,
            row_ids,
            indices=indices,
            replace=replace,
            prob=prob,
            prob_ids=prob_ids,
            labor_ids=labor_ids,
            excluded=skipped,
        )
        return counts, positions if eids is None else eids[positions], picked
    counts = torch.empty(rows.shape[0], dtype=torch.int64)
    threads = num_threads()
    arrays = indptr.contiguous(), rows.contiguous(), row_ids.contiguous()
    how = fanout, key % 2**64, replace, prob, prob_ids, labor_ids, mask, skipped
    drawing = kernels.Drawing(*arrays, *how, num_edges, counts)
    total = drawing.count(threads)
    if total < 0:
        _check_range(indptr, rows, num_edges)
    # Batches are alike: what one frees fits the next, and large pages have fewer addresses to find.
    edges, picked = empty((total,), indptr.dtype), empty((total,), indices.dtype)
    if isinstance(indices, SourcePieces):
        indices.write(drawing, edges, picked, threads)
    else:
        drawing.write(indices.contiguous(), eids, edges, picked, threads)
    return counts, edges, picked


def _check_structure(indptr: Tensor, indices: Tensor) -> None:
    _check.check_index_array("indptr", indptr)
    _check.check_index_array("indices", indices)
    _check_device("indptr", indptr, indices)
    last = int(indptr[-1]) if indptr.shape[0] else -1
    if last != indices.shape[0]:
        raise ValueError(
            f"indptr must end with len(indices) = {indices.shape[0]} "
            f"(got {last if indptr.shape[0] else 'no entries'}); build it from in-degrees with "
            "cumsum, with a 0 before them"
        )


def _check_rows(indptr: Tensor, rows: Tensor, row_ids: Tensor) -> None:
    for name, array in (("rows", rows), ("row_ids", row_ids)):
        _check.check_index_array(name, array)
        _check_device(name, array, indptr)
    if rows.shape != row_ids.shape:
        raise ValueError(
            f"row_ids must have one entry per row (got {row_ids.shape[0]} for {rows.shape[0]} "
            "rows); pass the original ids of the rows"
        )


def _check_range(indptr: Tensor, rows: Tensor, num_edges: int) -> None:
    if rows.numel() == 0:
        return
    num_rows = indptr.shape[0] - 1
    if (bad_row := _check.outside(rows, num_rows)) is not None:
        raise ValueError(
            f"every row must be in [0, len(indptr) - 1 = {num_rows}) "
            f"(got {bad_row}); pass rows of this structure, not global ids"
        )
    rows = rows.long()
    begins, ends = indptr[rows].long(), indptr[rows + 1].long()
    degrees = ends - begins
    bad = (begins < 0) | (ends > num_edges) | (degrees < 0) | (degrees >= _NO_LIMIT)
    if bool(bad.any()):
        at = int(torch.nonzero(bad)[0])
        raise ValueError(
            f"indptr must ascend from 0 to len(indices) = {num_edges}, by less than 2^31 per row "
            f"(row {int(rows[at])} has edges from {int(begins[at])} to {int(ends[at])}); build it "
            "from in-degrees with cumsum"
        )


def _check_draw(
    fanout: int,
    key: int,
    replace: bool,
    prob: Tensor | None,
    prob_ids: Tensor | None,
    labor_ids: Tensor | None,
    eids: Tensor | None,
    indptr: Tensor,
    indices: Tensor,
) -> None:
    if isinstance(fanout, bool) or not isinstance(fanout, int):
        raise TypeError(f"fanout must be an int (got {fanout!r}); -1 draws all edges")
    if fanout < -1:
        raise ValueError(f"fanout must not be below -1 (got {fanout}); -1 draws all edges")
    if not isinstance(key, int):
        raise TypeError(f"key must be an int (got {type(key).__name__}); use int(...)")
    if not -(2**63) <= key < 2**64:
        raise ValueError(f"key must fit in 64 bits (got {key}); take it modulo 2**64")
    _check.check_bool("replace", replace)
    if replace and fanout >= _NO_LIMIT:
        raise ValueError(f"fanout must be below 2^31 - 1 with replace=True (got {fanout})")
    num_edges = indices.shape[0]
    if prob is None and prob_ids is not None:
        raise ValueError("prob_ids say which weight an edge has; give prob, the weights, as well")
    if prob is not None:
        num_weights = num_edges
        if prob_ids is not None:
            _check_by_position("prob_ids", prob_ids, num_edges, indices, INDEX_DTYPES)
            _check.check_tensor("prob", prob)
            num_weights = prob.shape[0] if prob.dim() else 0
            if (bad_id := _check.outside(prob_ids, num_weights)) is not None:
                raise ValueError(
                    f"prob_ids must be in [0, len(prob) = {num_weights}) (got {bad_id}); give prob "
                    "an entry for each edge id"
                )
        _check_by_position("prob", prob, num_weights, indices, WEIGHT_DTYPES)
    if labor_ids is not None:
        _check_by_position("labor_ids", labor_ids, num_edges, indices, INDEX_DTYPES)
        if replace:
            raise ValueError(
                "labor_ids keep each edge at most once, so they cannot come with replace=True; "
                "leave out one of the two"
            )
    if eids is not None:
        _check_by_position("eids", eids, num_edges, indices, (indptr.dtype,))


def _check_by_position(
    name: str, array: Tensor, num_edges: int, like: Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    _check.check_tensor(name, array)
    if array.dtype not in dtypes:
        names = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(
            f"{name} must be {names} (got {array.dtype}); convert with .to({dtypes[0]})"
        )
    if array.shape != (num_edges,):
        raise ValueError(
            f"{name} must have one entry per edge, shape ({num_edges},) "
            f"(got {tuple(array.shape)}); index what is by edge id with the ids by position"
        )
    _check_device(name, array, like)


def _check_excluded(
    excluded: Tensor | None, num_edges: int, like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """(mask by position, positions), of which one at most is there."""
    if excluded is None:
        return None, None
    if isinstance(excluded, Tensor) and excluded.dtype in (torch.int32, torch.int64):
        _check.check_index_array("excluded", excluded)
        _check_device("excluded", excluded, like)
        if excluded.numel() == 0:
            return None, None
        if bool((excluded[1:] <= excluded[:-1]).any()):
            raise ValueError(
                "excluded positions must ascend, each given once (got "
                f"{excluded.numel()} that do not); use torch.unique"
            )
        first, last = int(excluded[0]), int(excluded[-1])
        if first < 0 or last >= num_edges:
            raise ValueError(
                f"excluded positions must be in [0, len(indices) = {num_edges}) "
                f"(got {first if first < 0 else last}); drop those of other edges"
            )
        return None, excluded.long().contiguous()
    _check_by_position("excluded", excluded, num_edges, like, (torch.bool, torch.uint8))
    return excluded.contiguous().view(torch.uint8), None


def _check_device(name: str, array: Tensor, like: Tensor) -> None:
    if array.device != like.device:
        raise ValueError(
            f"{name} must be on the device of the structure, {like.device} (got {array.device}); "
            "move it with .to(...)"
        )


_MOST_RANGES = 65535


class IdTable:
    """Renumbers ids from [0, num_ids), again and again, with memory that it keeps between calls.

    The compiled table is an array with an entry per id while that is moderate (up to 2^24), and a
    hash table beyond; neither is cleared between calls, so a call costs what it renumbers. In plain
    torch ids are sorted. Use one table per thread.

    Args:
        num_ids: Ids are below this number.

    Raises:
        TypeError: ``num_ids`` is not an int.
        ValueError: ``num_ids`` is negative, or needs more than 63 bits.

    Example:
        >>> table = IdTable(100)
        >>> ids, local = table.renumber(torch.tensor([40, 7]), torch.tensor([7, 93, 40, 93]))
        >>> ids, local
        (tensor([40,  7, 93]), tensor([1, 2, 0, 2]))
    """

    __slots__ = ("_table", "num_ids")

    num_ids: int

    def __init__(self, num_ids: int) -> None:
        if isinstance(num_ids, bool) or not isinstance(num_ids, int):
            raise TypeError(f"num_ids must be an int (got {num_ids!r}); pass the number of nodes")
        if num_ids < 0:
            raise ValueError(f"num_ids must not be negative (got {num_ids})")
        if num_ids > _check.MOST:
            raise ValueError(f"num_ids must be below 2^63 (got {num_ids})")
        self.num_ids = num_ids
        self._table: Any = None

    def __repr__(self) -> str:
        return f"IdTable(num_ids={self.num_ids})"

    def renumber(
        self, first: Tensor, others: Tensor, *, check: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Number ``first`` from 0 on, then each new id of ``others`` where it first appears.

        Args:
            first: [n] distinct ids, int32 or int64.
            others: [m] ids, of the same dtype and device.
            check: False where the caller has made the arrays itself; ids are looked at even so.

        Returns:
            ``(ids, local)``: the id behind each number, [n + new], ``first`` and then the new ones;
            and the number of each of ``others``, [m]. Both of the dtype of the inputs.

        Raises:
            TypeError: The ids are not tensors of one integer dtype.
            ValueError: Devices differ, an id is out of range, or ``first`` repeats one.
            RuntimeError: Another thread is using this table.
        """
        if check:
            _check.check_index_array("first", first)
            _check.check_index_array("others", others)
            _check.check_alike("first", first, "others", others)
        kernels = kernels_for(first.device)
        if kernels is None:
            self._check_range(first, others)
            return _renumber(first, others)
        if self._table is None:
            self._table = kernels.IdTable(self.num_ids)
        first, others = first.contiguous(), others.contiguous()
        local = empty_like(others)
        ids = empty((first.shape[0] + others.shape[0],), first.dtype)
        count = self._table.renumber(first, others, ids, local)
        if count < 0:
            self._check_range(first, others)
            raise _repeated(first)
        ids = ids[:count]
        return empty_like(ids).copy_(ids), local

    def _check_range(self, first: Tensor, others: Tensor) -> None:
        for name, array in (("first", first), ("others", others)):
            if (bad := _check.outside(array, self.num_ids)) is not None:
                raise ValueError(
                    f"every id in {name} must be in [0, num_ids={self.num_ids}) "
                    f"(got {bad}); make the table with the number of nodes"
                )


def _renumber(first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
    """In plain torch: equal ids side by side, each group led by where the id first stood."""
    ids = torch.cat([first, others])
    sorted_ids, order = torch.sort(ids, stable=True)
    starts = torch.ones_like(sorted_ids, dtype=torch.bool)
    starts[1:] = sorted_ids[1:] != sorted_ids[:-1]
    group = starts.cumsum(0) - 1
    appeared = order[starts]
    by_appearance = torch.sort(appeared).indices
    if not torch.equal(
        appeared[by_appearance[: first.shape[0]]],
        torch.arange(first.shape[0], device=first.device),
    ):
        raise _repeated(first)
    number = torch.empty_like(by_appearance)
    number[by_appearance] = torch.arange(number.shape[0], device=ids.device)
    local = torch.empty_like(order)
    local[order] = number[group]
    return ids[appeared[by_appearance]], local[first.shape[0] :].to(ids.dtype)


def _repeated(first: Tensor) -> ValueError:
    values, counts = torch.unique(first, return_counts=True)
    return ValueError(
        f"first must hold each id once (got {int(values[counts > 1][0])} several times); use "
        "torch.unique, or pass the rest in others"
    )


def group_by_range(
    ids: Tensor, starts: Sequence[int], last: int, dtype: torch.dtype, *, check: bool = True
) -> tuple[Tensor, Tensor, list[int]]:
    """Group ids by the range they are in.

    Args:
        ids: int32 or int64 ``[n]``.
        starts: ``num_ranges + 1`` ascending numbers, less than 65,536 ranges; range r is
            ``[starts[r], starts[r + 1])``.
        last: The range that comes after all others, which stay in order; so do ids in a range.
        dtype: int32 or int64, of the second result.
        check: False where the caller has made the arguments itself; ids are looked at even so.

    Returns:
        int64 ``[n]``, where each grouped id stood; ``[n]``, its distance from the start of its
        range; and the size of each range, by its number.

    Raises:
        TypeError: ``ids`` or ``dtype`` has another type.
        ValueError: An id is in no range, the ranges do not ascend from 0 or more, ``last`` is none
            of them, or one is too long for ``dtype``.
    """
    if check:
        _check.check_index_array("ids", ids)
        _check_dtype(dtype)
        _check_ranges(starts, last, dtype)
    kernels = kernels_for(ids.device)
    order = torch.empty(ids.shape, dtype=torch.int64, device=ids.device)
    if kernels is None:
        bounds = torch.tensor(starts, dtype=torch.int64, device=ids.device)
        range_of = torch.bucketize(ids.long().contiguous(), bounds[1:-1].contiguous(), right=True)
        is_last = (range_of == last).to(torch.int64)
        order = torch.argsort(range_of + is_last * len(starts), stable=True)
        rows = (ids.to(torch.int64) - bounds[range_of]).index_select(0, order).to(dtype)
        sizes = torch.bincount(range_of, minlength=len(starts) - 1)
        in_range = ids.numel() == 0 or bool(
            (ids.min() >= bounds[0]).logical_and(ids.max() < bounds[-1])
        )
    else:
        rows = torch.empty(ids.shape, dtype=dtype)
        sizes = torch.empty(len(starts) - 1, dtype=torch.int64)
        in_range = kernels.group_by_range(
            ids.contiguous(), torch.tensor(starts, dtype=torch.int64), last, order, rows, sizes
        )
    if not in_range:
        raise ValueError(
            f"every id must be in [{starts[0]}, {starts[-1]}) (got {int(ids.min())} to "
            f"{int(ids.max())})"
        )
    return order, rows, sizes.tolist()


def ungroup(
    order: Tensor, counts: Tensor, values: Tensor, dtype: torch.dtype, *, check: bool = True
) -> tuple[Tensor, Tensor]:
    """Put lists, which lie one after another, into the places where they belong.

    Args:
        order: int64 ``[n]``, a permutation: the place of each list.
        counts: int64 ``[n]``, how many elements each has.
        values: int32 or int64 ``[sum(counts)]``, their elements.
        dtype: int32 or int64, of the elements in the result.
        check: False where the caller has made the arguments itself; counts and order are looked at
            even so.

    Returns:
        Counts and elements, by place.

    Raises:
        TypeError: An array or ``dtype`` has another type.
        ValueError: There are not as many values as counts say, order is no permutation, devices
            differ, or an element does not fit into ``dtype``.
    """
    if check:
        _check_dtype(dtype)
        for name, array in (("order", order), ("counts", counts), ("values", values)):
            _check.check_index_array(name, array)
        for name, array in (("order", order), ("counts", counts)):
            _check.check_result(name, array, counts.shape, torch.int64, values.device)
        _check.check_narrows("values", values, dtype)
        # What torch indexes with must hold its numbers itself.
        order, counts, values = order.resolve_neg(), counts.resolve_neg(), values.resolve_neg()
    kernels = kernels_for(values.device)
    by_place = torch.empty(counts.shape, dtype=torch.int64, device=counts.device)
    if kernels is not None:
        moved = torch.empty(values.shape, dtype=dtype)
        fits = kernels.ungroup(
            order.contiguous(), counts.contiguous(), values.contiguous(), by_place, moved
        )
        if not fits:
            raise _misfit(counts, values)
        return by_place, moved
    places = torch.arange(order.numel(), device=order.device)
    fits = bool(((counts >= 0) & (counts <= values.numel())).all())
    if not fits or int(counts.sum()) != values.numel() or not order.sort().values.equal(places):
        raise _misfit(counts, values)
    by_place[order] = counts
    begins = counts.cumsum(0) - counts
    shift = torch.empty_like(begins)
    shift[order] = begins
    shift -= by_place.cumsum(0) - by_place
    source = torch.arange(values.numel(), device=values.device) + shift.repeat_interleave(by_place)
    return by_place, values.index_select(0, source).to(dtype)


def _misfit(counts: Tensor, values: Tensor) -> ValueError:
    return ValueError(
        f"order must be a permutation of {counts.numel()} lists, and counts must add up to "
        f"{values.numel()} (they add up to {sum(counts.tolist())})"
    )


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in INDEX_DTYPES:
        raise TypeError(f"dtype must be torch.int32 or torch.int64 (got {dtype})")


def _check_ranges(starts: Sequence[int], last: int, dtype: torch.dtype) -> None:
    num_ranges = len(starts) - 1
    if not 0 < num_ranges <= _MOST_RANGES:
        raise ValueError(f"there must be 1 to {_MOST_RANGES} ranges (got {num_ranges})")
    if isinstance(last, bool) or not isinstance(last, int):
        raise TypeError(f"last must be an int (got {last!r})")
    if not 0 <= last < num_ranges:
        raise ValueError(f"last must be one of {num_ranges} ranges (got {last})")
    longest = max(end - begin for begin, end in pairwise(starts))
    ascends = all(begin <= end for begin, end in pairwise(starts))
    if not ascends or starts[0] < 0 or starts[-1] > _check.MOST:
        raise ValueError(
            "starts must ascend, from 0 or more to less than 2^63 (got "
            f"{list(starts[:4])} ... {list(starts[-4:])}); pass where each range begins"
        )
    if longest > torch.iinfo(dtype).max + 1:
        raise ValueError(
            f"{dtype} must tell the ids of each range apart (got a range of {longest}); ask for "
            "torch.int64"
        )


def copy_rows(
    out: Tensor,
    places: Tensor | None,
    table: Tensor,
    rows: Tensor | None,
    *,
    check: bool = True,
) -> None:
    """``out[places] = table[rows]``, for tables of any dtype; no gradient is recorded.

    The compiled kernel asks for rows before it needs them, and writes large results past the
    caches.

    Args:
        out: ``[m, *]``, written to.
        places: int32 or int64 ``[n]``, distinct, in [0, m); None for the first n rows in order.
        table: ``[k, *]`` of the dtype and row shape of ``out``; copied first where they overlap.
        rows: int32 or int64 ``[n]``, in [0, k); None for the first n rows in order. At least one of
            ``places`` and ``rows`` is given, or n is k.
        check: False where the caller has made ``out``, contiguous, and knows that ``table`` is of
            its kind, dense, and no view of it; places and rows are looked at even so.

    Raises:
        TypeError: An argument is no tensor, or places or rows are not int32 or int64.
        IndexError: A place or row is out of range.
        ValueError: Dtypes, row shapes or the numbers of places and rows differ, or entries of
            ``out`` share memory.
    """
    if check:
        out, table = _checked_rows(out, places, table, rows)
    writes = not check or (out.is_contiguous() and _check.is_plain(out))
    kernels = kernels_for(out.device) if writes else None
    if kernels is not None and table.device == out.device and out.numel() and table.numel():
        kernels.copy_rows(
            _as_bytes(out),
            None if places is None else places.cpu().contiguous(),
            _as_bytes(table.contiguous()),
            None if rows is None else rows.cpu().contiguous(),
            num_threads(),
        )
        return
    for name, number, limit in (("places", places, out), ("rows", rows, table)):
        if number is not None:
            _check.check_places(name, number, limit.shape[0])
    if rows is not None and places is None and writes and table.device == out.device:
        # On a GPU this gather moves as many bytes a second as memory gives: no kernel of ours.
        torch.index_select(table, 0, rows.to(table.device), out=out[: rows.shape[0]])
        return
    if rows is not None:
        picked = table.index_select(0, rows.to(table.device))
    else:
        picked = table if places is None else table[: places.numel()]
    picked = picked.detach().to(out.device)
    if places is None:
        out[: picked.shape[0]] = picked
    else:
        out.index_copy_(0, places.to(out.device, torch.int64), picked)


def _checked_rows(
    out: Tensor, places: Tensor | None, table: Tensor, rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """``out`` and ``table`` as `copy_rows` reads and writes them, if the arguments fit."""
    out, table = (_check.check_tensor(n, t).detach() for n, t in (("out", out), ("table", table)))
    numbers = {"places": places, "rows": rows}
    for name, array in numbers.items():
        if array is not None:
            _check.check_index_array(name, array)
    if out.is_meta or table.is_meta:
        raise ValueError("out and table must hold numbers (got a tensor on the device meta)")
    if 0 in (out.dim(), table.dim()):
        raise ValueError("out and table must have rows (got a tensor without dimensions)")
    if out.dtype != table.dtype or out.shape[1:] != table.shape[1:]:
        raise ValueError(
            "out and table must have rows of one dtype and shape (got "
            f"{out.dtype} {tuple(out.shape[1:])} and {table.dtype} {tuple(table.shape[1:])})"
        )
    lengths = {name: array.shape[0] for name, array in numbers.items() if array is not None}
    count = next(iter(lengths.values()), table.shape[0])
    if any(length != count for length in lengths.values()):
        raise ValueError(f"places and rows must have one length (got {lengths})")
    limits = {"places": out.shape[0], "rows": table.shape[0]}
    for name, limit in limits.items():
        if numbers[name] is None and count > limit:
            raise IndexError(
                f"{count} rows must fit into a table of {limit}; pass {name}, or fewer rows"
            )
    _check.check_written("out", out)
    return out, _check.apart(table.resolve_conj().resolve_neg(), out)


def _as_bytes(table: Tensor) -> Tensor:
    return table.view(-1).view(torch.uint8).view(table.shape[0], -1)
