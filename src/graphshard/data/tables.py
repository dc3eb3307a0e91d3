# SPDX-License-Identifier: Apache-2.0
"""Tables: which files and columns a graph is made of; the same in Python as in TOML.

::

    # graph.toml                             # relative paths are seen from this file
    dangling = "drop"                        # ends of edges that no table of nodes has
    parallel = "keep"                        # edges with the same two ends

    [nodes.user]
    files = "users.csv"                      # a path, a list, a glob, a folder, a URI
    id = "user_id"                           # "#": the number of the row, from 0
    label = "segment"
    split = [0.6, 0.2, 0.2]

    [nodes.user.features]                    # left out: all other columns, by their types
    age = "standardized"
    country = {encoding = "category"}
    embedding = "vector"
    genres = {separator = "|"}               # several words in a cell
    "word_*" = {encoding = "vector", row_normalize = true}   # many columns, one vector
    "*" = "by type"                          # all others, as where features is left out

    [[nodes.user.join]]                      # more columns of the same nodes, by their ids
    files = "embeddings.parquet"
    id = "user"

    [edges.follows]
    files = ["follows-*.csv.gz"]
    source = "follower"
    target = "followee"
    source_type = "user"                     # left out where there is one type of nodes
    target_type = "user"
    weight = "strength"
    time = "date"

`partition_tables` reads them and writes a partition to train on; ``graphshard partition --tables``
is the same thing.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeAlias, get_args

from .._base.typing import CanonicalEType
from ._columns import evident_separator
from ._kept_columns import KeptColumns
from ._row_ids import IdColumn, RowIds
from ._table_files import AS_IT_LOOKS, FileOptions, TableSource, is_in_memory, options_of
from .id_files import user_ids as user_ids  # where users look for it
from .remote_files import folder_of, is_uri, read_file, shown, without_options
from .settings import Dangling, Parallel
from .settings import TableFormat as TableFormat  # where users look for it
from .splits import checked_fractions

ROW_NUMBER = "#"
"""In place of the name of an id column: nodes are named by the number of their row, from 0."""

Split: TypeAlias = str | Sequence[float] | Mapping[str, Any] | None
"""A column of names, three fractions, or a mapping: see `graphshard.data.labels`."""
FeatureColumns: TypeAlias = Sequence[str] | Mapping[str, str | Mapping[str, Any]] | None
"""Columns to use; or a mapping of them to their encodings; None: all that have no other role.

