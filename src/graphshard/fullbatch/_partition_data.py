# SPDX-License-Identifier: Apache-2.0
"""PartitionData: what one rank reads from a partition folder.

Reading needs no process group; only `construct_full_graph` and `construct_mfgs`, which tell
every rank what the others need from it, are collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.device import device_of
from .._base.file_rows import RowsInFiles
from .._base.lazy_columns import LazyColumns, tensors_there
from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..errors import PartitionFormatError
from ..graph import NTYPE
from ..partition import RangePartitionBook
from ..partition.checked_files import TensorFile
from ..partition.dgl_folder import owned_rows
from ..partition.format import PartitionConfig, read_config
from ..partition.load import features_in_files, load_features, load_structure
from ..partition.pyg_folder import PyGPartition, is_pyg_folder
from ..partition.structure import PartStructure
from ._stored_edges import LocalNodes, SourceColumn, StoredEdges
from .topology import RelationEdges, narrow

_INT16_MAX = 2**15 - 1
_PIECE = 1 << 20

T = TypeVar("T")


@dataclass(frozen=True)
class PartitionData:
    """One part of a partitioned graph: its edges, its features and the partition book.

    Rows of node features, and the row numbers used everywhere in this object, count the nodes of
    one type that this part owns, from 0.

    Args:
        graph_name: Name given to `graphshard.partition.partition_graph`.
        rank: The part that was read.
        partition_book: Owner of every node and edge.
        node_type_names: Node types in id order.
        canonical_etypes: Relations in id order.
        node_features: ``"type/name"`` to a tensor whose rows are the owned nodes of that type;
            and `NTYPE` to the number of each owned node's type, int32, types one after another.
        edge_features: ``"src:relation:dst/name"`` to a tensor whose rows are the owned edges.
        edges: Per relation, the in-edges of the owned nodes.
        device: Where the edges live, and features unless `to` has left them elsewhere.
        build: Digest that names the partition, the same for all its parts; None if what was read
            carries none. Ranks whose parts have different builds are refused.
        in_files: Features of nodes and edges that were left in their files, by their names among
            those: tensors there that are mapped, and must not be written to.
    """

    graph_name: str
    rank: int
    partition_book: RangePartitionBook
    node_type_names: tuple[str, ...]
    canonical_etypes: tuple[CanonicalEType, ...]
    node_features: Mapping[str, Tensor]
    edge_features: Mapping[str, Tensor]
    edges: Mapping[CanonicalEType, RelationEdges]
    device: torch.device
    build: str | None = None
    in_files: Mapping[str, RowsInFiles] = field(default_factory=dict)

    @property
    def num_parts(self) -> int:
        return self.partition_book.num_partitions()

    @property
    def edge_type_names(self) -> list[str]:
        """Relation names in id order."""
        return [relation for _, relation, _ in self.canonical_etypes]

    def node_map(self, ntype: str | None = None) -> RangeMap:
        """Which part owns which nodes of ``ntype``, in the per-type id space."""
        blocks = self.partition_book.node_map()[ntype or self._only_ntype()]
        return RangeMap.from_sizes([stop - start for start, stop in blocks])

    @property
    def node_ranges(self) -> list[tuple[int, int]]:
        """Homogenised ids, see `RangePartitionBook`, that each part owns: ``[start, end)``.

        On a graph with one node type they are its global ids.
        """
        return owned_ranges(self.partition_book)

    def num_owned(self, ntype: str | None = None) -> int:
        """Number of nodes of ``ntype`` that this part owns."""
        return self.node_map(ntype).size(self.rank)

    def local_rows(self, global_ids: Tensor, ntype: str | None = None) -> Tensor:
        """Rows, on this rank, of nodes given by global (relabelled, per-type) id.

        Raises:
            ValueError: An id belongs to another part.
        """
        ntype = ntype or self._only_ntype()
        node_map = self.node_map(ntype)
        global_ids = global_ids.to(torch.int64).cpu()
        node_map.check(global_ids, f"id of node type '{ntype}'")
        foreign = node_map.part_of(global_ids) != self.rank
        if bool(foreign.any()):
            start, stop = node_map.starts[self.rank], node_map.starts[self.rank + 1]
            raise ValueError(
                f"rank {self.rank} may only name its own nodes of type '{ntype}', with ids in "
                f"[{start}, {stop}) (got {int(global_ids[foreign][0])}); rows of this rank become "
                f"ids by adding {start}"
            )
        return (global_ids - node_map.starts[self.rank]).to(self.device)

    def _only_ntype(self) -> str:
        if len(self.node_type_names) != 1:
            raise ValueError(
                f"name a node type: the graph has {len(self.node_type_names)} "
                f"({', '.join(self.node_type_names)})"
            )
        return self.node_type_names[0]

    def check_num_ranks(self, num_ranks: int) -> None:
        """Raise if there are more ranks than parts; not collective.

        Ranks without a part could not load one, and so cannot be waited for.

        Raises:
            ValueError: There are.
        """
        if self.num_parts < num_ranks:
            raise wrong_number_of_ranks(self.num_parts, num_ranks)

    def to(
        self, device: torch.device | str, feature_device: torch.device | str | None = None
    ) -> PartitionData:
        """The same data with its tensors on ``device``.

        Args:
            device: Where graphs that are made of it shall be.
            feature_device: Where features of nodes and edges shall be; None is ``device``. On the
                CPU they take no memory of a GPU, and only the rows that are read go there:
                ``features[rows].to(device)``.
        """
        device = device_of(device)
        beside = device if feature_device is None else device_of(feature_device)
        return replace(
            self,
            node_features=_on(beside, self.node_features),
            edge_features=_on(beside, self.edge_features),
            edges={etype: _edges_on(device, edges) for etype, edges in self.edges.items()},
            device=device,
        )


def _on(device: torch.device, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Columns on a device; those that are not made yet, which is on the CPU, stay so there."""
    if device.type == "cpu" and all(rows.device == device for rows in tensors_there(columns)):
        return columns
    return {name: rows.to(device) for name, rows in columns.items()}


