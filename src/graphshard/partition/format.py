# SPDX-License-Identifier: Apache-2.0
"""The partition folder: what is where, how it is written, and how it is found whole.

::

    out_path/
    ├── <graph_name>.json             DGL's keys, and ours: format, sizes, digests, statistics
    ├── part0/
    │   ├── graph.safetensors         local structure
    │   │     coo/src coo/dst                        [local edges]   } those of graph_formats
    │   │     csc/indptr csc/indices csc/eids        in-edges        } that were asked for;
    │   │     csr/indptr csr/indices csr/eids        out-edges       } ids of the graph's idtype
    │   │     node/_ID node/_TYPE node/part_id node/inner_node       [local nodes]
    │   │     edge/_ID edge/_TYPE edge/inner_edge                    [local edges]
    │   ├── node_feats.safetensors    "type/feature"             [inner nodes of the type, ...]
    │   └── edge_feats.safetensors    "src:relation:dst/feature" [inner edges of the relation, ...]
    ├── part1/ ...
    ├── <graph_name>-part0/ ...       of a graph that came to a folder which had another one already
    └── .<graph_name>-<build>/        old parts, while they are being replaced

Names of types may hold any of ``/ : ~``: a feature's name has no slash, so its type is what stands
before the last one, and where a name has a colon the JSON lists the triples ("canonical_etypes").

"type/orig_id" and "src:relation:dst/orig_id" (int64) are always among the features: the ids that
the nodes and edges of the type had in the graph that was partitioned.

How a folder is written, and replaced, is described in `save/_writer.py`. Folders that DGL wrote are
read, too; `dgl_folder` draws them.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .._base.files import NotRegularFileError, read_json_regular
from .._base.typing import CanonicalEType
from ..errors import PartitionFormatError
from ._book import RangePartitionBook
from ._stats import PartitionStats
from .dgl_folder import DGLPartFile, find_relations
from .files import PART_FILES, PartFile, TensorFile, entries, etype_key
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
FORMAT_VERSION = 1


@dataclass(frozen=True)
class PartitionConfig:
    """A partition's JSON, checked: what is in here agrees with itself.

    Args:
        path: The file.
        content: All of it.
        graph_name: Name of the graph.
        num_parts: Number of parts.
        ntypes: Node type to its number.
        etypes: Canonical edge type to its number.
        node_map: Per node type, the block of each part.
        edge_map: Per edge type, the block of each part.
        layout: Whose files the parts are: ours, DGL's, or those of another version or program,
            which are not read.
        halo_hops: Reach of the halo; None where the JSON does not say.
        num_trainers_per_machine: Trainers that share a part; None likewise.
        part_method: How nodes were assigned; None likewise.
        graph_formats: Formats in which structure is stored; empty likewise.
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
    graph_formats: tuple[str, ...] = ()
    edges_by_destination: bool = False
    build: str | None = None
    files: tuple[dict[str, PartFile], ...] = ()
    stats: PartitionStats | None = None

    def check_part(self, part_id: int) -> int:
        """``part_id``, if there is such a part.

        Raises:
            ValueError: There is not.
        """
        if not 0 <= part_id < self.num_parts:
            raise ValueError(f"part_id must be in [0, {self.num_parts}) (got {part_id})")
        return int(part_id)

    def book(self, part_id: int) -> RangePartitionBook:
        """Who owns what, seen from one part.

        Raises:
            ValueError: There is no such part.
        """
        return RangePartitionBook(
            self.check_part(part_id),
            self.num_parts,
            self.node_map,
            self.edge_map,
            self.ntypes,
            self.etypes,
        )

    def open_part(self, part_id: int, kind: str) -> TensorFile | DGLPartFile:
        """Open one file of one part, after checking that it is the one this JSON speaks of.

        DGL's JSON says nothing of its files but where they are.

        Args:
            part_id: The part.
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
        """Raise unless the parts are in the format that this version reads.

        Raises:
            PartitionFormatError: They are not.
        """
        found, version = self.content.get("format"), self.content.get("format_version")
        if self.layout == "other" and found != FORMAT:
            raise PartitionFormatError(
                f"{self.path} describes neither a graphshard partition nor one of DGL's (format "
                f"{entries.shown(found)}, expected {FORMAT!r}); partition the graph with "
                "graphshard's partition_graph"
            )
        if self.layout == "other":
            raise PartitionFormatError(
                f"{self.path} has format version {entries.shown(version)}, and this graphshard "
                f"reads {FORMAT_VERSION}; use the graphshard that wrote it, or partition again"
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
        content = entries.mapping(content, "the JSON")
        num_parts = entries.whole_number(entries.required(content, "num_parts"), "num_parts", 1)
        ntypes = entries.read_ntypes(content)
        node_map = entries.read_node_map(content, num_parts)
        of_layout: dict[str, Any] = {}
        if _is_read(content):
            of_layout = _read_ours(path, content, num_parts)
        elif "format" not in content:
            files = entries.read_dgl_files(content, num_parts)
            of_layout = {"layout": "dgl", "build": build_of(content), "files": files}
            of_layout |= _read_settings(content)
        relations = entries.read_triples(content)
        relations |= _unnamed_types(path, content, ntypes, node_map, of_layout)
        config = PartitionConfig(
            path=path,
            content=content,
            graph_name=entries.text(entries.required(content, "graph_name"), "graph_name"),
            num_parts=num_parts,
            ntypes=ntypes,
            etypes=entries.read_etypes(content, ntypes, relations),
            node_map=node_map,
            edge_map=entries.read_edge_map(content, num_parts, relations),
            **of_layout,
        )
        book = config.book(0)
        for what, count in (("nodes", book.num_nodes()), ("edges", book.num_edges())):
            said = content.get(f"num_{what}", count)
            if said != count or isinstance(said, bool):
                raise ValueError(f"its maps hold {count} {what}, not {entries.shown(said)}")
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
        raise PartitionFormatError(
            f"partition config {path} does not exist; pass the path of the JSON file that "
            "partition_graph wrote"
        ) from None
    except IsADirectoryError:
        raise PartitionFormatError(
            f"partition config {path} is a folder; pass the path of the JSON file in it"
        ) from None
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


def _is_read(content: Mapping[str, Any]) -> bool:
    """Whether a JSON is of our format, in the version that is read."""
    version = content.get("format_version")
    return content.get("format") == FORMAT and type(version) is int and version == FORMAT_VERSION


def _read_ours(path: Path, content: dict[str, Any], num_parts: int) -> dict[str, Any]:
    """What our JSON says beyond DGL's."""
    for key in ("halo_hops", "num_trainers_per_machine", "ntypes", "etypes", "part_method"):
        entries.required(content, key)
    for key in ("num_nodes", "num_edges"):
        entries.whole_number(entries.required(content, key), key)
    formats = entries.listing(entries.required(content, "graph_formats"), "graph_formats")
    for name in formats:
        if name not in entries.GRAPH_FORMATS:
            raise ValueError(
                f"graph_formats must be some of {entries.GRAPH_FORMATS} (got {entries.shown(name)})"
            )
    settings = _read_settings(content)
    files = entries.read_part_files(content, num_parts)
    try:
        stats = PartitionStats.from_dict(entries.required(content, "stats"))
        if stats.num_parts != num_parts:
            raise ValueError(f"they are of {stats.num_parts} parts, not of {num_parts}")
    except ValueError as error:
        raise PartitionFormatError(
            f"the statistics in {path} are incomplete ({error}); partition again"
        ) from None
    by_destination = content.get("edges_by_destination", True)
    if not isinstance(by_destination, bool):
        raise ValueError("edges_by_destination must be true or false")
    return {
        **settings,
        "layout": "graphshard",
        "graph_formats": tuple(formats),
        "edges_by_destination": by_destination,
        "build": entries.read_build(content),
        "files": files,
        "stats": stats,
    }


