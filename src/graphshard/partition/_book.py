# SPDX-License-Identifier: Apache-2.0
"""RangePartitionBook: which part owns a node or an edge, from a handful of numbers.

[Note: id spaces]
Relabelling gives every node three names, and every edge likewise.

* The *homogenised* id counts all nodes. Part 0 comes first; inside a part, type 0 comes first.
* The *per-type* id counts the nodes of one type, part 0 first.
* The *local* id counts the nodes of one part (of one type, if one is named).

All three number the same nodes in the same order, so a part's nodes are one range of homogenised
ids, and its nodes of one type are one range of per-type ids. With two parts and types A and B::

    homogenised   0 ...... 100 ..... 200 ...... 300 ..... 400
                  |   A    |    B    |    A     |    B    |
    part          |------- 0 --------|-------- 1 ---------|
    per-type A    0 ...... 100         100 .... 200
    per-type B             0 .... 100           100 .... 200
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from .._base.typing import (
    DEFAULT_CANONICAL_ETYPE,
    DEFAULT_ETYPE,
    DEFAULT_NTYPE,
    CanonicalEType,
    EType,
    Ids,
)

Blocks: TypeAlias = Tensor | Sequence[Sequence[int]]


class IdSpace:
    """The ids of all nodes, or of all edges: blocks ordered by part, then by type.

    Args:
        sizes: ``sizes[part][type]`` ids in each block.
        what: "node" or "edge", for messages.
    """

    def __init__(self, sizes: Sequence[Sequence[int]], num_types: int, what: str) -> None:
        self.what = what
        self.num_types = num_types
        of_type = torch.tensor(sizes, dtype=torch.int64).reshape(len(sizes), num_types)
        self.blocks = RangeMap.from_sizes(of_type.flatten().tolist())
        self.parts = RangeMap.from_sizes(of_type.sum(1).tolist())
        self.per_type = list(map(RangeMap.from_sizes, of_type.T.tolist()))
        # Added to a homogenised id of a block, gives the per-type id.
        begins = torch.tensor(self.blocks.starts[:-1], dtype=torch.int64)
        self._shift = (of_type.cumsum(0) - of_type).flatten() - begins

    def local_offsets(self, part: int) -> list[int]:
        """Where each type begins among the local ids of a part, and where the last ends."""
        first = part * self.num_types
        starts = self.blocks.starts[first : first + self.num_types + 1]
        return [start - starts[0] for start in starts]

    def block_table(self) -> list[list[list[int]]]:
        """The blocks ``[type][part]``, each [start, stop)."""
        starts = torch.tensor(self.blocks.starts, dtype=torch.int64)
        blocks = torch.stack([starts[:-1], starts[1:]], dim=1)
        return blocks.view(self.parts.num_parts, self.num_types, 2).transpose(0, 1).tolist()

    def ranges(self, type_id: int | None) -> RangeMap:
        """Parts of the homogenised space (None), or of one type's."""
        return self.parts if type_id is None else self.per_type[type_id]

    def _checked(self, ids: Ids, type_id: int | None) -> Tensor:
        tensor = torch.as_tensor(ids)
        if tensor.numel() and (tensor.is_floating_point() or tensor.dtype == torch.bool):
            raise TypeError(
                f"{self.what} ids must be integers (got dtype {tensor.dtype}); "
                "turn a mask into ids with .nonzero().flatten()"
            )
        tensor = tensor.to(torch.int64)
        self.ranges(type_id).check(tensor, f"{self.what} id")
        return tensor

    def part_of(self, ids: Ids, type_id: int | None) -> Tensor:
        return self.ranges(type_id).part_of(self._checked(ids, type_id))

    def local_of(self, ids: Ids, part: int, type_id: int | None) -> Tensor:
        tensor = self._checked(ids, type_id)
        ranges = self.ranges(type_id)
        start, stop = ranges.starts[part], ranges.starts[part + 1]
        foreign = (tensor < start) | (tensor >= stop)
        if bool(foreign.any()):
            raise ValueError(
                f"{self.what} ids must belong to part {part}, which owns [{start}, {stop}) "
                f"(got {int(tensor[foreign][0])}); select them with {self.what[0]}id2partid first"
            )
        return tensor - start

    def to_per_type(self, ids: Ids) -> tuple[Tensor, Tensor]:
        tensor = self._checked(ids, None)
        block = self.blocks.part_of(tensor)
        return block % max(1, self.num_types), tensor + self._shift.to(tensor.device)[block]

    def to_homogenised(self, ids: Ids, type_id: int | None) -> Tensor:
        tensor = self._checked(ids, type_id)
        if type_id is None:
            return tensor
        block = self.per_type[type_id].part_of(tensor) * self.num_types + type_id
        return tensor - self._shift.to(tensor.device)[block]


