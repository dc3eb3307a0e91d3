# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint folder must say and who may write to it. No group; a few tests on two ranks."""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import socket
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import as_values, config_of, train_on_rank, write_parts

from graphshard import CheckpointError
from graphshard._base.files import writing
from graphshard.partition import partition_graph
from graphshard.servers.checkpoints import LOCK_FILE, DamagedError, RunLock, digest_of_content
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, load_model_state
from graphshard.train._checkpoint import read_run_manifest
from graphshard.train._result import Evaluation, History

pytestmark = pytest.mark.filterwarnings("ignore:patience=50 has no effect")  # it is in the state


def config(data: str, folder: Path | None, **more: Any) -> FullBatchConfig:
    values = {"model": "rgcn", "epochs": 4, "patience": 50, "aggregation": "oneshot", **more}
    if folder is not None:
        values = {"save_every": 2, **values, "checkpoint_dir": str(folder)}
    return config_of(data, **values)


def state(run: FullBatchRun) -> dict[str, torch.Tensor]:
    return {**run._learner.shared_state(), **run._learner.local_state()}


@pytest.fixture
def data(trained: Path) -> str:
    """Not to be changed."""
    return str(trained / "typed-1-random" / "g.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One part under `typed-1-random`, and the checkpoints of a run on it under `c`."""
    folder = tmp_path_factory.mktemp("trained")
    FullBatchRun(config(write_parts(folder, "typed", 1), folder / "c")).train()
    return folder


@pytest.fixture
def newest(trained: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint of epoch 4; that of epoch 2 is beside it."""
    return Path(shutil.copytree(trained / "c", tmp_path / "c")) / "epoch-00000004"


def change(folder: Path, changes: dict[str, Any], *, with_digest: bool) -> None:
    """Set values of a manifest; keys are paths with dots."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text())
    for keys, value in changes.items():
        *outer, last = keys.split("/")
        holder = content
        for key in outer:
            holder = holder[key]
        holder[last] = value
    if with_digest:
        content["blake2b"] = digest_of_content(content)
    path.write_text(json.dumps(content))


# -------------------------------------------------------------------------------------- manifests


@pytest.mark.timeout(600)  # with --all, thousands of files on a disk that others use
def test_no_flipped_bit_of_a_manifest_passes(newest: Path, run_all: bool) -> None:
    whole = read_run_manifest(newest)
    path = newest / "manifest.json"
    content = path.read_bytes()
    passed, step = 0, 1 if run_all else 53
    for bit in range(0, 8 * len(content), step):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert read_run_manifest(newest) == whole, f"bit {bit % 8} of byte {bit // 8}"
            passed += 1
        except (DamagedError, CheckpointError):
            pass
    assert passed < len(content) / step, (
        "white space and a letter of a number's exponent, nothing else"
    )


CHANGES: dict[str, dict[str, Any]] = {
    "two more epochs": {"values/history/epoch": 2},
    "another best": {"values/history/best/accuracy": {}},
    "no best": {"values/history/best": None},
    "waited": {"values/history/waited": 49},
    "epoch": {"epoch": 2},
    "world size": {"world_size": 2},
    "no files": {"files": {}},
    "history of text": {"values/history/losses": ["\ud800", None, {}, []]},
    "no history": {"values/history": None},
}


@cache
def undisturbed(data: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of a run of six epochs."""
    run = FullBatchRun(config(data, None, epochs=6))
    return run.train().losses, state(run)


@pytest.mark.filterwarnings("ignore:.*trying the one before:RuntimeWarning")
@pytest.mark.parametrize("case", CHANGES)
def test_a_changed_manifest_gives_way_to_the_one_before(
    case: str, data: str, newest: Path, tmp_path: Path
) -> None:
    losses, expected = undisturbed(data)
    change(newest, CHANGES[case], with_digest=False)
    with pytest.raises(CheckpointError, match="is not a whole checkpoint .*its digest is not"):
        load_model_state(newest)
    run = FullBatchRun(config(data, tmp_path / "c", epochs=6, resume=True))
    result = run.train()
    assert (result.resumed_from, result.losses) == (2, losses)
    assert all(torch.equal(value, state(run)[k]) for k, value in expected.items())


FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "epoch": ({"epoch": 6}, "it is of epoch 6, and its folder is epoch-00000004"),
    "history's epoch": ({"values/history/epoch": 2}, "one of each of 2 epochs"),
    "epochs and losses": (
        {"values/history/epoch": 1, "values/history/losses": [1.0]},
        "must be of an epoch up to 1",
    ),
    "true": ({"epoch": True}, "epoch must be an integer, at least 1"),
    "world size": ({"world_size": 10**30}, "one of each of"),
    "not a number": ({"values/history/losses": [1, 2, 3, 4]}, "the history's losses is not what"),
    "another field": ({"values/history/more": 1}, "a history must have"),
    "accuracy": ({"values/history/best/accuracy": {"val": None}}, "the history's best.accuracy"),
    "file": ({"files/rank-0.safetensors": 3}, "must have bytes and blake2b"),
    "digest": ({"files/rank-0.safetensors/blake2b": "x"}, "digits in base 16"),
    "another file": ({"files/../x": {"bytes": 1, "blake2b": "0" * 32}}, "one of each of"),
    "identity": ({"identity": []}, "identity must be a JSON object"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_manifest_with_a_right_digest_must_still_be_consistent(case: str, newest: Path) -> None:
    changes, message = FORGED[case]
    if case == "another file":
        content = json.loads((newest / "manifest.json").read_text())
        changes = {"files": {**content["files"], "../x": {"bytes": 1, "blake2b": "0" * 32}}}
    change(newest, changes, with_digest=True)
    with pytest.raises(DamagedError, match=message):
        read_run_manifest(newest)


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{}", "[" * 100_000, '{"a":' * 100_000, "\ud800"]
)
def test_hostile_manifests_are_damage(text: str, newest: Path) -> None:
    (newest / "manifest.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(DamagedError, match="manifest.json is missing or damaged"):
        read_run_manifest(newest)


@pytest.mark.parametrize("version", [1, 4])
def test_other_versions_are_no_damage(version: int, newest: Path) -> None:
    change(newest, {"format_version": version}, with_digest=version == 4)
    if version == 1:  # it had no digest
        path = newest / "manifest.json"
        content = json.loads(path.read_text())
        del content["blake2b"]
        path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="resume with the graphshard that wrote it"):
        read_run_manifest(newest)


def test_a_history_comes_back_from_its_values() -> None:
    inf = float("inf")
    best = Evaluation(epoch=1, accuracy={"val": 0.5}, val_loss=-inf)
    history = History(epoch=2, losses=[inf, -1.5], best=best, last=best)
    assert History.from_dict(json.loads(json.dumps(history.as_dict(), allow_nan=False))) == history
    diverged = History.from_dict(History(epoch=1, losses=[float("nan")]).as_dict())
    assert diverged.losses[0] != diverged.losses[0]


def test_tensors_must_be_those_of_the_model(data: str, newest: Path, tmp_path: Path) -> None:
    run = FullBatchRun(config(data, tmp_path / "c", resume=True, save_every=0))
    shared, local = run._learner.shared_state(), run._learner.local_state()
    name = next(n for n in shared if n.endswith("exp_avg"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({name: shared[name][:1]}, "must be torch.float64"),
        ({name: shared[name].float()}, r"must be torch.float64 .* \(got torch.float32"),
        ({"model/more": shared[name]}, "the model has no 'model/more'"),
        ({"optimizer/model/none/step": shared[name]}, "the model has no 'optimizer/model/none"),
    ]
    for changes, message in wrong:
        with pytest.raises(ValueError, match=message):
            run._learner.load({**shared, **changes}, local)
    del shared[name]
    with pytest.raises(ValueError, match=f"tensor '{name}' is missing"):
        run._learner.load(shared, local)
    with pytest.raises(ValueError, match="tensor 'embeddings.* is missing"):
        run._learner.load(run._learner.shared_state(), {})


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["manifest.json", "shared.safetensors", "rank-0.safetensors"])
def test_a_named_pipe_is_damage_and_no_wait(name: str, data: str, newest: Path) -> None:
    (newest / name).unlink()
    os.mkfifo(newest / name)
    with pytest.warns(RuntimeWarning, match="named pipe, not a regular file.*the one before"):
        run = FullBatchRun(config(data, newest.parent, resume=True))
    assert run.train().resumed_from == 2


def test_a_checkpoint_before_the_first_evaluation_has_no_model(data: str, tmp_path: Path) -> None:
    FullBatchRun(config(data, tmp_path / "c", eval_every=3, epochs=3, save_every=1)).train()
    with pytest.raises(CheckpointError, match="holds no best model: nothing had been evaluated"):
        load_model_state(tmp_path / "c" / "epoch-00000002")
    assert load_model_state(tmp_path / "c" / "epoch-00000003")


# -------------------------------------------------------------------------------------- partition


def test_a_run_is_not_resumed_on_another_partition(tmp_path: Path) -> None:
    """The same graph, name and sizes of parts: only the partition's build tells them apart."""
    data = write_parts(tmp_path, "plain", 2)
    values = {"model": "sage", "epochs": 2}
    run_ranks(train_on_rank, 2, as_values(config(data, tmp_path / "c", **values)))
    from train_cases import plain_graph

    again = tmp_path / "again"
    partition_graph(plain_graph(), "g", 2, str(again), part_method="random", seed=1, quiet=True)
    other = config(str(again / "g.json"), tmp_path / "c", resume=True, **values)
    with pytest.raises(RanksFailed, match="build was '[0-9a-f]+' and is '[0-9a-f]+'") as failed:
        run_ranks(train_on_rank, 2, as_values(other))
    assert all("the same partition" in text for text in failed.value.errors.values())


# ------------------------------------------------------------------------------------------- lock


def test_a_second_run_in_the_folder_is_refused_on_all_ranks(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "typed", 2)
    (tmp_path / "c").mkdir()
    held = RunLock(tmp_path / "c")
    owner = f"in use by another run \\(process {os.getpid()} on {socket.gethostname()}\\)"
    with pytest.raises(RanksFailed, match=owner) as failed:
        run_ranks(train_on_rank, 2, as_values(config(data, tmp_path / "c")))
    assert all("CheckpointError" in text for text in failed.value.errors.values())
    assert len(failed.value.errors) == 2
    held.release()
    run_ranks(train_on_rank, 2, as_values(config(data, tmp_path / "c")))
    RunLock(tmp_path / "c").release()


def test_a_run_that_only_reads_needs_no_lock(data: str, newest: Path) -> None:
    held = RunLock(newest.parent)
    partial = newest.with_name("epoch-00000006.partial")
    partial.mkdir()
    run = FullBatchRun(config(data, newest.parent, resume=True, save_every=0))
    assert run.train().resumed_from == 4
    assert partial.exists(), "it belongs to the run that writes"
    held.release()


def test_the_lock_of_a_killed_run_is_free_and_its_leftovers_are_swept(
    data: str, newest: Path
) -> None:
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        lock = RunLock(newest.parent)
        os.write(write, b"x")
        signal.pause()
        lock.release()
        os._exit(0)
    try:
        assert select.select([read], [], [], 60)[0], "the child did not answer"
        with pytest.raises(CheckpointError, match=f"process {pid} on"):
            RunLock(newest.parent)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)
    for leftover in ("epoch-00000005.partial", "epoch-00000006.partial"):
        newest.with_name(leftover).mkdir()
    newest.with_name("mine.partial").mkdir()
    run = FullBatchRun(config(data, newest.parent, resume=True))
    names = sorted(path.name for path in newest.parent.iterdir())
    assert names == [LOCK_FILE, "epoch-00000002", "epoch-00000004", "mine.partial"]
    run.train()
    RunLock(newest.parent).release()


def test_a_run_that_cannot_start_lets_go_of_the_folder(data: str, newest: Path) -> None:
    for values in ({}, {"resume": True, "hidden": 9}):
        with pytest.raises(CheckpointError):
            FullBatchRun(config(data, newest.parent, **values))
        RunLock(newest.parent).release()


@pytest.mark.parametrize("what", ["folder", "link"])
def test_what_is_no_lock_file_is_refused(what: str, data: str, tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    if what == "folder":
        (tmp_path / "c" / LOCK_FILE).mkdir()
    else:
        (tmp_path / "c" / LOCK_FILE).symlink_to("/dev/null")
    with pytest.raises(CheckpointError, match="must be a plain file .* remove what is there"):
        FullBatchRun(config(data, tmp_path / "c"))


# ---------------------------------------------------------------------------------------- writing


def test_a_full_disk_names_the_file() -> None:
    message = "/run/x cannot be written .*No space left.*make room"
    with pytest.raises(OSError, match=message), writing("/run/x"), open("/dev/full", "w") as file:
        print("x", file=file, flush=True)
    with pytest.raises(FileNotFoundError, match="/nowhere/x'$"), writing("/run/x"):
        open("/nowhere/x", "rb").close()


def train_with_small_files(rank: int, world_size: int, values: dict[str, Any]) -> None:
    """Rank 1 may only write files up to 1 KiB."""
    if rank == 1:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        train_on_rank(rank, world_size, values)
    finally:
        if rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_that_cannot_be_written_fails_on_all_ranks_with_its_name(
    tmp_path: Path,
) -> None:
    data = write_parts(tmp_path, "typed", 2)
    with pytest.raises(RanksFailed, match="rank-1.safetensors cannot be written") as failed:
        run_ranks(train_with_small_files, 2, as_values(config(data, tmp_path / "c")))
    assert all("rank 1: " in text and "OSError" in text for text in failed.value.errors.values())
    assert [path.name for path in (tmp_path / "c").iterdir()] == [LOCK_FILE]
