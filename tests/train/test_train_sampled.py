# SPDX-License-Identifier: Apache-2.0
"""Sampled training: exact with all neighbours, one process's losses, resumable. Up to 3 ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from test_train_parity import CASES, HOW_AND_CASE, NUM_STEPS, embedding_rows, one_worker
from test_train_parity import run as run_full_batch
from train_cases import GRAPHS, as_values, sampled_config_of, train_sampled_on_rank, write_parts

from graphshard.sampling import DrawSeed, MiniBatch
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import SampledConfig, SampledRun

ALL = {2: (-1, -1), 3: (-1, -1, -1)}


def run(folder: Path, case: str, world_size: int, how: str, **more: Any) -> list[dict[str, Any]]:
    kind, values = CASES[case]
    data = write_parts(folder, kind, world_size, how)
    values = {"dropout": 0.0, "fanouts": ALL[values.get("layers", 2)], **values, **more}
    config = sampled_config_of(data, **values)
    found: list[dict[str, Any]] = run_ranks(train_sampled_on_rank, world_size, as_values(config))
    return found


def assert_equal_runs(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Losses, evaluations and weights, to 1e-10."""
    (one,) = expected
    for rank in found:
        mine, theirs = rank["result"], one["result"]
        torch.testing.assert_close(mine["losses"], theirs["losses"], rtol=0, atol=1e-10)
        for which in ("best", "last"):
            assert mine[which]["accuracy"] == pytest.approx(theirs[which]["accuracy"])
        for name, value in one["shared"].items():
            torch.testing.assert_close(rank["shared"][name], value, rtol=0, atol=1e-10)
    torch.testing.assert_close(embedding_rows(found), embedding_rows(expected), rtol=0, atol=1e-10)


LIKE_OTHERS = (  # in what a sample of theirs needs; full-batch training has them all
    *("sage_gcn", "rgcn_one_hot_bases", "rgcn_typed_bases", "gatv2", "gatv2_typed", "hgt_plain"),
    *("both_directions", "gcn_own_rows", "gat_encoder", "sage_encoder", "rgcn", "sage_typed"),
    *("gcn_embeddings", "gat_typed"),
)


@pytest.mark.parametrize(
    ("how", "case"),
    [
        pytest.param(*case.values, marks=pytest.mark.exhaustive)
        if case.values[1] in LIKE_OTHERS
        else case
        for case in HOW_AND_CASE
    ],
)
def test_with_all_neighbours_it_is_full_batch_training(how: str, case: str, tmp_path: Path) -> None:
    expected = one_worker(case)
    if how == "random":
        assert_equal_runs(run(tmp_path, case, 1, how, epochs=NUM_STEPS), expected)
    assert_equal_runs(run(tmp_path, case, 3, how, epochs=NUM_STEPS), expected)


DRAWN = {"fanouts": (2, 3), "batch_size": 3, "dropout": 0.3}


@cache
def without_cache_and_prefetch(sampler: str) -> list[dict[str, Any]]:
    with TemporaryDirectory() as folder:
        options = {**DRAWN, "sampler": sampler, "prefetch": 0}
        return run(Path(folder), "rgcn_typed", 2, "random", **options)


@pytest.mark.parametrize("transport", ["collective", "replicated"])
@pytest.mark.parametrize(
    "sampler", ["neighbor", pytest.param("labor", marks=pytest.mark.exhaustive)]
)
def test_transport_cache_and_prefetch_change_nothing(
    transport: str, sampler: str, tmp_path: Path
) -> None:
    expected = without_cache_and_prefetch(sampler)
    cached = {"map_features": False, "cache_bytes": 2000}
    more = {"sampler": sampler, "transport": transport, "prefetch": 3, **cached}
    found = run(tmp_path, "rgcn_typed", 2, "random", **DRAWN, **more)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["result"]["losses"] == theirs["result"]["losses"]
        assert all(torch.equal(v, theirs["shared"][k]) for k, v in mine["shared"].items())
    assert expected[0]["result"]["sampling"]["cache_hit_rate"] is None
    assert 0 < found[0]["result"]["sampling"]["cache_hit_rate"] <= 1
    assert found[0]["result"]["sampling"]["steps_per_epoch"] == 2


