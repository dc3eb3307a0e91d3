# SPDX-License-Identifier: Apache-2.0
"""draw_neighbors: a few of the edges of each row, drawn at random and the same everywhere."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._base.kernels import kernels_for, num_threads
from ..._base.typing import INDEX_DTYPES
from .. import _check
from . import _draw_reference

_NO_LIMIT = 2**31 - 1
"""Degrees are below it; as a fanout it draws all edges."""


def draw_neighbors(
    indptr: Tensor,
    rows: Tensor,
    fanout: int,
    key: int,
    row_ids: Tensor,
    *,
    indices: Tensor,
    replace: bool = False,
    prob: Tensor | None = None,
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
        indices: [E] the source of each edge, int32 or int64.
        replace: Whether one edge may be drawn several times for a row.
        prob: [E] float32 or float64 weights by position, not by edge id; they need not sum to one.
            An edge whose weight is not positive and finite is never drawn.
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
        _check_structure(indptr, indices)
        _check_rows(indptr, rows, row_ids)
        # Torch indexes by what lies there.
        rows, row_ids = rows.resolve_neg(), row_ids.resolve_neg()
        _check_draw(fanout, key, replace, prob, labor_ids, eids, indptr, indices)
        mask, skipped = _check_excluded(excluded, indices.shape[0], indices)
    num_edges = indices.shape[0]
    prob = None if prob is None else prob.detach().contiguous()
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
        counts, positions, picked = _draw_reference.draw_neighbors(
            indptr,
            rows,
            fanout,
            key,
            row_ids,
            indices=indices,
            replace=replace,
            prob=prob,
            labor_ids=labor_ids,
            excluded=skipped,
        )
        return counts, positions if eids is None else eids[positions], picked
    counts = torch.empty(rows.shape[0], dtype=torch.int64)
    threads = num_threads()
    drawing = kernels.Drawing(
        indptr.contiguous(),
        rows.contiguous(),
        row_ids.contiguous(),
        fanout,
        key % 2**64,
        replace,
        prob,
        labor_ids,
        mask,
        skipped,
        num_edges,
        counts,
    )
    total = drawing.count(threads)
    if total < 0:
        _check_range(indptr, rows, num_edges)
    edges = torch.empty(total, dtype=indptr.dtype)
    picked = torch.empty(total, dtype=indices.dtype)
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
    low, high = (int(bound) for bound in torch.aminmax(rows))
    if low < 0 or high >= num_rows:
        raise ValueError(
            f"every row must be in [0, len(indptr) - 1 = {num_rows}) "
            f"(got {low if low < 0 else high}); pass rows of this structure, not global ids"
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
    if prob is not None:
        _check_by_position("prob", prob, num_edges, indices, (torch.float32, torch.float64))
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
