# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: exact resumption, damage, mismatch. Two gloo ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import as_values, config_of, train_on_rank, write_parts

from graphshard import CheckpointError
from graphshard.partition.checked_files import write_tensors
from graphshard.servers.checkpoints import digest_of_content
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import FullBatchConfig, FullBatchRun, TypedRGCN, load_model_state
from graphshard.train._checkpoint import Checkpoint, CheckpointFolder, read_run_manifest
from graphshard.train._result import History

pytestmark = pytest.mark.filterwarnings("ignore:patience=50 has no effect")  # it is in the state
# Dropout on, embeddings, a typed graph: everything that a checkpoint has to hold.
SETTINGS = {"model": "rgcn", "dropout": 0.4, "patience": 50}


def train(data: str, folder: Path | None, **more: Any) -> list[dict[str, Any]]:
    values = {**SETTINGS, **more}
    if folder is not None:
        values = {"save_every": 2, **values, "checkpoint_dir": str(folder)}
    found: list[dict[str, Any]] = run_ranks(train_on_rank, 2, as_values(config_of(data, **values)))
    return found


def assert_same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Bit for bit: losses, evaluations, weights, embeddings, moments, generators."""
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["result"]["losses"] == theirs["result"]["losses"]
        assert mine["result"]["best"] == theirs["result"]["best"]
        assert mine["result"]["last"] == theirs["result"]["last"]
        for part in ("shared", "local"):
            assert set(mine[part]) == set(theirs[part])
            for name, value in theirs[part].items():
                assert torch.equal(mine[part][name], value), name


def rewrite_manifest(folder: Path, **changes: Any) -> None:
    """Change what a manifest says, and have its digest be right."""
    path = folder / "manifest.json"
    content = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({**content, "blake2b": digest_of_content(content)}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[dict[str, Any]]]:
    """Two parts, the checkpoints of epochs 2 and 4 of a run on them, and its results."""
    folder = tmp_path_factory.mktemp("trained")
    data = write_parts(folder, "typed", 2)
    return data, folder / "c", train(data, folder / "c", epochs=4, aggregation="oneshot")


@pytest.fixture
def data(trained: tuple[str, Path, list[dict[str, Any]]]) -> str:
    return trained[0]


@pytest.fixture
def checkpoints(trained: tuple[str, Path, list[dict[str, Any]]], tmp_path: Path) -> Path:
    """A copy of the checkpoints."""
    return Path(shutil.copytree(trained[1], tmp_path / "c"))


def resume(data: str, folder: Path, **more: Any) -> list[dict[str, Any]]:
    return train(data, folder, **{"epochs": 4, "resume": True, "aggregation": "oneshot", **more})


@pytest.mark.parametrize("kind", ["typed", "knowledge"])
@pytest.mark.parametrize("aggregation", ["sequential", "oneshot"])
def test_a_resumed_run_is_the_undisturbed_one(kind: str, aggregation: str, tmp_path: Path) -> None:
    data = write_parts(tmp_path, kind, 2)
    undisturbed = train(data, None, epochs=7, aggregation=aggregation)
    train(data, tmp_path / "c", epochs=3, aggregation=aggregation)
    resumed = train(data, tmp_path / "c", epochs=7, aggregation=aggregation, resume=True)
    assert resumed[0]["result"]["resumed_from"] == 3
    assert_same(resumed, undisturbed)


def test_two_checkpoints_are_kept_and_a_finished_run_resumes_to_itself(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "typed", 2)
    first = train(data, tmp_path / "c", epochs=6, save_every=1)
    names = sorted(p.name for p in (tmp_path / "c").iterdir())
    assert names.pop(0) == ".lock"
    assert names == ["epoch-00000005", "epoch-00000006"]
    files = sorted(p.name for p in (tmp_path / "c" / names[1]).iterdir())
    assert files == [
        "manifest.json",
        "rank-0.safetensors",
        "rank-1.safetensors",
        "shared.safetensors",
    ]
    assert_same(train(data, tmp_path / "c", epochs=6, resume=True), first)


def test_a_checkpoint_holds_the_best_model(checkpoints: Path) -> None:
    state = load_model_state(checkpoints / "epoch-00000004")
    etypes = [
        ("author", "writes", "paper"),
        ("paper", "at", "place"),
        ("paper", "cites", "paper"),
        ("paper", "rev_writes", "author"),
    ]
    model = TypedRGCN({"author": 7}, etypes, ["author", "paper", "place"], "paper", 6, 3)
    model.double().load_state_dict(state)
    with pytest.raises(CheckpointError, match="not a whole checkpoint"):
        load_model_state(checkpoints / "epoch-00000099")


def test_resuming_before_the_first_checkpoint_starts_from_the_beginning(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "typed", 2)
    (tmp_path / "c").mkdir()
    resumed = train(data, tmp_path / "c", epochs=3, resume=True)
    assert resumed[0]["result"]["resumed_from"] is None
    assert_same(resumed, train(data, None, epochs=3))


def test_what_a_killed_run_left_behind_is_never_read(data: str, checkpoints: Path) -> None:
    newest = checkpoints / "epoch-00000004"
    newest.rename(checkpoints / "epoch-00000004.partial")
    resumed = resume(data, checkpoints)
    assert resumed[0]["result"]["resumed_from"] == 2
    assert newest.exists()
    assert not (checkpoints / "epoch-00000004.partial").exists()


DAMAGE = ["shared.safetensors", "rank-1.safetensors", "manifest.json", "missing"]


@pytest.mark.filterwarnings("ignore:.*trying the one before:RuntimeWarning")
@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    what: str, trained: tuple[str, Path, list[dict[str, Any]]], checkpoints: Path
) -> None:
    data, _, undisturbed = trained
    newest = checkpoints / "epoch-00000004"
    if what == "missing":
        (newest / "rank-0.safetensors").unlink()
    else:
        content = bytearray((newest / what).read_bytes())
        content[-20] ^= 0xFF
        (newest / what).write_bytes(content)
    resumed = resume(data, checkpoints)
    assert resumed[0]["result"]["resumed_from"] == 2
    assert_same(resumed, undisturbed)


@pytest.mark.filterwarnings("ignore:.*trying the one before:RuntimeWarning")
def test_when_every_checkpoint_is_damaged_the_run_says_so(data: str, checkpoints: Path) -> None:
    for manifest in checkpoints.glob("epoch-*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(RanksFailed, match="no checkpoint in .* is whole"):
        resume(data, checkpoints)


MISMATCHES = {
    "hidden was 6 and is 7": {"hidden": 7},
    "lr was 0.01 and is 0.1": {"lr": 0.1},
    "seed was 0 and is 1": {"seed": 1},
    "aggregation was 'oneshot' and is 'sequential'": {"aggregation": "sequential"},
}


@pytest.mark.parametrize("message", list(MISMATCHES))
def test_another_run_s_checkpoint_is_refused(message: str, data: str, checkpoints: Path) -> None:
    with pytest.raises(RanksFailed, match=message) as failed:
        resume(data, checkpoints, **MISMATCHES[message])
    assert all("CheckpointError" in text for text in failed.value.errors.values())


def test_other_numbers_of_workers_and_other_formats_are_refused(
    data: str, checkpoints: Path, tmp_path: Path
) -> None:
    three = config_of(
        write_parts(tmp_path, "typed", 3),
        **SETTINGS,
        aggregation="oneshot",
        resume=True,
        checkpoint_dir=str(checkpoints),
    )
    with pytest.raises(RanksFailed, match="was written by 2 workers"):
        run_ranks(train_on_rank, 3, as_values(three))
    rewrite_manifest(checkpoints / "epoch-00000004", format_version=99)
    with pytest.raises(RanksFailed, match="resume with the graphshard that wrote it"):
        resume(data, checkpoints)


def test_a_folder_in_use_and_a_folder_that_is_not_there_are_refused(
    data: str, checkpoints: Path
) -> None:
    with pytest.raises(RanksFailed, match="holds checkpoints of an earlier run"):
        train(data, checkpoints, epochs=4)
    with pytest.raises(RanksFailed, match="there is no folder of checkpoints"):
        resume(data, checkpoints / "nowhere")


# ------------------------------------------------------------------------------- older formats

OLD = Path(__file__).parent / "old_checkpoint"
"""Of a run of three epochs in format version 2, on the partition that is beside it."""


def resume_old(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """What a run holds that was resumed, and what it ends with."""
    run = FullBatchRun(FullBatchConfig(**values))
    held = {**run._learner.shared_state(), **run._learner.local_state()}
    state = {name: value.clone() for name, value in held.items()}
    history = run._history.as_dict()
    return {"state": state, "history": history, "losses": run.train().losses}


def test_a_run_goes_on_from_a_checkpoint_of_version_2(tmp_path: Path) -> None:
    data = str(OLD / "typed-2-random" / "g.json")
    old = {**SETTINGS, "weight_decay": 5e-4}  # the default of its time
    values = {**old, "epochs": 5, "save_every": 1}
    undisturbed = run_ranks(train_on_rank, 2, as_values(config_of(data, **old, epochs=5)))
    shutil.copytree(OLD / "run", tmp_path / "c")
    folder = tmp_path / "c" / "epoch-00000003"
    written = json.loads((folder / "manifest.json").read_text())
    assert written["format_version"] == 2
    best = {f"best/{name}": value for name, value in load_model_state(folder).items()}
    resumed = config_of(data, **values, resume=True, checkpoint_dir=str(tmp_path / "c"))
    found = run_ranks(resume_old, 2, as_values(resumed))
    for rank, mine in enumerate(found):
        files = [
            load_file(OLD / "run" / folder.name / f"{name}.safetensors")
            for name in ("shared", f"rank-{rank}")
        ]
        expected = {**files[0], **files[1]}
        assert mine["state"].keys() == expected.keys()
        assert all(torch.equal(mine["state"][name], value) for name, value in expected.items())
        assert len(best) > 4
        assert all(torch.equal(value, expected[k]) for k, value in best.items())
        assert mine["history"] == written["history"]
        theirs = undisturbed[rank]["result"]["losses"]
        torch.testing.assert_close(torch.tensor(mine["losses"]), torch.tensor(theirs))
    names = sorted(path.name for path in (tmp_path / "c").glob("epoch*"))
    assert names == ["epoch-00000004", "epoch-00000005"]
    (again,) = {str(each["losses"]) for each in run_ranks(resume_old, 2, as_values(resumed))}
    assert again == str(found[0]["losses"])


def test_rows_of_embeddings_are_found_by_their_ids(tmp_path: Path) -> None:
    """Whoever wrote them: the files of two ranks change places."""
    data = write_parts(tmp_path, "typed", 2)
    undisturbed = train(data, None, epochs=5)
    train(data, tmp_path / "c", epochs=3)
    folder = tmp_path / "c" / "epoch-00000003"
    tensors = [load_file(folder / f"rank-{rank}.safetensors") for rank in range(2)]
    content = json.loads((folder / "manifest.json").read_text())
    names = {table["name"] for table in content["tables"]}
    assert {"embeddings/rows.0", "optimizer/embeddings/rows.0/exp_avg", "best/rows.0"} < names
    for rank in range(2):
        own = {k: v for k, v in tensors[rank].items() if k.startswith("own/")}
        rows = {k: v for k, v in tensors[1 - rank].items() if not k.startswith("own/")}
        assert {k.partition("/")[0] for k in rows} == {"row", "id"}
        path = folder / f"rank-{rank}.safetensors"
        path.unlink()
        record = write_tensors(path, {**own, **rows})
        content["files"][path.name] = asdict(record)
    rewrite_manifest(folder, files=content["files"])
    assert_same(train(data, tmp_path / "c", epochs=5, resume=True), undisturbed)


def save_and_read(rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 1 has had no gradient, so no moments; the names of the tables."""
    ids = torch.arange(rank, 7, world_size)
    local = {"embeddings/ids_0": ids, "embeddings/rows.0": ids.view(-1, 1).double()}
    local["random"] = torch.tensor([rank])
    if rank == 0:
        for key in ("exp_avg", "exp_avg_sq"):
            local[f"optimizer/embeddings/rows.0/{key}"] = torch.rand(len(ids), 1)
        local["optimizer/embeddings/rows.0/step"] = torch.tensor(3.0)
    shared = {"model/weight": torch.ones(2), "optimizer/model/weight/step": torch.tensor(1.0)}
    checkpoints = CheckpointFolder(folder, {"seed": 0}, [ids])
    checkpoints.prepare(resume=False, write=True)
    history = History(epoch=1, losses=[0.5])
    checkpoints.save(Checkpoint(shared=shared, local=local, history=history))
    found = checkpoints.newest()
    checkpoints.close()
    assert found is not None
    assert found.history == history
    for mine, theirs in ((found.shared, shared), (found.local, local)):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], value) for name, value in theirs.items())
    return list(read_run_manifest(Path(folder) / "epoch-00000001")[0].tables)


def test_moments_that_a_rank_has_not_are_no_rows(tmp_path: Path) -> None:
    assert run_ranks(save_and_read, 2, str(tmp_path / "c")) == [["embeddings/rows.0"]] * 2
