# SPDX-License-Identifier: Apache-2.0
"""Hostile versions of an argument: what someone passes by mistake, or on purpose. No process."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Change = Callable[[Tensor, random.Random], Any]

IDS = (-1, -2, 2**31 - 1, 2**31, 2**63 - 1, -(2**63))
#: No number here is a size that memory has just room for: what is asked for is refused, or small.
INTS = (-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 2**50, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**70)
FLOATS = (float("nan"), float("inf"), -float("inf"), -1.0, 0.0, 1e308, 5e-324)
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
OTHERS = (None, "", "nope", 3.5, True, [], [1.0], {}, object())


class Tagged(Tensor):
    """A subclass that behaves."""


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().resolve_neg().clone()


def _strided(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same entries, apart in memory."""
    if tensor.dim() == 0:
        return tensor
    place = rng.randrange(tensor.dim())
    return _plain(tensor).repeat_interleave(2, place).movedim(place, 0)[::2].movedim(0, place)


def _transposed(tensor: Tensor, rng: random.Random) -> Tensor:
    order = list(range(tensor.dim()))
    rng.shuffle(order)
    back = [order.index(place) for place in range(tensor.dim())]
    return _plain(tensor).permute(order).contiguous().permute(back)


def _unaligned(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same entries, from an odd address on."""
    if tensor.numel() == 0:
        return tensor
    held = bytearray(tensor.numel() * tensor.element_size() + 1)
    moved = torch.frombuffer(held, dtype=tensor.dtype, count=tensor.numel(), offset=1)
    return moved.copy_(_plain(tensor).reshape(-1)).view(tensor.shape)


def _negated(tensor: Tensor, rng: random.Random) -> Tensor:
    """The same numbers, or those of the other sign, as a view whose negation is put off."""
    if tensor.dtype == torch.bool:
        return tensor
    plain = _plain(tensor)
    return torch._neg_view(plain.neg() if rng.random() < 0.7 else plain)


def _conjugate(tensor: Tensor, rng: random.Random) -> Tensor:
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor
    plain = _plain(tensor)
    return torch.complex(plain, plain.neg()).conj().imag  # a negation that is put off


def _one_entry(values: Sequence[Any]) -> Change:
    def change(tensor: Tensor, rng: random.Random) -> Tensor:
        fits = [v for v in values if not _overflows(v, tensor.dtype)]
        if tensor.numel() == 0 or not fits:
            return tensor
        changed = _plain(tensor)
        changed.view(-1)[rng.randrange(tensor.numel())] = rng.choice(fits)
        return changed

    return change


def _overflows(value: Any, dtype: torch.dtype) -> bool:
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return False
    info = torch.iinfo(dtype)
    return not info.min <= value <= info.max


def _past_the_end(tensor: Tensor, rng: random.Random) -> Tensor:
    if tensor.numel() == 0 or tensor.is_floating_point():
        return tensor
    changed = _plain(tensor)
    changed.view(-1)[rng.randrange(tensor.numel())] = int(tensor.max()) + rng.randint(1, 3)
    return changed


def _longer(tensor: Tensor, rng: random.Random) -> Tensor:
    return torch.cat([_plain(tensor), _plain(tensor[-1:])]) if tensor.dim() else tensor


def _wider(tensor: Tensor, rng: random.Random) -> Tensor:
    return torch.cat([_plain(tensor)] * 2, -1) if tensor.dim() else tensor


def _wanting_gradient(tensor: Tensor, rng: random.Random) -> Tensor:
    return _plain(tensor).requires_grad_() if tensor.is_floating_point() else tensor


def _quantized(tensor: Tensor, rng: random.Random) -> Tensor:
    return torch.quantize_per_tensor(_plain(tensor).float(), 0.5, 0, torch.qint8)


#: Another length or shape; what the numbers are stays.
SHAPES: dict[str, Change] = {
    "shorter": lambda t, r: t[:-1] if t.dim() else t,
    "longer": _longer,
    "narrower": lambda t, r: t[..., :-1] if t.dim() else t,
    "wider": _wider,
    "no columns": lambda t, r: t[..., :0] if t.dim() else t,
    "empty": lambda t, r: t[:0] if t.dim() else t,
    "one more dimension": lambda t, r: t.unsqueeze(r.randint(0, t.dim())),
    "flat": lambda t, r: t.reshape(-1),
    "no dimension": lambda t, r: t.reshape(-1)[0] if t.numel() else t,
}
#: The same numbers, or some of them, in another kind of tensor.
KINDS: dict[str, Change] = {
    "strided": _strided,
    "transposed": _transposed,
    "unaligned": _unaligned,
    "negated": _negated,
    "conjugate": _conjugate,
    "expanded": lambda t, r: t[:1].expand(t.shape) if t.dim() and t.numel() else t,
    "wanting gradient": _wanting_gradient,
    "subclass": lambda t, r: _plain(t).as_subclass(Tagged),
    "dtype": lambda t, r: _plain(t).to(r.choice(DTYPES)),
    "meta": lambda t, r: t.to("meta"),
    "sparse": lambda t, r: _plain(t).to_sparse() if t.dim() else t,
    "quantized": _quantized,
    "numpy": lambda t, r: _array(t),
    "list": lambda t, r: t.tolist(),
    "other": lambda t, r: r.choice(OTHERS),
}
#: Other numbers.
CONTENTS: dict[str, Change] = {
    "not finite": lambda t, r: _one_entry(FLOATS)(t, r) if t.is_floating_point() else t,
    "a wild id": lambda t, r: t if t.is_floating_point() else _one_entry(IDS)(t, r),
    "past the end": _past_the_end,
    "reversed": lambda t, r: _plain(t).flip(0) if t.dim() else t,
    "all equal": lambda t, r: _plain(t[-1:]).repeat_interleave(t.shape[0], 0) if t.dim() else t,
}


def _array(tensor: Tensor) -> Any:
    return _plain(tensor).float().numpy() if tensor.dtype == torch.bfloat16 else _numpy(tensor)


def _numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = _plain(tensor).numpy()
    return found


def _backwards(tensor: Tensor, rng: random.Random) -> Any:
    """An array of negative steps: what the binding layer may meet, and torch cannot hold."""
    if tensor.dtype == torch.bfloat16 or tensor.dim() == 0:
        return tensor
    return _numpy(tensor)[::-1] if rng.random() < 0.5 else _numpy(tensor)[..., ::-1]


def _read_only(tensor: Tensor, rng: random.Random) -> Any:
    if tensor.dtype == torch.bfloat16:
        return tensor
    array = _numpy(tensor)
    array.setflags(write=False)
    return array


#: For the binding layer alone.
ARRAYS: dict[str, Change] = {"backwards": _backwards, "read-only": _read_only}


def change(
    value: Any, rng: random.Random, peers: Sequence[Tensor], changes: dict[str, Change]
) -> tuple[str, Any]:
    """What was done to ``value``, and what became of it.

    Args:
        value: An argument as it should be.
        rng: Decides.
        peers: Tensors among the other arguments, to be passed in its place.
        changes: What may be done to a tensor.
    """
    if rng.random() < 0.02:
        return "other", rng.choice(OTHERS)
    if isinstance(value, Tensor) and (value.layout != torch.strided or value.is_quantized):
        return "as it is", value  # changed before; torch itself ends the process over some of these
    if isinstance(value, Tensor):
        if peers and rng.random() < 0.1:
            peer = rng.choice(peers)
            return ("peer", peer) if rng.random() < 0.5 else ("slice of a peer", peer[1:])
        name = rng.choice(list(changes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that torch gives up
            return name, changes[name](value, rng)
    if isinstance(value, bool):
        return "bool", not value
    if isinstance(value, int):
        return "int", rng.choice(INTS)
    if isinstance(value, float):
        return "float", rng.choice(FLOATS)
    if isinstance(value, str):
        return "str", rng.choice(("", "nope", "add", "div", "dot", "sum", "max", "u", "e", "src"))
    if isinstance(value, torch.dtype):
        return "dtype", rng.choice(DTYPES)
    if isinstance(value, (list, tuple)) and value:
        changed = list(value)
        place = rng.randrange(len(changed))
        name, changed[place] = change(changed[place], rng, peers, changes)
        return name, changed if rng.random() < 0.8 else changed[:-1]
    return "other", rng.choice(OTHERS)
