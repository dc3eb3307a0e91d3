# SPDX-License-Identifier: Apache-2.0
"""MiniBatch: the blocks of one step, and how much they weigh. global_mean: the loss of a step."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ...graph import Block


class MiniBatch(list[Block]):
    """The blocks of one step: ``batch[0]`` takes the inputs, ``batch[-1]`` ends at the seeds.

    Args:
        blocks: In that order.
        epoch: Which epoch it belongs to.
        step: Which step of the epoch.
        num_seeds: Seeds on this rank, of all types; 0 where this rank has run out of them.
        num_global_seeds: Seeds on all ranks together.
    """

    def __init__(
        self,
        blocks: Iterable[Block],
        *,
        epoch: int = 0,
        step: int = 0,
        num_seeds: int = 0,
        num_global_seeds: int = 0,
    ) -> None:
        super().__init__(blocks)
        self.epoch, self.step = epoch, step
        self.num_seeds, self.num_global_seeds = num_seeds, num_global_seeds

    def to(self, device: torch.device | str, non_blocking: bool = False) -> MiniBatch:
        """The same batch with its blocks, and what is attached to them, on a device."""
        return MiniBatch((block.to(device, non_blocking) for block in self), **vars(self))


def global_mean(values: Tensor, batch: MiniBatch | int, *, averaged_over: int = 1) -> Tensor:
    """This rank's share of the mean of ``values`` over the seeds of all ranks.

    The shares of all ranks add up to the mean, and so do their gradients: after
    `graphshard.gather_grads`, which adds them up, every rank has the gradient of what one process
    would compute from the union of the seeds. Nothing is communicated, because every rank knows in
    advance how many seeds the others have at each step. An empty batch weighs nothing.

    Args:
        values: ``[num_seeds, ...]``, a loss per seed of this rank (``reduction="none"``).
            Where a seed has several, their mean is taken.
        batch: What the loader gave; or the number of seeds on all ranks, for losses over some of
            them only.
        averaged_over: Number of ranks over which gradients will be averaged rather than added up:
            under DistributedDataParallel, ``torch.distributed.get_world_size()``.

    Returns:
        A scalar; 0 where there are no values.

    Raises:
        ValueError: Not one value per seed.

    Example:
        >>> import graphshard as sar
        >>> from graphshard.data import load_dataset
        >>> from graphshard.sampling import DataLoader, DistNeighborSampler
        >>> cora = load_dataset("cora")
        >>> sampler = DistNeighborSampler(
        ...     [5],
        ...     input_node_features={"feat": cora.graph.ndata["feat"]},
        ...     output_node_features={"label": cora.graph.ndata["label"]},
        ... )
        >>> model = sar.nn.SAGEConv(1433, 7, "mean")
        >>> for batch in DataLoader(cora.graph, cora.node_ids("train"), sampler, 70):
        ...     logits = model(batch[0], batch[0].srcdata["feat"])
        ...     labels = batch[-1].dstdata["label"]
        ...     losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        ...     global_mean(losses, batch).backward()
        ...     sar.gather_grads(model)
    """
    if isinstance(batch, MiniBatch):
        if values.dim() == 0 or values.shape[0] != batch.num_seeds:
            raise ValueError(
                f"values must hold one row for each of the {batch.num_seeds} seeds of this rank "
                f"(got shape {tuple(values.shape)}); compute the loss with reduction='none', or "
                "pass the number of seeds that count, on all ranks together, in place of the batch"
            )
        total = batch.num_global_seeds
    else:
        total = batch
    num_values = total * math.prod(values.shape[1:])
    return values.sum() / (max(1, num_values) / averaged_over)
