# SPDX-License-Identifier: Apache-2.0
"""The networks of ``graphshard train`` on paper: what each layer computes, keeps and sends.

Each function stands for a layer or a model of `graphshard.nn` and `graphshard.train`, with its
variables; see `_tape`. A plain graph is one of one node type and one relation. What comes after the
rows of the last layer, losses and scores of edges, is in `_losses`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Literal, NamedTuple

from .._base.typing import CanonicalEType
from ._sizes import Exchanges, LearntColumns, Network, PartSize, StatesSize, SumsByLength
from ._tape import NO_ZEROS, Exchange, Memory, Tape, TapeRows, ZeroSpread, around

_MAX_BLOCKS, _SMALLEST_BLOCK, _FEWEST_COLUMNS = 4, 1 << 20, 16  # as in fullbatch/column_blocks.py
_MAX_AGGREGATED_BASES = 8  # as in nn/_rel_graph_conv.py
_OPERATIONS_A_BYTE = 256  # as in fullbatch/halo_rows.py
_LARGE_BYTES = 1 << 20  # as in comm/transport.py
_SMALLEST_SAVED = 1 << 16  # as in fullbatch/row_transport.py
_LEAST_SAVED = 1 << 16  # as in fullbatch/row_transport.py


_NO_SUMS: SumsByLength = (0.0,) * 4


class _PassSize(NamedTuple):
    """Of a pass over the shards, rows and edges.

    Args:
        sums: What of ``halo``, and of ``sent``, are sums of several rows.
    """

    destinations: float
    edges: float
    cut: float
    halo: float
    sent: float
    sums: tuple[SumsByLength, SumsByLength] = (_NO_SUMS, _NO_SUMS)


def _sends_result_gradients(
    in_width: float, out_width: float, halo: float, itemsize: int, how: Exchanges
) -> bool:
    """Whether the gradient of what a layer gives travels, not that of its input.

    Where each edge has its reverse, a rank sums these gradients as it sums rows in the forward.
    Behind a ReLU they are zero where its result is. The rule of `graphshard.nn.symmetric_sums`.
    """
    size = halo * how.row_bytes(out_width, itemsize)
    is_message = _SMALLEST_SAVED <= size < (math.inf if how.between_hosts else _LARGE_BYTES)
    return how.has_reverses and how.wire > 1 and out_width <= in_width and is_message


class _Layers:
    """Layers of one network on what one rank has."""

    def __init__(self, tape: Tape, how: Exchanges) -> None:
        self.tape, self.how = tape, how
        #: TapeRows that this layer has exchanged already, for another relation.
        self.travelled: list[TapeRows] = []
        #: Of all rows that this layer sends, what is zero, where that was seen.
        self.seen_zeros: ZeroSpread | None = None

    # ------------------------------------------------------------------ exchanges

    def _note(
        self,
        direction: str,
        sent: float,
        received: float,
        own_work: float,
        kind: str,
        zeros: tuple[ZeroSpread, ZeroSpread] = (NO_ZEROS, NO_ZEROS),
    ) -> None:
        """An exchange, during which ``own_work`` is done; ``zeros`` as in `Exchange`."""
        if self.how.num_ranks == 1:
            return
        rounds = 1 if self.how.mode == "oneshot" else self.how.num_ranks - 1
        work = {kind: own_work} if own_work else {}
        self.tape.exchanges.append(
            Exchange(
                self.tape.layer, direction, sent, received, work, rounds, zeros,  # type: ignore[arg-type]
                word=min(self.how.wire, self.tape.itemsize, 4),
            )
        )  # fmt: skip

    def _zeros_in(
        self,
        rows: Sequence[tuple[TapeRows, float, float]],
        sums: tuple[SumsByLength, SumsByLength] = (_NO_SUMS, _NO_SUMS),
    ) -> tuple[ZeroSpread, ZeroSpread]:
        """Bytes of zeros in what is sent, and received.

        A sum is zero where all its rows are.

        Args:
            rows: TapeRows, how many leave, and how many come.
            sums: What of those that come, and that leave, are sums of several rows.
        """
        number = min(self.how.wire, self.tape.itemsize)
        sent, received = [0.0] * 3, [0.0] * 3
        for x, *counts in rows:
            ways = zip((sent, received), counts, reversed(sums), strict=True)
            for total, count, by_length in ways:
                for which, share in enumerate(self.seen_zeros or x.zeros):
                    zeros = (count - sum(by_length)) * share
                    zeros += sum(n * share**k for k, n in enumerate(by_length[:-1], 2))
                    total[which] += zeros * x.width * number
        return (sent[0], sent[1], sent[2]), (received[0], received[1], received[2])

    def note_unread_gradients(
        self, part: PartSize, etype: CanonicalEType, width: float, targets: Collection[str]
    ) -> None:
        """The gradients, of zeros, of a relation that no loss reads, in sequential mode.

        They return with those of the relations that shared its pass, which a loss does read.
        """
        if any(other[0] == etype[0] and other[2] in targets for other in part.edges):
            columns = self.how.row_bytes(width, self.tape.itemsize)
            sent, halo = part.sent.get(etype[0], 0.0), part.halo.get(etype[0], 0.0)
            self._note("backward", halo * columns, sent * columns, 0.0, "edges")

    def _blocks(self, halo: float, width: float) -> int:
        """Into how many blocks of columns a remote shard is taken in sequential mode."""
        most = max(1, min(_MAX_BLOCKS, int(width) // _FEWEST_COLUMNS))
        longest = halo / max(1, self.how.num_ranks - 1)
        return int(min(most, longest * width * self.tape.itemsize // _SMALLEST_BLOCK + 1))

    def passed(
        self,
        sources: Sequence[TapeRows],
        size: _PassSize,
        width: float,
        kind: Literal["edges", "attention"] = "edges",
        *,
        divides: bool = False,
        reads_again: bool = False,
        others: Sequence[TapeRows] = (),
        kept: Sequence[TapeRows] = (),
        passes: float = 1.0,
        keeps_result: bool = False,
        heads: float = 0.0,
        states: StatesSize | None = None,
        sends_result_gradients: bool = False,
    ) -> TapeRows:
        """What a pass over the shards makes of source rows.

        Args:
            sources: TapeRows that travel.
            width: Of the result.
            divides: Whether it is a mean, whose gradient is divided first.
            reads_again: Whether the backward reads the source rows.
            others: Further inputs, at the destinations.
            kept: What the backward reads of this rank's rows.
            passes: How often the backward reads the edges, against the forward.
            states: What travels where states of destinations do; the first of ``others`` is what
                scores read of destinations.
            sends_result_gradients: As `_sends_result_gradients` says.
        """
        tape, how = self.tape, self.how
        destinations, edges, cut, halo, sent, sums = size
        alone = how.num_ranks == 1 or (not halo and not sent)
        alone |= any(x is other for x in sources for other in self.travelled)
        self.travelled += sources
        columns = sum(x.width for x in sources)
        wire = how.row_bytes(columns, tape.itemsize, len(sources))
        numbers = columns * tape.itemsize
        if sources[0].is_constant and not others and len(sources) == 1:
            # Computed once, in a block of which a copy is kept.
            result = tape.new(destinations, width, "pool")
            tape.memory.keep(destinations * width * tape.itemsize, "features")
            return result
        needs_grad = any(x.node is not None for x in sources) and tape.records
        arrived: list[TapeRows] = []
        oneshot = how.mode == "oneshot"
        if not alone and states is not None:
            ways, read = 2 if needs_grad else 1, others[0].width
            if not self._sends_states(states, halo * wire, wire * ways, width, heads, read, ways):
                states = None
        come = made = of_result = of_read = of_number = 0.0  # states, and bytes of each
        if not alone and states is not None:
            (halo, sent), (come, made) = states.rows, states.states
            of_number = heads * max(tape.itemsize, 4)
            of_result, of_read = how.row_bytes(width, tape.itemsize), read * tape.itemsize
            self._note("forward", come * of_read, made * of_read, 0.0, kind)
        zeros = self._zeros_in([(x, sent, halo) for x in sources], sums)
        if not alone:
            of_state = of_result + of_number
            self._note(
                "forward",
                sent * wire + made * of_state,
                halo * wire + come * of_state,
                (edges - cut) * numbers,
                kind,
                zeros,
            )
            blocks = 1 if oneshot else self._blocks(halo, columns)
            share = 1.0 if oneshot else min(1.0, (1 + how.prefetch) / (how.num_ranks - 1)) / blocks
            outgoing = tape.new(sent * share, columns, "shared" if oneshot else "pool", "exchange")
            tape.do("elements", 2 * sent * numbers)  # put together before they leave
            arrived = [tape.new(halo * share, x.width, "pool", "halo") for x in sources]
        result = tape.new(destinations, width, "pool")
        moving = None
        if states is not None:
            moving = tape.new(come + made, width + heads, "pool", "exchange")
        tape.do(kind, edges * numbers)
        del moving
        if not alone:
            del outgoing
        keeps = reads_again and needs_grad and (oneshot or not how.rematerialize)
        saved: list[TapeRows | None] = [*kept, *(arrived if keeps else [])]
        if reads_again and needs_grad and not oneshot and not how.rematerialize and not alone:
            whole = [tape.new(halo * (1 - share), x.width, "pool", "halo") for x in sources]
            saved += whole
        if keeps_result:
            saved.append(result)
        del arrived
        wanted = [x.node is not None for x in sources]
        shapes = [(x.count, x.width) for x in sources]
        other_shapes = [(x.count, x.width, x.node is not None) for x in others]

        def backward(grad: TapeRows) -> list[TapeRows | None]:
            held: list[TapeRows] = []
            if divides:
                held.append(tape.new(destinations, width, "pool"))
                tape.do("elements", 3 * destinations * width * tape.itemsize)
            if heads:
                held.append(tape.new(destinations, heads))
            tape.do(kind, passes * edges * numbers)
            back = [w for w, want in zip(shapes, wanted, strict=True) if want]
            of_wire = how.row_bytes(sum(w for _, w in back), tape.itemsize, len(back))
            if not alone and reads_again and not oneshot and how.rematerialize:
                self._note("backward", sent * wire, halo * wire, 0.0, kind, zeros)
                held += [tape.new(halo * share, w, "pool", "halo") for _, w in shapes]
            of_own = (edges - cut) * numbers
            if states is not None:
                held.append(tape.new(come + made, width + 2 * heads, "pool", "exchange"))
                of_grad = of_result + 2 * of_number
                self._note("backward", come * of_grad, made * of_grad, 0.0, kind)
            if not alone and back and sends_result_gradients:
                of_result_grad = self._zeros_in([(grad, sent, halo)], sums)
                self._note("backward", sent * of_wire, halo * of_wire, of_own, kind, of_result_grad)
            elif not alone and back:
                self._note("backward", halo * of_wire, sent * of_wire, of_own, kind)
            if states is not None:
                self._note("backward", made * of_read, come * of_read, 0.0, kind)
            if oneshot and not alone:
                leaving = [tape.new(halo, w, "pool", "halo") for _, w in back]
                held.append(tape.new(halo, sum(w for _, w in back), "shared", "exchange"))
                leaving.clear()
            grads: list[TapeRows | None] = [
                tape.new(n, w, "pool") if want else None
                for (n, w), want in zip(shapes, wanted, strict=True)
            ]
            grads += [tape.new(n, w) if want else None for n, w, want in other_shapes]
            if not alone:
                part = 1.0 if oneshot else share
                if not oneshot:
                    held += [tape.new(halo * part, w, "pool", "halo") for _, w in back]
                back_here = [tape.new(sent * part, w, "pool", "exchange") for _, w in back]
                tape.do("elements", 3 * sent * sum(w for _, w in back) * tape.itemsize)
                del back_here
            return grads

        inputs = [*sources, *others]
        return tape.record(result, inputs, saved, backward)

    def _sends_states(
        self,
        states: StatesSize,
        halo_bytes: float,
        of_row: float,
        width: float,
        heads: float,
        read: float,
        ways: int,
    ) -> bool:
        """Whether states of destinations travel, as `split_of_attention` has it.

        Args:
            of_row: Bytes of a row, forward and backward together.
            read: Columns that scores read of destinations.
        """
        how, itemsize = self.how, self.tape.itemsize
        if how.mode != "oneshot" or (not how.between_hosts and halo_bytes >= _LARGE_BYTES):
            return False
        of_number = max(itemsize, 4)
        of_state = ways * how.row_bytes(width, itemsize) + read * itemsize + heads * of_number
        of_state += (2 * heads + read) * of_number if ways == 2 else 0.0
        num_read, num_rows, num_states = states.totals
        saved = (num_read - num_rows) * of_row - num_states * of_state
        return saved >= _LEAST_SAVED * how.num_ranks

    def with_remote_rows(
        self, x: TapeRows, size: _PassSize, width: float
    ) -> tuple[TapeRows, _PassSize]:
        """Inputs of own and remote rows where they are less to send than their products.

        Args:
            width: Of what is sent otherwise.

        Returns:
            The rows, and the size of a layer that then fetches nothing.
        """
        tape, how, halo, sent = self.tape, self.how, size.halo, size.sent
        if how.mode != "oneshot" or how.num_ranks == 1 or not (halo or sent):
            return x, size
        if x.node is not None or x.is_stored:
            return x, size
        wire = how.row_bytes(x.width, tape.itemsize)
        ways = 2 if tape.records else 1
        saved = how.row_bytes(width, tape.itemsize) * ways - (0 if x.is_constant else wire)
        if ways * 2 * x.width * width > saved * _OPERATIONS_A_BYTE:
            return x, size
        if not how.between_hosts and halo * wire >= _LARGE_BYTES:
            return x, size
        block = None
        if x.is_constant:
            tape.memory.keep(halo * x.width * tape.itemsize, "features")
        else:
            own_work, zeros = 2 * x.count * x.width * width, self._zeros_in([(x, sent, halo)])
            self._note("forward", sent * wire, halo * wire, own_work, "product", zeros)
            block = tape.new(halo, x.width, "pool", "halo").block
        return TapeRows(x.count + halo, x.width, block), size._replace(cut=0.0, halo=0.0, sent=0.0)

    def extended(self, rows: Mapping[str, TapeRows], part: PartSize) -> dict[str, TapeRows]:
        """Own and then halo rows of each type, in one exchange; one-shot mode."""
        tape, how = self.tape, self.how
        if how.num_ranks == 1:
            return dict(rows)
        sizes = {t: how.row_bytes(x.width, tape.itemsize) for t, x in rows.items()}
        sums = (
            sum(part.sent.get(t, 0.0) * size for t, size in sizes.items()),
            sum(part.halo.get(t, 0.0) * size for t, size in sizes.items()),
        )
        sent = {t: part.sent.get(t, 0.0) * x.width for t, x in rows.items()}
        own = sum(x.count * x.width for x in rows.values()) * tape.itemsize
        zeros = self._zeros_in(
            [(x, part.sent.get(t, 0.0), part.halo.get(t, 0.0)) for t, x in rows.items()]
        )
        self._note("forward", *sums, own, "elements", zeros)
        arrived = {
            t: tape.new(part.halo.get(t, 0.0), x.width, "pool", "halo") for t, x in rows.items()
        }
        outgoing = tape.new(sum(sent.values()), 1, "shared", "exchange")
        del outgoing
        result = {}
        seen = [True]  # the first type whose gradient comes stands for the exchange of all
        for t, x in rows.items():
            whole = tape.new(x.count + arrived[t].count, x.width)
            tape.do("elements", 2 * whole.count * whole.width * tape.itemsize)

            def backward(
                grad: TapeRows, x_count: float = x.count, width: float = x.width, t: str = t
            ) -> list[TapeRows | None]:
                if seen:
                    seen.pop()
                    self._note("backward", sums[1], sums[0], 0.0, "elements")
                leaving = tape.new(part.halo.get(t, 0.0), width, "shared", "exchange")
                back = tape.new(part.sent.get(t, 0.0), width, "pool", "exchange")
                total = tape.new(x_count, width)
                del back, leaving
                own = tape.new(x_count, width)
                tape.do("elements", 6 * x_count * width * tape.itemsize)
                del total
                return [own]

            result[t] = tape.record(whole, [x], [], backward)
        return result

    # ------------------------------------------------------------------ layers

    def sage(
        self, x: TapeRows, own: TapeRows, size: _PassSize, width: float, aggregator: str
    ) -> TapeRows:
        tape = self.tape
        first = aggregator != "pool" and (x.width > width or x.is_stored)
        sends_late = aggregator == "mean" and _sends_result_gradients(
            x.width, width, size.halo, tape.itemsize, self.how
        )
        is_late = not first and sends_late
        if aggregator == "pool":
            x, size = self.with_remote_rows(x, size, x.width)
            h = tape.relu(tape.affine([x], x.width), 0)
            value = tape.new(size.destinations, h.width)
            # Which edge won, for each number, on a shard and on all.
            position, argmax = (tape.new(size.destinations, h.width) for _ in range(2))
            neigh = self.passed([h], size, h.width, passes=2.0)
            del value, position
            neigh = tape.record(neigh, [neigh], [argmax], lambda grad: [grad])
            del h, argmax
        else:
            h = tape.affine([x], width, bias=False) if first else x
            divides = aggregator == "mean"
            neigh = self.passed(
                [h], size, h.width, divides=divides, sends_result_gradients=sends_late
            )
            if not divides:
                mine = tape.affine([own], width, is_again=True) if first else own
                neigh = tape.scaled(tape.add(neigh, mine))
                del mine
            del h
        if aggregator == "gcn":
            return tape.bias(neigh) if first else tape.affine([neigh], width)
        if first:
            return tape.affine([own], width, plus=neigh)
        return tape.affine([own, neigh], width, multiplies_late=is_late)

    def gcn(
        self, x: TapeRows, size: _PassSize, width: float, norm: str, bias: bool = True
    ) -> TapeRows:
        tape = self.tape
        if norm == "both" and not x.is_stored:
            x = tape.scaled(x)
        first = x.width > width or x.is_stored
        sends_late = _sends_result_gradients(x.width, width, size.halo, tape.itemsize, self.how)
        is_late = not first and sends_late
        h = tape.affine([x], width, bias=False) if first else x
        del x
        result = self.passed([h], size, h.width, sends_result_gradients=sends_late)
        del h
        result = tape.scaled(result)
        if not first:
            return tape.affine([result], width, bias=bias, multiplies_late=is_late)
        return tape.bias(result) if bias else result

    def gat(
        self,
        x: TapeRows,
        own: TapeRows,
        size: _PassSize,
        width: float,
        heads: float,
        dropout: float,
        is_v2: bool,
        edge_width: int = 0,
        states: StatesSize | None = None,
    ) -> TapeRows:
        """``width`` is that of all heads."""
        tape = self.tape
        states = None if edge_width else states
        of_edges = [tape.new(size[1], width if is_v2 else heads)] if edge_width else []
        if of_edges:
            tape.num_parameters += (edge_width + (not is_v2)) * width
            tape.do("product", 2.0 * size[1] * edge_width * of_edges[0].width)
            of_edges = [tape.force(of_edges[0], [], [], lambda grad: [])]
        is_same = own is x
        x = tape.dropout(x, dropout)
        own = x if is_same else tape.dropout(own, dropout)
        recomputes = self.how.mode == "sequential" and self.how.rematerialize
        x, size = self.with_remote_rows(x, size, width if is_v2 else width + heads)
        rows = tape.affine([x], width, bias=is_v2)
        tape.num_parameters += (1 if is_v2 else 3) * width  # vectors of the scores, and the bias
        if is_v2:
            there = tape.affine([own], width)
            kept = [] if recomputes else [rows, there]
            result = self.passed(
                [rows], size, width, "attention", reads_again=True, others=[there, *of_edges],
                kept=[*kept, *of_edges],
                passes=2.5, keeps_result=True, heads=heads, states=states,
            )  # fmt: skip
            del there
        else:
            el = tape.new(rows.count, heads)
            er = tape.new(size[0], heads)
            self.tape.do("elements", rows.count * rows.width * tape.itemsize)

            def backward(grad: TapeRows) -> list[TapeRows | None]:
                tape.do("elements", 3 * grad.count * grad.width * tape.itemsize)
                return [tape.new(grad.count, grad.width, "pool")]

            rows = tape.record(rows_alike(rows), [rows], [None if recomputes else rows], backward)
            el = tape.record(el, [rows], [], lambda grad: [None])
            if is_same:
                er = tape.record(er, [rows], [], lambda grad: [None])
            else:
                there = tape.affine([own], width, bias=False, is_again=True)
                there_shape = there.count, there.width
                er = tape.record(er, [there], [there], lambda grad: [tape.new(*there_shape)])
                del there
            result = self.passed(
                [rows, el], size, width, "attention", reads_again=True,
                others=[er, *of_edges], kept=[*([] if recomputes else [rows]), el, er, *of_edges],
                passes=2.5, keeps_result=True,
                heads=heads, states=states,
            )  # fmt: skip
            del el, er
        statistics = tape.new(size[0], 2 * heads)
        if recomputes and self.tape.records:
            # Found again from the input when the backward asks for it.
            shape = rows.count, rows.width, x.width

            def again(grad: TapeRows) -> list[TapeRows | None]:
                tape.do("product", 2 * shape[0] * shape[1] * shape[2])
                return [grad]

            return tape.record(result, [result], [statistics], again)
        return tape.record(result, [result], [statistics], lambda grad: [grad])

    def rgcn(self, x: TapeRows, size: _PassSize, network: Network, width: float) -> TapeRows:
        """One whose edges carry relation numbers."""
        tape, bases = self.tape, network.num_bases
        destinations, edges, halo, sent = size.destinations, size.edges, size.halo, size.sent
        if 0 < bases <= _MAX_AGGREGATED_BASES:
            weights = tape.learnt(edges, bases)
            coefficients = tape.new(edges, bases)
            coefficients = tape.record(coefficients, [weights], [], lambda grad: [None])
            neigh = self.passed(
                [x], size, x.width * bases, reads_again=True, others=[coefficients],
                kept=[x, coefficients], passes=2.0,
            )  # fmt: skip
            result = tape.affine([neigh], width, bias=False)
            tape.num_parameters += network.num_relations * bases
        else:
            whole = self.extended_plain(x, halo, sent)
            taken = tape.new(edges, x.width)
            ordered = tape.new(edges, x.width)
            del taken
            products = tape.new(edges, width)
            message = tape.new(edges, width)
            del products
            back_in_order = tape.new(edges, width)
            del message
            normed = tape.new(edges, width)
            del back_in_order
            tape.do("product", 2 * edges * x.width * width)
            tape.do("elements", edges * (4 * x.width + 8 * width) * tape.itemsize)
            result = tape.new(destinations, width, "pool")
            del normed
            matrices = network.num_bases or network.num_relations
            tape.num_parameters += matrices * x.width * width
            tape.num_parameters += network.num_relations * network.num_bases
            in_width, count = x.width, whole.count
            wants = whole.node is not None

            def backward(grad: TapeRows) -> list[TapeRows | None]:
                of_edges = tape.new(edges, width)
                scaled = tape.new(edges, width)
                del of_edges
                moved = tape.new(edges, width)
                del scaled
                tape.do("weights", 2 * edges * in_width * width)
                tape.do("elements", edges * (4 * in_width + 8 * width) * tape.itemsize)
                if not wants:
                    return [None]
                tape.do("product", 2 * edges * in_width * width)
                of_rows = tape.new(edges, in_width)
                joined = tape.new(edges, in_width)
                del of_rows, moved
                ordered_back = tape.new(edges, in_width)
                del joined
                total = tape.new(count, in_width)
                del ordered_back
                return [total]

            result = tape.force(result, [whole], [ordered], backward)
            del whole, ordered
        result = tape.bias(result)
        return tape.add(result, tape.affine([x], width, kind="heap", bias=False))

    def extended_plain(self, x: TapeRows, halo: float, sent: float) -> TapeRows:
        part = PartSize(nodes={"": x.count}, edges={}, halo={"": halo}, sent={"": sent})
        return self.extended({"": x}, part)[""]


def rows_alike(rows: TapeRows) -> TapeRows:
    """The same rows as the output of another operation."""
    return TapeRows(rows.count, rows.width, rows.block)


def _size_of(part: PartSize, etype: CanonicalEType, alone: bool) -> _PassSize:
    halo = part.halo_of.get(etype, part.halo.get(etype[0], 0.0))
    sent = part.sent_of.get(etype, part.sent.get(etype[0], 0.0))
    edges, cut = part.edges[etype], part.cut.get(etype, 0.0)
    return _PassSize(part.nodes[etype[2]], edges, cut, *((0.0, 0.0) if alone else (halo, sent)))


def _size_of_sums(size: _PassSize, part: PartSize, etype: CanonicalEType) -> _PassSize:
    """The size of a pass that sums, of one tensor, all relations of a source type that it has."""
    if etype[0] not in part.fewest:
        return size
    come, sent = part.fewest[etype[0]]
    sums = part.sums.get(etype[0], ((0.0, 0.0, 0.0, come), (0.0, 0.0, 0.0, sent)))
    return size._replace(halo=min(size.halo, come), sent=min(size.sent, sent), sums=sums)


def network_rows(
    tape: Tape,
    network: Network,
    parts: Sequence[PartSize],
    how: Exchanges,
    targets: Collection[str],
    seen_zeros: Sequence[ZeroSpread] = (),
) -> dict[str, TapeRows]:
    """What the network gives to nodes of some types.

    Args:
        parts: What each layer runs on.
        seen_zeros: Of the rows that each layer sends; empty: what follows from the network.
    """
    if network.own is not None:
        return _own_rows(tape, network, parts, how, targets)
    ntypes = list(parts[0].nodes)
    is_typed = len(ntypes) > 1 or len(parts[0].edges) > 1
    has_reverses = how.has_reverses or all(part.has_reverses for part in parts)
    layers = _Layers(tape, replace(how, has_reverses=has_reverses and not is_typed))
    has_heads = network.model in ("gat", "gatv2")
    wide = network.hidden * network.heads if has_heads else network.hidden
    if is_typed or network.model == "hgt":
        return _typed(layers, network, parts, targets, wide, seen_zeros)
    (ntype,) = ntypes
    (etype,) = parts[0].edges
    rows = _input(tape, network, ntype, parts[0].num_sources(ntype), wide)
    if network.encoder and network.model != "rgcn":
        tape.layer = "encoder"
        rows = tape.relu(tape.affine([rows], wide, kind="heap"))
    tape.layer = "inputs"
    h = rows if network.model == "rgcn" else tape.dropout(rows, network.dropout)
    widths = [h.width, *[wide] * (network.layers - 1), network.out]
    for index, (part, (_, width)) in enumerate(zip(parts, pairwise(widths), strict=True)):
        tape.layer = f"layers.{index}"
        layers.seen_zeros = seen_zeros[index] if seen_zeros else None
        rows = h  # what the layer before gave is there until this one has ended
        if index:
            rows = tape.elementwise(h, "input") if has_heads else tape.relu(h)
            if not has_heads:
                rows = tape.dropout(rows, network.dropout)
        own = rows
        if part.sources is not None:
            own = TapeRows(part.nodes[ntype], rows.width, rows.block, rows.node)
        size = _size_of(part, etype, how.num_ranks == 1)
        if network.sums_rows:
            size = _size_of_sums(size, part, etype)
        if network.model == "sage":
            out = layers.sage(rows, own, size, width, network.aggregator)
        elif network.model == "gcn":
            out = layers.gcn(rows, size, width, "both")
        elif network.model == "rgcn":
            out = layers.rgcn(rows, size, network, width)
        else:
            is_last = index == network.layers - 1
            heads = 1 if is_last else network.heads
            drop = network.dropout if index else 0.0
            read = network.edge_features.get(etype, 0)
            is_v2 = network.model == "gatv2"
            out = layers.gat(rows, own, size, width, heads, drop, is_v2, read, part.states)
        if network.residual and network.model != "rgcn":
            out = tape.add(out, tape.affine([own], width, kind="heap"))
        del own
        if network.norm and network.model != "rgcn" and index < network.layers - 1:
            out = tape.elementwise(out, "input")
            tape.num_parameters += 2 * width
        h = out
        del out, rows
    return {ntype: h}


def _own_rows(
    tape: Tape,
    network: Network,
    parts: Sequence[PartSize],
    how: Exchanges,
    targets: Collection[str],
) -> dict[str, TapeRows]:
    """What a network of the user's own gives to nodes of some types."""
    assert network.own is not None
    seen = network.own(parts, trains=tape.records)
    # Another network says how long it takes, and what comes of other ranks.
    beside = Tape(Memory({"features": 0.0}), tape.itemsize, tape.records)
    zeros = [around(share) if share else NO_ZEROS for share in seen.zeros]
    like = network_rows(beside, replace(network, own=None), parts, how, targets, zeros)
    ends = list(like.values())
    like.clear()
    while tape.records and ends:
        if ends[-1].node is not None:
            beside.backward(ends[-1])
        ends.pop()
    for work, amount in beside.work.items():
        if work != "pages":
            tape.do(work, amount)
    tape.exchanges += beside.exchanges
    tape.num_parameters += seen.num_parameters
    from_others = [
        tape.new(beside.memory.most.get(item, 0.0) / tape.itemsize, 1, "pool", item)
        for item in ("halo", "exchange")
    ]
    blocks: dict[int, TapeRows] = {}
    tape.replay(seen.forward, blocks, "activations")
    given = {}
    left = list(targets)
    for ntype in targets:
        rows = blocks.get(seen.outputs.get(ntype, -1))
        block = None if rows is None else rows.block
        result = TapeRows(parts[-1].nodes[ntype], network.out, block)

        def backward(grad: TapeRows) -> list[TapeRows | None]:
            left.pop()
            if not left:  # when gradients of all have come
                tape.replay(seen.backward, blocks, "gradients")
                blocks.clear()
                from_others.clear()
            return []

        given[ntype] = tape.force(result, [], [result], backward)
        del rows, result
    if not tape.records:  # what is not given has gone
        blocks.clear()
        from_others.clear()
    return given


