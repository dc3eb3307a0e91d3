# SPDX-License-Identifier: Apache-2.0
"""The folder that ``torch_geometric.distributed.Partitioner`` writes, read without PyG.

::

    META.json            num_parts, is_hetero, node_types, edge_types
    node_map.pt          the part of every node; of a typed graph node_map/TYPE.pt
    edge_map.pt          the part of every edge; edge_map/SOURCE__NAME__DESTINATION.pt
    part_P/graph.pt      row, col, edge_id; of a typed graph by relation, and edge_id counts all
    part_P/node_feats.pt {global_id, id, feats: {x}, time}, by type
    part_P/edge_feats.pt {global_id, feats: {edge_attr}, edge_time}, by relation

Ids are those of the graph that was partitioned, and an edge is in the part of its destination. PyG
writes ``x``, ``edge_attr`` and times; labels and masks it leaves to the user. ``x`` becomes
``feat``.

[Note: what torch.save writes]
::

    NAME/data.pkl    a pickle of protocol 2: dictionaries, lists, strings, numbers, tensors
    NAME/data/KEY    the bytes of one storage, not compressed
    NAME/byteorder   "little" or "big"

The pickle is not unpickled. Of its operations those are read here that such a file needs, and of
the names that it may call five, none of which is looked up: three make a dictionary, one a tensor,
and the types of storages are dtypes. All else is an error, and so is a length that the file does
not have.
"""

from __future__ import annotations

import math
import os
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.files import check_text, open_regular, read_json_regular
from .._base.pickled import PickleMachine
from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..errors import PartitionFormatError

_STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}
_DICT = ("collections OrderedDict", "__builtin__ dict", "builtins dict")
_DEFAULT_DICT = "collections defaultdict"
_TENSOR = "torch._utils _rebuild_tensor_v2"
_MOST_PICKLE_BYTES = 1 << 24
_MOST_DIMENSIONS = 64


class NameOfTorch(str):
    """A name that a pickle may call: one of the above."""

    __slots__ = ()


