# SPDX-License-Identifier: Apache-2.0
"""Schema: the node types and relations of a graph, and every way of naming one of them.

A relation is ``(source type, name, destination type)``; inside the package it is an index into
``canonical_etypes``. Node types have two sides: the types that edges leave (``srctypes``) and
those they enter (``dsttypes``). On an ordinary graph both lists are all the types and share their
data; on a block, and on a graph in which no type has both incoming and outgoing edges, they are
separate. A name that is unknown or ambiguous is a ValueError; so is None where there are several.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

from ..._base.files import check_text
from ..._base.typing import CanonicalEType
from ...errors import GraphTypeError, GraphValueError

NID: Final = "_ID"
EID: Final = "_ID"
NTYPE: Final = "_TYPE"
ETYPE: Final = "_TYPE"

_MAX_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FULL = slice(None, None, None)


class _All:
    """The type of `ALL`."""

    def __repr__(self) -> str:
        return "ALL"

    def __reduce__(self) -> str:
        return "ALL"


ALL: Final = _All()
"""Stands for every node or every edge."""


def is_all(ids: Any) -> bool:
    """Whether ``ids`` is `ALL` (DGL's own marker, the string ``__ALL__``, counts too)."""
    return ids is ALL or (isinstance(ids, str) and ids == "__ALL__")


def check_type_name(name: Any, what: str) -> str:
    """Return ``name`` if it can name a type, in files and messages too: any line of text can."""
    if not isinstance(name, str):
        raise GraphTypeError(f"{what} must be a string (got {name!r}); for example 'user'")
    try:
        size = len(check_text(name, what).encode())
    except ValueError as error:
        raise GraphValueError(str(error)) from None
    if not 0 < size <= _MAX_BYTES or _CONTROL.search(name):
        raise GraphValueError(
            f"{what} must be a non-empty line of text of up to {_MAX_BYTES} bytes, without control "
            f"characters (got {name!r:.80}, {size} bytes); rename it"
        )
    return name


class Schema:
    """The types of one graph; immutable, shared by all views and copies of it.

    Args:
        ntypes: All node types, in the order that ``ntypes`` reports.
        srctypes: The source side. Equal to ``dsttypes`` when the sides are one.
        dsttypes: The destination side.
        canonical_etypes: The relations.
        split: Whether source and destination sides are separate sets of nodes.
    """

    def __init__(
        self,
        ntypes: Sequence[str],
        srctypes: Sequence[str],
        dsttypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEType],
        split: bool,
    ) -> None:
        self.ntypes = list(ntypes)
        self.srctypes = list(srctypes)
        self.dsttypes = list(dsttypes)
        self.canonical_etypes = [(s, e, d) for s, e, d in canonical_etypes]
        self.etypes = [name for _, name, _ in self.canonical_etypes]
        self.split = split
        self._src_index = {name: i for i, name in enumerate(self.srctypes)}
        self._dst_index = {name: i for i, name in enumerate(self.dsttypes)}
        self._relation_index = {etype: i for i, etype in enumerate(self.canonical_etypes)}
        self._by_name: dict[str, list[int]] = {}
        for i, name in enumerate(self.etypes):
            self._by_name.setdefault(name, []).append(i)
        self.src_of = [self._src_index[s] for s, _, _ in self.canonical_etypes]
        self.dst_of = [self._dst_index[d] for _, _, d in self.canonical_etypes]
        self._single: dict[int, Schema] = {}

    @classmethod
    def of_graph(cls, ntypes: Sequence[str], canonical_etypes: Sequence[CanonicalEType]) -> Schema:
        """Schema of a graph that is not a block; the sides split where no type is on both."""
        sources = {s for s, _, _ in canonical_etypes}
        destinations = {d for _, _, d in canonical_etypes}
        if len(ntypes) < 2 or sources & destinations:
            return cls(ntypes, ntypes, ntypes, canonical_etypes, split=False)
        srctypes = sorted(name for name in ntypes if name not in destinations)
        return cls(ntypes, srctypes, sorted(destinations), canonical_etypes, split=True)

    @classmethod
    def of_block(
        cls,
        srctypes: Sequence[str],
        dsttypes: Sequence[str],
        canonical_etypes: Sequence[CanonicalEType],
    ) -> Schema:
        """Schema of a block: the sides are separate even where a type is on both."""
        ntypes = [*srctypes, *dsttypes]
        return cls(ntypes, srctypes, dsttypes, canonical_etypes, split=True)

    def single(self, relation: int) -> Schema:
        """Schema of the view that holds one relation alone."""
        schema = self._single.get(relation)
        if schema is None:
            etype = self.canonical_etypes[relation]
            source, _, destination = etype
            if self.split or source != destination:
                schema = Schema.of_block([source], [destination], [etype])
            else:
                schema = Schema([source], [source], [source], [etype], split=False)
            self._single[relation] = schema
        return schema

    def relation(self, etype: Any) -> int:
        """Index of a relation given by name, by triple, or by None when there is only one."""
        if etype is None:
            if len(self.canonical_etypes) != 1:
                raise GraphValueError(
                    f"etype must be given because the graph has {len(self.etypes)} relations: "
                    f"one of {self.canonical_etypes}"
                )
            return 0
        if isinstance(etype, str):
            found = self._by_name.get(etype, ())
            if len(found) == 1:
                return found[0]
            if found:
                triples = [self.canonical_etypes[i] for i in found]
                raise GraphValueError(
                    f"etype {etype!r} is ambiguous, {len(found)} relations have that name; "
                    f"give one of the triples {triples}"
                )
        else:
            index = self._relation_index.get(tuple(etype)) if _is_triple(etype) else None
            if index is not None:
                return index
        raise GraphValueError(f"no relation {etype!r}; the graph has {self.canonical_etypes}")

    def find(self, key: Any) -> list[int]:
        """Indices of the relations that match ``g[key]``.

        Args:
            key: A relation's name, ``"_"`` or ``:`` for all of them, or a triple in which each
                place is a name, ``:`` or ``"_"``.
        """
        wanted = key if isinstance(key, tuple) else (_FULL, key, _FULL)
        if len(wanted) != 3 or not all(isinstance(x, str) or x == _FULL for x in wanted):
            raise GraphTypeError(
                f"a graph is sliced as g['etype'] or g['srctype', 'etype', 'dsttype'], with ':' "
                f"for any (got {key!r})"
            )
        exact = self._relation_index.get(wanted) if _is_triple(wanted) else None
        if exact is not None:
            return [exact]
        places = [set(self.srctypes), set(self.etypes), set(self.dsttypes)]
        free = [
            x == _FULL or (x == "_" and x not in p) for x, p in zip(wanted, places, strict=True)
        ]
        found = [
            i
            for i, etype in enumerate(self.canonical_etypes)
            if all(f or x == y for f, x, y in zip(free, wanted, etype, strict=True))
        ]
        if not found:
            raise GraphValueError(
                f"no relation matches {key!r}; the graph has {self.canonical_etypes}"
            )
        return found

    def src_id(self, ntype: str | None) -> int:
        """Index into ``srctypes``; None means the only one."""
        return self._side(self._src_index, self.srctypes, ntype, "source node type")

    def dst_id(self, ntype: str | None) -> int:
        """Index into ``dsttypes``; None means the only one."""
        return self._side(self._dst_index, self.dsttypes, ntype, "destination node type")

    def node_id(self, ntype: str | None) -> tuple[str, int]:
        """Where the nodes of a type are: ("src" or "dst", index on that side).

        On a block a name means its source nodes, unless only destinations have it; the prefixes
        ``SRC/`` and ``DST/`` choose a side.
        """
        if ntype is None:
            if self.split or len(self.ntypes) != 1:
                raise GraphValueError(
                    f"ntype must be given because the graph has several node types: one of "
                    f"{sorted(set(self.ntypes))}"
                )
            return "src", 0
        if isinstance(ntype, str):
            if ntype in self._src_index:
                return "src", self._src_index[ntype]
            if ntype in self._dst_index:
                return "dst", self._dst_index[ntype]
            if self.split and ntype.startswith("SRC/"):
                return "src", self.src_id(ntype[4:])
            if self.split and ntype.startswith("DST/"):
                return "dst", self.dst_id(ntype[4:])
        raise GraphValueError(f"no node type {ntype!r}; the graph has {sorted(set(self.ntypes))}")

    @staticmethod
    def _side(index: dict[str, int], names: list[str], ntype: str | None, what: str) -> int:
        if ntype is None:
            if len(names) != 1:
                raise GraphValueError(
                    f"the {what} must be given because there are several: {names}"
                )
            return 0
        found = index.get(ntype)
        if found is None:
            raise GraphValueError(f"no {what} {ntype!r}; the graph has {names}")
        return found


def _is_triple(etype: Any) -> bool:
    return (
        isinstance(etype, tuple | list)
        and len(etype) == 3
        and all(isinstance(name, str) for name in etype)
    )


def joined_name(names: Iterable[str]) -> str:
    """Name of a type that stands for several, as in DGL: sorted and joined by '+'."""
    return "+".join(sorted(names))
