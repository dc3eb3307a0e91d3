# SPDX-License-Identifier: Apache-2.0
"""GraphFiles: a graph that is partitioned from NumPy's files, without being read as a whole.

Edges are read a batch at a time, in the order of the file; rows of features a block at a time. So
`partition_graph` with ``part_method="multilevel"``, or any other with ``memory``, needs memory for
some numbers of each node, and for none of the edges.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._base.files import PathLike, open_regular
from .._base.kernels import num_threads
from .._base.typing import DEFAULT_CANONICAL_ETYPE as _ONLY
from .._base.typing import DEFAULT_NTYPE, INDEX_DTYPES, CanonicalEType
from ._edge_files import kernels
from ._graph_source import BATCH_EDGES, GraphSource, check_type_names
from .checked_files import DTYPE_NAMES, RowSource, identity_of

_BLOCK_BYTES = 1 << 25  # rows that are put in order at a time
_GAP_BYTES = 1 << 14  # that are read and left out, rather than beginning another read


EdgePaths: TypeAlias = "ArrayPath | tuple[ArrayPath, ArrayPath]"
ArrayPath: TypeAlias = "PathLike | ArrayFile"


@dataclass(frozen=True, kw_only=True)
class GraphFiles:
    """A graph in ``.npy`` files, for `partition_graph`.

    Args:
        num_nodes: Number of nodes; of several types, by type.
        edges: A file of ``[2, num_edges]`` integers, row 0 sources, row 1 destinations; or a pair
            of files of ``[num_edges]``, sources and destinations; of several relations, by (source
            type, relation, destination type). An `ArrayFile` may stand for a path.
        node_features: By name, a file, or a tensor, of a row for each node; of several node types,
            a dict of those by type.
        edge_features: The same of edges; of several relations, by relation.
        idtype: int32 or int64: dtype of local ids in the files of parts.
        by_content: Whether a run that was interrupted is known by what the files hold, rather than
            by their names and times: for files that are made anew for each run.

    Example:
        >>> files = GraphFiles(num_nodes=10**8, edges="edges.npy")
        >>> partition_graph(files, "g", 8, "parts", part_method="multilevel")  # doctest: +SKIP
    """

    num_nodes: int | Mapping[str, int]
    edges: EdgePaths | Mapping[CanonicalEType, EdgePaths]
    node_features: Mapping[str, Any] = field(default_factory=dict)
    edge_features: Mapping[Any, Any] = field(default_factory=dict)
    idtype: torch.dtype = torch.int64
    by_content: bool = False


@dataclass(frozen=True)
class ArrayFile:
    """An array in a ``.npy`` file, or some of it.

    Args:
        offset: Where its first number begins.
        status: Size, time of the last change and number of the file.
    """

    path: Path
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    status: tuple[int, ...]

    @classmethod
    def open(cls, path: ArrayPath) -> ArrayFile:
        """Read the header, unless that was done.

        Raises:
            ValueError: It is not a file that `numpy.save` writes of numbers in rows.
            OSError: It cannot be opened.
        """
        if isinstance(path, ArrayFile):
            return path
        path = Path(path)
        with open_regular(path) as file:
            try:
                version = np.lib.format.read_magic(file)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, is_fortran, dtype = read(file)
            except ValueError as error:
                raise ValueError(
                    f"{path} must be a .npy file of numbers (got {error}); write it with numpy.save"
                ) from None
            status = os.fstat(file.fileno())
            offset = file.tell()
        count = int(np.prod(shape, dtype=object))
        if dtype.hasobject or dtype.names or (is_fortran and len(shape) > 1):
            raise ValueError(
                f"{path} must hold numbers, row after row (got {dtype} "
                f"{'in columns' if is_fortran else ''}); write it with numpy.save from "
                "numpy.ascontiguousarray"
            )
        if offset + count * dtype.itemsize != status.st_size:
            raise ValueError(
                f"{path} must have {offset + count * dtype.itemsize} bytes, as its header says "
                f"(got {status.st_size}); write it again"
            )
        return cls(path, dtype, shape, offset, (status.st_size, status.st_mtime_ns, status.st_ino))

    def read(self, first: int, count: int) -> npt.NDArray[Any]:
        """``count`` numbers, as if there were one dimension."""
        made = np.empty(count, dtype=self.dtype)
        data, start = made.view(np.uint8).data if count else memoryview(b""), 0
        with open_regular(self.path) as file:
            place = self.offset + first * self.dtype.itemsize
            while start < len(data):
                received = os.preadv(file.fileno(), [data[start:]], place + start)
                if not received:
                    raise OSError(f"{self.path} became shorter while it was read")
                start += received
        return made

    def tensor(self) -> Tensor:
        """All of it, mapped: pages are read when touched; it must not be written to.

        Pages that could be written to would count as memory of this process (``RLIMIT_DATA``).
        """
        mapped = np.memmap(self.path, self.dtype, "r", self.offset, self.shape)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            return torch.from_numpy(mapped)

    def identity(self) -> list[Any]:
        """What another file, or the same with other numbers, has not."""
        return [str(self.path.absolute()), str(self.dtype), list(self.shape), *self.status]

    def content_identity(self) -> list[Any]:
        """Dtype, shape and digest of the numbers."""
        digest = hashlib.blake2b(digest_size=16)
        count = int(np.prod(self.shape, dtype=object))
        at_once = max(_BLOCK_BYTES // max(self.dtype.itemsize, 1), 1)
        for first in range(0, count, at_once):
            digest.update(self.read(first, min(at_once, count - first)).view(np.uint8).data)
        return [str(self.dtype), list(self.shape), digest.hexdigest()]


@dataclass(frozen=True)
class _EdgeFile:
    """The ends of edges in one file, or in two.

    Args:
        dst_start: Place of the first destination among the numbers of its file.
    """

    src: ArrayFile
    dst: ArrayFile
    dst_start: int
    count: int

    @classmethod
    def open(cls, paths: EdgePaths) -> _EdgeFile:
        if not isinstance(paths, tuple):
            both = ArrayFile.open(paths)
            if len(both.shape) != 2 or both.shape[0] != 2 or both.dtype.kind not in "iu":
                raise ValueError(
                    f"{both.path} must hold integers of shape [2, num_edges] (got {both.dtype} "
                    f"{list(both.shape)}); write numpy.stack([src, dst])"
                )
            return cls(both, both, both.shape[1], both.shape[1])
        src, dst = map(ArrayFile.open, paths)
        for file in (src, dst):
            if file.shape != src.shape or len(file.shape) != 1 or file.dtype.kind not in "iu":
                raise ValueError(
                    f"{src.path} and {dst.path} must hold integers of one shape [num_edges] (got "
                    f"{src.dtype} {list(src.shape)} and {dst.dtype} {list(dst.shape)}); write the "
                    "sources and the destinations of all edges"
                )
        return cls(src, dst, 0, src.shape[0])

    def read(self, first: int, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Sources and destinations of some edges, int32 or int64."""
        src, dst = self.src.read(first, count), self.dst.read(self.dst_start + first, count)
        if src.dtype != dst.dtype or src.dtype not in (np.int32, np.int64):
            return src.astype(np.int64), dst.astype(np.int64)
        return src, dst