def _edges_on(device: torch.device, edges: RelationEdges) -> RelationEdges:
    """Edges on a device; those in a file stay there on the CPU."""
    if device.type == "cpu" and isinstance(edges, StoredEdges):
        return edges
    return RelationEdges(edges.src_part.to(device), edges.src.to(device), edges.dst.to(device))


def owned_ranges(book: RangePartitionBook) -> list[tuple[int, int]]:
    """Homogenised node ids owned by each part, ``[start, end)``."""
    starts = RangeMap.from_sizes([int(part["num_nodes"]) for part in book.metadata()]).starts
    return list(zip(starts[:-1], starts[1:], strict=True))


def suffix_key_lookup(
    feature_dict: Mapping[str, Tensor],
    key: str,
    expand_to_all: bool = False,
    type_list: Sequence[str] | None = None,
    *,
    ntype: str | None = None,
) -> Tensor:
    """The feature called ``key``, whatever type it is stored under.

    Args:
        feature_dict: ``node_features`` or ``edge_features`` of a `PartitionData`.
        key: Feature name without its type; or the end of it, if only one name ends so.
        expand_to_all: Give a row for each node of the part, types one after another: 0 where a
            type has no such feature. For ``node_features``.
        type_list: ``node_type_names``, for ``expand_to_all``.
        ntype: Type to look under, when several types have such a feature.

    Raises:
        KeyError: No feature, or several, have that name; with ``expand_to_all`` several types may.
        ValueError: ``expand_to_all`` without ``type_list``, or of features that types have in
            different shapes.
    """
    if ntype is not None:
        return feature_dict[f"{ntype}/{key}"]
    names = [name for name in feature_dict if "/" in name and name.rsplit("/", 1)[-1] == key]
    if not names:
        names = [name for name in feature_dict if "/" in name and name.endswith(key)]
    of_one_name = len({name.rsplit("/", 1)[-1] for name in names}) == 1
    if len(names) != 1 and not (expand_to_all and of_one_name):
        present = ", ".join(sorted(names or feature_dict))
        raise KeyError(
            f"need exactly one feature named '{key}' (got {len(names)}; have: {present})"
        )
    if not expand_to_all:
        return feature_dict[names[0]]
    by_type = {name.rpartition("/")[0]: feature_dict[name] for name in names}
    return _expanded(by_type, feature_dict, key, type_list)


def _expanded(
    by_type: Mapping[str, Tensor],
    features: Mapping[str, Tensor],
    key: str,
    type_list: Sequence[str] | None,
) -> Tensor:
    """A row for each node of the part, 0 where its type has no such feature."""
    if type_list is None or NTYPE not in features:
        raise ValueError(
            "expand_to_all needs node_features, and node_type_names as type_list (got "
            f"{type_list}{'' if NTYPE in features else f', and features without {NTYPE!r}'})"
        )
    kinds = {(rows.dtype, rows.shape[1:]) for rows in by_type.values()}
    if len(kinds) != 1:
        raise ValueError(
            f"feature '{key}' differs from type to type in dtype or row shape (got {kinds}), and "
            "cannot be one tensor; look it up type by type, with ntype="
        )
    node_type = features[NTYPE]
    like = next(iter(by_type.values()))
    rows = like.new_zeros((node_type.shape[0], *like.shape[1:]))
    for ntype, values in by_type.items():
        rows[node_type == list(type_list).index(ntype)] = values
    return rows