def _input(tape: Tape, network: Network, ntype: str, count: float, wide: float) -> TapeRows:
    if ntype not in network.features:
        return tape.learnt(count, wide)
    is_stored = network.in_files and network.model != "rgcn"
    learnt, dense = network.learnt.get(ntype), network.dense_width(ntype)
    if learnt is None:
        return tape.given(count, dense, is_stored=is_stored)
    return _with_learnt_columns(tape, learnt, count, dense, is_stored=is_stored)


def _with_learnt_columns(
    tape: Tape, learnt: LearntColumns, count: float, dense: int, *, is_stored: bool
) -> TapeRows:
    """Features, and rows of tables beside them."""
    tape.num_parameters += learnt.categories + learnt.columns * learnt.sparse_width
    numbers = [tape.new(count, 8 / tape.itemsize) for _ in learnt.widths]  # kept for gradients
    rows = [tape.new(count, width) for width in learnt.widths]
    tape.do("elements", 3 * count * sum(learnt.widths) * tape.itemsize)
    of_sparse = count * learnt.entries * learnt.sparse_width * tape.itemsize
    if learnt.columns:
        rows.append(tape.new(count, learnt.sparse_width, "pool"))
        tape.do("edges", of_sparse)
    if learnt.widths or dense:
        beside = tape.new(count, learnt.width)
        tape.do("elements", 2 * count * learnt.width * tape.itemsize)
    else:
        (beside,) = rows
    rows.clear()

    def backward(grad: TapeRows) -> list[TapeRows | None]:
        tape.do("elements", 3 * count * sum(learnt.widths) * tape.itemsize)
        tape.do("edges", of_sparse)
        return []

    beside = tape.force(beside, [], numbers, backward)
    if not dense:
        return beside
    if is_stored:
        beside.width, beside.is_stored, beside.num_learnt = dense + learnt.width, True, learnt.width
        return beside
    whole = tape.new(count, dense + learnt.width)
    tape.do("elements", 2 * count * whole.width * tape.itemsize)
    return tape.record(whole, [beside], [], lambda grad: [grad])


