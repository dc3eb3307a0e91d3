# SPDX-License-Identifier: Apache-2.0
"""The partition folder: what is where, how it is written, and how it is found whole.

::

    out_path/
    ├── <graph_name>.json             DGL's keys, and ours: format, sizes, digests, statistics
    ├── part0/
    │   ├── graph.safetensors         local structure, see `structure.py`; format 1: `_format_1.py`
    │   ├── node_feats.safetensors    "type/feature"             [inner nodes of the type, ...]
    │   └── edge_feats.safetensors    "src:relation:dst/feature" [inner edges of the relation, ...]
    ├── part1/ ...
    ├── <graph_name>-part0/ ...       of a graph that came to a folder which had another one already
    ├── .<graph_name>-work/           stages of a partition that is being made; see `_writer.py`
    └── .<graph_name>-<build>/        old parts, while they are being replaced

Names of types may hold any of ``/ : ~``: a feature's name has no slash, so its type is what stands
before the last one, and where a name has a colon the JSON lists the triples ("canonical_etypes").

"type/orig_id" and "src:relation:dst/orig_id" are always among the features: the ids that the nodes
and edges of the type had in the graph that was partitioned, in 32 bits where there are at most 2^32
of them (in format 1 in 64).

How a folder is written, and replaced, is described in `_writer.py`. Folders that DGL wrote are
read, too; `dgl_folder` draws them.

[Note: a JSON is checked once]
A JSON may have been damaged, or be an attempt to have files elsewhere read or moved. So numbers
are whole and bounded, counts are checked against the maps and lists that are there before anything
loops over them, and paths cannot leave the folder. What is wrong is a ValueError that shows it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

import torch

from .._base.files import NotRegularFileError, read_json_regular
from .._base.typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..errors import PartitionFormatError
from ._book import RangePartitionBook
from ._stats import PartitionStats
from .checked_files import (
    GRAPH_FORMATS,
    PART_FILES,
    TensorFile,
    etype_key,
    listing,
    mapping,
    required,
    shown,
    text,
    whole_number,
)
from .dgl_folder import DGLPartFile, find_relations
from .pyg_folder import is_pyg_folder

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "PART_FILES",
    "PartitionConfig",
    "build_of",
    "displaced_folder",
    "etype_key",
    "read_config",
    "read_content",
]

FORMAT = "graphshard-partition"
FORMAT_VERSION = 2
_READ_VERSIONS = (1, FORMAT_VERSION)

_MOST_JSON = 100  # of a folder, that are looked into for a message
_MOST_NAMED = 5

_IDTYPES = {"int32": torch.int32, "int64": torch.int64}

_BUILD = re.compile(r"[0-9a-f]{16}")

_DIGEST = re.compile(r"[0-9a-f]{32}")


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


@dataclass(frozen=True)
class PartitionConfig:
    """A partition's JSON, checked: what is in here agrees with itself.

    Args:
        etypes: Canonical edge type to its number.
        node_map: Per node type, the block of each part.
        edge_map: Per edge type, the block of each part.
        layout: Whose files the parts are: ours, DGL's, or those of another version or program,
            which are not read.
        halo_hops: Reach of the halo; None where the JSON does not say.
        num_trainers_per_machine: Trainers that share a part; None likewise.
        part_method: How nodes were assigned; None likewise.
        version: Of our format; 0 where the parts are not ours.
        graph_formats: Formats that `load_partition` builds (format 1 stores them); empty likewise.
        idtype: Of the ids of the graph that was partitioned; None where its structure says so.
        edges_by_destination: Whether a part's own edges of a relation come by destination; DGL's
            need not.
        build: Digest of everything else in the JSON, which names the partition; None where the
            parts are not read.
        files: Part to the kinds of its files to what the JSON says of them; empty where the parts
            are not read.
        stats: The statistics; None where the JSON is not ours.
    """

    path: Path
    content: dict[str, Any]
    graph_name: str
    num_parts: int
    ntypes: dict[str, int]
    etypes: dict[CanonicalEType, int]
    node_map: dict[str, list[list[int]]]
    edge_map: dict[CanonicalEType, list[list[int]]]
    layout: Literal["graphshard", "dgl", "other"] = "other"
    halo_hops: int | None = None
    num_trainers_per_machine: int | None = None
    part_method: str | None = None
    version: int = 0
    graph_formats: tuple[str, ...] = ()
    idtype: torch.dtype | None = None
    edges_by_destination: bool = False
    build: str | None = None
    files: tuple[dict[str, PartFile], ...] = ()
    stats: PartitionStats | None = None

    def book(self, part_id: int) -> RangePartitionBook:
        """Who owns what, seen from one part."""
        if not 0 <= part_id < self.num_parts:
            raise ValueError(f"part_id must be in [0, {self.num_parts}) (got {part_id})")
        maps, types = (self.node_map, self.edge_map), (self.ntypes, self.etypes)
        return RangePartitionBook(part_id, self.num_parts, *maps, *types)

    def open_part(self, part_id: int, kind: str) -> TensorFile | DGLPartFile:
        """Open one file of one part, after checking that it is the one this JSON speaks of.

        DGL's JSON says nothing of its files but where they are.

        Args:
            kind: "part_graph", "node_feats" or "edge_feats".

        Raises:
            PartitionFormatError: It is missing, damaged, lies outside the folder, or belongs to
                another partition.
        """
        self.check_format()
        assert self.build is not None
        if kind not in self.files[part_id]:
            raise PartitionFormatError(
                f"{self.path} names no {kind} of part {part_id}; partition the graph again"
            )
        expected = self.files[part_id][kind]
        folder = self.path.parent
        if self.layout == "dgl":
            names = [self.files[part_id].get(of, expected).name for of in (kind, "part_graph")]
            for name in names:
                _check_inside(folder / name, folder)
            path, graph_path = (folder / name for name in names)
            return DGLPartFile.open(path, kind, self.book(part_id), graph_path)
        problem: PartitionFormatError | None = None
        for base in (folder, displaced_folder(self.path, self.build)):
            path = base / expected.name
            try:
                _check_inside(path, folder)
                file = TensorFile.open(path)
            except PartitionFormatError as error:
                problem = problem or error
                continue
            if file.bytes == expected.bytes and file.blake2b == expected.blake2b:
                return file
            problem = problem or PartitionFormatError(
                f"file {path} is not the one that {self.path.name} describes (size {file.bytes} "
                f"and digest {file.blake2b}, expected {expected.bytes} and {expected.blake2b}); "
                "copy the whole partition again, or partition the graph again"
            )
        assert problem is not None
        raise problem

    def check_format(self) -> None:
        """Raise unless the parts are in the format that this version reads."""
        format_name, version = self.content.get("format"), self.content.get("format_version")
        if self.layout == "other" and format_name != FORMAT:
            raise PartitionFormatError(
                f"{self.path} describes neither a graphshard partition nor one of DGL's (format "
                f"{shown(format_name)}, expected {FORMAT!r}); partition the graph with "
                "graphshard's partition_graph"
            )
        if self.layout == "other":
            raise PartitionFormatError(
                f"{self.path} has format version {shown(version)}, and this graphshard reads "
                f"{' and '.join(map(str, _READ_VERSIONS))}; use the graphshard that wrote it, or "
                "partition again"
            )


def read_config(part_config: str | os.PathLike[str]) -> PartitionConfig:
    """Read a partition's JSON, ours or DGL's, old ones included.

    All of it is checked, and of ours the digest too, so that what comes later need not look again.
    An old JSON of DGL's that names relations alone is completed from the structure of its parts.

    Raises:
        PartitionFormatError: It is missing, not JSON, incomplete or inconsistent, or was changed
            after it was written; or PyG wrote it.
    """
    path = Path(part_config)
    if is_pyg_folder(path):
        raise PartitionFormatError(
            f"{path} is of a partition of PyG's; write it in our files with graphshard convert"
        )
    content = read_content(path)
    try:
        content = mapping(content, "the JSON")
        num_parts = whole_number(required(content, "num_parts"), "num_parts", 1)
        ntypes = _numbers_of(content, "ntypes", "a node type", DEFAULT_NTYPE)
        if not ntypes:
            raise ValueError("ntypes must name at least one node type (got none)")
        blocks = required(content, "node_map")
        node_map = _read_map(blocks, "node_map", DEFAULT_NTYPE, num_parts)
        of_layout: dict[str, Any] = {}
        if _is_read(content):
            of_layout = _read_ours(path, content, num_parts)
        elif "format" not in content:
            files = _read_dgl_files(content, num_parts)
            of_layout = {"layout": "dgl", "build": build_of(content), "files": files}
            of_layout |= _read_settings(content)
        relations = _read_triples(content)
        relations |= _unnamed_types(path, content, ntypes, node_map, of_layout)
        config = PartitionConfig(
            path=path,
            content=content,
            graph_name=text(required(content, "graph_name"), "graph_name"),
            num_parts=num_parts,
            ntypes=ntypes,
            etypes=_read_etypes(content, ntypes, relations),
            node_map=node_map,
            edge_map=_read_edge_map(content, num_parts, relations),
            **of_layout,
        )
        book = config.book(0)
        for what, count in (("nodes", book.num_nodes()), ("edges", book.num_edges())):
            said = content.get(f"num_{what}", count)
            if said != count or isinstance(said, bool):
                raise ValueError(f"its maps hold {count} {what}, not {shown(said)}")
    except PartitionFormatError:
        raise
    except ValueError as error:
        raise PartitionFormatError(
            f"partition config {path} is incomplete or of an unknown form ({error}); pass the "
            "JSON file that partition_graph wrote, copy it again, or partition the graph again"
        ) from None
    if config.layout == "graphshard" and build_of(content) != config.build:
        raise PartitionFormatError(
            f"{path} was changed after it was written (its digest differs); copy it again, or "
            "partition the graph again"
        )
    return config


def read_content(path: Path) -> Any:
    """What the file says, whatever it is.

    Raises:
        PartitionFormatError: It is missing, no regular file, or not JSON.
    """
    try:
        return read_json_regular(path)
    except FileNotFoundError:
        cure = _those_in(path.parent) or (
            "pass the path of the JSON file that partition_graph or graphshard partition wrote"
        )
        raise PartitionFormatError(f"partition config {path} does not exist; {cure}") from None
    except IsADirectoryError:
        cure = _those_in(path) or "pass the path of the JSON file in it"
        raise PartitionFormatError(f"partition config {path} is a folder; {cure}") from None
    except NotRegularFileError as error:
        raise PartitionFormatError(
            f"partition config {path} is {error.strerror}; pass the path of the JSON file that "
            "partition_graph wrote"
        ) from None
    except OSError as error:
        raise PartitionFormatError(
            f"partition config {path} cannot be read ({error.strerror}); check the path and its "
            "permissions"
        ) from error
    except ValueError as error:
        raise PartitionFormatError(
            f"partition config {path} is not JSON ({error}); copy it again, or partition again"
        ) from None


def _those_in(folder: Path) -> str:
    """To pass the JSON of a partition that is in a folder; "" where there is none."""
    found: list[str] = []
    for path in sorted(folder.glob("*.json"))[:_MOST_JSON]:
        with contextlib.suppress(OSError, ValueError):
            content = read_json_regular(path)
            if isinstance(content, dict) and "num_parts" in content:
                found.append(str(path))
    if len(found) > _MOST_NAMED:
        found[_MOST_NAMED - 1 :] = [f"{len(found) - _MOST_NAMED + 1} others"]
    which = "one of those that are there: " if len(found) > 1 else ""
    return f"pass {which}{', '.join(found)}{'' if which else ', which is there'}" if found else ""


def _is_read(content: Mapping[str, Any]) -> bool:
    """Whether a JSON is of our format, in the version that is read."""
    version = content.get("format_version")
    return content.get("format") == FORMAT and type(version) is int and version in _READ_VERSIONS


def _read_ours(path: Path, content: dict[str, Any], num_parts: int) -> dict[str, Any]:
    """What our JSON says beyond DGL's."""
    for key in ("halo_hops", "num_trainers_per_machine", "ntypes", "etypes", "part_method"):
        required(content, key)
    for key in ("num_nodes", "num_edges"):
        whole_number(required(content, key), key)
    formats = listing(required(content, "graph_formats"), "graph_formats")
    for name in formats:
        if name not in GRAPH_FORMATS:
            raise ValueError(f"graph_formats must be some of {GRAPH_FORMATS} (got {shown(name)})")
    version: int = content["format_version"]
    idtype = None
    if version > 1:
        name = required(content, "idtype")
        if not isinstance(name, str) or name not in _IDTYPES:
            raise ValueError(f"idtype must be one of {', '.join(_IDTYPES)} (got {shown(name)})")
        idtype = _IDTYPES[name]
    settings = _read_settings(content)
    files = _read_part_files(content, num_parts)
    try:
        stats = PartitionStats.from_dict(required(content, "stats"))
        if stats.num_parts != num_parts:
            raise ValueError(f"they are of {stats.num_parts} parts, not of {num_parts}")
    except ValueError as error:
        raise PartitionFormatError(
            f"the statistics in {path} are incomplete ({error}); partition again"
        ) from None
    by_destination = content.get("edges_by_destination", True)
    if not isinstance(by_destination, bool):
        raise ValueError("edges_by_destination must be true or false")
    build = required(content, "build")  # it names the folder, too, that parts step aside to
    if not isinstance(build, str) or not _BUILD.fullmatch(build):
        raise ValueError(f"build must be 16 hexadecimal digits (got {shown(build)})")
    return {
        **settings,
        "layout": "graphshard",
        "version": version,
        "idtype": idtype,
        "graph_formats": tuple(formats),
        "edges_by_destination": by_destination,
        "build": build,
        "files": files,
        "stats": stats,
    }


