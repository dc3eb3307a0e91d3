# SPDX-License-Identifier: Apache-2.0
"""Tape: a step of training on paper, on rows that have sizes and no values.

A network is written down once more in operations on `TapeRows`, which know how many numbers they
are. The tape notes what each operation computes and sends, and what it keeps for the backward;
memory is counted as torch's autograd has it: rows live while a variable or the tape holds them, a
node's rows go when its backward is done, gradients of one tensor are added up in new ones. Python's
own count of references says when rows are gone, so a program has the variables of the layer it
stands for, and nothing else has to be said.

[Note: resident memory]
    What a process takes from the system is more than what is in use, for freed blocks are kept.
    There are four kinds here: results of this package's kernels of `LARGE_BYTES` and more take
    whole large pages, which wait for later results (see [Note: memory of results] in
    ``_base/kernels.py``); what ranks of one host hand to each other lies in blocks that wait, too;
    these two count with the most that was ever in use. What torch makes comes from malloc, whose
    rules are those of `Malloc`. Set-up takes what goes back at once. A few epochs with their
    evaluations are gone through, for what malloc kept of one decides what the next one finds.

    They are those of ranks, whose tensors are in large pages (see [Note: large pages] in
    ``_base/memory.py``); a process that joins no others has small pages, and takes up to twice as
    much for what malloc keeps, more or less from run to run.

[Note: zeros]
    A long message between hosts goes without its zeros: the other numbers, and a bit for each. So
    rows know which share of their numbers is zero: behind a ReLU about half, behind a dropout more,
    as many as before behind a factor, and none behind all else: products, sums and norms. What is
    counted as sent are rows as they are; only the seconds of a link know of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .._base.kernels import LARGE_BYTES
from ._malloc import MALLOC_KEEPS, Malloc

_FIRST_THRESHOLD = 128 << 10  # of glibc
LARGE_PAGE = 2 << 20  # as kLargePage in csrc/runtime/large_blocks.cpp

_LONG_BYTES, _FEWEST_ZEROS = 1 << 16, 0.25
"""Messages of so many bytes of which such a share is zero go without their zeros; as in comm."""

ZeroSpread = tuple[float, float, float]
"""The share of numbers that is zero, or bytes of these: lowest, expected, highest."""

NO_ZEROS: ZeroSpread = 0.0, 0.0, 0.0
RELU_ZEROS: ZeroSpread = 0.4, 0.5, 0.6

_TENSOR_BYTES, _NODE_BYTES = 272, 400
"""Of what torch has beside the numbers of a tensor, and of a node of autograd."""

_MODEL = "parameters and optimizer"

AllocationKind = Literal["pool", "heap", "shared", "mapped"]
Work = Literal["product", "weights", "edges", "attention", "elements", "random", "pages", "start"]
"""What time is spent on: numbers of products of rows and matrices, of the gradients of matrices,
bytes read along edges by sums and by attention, bytes of all else, numbers that are drawn, bytes
that the system hands out anew, and operations as such."""


class Memory:
    """What is in use, and what is taken from the system.

    Args:
        fixed: Item to the bytes that are there all the time.
        freed: The largest block that malloc had mapped, and got back, before.
    """

    def __init__(self, fixed: dict[str, float], freed: float = 0.0) -> None:
        self.fixed = fixed
        self._in_use: dict[AllocationKind, float] = dict.fromkeys(
            ("pool", "heap", "shared", "mapped"), 0.0
        )
        self._kept: dict[AllocationKind, float] = dict.fromkeys(("pool", "shared"), 0.0)
        self._malloc = Malloc(max(freed, _FIRST_THRESHOLD))
        self._items: dict[str, float] = {}
        self._num_epochs = 0
        #: Gradients of the last step, moments, and the best model so far.
        self._gradients: list[_Allocation] = []
        self._moments: list[_Allocation] = []
        self._best: list[_Allocation] = []
        #: Item to the most bytes that it took.
        self.most: dict[str, float] = {}
        self.peak = sum(fixed.values())
        #: Item to bytes when most was resident.
        self.at_peak = dict(fixed)

    def keep(self, size: float, item: str) -> None:
        """Count what the first epoch makes and no other has to make again."""
        if not self._num_epochs:
            self.fixed[item] = self.fixed.get(item, 0.0) + size

    def begin_backward(self) -> None:
        """Gradients of the step before go."""
        self._gradients.clear()

    def take_gradient(self, size: float) -> None:
        """Take what stays until the next backward."""
        self._gradients.append(_Allocation(self, size, "heap", _MODEL))

    def step(self) -> None:
        """The optimizer steps down all gradients, as one vector; the first makes its moments."""
        sizes = [gradient.size for gradient in self._gradients]
        _Allocation(self, sum(sizes), "heap", _MODEL)
        if not self._moments:
            self._moments = [_Allocation(self, n, "heap", _MODEL) for n in sizes for _ in range(2)]

    def end_epoch(self) -> None:
        """An epoch and its evaluation are over, which finds the model to be the best so far."""
        self._num_epochs += 1
        self._best = [_Allocation(self, g.size, "heap", _MODEL) for g in self._gradients]

    def take_object(self, size: int) -> int:
        """Take what is small and goes with tensors or nodes; its number."""
        return self._malloc.take(size, is_tensor=False)

    def give_object_back(self, number: int) -> None:
        self._malloc.give_back(number)

    def take(self, size: float, kind: AllocationKind, item: str) -> int:
        """Take a block; its number, by which malloc knows it."""
        self._in_use[kind] += size
        self._items[item] = self._items.get(item, 0.0) + size
        self.most[item] = max(self.most.get(item, 0.0), self._items[item])
        number = self._malloc.take(size) if kind == "heap" else 0
        if kind in self._kept:
            self._kept[kind] = max(self._kept[kind], self._in_use[kind])
        taken = sum(self._kept.values()) + self._malloc.taken + self._in_use["mapped"]
        resident = sum(self.fixed.values()) + taken
        if resident > self.peak:
            self.peak = resident
            waiting = taken - sum(self._in_use.values())
            self.at_peak = {**self.fixed}
            for name, count in {**self._items, "buffers": waiting}.items():
                self.at_peak[name] = self.at_peak.get(name, 0.0) + count
        return number

    def give_back(self, size: float, kind: AllocationKind, item: str, number: int = 0) -> None:
        self._in_use[kind] -= size
        self._items[item] -= size
        if number:
            self._malloc.give_back(number)


class _Allocation:
    """Memory of rows, given back when the last that refers to it goes."""

    __slots__ = ("_item", "_memory", "_number", "_object", "kind", "size")

    def __init__(self, memory: Memory, size: float, kind: AllocationKind, item: str) -> None:
        if kind == "pool" and size < LARGE_BYTES:
            kind = "heap"
        if kind == "pool":
            size = math.ceil(size / LARGE_PAGE) * LARGE_PAGE
        self._memory, self.size, self.kind, self._item = memory, size, kind, item
        self._number = memory.take(size, kind, item)
        self._object = memory.take_object(_TENSOR_BYTES)

    def __del__(self) -> None:
        self._memory.give_back(self.size, self.kind, self._item, self._number)
        self._memory.give_object_back(self._object)


class BlockEvent(NamedTuple):
    """A block of memory that is taken, or goes."""

    block: int
    size: float | None  # in bytes; None: it goes
    kind: AllocationKind


@dataclass(frozen=True)
class StepEvents:
    """What a network was seen to take in a step.

    Args:
        outputs: Node type to the block of what the network gives to it.
        num_parameters: Numbers that are learnt.
        zeros: Of each layer, the share of zeros among the numbers of source rows that are read.
    """

    forward: tuple[BlockEvent, ...]
    backward: tuple[BlockEvent, ...]
    outputs: Mapping[str, int]
    num_parameters: float
    zeros: tuple[float, ...] = ()


def around(share: float) -> ZeroSpread:
    """A share of zeros that was seen, as far as those of a ReLU may be off."""
    low, expected, high = RELU_ZEROS
    return max(0.0, share - expected + low), share, min(1.0, share - expected + high)


def either_zero(first: ZeroSpread, second: ZeroSpread) -> ZeroSpread:
    """The share of zeros of products of numbers whose zeros have nothing to do with each other."""
    low, expected, high = (1 - (1 - a) * (1 - b) for a, b in zip(first, second, strict=True))
    return low, expected, high


class Node:
    """What the backward of an operation needs.

    Args:
        inputs: Of the operation; None where no gradient is wanted.
        saved: TapeRows that are kept until the backward is done.
        backward: From the gradient of the result to those of the inputs.
        num_parameters: Numbers whose gradient it finds.
    """

    def __init__(
        self,
        number: int,
        inputs: Sequence[Node | None],
        saved: list[_Allocation | None],
        backward: Callable[[TapeRows], Sequence[TapeRows | None]],
        layer: str,
        num_parameters: float,
    ) -> None:
        self.number, self.inputs, self.saved = number, list(inputs), saved
        self.num_parameters = num_parameters
        self.backward: Callable[[TapeRows], Sequence[TapeRows | None]] | None = backward
        self.layer = layer


@dataclass(eq=False)
class TapeRows:
    """``count`` rows of ``width`` numbers."""

    count: float
    width: float
    block: _Allocation | None
    node: Node | None = None
    #: Whether they are the same in every step, and what is made of them alone is kept.
    is_constant: bool = False
    #: Whether they stay in files, and are read for products.
    is_stored: bool = False
    #: Of rows in files, columns beside them that are learnt, and get gradients.
    num_learnt: int = 0
    #: Share of the numbers that is zero. See [Note: zeros].
    zeros: ZeroSpread = NO_ZEROS


@dataclass
class Exchange:
    """TapeRows that travel in one exchange.

    Args:
        sent: Bytes that leave this rank.
        received: Bytes that arrive.
        overlaps: Work that is done meanwhile.
        rounds: Messages one after the other.
        zeros: Of the bytes that are sent, and of those received, the bytes of zeros.
        word: Bytes of a number on its way.
    """

    layer: str
    direction: Literal["forward", "backward"]
    sent: float
    received: float
    overlaps: dict[Work, float] = field(default_factory=dict)
    rounds: int = 1
    zeros: tuple[ZeroSpread, ZeroSpread] = NO_ZEROS, NO_ZEROS
    word: int = 4

    def on_link(self, num_peers: int, which: int = 1) -> float:
        """Bytes of the direction that has more of them on a link; arguments as of `travels`."""
        return max(self.travels(num_peers, which))

    def travels(self, num_peers: int, which: int = 1) -> tuple[float, float]:
        """Bytes that are sent, and that come, without zeros. See [Note: zeros].

        Args:
            num_peers: Ranks that get a message each.
            which: Of the spread of zeros: 0 for the fewest, 2 for the most.
        """
        found = []
        for size, zeros in zip((self.sent, self.received), self.zeros, strict=True):
            is_long = size >= num_peers * _LONG_BYTES
            is_shorter = is_long and zeros[which] >= _FEWEST_ZEROS * size
            bits = size / (8 * self.word)
            found.append(size - zeros[which] + bits if is_shorter else size)
        return found[0], found[1]


class Tape:
    """What one step does; see the module.

    Args:
        memory: Where rows are counted.
        itemsize: Bytes of a number.
        records: Whether there will be a backward.
    """

    def __init__(self, memory: Memory, itemsize: int = 4, records: bool = True) -> None:
        self.memory, self.itemsize, self.records = memory, itemsize, records
        self.work: dict[Work, float] = {}
        self.exchanges: list[Exchange] = []
        self.layer = ""
        self.direction: Literal["forward", "backward"] = "forward"
        self._number = 0
        #: Numbers that are learnt alike on all ranks.
        self.num_parameters = 0.0
        #: Of these, numbers without a gradient: those of rows that nothing reads.
        self.num_unused = 0.0
        self._num_of_nodes = 0.0
        self._objects: list[int] = []  # of nodes, which go together

    def do(self, kind: Work, amount: float) -> None:
        """Note work."""
        self.work[kind] = self.work.get(kind, 0.0) + amount

    def new(
        self, count: float, width: float, kind: AllocationKind = "heap", item: str = "activations"
    ) -> TapeRows:
        """TapeRows that take memory."""
        if self.direction == "backward" and item == "activations":
            item = "gradients"
        size = count * width * self.itemsize
        block = _Allocation(self.memory, size, kind, item)
        if block.kind == "heap" and size > MALLOC_KEEPS:
            self.do("pages", size)
        return TapeRows(count, width, block)

    def given(self, count: float, width: float, *, is_stored: bool = False) -> TapeRows:
        """TapeRows that are counted among what is there all the time."""
        return TapeRows(count, width, None, is_constant=True, is_stored=is_stored)

    def replay(self, events: Sequence[BlockEvent], blocks: dict[int, TapeRows], item: str) -> None:
        """Take and give back what a network was seen to take.

        Args:
            blocks: Number to the block, of those that are there.
        """
        for block, size, kind in events:
            if size is None:
                blocks.pop(block, None)
            else:
                blocks[block] = self.new(size / self.itemsize, 1, kind, item)
                if self.records and self.direction == "forward":  # each has a node
                    self._objects.append(self.memory.take_object(_NODE_BYTES))

    def learnt(self, count: float, width: float) -> TapeRows:
        """Parameters, counted likewise, that get a gradient."""
        rows = TapeRows(count, width, None)
        rows.node = self._node([], [], lambda grad: [])
        return rows

    def record(
        self,
        result: TapeRows,
        inputs: Sequence[TapeRows],
        saved: Sequence[TapeRows | None],
        backward: Callable[[TapeRows], Sequence[TapeRows | None]],
    ) -> TapeRows:
        """Tie a result to what it was made of.

        Args:
            saved: What the backward reads; it is held for it.
        """
        self.do("start", 1)
        if self.records and any(rows.node is not None for rows in inputs):
            blocks = [None if rows is None else rows.block for rows in saved]
            result.node = self._node([rows.node for rows in inputs], blocks, backward)
        return result

    def force(
        self,
        result: TapeRows,
        inputs: Sequence[TapeRows],
        saved: Sequence[TapeRows | None],
        backward: Callable[[TapeRows], Sequence[TapeRows | None]],
    ) -> TapeRows:
        """The same of an operation with parameters, which always needs a backward."""
        self.do("start", 1)
        if self.records:
            blocks = [None if rows is None else rows.block for rows in saved]
            result.node = self._node([rows.node for rows in inputs], blocks, backward)
        return result

    def _node(
        self,
        inputs: Sequence[Node | None],
        saved: list[_Allocation | None],
        backward: Callable[[TapeRows], Sequence[TapeRows | None]],
    ) -> Node:
        self._number += 1
        self._objects.append(self.memory.take_object(_NODE_BYTES))
        # What was noted since the last node is of this one.
        more = self.num_parameters - self._num_of_nodes
        self._num_of_nodes = self.num_parameters
        return Node(self._number, inputs, saved, backward, self.layer, max(0.0, more))

    def backward(self, loss: TapeRows) -> None:
        """Run the backward of all that led to ``loss``, the latest operation first."""
        assert loss.node is not None
        self.memory.begin_backward()
        self.direction = "backward"
        reached: dict[int, Node] = {}
        stack = [loss.node]
        while stack:
            node = stack.pop()
            if node.number not in reached:
                reached[node.number] = node
                stack.extend(n for n in node.inputs if n is not None)
        grads: dict[int, TapeRows] = {loss.node.number: self.new(loss.count, loss.width)}
        loss.block = loss.node = None
        for number in sorted(reached, reverse=True):
            node = reached.pop(number)
            grad = grads.pop(number, None)
            if grad is None or node.backward is None:
                continue
            self.layer = node.layer
            shares = list(node.backward(grad))
            del grad
            if node.num_parameters:
                self.memory.take_gradient(node.num_parameters * self.itemsize)
            node.saved, node.backward = [], None
            while shares:
                share = shares.pop()
                into = node.inputs[len(shares)]
                if share is None or into is None:
                    continue
                before = grads.get(into.number)
                if before is not None:
                    self.do("elements", 3 * self._size(share))
                    grads[into.number] = self.new(share.count, share.width)
                else:
                    grads[into.number] = share
                del share, before
        self.direction, self.layer = "forward", ""
        self._forget_nodes()

    def _forget_nodes(self) -> None:
        while self._objects:
            self.memory.give_object_back(self._objects.pop())

    def step(self) -> None:
        """The optimizer's; the parameters are there from then on."""
        self.memory.step()
        self.memory.keep(self.num_parameters * self.itemsize, _MODEL)
        self.do("elements", 10 * self.num_parameters * self.itemsize)

    # ------------------------------------------------------------------ operations

    def _size(self, rows: TapeRows) -> float:
        return rows.count * rows.width * self.itemsize

    def affine(
        self,
        rows: Sequence[TapeRows],
        width: float,
        plus: TapeRows | None = None,
        kind: AllocationKind = "pool",
        *,
        bias: bool = True,
        is_again: bool = False,
        multiplies_late: bool = False,
    ) -> TapeRows:
        """TapeRows times matrices, summed, plus ``plus``.

        Args:
            is_again: Whether the matrices were used before.
            multiplies_late: Whether gradients are those of the result at first, and are multiplied
                by the matrices later.
        """
        count = rows[0].count
        if not is_again:
            self.num_parameters += sum(x.width for x in rows) * width + bias * width
        result = self.new(count, width, kind)
        numbers = [2.0 * x.count * x.width * width for x in rows]
        self.do("product", sum(numbers))
        stored = sum(self._size(x) for x in rows if x.is_stored)
        self.do("elements", 2 * stored)
        self.do("elements", (1 + (plus is not None)) * self._size(result))
        wanted = [x.node is not None for x in rows]
        shapes = [(x.count, x.num_learnt or x.width) for x in rows]

        def backward(grad: TapeRows) -> list[TapeRows | None]:
            grads: list[TapeRows | None] = []
            self.do("elements", 2 * stored)
            for (n, w), number, want in zip(shapes, numbers, wanted, strict=True):
                self.do("weights", number)
                if want:
                    self.do("product", number)
                of_rows = self.new(n, w, kind) if want else None
                if of_rows is not None and multiplies_late:
                    of_rows.zeros = grad.zeros
                grads.append(of_rows)
                del of_rows
            return [*grads, grad] if plus is not None else grads

        inputs = [*rows, *([plus] if plus is not None else [])]
        return self.force(result, inputs, rows, backward)

    def elementwise(
        self,
        rows: TapeRows,
        saves: Literal["input", "result", "other", "nothing"],
        passes: int = 3,
        function: Literal["ReLU", "factor", "other"] = "other",
    ) -> TapeRows:
        """A function of each number; ``saves`` says what its gradient is found from."""
        result = self.new(rows.count, rows.width)
        made = RELU_ZEROS if function == "ReLU" else NO_ZEROS
        result.zeros = rows.zeros if function == "factor" else made
        self.do("elements", passes * self._size(result))
        saved = {"input": rows, "result": result, "other": None, "nothing": None}[saves]

        def backward(grad: TapeRows) -> list[TapeRows | None]:
            self.do("elements", passes * self._size(grad))
            if saves == "nothing":
                return [grad]
            back = self.new(grad.count, grad.width)
            back.zeros = NO_ZEROS if function == "other" else either_zero(grad.zeros, made)
            return [back]

        return self.record(result, [rows], [saved], backward)

    def relu(self, rows: TapeRows, passes: int = 3) -> TapeRows:
        """Zero in place of numbers below it."""
        return self.elementwise(rows, "result", passes, "ReLU")

    def scaled(self, rows: TapeRows) -> TapeRows:
        """TapeRows, each times a factor."""
        return self.elementwise(rows, "other", function="factor")

    def dropout(self, rows: TapeRows, p: float) -> TapeRows:
        """As torch has it on a CPU: random factors of the size of the rows are kept."""
        if rows.is_stored and self.records:
            self.do("random", rows.count * rows.width)
        if not p or not self.records or rows.is_stored:
            return rows
        factors = self.new(rows.count, rows.width)
        result = self.new(rows.count, rows.width)
        result.zeros = either_zero(rows.zeros, (p, p, p))
        self.do("random", rows.count * rows.width)
        self.do("elements", 5 * self._size(result))

        def backward(grad: TapeRows) -> list[TapeRows | None]:
            self.do("elements", 3 * self._size(grad))
            back = self.new(grad.count, grad.width)
            back.zeros = either_zero(grad.zeros, (p, p, p))
            return [back]

        return self.record(result, [rows], [factors], backward)

    def add(self, first: TapeRows, second: TapeRows) -> TapeRows:
        """A sum of two."""
        result = self.new(first.count, first.width)
        self.do("elements", 3 * self._size(result))
        return self.record(result, [first, second], [], lambda grad: [grad, grad])

    def bias(self, rows: TapeRows) -> TapeRows:
        """TapeRows plus a vector."""
        self.num_parameters += rows.width
        result = self.new(rows.count, rows.width)
        self.do("elements", 2 * self._size(result))
        return self.force(result, [rows], [], lambda grad: [grad])

    def cross_entropy(self, scores: TapeRows, count: float) -> TapeRows:
        """Mean loss over ``count`` of the rows."""
        chosen = self.new(count, scores.width)
        logs = self.new(count, scores.width)
        self.do("elements", 6 * self._size(logs))
        del chosen
        result = self.new(1, 1)
        shape = scores.count, scores.width

        def backward(grad: TapeRows) -> list[TapeRows | None]:
            of_logs = self.new(count, shape[1])
            of_chosen = self.new(count, shape[1])
            self.do("elements", 6 * self._size(of_chosen))
            del of_logs
            zeros = self.new(*shape)
            whole = self.new(*shape)
            self.do("elements", 4 * self._size(whole))
            del of_chosen, zeros
            unread = 1.0 - min(1.0, count / shape[0]) if shape[0] else 0.0
            whole.zeros = unread, unread, unread
            return [whole]

        return self.record(result, [scores], [logs], backward)
