# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: what a network of the user's own takes, from steps on two small graphs.

Nothing is known of such a network, so that its plan cannot be written down. It is run, forward and
backward, on random graphs in the proportions of the one that is planned, and each block of memory
that an operation of torch makes is noted, and when it goes. A second graph is twice as large: a
block that is larger there grows with the graph, and its size is drawn on to that of the real one;
one that is not stays as it is. Results of this package's kernels, which wait in blocks of their
own, are told by how they are made.

What operations take and give back within themselves is not seen, nor are rows of other ranks, of
which the small graphs have none. Which share of the rows that would travel is zero is seen: those
that built-in messages read of sources. What functions of the user's and attention read counts as
none.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..errors import ModelError
from ..function import MessageFunction
from ..graph import Block, MessagePassingGraph, heterograph
from ..ops import Adjacency
from ..plan import BlockEvent, PartSize, StepEvents
from ._own_model import LayeredNetwork, ModelSchema, build_own_model

_COUNT = 1000  # of the largest of all numbers of nodes and of edges, in the smaller graph


class Rehearsal:
    """Gives the blocks of a step on parts of any size; for `graphshard.plan.Network`.

    The user's code runs once for all plans of a step on the same parts; what it gave, or why it
    failed, is kept.

    Args:
        schema: What the model is told about the graph.
        learnt: Node types whose rows get gradients.
    """

    def __init__(
        self,
        model: str,
        schema: ModelSchema,
        arguments: Mapping[str, Any],
        dtype: torch.dtype,
        learnt: Sequence[str],
        *,
        autocast: bool = False,
    ) -> None:
        self._schema, self._dtype, self._learnt = schema, dtype, tuple(learnt)
        self._model, self._autocast = model, autocast
        with torch.random.fork_rng(devices=[]):
            self._network = build_own_model(model, schema, arguments).to(dtype)
        self._known: dict[Any, StepEvents | ModelError] = {}

    @property
    def is_layered(self) -> bool:
        """Whether an evaluation of features in files goes layer by layer."""
        return isinstance(self._network, LayeredNetwork)

    def __call__(self, parts: Sequence[PartSize], *, trains: bool) -> StepEvents:
        """The blocks of a forward, and of its backward, where each layer runs on a part.

        Raises:
            ModelError: A step fails, or the two differ by more than the sizes of blocks.
        """
        key = trains, *(repr((p.nodes, p.sources, p.edges)) for p in parts)
        if key not in self._known:
            most = max(1.0, *(n for part in parts for n in _counts(part)))
            shares = [_COUNT / most, 2 * _COUNT / most]
            try:
                with torch.random.fork_rng(devices=[]):
                    small, large = (self._events(parts, share, trains=trains) for share in shares)
                self._known[key] = _drawn_on(small, large, shares)
            except Exception as error:  # whatever a user's code raises
                what = f"{type(error).__name__}: {error}".splitlines()[0]
                failed = ModelError(
                    f"model {self._model} must run on small graphs of random edges to be planned, "
                    f"and does not ({what}); plan one of graphshard's own"
                )
                self._known[key] = failed
                raise failed from error
        known = self._known[key]
        if isinstance(known, ModelError):
            raise known
        return known

    def _events(self, parts: Sequence[PartSize], share: float, *, trains: bool) -> _BlockLog:
        """What is noted in the second of two steps: the first makes what stays."""
        random = torch.Generator().manual_seed(0)
        first, is_whole = parts[0], parts[0].sources is None
        sizes = {t: _scaled(first.num_sources(t), share) for t in first.nodes}
        if is_whole:
            graphs = [_whole(first, share, random)] * len(parts)
        else:
            graphs = [_block(part, share, random) for part in parts]
        for graph in {id(graph): graph for graph in graphs}.values():
            self._set_edges(graph, random)
        noted = _BlockLog(len(graphs))
        graphs = [_watched(graph, noted, layer) for layer, graph in enumerate(graphs)]
        rows = {
            t: torch.randn(n, self._schema.node_widths[t], generator=random).to(self._dtype)
            for t, n in sizes.items()
        }
        for ntype in self._learnt if trains else ():
            rows[ntype].requires_grad_()
        given: Any = rows if self._schema.is_typed else next(iter(rows.values()))
        self._network.train(trains)
        with noted if trains else _both(torch.no_grad(), noted):
            for _ in range(2):
                noted.start()
                with torch.autocast("cpu", torch.bfloat16, enabled=self._autocast):
                    made = self._network(graphs, given)
                ends = made if isinstance(made, Mapping) else {str(self._schema.target): made}
                noted.end_forward(ends)
                if trains:
                    wanted = [x for x in ends.values() if x.requires_grad]
                    del made, ends
                    grads = [torch.ones_like(x) for x in wanted]
                    torch.autograd.backward(wanted, grads)
                    del wanted, grads
                    self._network.zero_grad(set_to_none=True)
                    for x in rows.values():
                        x.grad = None
                    noted.end_backward()
        noted.num_parameters = sum(p.numel() for p in self._network.parameters())
        return noted

    def _set_edges(self, graph: MessagePassingGraph, random: torch.Generator) -> None:
        for etype, widths in self._schema.edge_widths.items():
            count = graph.num_edges(etype)
            for name, width in widths.items():
                shape = (count,) if name == "weight" else (count, width)
                column = torch.rand(shape, generator=random).to(self._dtype)
                graph.edges[etype].data[name] = column


