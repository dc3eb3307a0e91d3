# SPDX-License-Identifier: Apache-2.0
"""The optimizer of a run: Adam or AdamW, its learning rate over the steps, clipped gradients.

The learning rate is a function of the number of steps made, and nothing of it is kept: a run that
resumes after an epoch has made as many as an undisturbed one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..comm.collectives import reduce_floats
from ._config import ResolvedConfig

_LEAST_NORM = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


class Descent:
    """Steps of an optimizer, whose learning rate follows the configured schedule.

    With ``warmup`` epochs of `W` steps together, the rate rises from ``lr / (W + 1)`` in equal
    steps and reaches ``lr`` at step `W`, counted from 0; that is torch's ``LinearLR(1 / (W + 1), 1,
    W)``. After that it is constant, or falls as ``CosineAnnealingLR(T - W)`` does, for `T` steps of
    all epochs.

    Args:
        penalized: Parameters with weight decay.
        others: Those without.
        owned: Those of them of which each rank has rows of its own; of all others, ranks have
            copies, with equal gradients when `step` is called.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        penalized: Sequence[Tensor],
        others: Sequence[Tensor],
        owned: Iterable[Tensor] = (),
    ) -> None:
        self._config = config
        self._owned = {id(parameter) for parameter in owned}
        self._parameters = [*penalized, *others]
        groups: list[dict[str, Any]] = [
            {"params": list(penalized), "weight_decay": config.weight_decay},
            {"params": list(others), "weight_decay": 0.0},
        ]
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
        self.optimizer: torch.optim.Optimizer = kind(groups, lr=config.lr)
        self.steps_per_epoch = 1
        #: Steps made, those before a resume included.
        self.num_steps = 0

    def start_at(self, epoch: int, steps_per_epoch: int) -> None:
        """Say how many steps an epoch has, and how many epochs have been trained."""
        self.steps_per_epoch = steps_per_epoch
        self.num_steps = epoch * steps_per_epoch

    @property
    def rate(self) -> float:
        """The learning rate of the last step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def rate_factor(self, step: int) -> float:
        """What the learning rate is multiplied with in a step, counted from 0."""
        config = self._config
        warmup = config.warmup * self.steps_per_epoch
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if config.schedule == "constant":
            return 1.0
        length = config.epochs * self.steps_per_epoch - warmup
        return (1 + math.cos(math.pi * min(1.0, (step - warmup) / length))) / 2

    def step(self) -> None:
        """Clip the gradients, which are summed over the ranks, and make a step. Collective."""
        if self._config.clip_norm is not None:
            self._clip(self._config.clip_norm)
        rate = self._config.lr * self.rate_factor(self.num_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.num_steps += 1

    def _clip(self, longest: float) -> None:
        """As ``clip_grad_norm_``, of the gradient of all ranks' parameters."""
        gradients = [(p.grad, id(p) in self._owned) for p in self._parameters if p.grad is not None]
        shared = sum(_square(grad) for grad, is_owned in gradients if not is_owned)
        owned = sum(_square(grad) for grad, is_owned in gradients if is_owned)
        (owned,) = reduce_floats([owned])
        factor = longest / (math.sqrt(shared + owned) + _LEAST_NORM)
        if factor < 1:
            for grad, _ in gradients:
                grad.mul_(factor)


def _square(gradient: Tensor) -> float:
    return float(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
