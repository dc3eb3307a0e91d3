# SPDX-License-Identifier: Apache-2.0
"""What a partition's JSON must say: every value that is read later is checked here, once.

A JSON may have been damaged, or be an attempt to have files elsewhere read or moved. So numbers
are whole and bounded, counts are checked against the maps and lists that are there before anything
loops over them, and paths cannot leave the folder. What is wrong is a ValueError that shows it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from ..._base.files import check_text
from ..._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType

GRAPH_FORMATS = ("coo", "csc", "csr")
"""Formats that the structure of a part may be stored in."""

PART_FILES = {
    "part_graph": "graph.safetensors",
    "node_feats": "node_feats.safetensors",
    "edge_feats": "edge_feats.safetensors",
}

_LARGEST = 2**62
_BUILD = re.compile(r"[0-9a-f]{16}")
_DIGEST = re.compile(r"[0-9a-f]{32}")
_SHOWN = 60

PartRanges = list[list[int]]


@dataclass(frozen=True)
class PartFile:
    """One file of a part, as the JSON describes it.

    Args:
        name: Path inside the partition's folder.
        bytes: Its size; None where DGL wrote it, which says nothing of it.
        blake2b: Its digest; None likewise.
    """

    name: str
    bytes: int | None = None
    blake2b: str | None = None


def etype_key(etype: CanonicalEType) -> str:
    """The name of a relation in files: "src:relation:dst".

    Where a name has a colon of its own the JSON lists the triples, too: see `triples_of`.
    """
    return ":".join(etype)


def triples_of(etypes: Sequence[CanonicalEType]) -> dict[str, list[list[str]]]:
    """What a JSON says of relations whose names cannot be taken apart: an entry, or nothing."""
    if any(":" in name for etype in etypes for name in etype):
        return {"canonical_etypes": [list(etype) for etype in etypes]}
    return {}


def read_triples(content: Mapping[str, Any]) -> dict[str, CanonicalEType]:
    """Relation, as the JSON names it, to its triple, where `triples_of` has written them."""
    found = {}
    for triple in listing(content.get("canonical_etypes", []), "canonical_etypes"):
        names = [text(n, "a name in canonical_etypes") for n in listing(triple, "a relation")]
        if len(names) != 3:
            raise ValueError(f"a relation must be of three names (got {shown(triple)})")
        etype = (names[0], names[1], names[2])
        found[etype_key(etype)] = etype
    return found


def required(content: Mapping[str, Any], key: str) -> Any:
    """The value of a key."""
    if key not in content:
        raise ValueError(f"'{key}' is missing")
    return content[key]


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """A whole number from ``least`` up."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
        raise ValueError(f"{name} must be a whole number from {least} up (got {shown(value)})")
    return value