A name with ``*`` or ``?`` stands for all columns that it matches and that have no other role; with
the encoding ``vector`` they are one vector. The encoding `BY_TYPE` is that of the column's type.
"""
BY_TYPE = "by type"
ROWS_OF_SEPARATORS = 10_000
"""Rows at the top of a table by which it is seen that cells are several words."""

_SOURCES = ("source", "src", "from", "source_id", "src_id", "u", "head", "_start")
_TARGETS = (
    "target",
    "dst",
    "to",
    "destination",
    "target_id",
    "dst_id",
    "dest",
    "v",
    "tail",
    "_end",
)
_OF_NEO4J = re.compile(r"[^:]*:(START_ID|END_ID|ID)(?:\((.*)\))?", re.IGNORECASE)
"""How Neo4j names columns of ids: personId:ID(Person), :START_ID(Person), :END_ID(Movie)."""
_IDS = ("id", "node_id", "node", "key", "uuid")
_LABEL_KEYS = ("column", "columns", "task", "max_classes", "separator")
_FRACTIONS = re.compile(r"\s*[0-9]*\.[0-9]+(\s*,\s*[0-9]*\.?[0-9]+)*\s*")
_READING = tuple(option.name for option in fields(FileOptions))


DEFAULT_FRACTIONS = (0.8, 0.1, 0.1)
"""Of rows for training, validation and test."""


@dataclass(frozen=True, kw_only=True)
class JoinedTable:
    """More columns of the nodes that another table has: rows are found by their ids.

    A node without a row has missing values; a row without a node is counted and left out; of rows
    with one id the first counts.

    Args:
        files: As of `NodeTable`.
        id: The column with the ids of the nodes; "#" is the number of the row, from 0.
        options: How to read the files.
    """

    files: Any
    id: str
    options: FileOptions = AS_IT_LOOKS


@dataclass(frozen=True, kw_only=True)
class NodeTable:
    """The table of one type of nodes: a row a node.

    Args:
        files: A path, URI, glob or folder, a list of those; or a table of pandas, Polars or
            pyarrow.
        id: The column by which edges name the nodes; "#" is the number of the row, from 0.
        features: Columns to use; or a mapping of them to encodings, see
            `graphshard.data.encodings`. None: all that have no other role.
        ignore: Columns that are not used, where ``features`` does not say which are.
        label: The column of labels; or a mapping with ``column`` and more, see
            `graphshard.data.labels`.
        split: Three fractions; a column of names; or a mapping: `graphshard.data.labels`.
        join: Other tables of the same nodes, whose columns are as those of this one.
        options: How to read the files.
    """

    files: Any
    id: str
    features: FeatureColumns = None
    ignore: Sequence[str] = ()
    label: str | Mapping[str, Any] | None = None
    split: Split = None
    join: Sequence[JoinedTable] = ()
    options: FileOptions = AS_IT_LOOKS

    def __post_init__(self) -> None:
        _check_columns(self)


@dataclass(frozen=True, kw_only=True)
class EdgeTable:
    """The table of one relation: a row an edge. What nodes have, too, is described there.

    Args:
        source: The column with the ids of the nodes where edges begin.
        target: The column with the ids of the nodes where they end.
        weight: A column of numbers, which becomes the edge feature ``weight``; 1 where missing.
        time: A column of times or whole numbers, which becomes the edge feature ``time``.
        relation_column: Of a knowledge graph, the column that says of which relation an edge is;
            its number becomes the edge feature ``etype``. Relations are numbered as their names are
            sorted. There is one table of edges then, between nodes of one type.
        split: Without a label it makes the task link prediction: edges are told from no edges.
    """

    files: Any
    source: str
    target: str
    features: FeatureColumns = None
    ignore: Sequence[str] = ()
    weight: str | None = None
    time: str | None = None
    relation_column: str | None = None
    label: str | Mapping[str, Any] | None = None
    split: Split = None
    options: FileOptions = AS_IT_LOOKS

    def __post_init__(self) -> None:
        _check_columns(self)


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The tables that make a graph.

    Types of nodes that have no table come from their edges.

    Args:
        nodes: Node type to its table.
        edges: (source type, relation, target type) to its table.
        dangling: What is done with an edge of which an end is in no row of the table of its type:
            "drop" leaves the edge out and counts it; "add" makes a node without features; "error".
        parallel: Whether edges with the same two ends are kept, or the first of them alone.
        seed: Of splits by fractions.
        base: Folder, a path or URI, that relative paths are seen from; None: the current one.

    Raises:
        ValueError: A name or option cannot be.

    Example:
        >>> import pandas
        >>> tables = Tables(
        ...     nodes={"user": NodeTable(files=pandas.DataFrame({"id": ["a", "b"]}), id="id")},
        ...     edges={
        ...         ("user", "follows", "user"): EdgeTable(
        ...             files=pandas.DataFrame({"from": ["a"], "to": ["b"]}),
        ...             source="from",
        ...             target="to",
        ...         )
        ...     },
        ... )
    """

    nodes: Mapping[str, NodeTable] = field(default_factory=dict)
    edges: Mapping[CanonicalEType, EdgeTable]
    dangling: Dangling = "drop"
    parallel: Parallel = "keep"
    seed: int = 0
    base: str | Path | None = None

    def __post_init__(self) -> None:
        for name, value, kind in (
            ("dangling", self.dangling, Dangling),
            ("parallel", self.parallel, Parallel),
        ):
            if value not in get_args(kind):
                raise ValueError(f"{name} must be one of {get_args(kind)} (got {value!r})")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be a whole number from 0 (got {self.seed!r})")
        if not self.edges:
            raise ValueError("there must be a table of edges at least; name one")
        for etype in self.edges:
            if not (isinstance(etype, tuple) and len(etype) == 3):
                raise ValueError(
                    "a table of edges must be under (source type, relation, target type) (got "
                    f"{etype!r})"
                )
        numbered = [e for e, of_edges in self.edges.items() if of_edges.relation_column is not None]
        if numbered and not (
            len(self.edges) == 1
            and len({*self.nodes, numbered[0][0], numbered[0][2]}) == 1
            and self.parallel == "keep"
        ):
            raise ValueError(
                "a table with relation_column must be the only one of edges, between nodes of one "
                f"type, with parallel edges kept (got edges {', '.join(map(str, self.edges))}, "
                f"parallel={self.parallel!r}); give a table for each relation"
            )
        for name in {*self.nodes, *(name for etype in self.edges for name in etype)}:
            if not isinstance(name, str) or not name or set(name) & set("/:~"):
                raise ValueError(
                    f"the name of a type must be text without / : ~, and not empty (got {name!r}); "
                    "rename it"
                )
        told = [t for t, table in self.nodes.items() if table.label is not None]
        of_edges = [str(e) for e, edge in self.edges.items() if edge.label is not None]
        if len(told) > 1 or (told and of_edges):
            raise ValueError(
                "one table of nodes may have labels, or tables of edges, as a graph has one task "
                f"(got {' and '.join(told + of_edges)}); leave one label out"
            )

    # ------------------------------------------------------------------ TOML

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> Tables:
        """Read a description in TOML.

        Args:
            path: Of the file, on this machine or a URI; files in it are seen from its folder.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: It is not TOML, or says something that cannot be.
        """
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib

        file = shown(os.fspath(path))
        read = read_file(path)
        try:
            content = tomllib.loads(read.decode("utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is not TOML: {error}") from None
        try:
            return cls._of_content(content, folder_of(path))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}: {error}") from None

    @classmethod
    def _of_content(cls, content: Mapping[str, Any], base: str) -> Tables:
        content = dict(content)
        nodes_content = _mapping(content.pop("nodes", {}), "nodes")
        edges_content = _mapping(content.pop("edges", {}), "edges")
        nodes = {}
        for ntype, said in nodes_content.items():
            nodes[ntype] = _table_of(NodeTable, said, f"nodes.{ntype}")
        edges: dict[CanonicalEType, EdgeTable] = {}
        only = next(iter(nodes)) if len(nodes) == 1 else None
        for name, said in edges_content.items():
            where = f"edges.{name}"
            said = dict(_mapping(said, where))
            ends = [said.pop("source_type", only), said.pop("target_type", only)]
            if None in ends:
                raise ValueError(
                    f"[{where}] must say source_type and target_type, as there is not one type of "
                    "nodes alone"
                )
            etype = (ends[0], said.pop("relation", name), ends[1])
            if etype in edges:
                raise ValueError(f"[{where}]: there is another table of {etype}; list its files")
            edges[etype] = _table_of(EdgeTable, said, where)
        allowed = {"dangling", "parallel", "seed"}
        if unknown := sorted(set(content) - allowed):
            raise ValueError(
                f"unknown key {unknown[0]!r}; there are {', '.join(sorted(allowed))}, "
                "[nodes.NAME] and [edges.NAME]"
            )
        return cls(nodes=nodes, edges=edges, base=base, **content)

    def to_toml(self) -> str:
        """The description in TOML.

        Raises:
            TypeError: A table is in memory, and no file.
        """
        lines = [f"dangling = {_toml(self.dangling)}", f"parallel = {_toml(self.parallel)}"]
        if self.seed:
            lines.append(f"seed = {self.seed}")
        for ntype, table in self.nodes.items():
            key = f"nodes.{_toml_key(ntype)}"
            lines += ["", f"[{key}]", *_toml_of_table(table, {})]
            lines += _toml_of_features(table.features, key)
            for joined in table.join:
                lines += ["", f"[[{key}.join]]", *_toml_of_table(joined, {})]
        names = [name for _, name, _ in self.edges]
        for (source_type, name, target_type), edge in self.edges.items():
            key = name if names.count(name) == 1 else f"{source_type} {name} {target_type}"
            more = {"source_type": source_type, "target_type": target_type}
            if key != name:
                more["relation"] = name
            lines += ["", f"[edges.{_toml_key(key)}]", *_toml_of_table(edge, more)]
            lines += _toml_of_features(edge.features, f"edges.{_toml_key(key)}")
        return "\n".join(lines) + "\n"

    def with_separators(self) -> tuple[Tables, list[str]]:
        """The same where features and labels of several words are cut, as their first rows suggest.

        See `graphshard.data._columns.evident_separator` for the rule.

        Returns:
            The tables, and what was found, a sentence each.
        """
        made: dict[Any, NodeTable | EdgeTable] = {**self.nodes, **self.edges}
        sentences: list[str] = []
        for owner, table in made.items():
            found = _separators_of(table, self.base)
            label, features = table.label, table.features
            left_out = {*_columns_of_roles(table), *table.ignore}
            said = features if isinstance(features, Mapping) else {}
            is_open = features is None or said.get("*") == BY_TYPE
            cut: dict[str, Any] = {}
            for column, (separator, why) in found.items():
                if label == column:
                    label = {"column": column, "separator": separator}
                elif is_open and column not in {*left_out, *label_columns(label), *said}:
                    cut[column] = {"encoding": "multi-hot", "separator": separator}
                else:
                    continue
                name = owner if isinstance(owner, str) else ":".join(owner)
                sentences.append(f"{column} of {name} is cut: {why}")
            if cut:
                features = {**cut, **said, "*": BY_TYPE}
            made[owner] = replace(table, label=label, features=features)
        nodes: Any = {ntype: made[ntype] for ntype in self.nodes}
        edges: Any = {etype: made[etype] for etype in self.edges}
        return replace(self, nodes=nodes, edges=edges), sentences

    # ------------------------------------------------------------------ a first one from files

    @classmethod
    def from_files(
        cls,
        nodes: Sequence[Any] = (),
        edges: Sequence[Any] = (),
        *,
        node_id: str | None = None,
        source: str | None = None,
        target: str | None = None,
        label: str | None = None,
        label_task: str | None = None,
        split: Split = None,
        links: Sequence[str] = (),
        weight: str | None = None,
        time: str | None = None,
        relation_column: str | None = None,
        ignore: Sequence[str] = (),
        separators: Mapping[str, str] | None = None,
        options: FileOptions = AS_IT_LOOKS,
        base: str | Path | None = None,
        **settings: Any,
    ) -> Tables:
        """The description that files suggest by their names and columns.

        A file may be written ``NAME=PATH``, which names its type or relation (a second one of one
        type is joined to the first by its ids), and a relation
        ``SOURCE:NAME:TARGET=PATH``, which names the types of its ends, too; otherwise the name is
        that of the file. What is not given goes by usual names of columns: an id is called ``id``,
        ``node_id``, as its type with ``_id``, or stands first; the ends of an edge are called
        ``source`` and ``target``, ``src`` and ``dst`` or the like, or stand first and second. The
        type of an end is the one that the name of its column begins with, or the only one, or the
        only one whose table has ids that stand in the column.

        Args:
            label: A column of nodes or, if no nodes have it, of edges, of any number of relations;
                ``TYPE=COLUMN`` for that of one of several tables that have it.
            label_task: What labels are, where their type does not tell: "classification",
                "multi-label classification" or "regression".
            links: Names of relations whose edges are to be predicted; without them, a split
                without a label is that of the only relation.
            separators: Columns of text, features or the label, to what their words are between;
                ``TYPE=COLUMN`` as for ``label``.
            **settings: More for `Tables`.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: A column is missing.
        """
        made_nodes: dict[str, NodeTable] = {}
        columns: dict[str, dict[str, str]] = {}
        said = [name for name in (node_id, label, *ignore) if name is not None]
        for item in nodes:
            name, files = _named(item)
            reader = TableSource(files, options, base=base, named=said)
            called = reader.spellings
            if name in made_nodes and files != item:  # the name was given
                first = made_nodes[name]
                usual = first.id if node_id is None else node_id
                names = list(reader.schema.names)
                own_key = called[usual] if usual in called else _id_column(name, names)
                if usual == ROW_NUMBER and own_key.casefold() not in _usual_ids(name):
                    own_key = ROW_NUMBER  # neither of the two has ids
                joined = JoinedTable(files=files, id=own_key, options=options)
                made_nodes[name] = replace(first, join=(*first.join, joined))
                more = {text: column for text, column in called.items() if column != own_key}
                columns[name] = more | columns[name]
                continue
            name = _unused_name(name, made_nodes)
            columns[name] = called
            key = node_id
            if key is None or (len(nodes) > 1 and key not in (*called, ROW_NUMBER)):
                key = _id_column(name, reader.telling_names)
            key = key if key == ROW_NUMBER else reader.column(key)
            made_nodes[name] = NodeTable(files=files, id=key, options=options)
        made_edges: dict[CanonicalEType, EdgeTable] = {}
        of_all = (source, target, label, weight, time, relation_column, *ignore)
        said = [name for name in of_all if name is not None]
        of_edges: dict[CanonicalEType, dict[str, str]] = {}
        for item in edges:
            name, files = _named(item)
            reader = TableSource(files, options, base=base, named=said)
            called = reader.spellings
            begin, end = end_columns(reader, source, target)
            if name.count(":") == 2:
                source_type, name, target_type = name.split(":")
            else:
                source_type, target_type = _types_of_ends((begin, end), made_nodes, reader, base)
            ends = source_type, target_type
            etype = (ends[0], name, ends[1])
            while etype in made_edges:
                etype = (ends[0], etype[1] + "_", ends[1])
            of_edges[etype] = called
            made_edges[etype] = EdgeTable(
                files=files,
                source=begin,
                target=end,
                weight=None if weight is None else called.get(weight),
                time=None if time is None else called.get(time),
                relation_column=None if relation_column is None else called.get(relation_column),
                options=options,
            )
        of_rows = {"weight": weight, "time": time, "relation_column": relation_column}
        for name, value in of_rows.items():
            if value is not None and all(value not in called for called in of_edges.values()):
                there = "; ".join(", ".join(called) for called in of_edges.values())
                raise ValueError(
                    f"{name} must be a column of edges (got {value!r}; there are {there})"
                )
        made = cls(nodes=made_nodes, edges=made_edges, base=base, **settings)
        if label_task is not None and label is None:
            raise ValueError(f"label_task is of a label (got {label_task!r}); say label, too")
        said_of_label = {} if label_task is None else {"task": label_task}
        made = made._with_columns(columns, of_edges, label, said_of_label, split, links, ignore)
        return made._cut_at({**columns, **of_edges}, separators or {})

    def _cut_at(self, columns: Mapping[Any, Mapping[str, str]], separators: Any) -> Tables:
        """The same where columns of several words are cut.

        Args:
            columns: Of each node type and relation, by all that they are called.
            separators: Columns to what their words are between.
        """
        made: dict[Any, NodeTable | EdgeTable] = {**self.nodes, **self.edges}
        for said, separator in separators.items():
            name, owners = _owners_of(said, columns)
            if not owners:
                raise ValueError(f"separators must name columns of the tables (got {said!r})")
            for owner in owners:
                table, column = made[owner], columns[owner][name]
                if column in _columns_of_roles(table):
                    raise ValueError(
                        f"separators are of features and labels (got {said!r}, which has another "
                        "role); leave it out"
                    )
                if column in label_columns(table.label):
                    label = table.label if isinstance(table.label, Mapping) else {"column": column}
                    made[owner] = replace(table, label={**label, "separator": separator})
                else:
                    before = table.features if isinstance(table.features, Mapping) else {}
                    cut = {**before, column: {"separator": separator}}
                    cut["*"] = cut.pop("*", BY_TYPE)  # behind what is named
                    made[owner] = replace(table, features=cut)
        nodes: Any = {ntype: made[ntype] for ntype in self.nodes}
        edges: Any = {etype: made[etype] for etype in self.edges}
        return replace(self, nodes=nodes, edges=edges)

    def _with_columns(
        self,
        columns: Mapping[str, Mapping[str, str]],
        of_edges: Mapping[CanonicalEType, Mapping[str, str]],
        label: str | None,
        said_of_label: Mapping[str, Any],
        split: Split,
        links: Sequence[str],
        ignore: Sequence[str],
    ) -> Tables:
        """The same with a label and split where they belong, and columns left out.

        Args:
            columns: Of each node type, by all that they are called.
            of_edges: The same of relations.
        """
        nodes, edges = dict(self.nodes), dict(self.edges)
        for column in ignore:
            if not any(column in called for called in (*columns.values(), *of_edges.values())):
                raise ValueError(f"ignore must name columns of the tables (got {column!r})")
        for ntype, called in columns.items():
            nodes[ntype] = replace(nodes[ntype], ignore=[called[c] for c in ignore if c in called])
        for etype, called in of_edges.items():
            edges[etype] = replace(edges[etype], ignore=[called[c] for c in ignore if c in called])
        if label is None and split is None and not links:
            return replace(self, nodes=nodes, edges=edges)
        targets: list[Any] = []
        if links and label is not None:
            raise ValueError(
                f"links are edges that are told from none, and have no label (got label {label!r} "
                f"and links {', '.join(links)}); leave one out"
            )
        if label is not None:
            label, targets = _labelled(label, columns, of_edges)
        elif links:
            for name in links:
                fitting = [e for e in edges if name in (e[1], ":".join(e))]
                if len(fitting) != 1:
                    raise ValueError(
                        f"links must name relations (got {name!r}, which {len(fitting)} of "
                        f"{', '.join(':'.join(e) for e in edges)} are)"
                    )
                targets += fitting
            split = DEFAULT_FRACTIONS if split is None else split
        elif len(edges) == 1:
            targets = list(edges)
        else:
            raise ValueError(
                "split without a label is for one table of edges; say which relations are to be "
                f"predicted: --links {next(iter(edges))[1]},..., or write a TOML file"
            )
        tables: dict[Any, Any] = nodes if targets[0] in nodes else edges
        every: dict[Any, Mapping[str, str]] = {**columns, **of_edges}
        for target in targets:
            said: Any = None if label is None else every[target][label]
            if said_of_label:
                said = {"column": said, **said_of_label}
            tables[target] = replace(tables[target], label=said, split=split)
        return replace(self, nodes=nodes, edges=edges)


