# SPDX-License-Identifier: Apache-2.0
"""DGL's graph and tensor files against DGL itself, and what is said of damaged ones. No process.

`dgl_corpus` holds files that DGL 1.1.3 wrote, from which mutations are made, and files that were
once read wrongly. Add a file there when one is found that is.
"""

from __future__ import annotations

import contextlib
import os
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from dgl_file_cases import EDGES, content, damaged, same, tensors

import graphshard
from graphshard.dgl.data import utils
from graphshard.graph.dgl_files import StoredTensor

CORPUS = Path(__file__).resolve().parent / "dgl_corpus"
FORMATS = (None, "coo", "csr", "csc", ["coo", "csr", "csc"])


@pytest.fixture(scope="module")
def dgl() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("dgl", reason="DGL is the oracle, and has no release here")


def made(library: Any, name: str, idtype: torch.dtype) -> Any:
    torch.manual_seed(3)
    edges, counts = EDGES[name]()
    if name in ("plain", "empty", "edgeless"):
        (ends,) = edges.values()
        graph = library.graph(ends, num_nodes=counts["_N"], idtype=idtype)
    else:
        graph = library.heterograph(edges, counts, idtype=idtype)
    for ntype in graph.ntypes:
        graph.nodes[ntype].data.update(tensors(graph.num_nodes(ntype)))
    for etype in graph.canonical_etypes:
        graph.edges[etype].data.update(tensors(graph.num_edges(etype)))
    return graph


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("idtype", [torch.int64, torch.int32], ids=str)
def test_graphs_are_read_and_written_as_dgl_does(
    formats: Any, idtype: torch.dtype, dgl: Any, tmp_path: Path
) -> None:
    theirs = [made(dgl, name, idtype) for name in EDGES]
    ours = [made(graphshard, name, idtype) for name in EDGES]
    labels = tensors(3)
    for writer, reader, graphs in ((dgl, graphshard, theirs), (graphshard, dgl, ours)):
        path = str(tmp_path / f"{writer.__name__}.bin")
        writer.save_graphs(path, graphs, labels, formats)
        found, found_labels = reader.load_graphs(path)
        assert same(labels, found_labels)
        for one, two in zip(graphs, found, strict=True):
            assert (one.ntypes, one.canonical_etypes) == (two.ntypes, two.canonical_etypes)
            assert same(content(one), content(two))
        some, _ = reader.load_graphs(path, [4, 0])
        assert same(content(graphs[4]), content(some[0]))
        assert same(content(graphs[0]), content(some[1]))
        assert same(labels, utils.load_labels(path))
    for one, two in zip(ours, graphshard.load_graphs(tmp_path / "graphshard.bin")[0], strict=True):
        assert same(content(one), content(two))


def test_tensors_are_read_and_written_as_dgl_does(dgl: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "rows.dgl")
    for some in (tensors(5), tensors(0), {}, {"_N/x": torch.ones(3)}):
        dgl.data.utils.save_tensors(path, some)
        assert same(some, utils.load_tensors(path))
        assert utils.save_tensors(path, some)
        assert same(some, dgl.data.utils.load_tensors(path))
    dgl.data.utils.save_tensors(path, {"one": torch.tensor(3.5)})  # DGL reads back another
    assert same({"one": torch.tensor(3.5)}, utils.load_tensors(path))


def test_types_may_have_names_that_partitions_cannot_have(dgl: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "g.bin")
    dgl.save_graphs(path, dgl.heterograph({("a:b", "http://x#y/z", "c~d"): ([0, 1], [1, 0])}))
    (graph,), _ = graphshard.load_graphs(path)
    assert graph.canonical_etypes == [("a:b", "http://x#y/z", "c~d")]
    graphshard.save_graphs(path, graph)
    (again,), _ = dgl.load_graphs(path)
    assert same(content(graph), content(again))


def test_a_file_that_is_written_anew_is_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "graph.bin"
    graph = graphshard.graph(([0], [1]))
    graphshard.save_graphs(path, graph)
    before = path.read_bytes()
    graph.ndata["z"] = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(TypeError, match="cannot hold torch.complex64"):
        graphshard.save_graphs(path, graph)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["graph.bin"]
    with pytest.raises(ValueError, match="it is a folder"):
        graphshard.save_graphs(path.parent, graphshard.graph(([], [])))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda p: graphshard.save_graphs(p, "g"), TypeError, "g_list must be a Graph or a list"),
        (lambda p: graphshard.save_graphs(p, [], formats="ell"), ValueError, "formats must be"),
        (lambda p: graphshard.save_graphs(p, [], [torch.ones(1)]), TypeError, "labels must be a"),
        (lambda p: utils.save_tensors(p, {1: torch.ones(1)}), TypeError, "must be texts"),
        (lambda p: utils.save_tensors(p, {"a": [1]}), TypeError, "must be a dense tensor"),
        (lambda p: utils.load_tensors(p, True), NotImplementedError, "needs DGL"),
        (lambda p: graphshard.load_graphs(p), FileNotFoundError, "No such file"),
        (lambda p: graphshard.load_graphs(p.parent), ValueError, "must be a regular file"),
    ],
)
def test_wrong_arguments(call: Any, error: type[Exception], words: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=words):
        call(tmp_path / "none.bin")


