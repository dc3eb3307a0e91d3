# SPDX-License-Identifier: Apache-2.0
"""SparseSGD, SparseAdagrad, SparseAdam: optimizers of `DistEmbedding`.

A step sends each row's gradients to the trainer that takes care of the row. It adds up those of
all trainers, updates the row once, and writes it; other rows are not touched. So a row changes as
that of a ``torch.nn.Embedding(sparse=True)`` in one process whose batch is that of all trainers.

For that a trainer adds up its own gradients of each row (`GradientExchange`). Sums of rows that
others take care of go to them; gradients of its own rows, and those that arrive, stay where they
lie.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.kernels import empty
from .._base.memory import keep_freed_memory
from ..comm import barrier
from ..comm.collectives import all_gather
from ..comm.group import group_state
from ..ops import UpdateRule, group_equal, sum_groups, update_rows
from ._dist_tensor import DistEmbedding, DistTensor
from ._job import SINGLE, current_job
from ._trainer_links import PeerRows


@dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct ids, ascending, as `update_rows` takes them."""

    ids: Tensor
    starts: Tensor
    order: Tensor
    tables: Sequence[Tensor]
    inner: tuple[int, int] = (0, 0)


def shares_of_trainers(policy: str) -> list[tuple[int, int, int]]:
    """(first id, last id + 1, rank) of all trainers, ascending; see `Job.share`. Collective."""
    mine = torch.tensor(current_job().share(policy))
    gathered = all_gather(group_state(), mine, "rows of trainers")
    return sorted((int(share[0]), int(share[1]), rank) for rank, share in enumerate(gathered))


class GradientExchange:
    """For the rows of one policy. All trainers make one together, and call it together."""

    def __init__(self, policy: str) -> None:
        shares = shares_of_trainers(policy)
        self._bounds = torch.tensor([0, *(stop for _, stop, _ in shares)])
        self._ranks = [rank for _, _, rank in shares]

    def gather(self, embedding: DistEmbedding) -> RowGradients | None:
        """The gradients, of all trainers, of this one's rows; None if no trainer has any.

        A gradient of no rows is one, too: optimizers of torch count a step with such a gradient.

        Those of each trainer are added up before they are added to others, and trainers' sums in
        the order of ranks, so that it does not matter who takes care of a row.
        """
        state = group_state()
        has_any, (ids, tables) = embedding.has_gradients, embedding.gradients()
        groups = group_equal(ids)
        distinct, starts, order = groups
        if state.world_size == 1:
            return RowGradients(*groups, tables) if has_any else None
        links = current_job().links()
        ends = torch.searchsorted(distinct, self._bounds).tolist()
        runs = {rank: range(ends[at], ends[at + 1]) for at, rank in enumerate(self._ranks)}

        def sums() -> Iterator[PeerRows]:
            for rank in links.peers:
                run = runs[rank]
                rows = empty((len(run), tables[0].shape[1]), torch.float32)
                sum_groups(rows, tables, order, starts[run.start : run.stop + 1])
                yield PeerRows(int(has_any), [distinct[run.start : run.stop], rows])

        likes = [ids[:0], tables[0][:0]]
        received = links.exchange(sums(), likes, "gradients")
        if not (has_any or any(rows.number for rows in received.values())):
            return None
        own = runs[state.rank]
        mine = order[starts[own.start] : starts[own.stop]]
        return _merged((ids, mine, tables), state.rank, received)


def _merged(
    own: tuple[Tensor, Tensor, Sequence[Tensor]], rank: int, received: Mapping[int, PeerRows]
) -> RowGradients:
    """The gradients of this rank's rows, where they lie.

    Args:
        own: This rank's ids, the places of those whose rows it has, and the gradients.
        received: What the others sent: ids and gradients.
    """
    ids, mine, tables = own
    by_rank, numbers, by_number = {rank: ids.index_select(0, mine)}, {rank: mine}, [*tables]
    end = ids.numel()
    for other, rows in received.items():
        by_rank[other], gradients = rows.tensors
        numbers[other] = torch.arange(end, end + gradients.shape[0])
        by_number.append(gradients)
        end += gradients.shape[0]
    ranks = sorted(by_rank)
    distinct, starts, order = group_equal(torch.cat([by_rank[each] for each in ranks]))
    order = torch.cat([numbers[each] for each in ranks]).index_select(0, order)
    return RowGradients(distinct, starts, order, by_number, (0, ids.numel()))


# ---------------------------------------------------------------------------- optimizers


