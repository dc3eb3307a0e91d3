# SPDX-License-Identifier: Apache-2.0
"""A graph whose types are named as those of RDF and Freebase are, with every separator in them."""

from __future__ import annotations

from typing import Any

import torch

import graphshard

PERSON, TOPIC, PREFIX, LONGER, TILDE = "http://ex.org/ns#Person", "/m/0f~x.y", "a", "a:b", "a~b"
SIZES = {PERSON: 40, TOPIC: 30, PREFIX: 12, LONGER: 13, TILDE: 14}
RELATIONS = [
    (PERSON, "http://ex.org/ns#knows", PERSON),
    (PERSON, "/people/person/spouse_s./people/marriage/spouse", TOPIC),
    (TOPIC, "type", PERSON),
    (TOPIC, "items", TOPIC),
    (PREFIX, "b:c", PREFIX),  # "a:b:c:a", which ("a:b", "c", "a") would be called, too
    (PREFIX, "x", LONGER),
    (LONGER, "~/~", TILDE),
    (LONGER, "", TOPIC),  # as DGL has it, a name may be empty
    (TILDE, "50%2E [/x]", PREFIX),
    (TILDE, "größer ≥…", TILDE),
]


def named() -> Any:
    """The graph; features are float64, and tell the number of the type and the row."""
    draw = torch.Generator().manual_seed(0)
    edges = {
        etype: tuple(torch.randint(0, SIZES[t], (90,), generator=draw) for t in etype[::2])
        for etype in RELATIONS
    }
    graph: Any = graphshard.heterograph(edges, SIZES)
    for number, ntype in enumerate(graph.ntypes):
        rows = 1000.0 * (number + 1) + torch.arange(SIZES[ntype], dtype=torch.float64)
        graph.nodes[ntype].data["feat"] = torch.stack([rows, rows / 3], dim=1)
    for number, etype in enumerate(graph.canonical_etypes):
        graph.edges[etype].data["w"] = 1000 * number + torch.arange(90)
    fields = graph.nodes[PERSON].data
    fields["label"] = torch.arange(40) % 3
    for split, name in enumerate(("train_mask", "val_mask", "test_mask")):
        fields[name] = torch.arange(40) % 4 == split
    return graph
