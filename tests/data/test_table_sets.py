# SPDX-License-Identifier: Apache-2.0
"""Sets of tables, partitioned and read back by users' ids, against pandas and scikit-learn.

Each set is written and partitioned twice: in two formats, cut into files in two ways, read in
batches of two sizes, in memory or with edges on disk, into two numbers of parts. What is read back
is what `table_sets.expected` says, both times, and the same both times. No process group.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from table_sets import SPLITS, Column, TableOf, TableSet, expected, write

from graphshard._base.kernels import extension_available, force_extension
from graphshard.data import (
    EdgeTable,
    NodeTable,
    Tables,
    _array_graph,
    _kept_columns,
    _read_tables,
    _table_files,
    _table_targets,
    partition_tables,
    splits,
    user_ids,
)
from graphshard.data._partition_tables import report_path
from graphshard.data.task import read_task
from graphshard.partition import load_partition
from graphshard.train.commands import run

NUM_SEEDS = 500


def tables_of(made: TableSet, folder: Path) -> Tables:
    """The set, written in a way that is drawn."""
    draw = made.draw
    made.variants += 1
    base = folder / f"tables-{made.variants}"

    def written(name: str, table: TableOf) -> Any:
        kind, num_files = draw.choice(made.formats), draw.choice([1, 1, 2, 4])
        return write(table.columns, base / name, kind, num_files, draw)

    def common(table: TableOf) -> dict[str, Any]:
        features: Any = None
        if table.features != "all":
            features = table.feature_names()
        if table.features == "mapping":
            features = {name: table.columns[name].asked or {} for name in table.feature_names()}
        split = table.split
        if isinstance(split, dict) and "files" in split:
            base.mkdir(exist_ok=True)
            files = {}
            for name, ids in table.split["files"].items():
                kind = "parquet" if isinstance(ids[0], bytes) else "csv"
                columns = {"key": Column(table.columns["key"].kind, ids)}
                files[name] = write(columns, base / f"{name}-ids", kind, 1, draw)
            split = {"files": files}
        made_of = {"features": features, "label": table.label, "split": split}
        return made_of | ({} if features is not None else {"ignore": table.ignore})

    return Tables(
        nodes={
            ntype: NodeTable(files=written(ntype, table), id="key", **common(table))
            for ntype, table in made.nodes.items()
        },
        edges={
            etype: EdgeTable(
                files=written(etype[1], table),
                source="from",
                target="to",
                weight=table.weight,
                time=table.time,
                **common(table),
            )
            for etype, table in made.edges.items()
        },
        dangling=made.dangling,  # type: ignore[arg-type]
        parallel=made.parallel,  # type: ignore[arg-type]
        seed=made.split_seed,
    )


def read_back(path: Path, num_parts: int) -> dict[str, Any]:
    """Nodes and edges of a partition in the order of the tables, with ids and fields."""
    ids: dict[str, dict[int, Any]] = {}
    rows: dict[str, dict[str, list[torch.Tensor]]] = {}
    places: dict[str, list[torch.Tensor]] = {}
    ends: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    of_part = {}
    for part in range(num_parts):
        for ntype, column in user_ids(path, part).items():
            of_part[part, ntype] = column.to_pylist()
    etypes: list[tuple[str, str, str]] = []
    for part in range(num_parts):
        graph, nodes, edges, book, _, _, etypes = load_partition(path, part)
        for key, values in {**nodes, **edges}.items():
            owner, _, name = key.rpartition("/")
            if name == "orig_id":
                places.setdefault(owner, []).append(values)
            else:
                rows.setdefault(owner, {}).setdefault(name, []).append(values)
        src, dst = (graph.ndata["_ID"][end.long()] for end in graph.edges())
        relation, number = book.map_to_per_etype(graph.edata["_ID"])
        is_inner = graph.edata["inner_edge"].bool()
        for place, etype in enumerate(etypes):
            chosen = (is_inner & (relation == place)).nonzero().view(-1)
            chosen = chosen[number[chosen].argsort()]
            of_type = [book.map_to_per_ntype(end[chosen])[1] for end in (src, dst)]
            ends.setdefault(":".join(etype), []).append((of_type[0], of_type[1]))
    # New numbers of nodes are the own nodes of part 0, then of part 1, and so on.
    for ntype in {ntype for _, ntype in of_part}:
        ids[ntype] = dict(enumerate(i for p in range(num_parts) for i in of_part[p, ntype]))
    result: dict[str, Any] = {"nodes": {}, "edges": {}}
    for ntype, by_number in ids.items():
        order = torch.cat(places[ntype]).argsort()
        result["nodes"][ntype] = {"ids": [by_number[i] for i in order.tolist()]}
        for name, parts in rows.get(ntype, {}).items():
            result["nodes"][ntype][name] = torch.cat(parts)[order].numpy()
    for etype in etypes:
        owner = ":".join(etype)
        order = torch.cat(places[owner]).argsort()
        src = torch.cat([pair[0] for pair in ends[owner]])[order].tolist()
        dst = torch.cat([pair[1] for pair in ends[owner]])[order].tolist()
        pairs = [(ids[etype[0]][a], ids[etype[2]][b]) for a, b in zip(src, dst, strict=True)]
        result["edges"][etype] = {"pairs": pairs}
        for name, parts in rows.get(owner, {}).items():
            result["edges"][etype][name] = torch.cat(parts)[order].numpy()
    return result


def compare(found: dict[str, Any], wanted: dict[str, Any], where: str) -> None:
    names = set(wanted) - {"classes"}
    assert set(found) == names, where
    for name in names:
        of_name = f"{name} of {where}"
        if name in ("ids", "pairs"):
            assert list(map(spoken, found[name])) == list(map(spoken, wanted[name])), of_name
        elif wanted[name].dtype.kind == "f":
            np.testing.assert_allclose(
                found[name], wanted[name], rtol=2e-5, atol=2e-6, err_msg=of_name
            )
        else:
            np.testing.assert_array_equal(found[name], wanted[name], err_msg=of_name)


def spoken(value: Any) -> Any:
    """An id as text: of typed files it is a number where CSV beside them makes it text."""
    if isinstance(value, tuple):
        return tuple(map(spoken, value))
    return value if isinstance(value, bytes) else str(value)


def partitioned(made: TableSet, folder: Path, num_parts: int, memory: int | None) -> Path:
    tables = tables_of(made, folder)
    out = folder / f"parts-{made.variants}"
    is_file = all(
        isinstance(t.files, str | list) for t in (*tables.nodes.values(), *tables.edges.values())
    )
    if is_file and made.draw.random() < 0.3:
        toml = folder / f"graph-{made.variants}.toml"
        toml.write_text(tables.to_toml(), encoding="utf-8")
        words = ["partition", "--tables", toml, "--parts", num_parts, "--out", out, "--quiet"]
        if made.split_seed:
            words += ["--seed", made.split_seed]
        if memory is not None:
            words += ["--memory", memory >> 20]
        assert run([*map(str, words), "--method", "random", "--name", "g"]) == 0
        return out / "g.json"
    return partition_tables(tables, num_parts, out, name="g", part_method="random", memory=memory)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=[] if seed < 16 else pytest.mark.exhaustive)
        for seed in range(NUM_SEEDS)
    ],
)
def test_partitions_of_tables_are_what_pandas_and_scikit_learn_expect(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = TableSet(seed)
    results = []
    parts = made.draw.sample([1, 2, 5], 2)
    for num_parts in parts:
        monkeypatch.setattr(_table_files, "_BLOCK", made.draw.choice([1 << 20, 900]))
        is_compiled = extension_available() and made.draw.random() < 0.7
        # Edges on disk, and everything that has a row for each of them; in blocks of a few rows.
        memory = 1 << 24 if is_compiled and made.draw.random() < 0.6 else None
        for module, name, sizes in (
            (_array_graph, "_BLOCK_ROWS", [1 << 20, 37]),
            (splits, "_BLOCK_ROWS", [1 << 20, 23]),
            (_table_targets, "_BLOCK_ROWS", [1 << 20, 41]),
            (_read_tables, "_MOST_AT_ONCE", [1 << 20, 0]),
            (_kept_columns, "MOST_IN_MEMORY", [1 << 28, 0]),
            (_kept_columns, "_RELEASED_EVERY", [1 << 25, 4096]),
        ):
            monkeypatch.setattr(module, name, made.draw.choice(sizes))
        with force_extension(is_compiled):
            path = partitioned(made, tmp_path, num_parts, memory)
        assert not [
            p.name for p in path.parent.iterdir() if p.name[:1] == "." or "folder" in p.name
        ]
        found = read_back(path, num_parts)
        owner = "nodes" if isinstance(made.target, str) else "edges"
        masks = None
        if made.target is not None:
            fields = found[owner][made.target]
            masks = {split: fields[f"{split}_mask"] for split in SPLITS}
        wanted = expected(made, masks)
        for kind in ("nodes", "edges"):
            assert set(found[kind]) == set(wanted[kind])
            for name, fields in wanted[kind].items():
                compare(found[kind][name], fields, f"{name} in {num_parts} parts")
        report = json.loads(report_path(path).read_text(encoding="utf-8"))
        for kind, of_kind in wanted["counts"].items():
            for name, counts in of_kind.items():
                assert {key: report[kind][name][key] for key in counts} == counts, name
        if made.target is not None:
            task, classes = read_task(path), wanted[owner][made.target].get("classes")
            assert task.target == made.target
            if classes is not None:
                assert [c.casefold() for c in task.class_names] == [
                    str(c).casefold() for c in classes
                ]
        results.append(found)
    first, second = results
    for kind in ("nodes", "edges"):
        for name, fields in first[kind].items():
            for key, values in fields.items():
                if key not in ("ids", "pairs"):
                    np.testing.assert_array_equal(values, second[kind][name][key], err_msg=key)
