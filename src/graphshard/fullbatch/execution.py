# SPDX-License-Identifier: Apache-2.0
"""A pass over shards: sequential aggregation and rematerialization.

Source: H. Mostafa, "Sequential Aggregation and Rematerialization: Distributed Full-batch Training
of Graph Neural Networks on Large Graphs", MLSys 2022, https://arxiv.org/abs/2111.06483.

A *pass* takes the shards of one or more relations in a fixed order. Per shard it receives the
owner's rows, merges what they contribute, and frees them; the rows of the next shard are fetched
meanwhile. The backward makes the same pass: it fetches the rows again (unless the reduction is
linear in them, or they were kept), computes the shard's partial result with gradients, and sends
the gradients of the rows to their owners. One-shot aggregation is the same pass over two shards:
own rows, and all remote rows; only the transport differs:

=====================  =======================================  =================================
transport              shards                                   messages
=====================  =======================================  =================================
`PairwiseTransport`    one for each rank                        one per shard, tensor, direction
`CollectiveTransport`  own rows, and all remote rows together   one collective for all of it
=====================  =======================================  =================================

Both start an exchange and hand out a `Pending`. Rows on their way are moved by the backend: gloo
has threads of its own for it, NCCL a stream of the device, so the thread that computes is free.
Where gloo sends what is on a GPU, rows are copied to and from host memory on a stream of their own,
beside the kernels of other shards.

Memory: the local rows, the result, and the rows of two shards, or a quarter of them where messages
can be cut ([Note: column blocks]). A shard has no more rows than a part, so the memory of a worker
falls as 1/P whatever the graph.
Communication: the halo once forward; backward the halo again, plus its gradients.

What several calls read is fetched once: a `HaloRowCache` keeps the rows of constant tensors, and
those of source fields in a ``local_scope``. [Note: what is kept between calls] says for how long.

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward. Fields
    set through ``dstdata`` do not travel, nor do fields from outside the scope until they are read,
    nor those whose rows are here for other relations than the read one's: of the keys and values
    that HGT has for each relation, what one relation read is of no use to the next.

[Note: inputs travel]
    An attention layer sends what its projection makes of each row, and gets a gradient back. What
    the model reads first needs no gradient. So its rows travel as they are, nothing returns, and
    each rank projects the remote rows that it reads, once more than their owner; constant features
    do not travel at all after the first epoch. It is done between hosts, in one-shot mode, where
    the bytes that it saves take longer than the products: at 32 GFLOP/s and 1 Gbit/s a rank does
    256 operations while a byte is sent. So constant rows have 512 columns at most. `localize` makes
    the rows; the layer then works on a local graph.

Left undone: the pass waits for each shard in turn even when a later one has already arrived; the
fixed order is what makes runs repeatable to the bit.
"""

from __future__ import annotations

import copy
import os
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from .._base.config import Config
from .._base.memory import available_memory
from .._base.typing import CanonicalEType
from ..comm import (
    HaloFetch,
    Pending,
    SentRows,
    agree,
    all_reduce,
    fetch_halo,
    start_fetch,
    start_fetch_all,
    start_return,
    start_return_all,
)
from ..comm.collectives import (
    WIRE_DTYPES,
    Wire,
    copying_ahead,
    keyed,
    row_bytes,
    rows_are_ready,
    wire_row_bytes,
)
from ..comm.halo import are_messages
from ..errors import RankError
from ..graph.frame import Frame, version_of
from ..ops import Adjacency, add_rows, empty
from ..plan import budget_of, fits_oneshot
from .lazy import DeferredEdges, FieldsOnRead
from .reductions import (
    CompanionRows,
    EdgeRows,
    EdgeValues,
    Expression,
    LazySoftmax,
    Leaf,
    LeafKey,
    PerEdge,
    Reduction,
    ShardEvaluation,
    accumulation_dtype,
    find_chunks,
    is_graph_kept,
    substitute,
    walk,
)
from .softmax import AttentionSum, PartialStates, SoftmaxSum, holds_softmax
from .topology import (
    WHOLE,
    ColumnBlock,
    ConstantCache,
    FewestRows,
    Halo,
    RowsAndStates,
    Shard,
    ShardStructure,
)

# -- the policy ------------------------------------------------------------------------------------

OPERATIONS_A_BYTE = 256
"""That a rank does while a byte is sent. See [Note: inputs travel]."""

LEAST_SAVED = 1 << 16
"""Bytes that a rank must save in a pass for states of destinations to travel: a round's worth."""

ModeName = Literal["sequential", "oneshot", "auto"]

_CPU = torch.device("cpu")
_MODES = ("sequential", "oneshot", "auto")


@dataclass(frozen=True, kw_only=True)
class AggregationMode:
    """How a sharded graph fetches remote rows.

    Args:
        mode: ``"sequential"``: one remote shard at a time, the next one on its way (memory falls
            as 1/P). ``"oneshot"``: the whole halo in one exchange (fastest, any reduction).
            ``"auto"``: one-shot if its halo fits the budget on every rank.
        rematerialize: With sequential aggregation, fetch again in the backward; False keeps what
            was fetched: less communication, more memory. None is what `Config.disable_sr` says
            when a layer runs.
        memory_budget: Bytes that the halo rows of one rank may take, for ``"auto"``; None: a
            quarter of the memory that is left (see `available_memory`; of its GPU, for a graph on
            one), shared by the ranks on the machine (on the GPU).
        row_width: Columns of the widest float32 row that will be exchanged, for ``"auto"``.
        prefetch: With sequential aggregation, remote shards that are fetched while another one is
            computed (blocks of them, where wide rows are taken block by block): the memory of
            that many shards is added. 0 is none: each shard is waited for. With one-shot
            aggregation the halo is one; it is fetched while the own shard is computed, unless
            this is 0. Threads of the communication backend move the rows, not those that compute.
            None is what `Config.pipeline_depth` says when a layer runs.
        partial_sums: Send sums of rows in place of rows where that is fewer: of messages that are
            summed or averaged; and between hosts in one-shot mode, of attention, states of
            destinations. The result is the same up to the order of additions.
        halo_dtype: ``torch.bfloat16`` or ``torch.float16``: wider floating-point rows of remote
            nodes, and their gradients on the way back, travel in it and are rounded to it; a
            rank's own rows are not. ``torch.int8``: with a scale for each row, and rounded up or
            down at random, so that the expectation is exact. None sends them as they are.
    """

    mode: ModeName = "auto"
    rematerialize: bool | None = None
    memory_budget: int | None = None
    row_width: int = 256
    prefetch: int | None = None
    halo_dtype: torch.dtype | None = None
    partial_sums: bool = True

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise ValueError(f"mode must be one of {', '.join(_MODES)} (got {self.mode!r})")
        if self.memory_budget is not None and self.memory_budget < 0:
            raise ValueError(
                f"memory_budget must be a number of bytes, at least 0 (got {self.memory_budget})"
            )
        if self.row_width < 1:
            raise ValueError(f"row_width must be at least 1 (got {self.row_width})")
        if self.prefetch is not None and self.prefetch < 0:
            raise ValueError(f"prefetch must be at least 0 (got {self.prefetch})")
        if self.halo_dtype is not None and self.halo_dtype not in WIRE_DTYPES:
            raise ValueError(
                "halo_dtype must be None or one of "
                f"{', '.join(map(str, WIRE_DTYPES))} (got {self.halo_dtype})"
            )

    @property
    def rematerializes(self) -> bool:
        """Whether a layer that runs now fetches again in its backward."""
        return not Config.disable_sr if self.rematerialize is None else self.rematerialize

    @property
    def fetched_ahead(self) -> int:
        """Remote shards that a layer that runs now fetches while it computes another one."""
        return max(0, Config.pipeline_depth) if self.prefetch is None else self.prefetch

    def agree(self, group: dist.ProcessGroup | None) -> None:
        """Check that all ranks chose alike; collective. The budget may differ.

        Raises:
            ValueError: On every rank, if they did not.
        """
        value = f"mode={self.mode}, rematerialize={self.rematerializes}, "
        value += f"prefetch={self.fetched_ahead}, halo_dtype={self.halo_dtype}, "
        value += f"partial_sums={self.partial_sums}"
        agree(value, "how remote rows are fetched", group)

    def resolve(
        self, num_halo_rows: int, group: dist.ProcessGroup | None, device: torch.device = _CPU
    ) -> ModeName:
        """``"sequential"`` or ``"oneshot"``, the same on every rank; collective for ``"auto"``.

        Args:
            num_halo_rows: Rows that this rank would hold in one-shot mode.
        """
        if self.mode != "auto":
            return self.mode
        budget = self.memory_budget
        if budget is None:
            budget = budget_of(_memory_of_a_rank(device))
        is_too_large = not fits_oneshot(num_halo_rows, self.row_width, budget)
        too_large = all_reduce(torch.tensor([int(is_too_large)]), group=group)
        return "sequential" if int(too_large[0]) else "oneshot"


