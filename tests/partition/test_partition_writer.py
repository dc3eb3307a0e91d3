# SPDX-License-Identifier: Apache-2.0
"""No partial file is ever taken for a whole one: crashes, damage, strange folders. No processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from partition_cases import plain, typed

from graphshard.errors import PartitionFormatError
from graphshard.graph import Graph, graph
from graphshard.partition import (
    _streamed,
    _writer,
    checked_files,
    format,
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
    partition_graph,
    verify_partition,
)
from graphshard.partition._writer import PartitionWriter
from graphshard.partition.checked_files import TensorFile, digest_of, write_tensors
from graphshard.partition.format import read_config


@pytest.fixture(autouse=True)
def _no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk would take most of the time, and shows nothing here."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class Killed(BaseException):
    """Stands for the end of the process."""


class NotKilled(Exception):
    """The action came to its end."""


def write(folder: Path, value: float, num_parts: int = 2, **arguments: Any) -> None:
    g = plain()
    g.ndata["x"] = torch.full((50,), value)
    partition_graph(g, "g", num_parts, folder, quiet=True, **arguments)


def value_of(folder: Path, thorough: bool = True) -> float:
    """The value of the partition in a folder, every part of which must be whole and of one run."""
    path = folder / "g.json"
    if thorough:
        assert verify_partition(path) == []
    num_parts = load_partition_book(path, 0)[0].num_partitions()
    values = {
        float(x)
        for part in range(num_parts)
        for x in load_partition(path, part)[1]["_N/x"].unique()
    }
    (value,) = values
    return value


GUARDED = (
    (os, "rename"),
    (os, "replace"),
    (os, "fsync"),
    (os, "mkdir"),
    (os, "rmdir"),
    (shutil, "rmtree"),
    (checked_files, "open"),
    (_writer, "open"),
)


@contextlib.contextmanager
def killed_at(operation: int) -> Iterator[None]:
    """The given operation on files, and all after it, never happen; the first raises `Killed`."""
    count = 0

    def guard(function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count >= operation:
                raise Killed
            return function(*args, **kwargs)

        return guarded

    with pytest.MonkeyPatch.context() as patch:
        for module, name in GUARDED:
            patch.setattr(module, name, guard(getattr(module, name, open)), raising=False)
        with contextlib.suppress(Killed):
            yield
            assert count < operation, "an operation was skipped, but nobody noticed"
            raise NotKilled


def every_crash(action: Callable[[], None]) -> Iterator[int]:
    """Run ``action``, killed at its first operation, then at its second, until it gets through."""
    for operation in range(1, 1000):
        try:
            with killed_at(operation):
                action()
        except NotKilled:
            return
        yield operation
    raise AssertionError("the action never ended")


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("num_parts", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_killed_replacement_leaves_the_old_partition_or_the_new(
    num_parts: int, tmp_path: Path
) -> None:
    found = set()
    start = tmp_path / "start"
    write(start, 1.0)
    folder = tmp_path / "out"
    shutil.copytree(start, folder)
    crashes = 0
    for crashes in every_crash(lambda: write(folder, 2.0, num_parts)):
        found.add(value_of(folder, thorough=crashes % 8 == 0))
        # The next run must cope with whatever is there.
        write(folder, 3.0)
        assert value_of(folder, thorough=crashes % 8 == 0) == 3.0
        assert hidden(folder) == []
        shutil.rmtree(folder)
        shutil.copytree(start, folder)
    assert crashes > 20
    assert found == {1.0, 2.0}
    assert value_of(folder) == 2.0
    assert hidden(folder) == []
    assert len(list(folder.iterdir())) == num_parts + 1


def test_crash_after_crash_never_loses_the_old_partition(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    for operation in every_crash(lambda: write(tmp_path, 2.0)):
        assert value_of(tmp_path, thorough=operation % 8 == 0) in (1.0, 2.0)
    assert value_of(tmp_path) == 2.0
    assert hidden(tmp_path) == []


def test_replacing_by_the_same_partition_survives_crashes_too(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    for operation in every_crash(lambda: write(tmp_path, 1.0)):
        assert value_of(tmp_path, thorough=operation % 8 == 0) == 1.0
    assert value_of(tmp_path) == 1.0
    assert hidden(tmp_path) == []


def test_a_killed_first_run_leaves_nothing_that_loads(tmp_path: Path) -> None:
    without = whole = 0
    for _ in every_crash(lambda: write(tmp_path, 1.0)):
        if (tmp_path / "g.json").exists():
            assert value_of(tmp_path) == 1.0
            whole += 1
            shutil.rmtree(tmp_path)
            tmp_path.mkdir()
            continue
        without += 1
        for load in (load_partition, load_partition_feats, load_partition_book):
            with pytest.raises(PartitionFormatError, match="does not exist"):
                load(tmp_path / "g.json", 0)
    assert without > 15
    assert whole < 5
    assert value_of(tmp_path) == 1.0
    assert hidden(tmp_path) == []


def test_an_error_while_writing_cleans_up(tmp_path: Path) -> None:
    write(tmp_path, 1.0)

    class Full(OSError):
        pass

    def full(*_: Any, **__: Any) -> None:
        raise Full("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_streamed, "write_tensors", full)
        with pytest.raises(Full):
            write(tmp_path, 2.0)
    assert value_of(tmp_path) == 1.0
    assert hidden(tmp_path) == []


def test_a_reader_that_started_before_a_replacement_goes_on(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    _, feats, *_ = load_partition(tmp_path / "g.json", 0)
    write(tmp_path, 2.0)
    assert float(feats["_N/x"].unique()) == 1.0


def test_fewer_parts_than_before(tmp_path: Path) -> None:
    write(tmp_path, 1.0, 5)
    write(tmp_path, 2.0, 2)
    assert value_of(tmp_path) == 2.0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["g.json", "part0", "part1"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    with (
        PartitionWriter(tmp_path, "g"),
        pytest.raises(RuntimeError, match="another process is partitioning into"),
    ):
        write(tmp_path, 1.0)
    write(tmp_path, 1.0)


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    write(tmp_path, 1.0)
    (tmp_path / "notes.json").write_text("[1, 2]")
    (tmp_path / "part1" / "thesis.tex").write_text("do not delete")
    with pytest.raises(ValueError, match=r"did not write \(such as thesis.tex\)"):
        write(tmp_path, 2.0)
    assert value_of(tmp_path) == 1.0
    (tmp_path / "part1" / "thesis.tex").unlink()
    (tmp_path / "g.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a partition that graphshard wrote"):
        write(tmp_path, 2.0)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a\\b"])
def test_names_must_name_a_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="graph_name must be usable as a file name"):
        partition_graph(plain(), name, 2, tmp_path, quiet=True)


@pytest.mark.parametrize("name", ["x" * 201, "\N{LATIN SMALL LETTER E WITH ACUTE}" * 101])
def test_a_name_that_is_too_long_is_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="graph_name must have at most 200 bytes"):
        partition_graph(plain(), name, 2, tmp_path / "parts", quiet=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["a graph [v1.2]*", "kg:1", "C:x", "a\nb", "x" * 200, "größe"])
@pytest.mark.parametrize("is_first", [True, False])
def test_a_name_with_odd_characters_is_fine(name: str, is_first: bool, tmp_path: Path) -> None:
    if not is_first:  # then its parts are called by its name, too
        partition_graph(plain(), "another", 2, tmp_path, quiet=True, part_method="random")
    for _ in range(2):
        partition_graph(plain(), name, 2, tmp_path, quiet=True, part_method="random")
    assert verify_partition(tmp_path / f"{name}.json") == []
    assert hidden(tmp_path) == []


# Damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    g = typed()
    g.nodes["paper"].data["x"] = torch.randn(45, 300)
    partition_graph(g, "g", 3, tmp_path, quiet=True)
    return tmp_path


FILES = ("graph", "node_feats", "edge_feats")


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_does_not_load(name: str, folder: Path) -> None:
    path = folder / f"part1/{name}.safetensors"
    for size in (path.stat().st_size - 1, path.stat().st_size // 2, 4, 0):
        os.truncate(path, size)
        with pytest.raises(PartitionFormatError, match="is damaged or incomplete"):
            load_partition(folder / "g.json", 1)
        (problem,) = verify_partition(folder / "g.json")
        assert problem.startswith(f"part 1: file {path} is damaged")
    load_partition(folder / "g.json", 0)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_does_not_load(name: str, folder: Path) -> None:
    (folder / f"part1/{name}.safetensors").unlink()
    with pytest.raises(PartitionFormatError, match=f"{name}.safetensors is missing"):
        load_partition(folder / "g.json", 1)
    (problem,) = verify_partition(folder / "g.json")
    assert "is missing" in problem


@pytest.mark.parametrize("name", FILES)
def test_the_file_of_another_part_does_not_load(name: str, folder: Path) -> None:
    shutil.copy(folder / f"part0/{name}.safetensors", folder / f"part1/{name}.safetensors")
    with pytest.raises(PartitionFormatError, match="is not the one that g.json describes"):
        load_partition(folder / "g.json", 1)


@pytest.mark.parametrize("name", FILES)
def test_one_flipped_bit_is_found(name: str, folder: Path) -> None:
    path = folder / f"part2/{name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 4
    path.write_bytes(data)
    problems = verify_partition(folder / "g.json")
    assert f"part 2: file {path} is damaged (its checksum differs)" in problems


def test_a_flipped_bit_in_the_header_is_found(folder: Path) -> None:
    path = folder / "part2/node_feats.safetensors"
    path.write_bytes(path.read_bytes().replace(b"venue/orig_id", b"venue/orig_ie"))
    assert any("checksum differs" in problem for problem in verify_partition(folder / "g.json"))


def test_a_tensor_file_that_another_program_wrote_does_not_load(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(PartitionFormatError, match="carries no blake2b digest"):
        TensorFile.open(tmp_path / "x.safetensors")


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "g.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.pop("num_parts"), "'num_parts' is missing"),
        (lambda c: c.pop("node_map"), "'node_map' is missing"),
        (lambda c: c.pop("graph_name"), "'graph_name' is missing"),
        (lambda c: c.update(node_map="map.npy"), "one number per node is not supported"),
        (lambda c: c.update(etypes={"cites": 0}), "not of the form 'source:relation:destination'"),
        (lambda c: c.update(num_nodes=3), "its maps hold 77 nodes, not 3"),
        (lambda c: c["node_map"].pop("venue"), "one entry per node type"),
        (lambda c: c["node_map"]["venue"].pop(), "for each of the 3 parts"),
        (lambda c: c["node_map"]["paper"].reverse(), "must tile the ids"),
        (lambda c: c["ntypes"].update(venue=5), "numbered from 0 without gaps"),
        (lambda c: c.update(format_version=99), "has format version 99, and this graphshard"),
        (lambda c: c.update(format="other"), "format 'other', expected 'graphshard-partition'"),
        (lambda c: c.pop("part-1"), "says nothing about the part_graph of part 1"),
        (lambda c: c["part-1"]["files"].clear(), "says nothing about the part_graph of part 1"),
        (lambda c: c.clear(), "is missing"),
    ],
)
def test_a_wrong_config_does_not_load(change: Any, message: str, folder: Path) -> None:
    edit(folder, change)
    with pytest.raises(PartitionFormatError, match=message):
        load_partition(folder / "g.json", 1)
    assert verify_partition(folder / "g.json")


def test_a_config_that_is_none(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.json").write_text((folder / "g.json").read_text()[:-40])
    for path, message in (
        (tmp_path / "broken.json", "is not JSON"),
        (tmp_path / "nowhere.json", "does not exist; pass .*g.json, which is there"),
        (tmp_path, "is a folder; pass .*g.json, which is there"),
    ):
        with pytest.raises(PartitionFormatError, match=message):
            load_partition_book(path, 0)
        (problem,) = verify_partition(path)
        assert message.split(";")[0] in problem


def test_partitions_that_are_in_the_folder_are_named(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "others"
    there.mkdir()
    (there / "g.dataset.json").write_text("{}")
    (there / "torn.json").write_text('{"num_parts"')
    (there / "list.json").write_text('["num_parts"]')
    with pytest.raises(PartitionFormatError, match="exist; pass the path of the JSON file that"):
        read_config(there / "edges.json")
    with pytest.raises(PartitionFormatError, match="is a folder; pass the path of the JSON file"):
        read_config(there)
    for number in range(7):
        (there / f"g{number}.json").write_text((folder / "g.json").read_text())
        cures = []
        for path in (there / "edges.json", there):
            with pytest.raises(PartitionFormatError) as error:
                read_config(path)
            cures.append(str(error.value).partition("; ")[2])
        assert cures[0] == cures[1]
        names = [f"{there}/g{n}.json" for n in range(number + 1)]
        if number > 4:
            names[4:] = [f"{number - 3} others"]
        if number == 0:
            assert cures[0] == f"pass {names[0]}, which is there"
        else:
            assert cures[0] == f"pass one of those that are there: {', '.join(names)}"


@pytest.mark.parametrize("part", [3, -1])
def test_a_part_that_is_none(part: int, folder: Path) -> None:
    for load in (load_partition, load_partition_feats, load_partition_book):
        with pytest.raises(ValueError, match=rf"part_id must be in \[0, 3\) \(got {part}\)"):
            load(folder / "g.json", part)


def test_an_edited_config_is_told(folder: Path) -> None:
    edit(folder, lambda content: content.update(halo_hops=7))
    (problem,) = verify_partition(folder / "g.json")
    assert "was changed after it was written" in problem


def test_wrong_statistics_are_told(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        content["stats"]["parts"][0]["cut_edges"] += 1
        content["build"] = format.build_of(content)

    edit(folder, change)
    (problem,) = verify_partition(folder / "g.json")
    assert "the statistics say that" in problem
    edit(folder, lambda content: content["stats"].pop("tolerance"))
    with pytest.raises(PartitionFormatError, match="statistics in .* are incomplete"):
        load_partition_stats(folder / "g.json")


def rewrite(
    folder: Path, part: int, kind: str, change: Callable[[dict[str, torch.Tensor]], object]
) -> None:
    """Change tensors of one file as a program with a bug would, digests and all."""
    content = json.loads((folder / "g.json").read_text())
    name = content[f"part-{part}"][kind]
    tensors = {key: value.clone() for key, value in TensorFile.open(folder / name).read().items()}
    change(tensors)
    (folder / name).unlink()
    record = write_tensors(folder / name, tensors)
    content[f"part-{part}"]["files"][name] = asdict(record)
    content["build"] = format.build_of(content)
    (folder / "g.json").write_text(json.dumps(content))
    assert digest_of(folder / name) == record.blake2b


def swap_first_two(key: str) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][:2] = tensors[key][:2].flip(0)

    return change


def assign(key: str, place: int, value: int) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[key][place] = value

    return change


def ids_in(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The ids that a file holds as differences."""
    steps = tensors[f"{name}/gaps"].long()
    steps[steps == 255] = tensors[f"{name}/wide"]
    return steps.cumsum(0)


