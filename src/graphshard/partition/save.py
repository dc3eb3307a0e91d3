# SPDX-License-Identifier: Apache-2.0
"""partition_graph: what is asked for, the assignment of graphs in memory, and the JSON.

The files of parts are made by `_streamed`, of a graph in memory as of one in files.
"""

from __future__ import annotations

import itertools
import math
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from .._base.files import check_text
from .._base.kernels import kernels_for, num_threads
from .._base.typing import INDEX_DTYPES, CanonicalEType
from ..graph import Graph
from ._book import RangePartitionBook
from ._graph_source import GraphSource
from ._metis import Objective, UndirectedGraph
from ._multilevel import MOST_PARTS
from ._node_order import order_nodes
from ._ranks import RANKS_FOLDER, PartitionRanks
from ._stats import PartitionStats
from ._streamed import DEFAULT_MEMORY, Streaming, stream_parts
from ._writer import PartitionWriter
from .assign import (
    BalanceNTypes,
    Constraint,
    PartMethod,
    assign_nodes,
    build_constraints,
)
from .checked_files import DTYPE_NAMES, GRAPH_FORMATS
from .format import etype_key, triples_of
from .graph_files import FileSource, GraphFiles

NodeMapping: TypeAlias = Tensor | dict[str, Tensor]
EdgeMapping: TypeAlias = Tensor | dict[CanonicalEType, Tensor]

# More parts than this, and than nodes, are likelier a slip of the hand than a test of empty parts.
_MOST_PARTS_OF_A_TEST = 64
_LEAST_MEMORY = 1 << 24