def _typed(
    layers: _Layers,
    network: Network,
    parts: Sequence[PartSize],
    targets: Collection[str],
    wide: float,
    seen_zeros: Sequence[ZeroSpread],
) -> dict[str, TapeRows]:
    """Networks of graphs with several types."""
    tape = layers.tape
    ntypes = list(parts[0].nodes)
    h: dict[str, TapeRows] = {}
    tape.layer = "projections"
    for ntype in ntypes:
        rows = _input(tape, network, ntype, parts[0].num_sources(ntype), wide)
        if ntype in network.features:
            rows = tape.affine([rows], wide, kind="heap", bias=False)
            if network.encoder and network.model not in ("rgcn", "hgt"):
                rows = tape.relu(rows)
        h[ntype] = rows
        del rows
    is_hgt = network.model == "hgt"
    last = network.hidden if is_hgt else network.out

    def activated(rows: TapeRows) -> TapeRows:
        if is_hgt:
            return rows
        return tape.elementwise(rows, "input") if "gat" in network.model else tape.relu(rows)

    for index, part in enumerate(parts):
        tape.layer = f"layers.{index}"
        layers.seen_zeros = seen_zeros[index] if seen_zeros else None
        width = last if index == network.layers - 1 else wide
        if is_hgt and index == 0:
            h = {t: tape.relu(x) for t, x in h.items()}
        if index:
            h = {t: tape.dropout(activated(x), network.dropout) for t, x in h.items()}
        own = {
            t: x if part.sources is None else TapeRows(part.nodes[t], x.width, x.block, x.node)
            for t, x in h.items()
        }
        read_after = targets if index == network.layers - 1 else None
        if is_hgt:
            h = _hgt(layers, network, part, h, own, read_after)
        else:
            h = _relations(layers, network, part, h, own, width, read_after)
        del own
        if network.norm and index < network.layers - 1 and network.model not in ("rgcn", "hgt"):
            h = {t: tape.elementwise(x, "input") for t, x in h.items()}
            tape.num_parameters += 2 * width * len(h)
    given = {t: h[t] for t in h if t in targets}
    del h
    for number, ntype in enumerate(given if is_hgt else ()):
        tape.layer = "output"
        rows = tape.dropout(given[ntype], network.dropout)
        given[ntype] = tape.affine([rows], network.out, kind="heap", is_again=number > 0)
        del rows
    return given