class RangePartitionBook:
    """The owner of every node and edge of a partitioned graph.

    A lookup is a binary search in as many numbers as there are parts. Wherever a method takes a
    type, leaving it out (or passing "_N" or "_E") means homogenised ids; see the note above.

    Args:
        part_id: The part that this process works on.
        node_map: Per node type, ``[num_parts, 2]``: the block ``[start, stop)`` of homogenised ids
            of that type in each part.
        edge_map: The same per canonical edge type.
        etypes: Canonical edge type to its number.

    Raises:
        ValueError: The blocks leave gaps, overlap or do not fit the types, or ``part_id`` is not
            one of the parts.

    Example:
        >>> book = RangePartitionBook(
        ...     0, 2, {"_N": [[0, 3], [3, 5]]}, {("_N", "_E", "_N"): [[0, 4], [4, 9]]},
        ...     {"_N": 0}, {("_N", "_E", "_N"): 0},
        ... )
        >>> book.nid2partid([0, 2, 3])
        tensor([0, 0, 1])
    """

    def __init__(
        self,
        part_id: int,
        num_parts: int,
        node_map: Mapping[str, Blocks],
        edge_map: Mapping[CanonicalEType, Blocks],
        ntypes: Mapping[str, int],
        etypes: Mapping[CanonicalEType, int],
    ) -> None:
        if num_parts < 1:
            raise ValueError(f"num_parts must be at least 1 (got {num_parts})")
        self._num_parts = num_parts
        self._part_id = self._check_part(part_id)
        self._ntypes: list[str] = _by_number("node", ntypes)
        self._canonical_etypes: list[CanonicalEType] = _by_number("edge", etypes)
        for etype in self._canonical_etypes:
            if not (isinstance(etype, tuple) and len(etype) == 3):
                raise ValueError(
                    f"edge types must be (source, relation, destination) triples (got {etype!r})"
                )
        self._nodes = IdSpace(_sizes("node", node_map, ntypes, num_parts), len(ntypes), "node")
        self._edges = IdSpace(_sizes("edge", edge_map, etypes, num_parts), len(etypes), "edge")

    @classmethod
    def of_sizes(
        cls,
        part_id: int,
        ntypes: Sequence[str],
        etypes: Sequence[CanonicalEType],
        node_sizes: Sequence[Sequence[int]],
        edge_sizes: Sequence[Sequence[int]],
    ) -> RangePartitionBook:
        """The book in which part ``p`` owns ``sizes[p][type]`` nodes and edges; not checked."""
        book = cls.__new__(cls)
        book._num_parts, book._part_id = len(node_sizes), part_id
        book._ntypes, book._canonical_etypes = list(ntypes), list(etypes)
        book._nodes = IdSpace(node_sizes, len(ntypes), "node")
        book._edges = IdSpace(edge_sizes, len(etypes), "edge")
        return book

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(part_id={self._part_id}, num_parts={self._num_parts}, "
            f"num_nodes={self.num_nodes()}, num_edges={self.num_edges()}, "
            f"ntypes={self._ntypes}, etypes={self.etypes})"
        )

    # Parts and types

    @property
    def partid(self) -> int:
        """The part that this process works on."""
        return self._part_id

    def num_partitions(self) -> int:
        """Number of parts."""
        return self._num_parts

    def metadata(self) -> list[dict[str, int]]:
        """Per part its number ("machine_id") and how many nodes and edges it owns."""
        return [
            {
                "machine_id": part,
                "num_nodes": self._nodes.parts.size(part),
                "num_edges": self._edges.parts.size(part),
            }
            for part in range(self._num_parts)
        ]

    def node_map(self) -> dict[str, list[list[int]]]:
        """Per node type, the block ``[start, stop)`` of homogenised ids in each part."""
        return dict(zip(self._ntypes, self._nodes.block_table(), strict=True))

    def edge_map(self) -> dict[CanonicalEType, list[list[int]]]:
        """Per canonical edge type, the block of homogenised ids in each part."""
        return dict(zip(self._canonical_etypes, self._edges.block_table(), strict=True))

    @property
    def ntypes(self) -> list[str]:
        """Node types, by number."""
        return list(self._ntypes)

    @property
    def etypes(self) -> list[str]:
        """Relation names, by number."""
        return [relation for _, relation, _ in self._canonical_etypes]

    @property
    def canonical_etypes(self) -> list[CanonicalEType]:
        """(source type, relation, destination type), by number."""
        return list(self._canonical_etypes)

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one edge type."""
        return len(self._ntypes) == 1 and len(self._canonical_etypes) == 1

    def to_canonical_etype(self, etype: EType) -> CanonicalEType:
        """The triple that ``etype`` names.

        Raises:
            ValueError: No relation has that name, or several have.
        """
        matches = [t for t in self._canonical_etypes if etype in (t, t[1])]
        if len(matches) == 1:
            return matches[0]
        if matches:
            raise ValueError(
                f"edge type '{etype}' is ambiguous; pass one of the triples {matches} instead"
            )
        raise ValueError(f"edge type {etype!r} does not exist; have {self._canonical_etypes}")

    def num_nodes(self, ntype: str | None = None) -> int:
        """Number of nodes, of all types or of one."""
        return self._nodes.ranges(self._ntype_number(ntype)).num_ids

    def num_edges(self, etype: EType | None = None) -> int:
        """Number of edges, of all types or of one."""
        return self._edges.ranges(self._etype_number(etype)).num_ids

    _num_nodes, _num_edges = num_nodes, num_edges  # DGL has renamed them so

    @property
    def local_ntype_offset(self) -> list[int]:
        """Where each node type begins among the local ids of this part, and where the last ends."""
        return self._nodes.local_offsets(self._part_id)

    @property
    def local_etype_offset(self) -> list[int]:
        """Where each edge type begins among the local ids of this part, and where the last ends."""
        return self._edges.local_offsets(self._part_id)

    # Owners

    def nid2partid(self, nids: Ids, ntype: str | None = None) -> Tensor:
        """Owner of each node: int64, as many as ``nids``.

        Raises:
            IndexError: An id is out of range.
        """
        return self._nodes.part_of(nids, self._ntype_number(ntype))

    def eid2partid(self, eids: Ids, etype: EType | None = None) -> Tensor:
        """Owner of each edge: int64, as many as ``eids``.

        Raises:
            IndexError: An id is out of range.
        """
        return self._edges.part_of(eids, self._etype_number(etype))

    def partid2nids(self, partid: int, ntype: str | None = None) -> Tensor:
        """All nodes that a part owns: int64, ascending."""
        return self._nodes.ranges(self._ntype_number(ntype)).ids_of(self._check_part(partid))

    def partid2eids(self, partid: int, etype: EType | None = None) -> Tensor:
        """All edges that a part owns: int64, ascending."""
        return self._edges.ranges(self._etype_number(etype)).ids_of(self._check_part(partid))

    def nid2localnid(self, nids: Ids, partid: int, ntype: str | None = None) -> Tensor:
        """Local ids, in the part that owns them, of nodes that are all of one part.

        Raises:
            IndexError: An id is out of range.
            ValueError: An id belongs to another part.
        """
        return self._nodes.local_of(nids, self._check_part(partid), self._ntype_number(ntype))

    def eid2localeid(self, eids: Ids, partid: int, etype: EType | None = None) -> Tensor:
        """Local ids, in the part that owns them, of edges that are all of one part.

        Raises:
            IndexError: An id is out of range.
            ValueError: An id belongs to another part.
        """
        return self._edges.local_of(eids, self._check_part(partid), self._etype_number(etype))

    # Homogenised <-> per type

    def map_to_per_ntype(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """(type number, per-type id) of homogenised node ids, both int64."""
        return self._nodes.to_per_type(ids)

    def map_to_per_etype(self, ids: Ids) -> tuple[Tensor, Tensor]:
        """(type number, per-type id) of homogenised edge ids, both int64."""
        return self._edges.to_per_type(ids)

    def map_to_homo_nid(self, ids: Ids, ntype: str) -> Tensor:
        """Homogenised ids of nodes of one type."""
        return self._nodes.to_homogenised(ids, self._ntype_number(ntype))

    def map_to_homo_eid(self, ids: Ids, etype: EType) -> Tensor:
        """Homogenised ids of edges of one type."""
        return self._edges.to_homogenised(ids, self._etype_number(etype))

    def _check_part(self, part: int) -> int:
        if not 0 <= part < self._num_parts:
            raise ValueError(f"part must be in [0, {self._num_parts}) (got {part})")
        return int(part)

    def _ntype_number(self, ntype: str | None) -> int | None:
        if ntype is None or ntype == DEFAULT_NTYPE:
            return None
        if ntype not in self._ntypes:
            raise ValueError(f"node type {ntype!r} does not exist; have {self._ntypes}")
        return self._ntypes.index(ntype)

    def _etype_number(self, etype: EType | None) -> int | None:
        if etype is None or etype in (DEFAULT_ETYPE, DEFAULT_CANONICAL_ETYPE):
            return None
        return self._canonical_etypes.index(self.to_canonical_etype(etype))


PartitionBook = RangePartitionBook


def _by_number(what: str, numbers: Mapping[Any, int]) -> list[Any]:
    names = sorted(numbers, key=lambda name: numbers[name])
    if [numbers[name] for name in names] != list(range(len(names))):
        raise ValueError(f"{what} types must be numbered from 0 without gaps (got {dict(numbers)})")
    return names


def _sizes(
    what: str, blocks: Mapping[Any, Blocks], numbers: Mapping[Any, int], num_parts: int
) -> list[list[int]]:
    """Block sizes [part][type], after checking that the blocks tile the id space in that order."""
    if set(blocks) != set(numbers):
        raise ValueError(
            f"{what}_map must have one entry per {what} type "
            f"(got {sorted(map(str, blocks))} for the types {sorted(map(str, numbers))})"
        )
    tables = {name: torch.as_tensor(table).tolist() for name, table in blocks.items()}
    for name, table in tables.items():
        if len(table) != num_parts or any(len(row) != 2 for row in table):
            raise ValueError(
                f"{what}_map must hold [start, stop) for each of the {num_parts} parts "
                f"(got {table} for type {name!r})"
            )
    sizes: list[list[int]] = []
    expected = 0
    for part in range(num_parts):
        sizes.append([])
        for name in _by_number(what, numbers):
            start, stop = tables[name][part]
            if start != expected or stop < start:
                raise ValueError(
                    f"{what}_map must tile the ids by part, then by type: the block of type "
                    f"{name!r} in part {part} must begin at {expected} (got [{start}, {stop}))"
                )
            sizes[-1].append(stop - start)
            expected = stop
    return sizes