def partition_graph(
    g: Graph | GraphFiles,
    graph_name: str,
    num_parts: int,
    out_path: str | os.PathLike[str],
    num_hops: int = 1,
    part_method: PartMethod = "metis",
    balance_ntypes: BalanceNTypes | None = None,
    balance_edges: bool = False,
    return_mapping: bool = False,
    num_trainers_per_machine: int = 1,
    objtype: Objective = "cut",
    graph_formats: str | Sequence[str] | None = None,
    *,
    balance_split: bool | Iterable[str] | None = None,
    tolerance: float = 1.05,
    seed: int = 0,
    reorder: bool | None = None,
    memory: int | None = None,
    halo_tolerance: float | None = 1.05,
    idtype: torch.dtype | None = None,
    ranks: PartitionRanks | None = None,
    quiet: bool = False,
    overwrite: bool = True,
    reshuffle: bool = True,
    use_graphbolt: bool = False,
    store_eids: bool = True,
    store_inner_node: bool = True,
    store_inner_edge: bool = True,
) -> tuple[NodeMapping, EdgeMapping] | None:
    """Divide a graph into parts and write them to a folder, features included.

    Nodes are assigned to parts; an edge goes with its destination. Nodes and edges get new ids,
    under which every part owns one contiguous range per type; the original ids are kept as the
    feature "orig_id". The in-edges of a node keep their original order. A part also holds a rim of
    foreign nodes (`num_hops`). `graphshard.partition.format` draws the folder. The same arguments
    give the same files, bit for bit; a folder that is written anew holds the old partition or the
    new one at any time, never a mixture. The caller's graph is not changed.

    Args:
        g: The graph; or `GraphFiles`, of which edges and features are not read as a whole with
            "multilevel", or with ``memory``.
        graph_name: Name of the graph and of the JSON file.
        num_parts: Number of parts. Parts may stay empty: small graphs in more parts than nodes are
            useful in tests. More than 64 that exceed the nodes are a warning, before they are made.
        out_path: Folder to write to; made if need be.
        num_hops: Reach of the halo. 1: sources of in-edges, and all out-edges, of a part's own
            nodes. k: also the in-edges of the halo, k - 1 times. 0: the sources alone.
        part_method: "metis"; "multilevel", which needs memory for a number per node alone, keeps
            edges on disk, and calls METIS for clusters of nodes; "random"; or the part of every
            node: a tensor or a list, for several node types a dict of those.
        balance_ntypes: Balance the nodes of every label: one whole number per node, for several
            node types a dict of those. Without it, the nodes of every node type are balanced.
        balance_edges: Balance in-edges too, for every class of nodes.
        num_trainers_per_machine: Divide every part among so many trainers; the trainer of a node,
            counted through all parts, is written as the feature "trainer_id" of nodes and edges.
        objtype: What METIS minimises: "cut", edges between parts, or "vol", the halo.
        graph_formats: Which of "coo", "csc" and "csr" `load_partition` builds; by default "coo".
        balance_split: Balance training, validation and test nodes: True for all masks named as
            usual (train_mask, val_mask, valid_mask, test_mask, train, val, test), or the names.
        tolerance: What balanced means: the heaviest part weighs at most so many times the mean,
            under each constraint (one node more is allowed where that is finer than a node).
        seed: Of METIS or of the random assignment.
        reorder: Order the nodes inside each part and type so that neighbours are near each other
            (where the original order is not better); False keeps the original order. By default
            True for several parts, but not by METIS for those of "random", whose nodes have few
            neighbours inside; a single part keeps the ids it had.
        memory: With any ``part_method`` but "metis": keep edges on disk, as "multilevel" does, and
            have no more than so many bytes of them in memory. By default 512 MiB with
            "multilevel". Files go to the folder ``.<graph_name>-work`` in ``out_path``; a run that
            was killed goes on where it stood, when it is started again with the same arguments.
        halo_tolerance: With "multilevel": the largest halo (nodes of others that a part reads,
            which set the time of an epoch) is made smaller together with the cut, which it may
            cost 2 %, until it is at most so many times the mean. None looks at the cut alone.
        idtype: int32 or int64: of the local ids of parts that are loaded; None: that of ``g``.
        ranks: Processes that make the parts of `GraphFiles` together, with edges on disk; this is
            rank 0 of them.
        quiet: Do not print the table of statistics.
        overwrite: Whether a partition of the same name in the folder is replaced; otherwise it is
            an error. Graphs of other names in the folder stay as they are in any case.
        reshuffle: Of DGL 0.x, where False kept the ids of the graph. Here nodes and edges always
            get new ids, so False is an error.
        use_graphbolt: Of DGL 2.x, which then writes files for other samplers. Here one format
            serves all of them, so the files are the same.
        store_eids: Of DGL 2.x with ``use_graphbolt``, as are the next two: what its files may
            leave out. Here files hold it always, so False is an error.

    Returns:
        With ``return_mapping``, the original id of every new node id and of every new edge id:
        two tensors; if there are several node types or relations, two dicts of tensors, by node
        type and by canonical edge type.

    Raises:
        TypeError: ``g`` or an argument has the wrong form, or a feature's dtype cannot be stored.
        ValueError: An argument is out of range or does not fit the graph; a type or feature has a
            name that files cannot hold; the folder holds something else.
        RuntimeError: Another process is writing to the folder.
        MetisError: METIS is missing or failed.

    Warns:
        BalanceWarning: A constraint could not be met; the message has the numbers.
        UserWarning: There are more than 64 parts, and more than nodes.

    Example:
        >>> from graphshard import graph
        >>> g = graph(([0, 1, 2, 3], [1, 0, 3, 2]))
        >>> partition_graph(g, "pairs", 2, "pairs-in-2", quiet=True)  # doctest: +SKIP
    """
    if not reshuffle:
        raise NotImplementedError(
            "reshuffle=False keeps the ids of the graph, and here every part owns contiguous ids; "
            "leave it out, and take original ids from the feature 'orig_id'"
        )
    del use_graphbolt  # all samplers read the same files
    for name, is_stored in (
        ("store_eids", store_eids),
        ("store_inner_node", store_inner_node),
        ("store_inner_edge", store_inner_edge),
    ):
        if not is_stored:
            raise NotImplementedError(
                f"{name}=False leaves out what every partition file holds here; leave it out"
            )
    if idtype not in (None, *INDEX_DTYPES):
        raise ValueError(f"idtype must be torch.int32 or torch.int64 (got {idtype!r})")
    if isinstance(g, GraphFiles):
        source: GraphSource = FileSource(g if idtype is None else replace(g, idtype=idtype))
    else:
        source = GraphSource(g, idtype)
    formats = _check_arguments(
        num_parts, num_hops, num_trainers_per_machine, seed, tolerance, objtype, graph_formats
    )
    keeps_edges_on_disk(memory, part_method)
    if halo_tolerance is not None and not 1.0 <= halo_tolerance < math.inf:
        raise ValueError(
            f"halo_tolerance must be at least 1: largest halo over mean (got {halo_tolerance!r}); "
            "for 5 % above the mean pass 1.05, or None for any"
        )
    if num_parts > max(source.num_nodes, _MOST_PARTS_OF_A_TEST):
        warnings.warn(
            f"num_parts={num_parts} is more than the graph's {source.num_nodes} nodes: "
            f"{num_parts - source.num_nodes} parts at least are made and stay empty; give no more "
            "than there are nodes",
            stacklevel=3,
        )
    _check_features(source, num_trainers_per_machine)
    is_plain = balance_ntypes is None and not balance_edges and not balance_split
    asked = Streaming(
        num_parts=num_parts,
        num_hops=num_hops,
        trainers_per_part=num_trainers_per_machine,
        tolerance=tolerance,
        seed=seed,
        reorder=num_parts > 1 if reorder is None else reorder,
        memory=DEFAULT_MEMORY if memory is None else memory,
        num_threads=num_threads(),
        halo_tolerance=halo_tolerance,
        resumes=keeps_edges_on_disk(memory, part_method),
        constraints=None
        if is_plain and len(source.ntypes) == 1
        else build_constraints(source, balance_ntypes, balance_edges, balance_split),
    )
    console = Console(stderr=True, markup=False, emoji=False, highlight=False)
    start = time.monotonic()

    def progress(line: str) -> None:
        if asked.resumes and not quiet:
            console.print(f"{time.monotonic() - start:7.1f} s  {line}", soft_wrap=True)

    with PartitionWriter(out_path, graph_name, overwrite=overwrite) as writer:
        if is_method(part_method, "multilevel"):
            _check_multilevel(objtype)
        else:
            asked = _assigned(source, part_method, asked, reorder, objtype)
        made = stream_parts(
            source,
            writer,
            asked,
            progress=progress,
            returns_mapping=return_mapping,
            ranks=ranks,
        )
        stats = PartitionStats(
            graph_name=graph_name,
            num_nodes=source.num_nodes,
            num_edges=source.num_edges,
            part_method=asked.method,
            tolerance=tolerance,
            parts=made.sizes,
            balances=made.balances,
        )
        settings = stats, formats, num_hops, num_trainers_per_machine
        writer.commit(_json_content(source, made.book, *settings))
        if ranks is None:  # what ranks that failed have left behind
            shutil.rmtree(writer.root / RANKS_FOLDER, ignore_errors=True)
    if not quiet:
        console = Console(markup=False, emoji=False)
        console.print(stats.table())
        if len(stats.balances) > 1:
            console.print(stats.balance_table())
    if made.old_node_ids is None or made.old_edge_ids is None:
        return None
    return _mapping(source, made.old_node_ids, made.old_edge_ids)


