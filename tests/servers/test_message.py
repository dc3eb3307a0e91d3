# SPDX-License-Identifier: Apache-2.0
"""Messages: what is sent arrives, and what is none is refused. No process group."""

from __future__ import annotations

import json
import random

import pytest
import torch

from graphshard.errors import MessageError
from graphshard.servers import WireMessage
from graphshard.servers._message_stream import MAX_HEADER

TENSORS = [
    torch.arange(7),
    torch.tensor([True, False]),
    torch.randn(3, 4, dtype=torch.float64),
    torch.randn(5, 0, 2),
    torch.randn(9).to(torch.bfloat16),
    torch.randn(2, 6).t(),
    torch.tensor(3, dtype=torch.int8),
]


def decoded(header: bytes, payload: bytes) -> WireMessage:
    message = WireMessage.from_header(header, len(payload))
    assert message.payload is not None
    message.payload.numpy()[:] = bytearray(payload)
    return message


def sent(message: WireMessage) -> WireMessage:
    header, pieces = message.encode()
    return decoded(header, b"".join(pieces))


@pytest.mark.parametrize("number", [0, 1, 2, len(TENSORS)])
def test_what_is_sent_arrives(number: int) -> None:
    fields = {"text": "ä\n", "numbers": [1, 2.5], "none": None}
    found = sent(WireMessage("op", fields, TENSORS[:number]))
    assert (found.op, found.fields) == ("op", fields)
    for one, other in zip(found.tensors, TENSORS[:number], strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_what_is_filled_in_arrives() -> None:
    message = WireMessage.allocate("op", {}, [(t.dtype, tuple(t.shape)) for t in TENSORS])
    for out, tensor in zip(message.tensors, TENSORS, strict=True):
        out.copy_(tensor)
    found = sent(message)
    assert all(torch.equal(a, b) for a, b in zip(found.tensors, TENSORS, strict=True))


def test_a_dtype_without_a_name_cannot_be_sent() -> None:
    with pytest.raises(MessageError, match="complex64"):
        WireMessage("op", {}, [torch.zeros(2, dtype=torch.complex64)]).encode()


def test_a_header_has_a_limit() -> None:
    with pytest.raises(MessageError, match="at most 16777216 bytes"):
        WireMessage("op", {"name": "x" * MAX_HEADER}).encode()


def header(tensors: object, op: object = "op", fields: object = None) -> bytes:
    return json.dumps({"op": op, "fields": fields or {}, "tensors": tensors}).encode()


@pytest.mark.parametrize(
    ("head", "payload"),
    [
        (b"", b""),
        (b"{", b""),
        (b"\xff\xfe", b""),
        (b"[1]", b""),
        (b"[" * 100_000, b""),
        (b"x" * (MAX_HEADER + 1), b""),
        (header([], op=3), b""),
        (header([], fields=[1]), b""),
        (header("abc"), b""),
        (header([3]), b""),
        (header([["float32"]]), b""),
        (header([["float32", 4]]), b"0" * 16),
        (header([["float32", [-1]]]), b""),
        (header([["float32", [True]]]), b"0" * 4),
        (header([["float32", [1.0]]]), b"0" * 4),
        (header([["float32", [2**60]]]), b""),
        (header([["float32", [2**40, 2**40, 0]]]), b""[:0]),
        (header([["float32", [2**47, 2**47]]]), b""),
        (header([["float32", [1] * 17]]), b"0" * 4),
        (header([["float32", [4]]]), b"0" * 15),
        (header([["float32", [4]]]), b"0" * 17),
        (header([["object", [1]]]), b"0" * 8),
        (header([["int8", [1]]] * 5000), b"0" * 5000),
    ],
)
def test_what_is_no_message_is_refused(head: bytes, payload: bytes) -> None:
    with pytest.raises(MessageError):
        decoded(head, payload)


def test_changed_bytes_are_a_message_or_refused() -> None:
    chosen = random.Random(0)
    head, pieces = WireMessage("read", {"names": [["a"]]}, TENSORS[:3]).encode()
    body = b"".join(pieces)
    refused = 0
    for _ in range(3000):
        changed, cut = bytearray(head), body[: chosen.randrange(len(body) + 1)]
        for _ in range(chosen.randrange(1, 4)):
            changed[chosen.randrange(len(changed))] = chosen.randrange(256)
        try:
            found = decoded(bytes(changed), cut if refused % 2 else body)
        except MessageError:
            refused += 1
        else:
            assert sum(t.numel() * t.element_size() for t in found.tensors) <= len(body)
    assert refused > 1000
