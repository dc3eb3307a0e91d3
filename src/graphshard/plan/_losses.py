# SPDX-License-Identifier: Apache-2.0
"""What a step and an evaluation make of the rows of nodes, on paper: losses, scores and ranks.

The loss of nodes is that of their scores. Those of edges read the rows of their ends, of which some
come from other ranks: `graphshard.train._edges` and `_links` on the tape.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ._networks import network_rows
from ._sizes import EdgeScorer, Exchanges, Network, PartSize
from ._tape import Exchange, Tape, TapeRows

_LINK_SCORES, _RANKED, _CANDIDATES = 1 << 24, 1024, 8192  # as in train/_links.py
_MOST_BLOCKS = 32  # of edges with negatives that are gone through; more are alike


def loss_of(
    tape: Tape,
    network: Network,
    parts: Sequence[PartSize],
    how: Exchanges,
    target: str,
) -> TapeRows:
    """The loss of the rows that are trained on, of nodes of a type or of edges."""
    part = parts[-1]
    if network.edges is None:
        (rows,) = network_rows(tape, network, parts, how, (target,)).values()
        return tape.cross_entropy(rows, part.train)
    given = network_rows(tape, network, parts, how, network.edges.node_types)
    tape.layer = "edges"
    if network.edges.out:
        scores = _pair_scores(tape, network, given, part, how, part.train)
        del given
        return tape.cross_entropy(scores, part.train)
    return _link_loss(tape, network, given, part, how, part.train)


def evaluate(
    tape: Tape, network: Network, parts: Sequence[PartSize], how: Exchanges, target: str
) -> None:
    """An evaluation of the whole graph, on a tape without a backward."""
    part = parts[-1]
    if network.edges is None:
        network_rows(tape, network, parts, how, (target,))
        return
    given = network_rows(tape, network, parts, how, network.edges.node_types)
    score_edges(tape, network, given, part, how)


def score_edges(
    tape: Tape, network: Network, given: Mapping[str, TapeRows], part: PartSize, how: Exchanges
) -> None:
    """Scores of all edges of a task from the rows of all nodes, or ranks of links."""
    assert network.edges is not None
    tape.layer = "edges"
    if network.edges.out:
        _pair_scores(tape, network, given, part, how, part.scored)
        return
    _link_loss(tape, network, given, part, how, part.evaluated)
    ends = [_ends(tape, network, given, part, how, part.evaluated, side) for side in (0, 1)]
    width = ends[0].width
    held = [tape.new(part.evaluated, width)]  # queries times answers
    queries = tape.new(_RANKED * 2, width + 2)  # of all ranks, and padded ones of this one
    most = max(x.count for x in given.values())
    found = tape.new(_RANKED, min(_CANDIDATES, most) * 1.5)  # and a truth value for each, twice
    held += [queries, found]


def _ends(
    tape: Tape,
    network: Network,
    given: Mapping[str, TapeRows],
    part: PartSize,
    how: Exchanges,
    count: float,
    side: int,
) -> TapeRows:
    """Rows of the sources (side 0) or destinations (1) of edges."""
    assert network.edges is not None
    ntypes = network.edges.ends[side]
    of_types = [given[t] for t in ntypes]
    width, num_nodes = of_types[0].width, sum(x.count for x in of_types)
    distinct: TapeRows | None = None
    halo, sent = part.fetched if how.num_ranks > 1 and side == 0 else (0.0, 0.0)
    wire = width * tape.itemsize  # not in the dtype of halos
    if side == 0:
        distinct = tape.new(num_nodes * -math.expm1(-count / max(1.0, num_nodes)), width)
    if halo or sent:
        arrived = tape.new(halo, width, "pool", "halo")
        outgoing = tape.new(sent, width, "shared", "exchange")
        tape.exchanges.append(Exchange(tape.layer, "forward", sent * wire, halo * wire))
        del outgoing
        distinct = tape.new(num_nodes * -math.expm1(-count / max(1.0, num_nodes)) + halo, width)
        del arrived
    result = tape.new(count, width)
    tape.do("elements", 2 * count * width * tape.itemsize)
    if len(ntypes) > 1:  # side by side, and put in their order
        joined = tape.new(count, width)
        result = tape.new(count, width)
        tape.do("elements", 4 * count * width * tape.itemsize)
        del joined
    num_distinct = 0.0 if distinct is None else distinct.count
    del distinct
    shapes = [x.count for x in of_types]

    def backward(grad: TapeRows) -> list[TapeRows | None]:
        tape.do("elements", 3 * count * width * tape.itemsize)
        held = [tape.new(num_distinct, width)] if num_distinct else []
        if len(ntypes) > 1:
            held.append(tape.new(count, width))
        if halo or sent:
            tape.exchanges.append(Exchange(tape.layer, "backward", halo * wire, sent * wire))
            held.append(tape.new(halo, width, "shared", "exchange"))
            held.append(tape.new(sent, width, "pool", "exchange"))
        return [tape.new(number, width) for number in shapes]

    return tape.record(result, of_types, [], backward)


def _pair_scores(
    tape: Tape,
    network: Network,
    given: Mapping[str, TapeRows],
    part: PartSize,
    how: Exchanges,
    count: float,
) -> TapeRows:
    """`graphshard.train._edges.PairPredictor` on some edges."""
    scorer = network.edges
    assert scorer is not None
    ends = [_ends(tape, network, given, part, how, count, side) for side in (0, 1)]
    width = ends[0].width
    both = tape.new(count, 2 * width + scorer.edge_width)
    tape.do("elements", 2 * count * both.width * tape.itemsize)

    def halves(grad: TapeRows) -> list[TapeRows | None]:
        return [TapeRows(count, width, grad.block) for _ in range(2)]

    both = tape.record(both, ends, [], halves)
    hidden = tape.relu(tape.affine([both], width, kind="heap"))
    del both
    hidden = tape.dropout(hidden, network.dropout)
    return tape.affine([hidden], scorer.out, kind="heap")


def _link_loss(
    tape: Tape,
    network: Network,
    given: Mapping[str, TapeRows],
    part: PartSize,
    how: Exchanges,
    count: float,
) -> TapeRows:
    """The loss of some edges against wrong ends, a block of edges at a time."""
    scorer = network.edges
    assert scorer is not None
    ends = [_ends(tape, network, given, part, how, count, side) for side in (0, 1)]
    width = ends[0].width
    tape.num_parameters += scorer.num_factors * width
    losses = []
    for side in scorer.sides:
        wrong = _wrong_rows(tape, scorer, given, how, side)
        queries = tape.dropout(ends[1 - side], network.dropout)
        if scorer.num_factors:
            factors = tape.new(count, width)
            product = tape.new(count, width)
            tape.do("elements", 5 * count * width * tape.itemsize)
            held = [queries, factors]
            queries = tape.record(
                product, [queries], held, lambda grad: [tape.new(grad.count, grad.width)]
            )
            del factors, product, held
        losses.append(_loss_of_side(tape, scorer, queries, ends[side], wrong, count))
        del queries, wrong
    return losses[0] if len(losses) == 1 else tape.add(*losses)


def _wrong_rows(
    tape: Tape, scorer: EdgeScorer, given: Mapping[str, TapeRows], how: Exchanges, side: int
) -> TapeRows:
    """Rows of what is drawn, of all types of the ends of a side, on every rank."""
    of_types = [given[t] for t in scorer.ends[side]]
    width = of_types[0].width
    rows = tape.new(scorer.negatives, width)
    shapes = [x.count for x in of_types]
    # Each rank has a few of them; all are summed, and so are their gradients.
    size = scorer.negatives * width * tape.itemsize * len(of_types)
    ids = 8.0 * scorer.negatives * len(of_types)
    if how.num_ranks > 1:
        tape.exchanges.append(Exchange(tape.layer, "forward", size + ids, size + ids))

    def backward(grad: TapeRows) -> list[TapeRows | None]:
        if how.num_ranks > 1:
            tape.exchanges.append(Exchange(tape.layer, "backward", size, size))
        return [tape.new(number, width) for number in shapes]

    return tape.record(rows, of_types, [], backward)


def _loss_of_side(
    tape: Tape,
    scorer: EdgeScorer,
    queries: TapeRows,
    right: TapeRows,
    wrong: TapeRows,
    count: float,
) -> TapeRows:
    """`graphshard.train._links.link_loss`; scores are numbers of 4 bytes at least."""
    width, wide = queries.width, max(1.0, 4 / tape.itemsize)
    number = scorer.negatives * wide
    size = min(count, max(1.0, _LINK_SCORES // max(1, scorer.negatives)))
    is_one = size >= count
    num_blocks = min(_MOST_BLOCKS, math.ceil(count / size)) if count else 0

    def forward() -> tuple[TapeRows, TapeRows]:
        product = tape.new(size, width * wide)
        negative = tape.new(size, number)
        is_right = tape.new(size, scorer.negatives / tape.itemsize)
        masked = tape.new(size, number)
        del product, negative
        both = tape.new(size, number + wide)
        exponents = tape.new(size, number + wide)
        del masked, exponents
        return both, is_right

    tape.do("product", 2.0 * count * scorer.negatives * width)
    tape.do("elements", 12 * count * number * tape.itemsize)
    kept: tuple[TapeRows, ...] = ()
    for _ in range(num_blocks):  # one after the other, for what malloc makes of them
        kept = ()
        kept = forward()
    saved = [queries, right, wrong, *(kept if is_one else ())]
    kept = ()

    def backward(grad: TapeRows) -> list[TapeRows | None]:
        of_ends: list[TapeRows | None] = [tape.new(count, width), tape.new(count, width)]
        if not is_one:  # slices of gradients are as long as the whole
            of_ends.append(tape.new(count, width))
        for _ in range(num_blocks):
            held = () if is_one else forward()
            grads = tape.new(size, 2 * (number + wide))
            masked = tape.new(size, number)
            del held, grads, masked
        tape.do("product", 4.0 * count * scorer.negatives * width)
        tape.do("elements", 12 * count * number * tape.itemsize)
        return [*of_ends[:2], tape.new(scorer.negatives, width)]

    return tape.record(tape.new(1, 1), [queries, right, wrong], saved, backward)