class SparseOptimizer(ABC):
    """What the optimizers have in common. All trainers make one together, and step together.

    Args:
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
        _check_not_negative("lr", lr)
        self.lr, self._params = lr, list(params)
        self._steps = [self._step_table(embedding) for embedding in self._params]
        self._num_steps = self._read_steps()
        self._state = [
            {name: self._new_state(embedding, name) for name in self.states}
            for embedding in self._params
        ]
        self._exchanges: dict[int, GradientExchange] = {}  # made by the first step
        self._writer: int | None = None  # of the numbers of steps
        keep_freed_memory()

    def _new_state(self, embedding: DistEmbedding, name: str) -> DistTensor:
        weight, first = embedding.weight, self._initial(name)
        key = f"{weight.tensor_name or weight.name.rsplit('~', 1)[1]}.{name}"
        policy, persistent = weight.part_policy, weight.is_persistent
        return DistTensor(weight.shape, torch.float32, key, first, policy, persistent)

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
                _check_not_negative(name, values)
            elif not isinstance(values, tuple | list) or len(values) != len(own):
                raise ValueError(f"{name} must be {len(own)} numbers (got {values!r:.200})")
            else:
                for value in values:
                    _check_not_negative(name, value)

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
        """Forget the gradients of what was looked up; lookups of a loss to come stay.

        Args:
            set_to_none: False leaves embeddings that had a gradient one of no rows, as torch does
                with ``sparse=True``: the steps to come count, with or without lookups.
        """
        for embedding in self._params:
            embedding.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows that have gradients on any trainer; then forget the lookups.

        As in torch, it counts as a step of an embedding if one of its lookups, be it of no rows,
        was part of a loss on any trainer, or ``zero_grad(set_to_none=False)`` has left a gradient.
        All trainers must call. When it returns, all of them read the new rows.

        Raises:
            RankError: A trainer failed, or did not answer in time.
            ServerError: A server is gone.
        """
        for number, embedding in enumerate(self._params):
            if number not in self._exchanges:
                self._exchanges[number] = GradientExchange(embedding.part_policy)
            gradients = self._exchanges[number].gather(embedding)
            embedding.reset()
            if gradients is None:
                continue
            self._num_steps[number] += 1
            tensors = [embedding.weight, *self._state[number].values()]
            self._update_rows(tensors, gradients, self._num_steps[number])
            self._write_steps(number)
        barrier()

    def _update_rows(
        self, tensors: Sequence[DistTensor], gradients: RowGradients, step: int
    ) -> None:
        rule = self._rule(step)

        def change(tables: Sequence[Tensor], rows: Tensor, begin: int, end: int) -> None:
            starts = gradients.starts[begin : end + 1]
            update_rows(
                rule, tables, rows, gradients.tables, gradients.order, starts, gradients.inner
            )

        current_job().cluster.update([tensor.name for tensor in tensors], gradients.ids, change)

    def _write_steps(self, number: int) -> None:
        """The trainer that has the row writes it."""
        if self._writer is None:
            shares = shares_of_trainers(SINGLE)
            self._writer = next(rank for start, stop, rank in shares if stop > start)
        if self._writer == group_state().rank:
            steps, name = self._num_steps[number], self._steps[number].name
            update = current_job().cluster.update
            update([name], torch.tensor([0]), lambda tables, *_: tables[0].fill_(steps))


class SparseSGD(SparseOptimizer):
    """``w -= lr g``, as `torch.optim.SGD`."""

    def _rule(self, step: int) -> UpdateRule:
        return UpdateRule("sgd", self.lr)


class SparseAdagrad(SparseOptimizer):
    """``s += g^2; w -= lr g / (sqrt(s) + eps)``, as `torch.optim.Adagrad`.

    Source: Duchi, Hazan and Singer, "Adaptive Subgradient Methods for Online Learning and
    Stochastic Optimization", JMLR 2011.

    Args:
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
        _check_not_negative("eps", eps)
        _check_not_negative("lr_decay", lr_decay)
        _check_not_negative("initial_accumulator_value", initial_accumulator_value)
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
        _check_not_negative("eps", eps)
        if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be two numbers in [0, 1) (got {betas})")
        self.betas, self.eps = (betas[0], betas[1]), eps
        super().__init__(params, lr)

    def _rule(self, step: int) -> UpdateRule:
        first, second = self.betas
        correction = (1 - second**step) ** 0.5 / (1 - first**step)
        return UpdateRule("adam", self.lr * correction, self.eps, self.betas)


def _check_not_negative(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a number of at least 0 (got {value!r})")
