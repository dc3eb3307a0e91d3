# SPDX-License-Identifier: Apache-2.0
"""announce: how many rows each rank will ask of each other one, and whether all ask alike.

One small exchange goes ahead of every round of questions and answers. Besides the sizes it carries
what would else cost a collective of its own: that a rank's check has failed, that ranks ask for
different things, and that some rank lacks something which only all together can make.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor

from ..comm.collectives import all_to_all, verify
from ..comm.group import GroupState

_FAILED = 1
_WORDS = 2
_BYTES = 4
_LIMIT = 2**31


def announce(
    state: GroupState,
    what: str,
    signature: str,
    error: Exception | None,
    sizes: Tensor,
    lacking: int = 0,
) -> tuple[Tensor, int]:
    """Exchange sizes; every rank must call.

    Args:
        state: The group.
        what: What the round is, for errors: "what neighbours are drawn".
        signature: What must be equal on all ranks.
        error: What this rank's check found, or None.
        sizes: int64 ``[world_size, k]``, for each rank k numbers below 2^31.
        lacking: Bits that say what this rank lacks.

    Returns:
        int64 ``[world_size, k]``, what each rank announced to this one; and the bits that any rank
        has set, this one included.

    Raises:
        Exception: On every rank, what a rank's check found; see `graphshard.comm.share_error`.
        ValueError: On every rank, if the signatures differ.
    """
    if state.world_size == 1:
        if error is not None:
            raise error
        return sizes, lacking
    check = zlib.crc32(signature.encode()) % _LIMIT
    words = torch.empty((state.world_size, _WORDS + sizes.shape[1]), dtype=torch.int32)
    words[:, 0] = lacking * 2 + (_FAILED if error is not None else 0)
    words[:, 1] = check
    words[:, _WORDS:] = sizes
    splits = [words.shape[1]] * state.world_size
    arrived = all_to_all(state, words.view(-1), splits, splits, what).view_as(words)
    flags = 0
    for word in arrived[:, 0].tolist():
        flags |= word
    if flags & _FAILED or bool((arrived[:, 1] != check).any()):
        verify(state, signature, what, error)
    return arrived[:, _WORDS:].to(torch.int64), flags // 2


def bytes_announced(world_size: int, num_sizes: int) -> int:
    """Bytes that a rank sends in one call, ``num_sizes`` being k."""
    return (world_size - 1) * _BYTES * (_WORDS + num_sizes)
