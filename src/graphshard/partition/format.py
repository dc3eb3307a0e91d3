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
    └── .<graph_name>-<build>/        old parts, while they are being replaced

"type/orig_id" and "src:relation:dst/orig_id" (int64) are always among the features: the ids that
the nodes and edges of the type had in the graph that was partitioned.

How a folder is written, and replaced, is told in `_writer`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._typing import DEFAULT_CANONICAL_ETYPE, DEFAULT_NTYPE, CanonicalEType
from ..errors import PartitionFormatError
from ._files import TensorFile

FORMAT = "graphshard-partition"
FORMAT_VERSION = 1
PART_FILES = {
    "part_graph": "graph.safetensors",
    "node_feats": "node_feats.safetensors",
    "edge_feats": "edge_feats.safetensors",
}


def etype_key(etype: CanonicalEType) -> str:
    """The name of a relation in files: "src:relation:dst"."""
    return ":".join(etype)


@dataclass(frozen=True)
class PartitionConfig:
    """A partition's JSON, checked.

    Args:
        path: The file.
        content: All of it.
        graph_name: Name of the graph.
        num_parts: Number of parts.
        ntypes: Node type to its number.
        etypes: Canonical edge type to its number.
        node_map: Per node type, the block of each part.
        edge_map: Per edge type, the block of each part.
    """

    path: Path
    content: dict[str, Any]
    graph_name: str
    num_parts: int
    ntypes: dict[str, int]
    etypes: dict[CanonicalEType, int]
    node_map: dict[str, list[list[int]]]
    edge_map: dict[CanonicalEType, list[list[int]]]

    @property
    def build(self) -> str | None:
        """Digest that names the partition; None in DGL's JSON."""
        build = self.content.get("build")
        return None if build is None else str(build)

    def check_part(self, part_id: int) -> int:
        """``part_id``, if there is such a part.

        Raises:
            ValueError: There is not.
        """
        if not 0 <= part_id < self.num_parts:
            raise ValueError(f"part_id must be in [0, {self.num_parts}) (got {part_id})")
        return int(part_id)

    def open_part(self, part_id: int, kind: str) -> TensorFile:
        """Open one file of one part, after checking that it is the one this JSON speaks of.

        Args:
            part_id: The part.
            kind: "part_graph", "node_feats" or "edge_feats".

        Raises:
            PartitionFormatError: It is missing, damaged, or belongs to another partition.
        """
        self.check_format()
        try:
            name = self.content[f"part-{part_id}"][kind]
            record = self.content[f"part-{part_id}"]["files"][name]
            size, digest = int(record["bytes"]), str(record["blake2b"])
        except (KeyError, TypeError, ValueError) as error:
            raise PartitionFormatError(
                f"{self.path} says nothing about the {kind} of part {part_id} (missing {error}); "
                "partition the graph again"
            ) from None
        folder = self.path.parent
        displaced = displaced_folder(self.path, self.content)
        problem: PartitionFormatError | None = None
        for path in (folder / name, displaced / name):
            try:
                file = TensorFile.open(path)
            except PartitionFormatError as error:
                problem = problem or error
                continue
            if path.stat().st_size == size and file.blake2b == digest:
                return file
            problem = problem or PartitionFormatError(
                f"file {path} is not the one that {self.path.name} describes (size "
                f"{path.stat().st_size} and digest {file.blake2b}, expected {size} and {digest}); "
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
        if found != FORMAT:
            raise PartitionFormatError(
                f"{self.path} does not describe a graphshard partition (format {found!r}, "
                f"expected {FORMAT!r}); partition the graph with graphshard's partition_graph"
            )
        if version != FORMAT_VERSION:
            raise PartitionFormatError(
                f"{self.path} has format version {version!r}, and this graphshard reads "
                f"{FORMAT_VERSION}; use the graphshard that wrote it, or partition again"
            )


def read_config(part_config: str | os.PathLike[str]) -> PartitionConfig:
    """Read a partition's JSON: ours, or DGL's (whose parts cannot be opened, but whose maps can).

    Raises:
        PartitionFormatError: It is missing, not JSON, incomplete or inconsistent.
    """
    path = Path(part_config)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PartitionFormatError(
            f"partition config {path} does not exist; pass the path of the JSON file that "
            "partition_graph wrote"
        ) from None
    except IsADirectoryError:
        raise PartitionFormatError(
            f"partition config {path} is a folder; pass the path of the JSON file in it"
        ) from None
    except ValueError as error:
        raise PartitionFormatError(
            f"partition config {path} is not JSON ({error}); copy it again, or partition again"
        ) from None
    try:
        num_parts = int(content["num_parts"])
        ntypes = {name: int(n) for name, n in content.get("ntypes", {DEFAULT_NTYPE: 0}).items()}
        default_etypes = {etype_key(DEFAULT_CANONICAL_ETYPE): 0}
        etypes = {
            _read_etype(key): int(n) for key, n in content.get("etypes", default_etypes).items()
        }
        config = PartitionConfig(
            path=path,
            content=content,
            graph_name=str(content["graph_name"]),
            num_parts=num_parts,
            ntypes=ntypes,
            etypes=etypes,
            node_map=_read_map(content["node_map"], DEFAULT_NTYPE),
            edge_map={
                _read_etype(key): blocks
                for key, blocks in _read_map(
                    content["edge_map"], etype_key(DEFAULT_CANONICAL_ETYPE)
                ).items()
            },
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        what = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise PartitionFormatError(
            f"partition config {path} is incomplete or of an unknown form ({what}); "
            "partition the graph again"
        ) from None
    return config


def _read_etype(key: str) -> CanonicalEType:
    names = key.split(":")
    if len(names) != 3:
        raise ValueError(f"edge type {key!r} is not of the form 'source:relation:destination'")
    return names[0], names[1], names[2]


def _read_map(blocks: Any, only_type: str) -> dict[str, list[list[int]]]:
    """Blocks per type; DGL once wrote the ends of the blocks alone, and no types."""
    if isinstance(blocks, str):
        raise ValueError(
            "a map with one number per node is not supported, only ranges of relabelled ids"
        )
    if isinstance(blocks, list):
        blocks = {only_type: blocks}
    found = {}
    for name, rows in blocks.items():
        if all(isinstance(row, int) for row in rows):
            rows = [[start, stop] for start, stop in zip([0, *rows], rows, strict=False)]
        found[name] = [[int(start), int(stop)] for start, stop in rows]
    return found


def displaced_folder(json_path: Path, content: Mapping[str, Any]) -> Path:
    """Where the parts of a JSON step aside while they are being replaced."""
    build = str(content.get("build", "none"))
    return json_path.parent / f".{json_path.stem}-{build}"


def build_of(content: Mapping[str, Any]) -> str:
    """A short name for what a JSON describes: the digest of everything else in it."""
    rest = {key: value for key, value in content.items() if key != "build"}
    text = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