def _owners_of(said: str, columns: Mapping[Any, Mapping[str, str]]) -> tuple[str, list[Any]]:
    """A column, and the types and relations that have it.

    Args:
        said: The column, or ``TYPE=COLUMN`` for that of one of several tables.
        columns: Of each type and relation, by all that they are called.
    """
    owner, equals, column = said.partition("=")
    if not equals or any(said in names for names in columns.values()):
        return said, [t for t, names in columns.items() if said in names]
    is_of = {t: owner in ((t,) if isinstance(t, str) else (t[1], ":".join(t))) for t in columns}
    return column, [t for t, names in columns.items() if is_of[t] and column in names]


def _labelled(
    label: str,
    columns: Mapping[str, Mapping[str, str]],
    of_edges: Mapping[CanonicalEType, Mapping[str, str]],
) -> tuple[str, list[Any]]:
    """The column of a label, and the types it is of: one of nodes, or those of edges that have it.

    Args:
        label: The column, or ``TYPE=COLUMN``, where several tables have it.
    """
    every: dict[Any, Mapping[str, str]] = {**columns, **of_edges}
    column, owners = _owners_of(label, every)
    targets = owners if column != label else [owner for owner in owners if owner in columns]
    is_clear = len(targets) == 1
    if not targets and column == label:
        targets = owners
        is_clear = bool(targets)
    if not is_clear:
        names = [t if isinstance(t, str) else ":".join(t) for t in targets] or ["none"]
        there = "; ".join(", ".join(each) for each in every.values())
        raise ValueError(
            f"label must be a column of one table of nodes, or of tables of edges (got {label!r}, "
            f"of {' and '.join(names)}; there are {there}); say of which it is: TYPE=COLUMN"
        )
    return column, targets


