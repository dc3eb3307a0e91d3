# SPDX-License-Identifier: Apache-2.0
"""Features too wide to be dense, from file to predictions, beside dense products. Up to 3 ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from train_cases import (
    as_values,
    config_of,
    plain_graph,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    typed_graph,
)

import graphshard
from graphshard.data import load_dataset
from graphshard.data.npy import SparseRows, most_in_a_row, padded_features
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun
from graphshard.train._categories import CategoryTables, SparseFeatures, _Entries

WIDTH = 50


def random_rows(count: int, seed: int = 3) -> scipy.sparse.csr_matrix:
    """A matrix with an empty row."""
    dense = scipy.sparse.random(count, WIDTH, 0.06, random_state=seed).toarray()
    dense[1] = 0
    return scipy.sparse.csr_matrix(dense)


def padded(rows: scipy.sparse.csr_matrix, row_normalize: bool = False) -> Any:
    sparse = SparseRows(rows.data, rows.indices, rows.indptr, rows.shape)
    return padded_features(sparse, torch.float64, row_normalize, most_in_a_row(sparse))


@pytest.mark.parametrize("row_normalize", [False, True])
def test_padded_rows_are_the_matrix(row_normalize: bool) -> None:
    rows = random_rows(30)
    columns, values = padded(rows, row_normalize)
    assert columns.dtype == torch.int32
    assert columns.shape[1] == np.diff(rows.indptr).max()
    found = torch.zeros(30, WIDTH + 1, dtype=torch.float64)
    found.scatter_add_(1, columns.long(), values)
    expected = rows.toarray()
    if row_normalize:
        expected = expected / np.where(expected.sum(1) == 0, 1, expected.sum(1))[:, None]
    assert not found[:, 0].any()
    np.testing.assert_allclose(found[:, 1:].numpy(), expected)
    empty, _ = padded(scipy.sparse.csr_matrix((4, WIDTH)))
    assert empty.tolist() == [[0]] * 4


def test_a_folder_is_kept_sparse_where_dense_would_be_too_much() -> None:
    cora = load_dataset("cora", keep_sparse=True, max_feature_bytes=10**6, row_normalize=True)
    fields = cora.graph.ndata
    assert "feat" not in fields
    dense = load_dataset("cora", row_normalize=True, keep_sparse=True).graph.ndata["feat"]
    found = torch.zeros(2708, 1434).scatter_add_(
        1, fields["feat_columns"].long(), fields["feat_values"]
    )
    torch.testing.assert_close(found[:, 1:], dense)
    with pytest.raises(ValueError, match=r"would take 0.0 GB as dense"):
        load_dataset("cora", max_feature_bytes=10**6)


def graph_of(kind: str) -> graphshard.Graph:
    graph = plain_graph() if kind == "plain" else typed_graph()
    ntype = "_N" if kind == "plain" else "author"
    del graph.nodes[ntype].data["feat"]
    columns, values = padded(random_rows(graph.num_nodes(ntype)))
    graph.nodes[ntype].data["feat_columns"] = columns
    graph.nodes[ntype].data["feat_values"] = values
    return graph


def parts_of(folder: Path, kind: str, num_parts: int) -> str:
    target = folder / f"{kind}-{num_parts}"
    partition_graph(graph_of(kind), "g", num_parts, str(target), part_method="random", quiet=True)
    return str(target / "g.json")


@pytest.mark.parametrize(("kind", "model"), [("plain", "gcn"), ("typed", "sage")])
def test_ranks_and_samples_train_as_one_process_does(kind: str, model: str, tmp_path: Path) -> None:
    values = {"model": model, "dropout": 0.0, "epochs": 3}
    config = config_of(parts_of(tmp_path, kind, 1), **values)
    (one,) = run_ranks(train_on_rank, 1, as_values(config))
    data = parts_of(tmp_path, kind, 3)
    whole = run_ranks(train_on_rank, 3, as_values(config_of(data, **values)))
    sampled = run_ranks(
        train_sampled_on_rank, 3, as_values(sampled_config_of(data, fanouts=(-1, -1), **values))
    )
    for several in (whole, sampled):
        for rank in several:
            torch.testing.assert_close(
                rank["result"]["losses"], one["result"]["losses"], rtol=0, atol=1e-10
            )
            for name, value in one["shared"].items():
                torch.testing.assert_close(rank["shared"][name], value, rtol=0, atol=1e-10)
    assert any("category_tables.matrices.0.weight" in name for name in one["shared"])


@pytest.mark.parametrize("hidden", [8, 64])  # 64 is the matrix of sparse features
def test_scores_are_those_of_a_dense_product(hidden: int, tmp_path: Path) -> None:
    config = config_of(parts_of(tmp_path, "plain", 1), model="gcn", dropout=0.0, hidden=hidden)
    learner = FullBatchRun(config)._learner
    graph = graph_of("plain")
    (matrix,) = learner.model.category_tables.matrices  # type: ignore[union-attr]
    dense = torch.from_numpy(random_rows(graph.num_nodes()).toarray())
    rows = dense[:, : matrix.num_embeddings - 1] @ matrix.weight[1:]
    first, second = learner.model.layers
    assert (first.weight is None) == (hidden == 64)
    whole = graph.local_var()
    order = learner._shard.original_ids["_N"]
    expected = second(whole, torch.relu(first(whole, rows)))[order]
    torch.testing.assert_close(learner.scores(), expected, rtol=0, atol=1e-10)


def test_features_that_changed_in_place_are_read_anew() -> None:
    matrix = random_rows(6)
    columns, values = padded(matrix)
    tables = CategoryTables({}, {"_N": WIDTH + 1}).double()
    rows = SparseFeatures(columns, values)
    (weights,) = tables.matrices

    def of_dense(dense: torch.Tensor) -> torch.Tensor:
        return dense @ weights.weight[1:]  # type: ignore[index]

    dense = torch.from_numpy(matrix.toarray())
    for factor in (1, 1, 3):
        values *= factor
        expected = of_dense(dense * factor)
        torch.testing.assert_close(tables({}, {}, {"_N": rows})["_N"], expected)
    other = SparseFeatures(rows.columns, rows.values / 3)
    torch.testing.assert_close(tables({}, {}, {"_N": other})["_N"], of_dense(dense))


class _Largest(TorchDispatchMode):
    """Notes the most bytes of a new tensor; a sum of whole numbers or booleans converts them."""

    most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)]
        if isinstance(result, torch.Tensor):
            if result.untyped_storage().data_ptr() not in given:
                self.most = max(self.most, result.numel() * result.element_size())
            if "sum" in str(func) and not args[0].is_floating_point():
                self.most = max(self.most, args[0].numel() * 8)
        return result


def test_finding_entries_takes_8_bytes_for_each() -> None:
    """What is larger, and freed, makes malloc keep smaller blocks on its heap, with holes."""
    columns = torch.randint(0, 3, (1000, 16), dtype=torch.int32)
    rows = SparseFeatures(columns, torch.rand(1000, 16))
    with _Largest() as largest:
        edges, values = _Entries()(rows, 2)
    is_entry = columns == 1  # 2 was not seen when the table was made
    assert largest.most == 8 * int(is_entry.sum())
    rows_of, _ = is_entry.nonzero(as_tuple=True)
    src, dst = edges.coo()
    assert src.dtype == torch.int32
    assert src.equal(columns[is_entry])
    assert dst.equal(rows_of.int())
    assert values.equal(rows.values[is_entry].unsqueeze(1))


def test_entries_of_no_rows_and_of_no_columns() -> None:
    for shape in ((0, 4), (4, 0), (3, 2)):
        rows = SparseFeatures(torch.zeros(shape, dtype=torch.int32), torch.zeros(shape))
        edges, values = _Entries()(rows, 3)
        assert (edges.num_src, edges.num_dst, edges.num_edges) == (3, shape[0], 0)
        assert values.shape == (0, 1)
        product = CategoryTables({}, {"_N": 3})({}, {}, {"_N": rows})["_N"]
        assert product.shape == (shape[0], 64)
        product.sum().backward()


@pytest.mark.usefixtures("forked_interpreters")
def test_predictions_do_not_depend_on_the_parts(tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    data = parts_of(tmp_path, "plain", 1)
    config = config_of(data, model="gcn", hidden=64, epochs=2, run=folder)
    run = FullBatchRun(config)
    run.train()
    one = graphshard.predict(config.data, folder)
    three = graphshard.predict(parts_of(tmp_path, "plain", 3), folder)
    assert one["id"].to_pylist() == three["id"].to_pylist()
    np.testing.assert_allclose(one["p_0"].to_numpy(), three["p_0"].to_numpy(), atol=1e-10)
    partition_graph(plain_graph(), "g", 1, str(tmp_path / "dense"), quiet=True)
    with pytest.raises(ValueError, match="sparse features"):
        graphshard.predict(str(tmp_path / "dense" / "g.json"), folder)


@pytest.mark.parametrize(
    ("columns", "values", "text"),
    [
        (None, torch.ones(40, 2), "got none and torch.float32"),
        (torch.ones(40, 3, dtype=torch.int32), torch.ones(40, 2), r"\(40, 3\) and torch.float32"),
        (-torch.ones(40, 2, dtype=torch.int32), torch.ones(40, 2), "numbers from 0 to 2147483646"),
        (torch.full((40, 2), 2**31), torch.ones(40, 2), "numbers from 0 to 2147483646"),
        (torch.ones(40, 2, dtype=torch.int32), torch.full((40, 2), torch.inf), "must be finite"),
    ],
)
def test_damaged_fields_are_refused(
    columns: Any, values: torch.Tensor, text: str, tmp_path: Path
) -> None:
    graph = plain_graph()
    del graph.ndata["feat"]
    graph.ndata["feat_values"] = values
    if columns is not None:
        graph.ndata["feat_columns"] = columns
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    with pytest.raises(ValueError, match=text):
        FullBatchRun(config_of(str(tmp_path / "g.json")))