def _read_settings(content: dict[str, Any]) -> dict[str, Any]:
    """How a partition was made, as far as its JSON says so."""
    settings: dict[str, Any] = {}
    for key, least in (("halo_hops", 0), ("num_trainers_per_machine", 1)):
        if key in content:
            settings[key] = whole_number(content[key], key, least)
    if "part_method" in content:
        settings["part_method"] = text(content["part_method"], "part_method")
    return settings


def _unnamed_types(
    path: Path,
    content: dict[str, Any],
    ntypes: dict[str, int],
    node_map: dict[str, list[list[int]]],
    of_layout: dict[str, Any],
) -> dict[str, CanonicalEType]:
    """The relations of an old JSON of DGL's that names them without their node types."""
    names = {key: n for key, n in _relation_names(content).items() if ":" not in key}
    if of_layout.get("layout") != "dgl" or not names:
        return {}
    graphs = []
    for part, files in enumerate(of_layout["files"]):
        if "part_graph" not in files:
            raise ValueError(f"it names no part_graph of part {part}")
        graphs.append(path.parent / files["part_graph"].name)
        _check_inside(graphs[-1], path.parent)
    if set(node_map) != set(ntypes):
        raise ValueError(f"node_map has {sorted(node_map)[:5]} and ntypes {sorted(ntypes)[:5]}")
    return find_relations(names, ntypes, node_map, graphs)