def is_method(part_method: PartMethod, name: str) -> bool:
    """Whether nodes are to be assigned by the method of that name."""
    return isinstance(part_method, str) and part_method == name


def keeps_edges_on_disk(memory: int | None, part_method: PartMethod) -> bool:
    """Whether `partition_graph` keeps edges on disk.

    Raises:
        ValueError: ``memory`` cannot be.
    """
    if memory is None:
        return is_method(part_method, "multilevel")
    if isinstance(memory, bool) or not isinstance(memory, int) or memory < _LEAST_MEMORY:
        raise ValueError(
            f"memory must be a number of bytes from {_LEAST_MEMORY} up, or None (got {memory!r})"
        )
    if is_method(part_method, "metis"):
        raise ValueError(
            "memory cannot be bounded with part_method='metis', which holds the whole graph (got "
            f"memory={memory}); use part_method='multilevel', or leave memory out"
        )
    return True


def _check_multilevel(objective: Objective) -> None:
    """Raise unless the multilevel assignment can be made."""
    if objective != "cut":
        raise ValueError(
            f"objtype must be 'cut' with part_method='multilevel' (got {objective!r}); leave it "
            "out, or use part_method='metis'"
        )
    if kernels_for(torch.device("cpu")) is None:
        raise RuntimeError(
            "part_method='multilevel' needs the compiled kernels (there are none, or they are "
            "switched off); build them with `pip install .`, or use part_method='metis'"
        )


def _assigned(
    source: GraphSource,
    part_method: PartMethod,
    asked: Streaming,
    reorder: bool | None,
    objective: Objective,
) -> Streaming:
    """``asked`` with the part of each node, and with an order of nodes if the graph is in memory.

    Args:
        reorder: As it was asked for. Parts at random have next to no neighbours inside, so METIS is
            not called for their order unless it was asked for.
    """
    is_random = is_method(part_method, "random")
    orders = not asked.resumes and asked.reorder and not (is_random and reorder is None)
    finds = is_method(part_method, "metis") and asked.num_parts * asked.trainers_per_part > 1
    undirected = None
    if orders or finds:
        undirected = UndirectedGraph.from_edges(source.homogenised_edges(), source.num_nodes)
    assignment = assign_nodes(
        source,
        asked.num_parts,
        part_method,
        asked.constraints or [Constraint.of_nodes(source.num_nodes)],
        num_trainers_per_machine=asked.trainers_per_part,
        objective=objective,
        tolerance=asked.tolerance,
        seed=asked.seed,
        undirected=undirected,
    )
    parts = assignment.parts
    order = None
    if orders and undirected is not None:
        order = order_nodes(parts, source.offsets, asked.num_parts, undirected)
    given = parts if assignment.trainers is None else assignment.trainers
    return replace(asked, method=assignment.method, given=given.astype(np.uint16), order=order)


