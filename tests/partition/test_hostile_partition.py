# SPDX-License-Identifier: Apache-2.0
"""Partitions written to do harm: their JSON, paths and pipes are told of at once. No process."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from partition_cases import contents, plain, typed

from graphshard.data.task import task_path
from graphshard.errors import PartitionFormatError
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.partition import (
    load_partition,
    load_partition_book,
    load_partition_feats,
    load_partition_stats,
    partition_graph,
    verify_partition,
)
from graphshard.partition.format import build_of, read_config
from graphshard.train import TaskInfo, write_task
from graphshard.train.commands import run

pytestmark = pytest.mark.usefixtures("no_syncing")


def at_once(function: Callable[[], Any]) -> BaseException | None:
    """What a call raises; it must come back, and not wait for anybody."""
    found: list[BaseException | None] = []

    def work() -> None:
        try:
            function()
            found.append(None)
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "the call does not come back"
    return found[0]


def edit(folder: Path, change: Callable[[dict[str, Any]], object], sign: bool = True) -> None:
    """Change the JSON, and its digest to agree with it."""
    path = folder / "g.json"
    content = json.loads(path.read_text())
    change(content)
    if sign and "build" in content:
        content["build"] = build_of(content)
    path.write_text(json.dumps(content))


# The JSON

DEEP = 200_000

TEXTS = {
    "empty": (b"", "is not JSON"),
    "only spaces": (b"  \n", "is not JSON"),
    "not UTF-8": (b'{"graph_name": "\xff"}', "is not JSON .*can't decode"),
    "byte order mark": (b"\xef\xbb\xbf{}", "is not JSON .*BOM"),
    "UTF-16": ('{"graph_name": "g"}'.encode("utf-16"), "is not JSON"),
    "a list": (b"[1, 2]", "the JSON must be an object"),
    "a number": (b"3", "the JSON must be an object"),
    "null": (b"null", "the JSON must be an object"),
    "deep lists": (b"[" * DEEP, "is not JSON .*nests too deeply"),
    "deep objects": (b'{"a":' * DEEP + b"0" + b"}" * DEEP, "is not JSON .*nests too deeply"),
    "a key twice": (b'{"num_parts": 1, "num_parts": 2}', "is not JSON .*'num_parts' twice"),
    "no number": (b'{"num_parts": NaN}', "is not JSON .*NaN is not a number"),
    "past floats": (b'{"num_parts": 1e999}', "is not JSON .*out of range"),
    "many digits": (b'{"num_parts": ' + b"1" * 9999 + b"}", "is not JSON"),
}

CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "billions of parts": (lambda c: c.update(num_parts=3_000_000_000), "of the 3000000000 parts"),
    "no parts": (lambda c: c.update(num_parts=0), "num_parts must be a whole number from 1 up"),
    "negative parts": (lambda c: c.update(num_parts=-3), r"from 1 up \(got -3\)"),
    "true parts": (lambda c: c.update(num_parts=True), r"from 1 up \(got True\)"),
    "half parts": (lambda c: c.update(num_parts=3.0), r"from 1 up \(got 3.0\)"),
    "parts in a text": (lambda c: c.update(num_parts="3"), r"from 1 up \(got '3'\)"),
    "parts in a list": (lambda c: c.update(num_parts=[3]), "num_parts must be a whole number"),
    "fewer parts": (lambda c: c.update(num_parts=2), "for each of the 2 parts"),
    "parts of 4000 bits": (lambda c: c.update(num_parts=2**4000), "a number of 4001 bits"),
    "name": (lambda c: c.update(graph_name=None), "graph_name must be a text"),
    "empty name": (lambda c: c.update(graph_name=""), "graph_name must be a text"),
    "types in a list": (lambda c: c.update(ntypes=["paper"]), "ntypes must be an object"),
    "no types": (lambda c: c.update(ntypes={}), "ntypes must name at least one"),
    "null types": (lambda c: c["ntypes"].update(venue=None), r"ntypes\['venue'\] must be a whole"),
    "huge type": (lambda c: c["ntypes"].update(venue=10**30), r"ntypes\['venue'\] must be a whole"),
    "types twice": (lambda c: c["ntypes"].update(venue=1), "numbered from 0 without gaps"),
    "unknown end": (lambda c: c["etypes"].update({"x:y:paper": 6}), "name the node type 'x'"),
    "text map": (lambda c: c["node_map"].update(venue="x"), r"node_map\['venue'\] must be a list"),
    "number map": (lambda c: c.update(node_map=7), "node_map must be an object"),
    "null map": (lambda c: c.update(edge_map=None), "edge_map must be an object"),
    "short row": (lambda c: c["node_map"]["venue"][0].pop(), r"must be \[start, stop\]"),
    "deep row": (lambda c: c["node_map"]["venue"].__setitem__(0, [[0], [1]]), "a whole number"),
    "half row": (lambda c: c["node_map"]["venue"].__setitem__(0, [0.5, 1]), "a whole number"),
    "negative row": (lambda c: c["node_map"]["venue"].__setitem__(0, [-1, 1]), "a whole number"),
    "huge row": (lambda c: c["node_map"]["venue"][-1].__setitem__(1, 2**63), "a whole number"),
    "long map": (lambda c: c["node_map"]["venue"].append([9, 9]), "for each of the 3 parts"),
    "num_nodes": (lambda c: c.update(num_nodes=2**70), "num_nodes must be a whole number"),
    "true num_edges": (lambda c: c.update(num_edges=True), "num_edges must be a whole number"),
    "no num_edges": (lambda c: c.pop("num_edges"), "'num_edges' is missing"),
    "hops": (lambda c: c.update(halo_hops="1"), "halo_hops must be a whole number"),
    "no hops": (lambda c: c.pop("halo_hops"), "'halo_hops' is missing"),
    "no build": (lambda c: c.pop("build"), "'build' is missing"),
    "part in a list": (lambda c: c.update({"part-0": []}), "part-0 must be an object"),
    "files in a list": (lambda c: c["part-0"].update(files=[]), "files must be an object"),
    "another part": (lambda c: c.update({"part-3": {}}), "there is 'part-3', but there are 3"),
    "no size": (lambda c: first_record(c).pop("bytes"), "'bytes' is missing"),
    "negative size": (lambda c: first_record(c).update(bytes=-1), "bytes must be a whole number"),
    "size in a list": (lambda c: first_record(c).update(bytes=[1]), "bytes must be a whole"),
    "digest": (lambda c: first_record(c).update(blake2b=None), "blake2b must be 32 hexa"),
    "statistics": (lambda c: c.update(stats=[]), "statistics in .*stats must be an object"),
    "no statistics": (lambda c: c.pop("stats"), "statistics in .*'stats' is missing"),
    "tolerance": (lambda c: c["stats"].update(tolerance="x"), "tolerance must be a number"),
    "few sizes": (lambda c: c["stats"]["parts"].pop(), "statistics in .*incomplete"),
    "a size": (lambda c: c["stats"]["parts"][0].update(bytes=None), "bytes must be a whole number"),
    "another size": (lambda c: c["stats"]["parts"][0].update(x=1), "has the unknown key 'x'"),
    "loads": (lambda c: c["stats"]["balances"][0].update(loads=[]), "loads must hold a number"),
    "text loads": (lambda c: c["stats"]["balances"][0].update(loads="ab"), "loads must be a list"),
}


def first_record(content: dict[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = content["part-0"]["files"][content["part-0"]["part_graph"]]
    return record


def refused(path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every way in must refuse a JSON in the same words, and the command line in one line."""
    for load in (
        lambda: load_partition(path, 0),
        lambda: load_partition_feats(path, 0),
        lambda: load_partition_book(path, 0),
        lambda: load_partition_stats(path),
        lambda: load_dgl_partition_data(path, 0),
    ):
        error = at_once(load)
        assert isinstance(error, PartitionFormatError), repr(error)
        assert re.search(message, str(error), re.DOTALL)
        assert str(path) in str(error)
    (problem,) = verify_partition(path)
    assert re.search(message, problem, re.DOTALL)
    capsys.readouterr()
    for command in ("inspect", "verify", "train --data"):
        assert run([*command.split(), str(path)]) in (1, 2)
        printed = capsys.readouterr()
        lines = (printed.err or printed.out).splitlines()
        assert re.search(message, lines[0])
        assert len(lines) <= 2, "the problem, and the number of problems"