def _check_inside(path: Path, folder: Path) -> None:
    """Raise if a link leads out of the partition's folder."""
    root, real = os.path.realpath(folder), os.path.realpath(path)
    if os.path.commonpath([root, real]) != root:
        raise PartitionFormatError(
            f"file {path} must lie inside the partition's folder (it is a link to {real}); put "
            "the file itself there"
        )


def displaced_folder(json_path: Path, build: str) -> Path:
    """Where the parts of a JSON, of a checked ``build``, step aside while they are replaced."""
    return json_path.parent / f".{json_path.stem}-{build}"


def build_of(content: Mapping[str, Any]) -> str:
    """A short name for what a JSON describes: the digest of everything else in it."""
    return digest_of_content(content, "build", 8)


def digest_of_content(content: Mapping[str, Any], key: str, num_bytes: int = 16) -> str:
    """Digest of a JSON object, without the digest that it carries under a key."""
    rest = dict(content)
    rest.pop(key, None)
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=num_bytes).hexdigest()


def triples_of(etypes: Sequence[CanonicalEType]) -> dict[str, list[list[str]]]:
    """What a JSON says of relations whose names cannot be taken apart: an entry, or nothing."""
    if ":" in "".join(map("".join, etypes)):
        return {"canonical_etypes": [list(etype) for etype in etypes]}
    return {}


