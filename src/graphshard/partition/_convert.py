# SPDX-License-Identifier: Apache-2.0
"""convert_partition: from the files of DGL to ours, and back; and from those of PyG.

Between DGL's and ours nothing is relabelled. It goes part by part, and features some rows at a
time, so that it takes the memory of the structure of one part. Ids, the order of local nodes and
edges, and every feature stay as they are, with two exceptions that DGL's files make: they know no
bool, which becomes uint8, and they hold ``orig_id`` only where it says more than the ids
themselves.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from .._base.files import check_text, sync_folder, write_json
from .._base.typing import CanonicalEType
from ..errors import PartitionFormatError
from ..graph import Graph, heterograph
from ..graph.dgl_files import dgl_dtype, save_graphs, write_tensor_file
from ._stats import Balance, PartitionStats, PartSizes
from ._writer import PartitionWriter, check_graph_name
from .checked_files import RowSource, TensorFile
from .dgl_folder import DGL_PART_FILES
from .format import PartitionConfig, etype_key, read_config, triples_of
from .load import load_part, load_structure, num_ids, open_features
from .pyg_folder import PyGPart, PyGPartition, is_pyg_folder
from .save import partition_graph
from .structure import original_ids, stored_dtype

Layout = Literal["graphshard", "dgl"]
_SLICE_BYTES = 1 << 24
_FEATURES: tuple[Literal["node_feats", "edge_feats"], ...] = ("node_feats", "edge_feats")


def convert_partition(
    part_config: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    to: Layout | None = None,
) -> Path:
    """Write a partition again, in DGL's files or in ours. Needs no process group, DGL or PyG.

    A partition of PyG's is read into memory as a whole, and partitioned again into the parts that
    it has: nodes and edges get new ids, in an order within parts for locality.

    Args:
        part_config: The JSON of a partition that `partition_graph`, ours or DGL's, wrote; or the
            folder of PyG's ``Partitioner``, or its ``META.json``, of which ``x`` becomes ``feat``.
        out_path: Folder to write to; made if need be. Not the one that is read.
        to: "dgl" for files that DGL reads, "graphshard" for ours; by default the other kind.

    Returns:
        The path of the new JSON.

    Raises:
        PartitionFormatError: The partition is damaged.
        TypeError: A feature has a dtype that DGL's files cannot hold.
        ValueError: ``to`` is neither, or "dgl" for a partition of PyG's; or there is something in
            ``out_path`` that would be replaced.
        RuntimeError: Another process is writing to the folder.
        OSError: A file cannot be written, such as on a full disk; names it.

    Example:
        >>> convert_partition("parts/cora.json", "parts-for-dgl")  # doctest: +SKIP
    """
    check_text(os.fspath(out_path), "out_path")
    if is_pyg_folder(Path(part_config)):
        return _from_pyg(Path(part_config), Path(out_path), to)
    config = read_config(part_config)
    config.check_format()
    if to is None:
        to = "dgl" if config.layout == "graphshard" else "graphshard"
    if to not in ("dgl", "graphshard"):
        raise ValueError(f"to must be 'dgl', 'graphshard' or None (got {to!r})")
    if os.path.realpath(out_path) == os.path.realpath(config.path.parent):
        raise ValueError(f"out_path must be another folder than that of {config.path}")
    return _to_dgl(config, Path(out_path)) if to == "dgl" else _to_ours(config, Path(out_path))


@contextmanager
def _feature_rows(
    config: PartitionConfig, part: int, kind: str
) -> Iterator[dict[str, Tensor | RowSource]]:
    """The features of a part; mapped, or still in the file."""
    file = open_features(config, config.book(part), kind)
    file.check_digest()
    if isinstance(file, TensorFile):
        features: dict[str, Tensor | RowSource] = dict(file.read())
        totals = num_ids(kind, config.book(part))
        for owner, total in totals.items():
            ids = features[name := f"{owner}/orig_id"]
            assert isinstance(ids, Tensor)
            features[name] = original_ids(ids, total)
        yield features
        return
    with file.rows() as rows:
        yield dict(rows)


def _pieces(rows: Tensor | RowSource) -> Iterable[Tensor]:
    if not isinstance(rows, Tensor):
        return rows.slices()
    row_bytes = max(1, rows[:1].nbytes)
    return torch.split(rows, max(1, _SLICE_BYTES // row_bytes)) if rows.dim() else (rows,)


# ---------------------------------------------------------------------------- to DGL


def _to_dgl(config: PartitionConfig, folder: Path) -> Path:
    check_graph_name(config.graph_name)
    for etype in config.etypes:
        if any(":" in name for name in etype):
            raise ValueError(
                f"{config.path} cannot be written in DGL's files, which separate the names of a "
                f"relation by ':' (got {etype}); rename the types of the graph and partition again"
            )
    json_path = folder / f"{config.graph_name}.json"
    parts = [f"part{part}" for part in range(config.num_parts)]
    for path in (json_path, *(folder / name for name in parts)):
        if os.path.lexists(path):
            raise ValueError(f"{path} exists; choose another folder, or move it away")
    folder.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{config.graph_name}-staging-", dir=folder))
    try:
        for part, name in enumerate(parts):
            _write_dgl_part(config, part, staging / name)
        content = _maps(config)
        for part, name in enumerate(parts):
            content[f"part-{part}"] = {kind: f"{name}/{f}" for kind, f in DGL_PART_FILES.items()}
        write_json(staging / json_path.name, content, final=json_path)
        for name in (*parts, json_path.name):  # without the JSON there is no partition
            os.rename(staging / name, folder / name)
            sync_folder(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return json_path


def _write_dgl_part(config: PartitionConfig, part: int, folder: Path) -> None:
    graph, *_ = load_part(config, part, load_feats=False)
    save_graphs(
        folder / DGL_PART_FILES["part_graph"],
        _as_dgl_has_it(graph, config),
        formats=list(config.graph_formats) or None,
    )
    for kind in _FEATURES:
        with _feature_rows(config, part, kind) as features:
            for rows in features.values():
                dgl_dtype(rows.dtype)
            pieces = {
                name: (rows.dtype, tuple(rows.shape), _pieces(rows))
                for name, rows in features.items()
                if not _is_implied(config, part, name, rows)
            }
            write_tensor_file(folder / DGL_PART_FILES[kind], pieces)
    sync_folder(folder)


def _maps(config: PartitionConfig) -> dict[str, Any]:
    """What both kinds of JSON say."""
    book = config.book(0)
    return {
        "graph_name": config.graph_name,
        "num_nodes": book.num_nodes(),
        "num_edges": book.num_edges(),
        "part_method": config.part_method or "custom",
        "num_parts": config.num_parts,
        "halo_hops": 1 if config.halo_hops is None else config.halo_hops,
        "node_map": book.node_map(),
        "edge_map": {etype_key(etype): blocks for etype, blocks in book.edge_map().items()},
        "ntypes": {name: number for number, name in enumerate(book.ntypes)},
        "etypes": {etype_key(name): n for n, name in enumerate(book.canonical_etypes)},
    }


def _as_dgl_has_it(graph: Graph, config: PartitionConfig) -> Graph:
    """The same structure with the columns that DGL has, in its dtypes."""
    adjacency = graph.adjacency()
    converted = Graph({graph.ntypes[0]: adjacency.num_dst}, {graph.canonical_etypes[0]: adjacency})
    # As DGL does it: of one part there are always types, and never owners.
    left_out = "part_id" if config.num_parts == 1 else "_TYPE"
    if config.num_parts > 1 and (len(config.ntypes) > 1 or len(config.etypes) > 1):
        left_out = ""
    for data, new in ((graph.ndata, converted.ndata), (graph.edata, converted.edata)):
        for name in [name for name in data.keys() if name != left_out]:  # noqa: SIM118
            new[name] = data[name].to(torch.uint8) if name.startswith("inner_") else data[name]
    return converted


def _is_implied(config: PartitionConfig, part: int, name: str, rows: Tensor | RowSource) -> bool:
    """Whether a feature says nothing: ids before partitioning that are those of the partition."""
    owner, _, feature = name.rpartition("/")
    if feature != "orig_id" or not isinstance(rows, Tensor):
        return False
    book = config.book(part)
    if owner in book.ntypes:
        ids = book.partid2nids(part, owner)
    else:
        etypes = {etype_key(etype): etype for etype in book.canonical_etypes}
        ids = book.partid2eids(part, etypes[owner])
    return torch.equal(rows, ids)


# ---------------------------------------------------------------------------- from PyG


def _from_pyg(path: Path, folder: Path, to: Layout | None) -> Path:
    if to not in ("graphshard", None):
        raise ValueError(
            f"a partition of PyG's becomes one of ours (got to={to!r}); convert that again"
        )
    partition = PyGPartition.open(path)
    if os.path.realpath(folder) == os.path.realpath(partition.folder):
        raise ValueError(f"out_path must be another folder than {partition.folder}")
    parts = [partition.read(part) for part in range(partition.num_parts)]
    graph = heterograph(
        {etype: _by_id(partition, etype, parts) for etype in partition.edge_parts},
        num_nodes_dict={t: of.numel() for t, of in partition.node_parts.items()},
    )
    for ntype, owner in partition.node_parts.items():
        ids = [part.nodes[ntype] for part in parts]
        columns = [part.node_features[ntype] for part in parts]
        graph.nodes[ntype].data.update(_joined(columns, ids, owner.numel(), str(path)))
    for etype, owner in partition.edge_parts.items():
        ids = [part.edges[etype][2] for part in parts]
        edge_columns = [part.edge_features[etype] for part in parts]
        graph.edges[etype].data.update(_joined(edge_columns, ids, owner.numel(), str(path)))
    owners = dict(partition.node_parts)
    name = partition.folder.resolve().name
    partition_graph(
        graph,
        name,
        partition.num_parts,
        folder,
        part_method=next(iter(owners.values())) if len(owners) == 1 else owners,
        quiet=True,
    )
    return folder / f"{name}.json"


def _by_id(
    partition: PyGPartition, etype: CanonicalEType, parts: Sequence[PyGPart]
) -> tuple[Tensor, Tensor]:
    """Sources and destinations of a relation in the order before partitioning."""
    count = partition.edge_parts[etype].numel()
    src, dst = torch.empty(count, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    for part in parts:
        sources, destinations, eids = part.edges[etype]
        src[eids], dst[eids] = sources, destinations
    return src, dst


def _joined(
    columns: Sequence[Mapping[str, Tensor]], ids: Sequence[Tensor], count: int, where: str
) -> dict[str, Tensor]:
    """Columns of all parts in the order before partitioning."""
    joined: dict[str, Tensor] = {}
    for name in columns[0]:
        like = columns[0][name]
        joined[name] = like.new_empty((count, *like.shape[1:]))
        for of_part, rows in zip(columns, ids, strict=True):
            column = of_part.get(name)
            if column is None or column.dtype != like.dtype or column.shape[1:] != like.shape[1:]:
                raise PartitionFormatError(f"{where}: parts differ in the column {name!r}")
            joined[name][rows] = column
    return joined


# ---------------------------------------------------------------------------- to ours


def _to_ours(config: PartitionConfig, folder: Path) -> Path:
    leaving = torch.zeros(config.num_parts, dtype=torch.int64)  # cut edges, by owner of the source
    num_copies = torch.zeros(config.num_parts, dtype=torch.int64)  # of which the owner has a copy
    sizes, by_destination, formats = [], True, set(config.graph_formats)
    idtypes = set()
    with PartitionWriter(folder, config.graph_name) as writer:
        for part in range(config.num_parts):
            structure = load_structure(config, part)
            book, count = structure.book, structure.num_inner_edges
            src, dst = structure.adjacency.coo()
            owners = structure.node_parts()[src.long()]
            cut = owners[:count][owners[:count] != part]
            leaving += torch.bincount(cut, minlength=config.num_parts)
            num_copies[part] = int((owners[count:] == part).sum())
            offsets = book.local_etype_offset
            for start, stop in zip(offsets[:-1], offsets[1:], strict=True):
                by_destination &= _ascends(dst[start:stop])
            if config.layout == "dgl":
                stored = config.open_part(part, "part_graph").read()
                formats |= {name.split("/")[0] for name in stored} - {"node", "edge"}
            idtypes.add(structure.idtype)
            pieces = structure.pieces(len(config.etypes) == 1 and _ascends(dst))
            writer.write_file(part, "part_graph", pieces.columns())
            for kind in _FEATURES:
                with _feature_rows(config, part, kind) as features:
                    writer.write_file(part, kind, _narrowed(features, num_ids(kind, book)))
            sizes.append(
                PartSizes(
                    inner_nodes=structure.num_inner_nodes,
                    halo_nodes=len(structure.halo),
                    inner_edges=count,
                    outer_edges=len(structure.outer),
                    cut_edges=len(cut),
                    bytes=writer.part_bytes(part),
                )
            )
        has_all = torch.equal(leaving, num_copies)
        idtype = torch.int64 if torch.int64 in idtypes else torch.int32
        content = _our_content(config, tuple(sizes), has_all, by_destination, formats)
        writer.commit({**content, "idtype": str(idtype).removeprefix("torch.")})
    return writer.json_path


def _ascends(ids: Tensor) -> bool:
    return bool((ids[1:] >= ids[:-1]).all())


def _narrowed(
    features: Mapping[str, Tensor | RowSource], totals: Mapping[str, int]
) -> dict[str, Tensor | RowSource]:
    """Features with original ids as files of ours hold them."""
    narrowed = dict(features)
    for owner, total in totals.items():
        ids = narrowed[name := f"{owner}/orig_id"]
        whole = ids if isinstance(ids, Tensor) else torch.cat(list(ids.slices()))
        narrowed[name] = whole.to(stored_dtype(total))
    return narrowed


def _our_content(
    config: PartitionConfig,
    sizes: tuple[PartSizes, ...],
    has_outer_edges: bool,
    by_destination: bool,
    formats: set[str],
) -> dict[str, Any]:
    content = _maps(config)
    balance = Balance("nodes", tuple(size.inner_nodes for size in sizes))
    stats = PartitionStats(
        graph_name=config.graph_name,
        num_nodes=content["num_nodes"],
        num_edges=content["num_edges"],
        part_method=content["part_method"],
        tolerance=max(1.0, balance.ratio),  # what was asked for is not known
        parts=sizes,
        balances=(balance,),
    )
    return {
        **content,
        **triples_of(list(config.etypes)),
        "halo_hops": content["halo_hops"] if has_outer_edges else 0,
        "num_trainers_per_machine": config.num_trainers_per_machine or 1,
        "graph_formats": sorted(formats),
        "edges_by_destination": by_destination,
        "stats": stats.as_dict(),
    }
