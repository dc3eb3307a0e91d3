# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: numbered folders, each whole or not there, of rows by original id and of states.

Training runs and clusters write one format::

    checkpoint_dir/
    ├── step-00000020/             of a run ``epoch-00000020``: the word says what is counted
    │   ├── manifest.json          what the files hold, plain values, digests
    │   ├── shared.safetensors     tensors of the states that all ranks hold alike
    │   ├── rank-0.safetensors     what rank 0 wrote: rows with their ids, and what it alone has
    │   └── rank-1.safetensors ...
    ├── step-00000010/             the one before; older ones are removed
    ├── step-00000030.partial/     being written, or left by a job that was killed: never read
    └── .lock                      held by rank 0 of the job that writes here: see `RunLock`

A checkpoint is written under its partial name, the manifest last, and then renamed, which is one
atomic step. Its manifest::

    {
     "format": "graphshard-checkpoint",
     "format_version": 3,
     "step": 20,                  or "epoch": the number in the folder's name
     "world_size": 2,             ranks that wrote it
     "identity": {...},           what a run that goes on must have in common
     "values": {...},             plain ones: a run's history, the settings of sparse optimizers
     "rows": {"node~_N": 2708, "edge~_N:_E:_N": 10556},     how many there are of each policy
     "destinations": {"edge~_N:_E:_N": "node~_N"},          of edges: the policy of their nodes
     "tables": [...],             name, dtype, row_shape, policy and whether it is persistent
     "state": {"model": ..., "optimizer": ..., ...},        see `pack`
     "files": {"shared.safetensors": {"bytes": ..., "blake2b": ...}, ...},
     "blake2b": "..."             of all the rest, written with sorted keys and without spaces
    }

======================  ===========================================================================
tensor of a rank        holds
======================  ===========================================================================
``row/TABLE``           rows of a table
``id/POLICY``           the original ids of rows of that policy, in the same order
``structure/POLICY``    of nodes: a number made of their in-degrees, which another graph has not
``own/NAME``            what this rank alone has, such as the state of its random generator
======================  ===========================================================================

The digest of a manifest is taken and placed alike in all versions, so that damage is told from a
checkpoint of another version. Two older formats are read: version 2, of training runs alone, whose
ranks wrote all that they had under its own name; and that of clusters (`_CLUSTER`), which had the
settings of sparse optimizers beside ``values``.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import re
import secrets
import shutil
import socket
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.files import check_regular, check_text, read_json_regular, sync_folder, write_json
from ..comm import agree, is_initialized, rank, world_size
from ..comm.collectives import reduce_ints, shared_errors, text_of_rank_0
from ..errors import CheckpointError, PartitionFormatError
from ..partition.checked_files import FileRecord, RowSource, TensorFile, digest_of, write_tensors
from ..partition.format import digest_of_content as digest_without
from ._host_graph import node_policy
from ._host_tables import TableInfo
from ._job import on_rank_0 as on_rank_0

FORMAT, FORMAT_VERSION = "graphshard-checkpoint", 3
_OF_RUN, _CLUSTER = (FORMAT, 2), ("graphshard-cluster-checkpoint", 1)

MANIFEST, SHARED, LOCK_FILE, PARTIAL = "manifest.json", "shared.safetensors", ".lock", ".partial"
_SEEN = ".seen-"
VISIBLE_SECONDS = 10.0
"""Longest wait for what rank 0 wrote: network file systems remember that a name was not there."""
PIECE_BYTES = 1 << 24
"""Rows are read, compared and written about so many bytes at a time."""
_IDS_AT_ONCE = 1 << 20
_WITH_IDS = ("node~", "edge~", "embedding~")
"""How policies begin whose rows have ids; rows of others are in order."""