def put(name: str, place: int, value: int) -> Callable[[dict[str, torch.Tensor]], object]:
    """Change one of the ids that a file holds as differences."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        ids = ids_in(tensors, name)
        ids[place] = value if value is not None else ids[place - 1]
        tensors[f"{name}/gaps"] = torch.full((len(ids),), 255, dtype=torch.uint8)
        tensors[f"{name}/wide"] = ids.diff(prepend=torch.zeros(1, dtype=torch.int64))

    return change


TWICE: Any = None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put("halo", -1, 10**6), r"an id of 'halo' is not in \[0, 77\)"),
        (put("outer", -1, -1), "an id of 'outer' is not in"),
        (put("halo", -1, 0), "a halo node belongs to the part"),
        (put("outer", -1, 0), "a halo edge belongs to the part"),
        (put("halo", -1, TWICE), "a foreign node is there twice"),
        (put("outer", -1, TWICE), "a foreign edge is there twice"),
        (lambda t: t.pop("halo/wide"), "'halo/wide' is missing"),
        (lambda t: t.update({"dst/wide": t["dst/wide"].repeat(2)}), "more than its gaps ask for"),
        (lambda t: t.update({"dst/wide": t["dst/wide"][:0]}), "fewer than its gaps ask for"),
        (lambda t: t.update({"src": t["src"][1:].clone()}), "sources of edges, and"),
        (
            lambda t: t.update({"dst/gaps": t["dst/gaps"][:-1].clone()}),
            "destinations of edges, and",
        ),
        (assign("src", 0, 10**6), "an edge ends outside the part"),
        (put("dst", 0, -1), "an id of 'dst' is not in"),
        (put("dst", 0, 0), "an edge is not owned by|not ordered by type|other types|joins other"),
        (put("dst", -1, 0), "an edge is not owned by|not ordered by type|other types|joins other"),
        (assign("src", -1, 0), "other types|joins other nodes"),
    ],
)
def test_a_wrong_structure_is_told(change: Any, message: str, folder: Path) -> None:
    rewrite(folder, 0, "part_graph", change)
    problems = verify_partition(folder / "g.json")
    assert any(re.search(message, problem) for problem in problems), problems


def test_wrong_features_are_told(folder: Path) -> None:
    rewrite(folder, 0, "node_feats", assign("paper/orig_id", 0, 0))
    (problem,) = verify_partition(folder / "g.json")
    assert problem == "the original ids of the nodes of type paper are not a permutation"
    rewrite(folder, 0, "node_feats", lambda tensors: tensors.pop("paper/orig_id"))
    (problem,) = verify_partition(folder / "g.json")
    assert problem.startswith(f"part 0: file {folder / 'part0/node_feats.safetensors'} must hold")
    assert "orig_id, one whole number for each of the nodes of type paper (got none)" in problem
    with pytest.raises(PartitionFormatError, match="must hold orig_id"):
        load_partition(folder / "g.json", 0)
    rewrite(folder, 0, "node_feats", lambda tensors: tensors.update({"paper/x": torch.ones(2)}))
    with pytest.raises(PartitionFormatError, match=r"'paper/x' in .* has shape \(2,\), but part 0"):
        load_partition(folder / "g.json", 0)
    rewrite(folder, 1, "edge_feats", lambda tensors: tensors.update({"a:b:c/x": torch.ones(2)}))
    with pytest.raises(PartitionFormatError, match="owns nothing of that type"):
        load_partition(folder / "g.json", 1)


def test_a_structure_without_its_columns_does_not_load(folder: Path) -> None:
    rewrite(folder, 0, "part_graph", lambda tensors: tensors.pop("src"))
    with pytest.raises(PartitionFormatError, match="is not the structure of a part"):
        load_partition(folder / "g.json", 0)


def test_edges_that_differ_from_their_owners_are_told(tmp_path: Path) -> None:
    """Two parallel edges into one node: an outer copy that names the other one's source."""
    g: Graph = graph(([0, 1, 2, 2], [2, 2, 0, 1]), num_nodes=3)
    partition_graph(g, "g", 2, tmp_path, part_method=[0, 0, 1], quiet=True)
    rewrite(
        tmp_path,
        0,
        "part_graph",
        lambda tensors: tensors["src"][-2:].copy_(tensors["src"][-2:].flip(0)),
    )
    (problem,) = verify_partition(tmp_path / "g.json")
    assert problem == "part 0: an outer edge joins other nodes than at its owner"