def test_there_is_no_such_graph(tmp_path: Path) -> None:
    graphshard.save_graphs(tmp_path / "g.bin", [graphshard.graph(([0], [1]))])
    with pytest.raises(IndexError, match=r"in \[0, 1\) \(got 1\)"):
        graphshard.load_graphs(tmp_path / "g.bin", [1])


def head(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


ONE = head(0xDD5A9FBE3FA2443F, 1, 1, 1) + b"x" + head(0xDD5E40F096B4A13F, 0)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "8 bytes are expected and 0 are left"),
        (head(1, 0, 0), "a file of tensors begins with"),
        (head(0xDD5A9FBE3FA2443F, 2**63, 2**63), "tensors do not fit into the 0 bytes left"),
        (head(0xDD5A9FBE3FA2443F, 1, 0), "it says 1 tensors and then 0"),
        (head(0xDD5A9FBE3FA2443F, 0, 0, 0), "8 bytes follow its tensors"),
        (head(0xDD5A9FBE3FA2443F, 1, 1, 2**62) + bytes(64), "bytes are expected and 64 are left"),
        (ONE + struct.pack("<iiiBBHqq", 1, 0, 1, 2, 32, 1, 2**40, 2**42), "has 4398046511104 by"),
        (ONE + struct.pack("<iiiBBHqq", 1, 0, 1, 2, 32, 1, 2**40, 4), "has 4 bytes"),
        (ONE + struct.pack("<iiiBBHqq", 1, 0, 1, 2, 32, 1, -1, -4), "-1 is no number of rows"),
        (ONE + struct.pack("<iiiBBHqqq", 1, 0, 2, 2, 32, 1, 2**62, 0, 0), None),
        (ONE + struct.pack("<iiiBBHqqqq", 1, 0, 3, 2, 32, 1, 2**62, 0, 2**62, 0), "has 0 bytes"),
        (ONE + struct.pack("<iiiBBHqq", 1, 0, 1, 9, 32, 1, 1, 4), "unknown kind 9 with 32 bits"),
        (ONE + struct.pack("<iiiBBHqq", 2, 0, 1, 2, 32, 1, 1, 4), "of device 2:0"),
        (ONE + struct.pack("<iiiBBHqq", 1, 0, 2**31 - 1, 2, 32, 1, 1, 4), "2147483647 dimensions"),
    ],
)
def test_lengths_that_a_file_cannot_mean(data: bytes, words: str | None, tmp_path: Path) -> None:
    path = tmp_path / "rows.dgl"
    path.write_bytes(data)
    if words is None:
        assert utils.load_tensors(path)["x"].shape == (2**62, 0)
        return
    with pytest.raises(ValueError, match=words) as caught:
        utils.load_tensors(path)
    assert str(path) in str(caught.value)
    assert "write it again" in str(caught.value)


def test_ids_that_are_out_of_range(tmp_path: Path) -> None:
    """Lengths agree, so that what is found is found by looking at the edges."""
    path = tmp_path / "g.bin"
    for formats, words in (("coo", "must be in"), ("csr", ""), ("csc", "")):
        graphshard.save_graphs(path, graphshard.graph(([5, 6], [6, 5])), formats=formats)
        data = path.read_bytes()
        path.write_bytes(data.replace(struct.pack("<qq", 6, 5), struct.pack("<qq", 6, 7)))
        with pytest.raises(ValueError, match=f"its edges are none: .*{words}"):
            graphshard.load_graphs(path)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of the tensors that were made for what is in a file."""
    made_of: list[int] = []
    original = StoredTensor.read

    def read(stored: StoredTensor) -> torch.Tensor:
        found = original(stored)
        made_of.append(found.nbytes)
        return found

    monkeypatch.setattr(StoredTensor, "read", read)
    return made_of


def use(path: Path) -> None:
    """Read a file and look at each edge; a ValueError is the only error that is right."""
    if path.suffix == ".dgl":
        utils.load_tensors(path)
        return
    graphs, _ = graphshard.load_graphs(path)
    for graph in graphs:
        for etype in graph.canonical_etypes:
            if max(map(graph.num_nodes, graph.ntypes)) < 2**20:  # a count may be any number
                graph.adjacency(etype).csc()
                graph.adjacency(etype).csr()


def test_files_that_were_kept_are_read_or_refused(allocated: list[int]) -> None:
    """Those that DGL wrote are read."""
    kept = sorted(CORPUS.iterdir())
    assert {path.suffix for path in kept} == {".bin", ".dgl"}
    for path in kept:
        with contextlib.nullcontext() if "dgl-1.1.3" in path.name else pytest.raises(ValueError):
            use(path)
        assert sum(allocated) <= path.stat().st_size
        allocated.clear()


@pytest.mark.timeout(3600)
def test_damaged_files_are_read_or_refused(
    allocated: list[int], run_all: bool, tmp_path: Path
) -> None:
    """Nothing but a ValueError, and never more memory than the file has bytes."""
    refused = 0
    kept = [path for path in sorted(CORPUS.iterdir()) if "dgl-1.1.3" in path.name]
    for path in kept:
        original = path.read_bytes()
        for number in range(40_000 if run_all else 200):
            changed = tmp_path / f"damaged{path.suffix}"
            changed.write_bytes(damaged(original, number))
            try:
                use(changed)
            except ValueError as error:
                assert str(changed) in str(error), f"mutation {number} of {path.name}"
                refused += 1
            assert sum(allocated) <= changed.stat().st_size, f"mutation {number} of {path.name}"
            allocated.clear()
    assert refused
