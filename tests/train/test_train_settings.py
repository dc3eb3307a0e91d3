# SPDX-License-Identifier: Apache-2.0
"""Settings that have no effect are refused, or a warning on rank 0. Up to 2 gloo ranks."""

from __future__ import annotations

import dataclasses
import re
import warnings
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
from train_cases import as_values, config_of, plain_graph, sampled_config_of, write_parts

import graphshard
from graphshard._base.settings import OnlyWith, notes_of
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from graphshard.train import EpochReport, FullBatchConfig, FullBatchRun, SampledConfig, SampledRun
from graphshard.train._config import FREE_FIELDS, MODELS
from graphshard.train._defaults import MODEL_DEFAULTS


@pytest.mark.parametrize("kind", [FullBatchConfig, SampledConfig])
def test_every_field_that_needs_another_is_refused_without_it(kind: type) -> None:
    """Also if it is given the value that it has anyway, as a command line may."""
    found = 0
    for name, hint in get_type_hints(kind, include_extras=True).items():
        for note in notes_of(hint, OnlyWith):
            choices = (
                MODELS if note.field == "model" else get_args(get_type_hints(kind)[note.field])
            )
            for choice in set(choices) - set(note.values):
                config = kind(data="g.json", **{note.field: choice})
                with pytest.raises(ValueError, match=f"^{name} is for the {note.field} "):
                    config.check_given([name])
                found += 1
            for choice in note.values:
                kind(data="g.json", **{note.field: choice}).check_given([name])
    assert found >= 7
    kind(data="g.json").check_given(["hidden", "layers", "lr"])


def test_fields_of_speed_may_stay_set_in_a_program() -> None:
    assert FullBatchConfig(data="g.json", aggregation="oneshot", prefetch=2).prefetch == 2
    assert "prefetch" in FREE_FIELDS
    with pytest.raises(ValueError, match="rematerialize is for the aggregation sequential or auto"):
        FullBatchConfig(data="g.json", aggregation="oneshot", rematerialize=False)
    with pytest.raises(ValueError, match="checkpoint_dir has no effect without save_every or"):
        FullBatchConfig(data="g.json", checkpoint_dir="c")


def test_one_fanout_makes_no_network_of_one_layer_without_a_word() -> None:
    layers = MODEL_DEFAULTS["sage"]["layers"]
    with pytest.raises(ValueError, match=r"\(got 10\); for 2 layers give fanouts 10,10, for one"):
        SampledConfig(data="g.json", model="sage", fanouts=(10,))
    assert SampledConfig(data="g.json", fanouts=(10,) * layers).resolved().layers == layers
    assert SampledConfig(data="g.json", fanouts=(10,), layers=1).resolved().layers == 1


def warned(rank: int, world_size: int, values: dict[str, Any], sampled: bool) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config: Any = SampledConfig(**values) if sampled else FullBatchConfig(**values)
        run = (SampledRun if sampled else FullBatchRun)(config)
        run._close()
    return [str(item.message).partition(" has no effect")[0] for item in caught]


ALONE: dict[str, tuple[bool, dict[str, Any]]] = {
    "heads=4": (False, {"model": "gat", "layers": 1, "heads": 4, "hidden": None}),
    "hidden=6": (False, {"layers": 1}),
    "halo_dtype=bfloat16": (False, {"halo_dtype": "bfloat16"}),
    "transport=replicated": (True, {"transport": "replicated"}),
    "map_features=False": (True, {"map_features": False}),
    "cache_bytes=1000": (True, {"cache_bytes": 1000}),
    "patience=5": (False, {"patience": 5, "epochs": 5}),
    "patience=4": (False, {"patience": 4, "epochs": 10, "eval_every": 3}),
    "fanouts=3,0": (True, {"fanouts": (3, 0)}),
}


@pytest.mark.parametrize("text", list(ALONE))
def test_what_has_no_effect_on_one_worker_is_told(text: str, tmp_path: Path) -> None:
    sampled, values = ALONE[text]
    make = sampled_config_of if sampled else config_of
    config: Any = make(write_parts(tmp_path, "plain", 1), **values)
    assert warned(0, 1, as_values(config), sampled) == [text]


def test_what_has_an_effect_is_not_told(tmp_path: Path) -> None:
    layers = {"layers": 1, "model": "rgcn"}
    for kind in ("knowledge", "typed"):  # whose embeddings are of that width
        data = write_parts(tmp_path, kind, 1)
        assert warned(0, 1, as_values(config_of(data, **layers)), False) == []
    data = write_parts(tmp_path, "plain", 2)
    config = sampled_config_of(data, transport="replicated", map_features=False, cache_bytes=1000)
    config = dataclasses.replace(config, patience=3, epochs=10, eval_every=3, fanouts=(-1, 1))
    assert run_ranks(warned, 2, as_values(config), True) == [[], []]


def test_a_cache_of_rows_that_are_shared_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_parts(tmp_path, "plain", 2)
    values = as_values(sampled_config_of(data, cache_bytes=1000))
    assert run_ranks(warned_on_one_host, 2, values) == [["cache_bytes=1000"], []]


def warned_on_one_host(rank: int, world_size: int, values: dict[str, Any]) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", str(world_size))
        return warned(rank, world_size, values, True)


def test_patience_without_validation_nodes_is_told(tmp_path: Path) -> None:
    graph: graphshard.Graph = plain_graph()
    graph.ndata["val_mask"] = torch.zeros(graph.num_nodes(), dtype=torch.bool)
    partition_graph(graph, "g", 1, tmp_path, quiet=True)
    config = config_of(str(tmp_path / "g.json"), patience=3)
    assert warned(0, 1, as_values(config), False) == ["patience=3"]


def told(reports: list[EpochReport]) -> list[str]:
    """The notes, without those of the defaults and of the plan."""
    notes = [report.note for report in reports if report.note is not None]
    return [note for note in notes if not note.startswith(("by default", "planned: "))]


def test_a_run_says_what_was_planned_and_one_that_is_resumed_at_its_end_so(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 1)
    config = config_of(data, checkpoint_dir=str(tmp_path / "c"), save_every=2, epochs=4)
    reports: list[EpochReport] = []
    took = max(FullBatchRun(config, progress=reports.append).train().peak_memory)
    planned, *_, compared = [report.note for report in reports if "plan" in (report.note or "")]
    (mebibytes,) = re.findall(r"planned: ([\d,]+) MiB a worker", planned or "")
    (in_all,) = re.findall(r"against the plan: memory ([\d,]+) MiB a worker \(", compared or "")
    assert int(mebibytes.replace(",", "")) > 100  # torch alone
    assert int(in_all.replace(",", "")) * 2**20 > took
    reports = []
    again = dataclasses.replace(config, resume=True, epochs=3)
    FullBatchRun(again, progress=reports.append).train()
    assert told(reports)[0] == (
        "resumed from epoch 4 of epochs=3: nothing to train; raise epochs for more"
    )


def test_features_of_more_digits_than_the_run_has_are_told_of(tmp_path: Path) -> None:
    config = config_of(write_parts(tmp_path, "plain", 1), model="sage", dtype="float32", epochs=1)
    reports: list[EpochReport] = []
    FullBatchRun(config, progress=reports.append)
    (note,) = told(reports)
    assert note == (
        "features of _N are float64 and are taken as float32; dtype float64 keeps their digits"
    )