def _relations(
    layers: _Layers,
    network: Network,
    part: PartSize,
    h: Mapping[str, TapeRows],
    own: Mapping[str, TapeRows],
    width: float,
    targets: Collection[str] | None,
) -> dict[str, TapeRows]:
    """A layer for each relation, summed at each node type, and the own rows.

    Args:
        targets: The types whose rows are read after the last layer; None before it.
    """
    tape, how, is_last = layers.tape, layers.how, targets is not None
    layers.travelled.clear()
    used = {etype[0] for etype in part.edges}
    oneshot = how.mode == "oneshot"
    sums = network.model in ("sage", "gcn", "rgcn") and network.aggregator != "pool"
    sums &= next(iter(h.values())).width <= width and any(t in part.fewest for t in used)
    if oneshot and not sums:
        local = _Layers(tape, Exchanges(mode="oneshot"))
        sources = layers.extended({t: x for t, x in h.items() if t in used}, part)
    else:
        local, sources = layers, dict(h)
    in_width, at_first = next(iter(h.values())).width, tape.num_parameters
    gathered: dict[str, list[TapeRows]] = {t: [] for t in h}
    for etype in part.edges:
        size = _size_of(part, etype, oneshot and not sums)
        x = sources[etype[0]]
        before = tape.num_parameters
        shares_pass = (sums or not oneshot) and network.model not in (
            "gat",
            "gatv2",
        )  # with its source type
        if shares_pass:
            halo, sent = part.halo.get(etype[0], 0.0), part.sent.get(etype[0], 0.0)
            size = size._replace(halo=halo, sent=sent)
            if x.width <= width and network.aggregator != "pool":  # not a tensor for each relation
                size = _size_of_sums(size, part, etype)
        if network.model == "sage":
            result = local.sage(x, own[etype[2]], size, width, network.aggregator)
        elif network.model in ("gcn", "rgcn"):
            result = local.gcn(x, size, width, "right", network.model == "gcn")
        else:
            heads = 1 if is_last else network.heads
            result = local.gat(
                x, own[etype[2]], size, width, heads, 0.0, network.model == "gatv2",
                network.edge_features.get(etype, 0),
            )  # fmt: skip
        gathered[etype[2]].append(result)
        if targets is not None and etype[2] not in targets:
            tape.num_unused += tape.num_parameters - before
            if shares_pass and x.width > width and tape.records:
                layers.note_unread_gradients(part, etype, width, targets)
        del x, result
    del sources
    out = {}
    for ntype, x in own.items():
        before = tape.num_parameters
        rows = tape.affine([x], width, kind="heap", bias=network.model != "rgcn")
        if network.model == "rgcn":
            rows = tape.bias(rows)
        if targets is not None and ntype not in targets:
            tape.num_unused += tape.num_parameters - before
        results = gathered.pop(ntype)
        while results:
            total = results.pop()
            rows = tape.add(rows, total)
            del total
        out[ntype] = rows
        del rows
    if network.model == "rgcn":  # its matrices are in one tensor, and relations have no bias
        matrices = (network.num_bases or len(part.edges)) + len(own)
        tape.num_parameters = at_first + (matrices * in_width + len(own)) * width
        tape.num_parameters += len(part.edges) * network.num_bases
        tape.num_unused = 0.0
    return out


