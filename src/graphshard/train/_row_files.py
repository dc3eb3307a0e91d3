# SPDX-License-Identifier: Apache-2.0
"""Files without a name to which a run writes rows: what a layer gives, features converted."""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._base.file_rows import FilePiece, RowsFile, RowsInFiles
from ..comm import barrier, rank, world_size
from ..comm.address import machine_name
from ..comm.collectives import gather_texts, shared_errors
from ..comm.group import group_state
from ..comm.transport import named_file
from ._config import ResolvedConfig

if TYPE_CHECKING:
    from ._training_shard import TrainingShard

HIDDEN = "rows of the layer before"
_ALIGNMENT = 64


def row_folders(config: ResolvedConfig) -> list[Path]:
    """Where files may be, the best place first; temporary files are in memory on some machines."""
    folders = [] if config.run is None else [Path(config.run)]
    return [*folders, Path(config.data).parent, Path(tempfile.gettempdir())]


class RowsOfLayer:
    """Rows of this rank's nodes in a file that has no name, and those of others of this machine.

    Making one is collective, and so is `tables`.

    Attributes:
        is_mapping: Whether the layer gave rows by node type.
    """

    def __init__(
        self, shard: TrainingShard, ntypes: Collection[str], folders: Sequence[Path]
    ) -> None:
        self.ntypes, self.is_mapping = tuple(ntypes), False
        self._sizes = {t: shard.data.node_map(t).starts for t in ntypes}
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._files: list[RowsFile | None] = []
        self._descriptor = -1
        with contextlib.ExitStack() as stack:
            with shared_errors():
                path, descriptor = stack.enter_context(_writable(folders))
                self._descriptor, self._path = os.dup(descriptor), path
            texts = [f"{machine_name()} {path}"]
            if world_size() > 1:
                texts = gather_texts(group_state(), texts[0])
            for text in texts:
                machine, _, name = text.partition(" ")
                is_here = machine == machine_name() and os.path.exists(name)
                self._files.append(RowsFile(Path(name)) if is_here else None)
            if world_size() > 1:
                barrier()  # before the file loses its name

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def set_kinds(self, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        """Say of which dtype and shape a row of each type is; before any is written."""
        self._kinds = dict(kinds)

    def write(self, ntype: str, first: int, rows: Tensor) -> None:
        """Write rows of this rank's nodes that follow one another, the first of them ``first``."""
        rows = rows.detach().cpu().contiguous()
        if not rows.numel():
            return
        size = rows[0].numel() * rows.element_size()
        at = self._offset(rank(), ntype) + first * size
        _write(self._descriptor, at, rows, self._path.parent)

    def tables(self) -> dict[tuple[Any, str], list[RowsInFiles | None]]:
        """The rows of each type and rank, where they are seen from here."""
        if world_size() > 1:
            barrier()  # until all have written
        return {
            (ntype, HIDDEN): [self._rows(number, ntype) for number in range(world_size())]
            for ntype in self.ntypes
        }

    def own(self, ntype: str) -> Tensor:
        """This rank's rows, mapped: not to be written to."""
        rows = self._rows(rank(), ntype)
        assert rows is not None
        return rows.mapped(is_private=False)

    def _count(self, number: int, ntype: str) -> int:
        starts = self._sizes[ntype]
        return starts[number + 1] - starts[number]

    def _offset(self, number: int, ntype: str) -> int:
        """Where the rows of a type begin in the file of a rank."""
        offset = 0
        for other in self.ntypes[: self.ntypes.index(ntype)]:
            dtype, shape = self._kinds[other]
            size = self._count(number, other) * math.prod(shape) * dtype.itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset

    def _rows(self, number: int, ntype: str) -> RowsInFiles | None:
        file = self._files[number]
        if file is None:
            return None
        dtype, shape = self._kinds[ntype]
        piece = FilePiece(file, self._offset(number, ntype), self._count(number, ntype))
        return RowsInFiles((piece,), dtype, shape, dtype)


@contextlib.contextmanager
def _writable(folders: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """A new file in the first folder that takes one."""
    for folder in folders[:-1]:
        if os.access(folder, os.W_OK):
            with named_file(folder) as made:
                yield made
            return
    with named_file(folders[-1]) as made:
        yield made


def rows_with_dtype(rows: RowsInFiles, folders: Sequence[Path]) -> RowsInFiles:
    """Rows as files have them in the dtype in which they are given: these, or in a new file.

    Raises:
        OSError: There is no room for it.
    """
    if rows.dtype == rows.stored_dtype:
        return rows
    with _writable(folders) as (path, descriptor):
        file = RowsFile(path)
        at = 0
        for block in rows.blocks():
            at += _write(descriptor, at, block, path.parent)
    return RowsInFiles((FilePiece(file, 0, rows.shape[0]),), rows.dtype, rows.row_shape, rows.dtype)


def _write(descriptor: int, at: int, rows: Tensor, folder: Path) -> int:
    """Write rows at a place of a file; returns their bytes."""
    data = rows.view(-1).view(torch.uint8).numpy().data
    size = len(data)
    while data:
        try:
            written = os.pwrite(descriptor, data, at)
        except OSError as error:
            raise OSError(
                f"rows of nodes must be written to {folder} (got: {error.strerror}); make room "
                "there, or give run, a folder with more"
            ) from None
        data, at = data[written:], at + written
    return size
