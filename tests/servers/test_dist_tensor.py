# SPDX-License-Identifier: Apache-2.0
"""DistTensor against one array: in one process, and on servers with several trainers."""

from __future__ import annotations

import gc
import mmap
import os
import random
import resource
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from clusters import NUM_ROWS, POLICY, alone, join, leave, served
from torch import Tensor

from graphshard._base.files import shared_memory_folder
from graphshard.comm import barrier
from graphshard.errors import RankError
from graphshard.servers import DistTensor, Job, TableInfo, WireMessage, _host_tables
from graphshard.servers._host_tables import HostTables, attached
from graphshard.testing import run_ranks
from large_pages import LARGE_PAGE, bytes_in_large_pages, can_move_shared_memory


@pytest.fixture(params=["alone", "one host", "three hosts", "three hosts, no shared memory"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    if request.param == "alone":
        yield alone()
    else:
        with served(1 if request.param == "one host" else 3) as addresses:
            yield join(addresses, 0, attach="no shared" not in request.param)
            leave()
    leave()


def filled(name: str, dtype: torch.dtype, *row: int) -> tuple[DistTensor, Tensor]:
    """A tensor, and an array that is equal to it."""
    array = (torch.randn(NUM_ROWS, *row) * 9).to(dtype)
    tensor = DistTensor((NUM_ROWS, *row), dtype, name)
    tensor[:] = array
    return tensor, array


INDICES: list[Any] = [
    0,
    NUM_ROWS - 1,
    -1,
    np.int64(1500),
    torch.tensor(7),
    slice(None),
    slice(1490, 1510),
    slice(None, None, -700),
    slice(3, 3),
    slice(5, 2),
    slice(2, 10, -1),
    [],
    [4999, 0, 0, 1500, -2],
    (1, 2),
    np.array([1499, 1500, 3999, 4000]),
    torch.tensor([4000, 3999, 3999], dtype=torch.int32),
    torch.arange(NUM_ROWS) % 7 == 0,
    np.arange(NUM_ROWS) < 0,
]


@pytest.mark.parametrize("index", INDICES, ids=lambda i: repr(i)[:30].replace("\n", ""))
@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, (3, 2)), (torch.bool, ())])
def test_rows_are_read_as_of_an_array(job: Job, index: Any, dtype: Any, row: Any) -> None:
    tensor, array = filled("x", dtype, *row)
    plain = list(index) if isinstance(index, tuple) else index
    if isinstance(plain, slice) and plain.step is not None:
        plain = list(range(NUM_ROWS)[plain])
    expected = array[plain if not isinstance(plain, list) else torch.tensor(plain).long()]
    if expected.dim() == len(row):  # as in DGL, an int gives one row of a matrix
        expected = expected.unsqueeze(0)
    assert torch.equal(tensor[index], expected)
    assert torch.equal(tensor.read_async(index).wait()[0], expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int16, torch.uint8])
def test_rows_are_written_as_of_an_array(job: Job, dtype: torch.dtype) -> None:
    tensor, array = filled("x", dtype, 2)
    chosen = random.Random(0)
    for _ in range(20):
        ids = torch.tensor(chosen.choices(range(NUM_ROWS), k=chosen.randrange(60))).long()
        rows = (torch.randn(len(ids), 2) * 9).to(dtype)
        tensor[ids] = rows
        for place, number in enumerate(ids.tolist()):  # the last one counts
            array[number] = rows[place]
    tensor[3] = array[3] = torch.tensor([1, 2]).to(dtype)
    assert torch.equal(tensor[:], array)
    assert tensor.count_nonzero() == int(array.count_nonzero())
    assert (tensor.shape, tensor.dtype, len(tensor)) == ((NUM_ROWS, 2), dtype, NUM_ROWS)


@pytest.mark.parametrize(
    ("index", "error", "text"),
    [
        (NUM_ROWS, IndexError, r"must be in \[0, 5000\) \(got 5000\)"),
        (-NUM_ROWS - 1, IndexError, r"\(got -5001\)"),
        ([0, 7000], IndexError, "got 7000"),
        (torch.ones(3, dtype=torch.bool), IndexError, "5000 entries"),
        ([0.5], TypeError, "got list"),
        (torch.zeros(2, 2).long(), TypeError, "one dimension"),
        ("abc", TypeError, "str"),
        (None, TypeError, "NoneType"),
        ([[1], [2, 3]], TypeError, "list"),
    ],
)
def test_wrong_indices_are_errors(job: Job, index: Any, error: Any, text: str) -> None:
    tensor, array = filled("x", torch.float32, 2)
    with pytest.raises(error, match=text):
        tensor[index]
    with pytest.raises(error, match=text):
        tensor[index] = torch.zeros(2, 2)
    assert torch.equal(tensor[:], array)