def wrong_number_of_ranks(num_parts: int, num_ranks: int) -> ValueError:
    """What is raised, on every rank, where a graph has not as many parts as there are ranks."""
    return ValueError(
        f"a graph of {num_parts} parts needs {num_parts} ranks (got {num_ranks}); partition it "
        "into that many parts, or start that many workers"
        + ("" if dist.is_initialized() else " and call initialize_comms first")
    )


def _check_part(part: int, num_parts: int) -> None:
    """Raise on a rank that has no part what the others raise in `construct_full_graph`."""
    if dist.is_initialized() and part == dist.get_rank() >= num_parts:
        raise wrong_number_of_ranks(num_parts, dist.get_world_size())


def load_dgl_partition_data(
    partition_json_file: str | Path,
    own_partition_idx: int,
    device: torch.device | str = "cpu",
    *,
    feature_device: torch.device | str | None = None,
    checksums: bool = False,
    leave_features: bool = False,
) -> PartitionData:
    """Read one part of a partition folder, ours, DGL's or PyG's. Needs no process group.

    It needs neither DGL nor PyG. The JSON and the structure are checked as a whole. Of a folder
    that DGL, old releases included, or PyG wrote, all is read into memory; ours is mapped. That all
    ranks read the same partition is checked where they meet: in `construct_full_graph` and
    `construct_mfgs`.

    Args:
        partition_json_file: The JSON that ``partition_graph``, that of
            ``graphshard.servers`` or that of ``dgl.distributed``, wrote; or the folder of
            PyG's ``Partitioner``, or the ``META.json`` in it, of which ``x`` becomes ``feat``.
        own_partition_idx: Part to read; part ``r`` goes to rank ``r``.
        device: Where to put its tensors.
        feature_device: Where to put features of nodes and edges; None is ``device``. With "cpu",
            those of our folders stay mapped files, for features that a GPU has no room for.
        checksums: Read every byte of the features, too, and compare digests; ``graphshard train``
            does so, and ``graphshard verify`` does it once for all parts.
        leave_features: Leave the features named ``feat`` in their files, of a partition that
            graphshard wrote: they take no memory, must not be written to, and come with
            ``in_files`` besides, for `graphshard.sampling.FileFeatureStore`.

    Raises:
        PartitionFormatError: The folder is missing, incomplete or damaged.
        ValueError: ``own_partition_idx`` is not one of its parts, as on ranks beyond their number.
    """
    if is_pyg_folder(Path(partition_json_file)):
        if leave_features:
            raise PartitionFormatError(
                "features can be left in the files of a partition that graphshard wrote alone (got "
                f"{partition_json_file}, which PyG wrote); graphshard convert makes one of it"
            )
        partition = PyGPartition.open(Path(partition_json_file))
        _check_part(own_partition_idx, partition.num_parts)
        return _of_pyg(partition, own_partition_idx).to(device, feature_device)
    config = read_config(partition_json_file)
    _check_part(own_partition_idx, config.num_parts)
    structure = load_structure(config, own_partition_idx, as_stored=True)
    column = _source_column(config, own_partition_idx)
    book = structure.book
    in_files: dict[str, RowsInFiles] = {}
    features = []
    for kind in ("node_feats", "edge_feats"):
        names: tuple[str, ...] = ()
        if leave_features:
            left = features_in_files(config, own_partition_idx, kind)
            in_files.update(left)
            names = *left, *(f"{owner}/orig_id" for owner in owned_rows(kind, book))
        features.append(
            load_features(
                config,
                own_partition_idx,
                kind,
                checksums=checksums,
                left=names,
            )
        )
    node_feats, edge_feats = (
        some if isinstance(some, LazyColumns) else LazyColumns(some, {}) for some in features
    )
    node_types = {NTYPE: partial(_node_types, book, own_partition_idx)}
    data = PartitionData(
        graph_name=config.graph_name,
        rank=own_partition_idx,
        partition_book=book,
        node_type_names=tuple(book.ntypes),
        canonical_etypes=tuple(book.canonical_etypes),
        node_features=node_feats.with_makers(node_types),
        edge_features=edge_feats,
        edges={},
        device=torch.device("cpu"),
        build=config.build,
        in_files=in_files,
    )
    try:
        edges = _relation_edges(data, structure, column)
    except ValueError as error:
        raise PartitionFormatError(
            f"part {own_partition_idx} of {config.path} contradicts itself ({error}); partition "
            "the graph again"
        ) from None
    return replace(data, edges=edges).to(device, feature_device)


