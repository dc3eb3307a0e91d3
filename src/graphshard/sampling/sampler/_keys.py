# SPDX-License-Identifier: Apache-2.0
"""DrawSeed: what a draw depends on besides the node that it is for.

[Note: keyed draws]
    The neighbours drawn for a node depend on (seed, epoch, step, layer, relation, original node
    id) and on nothing else: not on the rank that asks, the rank that answers, the number of
    ranks, parts or threads, nor on what else is drawn. So every split of the work draws the same
    sample, and a coming epoch's draws can be known in advance by drawing them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class DrawSeed:
    """One mini-batch's draws.

    Args:
        seed: Of the run.
        epoch: Which pass over the seeds.
        step: Which batch of the epoch.
    """

    seed: int
    epoch: int = 0
    step: int = 0

    @classmethod
    def fresh(cls) -> DrawSeed:
        """A seed from torch's default generator, as other random functions of torch use it."""
        return cls(int(torch.randint(2**62, ())))

    def at(self, *, epoch: int | None = None, step: int | None = None) -> DrawSeed:
        """The same run at another place."""
        return replace(
            self,
            epoch=self.epoch if epoch is None else epoch,
            step=self.step if step is None else step,
        )

    def key(self, layer: int, relation: int) -> int:
        """The 64-bit key of the draws of one layer under one relation.

        Args:
            layer: Index of the block that the draws are for.
            relation: Index of the relation in ``canonical_etypes``.
        """
        mixed = 0
        for part in (self.seed, self.epoch, self.step, layer, relation):
            mixed = _mix((mixed + _STEP + (part & _WORD)) & _WORD)
        return mixed


def _mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of words."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)