def read_pt(path: str | os.PathLike[str]) -> Any:
    """What a file of ``torch.save`` holds: dictionaries, lists, tuples, strings, numbers, tensors.

    Args:
        path: A file as torch has written it since release 1.6.

    Returns:
        The value, its tensors on the CPU. They own their memory, of which the file has as much.

    Raises:
        PartitionFormatError: The file is damaged, compressed, of an older release, or holds
            anything else, such as objects of classes.
        OSError: It cannot be opened.
    """
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(4) != b"PK\x03\x04":
                raise ValueError(
                    "it is no archive of torch.save; load and save it again with torch 1.6 or later"
                )
            with zipfile.ZipFile(file) as archive:
                return _Archive(archive, size).value()
    except (ValueError, KeyError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
        raise PartitionFormatError(f"file {os.fspath(path)} cannot be read: {error}") from None
    except (IndexError, TypeError, OverflowError, RuntimeError, UnicodeDecodeError) as error:
        # What an interpreter of damaged operations meets.
        raise PartitionFormatError(
            f"file {os.fspath(path)} is damaged ({type(error).__name__}: {error})"
        ) from None


class _Archive:
    """The records of a file, checked against its size."""

    def __init__(self, archive: zipfile.ZipFile, file_size: int) -> None:
        self._archive = archive
        self._records: dict[str, zipfile.ZipInfo] = {}
        total = 0
        for info in archive.infolist():
            name = info.filename.partition("/")[2]
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 0x1:
                raise ValueError(f"record {info.filename!r} is compressed or encrypted")
            if info.file_size != info.compress_size or name in self._records:
                raise ValueError(f"record {info.filename!r} contradicts the directory of the file")
            self._records[name] = info
            total += info.file_size
        if total > file_size:
            raise ValueError(f"its records have {total} bytes, and the file {file_size}")
        self._storages: dict[str, Tensor] = {}

    def value(self) -> Any:
        order = self._bytes("byteorder", 16) if "byteorder" in self._records else b"little"
        if order.decode() != sys.byteorder:
            raise ValueError(f"its numbers are {order.decode()!r}-endian, unlike this machine's")
        return _TensorMachine(self._bytes("data.pkl", _MOST_PICKLE_BYTES), self).run()

    def _bytes(self, name: str, most: int) -> bytearray:
        if name not in self._records:
            raise ValueError(f"it has no record {name!r}")
        info = self._records[name]
        if info.file_size > most:
            raise ValueError(f"record {name!r} has {info.file_size} bytes, more than {most}")
        content = bytearray(info.file_size)
        with self._archive.open(info) as record:
            done = 0
            while done < len(content):
                count = record.readinto(memoryview(content)[done:])  # type: ignore[attr-defined]
                if not count:
                    raise ValueError(f"record {name!r} ends early")
                done += count
        return content

    def storage(self, reference: Any) -> Tensor:
        """The numbers that a persistent id of the pickle stands for."""
        if not isinstance(reference, tuple) or len(reference) != 5 or reference[0] != "storage":
            raise ValueError("it refers to something that is no storage")
        _, kind, key, _, count = reference
        prefix, _, name = kind.partition(" ") if isinstance(kind, NameOfTorch) else ("", "", "")
        if prefix != "torch" or name not in _STORAGES or not isinstance(key, str):
            raise ValueError(f"it has a storage of an unknown type ({kind!r})")
        dtype = _STORAGES[name]
        if key not in self._storages:
            content = self._bytes(f"data/{key}", sys.maxsize)
            if len(content) % dtype.itemsize:
                raise ValueError(f"storage {key} has a part of a number")
            none = torch.empty(0, dtype=dtype)
            self._storages[key] = torch.frombuffer(content, dtype=dtype) if content else none
        numbers = self._storages[key]
        if numbers.dtype != dtype or type(count) is not int or numbers.numel() != count:
            raise ValueError(
                f"storage {key} has {numbers.numel()} numbers, and not {count} {dtype}"
            )
        return numbers


class _TensorMachine(PickleMachine):
    """Knows dictionaries, tensors and the storages that they are views of."""

    def __init__(self, program: bytearray, archive: _Archive) -> None:
        super().__init__(program)
        self._archive = archive

    def named(self, module: str, name: str) -> Any:
        name_of_torch = NameOfTorch(f"{module} {name}")
        is_storage = module == "torch" and name in _STORAGES
        if not is_storage and name_of_torch not in (*_DICT, _DEFAULT_DICT, _TENSOR):
            return super().named(module, name)
        return name_of_torch

    def called(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        if isinstance(function, NameOfTorch):
            names = [a for a in arguments if isinstance(a, NameOfTorch) and a in _DICT]
            if function == _TENSOR:
                return _tensor(arguments)
            if function in _DICT and not arguments:
                return {}
            if function == _DEFAULT_DICT and len(names) == len(arguments):
                return {}
        return super().called(function, arguments)

    def referred(self, reference: Any) -> Tensor:
        return self._archive.storage(reference)


def _tensor(arguments: tuple[Any, ...]) -> Tensor:
    """A view of a storage: of offset, size and strides that stay inside, and repeat nothing."""
    if len(arguments) not in (6, 7) or not isinstance(arguments[0], Tensor):
        raise ValueError("its pickle makes a tensor of other arguments than torch does")
    storage, offset, size, strides = arguments[:4]
    if (
        not isinstance(size, tuple)
        or not isinstance(strides, tuple)
        or len(size) != len(strides)
        or len(size) > _MOST_DIMENSIONS
        or any(type(n) is not int or n < 0 for n in (offset, *size, *strides))
    ):
        raise ValueError(f"a tensor cannot have the size {size!r} with the strides {strides!r}")
    count = math.prod(size)
    last = offset + sum((n - 1) * stride for n, stride in zip(size, strides, strict=True))
    if count and (count > storage.numel() or last >= storage.numel()):
        raise ValueError(
            f"a tensor of the size {size} does not fit its storage of {storage.numel()} numbers"
        )
    return storage.as_strided(size, strides, offset) if count else storage.new_empty(size)


META = "META.json"
_TO_OURS = {"x": "feat", "y": "label"}
_MOST = 1 << 20
"""Of parts."""


@dataclass(frozen=True)
class PyGPart:
    """One part, by ids before partitioning.

    Args:
        nodes: Node type to int64 ids, ascending.
        node_features: Node type to columns with a row for each of them.
        edges: Relation to sources, destinations and ids, int64, by destination and then id.
        edge_features: Relation to columns with a row for each of them.
    """

    nodes: dict[str, Tensor]
    node_features: dict[str, dict[str, Tensor]]
    edges: dict[CanonicalEType, tuple[Tensor, Tensor, Tensor]]
    edge_features: dict[CanonicalEType, dict[str, Tensor]]


@dataclass(frozen=True)
class PyGPartition:
    """A partition that PyG wrote.

    Args:
        is_typed: Whether it is of ``HeteroData``.
        node_parts: Node type to the part of each node, int64.
        edge_parts: Relation to the part of each edge, int64.
    """

    folder: Path
    num_parts: int
    is_typed: bool
    node_parts: dict[str, Tensor]
    edge_parts: dict[CanonicalEType, Tensor]
    _offsets: dict[CanonicalEType, int] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path) -> PyGPartition:
        """The partition of a folder, given by it or by its ``META.json``."""
        folder = path if path.is_dir() else path.parent
        try:
            meta = read_json_regular(folder / META)
        except (OSError, ValueError) as error:
            raise PartitionFormatError(f"{folder / META} cannot be read: {error}") from None
        num_parts, ntypes, etypes = _checked_meta(folder, meta)
        is_typed = ntypes is not None
        node_files = {DEFAULT_NTYPE: "node_map.pt"}
        edge_files = {DEFAULT_CANONICAL_ETYPE: "edge_map.pt"}
        if ntypes is not None:
            node_files = {t: f"node_map/{t}.pt" for t in ntypes}
            edge_files = {t: f"edge_map/{'__'.join(t)}.pt" for t in etypes}
        node_parts = {t: _parts(folder / name, num_parts) for t, name in node_files.items()}
        edge_parts = {t: _parts(folder / name, num_parts) for t, name in edge_files.items()}
        offsets, count = {}, 0
        for etype, parts in edge_parts.items():
            offsets[etype] = count
            count += parts.numel()
        return cls(folder, num_parts, is_typed, node_parts, edge_parts, offsets)

    def read(self, part: int) -> PyGPart:
        """One part."""
        if not 0 <= part < self.num_parts:
            raise ValueError(f"there is no part {part} of {self.num_parts} in {self.folder}")
        folder = self.folder / f"part_{part}"
        graph = _read(folder / "graph.pt")
        node_feats, edge_feats = _read(folder / "node_feats.pt"), _read(folder / "edge_feats.pt")
        if not self.is_typed:
            graph = {DEFAULT_CANONICAL_ETYPE: graph}
            node_feats = {DEFAULT_NTYPE: node_feats}
            edge_feats = {DEFAULT_CANONICAL_ETYPE: edge_feats}
        nodes = {t: (of == part).nonzero().view(-1) for t, of in self.node_parts.items()}
        edges, edge_columns = {}, {}
        for etype in self.edge_parts:
            where = f"{folder / 'graph.pt'}, relation {etype}"
            edges[etype], order = self._edges(_entry(graph, etype, where), etype, part, where)
            where = f"{folder / 'edge_feats.pt'}, relation {etype}"
            columns = _dict(edge_feats.get(etype), where)
            edge_columns[etype] = self._edge_columns(columns, order, where)
        node_columns = {}
        where = str(folder / "node_feats.pt")
        for t, ids in nodes.items():
            stored = _entry(node_feats, t, where)
            node_columns[t] = self._node_columns(stored, t, ids, f"{where}, type {t!r}")
        return PyGPart(nodes, node_columns, edges, edge_columns)

    def _edges(
        self, stored: Mapping[str, Any], etype: CanonicalEType, part: int, where: str
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """Sources, destinations and ids; and where each was in the file."""
        row, col = (_ids(stored, name, where) for name in ("row", "col"))
        eids = _ids(stored, "edge_id", where) - self._offsets[etype]
        if not row.numel() == col.numel() == eids.numel():
            raise PartitionFormatError(f"{where}: row, col and edge_id differ in length")
        _check_range(row, self.node_parts[etype[0]].numel(), f"{where}: row")
        _check_range(col, self.node_parts[etype[2]].numel(), f"{where}: col")
        _check_range(eids, self.edge_parts[etype].numel(), f"{where}: edge_id")
        owned = (self.edge_parts[etype] == part).nonzero().view(-1)
        if not torch.equal(eids.sort().values, owned):
            raise PartitionFormatError(
                f"{where}: its edges are not those that edge_map gives to part {part}"
            )
        if bool((self.node_parts[etype[2]][col] != part).any()):
            raise PartitionFormatError(f"{where}: an edge ends at a node of another part")
        order = torch.argsort(eids)
        order = order[torch.argsort(col[order], stable=True)]
        return (row[order], col[order], eids[order]), order

    def _edge_columns(
        self, stored: Mapping[str, Any], order: Tensor, where: str
    ) -> dict[str, Tensor]:
        """Columns in the order of the edges."""
        feats = dict(_dict(stored.get("feats"), where))
        if stored.get("edge_time") is not None:
            feats["edge_time"] = stored["edge_time"]
        columns = {}
        for name, column in feats.items():
            if column is not None:
                columns[name] = _column(column, order.numel(), name, where)[order]
        return columns

    def _node_columns(
        self, stored: Mapping[str, Any], ntype: str, ids: Tensor, where: str
    ) -> dict[str, Tensor]:
        """Columns in the order of the ids."""
        given = _ids(stored, "id" if self.is_typed else "global_id", where)
        ascending, order = given.sort()
        if not torch.equal(ascending, ids):
            raise PartitionFormatError(f"{where}: its nodes are not those that node_map gives it")
        feats = _dict(stored.get("feats"), where)
        columns = {}
        for name, column in feats.items():
            if column is not None:
                columns[_TO_OURS.get(name, name)] = _column(column, ids.numel(), name, where)[order]
        if stored.get("time") is not None:  # of all nodes of the type, in each part
            count = self.node_parts[ntype].numel()
            columns["time"] = _column(stored["time"], count, "time", where)[ids]
        return columns


def is_pyg_folder(path: Path) -> bool:
    """Whether a path means a partition of PyG's: its folder, or the ``META.json`` in it."""
    return path.name == META or (path.is_dir() and (path / META).exists())


def _checked_meta(folder: Path, meta: Any) -> tuple[int, list[str] | None, list[CanonicalEType]]:
    """Parts, node types (None of a plain graph) and relations."""
    meta = meta if isinstance(meta, dict) else {}
    num_parts, is_typed = meta.get("num_parts"), meta.get("is_hetero")
    if type(num_parts) is not int or type(is_typed) is not bool or not 1 <= num_parts <= _MOST:
        raise PartitionFormatError(
            f"{folder / META} must have num_parts and is_hetero (got {num_parts!r}, {is_typed!r}); "
            "it is not what torch_geometric.distributed.Partitioner writes"
        )
    if not is_typed:
        return num_parts, None, []
    ntypes, etypes = meta.get("node_types"), meta.get("edge_types")
    if not isinstance(ntypes, list) or not isinstance(etypes, list):
        raise PartitionFormatError(f"{folder / META} must list node_types and edge_types")
    triples = [tuple(t) for t in etypes if isinstance(t, list) and len(t) == 3]
    names = [*ntypes, *(name for triple in triples for name in triple)]
    is_fine = len(triples) == len(etypes) and all(map(_is_name, names))
    if not is_fine or len(set(triples)) != len(triples) or len(set(ntypes)) != len(ntypes):
        raise PartitionFormatError(
            f"{folder / META} must name each node type and each relation, of three names, once"
        )
    unknown = {n for triple in triples for n in (triple[0], triple[2])} - set(ntypes)
    if unknown:
        raise PartitionFormatError(f"{folder / META} has relations of unknown types {unknown}")
    return num_parts, ntypes, [(a, b, c) for a, b, c in triples]


def _is_name(name: Any) -> bool:
    """Whether a file can be called so."""
    if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\\0"):
        return False
    try:
        return bool(check_text(name, "a name"))
    except ValueError:
        return False


def _read(path: Path) -> dict[Any, Any]:
    content = _value(path)
    if not isinstance(content, dict):
        raise PartitionFormatError(f"{path} holds no dictionary")
    return content


def _value(path: Path) -> Any:
    try:
        return read_pt(path)
    except OSError as error:
        raise PartitionFormatError(f"{path} cannot be read: {error}") from None


def _parts(path: Path, num_parts: int) -> Tensor:
    parts = _ids({"map": _value(path)}, "map", str(path))
    _check_range(parts, num_parts, f"{path}: parts")
    return parts


def _entry(stored: Mapping[Any, Any], key: Any, where: str) -> Mapping[str, Any]:
    entry = stored.get(key)
    if not isinstance(entry, dict):
        raise PartitionFormatError(f"{where} has nothing of {key!r}")
    return entry


def _dict(stored: Any, where: str) -> Mapping[Any, Any]:
    """A dictionary that may be missing."""
    if stored is None:
        return {}
    if not isinstance(stored, dict) or not all(isinstance(name, str) for name in stored):
        raise PartitionFormatError(f"{where}: there must be a dictionary by name")
    return stored


def _ids(stored: Mapping[str, Any], name: str, where: str) -> Tensor:
    ids = stored.get(name)
    if not isinstance(ids, Tensor) or ids.dim() != 1 or ids.dtype not in (torch.int64, torch.int32):
        raise PartitionFormatError(f"{where}: {name} must be a tensor of ids")
    return ids.to(torch.int64)


def _check_range(ids: Tensor, count: int, what: str) -> None:
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise PartitionFormatError(
            f"{what} must be in [0, {count}) (got {int(ids.min())} to {int(ids.max())})"
        )


def _column(column: Any, count: int, name: str, where: str) -> Tensor:
    if not isinstance(column, Tensor) or column.dim() == 0 or column.shape[0] != count:
        shape = tuple(column.shape) if isinstance(column, Tensor) else type(column).__name__
        raise PartitionFormatError(f"{where}: {name!r} must have {count} rows (got {shape})")
    return column
