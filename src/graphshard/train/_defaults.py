# SPDX-License-Identifier: Apache-2.0
"""Settings that were left open: what a run takes by its model and by what is known of the data.

[Note: defaults]
    Few labels on a sparse graph, as the papers of these models had it (Cora has 140 and 5 edges a
    node): their small networks, with weight decay and much dropout, for what is to be feared there
    is overfitting.

    Few labels on a dense graph, from `DENSE` edges a node on: a mean over many neighbours hardly
    overfits, and weight decay keeps it from fitting at all, the more so where rows of features sum
    to 1. So none of it, a wider network and a higher rate. As in Shchur et al., `Pitfalls of Graph
    Neural Network Evaluation <https://arxiv.org/abs/1811.05868>`_, a run goes on until 50
    evaluations were no better, for these networks learn slowly, and the best is late.

    Few labels of many classes, from `MANY_CLASSES` on: Kipf and Welling's settings for NELL. A
    hidden layer of 16 numbers hardly tells 100 classes apart, and with a label a class there is
    little to drop. They ended by validation loss, after up to 200 epochs. Where there are no
    validation rows a run has 50, as those of Schlichtkrull et al., who had none either: what a
    network learns later is each labelled node by itself.

    Many labels, from `MANY` training rows on: a wide network, little dropout, no weight decay, and
    an end by patience. Before the first layer, a linear layer and a ReLU of each node by itself,
    for the mean of a few numbers over many neighbours says little; rows of hidden layers are
    normalised. In GCN and GAT, which mix a node's own row with all others, a matrix of its own for
    it. That is the frame of Platonov et al., `A critical look at the evaluation of GNNs under
    heterophily <https://arxiv.org/abs/2302.11640>`_, in fewer and narrower layers, and with up to
    as many epochs: by epoch 300 validation still rises, of GAT by two points more.

    Links of a knowledge graph, whose edges carry relation numbers: one layer of R-GCN on
    learnt rows (more were not tried); four bases, as with a matrix for each of hundreds of
    relations there is little to learn each from. Many negatives, as
    a rank among all nodes is what counts. Links of other graphs: two layers as wide; without norms
    what GCN gives to nodes is too much alike for long. Neither has weight decay. A step is of a
    thousand edges, and an epoch as long as the graph is large, so there are fewer of them the more
    edges there are (`LINKS_OF_A_RUN`), and less patience.

    The numbers behind this are in benchmarks/results/defaults_2026-11-26.md, and those of links of
    plain graphs in link_defaults_2026-11-26.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

MANY = 1000
DENSE = 10.0
MANY_CLASSES = 20
LINKS_OF_A_RUN = 5_000_000
"""Edges that a run on links goes through, the same ones again in each epoch; 10 epochs at least."""

PAPER: dict[str, Any] = {
    "hidden": 16,
    "layers": 2,
    "heads": 1,
    "dropout": 0.5,
    "lr": 0.01,
    "weight_decay": 5e-4,
    "epochs": 200,
    "patience": 0,
    "num_bases": 0,
    "residual": False,
    "norm": False,
    "encoder": False,
}
_GAT = {"hidden": 8, "heads": 8, "dropout": 0.6, "lr": 0.005, "epochs": 300, "patience": 100}

MODEL_DEFAULTS: dict[str, dict[str, Any]] = {
    # Kipf and Welling, ICLR 2017: Cora and Citeseer.
    "gcn": PAPER,
    # Hamilton et al., NIPS 2017, mean aggregator; hidden width and L2 as for the other two.
    "sage": PAPER,
    # Velickovic et al., ICLR 2018: Cora and Citeseer.
    "gat": {**PAPER, **_GAT},
    # Brody et al., ICLR 2022, in the place of GAT.
    "gatv2": {**PAPER, **_GAT},
    # Schlichtkrull et al., ESWC 2018: AIFB without L2, MUTAG with 5e-4; one between does for both.
    "rgcn": {**PAPER, "dropout": 0.0, "epochs": 50, "weight_decay": 1e-4},
    # Hu et al., WWW 2020; hidden width is that of all heads together.
    "hgt": {**PAPER, "hidden": 64, "heads": 4, "lr": 0.005, "patience": 100},
}
"""What stands for a field that is open, with few labels on a sparse graph."""

_ATTENTION = ("gat", "gatv2")
_BASES = 4


@dataclass(frozen=True, kw_only=True)
class GraphFacts:
    """What the defaults of a model depend on; the same on all ranks.

    Args:
        num_train: Number of labelled training rows.
        width: Of the features of the target type, 0 without.
        mean_degree: Edges per node, as the partition has them.
        entropy: Of the shares of classes among training rows: the loss of who knows these alone;
            None where there are no classes, one for each row.
        largest_share: The share of the most frequent one.
        has_val: Whether any validation row has a label.
        is_of_links: Whether the task is to predict links.
        num_relations: Of relation numbers that edges carry; 0: they carry none.
    """

    num_train: int
    width: int
    mean_degree: float
    is_typed: bool
    entropy: float | None = None
    largest_share: float | None = None
    has_val: bool = True
    is_of_links: bool = False
    num_relations: int = 0


def num_negatives(has_relation_numbers: bool) -> int:
    """Nodes that are drawn in a step as wrong ends of links, where that is left open."""
    return 1024 if has_relation_numbers else 256


def _of_links(model: str, facts: GraphFacts) -> tuple[dict[str, Any], str]:
    epochs = min(100, max(10, math.ceil(LINKS_OF_A_RUN / max(1, facts.num_train))))
    values = {**MODEL_DEFAULTS[model], "weight_decay": 0.0, "dropout": 0.2, "lr": 0.01}
    values |= {"epochs": epochs, "patience": max(3, epochs // 10)}
    values["hidden"] = 16 if model in _ATTENTION else 128
    if facts.num_relations:
        values |= {"layers": 1, "lr": 0.005}
        if model == "rgcn" and facts.num_relations > _BASES:
            values["num_bases"] = _BASES
        return values, "links of a knowledge graph: one wide layer"
    values["norm"] = model == "gcn"
    return values, "links: a wide network"


def defaults_of(model: str, facts: GraphFacts | None) -> tuple[dict[str, Any], str]:
    """The values of settings that were left open, and why these. See [Note: defaults].

    Args:
        model: The name of a model; one of the user's own is taken for SAGE.
    """
    model = "sage" if ":" in model else model
    if facts is not None and facts.is_of_links:
        return _of_links(model, facts)
    values = dict(MODEL_DEFAULTS[model])
    if facts is None or facts.num_train < MANY:
        if facts is not None and (facts.entropy or 0.0) > math.log(MANY_CLASSES):
            width = values["hidden"] if model in _ATTENTION else 64
            values |= {"hidden": width, "dropout": 0.1, "weight_decay": 1e-5}
            if not facts.has_val:
                values["epochs"] = 50
                why = "few labels of many classes, none to validate: a wider network, an early end"
                return values, why
            return values, "few labels of many classes: a wider network"
        is_dense = facts is not None and facts.mean_degree >= DENSE and not facts.is_typed
        if not is_dense or model == "rgcn":
            return values, "few labels: a small network, as in the papers"
        values |= {"weight_decay": 0.0, "lr": 0.02, "epochs": 400, "patience": 50}
        values["hidden"] = 8 if model in _ATTENTION else 64
        if model in _ATTENTION:
            values["dropout"] = 0.5
        return values, "few labels, many edges a node: no weight decay"
    values |= {"weight_decay": 0.0, "lr": 0.01, "epochs": 1000, "patience": 50, "dropout": 0.2}
    values["hidden"] = 8 if model in _ATTENTION else 64
    if model == "rgcn":
        values |= {"hidden": 64, "epochs": 100, "patience": 20}
    if model == "hgt":
        values |= {"lr": 0.005, "epochs": 200}
    values["residual"] = model in ("gcn", *_ATTENTION) and not facts.is_typed
    values["encoder"] = values["norm"] = model in ("gcn", "sage", *_ATTENTION)
    return values, "many labels: a wide network"
