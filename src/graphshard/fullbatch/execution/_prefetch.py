# SPDX-License-Identifier: Apache-2.0
"""Arrivals: the source rows of one shard after the other, with the next ones under way."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from typing import TypeAlias

from torch import Tensor

from ...comm import Pending
from ...errors import RankError
from ..lazy import LeafKey
from ..topology import ColumnBlock
from ._transports import RowTransport

SourceRows: TypeAlias = dict[LeafKey, Tensor]
"""What a visit has of each source leaf."""

Visit: TypeAlias = tuple[int, ColumnBlock]
"""A step of a pass, and the columns to take in it."""

Arrival: TypeAlias = tuple[int, ColumnBlock, SourceRows]
"""A visit whose rows are here."""


class Arrivals:
    """Where a pass gets its source rows from.

    Args:
        transport: How remote rows come.
        whole: Own rows of each source leaf.
        axes: Dimension of each leaf that blocks are cut along; None or absent for whole ones.
        needs_grad: Whether gradients of a leaf's rows will be returned.
        known: Rows of the only remote shard that are here already.
    """

    def __init__(
        self,
        transport: RowTransport,
        whole: SourceRows,
        axes: Mapping[LeafKey, int | None],
        needs_grad: Mapping[LeafKey, bool],
        known: SourceRows,
    ) -> None:
        self._transport, self._whole, self._axes = transport, whole, axes
        self._needs_grad, self._known = needs_grad, known

    def walk(self, visits: Sequence[Visit], prefetch: int) -> Generator[Arrival, None, None]:
        """Each visit with its source rows. Close it after an error, for what is under way.

        Args:
            visits: The own shard first, then remote ones, each in all its blocks.
            prefetch: For how many visits rows are under way while one is worked on.
        """
        rows = dict(self._whole)
        under_way: deque[tuple[list[LeafKey], Pending]] = deque()
        started = 1  # the rows of the first visit are here
        try:
            for number, (step, block) in enumerate(visits):
                if number and self._whole:
                    if not under_way:
                        under_way.append(self._start(visits[number]))
                        started = number + 1
                    arriving, pending = under_way.popleft()
                    if step and block.is_first:
                        rows |= self._known
                    rows |= zip(arriving, pending.wait(), strict=True)
                    del pending
                while self._whole and started < len(visits) and started <= number + prefetch:
                    under_way.append(self._start(visits[started]))
                    started += 1
                yield step, block, rows
                # Before the next ones are waited for. What is not cut came with the first block
                # of its shard, and stays for the others.
                if number + 1 < len(visits):
                    replaced = self._renewed(visits[number + 1][1])
                    rows = {key: t for key, t in rows.items() if key not in replaced}
        finally:
            # After an error in the middle: no message of this pass may meet those of a later one.
            for _, pending in under_way:
                with contextlib.suppress(RankError):
                    pending.wait()

    def _start(self, visit: Visit) -> tuple[list[LeafKey], Pending]:
        step, block = visit
        keys = [key for key in self._renewed(block) if key not in self._known]
        parts = [block.of(self._whole[key], self._axes.get(key)) for key in keys]
        needs_grad = [self._needs_grad[key] for key in keys]
        return keys, self._transport.start_fetch(step, parts, needs_grad)

    def _renewed(self, block: ColumnBlock) -> list[LeafKey]:
        """Source leaves that change with a visit: all with a first block, then those cut."""
        return [key for key in self._whole if block.is_first or self._axes.get(key) is not None]
