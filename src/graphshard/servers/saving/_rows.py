# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in checkpoints: written by the trainers that have them, found by original id.

======================  ===========================================================================
tensor in a file        holds
======================  ===========================================================================
``row/TABLE``           rows of a table
``id/POLICY``           the original ids of rows of that policy, in the same order
``structure/POLICY``    of nodes: a number made of their in-degrees, which another graph has not
======================  ===========================================================================
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ...errors import CheckpointError
from .._cluster import Cluster, RowsRequest
from .._host_graph import pointer_table_of

PIECE_BYTES = 1 << 24
"""Rows are read, compared and written about so many bytes at a time."""
_IDS_AT_ONCE = 1 << 20

Reader: TypeAlias = Callable[[str, int, int], Tensor]
"""Rows ``[start, stop)`` of a table, by its name."""


@dataclass(frozen=True)
class RowStream:
    """Rows that are read while they are written to a file. A `partition.files.RowSource`.

    Args:
        dtype: Of the rows.
        row_shape: Of one.
        start: The first row.
        stop: One past the last.
        read: Gives rows ``[start, stop)``.
    """

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    start: int
    stop: int
    read: Callable[[int, int], Tensor]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.stop - self.start, *self.row_shape))

    def slices(self) -> Iterator[Tensor]:
        for begin, end in pieces(self.start, self.stop, self.dtype, self.row_shape):
            yield self.read(begin, end)


def pieces(
    start: int, stop: int, dtype: torch.dtype, row_shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` in pieces of a few megabytes."""
    most = max(1, PIECE_BYTES // max(1, math.prod(row_shape) * dtype.itemsize))
    for begin in range(start, stop, most):
        yield begin, min(stop, begin + most)


def cluster_reader(cluster: Cluster) -> Reader:
    """Reads rows of any host; those of this one are not copied."""

    def read(name: str, start: int, stop: int) -> Tensor:
        starts, here = cluster.info(name).starts, cluster.here
        rows = cluster.hosts[here].rows(name)
        if rows is not None and starts[here] <= start <= stop <= starts[here + 1]:
            return rows[start - starts[here] : stop - starts[here]]
        return cluster.read([RowsRequest([name], torch.arange(start, stop))])[0]

    return read


def id_table(policy: str) -> str:
    """The table of original ids."""
    return f"{policy}~orig_id"


def policies_in_files(policies: Iterable[str], destinations: Mapping[str, str]) -> list[str]:
    """Policies whose ids are in a checkpoint: those given, and of edges their destinations'."""
    found = set(policies)
    found |= {destinations[policy] for policy in found if policy.startswith("edge~")}
    return sorted(p for p in found if p.startswith(("node~", "edge~")))


class Structure:
    """What tells a node of one graph from that of another: its in-degrees.

    Args:
        tables: Names of all tables.
        destinations: Policy of the edges of each relation to that of the nodes they enter.
        read: Gives rows of tables.
    """

    def __init__(
        self, tables: Iterable[str], destinations: Mapping[str, str], read: Reader
    ) -> None:
        self._read = read
        self._pointers: dict[str, list[str]] = {}
        there = set(tables)
        for edges, nodes in sorted(destinations.items()):
            name = pointer_table_of(edges)
            if name in there:
                self._pointers.setdefault(nodes, []).append(name)

    def of(self, policy: str, starts: Sequence[int], begin: int, end: int) -> Tensor:
        """int64 ``[end - begin]``, one for each of these nodes.

        Args:
            policy: Of the nodes.
            starts: First node of each host, and their number.
            begin: The first node.
            end: One past the last.
        """
        found = torch.zeros(end - begin, dtype=torch.int64)
        for name in self._pointers.get(policy, []):
            salt = hashlib.blake2b(name.encode(), digest_size=7).digest()
            for host in range(len(starts) - 1):
                low, high = max(begin, starts[host]), min(end, starts[host + 1])
                if low < high:  # each host has one pointer more than nodes
                    pointer = self._read(name, low + host, high + host + 1).to(torch.int64)
                    degrees = pointer[1:] - pointer[:-1]
                    found[low - begin : high - begin] += degrees * int.from_bytes(salt, "little")
        return found


class SavedRows:
    """Rows of one policy in the files of a checkpoint, by original id.

    Args:
        files: Tensors of each file.
        policy: Of the rows.
        has_ids: Whether rows have original ids; else they are in order.
    """

    def __init__(
        self, files: Sequence[Mapping[str, Tensor]], policy: str, has_ids: bool = True
    ) -> None:
        self._files, self._policy, self._has_ids = files, policy, has_ids

    def find(self, original: Tensor) -> Tensor:
        """Places of rows among those of all files: int64 ``[n]``.

        Args:
            original: Their ids, int64 ``[n]``.

        Raises:
            CheckpointError: Some are not there.
        """
        if not self._has_ids:
            return original
        ascending, order = torch.sort(original)
        places = torch.full_like(original, -1)
        first = 0
        for file in self._files:
            ids = file[f"id/{self._policy}"]
            for begin in range(0, len(ids) if len(original) else 0, _IDS_AT_ONCE):
                chunk = ids[begin : begin + _IDS_AT_ONCE]
                slot = torch.searchsorted(ascending, chunk).clamp_(max=len(original) - 1)
                hits = (ascending[slot] == chunk).nonzero().view(-1)
                places[order[slot[hits]]] = first + begin + hits
            first += len(ids)
        missing = (places < 0).nonzero().view(-1)
        if missing.numel():
            raise CheckpointError(
                f"{missing.numel()} rows of {self._policy} are not in the checkpoint, such as that "
                f"of original id {int(original[missing[0]])}; it is of another graph"
            )
        return places

    def read(self, key: str, places: Tensor) -> Tensor:
        """Rows of one tensor of the files, from what `find` gave.

        Args:
            key: Its name in the files.
            places: int64 ``[n]``.
        """
        first, found, out = 0, 0, None
        for file in self._files:
            rows = file[key]
            inside = (places >= first) & (places < first + len(rows))
            count = int(inside.sum())
            if count == len(places):
                return _chosen(rows, places - first)
            if count:
                if out is None:
                    out = torch.empty((len(places), *rows.shape[1:]), dtype=rows.dtype)
                out[inside] = _chosen(rows, places[inside] - first)
                found += count
            first += len(rows)
        assert out is not None and found == len(places)
        return out


def _chosen(rows: Tensor, places: Tensor) -> Tensor:
    """``rows[places]``, not copied where they follow each other."""
    count = len(places)
    if count and int(places[-1]) - int(places[0]) == count - 1:
        begin = int(places[0])
        if torch.equal(places, torch.arange(begin, begin + count)):
            return rows[begin : begin + count]
    return rows.index_select(0, places)