def _hgt(
    layers: _Layers,
    network: Network,
    part: PartSize,
    h: Mapping[str, TapeRows],
    own: Mapping[str, TapeRows],
    targets: Collection[str] | None,
) -> dict[str, TapeRows]:
    """`graphshard.nn.TypedHGTConv`; ``targets`` are the types whose rows are read after it."""
    tape, width, heads = layers.tape, network.hidden, network.heads
    used = {etype[0] for etype in part.edges}
    before = tape.num_parameters
    keys = {t: tape.affine([h[t]], width, kind="heap") for t in used}
    values = {t: tape.affine([h[t]], width, kind="heap") for t in used}
    queries = {
        t: tape.affine([own[t]], width, kind="heap") for t in {etype[2] for etype in part.edges}
    }
    tape.num_parameters = before + 3 * sum((x.width + 1) * width for x in h.values())
    if targets is not None:
        feeding = {etype[0] for etype in part.edges if etype[2] in targets}
        tape.num_unused += sum(
            (x.width + 1) * width * ((t not in targets) + 2 * (t not in feeding))
            for t, x in h.items()
        )
    head = width / heads
    rows_of, scores_of, copies = {}, {}, []
    local = _Layers(tape, Exchanges(mode="oneshot"))
    for etype in part.edges:
        count = h[etype[0]].count
        for name, table in (("key", keys), ("value", values)):
            x = tape.affine(
                [TapeRows(count * heads, head, table[etype[0]].block, table[etype[0]].node)],
                head,
                kind="heap",
                bias=False,
            )
            tape.num_parameters += (heads - 1) * head * head
            # Heads come first in the product; the kernel reads a copy in which nodes do.
            rows_of[etype, name] = tape.elementwise(
                TapeRows(count, width, x.block, x.node), "other"
            )
            copies.append(x)
            del x
        tape.num_parameters += heads
        if targets is not None and etype[2] not in targets:
            tape.num_unused += 2 * heads * head * head + heads
        size = _size_of(part, etype, True)
        key, query = rows_of[etype, "key"], queries[etype[2]]
        scores_of[etype] = local.passed(
            [key], size._replace(destinations=size.edges), heads, reads_again=True,
            others=[query], kept=[key, query], passes=2.0,
        )  # fmt: skip
        del key, query
    _note_hgt(layers, part, width, targets)
    sums: dict[str, list[TapeRows]] = {t: [] for t in own}
    for etype, score in scores_of.items():
        weight = tape.elementwise(score, "result")
        value = rows_of[etype, "value"]
        size = _size_of(part, etype, True)
        sums[etype[2]].append(
            local.passed(
                [value],
                size,
                width,
                reads_again=True,
                others=[weight],
                kept=[value, weight],
                passes=2.0,
            )
        )
        del weight, value
    del keys, values, queries, rows_of, scores_of, copies
    out = {}
    for ntype, x in own.items():
        parts = sums.pop(ntype)
        total = parts.pop() if parts else tape.given(x.count, width)
        while parts:
            total = tape.add(total, parts.pop())
        rows = tape.affine([tape.elementwise(total, "input")], width, kind="heap")
        tape.num_parameters += 1
        if targets is not None and ntype not in targets:
            tape.num_unused += (width + 1) * width + 1
        del total
        out[ntype] = tape.add(tape.elementwise(rows, "other"), tape.elementwise(x, "other"))
        del rows
    return out


