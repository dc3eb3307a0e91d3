# SPDX-License-Identifier: Apache-2.0
"""``graphshard partition``, ``tables``, ``inspect``, ``verify`` and ``convert``."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..._base.settings import Unset
from ...data.remote_files import shown, without_options
from ...data.settings import Dangling, Parallel, Preparation, TableFormat
from ...errors import PartitionFormatError
from ._options import PartitionPath, is_partition, options_of, partition_json

if TYPE_CHECKING:
    from ...data import Tables
    from ...data.task import TaskInfo
    from ...partition import PartitionRanks
    from ...partition.format import PartitionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableFlags:
    """What tables of nodes and edges are; options of ``partition`` and ``tables``."""

    nodes: Annotated[
        list[str] | None,
        "Table of nodes: CSV, Parquet, Arrow or JSON lines; a file, glob, folder or URI, or "
        "TYPE=FILE. Several times for several types; of one type, rows are joined by their ids.",
        Unset("none: nodes come from edges"),
    ] = None
    edges: Annotated[
        list[str] | None,
        "Table of edges, in the same way; RELATION=FILE, or SOURCE:RELATION:TARGET=FILE with the "
        "types of the ends. Several times for several relations.",
        Unset("none"),
    ] = None
    node_id: Annotated[
        str | None,
        "Column of nodes by which edges name them; columns of files without header go by their "
        "places, from 0, here and below.",
        Unset("one called so, or the first"),
    ] = None
    source: Annotated[
        str | None,
        "Column of edges with the id of the node where an edge begins.",
        Unset("source, src or the like, or the first"),
    ] = None
    target: Annotated[
        str | None,
        "Column of edges with the id of the node where an edge ends.",
        Unset("target, dst or the like, or the second"),
    ] = None
    label: Annotated[
        str | None,
        "Column of nodes, or of edges, to learn; TYPE=COLUMN where several have it.",
        Unset("none"),
    ] = None
    label_task: Annotated[
        str | None,
        "What labels are: classification, 'multi-label classification' or regression.",
        Unset("as their type says"),
    ] = None
    split: Annotated[
        str | None,
        "Fractions for training, validation and test, such as 0.6,0.2,0.2, or a column that says "
        "train, val or test. Without --label it is edges that are to be predicted.",
        Unset("0.8,0.1,0.1 of the rows with a label"),
    ] = None
    links: Annotated[
        str | None,
        "Relations whose edges are to be predicted, names between commas.",
        Unset("none; with --split and no --label the only one"),
    ] = None
    split_files: Annotated[
        str | None,
        "Files of ids instead, or of the two ends of edges: train=FILE,val=FILE,test=FILE.",
        Unset("none"),
    ] = None
    weight: Annotated[str | None, "Column of edges with weights.", Unset("none")] = None
    time: Annotated[str | None, "Column of edges with times.", Unset("none")] = None
    relation_column: Annotated[
        str | None,
        "Column of edges with the relation of each, of a knowledge graph.",
        Unset("none"),
    ] = None
    ignore: Annotated[
        list[str] | None, "Column that is no feature. Several times.", Unset("none")
    ] = None
    separator: Annotated[
        list[str] | None,
        "COLUMN=TEXT: what the words in cells of a column are between, such as 'genres=|', of "
        "features or the label; TYPE=COLUMN=TEXT where several have it. Several times.",
        Unset("none: a cell is one category"),
    ] = None
    dangling: Annotated[
        Dangling | None,
        "An edge whose end is no row of --nodes: drop it, add a node without features, or stop.",
        Unset("drop"),
    ] = None
    parallel: Annotated[
        Parallel | None,
        "Edges with the same two ends: keep all, or drop all but the first.",
        Unset("keep"),
    ] = None
    format: Annotated[
        TableFormat | None,
        "Of the files; json is an object a line.",
        Unset("by the ending, or as the file looks"),
    ] = None
    delimiter: Annotated[
        str | None, "What separates cells of CSV; '\\t' is a tab.", Unset("as the file looks")
    ] = None
    encoding: Annotated[str | None, "Of CSV, such as latin-1.", Unset("UTF-8")] = None
    null: Annotated[
        list[str] | None,
        "Cell of CSV that is missing, besides NA, null and the like, such as unknown. Several "
        "times.",
        Unset("none more"),
    ] = None
    header: Annotated[
        bool | None, "Whether the first line of CSV names columns.", Unset("as the file looks")
    ] = None

    def read(self, seed: int, base: Path | None = None) -> Tables:
        """The tables, as far as files and flags tell."""
        from ...data import FileOptions, Tables

        settings: dict[str, Any] = {"seed": seed, "base": base}
        for name in ("dangling", "parallel"):
            if getattr(self, name) is not None:
                settings[name] = getattr(self, name)
        if not self.edges:
            raise ValueError("tables need edges: name at least one file with --edges")
        delimiter = self.delimiter
        return Tables.from_files(
            self.nodes or (),
            self.edges,
            node_id=self.node_id,
            source=self.source,
            target=self.target,
            label=self.label,
            label_task=self.label_task,
            split=self._split(),
            links=[] if self.links is None else self.links.split(","),
            weight=self.weight,
            time=self.time,
            relation_column=self.relation_column,
            ignore=self.ignore or (),
            separators=self._separators(),
            options=FileOptions(
                format=self.format,
                delimiter=None if delimiter is None else delimiter.replace("\\t", "\t"),
                header=self.header,
                encoding=self.encoding,
                more_null_values=tuple(self.null or ()),
            ),
            **settings,
        )

    def _separators(self) -> dict[str, str]:
        """Columns to what their words are between."""
        made: dict[str, str] = {}
        for said in self.separator or ():
            # The last =, but the one before where text is = itself: movie=genres=| and genres==.
            column, equals, text = said.rpartition("=")
            if column.endswith("=") and not text:
                column, text = column[:-1], "="
            if not column or not equals or column in made:
                raise ValueError(
                    "separator must be COLUMN=TEXT, or TYPE=COLUMN=TEXT, once for each column (got "
                    f"{said!r}); write it as 'genres=|'"
                )
            made[column] = text
        return made

    def _split(self) -> Any:
        """How rows are split: fractions, the name of a column, or files of ids."""
        from ...data.splits import SPLITS

        if self.split_files is None:
            return _split_of(self.split)
        if self.split is not None:
            raise ValueError("rows are split by --split or by --split-files; leave one out")
        files: dict[str, str] = {}
        for item in self.split_files.split(","):
            split, equals, path = item.partition("=")
            split = split.strip()
            if not equals or not path.strip() or split not in SPLITS or split in files:
                raise ValueError(
                    "split_files must be like train=FILE,val=FILE,test=FILE (got "
                    f"{self.split_files!r})"
                )
            files[split] = path.strip()
        return {"files": files}


def _split_of(text: str | None) -> Any:
    """Fractions, or the name of a column."""
    if text is None:
        return None
    words = [word.strip() for word in text.split(",")]
    if len(words) == 1 and words[0].isdecimal():
        return words[0]  # the place of a column that has no name
    try:
        return [float(word) for word in words]
    except ValueError:
        return text


@options_of(TableFlags)
def tables(**flags: Any) -> None:
    """Write a first TOML file for tables of nodes and edges, to be changed and kept.

    graphshard tables --nodes users.csv --edges follows.csv > graph.toml

    graphshard partition --tables graph.toml --parts 3 --out parts

    Columns of text whose cells are several words, such as Action|Drama, are cut into them, and it
    is said by what.
    """
    described, sentences = TableFlags(**flags).read(0).with_separators()
    print(*(f"# {sentence}\n" for sentence in sentences), described.to_toml(), sep="", end="")


@options_of(Preparation)
@options_of(TableFlags)
def partition(
    *,
    data: Annotated[
        str | None,
        "A data set: 'cora', a folder of arrays or of OGB's files, the name of a folder in "
        "$GRAPHSHARD_DATASETS, a table of edges as --edges takes it, or a graph of DGL's "
        "save_graphs that ends in .bin or .dgl.",
        Unset("none: tables are given"),
    ] = None,
    tables: Annotated[
        str | None,
        "TOML file, or a URI of one, that describes tables of nodes and edges; graphshard tables "
        "writes a first one.",
        Unset("none"),
    ] = None,
    encodings_from: Annotated[
        Path | None,
        "Partition of other tables, whose encodings and classes are used for these.",
        Unset("made of these tables"),
    ] = None,
    parts: Annotated[int, "Number of parts."],
    out: Annotated[Path, "Folder to write; made if need be."],
    name: Annotated[
        str | None, "Name of the graph and of the JSON.", Unset("the data set's")
    ] = None,
    method: Annotated[
        Literal["metis", "multilevel", "random"],
        "How to assign nodes; multilevel keeps edges on disk.",
    ] = "metis",
    objective: Annotated[
        Literal["cut", "vol"] | None,
        "What METIS minimises: edges between parts, or the halo.",
        Unset("cut"),
    ] = None,
    balance_edges: Annotated[bool, "Balance in-edges too."] = False,
    balance_split: Annotated[bool, "Balance training, validation and test nodes."] = False,
    balance_ntypes: Annotated[
        str | None,
        "Balance the nodes of every value of this node feature, e.g. label.",
        Unset("the nodes of every type"),
    ] = None,
    hops: Annotated[int, "Reach of the halo that a part keeps."] = 1,
    tolerance: Annotated[float, "Heaviest part over the mean, under every constraint."] = 1.05,
    seed: Annotated[int, "Seed of METIS or of the random assignment."] = 0,
    reorder: Annotated[
        bool | None,
        "Order nodes for locality inside each part.",
        Unset("yes for several parts"),
    ] = None,
    memory: Annotated[
        int | None,
        "MiB of edges in memory while parts are made, the others being on disk; not for metis.",
        Unset("512 for multilevel, all for random"),
    ] = None,
    quiet: Annotated[bool, "Print nothing but errors."] = False,
    **options: Any,
) -> None:
    """Divide a graph into parts, one for each worker, and write them to a folder.

    The graph is a data set (--data), or tables of nodes and edges (--nodes and --edges, or
    --tables). Several processes that torchrun starts share the work on a graph whose edges are on
    disk; all must see the folder.
    """
    from ...data import partition_tables
    from ...data.prepare import partition_by_name

    names = {field.name for field in dataclasses.fields(Preparation)}
    preparation = {name: value for name, value in options.items() if name in names}
    flags = TableFlags(**{n: value for n, value in options.items() if n not in names})
    if parts < 1:
        raise ValueError(f"parts must be at least 1 (got {parts})")
    if objective is not None and method != "metis":
        raise ValueError(
            f"objective is for the method metis (got objective={objective}, {method}); leave it out"
        )
    if memory is not None and memory < 16:
        raise ValueError(
            f"memory must be at least 16 MiB (got {memory}); give more, or leave it out"
        )
    common: dict[str, Any] = {
        "balance_field": balance_ntypes,
        "num_hops": hops,
        "part_method": method,
        "objtype": objective or "cut",
        "balance_edges": balance_edges,
        "balance_split": balance_split or None,
        "tolerance": tolerance,
        "seed": seed,
        "reorder": reorder,
        "memory": None if memory is None else memory << 20,
        "quiet": quiet,
    }
    with contextlib.ExitStack() as stack:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ:
            ranks = stack.enter_context(_ranks(out, common))
            if ranks.rank > 0:
                ranks.help()
                return
            common["ranks"] = ranks
        described = _tables_of(data, tables, flags, seed)
        if described is not None:
            written = partition_tables(
                described,
                parts,
                out,
                name=name if name is not None or tables is None else without_options(tables).stem,
                preparation=Preparation(**preparation),
                encodings_from=None if encodings_from is None else partition_json(encodings_from),
                options=preparation,
                **common,
            )
        else:
            assert data is not None
            if encodings_from is not None:
                raise ValueError("encodings_from is for tables (got a data set); leave it out")
            written = partition_by_name(
                data,
                parts,
                out,
                preparation=Preparation(**preparation),
                title=name,
                options={"data": Path(data).name, **preparation},
                **common,
            )
    if not quiet:
        console = Console(markup=False, emoji=False)
        console.print(f"wrote {written}", markup=False, highlight=False, soft_wrap=True)


def _ranks(out: Path, arguments: Mapping[str, Any]) -> PartitionRanks:
    """What this process is among those that torchrun, or another launcher, has started."""
    from ...partition import PartitionRanks
    from ...partition.save import keeps_edges_on_disk
    from ..launch import end_with_launcher

    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not keeps_edges_on_disk(arguments["memory"], arguments["part_method"]):
        raise ValueError(
            f"{num_ranks} processes share a partition whose edges are on disk: pass --memory, or "
            f"--method multilevel, or start one process (got --method {arguments['part_method']})"
        )
    end_with_launcher()
    return PartitionRanks(out, rank, num_ranks)


def _tables_of(
    data: str | None, described: str | None, flags: TableFlags, seed: int
) -> Tables | None:
    """The tables that options name; None where they name a data set."""
    from ...data import Tables
    from ...data.prepare import is_table

    are_given = flags != TableFlags()
    ways = [data is not None, described is not None, bool(flags.nodes or flags.edges)]
    if sum(ways) != 1:
        raise ValueError(
            "say what to partition with one of --data, --tables, and --nodes and --edges (got "
            f"{'none' if not any(ways) else 'several'})"
        )
    if data is None and described is None:
        return flags.read(seed)
    if data is not None:
        if is_table(data):
            return dataclasses.replace(flags, edges=[data]).read(seed)
        if are_given:
            raise ValueError("options of tables are for --nodes and --edges; leave out --data")
        return None
    assert described is not None
    said = Tables.from_toml(described)
    changes = {n: getattr(flags, n) for n in ("dangling", "parallel") if getattr(flags, n)}
    others = dataclasses.replace(flags, dangling=None, parallel=None)
    if others != TableFlags():
        raise ValueError(
            f"columns and files are said in {shown(described)}; leave their options out"
        )
    return dataclasses.replace(said, **changes)


@options_of()
def inspect(
    partition: PartitionPath,
    plot: Annotated[
        Path | None,
        "Also draw balance, rows per part, and what passes between parts to this PNG.",
        Unset("no picture"),
    ] = None,
    sums: Annotated[
        bool, "Also count the rows that each part gets for a sum or attention; reads all edges."
    ] = False,
) -> None:
    """Show what is in a partition and how good it is."""
    from ...data.task import read_task
    from ...partition import load_partition_stats
    from ...partition.format import read_config
    from ._partition_picture import plot_partition

    path = partition_json(partition)
    config, task = read_config(path), read_task(path)
    config.check_format()
    if plot is not None:
        plot_partition(config, load_partition_stats(path), plot)
    console = Console(markup=False, emoji=False, highlight=False)
    console.print(_types_table(config))
    if config.stats is not None:
        console.print(config.stats.table())
        console.print(config.stats.balance_table())
    else:
        console.print("DGL wrote it: it has no statistics until graphshard convert")
    if sums:
        console.print(_sums_table(str(path), config.num_parts))
    if task.target is not None:
        console.print(f"task: {_spoken_task(task)}", soft_wrap=True)
        if task.num_relations:
            console.print(f"relations: {task.num_relations}, as the edge feature etype")
    if plot is not None:
        console.print(f"wrote {plot}", soft_wrap=True)


def _spoken_task(task: TaskInfo) -> str:
    """The task as a sentence has it."""
    from ...partition.format import etype_key

    if isinstance(task.target, str):
        what = f"nodes of type {task.target}"
    else:
        what = f"edges {' and '.join(map(etype_key, task.targets))}"
    if task.kind == "link prediction":
        return f"predict {what}"
    if task.kind.endswith("regression"):
        return f"predict a number of {what}"
    several = ", several at once" if task.is_multilabel else ""
    return f"classify {what} into {task.num_classes} classes{several}"


def _types_table(config: PartitionConfig) -> Table:
    """Node types and relations, and how evenly each is owned by the parts."""
    from ...partition import Balance
    from ...partition.format import etype_key

    rows = {name: config.node_map[name] for name in config.ntypes}
    rows |= {etype_key(etype): config.edge_map[etype] for etype in config.etypes}
    owned = [Balance(n, tuple(stop - start for start, stop in rows[n])) for n in rows]
    return Balance.table("types", "type", owned)


def _sums_table(path: str, num_parts: int) -> Table:
    """Rows that each part reads of others, and the fewest that serve it where it sums."""
    from ...fullbatch import load_dgl_partition_data
    from ...fullbatch.fewest_rows import count_fewest_rows
    from ...fullbatch.topology import LocalEdges

    counts: dict[str, list[tuple[int, ...]]] = {}
    for part in range(num_parts):
        data = load_dgl_partition_data(path, part)
        for source in data.node_type_names:
            edges = [
                LocalEdges(e.src_part, e.src, e.dst, data.num_owned(etype[2]))
                for etype, e in data.edges.items()
                if etype[0] == source
            ]
            if edges:
                totals = count_fewest_rows(edges, part, num_parts)[:3].sum(1).tolist()
                counts.setdefault(source, []).append(tuple(totals))
    table = Table(title="rows from other parts", title_justify="left")
    table.add_column("sources")
    for heading in ("part", "rows", "rows and partial sums", "of these sums", "ratio"):
        table.add_column(heading, justify="right")
    for source, parts in counts.items():
        total = tuple(map(sum, zip(*parts, strict=True)))
        for name, row in [*((str(n), c) for n, c in enumerate(parts)), ("all", total)]:
            read, sent, _ = row
            ratio = f"{sent / read:.2f}" if read else "1.00"
            table.add_row(source, name, *(f"{number:,}" for number in row), ratio)
    return table


@options_of()
def verify(
    partition: PartitionPath,
    checksums: Annotated[bool, "Compute checksums, which reads every byte."] = True,
) -> None:
    """Check a partition from end to end; exit code 1 if anything is wrong with it."""
    from ...data.id_files import check_id_file, id_files
    from ...data.task import read_task
    from ...partition import verify_partition
    from ...partition.format import read_content

    path = partition_json(partition)
    read_content(path)  # a wrong path is wrong input, not a damaged partition
    problems = verify_partition(path, checksums=checksums)
    try:
        read_task(path)  # the description of the task, which verify_partition knows nothing of
        for name, record in id_files(path).items():
            check_id_file(path.parent / name, record)
    except PartitionFormatError as error:
        if str(error) not in problems:  # that of the partition, told already
            problems.append(str(error))
    for problem in problems:
        print(problem)
    if problems:
        print(f"{path}: {len(problems)} problem(s)")
        raise typer.Exit(1)
    print(f"{path}: whole")


@options_of()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            help="A partition's JSON, or the folder that PyG's Partitioner wrote; or a graph: a "
            "data set as for partition, or a file of DGL's save_graphs (.bin, .dgl).",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[
        Path,
        "Of a partition: folder to write, made if need be. Of a graph: file to write, whose ending "
        "says how (.bin and .dgl as DGL has it; .csv, .parquet).",
    ],
    to: Annotated[
        Literal["dgl", "graphshard"] | None,
        "Whose partition files to write.",
        Unset("dgl for ours, ours for DGL's and PyG's"),
    ] = None,
) -> None:
    """Write a partition, or a graph, in the files of DGL, or in ours again; needs no DGL or PyG."""
    from ...data.id_files import copy_id_files
    from ...data.prepare import read_graph, write_graph
    from ...data.task import read_task, write_task
    from ...partition import convert_partition

    if not is_partition(source):
        if to is not None:
            raise ValueError(f"--to is for partitions, and {source} is none; end --out as wanted")
        write_graph(read_graph(source), out)
        print(f"wrote {out}")
        return
    path = partition_json(source)
    task = read_task(path)
    written = convert_partition(path, out, to)
    if task.target is not None or task.schema is not None:
        write_task(written, task, copy_id_files(path, written))
    print(f"wrote {written}")
