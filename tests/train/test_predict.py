# SPDX-License-Identifier: Apache-2.0
"""Predictions of any number of parts are those of one process, row for row. Up to 5 gloo ranks."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from train_cases import (
    GRAPHS,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    write_parts,
)

from graphshard import graph as make_graph
from graphshard.partition import partition_graph
from graphshard.testing import RanksFailed, run_ranks
from graphshard.train import FullBatchRun, predict, start_run
from graphshard.train._export import read_card
from graphshard.train._prediction_files import merged, write_merged

CASES = {
    "gcn": ("plain", {"model": "gcn"}),
    "sage": ("plain", {"model": "sage", "layers": 3}),
    "gat": ("plain", {"model": "gat", "heads": 2, "hidden": 3}),
    "rgcn": ("plain", {"model": "rgcn", "num_bases": 2}),
    "rgcn_one_hot": ("knowledge", {"model": "rgcn"}),
    "gcn_embeddings": ("knowledge", {"model": "gcn"}),
    "rgcn_typed": ("typed", {"model": "rgcn"}),
    "hgt": ("typed", {"model": "hgt", "heads": 2}),
    "gcn_both": ("plain", {"model": "gcn", "both_directions": None}),
    "typed_both": ("typed", {"model": "sage", "both_directions": None}),
}


@cache
def folder_of_runs() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def one_part(kind: str) -> str:
    folder = Path(folder_of_runs().name)
    path = folder / f"{kind}-1-random" / "g.json"
    return str(path) if path.exists() else write_parts(folder, kind, 1)


def trained(case: str) -> Path:
    """The folder of a run of one worker."""
    kind, values = CASES[case]
    run = Path(folder_of_runs().name) / case
    if not run.exists():
        data = one_part(kind)
        FullBatchRun(config_of(data, epochs=2, dropout=0.0, run=str(run), **values)).train()
    return run


def scores_of(case: str) -> torch.Tensor:
    """What the run's best model gives for each node in one process, by its original number."""
    kind, values = CASES[case]
    run = FullBatchRun(config_of(one_part(kind), epochs=2, dropout=0.0, **values))
    run.train()
    learner = run._learner
    model, rows = learner.best
    learner.model.load_state_dict(model)
    learner.embeddings.load_state_dict(rows)
    learner.model.eval()
    with torch.no_grad():
        scores = learner.scores()
    original = run._shard.original_ids[run._shard.target]
    return scores[torch.argsort(original)]


def predict_on_ranks(rank: int, world_size: int, values: dict[str, Any]) -> dict[str, Any]:
    out = predict(values.pop("data"), values.pop("run"), values.pop("out"), **values)
    return {"out": str(out), "files": sorted(os.listdir(Path(out).parent))}


def predicted(folder: Path, case: str, parts: int, how: str, **more: Any) -> pd.DataFrame:
    data = write_parts(folder, CASES[case][0], parts, how)
    out = folder / "out" / "p.parquet"
    values = {"data": data, "run": str(trained(case)), "out": str(out), "device": "cpu", **more}
    found = run_ranks(predict_on_ranks, parts, {"timeout": 30.0, **values})
    assert found[0]["files"] == ["p.parquet"]
    return pd.read_parquet(out)


ALL_CASES = [  # each case for one number of parts; for all of them with ``--all``
    pytest.param(case, parts, how, marks=[] if i % 4 == j else pytest.mark.exhaustive)
    for i, case in enumerate(CASES)
    for j, (parts, how) in enumerate([(2, "random"), (3, "empty_part"), (5, "random"), (1, "")])
]


@pytest.mark.parametrize(("case", "parts", "how"), ALL_CASES)
def test_rows_are_those_of_one_process(case: str, parts: int, how: str, tmp_path: Path) -> None:
    table = predicted(tmp_path, case, parts, how or "random")
    scores = scores_of(case)
    assert table["id"].tolist() == list(range(len(scores)))
    assert table["prediction"].tolist() == scores.argmax(1).tolist()
    found = table[["p_0", "p_1", "p_2"]].to_numpy()
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, scores.softmax(1).numpy(), rtol=0, atol=1e-12)


IN_FILES = [  # likewise
    pytest.param(case, parts, how, marks=[] if is_usual else pytest.mark.exhaustive)
    for case in CASES
    for parts, how in [(1, "random"), (2, "random"), (5, "empty_part")]
    for is_usual in [(case, parts) in [("gat", 2), ("typed_both", 2)]]
]