def _note_hgt(
    layers: _Layers, part: PartSize, width: float, targets: Collection[str] | None
) -> None:
    """Exchanges of `graphshard.nn.TypedHGTConv`, forward and backward, and the halo rows.

    In one-shot mode keys and values of a relation travel together, once. In sequential mode values
    are read for the sums, with the keys of all relations of a source type together, and keys alone
    before that where a softmax goes over several relations.
    """
    tape, how = layers.tape, layers.how
    if how.num_ranks == 1:
        return
    oneshot = how.mode == "oneshot"
    num_from = Counter(etype[0] for etype in part.edges)
    num_into = Counter(etype[2] for etype in part.edges)
    # Halo rows, sent rows, columns, and whether a loss depends on them.
    passes: list[tuple[float, float, float, bool]] = []
    for etype in part.edges:
        rows = part.halo_of.get(etype, 0.0), part.sent_of.get(etype, 0.0)
        if oneshot or num_into[etype[2]] > 1:
            is_used = not oneshot or targets is None or etype[2] in targets
            passes.append((*rows, 2 * width if oneshot else width, is_used))
    for ntype, number in () if oneshot else num_from.items():
        rows = part.halo.get(ntype, 0.0), part.sent.get(ntype, 0.0)
        passes.append((*rows, 2 * width * number, True))
    for halo, sent, columns, is_used in passes:
        row = how.row_bytes(columns, tape.itemsize, round(columns / width))
        of_pass = sent * row, halo * row
        layers._note("forward", *of_pass, 0.0, "edges")
        if tape.records and is_used:
            if not oneshot and how.rematerialize:
                layers._note("backward", *of_pass, 0.0, "edges")
            layers._note("backward", *of_pass[::-1], 0.0, "edges")
