# SPDX-License-Identifier: Apache-2.0
"""Messages: what is sent arrives, and what is none is refused. No process group.

The oracle for tensors without their zeros is NumPy.
"""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from graphshard._base.kernels import extension_available, force_extension
from graphshard.errors import MessageError
from graphshard.servers import WireMessage
from graphshard.servers._message_stream import MAX_HEADER, MessageRoom

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
    room, at = MessageRoom.from_header(header, len(payload), 1 << 20), 0
    for piece in room.pieces:
        piece[:] = payload[at : at + len(piece)]
        at += len(piece)
    assert at == len(payload)
    return room.filled()


def sent(message: WireMessage, leave_out_zeros: bool = False) -> WireMessage:
    header, pieces = message.encode(leave_out_zeros=leave_out_zeros)
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


# -- without zeros ---------------------------------------------------------------------------------

needs_extension = pytest.mark.skipif(
    not extension_available(), reason="without the extension no zeros are left out"
)
LONG = 30_000  # numbers of one byte and more


def sparse(dtype: torch.dtype, share: float, *shape: int) -> Tensor:
    """Numbers of which such a share is zero."""
    seeded = torch.Generator().manual_seed(0)
    rows = torch.randn(*shape, generator=seeded)
    rows[torch.rand(shape, generator=seeded) < share] = 0
    return (rows * 1000).to(dtype)


def bytes_sent(tensor: Tensor) -> int:
    """Of a long tensor without its zeros."""
    words = {1: np.uint8, 2: np.uint16}.get(tensor.element_size(), np.uint32)
    values = tensor.contiguous().view(-1).view(torch.uint8).numpy().view(words)
    return int(np.count_nonzero(values)) * values.itemsize + (values.size + 63) // 64 * 8


@needs_extension
@pytest.mark.parametrize("is_filled_in", [False, True])
@pytest.mark.parametrize("native", [True, False])
def test_long_tensors_go_without_their_zeros(is_filled_in: bool, native: bool) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int8, torch.bool)
    tensors = [sparse(dtype, 0.7, LONG, 3) for dtype in dtypes]
    full = [sparse(torch.float32, 0.0, LONG), sparse(torch.float32, 0.7, 10)]
    tensors = [full[1], tensors[0], full[0], *tensors[1:], full[1], tensors[0].view(3, -1).t()]
    message = WireMessage("op", {}, tensors)
    if is_filled_in:
        message = WireMessage.allocate("op", {}, [(t.dtype, tuple(t.shape)) for t in tensors])
        for out, tensor in zip(message.tensors, tensors, strict=True):
            out.copy_(tensor)
    head, pieces = message.encode(leave_out_zeros=True)
    entries = json.loads(head)["tensors"]
    assert [entry[2] for entry in entries if len(entry) == 3] == [
        bytes_sent(t) for t in tensors if t is not full[0] and t is not full[1]
    ]
    saved = sum(t.nbytes - entry[2] for t, entry in zip(tensors, entries, strict=True) if entry[2:])
    assert sum(map(len, pieces)) == message.num_bytes - saved
    with force_extension(native):
        room, at, payload = (
            MessageRoom.from_header(head, message.num_bytes - saved, message.num_bytes),
            0,
            b"".join(pieces),
        )
        for piece in room.pieces:
            piece[:] = payload[at : at + len(piece)]
            at += len(piece)
        arrived = room.filled()
    for found, expected in zip(arrived.tensors, tensors, strict=True):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


def test_what_is_sent_as_it_is() -> None:
    tensors = [sparse(torch.float32, 0.9, 1000), sparse(torch.float32, 0.1, LONG)]
    head, _ = WireMessage("op", {}, tensors).encode(leave_out_zeros=True)
    assert [len(entry) for entry in json.loads(head)["tensors"]] == [2, 2]
    head, _ = WireMessage("op", {}, [sparse(torch.float32, 0.9, LONG)]).encode()
    assert [len(entry) for entry in json.loads(head)["tensors"]] == [2]


def test_room_is_made_for_as_many_bytes_as_are_legal_with_all_zeros() -> None:
    head = header([["float32", [1 << 20], (1 << 20) // 8]])
    assert MessageRoom.from_header(head, (1 << 20) // 8, 1 << 22).shorter[0][1] == 1 << 17
    with pytest.raises(MessageError, match="at most 4194303 bytes"):
        MessageRoom.from_header(head, (1 << 20) // 8, (1 << 22) - 1)


@pytest.mark.parametrize("size", [True, None, "9", 1.5, 0, -8, 400, 401, 2**70, [8]])
def test_what_is_no_size_of_a_tensor_without_its_zeros_is_refused(size: object) -> None:
    with pytest.raises(MessageError, match="bytes"):
        decoded(header([["float32", [100], size]]), bytes(9))


@pytest.mark.parametrize("native", [True, False])
def test_changed_bytes_of_tensors_without_zeros_are_a_message_or_refused(native: bool) -> None:
    if native and not extension_available():
        pytest.skip("there is no extension")
    words = np.arange(100, dtype=np.uint32) % 3
    bits = np.packbits(words != 0, bitorder="little").tobytes().ljust(16, b"\0")
    body = words[words != 0].tobytes() + bits
    head = header([["float32", [100], len(body)]])
    assert decoded(head, body).tensors[0].view(torch.int32).tolist() == words.tolist()
    chosen, refused = random.Random(0), 0
    with force_extension(native):
        for _ in range(2000):
            changed, sent_as = bytearray(body), len(body)
            if chosen.random() < 0.5:
                sent_as = chosen.randrange(1, 400)
                changed = changed[:sent_as].ljust(sent_as, b"x")
            for _ in range(chosen.randrange(3)):
                changed[chosen.randrange(len(changed))] = chosen.randrange(256)
            try:
                found = decoded(header([["float32", [100], sent_as]]), bytes(changed))
            except MessageError:
                refused += 1
            else:
                kept = np.unpackbits(np.frombuffer(changed[-16:], np.uint8)).sum()
                assert sent_as == 4 * kept + 16
                assert found.tensors[0].count_nonzero() <= kept
    assert 500 < refused < 2000