def _source_column(config: PartitionConfig, part: int) -> SourceColumn | None:
    """Where a part's file has the sources of its edges; None of formats without that."""
    file = config.open_part(part, "part_graph")
    if config.version < 2 or not isinstance(file, TensorFile):
        return None
    return SourceColumn(file.path.absolute(), file.blake2b, file.places["src"][0])


def _of_pyg(partition: PyGPartition, rank: int) -> PartitionData:
    """A part that PyG wrote; nodes of a part keep their order, edges come by destination."""
    part = partition.read(rank)
    ntypes, etypes = tuple(partition.node_parts), tuple(partition.edge_parts)
    num_parts = partition.num_parts
    node_sizes = {t: _sizes(of, num_parts) for t, of in partition.node_parts.items()}
    edge_sizes = {t: _sizes(of, num_parts) for t, of in partition.edge_parts.items()}
    book = RangePartitionBook(
        rank,
        num_parts,
        _blocks(node_sizes, num_parts),
        _blocks(edge_sizes, num_parts),
        {ntype: number for number, ntype in enumerate(ntypes)},
        {etype: number for number, etype in enumerate(etypes)},
    )
    owner_dtype = torch.int16 if num_parts <= _INT16_MAX else torch.int32
    rows = {}
    for ntype, owner in partition.node_parts.items():
        order = torch.argsort(owner, stable=True)
        starts = torch.tensor(RangeMap.from_sizes(node_sizes[ntype]).starts)
        rows[ntype] = torch.empty_like(order)
        rows[ntype][order] = torch.arange(order.numel()) - starts[owner[order]]
        rows[ntype] = narrow(rows[ntype], max(node_sizes[ntype], default=0))
    edges, edge_features, node_features = {}, {}, {}
    for etype, (src, dst, eids) in part.edges.items():
        owner = partition.node_parts[etype[0]][src].to(owner_dtype)
        edges[etype] = RelationEdges(owner, rows[etype[0]][src], rows[etype[2]][dst])
        for name, column in {**part.edge_features[etype], "orig_id": eids}.items():
            edge_features[f"{':'.join(etype)}/{name}"] = column
    for ntype, ids in part.nodes.items():
        for name, column in {**part.node_features[ntype], "orig_id": ids}.items():
            node_features[f"{ntype}/{name}"] = column
    return PartitionData(
        graph_name=partition.folder.name,
        rank=rank,
        partition_book=book,
        node_type_names=ntypes,
        canonical_etypes=etypes,
        node_features={**node_features, NTYPE: _node_types(book, rank)},
        edge_features=edge_features,
        edges=edges,
        device=torch.device("cpu"),
    )


def _sizes(parts: Tensor, num_parts: int) -> list[int]:
    return torch.bincount(parts, minlength=num_parts).tolist()


def _blocks(sizes: Mapping[T, Sequence[int]], num_parts: int) -> dict[T, list[list[int]]]:
    """Homogenised ids of each type in each part: part by part, in a part type by type."""
    blocks: dict[T, list[list[int]]] = {kind: [] for kind in sizes}
    first = 0
    for part in range(num_parts):
        for kind, of_parts in sizes.items():
            blocks[kind].append([first, first + of_parts[part]])
            first += of_parts[part]
    return blocks


def _node_types(book: RangePartitionBook, part: int) -> Tensor:
    """The number of each owned node's type, int32; takes no memory where there is one type."""
    sizes = [blocks[part][1] - blocks[part][0] for blocks in book.node_map().values()]
    if len(sizes) == 1:
        return torch.zeros(1, dtype=torch.int32).expand(sizes[0])
    return torch.arange(len(sizes), dtype=torch.int32).repeat_interleave(torch.tensor(sizes))


