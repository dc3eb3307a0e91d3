# SPDX-License-Identifier: Apache-2.0
"""agree, share_error: checks whose verdict every rank learns, so that none is left waiting.

Both cost one all_gather of a few bytes per rank while all is well. Only when something is wrong do
the ranks exchange texts, in a second round that all of them know to be needed.
"""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from ... import errors
from ..group import GroupState, group_state, rank_names
from ._operations import all_gather

_DIGEST_BYTES = 32
_MAX_TEXT_BYTES = 8192
_SHOWN = 300
_SHORT, _FEW = 40, 8  # characters, and different values, up to which each is shown with its ranks

_KNOWN_ERRORS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        ValueError,
        TypeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        FloatingPointError,
        OSError,
        FileNotFoundError,
        PermissionError,
        MemoryError,
        errors.PartitionFormatError,
        errors.MetisError,
        errors.CheckpointError,
    )
}


def agree(value: str | bytes, what: str, group: dist.ProcessGroup | None = None) -> None:
    """Check that every rank passes the same value; every rank must call.

    Args:
        value: Any text or bytes; 32 bytes of it, its hash, travel.
        what: What the value is, for the message: "the partition's format version".
        group: Who must agree; None is the default group.

    Raises:
        ValueError: On every rank, if the values differ; names the ranks that differ from rank 0.
    """
    verify(group_state(group), value, what, None)


def share_error(error: BaseException | None, group: dist.ProcessGroup | None = None) -> None:
    """Share the verdict of a check that may fail on one rank alone; every rank must call.

    Args:
        error: What this rank's check found, or None if all is well here.
        group: Who takes part; None is the default group.

    Raises:
        Exception: On every rank if any rank passed an error: of the same type as the first bad
            rank's where that type is a common built-in or one of graphshard's, else `RankError`.
            The first bad rank chains its own error.
    """
    verify(group_state(group), b"", "", error)


def verify(
    state: GroupState, value: str | bytes, what: str, error: BaseException | None, cure: str = ""
) -> None:
    """`share_error`, then `agree`, in the same single round; the message ends with ``cure``."""
    if state.world_size == 1:
        if error is not None:
            raise error
        return
    # a path may have halves of characters, and this rank must not fail where others wait
    data = value.encode(errors="surrogatepass") if isinstance(value, str) else value
    digest = hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
    verdicts = _gather_bytes(state, bytes([error is not None]) + digest)
    failed = [r for r, verdict in enumerate(verdicts) if verdict[0]]
    if failed:
        _raise_shared(state, failed, error)
    if any(verdict != verdicts[0] for verdict in verdicts):
        _raise_different(state, verdicts, data, what, cure)


def _raise_shared(state: GroupState, failed: list[int], error: BaseException | None) -> None:
    text = f"{type(error).__name__}\n{error}" if error is not None else ""
    first = failed[0]
    kind_name, _, message = gather_texts(state, text)[first].partition("\n")
    who = state.members[first]
    others = [state.members[r] for r in failed[1:]]
    head = f"rank {who}: {message}" + (f" (so did ranks {others})" if others else "")
    known = _KNOWN_ERRORS.get(kind_name)
    if known is not None:
        shared: Exception = known(head)
    else:
        shared = errors.RankError(f"rank {who} raised {kind_name}: {message}", [who])
    if state.rank == first and error is not None:
        raise shared from error
    raise shared


def _raise_different(
    state: GroupState, verdicts: list[bytes], value: bytes, what: str, cure: str
) -> None:
    texts = gather_texts(state, value.decode(errors="backslashreplace"))
    different = [r for r, verdict in enumerate(verdicts) if verdict != verdicts[0]]
    ranks = [state.members[r] for r in different]
    one, other = _around_difference(texts[0], texts[different[0]])
    found = f"rank {state.members[0]} has {one!r}, rank {ranks[0]} has {other!r}"
    if max(map(len, texts)) <= _SHORT and len(set(texts)) <= _FEW:
        holders: dict[str, list[int]] = {}
        for member, text in zip(state.members, texts, strict=True):
            holders.setdefault(text, []).append(member)
        found = ", ".join(
            f"{rank_names(who)} {'has' if len(who) == 1 else 'have'} {text!r}"
            for text, who in holders.items()
        )
    raise ValueError(
        f"{what} must be the same on all ranks, but {rank_names(ranks)} "
        f"{'differs' if len(ranks) == 1 else 'differ'} from rank {state.members[0]}: "
        f"{found}{'; ' if cure else ''}{cure}"
    )


def _around_difference(one: str, other: str) -> tuple[str, str]:
    """The parts of two long texts around the first character that differs."""
    same = 0
    while same < min(len(one), len(other)) and one[same] == other[same]:
        same += 1
    start = 0 if same < _SHOWN // 2 else same - _SHOWN // 4
    return one[start : start + _SHOWN], other[start : start + _SHOWN]


def _gather_bytes(state: GroupState, data: bytes) -> list[bytes]:
    """Every rank's bytes; the length must be the same everywhere."""
    payload = torch.tensor(list(data), dtype=torch.uint8, device=state.small_device)
    return [bytes(part.tolist()) for part in all_gather(state, payload, "agree", "agree")]


def gather_texts(state: GroupState, text: str) -> list[str]:
    """Every rank's text, by rank, cut after a few kilobytes."""
    data = text.encode(errors="backslashreplace")[:_MAX_TEXT_BYTES]
    sizes = [
        int.from_bytes(size, "big") for size in _gather_bytes(state, len(data).to_bytes(8, "big"))
    ]
    longest = max(sizes)
    parts = _gather_bytes(state, data.ljust(longest, b"\0")) if longest else [b""] * len(sizes)
    return [part[:size].decode(errors="replace") for part, size in zip(parts, sizes, strict=True)]
