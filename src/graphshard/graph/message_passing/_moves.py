# SPDX-License-Identifier: Apache-2.0
"""MovableGraph: a local graph on another device, with another id type, or in other formats."""

from __future__ import annotations

from typing import Any, TypeVar

import torch

from ...errors import GraphValueError
from ...ops import Adjacency
from ._queries import QueryableGraph, RelationFacts

MovableT = TypeVar("MovableT", bound="MovableGraph")


class MovableGraph(QueryableGraph):
    """Layer of `LocalGraph`; a class of its own because one of its methods is called ``int``."""

    def _with_relations(self: MovableT, relations: list[Adjacency]) -> MovableT:
        new = self.local_var()
        new.relations = relations
        new._facts = [RelationFacts(facts.zero_in_degree) for facts in self._facts]
        new.device, new.idtype = relations[0].device, relations[0].idtype
        return new

    def to(self: MovableT, device: Any, non_blocking: bool = False) -> MovableT:
        """The same graph with edges and features on ``device``; itself if it is there already."""
        if device is None:
            return self
        target = torch.empty(0, device=device).device
        if target == self.device:
            return self
        new = self._with_relations([adj.to(target) for adj in self.relations])
        shared = new._dst_frames is new._src_frames
        new._src_frames = [frame.to(target, non_blocking) for frame in new._src_frames]
        new._dst_frames = (
            new._src_frames
            if shared
            else [frame.to(target, non_blocking) for frame in new._dst_frames]
        )
        new._edge_frames = [frame.to(target, non_blocking) for frame in new._edge_frames]
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
        """Which sparse formats exist, or this graph with the named ones built.

        Args:
            formats: None, or one or several of ``"coo"``, ``"csc"``, ``"csr"``. Every format can
                always be built later: naming them is a hint, not a limit.

        Returns:
            Without ``formats`` a dictionary of the lists ``"created"`` and ``"not created"``;
            else this graph.

        Raises:
            ValueError: an unknown format.
        """
        if formats is None:
            made = [adj.formats() for adj in self.relations]
            created = [name for name in ("coo", "csr", "csc") if all(each[name] for each in made)]
            missing = [name for name in ("coo", "csr", "csc") if name not in created]
            return {"created": created, "not created": missing}
        wanted = [formats] if isinstance(formats, str) else list(formats)
        unknown = [name for name in wanted if name not in ("coo", "csr", "csc")]
        if unknown or not wanted:
            raise GraphValueError(f"formats must be among 'coo', 'csr', 'csc' (got {formats!r})")
        for adj in self.relations:
            for name in wanted:
                getattr(adj, name)()
        return self

    def create_formats_(self) -> None:
        """Build all sparse formats now, so that no later call has to."""
        self.formats(("coo", "csr", "csc"))