class GivenSeeds:
    """Stands in for the loader of a run on one process: batches of given seeds, by original id."""

    def __init__(self, run: SampledRun, seeds: list[torch.Tensor], steps: int) -> None:
        self._run, self._seeds, self._steps = run, seeds, steps

    def __len__(self) -> int:
        return self._steps

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def close(self) -> None:
        pass

    def __iter__(self) -> Iterator[MiniBatch]:
        inputs, sampler = self._run._inputs, self._run._sampler()
        graph, target = inputs.graph, self._run._shard.target
        node_with_id = torch.argsort(graph.original_ids[target])
        for step in range(self._steps):
            ids = node_with_id[self._seeds[self._epoch * self._steps + step]]
            key = DrawSeed(self._run.config.seed, self._epoch, step)
            blocks = sampler.sample(graph, {target: ids}, draw_seed=key)[2]
            for t, names in inputs.node_features.items():
                frame, rows = blocks[0].srcnodes[t].data, graph.nodes[t].data
                frame.update({name: rows[name][frame["_ID"]] for name in names})
            frame = blocks[-1].dstnodes[target].data
            frame["label"] = graph.nodes[target].data["label"][frame["_ID"]]
            for block in blocks:
                for etype, names in inputs.edge_features.items():
                    frame, rows = block.edges[etype].data, graph.edges[etype].data
                    frame.update({name: rows[name][frame["_ID"]] for name in names})
            yield MiniBatch(blocks, num_seeds=ids.numel(), num_global_seeds=ids.numel())


