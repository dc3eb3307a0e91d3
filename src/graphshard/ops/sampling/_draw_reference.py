# SPDX-License-Identifier: Apache-2.0
"""Drawing edges per row in plain torch: specification, fallback, and oracle of the kernel.

Each row draws from the list of its edges without the excluded ones; a draw is an offset into that
list. The number of a word in a row's stream is the number of the draw (uniform, or with
replacement) or the offset of the edge (weighted without replacement).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from . import _random

_NO_LIMIT = 2**31 - 1
_EDGES_AT_ONCE = 1 << 20
"""Weights and shared numbers are looked at edge by edge; so many edges are held at a time."""


@dataclass(frozen=True)
class _Lists:
    """For each row drawn, its edges without the excluded ones."""

    begin: Tensor  # [n] int64, where the row begins, excluded edges included
    degree: Tensor  # [n] int64, without them
    excluded: Tensor | None  # all excluded positions, ascending
    first: Tensor | None  # [n], how many of them lie before the row
    last: Tensor | None  # [n], how many lie before its end

    @classmethod
    def of(cls, indptr: Tensor, rows: Tensor, excluded: Tensor | None) -> _Lists:
        rows = rows.long()
        begin = indptr[rows].long()
        end = indptr[rows + 1].long()
        if excluded is None or excluded.numel() == 0:
            return cls(begin, end - begin, None, None, None)
        first = torch.searchsorted(excluded, begin)
        last = torch.searchsorted(excluded, end)
        return cls(begin, end - begin - (last - first), excluded, first, last)

    def slice(self, first: int, last: int) -> _Lists:
        def cut(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[first:last]

        return _Lists(
            self.begin[first:last],
            self.degree[first:last],
            self.excluded,
            cut(self.first),
            cut(self.last),
        )

    def positions(self, which: Tensor, offsets: Tensor) -> Tensor:
        """Position of each edge, given as the number of its row and its offset in that list."""
        found = self.begin[which] + offsets
        if self.excluded is None or self.first is None or self.last is None:
            return found
        # An excluded edge is skipped if no more than `offset` kept edges of the row precede it;
        # `kept_before` counts kept edges from the very first row on.
        kept_before = self.excluded - torch.arange(
            self.excluded.numel(), device=self.excluded.device
        )
        first = self.first[which]
        skipped = torch.searchsorted(kept_before, found - first, right=True)
        return found + torch.minimum(skipped, self.last[which]) - first


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
) -> tuple[Tensor, Tensor, Tensor]:
    """As `graphshard.ops.draw_neighbors`, without its checks; excluded are positions, ascending."""
    lists = _Lists.of(indptr, rows, excluded)
    states = _random.states(_random.key_state(key, _random.ROW_DOMAIN), row_ids.long())
    if fanout < 0:
        fanout, replace = _NO_LIMIT, False
    if prob is None and (labor_ids is None or fanout == _NO_LIMIT):
        counts, offsets = (_repeated if replace else _uniform)(lists.degree, fanout, states)
    else:
        numbers = None
        if labor_ids is not None:
            start = _random.key_state(key, _random.SOURCE_DOMAIN)
            numbers = _SharedNumbers(start, labor_ids)
        counts, offsets = _by_edge(lists, fanout, states, replace, prob, numbers)
    which = torch.repeat_interleave(
        torch.arange(rows.shape[0], device=rows.device), counts, output_size=offsets.shape[0]
    )
    positions = lists.positions(which, offsets)
    return counts, positions.to(indptr.dtype), indices[positions]


def _uniform(degree: Tensor, fanout: int, states: Tensor) -> tuple[Tensor, Tensor]:
    """Floyd's algorithm: of d edges, draw k without replacement in k steps.

    Step i draws t from [0, d - k + i]; if t was drawn before, d - k + i is taken in its place.
    """
    counts = degree.clamp(max=fanout)
    which, offsets = _places(counts)
    (limited,) = torch.nonzero(degree > fanout, as_tuple=True)
    if limited.numel() == 0 or fanout == 0:
        return counts, offsets
    chosen = torch.empty(limited.shape[0], fanout, dtype=torch.int64, device=degree.device)
    first = degree[limited] - fanout
    for i in range(fanout):
        drawn = _random.below(_random.word(states[limited], i), first + (i + 1))
        known = (chosen[:, :i] == drawn[:, None]).any(1)
        chosen[:, i] = torch.where(known, first + i, drawn)
    offsets[(degree > fanout)[which]] = chosen.sort(1).values.flatten()
    return counts, offsets


def _repeated(degree: Tensor, fanout: int, states: Tensor) -> tuple[Tensor, Tensor]:
    counts = torch.where(degree > 0, fanout, 0)
    which, numbers = _places(counts)
    return counts, _random.below(_random.word(states[which], numbers), degree[which])


@dataclass(frozen=True)
class _SharedNumbers:
    """A number in [0, 1) per source node, the same for every row that has it as a neighbour."""

    start: int
    ids: Tensor  # [E] which source an edge has

    def at(self, positions: Tensor) -> Tensor:
        return _random.unit(_random.states(self.start, self.ids[positions].long()))


def _by_edge(
    lists: _Lists,
    fanout: int,
    states: Tensor,
    replace: bool,
    prob: Tensor | None,
    numbers: _SharedNumbers | None,
) -> tuple[Tensor, Tensor]:
    """Draws that look at every edge of a row, for some rows at a time."""
    all_counts = [lists.degree.new_empty(0)]
    all_offsets = [lists.degree.new_empty(0)]
    for first, last in _chunks(lists.degree):
        part = lists.slice(first, last)
        which, offsets = _places(part.degree)
        positions = part.positions(which, offsets)
        if prob is None:
            weights = torch.ones_like(positions, dtype=torch.float64)
        else:
            weights = prob[positions].double()
        positive = (weights > 0) & (weights < torch.inf)
        if fanout == _NO_LIMIT:
            chosen = positive
        elif numbers is not None:
            chosen = _shared(part.degree, which, weights, positive, fanout, numbers.at(positions))
        elif replace:
            part_states = states[first:last]
            counts, drawn = _weighted_repeated(
                part.degree, which, weights, positive, fanout, part_states
            )
            all_counts.append(counts)
            all_offsets.append(drawn)
            continue
        else:
            words = _random.word(states[first:last][which], offsets)
            chosen = _race(which, weights, positive, fanout, words, last - first)
        all_counts.append(torch.bincount(which[chosen], minlength=last - first))
        all_offsets.append(offsets[chosen])
    return torch.cat(all_counts), torch.cat(all_offsets)


def _race(
    which: Tensor, weights: Tensor, positive: Tensor, fanout: int, words: Tensor, num_rows: int
) -> Tensor:
    """Edges arrive after exponential times of rate weight; the first ones in a row are drawn.

    That is drawing one after another, each time by weight among those left (Efraimidis and
    Spirakis, Weighted random sampling with a reservoir, 2006). Of equal times the smaller offset is
    first.
    """
    (runners,) = torch.nonzero(positive, as_tuple=True)
    times = _random.exponential(words[runners]) / weights[runners]
    times = times.clamp(max=torch.finfo(torch.float64).max)
    runners = runners[torch.sort(times, stable=True).indices]
    runners = runners[torch.sort(which[runners], stable=True).indices]
    _, rank = _places(torch.bincount(which[runners], minlength=num_rows))
    chosen = torch.zeros_like(positive)
    chosen[runners[rank < fanout]] = True
    return chosen


def _shares(
    degree: Tensor, which: Tensor, weights: Tensor, positive: Tensor
) -> tuple[Tensor, Tensor]:
    """Weights as integers, ceil(w / max * 2^s), and their sums per row, which are below 2^62."""
    weights = torch.where(positive, weights, 0.0)
    largest = torch.zeros(degree.shape[0], dtype=torch.float64, device=degree.device)
    largest.scatter_reduce_(0, which, weights, "amax")
    places = (62 - torch.frexp(degree.double()).exponent.long()).clamp(max=52)
    scale = torch.bitwise_left_shift(torch.ones_like(degree), places).double()
    shares = torch.ceil(weights / largest[which] * scale[which])
    shares = torch.where(positive, shares, 0.0).long()
    return shares, _sums(shares, which, degree.shape[0])


def _weighted_repeated(
    degree: Tensor,
    which: Tensor,
    weights: Tensor,
    positive: Tensor,
    fanout: int,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    shares, totals = _shares(degree, which, weights, positive)
    counts = torch.where(totals > 0, fanout, 0)
    row, number = _places(counts)
    drawn = _random.unit(_random.word(states[row], number))
    targets = torch.floor(drawn * totals[row].double()).long()
    targets = torch.minimum(targets, totals[row] - 1)
    # The drawn edge is the first whose running sum is above the target; rows are halved together.
    starts = degree.cumsum(0) - degree
    running = _running_sums(shares, degree)
    low, high = torch.zeros_like(targets), degree[row] - 1
    while bool((low < high).any()):
        middle = (low + high) >> 1
        above = running[starts[row] + middle] > targets
        high = torch.where(above, middle, high)
        low = torch.where(above, low, middle + 1)
    return counts, low


def _shared(
    degree: Tensor,
    which: Tensor,
    weights: Tensor,
    positive: Tensor,
    fanout: int,
    numbers: Tensor,
) -> Tensor:
    """Keep an edge if its source's number is below min(1, c * weight); see `draw_neighbors`.

    c is the row's own, such that ``fanout`` edges are expected, or all if there are no more. An
    edge with c * weight > 1 is certain; c for the others grows with each that is, so the certain
    ones are found by asking again until there are no more of them.
    """
    num_rows = degree.shape[0]
    shares, totals = _shares(degree, which, weights, positive)
    few = _sums(positive.long(), which, num_rows) <= fanout
    wanted, sums = torch.full_like(totals, fanout), totals
    while True:
        certain = shares * wanted[which] > sums[which]
        now = fanout - _sums(certain.long(), which, num_rows)
        now = torch.where(few, wanted, now)
        if bool((now == wanted).all()):
            break
        wanted, sums = now, totals - _sums(torch.where(certain, shares, 0), which, num_rows)
    likely = numbers * sums[which].double() < (shares * wanted[which]).double()
    return positive & (few[which] | likely)


def _sums(values: Tensor, which: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, dtype=torch.int64, device=values.device).index_add_(
        0, which, values
    )


def _running_sums(values: Tensor, counts: Tensor) -> Tensor:
    """Sums of the values of a row up to and with each; that the whole may wrap cancels out."""
    running = values.cumsum(0)
    starts = counts.cumsum(0) - counts
    before = torch.cat([running.new_zeros(1), running])[starts]
    return running - torch.repeat_interleave(before, counts, output_size=values.shape[0])


def _places(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For counts.sum() places in row order: the number of the row, and the place within it."""
    ends = counts.cumsum(0)
    total = int(ends[-1]) if counts.numel() else 0
    numbers = torch.arange(counts.shape[0], device=counts.device)
    which = torch.repeat_interleave(numbers, counts, output_size=total)
    return which, torch.arange(total, device=counts.device) - (ends - counts)[which]


def _chunks(degree: Tensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows with about _EDGES_AT_ONCE edges each, or one row that has more."""
    ends = degree.cumsum(0)
    first = 0
    while first < degree.shape[0]:
        before = int(ends[first] - degree[first])
        last = int(torch.searchsorted(ends, before + _EDGES_AT_ONCE, right=True))
        last = max(last, first + 1)
        yield first, last
        first = last