def _relation_edges(
    data: PartitionData, structure: PartStructure, column: SourceColumn | None
) -> dict[CanonicalEType, RelationEdges]:
    """The edges of each relation, from the homogenised local graph; inner edges come first.

    Args:
        column: Where the file has sources, if they can be read there.

    Raises:
        ValueError: An inner edge ends at another part's node, or at one of another type.
    """
    book = data.partition_book
    num_inner = structure.num_inner_edges
    global_ids = structure.node_ids()
    owner = book.nid2partid(global_ids)
    node_type, per_type_id = book.map_to_per_ntype(global_ids)
    rows = torch.empty_like(per_type_id)
    for index, ntype in enumerate(data.node_type_names):
        of_type = node_type == index
        rows[of_type] = data.node_map(ntype).local_of(per_type_id[of_type], owner[of_type])
    rows = narrow(rows, int(rows.max()) + 1 if rows.numel() else 0)
    owner = owner.to(torch.int16 if data.num_parts <= _INT16_MAX else torch.int32)
    offsets = book.local_etype_offset
    edges: dict[CanonicalEType, RelationEdges] = {}
    if column is not None:
        most = max(map(book.num_nodes, book.ntypes), default=0)
        halo_ids = narrow(per_type_id[structure.num_inner_nodes :].clone(), most)
        nodes = LocalNodes(owner, rows, structure.num_inner_nodes, halo_ids, column)
        for index, etype in enumerate(data.canonical_etypes):
            stored = _stored_edges(data, structure, nodes, index)
            if stored is None:
                break
            if len(data.node_type_names) > 1:
                for _, numbers, _ in stored.numbers():
                    _check_type(numbers, etype[0], node_type, data, etype)
            edges[etype] = stored
        else:
            return edges
    src, dst = (ends[:num_inner] for ends in structure.adjacency.coo())
    for index, etype in enumerate(data.canonical_etypes):  # inner edges are sorted by relation
        ends = [some[offsets[index] : offsets[index + 1]] for some in (src, dst)]
        if ends[1].numel() and int(ends[1].max()) >= structure.num_inner_nodes:
            raise _ends_elsewhere(etype)
        if len(data.node_type_names) > 1:
            _check_type(ends[0], etype[0], node_type, data, etype)
            _check_type(ends[1], etype[2], node_type, data, etype)
        edges[etype] = RelationEdges(
            owner.index_select(0, ends[0]), *(rows.index_select(0, some) for some in ends)
        )
    return edges


def _stored_edges(
    data: PartitionData, structure: PartStructure, nodes: LocalNodes, index: int
) -> StoredEdges | None:
    """The edges of a relation where the file has them; None where destinations do not ascend."""
    book, etype = data.partition_book, data.canonical_etypes[index]
    start, stop = book.local_etype_offset[index : index + 2]
    offsets = book.local_ntype_offset
    source, target = (data.node_type_names.index(t) for t in (etype[0], etype[2]))
    low, high = offsets[target], offsets[target + 1]
    if structure.adjacency.is_given_as("csc"):  # of a single relation
        indptr, sources, _ = structure.adjacency.csc()
        indptr = indptr[low : high + 1]
        within = int(structure.adjacency.csc()[0][structure.num_inner_nodes])
        first, last = int(indptr[0]), int(indptr[-1])
    else:
        sources, dst = structure.adjacency.coo()
        dst = dst[start:stop]
        if any(
            bool((dst[i : i + _PIECE + 1].diff() < 0).any()) for i in range(0, len(dst), _PIECE)
        ):
            return None
        bounds = torch.arange(low, high + 1, dtype=dst.dtype)
        indptr = torch.searchsorted(dst, bounds)
        indptr = narrow(indptr, dst.numel() + 1).contiguous()
        within = int(torch.searchsorted(dst, structure.num_inner_nodes)) + start
        first, last = int(indptr[0]) + start, int(indptr[-1]) + start
    if within != stop:
        raise _ends_elsewhere(etype)
    if (first, last) != (start, stop):
        raise _of_another_type(etype, etype[2])
    return StoredEdges(indptr, sources[start:stop], nodes, offsets[source], start)


def _ends_elsewhere(etype: CanonicalEType) -> ValueError:
    return ValueError(f"an edge of {etype} that the part owns ends at a node of another part")


def _of_another_type(etype: CanonicalEType, ntype: str) -> ValueError:
    return ValueError(f"an edge of {etype} ends at a node that is not of type {ntype}")


def _check_type(
    nodes: Tensor, ntype: str, node_type: Tensor, data: PartitionData, etype: CanonicalEType
) -> None:
    """Kernels take rows for ids of the relation's types: so the ends must be of these types."""
    if bool((node_type[nodes] != data.node_type_names.index(ntype)).any()):
        raise _of_another_type(etype, ntype)