def with_names_of(table: Any, name_of: Callable[[str], str]) -> Any:
    """A table of nodes or edges whose columns all go by their names.

    Args:
        name_of: The name of a column that is called in any way, such as by its place.
    """
    changes: dict[str, Any] = {}
    for role in ("id", "source", "target", "weight", "time", "relation_column"):
        said = getattr(table, role, None)
        if said is not None and said != ROW_NUMBER:
            changes[role] = name_of(said)
    features, label, split = table.features, table.label, table.split
    if features is not None:
        names = {said: said if set(said) & set("*?") else name_of(said) for said in features}
        if isinstance(features, Mapping):
            changes["features"] = {names[said]: encoding for said, encoding in features.items()}
        else:
            changes["features"] = [names[said] for said in features]
    changes["ignore"] = [name_of(said) for said in table.ignore]
    if isinstance(label, str):
        changes["label"] = name_of(label)
    elif label is not None:
        key = "columns" if "columns" in label else "column"
        named = list(map(name_of, label_columns(label)))
        changes["label"] = {**label, key: named if key == "columns" else named[0]}
    if isinstance(split, str):
        changes["split"] = name_of(split)
    elif isinstance(split, Mapping):
        said_of: dict[str, Any] = {
            key: name_of(split[key]) for key in ("column", "time") if key in split
        }
        if "masks" in split:
            said_of["masks"] = {name: name_of(said) for name, said in split["masks"].items()}
        changes["split"] = {**split, **said_of}
    return replace(table, **changes)