@dataclass(frozen=True)
class FileRows:
    """Rows of a file, read when they are written.

    Args:
        file: ``[num_rows, ...]``.
        ids: Makes the numbers of rows piece by piece, from the first on, whenever it is called.
        count: Rows in all.
    """

    file: ArrayFile
    ids: Callable[[], Iterator[Tensor]]
    count: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.from_numpy(np.empty(0, dtype=self.file.dtype)).dtype

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.count, *self.file.shape[1:]))

    def slices(self) -> Iterator[Tensor]:
        width = int(np.prod(self.file.shape[1:], dtype=np.int64))
        row_bytes = max(width * self.file.dtype.itemsize, 1)
        for piece in self.ids():
            for ids in piece.split(max(_BLOCK_BYTES // row_bytes, 1)):
                yield torch.from_numpy(self._rows(ids.numpy(), width, row_bytes))

    def _rows(self, ids: npt.NDArray[np.int64], width: int, row_bytes: int) -> npt.NDArray[Any]:
        """Some rows, read in the order in which they are in the file."""
        made = np.empty((len(ids), width), dtype=self.file.dtype)
        order = np.argsort(ids, kind="stable")
        ascending = ids[order]
        gap = 1 + _GAP_BYTES // row_bytes
        breaks = np.flatnonzero(np.diff(ascending) > gap) + 1
        most = max(_BLOCK_BYTES // row_bytes, 1)
        for some in np.split(np.arange(len(ids)), breaks):
            start = 0
            while start < len(some):
                first = ascending[some[start]]
                inside = some[start:]
                stop = start + int(np.searchsorted(ascending[inside], first + most))
                inside = some[start:stop]
                count = int(ascending[inside[-1]] - first) + 1
                rows = self.file.read(int(first) * width, count * width).reshape(count, width)
                made[order[inside]] = rows[ascending[inside] - first]
                start = stop
        return made.reshape(len(ids), *self.file.shape[1:])


class FileSource(GraphSource):
    """A graph in files as the stages of partitioning take it.

    Raises:
        TypeError: An argument of `GraphFiles` has the wrong form.
        ValueError: A file is not what it must be, or its counts contradict others.
        OSError: A file cannot be opened.
    """

    def __init__(self, files: GraphFiles) -> None:
        self.files = files
        counts, edges = files.num_nodes, files.edges
        if isinstance(counts, int) == isinstance(edges, Mapping):
            raise TypeError(
                "num_nodes and edges must both be of one type, or both dicts by type and by "
                f"relation (got {type(counts).__name__} and {type(edges).__name__})"
            )
        by_type = {DEFAULT_NTYPE: counts} if isinstance(counts, int) else dict(counts)
        is_plain = not isinstance(edges, Mapping)
        by_relation: dict[CanonicalEType, EdgePaths]
        by_relation = dict(edges) if isinstance(edges, Mapping) else {_ONLY: edges}
        if files.idtype not in INDEX_DTYPES:
            raise ValueError(f"idtype must be torch.int32 or torch.int64 (got {files.idtype})")
        self.ntypes = sorted(by_type)
        self.canonical_etypes = sorted(by_relation)
        check_type_names(self.ntypes, self.canonical_etypes)
        for etype in self.canonical_etypes:
            for ntype in (etype[0], etype[2]):
                if ntype not in by_type:
                    raise ValueError(
                        f"num_nodes must have the types of the ends of every relation (got {etype}"
                        f" and {self.ntypes}); add {ntype!r}"
                    )
        self.node_counts = [int(by_type[ntype]) for ntype in self.ntypes]
        if min(self.node_counts, default=0) < 0:
            raise ValueError(f"num_nodes must not be negative (got {by_type})")
        self._edges = [_EdgeFile.open(by_relation[etype]) for etype in self.canonical_etypes]
        self.edge_counts = [file.count for file in self._edges]
        self.src_type = [self.ntypes.index(src) for src, _, _ in self.canonical_etypes]
        self.dst_type = [self.ntypes.index(dst) for _, _, dst in self.canonical_etypes]
        self.idtype = files.idtype
        self.num_nodes, self.num_edges = sum(self.node_counts), sum(self.edge_counts)
        self.offsets = list(itertools.accumulate(self.node_counts, initial=0))
        self._node_features = _features_by_owner(
            "node", files.node_features, isinstance(counts, int), self.ntypes, self.node_counts
        )
        self._edge_features = _features_by_owner(
            "edge", files.edge_features, is_plain, self.canonical_etypes, self.edge_counts
        )
        self._by_content = files.by_content

    def edges(self, relation: int) -> tuple[Tensor, Tensor]:
        """All edges, in memory; for what cannot do with a batch at a time."""
        batches = list(self.edge_batches(relation))
        none = np.zeros(0, dtype=np.int64)
        src, dst = (
            torch.from_numpy(np.concatenate([none, *(ends[i] for ends in batches)])).to(self.idtype)
            for i in (0, 1)
        )
        return src, dst

    def edge_batches(
        self, relation: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        file, count = self._edges[relation], self.edge_counts[relation]
        for first in range(0, count, BATCH_EDGES):
            src, dst = file.read(first, min(BATCH_EDGES, count - first))
            for ids, path, ends, types in (
                (src, file.src.path, "sources", self.src_type),
                (dst, file.dst.path, "destinations", self.dst_type),
            ):
                most = self.node_counts[types[relation]]
                if ids.min() < 0 or ids.max() >= most:
                    bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
                    raise ValueError(
                        f"{path} must hold {ends} in [0, {most}) (got {bad}); correct num_nodes, "
                        "or the file"
                    )
            yield src, dst

    def in_degrees(self) -> Tensor:
        degrees = np.zeros(self.num_nodes, dtype=np.uint32)
        for relation, type_id in enumerate(self.dst_type):
            for _, dst in self.edge_batches(relation):
                kernels().count_ids(
                    dst, self.offsets[type_id], self.node_counts[type_id], degrees, num_threads()
                )
        return torch.from_numpy(degrees.astype(np.int64))

    def identity(self) -> dict[str, Any]:
        """Of all files, and of features that are tensors; their bytes."""

        def of_file(file: ArrayFile) -> list[Any]:
            return file.content_identity() if self._by_content else file.identity()

        features = []
        for owner in (*self._node_features, *self._edge_features):
            for name, item in sorted(owner.items()):
                of_item = of_file(item) if isinstance(item, ArrayFile) else identity_of(item)
                features.append([name, *of_item])
        # One file of both ends, or two.
        files = [dict.fromkeys((file.src, file.dst)) for file in self._edges]
        return {"edges": [list(map(of_file, some)) for some in files], "features": features}

    def node_features(self, type_id: int) -> dict[str, Tensor]:
        return _tensors(self._node_features[type_id])

    def edge_features(self, relation: int) -> dict[str, Tensor]:
        return _tensors(self._edge_features[relation])

    def node_feature_rows(self, type_id: int, ids: Tensor) -> Mapping[str, RowSource]:
        rows: dict[str, RowSource] = {**super().node_feature_rows(type_id, ids)}
        for name, item in self._node_features[type_id].items():
            if isinstance(item, ArrayFile):
                rows[name] = FileRows(item, lambda: iter([ids]), len(ids))
        return rows

    def edge_feature_rows(
        self, relation: int, ids: Callable[[], Iterator[Tensor]], count: int
    ) -> Mapping[str, RowSource]:
        rows: dict[str, RowSource] = {**super().edge_feature_rows(relation, ids, count)}
        for name, item in self._edge_features[relation].items():
            if isinstance(item, ArrayFile):
                rows[name] = FileRows(item, ids, count)
        return rows


def _features_by_owner(
    what: str, given: Mapping[Any, Any], is_plain: bool, owners: list[Any], counts: list[int]
) -> list[dict[str, ArrayFile | Tensor]]:
    """Features of each type, files opened and rows counted."""
    by_owner = {owners[0]: given} if is_plain else dict(given)
    strange = sorted(map(str, set(by_owner) - set(owners)))
    if strange:
        raise ValueError(f"{what}_features must be of types of the graph (got {strange[0]})")
    made = []
    for owner, count in zip(owners, counts, strict=True):
        features: dict[str, ArrayFile | Tensor] = {}
        for name, item in by_owner.get(owner, {}).items():
            opened = item if isinstance(item, Tensor) else ArrayFile.open(item)
            if isinstance(opened, ArrayFile):
                try:
                    dtype = torch.from_numpy(np.empty(0, dtype=opened.dtype)).dtype
                except TypeError:
                    dtype = None
                if dtype not in DTYPE_NAMES:
                    raise TypeError(
                        f"{opened.path} must have a dtype that files of parts can hold (got "
                        f"{opened.dtype}); convert it to one of "
                        f"{', '.join(str(dtype) for dtype in DTYPE_NAMES)}"
                    )
            if not opened.shape or opened.shape[0] != count:
                raise ValueError(
                    f"feature '{name}' must have a row for each of the {count} {what}s of "
                    f"{owner} (got shape {tuple(opened.shape)})"
                )
            features[name] = opened
        made.append(features)
    return made


def _tensors(features: Mapping[str, ArrayFile | Tensor]) -> dict[str, Tensor]:
    return {
        name: item.tensor() if isinstance(item, ArrayFile) else item
        for name, item in features.items()
    }