@pytest.mark.parametrize(("case", "parts", "how"), IN_FILES)
def test_features_in_files_predict_the_same(
    case: str, parts: int, how: str, tmp_path: Path
) -> None:
    table = predicted(tmp_path, case, parts, how, embeddings=True, memory="3GiB")
    scores = scores_of(case)
    assert table["prediction"].tolist() == scores.argmax(1).tolist()
    found = table[["p_0", "p_1", "p_2"]].to_numpy()
    np.testing.assert_allclose(found, scores.softmax(1).numpy(), rtol=0, atol=1e-12)
    values = {"data": one_part(CASES[case][0]), "run": str(trained(case)), "device": "cpu"}
    expected = predict(**values, embeddings=True)["embedding"].to_pylist()
    np.testing.assert_allclose(table["embedding"].tolist(), expected, rtol=0, atol=1e-6)


def test_a_budget_for_predictions_too_small_is_refused(tmp_path: Path) -> None:
    data, run = one_part("plain"), str(trained("gcn"))
    with pytest.raises(ValueError, match=r"memory must be at least .* MiB .*got 50 MiB"):
        predict(data, run, device="cpu", memory="50MiB")
    with pytest.raises(ValueError, match=r"memory must be a number of bytes above 0.*got 'much'"):
        predict(data, run, memory="much")


def test_embeddings_that_three_ranks_learnt_are_found_by_two(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "typed", 3)
    run = tmp_path / "run"
    config = config_of(data, model="rgcn", epochs=2, dropout=0.0, run=str(run))
    run_ranks(train_on_rank, 3, as_values(config))
    tables = []
    for parts in (1, 2):
        other = write_parts(tmp_path / str(parts), "typed", parts)
        out = tmp_path / f"{parts}.parquet"
        values = {"data": other, "run": str(run), "out": str(out), "device": "cpu"}
        run_ranks(predict_on_ranks, parts, {"timeout": 30.0, **values})
        tables.append(pd.read_parquet(out))
    pd.testing.assert_frame_equal(*tables, rtol=0, atol=1e-12)


def test_each_rank_gets_its_rows_without_a_file(tmp_path: Path) -> None:
    data = write_parts(tmp_path, "plain", 2)
    tables = run_ranks(rows_of_rank, 2, data, str(trained("gcn")))
    assert sorted(tables[0] + tables[1]) == list(range(40))
    assert tables[0] == sorted(tables[0])


def rows_of_rank(rank: int, world_size: int, data: str, run: str) -> list[int]:
    return list(predict(data, run, device="cpu")["id"].to_pylist())


@pytest.mark.parametrize("nodes", ["unlabelled", "train", "val", "test"])
def test_some_nodes_alone(nodes: str, tmp_path: Path) -> None:
    found = predicted(tmp_path, "gcn", 2, "random", nodes=nodes)["id"].tolist()
    ndata = GRAPHS["plain"]().ndata
    expected = ndata["label"] < 0 if nodes == "unlabelled" else ndata[f"{nodes}_mask"]
    assert found == expected.nonzero().view(-1).tolist()


@pytest.mark.parametrize("ending", ["txt", "csv", "parquet"])
def test_nodes_of_a_file(ending: str, tmp_path: Path) -> None:
    ids, path = [31, 7, 7, 0], tmp_path / f"ids.{ending}"
    if ending == "txt":
        path.write_text("\ufeff" + "".join(f"{i}\r\n\r\n" for i in ids), encoding="utf-8")
    elif ending == "csv":
        pd.DataFrame({"name": list("abcd"), "id": ids}).to_csv(path, index=False)
    else:
        pd.DataFrame({"whatever": np.array(ids, np.uint32)}).to_parquet(path)
    assert predicted(tmp_path, "gcn", 2, "random", nodes=str(path))["id"].tolist() == [0, 7, 31]


