# SPDX-License-Identifier: Apache-2.0
"""Which edges a batch of edges excludes, in every mode, against DGL. No process group."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loader_cases import BOTH, dgl, plain, typed

from graphshard.dgl.dataloading import (
    MultiLayerFullNeighborSampler,
    NeighborSampler,
    as_edge_prediction_sampler,
)
from graphshard.graph import EID, NID
from graphshard.sampling.sampler import edges_to_exclude

REVERSE = torch.cat([torch.arange(60, 120), torch.arange(60)])
"""In the plain graph edge e + 60 is edge e reversed."""
EVENTS = {"buys": "bought_by", "bought_by": "buys"}


def drawn_eids(module: Any, g: Any, seeds: Any, fanout: int = -1, **options: Any) -> Any:
    """Ids of all edges of the blocks, by relation."""
    sampler = module.dataloading.NeighborSampler([fanout, fanout])
    sampler = module.dataloading.as_edge_prediction_sampler(sampler, **options)
    *_, blocks = sampler.sample(g, seeds)
    return [{e: sorted(b.edges[e].data[EID].tolist()) for e in b.canonical_etypes} for b in blocks]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exclude": "self"},
        {"exclude": "reverse_id", "reverse_eids": REVERSE},
        {"exclude": lambda eids: eids + 1},
        {"exclude": torch.tensor([3, 60, 61])},
    ],
    ids=["none", "self", "reverse_id", "callable", "tensor"],
)
def test_plain_as_dgl(options: dict[str, Any]) -> None:
    seeds = torch.tensor([3, 17, 80, 44])  # ascending within DGL's reach: it may sort them
    ours, theirs = (drawn_eids(m, plain(m), seeds.clone(), **options) for m in BOTH)
    assert ours == theirs


@pytest.mark.parametrize(
    "options",
    [
        {"exclude": "self"},
        {
            "exclude": "reverse_id",
            "reverse_eids": {"buys": torch.arange(30).flip(0), "knows": torch.arange(25)},
        },
        {"exclude": "reverse_types", "reverse_etypes": EVENTS},
        {"exclude": lambda eids: {("user", "knows", "user"): eids[("user", "buys", "item")]}},
        {"exclude": {("user", "knows", "user"): torch.tensor([0, 5])}},
    ],
    ids=["self", "reverse_id", "reverse_types", "callable", "dict"],
)
def test_typed_as_dgl(options: dict[str, Any]) -> None:
    found = []
    for module in BOTH:
        g, given = typed(module), options
        if module is dgl and "reverse_eids" in options:  # it wants triples here
            named = {g.to_canonical_etype(e): ids for e, ids in options["reverse_eids"].items()}
            given = options | {"reverse_eids": named}
        seeds = {"buys": torch.tensor([1, 2, 20]), "knows": torch.tensor([4, 6])}
        found.append(drawn_eids(module, g, seeds, **given))
    assert found[0] == found[1]


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_full_fanouts_remain(idtype: torch.dtype) -> None:
    """Excluded before drawing: who has enough other neighbours still gets as many as asked for."""
    g = plain(idtype=idtype)
    seeds = torch.arange(0, 40, dtype=idtype)
    sampler = as_edge_prediction_sampler(
        NeighborSampler([2, 2]), exclude="reverse_id", reverse_eids=REVERSE
    )
    for _ in range(3):
        *_, blocks = sampler.sample(g, seeds)
        excluded = set(range(40)) | set(range(60, 100))
        gone = torch.bincount(torch.cat([g.edges()[1][:40], g.edges()[1][60:100]]), minlength=20)
        left = g.in_degrees() - gone
        for block in blocks:
            assert not excluded & set(block.edata[EID].tolist())
            nodes = block.dstdata[NID].long()
            assert torch.equal(block.in_degrees().long(), left[nodes].clamp(max=2).long())


def test_modes_by_hand() -> None:
    g = typed()
    buys, back = ("user", "buys", "item"), ("item", "bought_by", "user")
    seeds = {buys: torch.tensor([4, 2]), back: torch.tensor([7])}

    def found(*args: Any) -> Any:
        result = edges_to_exclude(g, seeds, seeds, *args)
        return result and {etype: sorted(set(ids.tolist())) for etype, ids in result.items()}

    assert found(None) is None
    assert found("self") == {buys: [2, 4], back: [7]}
    assert found("reverse_types", None, EVENTS) == {buys: [2, 4, 7], back: [2, 4, 7]}
    assert found("reverse_types", None, {"buys": "bought_by"}) == {buys: [2, 4], back: [2, 4, 7]}
    flipped = torch.arange(30).flip(0)
    assert found("reverse_id", {"buys": flipped, back: flipped}) == {
        buys: [2, 4, 25, 27],
        back: [7, 22],
    }


def test_errors() -> None:
    sampler = NeighborSampler([2])

    def make(*args: Any) -> Any:
        return as_edge_prediction_sampler(sampler, *args)

    with pytest.raises(ValueError, match=r"exclude must be None, one of .* \(got 'selves'\)"):
        make("selves")
    with pytest.raises(TypeError, match=r"exclude must be None, .* \(got int\)"):
        make(3)
    with pytest.raises(ValueError, match="needs reverse_eids"):
        make("reverse_id")
    with pytest.raises(ValueError, match="needs reverse_etypes"):
        make("reverse_types")
    g = typed()
    seeds = {"buys": torch.tensor([0])}
    with pytest.raises(ValueError, match=r"reverse_eids has no entry for \('user', 'buys'"):
        make("reverse_id", {"knows": torch.arange(25)}).sample(g, seeds)
    with pytest.raises(ValueError, match=r"one id for each of the 120 edges .* \(3,\)"):
        make("reverse_id", [0, 1, 2]).sample(plain(), [0])
    with pytest.raises(ValueError, match=r"relations of equal size.*got 30 edges .* and 25"):
        make("reverse_types", None, {"buys": "knows"}).sample(g, seeds)
    with pytest.raises(ValueError, match="'sells' must name one relation"):
        make("reverse_types", None, {"buys": "sells"}).sample(g, seeds)
    with pytest.raises(ValueError, match=r"what exclude returned .* \[0, 120\) \(got -1\)"):
        make(lambda eids: eids - 1).sample(plain(), [0])


def test_ids_of_no_edge_exclude_nothing() -> None:
    """As with DGL: a map of reverse edges may be of a graph that has more edges."""
    g, seeds = plain(), torch.arange(40)
    own = as_edge_prediction_sampler(MultiLayerFullNeighborSampler(1), exclude="self")
    for exclude, reverse_eids in (
        ("reverse_id", torch.arange(240).roll(120)),
        (lambda eids: torch.cat([eids, eids + 120]), None),
    ):
        sampler = as_edge_prediction_sampler(
            MultiLayerFullNeighborSampler(1), exclude=exclude, reverse_eids=reverse_eids
        )
        found, wanted = (s.sample(g, seeds)[-1][0].edata[EID] for s in (sampler, own))
        assert torch.equal(found, wanted)
