# SPDX-License-Identifier: Apache-2.0
"""partition_tables: from tables to a partition to train on, with the user's own ids beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from .._base.files import write_json
from .._base.typing import CanonicalEType
from ..partition.format import read_config
from ..partition.save import partition_graph
from ._array_graph import (
    ArrayGraph,
    both_directions,
    folder_of_arrays,
    with_inverse_numbers,
    with_inverses,
    with_self_loops,
)
from ._read_tables import TablesGraph, read_tables
from ._table_report import TableReport
from .id_files import write_id_files
from .settings import Preparation
from .tables import Tables
from .task import TaskInfo, balance_classes, inverse_names, read_task, write_task

_NOT_OF_REVERSES = ("label",)
_AS_READ = Preparation()


def report_path(partition_json: str | os.PathLike[str]) -> Path:
    """Where it is kept what was read from tables."""
    path = Path(partition_json)
    return path.with_name(f"{path.stem}.tables.json")


def partition_tables(
    tables: Tables,
    num_parts: int,
    out: str | os.PathLike[str],
    *,
    name: str | None = None,
    preparation: Preparation = _AS_READ,
    balance_field: str | None = None,
    encodings_from: str | os.PathLike[str] | None = None,
    options: Mapping[str, Any] | None = None,
    quiet: bool = True,
    **arguments: Any,
) -> Path:
    """Read tables, and write the graph that they make as a partition to train on.

    Nodes have the features ``feat`` (float32, all encoded columns side by side) and, of columns
    with many categories, ``categories`` (int64, a column for each, 0 where unknown); the target of
    the task has ``label``, ``train_mask``, ``val_mask`` and ``test_mask``. Edges have the same, and
    ``weight`` and ``time``. Beside the JSON are ``NAME.dataset.json``, with the task and the
    schema (columns of ids, encodings, label), and ``NAME.tables.json``, with what was read. Users'
    ids are read by `user_ids`.

    With ``part_method="multilevel"``, or ``memory``, nothing that has a row for each edge is ever
    whole in memory: edges are read in batches, and what is made of them goes to files in ``out``,
    which are removed at the end.

    Args:
        out: Folder to write to; made if need be.
        name: Name of the graph and of the JSON; None: that of the first relation.
        preparation: Reverses, self loops and inverse relations to add. A reverse has the features
            of its edge.
        balance_field: Field of the target's nodes whose values are to be spread evenly, such as
            ``label``.
        encodings_from: The JSON of another partition that was made from tables: its encodings, and
            its classes, are used. Categories that it does not know are counted.
        options: How the graph was prepared, to be noted beside the partition.
        quiet: Do not print what was read, and the statistics of the partition.
        **arguments: More for `graphshard.partition.partition_graph`.

    Returns:
        The path of the JSON.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A table, column or cell is not what it must be, or there are more parts than
            nodes; and those of `graphshard.partition.partition_graph`.
        PartitionFormatError: The partition that has the encodings is damaged.

    Example:
        >>> tables = Tables.from_toml("graph.toml")  # doctest: +SKIP
        >>> partition_tables(tables, 3, "parts")  # doctest: +SKIP
    """
    name = next(iter(tables.edges))[1] if name is None else name
    if encodings_from is not None:
        read_config(encodings_from)  # says so where there is no partition
    given = None if encodings_from is None else read_task(encodings_from)
    with folder_of_arrays(Path(out), arguments) as folder:
        read = read_tables(tables, name=name, encodings_from=given, folder=folder)
        graph, task = prepared_tables(read, preparation)
        if not quiet:
            read.report.show(Console(emoji=False))
        num_nodes = sum(graph.num_nodes.values())
        if not num_nodes:
            raise ValueError(
                f"the tables of {name} must have a row at least (got none); check that the files "
                "are the right ones, and by what their cells are separated"
            )
        if num_parts > num_nodes:
            raise ValueError(
                f"there must be no more parts, or workers, than nodes of {name}, {num_nodes} (got "
                f"{num_parts}): a part without nodes has nothing to do"
            )
        if balance_field is not None:
            if not isinstance(task.target, str):
                raise ValueError(
                    f"balance_ntypes must name a field of the nodes that have labels, and there "
                    f"are none (got {balance_field!r})"
                )
            arguments["balance_ntypes"] = balance_classes(
                graph.nodes[task.target], graph.num_nodes, task.target, balance_field
            )
        source = graph.graph(graph.least_idtype) if folder is None else graph.files()
        ids, report = read.ids, read.report
        del read, graph
        arguments.setdefault("idtype", torch.int64)
        partition_graph(source, name, num_parts, out, quiet=quiet, **arguments)
    json_path = Path(out) / f"{name}.json"
    files = write_id_files(json_path, ids)
    _write_report(json_path, report)
    write_task(json_path, replace(task, options=dict(options or {})), files)
    return json_path


def _write_report(json_path: Path, report: TableReport) -> None:
    path = report_path(json_path)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    try:
        write_json(partial, report.as_json(), final=path)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def prepared_tables(read: TablesGraph, preparation: Preparation) -> tuple[ArrayGraph, TaskInfo]:
    """The graph with the edges that were asked for, and the task with where reverses are."""
    graph, task, notes = read.content, read.task, read.report.notes
    if preparation.row_normalize:
        raise ValueError(
            "row_normalize is for folders of arrays; columns of tables are standardized, or say "
            'their encodings in the TOML file, such as "w*" = {encoding = "vector", '
            "row_normalize = true}"
        )
    is_plain = all(source == target for source, _, target in graph.etypes)
    if preparation.bidirected and not is_plain:
        raise ValueError(
            "bidirected is for relations between nodes of one type (got "
            f"{', '.join(map(str, graph.etypes))}); inverse adds the inverse of every "
            "relation"
        )
    if preparation.self_loops and len(graph.etypes) > 1:
        raise ValueError(
            "self_loops is for graphs of one relation (got "
            f"{', '.join(map(str, graph.etypes))}); leave it out"
        )
    reverse_of: tuple[CanonicalEType | None, ...] = task.reverses
    if task.relation_names and (preparation.bidirected or preparation.self_loops):
        what = "bidirected" if preparation.bidirected else "self_loops"
        raise ValueError(
            f"{what} is for edges without relation numbers; leave it out, or take --inverse, which "
            "adds the inverse of each relation"
        )
    if preparation.bidirected:
        before = sum(map(graph.num_edges, graph.etypes))
        graph = both_directions(graph)
        after = sum(map(graph.num_edges, graph.etypes))
        notes.append(f"edges in both directions: {before:,} became {after:,}")
        reverse_of = task.targets
    if preparation.inverse and task.relation_names:
        graph = with_inverse_numbers(graph, len(task.relation_names))
        names = task.relation_names + inverse_names(task.relation_names)
        task = replace(task, relation_names=names, num_relations=len(names))
        notes.append(f"inverse of each of {len(names) // 2} relations: rev_...")
        reverse_of = task.targets
    elif preparation.inverse:
        graph, inverses = with_inverses(graph, _NOT_OF_REVERSES)
        notes.append(f"inverse relations: {', '.join(name for _, name, _ in inverses.values())}")
        if not any(reverse_of):
            reverse_of = tuple(inverses[etype] for etype in task.targets)
    if preparation.self_loops:
        graph = with_self_loops(graph)
        notes.append("every node has one self loop")
    return graph, replace(task, reverse_of=reverse_of if any(reverse_of) else None)