def _json_content(
    source: GraphSource,
    book: RangePartitionBook,
    stats: PartitionStats,
    formats: tuple[str, ...],
    num_hops: int,
    num_trainers_per_machine: int,
) -> dict[str, Any]:
    relations = list(map(etype_key, source.canonical_etypes))
    return {
        "graph_name": stats.graph_name,
        "num_nodes": source.num_nodes,
        "num_edges": source.num_edges,
        "part_method": stats.part_method,
        "num_parts": stats.num_parts,
        "halo_hops": num_hops,
        "num_trainers_per_machine": num_trainers_per_machine,
        "graph_formats": list(formats),
        "idtype": str(source.idtype).removeprefix("torch."),
        "node_map": book.node_map(),
        "edge_map": dict(zip(relations, book.edge_map().values(), strict=True)),
        "ntypes": dict(zip(source.ntypes, itertools.count(), strict=False)),
        "etypes": dict(zip(relations, itertools.count(), strict=False)),
        **triples_of(source.canonical_etypes),
        "stats": stats.as_dict(),
    }


def _mapping(
    source: GraphSource, old_node_ids: list[Tensor], old_edge_ids: list[Tensor]
) -> tuple[NodeMapping, EdgeMapping]:
    nodes = dict(zip(source.ntypes, old_node_ids, strict=True))
    edges = dict(zip(source.canonical_etypes, old_edge_ids, strict=True))
    if len(nodes) == len(edges) == 1:
        return next(iter(nodes.values())), next(iter(edges.values()))
    return nodes, edges


def _check_arguments(
    num_parts: int,
    num_hops: int,
    num_trainers_per_machine: int,
    seed: int,
    tolerance: float,
    objtype: str,
    graph_formats: str | Sequence[str] | None,
) -> tuple[str, ...]:
    """The formats to store, after checking everything that needs no graph."""
    for name, value, least in (
        ("num_parts", num_parts, 1),
        ("num_hops", num_hops, 0),
        ("num_trainers_per_machine", num_trainers_per_machine, 1),
        ("seed", seed, 0),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be a whole number from {least} up (got {value!r})")
    if num_parts * num_trainers_per_machine > MOST_PARTS:
        raise ValueError(
            f"num_parts times num_trainers_per_machine must be at most {MOST_PARTS} (got "
            f"{num_parts * num_trainers_per_machine}); use fewer"
        )
    if seed >= 2**31:
        raise ValueError(f"seed must be below 2**31 (got {seed})")
    if not 1.0 <= tolerance < math.inf:
        raise ValueError(
            f"tolerance must be at least 1: heaviest part over mean (got {tolerance!r}); for 5 % "
            "above the mean pass 1.05"
        )
    if objtype not in ("cut", "vol"):
        raise ValueError(f"objtype must be 'cut' or 'vol' (got {objtype!r})")
    if graph_formats is None:
        return ("coo",)
    asked = (graph_formats,) if isinstance(graph_formats, str) else tuple(graph_formats)
    if not asked or not set(asked) <= set(GRAPH_FORMATS):
        raise ValueError(
            f"graph_formats must be some of {GRAPH_FORMATS}, or None (got {graph_formats!r})"
        )
    return tuple(name for name in GRAPH_FORMATS if name in asked)


def _check_features(source: GraphSource, num_trainers_per_machine: int) -> None:
    own = {"orig_id"} | ({"trainer_id"} if num_trainers_per_machine > 1 else set())
    owners = {}
    for type_id, ntype in enumerate(source.ntypes):
        owners[f"node type '{ntype}'"] = source.node_features(type_id)
    for relation, etype in enumerate(source.canonical_etypes):
        owners[f"relation {etype}"] = source.edge_features(relation)
    for owner, features in owners.items():
        for name, feature in features.items():
            check_text(name, f"the name of a feature of {owner}")
            if not name or "/" in name:
                raise ValueError(
                    "the name of a feature must be non-empty and without '/', which separates it "
                    f"from its type in files (got {name!r} of {owner}); rename it"
                )
            if name in own:
                raise ValueError(
                    f"the feature name {name!r} is taken: partition_graph writes one itself (it "
                    f"is on {owner}); rename or remove it"
                )
            if not isinstance(feature, Tensor) or feature.layout != torch.strided:
                raise TypeError(
                    f"feature '{name}' of {owner} must be a dense tensor to be stored "
                    f"(got {type(feature).__name__}); convert it with .to_dense()"
                )
            if feature.dtype not in DTYPE_NAMES:
                raise TypeError(
                    f"feature '{name}' of {owner} has dtype {feature.dtype}, which partition "
                    f"files cannot hold; convert it to one of "
                    f"{', '.join(str(dtype) for dtype in DTYPE_NAMES)}"
                )