def train_noting_seeds(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    """Train, and return the seeds of each step and the original ids of this rank's nodes too."""
    run = SampledRun(SampledConfig(**values))
    target = run._shard.target
    seeds: list[torch.Tensor] = []
    step = run._step

    def noting(blocks: MiniBatch, when: str) -> tuple[float, int]:
        seeds.append(blocks[-1].dstnodes[target].data["_ID"])
        return step(blocks, when)

    run._step = noting  # type: ignore[method-assign]
    result = run.train()
    return {
        "result": result.as_dict(),
        "shared": run._learner.shared_state(),
        "local": run._learner.local_state(),
        "seeds": seeds,
        "original": run._shard.original_ids[target],
    }


def train_on_given_seeds(
    rank: int, world_size: int, values: dict[str, Any], seeds: list[torch.Tensor], steps: int
) -> dict[str, Any]:
    run = SampledRun(SampledConfig(**values))
    run._loader.close()
    run._loader = GivenSeeds(run, seeds, steps)  # type: ignore[assignment]
    result = run.train()
    return {
        "result": result.as_dict(),
        "shared": run._learner.shared_state(),
        "local": run._learner.local_state(),
    }


SMALL_BATCHES = ["gcn", "sage", "gat", "rgcn_one_hot_bases", "rgcn_typed", "rgcn", "rgcn_one_hot"]


@pytest.mark.parametrize(
    ("case", "sampler"),
    [  # each case with one of the samplers; with both, with ``--all``
        pytest.param(
            case, sampler, marks=[] if (i + j) % 2 == 0 and i < 5 else pytest.mark.exhaustive
        )
        for i, case in enumerate(SMALL_BATCHES)
        for j, sampler in enumerate(("neighbor", "labor"))
    ],
)
def test_small_batches_have_the_losses_of_one_process(
    case: str, sampler: str, tmp_path: Path
) -> None:
    """Which draws from the whole graph, for the union of the batches of all ranks."""
    kind, values = CASES[case]
    fanouts = (2, 3, 2)[: values.get("layers", 2)]
    options = {"dropout": 0.0, "fanouts": fanouts, "batch_size": 3, "epochs": 3, **values}
    options["sampler"] = sampler
    config = sampled_config_of(write_parts(tmp_path, kind, 3, "no_train"), **options)
    several = run_ranks(train_noting_seeds, 3, as_values(config))
    steps = several[0]["result"]["sampling"]["steps_per_epoch"]
    assert steps > 1
    original = torch.cat([rank["original"] for rank in several])
    per_step = zip(*(rank["seeds"] for rank in several), strict=True)
    union = [original[torch.cat(step)] for step in per_step]
    labelled = GRAPHS[kind]().nodes["paper" if kind == "typed" else "_N"].data
    num_train = int((labelled["train_mask"] & (labelled["label"] >= 0)).sum())
    assert all(
        torch.unique(torch.cat(union[e * steps : (e + 1) * steps])).numel() == num_train
        for e in range(config.epochs or 0)
    )
    one = dataclasses.replace(config, data=write_parts(tmp_path, kind, 1))
    expected = run_ranks(train_on_given_seeds, 1, as_values(one), union, steps)
    assert_equal_runs(several, expected)


def test_a_resumed_run_is_the_undisturbed_one(tmp_path: Path) -> None:
    """Also with another transport and another depth of prefetching. Dropout is on."""
    options = {"fanouts": (2, 2), "batch_size": 3, "dropout": 0.4, "sampler": "labor"}
    undisturbed = run(tmp_path, "rgcn_typed", 2, "random", **options, epochs=6)
    folder = {"checkpoint_dir": str(tmp_path / "c"), "save_every": 2, "eval_every": 3}
    run(tmp_path, "rgcn_typed", 2, "random", **options, epochs=3, **folder)
    more = {"transport": "replicated", "prefetch": 0, "resume": True}
    resumed = run(tmp_path, "rgcn_typed", 2, "random", **options, epochs=6, **folder, **more)
    assert resumed[0]["result"]["resumed_from"] == 3
    for mine, theirs in zip(resumed, undisturbed, strict=True):
        assert mine["result"]["losses"] == theirs["result"]["losses"]
        assert mine["result"]["last"] == theirs["result"]["last"]
        for part in ("shared", "local"):
            for name, value in theirs[part].items():
                same = torch.equal(mine[part].get(name, value), value)
                assert same or name.startswith("best/"), name


def test_another_sampling_does_not_resume(tmp_path: Path) -> None:
    options = {"batch_size": 3, "checkpoint_dir": str(tmp_path / "c"), "epochs": 2}
    run(tmp_path, "sage", 2, "random", **options, save_every=1)
    for change, message in (
        ({"batch_size": 4}, "batch_size was 3 and is 4"),
        ({"fanouts": (2, 2, 2)}, r"fanouts was \[-1, -1, -1\] and is \[2, 2, 2\]"),
        ({"sampler": "labor"}, "sampler was 'neighbor' and is 'labor'"),
    ):
        with pytest.raises(RanksFailed, match=message):
            run(tmp_path, "sage", 2, "random", **{**options, **change}, resume=True)
    with pytest.raises(RanksFailed, match="belongs to another run"):
        folder = {"checkpoint_dir": str(tmp_path / "c"), "resume": True}
        run_full_batch(tmp_path, "sage", 2, "random", **folder)


def test_dropout_depends_on_rank_and_epoch_and_runs_repeat(tmp_path: Path) -> None:
    options = {"fanouts": (3, 3), "batch_size": 4, "dropout": 0.5}
    first = run(tmp_path, "gcn", 2, "random", **options)
    again = run(tmp_path, "gcn", 2, "random", **options)
    other = run(tmp_path, "gcn", 2, "random", **options, seed=1)
    assert first[0]["result"]["losses"] == again[0]["result"]["losses"]
    assert first[0]["result"]["losses"] != other[0]["result"]["losses"]
    assert not torch.equal(first[0]["local"]["random"], first[1]["local"]["random"])


@pytest.mark.filterwarnings("ignore:fanouts=0,1 has no effect")
def test_nodes_for_which_nothing_was_drawn_are_no_error(tmp_path: Path) -> None:
    for case in ("gcn", "gat"):
        found = run(tmp_path, case, 2, "random", fanouts=(0, 1), batch_size=2)
        assert len(found[0]["result"]["losses"]) == 5


def test_the_report_counts_what_was_drawn(tmp_path: Path) -> None:
    (one,) = run(tmp_path, "sage", 1, "random", fanouts=(3, 2, 2), batch_size=5, epochs=2)
    sampling = one["result"]["sampling"]
    assert sampling["steps_per_epoch"] == 3
    assert sampling["edges_per_second"] > 0
    assert 0 <= sampling["seconds_waiting"] <= one["result"]["seconds_per_epoch"]