@pytest.mark.parametrize(
    ("rows", "error", "text"),
    [
        (torch.zeros(2, 3), ValueError, r"shape \(3, 2\) \(got \(2, 3\)\)"),
        (torch.zeros(2), ValueError, r"got \(2,\)"),
        (torch.zeros(3, 2, dtype=torch.float64), TypeError, "must be torch.float32"),
    ],
)
def test_wrong_rows_are_errors(job: Job, rows: Tensor, error: Any, text: str) -> None:
    tensor, array = filled("x", torch.float32, 2)
    with pytest.raises(error, match=text):
        tensor[[1, 1600, 4500]] = rows
    assert torch.equal(tensor[:], array)


def test_one_of_the_same_name_is_the_same(job: Job) -> None:
    _tensor, array = filled("x", torch.float32, 2)
    again = DistTensor((NUM_ROWS, 2), torch.float32, "x", lambda *_: 1 / 0)  # type: ignore[arg-type]
    assert torch.equal(again[:], array)
    with pytest.raises(ValueError, match="exists with shape"):
        DistTensor((NUM_ROWS, 3), torch.float32, "x")
    with pytest.raises(ValueError, match="float64"):
        DistTensor((NUM_ROWS, 2), torch.float64, "x")
    with pytest.raises(ValueError, match="pass attach=True"):
        DistTensor((NUM_ROWS, 2), torch.float32, "x", attach=False)


def test_it_goes_with_its_last_object_unless_persistent(job: Job) -> None:
    tensor, array = filled("x", torch.float32, 2)
    again = DistTensor((NUM_ROWS, 2), torch.float32, "x")
    kept = DistTensor((NUM_ROWS,), torch.int32, "kept", persistent=True)
    kept[:] = torch.arange(NUM_ROWS, dtype=torch.int32)
    del tensor, kept
    gc.collect()
    assert torch.equal(again[:], array)
    del again
    gc.collect()
    new = DistTensor((NUM_ROWS,), torch.int32, "x")  # of another shape: the old one is gone
    assert new.count_nonzero() == 0
    kept = DistTensor((NUM_ROWS,), torch.int32, "kept")
    assert kept[7] == 7
    kept.delete()
    assert DistTensor((NUM_ROWS,), torch.int32, "kept").count_nonzero() == 0


@pytest.mark.parametrize("name", ["", "a~b", "a\nb", "x" * 10_000, 3])
def test_hostile_names_are_refused(job: Job, name: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="name"):
        DistTensor((NUM_ROWS,), torch.int32, name)


def test_as_many_tables_as_a_graph_of_very_many_relations_has_are_listed() -> None:
    with served(1) as (address,):
        job = join([address], 0)
        for number in range(4000):
            name = f"{POLICY}~{'a long name of a relation ' * 4}{number}"
            job.cluster.create(TableInfo(name, torch.int64, (), (0, 1), POLICY, True))
        leave()
        job = join([address], 0)
        job.cluster.refresh()
        assert len(job.cluster.names()) == 4000
        leave()


def test_what_can_be_made_can_be_read(job: Job) -> None:
    """A row of as many extents as torch's and NumPy's rules and a message take together."""
    rows = torch.randn(NUM_ROWS, *[1] * 13, 2)
    tensor = DistTensor(rows.shape, torch.float32, "long")
    tensor[:] = rows
    assert torch.equal(tensor[[4999, 0]], rows[[4999, 0]])
    for extents in (16, 65_535):
        with pytest.raises(ValueError, match="at most 16 extents"):
            DistTensor((NUM_ROWS, *[1] * extents), torch.float32, "longer")
    with pytest.raises(ValueError, match=r"less than 2\^48 elements"):
        DistTensor((NUM_ROWS, 2**40), torch.float32, "wider")


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "ä ß", "a.b/c"])
def test_names_are_no_paths(job: Job, name: str) -> None:
    tensor = DistTensor((NUM_ROWS,), torch.int32, name)
    tensor[5] = 5
    assert (tensor.tensor_name, int(tensor[5])) == (name, 5)