def _columns_of_roles(table: NodeTable | EdgeTable) -> set[str | None]:
    """Columns of a table that are neither features nor labels; None, too, where it lacks a role."""
    roles = ("id", "source", "target", "weight", "time", "relation_column")
    return {*(getattr(table, role, None) for role in roles), *split_columns(table.split)}


def label_columns(label: str | Mapping[str, Any] | None) -> list[str]:
    """The columns of a label."""
    if label is None or isinstance(label, str):
        return [] if label is None else [label]
    said = label["columns"] if "columns" in label else [label["column"]]
    return list(said)


def split_columns(split: Split) -> list[str]:
    """The columns of a split."""
    if isinstance(split, str):
        return [split]
    if not isinstance(split, Mapping):
        return []
    columns = [split[key] for key in ("column", "time") if key in split]
    return [*columns, *split.get("masks", {}).values()]


# ---------------------------------------------------------------------- checks, TOML


def _check_columns(table: NodeTable | EdgeTable) -> None:
    """Raise unless every column of a table has one role."""
    roles: dict[str, str] = {}
    named = {"id": getattr(table, "id", None)}
    for role in ("source", "target", "weight", "time", "relation_column"):
        named[role] = getattr(table, role, None)
    for role, column in named.items():
        if column is None:
            continue
        if not isinstance(column, str) or not column:
            raise ValueError(f"{role} must name a column (got {column!r})")
        if column in roles and {role, roles[column]} != {"source", "target"}:
            raise ValueError(f"column {column!r} is {roles[column]} and {role}; it can be one")
        roles[column] = role
    if isinstance(table.features, str) or isinstance(table.ignore, str):
        raise ValueError("features and ignore must be lists of columns; write [...]")
    for column in table.features or ():
        if column in roles:
            raise ValueError(f"column {column!r} is {roles[column]} and cannot be a feature")
    if table.label is not None and not isinstance(table.label, str):
        said = dict(table.label)
        if ("column" in said) + ("columns" in said) != 1:
            raise ValueError(f"label must say its column, or its columns (got {said})")
        if unknown := sorted(set(said) - set(_LABEL_KEYS)):
            raise ValueError(f"a label has {', '.join(_LABEL_KEYS)} (got {unknown[0]!r})")
        separator = said.get("separator", ",")
        if ("columns" in said and "separator" in said) or not (
            isinstance(separator, str) and separator
        ):
            raise ValueError(
                f"separator of a label must be the text between the classes of a cell (got {said})"
            )
    split = table.split
    if isinstance(split, Mapping):
        ways = [key for key in ("column", "masks", "files", "fractions") if key in split]
        unknown = sorted(set(split) - {*ways, "time", "stratify"})
        if len(ways) != 1 or unknown or ("time" in split and "fractions" not in split):
            raise ValueError(
                "split must have one of column (of names), masks (columns of true and false by "
                "train, val and test), files (of ids), and fractions, which may go by a time (got "
                f"{dict(split)})"
            )
    elif isinstance(split, str) and _FRACTIONS.fullmatch(split):
        numbers = [float(word) for word in split.split(",")]
        raise ValueError(f"split must have fractions as a list (got {split!r}); write {numbers}")
    elif split is not None and not isinstance(split, str):
        checked_fractions(list(split))


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"[{where}] must be a table of keys (got {value!r})")
    return value