def text(value: Any, name: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be a text that is not empty (got {shown(value)})")
    return check_text(value, name)


def mapping(value: Any, name: str) -> dict[str, Any]:
    """An object of JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object with keys (got {shown(value)})")
    return value


def listing(value: Any, name: str) -> list[Any]:
    """A list of JSON."""
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list (got {shown(value)})")
    return value


def only_keys(content: Mapping[str, Any], keys: Iterable[str], name: str) -> None:
    """Raise unless an object has these keys and no other."""
    for key in keys:
        required(content, key)
    strange = sorted(set(content) - set(keys))
    if strange:
        raise ValueError(f"{name} has the unknown key {strange[0][:_SHOWN]!r}")


def shown(value: Any) -> str:
    """A value for a message, cut short where it is long."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, dict | list) and len(value) > 10:
        return f"a {type(value).__name__} of {len(value)}"
    found = repr(value)
    return found if len(found) <= _SHOWN else f"{found[:_SHOWN]}..."


def read_ntypes(content: Mapping[str, Any]) -> dict[str, int]:
    """Node type to its number; DGL leaves them out where there is one."""
    types = mapping(content.get("ntypes", {DEFAULT_NTYPE: 0}), "ntypes")
    if not types:
        raise ValueError("ntypes must name at least one node type (got none)")
    return {
        text(name, "a node type"): whole_number(n, f"ntypes[{shown(name)}]")
        for name, n in types.items()
    }


def relation_names(content: Mapping[str, Any]) -> dict[str, int]:
    """Relation, as the JSON names it, to its number; DGL leaves them out where there is one."""
    types = mapping(content.get("etypes", {etype_key(DEFAULT_CANONICAL_ETYPE): 0}), "etypes")
    return {
        text(key, "a relation"): whole_number(n, f"etypes[{shown(key)}]")
        for key, n in types.items()
    }


def read_etypes(
    content: Mapping[str, Any],
    ntypes: Mapping[str, int],
    relations: Mapping[str, CanonicalEType],
) -> dict[CanonicalEType, int]:
    """Canonical edge type to its number; ``relations`` are those that are named in another way."""
    types = relation_names(content)
    found = {relations.get(key) or _read_etype(key): number for key, number in types.items()}
    for source, _, target in found:
        for ntype in (source, target):
            if ntype not in ntypes:
                raise ValueError(f"etypes name the node type {shown(ntype)}, and ntypes do not")
    return found


def read_node_map(content: Mapping[str, Any], num_parts: int) -> dict[str, PartRanges]:
    """Per node type, the block of each part."""
    return _read_map(required(content, "node_map"), "node_map", DEFAULT_NTYPE, num_parts)


def read_edge_map(
    content: Mapping[str, Any], num_parts: int, relations: Mapping[str, CanonicalEType]
) -> dict[CanonicalEType, PartRanges]:
    """Per edge type, the block of each part; ``relations`` as for `read_etypes`."""
    only_type = etype_key(DEFAULT_CANONICAL_ETYPE)
    found = _read_map(required(content, "edge_map"), "edge_map", only_type, num_parts)
    return {relations.get(key) or _read_etype(key): blocks for key, blocks in found.items()}


def _read_etype(key: str) -> CanonicalEType:
    names = key.split(":")
    if len(names) != 3:
        raise ValueError(f"edge type {shown(key)} is not of the form 'source:relation:destination'")
    return names[0], names[1], names[2]


def _read_map(blocks: Any, name: str, only_type: str, num_parts: int) -> dict[str, PartRanges]:
    """Blocks per type; DGL once wrote the ends of the blocks alone, and no types."""
    if isinstance(blocks, str):
        raise ValueError(
            f"{name} with one number per node is not supported, only ranges of relabelled ids"
        )
    if isinstance(blocks, list):
        blocks = {only_type: blocks}
    found = {}
    for key, rows in mapping(blocks, name).items():
        what = f"{name}[{shown(key)}]"
        if len(listing(rows, what)) != num_parts:
            raise ValueError(
                f"{what} must hold [start, stop) for each of the {num_parts} parts (got "
                f"{len(rows)} of them)"
            )
        if all(isinstance(row, int) for row in rows):
            rows = [[start, stop] for start, stop in zip([0, *rows], rows, strict=False)]
        for row in rows:
            if len(listing(row, f"a block of {what}")) != 2:
                raise ValueError(f"a block of {what} must be [start, stop] (got {shown(row)})")
        found[key] = [[whole_number(n, f"a bound in {what}") for n in row] for row in rows]
    return found


def read_build(content: Mapping[str, Any]) -> str:
    """The digest that names a partition, and the folder its parts step aside to: 16 hex digits."""
    build = required(content, "build")
    if not isinstance(build, str) or not _BUILD.fullmatch(build):
        raise ValueError(f"build must be 16 hexadecimal digits (got {shown(build)})")
    return build


def read_part_files(content: Mapping[str, Any], num_parts: int) -> tuple[dict[str, PartFile], ...]:
    """For every part, its files by kind."""
    strange = {key for key in content if key.startswith("part-")}
    strange -= {f"part-{part}" for part in range(num_parts)}
    if strange:
        raise ValueError(f"there is {min(strange)[:_SHOWN]!r}, but there are {num_parts} parts")
    return tuple(_read_part(content, part) for part in range(num_parts))


def read_dgl_files(content: Mapping[str, Any], num_parts: int) -> tuple[dict[str, PartFile], ...]:
    """For every part of a JSON that DGL wrote, its files by kind, as far as it names them."""
    found = []
    for part in range(num_parts):
        entry = mapping(content.get(f"part-{part}", {}), f"part-{part}")
        kinds = [kind for kind in PART_FILES if kind in entry]
        found.append({kind: PartFile(inside_path(entry[kind])) for kind in kinds})
        if "part_graph_graphbolt" in entry and not kinds:
            raise ValueError(
                f"part {part} is a pickle of GraphBolt's, which is never read; partition with "
                "use_graphbolt=False"
            )
    return tuple(found)


def _read_part(content: Mapping[str, Any], part: int) -> dict[str, PartFile]:
    found = {}
    for kind in PART_FILES:
        try:
            entry = mapping(required(content, f"part-{part}"), f"part-{part}")
            name = inside_path(required(entry, kind))
            files = mapping(required(entry, "files"), "files")
            record = mapping(required(files, name), f"the record of {shown(name)}")
            size = whole_number(required(record, "bytes"), "bytes")
            digest = required(record, "blake2b")
            if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
                raise ValueError(f"blake2b must be 32 hexadecimal digits (got {shown(digest)})")
        except ValueError as error:
            raise ValueError(
                f"it says nothing about the {kind} of part {part} that can be used: {error}"
            ) from None
        found[kind] = PartFile(name, size, digest)
    return found


def inside_path(name: Any) -> str:
    """A path that stays inside the folder that it is taken from, as far as its text can tell."""
    path = PurePosixPath(text(name, "a path"))
    is_elsewhere = path.is_absolute() or PureWindowsPath(name).is_absolute() or ".." in path.parts
    # A colon follows the letter of a drive there; elsewhere a graph may be called "kg:1".
    forbidden = "\\\0:" if os.name == "nt" else "\\\0"
    if is_elsewhere or not path.parts or set(forbidden) & set(name):
        raise ValueError(f"a path must stay inside the partition's folder (got {shown(name)})")
    return str(name)