def _read_settings(content: dict[str, Any]) -> dict[str, Any]:
    """How a partition was made, as far as its JSON says so."""
    settings: dict[str, Any] = {}
    for key, least in (("halo_hops", 0), ("num_trainers_per_machine", 1)):
        if key in content:
            settings[key] = entries.whole_number(content[key], key, least)
    if "part_method" in content:
        settings["part_method"] = entries.text(content["part_method"], "part_method")
    return settings


def _unnamed_types(
    path: Path,
    content: dict[str, Any],
    ntypes: dict[str, int],
    node_map: dict[str, list[list[int]]],
    of_layout: dict[str, Any],
) -> dict[str, CanonicalEType]:
    """The relations of an old JSON of DGL's that names them without their node types."""
    names = {key: n for key, n in entries.relation_names(content).items() if ":" not in key}
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
    """Where the parts of a JSON step aside while they are being replaced.

    Args:
        json_path: The JSON.
        build: What `PartitionConfig.build` says: 16 hexadecimal digits, so that no path comes of
            it that leads elsewhere.
    """
    return json_path.parent / f".{json_path.stem}-{build}"


def build_of(content: Mapping[str, Any]) -> str:
    """A short name for what a JSON describes: the digest of everything else in it."""
    rest = {key: value for key, value in content.items() if key != "build"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