def _table_of(kind: Any, said: Any, where: str) -> Any:
    said = dict(_mapping(said, where))
    if kind is NodeTable and "join" in said:
        joined = said["join"] if isinstance(said["join"], list) else [said["join"]]
        said["join"] = tuple(_table_of(JoinedTable, table, f"{where}.join") for table in joined)
    reading = {key: said.pop(key) for key in _READING if key in said}
    names = [option.name for option in fields(kind) if option.name != "options"]
    if unknown := sorted(set(said) - set(names)):
        allowed = [*names, *_READING]
        if kind is EdgeTable:
            allowed += ["source_type", "target_type", "relation"]
        raise ValueError(
            f"[{where}]: unknown key {unknown[0]!r}; there are {', '.join(sorted(allowed))}"
        )
    needed = ["files", "source", "target"] if kind is EdgeTable else ["files", "id"]
    for key in needed:
        if key not in said:
            raise ValueError(f"[{where}] must say {key}")
    try:
        return kind(**said, options=options_of(reading))
    except (ValueError, TypeError) as error:
        raise ValueError(f"[{where}]: {error}") from None


def _toml(value: Any) -> str:
    """A value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        escaped = text.replace("\\", "\\\\").replace('"', '\\"')
        escaped = re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped)
        return f'"{escaped}"'
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, Iterable):
        return "[" + ", ".join(map(_toml, value)) + "]"
    raise TypeError(f"a {type(value).__name__} cannot be written in TOML")


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml(key)


def _toml_of_table(
    table: NodeTable | EdgeTable | JoinedTable, more: Mapping[str, str]
) -> list[str]:
    if is_in_memory(table.files):
        raise TypeError("a table in memory has no file to name; write it to Parquet first")
    lines = []
    for option in fields(table):
        value = getattr(table, option.name)
        if option.name == "target":
            lines.append(f"target = {_toml(value)}")
            lines += [f"{key} = {_toml(said)}" for key, said in more.items()]
        elif option.name == "options":
            for reading in fields(FileOptions):
                said = getattr(value, reading.name)
                if said != getattr(FileOptions(), reading.name):
                    lines.append(f"{reading.name} = {_toml(said)}")
        elif value is None or option.name == "join" or (option.name == "ignore" and not value):
            continue
        elif option.name != "features" or not isinstance(value, Mapping):
            lines.append(f"{option.name} = {_toml(value)}")
    return lines


def _toml_of_features(features: FeatureColumns, where: str) -> list[str]:
    if not isinstance(features, Mapping):
        return []
    lines = ["", f"[{where}.features]"]
    return lines + [f"{_toml_key(column)} = {_toml(said)}" for column, said in features.items()]


# ---------------------------------------------------------------------- what files suggest


def _named(item: Any) -> tuple[str, Any]:
    """The name of a type, and its files, of ``NAME=PATH`` or a path."""
    if is_in_memory(item):
        raise ValueError("from_files takes paths; pass tables in memory to NodeTable and EdgeTable")
    text = os.fspath(item)
    name, equals, path = text.partition("=")
    if equals and re.fullmatch(r"[\w .:-]+", name) and not os.path.exists(text):
        return name, path
    parts = (without_options(text) if is_uri(text) else Path(text)).parts
    for part in reversed(parts):
        # Spark writes follows/day=1/part-0.parquet, of which follows says what it is.
        if "=" in part or part.startswith("part-"):
            continue
        stem = re.sub(r"[/:~]", "_", re.split(r"[.*?\[]", part)[0]).strip("-_ ")
        if stem:
            return stem, item
    return "table", item


def _separators_of(
    table: NodeTable | EdgeTable, base: str | Path | None
) -> dict[str, tuple[str, str]]:
    """Columns to what their words are between, and why, as the first rows have it."""
    joined = table.join if isinstance(table, NodeTable) else ()
    found: dict[str, tuple[str, str]] = {}
    for one, of in ((table, None), *((other, table) for other in joined)):
        source = TableSource(one.files, one.options, base=base, named=named_columns(one, of))
        batch = next(source.batches(source.schema.names, ROWS_OF_SEPARATORS), None)
        if batch is None:
            continue
        kept = KeptColumns()
        try:
            for name in source.schema.names:
                cells = [batch.columns.column(name).slice(0, ROWS_OF_SEPARATORS)]
                values = source.whole_column(name, cells, kept)
                if (separator := evident_separator(values, name)) is not None:
                    found.setdefault(name, separator)
        finally:
            kept.close()
    return found


def named_columns(
    table: NodeTable | EdgeTable | JoinedTable, of: NodeTable | EdgeTable | None = None
) -> list[str]:
    """The columns that are asked for by name, which tell which line is the header.

    Args:
        of: The table that it is joined to.
    """
    roles = ("id", "source", "target", "weight", "time", "relation_column")
    named = [getattr(table, role, None) for role in roles]
    said = table if of is None else of
    assert not isinstance(said, JoinedTable)
    named += [*(said.features or ()), *said.ignore]
    named += [*label_columns(said.label), *split_columns(said.split)]
    return [name for name in named if name is not None]


def _unused_name(name: str, names: Iterable[str]) -> str:
    taken, candidate, number = set(names), name, 2
    while candidate in taken:
        candidate, number = f"{name}_{number}", number + 1
    return candidate


def _stems(ntype: str) -> list[str]:
    """What a column that speaks of a type may begin with."""
    name = ntype.casefold()
    return [name, name.removesuffix("s"), re.sub(r"ies$", "y", name)]


def _of_neo4j(role: str, columns: Sequence[str]) -> str | None:
    """The column that Neo4j has given a role: ID, START_ID or END_ID."""
    for column in columns:
        named = _OF_NEO4J.fullmatch(column)
        if named is not None and named[1].upper() == role:
            return column
    return None


def _usual_ids(ntype: str) -> list[str]:
    """What columns of ids of a type are called, the most usual first, in small letters."""
    stems = (f"{stem}{end}" for stem in _stems(ntype) for end in ("_id", "id", ""))
    return [*_IDS[:1], *stems, *_IDS[1:]]


def _id_column(ntype: str, columns: Sequence[str]) -> str:
    if (column := _of_neo4j("ID", columns)) is not None:
        return column
    for name in _usual_ids(ntype):
        for column in columns:
            if column.casefold() == name:
                return column
    return columns[0]


def _column_of(reader: TableSource, asked: str | None, usual: Sequence[str], first: str) -> str:
    if asked is not None:
        return reader.column(asked)
    role = "START_ID" if usual is _SOURCES else "END_ID"
    if (named := _of_neo4j(role, reader.schema.names)) is not None:
        return named
    for name in usual:
        for column in reader.schema.names:
            if column.casefold() == name:
                return str(column)
    return first


def end_columns(reader: TableSource, source: str | None, target: str | None) -> tuple[str, str]:
    """The columns of the two ends of edges: those that are said, of usual names, or the first.

    Raises:
        ValueError: There is none of a name, or no two columns.
    """
    names, telling = list(reader.schema.names), reader.telling_names
    if len(names) < 2 and None in (source, target):
        raise ValueError(
            f"{reader.name} must have a column for each end of an edge (got {names}); say by what "
            "cells are separated, if they are"
        )
    if len(telling) < 2:
        telling = names
    begin = _column_of(reader, source, _SOURCES, telling[0])
    rest = [column for column in telling if column != begin] or [begin]
    return begin, _column_of(reader, target, _TARGETS, rest[0])


def _group_of(column: str, ntype: str) -> str:
    """The group of ids that Neo4j names in a column; the node type where it names none."""
    named = _OF_NEO4J.fullmatch(column)
    return ntype if named is None or not named[2] else named[2]


def _type_by_ids(
    column: str, reader: TableSource, nodes: Mapping[str, NodeTable], base: str | Path | None
) -> str:
    """The one type of nodes whose first million ids the first rows of a column name; else ""."""
    batch = next(reader.batches([column]), None)
    if batch is None:
        return ""
    values = batch.columns.column(column).slice(0, 10_000).drop_null()
    told: list[str] = []
    for ntype, table in nodes.items():
        ids = RowIds(ntype)
        source = TableSource(table.files, table.options, base=base, named=[table.id])
        if table.id == ROW_NUMBER:
            return ""
        try:
            for rows in source.batches([table.id]):
                of_rows = rows.columns.column(table.id).drop_null()
                ids.add(of_rows, IdColumn(rows.file, source.is_untyped))
                if len(ids) >= 1_000_000:
                    break
            found = ids.find(values, IdColumn(batch.file, reader.is_untyped))
        except ValueError:  # ids of another kind
            continue
        if (found >= 0).any():
            told.append(ntype)
    return told[0] if len(told) == 1 else ""


def _types_of_ends(
    columns: Sequence[str],
    nodes: Mapping[str, NodeTable],
    reader: TableSource,
    base: str | Path | None,
) -> list[str]:
    """The node types that the two columns of ends speak of, by their names or else their ids.

    Raises:
        ValueError: They do not tell.
    """
    if not nodes:
        return ["node", "node"]
    types: list[str] = []
    for column in columns:
        named = _OF_NEO4J.fullmatch(column)
        of_group = [t for t, table in nodes.items() if named and _group_of(table.id, t) == named[2]]
        if named is not None and named[2] and len(of_group) == 1:
            types.append(of_group[0])
            continue
        name = column.casefold()
        fitting = [t for t in nodes if any(stem and name.startswith(stem) for stem in _stems(t))]
        of_ids = [t for t, table in nodes.items() if table.id.casefold() == name]
        types.append((of_ids if len(of_ids) == 1 else fitting or [""])[0])
    if len(nodes) == 1:
        # userId and movieId with a table of movies; but not user and friend with one of users.
        is_another = all(c.casefold().endswith("id") for c in columns) and any(types)
        if not is_another or all(types):
            return list(nodes) * 2
    for side, column in enumerate(columns):
        types[side] = types[side] or _type_by_ids(column, reader, nodes, base)
        if not types[side]:
            raise ValueError(
                f"column {column!r} does not tell of which type its nodes are, {' or '.join(nodes)}"
                " or one without a table; name the types as SOURCE:RELATION:TARGET=FILE, or in a "
                "TOML file"
            )
    return types