@pytest.mark.parametrize("name", list(TEXTS))
def test_a_file_that_is_no_json_object_is_told(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, message = TEXTS[name]
    (folder / "g.json").write_bytes(text)
    refused(folder / "g.json", message, capsys)


@pytest.mark.parametrize("name", list(CHANGES))
def test_values_of_another_form_are_told(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, message = CHANGES[name]
    edit(folder, change)
    refused(folder / "g.json", message, capsys)


def test_a_value_that_was_changed_alone_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(folder, lambda c: c.update(part_method="metic"), sign=False)
    refused(folder / "g.json", "was changed after it was written", capsys)


def test_ids_that_no_file_holds_take_no_memory(folder: Path) -> None:
    """Maps that agree with each other, of 2 ** 60 nodes in a part that another rank has."""

    def change(content: dict[str, Any]) -> None:
        last = max(content["node_map"], key=lambda name: content["node_map"][name][-1][1])
        content["node_map"][last][-1][1] += 2**60
        content["num_nodes"] += 2**60

    edit(folder, change)
    assert load_partition_book(folder / "g.json", 0)[0].num_nodes() == 2**60 + 77
    data = load_dgl_partition_data(folder / "g.json", 0)
    assert sum(data.node_map(ntype).num_ids for ntype in data.node_type_names) == 2**60 + 77
    with pytest.raises(PartitionFormatError, match="but part 2 owns 115292"):
        load_partition(folder / "g.json", 2)
    assert any(
        "but part 2 owns 115292" in problem for problem in verify_partition(folder / "g.json")
    )


def test_files_of_ours_are_not_taken_for_those_of_dgl(folder: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for key in ("format", "format_version", "build", "stats"):
            content.pop(key)

    edit(folder, change)
    assert read_config(folder / "g.json").layout == "dgl"
    assert load_partition_book(folder / "g.json", 1)[0].num_nodes() == 77
    with pytest.raises(PartitionFormatError, match="a file of graphs begins with"):
        load_partition(folder / "g.json", 1)


# What is no regular file


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["g.json", "g.dataset.json"])
def test_a_pipe_in_place_of_a_json_does_not_block(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(folder / "g.json", TaskInfo(name="g"))
    pipe(folder / name)
    for command in ("inspect", "verify"):
        assert at_once(partial(run, [command, str(folder / "g.json")])) is None
        printed = capsys.readouterr()
        assert "a named pipe, not a regular file" in printed.err + printed.out
        assert "Traceback" not in printed.err


@pytest.mark.parametrize("name", ["graph", "node_feats", "edge_feats"])
def test_a_pipe_in_place_of_a_part_does_not_block(name: str, folder: Path) -> None:
    path = folder / f"part1/{name}.safetensors"
    pipe(path)
    for load in (load_partition, load_dgl_partition_data):
        error = at_once(partial(load, folder / "g.json", 1))
        assert isinstance(error, PartitionFormatError)
        assert f"file {path} cannot be read (a named pipe, not a regular file)" in str(error)
    assert at_once(lambda: verify_partition(folder / "g.json")) is None


def test_pipes_do_not_block_who_partitions_again(folder: Path) -> None:
    (folder / "g.json").unlink()
    os.mkfifo(folder / "g.json")
    os.mkfifo(folder / "other.json")
    error = at_once(lambda: partition_graph(typed(), "g", 3, folder, quiet=True))
    assert isinstance(error, ValueError)
    assert "exists and is not a partition that graphshard wrote" in str(error)
    (folder / "g.json").unlink()
    assert at_once(lambda: partition_graph(typed(), "g", 3, folder, quiet=True)) is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read_are_told(folder: Path) -> None:
    (folder / "part1/graph.safetensors").chmod(0)
    with pytest.raises(PartitionFormatError, match="cannot be read"):
        load_partition(folder / "g.json", 1)
    (folder / "g.json").chmod(0)
    with pytest.raises(PartitionFormatError, match="cannot be read"):
        load_partition_book(folder / "g.json", 1)


def test_a_folder_in_place_of_a_part_is_told(folder: Path) -> None:
    path = folder / "part1/graph.safetensors"
    path.unlink()
    path.mkdir()
    with pytest.raises(PartitionFormatError, match="cannot be read .Is a directory"):
        load_partition(folder / "g.json", 1)


# Paths that lead out of the folder


def rename_graph(name: str) -> Callable[[dict[str, Any]], None]:
    """Say that the structure of part 0 is elsewhere."""

    def change(content: dict[str, Any]) -> None:
        files = content["part-0"]["files"]
        files[name] = files.pop(content["part-0"]["part_graph"])
        content["part-0"]["part_graph"] = name

    return change


@pytest.mark.parametrize(
    "name", ["../secret", "part0/../../secret", "/etc/passwd", "", ".", "a\0b", "c:/x", "a\\..\\b"]
)
def test_a_part_may_not_be_outside_the_folder(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "part0/graph.safetensors", folder.parent / "secret")
    edit(folder, rename_graph(name))
    refused(folder / "g.json", "a path must (stay inside|be a text)", capsys)


def test_a_link_out_of_the_folder_is_refused_and_one_inside_is_not(folder: Path) -> None:
    path = folder / "part0/graph.safetensors"
    shutil.move(path, folder.parent / "elsewhere")
    path.symlink_to(folder.parent / "elsewhere")
    with pytest.raises(PartitionFormatError, match="must lie inside the partition's folder"):
        load_partition(folder / "g.json", 0)
    assert any("must lie inside" in problem for problem in verify_partition(folder / "g.json"))
    path.unlink()
    shutil.move(folder.parent / "elsewhere", folder / "store")
    path.symlink_to("../store")
    assert verify_partition(folder / "g.json") == []
    link = folder.parent / "link"
    link.symlink_to(folder)
    assert verify_partition(link / "g.json") == []


@pytest.fixture
def docs(folder: Path) -> Path:
    """A folder beside the partition that nobody may touch, with what looks like parts in it."""
    made = folder.parent / "docs"
    for name in ("part0/thesis.tex", "part7/graph.safetensors", "notes.txt"):
        (made / name).parent.mkdir(parents=True, exist_ok=True)
        (made / name).write_text("do not delete")
    return made


@pytest.mark.parametrize(
    "build", ["x/../../docs", "../docs", "/docs", "", "..", "0" * 15, "G" * 16, 7, None, ["x"]]
)
def test_a_build_is_16_digits_and_never_a_path(build: Any, folder: Path, docs: Path) -> None:
    """The finding: the next writer moved a sibling folder into the partition and deleted it."""
    (folder / ".g-x").mkdir()
    edit(folder, lambda content: content.update(build=build), sign=False)
    before = contents(docs)
    with pytest.raises(PartitionFormatError, match="build must be 16 hexadecimal digits"):
        load_partition(folder / "g.json", 0)
    with pytest.raises(ValueError, match="is not a partition that graphshard wrote"):
        partition_graph(typed(), "g", 3, folder, quiet=True)
    assert contents(docs) == before
    assert (folder / "part0/graph.safetensors").exists()


def test_the_folder_for_old_parts_may_not_be_a_link_or_hold_anything_else(
    folder: Path, docs: Path
) -> None:
    aside = folder / f".g-{read_config(folder / 'g.json').build}"
    before, parts = contents(docs), contents(folder)
    aside.symlink_to(docs)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"holds files that graphshard did not write|a link"):
            partition_graph(plain(), "g", 3, folder, quiet=True)
        assert contents(docs) == before
        if aside.is_symlink():
            aside.unlink()
            (aside / "docs").mkdir(parents=True)
            (aside / "docs" / "notes.txt").write_text("do not delete")
            (folder / "docs").mkdir()
            (folder / "docs" / "notes.txt").write_text("neither")
    assert (aside / "docs" / "notes.txt").exists()
    assert (folder / "docs" / "notes.txt").read_text() == "neither"
    shutil.rmtree(folder / "docs")
    shutil.rmtree(aside)
    assert contents(folder) == parts


def test_hidden_folders_of_others_are_left_alone(folder: Path) -> None:
    """A writer used to delete every hidden folder whose name began with that of its graph."""
    for name in (".g-notes", ".g-staging-", ".g-2-staging-abc", ".g-0123456789abcdeX"):
        (folder / name).mkdir()
        (folder / name / "thesis.tex").write_text("do not delete")
    partition_graph(plain(), "g", 3, folder, quiet=True)
    for name in (".g-notes", ".g-staging-", ".g-2-staging-abc", ".g-0123456789abcdeX"):
        assert (folder / name / "thesis.tex").exists(), name
    (folder / ".g-staging-abc").mkdir()
    (folder / ".g-staging-abc" / "thesis.tex").write_text("do not delete")
    with pytest.raises(ValueError, match=r"did not write \(such as thesis.tex\)"):
        partition_graph(plain(), "g", 3, folder, quiet=True)
    assert (folder / ".g-staging-abc" / "thesis.tex").exists()


def test_a_damaged_partition_of_another_graph_is_left_alone(folder: Path) -> None:
    edit(folder, lambda content: content.update(halo_hops=[]))
    before = contents(folder)
    partition_graph(plain(), "other", 3, folder, quiet=True)
    assert before.items() <= contents(folder).items()


def test_a_file_in_place_of_a_part_folder_is_told(tmp_path: Path) -> None:
    (tmp_path / "part0").write_text("do not delete")
    with pytest.raises(ValueError, match="part0 is not a folder that graphshard wrote"):
        partition_graph(plain(), "g", 3, tmp_path, quiet=True)
    assert (tmp_path / "part0").read_text() == "do not delete"


def test_a_tolerance_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tolerance must be at least 1: .*\(got inf\)"):
        partition_graph(plain(), "g", 2, tmp_path, tolerance=float("inf"), quiet=True)


# The description of the task

TASKS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "classes": (lambda c: c.update(num_classes=99), "its digest differs"),
    "build": (lambda c: c.update(build="0" * 16), "its digest differs"),
    "no digest": (lambda c: c.pop("digest"), "'digest' is missing"),
    "version": (lambda c: c.update(format_version=1), "format 'graphshard-dataset' 1"),
    "names": (lambda c: c.update(class_names=7), "its digest differs"),
}


@pytest.mark.parametrize("name", list(TASKS))
def test_verify_looks_at_the_description_of_the_task(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_task(folder / "g.json", TaskInfo(name="g", target="paper", num_classes=4))
    path = task_path(folder / "g.json")
    assert run(["verify", str(folder)]) == 0
    change, message = TASKS[name]
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert run(["verify", str(folder)]) == 1
    printed = capsys.readouterr().out
    assert re.search(message, printed)
    assert f"{path} does not describe a task" in printed


@pytest.mark.parametrize("text", ["", "[" * DEEP, '{"a": NaN}', '{"a": 1, "a": 2}', "3", "null"])
def test_a_task_that_is_no_json_object_is_told(
    text: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task_path(folder / "g.json").write_text(text)
    for command, code in (("verify", 1), ("inspect", 2)):
        capsys.readouterr()
        assert run([command, str(folder / "g.json")]) == code
        printed = capsys.readouterr()
        assert "does not describe a task" in printed.out + printed.err
