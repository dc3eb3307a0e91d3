# SPDX-License-Identifier: Apache-2.0
"""Link prediction: structure, losses and filtered ranks, against numpy; gloo ranks are as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from train_cases import (
    GRAPHS,
    as_values,
    config_of,
    sampled_config_of,
    train_on_rank,
    train_sampled_on_rank,
    write_parts,
)

from graphshard._base.ranges import RangeMap
from graphshard.testing import run_ranks
from graphshard.train import FullBatchRun, SampledRun, TaskInfo, write_task
from graphshard.train._links import Facts, Negatives, link_loss, ranks_of
from graphshard.train.commands import run

LINKS = {"task": "link prediction", "dropout": 0.0, "epochs": 3, "negatives": 7}
WRITES, REVERSE = ("author", "writes", "paper"), ("paper", "rev_writes", "author")
NAMES = ("likes", "knows", "is a", "rev_likes", "rev_knows", "rev_is a")
CASES: dict[str, tuple[dict[str, Any], TaskInfo | None]] = {
    "plain_links": ({"model": "sage"}, None),
    "relation_links": (
        {"model": "rgcn"},
        TaskInfo(
            name="g",
            kind="link prediction",
            target=("_N", "_E", "_N"),
            reverse_of=("_N", "_E", "_N"),
            num_relations=6,
            relation_names=NAMES,
        ),
    ),
    "typed_links": (
        {"model": "rgcn", "loss": "bce"},
        TaskInfo(name="g", kind="link prediction", target=WRITES, reverse_of=REVERSE),
    ),
}


def write(folder: Path, kind: str, num_parts: int, how: str = "random") -> str:
    """A partition with its task beside it."""
    data = write_parts(folder, kind, num_parts, how)
    task = CASES[kind][1]
    if task is not None:
        write_task(data, task)
    return data


def card_of(folder: Path, *words: str) -> dict[str, Any]:
    """What a run by command, with data, epochs and seldom else, has left."""
    place = str(folder / "run")
    line = ["train", *words, "--epochs", "2", "--run", place, "--device", "cpu", "--quiet"]
    assert run(line) == 0
    card: dict[str, Any] = json.loads((folder / "run" / "model.json").read_text("utf-8"))
    return card


@pytest.mark.usefixtures("forked_interpreters")
def test_links_are_learnt_from_the_name_of_the_data_alone(tmp_path: Path) -> None:
    facts = tmp_path / "facts"
    facts.mkdir()
    random = np.random.default_rng(5)
    for name, count in (("train", 90), ("valid", 20), ("test", 10)):
        rows = random.integers(0, [30, 6, 30], (count, 3))
        np.save(facts / f"{name}.npy", rows)
    card = card_of(tmp_path / "a", "--data", str(facts))
    settings = {name: card["config"][name] for name in ("model", "layers", "num_bases", "fanouts")}
    assert settings == {"model": "rgcn", "layers": 1, "num_bases": 4, "fanouts": [10]}
    assert (card["mode"], card["task"]["kind"]) == ("sample", "link prediction")
    assert card["embeddings"] == {"_N": 128}
    assert set(card["best"]["metrics"]["mrr"]) == {"val", "test"}
    edges = tmp_path / "edges.csv"
    rows = "\n".join(f"n{a},n{b}" for a, b in random.integers(0, 20, (80, 2)))
    edges.write_text(f"src,dst\n{rows}\n")
    card = card_of(tmp_path / "b", "--data", str(edges), "--task", "link prediction")
    assert (card["mode"], card["config"]["layers"]) == ("sample", 2)
    made, out = tmp_path / "b" / "run", tmp_path / "top.csv"
    words = ["--data", str(made / "parts"), "--run", str(made), "--top", "1", "--out", str(out)]
    assert run(["predict", *words, "--quiet"]) == 0
    names = {name for row in rows.split("\n") for name in row.split(",")}
    lines = [line.split(",")[:2] for line in out.read_text("utf-8").splitlines()[1:]]
    assert lines
    assert {end.strip('"') for line in lines for end in line} <= names
    words = "--data", str(facts), "--mode", "full", "--model", "gcn", "--no-both-directions"
    card = card_of(tmp_path / "c", *words)
    assert (card["mode"], card["config"]["model"]) == ("full", "gcn")


def triples(kind: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """``[n, 3]`` source, relation, destination by original ids; and the masks of splits."""
    graph = GRAPHS[kind]()
    etype = WRITES if kind == "typed_links" else ("_N", "_E", "_N")
    src, dst = (ends.numpy() for ends in graph.edges(etype=etype))
    data = graph.edges[etype].data
    number = data["etype"].numpy() if "etype" in data else np.zeros_like(src)
    masks = {s: data[f"{s}_mask"].numpy() for s in ("train", "val", "test")}
    return np.stack([src, number, dst], axis=1), masks


def brute_force(
    facts: np.ndarray, chosen: np.ndarray, src: np.ndarray, dst: np.ndarray, weight: np.ndarray
) -> np.ndarray:
    """Filtered ranks of the destinations of some facts."""
    ranks = []
    for u, r, v in facts[chosen]:
        scores = dst @ (src[u] * weight[r])
        others = np.ones(len(dst), dtype=bool)
        others[facts[(facts[:, 0] == u) & (facts[:, 1] == r), 2]] = False
        others[v] = False
        ranks.append(1 + (scores[others] > scores[v]).sum())
    return np.array(ranks)


@pytest.mark.parametrize("kind", CASES)
def test_ranks_are_those_of_a_search_over_all_nodes(kind: str, tmp_path: Path) -> None:
    values, _ = CASES[kind]
    run = FullBatchRun(config_of(write(tmp_path, kind, 1), **{**LINKS, **values}))
    last = run.train().last
    rows, original = run._learner.evaluation_scores(), run._shard.original_ids
    by_id = {}
    for ntype, of_type in rows.items():
        by_id[ntype] = np.zeros(of_type.shape)
        by_id[ntype][original[ntype]] = of_type.detach().numpy()
    facts, masks = triples(kind)
    source, target = ("author", "paper") if kind == "typed_links" else ("_N", "_N")
    predictor: Any = run._learner.model.predictor
    weight = np.ones((1, by_id[source].shape[1]))
    if kind == "relation_links":
        weight = predictor.relations.detach().numpy()
    for split in ("val", "test"):
        ranks = brute_force(facts, masks[split], by_id[source], by_id[target], weight)
        relations = facts[masks[split], 1]
        if kind == "relation_links":  # sources are ranked, too
            turned = facts[:, ::-1]
            heads = brute_force(turned, masks[split], by_id[target], by_id[source], weight)
            ranks, relations = np.concatenate([ranks, heads]), np.tile(relations, 2)
        found = {name: by_split[split] for name, by_split in last.metrics.items()}
        expected = {"mrr": (1 / ranks).mean()} | {
            f"hits@{k}": (ranks <= k).mean() for k in (1, 3, 10)
        }
        assert found == pytest.approx(expected)
        for number in np.unique(relations) if kind == "relation_links" else ():
            of_relation = last.by_relation[NAMES[number]]["mrr"][split]
            assert of_relation == pytest.approx((1 / ranks[relations == number]).mean())
    assert bool(last.by_relation) == (kind == "relation_links")
    assert last.main == "mrr"


@pytest.mark.parametrize("kind", CASES)
def test_held_out_edges_and_their_reverses_carry_no_messages(kind: str, tmp_path: Path) -> None:
    values, _ = CASES[kind]
    run = FullBatchRun(config_of(write(tmp_path, kind, 1), **{**LINKS, **values}))
    shard, original = run._shard, run._shard.original_ids
    facts, masks = triples(kind)
    gone = {tuple(map(int, fact)) for fact in facts[masks["val"] | masks["test"]]}
    reversed_ = {(v, (r + 3) % 6 if kind == "relation_links" else r, u) for u, r, v in gone}
    for etype in shard.data.canonical_etypes:
        edges = shard.data.edges[etype]
        src = original[etype[0]][edges.src.long()].tolist()
        dst = original[etype[2]][edges.dst.long()].tolist()
        number = [0] * len(src) if shard.relation is None else shard.relation[0].tolist()
        left = sorted(zip(src, number, dst, strict=True))
        if etype in (WRITES, ("_N", "_E", "_N")):
            kept = facts[~(masks["val"] | masks["test"])].tolist()
            reverses = set() if kind == "typed_links" else reversed_
            assert left == sorted(fact for fact in map(tuple, kept) if fact not in reverses)
        elif etype == REVERSE:
            assert not reversed_ & set(left)
            assert left
    assert shard.data.partition_book.num_edges() == sum(
        edges.num_edges for edges in shard.data.edges.values()
    )


@pytest.mark.parametrize("kind", ["plain_links", "typed_links"])
def test_added_directions_bring_nothing_back(kind: str, tmp_path: Path) -> None:
    values = {**LINKS, **CASES[kind][0], "both_directions": True}
    shard = FullBatchRun(config_of(write(tmp_path, kind, 1), **values))._shard
    facts, masks = triples(kind)
    evaluated = masks["val"] | masks["test"]
    gone, kept = ({(u, v) for u, _, v in facts[m].tolist()} for m in (evaluated, ~evaluated))
    if kind == "typed_links":
        gone -= kept  # parallel edges
    original = shard.original_ids
    for etype in shard.data.canonical_etypes:
        edges = shard.data.edges[etype]
        src = original[etype[0]][edges.src.long()].tolist()
        dst = original[etype[2]][edges.dst.long()].tolist()
        if etype in (WRITES, ("_N", "_E", "_N")):
            assert not gone & set(zip(src, dst, strict=True))
        if etype in (REVERSE, ("_N", "_E", "_N")):
            assert not gone & set(zip(dst, src, strict=True))


@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_resumed_run_ends_as_an_undisturbed_one(is_sampled: bool, tmp_path: Path) -> None:
    data = write(tmp_path, "relation_links", 1)
    saved = {"checkpoint_dir": str(tmp_path / "c"), "save_every": 2}

    def run(**values: Any) -> Any:
        values = {**LINKS, "model": "rgcn", "dropout": 0.2, **values}
        if is_sampled:
            settings = {"fanouts": (3, 3), "batch_size": 16, **values}
            return SampledRun(sampled_config_of(data, **settings)).train()
        return FullBatchRun(config_of(data, **values)).train()

    undisturbed = run(epochs=4)
    run(epochs=2, **saved)
    resumed = run(epochs=4, resume=True, **saved)
    assert resumed.resumed_from == 2
    assert (resumed.losses, resumed.best) == (undisturbed.losses, undisturbed.best)


@pytest.mark.parametrize(
    ("kind", "num_parts", "how"),
    [
        pytest.param("plain_links", 2, "random", marks=pytest.mark.exhaustive),
        ("relation_links", 3, "few_edges"),
        ("typed_links", 5, "empty_part"),
        pytest.param("typed_links", 3, "few_edges", marks=pytest.mark.exhaustive),
        pytest.param("relation_links", 5, "empty_part", marks=pytest.mark.exhaustive),
    ],
)
def test_workers_rank_as_one_does(kind: str, num_parts: int, how: str, tmp_path: Path) -> None:
    values = {**LINKS, **CASES[kind][0]}
    one = FullBatchRun(config_of(write(tmp_path, kind, 1), **values)).train()
    config = config_of(write(tmp_path, kind, num_parts, how), **values)
    for found in run_ranks(train_on_rank, num_parts, as_values(config)):
        result = found["result"]
        torch.testing.assert_close(result["losses"], one.losses, rtol=0, atol=1e-10)
        assert result["num_nodes"] == one.num_nodes
        expected = one.as_dict()["last"]
        for name in ("metrics", "by_relation", "val_loss"):
            torch.testing.assert_close(result["last"][name], expected[name], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "kind", ["typed_links", pytest.param("relation_links", marks=pytest.mark.exhaustive)]
)
def test_samples_of_all_neighbours_learn_the_same(kind: str, tmp_path: Path) -> None:
    values = {**LINKS, **CASES[kind][0], "layers": 2}
    full = FullBatchRun(config_of(write(tmp_path, kind, 1), **values)).train()
    # In full batch all edges carry messages.
    more = {"fanouts": (-1, -1), "exclude_targets": False}
    config = sampled_config_of(write(tmp_path, kind, 2, "few_edges"), **values, **more)
    for found in run_ranks(train_sampled_on_rank, 2, as_values(config)):
        torch.testing.assert_close(found["result"]["losses"], full.losses, rtol=0, atol=1e-10)


def test_batches_of_links_are_learnt_from(tmp_path: Path) -> None:
    values = {**LINKS, "model": "sage", "epochs": 6, "batch_size": 16, "fanouts": (3, 3)}
    run = SampledRun(sampled_config_of(write(tmp_path, "plain_links", 1), **values))
    result = run.train()
    assert result.losses[-1] < result.losses[0]
    assert result.sampling is not None
    assert result.sampling.steps_per_epoch == -(-result.num_nodes["train"] // 16)


@pytest.mark.parametrize("kind", ["softmax", "bce"])
@pytest.mark.parametrize("block", [2**24, 10])
def test_the_loss_is_that_of_each_edge_against_what_was_drawn(
    kind: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graphshard.train._links._SCORES", block)
    generator = torch.Generator().manual_seed(0)
    queries, right, wrong = (
        torch.randn(n, 4, generator=generator, dtype=torch.float64).requires_grad_()
        for n in (6, 6, 5)
    )
    answers, ids = torch.tensor([3, 1, 9, 9, 4, 0]), torch.tensor([9, 1, 2, 1, 8])
    total = torch.zeros((), dtype=torch.float64)
    for query, answer, row in zip(queries, right, answers, strict=True):
        others = wrong[ids != row] @ query
        positive = query @ answer
        if kind == "softmax":
            scores = torch.cat([positive.view(1), others])
            total = total + F.cross_entropy(scores.unsqueeze(0), torch.tensor([0]))
        else:
            one, zero = torch.ones_like(positive), torch.zeros_like(others)
            total = total + F.binary_cross_entropy_with_logits(positive, one)
            total = total + F.binary_cross_entropy_with_logits(others, zero)
    found = link_loss(kind, queries, right, answers, wrong, ids)
    torch.testing.assert_close(found, total)
    inputs = (queries, right, wrong)
    for mine, expected in zip(
        torch.autograd.grad(found, inputs), torch.autograd.grad(total, inputs), strict=True
    ):
        torch.testing.assert_close(mine, expected)


def test_of_equal_scores_half_are_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.train._links._CANDIDATES", 2)
    monkeypatch.setattr("graphshard.train._links._QUERIES", 1)
    candidates = torch.tensor([[1.0], [2.0], [2.0], [2.0], [3.0], [9.0]])
    facts = Facts.of(torch.tensor([0, 0]), torch.tensor([0, 0]), 1, torch.tensor([1, 5]))
    queries = torch.ones(2, 1)
    scores, codes = torch.tensor([2.0, 9.0]), torch.tensor([0, 0])
    assert ranks_of(queries, scores, codes, candidates, facts).tolist() == [3.0, 1.0]


def test_what_is_drawn_is_of_original_ids_and_of_all_nodes() -> None:
    ids = torch.tensor([2, 0, 3, 1])
    negatives = Negatives(ids, RangeMap((0, 4)), 4000, 5, 0)
    first, again, other = negatives.drawn(0)[0], negatives.drawn(0)[0], negatives.drawn(1)[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.bincount(first, minlength=4).min() > 850
    same = Negatives(torch.arange(4), RangeMap((0, 4)), 4000, 5, 0).drawn(0)[0]
    assert torch.equal(ids[first], same)
    assert not torch.equal(same, Negatives(torch.arange(4), RangeMap((0, 4)), 4000, 5, 1).drawn(0))
    assert negatives.drawn(0, 3).shape == (3, 4000)


WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "one relation must have the feature 'train_mask', of each edge": ("plain", LINKS),
    "negatives is for link prediction (got negatives=3": ("plain", {"negatives": 3}),
    "loss must be one of softmax, bce for link prediction (got 'l1')": (
        "plain_links",
        {**LINKS, "loss": "l1"},
    ),
    "metrics must be of mrr, hits@1, hits@3, hits@10 for this task (got 'auroc')": (
        "plain_links",
        {**LINKS, "metrics": "mrr,auroc"},
    ),
}


@pytest.mark.parametrize("model", ["sage", "rgcn", "hgt"])
def test_a_type_that_no_relation_leads_to_is_refused(model: str, tmp_path: Path) -> None:
    values = {**LINKS, "model": model, "both_directions": False}
    text = rf"{model} needs a relation into each node type.* to 'user'; .*--no-both-directions"
    with pytest.raises(ValueError, match=text):
        FullBatchRun(config_of(write_parts(tmp_path, "bipartite_links", 1), **values))


@pytest.mark.parametrize("message", WRONG)
def test_what_does_not_fit_links_is_refused(message: str, tmp_path: Path) -> None:
    kind, values = WRONG[message]
    with pytest.raises(ValueError) as error:
        FullBatchRun(config_of(write_parts(tmp_path, kind, 1), **{"model": "sage", **values}))
    assert message in str(error.value)
