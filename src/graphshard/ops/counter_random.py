# SPDX-License-Identifier: Apache-2.0
"""Random numbers that are functions of what they are for: a key, an id, and a counter.

There is no generator state to pass around, so a number comes out the same on any rank, in any
thread and in any order of asking. Words are 64 bits, held in int64 tensors, whose products wrap;
numbers made of words use integer arithmetic or float64 ``+ - * /`` in a written order, so that
csrc/sampling/random.h, which says the same in C++, agrees bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 2**64


def _signed(word: int) -> int:
    word %= _WORD
    return word - _WORD if word >= _WORD // 2 else word


GAMMA = _signed(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio, odd: the step of a counter
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)

# What a key is mixed with, so that draws by row and draws by source share no stream.
ROW_DOMAIN = 0x5851F42D4C957F2D
SOURCE_DOMAIN = 0xD1342543DE82EF95

_LN2 = 0.6931471805599453
_SQRT2 = 1.4142135623730951
_LOG_TERMS = 11


def key_state(key: int, domain: int) -> int:
    """The state that a key starts from in one of the domains above, as a signed 64-bit number."""
    word = (key ^ domain) % _WORD
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        word = (word ^ (word >> shift)) * factor % _WORD
    return _signed(word ^ (word >> 31))


def mix(words: Tensor) -> Tensor:
    """A bijection of 64-bit words that looks random: the finalizer of splitmix64."""
    words = (words ^ _shift(words, 30)) * _FIRST
    words = (words ^ _shift(words, 27)) * _SECOND
    return words ^ _shift(words, 31)


def states(start: int, ids: Tensor) -> Tensor:
    """One state per id, all of them from the state of one key."""
    return mix(ids * GAMMA + start)


def word(state: Tensor, counter: Tensor | int) -> Tensor:
    """Word number ``counter`` (from 0) of each state."""
    if isinstance(counter, int):
        return mix(state + _signed((counter + 1) * GAMMA))
    return mix(state + (counter + 1) * GAMMA)


def below(words: Tensor, bound: Tensor | int) -> Tensor:
    """An integer in [0, bound) from each word: floor(word * bound / 2^64), for bounds < 2^31."""
    high = _shift(words, 32) * bound
    low = (words & 0xFFFFFFFF) * bound
    return (high + (low >> 32)) >> 32


def unit(words: Tensor) -> Tensor:
    """A float64 in [0, 1) from each word, a multiple of 2^-53."""
    return _shift(words, 11).double() * 2.0**-53


def exponential(words: Tensor) -> Tensor:
    """A standard exponential variable from each word: -log(u), u in (0, 1] a multiple of 2^-53.

    ``u = 2^e f`` with f in [sqrt(1/2), sqrt(2)]; ``log f = 2 atanh(s)``, ``s = (f - 1) / (f + 1)``,
    by its series, cut where the rest is below half a unit in the last place.
    """
    bits = (_shift(words, 11) + 1).double().view(torch.int64)
    exponent = (bits >> 52) - (1023 + 53)
    fraction = ((bits & (2**52 - 1)) | (1023 << 52)).view(torch.float64)
    large = fraction > _SQRT2
    fraction = torch.where(large, fraction * 0.5, fraction)
    exponent = exponent + large
    s = (fraction - 1.0) / (fraction + 1.0)
    square = s * s
    series = torch.full_like(s, 2.0 / (2 * _LOG_TERMS + 1))
    for term in reversed(range(_LOG_TERMS)):
        series = series * square + 2.0 / (2 * term + 1)
    return -(exponent.double() * _LN2 + s * series)


def _shift(words: Tensor, count: int) -> Tensor:
    """To the right, filling with zeros."""
    return (words >> count) & ((1 << (64 - count)) - 1)
