# SPDX-License-Identifier: Apache-2.0
"""Defaults by what is known of the data, and what is said of a run that learns nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from train_cases import config_of, plain_graph, write_parts

from graphshard.partition import partition_graph
from graphshard.train import MODELS, FullBatchConfig, FullBatchRun, SampledConfig
from graphshard.train._defaults import MANY, MODEL_DEFAULTS, GraphFacts, defaults_of

FEW = GraphFacts(num_train=140, width=1433, mean_degree=4.9, is_typed=False)
FEW_DENSE = GraphFacts(num_train=200, width=767, mean_degree=21.0, is_typed=False)
MANY_LABELS = GraphFacts(num_train=MANY, width=10, mean_degree=40.0, is_typed=False)


@pytest.mark.parametrize("model", MODELS)
def test_few_labels_of_a_sparse_graph_take_what_papers_did(model: str) -> None:
    config = FullBatchConfig(data="x", model=model)
    assert config.resolved(FEW) == config.resolved()
    for facts in (FEW, FEW_DENSE, MANY_LABELS):
        values, why = defaults_of(model, facts)
        assert set(values) == set(MODEL_DEFAULTS[model])
        assert why.startswith("many labels" if facts is MANY_LABELS else "few labels")


def test_other_data_get_other_settings_and_what_is_given_stays() -> None:
    dense = FullBatchConfig(data="x", model="sage").resolved(FEW_DENSE)
    assert (dense.hidden, dense.weight_decay) == (64, 0.0)
    many = FullBatchConfig(data="x", model="gat", hidden=5).resolved(MANY_LABELS)
    assert (many.hidden, many.dropout, many.patience) == (5, 0.2, 50)
    own = FullBatchConfig(data="x", model="a.b:Net").resolved(MANY_LABELS)
    assert own.hidden == FullBatchConfig(data="x", model="sage").resolved(MANY_LABELS).hidden
    sparse = FullBatchConfig(data="x", model="gcn")
    nell = GraphFacts(num_train=105, width=0, mean_degree=4, is_typed=False, entropy=4.6)
    assert (sparse.resolved(nell).hidden, sparse.resolved(nell).dropout) == (64, 0.1)
    assert sparse.resolved(nell).epochs == 200
    assert sparse.resolved(dataclasses.replace(nell, has_val=False)).epochs == 50
    gcn = sparse.resolved(MANY_LABELS)
    assert (gcn.encoder, gcn.residual, gcn.norm) == (True, True, True)
    typed = GraphFacts(num_train=200, width=7, mean_degree=21.0, is_typed=True)
    assert FullBatchConfig(data="x", model="sage").resolved(typed).weight_decay == 5e-4


@pytest.mark.parametrize("model", MODELS)
def test_links_have_defaults_of_their_own(model: str) -> None:
    plain = GraphFacts(num_train=9, width=5, mean_degree=4, is_typed=False, is_of_links=True)
    of_facts = dataclasses.replace(plain, num_relations=474)
    for facts in (plain, of_facts):
        values, why = defaults_of(model, facts)
        assert set(values) == set(MODEL_DEFAULTS[model])
        assert why.startswith("links")
        assert (values["weight_decay"], values["layers"]) == (0.0, 1 if facts is of_facts else 2)
    bases = SampledConfig(data="x", model="rgcn").resolved(of_facts).num_bases
    few = SampledConfig(data="x", model="rgcn").resolved(
        dataclasses.replace(of_facts, num_relations=4)
    )
    assert (bases, few.num_bases, few.fanouts) == (4, 0, (10,))


def notes_of_a_run(path: str, **values: object) -> list[str]:
    notes: list[str] = []
    config = config_of(path, epochs=12, **values)

    def note(report: object) -> None:
        if (text := getattr(report, "note", None)) is not None:
            notes.append(text)

    FullBatchRun(config, progress=note).train()
    return notes


def test_what_was_chosen_is_said_in_a_line(tmp_path: Path) -> None:
    notes = notes_of_a_run(write_parts(tmp_path, "plain", 1), lr=0.3)
    assert notes[0] == (
        "by default (few labels: a small network, as in the papers): layers 2, dropout 0.5, "
        "weight_decay 0.0005, patience 0"
    )


def test_layers_that_many_labels_bring_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphshard.train._defaults.MANY", 5)
    notes = notes_of_a_run(write_parts(tmp_path, "plain", 1), model="gcn", lr=0.01)
    assert notes[0] == (
        "by default (many labels: a wide network): layers 2, dropout 0.2, "
        "weight_decay 0.0, patience 50, encoder, residual, norm"
    )


def test_a_loss_that_stays_is_said(tmp_path: Path) -> None:
    graph = plain_graph()
    graph.ndata["feat"] = torch.zeros(graph.num_nodes(), 4, dtype=torch.float64)
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    notes = notes_of_a_run(str(tmp_path / "g.json"), model="gcn", layers=3)
    labels = graph.ndata["label"][graph.ndata["train_mask"] & (graph.ndata["label"] >= 0)]
    shares = torch.bincount(labels).double() / labels.numel()
    entropy = float(torch.special.entr(shares).sum())
    assert notes[-1].startswith("did not learn: the training loss is 1.")
    assert (
        f"by the shares of the classes {entropy:.4f}; try weight_decay 0, lr 0.001, layers 2"
        in (notes[-1])
    )


def test_two_uneven_classes_are_told_apart_by_auroc(tmp_path: Path) -> None:
    graph = plain_graph()
    graph.ndata["label"] = (torch.arange(graph.num_nodes()) % 7 == 0).long()
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    run = FullBatchRun(config_of(str(tmp_path / "g.json"), epochs=1))
    assert run._shard.task.metrics == ("auroc", "accuracy")
