# SPDX-License-Identifier: Apache-2.0
"""HostTables: the rows that one host has of each named tensor, and the requests that reach them.

Ids count the rows of a tensor on all hosts; each host has one run of them, so a row is found by a
subtraction. Processes on the host map the same memory, and read and write it without asking.

`TableServer` answers those of other hosts.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.files import MappedFile, TemporaryFolder, check_text, shared_memory_folder, writing
from ..errors import MessageError
from ..ops import copy_rows
from ._message_stream import WireMessage, check_shape, dtype_name, dtype_named
from .rpc import Handler, MessageServer

MAX_NAME = 4096
# Bytes of a table: those who wait for it wait some seconds at most.
_MOST_POPULATED, _MOST_IN_LARGE_PAGES = 1 << 34, 1 << 32
_NAME = re.compile(r"[^\x00-\x1f\x7f]+")


@dataclass(frozen=True)
class TableInfo:
    """A named tensor.

    Args:
        name: Unique in the job.
        starts: First row of each host, and the number of rows.
        policy: How rows are spread: ``node~TYPE`` or ``edge~SRC:REL:DST``.
        persistent: Whether it outlives the object that made it.

    Raises:
        ValueError: It has more extents, or elements, than a message takes.
    """

    name: str
    dtype: torch.dtype
    row_shape: tuple[int, ...]
    starts: tuple[int, ...]
    policy: str
    persistent: bool = False

    def __post_init__(self) -> None:
        try:  # rows that cannot be sent could not be read
            check_shape((self.starts[-1], *self.row_shape))
        except MessageError as error:
            raise ValueError(f"{self.name!r} cannot be a table: {error}") from None

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize

    def shape_on(self, host: int) -> tuple[int, ...]:
        """Of the rows of a host."""
        return (self.starts[host + 1] - self.starts[host], *self.row_shape)

    def as_json(self) -> dict[str, Any]:
        """As a message has it."""
        return {**vars(self), "dtype": dtype_name(self.dtype)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> TableInfo:
        """From a message; MessageError if a field is missing, or out of range."""
        try:
            name, policy, persistent = fields["name"], fields["policy"], fields["persistent"]
            dtype = dtype_named(fields["dtype"])
            row_shape, starts = tuple(fields["row_shape"]), tuple(fields["starts"])
        except (KeyError, TypeError):
            raise MessageError("a table has a name, dtype, row_shape, starts and policy") from None
        check_name(name)
        check_name(policy)
        for numbers in (row_shape, starts):
            if not all(type(n) is int and 0 <= n < 2**48 for n in numbers):
                raise MessageError("row_shape and starts must be numbers of 0 or more")
        if len(starts) < 2 or starts[0] != 0 or list(starts) != sorted(starts):
            raise MessageError("starts must ascend from 0")
        if not isinstance(persistent, bool):
            raise MessageError("persistent must be true or false")
        return cls(name, dtype, row_shape, starts, policy, persistent)


def check_name(name: object) -> None:
    """Raise ValueError unless ``name`` can name a tensor.

    Names are never used as paths.
    """
    if isinstance(name, str):
        check_text(name, "a name")
    if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name.encode()) > MAX_NAME:
        raise ValueError(
            f"a name must be 1 to {MAX_NAME} bytes of printable text (got {name!r:.80})"
        )


@dataclass(frozen=True)
class _HostTable:
    info: TableInfo
    rows: Tensor
    path: str | None
    holders: Counter[str]  # how often each client has asked for it
    is_loaded: bool = False


class HostTables:
    """Named tables of one host.

    Args:
        is_shared: Keep rows in files that other processes of the host map; else in this process.
        directory: Where such files go; by default in shared memory.
    """

    def __init__(
        self, host: int, is_shared: bool, directory: str | os.PathLike[str] | None = None
    ) -> None:
        self.host = host
        self._tables: dict[str, _HostTable] = {}
        self._lock = threading.RLock()
        self._folder: TemporaryFolder | None = None
        if is_shared:
            self._folder = TemporaryFolder(directory or shared_memory_folder())

    def close(self) -> None:
        """Free everything."""
        with self._lock:
            self._tables.clear()
            if self._folder is not None:
                self._folder.cleanup()

    # ------------------------------------------------------------------ in this process

    def infos(self) -> list[TableInfo]:
        """All tables, by name."""
        with self._lock:
            return [table.info for _, table in sorted(self._tables.items())]

    def rows(self, name: str) -> Tensor:
        """The host's rows of a table, ``[num_rows, *row_shape]``."""
        return self._find(name).rows

    def path(self, name: str) -> str | None:
        """Where other processes of the host find a table; None where it is this process's own."""
        return self._find(name).path

    def create(self, info: TableInfo, holder: str = "") -> bool:
        """Make a table of zeros, or find it; returns whether it is new.

        Args:
            holder: Id of the client that asks for it.

        Raises:
            ValueError: A table of that name has another shape, dtype or policy.
            OSError: There is no room.
        """
        with self._lock:
            table = self._tables.get(info.name)
            if table is not None:
                if replace(table.info, persistent=info.persistent) != info:
                    raise ValueError(
                        f"a tensor named {info.name!r} exists with {_described(table.info)} (asked "
                        f"for {_described(info)}); use another name, or delete it first"
                    )
                if info.persistent:
                    self._tables[info.name] = replace(table, info=info)
                table.holders[holder] += 1
                return False
            if self.host >= len(info.starts) - 1:
                raise ValueError(f"{info.name!r} has no rows on host {self.host}")
            path = None
            if self._folder is None:
                rows = torch.zeros(info.shape_on(self.host), dtype=info.dtype)
            else:
                path = str(self._folder.path / secrets.token_hex(8))
                rows = new_file(path, info.shape_on(self.host), info.dtype)
            self._tables[info.name] = _HostTable(info, rows, path, Counter([holder]))
            return True

    def delete(self, name: str) -> None:
        """Forget a table; memory goes when the last process that maps it lets it go."""
        with self._lock:
            table = self._tables.pop(name, None)
            if table is not None and table.path is not None:
                Path(table.path).unlink(missing_ok=True)

    def release(self, name: str, holder: str = "") -> None:
        """Let a table go that a client asked for by `create`."""
        with self._lock:
            table = self._tables.get(name)
            if table is None or table.holders[holder] == 0:
                return
            table.holders[holder] -= 1
            if not table.info.persistent and table.holders.total() == 0:
                self.delete(name)

    def release_all(self, holder: str) -> None:
        """Let everything go that a client asked for."""
        with self._lock:
            for name in [n for n, table in self._tables.items() if table.holders[holder]]:
                self._tables[name].holders[holder] = 1
                self.release(name, holder)

    def mark_loaded(self) -> None:
        """Remember that the tables there are have the rows of the graph's partition."""
        with self._lock:
            for name, table in self._tables.items():
                self._tables[name] = replace(table, is_loaded=True)

    def mark_written(self, name: str) -> None:
        """Remember that rows of a table may be others than it was loaded with."""
        with self._lock:
            table = self._find(name)
            if table.is_loaded:
                self._tables[name] = replace(table, is_loaded=False)

    def _find(self, name: Any) -> _HostTable:
        with self._lock:
            table = self._tables.get(name) if isinstance(name, str) else None
            if table is None:
                names = ", ".join(sorted(self._tables)) or "none"
                raise KeyError(f"no tensor named {name!r:.200}; there are: {names:.2000}")
            return table

    # ------------------------------------------------------------------ requests

    def handlers(self) -> dict[str, Handler]:
        """What answers requests, by op."""
        return {
            "tables": self._on_tables,
            "create": self._on_create,
            "delete": self._on_delete,
            "release": self._on_release,
            "read": self._on_read,
            "write": self._on_write,
            "mark_written": self._on_mark_written,
            "count_nonzero": self._on_count_nonzero,
        }

    def _on_tables(self, request: WireMessage) -> WireMessage:
        with self._lock:
            names = request.fields.get("names")
            chosen = sorted(self._tables) if names is None else _texts(names)
            described = [self._described(name) for name in chosen if name in self._tables]
        return WireMessage("tables", {"tables": described})

    def _on_create(self, request: WireMessage) -> WireMessage:
        info = TableInfo.from_json(request.fields)
        is_new = self.create(info, request.sender)
        return WireMessage("created", {"is_new": is_new, "table": self._described(info.name)})

    def _described(self, name: str) -> dict[str, Any]:
        table = self._find(name)
        fields = table.info.as_json() | {"is_loaded": table.is_loaded}
        if table.path is not None:
            stat = os.stat(table.path)
            fields["file"] = [table.path, stat.st_dev, stat.st_ino]
        return fields

    def _on_delete(self, request: WireMessage) -> WireMessage:
        self.delete(request.fields.get("name", ""))
        return WireMessage("deleted")

    def _on_release(self, request: WireMessage) -> WireMessage:
        self.release(request.fields.get("name", ""), request.sender)
        return WireMessage("released")

    def _on_read(self, request: WireMessage) -> WireMessage:
        """Rows of several tables: ``fields["names"]`` has a list of names for each ids tensor.

        The answer says of each table whether its rows were those of the partition until then.
        """
        names = request.fields.get("names")
        if not isinstance(names, list) or len(names) != len(request.tensors):
            raise MessageError("read takes names for each tensor of ids")
        reads = [
            (self._find(name), ids)
            for ids, some in zip(request.tensors, names, strict=True)
            for name in _texts(some)
        ]
        for table, ids in reads:
            _check_ids(ids, table)
        specs = [(t.info.dtype, (ids.numel(), *t.info.row_shape)) for t, ids in reads]
        request.check_answer(specs)
        as_loaded: list[bool] = []
        answer = WireMessage.allocate("rows", {"as_loaded": as_loaded}, specs)
        for out, (table, ids) in zip(answer.tensors, reads, strict=True):
            copy_rows(out, None, table.rows, ids)
        with self._lock:  # after the copies: who writes says so first
            now = [self._tables.get(table.info.name) for table, _ in reads]
        as_loaded += [table is not None and table.is_loaded for table in now]
        return answer

    def _on_write(self, request: WireMessage) -> WireMessage:
        table = self._find(request.fields.get("name"))
        if len(request.tensors) != 2:
            raise MessageError("write takes ids and rows")
        ids, rows = request.tensors
        _check_ids(ids, table)
        check_rows(table.info, ids.numel(), rows)
        self.mark_written(table.info.name)
        write_rows(table.rows, ids, rows)
        return WireMessage("written")

    def _on_mark_written(self, request: WireMessage) -> WireMessage:
        """A process of this host writes to a table in place."""
        self.mark_written(self._find(request.fields.get("name")).info.name)
        return WireMessage("marked")

    def _on_count_nonzero(self, request: WireMessage) -> WireMessage:
        table = self._find(request.fields.get("name"))
        return WireMessage("count", {"count": int(torch.count_nonzero(table.rows))})


