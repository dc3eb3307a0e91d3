# SPDX-License-Identifier: Apache-2.0
"""WireMessage: a name, some plain values and some tensors, as a header and one run of bytes.

::

    header   JSON, UTF-8: {"op": str, "fields": {...}, "tensors": [[dtype, shape], ...]}
    payload  the tensors' rows back to back, each from a multiple of 64 bytes on

Nothing in a message is code, and decoding checks every length before it makes a tensor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.kernels import empty
from ...errors import MessageError

Spec: TypeAlias = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a tensor."""

MAX_HEADER = 1 << 24  # some 60,000 tables are listed in one
MAX_TENSORS = 4096
MAX_EXTENTS = 16
_ALIGNMENT = 64
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class WireMessage:
    """What one side says to the other.

    Args:
        op: What is asked for, or ``"error"``.
        fields: Values that JSON has.
        tensors: Dense, on the CPU.
        payload: uint8, the memory that ``tensors`` are views of, laid out as on the wire; None
            where they lie elsewhere.
        sender: Id of the client that a server has it from; not sent.
        max_answer: Most bytes of the tensors that answer it, where it came over the wire; not sent.
    """

    op: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    tensors: Sequence[Tensor] = ()
    payload: Tensor | None = None
    sender: str = ""
    max_answer: int | None = None

    def check_answer(self, specs: Sequence[Spec]) -> None:
        """Raise unless tensors can answer this request; to be called before they are gathered.

        Raises:
            MessageError: They take more than a message has room for.
        """
        size = _layout(specs)[1]
        if self.max_answer is not None and size > self.max_answer:
            raise MessageError(
                f"the answer to {self.op!r:.80} has at most {self.max_answer} bytes (it would have "
                f"{size}); ask for fewer rows at once"
            )

    @classmethod
    def allocate(cls, op: str, fields: Mapping[str, Any], specs: Sequence[Spec]) -> WireMessage:
        """A message whose tensors are to be filled in, where they are sent from."""
        offsets, size = _layout(specs)
        payload = empty([size], torch.uint8)
        tensors = [_view(payload, spec, at) for spec, at in zip(specs, offsets, strict=True)]
        return cls(op, fields, tensors, payload)

    def encode(self) -> tuple[bytes, list[memoryview]]:
        """Header, and the payload in pieces that follow each other; tensors are not copied.

        Raises:
            MessageError: A dtype that cannot be sent, or a header that is too long.
        """
        specs = [(tensor.dtype, tuple(tensor.shape)) for tensor in self.tensors]
        for dtype, _ in specs:
            check_dtype(dtype)
        header = json.dumps(
            {
                "op": self.op,
                "fields": self.fields,
                "tensors": [[_NAMES[dtype], list(shape)] for dtype, shape in specs],
            }
        ).encode()
        if len(header) > MAX_HEADER:
            raise MessageError(
                f"the header of a message must have at most {MAX_HEADER} bytes (got "
                f"{len(header)}); use shorter names, or ask for fewer of them at once"
            )
        if self.payload is not None:
            return header, [bytes_of(self.payload)]
        pieces, end = [], 0
        for tensor, offset in zip(self.tensors, _layout(specs)[0], strict=True):
            pieces += [memoryview(bytes(offset - end)), bytes_of(tensor)]
            end = offset + len(pieces[-1])
        return header, [piece for piece in pieces if len(piece)]

    @classmethod
    def from_header(cls, header: bytes, size: int) -> WireMessage:
        """The message that a header describes, with room for its payload.

        Args:
            header: As `encode` makes it.
            size: Bytes of the payload that follows; to be received into ``payload``.

        Raises:
            MessageError: It is none, or the tensors that it describes have another size.
        """
        if len(header) > MAX_HEADER:
            raise MessageError(f"a header has {len(header)} bytes; at most {MAX_HEADER} are legal")
        try:
            content = json.loads(header)
            op, fields, listed = content["op"], content["fields"], content["tensors"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise MessageError("a header must be JSON with op, fields and tensors") from None
        if not (isinstance(op, str) and isinstance(fields, dict) and isinstance(listed, list)):
            raise MessageError("a header must hold a text, an object and a list")
        if len(listed) > MAX_TENSORS:
            raise MessageError(f"a message has at most {MAX_TENSORS} tensors (got {len(listed)})")
        specs = [_spec(entry) for entry in listed]
        expected = _layout(specs)[1]
        if expected != size:
            raise MessageError(f"the tensors of a message take {expected} bytes (got {size} bytes)")
        return cls.allocate(op, fields, specs)


def check_dtype(dtype: torch.dtype) -> None:
    """Raise unless tensors of a dtype can be sent."""
    if dtype not in _NAMES:
        raise MessageError(
            f"tensors of {', '.join(_DTYPES)} can be sent (got {dtype}); convert it first"
        )


def check_shape(shape: Sequence[Any]) -> None:
    """Raise unless tensors of a shape can be sent.

    Raises:
        MessageError: It has too many extents, or some that are too large.
    """
    is_short = len(shape) <= MAX_EXTENTS
    if not is_short or not all(type(extent) is int and 0 <= extent < 2**48 for extent in shape):
        raise MessageError(
            f"the shape of a tensor has at most {MAX_EXTENTS} extents, whole numbers of 0 or more "
            f"(got {len(shape)}: {list(shape[:20])!s:.80})"
        )
    if math.prod(max(extent, 1) for extent in shape) >= 2**48:
        raise MessageError(f"a tensor has less than 2^48 elements (got shape {tuple(shape)})")


def dtype_name(dtype: torch.dtype) -> str:
    """How a message names a dtype."""
    check_dtype(dtype)
    return _NAMES[dtype]


def dtype_named(name: Any) -> torch.dtype:
    """The dtype of a name.

    Raises:
        MessageError: There is none.
    """
    if not isinstance(name, str) or name not in _DTYPES:
        raise MessageError(f"unknown dtype {name!r:.80}; known are {', '.join(_DTYPES)}")
    return _DTYPES[name]


def _spec(entry: Any) -> Spec:
    if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], list)):
        raise MessageError("a tensor is described by its dtype and shape")
    name, shape = entry
    check_shape(shape)
    return dtype_named(name), tuple(shape)


def _layout(specs: Sequence[Spec]) -> tuple[list[int], int]:
    """First byte of each tensor, and the length of all."""
    offsets, end = [], 0
    for dtype, shape in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        offsets.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    return offsets, end


def _view(payload: Tensor, spec: Spec, offset: int) -> Tensor:
    dtype, shape = spec
    size = math.prod(shape) * dtype.itemsize
    return payload[offset : offset + size].view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, which is copied only if it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