@contextlib.contextmanager
def _both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


def _counts(part: PartSize) -> Iterator[float]:
    yield from part.edges.values()
    yield from (part.num_sources(t) for t in part.nodes)


def _scaled(count: float, share: float) -> int:
    return max(1, round(count * share)) if count else 0


def _ends(
    part: PartSize, share: float, random: torch.Generator
) -> Iterator[tuple[Any, Tensor, Tensor, int, int]]:
    for etype, count in part.edges.items():
        num_src = _scaled(part.num_sources(etype[0]), share)
        num_dst = _scaled(part.nodes[etype[2]], share)
        number = _scaled(count, share) if num_src and num_dst else 0
        src, dst = (
            torch.randint(max(1, n), (number,), generator=random) for n in (num_src, num_dst)
        )
        yield etype, src, dst, num_src, num_dst


def _whole(part: PartSize, share: float, random: torch.Generator) -> MessagePassingGraph:
    ends = {etype: (src, dst) for etype, src, dst, _, _ in _ends(part, share, random)}
    return heterograph(ends, {t: _scaled(n, share) for t, n in part.nodes.items()})


def _block(part: PartSize, share: float, random: torch.Generator) -> Block:
    edges = {
        etype: Adjacency(src, dst, num_src, num_dst, check=False)
        for etype, src, dst, num_src, num_dst in _ends(part, share, random)
    }
    sources = {t: _scaled(part.num_sources(t), share) for t in part.nodes}
    return Block(sources, {t: _scaled(n, share) for t, n in part.nodes.items()}, edges)


def _watched(graph: MessagePassingGraph, log: _BlockLog, layer: int) -> MessagePassingGraph:
    """The graph of a layer, which tells of the source rows that built-in messages read."""
    kind: Any = type(graph)

    def note(graph: Any, message: Any, etype: Any = None) -> None:
        if isinstance(message, MessageFunction):
            ends = (message.lhs_target, message.lhs_field), (message.rhs_target, message.rhs_field)
            for of_relation in graph.canonical_etypes if etype is None else [etype]:
                for field in (field for target, field in ends if target == "u"):
                    log.read(layer, graph[of_relation].srcdata.get(field))

    def update_all(self: Any, message_func: Any, *more: Any, **named: Any) -> None:
        note(self, message_func, named.get("etype", more[2] if len(more) > 2 else None))
        kind.update_all(self, message_func, *more, **named)

    def multi_update_all(self: Any, etype_dict: Any, *more: Any, **named: Any) -> None:
        for etype, functions in etype_dict.items():
            note(self, functions[0], etype)
        kind.multi_update_all(self, etype_dict, *more, **named)

    # Views of some relations are of the same class.
    methods = {"update_all": update_all, "multi_update_all": multi_update_all}
    watched = copy.copy(graph)
    watched.__class__ = type(kind.__name__, (kind,), methods)
    return watched


class _SeenBlock(NamedTuple):
    block: int
    size: int | None  # in bytes; None: it goes
    is_of_kernel: bool = False


