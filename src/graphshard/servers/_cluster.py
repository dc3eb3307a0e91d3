# SPDX-License-Identifier: Apache-2.0
"""Cluster: the named tables of all hosts, as one process reads and writes them.

Rows of this host are read and written in place. Those of another one take a message there and one
back, all of them at the same time, each no longer than the connection's timeout; rows that are kept
here are in neither (see [Note: cached rows] in ``_row_cache.py``).
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.kernels import empty
from ..comm import Pending
from ..errors import MessageError, ServerError
from ..ops import copy_rows, group_by_range
from ._host_tables import HostTables, TableInfo, attached, check_rows, write_rows
from ._message_stream import WireMessage
from ._row_cache import CachedRows, RowCache
from .rpc import Handler, MessageClient, PendingAnswer

_INT32_MAX = 2**31 - 1
MESSAGE_BYTES = 1 << 26
"""Longer requests and answers go in pieces of about this many bytes."""
_MOST_HERE = 1 << 24  # bytes of an answer that the caller's thread receives itself


class LocalHost:
    """This process, the only host of a job without servers; its methods are as of `ServedHost`.

    Args:
        handlers: What answers requests beside those for its tables, by op.
    """

    def __init__(self, tables: HostTables, handlers: Mapping[str, Handler] | None = None) -> None:
        self._tables, self._handlers = tables, tables.handlers() | dict(handlers or {})
        self.address = None

    def start(self, request: WireMessage) -> _GivenAnswer:
        return _GivenAnswer(self._handlers[request.op](request))

    begin = start

    def rows(self, name: str) -> Tensor | None:
        return self._tables.rows(name)

    def learn(self, info: TableInfo, file: Sequence[Any] | None) -> bool:
        return False

    def forget(self, name: str) -> None:
        return

    def close(self) -> None:
        self._tables.close()


@dataclass(frozen=True)
class _GivenAnswer:
    answer: WireMessage

    def result(self) -> WireMessage:
        return self.answer


class ServedHost:
    """A host with a server.

    Args:
        may_attach: Whether the server may be on this machine.
    """

    def __init__(self, connection: MessageClient, may_attach: bool) -> None:
        self.connection, self._may_attach = connection, may_attach
        self.address = connection.address
        self.start = connection.start  # asks, and goes on
        self.begin = connection.begin  # asks, and waits soon
        self._rows: dict[str, tuple[Sequence[Any], Tensor | None]] = {}

    def rows(self, name: str) -> Tensor | None:
        """Its rows of a table, where this process can read and write them; else None.

        Raises:
            ServerError: The server has given this process up.
        """
        self.connection.check_present()
        mapped = self._rows.get(name)
        return None if mapped is None else mapped[1]

    def learn(self, info: TableInfo, file: Sequence[Any] | None) -> bool:
        """See what its server says of a table, and in which file of this machine it is.

        Returns:
            Whether it is in another one than it was.
        """
        mapped = self._rows.get(info.name)
        if file is None or not self._may_attach:
            self._rows.pop(info.name, None)
        elif mapped is None or mapped[0] != file:
            self._rows[info.name] = file, attached(file, info, self.connection.host)
            return mapped is not None
        return False

    def forget(self, name: str) -> None:
        """Unmap what it has of a table."""
        self._rows.pop(name, None)

    def close(self) -> None:
        """End the connection, and unmap all tables."""
        self._rows.clear()
        self.connection.close()


Host: TypeAlias = LocalHost | ServedHost
Answer: TypeAlias = PendingAnswer | _GivenAnswer


@dataclass(frozen=True)
class RowsRequest:
    """Rows of some tables that are spread alike.

    Args:
        ids: Integer ``[n]``, ids of all hosts together, on the CPU.
    """

    names: Sequence[str]
    ids: Tensor


class Cluster:
    """The hosts of a job.

    Methods that take a table's name raise KeyError if there is none, and those that take ids
    IndexError if one is out of range, before anything is written. All raise ServerError if a server
    is gone; what they write to other hosts is there then.

    Args:
        here: The number of this process's host.
    """

    def __init__(self, hosts: Sequence[Host], here: int) -> None:
        self.hosts, self.here = list(hosts), here
        self._infos: dict[str, TableInfo] = {}
        self._releases: deque[Answer] = deque()
        self._marked: set[tuple[str, int]] = set()
        self._cache = RowCache()
        self._holds: dict[object, str] = {}  # what this process holds: a table's name, for each

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    def server_address(self) -> str:
        """``host:port`` of a server, of another host if there is one; RuntimeError without any."""
        others = [host for number, host in enumerate(self.hosts) if number != self.here]
        address = [*others, self.hosts[self.here]][0].address
        if address is None:
            raise RuntimeError("a cluster without servers has one trainer")
        return address

    def close(self) -> None:
        """End the connections."""
        for host in self.hosts:
            host.close()

    def ask(self, requests: Sequence[tuple[int, WireMessage]]) -> list[WireMessage]:
        """The answers of hosts, all asked at the same time.

        All are waited for, also after an error.
        """
        answers, error = _results([self.hosts[n].begin(message) for n, message in requests])
        if error is not None:
            raise error
        return list(answers.values())

    def ask_all(self, request: WireMessage) -> list[WireMessage]:
        """The answers of all hosts to one request, by number."""
        return self.ask([(number, request) for number in range(self.num_hosts)])

    # ------------------------------------------------------------------ tables

    def refresh(self) -> list[WireMessage]:
        """Learn which tables there are; returns what each host says of its own."""
        answers = self.ask_all(WireMessage("tables"))
        self._learn(answers)
        return answers

    def names(self) -> list[str]:
        """The tables that are known."""
        return sorted(self._infos)

    def info(self, name: str) -> TableInfo:
        """A table; asks the servers if it is new here."""
        if name not in self._infos:
            self._learn(self.ask_all(WireMessage("tables", {"names": [name]})))
        if name not in self._infos:
            raise KeyError(f"no tensor named {name!r}; there are: {', '.join(self.names())}")
        return self._infos[name]

    def create(self, info: TableInfo) -> bool:
        """Make a table of zeros on all hosts, or find it; returns whether it is new.

        What is not persistent stays until `release` was called for each `hold`, or `delete`.

        Raises:
            ValueError: A table of that name has another shape, dtype or policy; or some hosts have
                it and others, which were started again, do not. Nothing is made then.
            OSError: Some host has no room. Nothing is made then.
        """
        request = WireMessage("create", info.as_json())
        answers, error = _results([host.start(request) for host in self.hosts])
        new = [number for number, answer in answers.items() if answer.fields["is_new"]]
        if error is None and 0 < len(new) < self.num_hosts:
            error = ValueError(
                f"hosts {new} have no rows of {info.name!r}, and others have; where a server was "
                "started again, call load_checkpoint, or delete the tensor and make it anew"
            )
        if error is not None:
            undo = {n: "delete" if n in new else "release" for n in answers}
            with contextlib.suppress(ServerError):
                self.ask([(n, WireMessage(op, {"name": info.name})) for n, op in undo.items()])
            raise error
        self._learn(list(answers.values()))
        return bool(new)

    def hold(self, name: str) -> object:
        """Note that this process holds a table, for which `create` was called; for `release`."""
        key = object()
        self._holds[key] = name
        return key

    def held(self) -> list[str]:
        """The tables that this process holds."""
        return sorted(set(self._holds.copy().values()))

    def release(self, key: object) -> None:
        """Let a table go that this process holds; not waited for.

        A table that is not persistent is deleted once all that hold it let it go. The garbage
        collector may call this, in any thread: what it changes it changes in one step.

        Args:
            key: As `hold` gave it. Nothing happens if the table was deleted since.
        """
        name = self._holds.pop(key, None)
        if name is None:
            return
        if name not in self._holds.copy().values():
            self._give_back(name)
        for host in self.hosts:
            self._releases.append(host.start(WireMessage("release", {"name": name})))

    def delete(self, name: str) -> None:
        """Delete a table on all hosts. Other processes that have used it call `forget`."""
        self.forget(name)
        self.ask_all(WireMessage("delete", {"name": name}))

    def forget(self, name: str) -> None:
        """Give back what this process has of a table that is deleted, and hold it no more."""
        for key, held in self._holds.copy().items():
            if held == name:
                self._holds.pop(key, None)
        self._give_back(name)

    def _give_back(self, name: str) -> None:
        """Unmap a table's rows, and know nothing of it; `info` learns it again."""
        self._infos.pop(name, None)
        for number, host in enumerate(self.hosts):
            host.forget(name)
            self._marked.discard((name, number))

    def settle(self) -> None:
        """Wait until what this process has released is gone; servers that are gone do not count."""
        while self._releases:
            with contextlib.suppress(ServerError):
                self._releases.popleft().result()

    def _learn(self, answers: Sequence[WireMessage]) -> None:
        for number, answer in enumerate(answers):
            listed = answer.fields.get("tables")
            for fields in [answer.fields["table"]] if listed is None else listed:
                info = TableInfo.from_json(fields)
                first = self._infos.setdefault(info.name, info)
                if number == 0:
                    self._infos[info.name] = info
                elif first.starts != info.starts:
                    raise ServerError(f"hosts 0 and {number} disagree on {info.name!r}", number)
                if self.hosts[number].learn(info, fields.get("file")):
                    self._marked.discard((info.name, number))

    # ------------------------------------------------------------------ rows

    def read(self, requests: Sequence[RowsRequest]) -> list[Tensor]:
        """Rows of each request's tables in turn, ``[n, *row_shape]`` each."""
        return self._start_read(requests, waits_soon=True).wait()

    def start_read(self, requests: Sequence[RowsRequest]) -> Pending:
        """As `read`, while this thread goes on."""
        return self._start_read(requests, waits_soon=False)

    def _start_read(self, requests: Sequence[RowsRequest], waits_soon: bool) -> Pending:
        results: list[list[Tensor]] = []
        local: list[_Piece] = []
        remote: list[list[_Piece]] = [[] for _ in self.hosts]
        known: list[list[_Hits]] = [[] for _ in self.hosts]
        for request in requests:
            infos = [self.info(name) for name in request.names]
            row_bytes = sum(info.row_bytes for info in infos)
            outs: list[Tensor] = []
            results.append(outs)
            for number, rows, places in self._by_host(infos, request.ids):
                piece = _Piece(infos, rows, places, outs)
                here = [self.hosts[number].rows(name) for name in request.names]
                if all(table is not None for table in here):
                    local.append(piece)
                    piece.tables = here  # type: ignore[assignment]
                    continue
                kept = self._cache.of(request.names, number)
                if kept is not None:
                    hits = _Hits.among(piece, kept)
                    if hits is not None:
                        known[number].append(hits)
                        piece = hits.rest
                pieces = piece.parts(row_bytes)
                remote[number] += pieces
                if pieces == [piece] and piece.places is None:
                    break  # the rows that arrive are the result
            else:
                count = request.ids.numel()
                outs += [empty((count, *info.row_shape), info.dtype) for info in infos]
        batches = [(n, pieces) for n, some in enumerate(remote) for pieces in _batches(some)]
        most = max((sum(piece.num_bytes for piece in pieces) for _, pieces in batches), default=0)
        started = []
        for number, pieces in batches:
            host = self.hosts[number]
            ask = host.begin if waits_soon and most <= _MOST_HERE else host.start
            started.append((number, pieces, ask(_read_message(pieces))))

        def finish() -> list[Tensor]:
            for piece in local:
                for out, table in zip(piece.outs, piece.tables, strict=True):
                    copy_rows(out, piece.places, table, piece.rows)
            error = None
            for number, pieces, answer in started:
                try:
                    self._take(number, pieces, answer.result())
                except Exception as caught:
                    error = error or caught
            if error is not None:
                raise error
            self._take_kept(known)
            return [out for outs in results for out in outs]

        return Pending(finish)

    def _take(self, number: int, pieces: Sequence[_Piece], answer: WireMessage) -> None:
        """Put the rows of a host's answer where they go, and keep them if they may be."""
        arrived, said = iter(answer.tensors), iter(answer.fields["as_loaded"])
        for piece in pieces:
            columns = list(islice(arrived, len(piece.infos)))
            for info, rows in zip_longest(piece.infos, columns):
                expected = (piece.rows.numel(), *info.row_shape)
                if rows is None or rows.dtype != info.dtype or tuple(rows.shape) != expected:
                    raise MessageError("a server answered with other rows than were asked for")
            as_loaded = list(islice(said, len(piece.infos)))
            for info, is_as_loaded in zip(piece.infos, as_loaded, strict=True):
                if not is_as_loaded:
                    self._cache.forget(info.name, number)
            if not piece.outs:
                piece.outs += columns
            else:
                for out, rows in zip(piece.outs, columns, strict=True):
                    copy_rows(out, piece.places, rows, None)
            if all(as_loaded):
                self._cache.add(piece.infos, number, piece.rows, columns)

    def _take_kept(self, known: Sequence[Sequence[_Hits]]) -> None:
        """Put rows that are kept where they go; those of a table that was written to come anew."""
        again: list[tuple[int, list[_Piece]]] = []
        for number, some in enumerate(known):
            old = []
            for hits in some:
                names = [info.name for info in hits.piece.infos]
                if self._cache.of(names, number) is hits.kept:
                    hits.kept.copy(hits.piece.outs, hits.places, hits.slots)
                else:
                    row_bytes = sum(info.row_bytes for info in hits.piece.infos)
                    old += hits.piece.parts(row_bytes)
            again += [(number, pieces) for pieces in _batches(old)]
        answers = self.ask([(number, _read_message(pieces)) for number, pieces in again])
        for (number, pieces), answer in zip(again, answers, strict=True):
            self._take(number, pieces, answer)

    def write(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """``table[ids] = rows``; on return every host has what it owns.

        Args:
            ids: Integer ``[n]``; where one is repeated, its last row counts.
            rows: ``[n, *row_shape]`` of the table's dtype.
        """
        info = self.info(name)
        check_rows(info, ids.numel(), rows)
        rows = rows.detach().cpu()
        asked: list[list[tuple[int, WireMessage]]] = []  # by host
        for number, local, places in self._by_host([info], ids):
            chosen = rows if places is None else rows.index_select(0, places)
            table = self.hosts[number].rows(name)
            if table is not None:
                self.mark_written(name, number)
                write_rows(table, local, chosen)
                continue
            most = max(1, MESSAGE_BYTES // max(1, info.row_bytes))
            pieces = zip(local.split(most), chosen.split(most), strict=True)
            asked.append([(number, WireMessage("write", {"name": name}, [*p])) for p in pieces])
        # One after another to a host, so that of an id in two messages the later one counts.
        for batch in zip_longest(*asked):
            self.ask([message for message in batch if message is not None])

    def mark_written(self, name: str, number: int) -> None:
        """Tell a host, once, that this process writes to its rows of a table in place.

        What is not as the partition has it is saved with the cluster.
        """
        if (name, number) not in self._marked:
            self.ask([(number, WireMessage("mark_written", {"name": name}))])
            self._marked.add((name, number))

    def update(
        self,
        names: Sequence[str],
        ids: Tensor,
        change: Callable[[Sequence[Tensor], Tensor, int, int], None],
    ) -> None:
        """Change rows of some tables that are spread alike.

        Rows of this host are changed where they lie; those of others, all in one read and one
        write.

        Args:
            ids: Integer ``[n]``, ascending, each once.
            change: Called with tables, the rows that it changes there, and which of the ids these
                are: the first, and the last plus 1.
        """
        infos = [self.info(name) for name in names]
        local: list[tuple[int, Tensor, list[Tensor]]] = []
        remote: list[slice] = []
        begin = 0
        for number, rows, _ in self._by_host(infos, ids):  # ids ascend, so that hosts do
            here = [self.hosts[number].rows(name) for name in names]
            tables = [table for table in here if table is not None]
            if len(tables) == len(here):
                local.append((begin, rows, tables))
                for name in names:
                    self.mark_written(name, number)
            else:
                remote.append(slice(begin, begin + rows.numel()))
            begin += rows.numel()
        others = torch.cat([ids[:0], *(ids[each] for each in remote)])
        pending = self._start_read([RowsRequest(names, others)] if remote else [], waits_soon=True)
        for begin, rows, tables in local:
            change(tables, rows, begin, begin + rows.numel())
        if not remote:
            return
        values, begin = pending.wait(), 0
        for each in remote:
            end = begin + each.stop - each.start
            places = torch.arange(end - begin)
            change([value[begin:end] for value in values], places, each.start, each.stop)
            begin = end
        for name, value in zip(names, values, strict=True):
            self.write(name, others, value)

    def count_nonzero(self, name: str) -> int:
        """Elements of a table that are not 0, on all hosts."""
        answers = self.ask_all(WireMessage("count_nonzero", {"name": name}))
        return sum(int(answer.fields["count"]) for answer in answers)

    def _by_host(
        self, infos: Sequence[TableInfo], ids: Tensor
    ) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """(host, rows there, places among ``ids``) for each host that has some of them."""
        starts = infos[0].starts
        if any(info.starts != starts for info in infos):
            raise ValueError("tables that are read together must have rows of the same kind")
        if ids.numel() == 0:
            return
        low, high = (int(end) for end in ids.aminmax())
        if low < 0 or high >= starts[-1]:
            raise IndexError(
                f"ids of {infos[0].name!r} must be in [0, {starts[-1]}) (got "
                f"{low if low < 0 else high})"
            )
        dtype = torch.int32 if starts[-1] <= _INT32_MAX else torch.int64
        first = bisect_right(starts, low) - 1
        if high < starts[first + 1]:
            yield first, (ids - starts[first]).to(dtype) if starts[first] else ids.to(dtype), None
            return
        order, rows, sizes = group_by_range(ids, starts, len(starts) - 2, dtype)
        begin = 0
        for number, size in enumerate(sizes):
            if size:
                end = begin + size
                yield number, rows[begin:end], order[begin:end]
                begin = end


def _results(started: Sequence[Answer]) -> tuple[dict[int, WireMessage], Exception | None]:
    """The answers that come, by number, and the first error."""
    answers: dict[int, WireMessage] = {}
    error = None
    for number, answer in enumerate(started):
        try:
            answers[number] = answer.result()
        except Exception as caught:
            error = error or caught
    return answers, error


@dataclass(eq=False)
class _Piece:
    """Rows of one host that a request wants.

    Args:
        rows: Rows on the host.
        places: Where they go in ``outs``; None for everywhere, in order.
        outs: One for each table, by the time that rows arrive; none where those are the result.
        tables: The rows of the host, where this process can read them.
    """

    infos: Sequence[TableInfo]
    rows: Tensor
    places: Tensor | None
    outs: list[Tensor]
    tables: Sequence[Tensor] = ()

    def parts(self, row_bytes: int) -> list[_Piece]:
        """The same in pieces for one message each."""
        most = max(1, MESSAGE_BYTES // max(1, row_bytes))
        count = self.rows.numel()
        if count <= most:
            return [self]
        places = torch.arange(count) if self.places is None else self.places
        both = zip(self.rows.split(most), places.split(most), strict=True)
        return [_Piece(self.infos, rows, at, self.outs) for rows, at in both]

    @property
    def num_bytes(self) -> int:
        return self.rows.numel() * sum(info.row_bytes for info in self.infos)


def _batches(pieces: Sequence[_Piece]) -> Iterator[list[_Piece]]:
    """Pieces that go into one message."""
    batch: list[_Piece] = []
    size = 0
    for piece in pieces:
        if batch and size + piece.num_bytes > MESSAGE_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece.num_bytes
    if batch:
        yield batch


@dataclass(frozen=True)
class _Hits:
    """Rows of a piece that are kept, if their host still has them so.

    Args:
        piece: These rows.
        places: Where they go.
        slots: Where they are kept.
        rest: The others, of which there may be none: their host is asked all the same.
    """

    piece: _Piece
    places: Tensor
    kept: CachedRows
    slots: Tensor
    rest: _Piece

    @classmethod
    def among(cls, piece: _Piece, kept: CachedRows) -> _Hits | None:
        """None if there are none."""
        slots = kept.find(piece.rows)
        is_hit = slots >= 0
        hits, misses = is_hit.nonzero().view(-1), is_hit.logical_not_().nonzero().view(-1)
        if len(hits) == 0:
            return None

        at_hits, at_rest = (
            at if piece.places is None else piece.places[at] for at in (hits, misses)
        )
        known = _Piece(piece.infos, piece.rows[hits], at_hits, piece.outs)
        rest = _Piece(piece.infos, piece.rows[misses], at_rest, piece.outs)
        return cls(known, at_hits, kept, slots[hits], rest)


def _read_message(pieces: Sequence[_Piece]) -> WireMessage:
    """What asks a host for rows."""
    names = [[info.name for info in piece.infos] for piece in pieces]
    return WireMessage("read", {"names": names}, [piece.rows for piece in pieces])