def new_file(path: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of zeros in a new file, with all its memory taken; OSError if there is no room."""
    num_bytes = max(1, math.prod(shape) * dtype.itemsize)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        with writing(path):
            os.ftruncate(descriptor, num_bytes)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, num_bytes)  # a full disk is an error, no signal
        memory = MappedFile(descriptor, num_bytes)
        memory.use_large_pages(_MOST_IN_LARGE_PAGES)
        memory.populate(_MOST_POPULATED, writes=True)
        return _as_tensor(memory, shape, dtype)
    except BaseException:
        Path(path).unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def attached(file: Sequence[Any], info: TableInfo, host: int) -> Tensor | None:
    """The rows of a table of this machine's server; None if the server is on another one.

    Args:
        file: Path, device and inode, as the server says.
    """
    path, device, inode = file
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        stat = os.fstat(descriptor)
        if (stat.st_dev, stat.st_ino) != (device, inode):
            return None
        shape = info.shape_on(host)
        memory = MappedFile(descriptor, max(1, math.prod(shape) * info.dtype.itemsize))
        folder = shared_memory_folder()
        if folder is not None and os.stat(folder).st_dev == device:  # of a disk, all would be read
            memory.populate(_MOST_POPULATED)
        return _as_tensor(memory, shape, info.dtype)
    finally:
        os.close(descriptor)


def _as_tensor(memory: MappedFile, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(memory.buffer, dtype=dtype, count=count).view(tuple(shape))


def check_rows(info: TableInfo, count: int, rows: Tensor) -> None:
    """Raise TypeError or ValueError unless rows can be written to ``count`` rows of a table."""
    if rows.dtype != info.dtype:
        raise TypeError(
            f"rows of {info.name!r} must be {info.dtype} (got {rows.dtype}); convert them with "
            f".to({info.dtype})"
        )
    if tuple(rows.shape) != (count, *info.row_shape):
        raise ValueError(
            f"{count} rows of {info.name!r} must have shape {(count, *info.row_shape)} (got "
            f"{tuple(rows.shape)})"
        )


def write_rows(table: Tensor, ids: Tensor, rows: Tensor) -> None:
    """``table[ids] = rows``; of an id that is there several times, the last row counts."""
    if ids.numel() > 1 and not bool((ids[1:] > ids[:-1]).all()):
        ascending, order = torch.sort(ids, stable=True)
        is_last = torch.ones_like(ascending, dtype=torch.bool)
        is_last[:-1] = ascending[:-1] != ascending[1:]
        if not bool(is_last.all()):
            chosen = order[is_last]
            copy_rows(table, ids[chosen], rows, chosen)
            return
    copy_rows(table, ids, rows, None)


def _check_ids(ids: Tensor, table: _HostTable) -> None:
    check_is_ids(ids)
    num_rows = table.rows.shape[0]
    if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < num_rows):
        raise IndexError(
            f"rows of {table.info.name!r} on this host are in [0, {num_rows}) (got "
            f"{int(ids.min())} to {int(ids.max())})"
        )


def check_is_ids(ids: Tensor) -> None:
    """Raise MessageError unless a tensor of a message can hold ids."""
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        raise MessageError(f"ids must be int32 or int64 of one dimension (got {ids.dtype})")


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise MessageError("names must be a list of texts")
    return value


def _described(info: TableInfo) -> str:
    shape = (info.starts[-1], *info.row_shape)
    return f"shape {shape}, {info.dtype}, {info.policy}, rows of hosts from {list(info.starts)}"


# ---------------------------------------------------------------------------- a server of them


class TableServer:
    """The server of one host. It answers once it is started, when its tables are filled.

    Args:
        port: 0 for a free one.
        directory: Where shared memory goes; see `HostTables`.
        **options: As for `MessageServer`.

    Attributes:
        handlers: What answers requests, by op; more may be added before it starts.
    """

    def __init__(
        self,
        number: int,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.tables = HostTables(number, is_shared=True, directory=directory)
        self.handlers: dict[str, Handler] = self.tables.handlers()
        self.handlers["ping"] = lambda request: WireMessage("ok")
        self._options = {
            "token": token,
            "host": host,
            "port": port,
            "on_client_gone": self.tables.release_all,
            **options,
        }
        self._server: MessageServer | None = None

    def start(self) -> None:
        """Listen, and answer in threads."""
        self._server = MessageServer(self.handlers, **self._options)

    @property
    def address(self) -> str:
        """``host:port``, once it has started."""
        assert self._server is not None
        return f"{self._server.host}:{self._server.port}"

    def num_clients(self) -> int:
        """How many clients have announced themselves and are there."""
        return 0 if self._server is None else len(self._server.clients.labels())

    def stop(self) -> None:
        """Stop answering, and free the tables."""
        if self._server is not None:
            self._server.stop()
        self.tables.close()
