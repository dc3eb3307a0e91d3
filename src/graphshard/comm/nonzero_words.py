# SPDX-License-Identifier: Apache-2.0
"""Messages without the zeros in them.

Rows that come out of a ReLU are half of zeros, those behind a dropout three quarters, and rows of
bags of words are little else. A link between hosts is slower than a pass over memory by far, so a
long message is sent without its zeros where it has many: first the words that are not zero, then a
bit a word that says where they belong. Nothing is lost: a word is a number of its dtype, or half of
a wider one, and only that of which all bits are zero is left out, not -0.0.

Whether that is so is decided by the sender, for each message, by what is in it. The receiver has
room for the message as it is; gloo takes a shorter one over TCP, as it does on Linux, where libuv,
elsewhere, waits for all of it. How many bytes came it learns beside it.
Graph servers and their trainers do the same over sockets of their own.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch import Tensor

from .._base.kernels import empty, kernels_for

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""By their bytes."""

_TAKES_SHORT_MESSAGES = sys.platform == "linux"


def word_bytes(*tensors: Tensor) -> int:
    """Bytes of the words that messages of such numbers are made of."""
    return min(4, *(tensor.element_size() for tensor in tensors))


def without_zeros(message: Tensor, num_bytes: int) -> Tensor | None:
    """The words of a message that are not zero, and where they are; None where that gains little.

    Args:
        message: uint8 ``[n]`` on the CPU, whole words.
        num_bytes: Of a word: 1, 2 or 4.

    Returns:
        uint8, shorter than the message.
    """
    kernels = kernels_for(message.device)
    if kernels is None or not _TAKES_SHORT_MESSAGES:
        return None
    words = message.view(_WORDS[num_bytes])
    bits = torch.empty((words.numel() + 63) // 64, dtype=torch.int64)
    room = words.numel() // 8 * 7 + 64
    packed = empty((room * num_bytes + bits.nbytes,), torch.uint8)
    count = kernels.pack_words(words, packed[: room * num_bytes].view(words.dtype), bits)
    end = count * num_bytes
    if count < 0 or end + bits.nbytes >= message.numel():
        return None
    packed[end : end + bits.nbytes] = bits.view(torch.uint8)
    return packed[: end + bits.nbytes]


def put_zeros(message: Tensor, size: int, num_bytes: int) -> None:
    """Undo `without_zeros`, in place.

    Args:
        message: uint8 ``[n]``, of which the first bytes came.
        size: How many.

    Raises:
        ValueError: They are not what `without_zeros` makes.
    """
    words = message.view(_WORDS[num_bytes])
    num_words = words.numel()
    count, rest = divmod(size - (num_words + 63) // 64 * 8, num_bytes)
    if 0 <= count <= num_words and rest == 0 and size < message.numel():
        bits = message[count * num_bytes : size].clone().view(torch.int64)
        kernels = kernels_for(message.device)
        if (
            _unpack(words, count, bits)
            if kernels is None
            else kernels.unpack_words(words, count, bits)
        ):
            return
    raise ValueError(f"a message of {message.numel()} bytes came as {size} that are not its words")


def _unpack(words: Tensor, count: int, bits: Tensor) -> bool:
    """The extension's ``unpack_words``."""
    is_kept = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little").astype(bool)
    if is_kept.sum() != count or is_kept[words.numel() :].any():
        return False
    kept = words[:count].clone()
    words.zero_()
    words[torch.from_numpy(is_kept[: words.numel()])] = kept
    return True
