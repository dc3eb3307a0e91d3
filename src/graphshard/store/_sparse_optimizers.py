# SPDX-License-Identifier: Apache-2.0
"""SparseSGD, SparseAdagrad, SparseAdam: optimizers of `DistEmbedding`.

A step sends each row's gradients to the trainer that takes care of the row. It adds up those of
all trainers, updates the row once, and writes it; other rows are not touched. So a row changes as
that of a ``torch.nn.Embedding(sparse=True)`` in one process whose batch is that of all trainers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._kernel import empty
from ..comm.collectives import all_gather, all_to_all
from ..comm.group import group_state
from ..comm.wire import start_exchange
from ..ops import UpdateRule, group_equal, sum_groups, update_rows
from ._dist_tensor import DistTensor
from ._embedding import DistEmbedding
from ._job import SINGLE, current_job, wait_for_trainers

_ID_COLUMNS = 2  # of a message's float32 rows: an id of 64 bits, and then a gradient


@dataclass(frozen=True)
class _Gradients:
    """Gradients of distinct ids, ascending, as `update_rows` takes them."""

    ids: Tensor
    starts: Tensor
    order: Tensor
    tables: Sequence[Tensor]
    inner: tuple[int, int] = (0, 0)


class SparseOptimizer(ABC):
    """What the optimizers have in common. All trainers make one together, and step together.

    Args:
        params: The embeddings.
        lr: Learning rate, at least 0.
    """

    #: Names of the rows of state beside each row of an embedding.
    states: tuple[str, ...] = ()
    #: Numbers that it is made with.
    settings: tuple[str, ...] = ("lr",)

    def __init__(self, params: Sequence[DistEmbedding], lr: float) -> None:
        if not isinstance(params, Sequence) or not params:
            raise ValueError(f"params must be a list of DistEmbedding (got {params!r:.200})")
        for embedding in params:
            if not isinstance(embedding, DistEmbedding):
                raise TypeError(
                    f"params must be DistEmbedding (got {type(embedding).__name__}); parameters of "
                    "modules go to a torch.optim optimizer"
                )
        check_at_least("lr", lr, 0.0)
        self.lr, self._params = lr, list(params)
        self._steps = [self._step_table(embedding) for embedding in self._params]
        self._num_steps = self._read_steps()
        self._state = [
            {name: self._new_state(embedding, name) for name in self.states}
            for embedding in self._params
        ]
        self._shares: dict[str, list[tuple[int, int, int]]] = {}

    def _new_state(self, embedding: DistEmbedding, name: str) -> DistTensor:
        key = f"{embedding.weight.tensor_name or embedding.name.rsplit('~', 1)[1]}.{name}"
        return DistTensor(
            embedding.weight.shape,
            torch.float32,
            key,
            self._initial(name),
            embedding.part_policy,
            embedding.weight.is_persistent,
        )

    def _step_table(self, embedding: DistEmbedding) -> DistTensor:
        """How often an embedding was updated: one number of the cluster."""
        kind, weight = type(self).__name__, embedding.weight
        name = f"{weight.name.replace('~', '.')}.{kind}.num_steps"
        return DistTensor(
            (1,), torch.int64, name, part_policy=SINGLE, persistent=weight.is_persistent
        )

    def _initial(self, name: str) -> Any:
        """First contents of a state; None for zeros."""
        return None

    def _read_steps(self) -> list[int]:
        return [int(table[0]) for table in self._steps]

    def tensors(self) -> list[DistTensor]:
        """The embeddings' rows, and all that is kept beside them."""
        states = [tensor for state in self._state for tensor in state.values()]
        return [*(embedding.weight for embedding in self._params), *states, *self._steps]

    def state_dict(self) -> dict[str, Any]:
        """Its kind, settings and embeddings, as plain values; rows and steps are in the cluster."""
        return {
            "kind": type(self).__name__,
            "embeddings": [embedding.name for embedding in self._params],
            **{name: getattr(self, name) for name in self.settings},
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless `load_state_dict` takes a state."""
        mine = self.state_dict()
        for key in ("kind", "embeddings"):
            if state.get(key) != mine[key]:
                raise ValueError(
                    f"a state of {mine['kind']} must have {key} {mine[key]!r} (got "
                    f"{state.get(key)!r:.200})"
                )
        for name in self.settings:
            values, own = state.get(name), mine[name]
            if not isinstance(own, tuple):
                check_at_least(name, values, 0.0)  # type: ignore[arg-type]
            elif not isinstance(values, tuple | list) or len(values) != len(own):
                raise ValueError(f"{name} must be {len(own)} numbers (got {values!r:.200})")
            else:
                for value in values:
                    check_at_least(name, value, 0.0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the settings of a state, and the numbers of steps that the cluster has.

        Raises:
            ValueError: It is of another kind, or of other embeddings.
        """
        self.check_state_dict(state)
        for name in self.settings:
            value = state[name]
            setattr(self, name, tuple(value) if isinstance(value, list) else value)
        self._num_steps = self._read_steps()

    @abstractmethod
    def _rule(self, step: int) -> UpdateRule:
        """How rows change.

        Args:
            step: Steps of their embedding, this one included.
        """

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of what was looked up; lookups of a loss to come stay."""
        for embedding in self._params:
            embedding.zero_grad()

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows that have gradients on any trainer; then forget the lookups.

        All trainers must call. When it returns, all of them read the new rows.

        Raises:
            RankError: A trainer failed, or did not answer in time.
            ServerError: A server is gone.
        """
        for number, embedding in enumerate(self._params):
            found = self._to_owners(embedding)
            embedding.reset()
            if found is None:
                continue
            self._num_steps[number] += 1
            self._update_rows([embedding.weight, *self._state[number].values()], found, number)
            self._write_steps(number)
        wait_for_trainers()

    def _update_rows(self, tensors: Sequence[DistTensor], found: _Gradients, number: int) -> None:
        rule = self._rule(self._num_steps[number])

        def change(tables: Sequence[Tensor], rows: Tensor, begin: int, end: int) -> None:
            starts = found.starts[begin : end + 1]
            update_rows(rule, tables, rows, found.tables, found.order, starts, found.inner)

        current_job().cluster.update([tensor.name for tensor in tensors], found.ids, change)

    def _write_steps(self, number: int) -> None:
        """The trainer that has the row writes it."""
        state = group_state()
        if any(stop > start and r == state.rank for start, stop, r in self._shares_of(SINGLE)):
            self._steps[number][0] = self._num_steps[number]

    def _to_owners(self, embedding: DistEmbedding) -> _Gradients | None:
        """The gradients that this trainer adds up; None if no trainer has any."""
        state, (ids, tables) = group_state(), embedding.gradients()
        distinct, starts, order = group_equal(ids)
        if state.world_size == 1:
            return _Gradients(distinct, starts, order, tables) if ids.numel() else None
        shares = self._shares_of(embedding.part_policy)
        bounds = torch.tensor([0, *(stop for _, stop, _ in shares)])
        ends = torch.searchsorted(distinct, bounds).tolist()
        groups = {rank: slice(*ends[i : i + 2]) for i, (_, _, rank) in enumerate(shares)}
        own = groups.pop(state.rank)
        send = [0] * state.world_size
        for rank, each in groups.items():
            send[rank] = each.stop - each.start
        counts = torch.tensor([[size, ids.numel()] for size in send])
        twos = [2] * state.world_size
        arrived = all_to_all(state, counts.view(-1), twos, twos, "gradients").view(-1, 2)
        if not bool(arrived[:, 1].any()):
            return None
        receive: list[int] = arrived[:, 0].tolist()
        message = empty((sum(send), _ID_COLUMNS + embedding.embedding_dim), torch.float32)
        runs = message.split(send)
        for rank, each in groups.items():
            if send[rank]:
                of_ids = distinct[each].view(torch.int32).view(-1, _ID_COLUMNS)
                runs[rank].view(torch.int32)[:, :_ID_COLUMNS] = of_ids
                sums = runs[rank][:, _ID_COLUMNS:]
                sum_groups(sums, tables, order, starts[each.start : each.stop + 1])
        (rows,) = start_exchange(state, [message], [send], [receive], "gradients").wait()
        mine = order[starts[own.start] : starts[own.stop]]
        return _merged(rows, sum(receive[: state.rank]), ids, mine, tables)

    def _shares_of(self, policy: str) -> list[tuple[int, int, int]]:
        """(first id, last id + 1, rank), ascending, of all trainers; collective at first."""
        if policy not in self._shares:
            state = group_state()
            mine = torch.tensor(current_job().share(policy))
            gathered = all_gather(state, mine, "rows of trainers")
            shares = [(int(s[0]), int(s[1]), rank) for rank, s in enumerate(gathered)]
            self._shares[policy] = sorted(shares)
        return self._shares[policy]


class SparseSGD(SparseOptimizer):
    """``w -= lr g``, as `torch.optim.SGD`.

    Args:
        params: The embeddings.
        lr: Learning rate, at least 0.
    """

    def _rule(self, step: int) -> UpdateRule:
        return UpdateRule("sgd", self.lr)


class SparseAdagrad(SparseOptimizer):
    """``s += g^2; w -= lr g / (sqrt(s) + eps)``, as `torch.optim.Adagrad`.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization", JMLR 2011.

    Args:
        params: The embeddings.
        lr: Learning rate, at least 0.
        eps: Added to the root, at least 0.
        lr_decay: The rate of step t is ``lr / (1 + (t - 1) lr_decay)``.
        initial_accumulator_value: First value of ``s``.
    """

    states = ("adagrad_sum",)
    settings = ("lr", "eps", "lr_decay")

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float = 1e-2,
        eps: float = 1e-10,
        *,
        lr_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        check_at_least("eps", eps, 0.0)
        check_at_least("lr_decay", lr_decay, 0.0)
        check_at_least("initial_accumulator_value", initial_accumulator_value, 0.0)
        self.eps, self.lr_decay = eps, lr_decay
        self._first = initial_accumulator_value
        super().__init__(params, lr)

    def _initial(self, name: str) -> Any:
        if self._first == 0:
            return None
        return lambda shape, dtype: torch.full(shape, self._first, dtype=dtype)

    def _rule(self, step: int) -> UpdateRule:
        return UpdateRule("adagrad", self.lr / (1 + (step - 1) * self.lr_decay), self.eps)


class SparseAdam(SparseOptimizer):
    """Adam of the rows that have gradients, as `torch.optim.SparseAdam`.

    Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015,
    https://arxiv.org/abs/1412.6980. Moments of rows without gradients do not decay.

    Args:
        params: The embeddings.
        lr: Learning rate, at least 0.
        betas: Decay of the moments, each in [0, 1).
        eps: Added to the root, at least 0.
    """

    states = ("adam_mean", "adam_square")
    settings = ("lr", "eps", "betas")

    def __init__(
        self,
        params: Sequence[DistEmbedding],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        check_at_least("eps", eps, 0.0)
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1) (got {betas})")
        self.betas, self.eps = (betas[0], betas[1]), eps
        super().__init__(params, lr)

    def _rule(self, step: int) -> UpdateRule:
        first, second = self.betas
        correction = (1 - second**step) ** 0.5 / (1 - first**step)
        return UpdateRule("adam", self.lr * correction, self.eps, self.betas)


def check_at_least(name: str, value: float, least: float) -> None:
    """Raise ValueError unless a number is finite and not below ``least``."""
    if not isinstance(value, int | float) or not least <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least {least:g} (got {value!r})")


def _merged(
    arrived: Tensor, place: int, ids: Tensor, mine: Tensor, tables: Sequence[Tensor]
) -> _Gradients:
    """Gradients from other ranks, and this one's own where they lie.

    Args:
        arrived: Messages, from other ranks in order.
        place: How many rows of them come from ranks before this one.
        ids: Of this rank's gradients.
        mine: Which of those it adds up itself.
        tables: Its gradients.
    """
    columns = arrived.view(torch.int32)[:, :_ID_COLUMNS].contiguous()
    others, grads = columns.view(torch.int64).view(-1), arrived[:, _ID_COLUMNS:]
    count, end = ids.numel(), arrived.shape[0] + ids.numel()
    numbers = torch.cat([torch.arange(place), mine + place, torch.arange(place + count, end)])
    distinct, starts, order = group_equal(torch.cat([others[:place], ids[mine], others[place:]]))
    by_number = [grads[:place], *tables, grads[place:]]
    return _Gradients(distinct, starts, numbers[order], by_number, (place, place + count))