def _read_triples(content: Mapping[str, Any]) -> dict[str, CanonicalEType]:
    """Relation, as the JSON names it, to its triple, where `triples_of` has written them."""
    triples = {}
    for triple in listing(content.get("canonical_etypes", []), "canonical_etypes"):
        names = listing(triple, "a relation")
        if len(names) != 3:
            raise ValueError(f"a relation must be of three names (got {shown(triple)})")
        source, relation, target = (  # that of a relation between two types may be empty
            "" if i == 1 and n == "" else text(n, "a name in canonical_etypes")
            for i, n in enumerate(names)
        )
        etype = (source, relation, target)
        triples[etype_key(etype)] = etype
    return triples


def _numbers_of(content: Mapping[str, Any], key: str, what: str, only_type: str) -> dict[str, int]:
    """Type, as the JSON names it, to its number; DGL leaves them out where there is one."""
    types = mapping(content.get(key, {only_type: 0}), key)
    return {text(t, what): whole_number(n, f"{key}[{shown(t)}]") for t, n in types.items()}


def _relation_names(content: Mapping[str, Any]) -> dict[str, int]:
    return _numbers_of(content, "etypes", "a relation", etype_key(DEFAULT_CANONICAL_ETYPE))


def _read_etypes(
    content: Mapping[str, Any],
    ntypes: Mapping[str, int],
    relations: Mapping[str, CanonicalEType],
) -> dict[CanonicalEType, int]:
    """Canonical edge type to its number; ``relations`` are those that are named in another way."""
    types = _relation_names(content)
    etypes = {relations.get(key) or _read_etype(key): number for key, number in types.items()}
    for source, _, target in etypes:
        for ntype in (source, target):
            if ntype not in ntypes:
                raise ValueError(f"etypes name the node type {shown(ntype)}, and ntypes do not")
    return etypes