WRONG = {
    "names 2 of 3 ids that are not in the graph (41, 99)": ({"nodes": "FILE"}, "3\n41\n99\n"),
    "must have ids of type int64, as the graph has (got string": ({"nodes": "FILE"}, "3\nx7\n"),
    "nodes must be one of unlabelled, all, train, val, test": ({"nodes": "labelled"}, ""),
    "out must end in .parquet, .csv or .csv.gz": ({"out": "p.xls"}, ""),
    "top must be at least 1": ({"top": 0}, ""),
    "there is no folder": ({"run": "nowhere"}, ""),
    "has no model.json: no run has ended there": ({"run": "."}, ""),
    "does not fit the model": ({"data": "typed"}, ""),
}


@pytest.mark.parametrize("message", list(WRONG))
def test_what_cannot_be_predicted_is_said_on_every_rank(message: str, tmp_path: Path) -> None:
    values, text = WRONG[message]
    data = write_parts(tmp_path, values.get("data", "plain"), 2)
    (tmp_path / "ids.txt").write_text(text)
    more = {
        "data": data,
        "run": str(trained("gcn")),
        "out": str(tmp_path / "out" / "p.csv"),
        **{k: str(tmp_path / "ids.txt") if v == "FILE" else v for k, v in values.items()},
    }
    more["data"] = data
    if more["run"] == ".":
        more["run"] = str(tmp_path)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(predict_on_ranks, 2, more)
    assert message in str(failed.value)
    assert not (tmp_path / "out").exists() or not os.listdir(tmp_path / "out")


def test_top_classes_and_embeddings(tmp_path: Path) -> None:
    table = predicted(tmp_path, "gcn", 2, "random", top=2, embeddings=True)
    scores = scores_of("gcn").softmax(1)
    values, classes = scores.topk(2, dim=1)
    assert list(table)[1:6] == ["prediction", "class_1", "p_1", "class_2", "p_2"]
    for place in (0, 1):
        assert table[f"class_{place + 1}"].tolist() == classes[:, place].tolist()
        np.testing.assert_allclose(table[f"p_{place + 1}"], values[:, place].numpy(), atol=1e-12)
    assert np.stack(table["embedding"]).shape == (40, 6)


def test_csv_reads_back_as_parquet(tmp_path: Path) -> None:
    parquet = predicted(tmp_path, "gcn", 1, "random", embeddings=True)
    data = str(tmp_path / "plain-1-random" / "g.json")
    for name in ("p.csv", "p.csv.gz"):
        out = predict(data, trained("gcn"), tmp_path / name, embeddings=True, device="cpu")
        csv = pd.read_csv(out)
        vectors = np.array([json.loads(text) for text in csv.pop("embedding")])
        np.testing.assert_array_equal(vectors, np.stack(parquet["embedding"]))
        pd.testing.assert_frame_equal(csv, parquet.drop(columns="embedding"), check_exact=True)


def test_files_are_merged_in_order_in_bounded_pieces(tmp_path: Path) -> None:
    """Against a sort by pandas, on files whose batches end anywhere."""
    random = np.random.default_rng(0)
    frames, paths = [], []
    for number, size in enumerate([0, 1, 700, 301]):
        rows = np.sort(random.choice(5000, size, replace=False)) * 4 + number
        frame = pd.DataFrame({"graphshard row": rows, "id": [f"u{row}" for row in rows]})
        table = pa.Table.from_pandas(frame, preserve_index=False)
        table = table.cast(pa.schema([("graphshard row", pa.int64()), ("id", pa.string())]))
        paths.append(tmp_path / f"{number}.arrow")
        with pa.ipc.new_file(pa.OSFile(str(paths[-1]), "wb"), table.schema) as writer:
            writer.write_table(table, max_chunksize=int(random.integers(1, 90)))
        frames.append(frame)
    found = pa.concat_tables(merged(paths)).to_pandas()
    expected = pd.concat(frames).sort_values("graphshard row")
    assert found["id"].tolist() == expected["id"].tolist()


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "p.csv"
    out.write_text("of an earlier run")
    with pytest.raises(RanksFailed, match="rank 1 has no rows"):
        run_ranks(fail_in_writing, 2, str(out))
    assert out.read_text() == "of an earlier run"
    assert os.listdir(tmp_path) == ["p.csv"]


def fail_in_writing(rank: int, world_size: int, out: str) -> None:
    batch = pa.RecordBatch.from_pydict({"graphshard row": [rank], "id": [rank]})

    def batches() -> Any:
        yield batch
        if rank == 1:
            raise ValueError("rank 1 has no rows")

    write_merged(batches(), batch.schema, Path(out))


