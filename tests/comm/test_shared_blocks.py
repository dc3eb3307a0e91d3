# SPDX-License-Identifier: Apache-2.0
"""The blocks themselves, written and read by one process as two ranks. No process group."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from graphshard._base.kernels import extension_available
from graphshard.comm._shared_memory import SharedBlocks, SharedPeer

pytestmark = pytest.mark.skipif(
    not extension_available() or not hasattr(os, "memfd_create"),
    reason="needs the extension, and Linux",
)

MEGABYTE = 1 << 20


@pytest.fixture
def ranks():
    """Rank 0 writes, ranks 1 and 2 read."""
    found = [SharedBlocks.make(rank, 3) for rank in range(3)]
    assert all(found)
    for blocks in found:
        blocks.peers.extend(other.me for other in found)
    yield found
    for blocks in found:
        blocks.leave(0.0)


def write(blocks, size, value, readers):
    tensor = blocks.empty((size,), torch.uint8).fill_(value)
    return blocks.publish(tensor, readers)


def read(blocks, place, size, offset=0):
    into = torch.empty(size, dtype=torch.uint8)
    blocks.read(0, (*place, offset), into)
    return into


def addresses(blocks):
    return {block.address for block in blocks._blocks}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_tensor_like_any_other(ranks, dtype):
    writer, reader, _ = ranks
    made = writer.empty((5, 3), dtype)
    assert made.shape == (5, 3)
    assert made.dtype == dtype
    assert made.is_contiguous()
    made.copy_(torch.arange(15).view(5, 3))
    place = writer.publish(made, [1])
    size = made.numel() * made.element_size()
    found = read(reader, place, size).view(dtype).view(5, 3)
    assert torch.equal(found, made)
    assert writer.empty((0, 3), dtype).shape == (0, 3)
    assert writer.publish(made[:0], [1]) == (-1, 0)
    assert writer.publish(made, []) == (-1, 0)


def test_other_memory_is_copied_and_parts_are_read(ranks):
    writer, reader, _ = ranks
    payload = torch.arange(100, dtype=torch.uint8)
    place = writer.publish(payload, [1])
    payload.zero_()
    assert torch.equal(read(reader, place, 10, 30), torch.arange(30, 40, dtype=torch.uint8))


def test_a_block_waits_for_all_readers_and_for_tensors(ranks):
    writer, one, two = ranks
    tensor = writer.empty((MEGABYTE,), torch.uint8).fill_(1)
    place = writer.publish(tensor, [1, 2])
    first = addresses(writer)
    read(one, place, MEGABYTE)
    second = write(writer, MEGABYTE, 2, [1])
    assert len(addresses(writer)) == 2
    assert int(read(two, place, MEGABYTE).min()) == 1
    third = write(writer, MEGABYTE, 3, [1])  # the tensor is still there
    assert len(addresses(writer)) == 3
    del tensor
    fourth = writer.empty((MEGABYTE,), torch.uint8)
    assert {fourth.data_ptr() - writer._header} == first
    for known, value in ((second, 2), (third, 3)):
        assert set(read(one, known, MEGABYTE).tolist()) == {value}
    assert writer.counts()[0] == MEGABYTE


def test_published_twice(ranks):
    writer, one, two = ranks
    tensor = writer.empty((64,), torch.uint8).fill_(7)
    places = [writer.publish(tensor, [1]), writer.publish(tensor, [2])]
    assert len(addresses(writer)) == 2
    assert int(read(two, places[1], 64).max()) == 7
    assert int(read(one, places[0], 64).max()) == 7


def test_blocks_grow_and_never_exceed_the_peak_of_use(ranks):
    writer, one, _ = ranks
    for size in (1, 3, 2, 7, 1, 5):
        place = write(writer, size * MEGABYTE, size, [1])
        assert set(read(one, place, size * MEGABYTE)[::4096].tolist()) == {size}
    assert len(addresses(writer)) == 1
    assert writer.counts() == (0, 7 * MEGABYTE, 7 * MEGABYTE)
    generator = torch.Generator().manual_seed(0)
    in_flight, most = [], 0
    for _ in range(200):
        if in_flight and torch.rand((), generator=generator) < 0.5:
            place, size = in_flight.pop(int(torch.randint(len(in_flight), (), generator=generator)))
            assert int(read(one, place, size)[-1]) == size % 251
        else:
            size = int(torch.randint(1, MEGABYTE, (), generator=generator))
            in_flight.append((write(writer, size, size % 251, [1]), size))
        used, waiting, peak = writer.counts()
        most = max(most, used)
        assert used + waiting <= peak
    assert most <= peak


def test_another_use_or_another_file_is_noticed(ranks):
    writer, one, _ = ranks
    place = write(writer, 64, 1, [1])
    gone = os.strerror(errno.ESTALE)
    with pytest.raises(RuntimeError, match=gone):
        read(one, (place[0], place[1] + 1), 64)
    with open(os.devnull, "rb") as other, pytest.raises(RuntimeError, match="taken back"):
        read(one, (other.fileno(), place[1]), 64)
    with pytest.raises(RuntimeError, match="taken back the memory that it shared"):
        read(one, (-1, 0), 64)
    with pytest.raises(RuntimeError, match=os.strerror(errno.EIO)):
        read(one, place, 64, 1 << 30)
    assert int(read(one, place, 64).max()) == 1


def test_who_is_seen(ranks):
    writer, one, _ = ranks
    assert one.can_see(writer.me)
    me = writer.me
    assert not one.can_see(SharedPeer(me.process, me.descriptor, me.token + 1))
    assert not one.can_see(SharedPeer(1 << 30, me.descriptor, me.token))
    writer.leave(0.0)
    assert not one.can_see(me)
    writer.leave(0.0)  # and once more
    writer.fail()


def test_it_can_be_turned_off(monkeypatch):
    monkeypatch.setenv("GRAPHSHARD_SHARED_MEMORY", "0")
    assert SharedBlocks.make(0, 2) is None
    monkeypatch.setenv("GRAPHSHARD_SHARED_MEMORY", "1")
    assert SharedBlocks.make(0, 2) is not None
    assert SharedBlocks.make(0, 1 << 20) is None
