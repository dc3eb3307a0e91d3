# SPDX-License-Identifier: Apache-2.0
"""MovableGraph: a local graph on another device, with another id type, or in other formats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._base.device import device_of
from ...errors import GraphValueError
from ...ops import Adjacency
from ._queries import QueryableGraph, RelationFacts

MovableT = TypeVar("MovableT", bound="MovableGraph")


def _pinned(column: Any) -> Any:
    return column.contiguous().pin_memory() if isinstance(column, Tensor) else column.pin_memory()


def _recorded(array: Tensor, stream: Any) -> Tensor:
    array.record_stream(stream)
    return array


FORMATS = ("coo", "csr", "csc")


class MovableGraph(QueryableGraph):
    """Layer of `LocalGraph`; a class of its own because one of its methods is called ``int``."""

    _formats: tuple[str, ...] = FORMATS

    def _with_relations(self: MovableT, relations: list[Adjacency]) -> MovableT:
        new = self.local_var()
        new.relations = relations
        new._facts = [RelationFacts(facts.zero_in_degree) for facts in self._facts]
        new.device, new.idtype = relations[0].device, relations[0].idtype
        return new

    def to(self: MovableT, device: Any, non_blocking: bool = False) -> MovableT:
        """The same graph with edges and features on ``device``; itself if it is there already.

        Args:
            device: Where to; None leaves the graph where it is.
            non_blocking: As for tensors: copies from page-locked memory to a GPU are only begun,
                and come before whatever is launched later on the current stream. A copy to the CPU
                is always waited for, since nothing would say when its values may be read.

        Raises:
            TypeError: A field is a deferred value, which cannot move.
        """
        if device is None:
            return self
        target = device_of(device)
        if target == self.device:
            return self
        begun = non_blocking and target.type != "cpu"
        return self._copied(lambda array: array.to(target, non_blocking=begun))

    def _copied(self: MovableT, change: Callable[[Any], Any]) -> MovableT:
        """A graph with ``change`` of every array and every field, which may be lazy."""
        new = self._with_relations([adj.map(change) for adj in self.relations])
        shared = new._dst_frames is new._src_frames
        new._src_frames = [frame.map(change, new.device) for frame in new._src_frames]
        new._dst_frames = (
            new._src_frames
            if shared
            else [frame.map(change, new.device) for frame in new._dst_frames]
        )
        new._edge_frames = [frame.map(change, new.device) for frame in new._edge_frames]
        return new

    def cpu(self: MovableT) -> MovableT:
        """The same graph on the CPU."""
        return self.to("cpu")

    def astype(self: MovableT, idtype: torch.dtype) -> MovableT:
        """The same graph with ids of ``idtype``; features are left as they are.

        Raises:
            TypeError: not torch.int32 or torch.int64.
            ValueError: a count does not fit in 32 bits.
        """
        relations = [adj.astype(idtype) for adj in self.relations]
        return self if idtype == self.idtype else self._with_relations(relations)

    def int(self: MovableT) -> MovableT:
        """The same graph with int32 ids."""
        return self.astype(torch.int32)

    def long(self: MovableT) -> MovableT:
        """The same graph with int64 ids."""
        return self.astype(torch.int64)

    def formats(self: MovableT, formats: Any = None) -> Any:
        """Which sparse formats exist, or this graph with the named ones alone.

        Args:
            formats: None, or one or several of ``"coo"``, ``"csc"``, ``"csr"``. Those that exist
                are kept; where none does, the first of them, in the order coo, csr, csc, is built.
                A format that is left out is still built when a call needs it, but not counted.

        Returns:
            Without ``formats`` a dictionary of the lists ``"created"`` and ``"not created"``;
            else a graph with its own structure and the same features.

        Raises:
            ValueError: an unknown format.
        """
        if formats is None:
            made = [adj.formats() for adj in self.relations]
            created = [name for name in self._formats if all(each[name] for each in made)]
            missing = [name for name in self._formats if name not in created]
            return {"created": created, "not created": missing}
        wanted = [formats] if isinstance(formats, str) else list(formats)
        unknown = [name for name in wanted if name not in FORMATS]
        if unknown or not wanted:
            raise GraphValueError(f"formats must be among 'coo', 'csr', 'csc' (got {formats!r})")
        names = tuple(name for name in FORMATS if name in wanted)
        new = self._with_relations([adj.restricted(names) for adj in self.relations])
        new._formats = names
        return new

    def create_formats_(self) -> None:
        """Build all sparse formats that the graph may have now, so that no later call has to."""
        for adj in self.relations:
            for name in self._formats:
                getattr(adj, name)()

    # ------------------------------------------------------------------ page-locked memory

    def is_pinned(self) -> bool:
        """Whether the edges are in page-locked memory, from where a GPU reads them fastest."""
        return all(array.is_pinned() for adj in self.relations for array in adj.coo())

    def pin_memory(self: MovableT) -> MovableT:
        """A copy in page-locked memory, from where copies to a GPU run beside other work.

        Fields that have not been gathered yet stay so. ``torch.utils.data.DataLoader`` calls this
        on batches that are graphs, with its ``pin_memory=True``.

        Raises:
            ValueError: the graph is on a GPU.
            RuntimeError: torch has no GPU to lock memory for.
        """
        self._check_on_cpu()
        return self._copied(_pinned)

    def pin_memory_(self: MovableT) -> MovableT:
        """Move edges and features to page-locked memory, in place; for graphs on the CPU.

        Raises:
            ValueError: the graph is on a GPU.
            RuntimeError: torch has no GPU to lock memory for.
        """
        self._check_on_cpu()
        return self._replaced(lambda array: array.pin_memory())

    def _check_on_cpu(self) -> None:
        if self.device.type != "cpu":
            raise GraphValueError(f"only a graph on the CPU can be pinned (it is on {self.device})")

    def unpin_memory_(self: MovableT) -> MovableT:
        """Undo `pin_memory_`, in place; nothing happens to a graph that is not pinned."""
        if self.device.type != "cpu" or not self.is_pinned():
            return self
        return self._replaced(lambda array: array.clone() if array.is_pinned() else array)

    def record_stream(self: MovableT, stream: Any) -> MovableT:
        """Say that a stream uses the graph, as ``torch.Tensor.record_stream`` does of a tensor.

        The memory of edges and features is then not used for anything else before what has been
        launched on that stream is done, wherever the graph is dropped. Needed for a graph that was
        made on another stream; the loaders do it.

        Args:
            stream: A ``torch.cuda.Stream``.

        Raises:
            ValueError: the graph is on the CPU, where there are no streams.
        """
        if self.device.type == "cpu":
            raise GraphValueError("record_stream is for graphs on a GPU (this one is on the CPU)")
        for adj in self.relations:
            adj.map(lambda array: _recorded(array, stream))
        for frame in (*self._src_frames, *self._dst_frames, *self._edge_frames):
            frame.record_stream(stream)
        return self

    def _replaced(self: MovableT, change: Callable[[Tensor], Tensor]) -> MovableT:
        for place, adj in enumerate(self.relations):
            self.relations[place] = adj.map(change)
        sides = [self._src_frames, self._edge_frames]
        if self._dst_frames is not self._src_frames:
            sides.append(self._dst_frames)
        for frame in (frame for frames in sides for frame in frames):
            for name in frame:
                frame[name] = change(frame[name])
        return self