def _memory_of_a_rank(device: torch.device) -> int:
    """Bytes that are left for this rank where its graph is."""
    num_ranks = dist.get_world_size() if dist.is_initialized() else 1  # on this machine
    if "LOCAL_WORLD_SIZE" in os.environ:
        num_ranks = max(int(os.environ["LOCAL_WORLD_SIZE"]), 1)
    if device.type != "cuda":
        return available_memory() // num_ranks
    free, _ = torch.cuda.mem_get_info(device)
    # What torch has taken from the device and does not use now is left, too.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free // -(-num_ranks // torch.cuda.device_count())


# -- how source rows travel, and those that are kept -----------------------------------------------

SourceRows: TypeAlias = dict[LeafKey, Tensor]
"""Rows of each source leaf."""

Visit: TypeAlias = tuple[int, ColumnBlock]
"""A step of a pass, and the columns to take in it."""


class RowTransport(ABC):
    """Exchange of the rows of one halo, shard by shard.

    Args:
        wire: In which dtype wider floating-point rows travel; None is their own.
        keeps_rows: Keep what was fetched for the backward, instead of fetching it again.
        fewest: What travels in place of the rows of the halo; None for these.
    """

    #: Whether rows can be taken a few columns at a time. See [Note: column blocks].
    by_columns = True
    #: Whether gradients can be differentiated, and those of remote rows are found first.
    by_collective = False
    #: Whether remote rows are outputs of a pass too.
    returns_rows = False
    #: Tells edges of one relation apart that are not all of it.
    edges_number: int | None = None
    #: Rows that each step brings; step 0, of the own shard, brings none.
    num_rows: Sequence[int]

    def __init__(
        self,
        halo: Halo,
        wire: Wire = None,
        keeps_rows: bool = False,
        fewest: FewestRows | None = None,
    ) -> None:
        self.halo, self.wire, self.keeps_rows, self.fewest = halo, wire, keeps_rows, fewest
        self.plan = halo.plan if fewest is None else fewest.plan
        self.longest_message = (halo if fewest is None else fewest).longest_message
        #: What rows that are summed where they are are multiplied by, as `FewestRows.sent_weights`.
        self.weights: Tensor | None = None
        #: Shards of one pass, the own one included.
        self.num_steps = halo.plan.world_size
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        #: Blocks of passes, and the dimension of each leaf that they cut, by call sites.
        self.chunks: dict[Hashable, tuple[list[ColumnBlock], list[int | None]]] = {}

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """The shards of a relation, in the order in which they are merged."""
        if etype not in self._shards:
            self._shards[etype] = self._find_shards(etype)
        return self._shards[etype]

    @abstractmethod
    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]: ...

    def bind(self, reduction: Reduction) -> None:  # noqa: B027
        """Let a reduction send what it sends besides rows."""

    def whole_adjacency(self, etype: CanonicalEType) -> Adjacency:
        """All edges of a relation, from extended rows to destinations."""
        return self.halo.adjacency(etype)

    def keyed(self, is_constant: bool = False) -> RowTransport:
        """The same for one pass, which rounds at random in a way of its own; see `keyed`.

        Args:
            is_constant: Whether what travels stays for the run: the mean of many roundings would
                not be exact, so it is not rounded to int8.
        """
        wire = None if is_constant and self.wire == torch.int8 else keyed(self.wire)
        if wire is self.wire:
            return self
        transport = copy.copy(self)
        transport.wire = wire
        return transport

    def weighted(
        self, rows: Tensor, weights: Tensor, constants: ConstantCache
    ) -> RowTransport | None:
        """The same for sums of rows times fixed weights; None where these weigh more.

        Collective: the weights of the edges that other ranks sum are sent to them, anew for each
        pass unless they are constant.

        Args:
            rows: ``[num_owned, ...]``.
            weights: Of the edges of the only relation, by local edge id.
        """
        fewest = self.fewest
        if fewest is None or fewest.partial_edges is None:
            return None
        transport, key = copy.copy(self), ("weights", fewest.plan.serial, self.edges_number)
        if constants.is_constant([weights]):
            transport.weights = constants.get(key, [weights])
        else:
            num_rows, num_edges = fewest.saved
            exchanges = 2 if torch.is_grad_enabled() and rows.requires_grad else 1
            of_row = wire_row_bytes(rows, self.wire)
            if num_rows * of_row * exchanges <= num_edges * row_bytes(weights):
                return None
        if transport.weights is None:
            transport.weights = fewest.sent_weights(weights, self.partial_edges())
            if constants.is_constant([weights]):
                constants.put(key, [weights], transport.weights)
        return transport

    def partial_edges(self) -> Tensor:
        """Ids of the edges that other ranks sum, in their order."""
        assert self.fewest is not None
        assert self.fewest.partial_edges is not None
        return self.fewest.partial_edges

    @abstractmethod
    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        """Rows of a remote shard, out of whole tensors; collective."""

    @abstractmethod
    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        """Gradients of the rows of a remote shard, to their owners; collective."""

    @abstractmethod
    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        """Add what `start_return` brought to ``total``, which has all own rows, in place."""

    def prefetched(
        self,
        visits: Sequence[Visit],
        depth: int,
        whole: SourceRows,
        axes: Mapping[LeafKey, int | None],
        needs_grad: Mapping[LeafKey, bool],
        fetched_before: SourceRows,
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows, those of the next visits being fetched meanwhile.

        Close it after an error, so that no message of this pass meets those of a later one.

        Args:
            visits: The own shard first, then remote ones, each in all its blocks.
            depth: For how many visits rows are fetched ahead.
            whole: Own rows of each source leaf.
            axes: Dimension of each leaf that blocks are cut along; None or absent for whole ones.
            needs_grad: Whether gradients of a leaf's rows will be returned.
            fetched_before: Rows of the only remote shard that are here already.
        """
        cut = [key for key in whole if axes.get(key) is not None]

        def start(visit: Visit) -> tuple[list[LeafKey], Pending]:
            step, block = visit
            # All leaves with the first block of a shard, then those that are cut.
            keys = [key for key in (cut if block.index else whole) if key not in fetched_before]
            parts = [
                whole[key] if block.count == 1 else block.of(whole[key], axes.get(key))
                for key in keys
            ]
            with copying_ahead(device, are_here) if are_here is not None else nullcontext():
                return keys, self.start_fetch(step, parts, [needs_grad[key] for key in keys])

        device = next(iter(whole.values())).device if whole else _CPU
        on_gpu = device.type != "cpu"
        are_here = rows_are_ready(self.plan.state, device) if on_gpu else None
        computed: deque[torch.cuda.Event | None] = deque()
        rows = dict(whole)
        pending: deque[tuple[list[LeafKey], Pending]] = deque()
        started = 1  # the rows of the first visit are here
        try:
            for number, (step, block) in enumerate(visits):
                if number and whole:
                    if not pending:
                        pending.append(start(visits[number]))
                        started = number + 1
                    if len(computed) > 1 and (event := computed.popleft()) is not None:
                        # The host must not run ahead of the device, or the rows of many visits
                        # would be there at once: one is computed, and one comes.
                        event.synchronize()
                    keys, arriving = pending.popleft()
                    if step and block.index == 0:
                        rows |= fetched_before
                    rows |= zip(keys, arriving.wait(), strict=True)
                    del arriving
                while whole and started < len(visits) and started <= number + depth:
                    pending.append(start(visits[started]))
                    started += 1
                yield step, block, rows
                if on_gpu:
                    computed.append(rows_are_ready(self.plan.state, device))
                # Before the next ones are waited for. What is not cut came with the first block
                # of its shard, and stays for the others.
                if number + 1 < len(visits):
                    renewed = cut if visits[number + 1][1].index else whole
                    rows = {key: t for key, t in rows.items() if key not in renewed}
        finally:
            for _, arriving in pending:
                with suppress(RankError):
                    arriving.wait()


class PairwiseTransport(RowTransport):
    """One remote rank at a time: the memory of a shard, whatever the halo."""

    def __init__(
        self,
        halo: Halo,
        wire: Wire = None,
        keeps_rows: bool = False,
        fewest: FewestRows | None = None,
    ) -> None:
        super().__init__(halo, wire, keeps_rows, fewest)
        plan, rank, num_ranks = self.plan, self.plan.rank, self.plan.world_size
        steps = range(num_ranks)
        self.num_rows = [plan.recv_splits[(rank - step) % num_ranks] for step in steps]
        self._readers = [(rank + step) % num_ranks for step in steps]
        self._sent = [plan.sent[reader] for reader in self._readers]

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return (self.halo if self.fewest is None else self.fewest).shards(etype)

    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        if self.fewest is not None:
            reader, weights = self._readers[step], self.weights
            tensors = [self.fewest.made(tensor, reader, weights) for tensor in tensors]
        return start_fetch(self.plan, step, tensors, self.wire)

    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        return start_return(self.plan, step, grads, self.wire)

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        if self.fewest is not None:
            self.fewest.add_returned(total, arrived, self._readers[step], self.weights)
            return
        _add_at(total, self._sent[step], arrived)


class CollectiveTransport(RowTransport):
    """The whole halo in one collective: one step after the own shard, however many ranks."""

    by_columns = False  # blocks would be a collective each
    by_collective = True

    def __init__(self, halo: Halo, wire: Wire = None, fewest: FewestRows | None = None) -> None:
        super().__init__(halo, wire, keeps_rows=True, fewest=fewest)
        self.num_steps = min(self.num_steps, 2)
        self.num_rows = [0, self.plan.num_halo]
        self.returns_rows = fewest is None

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return (self.halo if self.fewest is None else self.fewest).halves(etype)

    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        if self.fewest is not None:
            tensors = [self.fewest.made(tensor, None, self.weights) for tensor in tensors]
        return start_fetch_all([(self.plan, t) for t in tensors], self.wire, needs_grad)

    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        return start_return_all([(self.plan, grad) for grad in grads], self.wire)

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        if self.fewest is not None:
            self.fewest.add_returned(total, arrived, None, self.weights)
            return
        num_readers = sum(count > 0 for count in self.plan.send_splits)
        if total.dtype.itemsize == 2 and num_readers > 1:  # rounded once for all of them
            self.plan.add_returned(total, arrived)
            return
        parts = arrived.split(self.plan.send_splits)
        for sent, part in zip(self.plan.sent, parts, strict=True):
            _add_at(total, sent, part)


class StatesTransport(CollectiveTransport):
    """Rows of an attention beside states of destinations, see [Note: fewest rows]."""

    def __init__(self, split: RowsAndStates, wire: Wire = None) -> None:
        super().__init__(split.halo, wire)
        self.split, self.plan = split, split.rows
        self.num_rows, self.returns_rows = [0, split.rows.num_halo], False

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return self.split.halves

    def bind(self, reduction: Reduction) -> None:
        assert isinstance(reduction, AttentionSum)
        reduction.states = PartialStates(self.split, self.wire, self.partial_edges())

    def partial_edges(self) -> Tensor:
        return self.split.partial_edges


def split_of_attention(
    halo: Halo, reduction: Reduction, wire: Wire, constants: ConstantCache
) -> RowsAndStates | None:
    """What travels of a pass in one-shot mode beside rows; None where these travel alone.

    Collective the first time for a halo. See [Note: fewest rows].
    """
    if not isinstance(reduction, AttentionSum) or halo.plan.world_size == 1:
        return None
    if reduction.reads_edges:
        return None
    sources = [leaf.tensor for leaf in reduction.leaves if leaf.target == "u"]
    if any(constants.is_constant([tensor]) for tensor in sources):
        return None
    if not are_messages([(halo.plan, tensor) for tensor in sources], wire):
        return None
    of_row, of_state = reduction.bytes_each(wire)
    if halo.plan.most_rows * of_row < LEAST_SAVED:  # less is read, and can be saved
        return None
    split = halo.fewest_of_attention
    if split is None:
        return None
    num_read, num_rows, num_states = split.totals
    saved = (num_read - num_rows) * of_row - num_states * of_state
    return split if saved >= LEAST_SAVED * halo.plan.world_size else None


def _add_at(total: Tensor, sent: SentRows, rows: Tensor) -> None:
    """Add ``rows`` where those that were sent lie, in place; a rank reads no row twice."""
    if not sent.runs:
        add_rows(total, sent.index_on(total.device), rows)
        return
    first = 0
    for start, stop in sent.runs:
        total[start:stop].add_(rows.narrow(0, first, stop - start))
        first += stop - start


@dataclass
class _HaloRows:
    """Halo rows of a field, at the version that they are of.

    See [Note: what is kept between calls].
    """

    tensor: Tensor
    version: int
    remote: Tensor
    extended: Tensor | None = None


class HaloRowCache:
    """Halo rows of constant tensors and of source fields; ``wire`` as in `RowTransport`."""

    def __init__(self, structure: ShardStructure, wire: Wire) -> None:
        self._constants, self._wire = structure.constants, wire
        self._fields: dict[tuple[int, int], _HaloRows] = {}
        # Fields of which partial sums have come, and the call sites; those that did not suffice.
        self._summed: dict[tuple[int, int], tuple[Tensor, int, Hashable]] = {}
        self._read_again: set[tuple[int, Hashable]] = set()
        #: Scopes that are open; without one, rows of fields are not kept for later calls.
        self.num_scopes = 0

    # ------------------------------------------------------------------ constants

    def constant_rows(self, halo: Halo, own: Tensor) -> Tensor | None:
        """Halo rows of a tensor that needs no gradient, if they were fetched before."""
        if not self._constants.is_constant([own]):
            return None
        return self._constants.get(("halo", id(halo)), [own])

    def keep_constant(self, halo: Halo, own: Tensor, rows: Tensor) -> None:
        """Keep halo rows of a tensor that needs no gradient, if it is constant."""
        if self._constants.is_constant([own]):
            self._constants.put(("halo", id(halo)), [own], rows)

    def fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Halo rows ``[num_halo, ...]`` of each tensor, in one exchange; collective."""
        return self.start_fetch(requests).wait()

    def start_fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> Pending:
        """The same, to be waited for."""
        rows = [self.constant_rows(halo, own) for halo, own in requests]
        missing = [i for i, part in enumerate(rows) if part is None]
        pairs = [(requests[i][0].plan, requests[i][1]) for i in missing]
        wire = keyed(self._wire)
        if self._wire == torch.int8 and self._constants.is_constant([own for _, own in pairs]):
            wire = None  # it stays for the run, and so would what it is rounded by

        def join(fetched: list[Tensor]) -> list[Tensor]:
            for i, part in zip(missing, fetched, strict=True):
                rows[i] = part
                self.keep_constant(*requests[i], part)
            return [part for part in rows if part is not None]

        return HaloFetch(pairs, wire).then(join)

    def are_less(self, requests: Sequence[tuple[Halo, Tensor]], width: int) -> bool:
        """Whether it is less to send rows, and multiply them, than their products.

        The same on every rank. See [Note: inputs travel].
        """
        tensors = [own for _, own in requests]
        if not tensors or any(own.requires_grad for own in tensors):
            return False
        saved, operations, ways = 0, 0, 2 if torch.is_grad_enabled() else 1
        for own in tensors:
            device = own.device.type
            is_cast = own.dtype != torch.float64 and torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if is_cast else own.dtype
            like = own.new_empty((0, *own.shape[1:-1], width), dtype=dtype)
            saved += ways * wire_row_bytes(like, self._wire)
            operations += ways * 2 * own.shape[1:].numel() * width
            if not self._constants.is_constant([own]):
                saved -= wire_row_bytes(own, self._wire)
        if operations > saved * OPERATIONS_A_BYTE:
            return False
        return are_messages([(halo.plan, own) for halo, own in requests], self._wire)

    def extended(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Own and then halo rows, ``[num_extended, ...]``; with one rank the own tensor itself."""
        if all(halo.plan.world_size == 1 for halo, _ in requests):
            return [own for _, own in requests]
        rows = self.fetch(requests)
        return [torch.cat([own, part]) for (_, own), part in zip(requests, rows, strict=True)]

    # ------------------------------------------------------------------ fields

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, rows of fields are kept; on leaving, also an inner scope, they are dropped."""
        self.num_scopes += 1
        try:
            yield
        finally:
            self.num_scopes -= 1
            self._fields.clear()
            self._summed.clear()

    def fields(self, halo: Halo, frame: Frame, frames: Sequence[Frame]) -> Mapping[str, Any]:
        """A source frame as one relation's edges see it: extended rows, fetched when read.

        Args:
            frames: All source frames in use; rows of what is in none of them are dropped.
        """
        return FieldsOnRead(frame, lambda name: self._extended_field(halo, frame, name, frames))

    def companions(self, halo: Halo, frame: Frame, name: str) -> list[Tensor]:
        """What else a read of field ``name`` fetches. See [Note: fields travel together]."""
        if not self.num_scopes:
            return []
        read = frame[name]
        others = [frame[n] for n in frame.scope_fields() if frame.view_of(n) != "dst"]
        distinct = {id(tensor): tensor for tensor in others if tensor is not read}
        halos: dict[int, set[int]] = {}
        for of_halo, of_tensor in self._fields:
            halos.setdefault(of_tensor, set()).add(of_halo)
        of_read = halos.get(id(read), set())
        return [
            tensor
            for key, tensor in distinct.items()
            if self.find(halo, tensor) is None and halos.get(key, set()) <= of_read
        ]

    def put(
        self, halo: Halo, rows: Sequence[tuple[Tensor, Tensor]], frames: Sequence[Frame]
    ) -> None:
        """Keep halo rows of fields, as (field, rows) each, if a scope bounds how long."""
        if not self.num_scopes:
            return
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._fields = {k: e for k, e in self._fields.items() if id(e.tensor) in in_use}
        for tensor, remote in rows:
            entry = _HaloRows(tensor, version_of(tensor), remote)
            self._fields[id(halo), id(tensor)] = entry
            if remote.grad_fn is not None:
                remote.grad_fn.register_prehook(self._forgetting((id(halo), id(tensor)), entry))

    def _forgetting(self, key: tuple[int, int], entry: _HaloRows) -> Callable[[Any], None]:
        """A hook that drops an entry: a backward frees the graph that its rows hang on."""
        cache, dropped = weakref.ref(self), weakref.ref(entry)  # the graph holds the hook

        def forget(_: Any) -> None:
            fields = {} if (here := cache()) is None else here._fields
            if key in fields and fields[key] is dropped():
                del fields[key]

        return forget

    def note_summed(self, halo: Halo, tensor: Tensor, site: Hashable) -> None:
        """Note that partial sums of a field have come, and not its rows."""
        if self.num_scopes:
            self._summed[id(halo), id(tensor)] = tensor, version_of(tensor), site

    def is_read_again(self, halo: Halo, tensor: Tensor, site: Hashable) -> bool:
        """Whether rows of a field should come, as other calls of its scope read them, too.

        A call site knows that from the second time on.
        """
        self._note_read(halo, tensor)
        return (id(halo), id(tensor)) in self._summed or (id(halo), site) in self._read_again

    def _note_read(self, halo: Halo, tensor: Tensor) -> None:
        summed = self._summed.get((id(halo), id(tensor)))
        if summed is not None and summed[0] is tensor and summed[1] == version_of(tensor):
            self._read_again.add((id(halo), summed[2]))

    def find(self, halo: Halo, tensor: Tensor) -> _HaloRows | None:
        """The tensor's halo rows, if they are here."""
        self._note_read(halo, tensor)
        entry = self._fields.get((id(halo), id(tensor)))
        if entry is None or entry.tensor is not tensor or entry.version != version_of(tensor):
            return None
        # Rows fetched without a gradient do not serve a pass that needs one.
        stale = tensor.requires_grad and torch.is_grad_enabled() and not entry.remote.requires_grad
        return None if stale else entry

    def _extended_field(
        self, halo: Halo, frame: Frame, name: str, frames: Sequence[Frame]
    ) -> Tensor:
        own = frame[name]
        entry = self.find(halo, own)
        if entry is None:
            distinct = [own, *self.companions(halo, frame, name)]
            fetched = self.fetch([(halo, tensor) for tensor in distinct])
            self.put(halo, list(zip(distinct, fetched, strict=True)), frames)
            entry = self.find(halo, own) or _HaloRows(own, version_of(own), fetched[0])
        if entry.extended is None:
            alone = halo.plan.world_size == 1
            entry.extended = own if alone else torch.cat([own, entry.remote])
        return entry.extended


# -- gradients of whole tensors out of those of their rows -----------------------------------------


@dataclass
class ShardGradients:
    """Gradients of one reduction with respect to what one shard saw; None where unused.

    Args:
        parameters: In the order of the pass.
        are_new: Whether the tensors are not shared, so that they may be written to.
    """

    leaves: dict[LeafKey, Tensor | None]
    parameters: list[Tensor | None]
    are_new: bool = False


class GradientSums:
    """Gradients of whole leaves, added up shard by shard; remote rows' are sent to their owners.

    Args:
        leaves: Those whose gradients are asked for.
        tensors: All leaves, whole; without values where no gradient needs them.
        axes: Dimension of each leaf that blocks are cut along; None or absent where every block
            sees the whole leaf.
        depth: Most shards whose gradients travel at once.
    """

    def __init__(
        self,
        transport: RowTransport,
        leaves: Sequence[Leaf],
        tensors: Mapping[LeafKey, Tensor],
        axes: Mapping[LeafKey, int | None],
        depth: int,
    ) -> None:
        self._transport, self._axes, self._depth = transport, axes, depth
        self.leaves: dict[LeafKey, Tensor] = {}
        self._source_keys: list[LeafKey] = []
        self._dtypes: dict[LeafKey, torch.dtype] = {}  # in which the sums are kept
        for leaf in leaves:
            dtype = tensors[leaf.key].dtype
            is_source = leaf.target == "u"
            # With the whole halo at once a source row is added to once.
            widens = transport.by_columns or not is_source
            self._dtypes[leaf.key] = accumulation_dtype(dtype) if widens else dtype
            self.leaves[leaf.key] = tensors[leaf.key]
            if is_source:
                self._source_keys.append(leaf.key)
        self._sums: dict[LeafKey, Tensor] = {}
        self._from_shard: dict[LeafKey, Tensor] = {}
        self._new_rows: set[LeafKey] = set()
        self._pending: deque[tuple[int, ColumnBlock, list[LeafKey], Pending]] = deque()

    def add(self, shard: Shard, grads: ShardGradients, block: ColumnBlock) -> None:
        """Take in the gradients of one reduction on one block of a shard."""
        for key, grad in grads.leaves.items():
            if grad is None:
                continue
            if key[0] == "u":
                self.add_to_rows(key, grad, grads.are_new)
            elif key[0] == "e" and shard.eids is not None:
                total = block.of(self._sum(key), self._axes.get(key))
                total.index_add_(0, shard.eids.to(torch.int64), grad.to(total.dtype))
            else:
                self._add_whole(key, grad, block, grads.are_new)

    def add_to_rows(self, key: LeafKey, grad: Tensor | None, is_new: bool = False) -> None:
        """Take in a gradient of the source rows of the present shard, if it is asked for."""
        if grad is None or key not in self.leaves:
            return
        before = self._from_shard.get(key)
        self._from_shard[key] = grad if before is None else before + grad
        if is_new or before is not None:
            self._new_rows.add(key)

    def send(self, step: int, block: ColumnBlock) -> None:
        """Add the own shard's source gradients, or start those of a remote shard on their way.

        Those of a leaf that is cut go block by block, the others with the last block.
        """
        if not self._source_keys:
            return
        if step == 0:
            while self._from_shard:
                key, grad = self._from_shard.popitem()
                self._add_whole(key, grad, block, key in self._new_rows)
            self._new_rows.clear()
            return
        self._new_rows.clear()
        keys, outgoing = [], []
        for key in self._source_keys:
            axis = self._axes.get(key)
            if block.count > 1 and axis is None and not block.is_last:
                continue
            rows = self._from_shard.pop(key, None)
            if rows is None:
                none = block.of(self.leaves[key][:0], axis)
                rows = none.new_zeros((self._transport.num_rows[step], *none.shape[1:]))
            keys.append(key)
            outgoing.append(rows.to(self.leaves[key].dtype))
            del rows
        while self._pending and len(self._pending) >= self._depth:
            self._receive()
        pending = self._transport.start_return(step, outgoing)
        self._pending.append((step, block, keys, pending))
        if self._depth == 0:
            pending.wait()  # and added when it would be otherwise: the same sums to the bit

    def finish(self) -> list[Tensor]:
        """Receive all gradients that other ranks computed; returns the sums, leaf by leaf."""
        while self._pending:
            self._receive()
        return self.so_far()

    def finish_sources(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Likewise of the source leaves alone, added to these gradients in place."""
        self._sums.update(zip(self._source_keys, grads, strict=True))
        while self._pending:
            self._receive()
        return grads

    def so_far(self) -> list[Tensor]:
        """The sums, leaf by leaf, without what is on its way."""
        return [self._sum(key).to(tensor.dtype) for key, tensor in self.leaves.items()]

    def abandon(self) -> None:
        """After an error: no message of this pass may meet those of a later one."""
        while self._pending:
            with suppress(RankError):
                self._pending.popleft()[-1].wait()

    def _receive(self) -> None:
        step, block, keys, pending = self._pending.popleft()
        for key, grad in zip(keys, pending.wait(), strict=True):
            total = self._sum(key)
            if block.count > 1:
                total = block.of(total, self._axes.get(key))
            self._transport.add_returned(step, total, grad)

    def _sum(self, key: LeafKey) -> Tensor:
        if key not in self._sums:
            tensor = self.leaves[key]
            self._sums[key] = empty(tensor.shape, self._dtypes[key], tensor.device).zero_()
        return self._sums[key]

    def _add_whole(self, key: LeafKey, grad: Tensor, block: ColumnBlock, is_new: bool) -> None:
        """Add to all rows of a leaf."""
        if key in self._sums or block.count > 1:
            total = block.of(self._sum(key), self._axes.get(key))
            total += grad
            return
        # A copy, unless it is new: autograd may have given the same tensor to two leaves.
        dtype = self._dtypes[key]
        if is_new and grad.dtype == dtype and grad.is_contiguous():
            self._sums[key] = grad
        else:
            self._sums[key] = empty(grad.shape, dtype, grad.device).copy_(grad)


# -- the pass --------------------------------------------------------------------------------------


class PassPart(NamedTuple):
    """One relation's reduction in a pass."""

    etype: CanonicalEType
    reduction: Reduction
    keys: list[LeafKey]  # of its leaves
    shards: Sequence[Shard]  # by step


class ShardPass:
    """One walk over the shards of a halo, for one or more relations that share it.

    Args:
        transport: The source rows, and how they come; every relation's sources are among them.
        reductions: What to compute for which relation, in an order equal on all ranks.
        prefetch: Shards that are fetched ahead while another is computed.
        fetched_before: Rows of the only remote shard that are here already, by source leaf.
    """

    def __init__(
        self,
        transport: RowTransport,
        reductions: Sequence[tuple[CanonicalEType, Reduction]],
        prefetch: int,
        device: torch.device,
        fetched_before: SourceRows | None = None,
    ) -> None:
        self.transport, self.prefetch, self.device = transport, prefetch, device
        self.unread: set[int] = set()  # leaves whose values the backward does not read
        self._needs_sources = self._is_random = self.can_lose_result = False
        self.parts: list[PassPart] = []
        self.leaves: list[Leaf] = []
        self.sources: list[Leaf] = []
        numbers: dict[LeafKey, int] = {}
        for etype, reduction in reductions:
            reduction.num_shards = transport.num_steps
            # With the whole halo at once a row is added to once: there is nothing to keep wide.
            reduction.widens = transport.by_columns
            transport.bind(reduction)
            self._needs_sources |= reduction.needs_sources
            self._is_random |= reduction.is_random
            self.can_lose_result |= reduction.can_lose_result
            keys = []
            for leaf in reduction.leaves:
                keys.append(leaf.key)
                if leaf.key not in numbers:
                    numbers[leaf.key] = len(numbers)
                    self.leaves.append(leaf)
                    if leaf.target == "u":
                        self.sources.append(leaf)
            self.parts.append(PassPart(etype, reduction, keys, transport.shards(etype)))
        blocks, self._axes = [WHOLE], dict[LeafKey, int | None]()
        if self.sources and transport.num_steps > 1 and transport.by_columns:
            blocks = self._cut_into_blocks(numbers)
        # The own shard, then the others, block by block.
        self._visits: list[Visit] = [(0, WHOLE)]
        for step in range(1, transport.num_steps):
            for block in blocks:
                self._visits.append((step, block))
        self._fetched_before = fetched_before or {}
        self._remote: SourceRows = {}  # what came last
        self._kept: dict[Visit, SourceRows] = {}
        self._random: list[RandomState] = []
        #: Where the last gradients are added; None adds them before the backward of the pass ends.
        self.returned: ReturnedGradients | None = None
        kind = device.type
        self._autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def _cut_into_blocks(self, numbers: Mapping[LeafKey, int]) -> list[ColumnBlock]:
        """Take remote shards block by block, if all reductions can and agree on how."""
        reductions = [part.reduction for part in self.parts]
        sites = tuple([reduction.site for reduction in reductions])
        order = tuple([numbers[key] for part in self.parts for key in part.keys])
        cut = self.transport.chunks.get((sites, order))
        if cut is None:
            cut = find_chunks(reductions, self.leaves, self.transport.longest_message)
            if None not in sites:
                self.transport.chunks[sites, order] = cut
        blocks, axes = cut
        self._axes = dict(zip(numbers, axes, strict=True))
        return blocks

    def run(self, meanwhile: Callable[[], None] | None = None) -> list[tuple[Tensor, ...]]:
        """Outputs of each reduction, differentiable in every leaf and discovered parameter.

        Args:
            meanwhile: Work that needs no remote rows: done once the own shard is, before the first
                rows are waited for. See [Note: gradients of a pass].
        """
        inputs = [leaf.tensor for leaf in self.leaves]
        if self.transport.by_collective and torch.is_grad_enabled():
            inputs = self._begun(inputs)
        outputs = self._forward(meanwhile)
        if self._is_random:
            parameters = {id(p): p for part in self.parts for p in part.reduction.parameters()}
            inputs += parameters.values()
        if not torch.is_grad_enabled() or True not in [t.requires_grad for t in inputs]:
            return outputs
        # Remote rows that came along are outputs, too. Other objects than those that the backward
        # keeps, which would hold on to its node.
        self._outer = [leaf.key for leaf in self.sources if leaf.tensor.requires_grad]
        self._outer = [key for key in self._outer if key in self._remote]
        flat = [output for group in outputs for output in group]
        self.num_results = len(flat)
        flat += [self._remote[key].detach() for key in self._outer]
        self._release()
        results = iter(_PassFunction.apply(self, flat, *inputs))
        outputs = [tuple(islice(results, len(group))) for group in outputs]
        self._remote |= zip(self._outer, results, strict=True)
        self._output_counts = [len(group) for group in outputs]
        for part, group in zip(self.parts, outputs, strict=True):
            part.reduction.tie(group)
        return outputs

    def _begun(self, inputs: list[Tensor]) -> list[Tensor]:
        """The inputs, sources being outputs of `_BeginPass`."""
        chosen = [
            i
            for i, leaf in enumerate(self.leaves)
            if leaf.target == "u" and leaf.tensor.requires_grad
        ]
        if not chosen or self.transport.num_steps == 1:
            return inputs
        self.returned = ReturnedGradients()
        rows = _BeginPass.apply(self.returned, *(inputs[i] for i in chosen))
        for i, part in zip(chosen, rows, strict=True):
            inputs[i] = part
        return inputs

    def take_remote(self) -> SourceRows:
        """What `run` fetched of each source leaf, for others to use; once."""
        remote, self._remote = self._remote, {}
        return remote

    def _forward(self, meanwhile: Callable[[], None] | None) -> list[tuple[Tensor, ...]]:
        records = torch.is_grad_enabled()
        keep_rows = self.transport.keeps_rows and self._needs_sources and records
        tensors: dict[LeafKey, Tensor] = {}
        needs_grad: dict[LeafKey, bool] = {}
        for leaf in self.leaves:
            tensors[leaf.key] = leaf.tensor.detach()
            needs_grad[leaf.key] = records and leaf.tensor.requires_grad
        with (
            torch.no_grad(),
            self._beginning(tensors, self.parts),
            closing(self._fetched(tensors, needs_grad)) as visits,
        ):
            for step, block, rows in visits:
                if keep_rows and step:
                    self._kept[step, block] = rows
                if self.transport.returns_rows and step:
                    self._remote = dict(rows)
                if self._is_random:
                    self._random.append(RandomState.capture(self.device))
                for part in self.parts:
                    part.reduction.merge(self._evaluation(part, step, block, rows, tensors))
                del rows
                if step == 0 and meanwhile is not None:
                    with torch.set_grad_enabled(records):
                        meanwhile()
            return [part.reduction.finish() for part in self.parts]

    @contextmanager
    def _beginning(
        self, tensors: Mapping[LeafKey, Tensor], parts: Sequence[PassPart]
    ) -> Iterator[None]:
        """Start what reductions send besides rows; after an error it is waited for."""
        try:
            for part in parts:
                part.reduction.begin(tensors)
            yield
        except BaseException:
            for part in parts:
                part.reduction.abandon()
            raise

    def _release(self) -> None:
        """Keep no values for the backward that it will not read, and none besides autograd."""
        released = {}
        for i, leaf in enumerate(self.leaves):
            if leaf.target == "u" and not self._needs_sources:
                self.unread.add(i)
            released[leaf.key] = leaf.released()
        if self.unread:
            self._fetched_before = {}
        self.leaves = list(released.values())
        self.sources = [leaf for leaf in self.leaves if leaf.target == "u"]
        for part in self.parts:
            part.reduction.release(released)

    def _fetched(
        self, tensors: Mapping[LeafKey, Tensor], needs_grad: Mapping[LeafKey, bool]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows."""
        whole = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        return self.transport.prefetched(
            self._visits, self.prefetch, whole, self._axes, needs_grad, self._fetched_before
        )

    def _evaluation(
        self,
        part: PassPart,
        step: int,
        block: ColumnBlock,
        rows: SourceRows,
        tensors: Mapping[LeafKey, Tensor],
    ) -> ShardEvaluation:
        """What one shard sees of each leaf of a reduction."""
        shard, values = part.shards[step], {}
        for key in part.keys:
            if key[0] == "u":
                values[key] = rows[key]
                continue
            values[key] = block.of(tensors[key], self._axes.get(key))
            if key[0] == "e":
                values[key] = shard.edge_rows(values[key])
        return ShardEvaluation(shard, values, block)

    # ------------------------------------------------------------------ backward

    def begin_backward(
        self, grads: Sequence[Tensor | None]
    ) -> tuple[list[Sequence[Tensor]], list[Tensor | None]]:
        """Take in the gradients of the outputs; what only they need is freed after it.

        Before the inputs are asked for, which may have to be computed again.

        Returns:
            For each reduction what its shards get; and the gradients of remote rows that other
            calls have read as well.
        """
        given, part_grads = iter(grads), []
        for part, count in zip(self.parts, self._output_counts, strict=True):
            of_part: list[Any] = list(islice(given, count))  # none is None: see `_PassFunction`
            part_grads.append(part.reduction.begin_backward(of_part))
        return part_grads, list(given)

    def merge_again(self, saved: Sequence[Tensor | None]) -> None:
        """Compute results again that the caller has changed in place; collective if rows travel.

        Every rank runs the same program, so all have lost the same results. See
        [Note: results that are changed in place] in `graphshard.ops`.
        """
        lost = [part for part in self.parts if part.reduction.has_lost_result]
        tensors = self._tensors(saved)
        with (
            torch.no_grad(),
            self._beginning(tensors, lost),
            closing(self._sources_again(tensors, self._visits)) as visits,
        ):
            for step, block, rows in visits:
                with self._as_in_forward(step):
                    for part in lost:
                        part.reduction.merge(self._evaluation(part, step, block, rows, tensors))
                del rows
            for part in lost:
                part.reduction.finish()

    def _tensors(self, saved: Sequence[Tensor | None]) -> dict[LeafKey, Tensor]:
        """Each leaf, from what was saved of the inputs; without values where they were freed."""
        tensors = {}
        for leaf, tensor in zip(self.leaves, saved, strict=False):  # parameters come last
            tensors[leaf.key] = leaf.tensor if tensor is None else tensor.detach()
        return tensors

    def backward(
        self,
        saved: Sequence[Tensor | None],
        needed: Sequence[bool],
        part_grads: Sequence[Sequence[Tensor]],
        outer_grads: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Gradients of the inputs (leaves, then parameters), computed shard by shard.

        Args:
            saved: The inputs; None for leaves whose values were freed.
            needed: Whether the gradient of each is asked for.
        """
        count, tensors = len(self.leaves), self._tensors(saved)
        leaves = [leaf for leaf, need in zip(self.leaves, needed, strict=False) if need]
        sums = GradientSums(self.transport, leaves, tensors, self._axes, self.prefetch)
        others = zip(saved[count:], needed[count:], strict=True)
        parameters = [p for p, need in others if need and p is not None]
        parameter_grads = [torch.zeros_like(p) for p in parameters]
        work = []
        for part, grads in zip(self.parts, part_grads, strict=True):
            work.append((part, [key for key in part.keys if key in sums.leaves], grads))
        visits = self._visits
        if self.transport.by_collective and self.sources:
            # Gradients of remote rows travel while those of own rows are found. One remote rank at
            # a time they come last: the memory of a message is not held beside that of own rows.
            visits = visits[::-1]
        try:
            with closing(self._sources_again(tensors, visits)) as visited:
                for step, block, rows in visited:
                    with self._as_in_forward(step):
                        for part, keys, grads in work:
                            evaluation = self._evaluation(part, step, block, rows, tensors)
                            shares = _shard_backward(
                                part.reduction, evaluation, grads, keys, parameters
                            )
                            del evaluation
                            sums.add(part.shards[step], shares, block)
                            for total, share in zip(
                                parameter_grads, shares.parameters, strict=True
                            ):
                                if share is not None:
                                    total += share
                            del shares
                    del rows
                    if step:
                        for key, grad in zip(self._outer, outer_grads, strict=True):
                            sums.add_to_rows(key, grad)
                    sums.send(step, block)
            totals = sums.finish() if self.returned is None else self.returned.later(sums)
            results = iter([*totals, *parameter_grads])
        except BaseException:
            sums.abandon()
            for part in self.parts:
                part.reduction.abandon()
            raise
        return [next(results) if need else None for need in needed]

    def _sources_again(
        self, tensors: Mapping[LeafKey, Tensor], visits: Sequence[Visit]
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Source rows of each visit: kept, fetched again, or empty where no value is read."""
        if self._needs_sources and not self.transport.keeps_rows:
            yield from self._fetched(tensors, {leaf.key: False for leaf in self.sources})
            return
        own = {leaf.key: tensors[leaf.key] for leaf in self.sources}
        for step, block in visits:
            if step == 0 or not self.sources:
                yield step, block, own
            elif (step, block) in self._kept:
                yield step, block, self._kept[step, block]
            else:
                yield step, block, self._rows_without_values(step, block)

    def _rows_without_values(self, step: int, block: ColumnBlock) -> SourceRows:
        """Source rows whose shape alone is read."""
        rows = {}
        for leaf in self.sources:
            like = leaf.tensor.detach()[:0]
            if block.count > 1:
                like = block.of(like, self._axes.get(leaf.key))
            num_rows = self.transport.num_rows[step]
            rows[leaf.key] = like.new_zeros(()).expand(num_rows, *like.shape[1:])
        return rows

    @contextmanager
    def _as_in_forward(self, step: int) -> Iterator[None]:
        """Random state and autocast as they were in the forward; both put back on the way out."""
        device, (enabled, dtype) = self.device, self._autocast
        outside = RandomState.capture(device) if self._random else None
        try:
            if self._random:
                self._random[step].restore(device)
            with torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
                yield
        finally:
            if outside is not None:
                outside.restore(device)

    def differentiated(
        self,
        grads: Sequence[Tensor | None],
        saved: Sequence[Tensor | None],
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        """`backward`, differentiable itself: everything is computed again, by autograd.

        All in-edges are one shard, whose sources are own and remote rows.
        """
        inputs = [self.leaves[i].tensor if t is None else t for i, t in enumerate(saved)]
        # Views: a tensor may be read at two ends of an edge, and has a gradient at each.
        views = [
            t.view_as(t) if t.requires_grad or not need else t.detach().requires_grad_()
            for t, need in zip(inputs, needed, strict=True)
        ]
        halo = self.transport.halo
        with self._as_in_forward(0):
            values = {leaf.key: t for leaf, t in zip(self.leaves, views, strict=True)}
            own = {leaf.key: values[leaf.key] for leaf in self.sources}
            rows = fetch_halo([(halo.plan, tensor) for tensor in own.values()], self.transport.wire)
            remote = dict(zip(own, rows, strict=True))
            values |= {key: torch.cat([own[key], part]) for key, part in remote.items()}
            outputs: list[Tensor] = []
            for part in self.parts:
                shard = Shard(0, self.transport.whole_adjacency(part.etype), None)
                outputs += part.reduction.recompute(ShardEvaluation(shard, values))
            outputs += [remote[key] for key in self._outer]
        pairs = [
            (out, grad)
            for out, grad in zip(outputs, grads, strict=True)
            if grad is not None and out.requires_grad
        ]
        targets = [t for t, need in zip(views, needed, strict=True) if need]
        outs, cotangents = zip(*pairs, strict=True)
        results = iter(
            torch.autograd.grad(outs, targets, cotangents, create_graph=True, allow_unused=True)
        )
        return [next(results) if need else None for need in needed]


def _shard_backward(
    reduction: Reduction,
    evaluation: ShardEvaluation,
    grads: Sequence[Tensor],
    keys: Sequence[LeafKey],
    parameters: Sequence[Tensor],
) -> ShardGradients:
    """Gradients of one reduction on one shard, with respect to what that shard saw of ``keys``."""
    grads = reduction.shard_gradients(evaluation, grads)
    direct = reduction.direct_gradients(evaluation, grads, keys)
    if direct is not None:
        return ShardGradients(direct, [None] * len(parameters), are_new=True)
    values = dict(evaluation.values)
    for key in keys:
        values[key] = values[key].detach().requires_grad_()
    with torch.enable_grad():
        adjoints = reduction.adjoints(replace(evaluation, values=values, memo={}), grads)
    targets = [*(values[key] for key in keys), *parameters]
    shares: list[Tensor | None] = [None] * len(targets)
    pairs = [(a.output, a.cotangent.to(a.output.dtype)) for a in adjoints if a.output.requires_grad]
    if pairs and targets:
        outputs, cotangents = zip(*pairs, strict=True)
        shares = list(torch.autograd.grad(outputs, targets, cotangents, allow_unused=True))
    by_leaf = dict(zip(keys, shares, strict=False))
    for adjoint in adjoints:
        for key in by_leaf.keys() & adjoint.leaf_grads.keys():
            before, added = by_leaf[key], adjoint.leaf_grads[key]
            by_leaf[key] = added if before is None else before + added
    return ShardGradients(by_leaf, shares[len(keys) :])


class ReturnedGradients:
    """Gradients of own rows that other ranks found, from their start to their sum.

    [Note: gradients of a pass]
        In one-shot mode a pass is two nodes of the autograd graph: `_BeginPass` takes own rows and
        gives them on, `_PassFunction` makes the results. Autograd runs the newest node that is
        ready. So in the backward gradients of remote rows are sent by `_PassFunction`, which finds
        those of own rows next; then comes what was made between the two, while rows travelled in
        the forward; and last `_BeginPass` waits for what the other ranks return, and adds it.
    """

    def __init__(self) -> None:
        self._sums: GradientSums | None = None

    def later(self, sums: GradientSums) -> list[Tensor]:
        """The sums without what is on its way, which `added_to` adds for source rows."""
        self._sums = sums
        # Where the gradients of own rows are not asked for, `_BeginPass` is not run.
        torch.autograd.Variable._execution_engine.queue_callback(self._abandon)
        return sums.so_far()

    def added_to(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Gradients of source rows, with what is on its way, if anything is; in place.

        They are the sums, and more where a pass is differentiated twice.
        """
        sums, self._sums = self._sums, None
        if sums is None:
            return grads
        try:
            return sums.finish_sources(grads)
        except BaseException:
            sums.abandon()
            raise

    def _abandon(self) -> None:
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.abandon()


class _BeginPass(torch.autograd.Function):
    """Forward: own rows as they are. Backward: their gradients, with those from other ranks."""

    @staticmethod
    def forward(ctx: Any, returned: ReturnedGradients, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.returned = returned
        return tuple([part.detach() for part in rows])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *ctx.returned.added_to(grads)


class _PassFunction(torch.autograd.Function):
    """Ties the outputs of a pass, already computed, to the tensors they were computed from."""

    @staticmethod
    def forward(
        ctx: Any, shard_pass: ShardPass, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.shard_pass = shard_pass
        unread = shard_pass.unread
        ctx.save_for_backward(*[None if i in unread else t for i, t in enumerate(inputs)])
        ctx.set_materialize_grads(False)  # remote rows are hardly ever read by other calls
        results = outputs[: shard_pass.num_results]
        ctx.likes = [(out.shape, out.dtype, out.device) for out in results]
        return tuple([out.detach() for out in outputs])  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        full = list(grads)
        for i, (shape, dtype, device) in enumerate(ctx.likes):
            if full[i] is None:
                full[i] = torch.zeros(shape, dtype=dtype, device=device)
        shard_pass: ShardPass | None = ctx.shard_pass
        if (
            torch.is_grad_enabled()
            and shard_pass is not None
            and shard_pass.transport.by_collective
        ):
            needed = ctx.needs_input_grad[2:]
            return (None, None, *shard_pass.differentiated(full, ctx.saved_tensors, needed))
        return _gradients(ctx, *full)


@once_differentiable
def _gradients(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    shard_pass: ShardPass | None = ctx.shard_pass
    if shard_pass is None:
        raise AssertionError(ctx.saved_tensors)  # which raises: an earlier backward has freed them
    saved = None
    if shard_pass.can_lose_result and any(p.reduction.has_lost_result for p in shard_pass.parts):
        saved = ctx.saved_tensors
        shard_pass.merge_again(saved)
    output_grads = shard_pass.begin_backward(grads)
    saved = ctx.saved_tensors if saved is None else saved
    results = shard_pass.backward(saved, ctx.needs_input_grad[2:], *output_grads)
    if not is_graph_kept():
        ctx.shard_pass = None  # it holds the inputs, too; this node lives as long as the loss does
    return None, None, *results


@dataclass
class RandomState:
    """The generators' states at one point, to compute a shard again with the same draws."""

    cpu: Tensor
    device: Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        on_gpu = device.type == "cuda"
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_gpu else None)

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


# -- running what was compiled ---------------------------------------------------------------------


@dataclass
class Compiled:
    """A call of the protocol as a pass runs it.

    Args:
        source: The field whose rows travel; None where others do not travel with it.
        constant: Under what the result is kept, and the constant tensors that it is of.
        finish: From the outputs of the reduction to the result; None for the only output.
        out_field: Where the result goes; "" where the caller knows.
    """

    etype: CanonicalEType
    reduction: Reduction
    source: str | None = None
    constant: tuple[Hashable, list[Tensor]] | None = None
    finish: Callable[[tuple[Tensor, ...]], Tensor] | None = None
    out_field: str = ""


class Runner:
    """Runs reductions on one rank's shards."""

    def __init__(self, structure: ShardStructure, config: AggregationMode) -> None:
        self.structure, self.config = structure, config
        self.rows = HaloRowCache(structure, config.halo_dtype)
        self.is_oneshot = config.mode == "oneshot"
        self._transports: dict[tuple[frozenset[CanonicalEType], bool, bool], RowTransport] = {}

    def run(
        self,
        group: Sequence[Compiled],
        companions: Sequence[Tensor] | None = None,
        frames: Sequence[Frame] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> list[tuple[Tensor, ...]]:
        """Outputs of one pass.

        Args:
            group: What to compute, for relations with one source type.
            companions: Tensors of the source type whose rows travel, too; None where remote rows
                are not kept for later calls.
            meanwhile: As for `ShardPass.run`, in one-shot mode.
        """
        reductions = [(call.etype, call.reduction) for call in group]
        etypes = [etype for etype, _ in reductions]
        transport = None if companions else self._summing_transport(etypes, group)
        if transport is None and len(group) == 1 and not companions:
            transport = self._states_transport(group[0])
        if transport is None:
            transport = self.transport(etypes)
        constants = self.structure.constants
        sources = [r for _, reduction in reductions for r in reduction.leaves if r.target == "u"]
        transport = transport.keyed(all(constants.is_constant([s.tensor]) for s in sources))
        depth, device = self.config.fetched_ahead, self.structure.device
        if not transport.returns_rows:
            shard_pass = ShardPass(transport, reductions, depth, device)
            return shard_pass.run(meanwhile if self.is_oneshot else None)
        if companions:
            reductions.append((group[0].etype, CompanionRows(companions)))
        halo = transport.halo
        own = {leaf.key: leaf.tensor for _, r in reductions for leaf in r.leaves}
        own = {key: tensor for key, tensor in own.items() if key[0] == "u"}
        fixed = {key: tensor for key, tensor in own.items() if not tensor.requires_grad}
        constant = {key: self.rows.constant_rows(halo, tensor) for key, tensor in fixed.items()}
        fetched_before = {key: rows for key, rows in constant.items() if rows is not None}
        # Where all results of some rows are kept, no call asks for the rows again.
        read_again = {("u", id(tensor)) for tensor in companions or ()}
        for call in group:
            if call.constant is None:
                read_again |= {leaf.key for leaf in call.reduction.leaves}
        shard_pass = ShardPass(transport, reductions, depth, device, fetched_before)
        outputs = shard_pass.run(meanwhile)[: len(group)]
        remote = shard_pass.take_remote()
        for key in fixed.keys() & read_again - fetched_before.keys():
            self.rows.keep_constant(halo, own[key], remote[key])
        if companions is not None:
            self.rows.put(halo, [(tensor, remote[key]) for key, tensor in own.items()], frames)
        return outputs

    def transport(
        self, etypes: Sequence[CanonicalEType], fewest: FewestRows | None = None
    ) -> RowTransport:
        """How rows of the halo of some relations travel; the only difference between the modes."""
        rematerializes = self.config.rematerializes
        key = frozenset(etypes), rematerializes, fewest is not None
        if key not in self._transports:
            halo, wire = self.structure.halo(etypes), self.config.halo_dtype
            self._transports[key] = (
                CollectiveTransport(halo, wire, fewest)
                if self.is_oneshot
                else PairwiseTransport(halo, wire, not rematerializes, fewest)
            )
        return self._transports[key]

    def _summing_transport(
        self, etypes: Sequence[CanonicalEType], group: Sequence[Compiled]
    ) -> RowTransport | None:
        """The transport of a pass of which partial sums travel; None where rows do.

        See [Note: fewest rows]. Collective the first time for some relations.
        """
        if not self.config.partial_sums or self.structure.world_size == 1:
            return None
        sources = [call.reduction.summed_source() for call in group]
        source = sources[0]
        if source is None or any(s is None or s.key != source.key for s in sources):
            return None
        if len(set(etypes)) < len(etypes) or self.structure.constants.is_constant([source.tensor]):
            return None
        halo = self.structure.halo(etypes)
        site = tuple([call.reduction.site for call in group])
        if self.rows.is_read_again(halo, source.tensor, site):
            return None
        fewest = halo.fewest
        if fewest is None:
            return None
        weights = group[0].reduction.summed_weights()
        transport: RowTransport | None = self.transport(etypes, fewest)
        if weights is not None:
            constants = self.structure.constants
            transport = self.transport(etypes, fewest).weighted(source.tensor, weights, constants)
        if transport is not None and self.is_oneshot:
            self.rows.note_summed(halo, source.tensor, site)
        return transport

    def _states_transport(self, call: Compiled) -> RowTransport | None:
        """Likewise of states of destinations, in one-shot mode."""
        if not self.config.partial_sums or not self.is_oneshot:
            return None
        halo, wire = self.structure.halo([call.etype]), self.config.halo_dtype
        split = split_of_attention(halo, call.reduction, wire, self.structure.constants)
        return None if split is None else StatesTransport(split, wire)

    def own_shard(self, etype: CanonicalEType) -> Shard:
        """The edges of a relation between rows of this rank."""
        return self.structure.halo([etype]).own_shard(etype)

    def is_here(self, call: Compiled, source: Frame) -> bool:
        """Whether nothing has to be fetched for a call in one-shot mode."""
        if self.structure.world_size == 1:
            return True
        if call.source is None:
            return False
        return self.rows.find(self.transport([call.etype]).halo, source[call.source]) is not None

    def companions(self, call: Compiled, source: Frame) -> list[Tensor] | None:
        """Source fields that travel with that of a call; None where no remote rows are kept."""
        if not self.is_oneshot or call.source is None or not self.rows.num_scopes:
            return None
        return self.rows.companions(self.transport([call.etype]).halo, source, call.source)

    # ------------------------------------------------------------------ values of edges

    def deferred(self, etype: CanonicalEType, num_edges: int, value: Expression) -> DeferredEdges:
        """A value of each edge that is computed where it is needed."""

        # Not the frames: the value will be in one of them, and a cycle would keep all of their
        # tensors until the garbage collector comes by.
        def materialize(expression: Expression) -> Tensor:
            if isinstance(expression, EdgeRows):
                return expression.leaf.tensor
            message = PerEdge(self.resolve(etype, expression))
            ((rows,),) = self.run([Compiled(etype, EdgeValues([message], num_edges))])
            return rows

        return DeferredEdges(value, materialize, self.structure.device)

    def resolve(self, etype: CanonicalEType, root: Expression) -> Expression:
        """``root`` with each softmax turned into arithmetic, by a pass that finds its total."""
        while True:
            softmaxes = (node for node in walk(root) if isinstance(node, LazySoftmax))
            inner = next((node for node in softmaxes if not holds_softmax(node.child)), None)
            if inner is None:
                return root
            peak, total = self.statistics(etype, inner)
            plain = inner.resolve(peak, total.masked_fill(total == 0, 1.0))
            root = substitute(root, {id(inner): plain})

    def statistics(self, etype: CanonicalEType, softmax: LazySoftmax) -> tuple[Tensor, Tensor]:
        """Peak and total of a softmax at each destination."""
        reduction = SoftmaxSum(softmax)
        ((total,),) = self.run([Compiled(etype, reduction)])
        assert reduction.shifted.peak is not None
        return reduction.shifted.peak, total