def test_files_are_plain_safetensors(folder: Path) -> None:
    from safetensors.torch import load_file

    theirs = load_file(folder / "part0/node_feats.safetensors")
    ours = load_partition(folder / "g.json", 0)[1]
    assert set(theirs) == set(ours)
    assert all(torch.equal(theirs[key], ours[key]) for key in ours)


def test_dtypes_that_files_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="'x' must have a dtype .*got torch.complex64"):
        write_tensors(tmp_path / "x", {"x": torch.zeros(1, dtype=torch.complex64)})


def test_several_graphs_share_a_folder(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        write(tmp_path, value)
        partition_graph(plain(), "other", 3, tmp_path, quiet=True)
        partition_graph(plain(), "third", 1, tmp_path, quiet=True, overwrite=False)
        assert value_of(tmp_path) == value
        for name, num_parts in (("g", 2), ("other", 3), ("third", 1)):
            verify_partition(tmp_path / f"{name}.json")
            assert (
                load_partition_book(tmp_path / f"{name}.json", 0)[0].num_partitions() == num_parts
            )
        with pytest.raises(ValueError, match="third.json exists; choose another graph_name"):
            partition_graph(plain(), "third", 2, tmp_path, quiet=True, overwrite=False)
        (tmp_path / "third.json").unlink()
    partition_graph(plain(), "other", 2, tmp_path, quiet=True)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["other-part0", "other-part1", "part0", "part1", "third-part0"]