def test_policies_are_found_by_size(job: Job) -> None:
    with pytest.raises(ValueError, match="0 kinds of rows have 12"):
        DistTensor((12,), torch.int32)
    with pytest.raises(ValueError, match="must have 5000 rows"):
        DistTensor((12,), torch.int32, part_policy=POLICY)
    with pytest.raises(ValueError, match="unknown policy"):
        DistTensor((12,), torch.int32, part_policy="node~other")
    with pytest.raises(ValueError, match="a persistent tensor needs a name"):
        DistTensor((NUM_ROWS,), torch.int32, persistent=True)
    assert DistTensor((NUM_ROWS,), torch.int32, part_policy=POLICY).part_policy == POLICY


def test_masks_are_combined(job: Job) -> None:
    (one, a), (other, b) = filled("a", torch.bool), filled("b", torch.bool)
    one[:100], other[50:150] = torch.zeros(100).bool(), torch.zeros(100).bool()
    a[:100] = b[50:150] = False
    assert torch.equal((one | other)[:], a | b)
    assert (one & other).count_nonzero() == int((a & b).sum())
    with pytest.raises(TypeError, match="same kind of rows"):
        one | a  # type: ignore[operator]


def test_without_a_cluster_there_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="initialize"):
        DistTensor((5,), torch.int32)


def test_rows_of_other_hosts_stay_when_one_lost_its_own() -> None:
    with served(3) as addresses:
        job = join(addresses, 0)
        tensor = DistTensor((NUM_ROWS,), torch.int64, "x", persistent=True)
        tensor[:] = torch.arange(NUM_ROWS)
        lost = WireMessage("delete", {"name": tensor.name})
        job.cluster.hosts[1].start(lost).result()  # as after a start of its server
        for _ in range(2):
            with pytest.raises(ValueError, match=r"hosts \[1\] have no rows of 'node~_N~x'"):
                DistTensor((NUM_ROWS,), torch.int64, "x", lambda s, d: -torch.ones(s, dtype=d))
        start, stop = job.starts(POLICY)[1:3]
        kept = torch.cat([torch.arange(start), torch.arange(stop, NUM_ROWS)])
        assert torch.equal(tensor[kept], kept)
        leave()


# ---------------------------------------------------------------------------- several trainers


def randn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def contents(rank: int, world_size: int, addresses: list[str]) -> Tensor:
    if addresses:
        join(addresses, rank % len(addresses))
    else:
        alone()
    torch.manual_seed(7 if rank == 0 else 100 + rank)  # rank 0's state counts
    tensor = DistTensor((NUM_ROWS, 3), torch.float32, "x", randn)
    found: Tensor = tensor[:]
    leave()
    return found


def test_first_contents_do_not_depend_on_hosts_and_trainers() -> None:
    (expected,) = run_ranks(contents, 1, [])
    assert 0.9 < float(expected.std()) < 1.1
    assert len(torch.unique(expected[:, 0])) > 4900
    for num_hosts, world_size in ((1, 1), (2, 3), (3, 2)):
        with served(num_hosts) as addresses:
            found = run_ranks(contents, world_size, addresses)
        assert all(torch.equal(each, expected) for each in found)


def many_writes(rank: int, world_size: int, addresses: list[str], rounds: int) -> Tensor:
    """Rounds in which each trainer writes rows of its own, and reads what the others wrote."""
    here = rank % len(addresses)
    join(addresses, here, attach=rank != 1)
    tensor = DistTensor((NUM_ROWS, 2), torch.int64, "x")
    array = torch.zeros(NUM_ROWS, 2, dtype=torch.int64)
    order = torch.Generator().manual_seed(0)  # the same on all ranks
    for number in range(rounds):
        permuted = torch.randperm(NUM_ROWS, generator=order)
        for writer in range(world_size):
            ids = permuted[writer :: world_size * 7]
            rows = torch.stack([ids * number, ids + writer], 1)
            array[ids] = rows
            if writer == rank:
                tensor[ids] = rows
        barrier()
        ids = torch.randint(0, NUM_ROWS, (200,))
        assert torch.equal(tensor[ids], array[ids])
        barrier()
    found: Tensor = tensor[:]
    assert torch.equal(found, array)
    barrier()
    leave()
    return found