def _read_edge_map(
    content: Mapping[str, Any], num_parts: int, relations: Mapping[str, CanonicalEType]
) -> dict[CanonicalEType, PartRanges]:
    """Per edge type, the block of each part; ``relations`` as for `_read_etypes`."""
    only_type = etype_key(DEFAULT_CANONICAL_ETYPE)
    by_name = _read_map(required(content, "edge_map"), "edge_map", only_type, num_parts)
    return {relations.get(key) or _read_etype(key): blocks for key, blocks in by_name.items()}


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
    by_type = {}
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
        by_type[key] = [[whole_number(n, f"a bound in {what}") for n in row] for row in rows]
    return by_type


def _read_part_files(content: Mapping[str, Any], num_parts: int) -> tuple[dict[str, PartFile], ...]:
    """For every part, its files by kind."""
    strange = {key for key in content if key.startswith("part-")}
    strange -= {f"part-{part}" for part in range(num_parts)}
    if strange:
        raise ValueError(f"there is {min(strange)[:60]!r}, but there are {num_parts} parts")
    return tuple(_read_part(content, part) for part in range(num_parts))


def _read_dgl_files(content: Mapping[str, Any], num_parts: int) -> tuple[dict[str, PartFile], ...]:
    """For every part of a JSON that DGL wrote, its files by kind, as far as it names them."""
    files_by_part = []
    for part in range(num_parts):
        entry = mapping(content.get(f"part-{part}", {}), f"part-{part}")
        kinds = [kind for kind in PART_FILES if kind in entry]
        files_by_part.append({kind: PartFile(_inside_path(entry[kind])) for kind in kinds})
        if "part_graph_graphbolt" in entry and not kinds:
            raise ValueError(
                f"part {part} is a pickle of GraphBolt's, which is never read; partition with "
                "use_graphbolt=False"
            )
    return tuple(files_by_part)


def _read_part(content: Mapping[str, Any], part: int) -> dict[str, PartFile]:
    files_of_part = {}
    for kind in PART_FILES:
        try:
            entry = mapping(required(content, f"part-{part}"), f"part-{part}")
            name = _inside_path(required(entry, kind))
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
        files_of_part[kind] = PartFile(name, size, digest)
    return files_of_part


def _inside_path(name: Any) -> str:
    """A path that stays inside the folder that it is taken from, as far as its text can tell."""
    path = PurePosixPath(text(name, "a path"))
    is_elsewhere = path.is_absolute() or PureWindowsPath(name).is_absolute() or ".." in path.parts
    if is_elsewhere or not path.parts or set("\\\0") & set(name):
        raise ValueError(f"a path must stay inside the partition's folder (got {shown(name)})")
    return str(name)
