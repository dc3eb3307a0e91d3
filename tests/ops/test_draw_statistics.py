# SPDX-License-Identifier: Apache-2.0
"""draw_neighbors against exact probabilities: chi-square tests over many rows, seeds fixed.

A row is drawn for under many ids, which are independent draws; LABOR, whose numbers belong to
sources, gets rows with sources of their own.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, permutations, product

import numpy as np
import pytest
import torch
from scipy.stats import chi2, chisquare
from torch import Tensor

from graphshard.ops import counter_random, draw_neighbors

NUM_DRAWS = 20_000
LEAST_P = 1e-3
WEIGHTS = (0.5, 3.0, 0.0, 1.0, 1.0, 8.0)


def draw_often(degree: int, fanout: int, key: int = 5, **more: object) -> tuple[Tensor, Tensor]:
    """Counts, and offsets drawn, for NUM_DRAWS ids of one row with ``degree`` edges."""
    rows = torch.zeros(NUM_DRAWS, dtype=torch.int64)
    counts, positions, _ = draw_neighbors(
        torch.tensor([0, degree]),
        rows,
        fanout,
        key,
        torch.arange(NUM_DRAWS),
        indices=torch.arange(degree),
        **more,
    )
    return counts, positions


def check(observed: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> None:
    """Chi-square of outcomes; ``expected`` has the probability of each."""
    assert set(observed) <= {outcome for outcome, p in expected.items() if p > 0}
    total = sum(observed.values())
    assert sum(expected.values()) == pytest.approx(1)
    pairs = [(observed[outcome], p * total) for outcome, p in expected.items() if p > 0]
    assert min(mean for _, mean in pairs) > 5
    found, mean = (np.array(column) for column in zip(*pairs, strict=True))
    assert chisquare(found, mean * found.sum() / mean.sum()).pvalue > LEAST_P


def outcomes(positions: Tensor, fanout: int) -> Counter[tuple[int, ...]]:
    return Counter(map(tuple, positions.view(-1, fanout).tolist()))


@pytest.mark.parametrize(("degree", "fanout"), [(7, 3), (6, 5), (70, 1), (66, 2)])
def test_every_set_is_equally_likely(degree: int, fanout: int, way: str) -> None:
    _, positions = draw_often(degree, fanout)
    sets = list(combinations(range(degree), fanout))
    check(outcomes(positions, fanout), dict.fromkeys(sets, 1 / len(sets)))


@pytest.mark.parametrize(
    ("degree", "fanout"), [(40, 15), (65, 8), (100, 12), (300, 12), (90, 30), (1100, 30), (200, 70)]
)
def test_every_edge_is_equally_likely(degree: int, fanout: int, way: str) -> None:
    """Counts of inclusion covary as those of a simple random sample do."""
    _, positions = draw_often(degree, fanout)
    found = torch.bincount(positions, minlength=degree).double()
    p = fanout / degree
    variance = NUM_DRAWS * p * (1 - p) * degree / (degree - 1)
    statistic = float(((found - NUM_DRAWS * p) ** 2).sum()) / variance
    assert LEAST_P < chi2.sf(statistic, degree - 1) < 1 - LEAST_P


def test_with_replacement_draws_are_independent(way: str) -> None:
    counts, positions = draw_often(5, 3, replace=True)
    assert bool((counts == 3).all())
    check(outcomes(positions, 3), dict.fromkeys(product(range(5), repeat=3), 1 / 125))


def test_weighted_with_replacement(way: str) -> None:
    weights = torch.tensor(WEIGHTS)
    _, positions = draw_often(6, 2, replace=True, prob=weights)
    p = (weights / weights.sum()).tolist()
    check(outcomes(positions, 2), {(i, j): p[i] * p[j] for i, j in product(range(6), repeat=2)})


def successive(weights: tuple[float, ...], fanout: int) -> dict[tuple[int, ...], float]:
    """Probability of each set when edges are drawn one after another, by enumeration."""
    found: dict[tuple[int, ...], float] = {}
    for order in permutations(range(len(weights)), fanout):
        probability, left = 1.0, sum(weights)
        for edge in order:
            probability *= weights[edge] / left
            left -= weights[edge]
        key = tuple(sorted(order))
        found[key] = found.get(key, 0.0) + probability
    return found


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_weighted_without_replacement(fanout: int, way: str) -> None:
    _, positions = draw_often(6, fanout, prob=torch.tensor(WEIGHTS))
    check(outcomes(positions, fanout), successive(WEIGHTS, fanout))


def test_weights_far_apart(way: str) -> None:
    """Five orders of magnitude; the light edges together are drawn as often as they should."""
    weights = torch.full((41,), 1e-5, dtype=torch.float64)
    weights[20] = 0.1
    for replace in (True, False):
        _, positions = draw_often(41, 1, prob=weights, replace=replace)
        light = int((positions != 20).sum())
        mean = NUM_DRAWS * 4e-4 / (0.1 + 4e-4)
        assert abs(light - mean) < 4 * mean**0.5


def labor_probabilities(weights: tuple[float, ...], fanout: int) -> list[float]:
    """min(1, c w) with c by bisection, so that they sum to ``fanout``."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        if sum(min(1.0, middle * w) for w in weights) < fanout:
            low = middle
        else:
            high = middle
    return [min(1.0, high * w) for w in weights]