class _BlockLog(TorchDispatchMode):
    """Notes blocks of memory as operations make them, and as the last tensor on them goes.

    Args:
        num_layers: Whose source rows are noted, too.
    """

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self._is_paused = False
        #: Of each layer, numbers of source rows that were read, and zeros among them.
        self._read = [[0, 0] for _ in range(num_layers)]
        self._blocks: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._number = 0
        self.events: list[_SeenBlock] = []
        self.forward: tuple[_SeenBlock, ...] = ()
        self.backward: tuple[_SeenBlock, ...] = ()
        self.outputs: dict[str, int] = {}
        self.num_parameters = 0

    def start(self) -> None:
        """Forget what was noted; blocks that are there stay known."""
        self.events.clear()
        self._read = [[0, 0] for _ in self._read]

    def read(self, layer: int, rows: Any) -> None:
        """Count the zeros of rows that a layer reads; what that takes is not noted."""
        if isinstance(rows, Tensor) and rows.is_floating_point():
            self._is_paused = True
            self._read[layer][0] += rows.numel()
            self._read[layer][1] += rows.numel() - int(torch.count_nonzero(rows.detach()))
            self._is_paused = False

    @property
    def zeros(self) -> tuple[float, ...]:
        """Of each layer, the share of zeros in what it read."""
        return tuple(zeros / numbers if numbers else 0.0 for numbers, zeros in self._read)

    def end_forward(self, rows: Mapping[str, Tensor]) -> None:
        self.forward = tuple(self.events)
        self.events.clear()
        self.outputs = {t: self._note(x, is_new=False) for t, x in rows.items()}

    def end_backward(self) -> None:
        self.backward = tuple(self.events)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_paused:
            return func(*args, **kwargs)
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor):
                self._note(x, is_new=False)
        result = func(*args, **kwargs)
        # This package's kernels write to empty tensors, which operations of torch do not ask for.
        is_of_kernel = func is torch.ops.aten.empty.memory_format
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self._note(x, is_new=True, is_of_kernel=is_of_kernel)
        return result

    def _note(self, tensor: Tensor, *, is_new: bool, is_of_kernel: bool = False) -> int:
        """The number of a tensor's block."""
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._blocks and self._blocks[key][0]() is storage:
            return self._blocks[key][1]
        number = self._number
        self._number += 1

        def gone(reference: weakref.ref[Any]) -> None:
            if is_new:
                self.events.append(_SeenBlock(number, None))
            if key in self._blocks and self._blocks[key][0] is reference:
                del self._blocks[key]

        self._blocks[key] = weakref.ref(storage, gone), number
        if is_new:
            self.events.append(_SeenBlock(number, storage.nbytes(), is_of_kernel))
        return number


def _drawn_on(small: _BlockLog, large: _BlockLog, shares: Sequence[float]) -> StepEvents:
    """Events of a step of full size, from those of two that are small."""
    first, second = (_numbered_of((*n.forward, *n.backward)) for n in (small, large))
    if [(number, is_taken) for number, is_taken, _ in first] != [
        (number, is_taken) for number, is_taken, _ in second
    ]:
        raise ValueError("it does not do the same on graphs of two sizes")
    further = (1.0 - shares[0]) / (shares[1] - shares[0])
    events = []
    for (number, is_taken, event), (_, _, other) in zip(first, second, strict=True):
        size = None
        if is_taken:
            assert event.size is not None and other.size is not None
            size = max(0.0, event.size + (other.size - event.size) * further)
        events.append(BlockEvent(number, size, "pool" if event.is_of_kernel else "heap"))
    numbers = {event.block: number for number, _, event in first}
    in_forward = len(_numbered_of(small.forward))
    return StepEvents(
        forward=tuple(events[:in_forward]),
        backward=tuple(events[in_forward:]),
        outputs={t: numbers.get(block, -1) for t, block in small.outputs.items()},
        num_parameters=float(small.num_parameters),
        zeros=large.zeros,
    )


def _numbered_of(events: Sequence[_SeenBlock]) -> list[tuple[int, bool, _SeenBlock]]:
    """Events of blocks that were taken in the step, numbered from 0: whether it was, and which."""
    numbers: dict[int, int] = {}
    found = []
    for event in events:
        if event.size is not None:
            numbers[event.block] = len(numbers)
        if event.block in numbers:
            found.append((numbers[event.block], event.size is not None, event))
    return found