_TAKEN = (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
_OWNER_BYTES = 512
_DIGEST_KEY, _DIGEST_BYTES = "blake2b", 16
_HEX_DIGEST = re.compile(rf"[0-9a-f]{{{2 * _DIGEST_BYTES}}}")
_PLAIN = (str, int, float, bool, type(None))


class DamagedError(Exception):
    """A checkpoint is not whole; the one before may be. What reads its files raises this."""


# ---------------------------------------------------------------------------- folders


def rank_file(rank: int) -> str:
    """Name of the file with what a rank alone holds."""
    return f"rank-{rank}.safetensors"


@dataclass(frozen=True)
class CheckpointNames:
    """Names of the folders of checkpoints: a word and a number.

    Args:
        word: What is counted.
        least: The first number.
    """

    word: str
    least: int = 1

    def name(self, number: int) -> str:
        """Of the checkpoint of a number."""
        return f"{self.word}-{number:08d}"

    def number(self, name: str) -> int | None:
        """The number in a name; None if it is no such name."""
        match = re.fullmatch(rf"{self.word}-([0-9]{{8,20}})", name)
        number = self.least - 1 if match is None else int(match[1])
        return number if number >= self.least and self.name(number) == name else None

    def find(self, folder: Path) -> list[str]:
        """Finished checkpoints in a folder, newest first."""
        if not folder.is_dir():
            return []
        numbers = [self.number(item.name) for item in folder.iterdir()]
        ordered = sorted((number for number in numbers if number is not None), reverse=True)
        return [self.name(number) for number in ordered]

    def remove_partial(self, folder: Path) -> None:
        """Remove what killed runs left half written."""
        for item in folder.iterdir():
            if item.name.startswith(_SEEN):
                remove(item)
            whole = item.name.removesuffix(PARTIAL)
            if whole != item.name and self.number(whole) is not None:
                remove(item)

    def remove_old(self, folder: Path, num_newest: int, spared: Collection[str] = ()) -> None:
        """Keep so many of the newest, and those of some names."""
        with contextlib.suppress(OSError):
            for old in self.find(folder)[num_newest:]:
                if old not in spared:
                    remove(folder / old)


class RunLock:
    """Holds a folder for this process until `release`, or until the process ends.

    The lock is the kernel's (``flock`` on a file in the folder), so that it ends with the process
    that holds it, however that ends. The file stays, and says who took the lock last.

    Raises:
        CheckpointError: Another process holds it; names that one. Or the file of the lock cannot
            be opened or made.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / LOCK_FILE
        # No link is followed and nothing is waited for, whatever stands in place of the file.
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        try:
            descriptor = os.open(path, flags, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"{path} must be a plain file that this process may write ({error.strerror}), to "
                "hold the folder with; remove what is there, or give another checkpoint_dir"
            ) from None
        self._end = weakref.finalize(self, os.close, descriptor)
        try:
            _lock(descriptor, folder)
        except BaseException:
            self.release()
            raise
        owner = f"process {os.getpid()} on {socket.gethostname()}"
        with contextlib.suppress(OSError):  # of a full disk: the lock itself needs no room
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, owner.encode(), 0)

    def release(self) -> None:
        """Free the folder; a second call does nothing."""
        self._end()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _TAKEN:
            raise CheckpointError(
                f"{folder} is in use by another run ({_owner(descriptor)}); wait for that run or "
                "end it, or give another checkpoint_dir"
            ) from None
        warnings.warn(
            f"{folder} cannot be locked ({error.strerror}), so nothing keeps another run from "
            "writing there; give each run its own checkpoint_dir",
            RuntimeWarning,
            stacklevel=2,
        )


def _owner(descriptor: int) -> str:
    with contextlib.suppress(OSError):
        owner = os.pread(descriptor, _OWNER_BYTES, 0).decode("utf-8", errors="replace")
        if owner.isprintable() and owner:
            return owner
    return "which has not said yet who it is"


# ---------------------------------------------------------------------------- manifests


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a manifest says.

    Args:
        identity: What a run that goes on must have in common.
        rows: Number of rows of each policy.
        destinations: Policy of the edges of each relation to that of the nodes they enter.
        tables: By name; ``starts`` are 0 and the number of rows.
        state: Packed states by name.
    """

    number: int
    world_size: int
    identity: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    destinations: dict[str, str] = field(default_factory=dict)
    tables: dict[str, TableInfo] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    files: dict[str, FileRecord] = field(default_factory=dict)
    digest: str = ""
    version: int = FORMAT_VERSION

    @property
    def policies(self) -> list[str]:
        """Policies whose original ids are in the files."""
        return policies_in_files((info.policy for info in self.tables.values()), self.destinations)


ManifestCheck: TypeAlias = Callable[[Path, Manifest], object]
"""Raises ValueError or `DamagedError` for a manifest that is damaged, `CheckpointError` for one
that is of another job."""


digest_of_content = partial(digest_without, key=_DIGEST_KEY)
"""Digest of a manifest, without the one that it carries."""


def records_of(paths: Iterable[Path]) -> dict[str, FileRecord]:
    """Size and digest of tensor files that have been written, by name."""
    return {
        path.name: FileRecord(path.stat().st_size, TensorFile.open(path).blake2b) for path in paths
    }


def write_manifest(folder: Path, names: CheckpointNames, manifest: Manifest) -> None:
    """Write the JSON of a checkpoint, with its digest, and sync it to disk."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        names.word: manifest.number,
        "world_size": manifest.world_size,
        "identity": manifest.identity,
        "values": manifest.values,
        "rows": manifest.rows,
        "destinations": manifest.destinations,
        "tables": [info.as_json() for info in manifest.tables.values()],
        "state": manifest.state,
        "files": {name: asdict(record) for name, record in manifest.files.items()},
    }
    content[_DIGEST_KEY] = digest_of_content(content)
    write_json(folder / MANIFEST, content)


def read_manifest(
    folder: Path, names: CheckpointNames, check: ManifestCheck = lambda folder, manifest: None
) -> Manifest:
    """Read and check the JSON of a checkpoint.

    Raises:
        DamagedError: It is missing, is not what was written, or does not belong to this folder.
        CheckpointError: It is of another format, or another version of it; or what ``check`` says.
    """
    content, digest = _read_sealed(folder)
    try:
        manifest = _checked(folder, names, content, digest)
        check(folder, manifest)
    except CheckpointError:
        raise
    except ValueError as error:
        raise DamagedError(f"the manifest of {folder} is damaged ({error})") from None
    return manifest


def _read_sealed(folder: Path) -> tuple[dict[str, Any], str]:
    """What a manifest says, as this version says it, not checked further; and its digest."""
    path = folder / MANIFEST
    try:
        content = read_json_regular(path)
        if not isinstance(content, dict):
            raise ValueError(f"it must be a JSON object, and is a {type(content).__name__}")
        carried = content.get(_DIGEST_KEY)
        if carried is not None and carried != digest_of_content(content):
            raise ValueError("its digest is not that of its content")
        kind = content.get("format"), content.get("format_version")
        is_read = kind in ((FORMAT, FORMAT_VERSION), _OF_RUN, _CLUSTER)
        if not is_read and (carried is not None or kind == (FORMAT, 1)):
            raise CheckpointError(
                f"{folder} has the format {kind}, and this graphshard reads "
                f"{(FORMAT, FORMAT_VERSION)}; resume with the graphshard that wrote it"
            )
        digest = _hex_digest(_DIGEST_KEY, carried)
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None
    if kind == _OF_RUN:
        values = {"history": content.get("history")}
        content |= {"values": values, "rows": {}, "destinations": {}, "tables": [], "state": {}}
    if kind == _CLUSTER:
        values = {"sparse_optimizers": content.get("sparse_optimizers")}
        content |= {"values": values, "identity": {}}
    return content, digest


def _checked(
    folder: Path, names: CheckpointNames, content: Mapping[str, Any], digest: str
) -> Manifest:
    number = check_positive(content, names.word, names.least)
    if folder.name != names.name(number):
        raise ValueError(f"it is of {names.word} {number}, and its folder is {folder.name}")
    world_size, files = check_positive(content, "world_size"), json_object(content, "files")
    expected = {SHARED, *map(rank_file, range(min(world_size, len(files))))}
    if set(files) != expected or len(files) != world_size + 1:
        raise ValueError(f"files must be {SHARED} and one of each of {world_size} ranks")
    rows = json_object(content, "rows")
    for policy in rows:
        check_positive(rows, policy, 0)
    destinations = _destinations(content, rows)
    tables = {}
    for entry in list_of_objects(content, "tables"):
        info = TableInfo.from_json(entry)
        num_rows = rows.get(info.policy)
        if len(info.starts) != 2 or num_rows not in (None, info.starts[-1]) or info.name in tables:
            raise ValueError(f"the table {info.name!r} does not fit the rows of its policy")
        if info.policy.startswith("edge~") and info.policy not in destinations:
            raise ValueError(f"the table {info.name!r} is of edges without destinations")
        tables[info.name] = info
    return Manifest(
        number=number,
        world_size=world_size,
        identity=json_object(content, "identity"),
        values=json_object(content, "values"),
        rows=rows,
        destinations=destinations,
        tables=tables,
        state=json_object(content, "state"),
        files={name: check_record(name, value) for name, value in files.items()},
        digest=digest,
        version=content["format_version"],
    )


def _destinations(content: Mapping[str, Any], rows: Mapping[str, int]) -> dict[str, str]:
    if "destinations" not in content:  # written when no type had a colon in its name
        return {p: node_policy(p.rpartition(":")[2]) for p in rows if p.startswith("edge~")}
    destinations = json_object(content, "destinations")
    for policy, nodes in destinations.items():
        if policy not in rows or nodes not in rows:
            raise ValueError(f"destinations name {policy!r:.80} or {nodes!r:.80}, and rows do not")
    return destinations


def list_of_objects(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """A list of objects in a JSON object; ValueError if it is none."""
    value = content.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{key} must be a list of JSON objects (got {value!r:.80})")
    return value


def check_record(name: str, value: Any) -> FileRecord:
    """What a manifest says of a file; ValueError if it is no such thing."""
    if not isinstance(value, dict) or set(value) != {"bytes", "blake2b"}:
        raise ValueError(f"files['{name}'] must have bytes and blake2b (got {value!r:.80})")
    return FileRecord(
        check_positive(value, "bytes"), _hex_digest(f"blake2b of {name}", value["blake2b"])
    )


def _hex_digest(name: str, value: Any) -> str:
    if not isinstance(value, str) or not _HEX_DIGEST.fullmatch(value):
        raise ValueError(
            f"{name} must be {2 * _DIGEST_BYTES} digits in base 16 (got {value!r:.80})"
        )
    return value


def check_positive(content: Mapping[str, Any], key: str, least: int = 1) -> int:
    """A whole number of a JSON object; ValueError if it is none."""
    value = content.get(key)
    if type(value) is not int or value < least:
        raise ValueError(f"{key} must be an integer, at least {least} (got {value!r:.80})")
    return value


def json_object(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    """An object in a JSON object; ValueError if it is none."""
    value = content.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be a JSON object (got {value!r:.80})")
    return value


# ---------------------------------------------------------------------------- writing


def hold_folder(
    folder: Path, names: CheckpointNames, check: Callable[[], object]
) -> RunLock | None:
    """Make and hold a folder of checkpoints, for one job to write to. Collective.

    Rank 0 has the lock. What killed jobs left half written is removed.

    Args:
        folder: It need not be there.
        check: Called on rank 0 while it is held, before anything in it is changed.

    Raises:
        CheckpointError: Another job holds it, or a rank does not see it; on all ranks.
    """
    lock: RunLock | None = None
    try:
        with shared_errors():
            if rank() == 0:
                check_text(str(folder), "checkpoint_dir")
                folder.mkdir(parents=True, exist_ok=True)
                lock = RunLock(folder)
                check()
                names.remove_partial(folder)
        check_shared(folder)
    except BaseException:
        if lock is not None:
            lock.release()
        raise
    return lock


def write_checkpoint(
    folder: Path,
    names: CheckpointNames,
    manifest: Manifest,
    own: Mapping[str, Tensor | RowSource],
    shared: Mapping[str, Tensor],
) -> Path:
    """Write a checkpoint to a folder that is held; returns the checkpoint's folder. Collective.

    Args:
        manifest: What it says; files and digests are added.
        own: Tensors of this rank's file.
        shared: Tensors of the states, on rank 0.

    Raises:
        Exception: What a rank raised, on all ranks; nothing is left of the checkpoint.
    """
    final = folder / names.name(manifest.number)
    partial = final.with_name(final.name + PARTIAL)
    file_names = (SHARED, *map(rank_file, range(world_size())))
    try:
        with shared_errors():
            if rank() == 0:
                remove(partial)
                partial.mkdir()
        with shared_errors():
            write_tensors(partial / rank_file(rank()), own)
            if rank() == 0:
                write_tensors(partial / SHARED, shared)
        with shared_errors():
            if rank() == 0:
                files = records_of(partial / name for name in file_names)
                write_manifest(partial, names, replace(manifest, files=files))
                sync_folder(partial)
                remove(final)  # found damaged when the job was started again
                os.rename(partial, final)
                sync_folder(folder)
    except Exception:  # a rank that failed may be gone, not say why
        if rank() == 0:  # a disk that is full needs the room
            shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def check_shared(folder: Path) -> None:
    """Raise unless all ranks see what rank 0 writes to a folder. Collective."""
    file = folder / text_of_rank_0(f"{_SEEN}{secrets.token_hex(8)}")
    try:
        on_rank_0(file.touch)
        with shared_errors():
            deadline = time.monotonic() + VISIBLE_SECONDS
            while not file.is_file():
                if time.monotonic() > deadline:
                    raise CheckpointError(
                        f"rank 0 wrote to the folder {folder}, but this rank does not see it "
                        "there; checkpoint_dir must be on storage that all ranks share"
                    )
                time.sleep(0.05)
    finally:
        if rank() == 0:
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a folder with all in it, or whatever else has its name; it need not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Opened:
    """A checkpoint that is whole."""

    path: Path
    manifest: Manifest
    files: list[dict[str, Tensor]]
    states: dict[str, Any]

    def own(self) -> dict[str, Tensor]:
        """What this rank alone had, of a checkpoint that as many ranks wrote."""
        tensors = self.files[rank()]
        if self.manifest.version == 2:
            return dict(tensors)
        return {k.removeprefix("own/"): v for k, v in tensors.items() if k.startswith("own/")}


def open_newest(
    folder: Path,
    names: CheckpointNames,
    *,
    number: int | None = None,
    check: ManifestCheck = lambda folder, manifest: None,
) -> Opened | None:
    """The newest checkpoint that is whole for all ranks, or that of a number. Collective.

    Of the checkpoints that are damaged there is a warning. Every byte is read by one rank.

    Args:
        number: Which of them; None for the newest.
        check: Of each manifest, before the files are read.

    Raises:
        CheckpointError: There are some, and none is whole; or what ``check`` says. On all ranks.
    """
    with shared_errors():
        listed = names.find(folder) if rank() == 0 else []
        listed = [name for name in listed if number in (None, names.number(name))]
    candidates, damage = text_of_rank_0("\n".join(listed)).splitlines(), ""
    for name in candidates:
        opened, damage = _try(folder / name, names, check)
        if opened is not None:
            return opened
        if len(candidates) > 1:
            warnings.warn(f"{damage}; trying the one before", RuntimeWarning, stacklevel=3)
    if damage:
        raise CheckpointError(
            f"no checkpoint in {folder} is whole: {damage}; start again in another folder"
        )
    return None


def _try(path: Path, names: CheckpointNames, check: ManifestCheck) -> tuple[Opened | None, str]:
    """The checkpoint, or what of it is damaged, the same on all ranks. Collective."""
    opened: Opened | None = None
    damage = ""
    with shared_errors():
        try:
            manifest = read_manifest(path, names, check)
            files, states = read_rank_files(path, manifest), read_states(path, manifest)
            check_digests(path, manifest, rank(), world_size())
            opened = Opened(path, manifest, files, states)
        except DamagedError as error:
            damage = str(error)
    num_ranks = world_size()
    first_failed = -reduce_ints([-(rank() if opened is None else num_ranks)], "max")[0]
    if first_failed < num_ranks:
        return None, damage or f"{path} is damaged, or not there, for rank {first_failed}"
    assert opened is not None
    if is_initialized():
        agree(opened.manifest.digest, f"the manifest of {path}")
    return opened, ""


def check_digests(folder: Path, manifest: Manifest, first: int, step: int) -> None:
    """Read every byte of each ``step``-th file from ``first`` on, by name; compare digests."""
    for name in sorted(manifest.files)[first::step]:
        try:
            digest = digest_of(folder / name)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{folder / name} is missing or damaged ({error})") from None
        if digest != manifest.files[name].blake2b:
            raise DamagedError(
                f"{folder / name} is damaged: its digest is not that of the manifest"
            )


def read_states(
    folder: Path, manifest: Manifest, *, only: str | None = None, whole: bool = False
) -> dict[str, Any]:
    """The states of a checkpoint, by name; tensors are copies.

    Args:
        only: The name of the one state that is wanted.
        whole: Read every byte of the file, and compare the digest.
    """
    tensors = read_checked(folder / SHARED, manifest.files[SHARED], whole=whole)
    packed = manifest.state
    if manifest.version == 2:
        packed = _state_of_version_2(tensors)
    try:
        chosen = {name: value for name, value in packed.items() if only in (None, name)}
        return {name: unpack(value, tensors) for name, value in chosen.items()}
    except ValueError as error:
        raise DamagedError(f"{folder} is damaged ({error})") from None


def _state_of_version_2(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Names of tensors began with that of their state."""
    state: dict[str, Any] = {}
    for name in tensors:
        word, _, rest = name.partition("/")
        state.setdefault(word, {"dict": []})["dict"].append([rest, {"tensor": name}])
    return state


def read_rank_files(folder: Path, manifest: Manifest) -> list[dict[str, Tensor]]:
    """The mapped tensors of each rank's file, checked against what the manifest says of them."""
    files = []
    for number in range(manifest.world_size):
        name = rank_file(number)
        files.append(read_checked(folder / name, manifest.files[name], whole=False))
    for key, info in _expected(manifest).items():
        total = 0
        for number, file in enumerate(files):
            rows = file.get(key)
            if rows is None or rows.dtype != info.dtype or tuple(rows.shape[1:]) != info.row_shape:
                raise DamagedError(f"{folder / rank_file(number)} has no rows {key!r}, or others")
            total += len(rows)
        if total != info.starts[-1]:
            raise DamagedError(f"{folder} has {total} rows {key!r} and not {info.starts[-1]}")
    return files


def _expected(manifest: Manifest) -> dict[str, TableInfo]:
    expected = {f"row/{name}": info for name, info in manifest.tables.items()}
    for policy in manifest.policies:
        starts = (0, manifest.rows.get(policy, 0))
        ids = TableInfo(f"id/{policy}", torch.int64, (), starts, policy)
        expected[f"id/{policy}"] = ids
        if policy.startswith("node~"):
            expected[f"structure/{policy}"] = ids
    return expected


def read_checked(path: Path, record: FileRecord, *, whole: bool = True) -> dict[str, Tensor]:
    """The tensors of a file of a checkpoint, mapped.

    Args:
        whole: Read every byte, and compare their digest; else the header alone.
    """
    try:
        size = check_regular(path).st_size
        if size != record.bytes:
            raise DamagedError(f"{path} is damaged: it has {size} bytes and not {record.bytes}")
        file = TensorFile.open(path)
        if file.blake2b != record.blake2b or (whole and digest_of(path) != record.blake2b):
            raise DamagedError(f"{path} is damaged: its digest is not that of the manifest")
        return file.read()
    except (PartitionFormatError, OSError) as error:
        raise DamagedError(f"{path} is missing or damaged ({error})") from None


# ---------------------------------------------------------------------------- rows by original id


def pieces(
    start: int, stop: int, dtype: torch.dtype, row_shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` in pieces of a few megabytes."""
    most = max(1, PIECE_BYTES // max(1, math.prod(row_shape) * dtype.itemsize))
    for begin in range(start, stop, most):
        yield begin, min(stop, begin + most)


def policies_in_files(policies: Iterable[str], destinations: Mapping[str, str]) -> list[str]:
    """Policies whose ids are in a checkpoint: those given, and of edges their destinations'."""
    policies_needed = set(policies)
    policies_needed |= {
        destinations[policy] for policy in policies_needed if policy.startswith("edge~")
    }
    return sorted(p for p in policies_needed if p.startswith(_WITH_IDS))


class SavedRows:
    """Rows of one policy in the files of a checkpoint, by original id."""

    def __init__(self, files: Sequence[Mapping[str, Tensor]], policy: str) -> None:
        self._files, self._policy = files, policy

    def find(self, original: Tensor) -> Tensor:
        """int64 ``[n]``: positions of rows among those of all files, from their original ids.

        CheckpointError if some are not there.
        """
        ascending, order = torch.sort(original)
        places = torch.full_like(original, -1)
        first = 0
        for file in self._files:
            ids = file[f"id/{self._policy}"]
            for begin in range(0, len(ids) if len(original) else 0, _IDS_AT_ONCE):
                chunk = ids[begin : begin + _IDS_AT_ONCE]
                slot = torch.searchsorted(ascending, chunk).clamp_(max=len(original) - 1)
                hits = (ascending[slot] == chunk).nonzero().view(-1)
                places[order[slot[hits]]] = first + begin + hits
            first += len(ids)
        missing = (places < 0).nonzero().view(-1)
        if missing.numel():
            raise CheckpointError(
                f"{missing.numel()} rows of {self._policy} are not in the checkpoint, such as that "
                f"of original id {int(original[missing[0]])}; it is of another graph"
            )
        return places

    def read(self, key: str, places: Tensor) -> Tensor:
        """Rows of one tensor of the files, from what `find` gave."""
        first, num_read, out = 0, 0, None
        for file in self._files:
            rows = file[key]
            inside = (places >= first) & (places < first + len(rows))
            count = int(inside.sum())
            if count == len(places):
                return _chosen(rows, places - first)
            if count:
                if out is None:
                    out = torch.empty((len(places), *rows.shape[1:]), dtype=rows.dtype)
                out[inside] = _chosen(rows, places[inside] - first)
                num_read += count
            first += len(rows)
        assert out is not None and num_read == len(places)
        return out


def _chosen(rows: Tensor, places: Tensor) -> Tensor:
    """``rows[places]``, not copied where they follow each other."""
    count = len(places)
    if count and int(places[-1]) - int(places[0]) == count - 1:
        begin = int(places[0])
        if torch.equal(places, torch.arange(begin, begin + count)):
            return rows[begin : begin + count]
    return rows.index_select(0, places)


# ---------------------------------------------------------------------------- states


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON has it.

    Args:
        value: Plain values and tensors, in dictionaries, lists and tuples.
        tensors: Where tensors go.
        name: Of the value, for errors and for names of tensors.

    Raises:
        TypeError: Something else is in it.
    """
    if isinstance(value, Tensor):
        key = name
        while key in tensors:
            key += "'"
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, _PLAIN):
                raise TypeError(
                    f"keys of {name} must be text or numbers (got {type(key).__name__})"
                )
            pairs.append([_plain(key), pack(item, tensors, f"{name}/{key}")])
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}/{n}") for n, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if type(value) in _PLAIN:
        return _plain(value)
    raise TypeError(
        f"{name} must be made of tensors and of values that JSON has (got {type(value).__name__}); "
        "save something else in its place"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was packed, with copies of tensors; ValueError if `pack` makes no such."""
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if isinstance(packed, _PLAIN):
        return packed
    if isinstance(packed, dict) and len(packed) == 1:
        ((kind, content),) = packed.items()
        if kind == "tensor" and isinstance(content, str) and content in tensors:
            return tensors[content].clone()
        if kind == "tuple" and isinstance(content, list):
            return tuple(unpack(item, tensors) for item in content)
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "dict" and isinstance(content, list):
            return dict(_pair(pair, tensors) for pair in content)
    raise ValueError(f"the state holds {packed!r:.80}, which is no value")


def _pair(pair: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"the state holds {pair!r:.80}, which is no key and value")
    key = unpack(pair[0], tensors)
    if not isinstance(key, _PLAIN):
        raise ValueError(f"the state holds the key {key!r:.80}")
    return key, unpack(pair[1], tensors)
