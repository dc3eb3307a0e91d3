# SPDX-License-Identifier: Apache-2.0
"""DistTensor: a tensor whose rows are spread over the hosts; DistEmbedding: one that is learnt."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..comm import Pending, agree, barrier, come_together, rank
from ..comm.collectives import shared_errors
from ._cluster import Cluster, RowsRequest
from ._host_tables import TableInfo, check_name
from ._job import Job, current_job, from_rank_0, on_rank_0
from ._message_stream import check_dtype

RowIndex: TypeAlias = int | slice | Sequence[int] | Tensor | np.ndarray[Any, Any]
InitFunction: TypeAlias = Callable[[tuple[int, ...], torch.dtype], Tensor]

INIT_ROWS = 1024
"""Rows that an ``init_func`` fills at a time, from ids that are multiples of this."""


class DistTensor:
    """A tensor of which each host has the rows of its nodes or edges.

    All trainers make it together, with the same arguments; one of the same name that exists is
    used as it is. Rows are read and written by any trainer at any time. A write has reached its
    owner when it returns, so that after a `barrier` all trainers read it.

    Args:
        shape: First the number of nodes or edges of a type.
        name: Of the tensor in the cluster; None for one that cannot be asked for by name.
        init_func: From shape and dtype to first contents; None for zeros. It is called for a few
            rows at a time, with torch's seed set from the tensor's name, the first row's id and
            rank 0's random state, so contents do not depend on the number of hosts and trainers.
        part_policy: How rows are spread, from `DistGraph.get_node_partition_policy` and its
            sibling; None where one type alone has that many nodes or edges.
        persistent: Whether it stays, for later attachment by name, when this object goes.
        is_gdata: Accepted for DGL's scripts.
        attach: Whether one of the same name may be used; False raises if there is one.

    Raises:
        ValueError: No or several types have that many rows, or one of that name differs; on all
            trainers.
        RuntimeError: There is no cluster yet.

    Example:
        >>> import tempfile, torch
        >>> from graphshard.data import random_graph
        >>> from graphshard.servers import DistGraph, DistTensor, exit_client
        >>> from graphshard.partition import partition_graph
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = partition_graph(random_graph(50, 200, seed=0), "g", 2, folder, quiet=True)
        ...     g = DistGraph("g", part_config=f"{folder}/g.json")
        >>> hidden = DistTensor((g.num_nodes(), 3), torch.float32, "hidden")
        >>> hidden[[4, 7]] = torch.ones(2, 3)
        >>> hidden[4:8].sum(1)
        tensor([3., 0., 0., 3.])
        >>> exit_client()
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        name: str | None = None,
        init_func: InitFunction | None = None,
        part_policy: Any = None,
        persistent: bool = False,
        is_gdata: bool = True,
        attach: bool = True,
    ) -> None:
        job = current_job()
        shape = tuple(int(extent) for extent in shape)
        policy = _policy_of(job, shape, part_policy)
        if name is None and persistent:
            raise ValueError("a persistent tensor needs a name, to be found by; pass name")
        key = _new_key(job, policy, name)
        info = TableInfo(key, dtype, shape[1:], job.starts(policy), policy, persistent)
        check_dtype(dtype)
        job.cluster.settle()
        come_together(
            "DistTensor",
            "all trainers make a DistTensor together; make it on every rank, and read and write "
            "it on any",
        )
        agree(f"{info}, {init_func is not None}, {attach}", "the DistTensor that is made")
        is_new, hold = False, None
        try:
            for is_turn in (rank() == 0, rank() != 0):  # rank 0 makes it, the others find it
                with shared_errors():
                    if is_turn:
                        is_new = job.cluster.create(info)
                        hold = job.cluster.hold(key)
                        if not (is_new or attach or rank()):
                            raise ValueError(
                                f"a tensor named {name!r} exists; pass attach=True to use it"
                            )
        except BaseException:
            _drop(job.cluster, hold)
            raise
        self._finalizer = weakref.finalize(self, _drop, job.cluster, hold)
        self._finalizer.atexit = False
        is_new = bool(from_rank_0(int(is_new)))
        self._job, self._info, self._tensor_name = job, job.cluster.info(key), name
        if is_new and init_func is not None:
            try:
                _fill(job, self, init_func)
            except Exception:  # on all trainers; who tries again must not find it half filled
                job.cluster.forget(key)
                if rank() == 0:
                    job.cluster.delete(key)
                raise
        barrier()
        if persistent:
            self._finalizer.detach()

    @classmethod
    def existing(cls, job: Job, key: str) -> DistTensor:
        """One that the cluster has, without asking other trainers.

        Args:
            key: Its name with its policy.
        """
        tensor, info = cls.__new__(cls), job.cluster.info(key)
        tensor._job, tensor._info = job, info
        tensor._tensor_name = key.removeprefix(f"{info.policy}~")
        return tensor

    # ------------------------------------------------------------------ what it is

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return (self._info.starts[-1], *self._info.row_shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self._info.dtype

    @property
    def name(self) -> str:
        """Its name in the cluster, with the policy: ``node~TYPE~NAME``."""
        return self._info.name

    @property
    def tensor_name(self) -> str | None:
        """The name that it was given."""
        return self._tensor_name

    @property
    def kvstore_key(self) -> str:
        """As `name`."""
        return self._info.name

    @property
    def part_policy(self) -> str:
        """How rows are spread."""
        return self._info.policy

    @property
    def is_persistent(self) -> bool:
        """Whether it stays when no trainer has it any more."""
        return self._info.persistent

    def __len__(self) -> int:
        return self._info.starts[-1]

    def __repr__(self) -> str:
        return f"DistTensor(name={self.name!r}, shape={self.shape}, dtype={self.dtype})"

    # ------------------------------------------------------------------ rows

    def __getitem__(self, index: RowIndex) -> Tensor:
        """Rows: ``[n, ...]``, as in DGL also for an int, where ``n`` is 1.

        Raises:
            IndexError: An id is out of range.
            TypeError: Not an index.
            ServerError: A server is gone.
        """
        ids = row_ids(index, len(self), self.name)
        (rows,) = self._job.cluster.read([RowsRequest([self.name], ids)])
        return rows

    def read_async(self, index: RowIndex) -> Pending:
        """Start reading rows; ``wait()`` gives ``[rows]``."""
        ids = row_ids(index, len(self), self.name)
        return self._job.cluster.start_read([RowsRequest([self.name], ids)])

    def __setitem__(self, index: RowIndex, rows: Any) -> None:
        """Write rows; on return their owners have them.

        Raises:
            IndexError: An id is out of range; nothing is written.
            TypeError: Another dtype; nothing is written.
            ValueError: Another shape; nothing is written.
            ServerError: A server is gone.
        """
        ids = row_ids(index, len(self), self.name)
        value = rows if isinstance(rows, Tensor) else torch.as_tensor(rows, dtype=self.dtype)
        if _is_int(index) and value.dim() == len(self.shape) - 1:
            value = value.unsqueeze(0)
        self._job.cluster.write(self.name, ids, value)

    @property
    def local_partition(self) -> Tensor:
        """The rows of this host, ``[num_rows, ...]``: the memory itself where it is shared."""
        cluster = self._job.cluster
        starts, here = cluster.info(self.name).starts, cluster.here
        rows = cluster.hosts[here].rows(self.name)
        if rows is None:
            return self[starts[here] : starts[here + 1]]
        cluster.mark_written(self.name, here)  # it may be
        return rows

    def count_nonzero(self) -> int:
        """Elements that are not 0, on all hosts."""
        return self._job.cluster.count_nonzero(self.name)

    def __or__(self, other: DistTensor) -> DistTensor:
        """Union of two masks. All trainers make it together."""
        return self._combined(other, torch.logical_or)

    def __and__(self, other: DistTensor) -> DistTensor:
        """Intersection of two masks. All trainers make it together."""
        return self._combined(other, torch.logical_and)

    def _combined(
        self, other: DistTensor, function: Callable[[Tensor, Tensor], Tensor]
    ) -> DistTensor:
        if not isinstance(other, DistTensor) or other.part_policy != self.part_policy:
            raise TypeError(
                f"masks must be of the same kind of rows (got {self} and {other!r:.200})"
            )
        result = DistTensor(self.shape, self.dtype, part_policy=self.part_policy)
        start, stop = self._job.share(self.part_policy)
        for begin in range(start, stop, 1 << 20):
            chosen = slice(begin, min(stop, begin + (1 << 20)))
            result[chosen] = function(self[chosen], other[chosen]).to(self.dtype)
        barrier()
        return result

    def delete(self) -> None:
        """Delete it on all hosts, also a persistent one. All trainers must call."""
        barrier()
        on_rank_0(lambda: self._job.cluster.delete(self.name))
        self._job.cluster.forget(self.name)


def row_ids(index: RowIndex, num_rows: int, what: str) -> Tensor:
    """Integer ``[n]`` ids that an index names; negative ones count from the end."""
    if isinstance(index, slice):
        rows = range(num_rows)[index]
        return torch.arange(rows.start, rows.start + len(rows) * rows.step, rows.step)
    if _is_int(index):
        ids = torch.tensor([int(index)])  # type: ignore[arg-type]
    else:
        try:
            ids = torch.as_tensor(index)
        except (TypeError, ValueError, RuntimeError):
            ids = torch.empty(0, 0)
        if ids.numel() == 0 and ids.dim() == 1:
            ids = ids.to(torch.int64)
    if ids.dtype == torch.bool and ids.dim() == 1:
        if ids.numel() != num_rows:
            raise IndexError(f"a mask of {what!r} must have {num_rows} entries (got {ids.numel()})")
        return ids.cpu().nonzero().view(-1)
    if ids.dim() != 1 or ids.dtype not in (torch.int32, torch.int64):
        got = type(index).__name__
        if isinstance(index, Tensor):
            got = f"{index.dtype} of shape {tuple(index.shape)}"
        raise TypeError(
            f"{what!r} takes an int, a slice, a list of ints, a mask, or an int32 or int64 tensor "
            f"of one dimension (got {got})"
        )
    ids = ids.cpu()
    if ids.numel() == 0:
        return ids
    low, high = (int(end) for end in ids.aminmax())
    if low < -num_rows or high >= num_rows:
        bad = low if low < -num_rows else high
        raise IndexError(f"ids of {what!r} must be in [0, {num_rows}) (got {bad})")
    return torch.where(ids < 0, ids + num_rows, ids) if low < 0 else ids


def _is_int(index: Any) -> bool:
    if isinstance(index, bool):
        return False
    is_scalar = isinstance(index, Tensor | np.ndarray) and index.ndim == 0
    return isinstance(index, int | np.integer) or (
        is_scalar and str(index.dtype).removeprefix("torch.").startswith("int")
    )


def _policy_of(job: Job, shape: tuple[int, ...], part_policy: Any) -> str:
    if not shape or any(extent < 0 for extent in shape):
        raise ValueError(f"shape must have a first dimension, and no negative one (got {shape})")
    if part_policy is None:
        return job.policy_of_size(shape[0])
    policy = str(getattr(part_policy, "policy_str", part_policy))
    num_rows = job.starts(policy)[-1]
    if num_rows != shape[0]:
        raise ValueError(
            f"a tensor of {policy!r} must have {num_rows} rows (got shape {shape}); pass the "
            "policy of another type"
        )
    return policy


def _new_key(job: Job, policy: str, name: str | None) -> str:
    if name is None:
        job.num_anonymous += 1
        if job.run_id == 0:
            job.run_id = from_rank_0(secrets.randbits(62) | 1)
        name = f"anonymous-{job.run_id:x}-{job.num_anonymous}"
    check_name(name)
    if "~" in name:
        raise ValueError(f"the name of a tensor must not contain '~' (got {name!r})")
    return f"{policy}~{name}"


def _drop(cluster: Cluster, hold: object) -> None:
    """Let a table go; not waited for."""
    with contextlib.suppress(Exception):
        cluster.release(hold)


def _fill(job: Job, tensor: DistTensor, init_func: InitFunction) -> None:
    """First contents, block by block, each with a seed of its own."""
    seed = from_rank_0(int(torch.randint(2**62, ())))
    start, stop = job.share(tensor.part_policy)
    with shared_errors():  # a trainer may have no rows to call it for
        for block in range(start // INIT_ROWS, -(-stop // INIT_ROWS) if stop > start else 0):
            begin = block * INIT_ROWS
            shape = (min(INIT_ROWS, len(tensor) - begin), *tensor.shape[1:])
            rows = _first_rows(init_func, shape, tensor, f"{seed} {tensor.name} {block}")
            low, high = max(start, begin), min(stop, begin + shape[0])
            tensor[low:high] = rows[low - begin : high - begin]


def _first_rows(
    init_func: InitFunction, shape: tuple[int, ...], tensor: DistTensor, name: str
) -> Tensor:
    """What a function makes with the seed of a name."""
    digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        rows = init_func(shape, tensor.dtype)
    if not isinstance(rows, Tensor) or tuple(rows.shape) != shape or rows.dtype != tensor.dtype:
        got = type(rows).__name__
        if isinstance(rows, Tensor):
            got = f"{rows.dtype} of shape {tuple(rows.shape)}"
        raise ValueError(f"init_func must return {tensor.dtype} of shape {shape} (got {got})")
    return rows


class DistEmbedding:
    """A float32 row for each node or edge, trained by a sparse optimizer.

    All trainers make it together. A lookup gives rows that autograd knows; gradients stay with
    them until the ``step`` of a `SparseAdagrad`, `SparseAdam` or `SparseSGD`.

    Args:
        num_embeddings: Number of nodes or edges of a type.
        init_func: See `DistTensor`; None for zeros.

    Example:
        >>> import tempfile, torch
        >>> from graphshard.data import random_graph
        >>> from graphshard.servers import DistEmbedding, DistGraph, SparseSGD
        >>> from graphshard.servers import exit_client
        >>> from graphshard.partition import partition_graph
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = partition_graph(random_graph(50, 200, seed=0), "g", 2, folder, quiet=True)
        ...     g = DistGraph("g", part_config=f"{folder}/g.json")
        >>> rows = DistEmbedding(g.num_nodes(), 2, "rows")
        >>> optimizer = SparseSGD([rows], lr=0.5)
        >>> rows([3, 3, 8]).sum().backward()
        >>> optimizer.step()
        >>> rows.weight[[3, 8]]
        tensor([[-1.0000, -1.0000],
                [-0.5000, -0.5000]])
        >>> exit_client()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str | None = None,
        init_func: InitFunction | None = None,
        part_policy: Any = None,
        *,
        persistent: bool = False,
    ) -> None:
        shape = (num_embeddings, embedding_dim)
        self._tensor = DistTensor(shape, torch.float32, name, init_func, part_policy, persistent)
        self._lookups: list[tuple[Tensor, Tensor]] = []
        # As of a parameter of torch: whether its gradient would be a tensor, and one of zeros.
        self._had_gradient = self._gradient_stays = False

    def __call__(self, ids: RowIndex, device: torch.device | str = "cpu") -> Tensor:
        """Rows ``[n, embedding_dim]``; with gradients enabled a leaf that requires one."""
        chosen = row_ids(ids, self.num_embeddings, self.name)
        rows = self._tensor[chosen].to(device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._lookups.append((chosen, rows))
        return rows

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self._tensor.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self._tensor.shape[1]

    @property
    def weight(self) -> DistTensor:
        """All rows."""
        return self._tensor

    @property
    def name(self) -> str:
        """As `DistTensor.name`."""
        return self._tensor.name

    @property
    def part_policy(self) -> str:
        """As `DistTensor.part_policy`."""
        return self._tensor.part_policy

    @property
    def has_gradients(self) -> bool:
        """Whether a lookup since `reset`, be it of no rows, was part of a loss.

        Also if ``zero_grad(set_to_none=False)`` has left a gradient of no rows.
        """
        return self._gradient_stays or any(rows.grad is not None for _, rows in self._lookups)

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """Of all lookups since `reset`; those outside of the loss have none.

        Returns:
            Ids, int64 ``[n]``; and their gradients, ``[_, embedding_dim]`` of each lookup, at least
            one, which together have ``n`` rows.
        """
        with_gradient = [(ids, rows.grad) for ids, rows in self._lookups if rows.grad is not None]
        if not with_gradient:
            return torch.empty(0, dtype=torch.int64), [torch.empty(0, self.embedding_dim)]
        ids = [ids for ids, _ in with_gradient]
        all_ids = ids[0] if len(ids) == 1 else torch.cat(ids)
        return all_ids.long(), [grad.cpu() for _, grad in with_gradient]

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        """Forget the gradients of lookups.

        Args:
            set_to_none: False leaves a gradient of no rows where there was one since the last call,
                until a call with True: steps count with it, and change no row.
        """
        self._gradient_stays = not set_to_none and (self._had_gradient or self.has_gradients)
        self._had_gradient = self._gradient_stays
        for _, rows in self._lookups:
            rows.grad = None

    def reset(self) -> None:
        """Forget the lookups."""
        self._had_gradient = self._had_gradient or self.has_gradients
        self._lookups.clear()

    def __repr__(self) -> str:
        return f"DistEmbedding({self.num_embeddings}, {self.embedding_dim}, name={self.name!r})"
