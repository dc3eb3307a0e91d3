# SPDX-License-Identifier: Apache-2.0
"""draw_neighbors: kernel and torch agree bit for bit; what a row draws depends on it alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from draw_cases import KINDS, Rows, options, structure
from ops_cases import in_each_way
from torch import Tensor

from graphshard._base.kernels import force_extension
from graphshard.ops import draw_neighbors
from graphshard.ops.sampling import SourcePiece, SourcePieces

CASE = structure()
Drawn = tuple[Tensor, Tensor, Tensor]


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def draw(case: Rows, fanout: int, kind: str, rows: Tensor | None = None, **more: object) -> Drawn:
    rows = case.rows if rows is None else rows
    arguments = {"indices": case.indices, **options(case, kind), **more}
    return draw_neighbors(case.indptr, rows, fanout, 99 + fanout, rows * 11 + 5, **arguments)


def equal(first: Drawn, second: Drawn) -> bool:
    return all(torch.equal(a.long(), b.long()) for a, b in zip(first, second, strict=True))


@pytest.mark.compiled
@pytest.mark.parametrize("excluded", ["none", "mask", "positions", "few"])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_torch(kind: str, excluded: str) -> None:
    mask = torch.zeros_like(CASE.indices, dtype=torch.bool)
    mask[CASE.excluded] = True
    given = {
        "none": None,
        "mask": mask,
        "positions": CASE.excluded,
        "few": CASE.excluded[::400].int(),
    }[excluded]
    fanouts = (0, 1, 7, 15, 30, 100, -1) if kind == "uniform" else (0, 6, 33, -1)
    for fanout in fanouts:
        with force_extension(False):
            expected = draw(CASE, fanout, kind, excluded=given)
        assert equal((expected[0], expected[1], CASE.indices[expected[1]]), expected)
        if excluded != "few":
            assert not bool(mask[expected[1]].any()) or given is None
        with force_extension(True):
            for count in (1, 4):
                with threads(count):
                    assert equal(draw(CASE, fanout, kind, excluded=given), expected)


def in_pieces(indices: Tensor, ends: list[int]) -> SourcePieces:
    """The same sources in pieces, each in numbers of its own: ids near it, then others."""
    pieces = []
    for number, (start, stop) in enumerate(pairwise([0, *ends, indices.numel()])):
        ids, own, shift = indices[start:stop].long(), 40 + number, 17 * number
        others = torch.unique(ids).flip(0)
        others = others[(others < shift) | (others >= shift + own)]
        place = torch.full((int(indices.max()) + 1,), -1)
        place[shift : shift + own] = torch.arange(own)[: len(place) - shift]
        place[others] = own + torch.arange(others.numel())
        dtype = (torch.int32, torch.int64)[number % 2]
        pieces.append(SourcePiece(place[ids].to(dtype), own, shift, others.to(dtype)))
    return SourcePieces(pieces, torch.int64 if len(ends) == 3 else torch.int32)


@pytest.mark.parametrize("kind", KINDS)
def test_sources_in_pieces(kind: str, way: str) -> None:
    for ends in ([], [50], [7, 7, 1300]):
        pieces = in_pieces(CASE.indices, ends)
        assert torch.equal(pieces[:].long(), CASE.indices.long())
        for fanout in (3, 33, -1):
            given = {"excluded": CASE.excluded[::50].contiguous(), "check": False}
            found = draw(CASE, fanout, kind, indices=pieces, **given)
            assert found[2].dtype == pieces.dtype
            assert equal(found, draw(CASE, fanout, kind, **given))
    with pytest.raises(TypeError, match="indices must be a tensor where check is true"):
        draw(CASE, 3, kind, indices=pieces)


@pytest.mark.compiled
def test_a_source_without_an_id_is_refused() -> None:
    piece = SourcePiece(CASE.indices.int(), 3, 0, torch.arange(2))
    for kind in ("uniform", "labor"):
        with pytest.raises(ValueError, match="every source must be below own"):
            draw(CASE, 30, kind, indices=SourcePieces([piece], torch.int64), check=False)


@in_each_way(
    "kind,dtype,id_dtype",
    ["weighted", "weighted replace", "weighted labor"],
    [torch.float32, torch.float64, torch.bool, torch.uint8],
    [torch.int32, torch.int64],
)
def test_weights_are_read_by_id(
    kind: str, dtype: torch.dtype, id_dtype: torch.dtype, way: str
) -> None:
    weights = CASE.weights
    if not dtype.is_floating_point:
        weights = weights > 0.5
    weights = weights.to(dtype)
    order = torch.randperm(len(weights), generator=torch.Generator().manual_seed(1))
    by_id = torch.empty_like(weights)
    by_id[order] = weights
    by_id = torch.cat([by_id, by_id[:3]])  # ids that no edge has
    case = CASE._replace(weights=weights.double())
    for fanout, excluded in ((0, None), (6, CASE.excluded), (33, None), (-1, CASE.excluded)):
        expected = draw(case, fanout, kind, excluded=excluded)
        by_ids = {"prob": by_id, "prob_ids": order.to(id_dtype), "excluded": excluded}
        assert equal(draw(case, fanout, kind, **by_ids), expected)


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("row_dtype", [torch.int32, torch.int64], ids=str)
def test_dtypes(idtype: torch.dtype, row_dtype: torch.dtype, way: str) -> None:
    wide = draw(CASE, 5, "uniform")
    eids = torch.arange(CASE.indices.shape[0]).flip(0)
    narrow = CASE._replace(
        indptr=CASE.indptr.to(idtype),
        indices=CASE.indices.to(row_dtype),
        rows=CASE.rows.to(row_dtype),
    )
    for ids in (None, eids.to(idtype)):
        counts, edges, picked = draw(narrow, 5, "uniform", eids=ids)
        assert (counts.dtype, edges.dtype, picked.dtype) == (torch.int64, idtype, row_dtype)
        expected = wide[1] if ids is None else eids[wide[1]]
        assert equal((counts, edges, picked), (wide[0], expected, wide[2]))
    assert equal(draw(narrow, 5, "labor"), draw(CASE, 5, "labor"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_drawn_alike_wherever_it_is_asked_for(kind: str, way: str) -> None:
    counts, positions, _ = draw(CASE, 6, kind)
    pieces = positions.split(counts.tolist())
    order = torch.randperm(CASE.rows.shape[0], generator=torch.Generator().manual_seed(1))[:70]
    found = draw(CASE, 6, kind, rows=CASE.rows[order])
    assert torch.equal(found[0], counts[order])
    assert torch.equal(found[1], torch.cat([pieces[i] for i in order.tolist()]))
    # The same lists of edges as rows of another structure, under the same ids.
    rows = torch.arange(CASE.indptr.shape[0] - 1).flip(0)
    bounds = zip(CASE.indptr.tolist(), CASE.indptr[1:].tolist(), strict=False)
    moved = torch.cat([torch.arange(begin, end) for begin, end in reversed(list(bounds))])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), CASE.indptr.diff().flip(0).cumsum(0)])
    other = CASE._replace(
        indptr=indptr, indices=CASE.indices[moved], weights=CASE.weights[moved], rows=rows
    )
    there = draw_neighbors(
        other.indptr, rows, 6, 105, rows.flip(0) * 11 + 5, indices=other.indices,
        **options(other, kind),
    )  # fmt: skip
    here = draw(CASE, 6, kind, rows=rows)
    assert equal((there[0], moved[there[1]], there[2]), (here[0].flip(0), *by_row(here)))


def by_row(drawn: Drawn) -> tuple[Tensor, Tensor]:
    """Positions and sources, rows in the opposite order."""
    counts = drawn[0].tolist()
    return (
        torch.cat(drawn[1].split(counts)[::-1]),
        torch.cat(drawn[2].split(counts)[::-1]),
    )


@pytest.mark.parametrize("given", ["mask", "positions"])
@pytest.mark.parametrize("kind", KINDS)
def test_excluded_edges_are_as_if_they_were_not_there(kind: str, given: str, way: str) -> None:
    mask = torch.zeros_like(CASE.indices, dtype=torch.bool)
    mask[CASE.excluded] = True
    left = torch.nonzero(~mask).flatten()
    before = torch.cat([torch.zeros(1, dtype=torch.int64), (~mask).cumsum(0)])
    smaller = CASE._replace(
        indptr=before[CASE.indptr], indices=CASE.indices[left], weights=CASE.weights[left]
    )
    for fanout in (3, 40, -1):
        counts, positions, picked = draw(smaller, fanout, kind)
        found = draw(CASE, fanout, kind, excluded=mask if given == "mask" else CASE.excluded)
        assert equal(found, (counts, left[positions], picked))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_drawn_is_in_its_row_and_in_order(kind: str, way: str) -> None:
    counts, positions, _ = draw(CASE, 6, kind)
    rows = torch.repeat_interleave(CASE.rows, counts)
    assert bool((positions >= CASE.indptr[rows]).all())
    assert bool((positions < CASE.indptr[rows + 1]).all())
    degrees = CASE.indptr.diff()[CASE.rows]
    positive = (CASE.weights > 0) & torch.isfinite(CASE.weights)
    if "weighted" in kind:
        assert bool(positive[positions].all())
        running = torch.cat([torch.zeros(1, dtype=torch.int64), positive.cumsum(0)])
        degrees = (running[CASE.indptr[1:]] - running[CASE.indptr[:-1]])[CASE.rows]
    if "labor" in kind:
        few = degrees <= 6
        assert torch.equal(counts[few], degrees[few])
    elif "replace" in kind:
        assert torch.equal(counts, torch.where(degrees > 0, 6, 0))
    else:
        assert torch.equal(counts, degrees.clamp(max=6))
    if "replace" not in kind:
        inside = rows[1:] == rows[:-1]
        starts = counts.cumsum(0)[:-1]
        inside[starts[(starts > 0) & (starts < rows.shape[0])] - 1] = False
        assert bool((positions[1:] > positions[:-1])[inside].all())


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_to_draw(kind: str, way: str) -> None:
    none = torch.empty(0, dtype=torch.int64)
    empty = Rows(torch.zeros(4, dtype=torch.int64), none, none.float(), none, torch.arange(3))
    for case, rows in ((empty, empty.rows), (empty, none), (CASE, none)):
        counts, positions, picked = draw(case, 5, kind, rows=rows)
        assert counts.tolist() == [0] * rows.shape[0]
        assert positions.numel() == picked.numel() == 0


@pytest.mark.parametrize("kind", ["uniform", "replace", "labor"])
def test_another_key_draws_other_edges(kind: str, way: str) -> None:
    rows, keys = torch.tensor([9]), [0, 1, -1, 2**64 - 2, 2**63]
    drawn = {
        tuple(
            draw_neighbors(
                CASE.indptr, rows, 20, key, rows, indices=CASE.indices, **options(CASE, kind)
            )[1].tolist()
        )
        for key in keys
    }
    assert len(drawn) == len(keys)
    first = draw_neighbors(CASE.indptr, rows, 5, -1, rows, indices=CASE.indices)
    assert equal(first, draw_neighbors(CASE.indptr, rows, 5, 2**64 - 1, rows, indices=CASE.indices))


def test_draws_never_change(way: str) -> None:
    """Written down once: a run that is repeated with a later version sees the same batches."""
    indptr = torch.tensor([0, 0, 3, 23, 93, 393, 2393])
    edges, rows = torch.arange(2393), torch.arange(6)
    case = Rows(indptr, edges * 37 % 101, (edges * 29 % 13).float(), edges[:0], rows)
    digests = {}
    for kind in KINDS:
        digest = hashlib.sha256()
        for fanout in (4, 11, 25, 40):
            for part in draw(case, fanout, kind):
                digest.update(part.long().numpy().tobytes())
        digests[kind] = digest.hexdigest()[:12]
    assert digests == DIGESTS


DIGESTS = {
    "uniform": "27f64b762dd0",
    "replace": "df190ad3e327",
    "weighted": "ec837693f137",
    "weighted64": "ec837693f137",
    "weighted replace": "b4bcc30d2a64",
    "labor": "9435300aadd5",
    "weighted labor": "3543939d4d3d",
}