@pytest.mark.parametrize("weights", [WEIGHTS, (1.0,) * 6, (1.0, 1.0, 1.0, 1.0, 100.0, 100.0)])
@pytest.mark.parametrize("fanout", [1, 3, 4])
def test_labor_keeps_edges_independently(weights: tuple[float, ...], fanout: int, way: str) -> None:
    degree = len(weights)
    rows = torch.arange(NUM_DRAWS)
    sources = torch.arange(NUM_DRAWS * degree)
    counts, positions, _ = draw_neighbors(
        torch.arange(NUM_DRAWS + 1) * degree,
        rows,
        fanout,
        3,
        rows,
        indices=sources,
        labor_ids=sources,
        prob=None if len(set(weights)) == 1 else torch.tensor(weights).repeat(NUM_DRAWS),
    )
    kept = torch.zeros(NUM_DRAWS, degree, dtype=torch.int64)
    kept[positions // degree, positions % degree] = 1
    assert torch.equal(kept.sum(1), counts)
    p = labor_probabilities(weights, fanout)
    expected = {
        pattern: float(np.prod([a if bit else 1 - a for bit, a in zip(pattern, p, strict=True)]))
        for pattern in product((0, 1), repeat=degree)
    }
    found = Counter(map(tuple, kept.tolist()))
    rare = {pattern for pattern, q in expected.items() if q * NUM_DRAWS < 8}
    assert sum(found.pop(pattern, 0) for pattern in rare if expected[pattern] < 1e-12) == 0
    lumped = {pattern: q for pattern, q in expected.items() if pattern not in rare}
    seldom = sum(found.pop(pattern, 0) for pattern in rare)
    mean = sum(expected[pattern] for pattern in rare) * NUM_DRAWS
    assert abs(seldom - mean) <= 4 * mean**0.5 + 1e-6
    total = sum(lumped.values())
    if len(lumped) > 1:
        check(found, {pattern: q / total for pattern, q in lumped.items()})


def test_labor_rows_share_their_sources(way: str) -> None:
    """With one degree for all, a source is taken by all of its rows or by none of them."""
    generator = torch.Generator().manual_seed(0)
    indices = torch.stack([torch.randperm(60, generator=generator)[:20] for _ in range(300)])
    rows, indptr = torch.arange(300), torch.arange(301) * 20
    arguments = {"indices": indices.flatten(), "labor_ids": indices.flatten()}
    counts, _, picked = draw_neighbors(indptr, rows, 5, 8, rows, **arguments)
    taken = torch.isin(indices, picked)
    assert torch.equal(taken.sum(1), counts)
    alone = draw_neighbors(indptr, rows, 5, 8, rows, indices=arguments["indices"])[2]
    assert picked.unique().numel() < 0.5 * alone.unique().numel()


def test_rows_and_keys_are_independent(way: str) -> None:
    """Of two ids under one key, of one id under two keys, and of draws and LABOR numbers."""
    first = draw_often(5, 1, key=1)[1]
    other_key = draw_often(5, 1, key=2)[1]
    pairs = dict.fromkeys(product(range(5), repeat=2), 1 / 25)
    check(Counter(zip(first.tolist(), other_key.tolist(), strict=True)), pairs)
    check(Counter(zip(first[::2].tolist(), first[1::2].tolist(), strict=True)), pairs)
    rows = torch.arange(NUM_DRAWS)
    kept = draw_neighbors(
        torch.arange(NUM_DRAWS + 1) * 2,
        rows,
        1,
        1,
        rows,
        indices=rows.repeat_interleave(2),
        labor_ids=rows.repeat_interleave(2),
    )[0]
    check(
        Counter(zip(first.tolist(), kept.tolist(), strict=True)),
        {(i, j): 0.1 for i in range(5) for j in (0, 2)},
    )


def test_random_words_against_plain_integers() -> None:
    """The generator in Python's integers, and its logarithm against numpy's."""
    words = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF, 2**53 - 1]
    tensor = torch.tensor([w - 2**64 if w >= 2**63 else w for w in words])

    def mix(word: int) -> int:
        word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
        return word ^ word >> 31

    assert [w % 2**64 for w in counter_random.mix(tensor).tolist()] == [mix(w) for w in words]
    for bound in (1, 7, 2**20 + 3, 2**31 - 1):
        assert counter_random.below(tensor, bound).tolist() == [w * bound >> 64 for w in words]
    assert counter_random.unit(tensor).tolist() == [(w >> 11) / 2**53 for w in words]
    state = counter_random.states(
        counter_random.key_state(-3, counter_random.ROW_DOMAIN), torch.arange(100_000)
    )
    u = np.array([((w % 2**64 >> 11) + 1) / 2**53 for w in state.tolist()])
    found = counter_random.exponential(state).numpy()
    np.testing.assert_allclose(found, -np.log(u), rtol=2e-15)
    assert counter_random.exponential(tensor[3:4]).item() == 0
