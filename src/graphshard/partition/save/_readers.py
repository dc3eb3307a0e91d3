# SPDX-License-Identifier: Apache-2.0
"""Where nodes that other parts read go inside their part: so that what is sent lies together.

A part sends each of its readers the rows of some nodes, at every layer. Rows that lie one after
the other go as they are; others have to be gathered. So the nodes that no other part reads come
first, and the others by the set of their readers. Sets are taken in the order of the reflected
binary Gray code (F. Gray, "Pulse Code Communication", US patent 2,632,058, 1953), in which one
reader comes or goes at a time: with 2 or 3 parts the rows of each reader are one run, with 4 they
are at most two; and in general those of the readers with the highest digits, which are the ones
that read most, are 1, 1, 2, 4, 8, ... runs at most.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from .._source import GraphSource

NUM_DIGITS = 8
"""Readers of a part that count; more sets than ``2**8`` would leave little of the order inside."""

_SLICE = 1 << 20  # edges looked at together

Places = npt.NDArray[np.uint8]


def places_by_readers(
    source: GraphSource, parts: npt.NDArray[np.integer], num_parts: int
) -> Places:
    """What to sort the nodes of a part by.

    Args:
        source: The graph; an edge is read by the part of its destination.
        parts: ``[num_nodes]``, part of each node, in homogenised order.
        num_parts: Number of parts.

    Returns:
        uint8 ``[num_nodes]``, in homogenised order; 0 for nodes that no other part reads.
    """
    owners = torch.from_numpy(parts).to(torch.int16 if num_parts < 2**15 else torch.int32)
    pairs = torch.zeros(num_parts * num_parts, dtype=torch.int64)
    for _, pair in _cut_edges(source, owners, num_parts):
        pairs += torch.bincount(pair, minlength=num_parts * num_parts)
    digits = _digits(pairs.view(num_parts, num_parts))
    is_read = torch.zeros((source.num_nodes, NUM_DIGITS), dtype=torch.uint8)
    for src, pair in _cut_edges(source, owners, num_parts):
        digit = digits.view(-1)[pair]
        counts = digit < NUM_DIGITS
        is_read.view(-1)[src[counts] * NUM_DIGITS + digit[counts]] = 1
    return _GRAY_PLACES[np.packbits(is_read.numpy(), axis=1)[:, 0]]


def _cut_edges(
    source: GraphSource, owners: torch.Tensor, num_parts: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Some edges at a time: homogenised sources, and ``owner * num_parts + reader`` of each."""
    for relation in range(len(source.canonical_etypes)):
        first_src, first_dst = (
            source.offsets[types[relation]] for types in (source.src_type, source.dst_type)
        )
        src, dst = source.edges(relation)
        for some_src, some_dst in zip(src.split(_SLICE), dst.split(_SLICE), strict=True):
            owner = owners[first_src:].index_select(0, some_src)
            reader = owners[first_dst:].index_select(0, some_dst)
            is_cut = owner != reader
            pair = owner[is_cut].long() * num_parts + reader[is_cut]
            yield some_src[is_cut].long() + first_src, pair


def _digits(pairs: torch.Tensor) -> torch.Tensor:
    """Digit ``[owner, reader]`` from the numbers of edges between them; the highest is 0."""
    order = torch.argsort(pairs, dim=1, descending=True, stable=True)
    return torch.argsort(order, dim=1)


def _gray_places() -> Places:
    """Place of each set of readers in the Gray code: the sum of all its right shifts."""
    places = np.arange(1 << NUM_DIGITS, dtype=np.uint8)
    for shift in (1, 2, 4):
        places ^= places >> shift
    return places


_GRAY_PLACES = _gray_places()