@pytest.mark.parametrize("rounds", [100, pytest.param(1000, marks=pytest.mark.exhaustive)])
def test_reads_and_writes_of_several_trainers(rounds: int) -> None:
    with served(3) as addresses:
        found = run_ranks(many_writes, 4, addresses, rounds, timeout=600)
    assert all(torch.equal(each, found[0]) for each in found)


def differ(rank: int, world_size: int, addresses: list[str]) -> list[str]:
    join(addresses, 0)
    texts = []
    for shape, name in (((NUM_ROWS, 1 + rank), "x"), ((NUM_ROWS,), f"name {rank}")):
        try:
            DistTensor(shape, torch.float32, name)
        except ValueError as error:
            texts.append(str(error))
    leave()
    return texts


def test_trainers_that_make_different_tensors_are_told() -> None:
    with served(1) as addresses:
        for texts in run_ranks(differ, 2, addresses):
            assert len(texts) == 2
            assert all("the DistTensor that is made" in text for text in texts)


def failing_on_rank_1(rank: int, world_size: int, addresses: list[str]) -> list[str]:
    join(addresses, rank)
    texts = []

    def first(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        if rank == 1:
            raise OverflowError("no numbers")
        return torch.ones(shape, dtype=dtype)

    for persistent in (False, True):
        given: Any = (NUM_ROWS,), torch.float32, "x"
        for init_func in (first, lambda shape, dtype: shape):
            try:
                DistTensor(*given, init_func, persistent=persistent)
            except (OverflowError, RankError, ValueError) as error:
                texts.append(str(error))
        again = DistTensor(*given, lambda s, d: torch.full(s, 2, dtype=d), persistent=persistent)
        assert bool((again[:] == 2).all())  # what was begun is gone
        barrier()
        again.delete()
    leave()
    return texts


def test_first_contents_that_one_trainer_cannot_make_are_an_error_on_all() -> None:
    with served(2) as addresses:
        for texts in run_ranks(failing_on_rank_1, 2, addresses):
            assert len(texts) == 4
            assert all("no numbers" in text for text in texts[::2])
            assert all("init_func must return torch.float32 of shape" in t for t in texts[1::2])
            assert all("(got tuple)" in text for text in texts[1::2])


@pytest.mark.skipif(not hasattr(mmap, "MADV_NORMAL"), reason="the system has no madvise")
@pytest.mark.parametrize("where", ["shared memory", "a disk"])
def test_pages_are_mapped_as_a_table_is_attached(where: str, tmp_path: Path) -> None:
    memory = shared_memory_folder()
    if memory is None:
        pytest.skip("there is no shared memory")
    folder = Path(memory)
    if where == "a disk":
        if os.stat(tmp_path).st_dev == os.stat(folder).st_dev:
            pytest.skip("temporary files are in shared memory")
        folder = tmp_path
    num_pages = 4096
    info = TableInfo("t", torch.float32, (mmap.PAGESIZE // 4,), (0, num_pages), POLICY)
    path = folder / f"graphshard-test-{secrets.token_hex(8)}"
    try:
        _host_tables.new_file(str(path), (num_pages, *info.row_shape), info.dtype)
        stat = os.stat(path)
        rows = attached([str(path), stat.st_dev, stat.st_ino], info, 0)
    finally:
        path.unlink()
    assert rows is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    rows[:, 0] = 1.0
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    # On a disk they are not, as all of a table would be read.
    assert (faults < num_pages // 8) == (where == "shared memory")


def test_a_table_is_in_large_pages() -> None:
    if not can_move_shared_memory():
        pytest.skip("this system makes no large pages of shared memory")
    tables = HostTables(0, True)
    try:
        tables.create(TableInfo("t", torch.float32, (128,), (0, 40_000), POLICY))
        rows = tables.rows("t")
        num_bytes = rows.numel() * 4 // LARGE_PAGE * LARGE_PAGE
        assert bytes_in_large_pages(rows.data_ptr()) == num_bytes
        assert not rows.any()
    finally:
        tables.close()