def test_a_model_of_learnt_rows_is_not_for_other_nodes(tmp_path: Path) -> None:
    graph = make_graph((torch.arange(50), torch.arange(50)), num_nodes=50)
    graph.edata["etype"] = torch.zeros(50, dtype=torch.int64)
    partition_graph(graph, "g", 1, str(tmp_path / "other"), quiet=True)
    with pytest.raises(ValueError, match="has other nodes of type '_N' than the model"):
        predict(tmp_path / "other" / "g.json", trained("gcn_embeddings"), device="cpu")


def test_other_nodes_with_the_same_features(tmp_path: Path) -> None:
    """A graph twice as large, of two copies: each node is predicted as its original."""
    graph = GRAPHS["plain"]()
    src, dst = graph.edges()
    twice = make_graph((torch.cat([src, src + 40]), torch.cat([dst, dst + 40])), num_nodes=80)
    twice.ndata["feat"] = graph.ndata["feat"].repeat(2, 1)
    partition_graph(twice, "g", 3, str(tmp_path), part_method="random", quiet=True)
    scores = scores_of("sage").softmax(1)
    values = {"data": str(tmp_path / "g.json"), "run": str(trained("sage")), "device": "cpu"}
    run_ranks(predict_on_ranks, 3, {**values, "out": str(tmp_path / "out" / "p.parquet")})
    table = pd.read_parquet(tmp_path / "out" / "p.parquet")
    found = table[["p_0", "p_1", "p_2"]].to_numpy()
    np.testing.assert_allclose(found, scores.repeat(2, 1).numpy(), rtol=0, atol=1e-12)


def test_the_card_says_what_the_weights_are(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    card = read_card(trained("gat"))
    state = load_file(trained("gat") / "model.safetensors")
    assert {n: list(t.shape) for n, t in state.items()} == {
        n: entry["shape"] for n, entry in card.parameters.items()
    }
    assert card.config["heads"] == 2
    assert card.feature_widths == {"_N": 20}
    assert card.num_classes == 3
    assert card.best["epoch"] in (1, 2)
    assert card.layers["layers.0"].startswith("GATConv(")


OTHER_RUNS: dict[str, dict[str, Any]] = {
    "samples": {"mode": "sample", "model": "gcn", "fanouts": (3, 3)},
    "bfloat16": {"model": "sage", "dtype": "bfloat16"},
    "autocast": {"model": "sage", "dtype": "float32", "autocast": True},
    "own": {"model": "own_models:Net"},
    "weights": {"model": "gcn", "class_weights": "balanced"},
}


@pytest.mark.parametrize("kind", OTHER_RUNS)
def test_every_kind_of_run_leaves_a_model(kind: str, tmp_path: Path) -> None:
    values = dict(OTHER_RUNS[kind])
    make = sampled_config_of if values.pop("mode", "") else config_of
    data, folder = one_part("plain"), str(tmp_path / "run")
    run = start_run(make(data, epochs=2, run=folder, **values))
    result = run.train()
    table = predict(data, folder, nodes="val", device="cpu").to_pandas()
    label = GRAPHS["plain"]().ndata["label"].numpy()[table["id"]]
    right = (table["prediction"] == label)[label >= 0]
    assert right.mean() == pytest.approx(result.best.accuracy["val"])
    shares = table.filter(like="p_").to_numpy()
    assert shares.dtype == (
        np.float64 if make is sampled_config_of or kind in ("own", "weights") else np.float32
    )
    np.testing.assert_allclose(shares.sum(1), 1, atol=1e-5)


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    import shutil

    run = tmp_path / "run"
    shutil.copytree(trained("gcn"), run)
    data = write_parts(tmp_path, "plain", 1)
    weights = run / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:100])
    with pytest.raises(ValueError, match=r"beside it: it is damaged or incomplete; train again"):
        predict(data, run, device="cpu")
    weights.write_bytes(whole[:-1] + b"\x01")
    with pytest.raises(ValueError, match=r"does not belong to model\.json beside it"):
        predict(data, run, device="cpu")
    card = run / "model.json"
    card.write_text(card.read_text().replace('"num_classes": 3', '"num_classes": 4'))
    with pytest.raises(ValueError, match="it was changed after it was written"):
        predict(data, run, device="cpu")
